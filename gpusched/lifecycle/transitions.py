"""Life cycle of a job: events in, new values out.

Every function takes values and returns new ones, with events for the job's history. What happens to runs is in
`run_transitions`; here is what people, the policy and time do to jobs. `TRANSITIONS` lists every legal
move; any other raises BrokenInvariant. Final states never change. A SUSPENDED run may end in every way that a RUNNING
one may.

                          SUSPENDED
                           ^     |
                      suspend   resume
                           |     v
    PENDING ----start----> RUNNING ----stop, preempt, leftovers, GPUs not clean----> COMPLETING
       ^                      |                                                          |
       |                      +------------------> finish <------------------------------+
       |                                             |
       +--- retry, requeue, never started -----------+----> a final state
"""

from __future__ import annotations

from gpusched.errors import BrokenInvariant, Refused
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobEvent, JobSpec, RetryRule, Run
from gpusched.model.settings import Settings
from gpusched.model.spec import SLURM_ENGINE
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.units import format_duration
from gpusched.model.value import replace
from gpusched.model.variants import pending_again

Step = tuple[Job, Run, tuple[JobEvent, ...]]
"""A job and its run after an event, with the new events of the job's history."""

_ENDS = (
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.OUT_OF_MEMORY,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
)

LIVE = (JobState.RUNNING, JobState.SUSPENDED)
"""States with a run that is not being ended."""

TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (JobState.PENDING, JobState.RUNNING),
        (JobState.PENDING, JobState.CANCELLED),
        (JobState.PENDING, JobState.COMPLETING),
        (JobState.PENDING, JobState.DEADLINE),
        (JobState.RUNNING, JobState.SUSPENDED),
        (JobState.SUSPENDED, JobState.RUNNING),
        *((live, JobState.COMPLETING) for live in LIVE),
        *((live, JobState.PENDING) for live in (*LIVE, JobState.COMPLETING)),
        *((live, end) for live in (*LIVE, JobState.COMPLETING) for end in _ENDS),
    }
)


def check_transition(job: Job, to: JobState) -> None:
    """Raises: BrokenInvariant, with the job's details, for an illegal move."""
    if (job.state, to) not in TRANSITIONS:
        raise BrokenInvariant(f"job {job.id} cannot go from {job.state} to {to} ({story_of(job)})")


def story_of(job: Job) -> str:
    """Details of the job for a broken invariant."""
    parts = [f"submitted at {job.submit_at:.3f}", f"run {job.run}"]
    for name in ("start_at", "end_at", "cancel_at", "hold", "exit_code", "signal", "reason"):
        value = getattr(job, name)
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join([*parts, f"failures {job.failures}", f"requeues {job.requeues}"])


def check_open(job: Job, run: Run) -> None:
    """Raises: BrokenInvariant if this is not the open run of the job."""
    is_current = run.job_id == job.id and run.number == job.run
    has_run = job.state in (*LIVE, JobState.COMPLETING) or job.is_handed_over
    if not is_current or not has_run or run.state is RunState.ENDED:
        raise BrokenInvariant(f"run {run.id} ({run.state}) has news, but job {job.id} is {job.state} ({story_of(job)})")


def move(job: Job, to: JobState) -> Job:
    """The job in another state; pending again, it may start with each of its variants. Raises: BrokenInvariant."""
    check_transition(job, to)
    if to is JobState.PENDING:
        job = pending_again(job)
    return replace(job, state=to)


def completing(job: Job) -> Job:
    """Move a job to COMPLETING; a suspended run is resumed for its end.

    `suspended_by` is kept, as a job suspended to make room no longer has cores of its own.
    """
    by = "policy" if job.suspended_by == "policy" else None
    return replace(move(job, JobState.COMPLETING), suspended_at=None, suspended_by=by)


def still_s(job: Job, now: float) -> float:
    """Length of the run's current suspension, in seconds."""
    return 0.0 if job.suspended_at is None else max(0.0, now - job.suspended_at)


_ONCE = RetryRule(requeue=False)
"""For adopted jobs, which cannot be restarted."""


def burst(job: Job, now: float, text: str) -> tuple[Job, JobEvent]:
    """Make a pending job one for Slurm, where it stays through retries, until a person requeues it."""
    if job.state is not JobState.PENDING or job.is_handed_over:
        raise BrokenInvariant(f"job {job.id} cannot burst while it is {job.state} ({story_of(job)})")
    return replace(job, spec=replace(job.spec, engine=SLURM_ENGINE, burst=True)), JobEvent(job.id, now, "note", text)


