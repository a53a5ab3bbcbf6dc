"""Layout of a step over the nodes of its job: which nodes it gets, which tasks run on each, with which CPUs and GPUs.

The rules are those of srun(1). A step has all nodes of its job unless it asks for fewer, or has fewer tasks. Tasks are
spread as evenly as the CPUs, the GPUs and --ntasks-per-node of each node allow; block, cyclic and plane
distributions only number them differently. What fits the job but not what other steps leave of it has to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpusched.errors import Refused
from gpusched.lifecycle.steps import free_gpus, least_used_gpus
from gpusched.model.job import GpuShare
from gpusched.model.step import ARBITRARY, CYCLIC, MOST_TASKS, PLANE, JobStep, StepPart, StepRequest
from gpusched.model.units import plural

_LOCALHOST = "localhost"
_ROUNDING = 1e-9
_NO_NODES = "see the nodes of the job with: scontrol show job {}"


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node of a job: what the job has there, and what other steps leave of it."""

    node: str
    cpus: float
    gpus: tuple[GpuShare, ...]
    free_cpus: float
    """Those that no exclusive step has."""
    free_gpus: tuple[GpuShare, ...]
    """Those that the step may get, in the order in which it gets them."""
    is_idle: bool = True
    """No step runs there."""


@dataclass(frozen=True, slots=True)
class StepJob:
    """What a layout depends on beside the request and the nodes."""

    shown_id: str
    ntasks: int
    """Of the job."""
    per_node: int | None = None
    """Tasks on each node, if the job stated them."""


def rooms(
    parts: Iterable[tuple[str, float, tuple[GpuShare, ...]]], steps: Sequence[JobStep], request: StepRequest
) -> list[NodeRoom]:
    """The nodes of a job as a new step finds them.

    Args: parts: name, CPUs and GPUs of the job on each node. steps: the open ones of the run.
    """
    used: dict[str, float] = {}
    busy: set[str] = set()
    for step in steps:
        for part in step.on_each_node:
            busy.add(part.node)
            if step.is_exclusive:
                used[part.node] = used.get(part.node, 0.0) + part.cpus
    found = []
    for node, cpus, gpus in parts:
        free = gpus
        if steps and request.has_own_gpus:
            free = tuple(least_used_gpus(gpus, steps) if request.overlaps else free_gpus(gpus, steps))
        whole = float(max(1, int(cpus)))
        found.append(NodeRoom(node, whole, gpus, whole - used.get(node, 0.0), free, node not in busy))
    return found


def lay_out(
    request: StepRequest, nodes: Sequence[NodeRoom], job: StepJob, near: str = ""
) -> tuple[StepPart, ...] | None:
    """The parts of a step, in the order of the job's nodes; None while other steps have what it needs.

    Args: nodes: of the job. near: that of the caller, for `localhost`.
    Raises: Refused, about `nodes`, `cpus` or `gpus`, for what the job can never give.
    """
    layout = _Layout(request, nodes, job, near)
    return layout.parts()


