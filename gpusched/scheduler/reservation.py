"""Reservations of blocked jobs and calendar windows, and where a job gets one."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterState
from gpusched.scheduler.request_units import RequestUnits

if TYPE_CHECKING:
    from gpusched.scheduler.placement import PlacementVeto
    from gpusched.scheduler.queue import Entry
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.timeline import End, Instant, RunningJob

SETTLED_FENCES = 2
"""A reservation becomes immovable this many times `fence_s` after its fence."""


class TimelineReservation:
    """A reservation for one blocked job, or a calendar window, from one instant to another."""

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
        """None for a calendar window, which never moves."""
        self._booking = self._first = booking
        self._cards: frozenset[int] | None = None
        self.start = start
        self.end = end
        self.state = state
        """The machines at its start, with all reservations in force then, including this one."""
        self.pass_until = pass_until
        """A job that ends by this instant may use the reserved resources."""
        self.fence_at: float | None = None
        """From when on no job passes, whatever its predicted end; None: not set."""
        self._ended = ended
        """The jobs that will have ended by then."""

    def waits_for(self, draft: ClusterState, now: float) -> tuple[int, ...]:
        """Running jobs that hold what the first place lacks now, and windows in force, in the order of their ends."""
        ended = sorted(self._ended, key=lambda end: (max(end[0], now), *end[1:3]))
        return _holders(draft, self._first, [end[3] for end in ended])

    def idle_s(self, now: float) -> float:
        """GPU seconds for which its cards will be idle before its start, which must be known, if no job passes."""
        cards = self.cards
        total = len(cards) * (self.start[0] - now)
        nodes = {piece.node for piece in self._booking.pieces()}
        for end_at, _, _, running in self._ended if cards else ():
            booking = running.booking
            # Most runs are on other nodes.
            if end_at > now and (booking.node in nodes or booking.others):
                held = sum(part.card in cards for piece in booking.pieces() for part in piece.parts)
                total -= held * (end_at - now)
        return max(0.0, total)

    @property
    def start_at(self) -> float | None:
        """Latest expected start; None if a job without a time limit must end first."""
        return None if self.start[0] == inf else self.start[0]

    @property
    def booking(self) -> AllocationUnits:
        return self._booking

    @property
    def cards(self) -> frozenset[int]:
        """Numbers of the reserved cards."""
        if self._cards is None:
            self._cards = frozenset(part.card for piece in self._booking.pieces() for part in piece.parts)
        return self._cards

    def move_to(self, booking: AllocationUnits) -> None:
        """Change the place, at the same instant."""
        self._booking, self._cards = booking, None

    def is_held_at(self, instant: Instant) -> bool:
        """Whether it is in force at that instant."""
        return self.start <= instant < self.end


def _holders(draft: ClusterState, booking: AllocationUnits, ended: Sequence[RunningJob]) -> tuple[int, ...]:
    """Jobs among these that hold a card, a license, or part of a node that the booking is short of now."""
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


def settled_at(cycle: Cycle, fence_at: float) -> float:
    """When the reservation of a job with this fence becomes immovable, so that nothing can delay it."""
    return fence_at + SETTLED_FENCES * cycle.settings.priority.fence_s


def is_settled(cycle: Cycle, fence_at: float | None) -> bool:
    """Whether the reservation of a job with this fence is immovable."""
    return fence_at is not None and cycle.now >= settled_at(cycle, fence_at)


def reserve_room(
    cycle: Cycle,
    entry: Entry,
    need: RequestUnits,
    duration_s: float,
    guard: PlacementVeto | None = None,
    only: AllocationUnits | None = None,
) -> TimelineReservation | None:
    """Reserve room for a job at the earliest instant; once fenced or settled, at a stable place.

    Predicted ends on each node change with every end. A job that followed them from node to
    node would drain many of them in vain.
    """
    job_id, timeline = entry[1], cycle.timeline
    fence_at, fence_s = cycle.planner.fences.get(job_id), cycle.settings.priority.fence_s
    most_s = cycle.queue.ranking.most_patience_s
    is_fenced = fence_at is not None and cycle.now >= fence_at
    may_keep = is_fenced and guard is None and not timeline.reservations
    if entry[2].variants and may_keep and is_settled(cycle, fence_at):
        # The place of the last cycle may be one of another variant, so the stable place is found anew.
        reservation = timeline.for_good().reserve(job_id, need, duration_s)
        if reservation is not None:
            timeline.reservations.remove(reservation)
            reservation = timeline.reserve(job_id, need, duration_s, None, reservation.booking)
    elif fence_at is not None and may_keep and not entry[2].variants:
        if only is None:
            reservation = _keep_room(cycle, entry, need, duration_s, fence_at)
        else:
            # The only place is a stable one.
            reservation = timeline.reserve(job_id, need, duration_s, None, only)
    else:
        stable = timeline.for_good() if fence_at is not None and is_settled(cycle, fence_at) else timeline
        reservation = stable.reserve(job_id, need, duration_s, guard, only)
    if reservation is None or fence_s == inf:
        return reservation
    if fence_at is None:
        # Where runs are short, predictions that err must not cost it more than its patience did.
        fence_at = max(cycle.now + min(fence_s, most_s), reservation.start_at or cycle.now)
    elif is_fenced:
        reservation.pass_until = -inf
    reservation.fence_at = fence_at
    return reservation


def _keep_room(
    cycle: Cycle, entry: Entry, need: RequestUnits, duration_s: float, fence_at: float
) -> TimelineReservation | None:
    """Reserve the place of the last cycle, or, if it may still move, one free in less than half the time."""
    planner, timeline, job_id = cycle.planner, cycle.timeline, entry[1]
    placement = planner.kept.get(job_id)
    place = None if placement is None else cycle.layout.booking(need.uid, placement)
    if place is not None and cycle.layout.placement(place) != placement:
        # One of its cards has left the machine.
        place = None
    found = timeline.reserve(job_id, need, duration_s)
    if found is not None and place is not None and found.booking != place:
        found_at = found.start[0]
        timeline.reservations.remove(found)
        kept = timeline.reserve(job_id, need, duration_s, None, place)
        may_move = cycle.now < settled_at(cycle, fence_at)
        if kept is not None and may_move and 2 * (found_at - cycle.now) < kept.start[0] - cycle.now:
            timeline.reservations.remove(kept)
            kept = None
        found = kept or timeline.reserve(job_id, need, duration_s)
    if found is not None:
        planner.kept[job_id] = cycle.layout.placement(found.booking)
    return found
