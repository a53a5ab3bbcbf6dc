"""The daemon: the one writer of the job table.

    main       composition root: arguments, lock, log, the concrete edges, readiness
    loop       the asyncio edge: sockets, timers, when the next tick is due
    tick       one tick: events and commands in, plan, one commit, starts out
    verbs/     what each command of a client does
    commit     what one tick records, as one transaction
    state      what is kept in memory, all of it rebuilt from the table
    reconcile  brings the engine in line with the table, also after a restart
    watch/     what is watched beside the queue
    launch/    from a job and a placement to an engine's ticket

Everything but `loop` and `main` is synchronous and knows only ports and the pure packages, so that the simulator and
the tests run the very same tick.
"""
