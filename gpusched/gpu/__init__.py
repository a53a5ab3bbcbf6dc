"""What the GPUs and the host are doing, read without ever making the daemon wait.

    worker      the daemon's end of the child process that reads: deadline, restart, last known state
    source      which GPUs to read, from settings and environment; the child's `main`
    nvml        real GPUs: one reading of all; the only importer of pynvml
    gateway     calls of the library without exceptions, and what its error codes mean
    device      one real GPU; `mig` its MIG instances, `topology` its links and NUMA node
    faults      XID faults, from NVML's events and from the kernel's log
    procinfo    processes and host memory, from /proc
    simulated   GPUs that exist in a text or a JSON file
    usage       whose memory it is: our runs', foreign, or unexplained
    release     whether a GPU is clean after a run
    history     one GPU over time: well, free, in foreign use
    tracker     folds readings into what the scheduler may use, and meters each run
    host        load of the node: CPU, memory, disk, network

The sources run in the child process and import nothing heavy.
"""
