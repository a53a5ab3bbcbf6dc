"""One cycle: what starts now, what is kept free, and why everything else waits.

The actions run in order, each on the state that the one before left:

    allocate   starts jobs in order of priority, up to the first that must wait for running jobs
    reserve    keeps room for that one
    backfill   starts later jobs that cannot delay it

The work is done per class of equal jobs: a start advances its class, a job that cannot start blocks
its class for the rest of the cycle. So the cost is that of the starts and the classes, whatever the
number of jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Plan, Reason, Reservation, Snapshot, Start
from gpusched.model.states import ReasonCode
from gpusched.policy.backfill import Ending, Reserved, endings, reserve
from gpusched.policy.ceilings import Ceilings
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.explain import Explainer
from gpusched.policy.ordering import Head, Line
from gpusched.policy.placement import Need, find, fits, options


class Cycle:
    """The state that the actions share."""

    def __init__(self, snapshot: Snapshot, settings: Settings) -> None:
        self.now = snapshot.now
        self.settings = settings
        self.layout = Layout(snapshot.nodes, settings)
        self.draft = Draft(self.layout)
        self.running = endings(self.layout, snapshot.allocations)
        for ending in self.running:
            self.draft.book(ending.booking)
        self.ceilings = Ceilings(self.layout, settings.ceiling, snapshot.allocations)
        self.line = Line(snapshot.pending, snapshot.now, settings)
        self.starts: list[Start] = []
        self.blocked: list[Head] = []
        self.first_blocked: Head | None = None
        self.reserved: Reserved | None = None
        self._hopeless: set[object] = set()

    def start(self, head: Head, booking: Booking) -> None:
        """Start the first job in line here."""
        self.draft.book(booking)
        self.ceilings.add(booking)
        limit_s = head.key.time_limit_s
        end_at = inf if limit_s is None else self.now + limit_s
        self.running.append(Ending(head.job.id, self.now, end_at, booking))
        self.starts.append(Start(head.job.id, self.layout.placement(booking)))
        self.line.advance()

    def block(self, head: Head) -> None:
        """The first job in line stays: so does its class."""
        self.blocked.append(head)
        self.line.drop()

    def is_hopeless(self, mark: object) -> bool:
        """Whether a job with the same mark was turned away; what is free only shrinks in a cycle."""
        return mark in self._hopeless

    def give_up(self, mark: object) -> None:
        """Turn later jobs with this mark away unseen."""
        self._hopeless.add(mark)

    def waits_for_others(self, need: Need) -> bool:
        """Whether ends of running jobs alone would let this job run, on the cards that may be used."""
        return not fits(self.draft, need) and fits(Draft(self.layout), need)


def allocate(cycle: Cycle) -> None:
    """Start jobs in order of priority up to the first that must wait for running ones.

    Jobs that only load, a drain or a fault keeps from starting hold up nobody.
    """
    while (head := cycle.line.first()) is not None:
        need = Need.of(head.key.request, head.key.uid)
        if not cycle.is_hopeless(need.signature):
            booking = find(cycle.draft, need, cycle.ceilings)
            if booking is not None:
                cycle.start(head, booking)
                continue
            cycle.give_up(need.signature)
            if cycle.waits_for_others(need):
                cycle.first_blocked = head
        cycle.block(head)
        if cycle.first_blocked is not None:
            return


def reserve_first(cycle: Cycle) -> None:
    """Keep room for the first blocked job, so that nothing overtakes it for ever."""
    head = cycle.first_blocked
    if head is not None:
        need = Need.of(head.key.request, head.key.uid)
        cycle.reserved = reserve(cycle.draft, need, cycle.running, cycle.now)


def backfill(cycle: Cycle) -> None:
    """Start later jobs in the gaps, unless the settings forbid it."""
    reserved = cycle.reserved
    while (head := cycle.line.first()) is not None:
        booking = None
        if reserved is not None and cycle.settings.priority.backfill:
            booking = _gap_for(cycle, reserved, head)
        if booking is None:
            cycle.block(head)
        else:
            cycle.start(head, booking)


def _gap_for(cycle: Cycle, reserved: Reserved, head: Head) -> Booking | None:
    need = Need.of(head.key.request, head.key.uid)
    limit_s = head.key.time_limit_s
    ends_in_time = limit_s is not None and cycle.now + limit_s <= reserved.pass_until
    if cycle.is_hopeless(need.signature) or cycle.is_hopeless((need.signature, ends_in_time)):
        return None
    if ends_in_time:
        booking = find(cycle.draft, need, cycle.ceilings)
        if booking is None:
            cycle.give_up(need.signature)
        return booking
    places = options(cycle.draft, need, cycle.ceilings, avoid=reserved.cards)
    if not places:
        cycle.give_up(need.signature)
    for place in sorted(places):
        if reserved.admits(place.booking):
            return place.booking
    cycle.give_up((need.signature, ends_in_time))
    return None


Action = Callable[[Cycle], None]

ACTIONS: tuple[Action, ...] = (allocate, reserve_first, backfill)


def decide(snapshot: Snapshot, settings: Settings) -> Plan:
    """Plan one cycle. Equal inputs give equal plans; the snapshot is not changed.

    Invariant: the starts of the plan together with the snapshot's allocations book nothing twice.
    """
    cycle = Cycle(snapshot, settings)
    for action in ACTIONS:
        action(cycle)
    return Plan(
        starts=tuple(cycle.starts),
        reservations=_reservations(cycle),
        reasons=_reasons(cycle),
        first_blocked=None if cycle.first_blocked is None else cycle.first_blocked.job.id,
        has_more=cycle.line.cut_short is not None,
    )


def _reservations(cycle: Cycle) -> tuple[Reservation, ...]:
    head, reserved = cycle.first_blocked, cycle.reserved
    if head is None or reserved is None:
        return ()
    return (Reservation(head.job.id, cycle.layout.placement(reserved.booking), reserved.start_at),)


def _reasons(cycle: Cycle) -> dict[ClassKey, Reason]:
    """Reasons are worked out last, so that what they call free is free when the plan is carried out."""
    explainer = Explainer(cycle.draft, cycle.ceilings, cycle.now, cycle.first_blocked, cycle.reserved)
    reasons = {head.key: explainer.reason(head) for head in cycle.blocked}
    for key in cycle.line.rest():
        reasons[key] = Reason(ReasonCode.PRIORITY, "is next in line and about to be looked at")
    return reasons
