"""What starts where, and why the rest waits: one planner that stands between cycles.

planner        the state that lives between cycles: apply(event), plan(now), fork()
events         what changes it
backfill       one cycle: the walk along the queue
queue          pending jobs: classes by request, user and priority
priority       which job comes first
fairshare      decayed use, kept up to date
timeline       ends of running jobs, and what is reserved from when until when
"""
