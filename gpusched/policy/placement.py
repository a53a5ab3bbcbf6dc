"""Where a request fits: filter nodes and cards, then score what is left.

Filters that cannot change within a cycle (type, size, health) run once per kind of request; the rest
looks at bookings. What each filter turned away is counted, so that "why not" is data.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gpusched.model.job import Request
from gpusched.policy.ceilings import Ceilings
from gpusched.policy.draft import (
    WHOLE_CARD,
    Booking,
    Card,
    Draft,
    Layout,
    Part,
    micros_of,
    millicpus_of,
    squeeze,
)


class Rejection(str, Enum):
    """Why a filter turned a node or a card away."""

    NODE_NOT_AVAILABLE = "node not available"
    GPU_DRIVER = "GPU driver broken"
    LOAD = "load ceiling"
    CPUS = "not enough CPUs"
    MEMORY = "not enough memory"
    GPUS = "not enough GPUs"
    CARD_TYPE = "GPU of another type"
    CARD_SMALL = "GPU with less VRAM than asked"
    CARD_LOST = "GPU lost"
    CARD_NOT_AVAILABLE = "GPU not available"
    CARD_FOREIGN = "GPU in foreign use"
    CARD_UNSHARABLE = "GPU cannot be shared"
    CARD_SIZE_UNKNOWN = "GPU of unknown VRAM"
    CARD_BOOKED = "GPU booked"
    CARD_FULL = "shared GPU without room"
    CARD_BUSY = "shared GPU too busy"

    __str__ = str.__str__


Tally = Counter[Rejection]


@dataclass(frozen=True, slots=True)
class Need:
    """A request in the units of the draft, with the user whose slices may share a card."""

    request: Request
    uid: int
    millicpus: int
    micros: int
    is_slice: bool
    kind: tuple[bool, str, int]
    """What the fixed filters look at: slices or whole cards, type, least VRAM."""

    @classmethod
    def of(cls, request: Request, uid: int) -> Need:
        """The need of this user's request. A request for whole cards does not depend on the user."""
        return cls(
            request=request,
            uid=uid,
            millicpus=millicpus_of(request.cpus),
            micros=0 if request.gpu_fraction is None else micros_of(request.gpu_fraction),
            is_slice=request.shares_cards,
            kind=(request.shares_cards, squeeze(request.gpu_type or ""), request.min_vram_mib or 0),
        )

    @property
    def signature(self) -> tuple[Request, int]:
        """Equal for needs that fit in exactly the same places."""
        return self.request, self.uid if self.is_slice else -1


@dataclass(frozen=True, slots=True)
class Pool:
    """Cards that pass the fixed filters, per node and best first, and how many did not."""

    cards_of: tuple[tuple[Card, ...], ...]
    rejected: Tally


@dataclass(frozen=True, slots=True, order=True)
class Option:
    """One place for a request; the smallest is the best."""

    score: tuple[int, int, int]
    booking: Booking = field(compare=False)


class Guard(Protocol):
    """What may turn a place down that has room."""

    def why_not(self, booking: Booking) -> str | None:
        """A sentence against this place; None when it will do."""


def find(draft: Draft, need: Need, ceilings: Ceilings | None = None, *, guard: Guard | None = None) -> Booking | None:
    """The best place for this need now, or None. Without `ceilings`, load is not looked at."""
    found = options(draft, need, ceilings, guard=guard)
    return min(found).booking if found else None


def fits(draft: Draft, need: Need) -> bool:
    """Whether there is any place for this need, whatever the load."""
    cards_of = _candidates(draft.layout, need)
    return any(
        isinstance(_try_node(draft, need, node, cards, None, _NOTHING, None), Option)
        for node, cards in enumerate(cards_of)
    )


def options(
    draft: Draft,
    need: Need,
    ceilings: Ceilings | None = None,
    *,
    avoid: frozenset[int] = frozenset(),
    tally: Tally | None = None,
    guard: Guard | None = None,
) -> list[Option]:
    """At most one place per node. Cards to `avoid` are taken only where no others are left."""
    found = []
    for node, cards in enumerate(_candidates(draft.layout, need)):
        tried = _try_node(draft, need, node, cards, ceilings, avoid, tally)
        if isinstance(tried, Option):
            if guard is None or guard.why_not(tried.booking) is None:
                found.append(tried)
        elif tally is not None:
            tally[tried] += 1
    return found


_NOTHING: frozenset[int] = frozenset()


def _candidates(layout: Layout, need: Need) -> tuple[tuple[Card, ...], ...]:
    """Per node, the cards to choose from; all of them, unlooked at, for a job without GPUs."""
    return pool(layout, need).cards_of if need.request.gpus else tuple(layout.cards_of)


def _try_node(
    draft: Draft,
    need: Need,
    node: int,
    cards: tuple[Card, ...],
    ceilings: Ceilings | None,
    avoid: frozenset[int],
    tally: Tally | None,
) -> Option | Rejection:
    rejection = _reject_node(draft, need, node, ceilings)
    if rejection is not None:
        return rejection
    count = need.request.gpus
    if not count:
        # A job without GPUs leaves the nodes with GPUs to those that need them.
        return Option((0, len(cards), node), Booking(node, need.uid, need.millicpus, need.request.mem_mib, ()))
    if len(cards) < count:
        return Rejection.GPUS
    if need.is_slice:
        closed = _NOTHING if ceilings is None else ceilings.closed_cards
        chosen = _choose_slices(draft, need, cards, closed, avoid, tally)
    else:
        chosen = _choose_wholes(draft, need, cards, avoid, tally)
    if chosen is None:
        return Rejection.GPUS
    parts, score = chosen
    avoided = sum(part.card in avoid for part in parts) if avoid else 0
    return Option((avoided, score, node), Booking(node, need.uid, need.millicpus, need.request.mem_mib, parts))


