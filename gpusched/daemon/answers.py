"""Answers about jobs from what the scheduler knows: why they wait, in which order, at which place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpusched.daemon.decide_step import StartWait
from gpusched.daemon.launch.environment import checkpoint_folder
from gpusched.daemon.reasons import waiting_codes, waiting_reason, waiting_reasons
from gpusched.engine.spool import attach_path
from gpusched.model.job import Job, run_id, split_run_id
from gpusched.model.mentions import Knows
from gpusched.model.snapshot import Reason
from gpusched.model.states import JobState, ReasonCode

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

_MANY = 100
"""For this many jobs, the whole queue is sorted at once."""


class JobAnswers:
    """They change nothing, and stand for the instant at which they are given."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def reason_for(self, job: Job) -> Reason | None:
        """Why a pending job is waiting, or why nothing is known of a running one; None for any other job."""
        return self.reasons()(job)

    def reasons(self, knows: Knows | None = None) -> Callable[[Job], Reason | None]:
        """`reason_for` as of now, for whole lists: the reason of each class is looked up once.

        Args: knows: the texts of these are rendered for a viewer; others, and without it all, are as they were written.
        """
        scheduler = self._scheduler
        now, waits, plan = scheduler.now(), self._starts_that_wait(), scheduler.plan
        reason_of = waiting_reasons(scheduler.state, plan, now, knows)

        def reason(job: Job) -> Reason | None:
            nonlocal plan, reason_of
            if plan is not scheduler.plan:
                # A long list is made in turns with ticks.
                plan = scheduler.plan
                reason_of = waiting_reasons(scheduler.state, plan, now, knows)
            if job.state is not JobState.PENDING:
                run = scheduler.state.open_runs.get(run_id(job.id, job.run))
                if run is None:
                    return None
                return scheduler.outages.reason(run, scheduler.leases.decided_at(job, run, now))
            if job.spec.is_for_slurm and (said := self._of_handover(job)) is not None:
                return said
            wait = waits.get(job.id)
            return reason_of(job) if wait is None else wait.reason(scheduler.cluster, now)

        return reason

    def reason_codes(self) -> Callable[[Job], ReasonCode]:
        """A function that gives the current reason codes of pending jobs."""
        scheduler = self._scheduler
        code_of = waiting_codes(scheduler.state, scheduler.plan, scheduler.now())
        waits = self._starts_that_wait()
        return (lambda job: ReasonCode.NONE if job.id in waits else code_of(job)) if waits else code_of

    def _starts_that_wait(self) -> Mapping[int, StartWait]:
        """Starts that await readings, by job, and by array for that of one of its tasks."""
        scheduler = self._scheduler
        waits = scheduler.decide_step.waits
        arrays = {
            array_id: wait for job_id, wait in waits.items() if (array_id := scheduler.state.arrays.array_of(job_id))
        }
        return {**arrays, **waits}

    def _of_handover(self, job: Job) -> Reason | None:
        """Why a job is not running that is handed over, as the other scheduler says now; None if nothing is known."""
        scheduler = self._scheduler
        if job.is_handed_over:
            text = None if scheduler.handover is None else scheduler.handover.status(run_id(job.id, job.run))
            run = scheduler.state.open_runs.get(run_id(job.id, job.run))
            facts = {} if run is None or run.native is None else {"native_id": run.native.id}
            return None if text is None else Reason(ReasonCode.HANDED_OVER, text, facts)
        found = waiting_reason(job, scheduler.state, scheduler.plan, scheduler.now())
        if found.code is not ReasonCode.HANDED_OVER or scheduler.handover is None:
            return found
        why = scheduler.handover.why_not()
        return found if why is None else Reason(found.code, f"cannot be handed over: {why}")

    def position(self, job: Job) -> int:
        """Number of jobs ahead of this one with the same request and owner."""
        state = self._scheduler.state
        return 0 if state.class_of(job.id) is None else state.position_in_class(job)

    def in_queue_order(self, jobs: Iterable[Job]) -> list[Job]:
        """Running jobs by id, then eligible ones in the order of the next tick, then those that cannot start yet."""
        state, jobs = self._scheduler.state, list(jobs)
        if len(jobs) >= _MANY:
            found, left = self._by_class(jobs)
            # Classes tell nothing of tasks without a row.
            if all(state.class_of(job_id) is None for job_id in left):
                return found
        queue = self._scheduler.planner().state.queue

        def place(job: Job) -> tuple[Any, ...]:
            if job.state is not JobState.PENDING:
                return 3 if job.state.is_final else 0, job.id
            key = state.class_of(job.id)
            if key is None:
                return 2, job.id
            return 1, queue.rank(queue.class_of_key(key), job.queued_at, job.id)

        return sorted(jobs, key=place)

    def active_in_order(self) -> list[Job]:
        """All active jobs, as `in_queue_order` puts them, without a look at each pending one."""
        return self._by_class(self._scheduler.state.jobs.values())[0]

    def _by_class(self, jobs: Iterable[Job]) -> tuple[list[Job], Collection[int]]:
        """Jobs in the order of the queue's classes, and the ids of pending ones that are in none of them."""
        scheduler = self._scheduler
        waiting: dict[int, Job] = {}
        others = []
        for job in jobs:
            if job.state is JobState.PENDING:
                waiting[job.id] = job
            else:
                others.append(job)
        others.sort(key=lambda job: (job.state.is_final, job.id))
        last = bisect_left(others, True, key=lambda job: job.state.is_final)
        in_line = scheduler.planner().state.queue.merged(scheduler.state.eligible.entries())
        eligible = [waiting.pop(job_id) for job_id in in_line if job_id in waiting]
        return [*others[:last], *eligible, *(waiting[job_id] for job_id in sorted(waiting)), *others[last:]], waiting

    def name_of_run(self, handle: str) -> str:
        """User-visible id of the job of a run, by the run's handle."""
        return self._scheduler.state.name_of(split_run_id(handle)[0])

    def files_of(self, run: str) -> tuple[str, ...]:
        """Files that show activity of an open run: its logs, its checkpoint folder, and the attach socket, whose
        timestamp follows typed input.
        """
        scheduler = self._scheduler
        found = scheduler.state.open_runs.get(run)
        if found is None:
            return ()
        job = scheduler.state.jobs[found.job_id]
        folder = checkpoint_folder(job, scheduler.head.site, scheduler.settings)
        has_socket = job.spec.interactive is not None and scheduler.head.site.spool
        typed = attach_path(scheduler.head.site.spool, run) if has_socket else None
        paths = (found.stdout_path, found.stderr_path, folder, typed)
        return tuple(path for path in paths if path is not None)
