"""Runs that make room or stand still: what the plan says of them, and what their owners ask for.

Each is recorded. `reconcile` brings the engine in line with the record after the commit, and again after a crash.
"""

from __future__ import annotations

from typing import Any

from gpusched.access import Act, check
from gpusched.errors import Refused
from gpusched.lifecycle import lifecycle, yielding
from gpusched.lifecycle.lifecycle import refuse_to_repeat
from gpusched.model.commands import Caller, Requeue, Resume, Suspend
from gpusched.model.execution import StopOrder, SuspendOrder
from gpusched.model.job import Job
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Plan, Preempt, PreemptMode
from gpusched.model.states import JobState, ReasonCode

from .selection import named
from .turn import Turn

_ACTS = {Suspend: Act.SUSPEND, Resume: Act.RESUME, Requeue: Act.REQUEUE}


def apply(command: Suspend | Resume | Requeue, turn: Turn) -> dict[str, Any]:
    """Apply one command: to all of its jobs or, with an error, to none."""
    jobs = _running_tasks(named(command.caller, _ACTS[type(command)], command.ids, turn), turn)
    if isinstance(command, Suspend):
        return _suspend(jobs, command.caller, turn)
    if isinstance(command, Resume):
        return _resume(jobs, command.caller, turn)
    return _requeue(jobs, command, turn)


def _running_tasks(jobs: list[Job], turn: Turn) -> list[Job]:
    """These jobs, in place of each array its tasks that run. Raises: Refused when an array has none."""
    found: dict[int, Job] = {}
    for job in jobs:
        if not job.is_array:
            found[job.id] = job
            continue
        tasks = [task for task in turn.world.tasks_of(job) if task.state in (JobState.RUNNING, JobState.SUSPENDED)]
        if not tasks:
            raise Refused(f"no task of array {job.shown_id} is running", f"see it with: gq -j {job.shown_id}")
        found.update({task.id: task for task in tasks})
    return list(found.values())


def _suspend(jobs: list[Job], caller: Caller, turn: Turn) -> dict[str, Any]:
    for job in jobs:
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            raise Refused(
                f"job {job.shown_id} is {job.state} and has nothing to suspend",
                _instead(job, "keep it from starting with: gctl hold"),
            )
        if job.suspended_by == "policy":
            raise Refused(
                f"job {job.shown_id} stands still already, to make room, and goes on by itself",
                f"see for whom with: gshow {job.shown_id}",
            )
    changed, unchanged, kept = [], [], []
    for job in jobs:
        if job.state is JobState.SUSPENDED:
            unchanged.append(job.shown_id)
            continue
        changed.append(job.shown_id)
        run = turn.run_of(job)
        if run.gpus:
            kept.append({"id": job.shown_id, "gpus": len(run.gpus)})
        text = f"suspended by {caller.user}; let it go on with: gctl resume {job.shown_id}"
        _stand_still(job, "user", text, turn)
    return {"changed": changed, "unchanged": unchanged, "kept": kept}


def _resume(jobs: list[Job], caller: Caller, turn: Turn) -> dict[str, Any]:
    for job in jobs:
        if job.suspended_by == "policy":
            raise Refused(
                f"job {job.shown_id} stands still to make room ({job.reason_text}) and goes on by itself",
                f"to have it wait in line instead: gctl requeue {job.shown_id}",
            )
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            raise Refused(
                f"job {job.shown_id} is {job.state}, not suspended",
                _instead(job, "see what it waits for with: gq --why"),
            )
    changed, unchanged = [], []
    for job in jobs:
        if job.state is JobState.RUNNING:
            unchanged.append(job.shown_id)
            continue
        changed.append(job.shown_id)
        _go_on(job, f"resumed by {caller.user}", turn)
    return {"changed": changed, "unchanged": unchanged}


