"""Placement of a request: filter nodes and cards, score the rest, and combine the nodes of a gang.

The filters are in `filters`, the strategies in `strategies`, groups of linked cards in `topology`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from gpusched.model.job import Bundles
from gpusched.model.planner_settings import LEARNING_STRATEGIES
from gpusched.model.value import replace
from gpusched.scheduler.bundles import bundles_within, fewest_nodes, largest, levelled
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterState, LayoutGpu
from gpusched.scheduler.filters import (
    NodeCandidates,
    Rejection,
    Tally,
    has_host_room,
    pool,
    reject_cluster,
    reject_node,
    slice_of,
)
from gpusched.scheduler.load_limits import LoadLimits
from gpusched.scheduler.node_costs import OF_SCARCE, card_cost, node_costs
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.strategies.scarce_gpus import scarce_of, scarcity_of
from gpusched.scheduler.strategies.scores import STRATEGIES, PlacementFeatures, Score, Strategy
from gpusched.scheduler.topology import CardCandidate, by_group, groups_of, largest_group, take, twins_of

_NOTHING: frozenset[int] = frozenset()
_UNKNOWN_SIZE = 1 << 60
_SCORE, _NODE = attrgetter("score"), attrgetter("node")

_SECOND_AT = 1
"""Index in an option's score of whether its node, or the worst of a gang's, lacks labels that the request prefers."""
SCARCE_AT = 4
"""Index in an option's score of the number of scarce cards it takes, if any request insists on cards."""


# Not frozen, though never modified: that takes a third of the time, and one is created for each node.
@dataclass(slots=True, order=True)
class Candidate:
    """One placement of a request; the smallest is the best."""

    score: Score
    booking: AllocationUnits = field(compare=False)


class PlacementVeto(Protocol):
    """Check that may deny a placement that has room."""

    def why_not(self, booking: AllocationUnits) -> str | None:
        """Sentence against this placement; None if it is admissible. Denials are monotone in cards and nodes."""


def best_placement(
    draft: ClusterState, need: RequestUnits, ceilings: LoadLimits | None = None, *, guard: PlacementVeto | None = None
) -> AllocationUnits | None:
    """Best placement for this need now, or None. Without `ceilings`, load is not checked."""
    found = candidates(draft, need, ceilings, guard=guard, each=need.request.nodes)
    if len(found) == 1:
        return found[0].booking
    return min(found, key=_SCORE).booking if found else None


def fits(draft: ClusterState, need: RequestUnits) -> bool:
    """Whether any placement exists for this need, regardless of load."""
    if reject_cluster(draft, need) is not None:
        return False
    if need.request.tail_gpus:
        return _fits_with_tail(draft, need)
    if need.bundles is not None:
        return fewest_nodes(bundle_rooms(draft, need).values(), need.request) is not None
    left = need.request.nodes
    if left > 1 and need.request.gpus and sum(count >= need.request.gpus for count in draft.free_cards) < left:
        return False
    for _ in hosts(draft, need):
        left -= 1
        if not left:
            return True
    return False


def _fits_with_tail(draft: ClusterState, need: RequestUnits) -> bool:
    """Whether an uneven gang fits: its last node asks for less, so one more node for that suffices."""
    there = set(hosts(draft, need))
    if len(there) != need.request.nodes:
        return len(there) > need.request.nodes
    return any(node not in there for node in hosts(draft, need.of_tail()))


def bundle_rooms(draft: ClusterState, need: RequestUnits) -> dict[int, int]:
    """For how many bundles each node has room, regardless of load; without nodes that have none."""
    found = {}
    for place in pool(draft.layout, need).places:

        def has_room(count: int, place: NodeCandidates = place) -> bool:
            part = need.of_bundles(count)
            return reject_node(draft, part, place.node, None) is None and _has_cards(draft, part, place)

        room = largest(bundles_within(draft, need, place.node), has_room)
        if room:
            found[place.node] = room
    return found


def hosts(draft: ClusterState, need: RequestUnits) -> Iterator[int]:
    """Nodes with room for one node's part of this need, the least of one with bundles, regardless of load."""
    if need.bundles is not None:
        need = need.of_bundles(1)
    for place in _with_cards(draft, need, pool(draft.layout, need).places):
        if reject_node(draft, need, place.node, None) is None and _has_cards(draft, need, place):
            yield place.node


