"""How long a run stands still, and what that does to the instants it is measured by."""

from __future__ import annotations

NOTICE_S = 0.5
"""Between TSTP, which a process may catch to let go of what it holds, and STOP, which it cannot."""
LOOK_AGAIN_S = (0.02, 2.0)
"""First and longest pause between two rounds of STOP while somebody still runs."""


class Standstill:
    """The account of one run. All instants are on the monotonic clock."""

    __slots__ = ("is_told", "is_wanted", "look_at", "pause_s", "since", "total_s")

    def __init__(self) -> None:
        self.is_wanted = False
        """Ordered before the job was started: it stands still from its first instant."""
        self.is_told = False
        """Whether the daemon knows of this one."""
        self.look_at: float | None = None
        """When STOP goes to whoever runs; None once nobody does."""
        self.pause_s = LOOK_AGAIN_S[0]
        self.since: float | None = None
        self.total_s = 0.0

    def begin(self, now: float) -> None:
        """From now on no time passes for the run."""
        self.since = now
        self.is_told = False
        self.look_at = now + NOTICE_S
        self.pause_s = LOOK_AGAIN_S[0]

    def look_again(self, now: float, is_still: bool) -> None:
        """After a round of STOP: when the next one is."""
        self.look_at = None if is_still else now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LOOK_AGAIN_S[1])

    def end(self, now: float) -> float:
        """Time passes again. Returns: how long it did not, to move on what is due later."""
        passed_s = 0.0 if self.since is None else now - self.since
        self.total_s += passed_s
        self.since = self.look_at = None
        return passed_s

    def so_far_s(self, now: float) -> float:
        """All times together, with the one that still lasts."""
        return self.total_s + (0.0 if self.since is None else now - self.since)
