"""Task layouts: how many tasks of a job run on each of its nodes, and what each node books for them.

A submission states amounts per task, per GPU, per core or per node; the scheduler books the same amounts on every
node. Without any statement about tasks a job has one on each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpusched.model.option import fields_of
from gpusched.model.request import ALL_MEM, gpus_of_each_node
from gpusched.model.request import TaskLayout as Declared
from gpusched.model.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.model.job import JobSpec, Request, TaskLayout

LAYOUT_KEYS = frozenset({*fields_of(Declared), "cpus", "mem_mib", "nodes", "gpus", "gpus_per_node"})
"""Keys of a submission that an arrangement is computed from."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What each node books, and how many tasks there are."""

    nodes: int
    ntasks: int
    cpus: float
    """On each node."""
    gpus: int | None
    """On each node; None if the submission states none."""
    mem_mib: int | None
    """On each node; None if the submission states none, 0 for all of it until a node is known."""

    @property
    def tasks_per_node(self) -> tuple[int, ...]:
        """Number of tasks on each node, the larger ones first."""
        return spread_tasks(self.ntasks, self.nodes)

    def amounts(self) -> dict[str, Any]:
        """The attributes of a `Request` that the submission states."""
        found = {"nodes": self.nodes, "cpus": self.cpus, "gpus": self.gpus, "mem_mib": self.mem_mib}
        return {name: amount for name, amount in found.items() if amount is not None}


def spread_tasks(ntasks: int, nodes: int) -> tuple[int, ...]:
    """Number of tasks on each node, as even as possible, the larger ones first."""
    each, more = divmod(ntasks, nodes)
    return tuple(each + (place < more) for place in range(nodes))


