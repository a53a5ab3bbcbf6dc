"""Bursting: looks at the expected starts of jobs that may go to Slurm, at intervals and on another thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.forecast import QueueForecast
from gpusched.daemon.verbs.admission import check_handover
from gpusched.errors import GpuschedError
from gpusched.lifecycle import transitions
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobSpec
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.units import format_duration
from gpusched.scheduler.burst import (
    Burst,
    BurstCandidate,
    allows_burst,
    burst_limit_s,
    choose_bursts,
    why_kept,
)

if TYPE_CHECKING:
    from gpusched.daemon.tick import Scheduler

LOOKED_AT = 200
"""Most jobs checked at one look, those that have waited longest."""


class BurstWatch:
    """Finds the jobs to burst at polls; the next tick carries them out."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_looking = False
        self._next_at: float | None = None
        self._kept: dict[int, JobSpec] = {}
        """What Slurm cannot keep, by job, so that it is checked once and takes no place of another."""
        self._settings: Settings | None = None
        """For which that was checked."""

    def poll(self) -> None:
        """Look once per interval, if a job of a queue that bursts is waiting."""
        scheduler, settings = self._scheduler, self._scheduler.settings
        if not any(burst_limit_s(name, settings) is not None for name in settings.queue):
            return
        now = asyncio.get_running_loop().time()
        if self._next_at is None:
            # What runs is not known well right after a start.
            self._next_at = now + settings.burst.interval_s
        if self._is_looking or now < self._next_at or scheduler.handover is None:
            return
        if scheduler.handover.why_not() is not None or not scheduler.history.load_some():
            return
        self._next_at = now + settings.burst.interval_s
        if not any(burst_limit_s(key.queue, settings) is not None for key in scheduler.plan.reasons):
            return
        in_slurm = sum(1 for job in scheduler.state.jobs.values() if job.spec.is_burst)
        if in_slurm >= settings.burst.max_jobs:
            return
        outlook = QueueForecast.of(scheduler)
        candidates = self._candidates(outlook, settings)
        if not candidates:
            return
        look = asyncio.get_running_loop().run_in_executor(None, _look, outlook, candidates, in_slurm)
        look.add_done_callback(self._done)
        self._is_looking = True

    def _candidates(self, outlook: QueueForecast, settings: Settings) -> list[BurstCandidate]:
        jobs, kept = self._scheduler.state.jobs, self._kept
        if settings is not self._settings:
            self._settings, kept = settings, {}
        self._kept = kept = {job_id: spec for job_id, spec in kept.items() if job_id in jobs}
        limits = {waiting.key.queue: burst_limit_s(waiting.key.queue, settings) for waiting in outlook.snapshot.pending}
        waiting_ids = [
            (one.queued_at, one.id)
            for waiting in outlook.snapshot.pending
            if limits[waiting.key.queue] is not None
            for one in waiting.jobs
        ]
        tx = self._scheduler.query_transaction()
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

    def _done(self, looked: asyncio.Future[tuple[Burst, ...]]) -> None:
        self._is_looking = False
        try:
            self._scheduler.decide_step.to_burst = looked.result()
        except asyncio.CancelledError:
            return
        except Exception as error:
            # The jobs wait here meanwhile.
            self._scheduler.failures.note("burst", error)
        else:
            self._scheduler.failures.recovered("burst")


def _look(outlook: QueueForecast, candidates: list[BurstCandidate], in_slurm: int) -> tuple[Burst, ...]:
    starts = outlook.starts([one.job_id for one in candidates])
    return choose_bursts(candidates, starts, outlook.snapshot.now, in_slurm, outlook.settings)


def carry_out(bursts: tuple[Burst, ...], tx: TickTransaction) -> None:
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
