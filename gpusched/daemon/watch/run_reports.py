"""Has running jobs planned to the ends that they report by their progress, as far as such reports were right.

Reports are read between ticks, by the reader that serves clients, and only from runs that have lasted for a while.
Nothing is recorded: a new daemon reads them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpusched.model.job import Job, Run, run_id
from gpusched.model.states import JobState
from gpusched.predict.family import family
from gpusched.predict.reports import ReportTrust

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler
    from gpusched.daemon.watch.progress import ProgressReader

LOOK_S = 20.0
"""Between two looks at all runs."""
LEAST_S = 10.0
"""Run time from which reports count: shorter runs end before anything could be planned by them."""
MOVED_S, MOVED_PART = 30.0, 0.02
"""By less than this, or this part of the remaining time, an end has not moved: each move is a new plan."""
MISSED_S, MISSED_PART = 60.0, 0.1
"""A report is refuted once the run has outlived it by this, and by this part of the reported length."""
MOST_REPORTS = 32
"""Kept per run; beyond it every other one is dropped."""


@dataclass(slots=True)
class _Reported:
    """What a run has reported so far."""

    start_at: float
    """Suspensions excluded."""
    lengths_s: list[float] = field(default_factory=list)
    """Its run time by each report."""

    def add(self, length_s: float) -> None:
        self.lengths_s.append(length_s)
        if len(self.lengths_s) > MOST_REPORTS:
            self.lengths_s = self.lengths_s[1::2]

    def is_refuted(self, elapsed_s: float) -> bool:
        """Whether the run has outlived most of its reports, such as one that is always about to end."""
        refuted = sum(elapsed_s >= one + max(MISSED_S, MISSED_PART * one) for one in self.lengths_s)
        return 2 * refuted > len(self.lengths_s)


class RunReports:
    """Keeps the reported ends of open runs. Args: reader: of their progress."""

    def __init__(self, scheduler: Scheduler, reader: ProgressReader) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._trust = ReportTrust()
        self._reported: dict[str, _Reported] = {}
        """By run."""
        self._next_look = 0.0
        self._look: asyncio.Task[None] | None = None
        scheduler.signals.jobs_changed.connect(self.changed)

    def poll(self) -> None:
        """Look at all runs from time to time."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_look and (self._look is None or self._look.done()):
            self._next_look = loop.time() + LOOK_S
            jobs = self._telling()
            if jobs or self._scheduler.state.reported_ends:
                self._look = loop.create_task(self._refresh(jobs))

    def changed(self, jobs: Mapping[int, Job]) -> None:
        """Called after each commit with the jobs whose rows changed: judge the reports of those that completed."""
        if not self._reported:
            return
        for job in jobs.values():
            found = self._reported.pop(run_id(job.id, job.run), None) if job.state.is_final else None
            if found is not None and job.state is JobState.COMPLETED and job.end_at is not None:
                self._trust.learn(family(job), found.lengths_s, job.end_at - found.start_at)

    def is_refuted(self, job: Job) -> bool:
        """Whether what the current run of a job reports does not count, since it, or others like it, were wrong."""
        one = self._reported.get(run_id(job.id, job.run))
        return one is not None and (
            one.is_refuted(self._scheduler.now() - one.start_at) or not self._trust.is_trusted(family(job))
        )

    def take_in(self, jobs: list[Job]) -> None:
        """Plan by what the reader knows of these running jobs."""
        scheduler = self._scheduler
        now, state = scheduler.now(), scheduler.state
        ends: dict[str, float] = {}
        for job in jobs:
            run = state.open_runs.get(run_id(job.id, job.run))
            if run is not None and run.start_at is not None and job.state is JobState.RUNNING:
                end_at = self._end_of(job, run, run.start_at, now)
                if end_at is not None:
                    ends[run.id] = _steady(state.reported_ends.get(run.id), end_at, now)
        self._reported = {handle: one for handle, one in self._reported.items() if handle in state.open_runs}
        if ends != state.reported_ends:
            state.note_reported_ends(ends)
            scheduler.look_again()

    def _telling(self) -> list[Job]:
        """Jobs that have run long enough to be asked."""
        scheduler = self._scheduler
        if not scheduler.settings.priority.predict:
            return []
        state, before = scheduler.state, scheduler.now() - LEAST_S
        runs = (run for run in state.open_runs.values() if run.start_at is not None and run.start_at <= before)
        jobs = (state.jobs.get(run.job_id) for run in runs)
        return [job for job in jobs if job is not None and job.state is JobState.RUNNING]

    async def _refresh(self, jobs: list[Job]) -> None:
        try:
            await self._reader.refresh(jobs, self._scheduler.state.open_runs)
            self.take_in(jobs)
        except Exception as error:
            self._scheduler.failures.note("progress of runs", error)
        else:
            self._scheduler.failures.recovered("progress of runs")

    def _end_of(self, job: Job, run: Run, start_at: float, now: float) -> float | None:
        """The end to plan a run to; None if it reports none, or none that is to be trusted."""
        shown = self._reader.of(run.id)
        if shown is None or shown.eta_at is None or shown.fraction >= 1 or shown.eta_at <= now:
            return None
        one = self._reported.get(run.id)
        if one is None:
            one = self._reported[run.id] = _Reported(start_at + run.suspended_s)
        one.add(shown.eta_at - one.start_at)
        return None if self.is_refuted(job) else shown.eta_at


def _steady(before_at: float | None, end_at: float, now: float) -> float:
    """The end as it was, unless it has moved."""
    if before_at is None or before_at <= now:
        return end_at
    return before_at if abs(end_at - before_at) < max(MOVED_S, MOVED_PART * (end_at - now)) else end_at