def _with_cards(draft: ClusterState, need: RequestUnits, places: Sequence[NodeCandidates]) -> Sequence[NodeCandidates]:
    """Nodes with enough free cards of any kind, if the need is for whole cards."""
    count = need.request.gpus
    if not count or need.is_slice:
        return places
    free = draft.free_cards
    return [place for place in places if free[place.node] >= count]


def _unlike(
    draft: ClusterState, need: RequestUnits, places: Sequence[NodeCandidates], each: int
) -> Sequence[NodeCandidates]:
    """The first `each` of nodes with equal hardware and equal free resources.

    They score the same, so the first would be taken anyway; not so for strategies that depend on which other jobs
    may run there.
    """
    if (
        draft.layout.strategy in LEARNING_STRATEGIES
        or need.is_slice
        or need.request.is_exclusive
        or len(places) <= each
    ):
        return places
    twins = twins_of(draft.layout)
    scarcity, costs = scarcity_of(draft.layout), node_costs(draft.layout, need)
    free, shared, millicpus, mem_mib = draft.free_cards, draft.shared_cards, draft.free_millicpus, draft.free_mem_mib
    seen: dict[object, int] = {}
    found = []
    for place in places:
        node = place.node
        twin = twins[node]
        if twin is not None and not shared[node]:
            state: tuple[object, ...] = twin, free[node], millicpus[node], mem_mib[node], place.is_second
            if costs is not None:
                state = *state, costs[node]
            if scarcity is not None and place.cards:
                state = *state, scarcity.class_of[place.cards[0].number]
            times = seen.get(state, 0)
            if times >= each:
                continue
            seen[state] = times + 1
        found.append(place)
    return found


def candidates(
    draft: ClusterState,
    need: RequestUnits,
    ceilings: LoadLimits | None = None,
    *,
    avoid: frozenset[int] = _NOTHING,
    tally: Tally | None = None,
    guard: PlacementVeto | None = None,
    each: int = 0,
) -> list[Candidate]:
    """At most one placement per node; at most one for a gang. Cards in `avoid` are taken only as a last resort.

    With `each`, only the first `each` of identical nodes are examined, for callers that want just the best one.
    """
    rejection = reject_cluster(draft, need)
    if rejection is not None:
        if tally is not None:
            tally[rejection] += 1
        return []
    if need.bundles is not None:
        return BundleSearch(draft, need, ceilings, avoid, guard).candidates(tally, each=each)
    search = NodeSearch(draft, need, ceilings, avoid, tally)
    found = []
    places: Sequence[NodeCandidates] = pool(draft.layout, need).places
    if tally is None:
        places = _with_cards(draft, need, places)
        if len(places) < need.request.nodes:
            return []
        if each and guard is None and not avoid and (ceilings is None or not ceilings.is_active):
            places = _unlike(draft, need, places, each)
    for place in places:
        tried = search.look(place)
        if guard is not None and isinstance(tried, Candidate):
            tried = search.admitted(place, tried, guard)
        if isinstance(tried, Candidate):
            found.append(tried)
        elif tally is not None:
            tally[tried] += 1
    if need.request.nodes > 1 or need.request.tail_gpus:
        gang = _gang(found, need.request.nodes, guard)
        if gang and need.request.tail_gpus:
            # The full nodes may be the first of their kind.
            tails = candidates(draft, need.of_tail(), ceilings, avoid=avoid, each=each and each + 1)
            return _with_tail(gang, tails, guard)
        return gang
    return found


def _with_tail(gang: list[Candidate], tails: list[Candidate], guard: PlacementVeto | None) -> list[Candidate]:
    """Complete the gang with the best further node for its last part; empty if there is none."""
    for one in gang:
        taken = {piece.node for piece in one.booking.pieces()}
        for tail in sorted(tails, key=_SCORE):
            if tail.booking.node in taken:
                continue
            whole = replace(one.booking, others=(*one.booking.others, tail.booking))
            if guard is None or guard.why_not(whole) is None:
                return [Candidate(one.score, whole)]
    return []


