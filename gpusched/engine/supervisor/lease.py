"""The lease of a run in the foreground: it ends when nothing has happened in it for so long.

What happens is typing, and work: processor time of the run's processes above a small part of one core, which a
program that uses a GPU always takes. It is only looked at when the lease would otherwise be warned of or end.
"""

from __future__ import annotations

LONGEST_WARNING_S = 300.0
WARNING_FRACTION = 0.25
"""Of the lease, where that is shorter."""
BUSY_FRACTION = 0.05
"""Of one core, on average since the last look: what an idle shell with a clock in its prompt never takes."""
WARN, END = "warn", "end"


class Lease:
    """The account of one run. Instants are on the monotonic clock, all lengths in seconds."""

    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s = lease_s
        self.warning_s = min(LONGEST_WARNING_S, WARNING_FRACTION * lease_s)
        self.active_at = now
        self.seen_at = now
        self.seen_cpu_s = 0.0
        self.is_warned = False
        self.look_at: float | None = now + lease_s - self.warning_s
        """When to look; None once it has ended."""

    def touch(self, now: float) -> None:
        """The client typed."""
        self.active_at = now

    def shift(self, passed_s: float) -> None:
        """The run was suspended for this long, which does not count."""
        self.active_at += passed_s
        self.seen_at += passed_s
        if self.look_at is not None:
            self.look_at += passed_s

    def look(self, now: float, cpu_s: float) -> str | None:
        """What is to be done: WARN, END or nothing. Args: cpu_s: processor time of the run so far."""
        if self.look_at is None:
            return None
        if self._has_worked(now, cpu_s):
            self.active_at = now
        self.seen_at, self.seen_cpu_s = now, cpu_s
        ends_at = self.active_at + self.lease_s
        if now >= ends_at:
            self.look_at = None
            return END
        if now < ends_at - self.warning_s:
            self.look_at = ends_at - self.warning_s
            self.is_warned = False
            return None
        self.look_at = ends_at
        is_news, self.is_warned = not self.is_warned, True
        return WARN if is_news else None

    def ends_at(self, now: float, cpu_s: float) -> float:
        """When it ends if nothing happens from now on; changes nothing."""
        return (now if self._has_worked(now, cpu_s) else self.active_at) + self.lease_s

    def _has_worked(self, now: float, cpu_s: float) -> bool:
        return now > self.seen_at and cpu_s - self.seen_cpu_s >= BUSY_FRACTION * (now - self.seen_at)

    def warning(self, now: float) -> str:
        """Shown at the terminal before the run ends."""
        left_s = max(1.0, self.active_at + self.lease_s - now)
        return (
            f"no activity here for {length(now - self.active_at)}; "
            f"this job ends in {length(left_s)} unless you type something"
        )


def length(seconds: float) -> str:
    """A duration for people; nothing else in this process can format one."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
