"""Ranges that hold as often as they say, learned from what became of earlier ones.

An estimate says when a job starts at the latest if nothing changes; much does. How long jobs have waited, as a part of
the wait that they were told, has a distribution, and its quantiles times the wait that the next one is told are a range
for that one: of those who come after jobs like those before them, four in five start inside (split conformal
prediction, with the newest ones alone, since the load of a machine changes). Where runs have no limits nobody knows
when a job starts at the latest; then it is told when it starts as usual, and those who were told so are a kind of
their own.

Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005), chapter 4.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor

from gpusched.model.value import Value

SHARE = 0.8
"""So many start inside their range."""

KEPT = 100
"""The newest ratios that quantiles are taken of."""

LEAST = 30
"""With fewer no range is given."""

TOLD_LEAST_S = 60.0
"""A wait that is told is taken to be no shorter: parts of nothing say nothing."""


class Told(Value):
    """What was said of a start, and when it was: instants. `start_at` is None as long as the job waits."""

    made_at: float
    told_at: float
    start_at: float | None
    is_latest: bool = True
    """Whether it was said when it starts at the latest; else when it does as usual."""


@dataclass(frozen=True, slots=True)
class Likely:
    """Between which parts of the wait that they were told, four in five have waited."""

    low: float
    high: float

    def range(self, made_at: float, told_at: float) -> tuple[float, float]:
        """When a job most likely starts, of which this instant is told now."""
        told_s = _told_s(made_at, told_at)
        return made_at + self.low * told_s, made_at + self.high * told_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the past says of ranges: those for now, None with too little; and how often those given before held."""

    likely: Likely | None
    """For jobs that are told when they start at the latest."""
    usual: Likely | None = None
    """For those that are told when they do as usual."""
    judged: int = 0
    held: int = 0

    @property
    def share(self) -> float | None:
        """Part of the ranges that held; None when none was given."""
        return self.held / self.judged if self.judged else None


def calibrate(told: Iterable[Told]) -> Calibration:
    """The ranges for now, and how those would have done that were known when each of these was told.

    Nothing that started later than an estimate was made counts for its range.
    """
    started = sorted((one for one in told if one.start_at is not None), key=lambda one: one.start_at or 0.0)
    asked = sorted(started, key=lambda one: one.made_at)
    latest, usual = _Ratios(), _Ratios()
    judged = held = known = 0

    def learn(until: float) -> None:
        nonlocal known
        while known < len(started) and (started[known].start_at or 0.0) <= until:
            one = started[known]
            (latest if one.is_latest else usual).add(_ratio(one))
            known += 1

    for one in asked:
        learn(one.made_at)
        likely = (latest if one.is_latest else usual).likely()
        if likely is not None:
            judged += 1
            held += likely.low <= _ratio(one) <= likely.high
    learn(float("inf"))
    return Calibration(latest.likely(), usual.likely(), judged, held)


class _Ratios:
    """How long the newest have waited, as parts of what they were told."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, ratio: float) -> None:
        """One more has started."""
        self._newest.append(ratio)
        insort(self._ordered, ratio)
        if len(self._newest) > KEPT:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]

    def likely(self) -> Likely | None:
        """Between which parts four in five of them lie; None with too few."""
        ordered, count = self._ordered, len(self._ordered)
        if count < LEAST:
            return None
        tail = (1 - SHARE) / 2
        low = max(0, floor(tail * (count + 1)) - 1)
        high = min(count - 1, ceil((1 - tail) * (count + 1)) - 1)
        return Likely(ordered[low], ordered[high])


def _told_s(made_at: float, told_at: float) -> float:
    return max(TOLD_LEAST_S, told_at - made_at)


def _ratio(one: Told) -> float:
    return ((one.start_at or 0.0) - one.made_at) / _told_s(one.made_at, one.told_at)
