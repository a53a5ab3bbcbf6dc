"""Planned ends of running jobs, reservations, and which jobs may pass them.

The first blocked jobs get reservations, each at the earliest instant at which it fits for its whole time
limit beside the earlier reservations. A later job may start now if, throughout its run, every
reservation still fits at its own instant. One reservation is EASY backfill, one for every job is conservative
backfill.

Jobs without a time limit are assumed to end after all jobs with one, in the order of their starts.
A reservation that needs the end of such a job has no start time, but it holds concrete cards.
To pass it by ending in time, a job must be shorter than the youngest such job has run already: then
the blocked job waits at most about twice as long as it would have, and the cards need not idle.

The prediction of a run without a limit grows once three quarters of it are over. The longer such runs have lasted
already, the longer they continue, as run times differ by powers of ten.

Little changes between cycles: one job ends, another starts. So the machines as they will be after
the first few ends are cached, and moved along from there (`_Cursor`).

Sources: Lifka, The ANL/IBM SP Scheduling System (1995), for EASY; Mu'alem and Feitelson, Utilization,
Predictability, Workloads, and User Runtime Estimates (2001), for conservative backfill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from math import inf

from gpusched.model.cluster import Allocation
from gpusched.model.value import Value, replace
from gpusched.scheduler.bundles import bundles_within, fewest_nodes
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterState, Counts, has_counts
from gpusched.scheduler.placement import Candidate, PlacementVeto, best_placement, fits
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.reservation import TimelineReservation

Instant = tuple[float, int]
"""UTC epoch seconds; jobs without a limit end at (inf, 1), (inf, 2) and so on, in the order of their starts."""

NEVER: Instant = (inf, 1 << 62)

FIRST_WINDOW = -1
"""Pseudo-id of the first calendar window among running and pending jobs, whose ids begin at 1; -2 for the next."""


class RunningJob(Value):
    """A running job as seen by the timeline. `end_at` is infinite without a time limit."""

    job_id: int
    start_at: float
    end_at: float
    booking: AllocationUnits

    def __lt__(self, other: RunningJob) -> bool:
        """Treat equal keys among the ends as equal, such as two parts of one job, one of them suspended."""
        return False


End = tuple[float, float, int, RunningJob]
"""Planned end, start, id of the job."""


class Timeline:
    """Running jobs by planned end, and the reservations of the present cycle.

    Invariant: `ends` is sorted. `state` is the present machines, which the caller keeps up to date.
    """

    __slots__ = ("_cursor", "_now", "_of_place", "_walker", "ends", "reservations", "state")

    def __init__(self, state: ClusterState, running: Iterable[RunningJob] = (), now: float = 0.0) -> None:
        self.state = state
        self.ends: list[End] = sorted(_end_of(one) for one in running)
        self.reservations: list[TimelineReservation] = []
        self._now = now
        self._cursor = _Cursor(self)
        """At the instant of the first reservation."""
        self._of_place: _Cursor | None = None
        """The same for a job that keeps its place: another one is free at another instant."""
        self._walker: _Cursor | None = None
        """At those of the others."""

    # --- what changes ---------------------------------------------------------------------------

    def add(self, running: RunningJob) -> None:
        """Add a running job that is already booked in `state`."""
        end = _end_of(running)
        ends = self.ends
        number = bisect_left(ends, end)
        ends.insert(number, end)
        self._cursor.added(number, running.booking)
        if self._of_place is not None:
            self._of_place.added(number, running.booking)
        if self._walker is not None:
            self._walker.added(number, running.booking)

    def remove(self, running: RunningJob) -> None:
        """Remove a run that has ended or changed; `state` must already reflect its end, if it has ended."""
        number = bisect_left(self.ends, (running.end_at, running.start_at, running.job_id))
        self._cursor.removed(number, running.booking)
        if self._of_place is not None:
            self._of_place.removed(number, running.booking)
        if self._walker is not None:
            self._walker.removed(number, running.booking)
        del self.ends[number]

    def forget_places(self) -> None:
        """Invalidate cached placements, though the machines are the same."""
        self._cursor.place = None
        if self._of_place is not None:
            self._of_place.place = None

    def look_again(self) -> None:
        """Invalidate all that was found about the machines: what stands against them has changed."""
        self._cursor, self._of_place, self._walker = _Cursor(self), None, None

    def pass_by(self, running: RunningJob) -> bool:
        """Apply the start of an added job to the reservations; return whether it outlasts the start of any."""
        end_at, has_passed = running.end_at, False
        for one in self.reservations:
            if end_at > one.pass_until:
                one.state.book(running.booking)
                has_passed = True
        return has_passed

    def move_to(self, now: float) -> None:
        """Advance the clock without any other change."""
        self._now = now

    def begin(self, now: float) -> None:
        """Begin a cycle without reservations."""
        self._now = now
        self.reservations = []

    def copy(self, state: ClusterState) -> Timeline:
        """The same jobs without reservations, over an equal state of the machines."""
        twin = Timeline(state, (), self._now)
        twin.ends = self.ends.copy()
        return twin

    def ending_early(self, ends_at: Mapping[int, float], suspended: Collection[int] = ()) -> Timeline:
        """A copy in which running jobs being stopped have each ended by their instant; some are only
        suspended. Reservations keep their place, though there is more room."""
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
        """Add a job that starts now, booked in `state` and allowed by `admits`."""
        self.add(running)
        self.pass_by(running)

    def _passed_by(self, end_at: float) -> list[TimelineReservation]:
        """Reservations that a job that runs from now until then could delay."""
        return [one for one in self.reservations if end_at > one.pass_until]

    def cards_reserved(self, end_at: float) -> frozenset[int]:
        """Cards that a job that runs until then should avoid."""
        return frozenset().union(*(one.cards for one in self._passed_by(end_at)))

    def concerns(self, end_at: float) -> tuple[int, ...]:
        """Numbers of the reservations that a job that runs until then could delay."""
        return tuple(number for number, one in enumerate(self.reservations) if end_at > one.pass_until)

    def leaves_licenses(self, licenses: Counts, end_at: float) -> bool:
        """Whether these licenses are free from now until then beside the reserved ones."""
        return all(has_counts(one.state.free_licenses, licenses) for one in self._passed_by(end_at))

    def admits(self, booking: AllocationUnits, end_at: float) -> bool:
        """Whether every reservation still fits at its time if this starts now and runs until then.

        Reservations may move to other cards for that, never to a later instant. On denial nothing changes.
        """
        tight = [one for one in self.reservations if end_at > one.pass_until and not one.state.has_room(booking)]
        if not tight or self.state.layout.is_flat:
            # Where there is one place alone, reservations have no other to move to.
            return not tight
        passed = self._passed_by(end_at)
        marks = self._marks()
        # A trial with the new job booked; `start` books it for real.
        for one in passed:
            one.state.book(booking)
        moved = all(self._move(one) for one in tight)
        for one in passed:
            one.state.release(booking)
        if moved and all(one.state.has_room(booking) for one in passed):
            return True
        self._restore(marks)
        return False

    def first_admitted(self, places: Iterable[Candidate], end_at: float) -> AllocationUnits | None:
        """The first of these places where a job that runs until then delays no reservation."""
        return next((one.booking for one in places if self.admits(one.booking, end_at)), None)

    def delayed_by(
        self, booking: AllocationUnits, end_at: float, own: TimelineReservation | None = None
    ) -> list[TimelineReservation]:
        """Reservations that would no longer fit at their time if this started now and ran until then.

        Args: own: reservation of the job itself, exempt from the check. Changes nothing.
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
        """Find other cards at the same instant for a reservation that no longer fits."""
        if moved.need is None:
            return False
        meets = [one for one in self.reservations if moved.is_held_at(one.start)]
        for one in meets:
            one.state.release(moved.booking)
        states = [one.state for one in meets]
        elsewhere = best_placement(_worst(states), moved.need) if _may_fit_all(states, moved.need) else None
        if elsewhere is None:
            return False
        for one in meets:
            one.state.book(elsewhere)
        moved.move_to(elsewhere)
        return True

    # --- what is reserved -----------------------------------------------------------------------

    def reserve_window(self, number: int, booking: AllocationUnits, start_at: float, end_at: float) -> None:
        """Reserve a future calendar window: fixed, and before all other reservations."""
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
        """Reserve room for this need and duration from the earliest instant on; None if it never fits.

        Ignores measured load, as its future is unknown.

        Args: only: the only possible placement for this need, if there is just one.
        """
        if not self.reservations and guard is None:
            cursor = self._cursor if only is None or self.state.layout.is_flat else self._cursor_of_place()
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

    def _cursor_of_place(self) -> _Cursor:
        if self._of_place is None:
            self._of_place = _Cursor(self)
        return self._of_place

    def drop(self, made: TimelineReservation) -> None:
        """Undo the last `reserve`."""
        self.reservations.remove(made)
        for other in self._met_between(made.start, made.end):
            other.state.release(made.booking)

    def for_good(self) -> Timeline:
        """The same with the end of every run unknown: they are taken to end in the order of their starts.

        `reserve` then finds the room that has had no start for longest. Jobs that start later do so elsewhere, so each
        cycle finds the same place until the runs on it have ended.
        """
        twin = Timeline(self.state, (replace(one, end_at=inf) for *_, one in self.ends), self._now)
        twin.reservations = self.reservations
        return twin

    def earliest(self, need: RequestUnits, duration_s: float, guard: PlacementVeto | None = None) -> Instant | None:
        """When `reserve` would find room; None if never."""
        found = self._earliest(need, duration_s, guard)
        return None if found is None else found[0]

    def fits_by(self, until: float, need: RequestUnits, duration_s: float, guard: PlacementVeto | None = None) -> bool:
        """Whether room could be reserved for this need by then.

        Not if others have reserved it: victims would make room for those.
        """
        return self._earliest(need, duration_s, guard, until) is not None

    def _earliest(
        self, need: RequestUnits, duration_s: float, guard: PlacementVeto | None, until: float = inf
    ) -> tuple[Instant, AllocationUnits, ClusterState, int] | None:
        """The first instant with room beside the reservations, the place, the machines then, and the number of jobs
        ended by then. Args: until: later instants are of no interest."""
        if self._walker is None:
            self._walker = _Cursor(self)
        walker = self._walker
        # Every end makes more room, so reservations can only postpone the instant.
        if not walker.go_to_room(need, self._now):
            # Even without any end there may be room once reservations are over.
            return None
        first = walker.instant(self._now)
        state, count = walker.state.copy(), walker.ended
        held: dict[int, TimelineReservation] = {}
        for start in self._candidates(first, until):
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
        """Reservations that begin between the two instants."""
        return [one for one in self.reservations if start < one.start < end]

    def _candidates(self, first: Instant, until: float) -> Iterator[Instant]:
        """Instants at which something is freed, from the first that could suffice, up to this one."""
        begin = bisect_left(self.ends, (first[0],)) if self._now < first[0] < inf else 0
        freed = instants_of(islice(self.ends, begin, None), self._now)
        last: Instant | None = None
        # One at a time: there may be thousands, and mostly one of the first suffices.
        for one in merge((first,), freed, sorted(one.end for one in self.reservations)):
            if one[0] > until or one == NEVER:
                return
            if one >= first and one != last:
                last = one
                yield one


