"""Expected GPUs that typical jobs would still take on a node, and how a placement changes that.

Lists of typical jobs are drawn in advance, the same for every node and every query. On a node in its present state the
jobs of a list are placed in turn where they fit, each slice on the fullest card with room. The mean number of GPUs
taken is the outlook of the node. A placement costs as much as it lowers the outlook. This uses up cores, memory,
whole cards and remainders of cards together, so that no node is left with GPUs without cores, and no card
with a remainder that no job asks for, if there is another choice.

Unconstrained jobs should avoid filling the cards that others insist on, even before those are scarce (see
`scarcity`): the pressure on a node is the GPUs requested by the typical jobs that could run there, each spread evenly
over all suitable cards. It is added to the cost of a placement.

The lists favour wide jobs beyond their frequency, because the other nodes of a cluster take the narrow ones;
a tenth of the fragmentation (see `fragmentation`) keeps whole nodes together where the lists see no difference.

Source: rollout, one step of policy iteration over simulated futures with common random numbers (Bertsekas, Tsitsiklis
and Wu, Rollout Algorithms for Combinatorial Optimization, Journal of Heuristics 3, 1997), each node by itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate

from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits
from gpusched.scheduler.strategies.fragmentation import CardState, Fragmentation, Typical, Usual

LISTS = 8
"""Lists of typical jobs tried on a node; more make every new state of a node costlier."""

LENGTH = 100
"""Jobs on a list: enough to fill the widest nodes."""

WIDTH = 0.85
"""A job of n GPUs is drawn n to the power of this times as often as its frequency."""

WITHOUT_GPUS = 0.2
"""A job without GPUs is drawn this many times as often as its frequency; other nodes have room for most of them."""

OF_FRAGMENTS = 0.1
"""Weight of a fragment relative to a GPU that no typical job takes."""

OF_PRESSURE = 0.5
"""Cost of a GPU under mean pressure relative to one that no typical job takes. More would cost too many of the latter:
scarce cards are left to others at any cost anyway (see `scarcity`)."""

OUTLOOK = "outlook"


class ExpectedCapacity(Fragmentation):
    """Outlook of the nodes in one layout, as the expected loss; `worth` is that of a placement."""

    def __init__(self, layout: ClusterLayout, typical: Typical) -> None:
        super().__init__(layout, _by_width(typical))
        self.pressure = self._pressures([weight for _, weight in typical])
        """Per node, the demand for its GPUs; 1 if every job may go everywhere."""
        self._jobs = [(usual.need.millicpus, usual.need.request.mem_mib, usual.need) for usual in self._usual]
        self._lists = _lists([usual.weight for usual in self._usual])
        self._left_of: dict[frozenset[int], list[list[int]]] = {}
        """Per set of jobs that fit at all, what is left of the lists."""
        self._is_of_one = len({usual.need.uid for usual in self._usual if usual.need.is_slice}) <= 1

    def _pressures(self, weights: Sequence[float]) -> list[float]:
        layout = self._layout
        pressure = [0.0] * len(layout.nodes)
        asked = 0.0
        for usual, weight in zip(self._usual, weights, strict=True):
            gpus = weight * _gpus(usual.need)
            if not gpus:
                continue
            cards_of = {node: self._cards_for(usual, node) for node in sorted(usual.nodes)}
            cards = sum(cards_of.values())
            if not cards:
                continue
            asked += gpus
            for node, count in cards_of.items():
                if count:
                    pressure[node] += gpus / cards
        return [one * len(layout.cards) / asked if asked else 0.0 for one in pressure]

    def _cards_for(self, usual: Usual, node: int) -> int:
        """Cards of a node that such jobs could use if nothing were booked there."""
        need, layout = usual.need, self._layout
        cards = sum(card.number in usual.cards for card in layout.cards_of[node])
        if cards < need.request.gpus or need.millicpus > layout.millicpus[node]:
            return 0
        return cards if need.request.mem_mib <= layout.mem_mib[node] else 0

    def worth(self, draft: ClusterState, booking: AllocationUnits) -> float:
        """Value of this placement: its change of the outlook (negative: a loss) minus the pressure on its GPUs."""
        return self.gain(draft, booking) - OF_PRESSURE * self.pressure[booking.node] * self._gpus_of(booking)

    def _gpus_of(self, booking: AllocationUnits) -> float:
        cards = self._layout.cards
        micros = 0
        for part in booking.parts:
            of_vram = part.vram_mib * WHOLE_CARD // max(1, cards[part.card].slice_total_mib or 1)
            micros += WHOLE_CARD if part.is_whole else max(part.micros, of_vram)
        return micros / WHOLE_CARD

    def _work_out(self, admits: tuple[bool, ...], millicpus: int, mem_mib: int, cards: tuple[CardState, ...]) -> float:
        room = sum(left for _, left, _ in cards)
        if not room:
            return 0.0
        fragments = super()._work_out(admits, millicpus, mem_mib, cards)
        return (room - self._taken(admits, millicpus, mem_mib, cards)) / WHOLE_CARD + OF_FRAGMENTS * fragments

    def _taken(self, admits: tuple[bool, ...], millicpus: int, mem_mib: int, cards: tuple[CardState, ...]) -> float:
        """Millionths of cards that the jobs of a list take, averaged over the lists."""
        fitting = frozenset(
            number
            for number, (cpus, mem, need) in enumerate(self._jobs)
            if admits[number]
            and cpus <= millicpus
            and mem <= mem_mib
            and (not need.request.gpus or self._useful(number, need, cards))
        )
        lists = self._left_of.get(fitting)
        if lists is None:
            lists = self._left_of[fitting] = [[job for job in one if job in fitting] for one in self._lists]
        kinds = {kind for kind, _, _ in cards}
        owners = {owner for _, _, owner in cards} - {-1}
        users = {self._jobs[number][2].uid for number in fitting if self._jobs[number][2].is_slice}
        if len(kinds) == 1 and self._is_of_one and (not users or owners <= users):
            rooms = sorted(left for _, left, _ in cards)
            wanted = self._needs[kinds.pop()]
            return sum(self._fill(one, millicpus, mem_mib, rooms.copy(), wanted) for one in lists) / len(lists)
        return sum(self._fill_any(one, millicpus, mem_mib, list(cards)) for one in lists) / len(lists)

    def _fill(self, jobs: Sequence[int], millicpus: int, mem_mib: int, rooms: list[int], wanted: Sequence[int]) -> int:
        """What jobs take of cards of one kind, given by their room, that all users may share."""
        known, failed = self._jobs, set()
        taken = 0
        for job in jobs:
            if job in failed:
                continue
            cpus, mem, need = known[job]
            if cpus > millicpus or mem > mem_mib:
                failed.add(job)
                continue
            count = need.request.gpus
            if count:
                part = wanted[job]
                place = bisect_left(rooms, part)
                if len(rooms) - place < count:
                    failed.add(job)
                    continue
                if count == 1 and part < WHOLE_CARD:
                    insort(rooms, rooms.pop(place) - part)
                else:
                    fresh = [left - part for left in rooms[place : place + count]]
                    rooms[place : place + count] = []
                    for left in fresh:
                        rooms.insert(bisect_right(rooms, left), left)
                taken += count * part
            millicpus -= cpus
            mem_mib -= mem
        return taken

    def _fill_any(self, jobs: Sequence[int], millicpus: int, mem_mib: int, cards: list[CardState]) -> int:
        """What jobs take of cards of several kinds, or of several users."""
        taken = 0
        failed: set[int] = set()
        for job in jobs:
            if job in failed:
                continue
            cpus, mem, need = self._jobs[job]
            count = need.request.gpus
            places = []
            if cpus <= millicpus and mem <= mem_mib:
                places = [
                    (left, number)
                    for number, (kind, left, owner) in enumerate(cards)
                    if 0 < self._needs[kind][job] <= left and owner in (-1, need.uid)
                ]
            if cpus > millicpus or mem > mem_mib or len(places) < count:
                failed.add(job)
                continue
            for left, number in sorted(places)[:count]:
                kind = cards[number][0]
                part = self._needs[kind][job]
                cards[number] = kind, left - part, need.uid if need.is_slice else -1
                taken += part
            millicpus -= cpus
            mem_mib -= mem
        return taken


def expected_capacity_of(layout: ClusterLayout) -> ExpectedCapacity | None:
    """Cached for this layout throughout the cycle; None if no typical jobs are known."""
    known = layout.pools.get(OUTLOOK)
    if isinstance(known, ExpectedCapacity):
        return known
    if not layout.typical:
        return None
    made = layout.pools[OUTLOOK] = ExpectedCapacity(layout, layout.typical)
    return made


def _gpus(need: RequestUnits) -> float:
    request = need.request
    return request.gpus if request.card_fraction is None else request.card_fraction


def _by_width(typical: Typical) -> Typical:
    weighted = []
    for need, weight in typical:
        gpus = _gpus(need)
        weighted.append((need, weight * (gpus**WIDTH if gpus else WITHOUT_GPUS)))
    total = sum(weight for _, weight in weighted)
    return tuple((need, weight / total) for need, weight in weighted)


def _lists(weights: Sequence[float]) -> list[list[int]]:
    """Lists of job numbers, drawn by weight, deterministic for given weights."""
    steps = list(accumulate(weights))
    last = len(weights) - 1
    state = 1
    made = []
    for _ in range(LISTS):
        drawn = []
        for _ in range(LENGTH):
            # Knuth's MMIX generator with a fixed seed, so that plans are reproducible.
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            drawn.append(min(last, bisect_right(steps, state / 2**64 * steps[-1])))
        made.append(drawn)
    return made
