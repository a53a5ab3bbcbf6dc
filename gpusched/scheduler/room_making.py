"""Room that others give up for a job: what they are leaving already, and what they are preempted for.

It is reserved for that job at once, or the next cycle would give it to others, who may have no right to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpusched.model.mentions import JOB, mention_jobs, mentioned_name
from gpusched.model.snapshot import Reason
from gpusched.model.states import ReasonCode
from gpusched.scheduler.limits import Amount
from gpusched.scheduler.preemption import Claim, Held, Preemption, Victim

if TYPE_CHECKING:
    from gpusched.scheduler.placement import PlacementVeto
    from gpusched.scheduler.queue import JobClass
    from gpusched.scheduler.rules import Cycle
    from gpusched.scheduler.timeline import Timeline


class RoomMaker:
    """The running jobs of one cycle as possible victims, and the claims to what they free."""

    def __init__(self, cycle: Cycle, held: Mapping[int, Held]) -> None:
        """Args: held: the running jobs, by id."""
        self._cycle = cycle
        capacity = cycle.planner.ranking.capacity
        self.preemption = Preemption(held, cycle.quotas, cycle.settings, capacity, cycle.now, cycle.name_of)
        self._leaving: dict[str, Amount] | None = cycle.quotas.mark()
        """What queues were losing before this cycle; None once it is over."""
        self._soon: tuple[tuple[int, ...], Timeline] | None = None
        """The timeline in which all jobs being stopped end in time, after so many starts, resumptions and victims."""

    @property
    def is_open(self) -> bool:
        """Whether its victims count as leaving."""
        return self._leaving is not None

    def close(self) -> None:
        """Count no victims as leaving any more."""
        if self._leaving is not None:
            self._cycle.quotas.restore(self._leaving)
            self._leaving = None

    def take_from_others(self, job_class: JobClass, number: int, guard: PlacementVeto | None) -> int | None:
        """Reserve for this job what others are leaving, or are preempted for; None if that does not help."""
        cycle = self._cycle
        leaving = "leaving", job_class.shape.need.signature, guard, len(self.preemption.claimed)
        if not cycle.is_known_infeasible(leaving):
            outcome = self._claim_leaving(job_class, number, guard)
            if outcome is not None:
                return outcome
            cycle.remember_infeasible(leaving)
        if not self._may_preempt(job_class, guard):
            return None
        outcome = self._preempt(job_class, number, guard)
        if outcome is None:
            cycle.remember_infeasible(_preempt_mark(job_class, guard))
        return outcome

    def reclaim_below_limit(
        self, job_class: JobClass, number: int, reason: Reason, *, only_fillers: bool
    ) -> int | None:
        """As `take_from_others`, for a job that a limit blocks with this reason."""
        guard = self._cycle.veto(job_class)
        outcome = self._claim_leaving(job_class, number, guard, reason)
        if outcome is not None or not self._may_preempt(job_class, guard):
            return outcome
        return self._preempt(job_class, number, guard, reason, only_fillers=only_fillers)

    def _may_preempt(self, job_class: JobClass, guard: PlacementVeto | None) -> bool:
        cycle = self._cycle
        return not cycle.is_known_infeasible(_preempt_mark(job_class, guard)) and cycle.may_preempt(job_class)

    def _claim_leaving(
        self, job_class: JobClass, number: int, guard: PlacementVeto | None, reason: Reason | None = None
    ) -> int | None:
        """Reserve room being freed already for this job; None if that is not enough."""
        cycle, preemption = self._cycle, self.preemption
        need, claims = job_class.shape.need, len(cycle.claims)
        if not preemption.frees_soon(job_class.key, cycle.draft, need, guard, self._booked(), claims):
            return None
        return self._claim(job_class, number, guard, reason) if self._fits_soon((), job_class, guard) else None

    def _preempt(
        self,
        job_class: JobClass,
        number: int,
        guard: PlacementVeto | None,
        reason: Reason | None = None,
        *,
        only_fillers: bool = False,
    ) -> int | None:
        """Preempt others for this job and reserve the room for it; None if that does not help."""
        cycle, preemption = self._cycle, self.preemption
        helps = partial(self._fits_soon, job_class=job_class, guard=guard)
        job_id, need = job_class.jobs[number][1], job_class.shape.need
        claim = Claim(job_class.key, need, cycle.draft, guard)
        if not preemption.choose(job_id, claim, helps, only_fillers=only_fillers):
            return None
        # The room freed by the victims can be reserved for others from then on.
        cycle.timeline = cycle.timeline.ending_early(*preemption.departures())
        return self._claim(job_class, number, guard, reason)

    def _claim(self, job_class: JobClass, number: int, guard: PlacementVeto | None, reason: Reason | None) -> int:
        """Reserve room being freed for this job, even beyond the maximum number of reservations."""
        cycle = self._cycle
        before, terms = len(cycle.reservations), job_class.key.terms
        # Counts as held: the next job of its queue must not reclaim more than the rest of the guarantee.
        cycle.quotas.add(terms, job_class.wanted)
        cycle.claims = (*cycle.claims, (terms, job_class.wanted))
        outcome = cycle.reserve(job_class, number, guard, self._preempting(job_class.jobs[number][1]) or reason)
        self.preemption.claimed.extend(one.booking for one in cycle.reservations[before:])
        return outcome

    def _booked(self) -> tuple[int, ...]:
        return len(self._cycle.starts), len(self._cycle.resumes), len(self.preemption.chosen)

    def _fits_soon(self, victims: Sequence[Victim], job_class: JobClass, guard: PlacementVeto | None) -> bool:
        """Whether there is room beside the reservations once all jobs being stopped, and these victims, have ended.

        Otherwise they would make room for others, who may have no right to it.
        """
        cycle, departures = self._cycle, self.preemption.departures(victims)
        if victims:
            soon = cycle.timeline.ending_early(*departures)
        else:
            booked = self._booked()
            if self._soon is None or self._soon[0] != booked:
                self._soon = booked, cycle.timeline.ending_early(*departures)
            soon = self._soon[1]
        return soon.fits_by(max(departures[0].values()), job_class.shape.need, cycle.reserved_s(job_class), guard)

    def _preempting(self, job_id: int) -> Reason | None:
        """Reason for a job whose victims are being stopped."""
        mine = sorted(one.job_id for one in self.preemption.chosen.values() if one.for_job == job_id)
        if not mine:
            return None
        names = [self._cycle.name_of(job_id) for job_id in mine]
        text = f"{mention_jobs(names)} {'make' if len(mine) > 1 else 'makes'} room for it"
        return Reason(ReasonCode.PREEMPTING, text, {"preempted": [mentioned_name(JOB, name) for name in names]})


def _preempt_mark(job_class: JobClass, guard: PlacementVeto | None) -> object:
    key = job_class.key
    return "preempt", job_class.shape.need.signature, key.terms.queue, key.terms.qos, key.inherited, guard
