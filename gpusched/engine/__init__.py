"""Starts runs on this machine, ends them, and reports what became of them.

In the daemon's process:

    local            LocalEngine: what the daemon talks to
    tracked_runs     the runs it answers for, and pidfds of their supervisors
    poller           one pollable thing for everything it waits for
    launchers        pass tickets to supervisors: the fork server; which launcher a daemon uses
    systemd          the other launcher: every run is a unit of systemd
    orders           the lines of a run's order file, and which orders it still lacks
    orphans          finds and kills what a dead supervisor left behind
    janitor          cleans up after ended runs, in quiet moments
    simulated        an engine without processes, for tests and the simulator

In processes of their own:

    forkserver       hands each ticket to a supervisor, forked if need be
    unit             main process of a run's unit: takes one ticket and supervises that run
    supervisor/      what a supervisor does
    going_down       whether the machine is shutting down

Shared by both sides:

    spool            the files by which daemon and supervisors agree, also after crashes of either
    wire             tickets down, events up; the pool of idle supervisors
    attach_protocol  what an interactive run and its client send each other
    linux/           processes, control groups, device rules, mounts, PAM, other users' rights

The paths of `forkserver`, `unit` and `going_down` must not change: a daemon or supervisor of the release before imports
them by name after the package was replaced.
"""
