"""Starts, stops and reports runs: on this machine, and through agents on others.

In the daemon's process:

    local            LocalEngine: the engine as the daemon sees it
    tracked_runs     the runs it is responsible for, and pidfds of their supervisors
    poller           one pollable descriptor for everything it waits for
    launchers        pass tickets to supervisors: the fork server; the choice of launcher
    systemd          the other launcher: every run is a systemd unit
    orders           lines of a run's order file, and the orders that a run still lacks
    orphans          finds and kills what a dead supervisor left behind
    janitor          cleans up after ended runs, in quiet moments
    remote/          the engine of another machine, and the agent there that does its work
    simulated        an engine without processes, for tests and the simulator

In separate processes:

    forkserver       hands each ticket to a supervisor, forking one if none is idle
    unit             main process of a run's unit: takes one ticket and supervises that run
    supervisor/      the supervisor of a run
    going_down       whether the machine is shutting down

Shared by both sides:

    spool            files by which daemon and supervisors agree, even after either crashes
    wire             tickets down, events up; the pool of idle supervisors
    attach_protocol  messages between an interactive run and its client
    linux/           processes, control groups, device rules, mounts, PAM, other users' rights

The paths of `forkserver`, `unit` and `going_down` must not change: after an upgrade of the package, a daemon or
supervisor of the previous release still imports them by name.
"""
