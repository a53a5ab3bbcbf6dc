"""Ranges of start times that hold as often as stated, learned from earlier estimates.

An estimate is the latest start if nothing changes, and much does. The actual wait as a fraction of the estimated wait
has a distribution; its quantiles times the next estimated wait are the range for that job. Four in five jobs start
inside (split conformal prediction over the newest estimates, because load changes). Without limits there is no latest
start; the estimate is then the usual start, and such estimates are calibrated separately.

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
"""Fraction of jobs that start inside their range."""

KEPT = 100
"""Newest ratios that the quantiles are taken from."""

LEAST = 30
"""With fewer ratios there is no range."""

LEAST_WAIT_S = 60.0
"""Minimum estimated wait: a ratio to almost 0 would be meaningless."""


class StartEstimate(Value):
    """When a job was estimated to start and when it did. `start_at` is None while it is pending."""

    made_at: float
    estimated_at: float
    start_at: float | None
    is_latest: bool = True
    """The estimate was the latest start; else the usual one."""

    @property
    def ratio(self) -> float:
        """Actual over estimated wait. The job must have started."""
        return ((self.start_at or 0.0) - self.made_at) / max(LEAST_WAIT_S, self.estimated_at - self.made_at)


@dataclass(frozen=True, slots=True)
class WaitRange:
    """Bounds of the actual wait as fractions of the estimated one, for four in five jobs."""

    low: float
    high: float

    def range(self, made_at: float, estimated_at: float) -> tuple[float, float]:
        """The range of starts for an estimate (`estimated_at`) made at `made_at`."""
        wait_s = max(LEAST_WAIT_S, estimated_at - made_at)
        return made_at + self.low * wait_s, made_at + self.high * wait_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """The ranges that apply now, None if there are too few estimates; and how often earlier ranges held."""

    likely: WaitRange | None
    """For estimates of the latest start."""
    usual: WaitRange | None = None
    """For estimates of the usual start."""
    judged: int = 0
    held: int = 0

    @property
    def share(self) -> float | None:
        """Fraction of the ranges that held; None if there were none."""
        return self.held / self.judged if self.judged else None


def calibrate(estimates: Iterable[StartEstimate]) -> Calibration:
    """The ranges for now, and how often the ranges available at each earlier estimate would have held.

    The range of an estimate is based only on jobs that had started when it was made.
    """
    started = sorted((one for one in estimates if one.start_at is not None), key=lambda one: one.start_at or 0.0)
    latest, usual = _Ratios(), _Ratios()
    judged = held = known = 0
    for one in sorted(started, key=lambda one: one.made_at):
        while known < len(started) and (started[known].start_at or 0.0) <= one.made_at:
            (latest if started[known].is_latest else usual).add(started[known].ratio)
            known += 1
        likely = (latest if one.is_latest else usual).likely()
        if likely is not None:
            judged += 1
            held += likely.low <= one.ratio <= likely.high
    for one in started[known:]:
        (latest if one.is_latest else usual).add(one.ratio)
    return Calibration(latest.likely(), usual.likely(), judged, held)


class _Ratios:
    """The newest ratios of actual to estimated waits."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, ratio: float) -> None:
        self._newest.append(ratio)
        insort(self._ordered, ratio)
        if len(self._newest) > KEPT:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]

    def likely(self) -> WaitRange | None:
        """The bounds that hold for four in five; None with too few ratios."""
        ordered, count = self._ordered, len(self._ordered)
        if count < LEAST:
            return None
        tail = (1 - SHARE) / 2
        low = max(0, floor(tail * (count + 1)) - 1)
        high = min(count - 1, ceil((1 - tail) * (count + 1)) - 1)
        return WaitRange(ordered[low], ordered[high])
