"""Life of one job: events in, new values out.

transitions   effect of an event on a job and its run, over one table of legal moves
retry         which failures are retried, when, and with how much more memory
failures      attribution of failures to the program or the GPU
dependencies  afterok:1:2 and its variants; arrays, pipelines and fallback build on it
overuse       runs that use more of a GPU than they booked, or a GPU that they did not book
idle          runs with idle GPUs
foreign       processes on GPUs without a job
alerts        alerts to owners and administrators
"""
