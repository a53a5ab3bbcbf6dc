"""Alerts raised by changes of a job, and by the passage of time alone.

Derives alerts from rows before and after a change; the user's own targets determine recipients and channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpusched.model.alert_events import EACH_TASK, NO_EFFICIENCY
from gpusched.model.alerts import Alert, Facts
from gpusched.model.cluster import DrainCause, DrainEntry, NodeView
from gpusched.model.job import Alerting, Job, Run
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_duration, gpu_label, gpu_list

LIMIT_FRACTION = 0.8
"""Fraction of the time limit that triggers `time_limit_80`."""

BACKOFF_FACTOR = 2.0
"""Growth factor of the waits between attempts."""

_GOOD_ENDS = (JobState.COMPLETED, JobState.CANCELLED)
_OF_WHOLE = frozenset({"pending", "queue_empty"})
"""Events reported only for an array as a whole."""
_OF_EITHER = frozenset({"begin", "end", "fail", "retry", "preempt"})
"""Events reported for an array as a whole or, on request, for each of its tasks."""


@dataclass(frozen=True, slots=True)
class AlertCause:
    """Reason for an alert about a job."""

    event: str
    message: str
    run: int = 0
    """Number of its run; 0 for none."""
    counts_as: tuple[str, ...] = ()
    """Further event words that request this alert."""
    about: str = ""
    """Distinguishes several alerts of this event about one run."""


def alert_causes(
    before: Job | None, after: Job, runs: Mapping[int, Run], changed: Iterable[int]
) -> Iterator[AlertCause]:
    """Yield the alerts due to the change of one job, in order of occurrence.

    Args:
        before: None for a new job.
        runs: known runs of the job, by number.
        changed: numbers of the runs changed together with it.
    """
    wanted = wanted_of(after)
    if not wanted:
        return
    last = before.run if before is not None else 0
    for number in sorted(changed):
        run = runs[number]
        if run.outcome is JobState.PREEMPTED and "preempt" in wanted:
            yield AlertCause("preempt", f"run {number} ended early: {run.reason_text}", number)
    if _makes_room(before, after) and "preempt" in wanted:
        yield AlertCause("preempt", f"run {after.run} was suspended: {after.reason_text or 'it makes room'}", after.run)
    if before is not None and "retry" in wanted:
        if after.failures > before.failures:
            retries = f"{after.failures} of {after.spec.retry.retries} retries used"
            yield AlertCause("retry", f"run {last} {_how(runs.get(last))}; will be retried, {retries}", last)
        if after.requeues > before.requeues and not after.hold:
            yield AlertCause("retry", f"run {last} was lost: {_how(runs.get(last))}; will be requeued", last)
    if _is_newly_held(before, after) and wanted & {"held", "fail"}:
        message = f"{after.reason_text}; find the cause, then: gctl release {after.shown_id}"
        yield AlertCause("held", message, last, ("fail",) if "fail" in wanted else ())
    if after.run > last and "begin" in wanted:
        yield AlertCause("begin", f"run {after.run} has started{_where(runs.get(after.run))}", after.run)
    if "begin" in wanted and _begins_as_array(before, after):
        yield AlertCause("begin", "its first task has started")
    if after.state.is_final and (before is None or not before.state.is_final):
        yield from _ended(after, wanted)


def wanted_of(job: Job) -> frozenset[str]:
    """Events to report for this row; an array and its tasks share one request."""
    alerting = job.spec.alerting
    if alerting is None:
        return frozenset()
    wanted = frozenset(alerting.on)
    if job.array_id is not None:
        return wanted - _OF_WHOLE - (frozenset() if EACH_TASK in wanted else _OF_EITHER)
    return wanted - _OF_EITHER if job.is_array and EACH_TASK in wanted else wanted


def _ended(job: Job, wanted: frozenset[str]) -> Iterator[AlertCause]:
    """One alert, however many words request it."""
    message = f"{job.state}: {job.reason_text or 'unknown reason'}"
    if job.is_array and has_failed(job):
        # One alert for all of them.
        message += f"; see which with: gq -j {job.id} -s F,TO,OOM,NF"
    if "fail" in wanted and has_failed(job):
        yield AlertCause("fail", message, job.run, ("end",) if "end" in wanted else ())
    elif "end" in wanted:
        yield AlertCause("end", message, job.run)


def has_failed(job: Job) -> bool:
    """Whether a final state is a failure rather than requested by the user."""
    if job.state is JobState.CANCELLED:
        return job.reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    return job.state.is_final and job.state not in _GOOD_ENDS


def wants_efficiency(job: Job) -> bool:
    """Whether to tell of waste after the job's end: to those who asked for it, or for the end, and did not opt out."""
    wanted = wanted_of(job)
    return NO_EFFICIENCY not in wanted and bool(wanted & {"efficiency", "end", "fail"})


