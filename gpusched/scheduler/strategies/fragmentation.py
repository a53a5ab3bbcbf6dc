"""Fraction of a node's free GPUs that typical jobs could not use, and how a placement changes that.

For a node with GPU room R_g on each card g, and a typical job m, the fragment is all of the room if m cannot run
on the node at all (too few cards with room, cores, memory, the wrong labels) or needs no GPU; else it is the sum of R_g
over the cards that m cannot use. The fragmentation of the node is the mean over the typical jobs, weighted by
frequency. A placement is scored by how many GPUs of fragments it removes.

Source: Weng et al., Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent (USENIX ATC 2023), section 3.2 and algorithm 1. As in the authors' simulator the gain of d GPUs is
quantised, floor(100 / (1 + exp(-d))), so that nearly equal nodes are filled in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, floor

from gpusched.model.bundles import part_of
from gpusched.model.cluster import Allocation
from gpusched.model.job import Request
from gpusched.model.snapshot import Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout, ClusterState, LayoutGpu
from gpusched.scheduler.filters import pool
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits

Typical = tuple[tuple[RequestUnits, float], ...]
"""Typical jobs with their frequency; the weights sum to 1."""

MOST_TYPICAL = 64
"""Maximum number of kinds of typical jobs; more make every placement costlier."""

COVERED = 0.95
"""Beyond that, the commonest kinds that make up this fraction of all jobs are kept apart."""

FRAGMENTATION = "fragmentation"
_MOST_KNOWN = 200_000
"""Maximum number of cached node states; then the cache is cleared, which bounds its size."""

CardState = tuple[int, int, int]
"""Kind of the card, room in millionths, user whose slices are on it (-1: none)."""


# --- the usual jobs ---------------------------------------------------------------------------------


def typical_of(snapshot: Snapshot) -> Typical:
    """Typical jobs, estimated from the pending and running ones."""
    counts: dict[RequestUnits, float] = {}
    for waiting in snapshot.pending:
        terms = waiting.key.terms
        _count(counts, terms.request, terms.uid, waiting.total * terms.request.nodes)
    for held in snapshot.allocations:
        _count(counts, _request_of(held), held.terms.uid, 1)
    return most_typical(counts)


def most_typical(counts: Mapping[RequestUnits, float], most: int = MOST_TYPICAL) -> Typical:
    """At most `most` kinds of jobs, with their frequency; the weights sum to 1.

    Beyond that, the commonest are kept apart. Of the rest, kinds with the same GPU request are merged into one
    with the mean of their cores and memory: wide jobs are rare, but without them none would find a
    whole node.
    """
    kinds = dict(counts)
    if len(kinds) > most:
        ordered = sorted(kinds.items(), key=lambda item: (-item[1], repr(item[0])))
        alone = _commonest(ordered, most - most // 4)
        rest = sorted(_by_gpus(dict(ordered[alone:])).items(), key=_weighs_most)
        kinds = dict(ordered[:alone])
        for need, count in rest[: most - alone]:
            kinds[need] = kinds.get(need, 0.0) + count
    total = sum(kinds.values())
    return tuple((need, count / total) for need, count in sorted(kinds.items(), key=_weighs_most))


def _commonest(ordered: Sequence[tuple[RequestUnits, float]], most: int) -> int:
    """Number of kinds, commonest first, that make up nearly all jobs; at most `most`."""
    wanted = COVERED * sum(count for _, count in ordered)
    for number, (_, count) in enumerate(ordered[:most]):
        if wanted <= 0:
            return number
        wanted -= count
    return most


def _weighs_most(item: tuple[RequestUnits, float]) -> tuple[float, float, str]:
    """Sort key: the total of GPUs requested."""
    need, count = item
    fraction = need.request.card_fraction
    return -count * (need.request.gpus if fraction is None else fraction), -count, repr(need)


def _by_gpus(counts: Mapping[RequestUnits, float]) -> dict[RequestUnits, float]:
    kinds: dict[RequestUnits, list[tuple[Request, float]]] = {}
    for need, count in counts.items():
        bare = replace(need.request, cpus=0.0, mem_mib=0, resources=())
        kinds.setdefault(RequestUnits.of(bare, need.uid), []).append((need.request, count))
    merged = {}
    for kind, members in kinds.items():
        total = sum(count for _, count in members)
        cpus = sum(request.cpus * count for request, count in members) / total
        mem_mib = sum(request.mem_mib * count for request, count in members) / total
        # Rounded, so that the order of addition does not matter.
        mean = replace(kind.request, cpus=round(cpus, 3), mem_mib=round(mem_mib))
        merged[RequestUnits.of(mean, kind.uid)] = total
    return merged


def _count(counts: dict[RequestUnits, float], request: Request, uid: int, times: float) -> None:
    if request.bundles is not None:
        # Wherever it is laid out, it is made of these.
        times, request = times * request.bundles.count / request.nodes, part_of(request, 1)
    bare = replace(request, nodes=1, licenses=(), prefer=None, is_exclusive=False)
    need = RequestUnits.of(bare, uid if request.shares_cards else -1)
    counts[need] = counts.get(need, 0.0) + times


def _request_of(held: Allocation) -> Request:
    """Holdings of a run on its node as a request, with its job's constraints if known."""
    share = held.gpus[0] if held.gpus else None
    fraction = None if share is None else share.fraction
    vram_mib = None if share is None or fraction is not None else share.vram_mib
    asked = held.terms.request
    return Request(
        gpus=len(held.gpus),
        gpu_fraction=fraction if len(held.gpus) == 1 else None,
        vram_mib=vram_mib,
        cpus=held.cpus + held.suspended_cpus,
        mem_mib=held.mem_mib,
        gpu_type=asked.gpu_type,
        min_vram_mib=asked.min_vram_mib,
        is_linked=asked.is_linked,
        constraint=asked.constraint,
        nodelist=asked.nodelist,
        exclude=asked.exclude,
    )


