"""Reservations made by an administrator, and estimates of starts with what became of them."""

from __future__ import annotations

from gpusched.model.snapshot import Placement
from gpusched.model.value import Value


class CalendarEntry(Value):
    """One reservation of the calendar, which may recur: what is kept, when, for whom."""

    name: str
    start_at: float
    """Of the first occurrence."""
    duration_s: int
    held: tuple[Placement, ...]
    """What is kept, on each node."""
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    every_s: int | None = None
    """Distance from one occurrence to the next; None for a single one."""
    until_at: float | None = None
    """No occurrence begins at or after this instant; None for no end."""
    made_by: str = ""
    made_at: float = 0.0
    message: str = ""
    """Why, for all to see."""

    @property
    def is_maintenance(self) -> bool:
        """Whether it is kept for nobody."""
        return not (self.users or self.accounts)


class Estimate(Value):
    """The first estimate of a job's start, and what became of it."""

    job_id: int
    made_at: float
    low_at: float
    high_at: float | None
    """None when nobody could tell."""
    start_at: float | None = None
    """When the job did start; None while it waits."""
