"""The time profile: who holds what until when, what is kept for whom, and who may pass.

The first blocked jobs get reservations, each at the earliest instant at which it fits for all of its time
limit beside what is kept already. A later job may start now when, for as long as it runs, every one of
them still fits at its own instant. One reservation is EASY backfill, one for every job is conservative
backfill.

A job without a time limit is taken to end after all that have one, those that started first ending
first. A reservation that needs the end of such a job has no start time, but it is of concrete cards.
To pass it by ending in time, a job must be shorter than the youngest such job has run already: then
the blocked job waits at most about twice as long as it would have, and the cards need not be idle.

Sources: Lifka, The ANL/IBM SP Scheduling System (1995), for EASY; Mu'alem and Feitelson, Utilization,
Predictability, Workloads, and User Runtime Estimates (2001), for conservative backfill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from gpusched.model.cluster import Allocation
from gpusched.model.value import Value, replace
from gpusched.policy.draft import Booking, Counts, Draft, Layout
from gpusched.policy.filters import has_counts
from gpusched.policy.placement import Guard, Need, find, fits

Instant = tuple[float, int]
"""UTC epoch seconds; jobs without a limit end at (inf, 1), (inf, 2) and so on, in the order of their starts."""

NEVER: Instant = (inf, 1 << 62)

FIRST_WINDOW = -1
"""Stands for the first window of the calendar among running and waiting jobs, whose ids begin at 1; -2 for the next."""


# Not frozen, though nothing changes one: a frozen one takes four times as long to make, and each run has one.
class Ending(Value):
    """A running job as the future sees it. `end_at` is infinite without a time limit."""

    job_id: int
    start_at: float
    end_at: float
    booking: Booking


def _suspended(one: Ending, at: float) -> Iterator[Ending]:
    """The cores are free then; nobody knows when a job that stands still has ended and leaves the rest."""
    booking = one.booking
    if booking.millicpus:
        yield replace(
            one, end_at=min(one.end_at, at), booking=Booking(booking.node, booking.uid, booking.millicpus, 0, ())
        )
    if booking.node_mem_mib or booking.parts or booking.resources or booking.licenses:
        yield replace(one, end_at=inf, booking=replace(booking, millicpus=0))


def endings(layout: Layout, allocations: Iterable[Allocation], now: float) -> list[Ending]:
    """The running jobs of a snapshot. Those on nodes that are gone give nothing back."""
    found = []
    for held in allocations:
        booking = layout.booking(held.uid, held)
        if booking is not None:
            found.append(Ending(held.job_id, held.start_at, end_of(held, now), booking))
    return found


def end_of(held: Allocation, now: float) -> float:
    """When a running job is taken to end: as predicted, and once it has run on for longer, at its limit."""
    limit_at = inf if held.expected_end_at is None else held.expected_end_at
    if held.predicted_end_at is not None and held.predicted_end_at > now:
        return min(held.predicted_end_at, limit_at)
    return limit_at


class Kept:
    """What is kept for one blocked job, or for a window of the calendar, from one instant to another."""

    __slots__ = ("_booking", "_cards", "_first", "_gone", "end", "job_id", "need", "pass_until", "start", "state")

    def __init__(
        self,
        job_id: int,
        need: Need | None,
        booking: Booking,
        start: Instant,
        end: Instant,
        state: Draft,
        pass_until: float,
        gone: Sequence[Ending] = (),
    ) -> None:
        self.job_id = job_id
        """Negative for a window of the calendar."""
        self.need = need
        """None for a window of the calendar, which nothing moves."""
        self._booking = self._first = booking
        self._cards: frozenset[int] | None = None
        self.start = start
        self.end = end
        self.state = state
        """The machines at the instant of its start, with all that is kept then, this one included."""
        self.pass_until = pass_until
        """A job that ends by this instant may use what is kept."""
        self._gone = gone
        """Those who will have ended by then, in that order."""

    def waits_for(self, draft: Draft) -> tuple[int, ...]:
        """Running jobs that hold what the first place lacks now, and windows in force, in the order of their ends."""
        return _holders(draft, self._first, self._gone)

    @property
    def start_at(self) -> float | None:
        """Latest expected start; None when a job without a time limit must end first."""
        return None if self.start[0] == inf else self.start[0]

    @property
    def booking(self) -> Booking:
        """What is kept."""
        return self._booking

    @property
    def cards(self) -> frozenset[int]:
        """Numbers of the cards that are kept."""
        if self._cards is None:
            self._cards = _cards_of(self._booking)
        return self._cards

    def move_to(self, booking: Booking) -> None:
        """Keep this instead, at the same instant."""
        self._booking, self._cards = booking, None

    def is_held_at(self, instant: Instant) -> bool:
        """Whether it is in force then."""
        return self.start <= instant < self.end


def _cards_of(booking: Booking) -> frozenset[int]:
    return frozenset(part.card for piece in booking.pieces() for part in piece.parts)


class Profile:
    """All that is known of the future of one cycle."""

    def __init__(self, draft: Draft, running: Iterable[Ending], now: float) -> None:
        self._draft = draft
        """Of now; the cycle books its starts in it."""
        self._now = now
        self._running = list(running)
        self.kept: list[Kept] = []

    # --- what happens now -----------------------------------------------------------------------

    def start(self, ending: Ending) -> None:
        """A job starts now that the draft has booked and `admits` let pass."""
        self._running.append(ending)
        for kept in self._passed_by(ending.end_at):
            kept.state.book(ending.booking)

    def end_early(self, ends_at: Mapping[int, float], suspended: Collection[int] = ()) -> None:
        """Running jobs are about to be stopped, each to have ended by its instant; some are only suspended.

        What was kept before stays where it is: it only has more room than it knows of.
        """
        self._running = self._ending_early(ends_at, suspended)

    def _ending_early(self, ends_at: Mapping[int, float], suspended: Collection[int]) -> list[Ending]:
        running: list[Ending] = []
        for one in self._running:
            end_at = ends_at.get(one.job_id)
            if end_at is None:
                running.append(one)
            elif one.job_id not in suspended:
                running.append(replace(one, end_at=min(one.end_at, end_at)))
            else:
                running.extend(_suspended(one, end_at))
        return running

    def _passed_by(self, end_at: float) -> list[Kept]:
        """What a job that runs from now until then could be in the way of."""
        return [kept for kept in self.kept if end_at > kept.pass_until]

    def cards_kept(self, end_at: float) -> frozenset[int]:
        """Cards that a job which runs until then had better leave alone."""
        return frozenset().union(*(kept.cards for kept in self._passed_by(end_at)))

    def concerns(self, end_at: float) -> tuple[int, ...]:
        """Which reservations, by number, a job that runs until then could be in the way of."""
        return tuple(number for number, kept in enumerate(self.kept) if end_at > kept.pass_until)

    def leaves_licenses(self, licenses: Counts, end_at: float) -> bool:
        """Whether so many can be used from now until then without those that are kept."""
        return all(has_counts(kept.state.free_licenses, licenses) for kept in self._passed_by(end_at))

    def admits(self, booking: Booking, end_at: float) -> bool:
        """Whether all that is kept still fits at its time if this is started now and runs until then.

        A reservation may move to other cards for that, never to a later instant. When the answer is no,
        nothing has changed.
        """
        passed = self._passed_by(end_at)
        tight = [kept for kept in passed if not kept.state.has_room(booking)]
        if not tight:
            return True
        marks = self._marks()
        # Tried with the newcomer in place; whoever starts it books it once more by `start`.
        for kept in passed:
            kept.state.book(booking)
        moved = all(self._move(kept) for kept in tight)
        for kept in passed:
            kept.state.release(booking)
        if moved and all(kept.state.has_room(booking) for kept in passed):
            return True
        self._restore(marks)
        return False

    def delayed_by(self, booking: Booking, end_at: float, own: Kept | None = None) -> list[Kept]:
        """What is kept and would no longer fit at its time if this was started now and ran until then.

        Args: own: what is kept for the very job that asks, which is not in its own way. Changes nothing.
        """
        marks = self._marks()
        for kept in self.kept:
            if own is not None and kept is not own and own.is_held_at(kept.start):
                kept.state.release(own.booking)
        passed = [kept for kept in self._passed_by(end_at) if kept is not own]
        tight = [kept for kept in passed if not kept.state.has_room(booking)]
        for kept in passed:
            kept.state.book(booking)
        stuck = [kept for kept in tight if not self._move(kept)]
        for kept in passed:
            kept.state.release(booking)
        found = stuck or [kept for kept in passed if not kept.state.has_room(booking)]
        self._restore(marks)
        return found

    def _marks(self) -> list[tuple[Kept, int, Booking]]:
        return [(kept, kept.state.checkpoint(), kept.booking) for kept in self.kept]

    def _restore(self, marks: Sequence[tuple[Kept, int, Booking]]) -> None:
        for kept, mark, before in marks:
            kept.state.rollback(mark)
            if kept.booking is not before:
                kept.move_to(before)

    def _move(self, kept: Kept) -> bool:
        """Find other cards for a reservation that no longer fits where it is, at the same instant."""
        if kept.need is None:
            return False
        meets = [other for other in self.kept if kept.is_held_at(other.start)]
        for other in meets:
            other.state.release(kept.booking)
        elsewhere = find(_worst([other.state for other in meets]), kept.need)
        if elsewhere is None:
            return False
        for other in meets:
            other.state.book(elsewhere)
        kept.move_to(elsewhere)
        return True

    # --- what is kept ---------------------------------------------------------------------------

    def keep_window(self, number: int, booking: Booking, start_at: float, end_at: float) -> None:
        """A window of the calendar that begins later: fixed, and before all reservations are made."""
        start, end = (start_at, 0), (end_at, 0)
        state = self._state_at(start)
        for other in self.kept:
            if start <= other.start < end:
                other.state.book(booking)
        state.book(booking)
        self.kept.append(Kept(number, None, booking, start, end, state, start_at))

    def reserve(self, job_id: int, need: Need, duration_s: float, guard: Guard | None = None) -> Kept | None:
        """Keep room for this need, for so long, from the earliest instant on; None when it never fits.

        Measured load is not looked at: what it will be then, nobody knows.
        """
        order = _in_order(self._running, self._now)
        found = self._earliest(order, need, duration_s, guard)
        if found is None:
            return None
        start, ended, booking, state = found
        state.book(booking)
        end = after(start, duration_s)
        for kept in self._met_between(start, end):
            kept.state.book(booking)
        gone = [ending for _, ending in order[:ended]]
        passed = pass_until(start, gone, self._now)
        made = Kept(job_id, need, booking, start, end, state, passed, gone)
        self.kept.append(made)
        return made

    def fits_after(
        self,
        ends_at: Mapping[int, float],
        suspended: Collection[int],
        need: Need,
        duration_s: float,
        guard: Guard | None = None,
    ) -> bool:
        """Whether room could be kept for this need from the instant on at which all of these have ended.

        Not when it is kept for others already: then it would be them for whom these make room.
        """
        order = _in_order(self._ending_early(ends_at, suspended), self._now)
        found = self._earliest(order, need, duration_s, guard)
        return found is not None and found[0][0] <= max(ends_at.values())

    def _earliest(
        self, order: Sequence[tuple[Instant, Ending]], need: Need, duration_s: float, guard: Guard | None
    ) -> tuple[Instant, int, Booking, Draft] | None:
        """The first instant with room beside what is kept, how many have ended by then, the place, the machines."""
        future = self._draft.copy()
        marks = [future.checkpoint()]

        def move_to(ends: int) -> None:
            if ends < len(marks):
                future.rollback(marks[ends])
                del marks[ends + 1 :]
            while len(marks) <= ends:
                future.release(order[len(marks) - 1][1].booking)
                marks.append(future.checkpoint())

        # Every end makes more room, so without what is kept the first instant that suffices is found by halving.
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            move_to(middle)
            if fits(future, need):
                high = middle
            else:
                low = middle + 1
        first = order[low - 1][0] if low else (self._now, 0)
        for start in self._candidates(order, first):
            # All that end by the same instant are gone then.
            ended = sum(1 for instant, _ in order if instant <= start)
            move_to(ended)
            mark = future.checkpoint()
            for kept in self.kept:
                if kept.is_held_at(start):
                    future.book(kept.booking)
            meets = self._met_between(start, after(start, duration_s))
            booking = find(_worst([future, *(kept.state for kept in meets)]), need, guard=guard)
            if booking is not None:
                return start, ended, booking, future.copy()
            future.rollback(mark)
        return None

    def _met_between(self, start: Instant, end: Instant) -> list[Kept]:
        """What is kept from a later instant on, but before the end."""
        return [kept for kept in self.kept if start < kept.start < end]

    def _candidates(self, order: Sequence[tuple[Instant, Ending]], first: Instant) -> Iterator[Instant]:
        """Instants at which something becomes free, from the first one that could suffice."""
        instants = {first, *(instant for instant, _ in order), *(kept.end for kept in self.kept)}
        yield from (instant for instant in sorted(instants) if instant >= first and instant != NEVER)

    def _state_at(self, instant: Instant) -> Draft:
        state = self._draft.copy()
        for end, ending in _in_order(self._running, self._now):
            if end <= instant:
                state.release(ending.booking)
        for kept in self.kept:
            if kept.is_held_at(instant):
                state.book(kept.booking)
        return state


def after(start: Instant, duration_s: float) -> Instant:
    """The instant that is so much later."""
    return (start[0] + duration_s, 0) if start[0] + duration_s < inf else NEVER


def _in_order(running: Iterable[Ending], now: float) -> list[tuple[Instant, Ending]]:
    """Running jobs by their ends. One past its time limit is being stopped: it counts as ending now."""
    by_end = sorted(running, key=lambda job: (max(job.end_at, now), job.start_at, job.job_id))
    endless, last = 0, None
    order = []
    for ending in by_end:
        # What a gang holds on its nodes becomes free at once.
        if ending.end_at == inf and ending.job_id != last:
            endless, last = endless + 1, ending.job_id
        order.append(((max(ending.end_at, now), endless), ending))
    return order


def pass_until(start: Instant, ended: Sequence[Ending], now: float) -> float:
    """By when a job must have ended that may use what is kept from then on, when these have ended."""
    if start[0] < inf:
        return start[0]
    youngest = max((ending.start_at for ending in ended if ending.end_at == inf), default=now)
    return now + max(0.0, now - youngest)


def _holders(draft: Draft, booking: Booking, ended: Sequence[Ending]) -> tuple[int, ...]:
    """Who of these holds a card, a license, or some of a node of which the booking lacks something now."""
    pieces = booking.pieces()
    cards = {part.card for piece in pieces for part in piece.parts if not draft.has_room_for(part, piece.uid)}
    nodes = {piece.node for piece in pieces if not draft.has_room(replace(piece, parts=(), licenses=(), others=()))}
    licenses = {name for name, count in booking.licenses if count > draft.free_licenses.get(name, 0)}

    def holds_some(piece: Booking) -> bool:
        return (
            piece.node in nodes
            or any(part.card in cards for part in piece.parts)
            or any(name in licenses for name, _ in piece.licenses)
        )

    return tuple(dict.fromkeys(one.job_id for one in ended if any(map(holds_some, one.booking.pieces()))))


def _worst(states: Sequence[Draft]) -> Draft:
    """What is free at all of several instants."""
    if len(states) == 1:
        return states[0]
    worst = states[0].copy()
    for state in states[1:]:
        worst.limit_to(state)
    return worst
