"""EASY backfill: the first blocked job gets a reservation, and others may pass only without delaying it.

The shadow is the earliest instant by which, as running jobs reach their time limits, the blocked job
fits. A later job may start now when it ends by the shadow, or when the blocked job still fits at the
shadow with this job in place.

A job without a time limit is taken to end after all that have one, those that started first ending
first. A reservation that needs the end of such a job has no start time, but it is of concrete cards.
To pass it by ending in time, a job must be shorter than the youngest such job has run already: then
the blocked job waits at most about twice as long as it would have, and the cards need not be idle.

Source: Lifka, The ANL/IBM SP Scheduling System (1995), for EASY.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from gpusched.model.cluster import Allocation
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.placement import Need, find, fits


@dataclass(frozen=True, slots=True)
class Ending:
    """A running job as the future sees it. `end_at` is infinite without a time limit."""

    job_id: int
    start_at: float
    end_at: float
    booking: Booking


def endings(layout: Layout, allocations: Iterable[Allocation]) -> list[Ending]:
    """The running jobs of a snapshot. Those on nodes that are gone give nothing back."""
    found = []
    for held in allocations:
        booking = layout.booking(held.uid, held)
        if booking is not None:
            end_at = inf if held.expected_end_at is None else held.expected_end_at
            found.append(Ending(held.job_id, held.start_at, end_at, booking))
    return found


class Reserved:
    """The reservation of the first blocked job, and the state of the machines when it starts."""

    __slots__ = ("_future", "_need", "booking", "cards", "pass_until", "start_at", "waits_for")

    def __init__(self, need: Need, booking: Booking, future: Draft, ended: Sequence[Ending], now: float) -> None:
        self._need = need
        self._future = future
        self.booking = booking
        self.cards = frozenset(part.card for part in booking.parts)
        """Numbers of the reserved cards."""
        self.waits_for = _in_the_way(ended, booking)
        """Running jobs in the way, in the order in which they are expected to end."""
        last_end = max((ending.end_at for ending in ended), default=now)
        self.start_at = None if last_end == inf else max(now, last_end)
        """Latest expected start; None when a job without a time limit must end first."""
        youngest = max((ending.start_at for ending in ended if ending.end_at == inf), default=now)
        self.pass_until = now + max(0.0, now - youngest) if self.start_at is None else self.start_at
        """A job that ends by this instant may use what is reserved."""
        future.book(booking)

    def admits(self, booking: Booking) -> bool:
        """Whether the reserved job still fits at its time if this is started now and goes on.

        When it does, the booking is part of the future from then on and the reservation may have
        moved to other cards. When it does not, nothing has changed.
        """
        future = self._future
        if future.has_room(booking):
            future.book(booking)
            return True
        mark = future.checkpoint()
        future.release(self.booking)
        if future.has_room(booking):
            future.book(booking)
            elsewhere = find(future, self._need)
            if elsewhere is not None:
                future.book(elsewhere)
                self.booking = elsewhere
                self.cards = frozenset(part.card for part in elsewhere.parts)
                return True
        future.rollback(mark)
        return False


def _in_the_way(ended: Sequence[Ending], booking: Booking) -> tuple[int, ...]:
    """Jobs that hold the cards of the booking; with none, those that hold cores and memory of its node."""
    cards = {part.card for part in booking.parts}
    there = [ending for ending in ended if ending.booking.node == booking.node]
    on_cards = [ending for ending in there if any(part.card in cards for part in ending.booking.parts)]
    return tuple(ending.job_id for ending in on_cards or there)


def reserve(draft: Draft, need: Need, running: Iterable[Ending], now: float) -> Reserved | None:
    """Keep room for this need at the earliest instant; None when no end of running jobs makes room.

    Measured load is not looked at: what it will be then, nobody knows.
    """
    future = draft.copy()
    # A job past its time limit is being stopped: it counts as ending now.
    order = sorted(running, key=lambda job: (max(job.end_at, now), job.start_at, job.job_id))
    marks = [future.checkpoint()]

    def move_to(ends: int) -> None:
        if ends < len(marks):
            future.rollback(marks[ends])
            del marks[ends + 1 :]
        while len(marks) <= ends:
            future.release(order[len(marks) - 1].booking)
            marks.append(future.checkpoint())

    # Every end makes more room, so the first instant that suffices can be found by halving.
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        move_to(middle)
        if fits(future, need):
            high = middle
        else:
            low = middle + 1
    # Jobs without a limit end one by one; of the others, all that end by the same instant are gone then.
    last_end = max(now, order[low - 1].end_at) if low else now
    while low < len(order) and order[low].end_at <= last_end != inf:
        low += 1
    move_to(low)
    booking = find(future, need)
    if booking is None:
        return None
    return Reserved(need, booking, future, order[:low], now)
