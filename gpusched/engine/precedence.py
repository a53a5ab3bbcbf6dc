"""A supervisor goes before its job: when the kernel ends somebody for want of memory, and soon at the processors.

What ends a job that forks or allocates without bound has to be served while the job does it. What is not permitted, as
to an ordinary user, is left as it is; the job then is the first to go for want of memory.
"""

from __future__ import annotations

import os

NICE = -10
RAISE_AFTER_S = 1.0
"""A job that ends sooner needs no such supervisor, which would only go before the daemon and the next start."""
OOM_SCORE = -500
JOB_OOM_SCORE = 100
"""Added to the job's where its supervisor may not lower its own."""


def take_precedence() -> tuple[int, int]:
    """Put this process before its future children when memory runs out; its own OOM score and that of its jobs."""
    before = _oom_score()
    if before <= OOM_SCORE or weigh_for_oom(OOM_SCORE):
        return min(before, OOM_SCORE), before
    return before, min(1000, before + JOB_OOM_SCORE)


def weigh_for_oom(score: int) -> bool:
    """How soon the kernel picks this process when memory runs out, -1000 to 1000; children inherit it.

    False where that is not permitted.
    """
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError:
        return False
    return True


def _oom_score() -> int:
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            return int(file.read())
    except OSError:
        return 0


def raise_priority() -> bool:
    """Put this process before its children at the processors; those to come start with the niceness that it has now.

    False where that is not permitted, or where the daemon was started at a niceness of its own.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) != 0 or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        # Its jobs have the same, which the kernel restores from 0 alone.
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except OSError:
        return False
    return True


def lower_priority() -> None:
    """Take back what `raise_priority` did."""
    os.setpriority(os.PRIO_PROCESS, 0, 0)
