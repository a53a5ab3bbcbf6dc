"""Keeps a supervisor ahead of its job: in out-of-memory kills, and soon for CPU time.

What ends a job that forks or allocates without bound has to be served while the job does it. What is not permitted, as
to an ordinary user, is left as it is; the job is then the first to be killed.
"""

from __future__ import annotations

import os

NICE = -10
RAISE_AFTER_S = 1.0
"""A job that ends sooner needs no such supervisor, which would only go before the daemon and the next start."""
OOM_SCORE = -500
JOB_OOM_SCORE = 100
"""Added to the job's where its supervisor may not lower its own."""


class OomScores:
    """How soon the kernel picks this process when memory runs out, -1000 to 1000, and the jobs that it starts.

    Children inherit the score, so it is that of the job while one is started. What is not permitted is left out.
    """

    def __init__(self) -> None:
        """Put this process before its future children."""
        try:
            # Kept open, for two writes in each run.
            self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            before = int(os.pread(self._fd, 16, 0))
        except (OSError, ValueError):
            self._fd, before = -1, 0
        self.own, self.job = before, min(1000, before + JOB_OOM_SCORE)
        if before <= OOM_SCORE or self._set(OOM_SCORE):
            self.own, self.job = min(before, OOM_SCORE), before

    def begin_start(self) -> None:
        """Give a job that is started from now on its score from its first instant."""
        self._set(self.job)

    def end_start(self) -> None:
        """Return to the supervisor's own score."""
        self._set(self.own)

    def _set(self, score: int) -> bool:
        try:
            os.pwrite(self._fd, b"%d" % score, 0)
        except OSError:
            return False
        return True


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
