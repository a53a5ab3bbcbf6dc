"""Trying changes of one pending job: each is planned by a fork of the planner, and the number of plans is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.events import JobQueued
from gpusched.scheduler.extension import NO_EXTENSIONS, Extensions
from gpusched.scheduler.planner import Planner

BUDGET = 25
"""Plans that one question may cost, beside that of the present."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that is worth a try."""

    key: ClassKey
    change: Mapping[str, object]
    option: str
    update: str
    size: float
    without: str = ""
    """What has to be left out, when the change is not an option to type."""
    remark: str = ""
    """What speaks for it, or should be thought of."""


@dataclass(frozen=True, slots=True)
class SensibleLimit:
    """Which time limits make sense for a job, judged by jobs like it, in seconds."""

    least_s: float
    """Nearly all of them took no longer."""
    most_s: float
    """A longer one is no safer."""
    why: str
    """`95 % of 34 jobs like it took at most 1:40:00`."""


@dataclass(slots=True)
class Trial:
    """Tries changes of one job, within the budget."""

    snapshot: Snapshot
    """Without the job."""
    settings: Settings
    key: ClassKey
    job: PendingJob
    allowed: Callable[[ClassKey], bool]
    planner: Planner
    """That knows the snapshot."""
    left: int = BUDGET + 1
    known: dict[ClassKey, float | None] = field(default_factory=dict)
    later: list[tuple[Change, float]] = field(default_factory=list)
    gaps_s: tuple[float, ...] = ()
    """How long what is kept for others or by the calendar is still free, longest first."""
    sensible: SensibleLimit | None = None
    """None when too few jobs like it have ended."""

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        settings: Settings,
        job_id: int,
        allowed: Callable[[ClassKey], bool],
        extensions: Extensions = NO_EXTENSIONS,
        sensible: SensibleLimit | None = None,
    ) -> Trial | None:
        """None when the job is not in the snapshot."""
        for at, waiting in enumerate(snapshot.pending):
            job = next((one for one in waiting.jobs if one.id == job_id), None)
            if job is not None:
                rest = tuple(one for one in waiting.jobs if one.id != job_id)
                classes = list(snapshot.pending)
                classes[at : at + 1] = [PendingClass(waiting.key, rest, waiting.total - 1)] if rest else []
                without = replace(snapshot, pending=tuple(classes))
                planner = Planner.from_snapshot(without, settings, extensions)
                return cls(without, settings, waiting.key, job, allowed, planner, sensible=sensible)
        return None

    def start_of(self, key: ClassKey) -> float | None:
        """When the job starts with this key, as far as one plan tells. None also when the budget is used up."""
        if key in self.known:
            return self.known[key]
        if self.left <= 0:
            return None
        self.left -= 1
        tried = self.planner.fork()
        tried.apply(JobQueued(key, self.job))
        plan = tried.plan(self.snapshot.now)
        found: float | None = None
        if any(start.job_id == self.job.id for start in plan.starts):
            found = self.snapshot.now
        else:
            kept = [one.start_at for one in plan.reservations if one.job_id == self.job.id]
            # A start that is expected at once is not one: something is in the way that should be gone.
            found = next((at for at in kept if at is not None and at > self.snapshot.now), None)
        if key == self.key:
            others = [one.start_at for one in plan.reservations if one.start_at is not None]
            self.gaps_s = tuple(
                sorted({at - self.snapshot.now for at in (*others, *self._of_calendar())}, reverse=True)
            )
        self.known[key] = found
        return found

    def _of_calendar(self) -> Iterator[float]:
        """Instants by which the calendar wants the job to have ended."""
        for window in self.snapshot.windows:
            if window.start_at > self.snapshot.now:
                yield window.start_at
            elif window.name == self.key.reservation:
                yield window.end_at

    def helps(self, one: Change) -> bool:
        """Whether the job starts now with this; what only makes it sooner is remembered."""
        if one.key == self.key or one.key.request.contradiction() is not None or not self.allowed(one.key):
            return False
        start_at = self.start_of(one.key)
        if start_at is not None and start_at > self.snapshot.now:
            self.later.append((one, start_at))
        return start_at == self.snapshot.now

    def largest(self, tries: Sequence[Change]) -> Change | None:
        """The last of these, smallest amount first, that helps; more is never easier than less."""
        if not tries or not self.helps(tries[0]):
            return None
        low, high = 0, len(tries)
        while high - low > 1 and self.left > 0:
            middle = (low + high) // 2
            if self.helps(tries[middle]):
                low = middle
            else:
                high = middle
        return tries[low]

    def request(self, **parts: object) -> ClassKey:
        """The key with a part of the request changed."""
        return replace(self.key, request=replace(self.key.request, **parts))  # type: ignore[arg-type]
