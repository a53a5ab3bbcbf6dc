"""The tree of queues as the settings give it, and the whole numbers that quotas are counted in.

Amounts are kept in millionths, so that taking one away again leaves exactly what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpusched.model.resources import Resources
from gpusched.model.settings import QueueSettings, Settings
from gpusched.model.value import Value
from gpusched.scheduler.sharing.upward import parent_in

MICRO = 1_000_000
"""One GPU, core or MiB in the unit of quotas."""

GPUS, CPUS, MEM = 0, 1, 2
KINDS = (GPUS, CPUS, MEM)
"""What queues are guaranteed and limited in, the scarcest first. VRAM is not one: a slice is a part of a GPU."""

NAMES = ("gpus", "cpus", "mem_mib")

Amount = tuple[int, int, int]
"""GPUs, cores and MiB of memory in millionths."""

ZERO: Amount = (0, 0, 0)


def amount_of(resources: Resources) -> Amount:
    """Resources in the unit of quotas."""
    return round(resources.gpus * MICRO), round(resources.cpus * MICRO), round(resources.mem_mib * MICRO)


def resources_of(amount: Iterable[int]) -> Resources:
    """The other way round, without VRAM."""
    gpus, cpus, mem = amount
    return Resources(gpus=gpus / MICRO, cpus=cpus / MICRO, mem_mib=mem / MICRO)


def micros_up_to(limit: float | None) -> int | None:
    """A limit in the unit of quotas; None stays none."""
    return None if limit is None else round(limit * MICRO)


def cells_gpus(cells: Iterable[str]) -> int:
    """Cards in groups that are promised whole, `NODE:SIZE` or `SIZE`, all together."""
    sizes = (cell.rpartition(":")[2].strip() for cell in cells)
    return sum(int(size) for size in sizes if size.isdecimal())


Limits = tuple[tuple[int, int], ...]
"""Kinds that have a limit or a guarantee, and how much, in millionths."""


class QueueNode(Value):
    """One queue in its place in the tree."""

    name: str
    settings: QueueSettings
    parent: str | None = None
    children: tuple[str, ...] = ()
    guaranteed: Amount = ZERO
    """Its own guarantee, or that of all below it where that is more; 0 is none."""
    guarantees: Limits = ()
    """The same, of what is guaranteed at all."""
    maxima: Limits = ()
    """Its own maxima for all its jobs together."""
    most_per_job: int | None = None
    """GPUs."""
    most_per_user: int | None = None
    """GPUs."""
    is_configured: bool = True

    @property
    def limits_users(self) -> bool:
        """Whether what each user holds in it counts."""
        return self.most_per_user is not None or self.settings.max_running_per_user is not None


def implied(name: str) -> QueueNode:
    """A queue that jobs are in though no setting names it: at the top, without limits or guarantee."""
    return QueueNode(name, QueueSettings(name), is_configured=False)


def plant(queues: Mapping[str, QueueSettings]) -> dict[str, QueueNode]:
    """Every configured queue by name. A parent that is not there, or a circle, counts as no parent."""
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
    """What the settings of the queue itself guarantee. Cells are part of its GPUs, and at least so many."""
    gpus = max(queue.guaranteed_gpus, cells_gpus(queue.cells))
    return amount_of(Resources(gpus=gpus, cpus=queue.guaranteed_cpus, mem_mib=queue.guaranteed_mem_mib))


def is_capacity(settings: Settings) -> bool:
    """Whether queues divide the machines among them: any has a guarantee, a weight or an order of its own."""
    return any(
        any(own_guarantee(queue)) or queue.weight is not None or queue.order is not None
        for queue in settings.queue.values()
    )
