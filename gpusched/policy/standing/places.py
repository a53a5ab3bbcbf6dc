"""Where a job of each shape goes now, worked out once until somebody starts or ends."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.policy.draft import Booking, Draft
from gpusched.policy.placement import find, options
from gpusched.policy.profile import Kept, Profile
from gpusched.policy.standing.kinds import Row, Shape


class Places:
    """The machines of now, and what is kept.

    Args: has_one_place: a job goes where it is put best, whatever is kept, or it waits.
    """

    __slots__ = ("_draft", "_has_one_place", "_is_flat", "_most_free", "epoch", "profile")

    def __init__(self, draft: Draft, *, is_flat: bool, has_one_place: bool) -> None:
        self._draft = draft
        self._is_flat = is_flat
        self._has_one_place = has_one_place
        self.profile = Profile(draft, (), 0.0)
        self.epoch = 0
        """What was found holds for one."""
        self._most_free = -1, 0
        """The most cards that are free on any node, and the epoch of which that is."""

    def may_fit(self, shape: Shape) -> bool:
        """A first look, by numbers alone; whether there is a place is another question."""
        draft = self._draft
        if self._is_flat:
            return shape.millicpus <= draft.free_millicpus[0]
        if self._most_free[0] != self.epoch:
            self._most_free = self.epoch, max(draft.free_cards)
        return shape.cards <= self._most_free[1]

    def fitting(self, shapes: Iterable[Shape]) -> set[Shape]:
        """Those of which one may find a place now."""
        epoch = self.epoch
        return {
            shape for shape in shapes if self.may_fit(shape) and (shape.epoch != epoch or shape.booking is not None)
        }

    def next_in(self, row: Row, number: int, now: float) -> int | None:
        """Where in its row, of a shape that may fit, the next job stands that could start now, from there on."""
        line, shape = row.by_length, row.shape
        if number >= len(line):
            return None
        kept = self.profile.kept
        if len(kept) != 1:
            return number
        if self._is_flat:
            passes: bool | None = shape.millicpus <= kept[0].state.free_millicpus[0]
        else:
            passes = shape.passes if shape.passes_of == self.epoch else None
        if passes is not False:
            return number
        longest_s = kept[0].pass_until - now
        if longest_s < row.shortest_s:
            return None
        if row.is_of_one_kind:
            return number if line[number][2].planned_s <= longest_s else None
        for at in range(number, len(line)):
            if line[at][2].planned_s <= longest_s:
                return at
        if not number:
            row.shortest_s = min(entry[2].planned_s for entry in line)
        return None

    def place(self, shape: Shape, end_at: float) -> Booking | None:
        """The best place now for a job of this shape that delays nothing that is kept, as in `cycle`."""
        profile, epoch = self.profile, self.epoch
        kept = profile.kept
        if not kept or not (end_at > kept[0].pass_until if len(kept) == 1 else profile.concerns(end_at)):
            return self.best(shape)
        if shape.passes_of == epoch and not shape.passes and len(kept) == 1:
            return None
        found: Booking | None = None
        if self._has_one_place or self._is_flat:
            booking = self.best(shape)
            if booking is None:
                return None
            found = booking if profile.admits(booking, end_at) else None
        elif shape.epoch == epoch and shape.booking is None:
            return None
        elif len(kept) > 1 or self._may_pass(shape, kept[0]):
            places = options(self._draft, shape.need, avoid=profile.cards_kept(end_at))
            if not places:
                shape.booking, shape.epoch = None, epoch
                return None
            places.sort()
            found = next((one.booking for one in places if profile.admits(one.booking, end_at)), None)
        shape.passes, shape.passes_of = found is not None, epoch
        return found

    def _may_pass(self, shape: Shape, kept: Kept) -> bool:
        """A first look, by numbers alone, at whether a job that is not over by then leaves room for what is kept.

        That may go elsewhere, so that its own cards count as free; but then it takes as many others.
        """
        cards, free = shape.cards, kept.state.free_cards
        if not cards:
            return True
        request = shape.need.request
        if sum(free) < cards * request.nodes + request.tail_gpus:
            return False
        free_now, held = self._draft.free_cards, {piece.node: len(piece.parts) for piece in kept.booking.pieces()}
        return any(count >= cards and free[node] + held.get(node, 0) >= cards for node, count in enumerate(free_now))

    def best(self, shape: Shape) -> Booking | None:
        """The best place now for a job of this shape, whatever is kept."""
        if shape.epoch != self.epoch:
            shape.booking = self.find(shape) if self.may_fit(shape) else None
            shape.epoch = self.epoch
        return shape.booking

    def find(self, shape: Shape) -> Booking | None:
        only = shape.only
        if only is None:
            only = find(self._draft, shape.need)
            if self._is_flat:
                shape.only = only
            return only
        return only if self._draft.has_room(only) else None
