"""Groups of related cards on a node, and the choice of cards among them.

Cards with the same link group are linked with each other; on a node without link groups, cards next to the same
memory (NUMA node) form groups instead; if both are unknown, all cards of the node are one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout, LayoutGpu

_GROUPS = "topology"
_TWINS = "twins"


@dataclass(frozen=True, slots=True)
class CardCandidate:
    """A candidate card; the smaller the cost the better."""

    card: LayoutGpu
    cost: tuple[int, ...]


def groups_of(layout: ClusterLayout) -> tuple[tuple[int, ...] | None, ...]:
    """Per node, the group of each of its cards, in order of card; None if all cards are one group."""
    known = layout.pools.get(_GROUPS)
    if isinstance(known, tuple):
        return known
    made = tuple(_groups_of_node(cards) for cards in layout.cards_of)
    layout.pools[_GROUPS] = made
    return made


def _groups_of_node(cards: Sequence[LayoutGpu]) -> tuple[int, ...] | None:
    marks: list[int | None] = [card.view.link_group for card in cards]
    if all(mark is None for mark in marks):
        marks = [card.view.numa for card in cards]
    if len(set(marks)) <= 1:
        # Cards without any link are interchangeable, and so are cards that are all linked.
        return None
    # A card without a link group, on a node where others have one, is a separate group.
    numbers: dict[object, int] = {}
    found = []
    for card, mark in zip(cards, marks, strict=True):
        key: object = ("card", card.number) if mark is None else mark
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)


def twins_of(layout: ClusterLayout) -> tuple[int | None, ...]:
    """Per node, a number shared by all identical nodes; None if its own cards differ.

    Custom resources are not compared: needs for them must be checked on each node.
    """
    known = layout.pools.get(_TWINS)
    if isinstance(known, tuple):
        return known
    numbers: dict[object, int] = {}
    groups = groups_of(layout)
    made = tuple(
        _kind_of_node(layout, node, numbers) if groups[node] is None else None for node in range(len(layout.nodes))
    )
    layout.pools[_TWINS] = made
    return made


def _kind_of_node(layout: ClusterLayout, node: int, numbers: dict[object, int]) -> int | None:
    cards = {
        (
            replace(card.view, uuid="", index=0, utilisation=None, ecc_errors=None),
            layout.slice_limits[card.number],
        )
        for card in layout.cards_of[node]
    }
    if len(cards) > 1:
        return None
    view = layout.nodes[node]
    kind = view.cpus, view.mem_mib, view.resources, len(layout.cards_of[node]), *cards
    return numbers.setdefault(kind, len(numbers))


def by_group(layout: ClusterLayout, node: int, cards: Sequence[LayoutGpu]) -> list[tuple[LayoutGpu, ...]]:
    """These cards of a node as one tuple per group, in order of appearance."""
    groups = groups_of(layout)[node]
    if groups is None:
        return [tuple(cards)] if cards else []
    first = layout.cards_of[node][0].number
    found: dict[int, list[LayoutGpu]] = {}
    for card in cards:
        found.setdefault(groups[card.number - first], []).append(card)
    return [tuple(members) for members in found.values()]


def take(
    layout: ClusterLayout, node: int, free: Sequence[CardCandidate], count: int, *, is_linked: bool, tightness: int
) -> tuple[list[CardCandidate], int] | None:
    """`count` of the free cards, and the number of additional groups they span.

    `free` is sorted, cheapest first. Groups that hold all of them come first, and among these the
    one with the cheapest cards, then with a `tightness` of 1 the one with the fewest free cards, so that others
    stay whole, with -1 the one with the most, with 0 the first. None if there are too few, or if they must be
    linked and no group has enough.
    """
    if len(free) < count:
        return None
    groups = groups_of(layout)[node]
    if groups is None:
        return list(free[:count]), 0
    first = layout.cards_of[node][0].number
    members: dict[int, list[CardCandidate]] = {}
    for one in free:
        members.setdefault(groups[one.card.number - first], []).append(one)
    whole = [group for group in members.values() if len(group) >= count]
    if whole:
        return _cheapest(whole, count, tightness), 0
    return None if is_linked else _spread(list(members.values()), count)


def _cheapest(groups: Sequence[list[CardCandidate]], count: int, tightness: int) -> list[CardCandidate]:
    """From the best of several groups with enough cards each."""

    def rank(group: list[CardCandidate]) -> tuple[tuple[int, ...], int, int]:
        return group[count - 1].cost, tightness * len(group), group[0].card.number

    return min(groups, key=rank)[:count]


def _spread(groups: Sequence[list[CardCandidate]], count: int) -> tuple[list[CardCandidate], int]:
    """From as few groups as possible: the largest whole, then the smallest with the rest; cheapest among equals."""
    left = sorted(groups, key=lambda group: (group[0].cost, group[0].card.number))
    chosen: list[CardCandidate] = []
    used = 0
    while len(chosen) < count:
        rest = count - len(chosen)
        enough = [group for group in left if len(group) >= rest]
        group = min(enough, key=len) if enough else max(left, key=len)
        left.remove(group)
        chosen.extend(group[:rest])
        used += 1
    return chosen, used - 1


def largest_group(layout: ClusterLayout, node: int, cards: Sequence[LayoutGpu]) -> int:
    """Maximum number of these cards of a node that are linked with each other."""
    return max((len(group) for group in by_group(layout, node, cards)), default=0)
