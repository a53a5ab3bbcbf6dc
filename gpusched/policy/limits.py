"""The limits of one queue or QOS against what is held and what a job needs, with the sentence for who waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpusched.model.settings import QosSettings
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_size_mib
from gpusched.policy.queues import GPUS, KINDS, MEM, MICRO, NAMES, Amount, QueueNode, micros_up_to

Held = tuple[int, int, int, int]
"""GPUs, cores and memory in millionths, and the number of running jobs."""

NONE_HELD: Held = (0, 0, 0, 0)
JOBS = 3
"""Position of the running jobs."""

_NOUNS = (("GPU", "GPUs"), ("core", "cores"))


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a job may not start now though it may fit: what the limit is, what is held, what it needs."""

    code: ReasonCode
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)


def has_limits(qos: QosSettings) -> bool:
    """Whether this QOS can keep a job from starting."""
    limits = (qos.max_gpus, qos.max_gpus_per_user, qos.max_gpus_per_job, qos.max_running_per_user)
    return any(limit is not None for limit in limits)


def over_job_limit(node: QueueNode, needed: Amount) -> Denial | None:
    """A job that is too large for the queue by itself."""
    who, facts = f"a job in queue {node.name} may", {"queue": node.name}
    most = micros_up_to(node.settings.max_gpus_per_job)
    return _over(ReasonCode.QUEUE_MAX_PER_JOB, who, GPUS, most, None, needed, facts)


def over_user_limit(node: QueueNode, user: str, held: Held, needed: Amount) -> Denial | None:
    """A user who holds or runs as much in the queue as one may. `held` is by this user in this queue."""
    limits, code = node.settings, ReasonCode.QUEUE_MAX_PER_USER
    who, facts = f"user {user} in queue {node.name} may", {"queue": node.name, "user": user}
    return _over(code, who, GPUS, micros_up_to(limits.max_gpus_per_user), held, needed, facts) or _over_running(
        code, who, limits.max_running_per_user, held, facts
    )


def over_maximum(node: QueueNode, held: Held, needed: Amount) -> Denial | None:
    """A queue that holds, with all below it, as much as it may."""
    for kind in KINDS:
        if node.most[kind] is not None:
            who, facts = f"queue {node.name} may", {"queue": node.name}
            denial = _over(ReasonCode.QUEUE_MAX, who, kind, node.most[kind], held, needed, facts)
            if denial is not None:
                return denial
    return None


def over_qos_limit(qos: QosSettings, user: str, held: Held, by_user: Held, needed: Amount) -> Denial | None:
    """A QOS of which one job, one user or everybody together holds as much as they may."""
    facts = {"qos": qos.name}
    job, one = f"a job of QOS {qos.name} may", f"user {user} in QOS {qos.name} may"
    of_user = {**facts, "user": user}
    per_job, per_user = micros_up_to(qos.max_gpus_per_job), micros_up_to(qos.max_gpus_per_user)
    return (
        _over(ReasonCode.QOS_MAX_GRES_PER_JOB, job, GPUS, per_job, None, needed, facts)
        or _over(ReasonCode.QOS_MAX_GRES_PER_USER, one, GPUS, per_user, by_user, needed, of_user)
        or _over_running(ReasonCode.QOS_MAX_JOBS_PER_USER, one, qos.max_running_per_user, by_user, of_user)
        or _over(ReasonCode.QOS_GRP_GRES, f"QOS {qos.name} may", GPUS, micros_up_to(qos.max_gpus), held, needed, facts)
    )


def _over(
    code: ReasonCode,
    who: str,
    kind: int,
    most: int | None,
    held: Held | None,
    needed: Amount,
    facts: Mapping[str, object],
) -> Denial | None:
    """Too much of one kind. Who needs nothing of it is not kept by it. `held` is None for limits of one job."""
    if most is None or not needed[kind]:
        return None
    before = 0 if held is None else held[kind]
    if before + needed[kind] <= most:
        return None
    holds = "" if held is None else f" and holds {show_number(kind, before)}"
    text = f"{who} hold {show_amount(kind, most)}{holds}; this job needs {show_number(kind, needed[kind])}"
    numbers = {"limit": most / MICRO, "held": before / MICRO, "needed": needed[kind] / MICRO}
    return Denial(code, text, {**facts, "resource": NAMES[kind], **numbers})


def _over_running(
    code: ReasonCode, who: str, most: int | None, held: Held, facts: Mapping[str, object]
) -> Denial | None:
    if most is None or held[JOBS] < most:
        return None
    text = f"{who} run {most} {'job' if most == 1 else 'jobs'} at once and runs {held[JOBS]}"
    return Denial(code, text, {**facts, "resource": "jobs", "limit": most, "held": held[JOBS], "needed": 1})


def show_number(kind: int, micros: int) -> str:
    """`3`, `0.5`, `64G`."""
    return format_size_mib(micros / MICRO) if kind == MEM else f"{micros / MICRO:.6g}"


def show_amount(kind: int, micros: int) -> str:
    """`1 GPU`, `3 cores`, `64G of memory`."""
    if kind == MEM:
        return f"{show_number(kind, micros)} of memory"
    one, many = _NOUNS[kind]
    return f"{show_number(kind, micros)} {one if micros == MICRO else many}"
