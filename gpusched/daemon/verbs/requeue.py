"""Requeue jobs: end their runs and return them to the queue."""

from __future__ import annotations

from typing import Any

from gpusched.access import Act, check
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs.selection import named, running_tasks
from gpusched.errors import Refused
from gpusched.lifecycle import transitions
from gpusched.lifecycle.transitions import refuse_to_repeat
from gpusched.model.commands import Requeue
from gpusched.model.job import Job
from gpusched.model.states import JobState


def apply(command: Requeue, tx: TickTransaction) -> dict[str, Any]:
    """Requeue all of the jobs or, with an error, none."""
    caller = command.caller
    jobs = running_tasks(named(caller, Act.REQUEUE, command.ids, tx), tx, or_in_slurm=True)
    for job in jobs:
        if command.hold:
            check(caller, Act.HOLD, job, tx.settings)
        _check(job, command)
    for job in jobs:
        after, story = transitions.requeue(job, tx.now, caller.by, is_owner=caller.uid == job.uid)
        if command.hold and job.hold != "admin":
            after, held = transitions.hold(after, tx.now, caller.by, admin=caller.uid != job.uid)
            story = (*story, held)
        tx.put_job(after, *story)
    return {"changed": [job.shown_id for job in jobs]}


def _check(job: Job, command: Requeue) -> None:
    shown = job.shown_id
    if job.state is JobState.PENDING and not job.is_handed_over:
        instead = "keep it from starting with: gctl hold" if command.hold else "see why with: gq --why"
        raise Refused(f"job {shown} is {job.state}: it is already pending", f"{instead} {shown}")
    if job.state not in (JobState.RUNNING, JobState.SUSPENDED) and not job.is_handed_over:
        raise Refused(f"job {shown} is {job.state} and cannot be requeued", f"see it with: gshow {shown}")
    if job.spec.interactive is not None:
        raise Refused(
            f"job {shown} runs in the foreground: its next run would have no terminal",
            f"end it and start it again: gcancel {shown}",
        )
    refuse_to_repeat(job)
    if not job.spec.retry.requeue:
        raise Refused(f"job {shown} was submitted with --no-requeue", f"end it and submit it again: gcancel {shown}")
