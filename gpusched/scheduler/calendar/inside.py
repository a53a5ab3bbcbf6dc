"""Reservations of the calendar: for others a booking that comes and goes, for members the place where they run."""

from __future__ import annotations

from math import inf

from gpusched.model.cluster import Allocation
from gpusched.model.snapshot import ClassKey, Snapshot, Window
from gpusched.scheduler.draft import Booking, Draft, Layout
from gpusched.scheduler.shortage import about
from gpusched.scheduler.timeline import FIRST_WINDOW, RunningJob, end_of

_NOBODY = -1


class Inside:
    """The windows of one cycle, and what runs inside those that are in force."""

    def __init__(self, snapshot: Snapshot, layout: Layout) -> None:
        self._layout = layout
        self._names = {window.name for window in snapshot.windows}
        self._open: dict[str, Window] = {}
        self._drafts: dict[str, Draft] = {}
        self._next: dict[str, float] = {}
        self._maintenance = [window for window in snapshot.windows if window.is_maintenance]
        self._everywhere = Draft(layout)
        """All that runs, inside and outside: one that was there before a window opened may still hold its cards."""
        self.now: list[RunningJob] = []
        """Windows in force, as if they were jobs that run until the window closes, and the licenses used inside."""
        self.later: list[tuple[int, Booking, float, float]] = []
        """Windows that open later, by number, with their instants."""
        for number, window in enumerate(snapshot.windows):
            booking = _booking_of(window, layout)
            if window.start_at > snapshot.now:
                self._next.setdefault(window.name, window.start_at)
                if booking is not None:
                    self.later.append((FIRST_WINDOW - number, booking, window.start_at, window.end_at))
            elif snapshot.now < window.end_at:
                self._open[window.name] = window
                self._drafts[window.name] = _draft_inside(window, layout)
                if booking is not None:
                    self.now.append(RunningJob(FIRST_WINDOW - number, window.start_at, window.end_at, booking))
        for held in snapshot.allocations if self._open else ():
            booking = layout.booking(held.uid, held)
            if booking is None:
                continue
            self._everywhere.book(booking)
            if held.reservation is not None and self.holds(held):
                self._drafts[held.reservation].book(booking)
                if held.licenses:
                    end_at = end_of(held, snapshot.now)
                    self.now.append(RunningJob(held.job_id, held.start_at, end_at, licenses_of(booking)))

    def holds(self, held: Allocation) -> bool:
        """Whether a running job is inside a window in force, and so holds nothing outside."""
        return held.reservation in self._open

    def draft(self, name: str, now: float, end_at: float) -> Draft:
        """What is free inside a window in force for a job that may run until then; for looking."""
        free = self._drafts[name].copy()
        free.limit_to(self._everywhere)
        closed = self._closed(self._open[name], now, end_at)
        for node in closed:
            number = self._layout.node_number(node)
            if number is not None:
                _close(free, number)
        free.count_cards()
        return free

    def _closed(self, window: Window, now: float, end_at: float) -> dict[str, Window]:
        """By node of a window, the maintenance that a job on it would run into."""
        found: dict[str, Window] = {}
        nodes = {place.node for place in window.held}
        for other in self._maintenance:
            if now < other.end_at and other.start_at < end_at:
                for place in other.held:
                    if place.node in nodes:
                        found.setdefault(place.node, other)
        return found

    def start(self, name: str | None, booking: Booking) -> None:
        """A job starts, a member inside or any other outside."""
        if name is not None:
            self._drafts[name].book(booking)
        if self._open:
            self._everywhere.book(booking)

    def why_not(self, name: str, key: ClassKey, end_at: float, now: float) -> str | None:
        """A sentence when a job may not run inside this reservation now."""
        window = self._open.get(name)
        if window is None:
            opens_at = self._next.get(name)
            if opens_at is not None:
                return f"reservation {name} begins in {about(opens_at - now)}"
            return f"there is no reservation {name} to come; let the job run outside with: gctl update JOB reservation="
        if not window.admits(key.user, key.account):
            return f"reservation {name} is not for {key.user} under account {key.account}"
        if end_at > window.end_at:
            left = about(window.end_at - now)
            limit = "the job has no time limit" if end_at == inf else "the job's time limit is longer"
            return f"reservation {name} ends in {left}, and {limit}"
        closed = self._closed(window, now, end_at)
        if closed and len(closed) == len({place.node for place in window.held}):
            other = min(closed.values(), key=lambda one: one.start_at)
            if other.start_at <= now:
                return f"maintenance {other.name} ends in {about(other.end_at - now)}"
            begins = f"begins in {about(other.start_at - now)}"
            return f"maintenance {other.name} {begins}, and the job's time limit is longer"
        return None


def licenses_of(booking: Booking) -> Booking:
    """What a member takes of what no window keeps."""
    return Booking(booking.node, booking.uid, 0, 0, (), licenses=booking.licenses)


def _booking_of(window: Window, layout: Layout) -> Booking | None:
    """All that a window keeps, as one booking over its nodes; None when none of them is there."""
    found = [booking for place in window.held if (booking := layout.booking(_NOBODY, place)) is not None]
    if not found:
        return None
    first, *others = found
    return Booking(
        first.node,
        first.uid,
        first.millicpus,
        first.mem_mib,
        first.parts,
        first.resources,
        first.licenses,
        first.is_exclusive,
        tuple(others),
        first.gpu_mem_mib,
    )


def _close(draft: Draft, node: int) -> None:
    """Leave nothing free on a node. The cards are to be counted afterwards."""
    draft.free_millicpus[node] = draft.free_mem_mib[node] = 0
    draft.exclusive[node] = draft.jobs[node] = 1
    for card in draft.layout.cards_of[node]:
        draft.wholes[card.number] = 1


def _draft_inside(window: Window, layout: Layout) -> Draft:
    """A draft in which only what the window keeps is free."""
    draft = Draft(layout)
    kept = {layout.node_number(place.node): place for place in window.held}
    cards = {
        part.card
        for place in window.held
        if (booking := layout.booking(_NOBODY, place)) is not None
        for part in booking.parts
    }
    for number in range(len(layout.nodes)):
        place = kept.get(number)
        if place is None:
            _close(draft, number)
            continue
        draft.free_millicpus[number] = round(place.cpus * 1000)
        draft.free_mem_mib[number] = layout.node_mem_mib(place)
        # Where only part of a node is kept, others use the rest: nobody inside can have the node alone.
        draft.jobs[number] = int(not place.is_exclusive)
        if not place.is_exclusive:
            draft.free_resources[number] = dict(place.resources)
    for card in layout.cards:
        if card.number not in cards:
            draft.wholes[card.number] = 1
    draft.count_cards()
    return draft
