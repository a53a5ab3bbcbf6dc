"""Where a job of each shape goes now, worked out once until somebody starts or ends."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.scheduler.draft import Booking, Draft
from gpusched.scheduler.placement import find, options
from gpusched.scheduler.queue import RequestShape
from gpusched.scheduler.timeline import Reservation, Timeline


class PlacementCache:
    """The best places on the machines of now, beside what is reserved.

    Args: has_one_place: a job goes where it is put best, whatever is reserved, or it waits.
    """

    __slots__ = ("_draft", "_has_one_place", "_most_free", "_timeline", "epoch", "is_flat")

    def __init__(self, draft: Draft, timeline: Timeline, *, is_flat: bool, has_one_place: bool) -> None:
        self._draft = draft
        self._timeline = timeline
        self.is_flat = is_flat
        self._has_one_place = has_one_place
        self.epoch = 0
        """What was found holds for one."""
        self._most_free = -1, 0
        """The epoch of which it is, and the most cards that are free on any node."""

    def may_fit(self, shape: RequestShape) -> bool:
        """A first look, by numbers alone; whether there is a place is another question."""
        draft = self._draft
        if self.is_flat:
            return shape.millicpus <= draft.free_millicpus[0]
        if self._most_free[0] != self.epoch:
            self._most_free = self.epoch, max(draft.free_cards, default=0)
        return shape.cards <= self._most_free[1]

    def fitting(self, shapes: Iterable[RequestShape]) -> set[RequestShape]:
        """Those of which one may find a place now."""
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

    def place(self, shape: RequestShape, end_at: float) -> Booking | None:
        """The best place now for a job of this shape that delays nothing that is reserved."""
        timeline, epoch = self._timeline, self.epoch
        reserved = timeline.reservations
        if not reserved or not (end_at > reserved[0].pass_until if len(reserved) == 1 else timeline.concerns(end_at)):
            return self.best(shape)
        if len(reserved) == 1:
            if shape.passes_of == epoch and not shape.passes:
                return None
            passed = 1, 1
        else:
            # Which reservations they are hangs on the time alone, so that to count them tells them.
            passed = len(reserved), sum([end_at > one.pass_until for one in reserved])
            if shape.refused_of != epoch:
                shape.refused_of, shape.refused = epoch, set()
            elif passed in shape.refused:
                return None
        found: Booking | None = None
        if self.is_flat:
            booking = self.best(shape)
            if booking is None:
                return None
            # There is no other place to which what is reserved could be moved.
            found = booking
            for one in reserved:
                if end_at > one.pass_until and not one.state.has_room(booking):
                    found = None
                    break
        elif self._has_one_place:
            booking = self.best(shape)
            if booking is None:
                return None
            found = booking if timeline.admits(booking, end_at) else None
        elif shape.epoch == epoch and shape.booking is None:
            return None
        elif len(reserved) > 1 or self._may_pass(shape, reserved[0]):
            places = options(self._draft, shape.need, avoid=timeline.cards_reserved(end_at))
            if not places:
                shape.booking, shape.epoch = None, epoch
                return None
            places.sort()
            found = next((one.booking for one in places if timeline.admits(one.booking, end_at)), None)
        shape.passes, shape.passes_of = found is not None, epoch
        if found is None:
            shape.refused.add(passed)
        return found

    def _may_pass(self, shape: RequestShape, reserved: Reservation) -> bool:
        """A first look, by numbers alone, at whether a job that is not over by then leaves room for what is reserved.

        That may go elsewhere, so that its own cards count as free; but then it takes as many others.
        """
        cards, free = shape.cards, reserved.state.free_cards
        if not cards:
            return True
        request = shape.need.request
        if sum(free) < cards * request.nodes + request.tail_gpus:
            return False
        free_now, held = self._draft.free_cards, {piece.node: len(piece.parts) for piece in reserved.booking.pieces()}
        return any(count >= cards and free[node] + held.get(node, 0) >= cards for node, count in enumerate(free_now))

    def best(self, shape: RequestShape) -> Booking | None:
        """The best place now for a job of this shape, whatever is reserved."""
        if shape.epoch != self.epoch:
            shape.booking = self.find(shape) if self.may_fit(shape) else None
            shape.epoch = self.epoch
        return shape.booking

    def find(self, shape: RequestShape) -> Booking | None:
        """The same, looked for."""
        only = shape.only
        if only is None:
            only = find(self._draft, shape.need)
            if self.is_flat:
                shape.only = only
            return only
        return only if self._draft.has_room(only) else None
