"""When running jobs end, what is reserved for whom, and who may pass.

The first blocked jobs get reservations, each at the earliest instant at which it fits for all of its time
limit beside what is reserved already. A later job may start now when, for as long as it runs, every one of
them still fits at its own instant. One reservation is EASY backfill, one for every job is conservative
backfill.

A job without a time limit is taken to end after all that have one, those that started first ending
first. A reservation that needs the end of such a job has no start time, but it is of concrete cards.
To pass it by ending in time, a job must be shorter than the youngest such job has run already: then
the blocked job waits at most about twice as long as it would have, and the cards need not be idle.

A run that outlives its prediction and has no limit is taken to run on: once three quarters of the predicted time are
over, the prediction grows. The longer such runs have run already, the longer they go on, as run times differ by powers
of ten.

From one cycle to the next little changes: one job ends, another starts. So the machines as they will be once
the first few jobs have ended are kept, and moved along from there (`_Cursor`).

Sources: Lifka, The ANL/IBM SP Scheduling System (1995), for EASY; Mu'alem and Feitelson, Utilization,
Predictability, Workloads, and User Runtime Estimates (2001), for conservative backfill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from gpusched.model.cluster import Allocation
from gpusched.model.value import Value, replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterState, Counts
from gpusched.scheduler.filters import has_counts
from gpusched.scheduler.placement import PlacementVeto, best_placement, fits
from gpusched.scheduler.request_units import RequestUnits

Instant = tuple[float, int]
"""UTC epoch seconds; jobs without a limit end at (inf, 1), (inf, 2) and so on, in the order of their starts."""

NEVER: Instant = (inf, 1 << 62)

FIRST_WINDOW = -1
"""Stands for the first window of the calendar among running and pending jobs, whose ids begin at 1; -2 for the next."""


class RunningJob(Value):
    """A running job as the timeline sees it. `end_at` is infinite without a time limit."""

    job_id: int
    start_at: float
    end_at: float
    booking: AllocationUnits

    def __lt__(self, other: RunningJob) -> bool:
        """Two parts of one job, of which one was suspended, may be as good as equal among the ends."""
        return False


End = tuple[float, float, int, RunningJob]
"""Planned end, start, id of the job."""


class TimelineReservation:
    """What is reserved for one blocked job, or for a window of the calendar, from one instant to another."""

    __slots__ = (
        *("_booking", "_cards", "_ended", "_first", "end", "fence_at", "job_id", "need", "pass_until", "start"),
        "state",
    )

    def __init__(
        self,
        job_id: int,
        need: RequestUnits | None,
        booking: AllocationUnits,
        start: Instant,
        end: Instant,
        state: ClusterState,
        pass_until: float,
        ended: Sequence[End] = (),
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
        """The machines at the instant of its start, with all that is reserved then, this one included."""
        self.pass_until = pass_until
        """A job that ends by this instant may use what is reserved."""
        self.fence_at: float | None = None
        """From when on nothing passes, whatever it is expected to run; None: nobody has said."""
        self._ended = ended
        """The jobs that will have ended by then."""

    def waits_for(self, draft: ClusterState, now: float) -> tuple[int, ...]:
        """Running jobs that hold what the first place lacks now, and windows in force, in the order of their ends."""
        ended = sorted(self._ended, key=lambda end: (max(end[0], now), *end[1:3]))
        return _holders(draft, self._first, [end[3] for end in ended])

    @property
    def start_at(self) -> float | None:
        """Latest expected start; None when a job without a time limit must end first."""
        return None if self.start[0] == inf else self.start[0]

    @property
    def booking(self) -> AllocationUnits:
        """What is reserved."""
        return self._booking

    @property
    def cards(self) -> frozenset[int]:
        """Numbers of the cards that are reserved."""
        if self._cards is None:
            self._cards = frozenset(part.card for piece in self._booking.pieces() for part in piece.parts)
        return self._cards

    def move_to(self, booking: AllocationUnits) -> None:
        """Reserve this instead, at the same instant."""
        self._booking, self._cards = booking, None

    def is_held_at(self, instant: Instant) -> bool:
        """Whether it is in force then."""
        return self.start <= instant < self.end


class Timeline:
    """Running jobs by their planned ends, and the reservations of the present cycle.

    Invariant: `ends` is sorted. `state` is the machines of now, which the caller keeps up to date.
    """

    __slots__ = ("_cursor", "_now", "_walker", "ends", "reservations", "state")

    def __init__(self, state: ClusterState, running: Iterable[RunningJob] = (), now: float = 0.0) -> None:
        self.state = state
        self.ends: list[End] = sorted(_end_of(one) for one in running)
        self.reservations: list[TimelineReservation] = []
        self._now = now
        self._cursor = _Cursor(self)
        """At the instant of the first reservation."""
        self._walker: _Cursor | None = None
        """At those of the others."""

    # --- what changes ---------------------------------------------------------------------------

    def add(self, running: RunningJob) -> None:
        """A job runs, as the machines of now know."""
        end = _end_of(running)
        ends = self.ends
        number = bisect_left(ends, end)
        ends.insert(number, end)
        self._cursor.added(number, running.booking)
        if self._walker is not None:
            self._walker.added(number, running.booking)

    def remove(self, running: RunningJob) -> None:
        """A job runs no longer, or not as was planned; the machines of now know that it is over, if it is."""
        number = bisect_left(self.ends, (running.end_at, running.start_at, running.job_id))
        self._cursor.removed(number, running.booking)
        if self._walker is not None:
            self._walker.removed(number, running.booking)
        del self.ends[number]

    def forget_places(self) -> None:
        """Other places may be the best now, though the machines are the same."""
        self._cursor.place = None

    def pass_by(self, running: RunningJob) -> bool:
        """A job that was added has started; whether it is still there when anything that is reserved begins."""
        end_at, has_passed = running.end_at, False
        for one in self.reservations:
            if end_at > one.pass_until:
                one.state.book(running.booking)
                has_passed = True
        return has_passed

    def move_to(self, now: float) -> None:
        """Time has passed, and nothing else has happened."""
        self._now = now

    def begin(self, now: float) -> None:
        """Begin a cycle: nothing is reserved yet."""
        self._now = now
        self.reservations = []

    def copy(self, state: ClusterState) -> Timeline:
        """The same jobs and no reservations, over an equal state of the machines."""
        twin = Timeline(state, (), self._now)
        twin.ends = self.ends.copy()
        return twin

    def ending_early(self, ends_at: Mapping[int, float], suspended: Collection[int] = ()) -> Timeline:
        """The same with running jobs that are about to be stopped, each to have ended by its instant; some are only
        suspended. What is reserved stays where it is: it only has more room than it knows of.
        """
        twin = Timeline(self.state, self._running_until(ends_at, suspended), self._now)
        twin.reservations = self.reservations
        return twin

    def _running_until(self, ends_at: Mapping[int, float], suspended: Collection[int]) -> Iterator[RunningJob]:
        for *_, one in self.ends:
            end_at = ends_at.get(one.job_id)
            if end_at is None:
                yield one
            elif one.job_id not in suspended:
                yield replace(one, end_at=min(one.end_at, end_at))
            else:
                yield from _suspended(one, end_at)

    # --- what happens now -----------------------------------------------------------------------

    def start(self, running: RunningJob) -> None:
        """A job starts now that the state has booked and `admits` let pass."""
        self.add(running)
        self.pass_by(running)

    def _passed_by(self, end_at: float) -> list[TimelineReservation]:
        """What a job that runs from now until then could be in the way of."""
        return [one for one in self.reservations if end_at > one.pass_until]

    def cards_reserved(self, end_at: float) -> frozenset[int]:
        """Cards that a job which runs until then had better leave alone."""
        return frozenset().union(*(one.cards for one in self._passed_by(end_at)))

    def concerns(self, end_at: float) -> tuple[int, ...]:
        """Which reservations, by number, a job that runs until then could be in the way of."""
        return tuple(number for number, one in enumerate(self.reservations) if end_at > one.pass_until)

    def leaves_licenses(self, licenses: Counts, end_at: float) -> bool:
        """Whether these licenses can be used from now until then without those that are reserved."""
        return all(has_counts(one.state.free_licenses, licenses) for one in self._passed_by(end_at))

    def admits(self, booking: AllocationUnits, end_at: float) -> bool:
        """Whether all that is reserved still fits at its time if this is started now and runs until then.

        A reservation may move to other cards for that, never to a later instant. When the answer is no,
        nothing has changed.
        """
        passed = self._passed_by(end_at)
        tight = [one for one in passed if not one.state.has_room(booking)]
        if not tight:
            return True
        marks = self._marks()
        # Tried with the newcomer in place; whoever starts it books it once more by `start`.
        for one in passed:
            one.state.book(booking)
        moved = all(self._move(one) for one in tight)
        for one in passed:
            one.state.release(booking)
        if moved and all(one.state.has_room(booking) for one in passed):
            return True
        self._restore(marks)
        return False

    def delayed_by(
        self, booking: AllocationUnits, end_at: float, own: TimelineReservation | None = None
    ) -> list[TimelineReservation]:
        """What is reserved and would no longer fit at its time if this was started now and ran until then.

        Args: own: what is reserved for the very job that asks, which is not in its own way. Changes nothing.
        """
        marks = self._marks()
        for one in self.reservations:
            if own is not None and one is not own and own.is_held_at(one.start):
                one.state.release(own.booking)
        passed = [one for one in self._passed_by(end_at) if one is not own]
        tight = [one for one in passed if not one.state.has_room(booking)]
        for one in passed:
            one.state.book(booking)
        stuck = [one for one in tight if not self._move(one)]
        for one in passed:
            one.state.release(booking)
        found = stuck or [one for one in passed if not one.state.has_room(booking)]
        self._restore(marks)
        return found

    def _marks(self) -> list[tuple[TimelineReservation, int, AllocationUnits]]:
        return [(one, one.state.checkpoint(), one.booking) for one in self.reservations]

    def _restore(self, marks: Sequence[tuple[TimelineReservation, int, AllocationUnits]]) -> None:
        for one, mark, before in marks:
            one.state.rollback(mark)
            if one.booking is not before:
                one.move_to(before)

    def _move(self, moved: TimelineReservation) -> bool:
        """Find other cards for a reservation that no longer fits where it is, at the same instant."""
        if moved.need is None:
            return False
        meets = [one for one in self.reservations if moved.is_held_at(one.start)]
        for one in meets:
            one.state.release(moved.booking)
        elsewhere = best_placement(_worst([one.state for one in meets]), moved.need)
        if elsewhere is None:
            return False
        for one in meets:
            one.state.book(elsewhere)
        moved.move_to(elsewhere)
        return True

    # --- what is reserved -----------------------------------------------------------------------

    def reserve_window(self, number: int, booking: AllocationUnits, start_at: float, end_at: float) -> None:
        """A window of the calendar that begins later: fixed, and before all reservations are made."""
        start, end = (start_at, 0), (end_at, 0)
        state = self.state.copy()
        for ends_at, _, _, running in self.ends:
            if ends_at <= start_at:
                state.release(running.booking)
        for other in self.reservations:
            if other.is_held_at(start):
                state.book(other.booking)
            if start <= other.start < end:
                other.state.book(booking)
        state.book(booking)
        self.reservations.append(TimelineReservation(number, None, booking, start, end, state, start_at))

    def reserve(
        self,
        job_id: int,
        need: RequestUnits,
        duration_s: float,
        guard: PlacementVeto | None = None,
        only: AllocationUnits | None = None,
    ) -> TimelineReservation | None:
        """Reserve room for this need, for so long, from the earliest instant on; None when it never fits.

        Measured load is not looked at: what it will be then, nobody knows.

        Args: only: the one place that there is for this need, where there is no more than one.
        """
        if not self.reservations and guard is None:
            cursor = self._cursor
            booking = cursor.earliest(need, self._now, only)
            if booking is None:
                return None
            cursor.reserve(booking)
            start, state, count = cursor.instant(self._now), cursor.state, cursor.ended
        else:
            found = self._earliest(need, duration_s, guard)
            if found is None:
                return None
            start, booking, state, count = found
            state.book(booking)
        end = after(start, duration_s)
        if self.reservations:
            for other in self._met_between(start, end):
                other.state.book(booking)
        ended = self.ends[:count]
        made = TimelineReservation(job_id, need, booking, start, end, state, pass_until(start, ended, self._now), ended)
        self.reservations.append(made)
        return made

    def take_back(self, one: TimelineReservation) -> None:
        """Undo `reserve`, of the only one."""
        self.reservations.remove(one)

    def reserve_for_good(
        self,
        job_id: int,
        need: RequestUnits,
        duration_s: float,
        guard: PlacementVeto | None = None,
        only: AllocationUnits | None = None,
    ) -> TimelineReservation | None:
        """Reserve room where nothing has started for longest, whatever is predicted.

        Jobs that start later do so elsewhere, so that the same place is found from cycle to cycle until the runs on it
        have ended.
        """
        twin = Timeline(self.state, (replace(one, end_at=inf) for *_, one in self.ends), self._now)
        twin.reservations = self.reservations
        return twin.reserve(job_id, need, duration_s, guard, only)

    def fits_after(
        self,
        ends_at: Mapping[int, float],
        suspended: Collection[int],
        need: RequestUnits,
        duration_s: float,
        guard: PlacementVeto | None = None,
    ) -> bool:
        """Whether room could be reserved for this need from the instant on at which all of these have ended.

        Not when it is reserved for others already: then it would be them for whom these make room.
        """
        twin = self.ending_early(ends_at, suspended)
        found = twin._earliest(need, duration_s, guard)
        return found is not None and found[0][0] <= max(ends_at.values())

    def _earliest(
        self, need: RequestUnits, duration_s: float, guard: PlacementVeto | None
    ) -> tuple[Instant, AllocationUnits, ClusterState, int] | None:
        """The first instant with room beside what is reserved, the place, the machines of then, and how many jobs will
        have ended.
        """
        if self._walker is None:
            self._walker = _Cursor(self)
        walker = self._walker
        # Every end makes more room, so what is reserved can only move the instant back.
        if not walker.go_to_room(need, self._now):
            # Where nobody ends there may be room for it all the same, once what is reserved is over.
            return None
        first = walker.instant(self._now)
        state, count = walker.state.copy(), walker.ended
        held: dict[int, TimelineReservation] = {}
        for start in self._candidates(first):
            ended = walker.ended_by(start)
            for end in self.ends[count:ended]:
                state.give_back(end[3].booking)
            count = ended
            for number, one in enumerate(self.reservations):
                if one.is_held_at(start) != (number in held):
                    if number in held:
                        state.give_back(held.pop(number).booking)
                    else:
                        state.take(one.booking)
                        held[number] = one
            states = [state, *(one.state for one in self._met_between(start, after(start, duration_s)))]
            booking = best_placement(_worst(states), need, guard=guard) if _may_fit_all(states, need) else None
            if booking is not None:
                return start, booking, state, count
        return None

    def _met_between(self, start: Instant, end: Instant) -> list[TimelineReservation]:
        """What is reserved from a later instant on, but before the end."""
        return [one for one in self.reservations if start < one.start < end]

    def _candidates(self, first: Instant) -> Iterator[Instant]:
        """Instants at which something becomes free, from the first one that could suffice."""
        ends = self.ends[bisect_left(self.ends, (first[0],)) :] if self._now < first[0] < inf else self.ends
        instants = {first, *instants_of(ends, self._now), *(one.end for one in self.reservations)}
        yield from (instant for instant in sorted(instants) if instant >= first and instant != NEVER)


class _Cursor:
    """The machines as they will be once the first `ended` of the running jobs have ended.

    Invariant: bookings that a reservation has brought with it come on top, and are rolled back before anything else is
    done to the machines.
    """

    __slots__ = ("_draft", "_freed", "_is_reserved", "_none_sooner", "_only", "_since", "_timeline", "ended", "place")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._draft: ClusterState | None = None
        """None until room is looked for the first time."""
        self.ended = 0
        self._is_reserved = False
        self._only: AllocationUnits | None = None
        """The only place for the need that is looked for."""
        self._since: list[AllocationUnits] = []
        """Of those who started since room was reserved, what is still held at its instant."""
        self._none_sooner: RequestUnits | None = None
        """That for which there was no room at any instant before this one, when that was last looked at."""
        self._freed: set[int] = set()
        """Nodes of which something is free sooner since then."""
        self.place: tuple[RequestUnits, AllocationUnits] | None = None
        """The best place at this instant for the need that was looked for, until the machines of then change."""

    @property
    def state(self) -> ClusterState:
        """The machines."""
        if self._draft is None:
            self._draft = self._timeline.state.copy()
        return self._draft

    def instant(self, now: float) -> Instant:
        """At which it stands."""
        if not self.ended:
            return now, 0
        ends = self._timeline.ends
        at = ends[self.ended - 1][0]
        if at < inf:
            return max(now, at), 0
        return inf, self.ended - bisect_left(ends, (inf,))

    # --- what changes ---------------------------------------------------------------------------

    def added(self, number: int, booking: AllocationUnits) -> None:
        """A job was put there among the ends."""
        if number < self.ended:
            self.ended += 1
        elif self._draft is None:
            return
        elif self._is_reserved:
            self._since.append(booking)
        else:
            self._draft.take(booking)
            self.place = None

    def removed(self, number: int, booking: AllocationUnits) -> None:
        """The job that stands there is about to be taken out."""
        ends = self._timeline.ends
        if number < self.ended:
            is_sooner = ends[number][0] == ends[self.ended - 1][0]
            self.ended -= 1
        else:
            is_sooner = self._draft is not None
            if is_sooner:
                self.cleared().give_back(booking)
                self.place = None
        if is_sooner:
            self._freed.update(piece.node for piece in booking.pieces())

    def cleared(self) -> ClusterState:
        """The machines without what a reservation has brought with it, and without a log."""
        state = self.state
        state.rollback(0)
        if self._is_reserved:
            for booking in self._since:
                state.take(booking)
                self.place = None
            self._since.clear()
            self._is_reserved = False
        return state

    def reserve(self, booking: AllocationUnits) -> None:
        """Book it on top, until the next time that room is looked for."""
        self.state.book(booking)
        self._is_reserved = True

    # --- where there is room ----------------------------------------------------------------------

    def earliest(self, need: RequestUnits, now: float, only: AllocationUnits | None) -> AllocationUnits | None:
        """The best place at the first instant with room where nothing is reserved, to which it goes; None for never."""
        state = self.cleared()
        if only is not self._only:
            self._only, self.place, self._none_sooner = only, None, None
        self._release(state, self._instant_after(self.ended, now))
        if self._best(state, need) is None:
            if not self._move_on(state, need) or self._best(state, need) is None:
                return None
        elif self._none_sooner is not need or self._may_fit(state, need, self._freed):
            self._move_back(state, need, now)
        self._none_sooner = need
        self._freed.clear()
        return self._best(state, need)

    def go_to_room(self, need: RequestUnits, now: float) -> bool:
        """Go to the first instant at which this need fits, whatever is reserved; False when there is none."""
        state, self._only, self.place, self._none_sooner = self.cleared(), None, None, None
        self._release(state, self._instant_after(self.ended, now))
        if fits(state, need):
            self._move_back(state, need, now)
            return True
        return self._move_on(state, need)

    def ended_by(self, instant: Instant) -> int:
        """How many have ended by then."""
        at, endless = instant
        ends = self._timeline.ends
        return bisect_left(ends, (inf,)) + endless if at == inf else bisect_left(ends, (at, inf))

    def _best(self, state: ClusterState, need: RequestUnits) -> AllocationUnits | None:
        """The best place at this instant."""
        if self.place is None or self.place[0] is not need:
            booking = self._only
            if booking is None:
                booking = best_placement(state, need)
            elif not state.has_room(booking):
                booking = None
            self.place = None if booking is None else (need, booking)
            return booking
        return self.place[1]

    def _fits(self, state: ClusterState, need: RequestUnits) -> bool:
        return fits(state, need) if self._only is None else state.has_room(self._only)

    def _may_fit(self, state: ClusterState, need: RequestUnits, nodes: Iterable[int]) -> bool:
        """Whether there can be room for (a part of) it on one of these nodes, by numbers alone.

        Where there was none before, it is only where something became free that there can be.
        """
        request = need.request
        if request.licenses:
            # What the cluster shares may be what was lacking.
            return True
        cards = 0 if need.is_slice else min(request.gpus, request.tail_gpus or request.gpus)
        free_cards, free_millicpus = state.free_cards, state.free_millicpus
        return any(free_cards[node] >= cards and free_millicpus[node] >= need.millicpus for node in nodes)

    def _instant_after(self, first: int, now: float) -> int:
        """How many have ended when all have that end at the same instant as those. Of ends nobody knows each is one."""
        ends = self._timeline.ends
        count = len(ends)
        last = ends[first - 1][0] if first else now
        while first < count and (ends[first][0] <= now or ends[first][0] == last < inf):
            first += 1
        return first

    def _release(self, state: ClusterState, ended: int) -> None:
        """Move on to when `ended` jobs have ended."""
        if ended > self.ended:
            for end in self._timeline.ends[self.ended : ended]:
                state.give_back(end[3].booking)
            self.ended, self.place = ended, None

    def _move_on(self, state: ClusterState, need: RequestUnits) -> bool:
        """Go to the first later instant with room for this need."""
        self._none_sooner = None
        ends = self._timeline.ends
        while self.ended < len(ends):
            first = self.ended
            self._release(state, self._instant_after(first + 1, -inf))
            nodes = {piece.node for end in ends[first : self.ended] for piece in end[3].booking.pieces()}
            if self._may_fit(state, need, nodes) and self._fits(state, need):
                return True
        return False

    def _move_back(self, state: ClusterState, need: RequestUnits, now: float) -> None:
        """Go to the first instant with room for this need, which is this one or a sooner one."""
        self._none_sooner = None
        ends = self._timeline.ends
        while self.ended and ends[self.ended - 1][0] > now:
            last, at = self.ended, ends[self.ended - 1][0]
            first = last - 1 if at == inf else bisect_left(ends, (at,), 0, last)
            for end in ends[first:last]:
                state.take(end[3].booking)
            self.ended = first
            if not self._fits(state, need):
                self._release(state, last)
                return
            self.place = None


# --- instants -----------------------------------------------------------------------------------


def _end_of(running: RunningJob) -> End:
    return running.end_at, running.start_at, running.job_id, running


_OUTLIVED, _GROWTH = 0.75, 2.25
"""A prediction grows by the second factor once the first part of it is over. Chosen on traces, see docs/explanation."""


def end_of(held: Allocation, now: float) -> float:
    """When a running job is taken to end: as predicted, and once it has run on for longer, at its limit."""
    limit_at = inf if held.expected_end_at is None else held.expected_end_at
    return foreseen_end(held.start_at, held.predicted_end_at, limit_at, now)


def foreseen_end(start_at: float, predicted_at: float | None, limit_at: float, now: float) -> float:
    """When a run is taken to end by this instant; infinite when unknown."""
    if predicted_at is None:
        return limit_at
    if limit_at < inf:
        return min(predicted_at, limit_at) if predicted_at > now else limit_at
    length_s, elapsed_s = max(1.0, predicted_at - start_at), now - start_at
    if not elapsed_s < inf:
        return inf
    while elapsed_s >= _OUTLIVED * length_s:
        length_s *= _GROWTH
    return start_at + length_s


def outlived_at(start_at: float, end_at: float) -> float:
    """When a run that is taken to end then, and has no limit, is taken to run on."""
    return start_at + _OUTLIVED * (end_at - start_at)


def after(start: Instant, duration_s: float) -> Instant:
    """The instant that is so much later."""
    return (start[0] + duration_s, 0) if start[0] + duration_s < inf else NEVER


def instants_of(ends: Sequence[End], now: float) -> Iterator[Instant]:
    """When something becomes free. One past its time limit is being stopped: it counts as ending now."""
    endless = 0
    for end_at, *_ in ends:
        if end_at < inf:
            yield (end_at if end_at > now else now), 0
        else:
            endless += 1
            yield inf, endless


def pass_until(start: Instant, ended: Sequence[End], now: float) -> float:
    """By when a job must have ended that may use what is reserved from then on, when these have ended."""
    if start[0] < inf:
        return start[0]
    youngest = max((start_at for end_at, start_at, _, _ in ended if end_at == inf), default=now)
    return now + max(0.0, now - youngest)


def _suspended(one: RunningJob, at: float) -> Iterator[RunningJob]:
    """The cores are free then; nobody knows when a suspended job has ended and leaves the rest."""
    booking = one.booking
    if booking.millicpus:
        yield replace(
            one,
            end_at=min(one.end_at, at),
            booking=AllocationUnits(booking.node, booking.uid, booking.millicpus, 0, ()),
        )
    if booking.node_mem_mib or booking.parts or booking.resources or booking.licenses:
        yield replace(one, end_at=inf, booking=replace(booking, millicpus=0))


def _holders(draft: ClusterState, booking: AllocationUnits, ended: Sequence[RunningJob]) -> tuple[int, ...]:
    """Who of these holds a card, a license, or some of a node of which the booking lacks something now."""
    pieces = booking.pieces()
    cards = {part.card for piece in pieces for part in piece.parts if not draft.has_room_for(part, piece.uid)}
    nodes = {piece.node for piece in pieces if not draft.has_room(replace(piece, parts=(), licenses=(), others=()))}
    licenses = {name for name, count in booking.licenses if count > draft.free_licenses.get(name, 0)}

    def holds_some(piece: AllocationUnits) -> bool:
        return (
            piece.node in nodes
            or any(part.card in cards for part in piece.parts)
            or any(name in licenses for name, _ in piece.licenses)
        )

    return tuple(dict.fromkeys(one.job_id for one in ended if any(map(holds_some, one.booking.pieces()))))


def _may_fit_all(states: Sequence[ClusterState], need: RequestUnits) -> bool:
    """Whether enough nodes have room for a part of this need at each of several instants, by numbers alone."""
    request = need.request
    cards, millicpus, left = 0 if need.is_slice else request.gpus, need.millicpus, request.nodes
    for node in range(len(states[0].free_cards)):
        for state in states:
            if state.free_cards[node] < cards or state.free_millicpus[node] < millicpus:
                break
        else:
            left -= 1
            if not left:
                return True
    return False


def _worst(states: Sequence[ClusterState]) -> ClusterState:
    """What is free at all of several instants."""
    if len(states) == 1:
        return states[0]
    worst = states[0].copy()
    for state in states[1:]:
        worst.limit_to(state)
    return worst
