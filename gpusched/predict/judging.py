"""Whether guesses of run times have been better than the limits that users gave: a measure that is kept up to date.

The measure is the mean of |log(said / true)| over the newest runs: 0 when all was said right, log 2 when it was off by
a factor of two on average, whichever way. `factor` has it as that factor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

KEPT = 500
"""The newest runs that are judged by."""

LEAST = 20
"""With fewer nothing is said, and limits are gone by."""

_SHORTEST_S = 1.0

_UNITS = 1 << 40
"""Of an error, in one."""


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of a run, and how long it was, in seconds."""

    guess_s: float
    limit_s: float
    run_s: float


@dataclass(frozen=True, slots=True)
class Measure:
    """How far off both have been: 1 is right, 2 is off by a factor of two on average."""

    runs: int
    guess_factor: float
    limit_factor: float

    @property
    def is_better(self) -> bool:
        """Whether guesses are what to plan with."""
        return self.runs >= LEAST and self.guess_factor < self.limit_factor


class Judge:
    """Keeps how far off what was said of the newest runs was, worked out once for each; it hears of every end.

    Invariant: the sums are those of the errors kept. Errors are whole numbers, so that no digit is lost on the way.
    """

    def __init__(self) -> None:
        self._errors: deque[tuple[int, int]] = deque()
        """Of guess and limit, oldest first."""
        self._guesses = self._limits = 0

    @property
    def is_better(self) -> bool:
        """Whether guesses are what to plan with."""
        return len(self._errors) >= LEAST and self._guesses < self._limits

    @property
    def measure(self) -> Measure:
        """How far off both have been."""
        units = max(1, len(self._errors)) * _UNITS
        return Measure(len(self._errors), exp(self._guesses / units), exp(self._limits / units))

    def add(self, *ended: Said) -> None:
        """Runs that have ended now, oldest first."""
        for one in ended:
            self._errors.append(self._count(one))
            if len(self._errors) > KEPT:
                guess, limit = self._errors.popleft()
                self._guesses -= guess
                self._limits -= limit

    def add_older(self, ended: Iterable[Said]) -> None:
        """Runs that ended before all that are known, oldest first."""
        room = KEPT - len(self._errors)
        for one in reversed(tuple(ended)[-room:] if room else ()):
            self._errors.appendleft(self._count(one))

    def _count(self, one: Said) -> tuple[int, int]:
        errors = _error(one.guess_s, one.run_s), _error(one.limit_s, one.run_s)
        self._guesses += errors[0]
        self._limits += errors[1]
        return errors


def _error(said_s: float, run_s: float) -> int:
    return round(abs(log(max(_SHORTEST_S, said_s) / max(_SHORTEST_S, run_s))) * _UNITS)
