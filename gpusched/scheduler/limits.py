"""Checks of one queue or QOS: holdings and needs against its limits, with the sentence for the blocked job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import field

from gpusched.model.queue_settings import QosSettings, QueueSettings, parent_in
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_amount, format_size_mib, plural
from gpusched.model.value import Value

MICRO = 1_000_000
"""One GPU, core or MiB in the unit of quotas."""

GPUS, CPUS, MEM = 0, 1, 2
KINDS = (GPUS, CPUS, MEM)
"""Resources with guarantees and limits, scarcest first. VRAM is not one: a slice is a fraction of a GPU."""

NAMES = ("gpus", "cpus", "mem_mib")

Amount = tuple[int, int, int]
"""GPUs, cores and MiB of memory in millionths."""

ZERO: Amount = (0, 0, 0)


def amount_of(resources: Resources) -> Amount:
    """Convert resources to the unit of quotas."""
    return round(resources.gpus * MICRO), round(resources.cpus * MICRO), round(resources.mem_mib * MICRO)


def resources_of(amount: Iterable[int]) -> Resources:
    """Convert back to resources, without VRAM."""
    gpus, cpus, mem = amount
    return Resources(gpus=gpus / MICRO, cpus=cpus / MICRO, mem_mib=mem / MICRO)


def micros_up_to(limit: float | None) -> int | None:
    """Convert a limit to the unit of quotas; None for no limit."""
    return None if limit is None else round(limit * MICRO)


def cells_gpus(cells: Iterable[str]) -> int:
    """Total cards in the cells, `NODE:SIZE` or `SIZE`."""
    sizes = (cell.rpartition(":")[2].strip() for cell in cells)
    return sum(int(size) for size in sizes if size.isdecimal())


Limits = tuple[tuple[int, int], ...]
"""Kinds with a limit or a guarantee, and the amount, in millionths."""


class QueueNode(Value):
    """One queue in the tree."""

    name: str
    settings: QueueSettings
    parent: str | None = None
    children: tuple[str, ...] = ()
    guaranteed: Amount = ZERO
    """Its own guarantee, or the sum of its descendants' if that is more; 0 is none."""
    guarantees: Limits = ()
    """The same, only for guaranteed kinds."""
    maxima: Limits = ()
    """Maxima for all its jobs together."""
    most_per_job: int | None = None
    """GPUs."""
    most_per_user: int | None = None
    """GPUs."""
    is_configured: bool = True

    @property
    def limits_users(self) -> bool:
        return self.most_per_user is not None or self.settings.max_running_per_user is not None


def implied(name: str) -> QueueNode:
    """Node for a queue without settings: at the top, without limits or guarantee."""
    return QueueNode(name, QueueSettings(name), is_configured=False)


def plant(queues: Mapping[str, QueueSettings]) -> dict[str, QueueNode]:
    """Build the tree: every configured queue by name. A missing parent or a cycle counts as no parent."""
    parents = {name: parent_in(name, queues) for name in queues}
    children: dict[str, list[str]] = {name: [] for name in queues}
    for name in sorted(queues):
        above = parents[name]
        if above is not None:
            children[above].append(name)
    nodes: dict[str, QueueNode] = {}

    def grow(name: str) -> Amount:
        below = [grow(child) for child in children[name]]
        own = own_guarantee(queues[name])
        gpus, cpus, mem = (max(own[kind], sum(amount[kind] for amount in below)) for kind in KINDS)
        nodes[name] = _node(queues[name], parents[name], tuple(children[name]), (gpus, cpus, mem))
        return gpus, cpus, mem

    for name in queues:
        if parents[name] is None:
            grow(name)
    return nodes


def _node(settings: QueueSettings, parent: str | None, children: tuple[str, ...], guaranteed: Amount) -> QueueNode:
    maxima = (micros_up_to(settings.max_gpus), micros_up_to(settings.max_cpus), micros_up_to(settings.max_mem_mib))
    return QueueNode(
        name=settings.name,
        settings=settings,
        parent=parent,
        children=children,
        guaranteed=guaranteed,
        guarantees=tuple((kind, amount) for kind, amount in enumerate(guaranteed) if amount),
        maxima=tuple((kind, most) for kind, most in enumerate(maxima) if most is not None),
        most_per_job=micros_up_to(settings.max_gpus_per_job),
        most_per_user=micros_up_to(settings.max_gpus_per_user),
    )


def own_guarantee(queue: QueueSettings) -> Amount:
    """Guarantee in the queue's own settings. Cells are part of its GPUs, and a lower bound of them."""
    gpus = max(queue.guaranteed_gpus, cells_gpus(queue.cells))
    return amount_of(Resources(gpus=gpus, cpus=queue.guaranteed_cpus, mem_mib=queue.guaranteed_mem_mib))


def is_capacity(settings: Settings) -> bool:
    """Whether queues divide the machines: any has its own guarantee, weight or order."""
    return any(
        any(own_guarantee(queue)) or queue.weight is not None or queue.order is not None
        for queue in settings.queue.values()
    )


Held = tuple[int, int, int, int]
"""GPUs, cores and memory in millionths, and the number of running jobs."""

NONE_HELD: Held = (0, 0, 0, 0)
JOBS = 3
"""Index of the number of running jobs."""

