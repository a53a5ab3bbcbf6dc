"""Whether guesses of run times have been better than the limits that users gave: a measure that is kept up to date.

The measure is the mean of |log(said / true)| over the newest runs: 0 when all was said right, log 2 when it was off by
a factor of two on average, whichever way. `factor` has it as that factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

KEPT = 500
"""The newest runs that are judged by."""

LEAST = 20
"""With fewer nothing is said, and limits are gone by."""

_SHORTEST_S = 1.0


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
    """Keeps how far off what was said of the newest runs was, worked out once for each: it is told at every end."""

    def __init__(self) -> None:
        self._guesses: list[float] = []
        self._limits: list[float] = []
        self.measure = Measure(0, 1.0, 1.0)

    def add(self, *ended: Said) -> None:
        """Runs that have ended now, oldest first."""
        guesses, limits = _errors(ended)
        self._take(self._guesses + guesses, self._limits + limits)

    def add_older(self, ended: Iterable[Said]) -> None:
        """Runs that ended before all that are known, oldest first."""
        guesses, limits = _errors(ended)
        self._take(guesses + self._guesses, limits + self._limits)

    def _take(self, guesses: list[float], limits: list[float]) -> None:
        self._guesses, self._limits = guesses[-KEPT:], limits[-KEPT:]
        count = max(1, len(self._guesses))
        means = sum(self._guesses) / count, sum(self._limits) / count
        self.measure = Measure(len(self._guesses), exp(means[0]), exp(means[1]))


def _errors(ended: Iterable[Said]) -> tuple[list[float], list[float]]:
    runs = tuple(ended)
    return [_error(one.guess_s, one.run_s) for one in runs], [_error(one.limit_s, one.run_s) for one in runs]


def _error(said_s: float, run_s: float) -> float:
    return abs(log(max(_SHORTEST_S, said_s) / max(_SHORTEST_S, run_s)))
