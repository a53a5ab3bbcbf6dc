"""One alert to one user, and what is reported of it."""

from __future__ import annotations

from typing import Any

from gpusched.model.value import Value

Facts = tuple[tuple[str, str | int | float], ...]
"""Values of FACTS by name; instants as UTC epoch seconds."""


MOST_SETTLED = 1000
"""Maximum recorded targets of one alert; no user has as many."""

Report = dict[str, Any]
"""Of a sender: key, and either `done`, or target, outcome (told, failed, gave_up), error, tries, failures, next_s."""

FILE = ""
"""In place of a target: the file itself is unusable for now."""


class Alert(Value):
    """One alert to one user: a row of the outbox, deleted after delivery to every target."""

    key: str
    """Identity of the alert for deduplication: `42.1 end`."""
    event: str
    counts_as: tuple[str, ...]
    """Event words; a target that asks for any of them receives the alert."""
    uid: int
    """User whose targets receive it."""
    at: float
    facts: Facts = ()
    targets: tuple[str, ...] = ()
    """Restricts delivery to these targets or mail addresses of the user; empty means all targets."""
    job_id: int | None = None
    run: int | None = None
    state: str = "waiting"
    """`armed`: sent once the user's queue is empty; `waiting`; `told`: kept to prevent a second delivery."""
    settled: tuple[str, ...] = ()
    """Targets with finished delivery: delivered or given up."""

    def may_settle(self, target: str) -> bool:
        """Whether this is news. Its user can claim any number of targets, and each would stay in its row."""
        return target not in self.settled and len(self.settled) < MOST_SETTLED