def _begins_as_array(before: Job | None, after: Job) -> bool:
    is_new = before is None or before.start_at is None
    return is_new and after.is_array and after.start_at is not None


def _is_newly_held(before: Job | None, after: Job) -> bool:
    """Held because of a fault; a hold by a person raises no alert."""
    code = ReasonCode.JOB_HELD_GPU_FAULT
    return before is not None and after.reason is code and not (before.hold and before.reason is code)


def _makes_room(before: Job | None, after: Job) -> bool:
    is_new = before is None or before.state is not JobState.SUSPENDED
    return is_new and after.state is JobState.SUSPENDED and after.suspended_by == "policy"


def _how(run: Run | None) -> str:
    return "failed" if run is None or run.outcome is None else f"{run.outcome}: {run.reason_text}"


def _where(run: Run | None) -> str:
    if run is None:
        return ""
    return f" on {run.node}" + (f", GPU {_indices(run)}" if run.gpus else "")


def _indices(run: Run) -> str:
    return gpu_list(share.index for share in run.gpus)


# --- time ---------------------------------------------------------------------------------------------


def limit_alert_at(job: Job, run: Run | None) -> float | None:
    """When the run will have used LIMIT_FRACTION of its limit; None without such an alert, or while suspended."""
    if run is None or job.state is not JobState.RUNNING or "time_limit_80" not in wanted_of(job):
        return None
    if job.spec.time_limit_s is None:
        return None
    began_at = run.intent_at if run.start_at is None else run.start_at
    return began_at + LIMIT_FRACTION * job.spec.time_limit_s + run.suspended_s


def pending_alert_at(job: Job, pending_s: float) -> float | None:
    """When the job will have been pending too long; None without such an alert, or while held."""
    if job.state is not JobState.PENDING or job.hold is not None or "pending" not in wanted_of(job):
        return None
    if job.start_at is not None and job.is_array:
        # Some of its tasks have started, so it is not stuck.
        return None
    return max(job.queued_at, job.eligible_at) + pending_s


def limit_alert(job: Job, run: Run) -> AlertCause:
    """The alert due at `limit_alert_at`."""
    limit = format_duration(job.spec.time_limit_s)
    return AlertCause(
        "time_limit_80", f"run {run.number} has used {LIMIT_FRACTION:.0%} of its time limit, {limit}", job.run
    )


def pending_alert(job: Job, now: float, why: str | None) -> AlertCause:
    """The alert due at `pending_alert_at`; `why` is the job's pending reason."""
    waited = format_duration(now - max(job.queued_at, job.eligible_at))
    return AlertCause("pending", f"pending for {waited}: {why or 'unknown reason'}", job.run + 1)


# --- rows of the outbox -------------------------------------------------------------------------------


def alert_of(job: Job, what: AlertCause, run: Run | None, now: float) -> Alert:
    """Make the outbox row; at most one per event, run and `about`."""
    alerting = job.spec.alerting or Alerting()
    return Alert(
        key=f"{job.id}.{what.run} {what.event}" + (f" {what.about}" if what.about else ""),
        event=what.event,
        counts_as=(what.event, *what.counts_as),
        uid=job.uid,
        at=now,
        facts=facts_of(job, what, run, now),
        targets=alerting.targets,
        job_id=job.id,
        run=what.run or None,
    )


