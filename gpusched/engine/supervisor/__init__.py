"""The process that claims one run, starts it, ends it, and records how it ended.

    supervisor    the life of one run, from its claim to its result; `result` what is recorded of it
    processes     the processes of the run, signals to them, their ends; `adopted` those of a process that ran before it
                  was a job, `holding` those of a part in which no command runs
    run_control   what orders and the clock do to them
    visits        what is started in the run from outside
    launch        work dir, log files, identity and exec of the job's first process
    logs          its log files; `rotation` those with a size limit
    priority      keeps the supervisor ahead of its job for CPU time and out-of-memory kills
    interactive   a foreground run, with its idle limit; `pty` its streams, `attach` its client's connection

Supervisors run isolated (`python -I -S`) and import only small built-in modules: each unshared page costs memory once
per running job, and each page that the fork server maps slows every fork. Modules needed by some runs only are
imported on demand.
"""
