"""The policy kept standing between cycles: what changes goes in, and each cycle looks only at what that can concern.

`decide` builds the world anew from a snapshot, which costs as much as there are machines, runs and classes. Here the
machines, the order of the line and the ends of the running jobs are kept from one cycle to the next, and

    a shape   jobs that ask for the same have one line; when the first finds no place, none of them does
    screens   whole numbers (free cores, free cards) turn most shapes away before any place is looked at
    arrivals  while nothing has become free, who waited goes on waiting: only those that are new are looked at
    periods   what age and past use do to ranks is worked out once in each `calc_period_s`, as it is in `decide`

The plan is that of `decide`, start for start: the same line, places, reservations and rule of who may pass, from the
same modules. A test lets both run side by side. Where ranks change within a period or limits are shared (queues, QOS,
dominant shares, plug-ins), `decide` itself is called. Calendars are not known here.

    kinds    jobs that are alike, and what is worked out once for all of them
    shares   what users have used, and what that does to their jobs
    lines    who waits, in order
    future   when runs end, and the machines of the first reservation
    places   where a job of each shape goes now
    cycle    the machines, the runs, and one cycle after another
"""

from gpusched.policy.standing.cycle import Standing
from gpusched.policy.standing.kinds import Kind

__all__ = ["Kind", "Standing"]
