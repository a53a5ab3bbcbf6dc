"""Ends a run in time when its node has lost the head, which then starts it elsewhere."""

from __future__ import annotations

import time

from gpusched.engine.contact import boottime_s, read_contact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

GRACE_FRACTION = 0.5
"""Of the lease at most, for the grace of the job."""
LOOK_FRACTION = 0.05
LOOK_S = 10.0
"""Longest sleep: timers stop while the machine is suspended, and the lease does not."""


class ContactWatch:
    """The lease of one run. The file is read only when the last contact known is too long ago.

    Args: lost_after_s: after the last contact; by then the run has ended, its grace included. end: ends the run, with
    the seconds that are left for it.
    """

    def __init__(
        self, spool: str, boot_id: str, lost_after_s: float, grace_s: float, end: Callable[[float], None]
    ) -> None:
        self._spool, self._boot_id = spool, boot_id
        self._lost_after_s = lost_after_s
        self._grace_s = min(grace_s, GRACE_FRACTION * lost_after_s)
        self._end = end
        self._contact = float("-inf")
        self.due_at: float | None = None
        """Monotonic instant of the next look; None once the lease has ended."""

    def act(self, now: float) -> None:
        """End the run if its lease has ended."""
        left_s = self.look()
        if left_s is not None:
            self._end(left_s)

    def look(self) -> float | None:
        """None as long as the lease lasts; else what is left for the run to end, in seconds."""
        now = boottime_s()
        if now >= self._ends_at():
            found = read_contact(self._spool, self._boot_id)
            # An instant in the future is not from this boot's clock.
            if found is not None and found <= now:
                self._contact = max(self._contact, found)
        left_s = self._ends_at() - now
        if left_s <= 0.0:
            self.due_at = None
            return max(0.0, self._contact + self._lost_after_s - now)
        self.due_at = time.monotonic() + min(left_s, LOOK_S, LOOK_FRACTION * self._lost_after_s)
        return None

    def lasts_from(self, contact: float | None) -> bool:
        """Whether the lease would last if this had been the last contact."""
        return contact is not None and boottime_s() < contact + self._lost_after_s - self._grace_s

    def _ends_at(self) -> float:
        """When the run gets its first signal, if there is no further contact."""
        return self._contact + self._lost_after_s - self._grace_s
