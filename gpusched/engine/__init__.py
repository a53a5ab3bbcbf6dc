"""Starts runs on this machine, ends them, and says what became of them.

    local       LocalEngine: what the daemon talks to; lives in the daemon's process
    watched     the runs it answers for, and pidfds of their supervisors
    waking      one pollable thing for all it waits for
    launcher    what gives tickets to supervisors; the fork server as the daemon sees it
    units       runs as systemd's units; `bus` speaks to PID 1, `properties` is what it is told of a run
    choice      which of the two launchers a daemon uses
    isolation   what the kernel can keep runs to on this machine; `processors` are those it has
    guard       keeps who is in no job off the GPUs
    orders      the lines of a run's order file, and which orders it still lacks
    remains     finds and kills what a dead supervisor left behind
    janitor     clears up after ended runs, in quiet moments
    simulated   an engine without processes, for tests and the simulator

    forkserver  a tiny process that hands each ticket to a supervisor; `idle_pool` are those without a run
    unit        the main process of a run's unit: takes one ticket, and is that run's supervisor
    supervisor  one process for each run: claims it, starts it, ends it, writes its result
    adopted     that of a process which ran before it was a job; `supervising` tells which kind a run has
    launch      work dir, log files, identity and exec of the job's first process; its `account`, its `pam` limits
    cage        limits of a run: its `cgroup`, its `device_rule`, its `mounts`
    session     a run in the foreground: its streams, its client, its lease
    proctree    walks /proc
    spool       the files by which daemon and supervisors agree, also after crashes of either
    wire        tickets down, events up

`forkserver`, `supervisor`, `launch`, `proctree`, `spool` and `wire` run in every supervisor. They import
nothing but small built-in modules: each page a supervisor does not share is paid once per running
job, and each page the fork server maps makes every fork slower.
"""
