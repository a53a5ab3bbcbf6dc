"""Scores of placements with room: the strategies of [placement] strategy, each a few small functions.

A strategy orders the cards of a node for a slice, and scores nodes. All use the smallest
sufficient cards for whole-card jobs, and leave nodes with many GPUs to jobs that use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState, LayoutGpu
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits
from gpusched.scheduler.strategies.expected_capacity import expected_capacity_of
from gpusched.scheduler.strategies.fragmentation import fragmentation_of

_LARGEST = "largest node"

Score = tuple[float, ...]
"""Smaller is better. The node number breaks ties."""


# Not frozen, as `placement.Candidate`.
@dataclass(slots=True)
class PlacementFeatures:
    """A placement on one node with the inputs of the strategies."""

    booking: AllocationUnits
    free: int
    """Previously unused cards of the right kind on the node."""
    largest_mib: int
    """For whole cards: the size of the largest among them."""
    opened: int
    """For slices: number of previously empty cards."""
    left_mib: int
    """For slices: the room left on their cards."""


CardCost = Callable[[ClusterState, LayoutGpu, int], tuple[int, ...]]
"""Cost of placing a slice on this card, given the room in MiB that is left then."""


# --- pack: fill nodes and cards ---------------------------------------------------------------------


def fullest_card(draft: ClusterState, card: LayoutGpu, left_mib: int) -> tuple[int, ...]:
    """Used cards before empty ones, then the least room left."""
    return int(not draft.slices[card.number]), left_mib


def pack(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    """Fewest empty cards opened, then the node with the least GPU room: tightest fit.

    This includes jobs without GPUs: they take cores where no GPU is left to need them.
    """
    node = choice.booking.node
    if draft.shared_cards[node]:
        room = sum(_free_micros(draft, card) for card in draft.layout.cards_of[node])
    else:
        room = draft.free_cards[node] * WHOLE_CARD
    if need.is_slice:
        return choice.opened, room, choice.left_mib
    if need.request.gpus:
        return choice.largest_mib, room
    return room, len(draft.layout.cards_of[node]), draft.free_millicpus[node]


# --- spread: even out -------------------------------------------------------------------------------


def emptiest_card(draft: ClusterState, card: LayoutGpu, left_mib: int) -> tuple[int, ...]:
    """Least booked card, then the smallest."""
    return draft.vram_mib[card.number] + card.view.foreign_mib, draft.micros[card.number], left_mib


def spread(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    node = choice.booking.node
    if not need.request.gpus:
        return len(draft.layout.cards_of[node]), -draft.free_millicpus[node]
    if need.is_slice:
        booked_mib = sum(draft.vram_mib[part.card] for part in choice.booking.parts)
        return booked_mib, -choice.free, choice.left_mib
    return choice.largest_mib, -choice.free


# --- first: in order --------------------------------------------------------------------------------


def any_card(draft: ClusterState, card: LayoutGpu, left_mib: int) -> tuple[int, ...]:
    """Cards by index."""
    return ()


def first(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    return ()


# --- best_fit: leave the least over -----------------------------------------------------------------


def best_fit(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    """Rest of cores and GPUs on the node, each as a fraction of the largest node's.

    Memory seldom runs out; as a third component it leaves less room for all (docs/explanation/placement.md).
    """
    layout, booking = draft.layout, choice.booking
    node = booking.node
    most_millicpus, most_cards = _largest(layout)
    left = (draft.free_millicpus[node] - booking.millicpus) / most_millicpus
    if most_cards:
        free_micros = sum(_free_micros(draft, card) for card in layout.cards_of[node])
        left += (free_micros - _asked_micros(draft, booking)) / WHOLE_CARD / most_cards
    # Rounded, so that the order of addition does not matter.
    return choice.largest_mib, round(left, 9)


def _asked_micros(draft: ClusterState, booking: AllocationUnits) -> int:
    return sum(
        WHOLE_CARD if part.is_whole else _taken_micros(draft, part.card, part.vram_mib, part.micros)
        for part in booking.parts
    )


def _largest(layout: ClusterLayout) -> tuple[int, int]:
    """Maximum cores in thousandths, and cards, of any one node."""
    known = layout.pools.get(_LARGEST)
    if isinstance(known, tuple):
        return known
    made = layout.pools[_LARGEST] = max(1, *layout.millicpus), max(len(cards) for cards in layout.cards_of)
    return made


def _free_micros(draft: ClusterState, card: LayoutGpu) -> int:
    number = card.number
    if draft.wholes[number]:
        return 0
    if not draft.slices[number]:
        return WHOLE_CARD
    left_mib = draft.layout.slice_limits[number] - draft.vram_mib[number]
    return max(0, min(WHOLE_CARD - draft.micros[number], left_mib * WHOLE_CARD // max(1, card.slice_total_mib or 1)))


def _taken_micros(draft: ClusterState, number: int, vram_mib: int, micros: int) -> int:
    total_mib = draft.layout.cards[number].slice_total_mib or 1
    return max(micros, vram_mib * WHOLE_CARD // max(1, total_mib))


# --- dot_product: like to like -----------------------------------------------------------------------


def dot_product(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    """Smallest dot product of demand and free resources, cores and GPUs as fractions of the largest node's.

    Source: the alignment score of Grandl et al., Multi-resource Packing for Cluster Schedulers (SIGCOMM 2014),
    inverted to keep free nodes free, as in the comparison of Weng et al. (USENIX ATC 2023).
    """
    layout, booking = draft.layout, choice.booking
    node = booking.node
    most_millicpus, most_cards = _largest(layout)
    product = booking.millicpus * draft.free_millicpus[node] / most_millicpus**2
    if most_cards:
        free_micros = sum(_free_micros(draft, card) for card in layout.cards_of[node])
        product += _asked_micros(draft, booking) * free_micros / (WHOLE_CARD * most_cards) ** 2
    return choice.largest_mib, round(product, 9)


# --- fgd: leave what others can use -----------------------------------------------------------------


def fgd(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    """Least additional fragmentation for the typical jobs; see `fragmentation`."""
    known = fragmentation_of(draft.layout)
    if known is None:
        return pack(draft, need, choice)
    return (-known.score(draft, choice.booking),)


# --- outlook: leave what would still be taken --------------------------------------------------------


def outlook(draft: ClusterState, need: RequestUnits, choice: PlacementFeatures) -> Score:
    """Least loss for the typical jobs, and GPUs in least demand; see `expected_capacity`."""
    known = expected_capacity_of(draft.layout)
    if known is None:
        return pack(draft, need, choice)
    # Rounded, so that equal nodes are taken in order.
    return (-round(known.worth(draft, choice.booking), 9),)


@dataclass(frozen=True, slots=True)
class Strategy:
    score: Callable[[ClusterState, RequestUnits, PlacementFeatures], Score]
    card_cost: CardCost
    tightness: int = 1
    """Take cards from the group of linked cards with the fewest free ones; -1: with the most, 0: from the first."""
    tries_each_card: bool = False
    """Whether the score also chooses among the cards that one slice could go to."""


STRATEGIES: dict[str, Strategy] = {
    "pack": Strategy(pack, fullest_card),
    "spread": Strategy(spread, emptiest_card, tightness=-1),
    "best_fit": Strategy(best_fit, fullest_card),
    "dot_product": Strategy(dot_product, fullest_card),
    "fgd": Strategy(fgd, fullest_card, tries_each_card=True),
    "outlook": Strategy(outlook, fullest_card, tries_each_card=True),
    "first": Strategy(first, any_card, tightness=0),
}