def _reject_node(draft: Draft, need: Need, node: int, ceilings: Ceilings | None) -> Rejection | None:
    view = draft.layout.nodes[node]
    request = need.request
    if view.why_not is not None:
        return Rejection.NODE_NOT_AVAILABLE
    if request.gpus and view.gpu_error is not None:
        return Rejection.GPU_DRIVER
    if need.millicpus and need.millicpus > draft.free_millicpus[node]:
        return Rejection.CPUS
    if request.mem_mib and request.mem_mib > draft.free_mem_mib[node]:
        return Rejection.MEMORY
    if ceilings is not None and ceilings.why_not(node, request.mem_mib) is not None:
        return Rejection.LOAD
    return None


def pool(layout: Layout, need: Need) -> Pool:
    """Cards that could hold (a part of) such a job if nothing were booked."""
    known = layout.pools.get(need.kind)
    if isinstance(known, Pool):
        return known
    rejected: Tally = Counter()
    cards_of = []
    for cards in layout.cards_of:
        passed = []
        for card in cards:
            rejection = reject_card(card, need.kind)
            if rejection is None:
                passed.append(card)
            else:
                rejected[rejection] += 1
        cards_of.append(tuple(sorted(passed, key=_by_size)))
    made = layout.pools[need.kind] = Pool(tuple(cards_of), rejected)
    return made


def _by_size(card: Card) -> tuple[bool, int, int]:
    """Smallest sufficient card first, so that large ones stay free; unknown sizes last."""
    total = card.view.vram_total_mib
    return total is None, total or 0, card.number


def reject_card(card: Card, kind: tuple[bool, str, int]) -> Rejection | None:
    """The first fixed filter that turns this card away, whatever is booked on it."""
    is_slice, model, min_vram_mib = kind
    view = card.view
    if not view.is_present:
        return Rejection.CARD_LOST
    if model not in card.model:
        return Rejection.CARD_TYPE
    if (min_vram_mib or is_slice) and view.vram_total_mib is None:
        return Rejection.CARD_SIZE_UNKNOWN
    if min_vram_mib and view.vram_total_mib is not None and view.vram_total_mib < min_vram_mib:
        return Rejection.CARD_SMALL
    if is_slice and not view.can_share:
        return Rejection.CARD_UNSHARABLE
    if view.why_not is not None:
        return Rejection.CARD_NOT_AVAILABLE
    if not is_slice and view.why_not_whole is not None:
        return Rejection.CARD_FOREIGN
    return None


def _choose_wholes(
    draft: Draft, need: Need, cards: tuple[Card, ...], avoid: frozenset[int], tally: Tally | None
) -> tuple[tuple[Part, ...], int] | None:
    """The smallest cards that do; the score is the size of the largest among them."""
    wholes, slices = draft.wholes, draft.slices
    free = [card for card in cards if not (wholes[card.number] or slices[card.number])]
    if tally is not None and len(free) < len(cards):
        tally[Rejection.CARD_BOOKED] += len(cards) - len(free)
    count = need.request.gpus
    if len(free) < count:
        return None
    if avoid:
        free.sort(key=lambda card: card.number in avoid)
    chosen = free[:count]
    largest_mib = max(card.view.vram_total_mib or 0 for card in chosen)
    return tuple(Part(number, True) for number in sorted(card.number for card in chosen)), largest_mib


def _choose_slices(
    draft: Draft,
    need: Need,
    cards: tuple[Card, ...],
    closed: frozenset[int],
    avoid: frozenset[int],
    tally: Tally | None,
) -> tuple[tuple[Part, ...], int] | None:
    """Best fit: the fullest cards on which the slice still fits; the score is the room left on them."""
    fitting: list[tuple[bool, int, int, Part]] = []
    for card in cards:
        part, left_mib = slice_of(draft, need, card)
        if part is None:
            rejection = Rejection.CARD_BOOKED if draft.wholes[card.number] else Rejection.CARD_FULL
        elif card.number in closed and draft.slices[card.number]:
            rejection = Rejection.CARD_BUSY
        else:
            fitting.append((card.number in avoid, left_mib, card.number, part))
            continue
        if tally is not None:
            tally[rejection] += 1
    if len(fitting) < need.request.gpus:
        return None
    fitting.sort(key=lambda found: found[:3])
    chosen = fitting[: need.request.gpus]
    parts = tuple(sorted((found[3] for found in chosen), key=lambda part: part.card))
    return parts, sum(found[1] for found in chosen)


def slice_of(draft: Draft, need: Need, card: Card) -> tuple[Part | None, int]:
    """The slice this need would take of a card and the VRAM left beside it in MiB; no slice when full.

    A fraction books the same share of what slices may hold, so that two halves fill a card.
    """
    number = card.number
    if draft.wholes[number] or (draft.slices[number] and draft.owner[number] != need.uid):
        return None, 0
    vram_mib = need.request.vram_mib
    if vram_mib is None:
        vram_mib = (card.slice_total_mib or 0) * need.micros // WHOLE_CARD
    left_mib = draft.layout.slice_limits[number] - draft.vram_mib[number] - vram_mib
    if left_mib < 0 or draft.micros[number] + need.micros > WHOLE_CARD:
        return None, left_mib
    return Part(number, False, vram_mib, need.micros), left_mib
