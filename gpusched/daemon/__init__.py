"""The daemon: the only writer of the job table.

    main       composition root: arguments, lock, log, adapters, readiness
    loop       the asyncio edge: sockets, timers, scheduling of ticks
    tick       one tick: events and commands in, plan, one commit, starts out
    verbs/     the effects of client commands
    commit     the changes of one tick, as one transaction
    state      in-memory state, rebuilt from the table at any time
    reconcile  brings the engine in line with the table, also after a restart
    watch/     monitoring beside the queue
    launch/    turns a job and its placement into an engine ticket

All modules but `loop` and `main` are synchronous and import only ports and pure packages, so that the
simulator and the tests run the same tick.
"""
