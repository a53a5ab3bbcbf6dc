"""What a new reservation of the calendar keeps: the cards that disturb least, and a fair part of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor

from gpusched.model.calendar import CalendarEntry
from gpusched.model.cluster import Allocation, GpuView, NodeView
from gpusched.model.job import GpuShare
from gpusched.model.snapshot import Placement
from gpusched.model.value import replace
from gpusched.scheduler.calendar.entries import meet_at, next_window, rivals


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants kept. Exactly one of `gpus`, `cards` and `is_node`, or none of them and `cpus`."""

    gpus: int | None = None
    """So many cards of one node."""
    cards: tuple[str, ...] = ()
    """These cards, by UUID, of one node."""
    is_node: bool = False
    """A whole node and everything on it."""
    cpus: float | None = None
    """Cores; None for the same part of the node's cores as of its cards."""
    mem_mib: int | None = None
    """Host memory; None as above."""


def choose(
    wish: Wish,
    entry: CalendarEntry,
    nodes: Iterable[NodeView],
    entries: Iterable[CalendarEntry],
    allocations: Iterable[Allocation],
    now: float,
) -> Placement | None:
    """What to keep for an entry that holds nothing yet; None when no node has that many cards left.

    Cards that another entry keeps at the same time are left out. Of the others those are taken on which
    the fewest jobs may still run when the next window begins, linked ones together, the lowest first.
    """
    window = next_window(entry, now)
    begins_at = entry.start_at if window is None else window.start_at
    meeting = [other for other in rivals(entry, entries) if meet_at(entry, other, now) is not None]
    taken = {share.uuid for other in meeting for place in other.held for share in place.gpus}
    taken_nodes = {place.node for other in meeting for place in other.held if place.is_exclusive}
    late = [held for held in allocations if held.expected_end_at is None or held.expected_end_at > begins_at]
    found = []
    for node in nodes:
        if node.name in taken_nodes and not (wish.cards or wish.is_node):
            continue
        cards = _cards(wish, node, taken, late)
        if cards is None:
            continue
        jobs = sum(1 for held in late if held.node == node.name)
        found.append((_disturbance(cards, late), jobs, node.name, _placement(wish, node, cards)))
    return min(found, key=lambda one: one[:3])[3] if found else None


def _cards(wish: Wish, node: NodeView, taken: set[str], late: Sequence[Allocation]) -> tuple[GpuView, ...] | None:
    """Cards of this node that fulfil the wish, by index; None when it cannot."""
    there = sorted((view for view in node.gpus if view.is_present), key=lambda view: view.index)
    if wish.is_node:
        return tuple(there)
    if wish.cards:
        # Who names cards is told what stands in the way of them.
        named = tuple(view for view in there if view.uuid in wish.cards)
        return named if len(named) == len(set(wish.cards)) else None
    if not wish.gpus:
        return ()
    # MIG instances are kept by name: so many GPUs are so many cards.
    whole = [view for view in there if view.uuid not in taken and view.mig_profile is None]
    return _pick(whole, wish.gpus, late)


def _pick(free: Sequence[GpuView], count: int, late: Sequence[Allocation]) -> tuple[GpuView, ...] | None:
    if len(free) < count:
        return None
    ranked = sorted(free, key=lambda view: (view.why_not is not None, _jobs_on(view, late), view.index))
    options = [(ranked[:count], len(ranked))]
    groups = {view.link_group for view in free if view.link_group is not None} if count > 1 else set()
    for group in sorted(groups):
        linked = [view for view in ranked if view.link_group == group]
        if len(linked) >= count:
            options.append((linked[:count], len(linked)))

    def cost(option: tuple[list[GpuView], int]) -> tuple[object, ...]:
        views, out_of = option
        groups = {view.link_group for view in views}
        is_linked = len(groups) == 1 and None not in groups
        indices = sorted(view.index for view in views)
        unwell = sum(view.why_not is not None for view in views)
        return unwell, _disturbance(views, late), not is_linked, out_of, indices

    chosen, _ = min(options, key=cost)
    return tuple(sorted(chosen, key=lambda view: view.index))


def _jobs_on(view: GpuView, late: Iterable[Allocation]) -> int:
    return sum(1 for held in late if any(share.uuid == view.uuid for share in held.gpus))


def _disturbance(views: Iterable[GpuView], late: Sequence[Allocation]) -> int:
    return sum(_jobs_on(view, late) for view in views)


def _placement(wish: Wish, node: NodeView, cards: Sequence[GpuView]) -> Placement:
    shares = tuple(GpuShare(view.uuid, view.index) for view in cards)
    place = Placement(node.name, shares, node.cpus, node.mem_mib, is_exclusive=wish.is_node)
    if wish.is_node:
        return replace(place, resources=node.resources)
    count = sum(view.is_present for view in node.gpus)
    part = len(cards) / count if cards else min(1.0, (wish.cpus or 0.0) / node.cpus) if node.cpus else 0.0
    cpus = float(floor(node.cpus * part)) if wish.cpus is None else wish.cpus
    mem_mib = floor(node.mem_mib * part) if wish.mem_mib is None else wish.mem_mib
    return replace(place, cpus=cpus, mem_mib=mem_mib)
