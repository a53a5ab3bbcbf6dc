"""Jobs laid out over nodes in bundles: what a node with some of them books, and what all nodes together book."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gpusched.model.job import Bundles, Request
from gpusched.model.layout import Arrangement, node_amounts, spread_tasks
from gpusched.model.value import asdict, replace


def bundles_of(found: Arrangement) -> Bundles | None:
    """The bundles of an arrangement as an attribute of its request."""
    return None if found.bundles is None else Bundles(**found.bundles)


@lru_cache(maxsize=4096)
def part_of(request: Request, count: int, nodes: int = 1) -> Request:
    """What each of so many nodes with `count` bundles books, as a request without any.

    Its licenses are those of the whole job for several nodes; one node alone is a part of the job, and has none.
    """
    gpus, cpus, mem_mib = node_amounts(asdict(bundles_in(request)), count)
    return replace(
        request,
        nodes=nodes,
        bundles=None,
        gpus=gpus,
        cpus=cpus,
        mem_mib=mem_mib,
        licenses=request.licenses if nodes > 1 else (),
    )


def one_node(request: Request) -> Request:
    """The request, all of it on one node."""
    bundles = bundles_in(request)
    return replace(part_of(request, bundles.count), licenses=request.licenses)


def on_each_node(request: Request, **amounts: Any) -> Request:
    """The request with these amounts of `gpus`, `cpus` or `mem_mib` on each node, however many bundles it has."""
    if request.bundles is None:
        return replace(request, **amounts)
    least = {f"node_{name}": amounts[name] for name in ("cpus", "mem_mib") if name in amounts}
    bundles = replace(request.bundles, **dict.fromkeys(amounts, 0), **least)
    return replace(request, bundles=bundles, **amounts)


def totals(request: Request) -> tuple[float, float]:
    """Cores and MiB of memory of all nodes together; with bundles, of the fewest nodes."""
    if request.bundles is None:
        nodes = request.nodes + bool(request.tail_gpus)
        return request.cpus * nodes, float(request.mem_mib * nodes)
    parts = [part_of(request, count) for count in spread_tasks(request.bundles.count, request.nodes)]
    return sum(part.cpus for part in parts), float(sum(part.mem_mib for part in parts))


def bundles_in(request: Request) -> Bundles:
    """The bundles of a request that has some."""
    assert request.bundles is not None, "the request has no bundles"
    return request.bundles