def _gang(found: list[Candidate], nodes: int, guard: PlacementVeto | None) -> list[Candidate]:
    """Combine the best nodes into one placement; empty if impossible. The licenses are booked once, with the first."""
    if guard is None:
        best = sorted(found, key=_SCORE)[:nodes]
        if len(best) < nodes:
            return []
        # In order of the nodes, so that ranks follow the names that people read.
        first, *rest = sorted((one.booking for one in best), key=_NODE)
        others = tuple(replace(one, licenses=()) for one in rest)
        return [Candidate(best[-1].score, replace(first, others=others))]
    chosen: AllocationUnits | None = None
    count = 0
    for option in sorted(found, key=_SCORE):
        wider = option.booking
        if chosen is not None:
            wider = replace(chosen, others=(*chosen.others, replace(wider, licenses=())))
        if count and guard.why_not(wider) is not None:
            continue
        chosen, count = wider, count + 1
        if count == nodes:
            first, *rest = sorted((replace(one, others=(), licenses=()) for one in chosen.pieces()), key=_NODE)
            return [Candidate(option.score, replace(first, others=tuple(rest), licenses=chosen.licenses))]
    return []


def _has_cards(draft: ClusterState, need: RequestUnits, place: NodeCandidates) -> bool:
    request = need.request
    if not request.gpus:
        return True
    if need.is_slice:
        free = [card for card in place.cards if slice_of(draft, need, card)[0] is not None]
    else:
        if draft.free_cards[place.node] < request.gpus:
            return False
        free = [card for card in place.cards if draft.is_unbooked(card.number)]
        if draft.layout.has_host_memory:
            free = [card for card in free if has_host_room(draft, need, card)]
    if len(free) < request.gpus:
        return False
    return not request.is_linked or largest_group(draft.layout, place.node, free) >= request.gpus


