"""Cancel or signal jobs, and end foreground jobs whose client is gone."""

from __future__ import annotations

from signal import SIGCONT
from typing import Any

from gpusched.access import Act, check, hides
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs.batch import cut_short
from gpusched.daemon.verbs.selection import no_job_for, permitted, select
from gpusched.errors import Refused
from gpusched.lifecycle import transitions
from gpusched.lifecycle.pipelines import step_ids
from gpusched.model.commands import Caller, Cancel, LoseClients, Selection
from gpusched.model.execution import SignalOrder
from gpusched.model.job import ClientProcess, Job
from gpusched.model.pipeline import pipeline_id
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports import JobFilter


def apply(command: Cancel, tx: TickTransaction) -> dict[str, Any]:
    """Cancel or signal jobs; return the ids by result: cancelled, signalled, ended before, missing."""
    selection = _with_steps(command.selection, command.caller, tx)
    caller, act = command.caller, Act.CANCEL if command.signal is None else Act.SIGNAL
    is_alone = len(selection.ids) == 1
    jobs, missing = select(selection, tx, caller)
    if selection.ids:
        for job in jobs:
            check(caller, act, job, tx.settings)
        if missing and is_alone:
            raise no_job_for(caller, missing[0], tx)
    else:
        jobs = permitted(jobs, selection, act, caller, tx)
        if command.signal is None and not command.dry_run:
            cut_short(selection, caller, tx)
    if not command.dry_run:
        for job in jobs:
            tx.audit(caller, act, job)
    answer: dict[str, Any] = {"cancelled": [], "signalled": [], "ended": [], "missing": [str(one) for one in missing]}
    for job in jobs:
        if job.state.is_final:
            answer["ended"].append(job.shown_id)
        elif command.signal is None:
            answer["cancelled"].append(job.shown_id)
            if not command.dry_run:
                tx.cancel(job, by=caller.by, user=caller.user)
        else:
            order = SignalOrder(command.signal, command.to)
            runs = _signalled(job, order, tx, is_alone=is_alone)
            answer["signalled"] += [one.shown_id for one in runs]
            if not command.dry_run:
                for one in runs:
                    tx.signal(tx.run_of(one).id, order)
    return answer


def _signalled(job: Job, order: SignalOrder, tx: TickTransaction, *, is_alone: bool) -> list[Job]:
    """Jobs that get the signal: this one, or the running tasks of an array.

    Raises: Refused if there are none and the command names no other job.
    """
    tasks = tx.state.tasks_of(job) if job.is_array else [job]
    signalled = [one for one in tasks if one.state is JobState.RUNNING]
    if not job.is_array and job.state is JobState.SUSPENDED and order.signal != SIGCONT:
        signalled = [job]
    if signalled or not is_alone:
        return signalled
    if job.is_array:
        raise Refused(
            f"no task of array {job.id} is running, so there is no process to signal",
            f"end it with: gcancel {job.id}",
        )
    if job.state is JobState.SUSPENDED:
        raise Refused(
            f"job {job.shown_id} is suspended, and a signal does not resume it",
            f"see why with: gq --why {job.shown_id}, or resume it with: gctl resume {job.shown_id}",
        )
    raise Refused(
        f"job {job.shown_id} is {job.state} and has no process to signal",
        f"end it with: gcancel {job.shown_id}",
    )


def _with_steps(selection: Selection, caller: Caller, tx: TickTransaction) -> Selection:
    """Resolve pipelines to job ids, in the tick, so as to include the fallback of a step that has just failed."""
    ids = list(selection.ids)
    for number in sorted(selection.pipelines):
        jobs = tx.jobs(JobFilter(pipelines=frozenset({pipeline_id(number)})))
        for job in [job for job in jobs if hides(caller, job, tx.settings)]:
            tx.audit_hidden(caller, job)
            jobs.remove(job)
        ids += step_ids(number, jobs, unfinished=True)
    return replace(selection, ids=tuple(dict.fromkeys(ids)))


def lose_clients(command: LoseClients, tx: TickTransaction) -> dict[str, Any]:
    """End pending jobs whose client is gone; supervisors notice it for running ones."""
    for job_id in command.ids:
        job = tx.state.jobs.get(job_id)
        if job is not None and (client := awaited(job)) is not None:
            text = f"its client, process {client.pid}, was gone before the job began"
            after, events = transitions.give_up(job, tx.now, ReasonCode.CLIENT_LOST, text)
            tx.put_job(after, *events)
    return {}


def awaited(job: Job) -> ClientProcess | None:
    """The process that must be alive for this job to start; None if there is none."""
    foreground = job.spec.interactive
    if job.state is not JobState.PENDING or foreground is None or foreground.keep:
        return None
    return foreground.client
