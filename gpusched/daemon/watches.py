"""Runs the watches of a tick, so that one that raises stops nothing else.

A watch changes the memory as it goes, so nothing but a reload takes back what it has done. The tick in which one
raises is therefore dropped as a whole, like one that cannot be recorded, and begins again at once without that watch.
It is tried again after a pause that grows with each failure, since every try that fails costs a reload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.failures import StepFailures

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
T = TypeVar("T")
Watch = Callable[[TickTransaction], object]


class WatchRaised(Exception):
    """A watch has raised: this tick is to begin again, without it."""


@dataclass(slots=True)
class _Pause:
    length_s: float
    until: float
    """On the monotonic clock."""
    is_failing: bool = True
    """It has not worked since."""


class Watches:
    """Runs them, and leaves out those that raised lately. Args: failures: where they are counted, logged and shown."""

    def __init__(self, failures: StepFailures, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._failures = failures
        self._monotonic = monotonic
        self._pauses: dict[tuple[str, str], _Pause] = {}
        """By watch, and the run or job that it raised for."""

    def run(self, name: str, action: Callable[..., T], *arguments: Any, part: str = "") -> T | None:
        """Call `action` and return its result; None while it is left out.

        Args: name: what is watched, for people; part: the run or job of this call, if it is left out alone.

        Raises: WatchRaised when it raises anything, or when a part of it did.
        """
        if self._pauses and self._is_paused(name, part):
            return None
        try:
            found = action(*arguments)
        except WatchRaised:
            raise
        except Exception as error:
            self._note_failure(name, part, error)
            raise WatchRaised(name) from error
        if self._pauses:
            self._note_success(name, part)
        return found

    def run_all(self, watches: Iterable[tuple[str, Watch]], tx: TickTransaction) -> None:
        """The same for several by name, in order; nearly free while none raises."""
        if self._pauses:
            for name, carry_out in watches:
                self.run(name, carry_out, tx)
            return
        name = ""
        try:
            for watch in watches:
                name, carry_out = watch
                carry_out(tx)
        except WatchRaised:
            raise
        except Exception as error:
            self._note_failure(name, "", error)
            raise WatchRaised(name) from error

    def is_left_out(self, name: str) -> bool:
        """Whether a watch raised lately, so that nothing may wait for it."""
        return self._is_paused(name, "")

    def _is_paused(self, name: str, part: str) -> bool:
        pause = self._pauses.get((name, part))
        return pause is not None and self._monotonic() < pause.until

    def _note_failure(self, name: str, part: str, error: Exception) -> None:
        before = self._pauses.get((name, part))
        length_s = FIRST_PAUSE_S if before is None else min(2 * before.length_s, LONGEST_PAUSE_S)
        self._pauses[name, part] = _Pause(length_s, self._monotonic() + length_s)
        self._failures.note(_step(name), error)

    def _note_success(self, name: str, part: str) -> None:
        """Note that it works again; the length of its pause counts until it has worked for as long."""
        now, pause = self._monotonic(), self._pauses.get((name, part))
        if pause is not None:
            pause.is_failing = False
        over = [one for one, pause in self._pauses.items() if now >= pause.until + _kept_s(pause)]
        for one in over:
            del self._pauses[one]
        failing = {one for (one, _), pause in self._pauses.items() if pause.is_failing}
        for watch in {name, *(one for one, _ in over)} - failing:
            self._failures.recovered(_step(watch))


def _kept_s(pause: _Pause) -> float:
    # What still counts as failing is a run or job that has left for good.
    return LONGEST_PAUSE_S if pause.is_failing else pause.length_s


def _step(name: str) -> str:
    return f"watch on {name}"