class NodeSearch:
    """Search for one need, node by node."""

    __slots__ = ("_avoid", "_ceilings", "_closed", "_costs", "_draft", "_need", "_strategy", "_tally", "scarce")

    def __init__(
        self,
        draft: ClusterState,
        need: RequestUnits,
        ceilings: LoadLimits | None,
        avoid: frozenset[int],
        tally: Tally | None,
    ) -> None:
        self._draft = draft
        self._need = need
        self._ceilings = ceilings
        self._closed = _NOTHING if ceilings is None else ceilings.closed_cards
        self._avoid = avoid
        self._tally = tally
        self._strategy: Strategy = STRATEGIES[draft.layout.strategy]
        self._costs = node_costs(draft.layout, need)
        self.scarce = scarce_of(draft)
        """State of the draft when the search began; None if no job insists on anything."""

    def look(self, place: NodeCandidates) -> Candidate | Rejection:
        """Best choice of cards on this node."""
        need, draft = self._need, self._draft
        rejection = reject_node(draft, need, place.node, self._ceilings)
        if rejection is not None:
            return rejection
        if not need.request.gpus:
            return self._option(place, (), 0, free=0)
        if len(place.cards) < need.request.gpus:
            return Rejection.GPUS
        return self._slices(place) if need.is_slice else self._wholes(place)

    def admitted(self, place: NodeCandidates, refused: Candidate, guard: PlacementVeto) -> Candidate | Rejection:
        """This option if the guard admits it, or else the best one with other cards of the node."""
        if guard.why_not(refused.booking) is None:
            return refused
        tally = self._tally
        self._tally = None
        try:
            others = [
                tried
                for cards in _other_cards(self._draft, place, refused.booking)
                if isinstance(tried := self.look(replace(place, cards=cards)), Candidate)
            ]
        finally:
            self._tally = tally
        for option in sorted(others, key=_SCORE):
            if guard.why_not(option.booking) is None:
                return option
        return Rejection.GUARD

    # --- whole cards ----------------------------------------------------------------------------

    def _wholes(self, place: NodeCandidates) -> Candidate | Rejection:
        """Smallest sufficient cards, linked with each other if possible."""
        draft, count = self._draft, self._need.request.gpus
        if self._tally is None and draft.free_cards[place.node] < count:
            return Rejection.GPUS
        wholes, slices = draft.wholes, draft.slices
        free = [card for card in place.cards if not (wholes[card.number] or slices[card.number])]
        if self._tally is not None and len(free) < len(place.cards):
            self._tally[Rejection.CARD_BOOKED] += len(place.cards) - len(free)
        if draft.layout.has_host_memory:
            unbooked, free = free, [card for card in free if has_host_room(draft, self._need, card)]
            if self._tally is not None and len(free) < len(unbooked):
                self._tally[Rejection.MEMORY] += len(unbooked) - len(free)
        if len(free) < count:
            return Rejection.GPUS
        chosen, split = None, 0
        if groups_of(draft.layout)[place.node] is None:
            if self._avoid or self.scarce is not None:
                free.sort(key=self._reluctance)
            chosen = free[:count]
        else:
            taken = self._take(place, [CardCandidate(card, self._cost_of_whole(card)) for card in free])
            if taken is None:
                return Rejection.LINKED
            chosen, split = [one.card for one in taken[0]], taken[1]
        whole_parts = draft.layout.whole_parts
        parts: tuple[CardShare, ...]
        if count == 1:
            parts = (whole_parts[chosen[0].number],)
            largest_mib = chosen[0].view.vram_total_mib or 0
        else:
            parts = tuple([whole_parts[number] for number in sorted([card.number for card in chosen])])
            largest_mib = max([card.view.vram_total_mib or 0 for card in chosen])
        return self._option(place, parts, split, free=len(free), largest_mib=largest_mib)

    def _cost_of_whole(self, card: LayoutGpu) -> tuple[int, ...]:
        total_mib = card.view.vram_total_mib
        return *self._reluctance(card), card.speed_cost, _UNKNOWN_SIZE if total_mib is None else total_mib

    def _reluctance(self, card: LayoutGpu) -> tuple[int, ...]:
        """Leading part of the cost of this card, compared before anything else."""
        is_avoided = card.number in self._avoid
        return (is_avoided,) if self.scarce is None else (is_avoided, self.scarce.holds(card.number))

    def _take(self, place: NodeCandidates, free: list[CardCandidate]) -> tuple[list[CardCandidate], int] | None:
        """Best of the free cards, without those to avoid if possible."""
        request, layout = self._need.request, self._draft.layout
        tightness, is_linked = self._strategy.tightness, request.is_linked
        if self._avoid:
            free.sort(key=lambda one: (one.cost, one.card.number))
            others = [one for one in free if one.card.number not in self._avoid]
            taken = take(layout, place.node, others, request.gpus, is_linked=is_linked, tightness=tightness)
            if taken is not None:
                return taken
        return take(layout, place.node, free, request.gpus, is_linked=is_linked, tightness=tightness)

    # --- slices ---------------------------------------------------------------------------------

    def _slices(self, place: NodeCandidates) -> Candidate | Rejection:
        """Slices on the cheapest cards according to the strategy."""
        fitting: list[CardCandidate] = []
        found: dict[int, tuple[CardShare, int]] = {}
        for card in place.cards:
            part, left_mib = slice_of(self._draft, self._need, card)
            if part is None:
                rejection = Rejection.CARD_BOOKED if self._draft.wholes[card.number] else Rejection.CARD_FULL
            elif card.number in self._closed and self._draft.slices[card.number]:
                rejection = Rejection.CARD_BUSY
            else:
                cost = self._strategy.card_cost(self._draft, card, left_mib)
                fitting.append(CardCandidate(card, (*self._reluctance(card), card.speed_cost, *cost)))
                found[card.number] = part, left_mib
                continue
            if self._tally is not None:
                self._tally[rejection] += 1
        if len(fitting) < self._need.request.gpus:
            return Rejection.GPUS
        fitting.sort(key=lambda one: (one.cost, one.card.number))
        if self._strategy.tries_each_card and self._need.request.gpus == 1:
            return min(self._slice_option(place, [one], 0, found) for one in self._unlike(fitting))
        taken = self._take(place, fitting)
        return Rejection.LINKED if taken is None else self._slice_option(place, *taken, found)

    def _unlike(self, fitting: list[CardCandidate]) -> list[CardCandidate]:
        """One card of each kind and state."""
        draft = self._draft
        kinds = {
            (one.cost, one.card.model, one.card.slice_total_mib, draft.micros[one.card.number]): one
            for one in reversed(fitting)
        }
        return list(kinds.values())

    def _slice_option(
        self, place: NodeCandidates, taken: list[CardCandidate], split: int, found: dict[int, tuple[CardShare, int]]
    ) -> Candidate:
        numbers = sorted(one.card.number for one in taken)
        return self._option(
            place,
            tuple(found[number][0] for number in numbers),
            split,
            free=sum(self._draft.is_unbooked(card.number) for card in place.cards),
            opened=sum(not self._draft.slices[number] for number in numbers),
            left_mib=sum(found[number][1] for number in numbers),
        )

    # --- the result -----------------------------------------------------------------------------

    def _option(
        self,
        place: NodeCandidates,
        parts: tuple[CardShare, ...],
        split: int,
        *,
        free: int,
        largest_mib: int = 0,
        opened: int = 0,
        left_mib: int = 0,
    ) -> Candidate:
        need, request = self._need, self._need.request
        booking = AllocationUnits(
            place.node,
            need.uid,
            need.millicpus,
            request.mem_mib,
            parts,
            request.resources,
            request.licenses,
            request.is_exclusive,
            gpu_mem_mib=self._draft.layout.gpu_mem_mib(request.mem_mib, parts),
        )
        choice = PlacementFeatures(booking, free, largest_mib, opened, left_mib)
        avoided = sum(part.card in self._avoid for part in parts) if self._avoid else 0
        score = self._strategy.score(self._draft, need, choice)
        cost = 0
        if self._costs is not None or self._draft.layout.has_speeds:
            cost = card_cost(self._draft.layout, parts) + (0 if self._costs is None else self._costs[place.node])
        if self.scarce is not None:
            scarce = self.scarce.count(parts)
            if scarce and (self._costs is not None or self._draft.layout.has_speeds):
                cost += OF_SCARCE
            score = scarce, *score
        return Candidate((avoided, place.is_second, cost, split, *score, place.node), booking)


