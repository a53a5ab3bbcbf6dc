"""Suspend running jobs, which keep their resources, and resume them."""

from __future__ import annotations

from typing import Any

from gpusched.access import Act
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs.selection import named, running_tasks
from gpusched.errors import Refused
from gpusched.model.commands import Resume, Suspend
from gpusched.model.job import Job
from gpusched.model.states import JobState


def suspend(command: Suspend, tx: TickTransaction) -> dict[str, Any]:
    """Suspend all of the jobs or, with an error, none. The reply's `kept`: the GPUs that they keep."""
    jobs = running_tasks(named(command.caller, Act.SUSPEND, command.ids, tx), tx)
    for job in jobs:
        refuse_in_slurm(job, "suspended")
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            raise Refused(
                f"job {job.shown_id} is {job.state} and cannot be suspended",
                _instead(job, "keep it from starting with: gctl hold"),
            )
        if job.suspended_by == "policy":
            raise Refused(
                f"job {job.shown_id} is already suspended to make room, and resumes by itself",
                f"see for which job with: gshow {job.shown_id}",
            )
    suspended = [job for job in jobs if job.state is not JobState.SUSPENDED]
    kept = []
    for job in suspended:
        if gpus := tx.run_of(job).gpus:
            kept.append({"id": job.shown_id, "gpus": len(gpus)})
        tx.suspend(job, "user", f"suspended by {command.caller.by}; resume it with: gctl resume {job.shown_id}")
    return {**_answer(jobs, suspended), "kept": kept}


def refuse_in_slurm(job: Job, what: str) -> None:
    """Refuse what cannot be done to a job while another scheduler has it. Raises: Refused."""
    if job.spec.is_for_slurm and job.is_handed_over_or_runs and not job.is_array:
        raise Refused(
            f"job {job.shown_id} is in Slurm, where it cannot be {what} from here",
            f"see its id there with: gshow {job.shown_id}, or take it back with: gctl requeue --hold {job.shown_id}",
        )


def resume(command: Resume, tx: TickTransaction) -> dict[str, Any]:
    """Resume all of the jobs or, with an error, none."""
    jobs = running_tasks(named(command.caller, Act.RESUME, command.ids, tx), tx)
    for job in jobs:
        if job.suspended_by == "policy":
            raise Refused(
                f"job {job.shown_id} is suspended to make room ({job.reason_text}) and resumes by itself",
                f"to return it to the queue instead: gctl requeue {job.shown_id}",
            )
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            raise Refused(
                f"job {job.shown_id} is {job.state}, not suspended",
                _instead(job, "see what it waits for with: gq --why"),
            )
    resumed = [job for job in jobs if job.state is not JobState.RUNNING]
    for job in resumed:
        tx.resume(job, f"resumed by {command.caller.by}")
    return _answer(jobs, resumed)


def _answer(jobs: list[Job], changed: list[Job]) -> dict[str, Any]:
    ids = {job.id for job in changed}
    return {
        "changed": [job.shown_id for job in changed],
        "unchanged": [job.shown_id for job in jobs if job.id not in ids],
    }


def _instead(job: Job, while_pending: str) -> str:
    return f"{while_pending} {job.shown_id}" if job.state is JobState.PENDING else f"see it with: gshow {job.shown_id}"
