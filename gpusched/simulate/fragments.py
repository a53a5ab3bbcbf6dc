"""Which of the GPUs that nobody holds could be used by somebody who waits; where nobody asks for GPUs, which cores.

Nodes in the same state (free cores, memory and room on each card) are one case, and jobs that ask for the same of a
node are one bit: which bits fit in which state is worked out once, so that a moment costs what it changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState, LayoutGpu
from gpusched.scheduler.filters import pool
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits

_CardState = tuple[int, int, int]
"""Kind of the card, room in millionths, user whose slices are on it (-1: none)."""

_MOST_KNOWN = 50_000
"""States that are remembered; then those in which no node is are forgotten."""


@dataclass(slots=True)
class _Shape:
    """What one kind of job asks for: so many nodes with a piece each, and perhaps one more with a smaller piece."""

    nodes: int
    piece: int
    tail: int | None
    waiting: int = 0

    @property
    def is_gang(self) -> bool:
        return self.nodes > 1 or self.tail is not None


class _State:
    """One case of a node: how much of it is idle, which pieces fit, and how much each choice of them could use."""

    __slots__ = ("cards", "fits", "idle", "nodes", "usable")

    def __init__(self, cards: tuple[_CardState, ...], idle: int, fits: int) -> None:
        self.cards = cards
        self.idle = idle
        self.fits = fits
        """A bit for each piece."""
        self.nodes = 0
        """How many are in this state."""
        self.usable: dict[int, int] = {0: 0}
        """By the bits of those pieces that somebody wants and that fit."""


class Fragments:
    """Idle and stranded room of a cluster while jobs come and go.

    Args:
        draft: what is booked; after it was changed on a node, `changed` is to be told.
        needs: what each kind of job asks for; it is named by its place here.
    """

    def __init__(self, draft: ClusterState, needs: Sequence[RequestUnits]) -> None:
        self._draft, self._layout = draft, draft.layout
        self._is_of_cards = any(need.request.gpus for need in needs)
        self._pieces: list[RequestUnits] = []
        numbers: dict[object, int] = {}
        self._shapes = [self._shape(need, numbers) for need in needs]
        self._gang_bits = 0
        self._able: dict[int, int] = {}
        """For each piece of a gang, on how many nodes it fits now."""
        for shape in self._shapes:
            if shape.is_gang:
                for piece in filter(None, (1 << shape.piece, 0 if shape.tail is None else 1 << shape.tail)):
                    self._gang_bits |= piece
                    self._able[piece] = 0
        self._gangs: dict[int, _Shape] = {}
        """Kinds of gangs of which somebody waits."""
        self._singles: dict[int, int] = {}
        """Bits of pieces of other jobs for which somebody waits, and how many."""
        self._mask, self._usable, self.idle = 0, 0, 0
        """`idle` is what nobody holds, in millionths of a card, or thousandths of a core."""
        self._takes, self._kind_of = _kinds_of_cards(self._layout, self._pieces)
        self._admits, self._host_of = _kinds_of_nodes(self._layout, self._pieces)
        self._alike = [self._kind_of_all(node) for node in range(len(self._layout.nodes))]
        """Per node, of which kind all its cards are; None where they are of several, or there are none."""
        self._states: dict[object, _State] = {}
        self._state_of: list[_State] = []
        for node in range(len(self._layout.nodes)):
            state = self._state(node)
            self._state_of.append(state)
            self._count(state, 1)

    def _shape(self, need: RequestUnits, numbers: dict[object, int]) -> _Shape:
        request = need.request
        tail = self._number(need.of_tail(), numbers) if request.tail_gpus else None
        return _Shape(request.nodes, self._number(need, numbers), tail)

    def _number(self, need: RequestUnits, numbers: dict[object, int]) -> int:
        request = need.request
        mark = (request.gpus, need.micros, request.vram_mib, need.millicpus, request.mem_mib, need.kind, need.where)
        mark_of_user = (*mark, need.uid if need.is_slice else -1)
        if mark_of_user not in numbers:
            numbers[mark_of_user] = len(self._pieces)
            self._pieces.append(need)
        return numbers[mark_of_user]

    # --- what changes ---------------------------------------------------------------------------

    def waits(self, kind: int, count: int) -> None:
        """So many jobs of a kind wait more than before; fewer, when it is below 0."""
        shape = self._shapes[kind]
        need = self._pieces[shape.piece]
        if not (need.request.gpus if self._is_of_cards else need.millicpus):
            return
        shape.waiting += count
        if shape.is_gang:
            if shape.waiting:
                self._gangs[kind] = shape
            else:
                self._gangs.pop(kind, None)
            return
        bit = 1 << shape.piece
        left = self._singles.get(bit, 0) + count
        if left:
            self._singles[bit] = left
        else:
            self._singles.pop(bit, None)

    def changed(self, node: int) -> None:
        """Something was booked or given back on a node."""
        before, after = self._state_of[node], self._state(node)
        if before is not after:
            self._count(before, -1)
            self._count(after, 1)
            self._state_of[node] = after

    def _count(self, state: _State, sign: int) -> None:
        state.nodes += sign
        self.idle += sign * state.idle
        self._usable += sign * self._usable_in(state)
        gangs = state.fits & self._gang_bits
        while gangs:
            bit = gangs & -gangs
            self._able[bit] += sign
            gangs ^= bit

    # --- what it comes to -----------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits who asks for any."""
        return bool(self._singles or self._gangs)

    def usable(self) -> int:
        """Of what is idle, how much somebody who waits could take now, in the unit of `idle`."""
        mask = 0
        for bit in self._singles:
            mask |= bit
        for shape in self._gangs.values():
            piece = 1 << shape.piece
            if self._able[piece] < shape.nodes:
                continue
            if shape.tail is None:
                mask |= piece
            elif self._able[1 << shape.tail] > shape.nodes:
                # What has room for a piece has room for the smaller one, so that one node more is left.
                mask |= piece | 1 << shape.tail
        if mask != self._mask:
            self._mask = mask
            self._usable = sum(state.nodes * self._usable_in(state) for state in self._states.values() if state.nodes)
        return self._usable

    def _usable_in(self, state: _State) -> int:
        chosen = self._mask & state.fits
        usable = state.usable.get(chosen)
        if usable is None:
            numbers = [number for number in range(len(self._pieces)) if chosen >> number & 1]
            usable = state.usable[chosen] = (
                sum(card[1] for card in state.cards if any(self._takes_of(number, card) for number in numbers))
                if self._is_of_cards
                else state.idle
            )
        return usable

    def _takes_of(self, piece: int, card: _CardState) -> bool:
        kind, room, owner = card
        wanted = self._takes[kind][piece]
        return bool(wanted) and wanted <= room and owner in (-1, self._pieces[piece].uid)

    # --- states ---------------------------------------------------------------------------------

    def _state(self, node: int) -> _State:
        draft = self._draft
        millicpus, mem_mib = draft.free_millicpus[node], draft.free_mem_mib[node]
        alike = self._alike[node]
        if alike is None or draft.shared_cards[node]:
            cards = tuple(sorted(self._card_state(card) for card in self._layout.cards_of[node]))
            mark: object = (self._host_of[node], millicpus, mem_mib, cards)
        else:
            cards = ()
            mark = (self._host_of[node], millicpus, mem_mib, alike, draft.free_cards[node])
        state = self._states.get(mark)
        if state is None:
            if len(self._states) >= _MOST_KNOWN:
                self._states = {mark: one for mark, one in self._states.items() if one.nodes}
            cards = cards or tuple(sorted(self._card_state(card) for card in self._layout.cards_of[node]))
            idle = sum(room for _, room, _ in cards) if self._is_of_cards else millicpus
            fits = self._fits(self._host_of[node], millicpus, mem_mib, cards)
            state = self._states[mark] = _State(cards, idle, fits)
        return state

    def _kind_of_all(self, node: int) -> int | None:
        kinds = {self._kind_of[card.number] for card in self._layout.cards_of[node]}
        return kinds.pop() if len(kinds) == 1 else None

    def _card_state(self, card: LayoutGpu) -> _CardState:
        draft, number = self._draft, card.number
        if draft.wholes[number]:
            return self._kind_of[number], 0, -1
        if not draft.slices[number]:
            return self._kind_of[number], WHOLE_CARD, -1
        room = WHOLE_CARD - draft.micros[number]
        if card.slice_total_mib:
            left_mib = self._layout.slice_limits[number] - draft.vram_mib[number]
            room = min(room, left_mib * WHOLE_CARD // card.slice_total_mib)
        return self._kind_of[number], max(0, room), draft.owner[number]

    def _fits(self, host: int, millicpus: int, mem_mib: int, cards: tuple[_CardState, ...]) -> int:
        fits = 0
        for number, need in enumerate(self._pieces):
            if (
                self._admits[host][number]
                and need.millicpus <= millicpus
                and need.request.mem_mib <= mem_mib
                and sum(self._takes_of(number, card) for card in cards) >= need.request.gpus
            ):
                fits |= 1 << number
        return fits


def _kinds_of_cards(layout: ClusterLayout, pieces: Sequence[RequestUnits]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Per kind of card what each piece takes of one in millionths, 0 if it cannot use such a card; the kind of each."""
    may = [{card.number for cards in pool(layout, need).cards_of for card in cards} for need in pieces]
    kinds: dict[tuple[int, ...], int] = {}
    kind_of = []
    for card in layout.cards:
        takes = tuple(
            _takes(need, card) if need.request.gpus and card.number in cards else 0
            for need, cards in zip(pieces, may, strict=True)
        )
        kind_of.append(kinds.setdefault(takes, len(kinds)))
    return list(kinds), kind_of


def _kinds_of_nodes(layout: ClusterLayout, pieces: Sequence[RequestUnits]) -> tuple[list[tuple[bool, ...]], list[int]]:
    """Per kind of node whether each piece may be on one; the kind of each node."""
    may = [{place.node for place in pool(layout, need).places} for need in pieces]
    kinds: dict[tuple[bool, ...], int] = {}
    kind_of = []
    for node in range(len(layout.nodes)):
        admits = tuple(node in nodes for nodes in may)
        kind_of.append(kinds.setdefault(admits, len(kinds)))
    return list(kinds), kind_of


def _takes(need: RequestUnits, card: LayoutGpu) -> int:
    if not need.is_slice:
        return WHOLE_CARD
    of_vram = 0
    if need.request.vram_mib is not None:
        of_vram = -(-need.request.vram_mib * WHOLE_CARD // max(1, card.slice_total_mib or 1))
    return max(1, need.micros, of_vram)
