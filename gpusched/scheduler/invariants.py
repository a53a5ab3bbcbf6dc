"""Invariants of every snapshot: nothing is booked twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from gpusched.model.bundles import part_of
from gpusched.model.cluster import Allocation, GpuView, NodeView
from gpusched.model.job import GpuShare, Request
from gpusched.model.planner_settings import OversubscribeSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.scheduler.request_units import WHOLE_CARD, micros_of, millicpus_of


def check_invariants(snapshot: Snapshot, settings: Settings | None = None) -> list[str]:
    """One sentence per violation; empty if all invariants hold.

    The sums are computed here from the allocations alone, independently of the planner's draft. Without
    settings there is no oversubscription, and licenses are not checked.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    over = OversubscribeSettings() if settings is None else settings.oversubscribe
    held: dict[str, list[Allocation]] = defaultdict(list)
    problems = []
    for allocation in snapshot.allocations:
        if allocation.node in nodes:
            held[allocation.node].append(allocation)
        else:
            problems.append(f"job {allocation.job_id} holds part of node {allocation.node}, which is not known")
    for name in sorted(held):
        problems.extend(_check_node(nodes[name], held[name], over))
    if settings is not None:
        problems.extend(_check_licenses(snapshot.allocations, settings.license))
    problems.extend(_check_gangs(snapshot.allocations))
    return problems


def _check_node(node: NodeView, held: list[Allocation], over: OversubscribeSettings) -> list[str]:
    views = {view.uuid: view for view in node.gpus}
    # What a node has that was not reached since the daemon's start is not known.
    problems = [] if node.is_unknown else _check_sums(node, held, over, views)
    alone = sorted({allocation.job_id for allocation in held if allocation.is_exclusive})
    jobs = sorted({allocation.job_id for allocation in held})
    if alone and len(jobs) > 1:
        problems.append(f"node {node.name} is held by job {alone[0]} alone and by jobs {', '.join(map(str, jobs))}")
    shares: dict[str, list[tuple[Allocation, GpuShare]]] = defaultdict(list)
    for allocation in held:
        uuids = [share.uuid for share in allocation.gpus]
        if len(set(uuids)) < len(uuids):
            problems.append(f"job {allocation.job_id} books one GPU of node {node.name} more than once")
        for share in allocation.gpus:
            shares[share.uuid].append((allocation, share))
    for uuid in sorted(shares):
        problems.extend(_check_card(f"GPU {uuid} of node {node.name}", views.get(uuid), shares[uuid], over.vram))
    return problems


def _check_sums(
    node: NodeView, held: list[Allocation], over: OversubscribeSettings, views: Mapping[str, GpuView]
) -> list[str]:
    """Check that what is booked of cores, memory and custom resources is there."""
    problems = []
    millicpus = sum(millicpus_of(allocation.cpus) for allocation in held)
    if millicpus > millicpus_of(node.cpus * over.cpus):
        problems.append(f"{millicpus / 1000:g} CPUs are booked on node {node.name}, which has {node.cpus:g}")
    mem_mib = sum(_mem_mib(allocation, views, int(node.mem_mib * over.mem)) for allocation in held)
    if mem_mib > int(node.mem_mib * over.mem):
        problems.append(f"{mem_mib} MiB of memory are booked on node {node.name}, which has {node.mem_mib}")
    booked = _sum_counts(allocation.resources for allocation in held)
    there = dict(node.resources)
    for name in sorted(booked):
        if booked[name] > there.get(name, 0):
            has = there.get(name, 0)
            problems.append(f"{booked[name]} of {name} are booked on node {node.name}, which has {has}")
    return problems


def _mem_mib(held: Allocation, views: Mapping[str, GpuView], node_mem_mib: int) -> int:
    """What an allocation takes of its node's memory, including that of cards without their own."""
    of_host = [view for view in views.values() if view.has_host_memory]
    wholes_mib = slices_mib = 0
    for share in held.gpus:
        if share.uuid in {view.uuid for view in of_host}:
            each_mib = node_mem_mib // len(of_host)
            wholes_mib += each_mib if share.is_whole else 0
            slices_mib += share.vram_mib or 0
    return max(held.mem_mib, wholes_mib) + slices_mib


