"""Task layouts: how many tasks of a job run on each of its nodes, and what each node books for them.

A submission states amounts per task, per GPU, per core or per node. Where it states all of them per node, the scheduler
books the same on every node; where it states a total, of GPUs or of tasks, the job consists of bundles, of which
nodes may take different numbers. Without any statement about tasks a job has one on each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

from gpusched.model.option import fields_of
from gpusched.model.request import ALL_MEM, gpus_of_each_node
from gpusched.model.request import TaskLayout as Declared
from gpusched.model.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.model.job import JobSpec, Request, RunPart, TaskLayout

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
    bundles: Mapping[str, Any] | None = None
    """The attributes of the request's bundles; None if every node books the same. With bundles, the amounts on each
    node are the largest of an even layout over the fewest nodes."""

    def amounts(self) -> dict[str, Any]:
        """The attributes of a `Request` that the submission states, without its bundles."""
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
    bundles = _bundles(given, nodes, ntasks, default_cpus)
    if bundles is not None:
        gpus, cpus, mem_mib = node_amounts(bundles, -(-bundles["count"] // nodes))
        has_gpus, has_mem = given.get("gpus") is not None or gpus, any(given.get(key) is not None for key in _OF_MEMORY)
        return Arrangement(nodes, ntasks, cpus, gpus if has_gpus else None, mem_mib if has_mem else None, bundles)
    most = -(-ntasks // nodes)
    each = _gpus_on_each(given, nodes, ntasks, most)
    cpus = _cpus_on_each(given, most, each or 0, default_cpus)
    return Arrangement(nodes, ntasks, cpus, each, _mem_on_each(given, cpus, each or 0))


def node_amounts(bundles: Mapping[str, Any], count: int) -> tuple[int, float, int]:
    """GPUs, cores and MiB of memory that a node with this many bundles books."""
    cpus = max(bundles["node_cpus"], count * bundles["cpus"])
    mem_mib = max(bundles["node_mem_mib"], ceil(round(count * bundles["mem_mib"], 6)))
    return count * bundles["gpus"], cpus, mem_mib


def _bundles(given: Mapping[str, Any], nodes: int, ntasks: int, default_cpus: float) -> dict[str, Any] | None:
    """The bundles of a job; None for one on a single node, and for one that books the same on every node."""
    nodes_max = max(nodes, given.get("nodes_max") or 0)
    sizes = None if nodes_max == 1 or given.get("gpus_per_node") else _bundle_sizes(given, nodes, nodes_max)
    if sizes is None:
        return None
    count, gpus, tasks = sizes
    if not gpus and (given.get("cpus_per_gpu") or given.get("mem_per_gpu_mib")):
        return None
    has_tasks = any(given.get(key) for key in ("ntasks", "ntasks_per_node", "ntasks_per_gpu"))
    node_tasks = 0 if tasks else given.get("ntasks_per_node") or 1
    if (per_gpu := given.get("cpus_per_gpu")) and gpus:
        cpus, node_cpus = float(max(gpus * per_gpu, tasks if has_tasks else 0)), float(node_tasks if has_tasks else 0)
    else:
        each = given.get("cpus", default_cpus)
        cpus, node_cpus = float(tasks * each), float(node_tasks * each)
    node_cpus = max(node_cpus, float(given.get("min_cpus", 0)))
    most = count - nodes + 1
    if tasks and given.get("ntasks_per_node"):
        most = min(most, given["ntasks_per_node"] // tasks)
    is_even = nodes == nodes_max == count
    # Of what takes nothing any number fits on a node; and cores alone tell the number of tasks on a node.
    is_sizeless = not gpus and (not cpus or bool(given.get("min_cpus")))
    if is_even or is_sizeless or count < nodes or most * nodes_max < count:
        return None
    mem_mib, node_mem_mib = _memory_of_bundles(given, gpus, cpus, node_cpus)
    return {
        "count": count,
        "nodes_max": min(nodes_max, count),
        "most": most,
        "gpus": gpus,
        "tasks": tasks,
        "cpus": cpus,
        "mem_mib": mem_mib,
        "node_cpus": node_cpus,
        "node_mem_mib": node_mem_mib,
    }


def _bundle_sizes(given: Mapping[str, Any], nodes: int, nodes_max: int) -> tuple[int, int, int] | None:
    """Number of bundles, and GPUs and tasks of each; no tasks if every node has the same number of them.

    None if the submission states no total that could be divided, or if its totals have no common part.
    """
    total, ntasks, per_node = given.get("gpus"), given.get("ntasks"), given.get("ntasks_per_node")
    if per_task := given.get("gpus_per_task"):
        if ntasks is None and (per_node or not total):
            return None
        count = ntasks or total // per_task
        return (count, per_task, 1) if total in (None, count * per_task) else None
    if per_gpu := given.get("ntasks_per_gpu"):
        if ntasks is not None and ntasks % per_gpu:
            return None
        count = total or (ntasks or 0) // per_gpu
        return (count, 1, per_gpu) if count and ntasks in (None, count * per_gpu) else None
    if total:
        if ntasks is None and per_node is not None and nodes == nodes_max and not total % nodes:
            # As many tasks on each node, which share its GPUs: each has as many of these.
            return None
        if ntasks is None or nodes == nodes_max == ntasks:
            return total, 1, 0
        count = gcd(total, ntasks)
        return count, total // count, ntasks // count
    if ntasks is None or nodes == nodes_max:
        return None
    return ntasks, 0, 1


def _memory_of_bundles(given: Mapping[str, Any], gpus: int, cpus: float, node_cpus: float) -> tuple[float, int]:
    """MiB of each bundle, and the least of a node."""
    if given.get("mem_per_gpu_mib"):
        return float(gpus * given["mem_per_gpu_mib"]), 0
    if per_cpu := given.get("mem_per_cpu_mib"):
        return float(per_cpu * cpus), ceil(per_cpu * max(1.0, node_cpus))
    mem_mib: int | str = given.get("mem_mib", 0)
    return 0.0, 0 if isinstance(mem_mib, str) else mem_mib


_OF_MEMORY = ("mem_mib", "mem_per_cpu_mib", "mem_per_gpu_mib")


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
    by_gpus, most = _nodes_of_gpus(given), given.get("nodes_max")
    nodes = given.get("nodes") or by_gpus
    if nodes is not None and most and nodes < (by_gpus or 0) <= most:
        nodes = by_gpus
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
    if most is not None and most < nodes:
        raise ValueError(f"the minimum of {plural(nodes, 'node')} exceeds the maximum of {most}")
    if ntasks < nodes:
        raise ValueError(f"{plural(nodes, 'node')} are requested for only {plural(ntasks, 'task')}")
    if per_node is not None and nodes < -(-ntasks // per_node) <= (most or 0):
        nodes = -(-ntasks // per_node)
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
    bundles = request.bundles
    gpus = {"gpus_per_node": request.gpus} if bundles is None or not bundles.gpus else {"gpus": request.total_gpus}
    if layout is None:
        return {**found, **gpus, "cpus": request.cpus, "mem_mib": request.mem_mib}
    found.update({name: getattr(layout, field.attribute) for name, field in fields_of(Declared).items()})
    are_tasks_stated = layout.ntasks is not None or layout.ntasks_per_node is not None
    if not (are_tasks_stated and (layout.gpus_per_task or layout.ntasks_per_gpu)):
        found.update(gpus)
    if layout.cpus_per_task is not None:
        found["cpus"] = layout.cpus_per_task
    elif not layout.cpus_per_gpu:
        found["cpus"] = request.cpus / max(_tasks_on_fewest(request, layout))
    if layout.is_all_mem:
        found["mem_mib"] = ALL_MEM
    elif not (layout.mem_per_cpu_mib or layout.mem_per_gpu_mib):
        found["mem_mib"] = request.mem_mib
    return {name: value for name, value in found.items() if value is not None}


def count_tasks(request: Request, layout: TaskLayout | None, nodes: int | None = None) -> int:
    """Number of tasks of a job in all: one on each node unless its layout says otherwise.

    Args: nodes: those it runs on, of a job with a range of them; the fewest if not given.
    """
    nodes = request.nodes if nodes is None else nodes
    if layout is None:
        return nodes
    if layout.ntasks is not None:
        return layout.ntasks
    if layout.ntasks_per_node is not None:
        return layout.ntasks_per_node * nodes
    if layout.ntasks_per_gpu is not None:
        return layout.ntasks_per_gpu * request.total_gpus
    if layout.gpus_per_task is not None:
        return request.total_gpus // layout.gpus_per_task
    return nodes


def tasks_on_nodes(request: Request, layout: TaskLayout | None, parts: Sequence[RunPart]) -> tuple[int, ...]:
    """Number of tasks of a run on each of its nodes, by what it books there."""
    bundles = request.bundles
    if bundles is None or not bundles.tasks:
        return spread_tasks(count_tasks(request, layout, len(parts)), len(parts))
    if bundles.gpus:
        counts = [len(part.gpus) // bundles.gpus for part in parts]
    else:
        counts = [round(part.cpus / bundles.cpus) for part in parts]
    if sum(counts) != bundles.count:
        # It books nothing here: another scheduler has it.
        return spread_tasks(count_tasks(request, layout), len(parts))
    return tuple(count * bundles.tasks for count in counts)


def _tasks_on_fewest(request: Request, layout: TaskLayout | None) -> tuple[int, ...]:
    """Number of tasks on each node, the larger ones first, where the job is laid out evenly over the fewest nodes."""
    bundles = request.bundles
    if bundles is None or not bundles.tasks:
        return spread_tasks(count_tasks(request, layout), request.nodes)
    return tuple(count * bundles.tasks for count in spread_tasks(bundles.count, request.nodes))


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
    has_others = spec.request.nodes > 1 or spec.request.bundles is not None
    return has_others and (spec.launch.slurm or spec.interactive is not None)


def ranks_on_nodes(spec: JobSpec, parts: Sequence[RunPart]) -> tuple[range, ...]:
    """Numbers of a run's ranks on each of its nodes; one on each for a job whose tasks the engine does not start."""
    counts = tasks_on_nodes(spec.request, spec.layout, parts) if starts_ranks(spec) else (1,) * len(parts)
    return tuple(range(sum(counts[:node]), sum(counts[: node + 1])) for node in range(len(parts)))


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
