"""The best place of each kind of request, until a job starts or ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpusched.scheduler.cluster_state import AllocationUnits, ClusterState
from gpusched.scheduler.placement import best_placement, candidates

if TYPE_CHECKING:
    from gpusched.scheduler.queue import RequestShape
    from gpusched.scheduler.reservation import TimelineReservation
    from gpusched.scheduler.timeline import Timeline


class PlacementCache:
    """Best placements on the machines as they are now, subject to the reservations.

    Args: has_one_place: a job gets its best placement regardless of reservations, or waits.
    """

    __slots__ = ("_draft", "_has_one_place", "_most_free", "_timeline", "epoch", "is_flat")

    def __init__(self, draft: ClusterState, timeline: Timeline, *, has_one_place: bool) -> None:
        self._draft = draft
        self._timeline = timeline
        self.is_flat = draft.layout.is_flat
        self._has_one_place = has_one_place
        self.epoch = 0
        """Cached placements are valid for one epoch."""
        self._most_free = -1, 0
        """Its epoch, and the most cards free on any node."""

    def may_fit(self, shape: RequestShape) -> bool:
        """Numeric precheck; a placement may still not exist."""
        draft = self._draft
        if self.is_flat:
            return shape.millicpus <= draft.free_millicpus[0]
        if self._most_free[0] != self.epoch:
            self._most_free = self.epoch, max(draft.free_cards, default=0)
        return shape.cards <= self._most_free[1]

    def may_fit_any(self, shapes: Iterable[RequestShape]) -> bool:
        """Whether `may_fit` holds for any of these."""
        if not self.is_flat:
            return any(map(self.may_fit, shapes))
        free = self._draft.free_millicpus[0]
        for shape in shapes:  # noqa: SIM110  a third of the time that any() takes, for every cycle
            if shape.millicpus <= free:
                return True
        return False

    def fitting(self, shapes: Iterable[RequestShape]) -> set[RequestShape]:
        """Shapes of which a job may find a placement now."""
        epoch = self.epoch
        if self.is_flat:
            free = self._draft.free_millicpus[0]
            return {
                shape
                for shape in shapes
                if shape.millicpus <= free and (shape.epoch != epoch or shape.booking is not None)
            }
        return {
            shape for shape in shapes if self.may_fit(shape) and (shape.epoch != epoch or shape.booking is not None)
        }

    def place(self, shape: RequestShape, end_at: float) -> AllocationUnits | None:
        """Best placement now for a job of this shape that delays no reservation."""
        timeline, epoch = self._timeline, self.epoch
        reserved = timeline.reservations
        if not reserved or not (end_at > reserved[0].pass_until if len(reserved) == 1 else timeline.concerns(end_at)):
            return self.best(shape)
        if len(reserved) == 1:
            if shape.barred_of == epoch:
                return None
            passed = 1, 1
        else:
            # Which reservations these are depends on the end alone, so their number identifies them.
            passed = len(reserved), sum([end_at > one.pass_until for one in reserved])
            if shape.refused_of != epoch:
                shape.refused_of, shape.refused = epoch, set()
            elif passed in shape.refused:
                return None
        found: AllocationUnits | None = None
        if self.is_flat or self._has_one_place:
            booking = self.best(shape)
            if booking is None:
                return None
            found = booking if timeline.admits(booking, end_at) else None
        elif shape.epoch == epoch and shape.booking is None:
            return None
        elif len(reserved) > 1 or self._may_pass(shape, reserved[0]):
            places = candidates(self._draft, shape.need, avoid=timeline.cards_reserved(end_at))
            if not places:
                shape.booking, shape.epoch = None, epoch
                return None
            places.sort()
            found = timeline.first_admitted(places, end_at)
        if found is None and len(reserved) == 1:
            shape.barred_of = epoch
        elif found is None:
            shape.refused.add(passed)
        return found

    def _may_pass(self, shape: RequestShape, reserved: TimelineReservation) -> bool:
        """Numeric precheck whether a job that ends after the start of a reservation leaves room for it.

        The reservation may move, so the job's own cards count as free; but then it takes as many others.
        """
        cards, free = shape.cards, reserved.state.free_cards
        if not cards:
            return True
        request = shape.need.request
        if sum(free) < cards * request.nodes + request.tail_gpus:
            return False
        free_now, held = self._draft.free_cards, {piece.node: len(piece.parts) for piece in reserved.booking.pieces()}
        return any(count >= cards and free[node] + held.get(node, 0) >= cards for node, count in enumerate(free_now))

    def best(self, shape: RequestShape) -> AllocationUnits | None:
        """Best placement now for a job of this shape, regardless of reservations."""
        if shape.epoch != self.epoch:
            if shape.only is None:
                shape.booking = self.find(shape) if self.may_fit(shape) else None
            else:
                shape.booking = shape.only if self._draft.has_room(shape.only) else None
            shape.epoch = self.epoch
        return shape.booking

    def find(self, shape: RequestShape) -> AllocationUnits | None:
        """As `best`, without its cache."""
        only = shape.only
        if only is None:
            only = best_placement(self._draft, shape.need)
            if self.is_flat:
                shape.only = only
            return only
        return only if self._draft.has_room(only) else None
