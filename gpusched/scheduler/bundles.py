"""Numbers of bundles on nodes: how many a node has room for, on how few nodes a job fits, and how many go to each.

A job with bundles takes as few nodes as it can, and on these it is laid out as evenly as their room allows: what its
nodes compute together is done when the one with the most of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gpusched.model.bundles import bundles_in
from gpusched.model.job import Request

if TYPE_CHECKING:
    from gpusched.scheduler.cluster_state import ClusterState
    from gpusched.scheduler.request_units import RequestUnits


def bundles_within(draft: ClusterState, need: RequestUnits, node: int) -> int:
    """The most bundles on a node by the number of free cards, cores and memory; fewer may have a place there."""
    bundles = bundles_in(need.request)
    count = bundles.most
    if bundles.gpus and not need.is_slice:
        count = min(count, draft.free_cards[node] // bundles.gpus)
    free_cpus, free_mib = draft.free_millicpus[node] / 1000, draft.free_mem_mib[node]
    if bundles.node_cpus and free_cpus < bundles.node_cpus:
        return 0
    if bundles.node_mem_mib and free_mib < bundles.node_mem_mib:
        return 0
    # Each bundle's amount is rounded when it is booked, so one more may fit than these quotients say.
    if bundles.cpus:
        count = min(count, int(free_cpus / bundles.cpus + 1e-3))
    if bundles.mem_mib:
        count = min(count, int(free_mib / bundles.mem_mib + 1e-3))
    return max(0, count)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, 0 if none does; every smaller one than one that fits does so too."""
    if most <= 0 or fits(most):
        return max(0, most)
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fewest_nodes(rooms: Iterable[int], request: Request) -> int | None:
    """The fewest nodes on which a job fits, of those with room for so many of its bundles; None if it does on none."""
    bundles, total, nodes = bundles_in(request), 0, 0
    for room in sorted(rooms, reverse=True):
        if not room or nodes == bundles.nodes_max:
            break
        total, nodes = total + room, nodes + 1
        if nodes >= request.nodes and total >= bundles.count:
            return nodes
    return None


def most_bundles(rooms: Iterable[int], request: Request) -> tuple[int, int]:
    """The most bundles of a job on as many nodes as it may have, and on how few nodes these have room."""
    found = [room for room in sorted(rooms, reverse=True) if room][: bundles_in(request).nodes_max]
    return sum(found), len(found)


def levelled(rooms: Sequence[int], count: int) -> list[int]:
    """Bundles for each of some nodes, at least one and at most its room: as equal as possible, `count` in all."""
    found, left = [0] * len(rooms), count
    # Those with the least room first: what they cannot take is left to the others.
    for done, place in enumerate(sorted(range(len(rooms)), key=lambda place: (rooms[place], place))):
        found[place] = min(rooms[place], -(-left // (len(rooms) - done)))
        left -= found[place]
    return found
