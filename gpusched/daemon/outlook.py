"""Questions about the future, put to a frozen copy of the present: when do jobs start, and what would help.

A copy is taken on the daemon's thread; the answers, which take a while, are worked out on another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from gpusched.model.job import Job, JobSpec
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Prediction, Snapshot
from gpusched.policy.ahead.estimates import MAX_CYCLES, Predict, StartRange, forecast_starts
from gpusched.policy.ahead.future import Arrival
from gpusched.policy.ahead.place import first_in_order, queue_position
from gpusched.policy.ahead.whatif import Alternative, alternatives
from gpusched.policy.extension import Extensions
from gpusched.policy.ordering import class_key
from gpusched.policy.sharing.admission import Tally, why_refused

from .history import History
from .tick import Scheduler

SEEN_JOBS = 5000
"""About how many waiting jobs a question looks at; those far behind are not told apart."""

SEEN_ARRIVALS = 500

_Mark = TypeVar("_Mark")


@dataclass(frozen=True, slots=True)
class Outlook:
    """The present, as questions about the future see it."""

    snapshot: Snapshot
    settings: Settings
    extensions: Extensions
    predict: Predict
    arrivals: tuple[Arrival, ...]
    tally: Tally

    @classmethod
    def of(cls, scheduler: Scheduler, newcomer: Job | None = None) -> Outlook:
        """The present of a scheduler, with one more job if given."""
        scheduler.history.load()
        now = scheduler.now()
        world = scheduler.world
        arrivals = [Arrival(at, class_key(job), _waits(job)) for at, job in world.timed_jobs(SEEN_ARRIVALS)]
        arrivals += [
            Arrival(job.eligible_at, class_key(job), _waits(job), dependency, parents)
            for job, dependency, parents in world.dependent_jobs(SEEN_ARRIVALS)
        ]
        snapshot = replace(scheduler.snapshot(now), pending=world.pending_views(SEEN_JOBS))
        if newcomer is not None and newcomer.eligible_at > now:
            arrivals.append(Arrival(newcomer.eligible_at, class_key(newcomer), _waits(newcomer)))
        elif newcomer is not None:
            snapshot = with_job(snapshot, class_key(newcomer), _waits(newcomer))
        tally = world.active.tally
        return cls(
            snapshot,
            scheduler.settings,
            scheduler.extensions,
            _predictor(scheduler.history, world.jobs.get, newcomer),
            tuple(arrivals),
            Tally(dict(tally.by_queue), dict(tally.by_queue_user), dict(tally.by_qos_user)),
        )

    def starts(self, wanted: Collection[int], max_cycles: int = MAX_CYCLES) -> dict[int, StartRange]:
        """When these jobs start."""
        return forecast_starts(
            self.snapshot, self.settings, self.predict, wanted, max_cycles, self.arrivals, self.extensions
        )

    def place(self, job_id: int) -> tuple[int, int] | None:
        """The place of a job in the queue, and of how many; None when it is too far behind to tell."""
        return queue_position(self.snapshot, self.settings, job_id, self.extensions)

    def first(self, most: int) -> list[int]:
        """The jobs in the first places."""
        return first_in_order(self.snapshot, self.settings, most, self.extensions)

    def alternatives(self, job: Job) -> tuple[Alternative, ...]:
        """What one could change about a waiting job so that it starts now."""
        settings, tally = self.settings, _without(self.tally, job)

        def allowed(key: ClassKey) -> bool:
            return why_refused(_changed(job.spec, key), job.user, settings, tally) is None

        return alternatives(self.snapshot, settings, job.id, allowed, self.extensions)


def with_job(snapshot: Snapshot, key: ClassKey, newcomer: PendingJob) -> Snapshot:
    """The snapshot with one more job that waits."""
    classes = {waiting.key: waiting for waiting in snapshot.pending}
    before = classes.get(key)
    # Behind a front that is cut short, its turn is beyond what one plan tells anyway.
    jobs = (newcomer,) if before is None else (*before.jobs, newcomer)
    classes[key] = PendingClass(key, jobs, 1 if before is None else before.total + 1)
    ordered = sorted(classes.values(), key=lambda waiting: (waiting.jobs[0].queued_at, waiting.jobs[0].id))
    return replace(snapshot, pending=tuple(ordered))


def _waits(job: Job) -> PendingJob:
    return PendingJob(job.id, job.queued_at)


def _predictor(history: History, find: Callable[[int], Job | None], newcomer: Job | None) -> Predict:
    """Looks jobs up in the daemon's memory as it is when asked; a job that has gone by then is not known."""
    known: dict[int, Prediction | None] = {}

    def predict(job_id: int) -> Prediction | None:
        if job_id not in known:
            job = newcomer if newcomer is not None and newcomer.id == job_id else find(job_id)
            known[job_id] = None if job is None else history.predict(job)
        return known[job_id]

    return predict


def _changed(spec: JobSpec, key: ClassKey) -> JobSpec:
    return replace(
        spec,
        request=key.request,
        queue=key.queue,
        time_limit_s=key.time_limit_s,
        reservation=key.reservation,
    )


def _without(tally: Tally, job: Job) -> Tally:
    """The numbers of jobs without this one, which would move and not come on top."""
    spec = job.spec
    return Tally(
        _less(tally.by_queue, spec.queue),
        _less(tally.by_queue_user, (spec.queue, job.user)),
        _less(tally.by_qos_user, (spec.qos, job.user)),
    )


def _less(counts: Mapping[_Mark, int], mark: _Mark) -> dict[_Mark, int]:
    return {**counts, mark: max(0, counts.get(mark, 0) - 1)}
