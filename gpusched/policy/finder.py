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
from gpusched.policy.placement import Option, Search, find

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
        best = self._of(need).best()
        return None if best is None else best.booking

    def places(self, need: Need) -> list[Booking]:
        """One place on every node that has room, in the order of the nodes."""
        return [option.booking for _, option in sorted(self._of(need).options.items())]

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
    """The options of one need, the best on top of a heap."""

    __slots__ = ("_heap", "_places", "_search", "options", "seen")

    def __init__(self, draft: Draft, need: Need, seen: int) -> None:
        self._search = Search(draft, need, None, frozenset(), None)
        self._places: dict[int, Place] = {place.node: place for place in pool(draft.layout, need).places}
        self.options: dict[int, Option] = {}
        self._heap: list[tuple[tuple[float, ...], int]] = []
        self.seen = seen
        for node, place in self._places.items():
            self._look(node, place)
        heapify(self._heap)

    def _look(self, node: int, place: Place) -> Option | None:
        tried = self._search.look(place)
        if not isinstance(tried, Option):
            return None
        self.options[node] = tried
        self._heap.append((tried.score, node))
        return tried

    def refresh(self, nodes: Iterable[int]) -> None:
        """Look at these nodes again."""
        for node in nodes:
            place = self._places.get(node)
            if place is None:
                continue
            before = self.options.pop(node, None)
            tried = self._search.look(place)
            if isinstance(tried, Option):
                self.options[node] = tried
                if before is None or before.score != tried.score:
                    heappush(self._heap, (tried.score, node))

    def best(self) -> Option | None:
        """The smallest that is still true; what is not any more is forgotten on the way."""
        heap, options = self._heap, self.options
        while heap:
            score, node = heap[0]
            option = options.get(node)
            if option is not None and option.score == score:
                return option
            heappop(heap)
        return None
