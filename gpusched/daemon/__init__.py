"""The daemon: the one writer of the job table.

    world      what is kept in memory, all of it rebuilt from the table
    commands   what clients may ask for, applied to the world
    tick       one turn: events and commands in, plan, one commit, starts out
    launch     from a job and a placement to an engine's ticket
    reconcile  what to do about open runs after a restart
    loop       the asyncio edge that owns sockets, timers and the concrete implementations
    main       arguments, lock, log, readiness

Everything but `loop` and `main` is synchronous and knows only ports, policy and model, so that the
simulator and the tests turn the very same tick.
"""
