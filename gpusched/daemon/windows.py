"""The windows of the calendar as the policy is shown them, and when they next begin or end."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.calendar import CalendarEntry
from gpusched.model.snapshot import Window
from gpusched.scheduler.calendar.entries import windows

AHEAD_S = 366 * 86400.0
"""How far the policy looks ahead; of one that recurs it is shown the first few anyway."""


class Windows:
    """The windows at an instant, worked out once for each, and the next edge after the last `look`."""

    def __init__(self) -> None:
        self._asked: tuple[float, tuple[CalendarEntry, ...]] | None = None
        self._found: tuple[Window, ...] = ()
        self._edge_at: float | None = None

    def at(self, calendar: Mapping[str, CalendarEntry], now: float) -> tuple[Window, ...]:
        """The windows that run now or later, by start and name."""
        asked = (now, tuple(calendar.values()))
        if asked != self._asked:
            self._asked = asked
            self._found = windows(asked[1], now, AHEAD_S) if asked[1] else ()
        return self._found

    def look(self, calendar: Mapping[str, CalendarEntry], now: float) -> None:
        """A plan is made of the windows at this instant: those that begin or end later change it."""
        self._edge_at = min(
            (one.start_at if one.start_at > now else one.end_at for one in self.at(calendar, now)), default=None
        )

    @property
    def edge_at(self) -> float | None:
        """When the next of them begins or ends, as of the last look."""
        return self._edge_at

    def have_moved(self, now: float) -> bool:
        """Whether one has begun or ended since the last look."""
        return self._edge_at is not None and self._edge_at <= now