class _Layout:
    """One layout in the making: places are indexes of nodes in the job."""

    def __init__(self, request: StepRequest, nodes: Sequence[NodeRoom], job: StepJob, near: str) -> None:
        self._request = request
        self._nodes = nodes
        self._job = job
        self._near = near
        self._is_now = True
        """Of what other steps leave; otherwise of all that the job has."""

    def parts(self) -> tuple[StepPart, ...] | None:
        find = self._of_hosts() if self._request.distribution == ARBITRARY else self._of_counts()
        shares = find()
        if shares is not None:
            return shares
        self._is_now = False
        if find() is not None:
            return None
        raise self._why_never()

    # --- nodes ---------------------------------------------------------------------------------------

    def _named(self, names: Sequence[str]) -> list[int]:
        """The places of nodes. Raises: Refused for one that the job does not have."""
        if not names:
            return []
        known: dict[str, int] = {}
        for place, room in reversed(list(enumerate(self._nodes))):
            known[room.node.partition(".")[0]] = place
            if room.node == self._near:
                known[_LOCALHOST] = place
        known.update({room.node: place for place, room in enumerate(self._nodes)})
        found = []
        for name in names:
            if name not in known:
                raise self._refuse("nodes", f"node {name} does not belong to job {self._job.shown_id}")
            found.append(known[name])
        return found

    def _refuse(self, about: str, text: str, hint: str = "") -> Refused:
        return Refused(text, hint or _NO_NODES.format(self._job.shown_id), about)

    def _pool(self) -> list[int]:
        """Nodes that the step may have. Raises: Refused if there is none."""
        request, shown = self._request, self._job.shown_id
        if request.relative >= len(self._nodes):
            there = plural(len(self._nodes), "node")
            raise self._refuse("nodes", f"the step begins with node {request.relative}, but job {shown} has {there}")
        excluded = set(self._named(request.exclude))
        pool = [place for place in range(request.relative, len(self._nodes)) if place not in excluded]
        if not pool:
            raise self._refuse("nodes", f"the step excludes all nodes of job {shown}")
        return pool

    def _of_counts(self) -> Callable[[], tuple[StepPart, ...] | None]:
        """A search over numbers of nodes. Raises: Refused."""
        request, pool = self._request, self._pool()
        named = list(dict.fromkeys(self._named(request.nodelist)))
        for place in named:
            if place not in pool:
                name = self._nodes[place].node
                raise self._refuse("nodes", f"the step asks for node {name} and excludes it", "name it once")
        least = request.nodes_min
        if least is not None and least > len(pool):
            raise self._refuse(
                "nodes",
                f"the step requests {plural(least, 'node')}, but job {self._job.shown_id} has {len(pool)} for it",
            )

        def find() -> tuple[StepPart, ...] | None:
            # Each is some milliseconds for a thousand nodes.
            for order in self._orders(pool, named):
                for places in self._choices(order, len(named)):
                    found = self._on(sorted(places))
                    if found is not None:
                        return found
            return None

        return find

    def _choices(self, order: Sequence[int], named: int) -> Iterator[Sequence[int]]:
        """Nodes to try, in order of preference. What does not fit on as many as possible fits on no fewer.

        Args: named: how many of the first ones were named.
        """
        request, most = self._request, len(order)
        tasks = request.tasks if request.tasks is not None else self._implied_tasks()
        limit = most if tasks is None else min(most, tasks)
        # The named ones are not passed over.
        usable = [place for at, place in enumerate(order) if at < named or self._is_usable(self._nodes[place])]
        low, high = self._node_counts(most, named)
        low, high = min(low, limit), min(high, limit)
        if named and tasks is not None and request.nodes_min is None:
            yield usable[: self._enough(usable, low, tasks)]
            return
        top = min(high, len(usable), request.gpus or most)
        if top >= low:
            yield usable[:top]
            if tasks is None and top > low:
                # With fewer nodes there are fewer tasks.
                yield usable[:low]

    def _enough(self, order: Sequence[int], least: int, tasks: int) -> int:
        """How many of the nodes have room for so many tasks; at least `least`."""
        room = 0
        for count, place in enumerate(order, 1):
            room += self._slots(self._nodes[place])
            if count >= least and room >= tasks:
                return count
        return len(order)

    def _node_counts(self, most: int, named: int) -> tuple[int, int]:
        """Least and largest number of nodes for the step, whatever its tasks."""
        request = self._request
        if (least := request.nodes_min) is not None:
            return least, max(least, min(most, request.nodes_max or least))
        if named:
            return named, most if request.tasks is not None or self._implied_tasks() is not None else named
        if request.tasks is not None or self._implied_tasks() is not None:
            return 1, most
        # Each node is to have some of the step's GPUs.
        gpus = request.gpus or most
        count = min(most, -(-gpus // request.gpus_per_node) if request.gpus and request.gpus_per_node else gpus)
        return count, count

    def _orders(self, pool: Sequence[int], named: Sequence[int]) -> list[list[int]]:
        """Nodes in the order of preference: by default those first that no step uses; and those with most room."""
        request, nodes = self._request, self._nodes
        rest = [place for place in pool if place not in named]
        idle = rest if request.overlaps else sorted(rest, key=lambda place: not nodes[place].is_idle)
        roomy = sorted(rest, key=lambda place: -self._slots(nodes[place]))
        rich = sorted(rest, key=lambda place: -len(self._gpus_of(nodes[place])))
        found: list[list[int]] = []
        for order in (idle, roomy, rich):
            if (whole := [*named, *order]) not in found:
                found.append(whole)
        return found

    # --- tasks ---------------------------------------------------------------------------------------

    def _implied_tasks(self) -> int | None:
        """Number of tasks that the GPUs imply, whatever the nodes."""
        request = self._request
        if request.tasks is None and request.gpus and request.gpus_per_task and request.ntasks_per_node is None:
            return max(1, request.gpus // request.gpus_per_task)
        return None

    def _tasks_on(self, nodes: int) -> int:
        """Number of tasks of a step on so many nodes."""
        request, job = self._request, self._job
        if request.tasks is not None:
            return request.tasks
        if (implied := self._implied_tasks()) is not None:
            return implied
        if request.ntasks_per_node is not None:
            return request.ntasks_per_node * nodes
        return job.ntasks if nodes == len(self._nodes) else (job.per_node or 1) * nodes

    def _cpus_of(self, room: NodeRoom) -> float:
        is_shared = not self._request.is_exact or self._request.overlaps
        return room.free_cpus if self._is_now and not is_shared else room.cpus

    def _gpus_of(self, room: NodeRoom) -> tuple[GpuShare, ...]:
        return room.free_gpus if self._is_now else room.gpus

    def _slots(self, room: NodeRoom) -> int:
        """Most tasks that a node takes, by all that it has."""
        request = self._request
        found = MOST_TASKS if request.ntasks_per_node is None else request.ntasks_per_node
        if request.gpus_per_task:
            found = min(found, len(self._gpus_of(room)) // request.gpus_per_task)
        return found if request.overcommits else min(found, self._cpu_slots(room))

    def _is_usable(self, room: NodeRoom) -> bool:
        """Whether a task can be there, with what each node is to have."""
        gpus = self._request.gpus_per_node or bool(self._request.gpus)
        return self._slots(room) > 0 and len(self._gpus_of(room)) >= gpus

    def _cpu_slots(self, room: NodeRoom) -> int:
        each = self._request.cpus_per_task
        return MOST_TASKS if each <= 0 else int((self._cpus_of(room) + _ROUNDING) // each)

    def _on(self, places: Sequence[int]) -> tuple[StepPart, ...] | None:
        """The step on these nodes; None if it does not fit."""
        tasks = self._tasks_on(len(places))
        counts = self._counts(places, tasks)
        if counts is None:
            return None
        numbers = numbered(counts, _plane(self._request.distribution))
        return self._parts(places, numbers)

    def _counts(self, places: Sequence[int], tasks: int) -> list[int] | None:
        """Tasks on each node, one at least; None if they do not fit."""
        rooms = [self._nodes[place] for place in places]
        most = [self._slots(room) for room in rooms]
        if not all(most) or sum(most) < tasks or tasks < len(places):
            return None
        if not self._request.overcommits:
            return spread(tasks, most)
        # Up to the CPUs first, and then on.
        first = [min(slots, self._cpu_slots(room)) for slots, room in zip(most, rooms, strict=True)]
        fitting = min(tasks, sum(first))
        base = spread(fitting, first)
        left = spread(tasks - fitting, [slots - count for slots, count in zip(most, base, strict=True)])
        counts = [count + more for count, more in zip(base, left, strict=True)]
        return counts if all(counts) else spread(tasks, most)

    def _of_hosts(self) -> Callable[[], tuple[StepPart, ...] | None]:
        """A layout that names the node of each task. Raises: Refused."""
        request = self._request
        pool = self._pool()
        hosts = self._named(request.hosts)
        tasks = len(hosts) if request.tasks is None else request.tasks
        if not hosts or tasks > len(hosts):
            raise self._refuse(
                "nodes", f"the step requests {plural(tasks, 'task')}, but its host file names nodes for {len(hosts)}"
            )
        places = sorted(set(hosts[:tasks]))
        if not set(places).issubset(pool):
            raise self._refuse("nodes", "the host file names a node that the step excludes", "name it once")
        numbers = [[number for number, host in enumerate(hosts[:tasks]) if host == place] for place in places]

        def find() -> tuple[StepPart, ...] | None:
            slots = [self._slots(self._nodes[place]) for place in places]
            fits = all(len(some) <= most for some, most in zip(numbers, slots, strict=True))
            return self._parts(places, numbers) if fits else None

        return find

    # --- CPUs and GPUs --------------------------------------------------------------------------------

    def _parts(self, places: Sequence[int], numbers: Sequence[Sequence[int]]) -> tuple[StepPart, ...] | None:
        """What the step gets on each node for these tasks; None if it does not fit."""
        request = self._request
        rooms = [self._nodes[place] for place in places]
        gpus = self._gpu_counts(rooms, [len(some) for some in numbers])
        if gpus is None:
            return None
        found = []
        for room, tasks, count in zip(rooms, numbers, gpus, strict=True):
            cpus = room.cpus
            if request.is_exact:
                cpus = len(tasks) * request.cpus_per_task
                cpus = min(cpus, room.cpus) if request.overcommits else cpus
                if cpus > self._cpus_of(room) + _ROUNDING:
                    return None
            shares = room.gpus
            if request.has_own_gpus:
                chosen = {share.uuid for share in self._gpus_of(room)[:count]}
                shares = tuple(share for share in room.gpus if share.uuid in chosen)
            found.append(StepPart(room.node, tuple(tasks), cpus, shares))
        return tuple(found)

    def _gpu_counts(self, rooms: Sequence[NodeRoom], tasks: Sequence[int]) -> list[int] | None:
        """GPUs of its own on each node; None if there are too few."""
        request = self._request
        free = [len(self._gpus_of(room)) for room in rooms]
        each = request.gpus_per_node or 0
        counts = [max(number * (request.gpus_per_task or 0), 0 if request.gpus else each) for number in tasks]
        if request.gpus:
            if request.gpus < len(rooms):
                return None
            most = [min(have, each) if each else have for have in free]
            left = max(0, request.gpus - sum(counts))
            if left > sum(max(0, top - count) for top, count in zip(most, counts, strict=True)):
                return None
            # Nodes that have none so far come first.
            more = level(left, counts, most)
            counts = [count + extra for count, extra in zip(counts, more, strict=True)]
        return counts if all(count <= have for count, have in zip(counts, free, strict=True)) else None

    # --- refusals ------------------------------------------------------------------------------------

    def _why_never(self) -> Refused:
        """What the job can never give, of as many nodes as the step may have."""
        request = self._request
        if request.distribution == ARBITRARY:
            places = list(dict.fromkeys(self._named(request.hosts)))
            tasks = len(request.hosts) if request.tasks is None else request.tasks
        else:
            pool, named = self._pool(), list(dict.fromkeys(self._named(request.nodelist)))
            rest = sorted((place for place in pool if place not in named), key=lambda place: -self._nodes[place].cpus)
            most = self._node_counts(len(pool), len(named))[1]
            tasks = self._tasks_on(most)
            places = [*named, *rest][: min(most, tasks)]
        rooms = [self._nodes[place] for place in places]
        return self._why_too_many(rooms, tasks) or self._why_no_cpus(rooms, tasks) or self._why_no_gpus(rooms, tasks)

    def _where(self, rooms: Sequence[NodeRoom]) -> str:
        if len(self._nodes) == 1:
            return ""
        return f" on {'its ' if len(rooms) == len(self._nodes) else ''}{plural(len(rooms), 'node')}"

    def _why_too_many(self, rooms: Sequence[NodeRoom], tasks: int) -> Refused | None:
        each = self._request.ntasks_per_node
        if each is None or tasks <= each * len(rooms) or self._request.distribution == ARBITRARY:
            return None
        nodes, has = plural(len(rooms), "node"), "has" if len(rooms) == 1 else "have"
        return Refused(
            f"the step requests {plural(tasks, 'task')}, but {nodes} of job {self._job.shown_id} with at most {each} "
            f"each {has} room for {each * len(rooms)}",
            "request fewer tasks, or more nodes when you submit the job",
            "nodes",
        )

    def _why_no_cpus(self, rooms: Sequence[NodeRoom], tasks: int) -> Refused | None:
        each, shown, where = self._request.cpus_per_task, self._job.shown_id, self._where(rooms)
        slots = [self._cpu_slots(room) for room in rooms]
        is_arbitrary = self._request.distribution == ARBITRARY
        if self._request.overcommits or (all(slots) and sum(slots) >= tasks and not is_arbitrary):
            return None
        cpus, have = tasks * each, sum(room.cpus for room in rooms)
        if cpus > have:
            text = f"the step requests {cpus:g} CPUs, but job {shown} has {have:g}{where}"
        elif is_arbitrary and all(slots) and sum(slots) >= tasks:
            text = f"the host file has more tasks with {each:g} CPUs on a node than job {shown} has room for there"
        else:
            tasks_of = f"{plural(tasks, 'task')} with {each:g} CPUs{' each' if tasks > 1 else ''}"
            text = f"the step requests {tasks_of}, but job {shown} has room for {sum(slots)}{where}"
        has_more = len(rooms) < len(self._nodes) and sum(map(self._cpu_slots, self._nodes)) >= tasks
        first = "use more nodes of the job" if has_more else "request more when you submit the job"
        return Refused(text, f"{first}, or let tasks share CPUs with --overcommit", "cpus")

    def _why_no_gpus(self, rooms: Sequence[NodeRoom], tasks: int) -> Refused:
        request, shown = self._request, self._job.shown_id
        gpu = f"{request.gpu_type} GPU" if request.gpu_type else "GPU"
        counts, where = [len(room.gpus) for room in rooms], self._where(rooms)
        wanted = max(request.gpus or 0, tasks * (request.gpus_per_task or 0))
        more = "request more when you submit the job"
        if wanted > sum(counts):
            return Refused(
                f"the step requests {plural(wanted, gpu)}, but job {shown} has {sum(counts)}{where}", more, "gpus"
            )
        if request.gpus_per_node and request.gpus_per_node > min(counts):
            each = plural(request.gpus_per_node, gpu) + (" on each node" if len(self._nodes) > 1 else "")
            there = f" on {min(rooms, key=lambda room: len(room.gpus)).node}" if len(self._nodes) > 1 else ""
            return Refused(f"the step requests {each}, but job {shown} has {min(counts)}{there}", more, "gpus")
        if request.gpus and request.gpus < len(rooms):
            text = f"the step requests {plural(request.gpus, gpu)} on {plural(len(rooms), 'node')} of job {shown}"
            return Refused(text, f"use as many nodes as GPUs: -N {request.gpus}", "gpus")
        if request.gpus_per_task:
            slots = sum(count // request.gpus_per_task for count in counts)
            tasks_of = f"{plural(tasks, 'task')} with {plural(request.gpus_per_task, gpu)} each"
            return Refused(
                f"the step requests {tasks_of}, but job {shown} has room for {min(slots, tasks - 1)}{where}",
                more,
                "gpus",
            )
        text = f"the step requests {plural(wanted, gpu)}, which the nodes of job {shown} cannot give together"
        return Refused(text, more, "gpus")


def spread(count: int, most: Sequence[int]) -> list[int]:
    """So many things over places that take at most these numbers, as evenly as possible, the earlier places first.

    There is room for all of them.
    """
    return level(count, [0] * len(most), most)


def level(count: int, have: Sequence[int], most: Sequence[int]) -> list[int]:
    """As `spread`, over places that have some already: those with the fewest get the next ones."""
    found = [0] * len(most)
    while count > 0:
        open_places = [place for place, top in enumerate(most) if have[place] + found[place] < top]
        lowest = min(have[place] + found[place] for place in open_places)
        low = [place for place in open_places if have[place] + found[place] == lowest]
        above = [have[place] + found[place] for place in open_places if have[place] + found[place] > lowest]
        room = min(min(most[place] for place in low), min(above, default=MOST_TASKS)) - lowest
        # Whole rounds at once: there may be thousands.
        rounds = min(room, count // len(low))
        if not rounds:
            for place in low[:count]:
                found[place] += 1
            return found
        for place in low:
            found[place] += rounds
        count -= rounds * len(low)
    return found


def numbered(counts: Sequence[int], plane: int) -> list[list[int]]:
    """Numbers of the tasks on each node, dealt out in groups of `plane`, one group to each node in turn."""
    found: list[list[int]] = [[] for _ in counts]
    number, total = 0, sum(counts)
    while number < total:
        for place, count in enumerate(counts):
            some = min(plane, count - len(found[place]))
            found[place] += range(number, number + some)
            number += some
    return found


def _plane(distribution: str) -> int:
    """Consecutive tasks on one node."""
    kind, _, size = distribution.partition("=")
    return int(size) if kind == PLANE else 1 if kind == CYCLIC else MOST_TASKS
