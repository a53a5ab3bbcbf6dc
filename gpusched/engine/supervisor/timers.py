"""What a run has to do at certain instants, all on the monotonic clock.

One list answers both how long to sleep and what is due, so that nothing can be due for which nobody wakes up.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class TimedAction(Protocol):
        """Has something to do at an instant, or never."""

        @property
        def due_at(self) -> float | None: ...

        def act(self, now: float) -> None:
            """Do it, and set the instant of the next time, if any."""

    class RestingAction(TimedAction, Protocol):
        """Waits as long as the run is suspended."""

        def shift(self, passed_s: float) -> None:
            """Exclude the seconds for which the run was suspended."""


class Timer:
    """One action, done once at the instant that was set. Args: action: gets the present instant."""

    __slots__ = ("_action", "due_at")

    def __init__(self, action: Callable[[float], object]) -> None:
        self._action = action
        self.due_at: float | None = None

    def set_by(self, at: float) -> None:
        """Set an instant, unless an earlier one is set."""
        if self.due_at is None or at < self.due_at:
            self.due_at = at

    def act(self, now: float) -> None:
        self.due_at = None
        self._action(now)

    def shift(self, passed_s: float) -> None:
        if self.due_at is not None:
            self.due_at += passed_s


class RunTimers:
    """All that one run has to do by the clock, in this order where several things are due."""

    def __init__(self, resting: list[RestingAction], always: list[TimedAction]) -> None:
        """Args: resting: what waits while the run is suspended; always: the rest."""
        self._resting = resting
        self._always = always
        self._is_suspended = False

    def add(self, timed: TimedAction) -> None:
        """Add something that is due whether or not the run is suspended, before what is there."""
        self._always.insert(0, timed)

    def add_resting(self, timed: RestingAction) -> None:
        """Add something that waits while the run is suspended, before what is there."""
        self._resting.insert(0, timed)

    def suspend(self) -> None:
        """Let rest what waits for the run."""
        self._is_suspended = True

    def resume(self, passed_s: float) -> None:
        """Go on with it. Args: passed_s: since `suspend`."""
        self._is_suspended = False
        for timed in self._resting:
            timed.shift(passed_s)

    def next_at(self) -> float | None:
        """When something is due; None if nothing ever is."""
        return min([timed.due_at for timed in self._running() if timed.due_at is not None], default=None)

    def act(self, now: float) -> None:
        """Do what is due, including what becomes due meanwhile further down the list."""
        for timed in self._running():
            if timed.due_at is not None and now >= timed.due_at:
                timed.act(now)

    def _running(self) -> list[TimedAction]:
        return [*self._always] if self._is_suspended else [*self._resting, *self._always]
