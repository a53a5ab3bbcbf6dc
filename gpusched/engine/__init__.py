"""Starts runs on this machine, ends them, and says what became of them.

    local       LocalEngine: what the daemon talks to; lives in the daemon's process
    watch       the live supervisors: pidfds, the event pipe, one pollable descriptor
    remains     finds and kills what a dead supervisor left behind
    forkserver  a tiny process that forks one supervisor per run
    supervisor  one process per run: claims it, starts it, ends it, writes its result
    launch      work dir, log files, identity and exec of the job's first process
    proctree    walks /proc
    spool       the files by which daemon and supervisors agree, also after crashes of either
    wire        tickets down, events up
    simulated   an engine without processes, for tests and the simulator

`forkserver`, `supervisor`, `launch`, `proctree`, `spool` and `wire` run in every supervisor. They import
nothing but small built-in modules: each page a supervisor does not share is paid once per running
job, and each page the fork server maps makes every fork slower.
"""
