"""When a job starts that waits for cheap or clean energy (`--start-when`): in the cheapest window before its deadline.

The job becomes eligible when that window begins. If it cannot start then, as its GPUs are busy, it waits on as long as
starting at once is the best that is left, and is put off when a later window is better. From the last start that meets
the deadline on, it is eligible whatever the price.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from gpusched.model.job import Job, JobSpec
from gpusched.model.states import JobState
from gpusched.model.tariff import Tariff, TariffRow
from gpusched.model.value import replace

CHEAP, GREEN = "cheap", "green"
_BETTER = 1 - 1e-6
"""A later start must be better by more than what rounding makes."""


def why_not_cheap(spec: JobSpec, tariff: Tariff | None) -> tuple[str, str] | None:
    """Why a job cannot wait for cheap or clean energy, and what to do; None if it can, or does not want to."""
    if spec.start_when is None:
        return None
    option = f"--start-when {spec.start_when}"
    if spec.deadline_at is None:
        return f"{option} needs a deadline, or the job might wait forever", "add one: --deadline now+24h"
    if spec.time_limit_s is None:
        return f"{option} needs a time limit: how long the job runs decides when it is cheapest", "add one: -t 4h"
    if spec.reservation is not None:
        return f"{option} and --reservation exclude each other: a reservation has its own time", "leave one of them out"
    what = "prices" if spec.start_when == CHEAP else "emissions"
    if tariff is None or not any(_rate(row, spec.start_when) is not None for row in tariff.rows):
        hint = "an administrator names a tariff in [energy] tariff; without one, leave the option out"
        return f"no {what} of energy over time are known here", hint
    return None


def cheapest_start(tariff: Tariff, earliest_at: float, run_s: float, latest_at: float, by: str) -> float:
    """The start of the window in which a run of this length costs or emits least; the earliest of equal ones.

    Windows of which a part is unknown are left out; if none is left, it is the earliest start.
    Args: latest_at: last start; by: `cheap` or `green`.
    """
    if latest_at <= earliest_at or run_s <= 0:
        return earliest_at
    edges = [earliest_at]
    while (edge := tariff.next_change(edges[-1])) < latest_at + run_s:
        edges.append(edge)
    edges.append(latest_at + run_s)
    integral = _Integral(tariff, edges, by)
    starts = {earliest_at, latest_at}
    # The mean is linear between these: its least value is at one of them.
    starts.update(at for edge in edges for at in (edge, edge - run_s) if earliest_at < at < latest_at)
    best_at, best = earliest_at, integral.between(earliest_at, earliest_at + run_s)
    for at in sorted(starts):
        amount = integral.between(at, at + run_s)
        if amount is not None and (best is None or amount < best - abs(best) * (1 - _BETTER)):
            best_at, best = at, amount
    return best_at


class _Integral:
    """Integral of a rate over time, between any two instants."""

    def __init__(self, tariff: Tariff, edges: list[float], by: str) -> None:
        self._edges = edges
        self._rates = [_rate(tariff.at(edge), by) for edge in edges[:-1]]
        self._sums, self._unknown = [0.0], [0]
        for (start, end), rate in zip(pairwise(edges), self._rates, strict=True):
            self._sums.append(self._sums[-1] + (rate or 0.0) * (end - start))
            self._unknown.append(self._unknown[-1] + (rate is None))

    def between(self, start: float, end: float) -> float | None:
        """None if the rate is unknown for any part."""
        (first, at_start), (last, at_end) = self._at(start), self._at(end)
        # A part that ends where another begins has nothing of it.
        last_part = last if end > self._edges[last] else last - 1
        if self._unknown[last_part + 1] > self._unknown[first]:
            return None
        return at_end - at_start

    def _at(self, instant: float) -> tuple[int, float]:
        place = min(max(bisect_right(self._edges, instant) - 1, 0), len(self._rates) - 1)
        return place, self._sums[place] + (self._rates[place] or 0.0) * (instant - self._edges[place])


def _rate(row: TariffRow, by: str) -> float | None:
    return row.price_per_kwh if by == CHEAP else row.g_per_kwh


def best_start(spec: JobSpec, tariff: Tariff | None, now: float) -> float:
    """When a job that waits for cheap or clean energy should start at the earliest."""
    earliest_at = max(now, spec.begin_at or now)
    if spec.start_when is None or tariff is None or spec.deadline_at is None or spec.time_limit_s is None:
        return earliest_at
    latest_at = spec.deadline_at - spec.time_limit_s
    return cheapest_start(tariff, earliest_at, spec.time_limit_s, latest_at, spec.start_when)


def put_off(job: Job, tariff: Tariff | None, now: float) -> Job:
    """A new job that waits for cheap or clean energy, eligible when it should start; any other unchanged."""
    if job.spec.start_when is None:
        return job
    start_at = best_start(job.spec, tariff, now)
    return replace(job, queued_at=start_at, eligible_at=start_at) if start_at > job.eligible_at else job


def postponed(job: Job, tariff: Tariff | None, now: float) -> Job | None:
    """A pending job with another time to start, as prices have changed or its window has passed; None to leave it."""
    waits = job.state is JobState.PENDING and job.run == 0 and job.hold is None
    if job.spec.start_when is None or not waits:
        return None
    start_at = best_start(job.spec, tariff, now)
    if start_at <= now:
        return None if job.eligible_at <= now else replace(job, eligible_at=now)
    return None if abs(start_at - job.eligible_at) < 1.0 else replace(job, eligible_at=start_at)