class _Cursor:
    """The machines as they will be after the first `ended` running jobs have ended.

    Invariant: the bookings of a reservation come last, and are rolled back before any other change to
    the machines.
    """

    __slots__ = ("_draft", "_freed", "_is_reserved", "_none_sooner", "_only", "_since", "_timeline", "ended", "place")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._draft: ClusterState | None = None
        """None before the first search."""
        self.ended = 0
        self._is_reserved = False
        self._only: AllocationUnits | None = None
        """The only possible place for the present need."""
        self._since: list[AllocationUnits] = []
        """Of those who started since room was reserved, what is still held at its instant."""
        self._none_sooner: RequestUnits | None = None
        """That for which there was no room at any instant before this one, when that was last looked at."""
        self._freed: set[int] = set()
        """Nodes with resources freed earlier since then."""
        self.place: tuple[RequestUnits, AllocationUnits] | None = None
        """The best place at this instant for the need that was looked for, until the machines of then change."""

    @property
    def state(self) -> ClusterState:
        if self._draft is None:
            self._draft = self._timeline.state.copy()
        return self._draft

    def instant(self, now: float) -> Instant:
        """Its present instant."""
        if not self.ended:
            return now, 0
        ends = self._timeline.ends
        at = ends[self.ended - 1][0]
        if at < inf:
            return max(now, at), 0
        return inf, self.ended - bisect_left(ends, (inf,))

    # --- what changes ---------------------------------------------------------------------------

    def added(self, number: int, booking: AllocationUnits) -> None:
        """Adjust for a job inserted at this index of the ends."""
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
        """Adjust for the job at this index of the ends, which is about to be removed."""
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
            self._freed.add(booking.node)
            if booking.others:
                self._freed.update(other.node for other in booking.others)

    def cleared(self) -> ClusterState:
        """The machines without the bookings of a reservation, and without a log."""
        state = self.state if self._draft is None else self._draft
        state.rollback(0)
        if self._is_reserved:
            for booking in self._since:
                state.take(booking)
                self.place = None
            self._since.clear()
            self._is_reserved = False
        return state

    def reserve(self, booking: AllocationUnits) -> None:
        """Book it temporarily, until the next search."""
        self.state.book(booking)
        self._is_reserved = True

    # --- where there is room ----------------------------------------------------------------------

    def earliest(self, need: RequestUnits, now: float, only: AllocationUnits | None) -> AllocationUnits | None:
        """Advance to the first instant with room without reservations; return the best placement, or None."""
        state = self.cleared()
        if only is not self._only and only != self._only:
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
        """Advance to the first instant at which this need fits, regardless of reservations; False if there is none."""
        state, self._only, self.place, self._none_sooner = self.cleared(), None, None, None
        self._release(state, self._instant_after(self.ended, now))
        if fits(state, need):
            self._move_back(state, need, now)
            return True
        return self._move_on(state, need)

    def ended_by(self, instant: Instant) -> int:
        """Number of jobs ended by then."""
        at, endless = instant
        ends = self._timeline.ends
        return bisect_left(ends, (inf,)) + endless if at == inf else bisect_left(ends, (at, inf))

    def _best(self, state: ClusterState, need: RequestUnits) -> AllocationUnits | None:
        """Best placement at this instant."""
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
        """Numeric precheck for room for (a part of) the need on one of these nodes.

        Without room before, it can only be where something was freed.
        """
        request = need.request
        if request.licenses:
            # Cluster-wide licenses may be what was short.
            return True
        if request.bundles is not None:
            need = need.of_bundles(1)
            request = need.request
        cards = 0 if need.is_slice else min(request.gpus, request.tail_gpus or request.gpus)
        free_cards, free_millicpus = state.free_cards, state.free_millicpus
        for node in nodes:  # noqa: SIM110  a third of the time that any() takes, for every cycle with a reservation
            if free_cards[node] >= cards and free_millicpus[node] >= need.millicpus:
                return True
        return False

    def _instant_after(self, first: int, now: float) -> int:
        """Number of jobs ended after all with the same end as these. Unknown ends are all distinct."""
        ends = self._timeline.ends
        count = len(ends)
        last = ends[first - 1][0] if first else now
        while first < count and (ends[first][0] <= now or ends[first][0] == last < inf):
            first += 1
        return first

    def _release(self, state: ClusterState, ended: int) -> None:
        """Advance until `ended` jobs have ended."""
        if ended > self.ended:
            for end in self._timeline.ends[self.ended : ended]:
                state.give_back(end[3].booking)
            self.ended, self.place = ended, None

    def _move_on(self, state: ClusterState, need: RequestUnits) -> bool:
        """Advance to the first later instant with room for this need."""
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
        """Move back to the first instant with room for this need, this one or earlier."""
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
"""A prediction grows by the second factor once the first fraction of it is over. Tuned on traces: docs/explanation."""


