"""Hold and release jobs."""

from __future__ import annotations

from typing import Any

from gpusched.access import Act, manages
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs.selection import has_ended, named, permitted, select, with_tasks
from gpusched.errors import Forbidden, Refused
from gpusched.lifecycle import transitions
from gpusched.model.commands import Caller, Hold, Release, Selection
from gpusched.model.job import Job
from gpusched.model.states import JobState
from gpusched.model.units import name_some


def apply(command: Hold | Release, tx: TickTransaction) -> dict[str, Any]:
    """Hold or release jobs. The reply's `running` names held jobs whose current run continues."""
    hold, caller = isinstance(command, Hold), command.caller
    jobs = _named(command, tx) if command.filters is None else _filtered(command, command.filters, tx)
    in_slurm = [job.shown_id for job in jobs if hold and job.is_handed_over]
    jobs = [job for job in jobs if not (hold and job.is_handed_over)]
    answer: dict[str, list[str]] = {"changed": [], "unchanged": [], **({"running": []} if hold else {})}
    for job in jobs:
        if not _changes(job, command):
            answer["unchanged"].append(job.shown_id)
            continue
        answer["changed"].append(job.shown_id)
        if hold and job.state is not JobState.PENDING and not job.is_array:
            answer["running"].append(job.shown_id)
        if command.dry_run:
            continue
        if hold:
            tx.put_job(*transitions.hold(job, tx.now, caller.by, admin=caller.uid != job.uid))
        else:
            tx.put_job(*transitions.release(job, tx.now, caller.by))
    if in_slurm:
        # Tasks of an array; a job that is named itself has been refused.
        text = (
            f"{name_some('task', in_slurm)} {'is' if len(in_slurm) == 1 else 'are'} in Slurm and cannot be held there"
        )
        answer["notes"] = [f"{text}; take one back and hold it with: gctl requeue --hold {in_slurm[0]}"]
    return answer


def _act(command: Hold | Release) -> Act:
    return Act.HOLD if isinstance(command, Hold) else Act.RELEASE


def _named(command: Hold | Release, tx: TickTransaction) -> list[Job]:
    caller, hold = command.caller, isinstance(command, Hold)
    found = named(caller, _act(command), command.ids, tx)
    for job in found:
        if job.state.is_final:
            raise has_ended(job)
        if hold and job.is_handed_over:
            raise Refused(
                f"job {job.shown_id} {job.reason_text} and cannot be held there",
                f"take it back and hold it with: gctl requeue --hold {job.shown_id}",
            )
        if hold and job.state is not JobState.PENDING and not job.is_array and not transitions.may_run_again(job):
            raise Refused(
                f"job {job.shown_id} is {job.state} and has no further run to hold",
                f"suspend it with: gctl suspend {job.shown_id}, or end it with: gcancel {job.shown_id}",
            )
    jobs = with_tasks(found, tx)
    for job in jobs:
        if not hold and not _may_release(caller, job, tx):
            raise Forbidden(
                f"job {job.shown_id} was held by an admin or operator, and {caller.user} cannot release it",
                f"see who held it with: gshow {job.shown_id}",
            )
    return jobs


def _filtered(command: Hold | Release, filters: Selection, tx: TickTransaction) -> list[Job]:
    """Matching jobs that would change; omits the rest, which may be a long queue."""
    caller, act = command.caller, _act(command)
    matching, _ = select(filters, tx, caller)
    jobs = with_tasks(permitted(matching, filters, act, caller, tx), tx)
    if isinstance(command, Hold):
        states = filters.states or {JobState.PENDING}
        jobs = [job for job in jobs if job.state in states and not job.is_handed_over]
        jobs = [job for job in jobs if job.state is JobState.PENDING or transitions.may_run_again(job)]
    else:
        jobs = [job for job in jobs if _may_release(caller, job, tx)]
    jobs = [job for job in jobs if _changes(job, command)]
    if not command.dry_run:
        for job in jobs:
            tx.audit(caller, act, job)
    return jobs


def _changes(job: Job, command: Hold | Release) -> bool:
    if isinstance(command, Release):
        return job.hold is not None
    # An admin's hold overrides one by the owner, who could otherwise release the job.
    return job.hold != "admin" and not (job.hold and command.caller.uid == job.uid)


def _may_release(caller: Caller, job: Job, tx: TickTransaction) -> bool:
    return job.hold != "admin" or caller.uid != job.uid or manages(caller, job.spec.queue, tx.settings)
