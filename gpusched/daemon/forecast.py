"""What would become of a job that is not submitted: the same `decide`, on the snapshot with it added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpusched.daemon.admitting import check_submission, completed
from gpusched.daemon.commands import new_job
from gpusched.daemon.selection import Caller
from gpusched.daemon.tick import Scheduler
from gpusched.daemon.turn import Turn
from gpusched.errors import Refused
from gpusched.model.job import GpuShare, JobSpec
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Plan, Snapshot
from gpusched.model.units import format_duration
from gpusched.policy.cycle import decide
from gpusched.policy.dependencies import Satisfied, evaluate, parse_dependency
from gpusched.policy.ordering import class_key


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer of `gsub --dry-run`."""

    verdict: str
    """starts_now, waits or refused."""
    text: str
    reason: str | None = None
    node: str | None = None
    gpus: tuple[GpuShare, ...] = ()
    start_at: float | None = None
    """Now, or the latest expected start where one is known."""
    facts: Mapping[str, object] = field(default_factory=dict)


def forecast(spec: JobSpec, caller: Caller, scheduler: Scheduler) -> Forecast:
    """Say what submitting this now would do; changes nothing."""
    now = scheduler.now()
    snapshot = scheduler.snapshot(now)
    turn = Turn(scheduler.world, scheduler.store, scheduler.settings, snapshot.nodes, now)
    spec = completed(spec, caller.user, scheduler.settings)
    try:
        check_submission([spec], caller.user, turn)
    except Refused as error:
        return Forecast("refused", error.message, "Refused")
    job = new_job(scheduler.world.next_id, caller, spec, now)
    if spec.hold:
        return Forecast("waits", "held until it is released with gctl release", "JobHeldUser")
    if job.eligible_at > now:
        text = f"begins in {format_duration(job.eligible_at - now)} at the earliest"
        return Forecast("waits", text, "BeginTime", start_at=job.eligible_at)
    if spec.dependency:
        expression = parse_dependency(spec.dependency)
        verdict = evaluate(expression, scheduler.world.lookup_parents(scheduler.store, set(expression.job_ids)))
        if not isinstance(verdict, Satisfied):
            return Forecast("waits", verdict.text, "Dependency")
    key = class_key(job)
    return _read(job.id, key, now, decide(_with_job(snapshot, key, job.id, job.queued_at), scheduler.settings))


def _with_job(snapshot: Snapshot, key: ClassKey, job_id: int, queued_at: float) -> Snapshot:
    newcomer = PendingJob(job_id, queued_at)
    classes = list(snapshot.pending)
    for at, waiting in enumerate(classes):
        if waiting.key == key:
            # Behind a front that is cut short, its turn is beyond this plan anyway.
            classes[at] = PendingClass(key, (*waiting.jobs, newcomer), waiting.total + 1)
            break
    else:
        classes.append(PendingClass(key, (newcomer,), 1))
    classes.sort(key=lambda waiting: (waiting.jobs[0].queued_at, waiting.jobs[0].id))
    return replace(snapshot, pending=tuple(classes))


def _read(job_id: int, key: ClassKey, now: float, plan: Plan) -> Forecast:
    for start in plan.starts:
        if start.job_id == job_id:
            place = start.placement
            cards = ", ".join(str(share.index) for share in place.gpus)
            text = f"would start now on {place.node}" + (f", GPU {cards}" if cards else "")
            return Forecast("starts_now", text, None, place.node, place.gpus, now)
    for reservation in plan.reservations:
        if reservation.job_id == job_id and reservation.start_at is not None:
            text = f"would wait about {format_duration(reservation.start_at - now)}"
            reason = plan.reasons.get(key)
            place = reservation.placement
            return Forecast(
                "waits",
                f"{text}: {reason.text}" if reason else text,
                str(reason.code) if reason else None,
                place.node,
                place.gpus,
                reservation.start_at,
                reason.facts if reason else {},
            )
    reason = plan.reasons.get(key)
    if reason is None:
        return Forecast("waits", "would wait behind the jobs that start now", "Priority")
    return Forecast("waits", f"would wait: {reason.text}", str(reason.code), facts=reason.facts)