def end_of(held: Allocation, now: float) -> float:
    """Assumed end of a running job: as predicted, or its limit once it has outlived that."""
    limit_at = inf if held.expected_end_at is None else held.expected_end_at
    return foreseen_end(held.start_at, held.predicted_end_at, limit_at, now, held.reported_end_at)


def foreseen_end(
    start_at: float, predicted_at: float | None, limit_at: float, now: float, reported_at: float | None = None
) -> float:
    """Assumed end of a run as of now; infinite if unknown.

    Its reports may bring it forward at will, which gains its user nothing. They put it off by one step of growth at
    most, since a late end leaves more time to pass a job for which these resources are reserved.
    """
    end_at = _predicted_end(start_at, predicted_at, limit_at, now)
    if reported_at is None or reported_at <= now:
        return end_at
    return min(reported_at, limit_at, start_at + _GROWTH * (end_at - start_at))


def _predicted_end(start_at: float, predicted_at: float | None, limit_at: float, now: float) -> float:
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
    """When a run without a limit and with this assumed end counts as outliving its prediction."""
    return start_at + _OUTLIVED * (end_at - start_at)


def after(start: Instant, duration_s: float) -> Instant:
    return (start[0] + duration_s, 0) if start[0] + duration_s < inf else NEVER


def instants_of(ends: Iterable[End], now: float) -> Iterator[Instant]:
    """Instants at which something is freed. A job past its time limit is being stopped: it counts as ending now."""
    endless = 0
    for end_at, *_ in ends:
        if end_at < inf:
            yield (end_at if end_at > now else now), 0
        else:
            endless += 1
            yield inf, endless


