"""State of the GPUs and the host, read without ever blocking the daemon.

    worker      the daemon's end of the reader process: deadline, restart, last known state
    source      which GPUs to read, from settings and environment; the child's `main`
    nvml        real GPUs: one reading of all; the only importer of pynvml
    amd         AMD's GPUs; the only importer of amdsmi
    gateway     calls of the library without exceptions, and the meaning of its error codes
    device      one real GPU; `mig` its MIG instances, `topology` its links and NUMA node
    mig_layout  makes MIG layouts, the only place that changes a card's division
    faults      XID faults, from NVML's events and from the kernel's log
    procinfo    processes and host memory, from /proc
    power       power caps of cards, and the limits from before on disk
    simulated   GPUs described in a text or a JSON file
    usage       who uses the memory: our runs, foreign processes, or unexplained
    release     whether a GPU is clean after a run
    history     one GPU over time: healthy, free, in foreign use
    tracker     folds readings into the scheduler's view, and meters each run
    host        load of the node: CPU, memory, disk, network

The sources run in the child process and import nothing heavy.
"""
