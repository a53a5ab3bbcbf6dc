"""The planner: running jobs, pending jobs and past use, kept between cycles.

Changes arrive as events, and each cycle examines only what they can affect. The state is exactly what `snapshot`
returns: a planner after any events plans like one built from its own snapshot.

    shapes    jobs with equal requests share a shape; when the first finds no room, none of them does
    screens   whole numbers (free cores, free cards) reject most shapes before any placement is tried
    arrivals  while nothing is freed, blocked jobs stay blocked: only new jobs are examined
    periods   the effect of age and past use on ranks is computed once in each `calc_period_s`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from math import inf

from gpusched.errors import BrokenInvariant
from gpusched.model.settings import Settings
from gpusched.model.snapshot import (
    ClassKey,
    PendingJob,
    Plan,
    Reservation,
    Snapshot,
    Start,
)
from gpusched.scheduler.backfill import Cycle
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.queue import Entry
from gpusched.scheduler.reasons import Reasons
from gpusched.scheduler.state import PlannerState
from gpusched.scheduler.strategies.expected_capacity import OUTLOOK
from gpusched.scheduler.strategies.fragmentation import FRAGMENTATION, typical_of


class Planner(PlannerState):
    def fork(self) -> Planner:
        """An independent planner with the same state, for what-if questions."""
        self.settle()
        twin = copy(self)
        twin.layout = layout = copy(self.layout)
        # The pools also hold the state learned about typical jobs.
        layout.pools = layout.pools.copy()
        if layout.wanted is not None:
            layout.wanted = layout.wanted.copy()
        twin.draft = self.draft.copy()
        twin.draft.layout = layout
        twin.timeline = self.timeline.copy(twin.draft)
        twin.quotas = self.quotas.copy()
        twin.fairshare, entities = self.fairshare.copy()
        twin.ranking = self.ranking.copy(layout, twin.quotas, twin.fairshare)
        twin.queue, classes = self.queue.copy(layout, twin.ranking, twin.fairshare, entities)
        twin._set_placements()
        twin.runs = {}
        for job_id, one in self.runs.items():
            made = twin.runs[job_id] = copy(one)
            made._planner = twin
            if one.entity is not None:
                made.entity = entities[one.entity]
            if one.job_class is not None:
                made.job_class = classes.get(one.job_class, one.job_class)
        twin.tasks, twin.fillers = self.tasks.copy(), self.fillers.copy()
        twin._usage, twin._absent, twin._recounted = self._usage.copy(), self._absent.copy(), self._recounted.copy()
        twin.fences, twin.kept, twin._outlived = self.fences.copy(), self.kept.copy(), self._outlived.copy()
        twin._gone = [(entities[entity], rate) for entity, rate in self._gone]
        twin._tentative, twin._undo, twin._confirmed = [], [], set()
        twin._cycle = None
        twin._is_stale = True
        twin._set_rules()
        for shape in twin.queue.shapes:
            shape.epoch = shape.barred_of = shape.refused_of = -1
        return twin

    def in_order(self, now: float) -> Iterator[tuple[ClassKey, PendingJob]]:
        """Pending jobs in queue order, up to the first class with hidden jobs that makes the order unknown."""
        self.settle()
        self._move_to(now)
        left = {one: len(one.jobs) for one in self.queue.classes}
        for queued_at, job_id, job_class in self.queue.in_order():
            yield job_class.key, PendingJob(job_id, queued_at)
            left[job_class] -= 1
            if not left[job_class] and job_class.hidden:
                return

    # --- a cycle --------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Plan one cycle. Equal states give equal plans; its trial bookings are undone before the next change.

        Invariant: the starts of the plan together with the running jobs book nothing twice.
        """
        self.settle()
        starts, cycle = self._plan(now)
        reservations = tuple(
            Reservation(one.job_id, self.layout.placement(one.booking), one.start_at, one.fence_at)
            for one in (cycle.reservations if cycle is not None else ())
        )
        preemption = None if cycle is None else cycle.made_preemption
        chosen = {} if preemption is None else preemption.chosen
        return Plan(
            starts=tuple(starts),
            preempts=tuple(chosen[job_id] for job_id in sorted(chosen)),
            resumes=() if cycle is None else tuple(cycle.resumes),
            reservations=reservations,
            reasons=Reasons(self, now, cycle if cycle is not None and not cycle.is_continued else None),
            first_blocked=reservations[0].job_id if reservations else None,
        )

    def schedule(self, now: float) -> Sequence[Start]:
        """Plan one cycle and apply its starts as if carried out.

        Raises: BrokenInvariant if the plan preempts or resumes, which the caller must carry out.
        """
        if self._tentative or self._undo:
            self.settle()
        starts, cycle = self._plan(now)
        self._tentative.clear()
        if self.fences:
            for start in starts:
                self._forget_fence(start.job_id)
        for one in cycle.reservations if cycle is not None else ():
            if one.fence_at is not None:
                self.fences.setdefault(one.job_id, one.fence_at)
        if cycle is not None and (cycle.resumes or (cycle.made_preemption and cycle.made_preemption.chosen)):
            raise BrokenInvariant("a plan that preempts was made where no caller carries it out")
        if self._undo:
            self._close()
        return starts

    def _plan(self, now: float) -> tuple[Sequence[Start], Cycle | None]:
        """The starts of a cycle, and the cycle itself, if one was needed."""
        self._move_to(now)
        queue = self.queue
        if not len(queue) and not self.odd_runs:
            self._leave_cycle()
            self.timeline.begin(now)
            queue.seen()
            return (), None
        cycle = self._cycle
        if cycle is not None and self._can_continue(cycle, now):
            before = len(cycle.starts)
            cycle.move_to(now)
            cycle.continue_with(queue.new)
            if cycle.has_claims:
                self._undo.append(cycle.close)
            queue.seen()
            return cycle.starts[before:], cycle
        self._leave_cycle()
        self._is_stale = False
        if self._learns:
            self._learn(now)
        cycle = Cycle(self, now)
        cycle.run()
        if cycle.has_claims:
            self._undo.append(cycle.close)
        self._cycle = cycle
        queue.seen()
        return cycle.starts, cycle

    def _learn(self, now: float) -> None:
        typical = typical_of(Snapshot(now, (), self.allocations(), self.queue.pending_classes(1)))
        if typical != self.layout.typical:
            self.layout.typical = typical
            self.layout.pools.pop(FRAGMENTATION, None)
            self.layout.pools.pop(OUTLOOK, None)
            self.placements.epoch += 1
            self.timeline.forget_places()

    def cycle_for_reasons(self, now: float) -> Cycle:
        """A whole cycle as of this instant, for the reasons of blocked jobs; its starts are not carried out."""
        self.settle()
        self._leave_cycle()
        self._is_stale = True
        _, cycle = self._plan(max(now, self._now))
        if cycle is None:
            cycle = Cycle(self, now)
            cycle.run()
        return cycle

    # --- the short cut ----------------------------------------------------------------------------

    def _can_continue(self, cycle: Cycle, now: float) -> bool:
        """Whether nothing has happened since this cycle but arrivals behind all jobs with a reservation."""
        if self._is_stale or cycle.has_passed or self._learns:
            return False
        if not cycle.may_continue_at(now) or (self.ranking.is_dynamic and cycle.starts):
            return False
        queue, new = self.queue, self.queue.new
        if queue.must_see and cycle.starts:
            # New holdings count against limits whose rest is promised to other jobs.
            return False
        if not cycle.depth:
            return True
        last = cycle.last_reserved
        if last is None:
            # Nothing is reserved yet: no job has waited long enough.
            return not len(queue) - len(new) or (
                cycle.first_patient is not None and not any(self._has_patience(one) for one in new)
            )
        for entry in new:
            job_class = entry[2]
            is_head = job_class.jobs[0] is entry and not self.ranking.is_dynamic
            if (job_class.rank if is_head else queue.rank(job_class, entry[0], entry[1])) < last:
                return False
        if not cycle.has_backfill:
            return True
        for one in cycle.reservations:
            start_at = one.start[0]
            if one.fence_at is not None and one.pass_until > -inf and one.fence_at <= now:
                return False
            if start_at <= now or start_at == inf:
                # With an unknown start, the allowance for passing jobs grows with time.
                return False
        if cycle.has_one_place and not self.placements.is_flat:
            # Its placement changes the best placements of the jobs behind it.
            return not any(self.placements.may_fit(entry[2].shape) for entry in new)
        return True

    def _has_patience(self, entry: Entry) -> bool:
        return self.ranking.has_patience(entry[2], entry[0])


def decide(snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> Plan:
    """Plan one cycle for a snapshot. Equal inputs give equal plans; the snapshot is not changed."""
    return Planner.from_snapshot(snapshot, settings, extensions).plan(snapshot.now)
