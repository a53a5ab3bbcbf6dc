"""Why a job is pending, from the state and the last plan's verdict on its class."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.daemon.state import DaemonState
from gpusched.lifecycle.dependencies import Never, Satisfied, Unsatisfied, as_typed
from gpusched.lifecycle.transitions import held_code
from gpusched.model.job import Job
from gpusched.model.mentions import Knows
from gpusched.model.snapshot import ClassKey, Plan, Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration, plural
from gpusched.scheduler.cheap import CHEAP


def waiting_reason(job: Job, state: DaemonState, plan: Plan, now: float) -> Reason:
    """The reason of a pending job: the first obstacle, in the order in which they have to go for it to start."""
    return waiting_reasons(state, plan, now)(job)


def waiting_reasons(state: DaemonState, plan: Plan, now: float, knows: Knows | None = None) -> Callable[[Job], Reason]:
    """A function that gives `waiting_reason` and looks that of each class up once: lists call it for thousands.

    Args: knows: render the text of each class for a viewer.
    """
    # Keyed by identity: each class has one key object, which the entry keeps alive, and hashing keys takes long.
    of_class: dict[int, tuple[ClassKey | None, Reason | None]] = {}

    def of(key: ClassKey | None) -> Reason | None:
        if id(key) not in of_class:
            found = None if key is None else plan.reasons.get(key)
            of_class[id(key)] = key, found if found is None or knows is None else found.render(knows)
        return of_class[id(key)][1]

    def reason_of(job: Job) -> Reason:
        key = _class_in_line(job, state)
        is_plain = key is not None
        if key is None:
            found = _reason_of_its_own(job, state, now)
            if found is not None:
                return found
            key = state.class_of(job.id)
        reason = of(key)
        if reason is None:
            return Reason(ReasonCode.NONE, "is about to be scheduled")
        if key is None or reason.code is ReasonCode.PRIORITY:
            return reason
        ahead = state.eligible.position(key, (job.queued_at, job.id)) if is_plain else state.position_in_class(job)
        if not ahead:
            return reason
        text = f"waits behind {plural(ahead, 'earlier job')} like it; the first of them: {reason.text}"
        return Reason(reason.code.of_followers, text, {**reason.facts, "ahead": ahead})

    return reason_of


def waiting_codes(state: DaemonState, plan: Plan, now: float) -> Callable[[Job], ReasonCode]:
    """A function that gives only the code of `waiting_reason`, for jobs with rows: lists call it for thousands."""
    of_class: dict[int, tuple[ClassKey | None, int, ReasonCode, ReasonCode]] = {}
    for key, first_id in state.eligible.firsts():
        reason = plan.reasons.get(key)
        code = ReasonCode.NONE if reason is None else reason.code
        # Keyed by identity: each class has one key object, kept here lest another gets its identity; hashing keys would
        # double the cost.
        of_class[id(key)] = key, first_id, code, code.of_followers

    def code_of(job: Job) -> ReasonCode:
        key = _class_in_line(job, state)
        if key is None:
            found = _reason_of_its_own(job, state, now)
            if found is not None:
                return found.code
            key = state.class_of(job.id)
        _, first, code, of_followers = of_class.get(id(key), _NOT_IN_LINE)
        # An array has the position of its first task without a row.
        is_first = job.id == first or (job.spec.array is not None and not state.position_in_class(job))
        return code if is_first else of_followers

    return code_of


_NOT_IN_LINE = None, 0, ReasonCode.NONE, ReasonCode.NONE


def _class_in_line(job: Job, state: DaemonState) -> ClassKey | None:
    """Class of an eligible job that is no part of an array, and so has no reason of its own."""
    return state.eligible.class_of(job.id) if job.spec.array is None else None


def _reason_of_its_own(job: Job, state: DaemonState, now: float) -> Reason | None:
    """Why a job may not start, whatever else is pending; None if it may."""
    if job.is_handed_over:
        return Reason(ReasonCode.HANDED_OVER, job.reason_text or "is in another scheduler")
    if job.hold is not None:
        code = held_code(job)
        if code is ReasonCode.JOB_HELD_ADMIN:
            return Reason(code, "held by an admin or operator, who alone can release it")
        if code is ReasonCode.JOB_HELD_GPU_FAULT:
            return Reason(code, f"{job.reason_text}; find the cause, then: gctl release {job.shown_id}")
        return Reason(code, f"held; release it with: gctl release {job.shown_id}")
    verdict = state.dependency_state(job)
    if isinstance(verdict, (Never, Unsatisfied)) and verdict.is_image:
        is_failed = isinstance(verdict, Never)
        code = ReasonCode.IMAGE_PULL_FAILED if is_failed else ReasonCode.IMAGE_PULL
        return Reason(code, verdict.text, {"image": job.spec.launch.image, "pull_job": job.spec.image_job})
    if isinstance(verdict, Never):
        return Reason(ReasonCode.DEPENDENCY_NEVER_SATISFIED, verdict.text, _dependency_of(job))
    if not isinstance(verdict, Satisfied):
        return Reason(ReasonCode.DEPENDENCY, verdict.text, _dependency_of(job))
    if verdict.at > now and verdict.at > job.eligible_at:
        text = f"begins in {format_duration(verdict.at - now)}, {verdict.text}"
        return Reason(ReasonCode.DEPENDENCY, text, {**_dependency_of(job), "eligible_at": verdict.at})
    if job.spec.array is not None and state.waits_for_counterparts(job):
        text = "waits for the corresponding tasks to complete"
        return Reason(ReasonCode.DEPENDENCY, text, _dependency_of(job))
    if job.eligible_at > now:
        return _by_time(job, now)
    why = state.why_infeasible(job)
    if why is None and job.spec.is_for_slurm:
        return Reason(ReasonCode.HANDED_OVER, "is about to be handed over to Slurm")
    return why


def _dependency_of(job: Job) -> dict[str, object]:
    return {"dependency": as_typed(job.spec.dependency)}


def _by_time(job: Job, now: float) -> Reason:
    wait = format_duration(job.eligible_at - now)
    facts = {"eligible_at": job.eligible_at}
    if job.run:
        text = f"run {job.run} failed ({job.reason_text or job.reason}); the next one begins in {wait}"
        return Reason(ReasonCode.RETRY_DELAY, text, {**facts, "run": job.run})
    if job.spec.start_when is not None and job.eligible_at > (job.spec.begin_at or 0.0):
        what = "cheapest" if job.spec.start_when == CHEAP else "cleanest"
        return Reason(
            ReasonCode.CHEAP_ENERGY, f"begins in {wait}, when its energy is {what} before its deadline", facts
        )
    return Reason(ReasonCode.BEGIN_TIME, f"begins in {wait}, as requested", facts)
