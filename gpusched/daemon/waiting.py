"""Why one job waits, from what the world knows of it and what the last plan said of its class."""

from __future__ import annotations

from gpusched.model.job import Job
from gpusched.model.snapshot import Plan, Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration, plural
from gpusched.policy.life.dependencies import Never, Satisfied, as_typed
from gpusched.policy.life.lifecycle import held_code

from .world import World


def waiting_reason(job: Job, world: World, plan: Plan, now: float) -> Reason:
    """The reason of a pending job, in the order in which things would have to change for it to start."""
    if job.hold is not None:
        code = held_code(job)
        if code is ReasonCode.JOB_HELD_ADMIN:
            return Reason(code, "held by an admin or operator, who alone can let it go")
        if code is ReasonCode.JOB_HELD_GPU_FAULT:
            return Reason(code, f"{job.reason_text}; find the cause, then: gctl release {job.shown_id}")
        return Reason(code, f"held; let it go with: gctl release {job.shown_id}")
    verdict = world.dependency_state(job)
    if isinstance(verdict, Never):
        return Reason(ReasonCode.DEPENDENCY_NEVER_SATISFIED, verdict.text, _dependency_of(job))
    if not isinstance(verdict, Satisfied):
        return Reason(ReasonCode.DEPENDENCY, verdict.text, _dependency_of(job))
    if verdict.at > now and verdict.at > job.eligible_at:
        text = f"begins in {format_duration(verdict.at - now)}, {verdict.text}"
        return Reason(ReasonCode.DEPENDENCY, text, {**_dependency_of(job), "eligible_at": verdict.at})
    if job.spec.array is not None and world.waits_for_counterparts(job):
        text = "waits for the tasks of the same numbers to complete"
        return Reason(ReasonCode.DEPENDENCY, text, _dependency_of(job))
    if job.eligible_at > now:
        return _by_time(job, now)
    key = world.class_of(job.id)
    reason = None if key is None else plan.reasons.get(key)
    if key is None or reason is None:
        return Reason(ReasonCode.NONE, "is about to be looked at")
    if reason.code is ReasonCode.PRIORITY:
        return reason
    ahead = world.position_in_class(job)
    if not ahead:
        return reason
    text = f"waits behind {plural(ahead, 'earlier job')} like it; the first of them: {reason.text}"
    return Reason(reason.code.of_followers, text, {**reason.facts, "ahead": ahead})


def _dependency_of(job: Job) -> dict[str, object]:
    return {"dependency": as_typed(job.spec.dependency)}


def _by_time(job: Job, now: float) -> Reason:
    wait = format_duration(job.eligible_at - now)
    facts = {"eligible_at": job.eligible_at}
    if job.run:
        text = f"run {job.run} failed ({job.reason_text or job.reason}); the next one begins in {wait}"
        return Reason(ReasonCode.RETRY_DELAY, text, {**facts, "run": job.run})
    return Reason(ReasonCode.BEGIN_TIME, f"asked to begin in {wait}", facts)
