"""What the daemon watches beside the queue: GPUs, processes, files, and what ended jobs teach."""
