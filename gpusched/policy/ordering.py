"""Which waiting job comes first: priority = sum of weight x factor, every factor in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from gpusched.model.job import NICE_MAX, NICE_MIN, Job
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Urgency


@dataclass(frozen=True, slots=True)
class Priority:
    """A job's rank with the parts it is made of. Higher is sooner; ties go by `queued_at`, then id."""

    total: float
    parts: tuple[tuple[str, float], ...]
    """Name of each factor and its weighted value."""


def class_key(job: Job, inherited: Urgency | None = None) -> ClassKey:
    """The class a job waits in; `inherited` is what the jobs that wait for it pass on."""
    spec = job.spec
    return ClassKey(
        job.uid,
        spec.account,
        spec.queue,
        spec.nice,
        spec.time_limit_s,
        spec.request,
        job.user,
        spec.qos,
        spec.deadline_at,
        spec.reservation,
        job.is_front,
        inherited,
        spec.retry.requeue,
        not spec.request.gpus,
    )


def priority(key: ClassKey, queued_at: float, now: float, settings: Settings) -> Priority:
    """Rank of a job of this class that has waited since `queued_at`."""
    weights = settings.priority
    age = weights.weight_age * age_factor(now - queued_at, weights.max_age_s)
    nice = weights.weight_nice * nice_factor(key.nice)
    return Priority(age + nice, (("age", age), ("nice", nice)))


def age_factor(waited_s: float, max_age_s: float) -> float:
    """Time waited over the longest that counts; a clock that was set back counts as no wait."""
    if max_age_s <= 0:
        return 0.0
    return min(1.0, max(0.0, waited_s / max_age_s))


def nice_factor(nice: int) -> float:
    """1 for the most urgent nice value, 0 for the least."""
    return min(1.0, max(0.0, (NICE_MAX - nice) / (NICE_MAX - NICE_MIN)))


@dataclass(frozen=True, slots=True)
class Head:
    """The job of a class that is next in line."""

    key: ClassKey
    job: PendingJob


class Line:
    """The heads of all classes, best first. Only heads are kept, so the cost does not grow with the jobs."""

    __slots__ = ("_heap", "_now", "_settings", "cut_short")

    def __init__(self, pending: Iterable[PendingClass], now: float, settings: Settings) -> None:
        self._now = now
        self._settings = settings
        self._heap: list[tuple[float, float, int, int, PendingClass]] = []
        self.cut_short: ClassKey | None = None
        """A class with more jobs than the snapshot shows, and all that it shows were started."""
        for waiting in pending:
            if waiting.jobs:
                self._heap.append(self._entry(waiting, 0))
        heapify(self._heap)

    def _entry(self, waiting: PendingClass, position: int) -> tuple[float, float, int, int, PendingClass]:
        job = waiting.jobs[position]
        rank = priority(waiting.key, job.queued_at, self._now, self._settings).total
        # Job ids are unique, so the comparison never reaches the position or the class.
        return -rank, job.queued_at, job.id, position, waiting

    def first(self) -> Head | None:
        """The best job in line; None when there is none, or when the next one is not in the snapshot."""
        if not self._heap or self.cut_short is not None:
            return None
        _, _, _, position, waiting = self._heap[0]
        return Head(waiting.key, waiting.jobs[position])

    def advance(self) -> None:
        """The first job starts: the next one of its class takes its place."""
        _, _, _, position, waiting = self._heap[0]
        if position + 1 < len(waiting.jobs):
            heapreplace(self._heap, self._entry(waiting, position + 1))
            return
        heappop(self._heap)
        # The next job of this class may go before all others in line, and nobody can tell from here.
        if waiting.total > len(waiting.jobs):
            self.cut_short = waiting.key

    def rest(self) -> list[ClassKey]:
        """Classes that were not looked at because the line was cut short, that one first."""
        if self.cut_short is None:
            return []
        return [self.cut_short, *(entry[4].key for entry in sorted(self._heap, key=lambda entry: entry[:3]))]

    def drop(self) -> None:
        """The first job cannot start: its class leaves the line for this cycle."""
        heappop(self._heap)
