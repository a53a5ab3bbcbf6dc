"""First estimates of when jobs start, kept to measure their accuracy.

Only jobs in the first places get one, in quiet moments, with a small limit on the time spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from gpusched.daemon.forecast import QueueForecast
from gpusched.daemon.watch.looks import BackgroundLook
from gpusched.model.snapshot import Estimate
from gpusched.ports import Store
from gpusched.ports.tables import ESTIMATES
from gpusched.predict.calibration import Calibration, StartEstimate, calibrate
from gpusched.scheduler.forecast import Accuracy, StartRange, accuracy

if TYPE_CHECKING:
    from gpusched.daemon.tick import Ticker

KEPT = 1000
"""Number of newest estimates that accuracy is measured by."""


class Estimates:
    """The newest estimates by job, read from the table on first use."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, Estimate] | None = None

    def forget(self) -> None:
        """Reload at the next call, since the table may have changed."""
        self._known = None

    def known(self) -> dict[int, Estimate]:
        if self._known is None:
            self._known = dict(sorted(self._store.load(ESTIMATES, KEPT).items()))
        return self._known

    def add(self, ranges: Mapping[int, StartRange], now: float) -> dict[int, Estimate]:
        """Keep the ranges of jobs that have none yet; return the new ones. Unknown ranges are skipped."""
        known = self.known()
        new = {
            job_id: Estimate(job_id, now, found.low_at, found.high_at)
            for job_id, found in ranges.items()
            if found.low_at is not None and job_id not in known
        }
        known.update(new)
        while len(known) > 2 * KEPT:
            del known[next(iter(known))]
        return new

    def started(self, job_id: int, at: float) -> Estimate | None:
        """The estimate of a job with its actual start; None without an estimate, or for a later run."""
        before = self.known().get(job_id)
        if before is None or before.start_at is not None:
            return None
        after = Estimate(job_id, before.made_at, before.low_at, before.high_at, at)
        self.known()[job_id] = after
        return after

    def calibration(self) -> Calibration:
        """Range that contains four in five starts, from past estimates, and how often it held."""
        told = []
        for one in self.known().values():
            told_at = one.low_at if one.high_at is None else one.high_at
            if told_at is not None:
                told.append(StartEstimate(one.made_at, told_at, one.start_at, is_latest=one.high_at is not None))
        return calibrate(told)

    def accuracy(self) -> Accuracy | None:
        """Accuracy of estimates; None when none can be judged yet."""
        return accuracy(self.known().values())


FIRST_PLACES = 50
CYCLES = 30
"""Limit on plans per look ahead; a job that starts beyond it gets its estimate later."""
_LEAST_GAP_S = 5.0
_REST = 20
"""Pause between looks, in multiples of the duration of the last one."""
_BUSY_TICKS = 20
"""Ticks since the last poll above which the daemon counts as busy."""


class Estimator:
    """Makes estimates at polls, on another thread."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker, self._scheduler = ticker, ticker.scheduler
        self._look: BackgroundLook[tuple[dict[int, StartRange], float, float]] = BackgroundLook(
            "look ahead", ticker.scheduler.failures, _LEAST_GAP_S
        )
        self._ticks = 0
        self._version: int | None = None
        """Of the queue at the last look."""

    def poll(self) -> None:
        """Look ahead in a quiet moment, if jobs are pending and the last look is long enough ago."""
        ticks, self._ticks = self._ticks, self._ticker.ticks
        is_quiet = self._ticker.ticks - ticks <= _BUSY_TICKS
        if is_quiet and self._scheduler.state.rules.lean is not None:
            # Earlier runs choose among nodes even while nothing is pending.
            self._scheduler.history.load_some()
        # Not the plan's reasons: to know whether there are any, a whole queue is walked.
        if not (is_quiet and self._look.is_due() and self._scheduler.state.census.pending):
            return
        if not self._scheduler.history.load_some():
            return
        # Without a change the first jobs are the same ones, which have their estimates.
        version = self._scheduler.planner().state.version
        if version == self._version:
            return
        self._version = version
        outlook = QueueForecast.of(self._scheduler)
        known = frozenset(self._scheduler.estimates.known())
        # Estimates are optional: the queue works without them.
        self._look.begin(self._take, _look, outlook, known)

    def _take(self, looked: tuple[dict[int, StartRange], float, float]) -> None:
        ranges, made_at, took_s = looked
        self._look.rest(max(_LEAST_GAP_S, _REST * took_s))
        self._ticker.record_estimates(ranges, made_at)


def _look(outlook: QueueForecast, known: frozenset[int]) -> tuple[dict[int, StartRange], float, float]:
    """Ranges of the first jobs without an estimate, the instant they refer to, and the time spent."""
    began = perf_counter()
    wanted = [job_id for job_id in outlook.first(FIRST_PLACES) if job_id not in known]
    ranges = outlook.starts(wanted, CYCLES) if wanted else {}
    return ranges, outlook.snapshot.now, perf_counter() - began