def pass_until(start: Instant, ended: Sequence[End], now: float) -> float:
    """Latest end of a job that may use a reservation's resources before it starts, which needs these ends."""
    if start[0] < inf:
        return start[0]
    youngest = max((start_at for end_at, start_at, _, _ in ended if end_at == inf), default=now)
    return now + max(0.0, now - youngest)


def _suspended(one: RunningJob, at: float) -> Iterator[RunningJob]:
    """Split a suspended job: its cores are free then; the end of the rest is unknown."""
    booking = one.booking
    if booking.millicpus:
        yield replace(
            one,
            end_at=min(one.end_at, at),
            booking=AllocationUnits(booking.node, booking.uid, booking.millicpus, 0, ()),
        )
    if booking.node_mem_mib or booking.parts or booking.resources or booking.licenses:
        yield replace(one, end_at=inf, booking=replace(booking, millicpus=0))


def _may_fit_all(states: Sequence[ClusterState], need: RequestUnits) -> bool:
    """Numeric precheck for enough nodes with room for a part of this need at each of several instants."""
    request = need.request
    if request.bundles is not None:
        rooms = (min(bundles_within(state, need, node) for state in states) for node in range(len(states[0].jobs)))
        return fewest_nodes(rooms, request) is not None
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
    """Resources free at all of several instants."""
    if len(states) == 1:
        return states[0]
    worst = states[0].copy()
    worst.limit_to(*states[1:])
    return worst
