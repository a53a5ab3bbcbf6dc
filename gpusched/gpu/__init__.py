"""What the GPUs and the host are doing, read without ever making the daemon wait.

    nvml        reads real GPUs; the only importer of pynvml
    simulated   GPUs that exist in a text or a JSON file
    choose      which of the two, from settings and environment
    child       the process that runs a source and answers over pipes
    topology    which cards are linked, and next to which memory each is
    worker      the daemon's end of that process: deadline, restart, last known state
    wire        a reading as one line of JSON
    usage       whose memory it is: our runs', foreign, or unexplained
    release     whether a card is clean after a run
    meter       peak memory, utilisation and energy of each run
    tracker     folds readings into what the policy may use
    host        load of the node: CPU, memory, disk, network

`child`, `wire` and the sources run in the child process and import nothing heavy.
"""
