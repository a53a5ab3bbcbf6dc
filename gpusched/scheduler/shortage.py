"""What is missing for a request to start now: each resource with what is needed, free and there at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpusched.model.units import format_amount, format_size_mib, plural, plural_of
from gpusched.model.value import replace
from gpusched.scheduler.amounts import WHOLE_CARD
from gpusched.scheduler.draft import Card, Draft
from gpusched.scheduler.filters import node_mem_mib, room_of
from gpusched.scheduler.placement import Need, hosts, pool, slice_of
from gpusched.scheduler.topology import by_group, largest_group
from gpusched.scheduler.words import (
    NAMED,
    about,
    describe,
    describe_part,
    licenses,
    name_some,
)

__all__ = ["NAMED", "Lack", "about", "describe", "lacks", "lacks_of_licenses", "name_some"]


@dataclass(frozen=True, slots=True)
class Lack:
    """One resource of which too little is free. With several nodes, `free` is the most on any one."""

    resource: str
    """`gpus`, `linked_gpus`, `vram_mib`, `gpu_fraction`, `cpus`, `mem_mib`, `resource:NAME`, `license:NAME`; `nodes`
    for a gang, for a job that must be alone, and when only the combination lacks."""
    needed: float
    free: float
    total: float
    text: str
    """Follows the word "needs"."""


def lacks(draft: Draft, need: Need) -> list[Lack]:
    """What keeps a need that does not fit now from fitting, each resource by itself.

    Only nodes and cards that may be used count, and a job must fit on one node, but for a gang, of which each
    node's part must.
    """
    usable = [place.node for place in pool(draft.layout, need).places]
    found = lacks_of_licenses(draft, need)
    if need.request.nodes > 1:
        found.extend(_lack_of_nodes(draft, need, usable))
    else:
        found.extend(_lacks_on_one_node(draft, need, usable))
    if not found:
        text = f"{describe(need.request, full=True)}, which is free, but not all of it on one node"
        found.append(Lack("nodes", 1, 0, len(usable), text))
    return found


def _lacks_on_one_node(draft: Draft, need: Need, usable: Sequence[int]) -> list[Lack]:
    layout, request = draft.layout, need.request
    found: list[Lack] = []
    if request.is_exclusive and all(draft.jobs[node] for node in usable):
        text = "a node of its own, and other jobs are on " + (f"all {len(usable)}" if len(usable) > 1 else "it")
        found.append(Lack("nodes", 1, 0, len(usable), text))
    of_gpus: list[Lack] = []
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
        found.append(Lack("nodes", 1, 0, len(usable), text))
    return found


def _needed_mib(draft: Draft, need: Need, usable: Sequence[int]) -> int:
    """Memory of one node that the need takes, with that of its cards where these have none of their own."""
    layout = draft.layout
    if not need.request.gpus or not layout.has_host_memory:
        return need.request.mem_mib
    cards_of = pool(layout, need).cards_of
    return min((node_mem_mib(need, card) for node in usable for card in cards_of[node]), default=need.request.mem_mib)


def lacks_of_licenses(draft: Draft, need: Need) -> list[Lack]:
    """Licenses of which too few are free."""
    found = []
    for name, count in need.request.licenses:
        free, total = max(0, draft.free_licenses.get(name, 0)), draft.layout.licenses.get(name, 0)
        if count > free:
            verb = "is" if free <= 1 else "are"
            text = f"{licenses(name, count)}, {free or 'none'} of {total} {verb} free"
            found.append(Lack(f"license:{name}", count, free, total, text))
    return found


def _lack_of_nodes(draft: Draft, need: Need, usable: Sequence[int]) -> list[Lack]:
    """Of a gang: how many nodes have its part free; the GPUs alone, if it is those that lack."""
    request = need.request
    gpus_alone = replace(request, nodes=1, cpus=0.0, mem_mib=0, resources=(), is_exclusive=False, licenses=())
    everything = replace(request, nodes=1, licenses=())
    for part, full in ((gpus_alone, False), (everything, True)):
        if full or part.gpus:
            able = sum(1 for _ in hosts(draft, Need.of(part, need.uid)))
            if able < request.nodes:
                what = describe_part(part, full=full)
                alone = " of its own" if part.is_exclusive else ""
                has = "has" if able <= 1 else "have"
                text = (
                    f"{request.nodes} nodes{alone} with {what} each, {able or 'none'} of {len(usable)} {has} that free"
                )
                return [Lack("nodes", request.nodes, able, len(usable), text)]
    return []


def _lack(
    resource: str, noun: str, needed: float, free: Sequence[float], total: float, show: Callable[[float], str]
) -> Lack:
    """The figures of a resource that nodes have in amounts. `free` is per node."""
    most = max(free, default=0)
    there = show(most) if most else "none"
    if len(free) > 1:
        overall = f"{show(sum(free))} of {show(total)} in all"
        text = f"{noun} on one node, the most free on one is {there} ({overall})"
    else:
        verb = "is" if most <= 1 or resource == "mem_mib" else "are"
        text = f"{noun}, {there} of {show(total)} {verb} free"
    return Lack(resource, needed, most, total, text)


def _lack_of_wholes(draft: Draft, need: Need, usable: Sequence[int]) -> list[Lack]:
    request = need.request
    cards_of = pool(draft.layout, need).cards_of
    free_cards = [_free(draft, node, cards_of[node]) for node in usable]
    free = [len(cards) for cards in free_cards]
    if request.gpus > max(free, default=0):
        noun = f"{request.gpus} free {request.gpu_type or plural_of(request.gpus, 'GPU')}"
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
    text = f"{request.gpus} free linked GPUs, the most free in one group is {most} (of {total})"
    return [Lack("linked_gpus", request.gpus, most, total, text)]


def _free(draft: Draft, node: int, cards: Sequence[Card]) -> list[Card]:
    return [] if draft.exclusive[node] else [card for card in cards if draft.is_unbooked(card.number)]


def _lack_of_slices(draft: Draft, need: Need, usable: Sequence[int]) -> list[Lack]:
    """Of one slice, the most room on any card; of several, the number of cards with room."""
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
        return [Lack("gpus", request.gpus, max(fitting, default=0), total, text)]
    open_cards = [
        card
        for card in every
        if not draft.wholes[card.number] and (not draft.slices[card.number] or draft.owner[card.number] == need.uid)
    ]
    room_mib = max((room_of(draft, need, card) for card in open_cards), default=0)
    total_mib = max((card.slice_total_mib or 0 for card in every), default=0)
    if request.vram_mib is not None:
        most = f"the most room on one is {format_size_mib(room_mib)}" if room_mib > 0 else "none has room"
        text = f"{what} on one card, {most}"
        return [Lack("vram_mib", request.vram_mib, max(0, room_mib), total_mib, text)]
    part = max(((WHOLE_CARD - draft.micros[card.number]) / WHOLE_CARD for card in open_cards), default=0.0)
    if room_mib < total_mib:
        part = min(part, max(0, room_mib) / max(1, total_mib))
    text = f"{what}, the most free on one is {part:.2g}"
    return [Lack("gpu_fraction", request.gpu_fraction or 0, part, 1, text)]