# --- fragmentation ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usual:
    """A typical job in terms of this layout."""

    need: RequestUnits
    weight: float
    nodes: frozenset[int]
    cards: frozenset[int]


class Fragmentation:
    def __init__(self, layout: ClusterLayout, typical: Typical) -> None:
        self._layout = layout
        self._usual = [_usual(layout, need, weight) for need, weight in typical]
        self._needs: list[tuple[int, ...]] = []
        """Per kind of card, the millionths that each typical job takes; 0 if it cannot use such a card."""
        kinds: dict[tuple[int, ...], int] = {}
        self._kind_of = [self._kind(card, kinds) for card in layout.cards]
        hosts: dict[tuple[bool, ...], int] = {}
        self._admits: list[tuple[bool, ...]] = []
        """Per kind of node, whether it admits each typical job."""
        self._host_of = [self._host(node, hosts) for node in range(len(layout.nodes))]
        self._counted = [tuple(card for card in cards if _is_usable(card)) for cards in layout.cards_of]
        self._known: dict[object, float] = {}

    def _kind(self, card: LayoutGpu, kinds: dict[tuple[int, ...], int]) -> int:
        takes = tuple(_takes(usual.need, card) if card.number in usual.cards else 0 for usual in self._usual)
        if takes not in kinds:
            kinds[takes] = len(kinds)
            self._needs.append(takes)
        return kinds[takes]

    def _host(self, node: int, hosts: dict[tuple[bool, ...], int]) -> int:
        admits = tuple(node in usual.nodes for usual in self._usual)
        if admits not in hosts:
            hosts[admits] = len(hosts)
            self._admits.append(admits)
        return hosts[admits]

    def score(self, draft: ClusterState, booking: AllocationUnits) -> int:
        """Score of this placement, 0 to 100; 50 changes nothing."""
        return floor(100 / (1 + exp(-self.gain(draft, booking))))

    def gain(self, draft: ClusterState, booking: AllocationUnits) -> float:
        """GPUs of fragments removed by this booking on its (first) node."""
        node = booking.node
        parts = {part.card: part for part in booking.parts}
        before: list[CardState] = []
        after: list[CardState] = []
        for card in self._counted[node]:
            state = self._state(draft, card)
            before.append(state)
            part = parts.get(card.number)
            after.append(state if part is None else self._with(draft, card, part, booking.uid))
        millicpus, mem_mib = draft.free_millicpus[node], draft.free_mem_mib[node]
        lost = self._amount(node, millicpus - booking.millicpus, mem_mib - booking.node_mem_mib, after)
        return self._amount(node, millicpus, mem_mib, before) - lost

    def amount(self, draft: ClusterState, node: int) -> float:
        """Number of free GPUs of this node that are fragments now."""
        states = [self._state(draft, card) for card in self._counted[node]]
        return self._amount(node, draft.free_millicpus[node], draft.free_mem_mib[node], states)

    def _state(self, draft: ClusterState, card: LayoutGpu) -> CardState:
        number = card.number
        kind = self._kind_of[number]
        if draft.wholes[number]:
            return kind, 0, -1
        if not draft.slices[number]:
            return kind, WHOLE_CARD, -1
        return kind, _room(draft.layout, card, draft.vram_mib[number], draft.micros[number]), draft.owner[number]

    def _with(self, draft: ClusterState, card: LayoutGpu, part: CardShare, uid: int) -> CardState:
        number = card.number
        if part.is_whole:
            return self._kind_of[number], 0, -1
        vram_mib, micros = draft.vram_mib[number] + part.vram_mib, draft.micros[number] + part.micros
        return self._kind_of[number], _room(draft.layout, card, vram_mib, micros), uid

    def _amount(self, node: int, millicpus: int, mem_mib: int, states: Iterable[CardState]) -> float:
        cards = tuple(sorted(states))
        mark = self._host_of[node], millicpus, mem_mib, cards
        known = self._known.get(mark)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[mark] = self._work_out(self._admits[self._host_of[node]], millicpus, mem_mib, cards)
        return known

    def _work_out(self, admits: tuple[bool, ...], millicpus: int, mem_mib: int, cards: tuple[CardState, ...]) -> float:
        room = sum(left for _, left, _ in cards)
        amount = 0.0
        for number, usual in enumerate(self._usual):
            need = usual.need
            useful = 0
            if admits[number] and need.millicpus <= millicpus and need.request.mem_mib <= mem_mib:
                useful = self._useful(number, need, cards)
            amount += usual.weight * (room - useful)
        return amount / WHOLE_CARD

    def _useful(self, number: int, need: RequestUnits, cards: tuple[CardState, ...]) -> int:
        """Room on the cards that this job could use, if there are enough of them; none for a job without GPUs."""
        useful = count = 0
        for kind, left, owner in cards:
            wanted = self._needs[kind][number]
            if wanted and left >= wanted and owner in (-1, need.uid):
                useful += left
                count += 1
        return useful if need.request.gpus and count >= need.request.gpus else 0


