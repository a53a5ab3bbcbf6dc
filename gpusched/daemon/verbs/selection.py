"""Select the jobs of a command and check the caller's rights: steps that the verbs share."""

from __future__ import annotations

from gpusched.access import Act, check, hides, is_admin, is_operator, is_private, may, no_job
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.errors import Forbidden, NotFound, Refused
from gpusched.model.commands import Caller, Selection
from gpusched.model.job import Job
from gpusched.model.states import JobState
from gpusched.model.units import printable
from gpusched.ports import JobFilter


def select(selection: Selection, tx: TickTransaction, caller: Caller) -> tuple[list[Job], list[int]]:
    """Jobs of a selection (ended ones only if named by id), and ids that do not exist or are hidden from the caller."""
    state = tx.state
    if selection.ids:
        found = {job_id: job for job_id in selection.ids if (job := state.find(job_id)) is not None}
        gone = [job_id for job_id in selection.ids if job_id not in found]
        found.update({job.id: job for job in tx.jobs(JobFilter(ids=frozenset(gone)))})
        hidden = [job_id for job_id, job in found.items() if hides(caller, job, tx.settings)]
        for job_id in hidden:
            tx.audit_hidden(caller, found.pop(job_id))
        missing = [job_id for job_id in selection.ids if job_id not in found]
        jobs = [found[job_id] for job_id in dict.fromkeys(selection.ids) if job_id in found]
    else:
        missing = []
        # An array means its tasks.
        jobs = [job for job in state.jobs.values() if job.array_id is None or selection.states]
        jobs.sort(key=lambda job: job.id)
    return [job for job in jobs if matches(job, selection, state)], missing


def matches(job: Job, selection: Selection, state: DaemonState) -> bool:
    """Whether the filters of a selection cover a job."""
    return (
        (not selection.users or job.user in selection.users)
        and (not selection.queues or job.spec.queue in selection.queues)
        and (not selection.names or job.is_named(selection.names, state.jobs))
        and (not selection.states or job.state in selection.states)
    )


def with_tasks(jobs: list[Job], tx: TickTransaction) -> list[Job]:
    """These jobs, each array followed by its tasks that have rows and have not ended, without duplicates."""
    found: dict[int, Job] = {}
    for job in jobs:
        found[job.id] = job
        if job.is_array:
            found.update({task.id: task for task in tx.state.tasks_of(job)})
    return list(found.values())


def no_job_for(caller: Caller, job_id: int, tx: TickTransaction) -> NotFound:
    """The error for an unknown job; where jobs are hidden, the same for a pruned job as for a hidden one."""
    return no_job(job_id, 0 if is_private("jobs", caller, tx.settings) else tx.state.next_id)


def named(caller: Caller, act: Act, ids: tuple[int, ...], tx: TickTransaction) -> list[Job]:
    """The named jobs, on which the caller may act. Raises: Forbidden, NotFound, before any is changed."""
    jobs, missing = select(Selection(ids=ids), tx, caller)
    if missing:
        raise no_job_for(caller, missing[0], tx)
    for job in jobs:
        check(caller, act, job, tx.settings)
    for job in jobs:
        tx.audit(caller, act, job)
    return jobs


def permitted(jobs: list[Job], selection: Selection, act: Act, caller: Caller, tx: TickTransaction) -> list[Job]:
    """Jobs that a filter covers: the caller's own, or those of named users on which the caller may act.

    Raises: Forbidden if it names other users and the caller has no rights over their jobs.
    """
    others = sorted(selection.users - {caller.user})
    if not others:
        return [job for job in jobs if job.uid == caller.uid]
    settings = tx.settings
    if not (is_admin(caller, settings) or is_operator(caller, settings)):
        raise Forbidden(
            f"only an admin or an operator may {act} jobs of {printable(others[0], 60)}, not {caller.user}",
            "leave -u out for your own jobs",
        )
    return [job for job in jobs if may(caller, act, job, settings)]


def has_ended(job: Job) -> Refused:
    return Refused(f"job {job.shown_id} has ended ({job.state})", f"see it with: gshow {job.shown_id}")


def running_tasks(jobs: list[Job], tx: TickTransaction, *, or_in_slurm: bool = False) -> list[Job]:
    """These jobs, with each array replaced by its running tasks. Raises: Refused for an array without any.

    Args: or_in_slurm: also tasks that wait in Slurm.
    """
    found: dict[int, Job] = {}
    for job in jobs:
        if not job.is_array:
            found[job.id] = job
            continue
        tasks = [
            task
            for task in tx.state.tasks_of(job)
            if task.state in (JobState.RUNNING, JobState.SUSPENDED) or (or_in_slurm and task.is_handed_over)
        ]
        if not tasks:
            raise Refused(f"no task of array {job.shown_id} is running", f"see it with: gq -j {job.shown_id}")
        found.update({task.id: task for task in tasks})
    return list(found.values())
