"""Resources that a request is short of right now, as the reasons of pending jobs name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpusched.model.bundles import on_each_node, part_of
from gpusched.model.job import Request
from gpusched.model.units import format_amount, format_size_mib, plural, plural_of
from gpusched.model.value import replace
from gpusched.scheduler.bundles import fewest_nodes, most_bundles
from gpusched.scheduler.cluster_state import ClusterState, LayoutGpu
from gpusched.scheduler.filters import node_mem_mib, pool, room_of, slice_of
from gpusched.scheduler.infeasible import describe, describe_part, license_text
from gpusched.scheduler.placement import bundle_rooms, hosts
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits
from gpusched.scheduler.topology import by_group, largest_group


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that is short. With several nodes, `free` is the most on any one."""

    resource: str
    """`gpus`, `linked_gpus`, `vram_mib`, `gpu_fraction`, `cpus`, `mem_mib`, `resource:NAME`, `license:NAME`; `nodes`
    for a gang, for an exclusive job, and if only the combination is short."""
    needed: int | float
    free: int | float
    total: int | float
    text: str
    """Follows the word "needs"."""


def shortages(draft: ClusterState, need: RequestUnits) -> list[Shortage]:
    """Why a need does not fit now, each resource by itself.

    Only usable nodes and cards count. A job must fit on one node; of a gang, each node's part must.
    """
    usable = [place.node for place in pool(draft.layout, need).places]
    found = license_shortages(draft, need)
    if need.bundles is not None:
        found.extend(_lack_of_bundles(draft, need, usable))
    elif need.request.nodes > 1:
        found.extend(_lack_of_nodes(draft, need, usable))
    else:
        found.extend(_lacks_on_one_node(draft, need, usable))
    if not found:
        text = f"{describe(need.request, full=True)}, which is free, but not all of it on one node"
        found.append(Shortage("nodes", 1, 0, len(usable), text))
    return found


def _lacks_on_one_node(draft: ClusterState, need: RequestUnits, usable: Sequence[int]) -> list[Shortage]:
    layout, request = draft.layout, need.request
    found: list[Shortage] = []
    if request.is_exclusive and all(draft.jobs[node] for node in usable):
        text = "an exclusive node, and other jobs are on " + (f"all {len(usable)}" if len(usable) > 1 else "it")
        found.append(Shortage("nodes", 1, 0, len(usable), text))
    of_gpus: list[Shortage] = []
    if request.gpus:
        of_gpus = (_lack_of_slices if need.is_slice else _lack_of_wholes)(draft, need, usable)
        found.extend(of_gpus)
    free_cpus = [0 if draft.exclusive[node] else max(0, draft.free_millicpus[node]) / 1000 for node in usable]
    if need.millicpus / 1000 > max(free_cpus, default=0):
        total = sum(layout.millicpus[node] for node in usable) / 1000
        noun = plural(request.cpus, "CPU")
        found.append(_lack("cpus", noun, request.cpus, free_cpus, total, format_amount))
    free_mib = [0 if draft.exclusive[node] else max(0, draft.free_mem_mib[node]) for node in usable]
    needed_mib = request.mem_mib if of_gpus else _needed_mib(draft, need, usable)
    if needed_mib > max(free_mib, default=0):
        total_mib = sum(layout.mem_mib[node] for node in usable)
        noun = f"{format_size_mib(needed_mib)} of memory"
        if needed_mib > request.mem_mib:
            noun += " (its GPU uses the host's)" if request.gpus == 1 else " (its GPUs use the host's)"
        found.append(_lack("mem_mib", noun, needed_mib, free_mib, total_mib, format_size_mib))
    for name, count in request.resources:
        free = [0 if draft.exclusive[node] else max(0, draft.free_resources[node].get(name, 0)) for node in usable]
        if count > max(free, default=0):
            total = sum(dict(layout.nodes[node].resources).get(name, 0) for node in usable)
            found.append(_lack(f"resource:{name}", f"{count} of {name}", count, free, total, format_amount))
    if not found and usable and all(draft.exclusive[node] for node in usable):
        where = "the node is" if len(usable) == 1 else "every node is"
        text = f"{describe(request, full=True)}, and {where} held by a job that must be alone"
        found.append(Shortage("nodes", 1, 0, len(usable), text))
    return found


