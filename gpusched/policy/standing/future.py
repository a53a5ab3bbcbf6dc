"""When running jobs are planned to end, and the machines as they will be once the first so many of them have.

Room is kept for the first that is blocked in each cycle, and from one cycle to the next little changes of what that
stands on: one job ends, another starts. So the machines of its instant are kept, and moved on from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import inf

from gpusched.policy.draft import Booking, Draft
from gpusched.policy.need import Need
from gpusched.policy.placement import find, fits
from gpusched.policy.profile import Ending, Kept, after, pass_until

End = tuple[float, float, int, Ending]
"""Planned end, start, id of the job."""


class Future:
    """Running jobs by their planned ends.

    Invariant: the machines kept are those of now without what the first `_ended` jobs hold. Bookings that the last
    reservation has brought with it come on top, and are rolled back before anything else is done to them.
    """

    __slots__ = (
        "_draft",
        "_ended",
        "_freed",
        "_is_kept",
        "_none_sooner",
        "_only",
        "_place",
        "_since",
        "_state",
        "ends",
    )

    def __init__(self, draft: Draft) -> None:
        """Args: draft: the machines of now, which others keep up to date."""
        self._draft = draft
        self.ends: list[End] = []
        self._state: Draft | None = None
        """The machines kept; None until room is kept for anybody."""
        self._ended = 0
        self._is_kept = False
        self._only: Booking | None = None
        """The only place for the need that is looked for."""
        self._since: list[Booking] = []
        """Of those who started since room was kept, what is still held at its instant."""
        self._none_sooner: Need | None = None
        """That for which there was no room at any instant before this one, when that was last looked at."""
        self._freed: set[int] = set()
        """Nodes of which something is free sooner since then."""
        self._place: tuple[Need, Booking] | None = None
        """The best place at this instant for the need that was looked for, until the machines of then change."""

    def add(self, ending: Ending) -> None:
        """A job runs, as the machines of now know."""
        end = ending.end_at, ending.start_at, ending.job_id, ending
        number = bisect_left(self.ends, end)
        self.ends.insert(number, end)
        if number < self._ended:
            self._ended += 1
        elif self._is_kept:
            self._since.append(ending.booking)
        elif self._state is not None:
            self._state.take(ending.booking)
            self._place = None

    def remove(self, ending: Ending) -> None:
        """A job runs no longer, or not as was planned; the machines of now know that it is over, if it is."""
        number = bisect_left(self.ends, (ending.end_at, ending.start_at, ending.job_id, ending))
        if number < self._ended:
            is_sooner = ending.end_at == self.ends[self._ended - 1][0]
            self._ended -= 1
        else:
            is_sooner = self._state is not None
            if is_sooner:
                self._cleared().give_back(ending.booking)
                self._place = None
        if is_sooner:
            self._freed.update(piece.node for piece in ending.booking.pieces())
        del self.ends[number]

    def forget_place(self) -> None:
        """Another place may be the best now, though the machines are the same."""
        self._place = None

    def keep(self, job_id: int, need: Need, duration_s: float, now: float, only: Booking | None = None) -> Kept | None:
        """`Profile.reserve` where nothing else is kept: at the first instant with room; None when there never is any.

        It takes the place of what was kept before, and its machines are those of its instant until the next change.

        Args: only: the one place that there is for this need, where there is no more than one.
        """
        state, self._only = self._cleared(), only
        self._release(state, self._instant_after(self._ended, now))
        if self._best(state, need) is None:
            if not self._move_on(state, need) or self._best(state, need) is None:
                return None
        elif self._none_sooner is not need or self._may_fit(state, need, self._freed):
            self._move_back(state, need, now)
        self._none_sooner = need
        self._freed.clear()
        booking = self._best(state, need)
        if booking is None:
            return None
        state.book(booking)
        self._is_kept = True
        start, gone = (now, 0), list[Ending]()
        if self._ended:
            at = max(now, self.ends[self._ended - 1][0])
            gone = [end[3] for end in self.ends[: self._ended]] if at == inf else gone
            start = at, sum(one.end_at == inf for one in gone)
        return Kept(job_id, need, booking, start, after(start, duration_s), state, pass_until(start, gone, now))

    def _cleared(self) -> Draft:
        """The machines without what the last reservation has brought with it, and without a log."""
        if self._state is None:
            self._state = self._draft.copy()
        state = self._state
        if self._is_kept:
            state.rollback(0)
            for booking in self._since:
                state.take(booking)
                self._place = None
            self._since.clear()
            self._is_kept = False
        return state

    def _best(self, state: Draft, need: Need) -> Booking | None:
        """The best place at this instant."""
        if self._place is None or self._place[0] is not need:
            booking = self._only
            if booking is None:
                booking = find(state, need)
            elif not state.has_room(booking):
                booking = None
            self._place = None if booking is None else (need, booking)
            return booking
        return self._place[1]

    def _fits(self, state: Draft, need: Need) -> bool:
        return fits(state, need) if self._only is None else state.has_room(self._only)

    def _may_fit(self, state: Draft, need: Need, nodes: Iterable[int]) -> bool:
        """Whether there can be room for (a part of) it on one of these nodes, by numbers alone.

        Where there was none before, it is only where something became free that there can be.
        """
        request = need.request
        cards = 0 if need.is_slice else min(request.gpus, request.tail_gpus or request.gpus)
        free_cards, free_millicpus = state.free_cards, state.free_millicpus
        return any(free_cards[node] >= cards and free_millicpus[node] >= need.millicpus for node in nodes)

    def _instant_after(self, first: int, now: float) -> int:
        """How many have ended when all have that end at the same instant as those. Of ends nobody knows each is one."""
        ends, count = self.ends, len(self.ends)
        last = ends[first - 1][0] if first else now
        while first < count and (ends[first][0] <= now or ends[first][0] == last < inf):
            first += 1
        return first

    def _release(self, state: Draft, ended: int) -> None:
        """Move on to when so many have ended."""
        if ended > self._ended:
            for end in self.ends[self._ended : ended]:
                state.give_back(end[3].booking)
            self._ended, self._place = ended, None

    def _move_on(self, state: Draft, need: Need) -> bool:
        """Go to the first later instant with room for this need."""
        self._none_sooner = None
        while self._ended < len(self.ends):
            first = self._ended
            self._release(state, self._instant_after(first + 1, -inf))
            nodes = {piece.node for end in self.ends[first : self._ended] for piece in end[3].booking.pieces()}
            if self._may_fit(state, need, nodes) and self._fits(state, need):
                return True
        return False

    def _move_back(self, state: Draft, need: Need, now: float) -> None:
        """Go to the first instant with room for this need, which is this one or a sooner one."""
        self._none_sooner = None
        ends = self.ends
        while self._ended and ends[self._ended - 1][0] > now:
            last, at = self._ended, ends[self._ended - 1][0]
            first = last - 1 if at == inf else bisect_left(ends, (at,), 0, last)
            for end in ends[first:last]:
                state.take(end[3].booking)
            self._ended = first
            if not self._fits(state, need):
                self._release(state, last)
                return
            self._place = None
