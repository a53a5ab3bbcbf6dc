"""What starts where, and why the rest waits: one planner that stands between cycles.

planner        plan(now), fork(), the short cut for arrivals; state what it knows, events what changes it
backfill       one cycle: the walk along the queue; rules what becomes of one job in it
queue          pending jobs: classes by request, user and priority
priority       which job comes first; fairshare decayed use and the account tree, usage the amounts
quota          queues that lend, limits and their reservations; limits the queue tree; admission what is refused
preemption     who makes room
timeline       ends of running jobs, and what is reserved from when until when; runs the running jobs
cluster_state  nodes and GPUs in whole numbers, with checkpoint and rollback; request_units requests in the same units
placement      where a request goes: filters, topology, cells, load_limits, and strategies/ that score what is left
calendar       reservations by an administrator
reasons        why a job waits; infeasible what can never fit, and what is missing now
forecast       when jobs start; whatif what would make them start sooner
"""