def _needed_mib(draft: ClusterState, need: RequestUnits, usable: Sequence[int]) -> int:
    """Memory of one node that the need takes, including its cards' if these have none of their own."""
    layout = draft.layout
    if not need.request.gpus or not layout.has_host_memory:
        return need.request.mem_mib
    cards_of = pool(layout, need).cards_of
    return min((node_mem_mib(need, card) for node in usable for card in cards_of[node]), default=need.request.mem_mib)


def license_shortages(draft: ClusterState, need: RequestUnits) -> list[Shortage]:
    """Licenses with too few free."""
    found = []
    for name, count in need.request.licenses:
        free, total = max(0, draft.free_licenses.get(name, 0)), draft.layout.licenses.get(name, 0)
        if count > free:
            text = f"{license_text(name, count)}, {free or 'none'} of {total} free"
            found.append(Shortage(f"license:{name}", count, free, total, text))
    return found


def _lack_of_nodes(draft: ClusterState, need: RequestUnits, usable: Sequence[int]) -> list[Shortage]:
    """For a gang, the number of nodes with its part free; the GPUs alone if only those are short."""
    request = need.request
    gpus_alone = replace(request, nodes=1, cpus=0.0, mem_mib=0, resources=(), is_exclusive=False, licenses=())
    everything = replace(request, nodes=1, licenses=())
    for part, full in ((gpus_alone, False), (everything, True)):
        if full or part.gpus:
            able = sum(1 for _ in hosts(draft, RequestUnits.of(part, need.uid)))
            if able < request.nodes:
                what = describe_part(part, full=full)
                alone = "exclusive " if part.is_exclusive else ""
                has = "has" if able <= 1 else "have"
                text = (
                    f"{request.nodes} {alone}nodes with {what} each, {able or 'none'} of {len(usable)} {has} that free"
                )
                return [Shortage("nodes", request.nodes, able, len(usable), text)]
    return []


def _lack_of_bundles(draft: ClusterState, need: RequestUnits, usable: Sequence[int]) -> list[Shortage]:
    """For a job in bundles, the most that is free on as many nodes as it may take; GPUs alone if those are short."""
    request, layout = need.request, draft.layout
    gpus_alone = replace(on_each_node(request, cpus=0.0, mem_mib=0), resources=(), is_exclusive=False, licenses=())
    for part, full in ((gpus_alone, False), (request, True)):
        if not (full or part.gpus):
            continue
        rooms = bundle_rooms(draft, RequestUnits.of(part, need.uid))
        if fewest_nodes(rooms.values(), part) is not None:
            continue
        count, nodes = most_bundles(rooms.values(), part)
        text = f"{describe(part, full=full)}, "
        if len(rooms) < request.nodes:
            least = describe_part(part_of(part, 1), full=full)
            text += f"{len(rooms) or 'none'} of {len(usable)} {'has' if len(rooms) <= 1 else 'have'} {least} free"
            return [Shortage("nodes", request.nodes, len(rooms), len(usable), text)]
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        if not full:
            total = sum(len(pool(layout, need).cards_of[node]) for node in usable)
            free = count * request.total_gpus // _count(request)
            text += f"the most free on {where} is {free} (of {total} in all)"
            return [Shortage("gpus", request.total_gpus, free, total, text)]
        text += f"the most that is free on {where} is {count} of its {_count(request)} parts"
        return [Shortage("nodes", _count(request), count, _count(request), text)]
    return []


def _count(request: Request) -> int:
    """Number of bundles."""
    return 1 if request.bundles is None else request.bundles.count


