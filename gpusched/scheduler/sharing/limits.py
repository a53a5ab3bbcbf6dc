"""The limits of one queue or QOS against what is held and what a job needs, with the sentence for who waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpusched.model.settings import QosSettings
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_amount, format_size_mib, plural
from gpusched.scheduler.sharing.queues import GPUS, MEM, MICRO, NAMES, Amount, QueueNode, micros_up_to

Held = tuple[int, int, int, int]
"""GPUs, cores and memory in millionths, and the number of running jobs."""

NONE_HELD: Held = (0, 0, 0, 0)
JOBS = 3
"""Position of the running jobs."""

_NOUNS = ("GPU", "CPU")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that several jobs share: of a queue, of a QOS, or of one user in either."""

    where: str
    """`queue` or `qos`."""
    name: str
    user: str | None
    """None for a limit of all users together."""
    kind: int
    """GPUs, cores, memory or jobs."""
    most: int


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a job may not start now though it may fit: what the limit is, what is held, what it needs."""

    code: ReasonCode
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)
    limit: Limit | None = None
    """None for a limit of one job alone."""


def has_limits(qos: QosSettings) -> bool:
    """Whether this QOS can keep a job from starting."""
    limits = (qos.max_gpus, qos.max_gpus_per_user, qos.max_gpus_per_job, qos.max_running_per_user)
    return any(limit is not None for limit in limits)


def shared_limits(node: QueueNode, user: str) -> Iterator[Limit]:
    """Those of a queue that several jobs of a user, or of all users, share."""
    if node.most_per_user is not None:
        yield Limit("queue", node.name, user, GPUS, node.most_per_user)
    if node.settings.max_running_per_user is not None:
        yield Limit("queue", node.name, user, JOBS, node.settings.max_running_per_user)
    for kind, most in node.maxima:
        yield Limit("queue", node.name, None, kind, most)


def shared_qos_limits(qos: QosSettings, user: str) -> Iterator[Limit]:
    """The same of a QOS."""
    per_user, most = micros_up_to(qos.max_gpus_per_user), micros_up_to(qos.max_gpus)
    if per_user is not None:
        yield Limit("qos", qos.name, user, GPUS, per_user)
    if qos.max_running_per_user is not None:
        yield Limit("qos", qos.name, user, JOBS, qos.max_running_per_user)
    if most is not None:
        yield Limit("qos", qos.name, None, GPUS, most)


def over_job_limit(node: QueueNode, needed: Amount) -> Denial | None:
    """A job that is too large for the queue by itself."""
    most = node.most_per_job
    if most is None or needed[GPUS] <= most:
        return None
    who = f"a job in queue {node.name} may"
    return _too_much(ReasonCode.QUEUE_MAX_PER_JOB, who, GPUS, most, None, needed, {"queue": node.name})


def over_user_limit(node: QueueNode, user: str, held: Held, needed: Amount) -> Denial | None:
    """A user who holds or runs as much in the queue as one may. `held` is by this user in this queue."""
    is_over = _is_over(node.most_per_user, held[GPUS], needed[GPUS])
    most_jobs = node.settings.max_running_per_user
    if not is_over and (most_jobs is None or held[JOBS] < most_jobs):
        return None
    code, who = ReasonCode.QUEUE_MAX_PER_USER, f"user {user} in queue {node.name} may"
    facts = {"queue": node.name, "user": user}
    if is_over:
        limit = Limit("queue", node.name, user, GPUS, node.most_per_user or 0)
        return _too_much(code, who, GPUS, limit.most, held, needed, facts, limit)
    limit = Limit("queue", node.name, user, JOBS, most_jobs or 0)
    return _too_many(code, who, limit, held, facts)


def over_maximum(node: QueueNode, held: Held, needed: Amount) -> Denial | None:
    """A queue that holds, with all below it, as much as it may."""
    for kind, most in node.maxima:
        if needed[kind] and held[kind] + needed[kind] > most:
            who = f"queue {node.name} may"
            limit = Limit("queue", node.name, None, kind, most)
            return _too_much(ReasonCode.QUEUE_MAX, who, kind, most, held, needed, {"queue": node.name}, limit)
    return None


def over_qos_limit(qos: QosSettings, user: str, held: Held, by_user: Held, needed: Amount) -> Denial | None:
    """A QOS of which one job, one user or everybody together holds as much as they may."""
    facts, one = {"qos": qos.name}, f"user {user} in QOS {qos.name} may"
    of_user = {**facts, "user": user}
    per_job, per_user = micros_up_to(qos.max_gpus_per_job), micros_up_to(qos.max_gpus_per_user)
    most, most_jobs = micros_up_to(qos.max_gpus), qos.max_running_per_user
    if per_job is not None and needed[GPUS] > per_job:
        who = f"a job of QOS {qos.name} may"
        return _too_much(ReasonCode.QOS_MAX_GRES_PER_JOB, who, GPUS, per_job, None, needed, facts)
    if per_user is not None and _is_over(per_user, by_user[GPUS], needed[GPUS]):
        limit = Limit("qos", qos.name, user, GPUS, per_user)
        return _too_much(ReasonCode.QOS_MAX_GRES_PER_USER, one, GPUS, per_user, by_user, needed, of_user, limit)
    if most_jobs is not None and by_user[JOBS] >= most_jobs:
        limit = Limit("qos", qos.name, user, JOBS, most_jobs)
        return _too_many(ReasonCode.QOS_MAX_JOBS_PER_USER, one, limit, by_user, of_user)
    if most is not None and _is_over(most, held[GPUS], needed[GPUS]):
        limit = Limit("qos", qos.name, None, GPUS, most)
        return _too_much(ReasonCode.QOS_GRP_GRES, f"QOS {qos.name} may", GPUS, most, held, needed, facts, limit)
    return None


def _is_over(most: int | None, held: int, needed: int) -> bool:
    """Whether so much more is too much. Who needs nothing of it is not kept by it."""
    return most is not None and needed > 0 and held + needed > most


def _too_much(
    code: ReasonCode,
    who: str,
    kind: int,
    most: int,
    held: Held | None,
    needed: Amount,
    facts: Mapping[str, object],
    limit: Limit | None = None,
) -> Denial:
    """Of one kind. `held` is None for limits of one job."""
    before = 0 if held is None else held[kind]
    holds = "" if held is None else f" and holds {show_number(kind, before)}"
    text = f"{who} hold {show_amount(kind, most)}{holds}; this job needs {show_number(kind, needed[kind])}"
    numbers = {"limit": most / MICRO, "held": before / MICRO, "needed": needed[kind] / MICRO}
    return Denial(code, text, {**facts, "resource": NAMES[kind], **numbers}, limit)


def _too_many(code: ReasonCode, who: str, limit: Limit, held: Held, facts: Mapping[str, object]) -> Denial:
    most = limit.most
    text = f"{who} run {plural(most, 'job')} at once and runs {held[JOBS]}"
    return Denial(code, text, {**facts, "resource": "jobs", "limit": most, "held": held[JOBS], "needed": 1}, limit)


def show_number(kind: int, micros: int) -> str:
    """`3`, `0.5`, `64G`."""
    return format_size_mib(micros / MICRO) if kind == MEM else format_amount(micros / MICRO)


def show_amount(kind: int, micros: int) -> str:
    """`1 GPU`, `3 CPUs`, `64G of memory`."""
    if kind == MEM:
        return f"{show_number(kind, micros)} of memory"
    return plural(micros / MICRO, _NOUNS[kind])
