"""What becomes of one job: events in, new values out.

transitions   what an event makes of a job and its run, over one table of legal moves
retry         which failures are tried again, when, and with how much more memory
failures      whose fault a failure is: the program's, or the GPU's
dependencies  afterok:1:2 and its kin; arrays, pipelines and fallback build on it
overuse       runs that use more of a GPU than they booked, or a GPU that they did not book
idle          runs whose GPUs do nothing
foreign       processes on GPUs without a job
alerts        what owners and administrators are told
"""