def cancel(job: Job, now: float, by: str, user: str = "root") -> tuple[Job, tuple[JobEvent, ...]]:
    """End a pending job at once; mark a job with a run, which is COMPLETING until the run has ended.

    A second cancel has no effect. Args: by: who did so and how, as stories tell it; user: who did so.
    """
    text = f"cancelled by {by}"
    code = ReasonCode.CANCELLED_BY_USER
    if job.state is JobState.PENDING and not job.is_handed_over:
        job = move(job, JobState.CANCELLED)
        job = replace(job, end_at=now, reason=code, reason_text=text, cancelled_by=user)
        return job, (JobEvent(job.id, now, "ended", f"{job.state}: {text}"),)
    if job.cancel_at is not None and job.state is JobState.COMPLETING:
        return job, ()
    if job.state is not JobState.COMPLETING:
        job = completing(job)
    job = replace(job, cancel_at=now, reason=code, reason_text=text, cancelled_by=user)
    return job, (JobEvent(job.id, now, "stopping", text, job.run),)


def lose_gpu(job: Job, now: float, lost: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Order the end of a run on a lost GPU, named by `lost`. No effect if it is already being ended."""
    if job.state not in LIVE:
        return job, ()
    text = f"lost {lost}"
    job = replace(completing(job), reason=ReasonCode.GPU_FAILED, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", f"is being ended: it {text}", job.run),)


def ends_unsatisfied(spec: JobSpec, settings: Settings, *, is_spared: bool = False) -> bool:
    """Whether a job whose dependency can never be satisfied is ended rather than left pending until it is changed.

    A pipeline step that `is_spared`, because others succeeded, needs no repair and would keep the pipeline from
    ending.
    """
    if is_spared and spec.step is not None and spec.never_satisfied is None:
        return True
    return (spec.never_satisfied or settings.life.never_satisfied) == "cancel"


def give_up(job: Job, now: float, code: ReasonCode, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Cancel a pending job for a reason other than a user's request."""
    if job.state is not JobState.PENDING:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot be given up ({story_of(job)})")
    job = replace(move(job, JobState.CANCELLED), end_at=now, reason=code, reason_text=text)
    return job, (JobEvent(job.id, now, "ended", f"{job.state}: {text}"),)


def last_start_at(job: Job) -> float | None:
    """Latest start of a pending job that meets its deadline, by its time limit; None without a constraint."""
    if job.state is not JobState.PENDING or job.spec.deadline_at is None or job.is_handed_over:
        return None
    return job.spec.deadline_at - min(one.time_limit_s or 0 for one in job.spec.variants or (job.spec,))


def misses_deadline(job: Job, now: float) -> bool:
    """Whether a pending job can no longer end by its deadline."""
    latest_at = last_start_at(job)
    return latest_at is not None and now > latest_at


def past_deadline(job: Job, now: float) -> tuple[Job, tuple[JobEvent, ...]]:
    """End a pending job that can no longer meet its deadline."""
    limit = job.spec.time_limit_s
    text = "its deadline has passed"
    if limit is not None:
        text = f"can no longer end by its deadline: its time limit is {format_duration(limit)}"
    job = replace(move(job, JobState.DEADLINE), end_at=now, reason=ReasonCode.DEADLINE, reason_text=text)
    return job, (JobEvent(job.id, now, "ended", f"{job.state}: {text}"),)


def may_run_again(job: Job) -> bool:
    """Whether another run may follow the open one: a requeue or a retry."""
    rule = rule_of(job)
    return job.cancel_at is None and (rule.requeue or job.failures < rule.retries)


def rule_of(job: Job) -> RetryRule:
    """When a job is started again."""
    return job.spec.retry if job.spec.adopted is None else _ONCE


def hold(job: Job, now: float, by: str, *, admin: bool = False) -> tuple[Job, JobEvent]:
    """Keep the job from starting; a running job is held for its next run."""
    _check_active(job, "held")
    job = replace(job, hold="admin" if admin else "user")
    return job, JobEvent(job.id, now, "held", f"held by {by}")


def hold_for_fault(job: Job, now: float, text: str) -> tuple[Job, JobEvent]:
    """Hold a job to keep it from taking out more cards, until its owner has looked into it."""
    _check_active(job, "held")
    job = replace(job, hold="user", reason=ReasonCode.JOB_HELD_GPU_FAULT, reason_text=text)
    return job, JobEvent(job.id, now, "held", text)


def held_code(job: Job) -> ReasonCode:
    """Reason of a held job: held by its owner, an admin or a fault."""
    if job.hold == "admin":
        return ReasonCode.JOB_HELD_ADMIN
    is_for_fault = job.reason is ReasonCode.JOB_HELD_GPU_FAULT
    return ReasonCode.JOB_HELD_GPU_FAULT if is_for_fault else ReasonCode.JOB_HELD_USER


def release(job: Job, now: float, by: str) -> tuple[Job, JobEvent]:
    _check_active(job, "released")
    if job.reason is ReasonCode.JOB_HELD_GPU_FAULT:
        job = replace(job, reason=None, reason_text=None)
    return replace(job, hold=None), JobEvent(job.id, now, "released", f"released by {by}")


def _check_active(job: Job, word: str) -> None:
    if job.state.is_final:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot be {word} ({story_of(job)})")


def new_job(job_id: int, caller: Caller, spec: JobSpec, now: float) -> Job:
    """Row of a newly submitted job."""
    queued_at = max(now, spec.begin_at or now)
    return Job(
        id=job_id,
        uid=caller.uid,
        user=caller.user,
        spec=spec,
        state=JobState.PENDING,
        submit_at=now,
        queued_at=queued_at,
        eligible_at=queued_at,
        hold="user" if spec.hold else None,
        tasks_left=None if spec.array is None else spec.array.tasks,
    )


def refuse_to_repeat(job: Job) -> None:
    """Reject adopted jobs, whose process cannot be restarted. Raises: Refused."""
    if job.spec.adopted is not None:
        raise Refused(
            f"job {job.shown_id} was adopted while running, so its command and environment are unknown",
            "submit it as a job: gsub",
        )


def preempt(job: Job, now: float, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Preempt a job's run: it is COMPLETING until the run has ended, and then pending again.

    A job that does not consent to a requeue ends as PREEMPTED. No effect if it is already being ended.
    `text` names the beneficiary, phrased to follow "preempted: ".
    """
    return _make_room(job, now, ReasonCode.PREEMPTED, text, f"preempted: {text}")


def requeue(job: Job, now: float, by: str, *, is_owner: bool) -> tuple[Job, tuple[JobEvent, ...]]:
    """As `preempt`, for a person who wants the job to start over.

    If that is its owner, the age of a job with a time limit starts over: otherwise, requeued repeatedly just before its
    limit, it would rank before others thanks to a limit that never ends it. A job that has burst comes back for good.
    """
    text = f"requeued by {by}"
    after, story = _make_room(job, now, ReasonCode.REQUEUED, text, text)
    if job.spec.is_burst:
        # The open run keeps its engine.
        after = replace(after, spec=replace(after.spec, engine=None, burst=False))
    is_late = is_owner and job.spec.time_limit_s is not None and bool(story)
    return (replace(after, queued_at=now) if is_late else after), story


def requeue_idle(job: Job, now: float, why: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """As `preempt`, for idle GPUs; the job returns to the queue without precedence."""
    return _make_room(job, now, ReasonCode.GPU_IDLE, why, f"is being requeued: {why}")


def cancel_idle(job: Job, now: float, why: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Cancel a job because of idle GPUs."""
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


def suspend(job: Job, now: float, by: str, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Suspend a running job. `by` is `user` or `policy`, `text` says why; no effect if suspended."""
    if job.state is JobState.SUSPENDED:
        return job, ()
    reason = ReasonCode.PREEMPTED if by == "policy" else None
    job = replace(move(job, JobState.SUSPENDED), suspended_at=now, suspended_by=by, reason=reason, reason_text=text)
    return job, (JobEvent(job.id, now, "suspended", text, job.run),)


def resume(job: Job, run: Run, now: float, text: str) -> Step:
    """Resume a suspended job. The run's suspended time is corrected once the engine reports it."""
    if job.state is not JobState.SUSPENDED:
        raise BrokenInvariant(f"job {job.id} is {job.state} and cannot continue ({story_of(job)})")
    run = replace(run, suspended_s=run.suspended_s + still_s(job, now))
    job = replace(move(job, JobState.RUNNING), suspended_at=None, suspended_by=None, reason=None, reason_text=None)
    return job, run, (JobEvent(job.id, now, "resumed", text, run.number),)
