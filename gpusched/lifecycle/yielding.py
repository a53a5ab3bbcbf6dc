"""Runs that make room for others, and runs that stand still: a decision in, new values out.

As in `lifecycle`, every function returns what becomes of the job with the lines that belong into its story.
"""

from __future__ import annotations

from gpusched.errors import BrokenInvariant
from gpusched.lifecycle.transitions import Step, completing, move, still_s, story_of
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace


def preempt(job: Job, now: float, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Have a job's run make room: it is COMPLETING until the run has ended, and then waits again.

    One that does not accept to be run again ends as PREEMPTED. One that is being ended already is left alone.
    `text` says for whom, in words that follow "preempted: ".
    """
    return _make_room(job, now, ReasonCode.PREEMPTED, text, f"preempted: {text}")


def requeue(job: Job, now: float, by: str, *, is_owner: bool) -> tuple[Job, tuple[JobEvent, ...]]:
    """As `preempt`, for somebody who wants the job to begin anew.

    Where that is its owner, a job with a time limit waits from now on: given back just before its limit, again and
    again, it would go before others by a limit that never ends it.
    """
    text = f"requeued by {by}"
    after, story = _make_room(job, now, ReasonCode.REQUEUED, text, text)
    is_late = is_owner and job.spec.time_limit_s is not None and bool(story)
    return (replace(after, queued_at=now) if is_late else after), story


def requeue_idle(job: Job, now: float, why: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """As `preempt`, for GPUs that do nothing; the job does not go before others when it waits again."""
    return _make_room(job, now, ReasonCode.GPU_IDLE, why, f"is being requeued: {why}")


def cancel_idle(job: Job, now: float, why: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Cancel a job whose GPUs do nothing."""
    if job.state is JobState.COMPLETING:
        return job, ()
    text = f"cancelled by the scheduler: {why}"
    job = replace(completing(job), cancel_at=now, reason=ReasonCode.GPU_IDLE, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", text, job.run),)


def _make_room(job: Job, now: float, reason: ReasonCode, text: str, told: str) -> tuple[Job, tuple[JobEvent, ...]]:
    if job.state is JobState.COMPLETING:
        return job, ()
    job = replace(completing(job), preempt_at=now, reason=reason, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", told, job.run),)


def counts_for_usage(run: Run) -> bool:
    """Whether an ended run is charged: not when the policy took its resources, so that its work was lost.

    A run that its owner had requeued is charged: the time was the owner's to use.
    """
    return run.reason is not ReasonCode.PREEMPTED


def suspend(job: Job, now: float, by: str, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Let a running job stand still. `by` is `user` or `policy`, `text` says why; a second time changes nothing."""
    if job.state is JobState.SUSPENDED:
        return job, ()
    reason = ReasonCode.PREEMPTED if by == "policy" else None
    job = replace(move(job, JobState.SUSPENDED), suspended_at=now, suspended_by=by, reason=reason, reason_text=text)
    return job, (JobEvent(job.id, now, "suspended", text, job.run),)


def resume(job: Job, run: Run, now: float, text: str) -> Step:
    """Let a job that stands still go on. The run's account of it is put right when the engine has told."""
    if job.state is not JobState.SUSPENDED:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot go on ({story_of(job)})")
    run = replace(run, suspended_s=run.suspended_s + still_s(job, now))
    job = replace(move(job, JobState.RUNNING), suspended_at=None, suspended_by=None, reason=None, reason_text=None)
    return job, run, (JobEvent(job.id, now, "resumed", text, run.number),)