MOST_WIDTHS = 8
"""Numbers of nodes that are tried for a job with bundles, from the fewest that may do."""


class BundleSearch:
    """Search for a job that may be laid out in several ways: on as few nodes as possible, as evenly as possible."""

    __slots__ = ("_avoid", "_ceilings", "_draft", "_found", "_guard", "_need", "_searches")

    def __init__(
        self,
        draft: ClusterState,
        need: RequestUnits,
        ceilings: LoadLimits | None,
        avoid: frozenset[int],
        guard: PlacementVeto | None,
    ) -> None:
        self._draft = draft
        self._need = need
        self._ceilings = ceilings
        self._avoid = avoid
        self._guard = guard
        self._searches: dict[int, NodeSearch] = {}
        self._found: dict[tuple[int, int], Candidate | None] = {}
        """Places of so many bundles, by node and their number."""

    def candidates(self, tally: Tally | None, *, each: int) -> list[Candidate]:
        """Places for the whole job, on fewer nodes first; with `each` at most one."""
        request = self._need.request
        rooms = self._rooms(tally)
        fewest, nodes_max = fewest_nodes((room for _, room in rooms), request), self._bundles.nodes_max
        found: list[Candidate] = []
        for nodes in () if fewest is None else range(fewest, min(nodes_max, fewest + MOST_WIDTHS - 1) + 1):
            found.extend(self._on_nodes(nodes, rooms, each))
            if found and each:
                return found[:1]
        return found

    @property
    def _bundles(self) -> Bundles:
        assert self._need.bundles is not None, "the job has no bundles"
        return self._need.bundles

    def _rooms(self, tally: Tally | None) -> list[tuple[NodeCandidates, int]]:
        """Nodes with room for some of the bundles, and for how many."""
        draft, need, found = self._draft, self._need, []
        for place in pool(draft.layout, need).places:
            if tally is not None:
                tried = NodeSearch(draft, need.of_bundles(1), self._ceilings, self._avoid, tally).look(place)
                if not isinstance(tried, Candidate):
                    tally[tried] += 1

            def has_room(count: int, place: NodeCandidates = place) -> bool:
                return self._on(place, count) is not None

            room = largest(bundles_within(draft, need, place.node), has_room)
            if room:
                found.append((place, room))
        return found

    def _on(self, place: NodeCandidates, count: int) -> Candidate | None:
        """Best choice of cards for so many bundles on this node; None if they do not fit."""
        mark = place.node, count
        if mark not in self._found:
            search = self._searches.get(count)
            if search is None:
                part = self._need.of_bundles(count)
                search = self._searches[count] = NodeSearch(self._draft, part, self._ceilings, self._avoid, None)
            tried = search.look(place)
            if self._guard is not None and isinstance(tried, Candidate):
                tried = search.admitted(place, tried, self._guard)
            self._found[mark] = tried if isinstance(tried, Candidate) else None
        return self._found[mark]

    def _on_nodes(self, nodes: int, rooms: list[tuple[NodeCandidates, int]], each: int) -> list[Candidate]:
        """Places on exactly so many nodes: the best of those with equal parts, or else one with unequal parts."""
        count = self._bundles.count
        options: list[Candidate] = []
        if not count % nodes and sum(room >= count // nodes for _, room in rooms) >= nodes:
            equal = self._need.of_bundles(count // nodes, nodes)
            options = candidates(
                self._draft, equal, self._ceilings, avoid=self._avoid, guard=self._guard, each=each and nodes
            )
        firsts = [one for one in rooms if not one[0].is_second]
        if len(firsts) < len(rooms) and not any(_is_preferred(option) for option in options):
            preferred = self._unequal(nodes, firsts)
            if preferred:
                return preferred
        if options:
            return [self._scored(option, nodes) for option in sorted(options)]
        return self._unequal(nodes, rooms)

    def _scored(self, option: Candidate, nodes: int) -> Candidate:
        """Fewer nodes before all but avoided cards."""
        booking, licenses = option.booking, self._need.request.licenses
        if booking.licenses != licenses:
            booking = replace(booking, licenses=licenses)
        return Candidate((option.score[0], nodes, *option.score[1:]), booking)

    def _unequal(self, nodes: int, rooms: list[tuple[NodeCandidates, int]]) -> list[Candidate]:
        """At most one place on so many of these nodes."""
        chosen = self._chosen(nodes, rooms)
        sizes = levelled([room for _, room in chosen], self._bundles.count)
        if len(chosen) < nodes or sum(sizes) < self._bundles.count:
            return []
        parts = [self._on(place, size) for (place, _), size in zip(chosen, sizes, strict=True)]
        there = [part for part in parts if part is not None]
        if len(there) == nodes and self._is_admitted(there):
            return [self._scored(self._joined(there), nodes)]
        grown = self._grown(nodes, rooms)
        return [] if grown is None else [self._scored(grown, nodes)]

    def _chosen(self, nodes: int, rooms: list[tuple[NodeCandidates, int]]) -> list[tuple[NodeCandidates, int]]:
        """The best nodes for parts that differ by one at most; if there are too few, those with the most room."""
        largest_part = -(-self._bundles.count // nodes)

        def cost(one: tuple[NodeCandidates, int]) -> Score:
            option = self._on(one[0], min(one[1], largest_part))
            return () if option is None else option.score

        wide = [one for one in rooms if one[1] >= largest_part]
        if len(wide) >= nodes:
            chosen = sorted(wide, key=cost)[:nodes]
        else:
            chosen = sorted(rooms, key=lambda one: (-one[1], cost(one)))[:nodes]
        # In order of the nodes, so that ranks follow the names that people read.
        return sorted(chosen, key=lambda one: one[0].node)

    def _grown(self, nodes: int, rooms: list[tuple[NodeCandidates, int]]) -> Candidate | None:
        """A place that the guard admits, node by node, those with the most room first; None if that finds none."""
        chosen: list[Candidate] = []
        left = self._bundles.count
        for place, room in sorted(rooms, key=lambda one: (-one[1], one[0].node)):

            def is_admitted(count: int, place: NodeCandidates = place) -> bool:
                part = self._on(place, count)
                return part is not None and self._is_admitted([*chosen, part])

            others = nodes - len(chosen) - 1
            size = largest(min(room, left - others), is_admitted)
            part = self._on(place, size) if size else None
            if part is not None:
                chosen.append(part)
                left -= size
            if not left or len(chosen) == nodes:
                break
        return self._joined(chosen) if not left and len(chosen) == nodes else None

    def _is_admitted(self, parts: list[Candidate]) -> bool:
        return self._guard is None or self._guard.why_not(self._joined(parts).booking) is None

    def _joined(self, parts: list[Candidate]) -> Candidate:
        """The parts as one place, in order of the nodes, with the score of the worst of them."""
        first, *rest = sorted((part.booking for part in parts), key=_NODE)
        whole = replace(first, others=tuple(rest), licenses=self._need.request.licenses)
        return Candidate(max(part.score for part in parts), whole)


def _is_preferred(option: Candidate) -> bool:
    """Whether all of its nodes have the labels that the request prefers."""
    return not option.score[_SECOND_AT]


def _other_cards(
    draft: ClusterState, place: NodeCandidates, refused: AllocationUnits
) -> Iterator[tuple[LayoutGpu, ...]]:
    """Alternatives on a node after the guard denied the first choice: each group of linked cards, all but the
    groups involved, and all but these cards."""
    touched = {part.card for part in refused.parts}
    if not touched:
        return
    groups = by_group(draft.layout, place.node, place.cards)
    if len(groups) > 1:
        yield from groups
        yield tuple(card for group in groups if not any(one.number in touched for one in group) for card in group)
    yield tuple(card for card in place.cards if card.number not in touched)
