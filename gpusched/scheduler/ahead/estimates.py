"""When waiting jobs will start, as a range, and how good such ranges have been.

The late end is the promise: every run uses all of its time limit. The early end supposes that runs take
as long as those like them did. Both suppose that nothing else is submitted, cancelled, held or broken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from gpusched.model.calendar import Estimate
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, Plan, Prediction, Snapshot
from gpusched.model.states import ReasonCode
from gpusched.model.value import replace
from gpusched.scheduler.ahead.future import Arrival, Future, Length, by_limit, play_starts_and_ends
from gpusched.scheduler.ahead.place import in_order
from gpusched.scheduler.extension import NO_EXTENSIONS, Extensions
from gpusched.scheduler.planner import decide

Predict = Callable[[int], Prediction | None]
"""How long a running or waiting job runs, by its id."""

MAX_CYCLES = 80
"""Plans for each end of the range, at most."""

MAX_VISITS = 6000
"""Classes that all plans for one end of the range may look at: with more classes there are fewer plans."""

SWIFTER = 20
"""So many plans are made in the time of one where each costs only what has changed."""

MANY_CLASSES = 100
"""With more classes than this, those behind the last wanted job are left out of the play."""

SLACK_S = 60.0
"""A start this close to its range counts as inside: polls and the cleaning of cards take their time."""


@dataclass(frozen=True, slots=True)
class StartRange:
    """When a job starts, from when until when at the latest. Unknown is None, never a guess."""

    low_at: float | None
    """If runs take as long as those like them did, and those that nobody knows use all of their time limit."""
    high_at: float | None
    """If every run uses all of its time limit; None when one without must end first, and beyond what was looked at."""

    @property
    def is_unknown(self) -> bool:
        """Whether nothing at all can be said."""
        return self.low_at is None and self.high_at is None


UNKNOWN = StartRange(None, None)


def forecast_starts(
    snapshot: Snapshot,
    settings: Settings,
    run_s: Predict,
    wanted: Collection[int],
    max_cycles: int = MAX_CYCLES,
    arrivals: Iterable[Arrival] = (),
    extensions: Extensions = NO_EXTENSIONS,
) -> dict[int, StartRange]:
    """The range of each wanted job; jobs that are neither in the snapshot nor among the arrivals are unknown."""
    arrivals = tuple(arrivals)
    snapshot = _without_those_behind(snapshot, settings, wanted, extensions)
    max_cycles = max(1, min(max_cycles, MAX_VISITS // max(1, len(snapshot.pending))))
    by_limits = _by_limits(snapshot)
    latest, plan = _play(by_limits, settings, by_limit, wanted, max_cycles, arrivals, extensions)
    if plan is None:
        plan = decide(by_limits, settings, extensions)
    promised = {one.job_id: one.start_at for one in plan.reservations}
    missing = _miss_their_deadline(snapshot, promised)
    earliest = latest
    if _knows_any(snapshot, arrivals, run_s):
        earliest, _ = _play(snapshot, settings, _as_usual(run_s), wanted, max_cycles, arrivals, extensions)
    seen = {job.id for waiting in snapshot.pending for job in waiting.jobs} | {one.job.id for one in arrivals}
    loaded = _blocked_by_load(snapshot, plan)
    ranges: dict[int, StartRange] = {}
    for job_id in wanted:
        if job_id not in seen or job_id in loaded or job_id in missing:
            ranges[job_id] = UNKNOWN
            continue
        # Behind a run that may take for ever, nothing is promised but what preemption makes sure of.
        high_at = promised.get(job_id)
        if high_at is None:
            high_at = latest.get(job_id)
        low_at = earliest.get(job_id)
        if high_at is not None:
            low_at = high_at if low_at is None else min(low_at, high_at)
        ranges[job_id] = StartRange(low_at, high_at)
    return ranges


def _play(
    snapshot: Snapshot,
    settings: Settings,
    length: Length,
    wanted: Collection[int],
    max_cycles: int,
    arrivals: tuple[Arrival, ...],
    extensions: Extensions,
) -> tuple[dict[int, float], Plan | None]:
    """When these start if runs last so long, and the plan of the present where one was made."""
    if not arrivals and extensions == NO_EXTENSIONS:
        found = play_starts_and_ends(snapshot, settings, length, wanted, SWIFTER * max_cycles)
        if found is not None:
            return found, None
    future = Future(snapshot, settings, length, arrivals, extensions)
    return future.play(wanted, max_cycles), future.first_plan


def _by_limits(snapshot: Snapshot) -> Snapshot:
    """The same world, planned by time limits where there are any: what is promised is no guess."""
    if not any(waiting.key.plan_s is not None for waiting in snapshot.pending) and not any(
        held.predicted_end_at is not None and held.expected_end_at is not None for held in snapshot.allocations
    ):
        return snapshot
    allocations = tuple(
        held if held.expected_end_at is None else replace(held, predicted_end_at=None) for held in snapshot.allocations
    )
    classes: dict[ClassKey, PendingClass] = {}
    for waiting in snapshot.pending:
        key = waiting.key if waiting.key.time_limit_s is None else replace(waiting.key, plan_s=None)
        other = classes.get(key)
        jobs = waiting.jobs if other is None else (*other.jobs, *waiting.jobs)
        total = waiting.total if other is None else other.total + waiting.total
        classes[key] = PendingClass(key, tuple(sorted(jobs, key=lambda one: (one.queued_at, one.id))), total)
    return replace(snapshot, allocations=allocations, pending=tuple(classes.values()))


def _knows_any(snapshot: Snapshot, arrivals: Iterable[Arrival], run_s: Predict) -> bool:
    ids = [held.job_id for held in snapshot.allocations]
    ids += [job.id for waiting in snapshot.pending for job in waiting.jobs]
    ids += [one.job.id for one in arrivals]
    return any(run_s(job_id) is not None for job_id in ids)


def _as_usual(run_s: Predict) -> Length:
    def length(job_id: int, limit_s: float | None, so_far_s: float) -> float | None:
        usual = run_s(job_id)
        if usual is None:
            return limit_s
        # A run that has outlived the middle of those like it is compared with the long ones, then with its limit.
        found = next((long_s for long_s in (usual.median_s, usual.high_s) if long_s > so_far_s), limit_s)
        return found if limit_s is None or found is None else min(found, limit_s)

    return length


def _miss_their_deadline(snapshot: Snapshot, promised: Mapping[int, float | None]) -> set[int]:
    """Jobs whose reservation is too late for them: they are ended before, unless something ends early."""
    return {
        job.id
        for waiting in snapshot.pending
        if waiting.key.deadline_at is not None
        for job in waiting.jobs
        if (at := promised.get(job.id)) is not None and at + (waiting.key.time_limit_s or 0) > waiting.key.deadline_at
    }


def _blocked_by_load(snapshot: Snapshot, plan: Plan) -> set[int]:
    """Jobs that measured load keeps from starting: when that ends, no time limit tells."""
    return {
        job.id
        for waiting in snapshot.pending
        if (reason := plan.reasons.get(waiting.key)) is not None and reason.code is ReasonCode.LOAD_CEILING
        for job in waiting.jobs
    }


def _without_those_behind(
    snapshot: Snapshot, settings: Settings, wanted: Collection[int], extensions: Extensions
) -> Snapshot:
    """Leave out the classes whose first job comes after every wanted one; they could only fill gaps."""
    if len(snapshot.pending) <= MANY_CLASSES:
        return snapshot
    left = set(wanted) & {job.id for waiting in snapshot.pending for job in waiting.jobs}
    kept = set()
    for key, job in in_order(snapshot, settings, extensions):
        if not left:
            break
        kept.add(key)
        left.discard(job.id)
    if left:
        return snapshot
    return replace(snapshot, pending=tuple(waiting for waiting in snapshot.pending if waiting.key in kept))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How good the first estimates of jobs that have started were."""

    count: int
    """Estimates with both ends whose jobs have started."""
    inside: float
    """Share of those that started inside their range, a minute more or less."""
    median_error_s: float
    """Half of them started at most this long before or after the early end."""


def accuracy(estimates: Iterable[Estimate]) -> Accuracy | None:
    """What became of the estimates; None when there is nothing to judge by."""
    inside = 0
    errors_s = []
    for one in estimates:
        if one.start_at is None or one.high_at is None:
            continue
        inside += one.low_at - SLACK_S <= one.start_at <= one.high_at + SLACK_S
        errors_s.append(abs(one.start_at - one.low_at))
    if not errors_s:
        return None
    errors_s.sort()
    return Accuracy(len(errors_s), inside / len(errors_s), errors_s[len(errors_s) // 2])
