"""What would become of a job that is not submitted: the same `decide`, on the snapshot with it added."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.outlook import Outlook
from gpusched.daemon.tick import Scheduler
from gpusched.daemon.verbs.admission import check_submission, completed, with_auto_limits
from gpusched.daemon.verbs.submit import existing
from gpusched.errors import Refused
from gpusched.lifecycle.dependencies import Never, Satisfied, evaluate, parse_dependency
from gpusched.lifecycle.lifecycle import new_job
from gpusched.model.commands import NEVER, Caller
from gpusched.model.job import Job, JobSpec
from gpusched.model.snapshot import ClassKey, Plan
from gpusched.model.units import format_duration, gpu_list
from gpusched.model.value import replace
from gpusched.ports.daemon import Forecast
from gpusched.predict.limits import LimitAdvice
from gpusched.scheduler.planner import decide


def forecast(spec: JobSpec, caller: Caller, scheduler: Scheduler, again: str = NEVER) -> Callable[[], Forecast]:
    """What submitting this now would do: a question that another thread may answer. Changes nothing."""
    answer = _at_once(spec, caller, scheduler, again)
    return (lambda: answer) if isinstance(answer, Forecast) else answer


def _at_once(spec: JobSpec, caller: Caller, scheduler: Scheduler, again: str) -> Forecast | Callable[[], Forecast]:
    now = scheduler.now()
    turn = TickTransaction(
        scheduler.world, scheduler.store, scheduler.settings, lambda: scheduler.nodes(now), now, scheduler.advise_limit
    )
    (spec,), said = with_auto_limits([spec], caller.user, turn)
    spec = completed(spec, caller, scheduler.settings)
    answer = _of_completed(spec, caller, scheduler, again, turn)

    def with_limit(found: Forecast) -> Forecast:
        source, text = spec.limit_source, "".join(said)
        return replace(found, time_limit_s=spec.time_limit_s, time_limit_source=source, limit_text=text)

    return with_limit(answer) if isinstance(answer, Forecast) else lambda: with_limit(answer())


def _of_completed(
    spec: JobSpec, caller: Caller, scheduler: Scheduler, again: str, turn: TickTransaction
) -> Forecast | Callable[[], Forecast]:
    now = turn.now
    try:
        found = existing(spec, again, caller, turn)
        if found is not None:
            return Forecast("exists", f"job {found['ids'][0]} has this key already; nothing would be submitted")
        check_submission([spec], caller, turn)
    except Refused as error:
        return Forecast("refused", error.message, "Refused", hint=error.hint or None)
    job = new_job(scheduler.world.next_id, caller, spec, now)
    if spec.hold:
        return Forecast("waits", "held until it is released with gctl release", "JobHeldUser")
    if spec.dependency:
        expression = parse_dependency(spec.dependency)
        world = scheduler.world
        earlier = world.earlier_namesake(caller.uid, spec.name) if expression.is_singleton else None
        verdict = evaluate(expression, world.lookup_parents(scheduler.store.jobs, expression), earlier)
        if isinstance(verdict, Never):
            text = f"could never start: {verdict.text}"
            return Forecast("waits", text, "DependencyNeverSatisfied")
        if not isinstance(verdict, Satisfied) or verdict.at > now:
            return Forecast("waits", verdict.text, "Dependency")
    outlook = Outlook.of(scheduler, job)
    advice = scheduler.advise_limit(job.user, job.spec)
    key = scheduler.world.key_of(job)
    return lambda: _look(outlook, job, key, advice)


def _look(outlook: Outlook, job: Job, key: ClassKey, advice: LimitAdvice | None) -> Forecast:
    now = outlook.snapshot.now
    found = outlook.starts([job.id])[job.id]
    if job.eligible_at > now:
        text = f"begins in {format_duration(job.eligible_at - now)} at the earliest"
        return Forecast("waits", text, "BeginTime", start_at=found.high_at, start_low_at=found.low_at)
    answer = _read(job.id, key, now, decide(outlook.snapshot, outlook.settings, outlook.extensions))
    if answer.verdict == "starts_now":
        return answer
    alternatives = outlook.alternatives(job, advice)
    return replace(answer, start_at=found.high_at, start_low_at=found.low_at, alternatives=alternatives)


def _read(job_id: int, key: ClassKey, now: float, plan: Plan) -> Forecast:
    for start in plan.starts:
        if start.job_id == job_id:
            place = start.placement
            cards = gpu_list(share.index for share in place.gpus)
            text = f"would start now on {place.node}" + (f", GPU {cards}" if cards else "")
            return Forecast("starts_now", text, None, place.node, place.gpus, now, now)
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
                facts=reason.facts if reason else {},
            )
    reason = plan.reasons.get(key)
    if reason is None:
        return Forecast("waits", "would wait behind the jobs that start now", "Priority")
    return Forecast("waits", f"would wait: {reason.text}", str(reason.code), facts=reason.facts)
