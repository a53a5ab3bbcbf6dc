"""What starts where, and why the rest waits: one planner that stands between cycles.

planner        plans by what it knows: plan(now), fork(), the short cut for arrivals
state          what it knows, and the events that change it: apply(event), from_snapshot()
events         what changes it
backfill       one cycle: the walk along the queue
rules          what becomes of one job in a cycle
reasons        why the others wait
queue          pending jobs: classes by request, user and priority
priority       which job comes first
fairshare      decayed use, kept up to date
timeline       ends of running jobs, and what is reserved from when until when
cluster_state  where a job of each shape goes now
runs           running jobs with all that they hold
"""