def _check_card(name: str, view: GpuView | None, booked: list[tuple[Allocation, GpuShare]], factor: float) -> list[str]:
    """Check one card; one that has left the machine still belongs to its holders, and to only one of them."""
    problems = []
    jobs = ", ".join(str(allocation.job_id) for allocation, _ in booked)
    if len(booked) > 1 and any(share.is_whole for _, share in booked):
        problems.append(f"{name} is booked both whole and shared, by jobs {jobs}")
    if len({allocation.terms.uid for allocation, _ in booked}) > 1:
        problems.append(f"{name} is shared by several users, by jobs {jobs}")
    fractions = sum(micros_of(share.fraction) for _, share in booked if share.fraction is not None)
    if fractions > WHOLE_CARD:
        problems.append(f"fractions of {fractions / WHOLE_CARD:g} of {name} are booked, by jobs {jobs}")
    vram_mib = sum(share.vram_mib or 0 for _, share in booked)
    # For a card without memory of its own, only the node's total counts.
    total_mib = None if view is None or view.has_host_memory else view.vram_total_mib
    if total_mib is not None and vram_mib > int(total_mib * factor):
        problems.append(f"{vram_mib} MiB of {name} are booked, which has {total_mib}, by jobs {jobs}")
    return problems


def _check_licenses(allocations: Iterable[Allocation], there: Mapping[str, int]) -> list[str]:
    booked = _sum_counts(allocation.licenses for allocation in allocations)
    return [
        f"{booked[name]} licenses {name} are booked, and there are {there.get(name, 0)}"
        for name in sorted(booked)
        if booked[name] > there.get(name, 0)
    ]


def _check_gangs(allocations: Iterable[Allocation]) -> list[str]:
    """Check that the pieces of a gang are equal, on different nodes, and that only one holds its licenses."""
    pieces: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        pieces[allocation.job_id].append(allocation)
    problems = []
    for job_id, parts in sorted(pieces.items()):
        request = parts[0].terms.request
        if request is not None and request.bundles is not None:
            problems.extend(_check_bundles(job_id, request, parts))
            continue
        if len(parts) == 1:
            continue
        if len({part.node for part in parts}) < len(parts):
            problems.append(f"job {job_id} holds one node more than once")
        shapes = {(part.cpus, part.mem_mib, part.resources, part.is_exclusive) for part in parts}
        if len(shapes) > 1 or not _has_like_gpus(parts):
            problems.append(f"job {job_id} does not hold the same on each of its nodes")
        if sum(bool(part.licenses) for part in parts) > 1:
            problems.append(f"job {job_id} holds its licenses more than once")
    return problems


def _check_bundles(job_id: int, request: Request, parts: list[Allocation]) -> list[str]:
    """Check that the pieces of a job in bundles are whole bundles, all of them, on as many nodes as it may have."""
    bundles = request.bundles
    if bundles is None:
        return []
    problems = []
    if not request.nodes <= len({part.node for part in parts}) == len(parts) <= bundles.nodes_max:
        problems.append(f"job {job_id} holds {len(parts)} parts of nodes; it asked for {request.nodes} or more nodes")
    total = sum(len(part.gpus) for part in parts)
    if total != request.total_gpus or any(bundles.gpus and len(part.gpus) % bundles.gpus for part in parts):
        problems.append(f"job {job_id} holds {total} GPUs, and asked for {request.total_gpus}")
    cpus = [round(part.cpus + part.suspended_cpus, 3) for part in parts]
    if bundles.gpus:
        counts = [len(part.gpus) // bundles.gpus for part in parts]
    else:
        counts = [round(booked / bundles.cpus) for booked in cpus]
    for part, count, booked in zip(parts, counts, cpus, strict=True):
        wanted = part_of(request, count)
        if (booked, part.mem_mib) != (round(wanted.cpus, 3), wanted.mem_mib):
            problems.append(f"job {job_id} does not hold what {count} of its bundles take on node {part.node}")
    if sum(counts) != bundles.count:
        problems.append(f"job {job_id} holds {sum(counts)} bundles, and asked for {bundles.count}")
    if sum(bool(part.licenses) for part in parts) > 1:
        problems.append(f"job {job_id} holds its licenses more than once")
    return problems


def _has_like_gpus(parts: list[Allocation]) -> bool:
    """Whether all pieces of a gang have the same number of GPUs, except for the requested tail."""
    counts = sorted(len(part.gpus) for part in parts)
    tail = parts[0].terms.request.tail_gpus
    return len(set(counts[1:] if tail and counts[0] == tail else counts)) == 1


def _sum_counts(counts: Iterable[tuple[tuple[str, int], ...]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for pairs in counts:
        for name, count in pairs:
            total[name] += count
    return total