_NOUNS = ("GPU", "CPU")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit shared by several jobs: of a queue, of a QOS, or of one user in either."""

    where: str
    """`queue` or `qos`."""
    name: str
    user: str | None
    """None for a limit of all users together."""
    kind: int
    """GPUs, cores, memory or jobs."""
    most: int


class Denial(Value):
    """Why a job may not start now though it may fit: the limit, the holdings, the need."""

    code: ReasonCode
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)
    limit: Limit | None = None
    """A limit below which the job may wait for others, or have them make room."""
    may_fill: bool = False
    """Whether the job may start as a filler instead."""

    @property
    def reason(self) -> Reason:
        """The reason that the job shows."""
        return Reason(self.code, self.text, self.facts)


def has_limits(qos: QosSettings) -> bool:
    """Whether this QOS can block a job."""
    limits = (qos.max_gpus, qos.max_gpus_per_user, qos.max_gpus_per_job, qos.max_running_per_user)
    return any(limit is not None for limit in limits)


def shared_limits(node: QueueNode, user: str) -> Iterator[Limit]:
    """Limits of a queue shared by several jobs of a user, or of all users."""
    if node.most_per_user is not None:
        yield Limit("queue", node.name, user, GPUS, node.most_per_user)
    if node.settings.max_running_per_user is not None:
        yield Limit("queue", node.name, user, JOBS, node.settings.max_running_per_user)
    for kind, most in node.maxima:
        yield Limit("queue", node.name, None, kind, most)


def shared_qos_limits(qos: QosSettings, user: str) -> Iterator[Limit]:
    """Limits of a QOS shared by several jobs of a user, or of all users."""
    per_user, most = micros_up_to(qos.max_gpus_per_user), micros_up_to(qos.max_gpus)
    if per_user is not None:
        yield Limit("qos", qos.name, user, GPUS, per_user)
    if qos.max_running_per_user is not None:
        yield Limit("qos", qos.name, user, JOBS, qos.max_running_per_user)
    if most is not None:
        yield Limit("qos", qos.name, None, GPUS, most)


def over_job_limit(node: QueueNode, needed: Amount) -> Denial | None:
    """Deny a job that exceeds the queue's limit per job."""
    most = node.most_per_job
    if most is None or needed[GPUS] <= most:
        return None
    who = f"a job in queue {node.name} may"
    return _too_much(ReasonCode.QUEUE_MAX_PER_JOB, who, GPUS, most, None, needed, {"queue": node.name})


def over_user_limit(node: QueueNode, user: str, held: Held, needed: Amount) -> Denial | None:
    """Deny a job beyond the queue's limit per user. `held` is by this user in this queue."""
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
    """Deny a job beyond the maximum of a queue and its descendants."""
    for kind, most in node.maxima:
        if needed[kind] and held[kind] + needed[kind] > most:
            who = f"queue {node.name} may"
            limit = Limit("queue", node.name, None, kind, most)
            return _too_much(ReasonCode.QUEUE_MAX, who, kind, most, held, needed, {"queue": node.name}, limit)
    return None


def over_qos_limit(qos: QosSettings, user: str, held: Held, by_user: Held, needed: Amount) -> Denial | None:
    """Deny a job beyond the QOS's limit per job, per user or in total."""
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
    """Whether the need exceeds the rest of the limit. A job that needs none of it is never blocked."""
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
    """Denial for one kind. `held` is None for limits per job."""
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


_SETTINGS = ("guaranteed_gpus", "guaranteed_cpus", "guaranteed_mem_mib")
_MAXIMA = ("max_gpus", "max_cpus", "max_mem_mib")


def quota_problems(settings: Settings, capacity: Resources | None) -> list[tuple[str, str]]:
    """Setting and sentence for every promise that cannot be kept. Without `capacity` the machines are not checked."""
    nodes = plant(settings.queue)
    found: list[tuple[str, str]] = []
    for name in sorted(nodes):
        found += _below(nodes[name], [nodes[child] for child in nodes[name].children])
    if capacity is not None:
        tops = [node for _, node in sorted(nodes.items()) if node.parent is None]
        found += _against_machines(tops, amount_of(capacity))
    return found


def _below(node: QueueNode, children: Sequence[QueueNode]) -> list[tuple[str, str]]:
    """Queues promised more, together, than their parent has or may have."""
    found = []
    own = own_guarantee(node.settings)
    for kind in KINDS:
        below = sum(child.guaranteed[kind] for child in children)
        most = dict(node.maxima).get(kind)
        if most is not None and below > most:
            text = f"the queues below {node.name} are guaranteed {show_amount(kind, below)}, but it may hold at most "
            found.append((f"queue.{node.name}.{_MAXIMA[kind]}", text + show_number(kind, most)))
        elif own[kind] and below > own[kind]:
            text = f"the queues below {node.name} are guaranteed {show_amount(kind, below)}, but it has only "
            found.append((f"queue.{node.name}.{_SETTINGS[kind]}", text + show_number(kind, own[kind])))
    return found


def _against_machines(tops: Sequence[QueueNode], capacity: Amount) -> list[tuple[str, str]]:
    found = []
    for kind in KINDS:
        promised = [node for node in tops if node.guaranteed[kind]]
        total = sum(node.guaranteed[kind] for node in promised)
        if total <= capacity[kind]:
            continue
        there = show_number(kind, capacity[kind])
        if len(promised) == 1:
            who = f"queue {promised[0].name} is guaranteed {show_amount(kind, total)}"
        else:
            each = ", ".join(f"{node.name} {show_number(kind, node.guaranteed[kind])}" for node in promised)
            who = f"queues are guaranteed {show_amount(kind, total)} ({each})"
        found.append((f"queue.{promised[-1].name}.{_SETTINGS[kind]}", f"{who}, but the machines have {there}"))
    return found
