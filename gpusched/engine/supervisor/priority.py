"""Keeps a supervisor ahead of its job: in out-of-memory kills, and after a moment for CPU time.

The supervisor that ends a job which forks or allocates without bound must itself get memory and CPU time meanwhile.
Steps not permitted to an ordinary user are skipped; the job is then the first to be killed.
"""

from __future__ import annotations

import os

NICE = -10
RAISE_AFTER_S = 1.0
"""A job that ends sooner needs no raised supervisor, which would only delay the daemon and the next start."""
OOM_SCORE = -500
JOB_OOM_SCORE = 100
"""Added to the job's score where its supervisor may not lower its own."""


class OomScores:
    """Out-of-memory scores of this process and of its jobs, -1000 to 1000: how soon the kernel kills each.

    Children inherit the score, so it is set to the job's while one starts. Changes that are not permitted are skipped.
    """

    def __init__(self) -> None:
        """Set this process's score below that of its future children."""
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
        """Switch to the job's score, so that a job has it from its first instant."""
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
    """Give this process precedence over its children for CPU time; future ones start with its current niceness.

    False where that is not permitted, or where the daemon was started with another niceness.
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
    """Undo `raise_priority`."""
    os.setpriority(os.PRIO_PROCESS, 0, 0)