def arrange(wanted: Mapping[str, Any], default_cpus: float) -> Arrangement:
    """Compute what each node books from the amounts in a submission.

    Args: wanted: by JSON name; `cpus` is for each task, `gpus` for all nodes together. default_cpus: for each task if
    no cores are stated.
    Raises: ValueError with a sentence on amounts that contradict each other.
    """
    given = {key: wanted[key] for key in LAYOUT_KEYS if wanted.get(key) is not None}
    _check_pairs(given)
    nodes, ntasks = _nodes_and_tasks(given)
    most = -(-ntasks // nodes)
    gpus = _gpus_on_each(given, nodes, ntasks, most)
    cpus = _cpus_on_each(given, most, gpus or 0, default_cpus)
    return Arrangement(nodes, ntasks, cpus, gpus, _mem_on_each(given, cpus, gpus or 0))


_PAIRS = (
    ("cpus", "cores per task", "cpus_per_gpu", "cores per GPU"),
    ("ntasks_per_gpu", "tasks per GPU", "gpus_per_task", "GPUs per task"),
    ("ntasks_per_gpu", "tasks per GPU", "ntasks_per_node", "tasks per node"),
    ("mem_mib", "memory per node", "mem_per_cpu_mib", "memory per core"),
    ("mem_mib", "memory per node", "mem_per_gpu_mib", "memory per GPU"),
    ("mem_per_cpu_mib", "memory per core", "mem_per_gpu_mib", "memory per GPU"),
)


def _check_pairs(given: Mapping[str, Any]) -> None:
    for one, what, other, also in _PAIRS:
        if given.get(one) and given.get(other):
            raise ValueError(f"{what} and {also} cannot be combined")
    for key, what in (("ntasks_per_gpu", "tasks per GPU"), ("gpus_per_task", "GPUs per task")):
        if given.get(key) and (given.get("gpus") == 0 or given.get("gpus_per_node") == 0):
            raise ValueError(f"{what} are requested, but no GPUs")


def _nodes_and_tasks(given: Mapping[str, Any]) -> tuple[int, int]:
    """Number of nodes and of tasks in all."""
    ntasks, per_node = given.get("ntasks"), given.get("ntasks_per_node")
    nodes = given.get("nodes") or _nodes_of_gpus(given)
    if nodes is None:
        nodes = -(-ntasks // per_node) if ntasks and per_node else 1
    total = given.get("gpus")
    if total is None and given.get("gpus_per_node"):
        total = given["gpus_per_node"] * nodes
    if ntasks is None and per_node is None:
        if total:
            ntasks = _tasks_of_gpus(given, total)
        elif given.get("ntasks_per_gpu"):
            raise ValueError("tasks per GPU are requested, but neither tasks nor GPUs")
    if ntasks is None:
        ntasks = nodes * (per_node or 1)
    most = given.get("nodes_max")
    if most is not None and most < nodes:
        raise ValueError(f"the minimum of {plural(nodes, 'node')} exceeds the maximum of {most}")
    if ntasks < nodes:
        raise ValueError(f"{plural(nodes, 'node')} are requested for only {plural(ntasks, 'task')}")
    if per_node is not None and ntasks > nodes * per_node:
        there = "1 node" if nodes == 1 else f"{nodes} nodes"
        raise ValueError(
            f"{plural(ntasks, 'task')} are requested, but {there} with {per_node} each "
            f"{'has' if nodes == 1 else 'have'} room for {nodes * per_node}"
        )
    return nodes, ntasks


def _nodes_of_gpus(given: Mapping[str, Any]) -> int | None:
    """As Slurm: GPUs in all and per node determine the number of nodes."""
    gpus, per_node = given.get("gpus"), given.get("gpus_per_node")
    return gpus // per_node if gpus and per_node and not gpus % per_node else None


def _tasks_of_gpus(given: Mapping[str, Any], total: int) -> int | None:
    """Number of tasks that the GPUs imply; None if they imply none."""
    if per_gpu := given.get("ntasks_per_gpu"):
        return int(total * per_gpu)
    if not (per_task := given.get("gpus_per_task")):
        return None
    if total % per_task:
        raise ValueError(f"{plural(total, 'GPU')} cannot be divided into tasks with {per_task} each")
    return int(total // per_task)


def _gpus_on_each(given: Mapping[str, Any], nodes: int, ntasks: int, most: int) -> int | None:
    """GPUs on each node; None if none are stated."""
    stated = gpus_of_each_node(given.get("gpus"), given.get("gpus_per_node"), nodes)
    each: int
    if per_task := given.get("gpus_per_task"):
        each, all_tasks = most * per_task, f"{plural(ntasks, 'task')} with {plural(per_task, 'GPU')} each"
    elif per_gpu := given.get("ntasks_per_gpu"):
        each, all_tasks = -(-most // per_gpu), f"{plural(ntasks, 'task')} with {per_gpu} on each GPU"
    else:
        return stated
    if stated is not None and stated != each:
        raise ValueError(f"{plural(stated * nodes, 'GPU')} and {all_tasks} contradict each other")
    return each


def _cpus_on_each(given: Mapping[str, Any], most: int, gpus: int, default: float) -> float:
    if per_gpu := given.get("cpus_per_gpu"):
        if not gpus:
            raise ValueError("cores per GPU are requested, but no GPUs")
        has_tasks = any(given.get(key) for key in ("ntasks", "ntasks_per_node", "ntasks_per_gpu"))
        return float(max(gpus * per_gpu, most if has_tasks else 0, given.get("min_cpus", 0)))
    return float(max(most * given.get("cpus", default), given.get("min_cpus", 0)))


def _mem_on_each(given: Mapping[str, Any], cpus: float, gpus: int) -> int | None:
    if per_gpu := given.get("mem_per_gpu_mib"):
        if not gpus:
            raise ValueError("memory per GPU is requested, but no GPUs")
        return int(gpus * per_gpu)
    if per_cpu := given.get("mem_per_cpu_mib"):
        return int(-(-per_cpu * max(1.0, cpus) // 1))
    mem_mib: int | str | None = given.get("mem_mib")
    return 0 if isinstance(mem_mib, str) else mem_mib


def layout_values(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the task layout that a submission states; empty if it states nothing about tasks or their sizes."""
    found = {field.attribute: wanted[name] for name, field in fields_of(Declared).items() if wanted.get(name)}
    if wanted.get("cpus") is not None:
        found["cpus_per_task"] = float(wanted["cpus"])
    if wanted.get("mem_mib") == ALL_MEM:
        found["is_all_mem"] = True
    return found


def as_asked(request: Request, layout: TaskLayout | None) -> dict[str, Any]:
    """The amounts of a job in the words of a submission, from which `arrange` computes the same again."""
    found: dict[str, Any] = {"nodes": request.nodes}
    if layout is None:
        return {**found, "gpus_per_node": request.gpus, "cpus": request.cpus, "mem_mib": request.mem_mib}
    found.update({name: getattr(layout, field.attribute) for name, field in fields_of(Declared).items()})
    are_tasks_stated = layout.ntasks is not None or layout.ntasks_per_node is not None
    if not (are_tasks_stated and (layout.gpus_per_task or layout.ntasks_per_gpu)):
        found["gpus_per_node"] = request.gpus
    if layout.cpus_per_task is not None:
        found["cpus"] = layout.cpus_per_task
    elif not layout.cpus_per_gpu:
        found["cpus"] = request.cpus / (-(-count_tasks(request, layout) // request.nodes))
    if layout.is_all_mem:
        found["mem_mib"] = ALL_MEM
    elif not (layout.mem_per_cpu_mib or layout.mem_per_gpu_mib):
        found["mem_mib"] = request.mem_mib
    return {name: value for name, value in found.items() if value is not None}


def count_tasks(request: Request, layout: TaskLayout | None) -> int:
    """Number of tasks of a job in all: one on each node unless its layout says otherwise."""
    if layout is None:
        return request.nodes
    if layout.ntasks is not None:
        return layout.ntasks
    if layout.ntasks_per_node is not None:
        return layout.ntasks_per_node * request.nodes
    if layout.ntasks_per_gpu is not None:
        return layout.ntasks_per_gpu * request.gpus * request.nodes
    if layout.gpus_per_task is not None:
        return request.gpus * request.nodes // layout.gpus_per_task
    return request.nodes


def states_tasks(layout: TaskLayout | None, request: Request) -> bool:
    """Whether a number of tasks was asked for, in itself or by GPUs for each."""
    if layout is None:
        return False
    are_stated = (layout.ntasks, layout.ntasks_per_node, layout.ntasks_per_gpu) != (None, None, None)
    return are_stated or (layout.gpus_per_task is not None and count_tasks(request, layout) != request.nodes)


def starts_ranks(spec: JobSpec) -> bool:
    """Whether each task of the job is a process that its engine starts; otherwise one is started on each node."""
    launch = spec.launch
    return launch.ranks and not launch.slurm and spec.interactive is None and states_tasks(spec.layout, spec.request)


def holds_other_nodes(spec: JobSpec) -> bool:
    """Whether the job's command runs on its first node alone, and its other nodes are only held, for steps in it.

    As in Slurm, for a batch script and a command in the foreground.
    """
    return spec.request.nodes > 1 and (spec.launch.slurm or spec.interactive is not None)


def ranks_on_nodes(spec: JobSpec, nodes: int) -> tuple[range, ...]:
    """Numbers of the ranks on each of so many nodes; one on each for a job whose tasks the engine does not start."""
    counts = spread_tasks(count_tasks(spec.request, spec.layout), nodes) if starts_ranks(spec) else (1,) * nodes
    return tuple(range(sum(counts[:node]), sum(counts[: node + 1])) for node in range(nodes))


_RIVALS = (
    frozenset({"gpus", "gpus_per_node"}),
    frozenset({"cpus", "cpus_per_gpu"}),
    frozenset({"mem_mib", "mem_per_cpu_mib", "mem_per_gpu_mib"}),
    frozenset({"nodes", "nodes_max"}),
)
"""Keys that state the same amount in several ways."""


def replaced_by(stated: Iterable[str]) -> frozenset[str]:
    """Keys of an earlier request that no longer hold once these are stated."""
    keys = frozenset(stated)
    return keys.union(*(group for group in _RIVALS if not group.isdisjoint(keys)))


def rearranged(
    request: Request, layout: TaskLayout | None, changes: Mapping[str, Any]
) -> tuple[Arrangement, dict[str, Any]]:
    """What each node books after a change, and the attributes of the new task layout; these are empty for none.

    Raises: as `arrange`.
    """
    kept = {name: value for name, value in as_asked(request, layout).items() if name not in replaced_by(changes)}
    asked = {**kept, **{name: changes[name] for name in LAYOUT_KEYS if changes.get(name) is not None}}
    found = layout_values(asked)
    if "cpus" not in changes and (layout is None or layout.cpus_per_task is None):
        found.pop("cpus_per_task", None)
    return arrange(asked, request.cpus), found