def _lack(
    resource: str,
    noun: str,
    needed: int | float,
    free: Sequence[int | float],
    total: int | float,
    show: Callable[[float], str],
) -> Shortage:
    """The numbers for a per-node resource. `free` is per node."""
    most = max(free, default=0)
    there = show(most) if most else "none"
    if len(free) > 1:
        overall = f"{show(sum(free))} of {show(total)} in all"
        text = f"{noun} on one node, the most free on one is {there} ({overall})"
    else:
        text = f"{noun}, {there} of {show(total)} free"
    return Shortage(resource, needed, most, total, text)


def _lack_of_wholes(draft: ClusterState, need: RequestUnits, usable: Sequence[int]) -> list[Shortage]:
    request = need.request
    cards_of = pool(draft.layout, need).cards_of
    free_cards = [_free(draft, node, cards_of[node]) for node in usable]
    free = [len(cards) for cards in free_cards]
    if request.gpus > max(free, default=0):
        noun = f"{request.gpus} {request.gpu_type or plural_of(request.gpus, 'GPU')}"
        if request.min_vram_mib:
            noun += f" with {format_size_mib(request.min_vram_mib)} or more"
        total = sum(len(cards_of[node]) for node in usable)
        return [_lack("gpus", noun, request.gpus, free, total, format_amount)]
    if not request.is_linked:
        return []
    found = [by_group(draft.layout, node, cards) for node, cards in zip(usable, free_cards, strict=True)]
    most = max((len(group) for groups in found for group in groups), default=0)
    if request.gpus <= most:
        return []
    total = max(largest_group(draft.layout, node, cards_of[node]) for node in usable)
    text = f"{request.gpus} linked GPUs, the most free in one group is {most} (of {total})"
    return [Shortage("linked_gpus", request.gpus, most, total, text)]


def _free(draft: ClusterState, node: int, cards: Sequence[LayoutGpu]) -> list[LayoutGpu]:
    return [] if draft.exclusive[node] else [card for card in cards if draft.is_unbooked(card.number)]


def _lack_of_slices(draft: ClusterState, need: RequestUnits, usable: Sequence[int]) -> list[Shortage]:
    """For one slice, the most room on any card; for several, the number of cards with room."""
    request = need.request
    cards_of = pool(draft.layout, need).cards_of
    cards = [() if draft.exclusive[node] else cards_of[node] for node in usable]
    fitting = [sum(slice_of(draft, need, card)[0] is not None for card in there) for there in cards]
    if request.gpus <= max(fitting, default=0):
        return []
    every = [card for there in cards for card in there]
    what = describe(request)
    if request.gpus > 1:
        total = len(every)
        text = f"{what}, {max(fitting, default=0)} of {total} cards {'have' if total > 1 else 'has'} room"
        return [Shortage("gpus", request.gpus, max(fitting, default=0), total, text)]
    open_cards = [
        card
        for card in every
        if not draft.wholes[card.number] and (not draft.slices[card.number] or draft.owner[card.number] == need.uid)
    ]
    room_mib = max((room_of(draft, need, card) for card in open_cards), default=0)
    total_mib = max((card.slice_total_mib or 0 for card in every), default=0)
    if request.vram_mib is not None and (request.sm_percent is None or room_mib < request.vram_mib):
        most = f"the most room on one is {format_size_mib(room_mib)}" if room_mib > 0 else "none has room"
        text = f"{what} on one card, {most}"
        return [Shortage("vram_mib", request.vram_mib, max(0, room_mib), total_mib, text)]
    part = max(((WHOLE_CARD - draft.micros[card.number]) / WHOLE_CARD for card in open_cards), default=0.0)
    if room_mib < total_mib and request.vram_mib is None:
        part = min(part, max(0, room_mib) / max(1, total_mib))
    most = f"{part:.0%}" if request.sm_percent is not None else f"{part:.2g}"
    text = f"{what}, the most free on one is {most}"
    return [Shortage("gpu_fraction", request.card_fraction or 0, part, 1, text)]
