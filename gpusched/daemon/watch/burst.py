"""Jobs that go to Slurm: which ones burst, by looks at expected starts, and the handover of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.forecast import QueueForecast
from gpusched.daemon.verbs.admission import check_handover
from gpusched.daemon.watch.looks import BackgroundLook
from gpusched.daemon.watches import Watch
from gpusched.errors import GpuschedError
from gpusched.lifecycle import run_transitions, transitions
from gpusched.lifecycle.output_paths import output_paths
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobSpec
from gpusched.model.settings import Settings
from gpusched.model.spec import SLURM_ENGINE
from gpusched.model.states import JobState
from gpusched.model.units import format_duration
from gpusched.scheduler.burst import Burst, BurstCandidate, allows_burst, burst_limit_s, choose_bursts, why_kept

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

_HANDED_OVER_PER_TICK = 200
LOOKED_AT = 200
"""Most jobs checked at one look, those that have waited longest."""


class BurstWatch:
    """Finds the jobs to burst at polls; the next tick carries them out."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._look: BackgroundLook[tuple[Burst, ...]] = BackgroundLook("burst", scheduler.failures)
        self._has_rested = False
        self._kept: dict[int, JobSpec] = {}
        """What Slurm cannot keep, by job, so that it is checked once and takes no place of another."""
        self._settings: Settings | None = None
        """For which that was checked."""

    def poll(self) -> None:
        """Look once per interval, if a job of a queue that bursts is waiting."""
        scheduler, settings = self._scheduler, self._scheduler.settings
        if not any(burst_limit_s(name, settings) is not None for name in settings.queue):
            return
        if not self._has_rested:
            # What runs is not known well right after a start.
            self._has_rested = True
            self._look.rest(settings.burst.interval_s)
        if not self._look.is_due() or scheduler.handover is None:
            return
        if scheduler.handover.why_not() is not None or not scheduler.history.load_some():
            return
        self._look.rest(settings.burst.interval_s)
        if not any(burst_limit_s(key.terms.queue, settings) is not None for key in scheduler.plan.reasons):
            return
        in_slurm = sum(1 for job in scheduler.state.jobs.values() if job.spec.is_burst)
        if in_slurm >= settings.burst.max_jobs:
            return
        outlook = QueueForecast.of(scheduler)
        candidates = self._candidates(outlook, settings)
        if candidates:
            self._look.begin(scheduler.handovers.take, _look, outlook, candidates, in_slurm)

    def _candidates(self, outlook: QueueForecast, settings: Settings) -> list[BurstCandidate]:
        jobs, kept = self._scheduler.state.jobs, self._kept
        if settings is not self._settings:
            self._settings, kept = settings, {}
        self._kept = kept = {job_id: spec for job_id, spec in kept.items() if job_id in jobs}
        queues = {waiting.key.terms.queue for waiting in outlook.snapshot.pending}
        limits = {queue: burst_limit_s(queue, settings) for queue in queues}
        waiting_ids = [
            (one.queued_at, one.id)
            for waiting in outlook.snapshot.pending
            if limits[waiting.key.terms.queue] is not None
            for one in waiting.jobs
        ]
        tx = self._scheduler.transaction(self._scheduler.now(), is_query=True)
        found: list[BurstCandidate] = []
        fit: set[int] = set()
        checked = 0
        for queued_at, job_id in sorted(waiting_ids):
            # A task without a row is as its array.
            job = jobs.get(job_id) or self._scheduler.state.array_of_unsplit(job_id)
            if job is None or not allows_burst(job.spec, settings) or kept.get(job.id) is job.spec:
                continue
            if checked >= LOOKED_AT:
                break
            checked += 1
            limit_s = limits[job.spec.queue]
            if job.id not in fit and why_not_burst(job, tx) is not None:
                kept[job.id] = job.spec
            elif limit_s is not None:
                fit.add(job.id)
                found.append(BurstCandidate(job_id, queued_at, limit_s))
        return found


def _look(outlook: QueueForecast, candidates: list[BurstCandidate], in_slurm: int) -> tuple[Burst, ...]:
    starts = outlook.starts([one.job_id for one in candidates])
    return choose_bursts(candidates, starts, outlook.snapshot.now, in_slurm, outlook.settings)


class Handovers(Watch):
    """Hands eligible jobs over to the scheduler that they are for, those to burst included."""

    name = "handover"

    def __init__(self, is_going_down: Callable[[], bool]) -> None:
        self._is_going_down = is_going_down
        self._bursts: tuple[Burst, ...] = ()

    def take(self, bursts: tuple[Burst, ...]) -> None:
        """Have the next tick make these jobs and tasks ones for Slurm."""
        self._bursts = bursts

    def carry_out(self, tx: TickTransaction) -> None:
        if self._is_going_down() or tx.handover is None or tx.handover.why_not() is not None:
            return
        if self._bursts:
            tx.restore_if_dropped(self, "_bursts")
            bursts, self._bursts = self._bursts, ()
            _burst(bursts, tx)
        for job in tx.state.to_hand_over(_HANDED_OVER_PER_TICK):
            paths = output_paths(job, job.run + 1, tx.handover.node, tx.settings.default.output)
            tx.put(*run_transitions.hand_over(job, SLURM_ENGINE, tx.handover.node, tx.now, *paths))


def _burst(bursts: tuple[Burst, ...], tx: TickTransaction) -> None:
    """Make these jobs and tasks ones for Slurm, if they still wait and Slurm can keep them."""
    for burst in bursts:
        job = tx.state.find(burst.job_id)
        if job is None or job.state is not JobState.PENDING or tx.state.class_of(job.id) is None:
            continue
        if burst_limit_s(job.spec.queue, tx.settings) is None or not allows_burst(job.spec, tx.settings):
            continue
        if why_not_burst(job, tx) is None:
            after, event = transitions.burst(job, tx.now, burst.text)
            tx.put_job(after, event)


def why_not_burst(job: Job, tx: TickTransaction) -> str | None:
    """Why Slurm cannot get a job, in words; None if it can."""
    kept = why_kept(job)
    if kept is not None:
        return kept
    try:
        check_handover(job.spec, Caller(job.uid, job.user), tx)
    except GpuschedError as error:
        return error.message
    return None


def burst_text(job: Job, tx: TickTransaction) -> str | None:
    """What `gq --why` says of a pending job in a queue that bursts; None for any other job."""
    limit_s = burst_limit_s(job.spec.queue, tx.settings)
    if limit_s is None or job.spec.is_for_slurm or job.state is not JobState.PENDING:
        return None
    if not allows_burst(job.spec, tx.settings):
        return (
            None
            if job.spec.burst is None
            else "is not handed over to Slurm: it was submitted with --no-burst, or requeued from there"
        )
    why = why_not_burst(job, tx)
    if why is not None:
        return f"is not handed over to Slurm: {why}"
    return f"is handed over to Slurm if its expected start stays more than {format_duration(limit_s)} away"