def _requeue(jobs: list[Job], command: Requeue, turn: Turn) -> dict[str, Any]:
    caller = command.caller
    for job in jobs:
        if command.hold:
            check(caller, Act.HOLD, job, turn.settings)
        if job.state is JobState.PENDING:
            instead = "keep it from starting with: gctl hold" if command.hold else "see what for with: gq --why"
            raise Refused(f"job {job.shown_id} is {job.state}: it waits already", f"{instead} {job.shown_id}")
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            raise Refused(
                f"job {job.shown_id} is {job.state} and cannot be requeued", f"see it with: gshow {job.shown_id}"
            )
        if job.spec.interactive is not None:
            raise Refused(
                f"job {job.shown_id} is in the foreground: nobody would be at its next run",
                f"end it and start it anew: gcancel {job.shown_id}",
            )
        refuse_to_repeat(job)
        if not job.spec.retry.requeue:
            raise Refused(
                f"job {job.shown_id} was submitted with --no-requeue",
                f"end it and submit it anew: gcancel {job.shown_id}",
            )
    for job in jobs:
        after, story = yielding.requeue(job, turn.now, caller.user, is_owner=caller.uid == job.uid)
        if command.hold and job.hold != "admin":
            after, held = lifecycle.hold(after, turn.now, caller.user, admin=caller.uid != job.uid)
            story = (*story, held)
        turn.put_job(after)
        turn.tell(*story)
    return {"changed": [job.shown_id for job in jobs]}


def _instead(job: Job, while_pending: str) -> str:
    return f"{while_pending} {job.shown_id}" if job.state is JobState.PENDING else f"see it with: gshow {job.shown_id}"


def carry_out(plan: Plan, turn: Turn) -> bool:
    """Record what the plan says of runs. Whether it freed or took anything at once."""
    moved = False
    for resume in plan.resumes:
        job = turn.world.jobs[resume.job_id]
        if job.state is JobState.SUSPENDED:
            _go_on(job, "goes on: there is room again", turn)
            moved = True
    for preempt in plan.preempts:
        moved |= _preempt(preempt, turn)
    return moved


def _preempt(preempt: Preempt, turn: Turn) -> bool:
    """Whether what the job held is free at once."""
    job = turn.world.jobs[preempt.job_id]
    if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        return False
    if preempt.mode == PreemptMode.SUSPEND:
        if job.state is JobState.SUSPENDED:
            return False
        _stand_still(job, "policy", f"{preempt.text}; it goes on by itself", turn)
        return True
    after, story = yielding.preempt(job, turn.now, preempt.text)
    turn.put_job(after)
    turn.tell(*story)
    return False


def _stand_still(job: Job, by: str, text: str, turn: Turn) -> None:
    after, story = yielding.suspend(job, turn.now, by, text)
    turn.put_job(after)
    turn.tell(*story)


def _go_on(job: Job, text: str, turn: Turn) -> None:
    after, run, story = yielding.resume(job, turn.run_of(job), turn.now, text)
    turn.put_job(after)
    turn.put_run(run)
    turn.tell(*story)


def pending_order(
    job: Job, settings: Settings, shutdown_grace_s: float | None = None
) -> StopOrder | SuspendOrder | None:
    """The lasting order that the row of a job with an open run stands for; None: its run is to move.

    Args: shutdown_grace_s: while the machine goes down, the longest grace of any run.
    """
    order = _recorded_order(job, settings)
    if shutdown_grace_s is None:
        return order
    # What is to be cancelled must not come back, as what ends with the machine does.
    is_cancelled = isinstance(order, StopOrder) and order.why == "cancel"
    grace_s = min(_grace_s(job, settings), shutdown_grace_s)
    return StopOrder("cancel" if is_cancelled else "shutdown", grace_s=grace_s)


def _recorded_order(job: Job, settings: Settings) -> StopOrder | SuspendOrder | None:
    grace_s = None
    if job.reason is ReasonCode.GPU_IDLE:
        grace_s = max(settings.idle.notice_s, _grace_s(job, settings))
    if job.cancel_at is not None:
        return StopOrder("cancel", grace_s=grace_s)
    if job.preempt_at is not None:
        return StopOrder("preempt", grace_s=grace_s)
    if job.state is JobState.COMPLETING and job.reason in _STOPPED_FOR:
        return StopOrder(_STOPPED_FOR[job.reason])
    return SuspendOrder() if job.state is JobState.SUSPENDED else None


_STOPPED_FOR = {
    ReasonCode.GPU_MEMORY_OVER: "vram_over",
    ReasonCode.GPU_UNBOOKED_USE: "unbooked_use",
    ReasonCode.GPU_FAILED: "gpu_lost",
}
"""Why a run is ended that is neither cancelled nor makes room."""


def _grace_s(job: Job, settings: Settings) -> float:
    own_s = job.spec.launch.grace_s
    return settings.life.grace_s if own_s is None else own_s
