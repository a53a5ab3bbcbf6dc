"""What must hold in every snapshot, whatever has happened: nothing is promised twice."""

from __future__ import annotations

from collections import defaultdict

from gpusched.model.cluster import Allocation, GpuView, NodeView
from gpusched.model.job import GpuShare
from gpusched.model.snapshot import Snapshot
from gpusched.policy.draft import WHOLE_CARD, micros_of, millicpus_of


def check_invariants(snapshot: Snapshot) -> list[str]:
    """One sentence for each thing that is wrong; empty when all is well.

    The sums are made here from the allocations alone, not by the draft that the policy decides on.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    held: dict[str, list[Allocation]] = defaultdict(list)
    problems = []
    for allocation in snapshot.allocations:
        if allocation.node in nodes:
            held[allocation.node].append(allocation)
        else:
            problems.append(f"job {allocation.job_id} holds part of node {allocation.node}, which is not known")
    for name in sorted(held):
        problems.extend(_check_node(nodes[name], held[name]))
    return problems


def _check_node(node: NodeView, held: list[Allocation]) -> list[str]:
    problems = []
    millicpus = sum(millicpus_of(allocation.cpus) for allocation in held)
    if millicpus > millicpus_of(node.cpus):
        problems.append(f"{millicpus / 1000:g} CPUs are booked on node {node.name}, which has {node.cpus:g}")
    mem_mib = sum(allocation.mem_mib for allocation in held)
    if mem_mib > node.mem_mib:
        problems.append(f"{mem_mib} MiB of memory are booked on node {node.name}, which has {node.mem_mib}")
    views = {view.uuid: view for view in node.gpus}
    shares: dict[str, list[tuple[Allocation, GpuShare]]] = defaultdict(list)
    for allocation in held:
        uuids = [share.uuid for share in allocation.gpus]
        if len(set(uuids)) < len(uuids):
            problems.append(f"job {allocation.job_id} books one GPU of node {node.name} more than once")
        for share in allocation.gpus:
            shares[share.uuid].append((allocation, share))
    for uuid in sorted(shares):
        problems.extend(_check_card(f"GPU {uuid} of node {node.name}", views.get(uuid), shares[uuid]))
    return problems


def _check_card(name: str, view: GpuView | None, booked: list[tuple[Allocation, GpuShare]]) -> list[str]:
    """A card that has left the machine still belongs to those who held it, and to nobody twice."""
    problems = []
    jobs = ", ".join(str(allocation.job_id) for allocation, _ in booked)
    if len(booked) > 1 and any(share.is_whole for _, share in booked):
        problems.append(f"{name} is booked whole and shared at once, by jobs {jobs}")
    if len({allocation.uid for allocation, _ in booked}) > 1:
        problems.append(f"{name} is shared by several users, by jobs {jobs}")
    fractions = sum(micros_of(share.fraction) for _, share in booked if share.fraction is not None)
    if fractions > WHOLE_CARD:
        problems.append(f"fractions of {fractions / WHOLE_CARD:g} of {name} are booked, by jobs {jobs}")
    vram_mib = sum(share.vram_mib or 0 for _, share in booked)
    total_mib = None if view is None else view.vram_total_mib
    if total_mib is not None and vram_mib > total_mib:
        problems.append(f"{vram_mib} MiB of {name} are booked, which has {total_mib}, by jobs {jobs}")
    return problems
