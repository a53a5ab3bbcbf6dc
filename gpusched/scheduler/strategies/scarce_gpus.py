"""Cards to leave to jobs that insist on them: on a model, a size, a label or a node.

An unconstrained job should not take the last cards that others require. Future demand is estimated from the
pending and running jobs (`GpuDemand`). Cards that the very same jobs insist on are one class. If the cards that are
free now were requested in the same proportions, the requests per free card of a class, from jobs insisting on it,
would be:

    fraction of all requested GPUs that jobs insisting on the class request, each spread over all suitable cards
        * free cards of all classes / free cards of the class

From `SCARCE` on the class is scarce, and others take its cards only as a last resort. An abundant class is filled as
usual, until just enough is left of it; in one without a free card there is nothing to protect,
and slices may fill its partly used cards. If no job insists on anything, or only on what is everywhere, nothing is
scarce and nothing is computed.

Source: after the protection levels of yield management (Belobaba, Application of a Probabilistic Decision Model to
Airline Seat Inventory Control, Operations Research 37, 1989), with the mean in place of the distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpusched.model.job import Request
from gpusched.model.snapshot import Snapshot
from gpusched.scheduler.cluster_state import CardShare, ClusterLayout, ClusterState
from gpusched.scheduler.filters import pool
from gpusched.scheduler.request_units import (
    GpuDemand,
    RequestUnits,
    constraint_strength,
    insisting_on_nothing,
    micros_asked,
)

SCARCE = 0.8
"""Requests per free card from jobs insisting on its class, from which on it is left to them. Below 1, since not
every card left serves them: some lack cores, and wide jobs need several on one node."""

_SCARCITY = "scarcity"


def wanted_of(snapshot: Snapshot) -> GpuDemand:
    """Demand of all pending and running jobs."""
    wanted = GpuDemand()
    for waiting in snapshot.pending:
        request = waiting.key.terms.request
        if request.gpus:
            wanted.add(constraint_strength(request), waiting.total * micros_asked(request))
    for held in snapshot.allocations:
        if held.terms.request.gpus and held.gpus:
            wanted.add(constraint_strength(held.terms.request), micros_asked(held.terms.request, len(held.gpus)))
    return wanted


@dataclass(frozen=True, slots=True)
class Scarce:
    """Classes of cards that are scarce in the present state of a draft."""

    class_of: Sequence[int]
    """Per card of the layout."""
    classes: frozenset[int]

    def holds(self, card: int) -> bool:
        return self.class_of[card] in self.classes

    def count(self, parts: Iterable[CardShare]) -> int:
        return sum(self.holds(part.card) for part in parts)


class Scarcity:
    """Classes of cards of a layout for the present constraints."""

    def __init__(self, layout: ClusterLayout, insisted: frozenset[Request]) -> None:
        self.insisted = insisted
        usable = _cards(layout, Request(gpus=1, cpus=0.0))
        self._accepted: list[tuple[Request, int, tuple[int, ...]]] = []
        """Constraints, with the number of suitable cards and their classes."""
        chosen = []
        for one in sorted(insisted, key=repr):
            cards = _cards(layout, one)
            if cards and cards != _cards(layout, insisting_on_nothing(one)):
                chosen.append((one, cards))
        numbers: dict[tuple[bool, ...], int] = {(False,) * len(chosen): 0}
        self.class_of = [0] * len(layout.cards)
        """Per card; no job insists on class 0."""
        for card in layout.cards:
            admits = tuple(card.number in cards for _, cards in chosen)
            self.class_of[card.number] = numbers.setdefault(admits, len(numbers))
        for place, (one, cards) in enumerate(chosen):
            classes = tuple(number for admits, number in numbers.items() if admits[place])
            self._accepted.append((one, len(cards), classes))
        self._nodes: list[list[int]] = [[] for _ in numbers]
        """Per class, the nodes whose cards all belong to it."""
        self._loose: list[list[int]] = [[] for _ in numbers]
        """Per class, its cards on other nodes."""
        self._cards = [0] * len(numbers)
        self.mixed = frozenset(
            node for node, cards in enumerate(layout.cards_of) if len({self.class_of[one.number] for one in cards}) > 1
        )
        """Nodes with cards of several classes."""
        for node, cards_of in enumerate(layout.cards_of):
            there = [card.number for card in cards_of if card.number in usable]
            for number in there:
                self._cards[self.class_of[number]] += 1
            if there and len(there) == len(cards_of) and node not in self.mixed:
                self._nodes[self.class_of[there[0]]].append(node)
            else:
                for number in there:
                    self._loose[self.class_of[number]].append(number)
        self._none = Scarce(self.class_of, frozenset())

    def scarce(self, draft: ClusterState, wanted: GpuDemand) -> Scarce:
        """The scarce classes in the present state of the draft."""
        if not self._accepted or wanted.micros <= 0:
            return self._none
        free = [self._free(draft, number) for number in range(len(self._nodes))]
        every_one = sum(free)
        # Fraction of the total demand that falls on each card.
        parts = [0.0] * len(free)
        for one, cards, classes in self._accepted:
            part = wanted.insisted.get(one, 0) / wanted.micros / cards
            for number in classes:
                parts[number] += part
        return Scarce(
            self.class_of,
            frozenset(
                number
                for number, part in enumerate(parts)
                if part * self._cards[number] * every_one >= SCARCE * free[number] > 0
            ),
        )

    def _free(self, draft: ClusterState, number: int) -> int:
        loose = sum(map(draft.is_unbooked, self._loose[number]))
        return loose + sum(map(draft.free_cards.__getitem__, self._nodes[number]))


def scarcity_of(layout: ClusterLayout) -> Scarcity | None:
    """Cached for this layout until the constraints change; None if there are none."""
    wanted = layout.wanted
    if wanted is None or not wanted.insisted:
        return None
    known = layout.pools.get(_SCARCITY)
    if isinstance(known, Scarcity) and known.insisted == wanted.insisted.keys():
        return known
    made = layout.pools[_SCARCITY] = Scarcity(layout, frozenset(wanted.insisted))
    return made


def scarce_of(draft: ClusterState) -> Scarce | None:
    """Scarce classes in the present state of this draft; None if no job insists on anything."""
    wanted, known = draft.layout.wanted, scarcity_of(draft.layout)
    return None if wanted is None or known is None else known.scarce(draft, wanted)


def _cards(layout: ClusterLayout, request: Request) -> frozenset[int]:
    """Numbers of the suitable cards for such a job if nothing were booked."""
    found = pool(layout, RequestUnits.of(request, -1))
    return frozenset(card.number for place in found.places for card in place.cards)
