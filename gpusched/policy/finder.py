"""Finds places again and again on one draft: of the nodes, only those that changed since are looked at anew.

What was found for a need on a node stays true until something is booked there or given back. With a thousand nodes and
a few hundred kinds of jobs nearly every question is about one or two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from gpusched.policy.draft import Booking, Draft
from gpusched.policy.filters import Place, pool
from gpusched.policy.need import Need
from gpusched.policy.placement import SCARCE_AT, Option, Search, find
from gpusched.policy.scarcity import Scarce, scarce_of, scarcity_of

Classes = tuple[int, ...]
"""Of the cards that an option takes; empty where nobody insists on any."""

Mark = tuple[float, ...]
"""A score, or one but for what is scarce."""

_MOST_KEPT = 2_000_000
"""Options that are kept; then all are forgotten, against growing without end."""


class Finder:
    """`placement.find` for whoever asks often, without guards and ceilings.

    Bookings go through `book` and `release`. Whoever changes the draft otherwise says so with `touch`.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._changed: list[int] = []
        """Nodes, in the order in which they changed."""
        self._kept: dict[object, _Kept] = {}
        self._scarce: Scarce | None = None
        """What was scarce when a place was last looked for."""

    def book(self, booking: Booking) -> None:
        """Take what the booking says."""
        self.draft.book(booking)
        self.touch(piece.node for piece in booking.pieces())

    def release(self, booking: Booking) -> None:
        """Give back what the booking took."""
        self.draft.release(booking)
        self.touch(piece.node for piece in booking.pieces())

    def touch(self, nodes: Iterable[int]) -> None:
        """What is kept of these nodes is not true any more."""
        self._changed.extend(nodes)

    def find(self, need: Need) -> Booking | None:
        """The best place for this need now, or None; that of `placement.find`."""
        request = need.request
        if request.nodes > 1 or request.tail_gpus or request.licenses:
            return find(self.draft, need)
        self._see_what_is_scarce()
        best = self._of(need).best(self._scarce)
        return None if best is None else best.booking

    def places(self, need: Need) -> list[Booking]:
        """One place on every node that has room, in the order of the nodes."""
        self._see_what_is_scarce()
        return [option.booking for _, option in sorted(self._of(need).options.items())]

    def _see_what_is_scarce(self) -> None:
        """What is scarce concerns the choice among nodes, and among the cards of nodes that have several classes."""
        before, self._scarce = self._scarce, scarce_of(self.draft)
        if before == self._scarce:
            return
        if before is None or self._scarce is None or before.class_of is not self._scarce.class_of:
            self._kept.clear()
            return
        known = scarcity_of(self.draft.layout)
        self.touch(() if known is None else known.mixed)

    def _of(self, need: Need) -> _Kept:
        # A booking names the user, of whole cards too.
        mark = need.request, need.uid
        kept = self._kept.get(mark)
        if kept is None:
            if len(self._kept) * len(self.draft.layout.nodes) > _MOST_KEPT:
                self._kept.clear()
                self._changed.clear()
            kept = self._kept[mark] = _Kept(self.draft, need, len(self._changed))
        elif kept.seen < len(self._changed):
            kept.refresh(set(self._changed[kept.seen :]))
            kept.seen = len(self._changed)
        return kept


class _Kept:
    """The options of one need; of those on cards of the same classes the best on top of a heap."""

    __slots__ = ("_draft", "_heaps", "_need", "_places", "options", "seen")

    def __init__(self, draft: Draft, need: Need, seen: int) -> None:
        self._draft = draft
        self._need = need
        self._places: dict[int, Place] = {place.node: place for place in pool(draft.layout, need).places}
        self.options: dict[int, Option] = {}
        self._heaps: dict[Classes, list[tuple[Mark, int]]] = {}
        """What is scarce changes with every booking, and with it which class comes first, but nothing within one."""
        self.seen = seen
        search = Search(draft, need, None, frozenset(), None)
        for node, place in self._places.items():
            tried = search.look(place)
            if isinstance(tried, Option):
                self.options[node] = tried
                classes, mark = _mark(tried, search.scarce)
                self._heaps.setdefault(classes, []).append((mark, node))
        for heap in self._heaps.values():
            heapify(heap)

    def refresh(self, nodes: Iterable[int]) -> None:
        """Look at these nodes again."""
        search = Search(self._draft, self._need, None, frozenset(), None)
        for node in nodes:
            place = self._places.get(node)
            if place is None:
                continue
            before = self.options.pop(node, None)
            tried = search.look(place)
            if isinstance(tried, Option):
                self.options[node] = tried
                classes, mark = _mark(tried, search.scarce)
                if before is None or _mark(before, search.scarce) != (classes, mark):
                    heappush(self._heaps.setdefault(classes, []), (mark, node))

    def best(self, scarce: Scarce | None) -> Option | None:
        """The smallest that is still true; what is not any more is forgotten on the way."""
        found: tuple[Mark, Option] | None = None
        for classes, heap in self._heaps.items():
            option = self._top(classes, heap, scarce)
            if option is None:
                continue
            score = option.score
            if scarce is not None:
                score = *score[:SCARCE_AT], sum(one in scarce.classes for one in classes), *score[SCARCE_AT + 1 :]
            if found is None or score < found[0]:
                found = score, option
        return None if found is None else found[1]

    def _top(self, classes: Classes, heap: list[tuple[Mark, int]], scarce: Scarce | None) -> Option | None:
        while heap:
            mark, node = heap[0]
            option = self.options.get(node)
            if option is not None and _mark(option, scarce) == (classes, mark):
                return option
            heappop(heap)
        return None


def _mark(option: Option, scarce: Scarce | None) -> tuple[Classes, Mark]:
    """The classes of its cards, and its score but for how many of them are scarce."""
    if scarce is None:
        return (), option.score
    classes = tuple(scarce.class_of[part.card] for part in option.booking.parts)
    return classes, (*option.score[:SCARCE_AT], *option.score[SCARCE_AT + 1 :])
