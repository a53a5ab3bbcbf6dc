"""A running job as kept by the planner, with all its holdings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.resources import Resources
from gpusched.model.snapshot import ClassKey, Placement
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.fairshare import NO_AMOUNTS, Amounts, FairShareEntity, amounts_of
from gpusched.scheduler.preemption import Held
from gpusched.scheduler.queue import JobClass
from gpusched.scheduler.request_units import constraint_strength, micros_asked
from gpusched.scheduler.timeline import RunningJob
from gpusched.scheduler.usage import footprint

if TYPE_CHECKING:
    from gpusched.scheduler.state import PlannerState


class ActiveRun:
    """A running job with all its holdings."""

    __slots__ = (
        *("_allocations", "_amount", "_held", "_planner", "entity", "is_filler", "is_suspended", "job_class"),
        *("limit_at", "placement", "predicted_at", "rate", "reported_at", "running", "watched_at"),
    )

    def __init__(
        self, planner: PlannerState, running: RunningJob, limit_at: float, source: ActiveRun | None = None
    ) -> None:
        """Args: source: whose fields it takes over, whatever the others say."""
        if source is not None:
            take_over(self, source)
            return
        self._planner = planner
        self.running = running
        self.limit_at = limit_at
        """End of its time limit."""
        self.predicted_at: float | None = None
        """When it is planned to end, where that is not its limit; once that is past, its limit counts."""
        self.reported_at: float | None = None
        """When it ends by its own reports."""
        self.watched_at = inf
        """When its planned end is looked at again, since it outlives its prediction then."""
        self.job_class: JobClass | None = None
        self.placement: Placement | None = None
        self.entity: FairShareEntity | None = None
        self.rate: Amounts = NO_AMOUNTS
        """Charged rate per second."""
        self.is_suspended = self.is_filler = False
        self._allocations: tuple[Allocation, ...] | None = None
        self._amount: Resources | None = None
        self._held: Held | None = None

    @property
    def first(self) -> Allocation:
        """Holdings on its first node."""
        return self.allocations[0]

    @property
    def terms(self) -> JobTerms:
        return self.first.terms if self.job_class is None else self.job_class.key.terms

    @property
    def array_id(self) -> int | None:
        """Id of its array; of a start that is not carried out only if the array limits its running tasks."""
        if self.job_class is None or self._allocations is not None:
            return self.first.array_id
        throttle = self.job_class.key.throttle
        return None if throttle is None else throttle[0]

    @property
    def amount(self) -> Resources:
        """Resources it takes from others."""
        if self._amount is None:
            self._amount = footprint(self._planner.layout, self.running.booking)
        return self._amount

    @property
    def held(self) -> Held:
        """As a possible victim."""
        if self._held is None:
            booking = self.running.booking
            pieces: tuple[AllocationUnits, ...] = (booking,)
            if booking.others:
                pieces = (replace(booking, others=()), *booking.others)
            self._held = Held(self.first, pieces, self.amount)
        return self._held

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Holdings on each of its nodes."""
        if self._allocations is None:
            self._allocations = tuple(self._made())
        return self._allocations

    def charged_rate(self) -> Amounts:
        """Rate at which it is charged, per second; while suspended not for its cores, as a filler for nothing."""
        if self.is_filler:
            return NO_AMOUNTS
        qos = self._planner.settings.qos.get(self.terms.qos)
        rate = self.amount if qos is None else self.amount.times(max(0.0, qos.usage_factor))
        if self.is_suspended:
            rate = Resources(rate.gpus, rate.vram_mib, 0.0, rate.mem_mib)
        return amounts_of(rate)

    def count_wanted(self, sign: int) -> None:
        """Add its GPUs to those that jobs usually ask for, or with `sign=-1` subtract them."""
        wanted = self._planner.layout.wanted
        if wanted is None:
            return
        for held in self.allocations:
            request = held.terms.request
            if request.gpus and held.gpus:
                wanted.add(constraint_strength(request), sign * micros_asked(request, len(held.gpus)))

    def tell(self, allocations: tuple[Allocation, ...]) -> None:
        """Set the holdings as allocations."""
        self._allocations, self._held, self._amount = allocations, None, None

    def _made(self) -> Iterator[Allocation]:
        assert self.job_class is not None
        assert self.placement is not None
        running = self.running
        limit_at = None if self.limit_at == inf else self.limit_at
        grace_s = self._planner.settings.life.grace_s
        for place in (self.placement, *self.placement.others):
            held = held_by(self.job_class.key, running.job_id, place, running.start_at, limit_at, grace_s)
            if self.predicted_at is not None or self.is_filler:
                held = replace(held, predicted_end_at=self.predicted_at, is_filler=self.is_filler)
            yield held


def held_by(
    key: ClassKey, job_id: int, place: Placement, start_at: float, limit_at: float | None, grace_s: float
) -> Allocation:
    """Holdings of a job of this class on one node. Args: limit_at: end of its time limit, if it has one."""
    return Allocation(
        job_id=job_id,
        terms=key.terms,
        node=place.node,
        gpus=place.gpus,
        cpus=place.cpus,
        mem_mib=place.mem_mib,
        start_at=start_at,
        expected_end_at=limit_at,
        resources=place.resources,
        licenses=place.licenses,
        is_exclusive=place.is_exclusive,
        array_id=None if key.throttle is None else key.throttle[0],
        grace_s=grace_s,
    )


instants_of = attrgetter("start_at", "expected_end_at", "predicted_end_at", "reported_end_at")
"""When a run began, and when its limit, its prediction and its reports have it end."""


def holds_the_same(planned: Sequence[Allocation], held: Sequence[Allocation]) -> bool:
    """Whether a run holds what was planned, or what it held before; only instants may differ."""
    return len(planned) == len(held) and all(map(_is_same, planned, held))


def _is_same(planned: Allocation, held: Allocation) -> bool:
    return (
        planned.node == held.node
        and planned.gpus == held.gpus
        and planned.cpus == held.cpus
        and planned.mem_mib == held.mem_mib
        and planned.resources == held.resources
        and planned.licenses == held.licenses
        and planned.is_exclusive == held.is_exclusive
        and planned.is_stopping == held.is_stopping
        and planned.is_suspended == held.is_suspended
        and planned.suspended_cpus == held.suspended_cpus
        and planned.terms == held.terms
        and planned.array_id in (None, held.array_id)
        and planned.is_filler == held.is_filler
    )