def fragmentation_of(layout: ClusterLayout) -> Fragmentation | None:
    """Cached for this layout throughout the cycle; None if no typical jobs are known."""
    known = layout.pools.get(FRAGMENTATION)
    if isinstance(known, Fragmentation):
        return known
    if not layout.typical:
        return None
    made = layout.pools[FRAGMENTATION] = Fragmentation(layout, layout.typical)
    return made


def _usual(layout: ClusterLayout, need: RequestUnits, weight: float) -> Usual:
    found = pool(layout, need)
    places = {place.node for place in found.places}
    cards = frozenset(card.number for node in places for card in found.cards_of[node])
    return Usual(need, weight, frozenset(places), cards)


def _takes(need: RequestUnits, card: LayoutGpu) -> int:
    """Millionths of this card that the job needs free on it."""
    if not need.is_slice:
        return WHOLE_CARD
    of_vram = 0
    if need.request.vram_mib is not None:
        of_vram = -(-need.request.vram_mib * WHOLE_CARD // max(1, card.slice_total_mib or 1))
    return max(1, need.micros, of_vram)


def _room(layout: ClusterLayout, card: LayoutGpu, vram_mib: int, micros: int) -> int:
    left_mib = layout.slice_limits[card.number] - vram_mib
    return max(0, min(WHOLE_CARD - micros, left_mib * WHOLE_CARD // max(1, card.slice_total_mib or 1)))


def _is_usable(card: LayoutGpu) -> bool:
    return card.view.is_present and card.view.why_not is None
