"""Decides what starts where, and why the rest waits. One planner keeps its state between cycles.

planner        plan(now), fork(), the fast path for arrivals; state holds its state, events changes it
backfill       one cycle: the walk along the queue; rules decides about one job in it
queue          pending jobs: classes by request, user and priority
priority       job order; fairshare decayed use and the account tree, usage the amounts
quota          queues that lend, limits and their reservations; limits the queue tree; admission refusals
preemption     choice of victims
timeline       planned ends of running jobs and reservations over time; runs the running jobs
cluster_state  nodes and GPUs in whole numbers, with checkpoint and rollback; request_units requests likewise
placement      where a request goes: filters, topology, cells, load_limits, and strategies/ that score the rest
calendar       reservations by an administrator
reasons        why a job waits; infeasible requests that can never fit, and current shortages
forecast       when jobs start; whatif changes that would start them sooner
"""
