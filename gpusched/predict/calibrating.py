"""Ranges that hold as often as they say, learned from what became of earlier ones.

An estimate says when a job starts at the latest if nothing changes; much does. How long jobs have waited, as a part of
the wait that they were told, has a distribution, and its quantiles times the wait that the next one is told are a range
for that one: of those who come after jobs like those before them, four in five start inside (split conformal
prediction, with the newest ones alone, since the load of a machine changes).

Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005), chapter 4.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor

SHARE = 0.8
"""So many start inside their range."""

KEPT = 200
"""The newest ratios that quantiles are taken of."""

LEAST = 30
"""With fewer no range is given."""

TOLD_LEAST_S = 60.0
"""A wait that is told is taken to be no shorter: parts of nothing say nothing."""


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of a start, and when it was: instants. `start_at` is None as long as the job waits."""

    made_at: float
    high_at: float
    start_at: float | None


@dataclass(frozen=True, slots=True)
class Likely:
    """Between which parts of the wait that they were told, four in five have waited."""

    low: float
    high: float

    def range(self, made_at: float, high_at: float) -> tuple[float, float]:
        """When a job most likely starts, of which `high_at` is told now."""
        told_s = _told_s(made_at, high_at)
        return made_at + self.low * told_s, made_at + self.high * told_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the past says of ranges: the one for now, None with too little; and how often those given before held."""

    likely: Likely | None
    judged: int = 0
    held: int = 0

    @property
    def share(self) -> float | None:
        """Part of the ranges that held; None when none was given."""
        return self.held / self.judged if self.judged else None


def calibrate(told: Iterable[Told]) -> Calibration:
    """The range for now, and how those would have done that were known when each of these was told.

    Nothing that started later than an estimate was made counts for its range.
    """
    started = sorted((one for one in told if one.start_at is not None), key=lambda one: one.start_at or 0.0)
    asked = sorted(started, key=lambda one: one.made_at)
    newest: deque[float] = deque()
    ordered: list[float] = []
    judged = held = known = 0

    def learn(until: float) -> None:
        nonlocal known
        while known < len(started) and (started[known].start_at or 0.0) <= until:
            ratio = _ratio(started[known])
            newest.append(ratio)
            insort(ordered, ratio)
            if len(newest) > KEPT:
                del ordered[bisect_left(ordered, newest.popleft())]
            known += 1

    for one in asked:
        learn(one.made_at)
        likely = _likely(ordered)
        if likely is not None:
            judged += 1
            held += likely.low <= _ratio(one) <= likely.high
    learn(float("inf"))
    return Calibration(_likely(ordered), judged, held)


def _likely(ordered: Sequence[float]) -> Likely | None:
    count = len(ordered)
    if count < LEAST:
        return None
    tail = (1 - SHARE) / 2
    low = max(0, floor(tail * (count + 1)) - 1)
    high = min(count - 1, ceil((1 - tail) * (count + 1)) - 1)
    return Likely(ordered[low], ordered[high])


def _told_s(made_at: float, high_at: float) -> float:
    return max(TOLD_LEAST_S, high_at - made_at)


def _ratio(one: Told) -> float:
    return ((one.start_at or 0.0) - one.made_at) / _told_s(one.made_at, one.high_at)