def facts_of(job: Job, what: AlertCause, run: Run | None, now: float) -> Facts:
    """Values for templates, by names of `model.alerts.FACTS`; missing facts are left out."""
    spec = job.spec
    found: dict[str, str | float | None] = {
        "event": what.event,
        "message": what.message,
        "at": now,
        "job": job.shown_id,
        "name": spec.name,
        "user": job.user,
        "account": spec.account or None,
        "queue": spec.queue,
        "state": job.state.value,
        "reason": job.reason_text,
        "exit_code": None if job.exit_code is None else str(job.exit_code),
        "signal": None if job.signal is None else str(job.signal),
        "run": str(what.run) if what.run else None,
        "submit_at": job.submit_at,
        "end_at": job.end_at,
        "time_limit": format_duration(spec.time_limit_s),
        "work_dir": spec.launch.work_dir,
    }
    if run is not None:
        found["node"] = run.node
        found["gpus"] = _indices(run) or None
        found["output"] = run.stdout_path
        began_at = found["start_at"] = run.start_at if run.start_at is not None else run.intent_at
        found["elapsed"] = format_duration((now if run.end_at is None else run.end_at) - began_at)
    elif job.is_array and job.start_at is not None:
        found["start_at"] = job.start_at
        found["elapsed"] = format_duration((now if job.end_at is None else job.end_at) - job.start_at)
    return tuple((name, value) for name, value in found.items() if value is not None)


QUIET_S = 3600.0
MOST_IN_QUIET = 3


@dataclass(frozen=True, slots=True)
class AdminEvent:
    """An event for the admin targets."""

    event: str
    """A word of ADMIN_EVENTS."""
    message: str
    node: str
    about: str = ""
    """UUID of the GPU, if any, as alerts are throttled per GPU."""

    @property
    def mark(self) -> str:
        """Common key prefix of all alerts about the same thing."""
        return " ".join(word for word in (self.event, self.node, self.about) if word) + " @"


def admin_alert(
    news: AdminEvent, now: float, uid: int, targets: tuple[str, ...], before: Iterable[Alert]
) -> Alert | None:
    """Make the outbox row; None without targets, or when the same was sent often enough.

    Args: before: earlier alerts, pending or sent.
    """
    if not targets:
        return None
    count = sum(1 for one in before if one.key.startswith(news.mark) and one.at > now - QUIET_S)
    if count >= MOST_IN_QUIET:
        return None
    is_last = count == MOST_IN_QUIET - 1
    message = news.message + ("; further alerts about this are suppressed for an hour" if is_last else "")
    return Alert(
        key=f"{news.mark}{now:.3f}",
        event=news.event,
        counts_as=(news.event,),
        uid=uid,
        at=now,
        facts=(("event", news.event), ("message", message), ("at", now), ("node", news.node)),
        targets=targets,
    )


def is_over(alert: Alert, now: float) -> bool:
    """Whether a sent admin alert can be forgotten."""
    return alert.job_id is None and alert.state == "told" and alert.at <= now - QUIET_S


def drain_event(drained: str, entry: DrainEntry, nodes: Iterable[NodeView]) -> AdminEvent | None:
    """Alert about a node or GPU that was drained, by a person or as suspect.

    None for a lost GPU, which is reported on detection.
    """
    if entry.cause is DrainCause.GPU_LOST:
        return None
    for node in nodes:
        for gpu in node.gpus:
            if gpu.uuid == drained:
                name = f"GPU {gpu_label(gpu.index)} ({gpu.name}, {gpu.uuid})"
                if entry.cause.is_suspicion:
                    return AdminEvent("gpu_suspect", f"{name} is suspect: {entry.message}", node.name, gpu.uuid)
                return AdminEvent("gpu_drained", f"{name} was drained: {entry.message}", node.name, gpu.uuid)
    return AdminEvent("gpu_drained", f"{drained} was drained: {entry.text}", drained)
