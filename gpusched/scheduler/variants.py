"""Jobs with variants: several requests, of which the first that can start now is booked, and never two at once.

    start     the first variant that fits now, in the order preferred, and delays no earlier job's reservation
    preempt   the first for which others make room
    reserve   the one with the earliest expected start, the more preferred of equal ones

Every rule holds for each variant: a limit blocks the variants that would exceed it, and the others go on. What blocks
each of them is kept as the reasons of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from gpusched.model.snapshot import Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration
from gpusched.scheduler.cluster_state import AllocationUnits
from gpusched.scheduler.limits import Denial
from gpusched.scheduler.placement import fits
from gpusched.scheduler.queue import BLOCKED, NEXT_IN_CLASS, STARTED, Entry, JobClass
from gpusched.scheduler.reasons import Blocked
from gpusched.scheduler.reservation import is_settled

if TYPE_CHECKING:
    from gpusched.scheduler.placement import PlacementVeto
    from gpusched.scheduler.request_units import RequestUnits
    from gpusched.scheduler.rules import Cycle


@dataclass(slots=True)
class _Look:
    """What keeps one variant of a job from starting."""

    variant: JobClass
    guard: PlacementVeto | None = None
    reason: Reason | None = None
    denial: Denial | None = None
    """The limit that holds it."""

    @property
    def need(self) -> RequestUnits:
        return self.variant.shape.need

    @property
    def is_open(self) -> bool:
        """Whether it waits only for room."""
        return self.reason is None


def schedule_variants(cycle: Cycle, job_class: JobClass, number: int) -> int:
    """Start this job with one of its variants, make or reserve room for one, or let it wait; returns the outcome."""
    entry = job_class.jobs[number]
    looks: list[_Look] = []
    for variant in job_class.variants:
        look = _look(cycle, variant)
        found = cycle.place_now(variant, entry, look.guard) if look.is_open else None
        if isinstance(found, AllocationUnits):
            cycle.start(variant, number, found)
            return STARTED
        look.reason = look.reason or found
        looks.append(look)
    denials = [look.denial for look in looks if look.denial is not None]
    is_spent = any(denial.may_fill for denial in denials) and not any(denial.limit for denial in denials)
    if is_spent and not any(look.is_open for look in looks):
        _tell(cycle, entry, looks)
        cycle.closed.add(job_class)
        cycle.fillers.append((job_class, number))
        return BLOCKED
    outcome = _make_room(cycle, entry, number, looks)
    if outcome is None:
        for look in looks:
            if look.denial is not None and look.denial.limit is not None:
                cycle.limit_reservations.wait(entry[1], look.denial.limit, look.variant.wanted)
                break
    _tell(cycle, entry, looks)
    if outcome is not None:
        return outcome
    may_fit_elsewhere = cycle.has_one_place and cycle.timeline.reservations
    if may_fit_elsewhere and any(fits(cycle.draft, variant.shape.need) for variant in job_class.variants):
        return NEXT_IN_CLASS
    cycle.closed.add(job_class)
    return BLOCKED


def _look(cycle: Cycle, variant: JobClass) -> _Look:
    """Which rule keeps this variant from starting, whatever room there is."""
    key = variant.key
    if key.deadline_at is not None and cycle.now + variant.limit_s > key.deadline_at and variant.limit_s < inf:
        text = f"may run {format_duration(variant.limit_s)}, and its deadline is sooner"
        return _Look(variant, reason=Reason(ReasonCode.DEADLINE, text))
    denial = cycle.denial(variant)
    if denial is not None:
        return _Look(variant, reason=denial.reason, denial=denial)
    return _Look(variant, cycle.veto(variant))


def _make_room(cycle: Cycle, entry: Entry, number: int, looks: Sequence[_Look]) -> int | None:
    """Have others make room for one of the variants, or reserve room for the one that can start soonest.

    Returns: the outcome; None if nothing was reserved.
    """
    waiting: list[_Look] = []
    for look in looks:
        if look.denial is not None and look.denial.limit is not None:
            outcome = cycle.reclaim_below_limit(look.variant, number, look.denial)
        elif not look.is_open or (cycle.reservations and cycle.is_strict):
            continue
        elif not cycle.waits_for_others(look.need, look.guard):
            look.reason = cycle.turned_down(look.need, look.guard)
            continue
        else:
            waiting.append(look)
            outcome = cycle.take_from_others(look.variant, number, look.guard)
        if outcome is not None:
            return outcome
    if not waiting or not cycle.may_reserve(entry[2], entry):
        return None
    soonest = _soonest(cycle, entry, waiting)
    before = len(cycle.reservations)
    outcome = cycle.reserve(soonest.variant, number, soonest.guard)
    return outcome if len(cycle.reservations) > before else None


def _soonest(cycle: Cycle, entry: Entry, waiting: Sequence[_Look]) -> _Look:
    """The variant with the earliest expected start.

    Once the job's reservation is settled, predictions do not count: it is the variant whose room has had no start for
    longest, so that starts elsewhere and new predictions do not have the job wait now for one and then for another.
    """
    if len(waiting) == 1:
        return waiting[0]
    timeline = cycle.timeline
    if is_settled(cycle, cycle.planner.fences.get(entry[1])):
        timeline = timeline.for_good()
    best, best_at = waiting[0], None
    for look in waiting:
        at = timeline.earliest(look.need, cycle.reserved_s(look.variant), look.guard)
        if at is not None and (best_at is None or at < best_at):
            best, best_at = look, at
    return best


def _tell(cycle: Cycle, entry: Entry, looks: Sequence[_Look]) -> None:
    """Keep what blocks each variant of the first blocked job of its class."""
    for look in looks:
        cycle.blocked.setdefault(look.variant, Blocked(entry, look.reason, variant=look.variant))
