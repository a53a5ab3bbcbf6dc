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
from math import inf

from gpusched.errors import BrokenInvariant
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingJob, Plan, Reservation, Snapshot, Start
from gpusched.scheduler.backfill import walk_arrivals, walk_queue
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.queue import Entry
from gpusched.scheduler.reasons import Reasons
from gpusched.scheduler.rules import Cycle
from gpusched.scheduler.state import Begun, PlannerState


class Planner:
    """Plans cycles on a state. An event is applied to the state; a plan leaves it as it was before the next change."""

    def __init__(self, state: PlannerState) -> None:
        self.state = state
        self._cycle: Cycle | None = None
        """The last cycle, while later arrivals may extend it."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> Planner:
        return cls(PlannerState.from_snapshot(snapshot, settings, extensions))

    def fork(self) -> Planner:
        """An independent planner with the same state, for what-if questions."""
        return Planner(self.state.fork())

    def in_order(self, now: float) -> Iterator[tuple[ClassKey, PendingJob]]:
        """Pending jobs in queue order, up to the first class with hidden jobs that makes the order unknown."""
        self.state.move_to(now)
        left = {one: len(one.jobs) for one in self.state.queue.classes}
        for queued_at, job_id, job_class in self.state.queue.in_order():
            yield job_class.key, PendingJob(job_id, queued_at)
            left[job_class] -= 1
            if not left[job_class] and job_class.hidden:
                return

    # --- a cycle --------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Plan one cycle. Equal states give equal plans; its trial bookings are undone before the next change.

        Invariant: the starts of the plan together with the running jobs book nothing twice.
        """
        starts, cycle = self._plan(now)
        reservations = tuple(
            Reservation(one.job_id, self.state.layout.placement(one.booking), one.start_at, one.fence_at)
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
        """Plan one cycle and apply its starts as if carried out. A cycle that would start nothing is left out.

        Raises: BrokenInvariant if the plan preempts or resumes, which the caller must carry out.
        """
        starts, cycle = self._plan(now, only_starts=True)
        if cycle is None:
            return starts
        if cycle.resumes or (cycle.made_preemption and cycle.made_preemption.chosen):
            raise BrokenInvariant("a plan that preempts was made where no caller carries it out")
        self.state.carry_out(starts, cycle.reservations)
        return starts

    def play(self, now: float) -> tuple[Sequence[Start], Sequence[Begun], Cycle | None]:
        """As `schedule`, where the caller carries out what the cycle preempts and resumes.

        Returns: the starts, the same as they were pending and run now, and the cycle, if one was needed.
        """
        starts, cycle = self._plan(now)
        return starts, () if cycle is None else self.state.carry_out(starts, cycle.reservations), cycle

    def _plan(self, now: float, *, only_starts: bool = False) -> tuple[Sequence[Start], Cycle | None]:
        """The starts of a cycle, and the cycle itself, if one was needed.

        Args: only_starts: the caller does not need its reservations.
        """
        state, queue = self.state, self.state.queue
        state.move_to(now)
        if not queue.classes and not state.odd_runs:
            self._cycle = None
            state.timeline.begin(now)
            queue.seen()
            return (), None
        cycle = self._cycle
        if cycle is not None and self._can_continue(cycle, now):
            before = len(cycle.starts)
            cycle.move_to(now)
            walk_arrivals(cycle, queue.new)
            if cycle.has_claims:
                state.undo_by(cycle.close)
            queue.seen()
            return cycle.starts[before:] if len(cycle.starts) > before else (), cycle
        self._cycle = None
        if only_starts and self._starts_none():
            state.timeline.begin(now)
            queue.seen()
            return (), None
        state.is_stale = False
        if state.learns:
            state.learn(now)
        cycle = Cycle(state, now)
        walk_queue(cycle)
        if cycle.has_claims:
            state.undo_by(cycle.close)
        self._cycle = cycle
        queue.seen()
        return cycle.starts, cycle

    def cycle_for_reasons(self, now: float) -> Cycle:
        """A whole cycle as of this instant, for the reasons of blocked jobs; its starts are not carried out."""
        self.state.settle()
        self._cycle = None
        self.state.is_stale = True
        _, cycle = self._plan(max(now, self.state.now))
        if cycle is None:
            cycle = Cycle(self.state, now)
            walk_queue(cycle)
        return cycle

    # --- the short cuts ---------------------------------------------------------------------------

    def _starts_none(self) -> bool:
        """Whether a whole cycle would do nothing but reserve room: no pending job fits, whatever the rules say."""
        state = self.state
        if state.settings.priority.fence_s < inf or state.learns or state.examines_all or state.windows:
            # The fence of a job follows from its first reservation.
            return False
        if state.odd_runs or state.fillers or state.queue.must_see:
            return False
        return not state.placements.may_fit_any(state.queue.shapes)

    def _can_continue(self, cycle: Cycle, now: float) -> bool:
        """Whether nothing has happened since this cycle but arrivals behind all jobs with a reservation."""
        state = self.state
        if state.is_stale or cycle.has_passed or state.learns:
            return False
        if cycle.has_spare or (cycle.has_dear and cycle.starts):
            return False
        if not cycle.may_continue_at(now) or (state.ranking.is_dynamic and cycle.starts):
            return False
        queue, new = state.queue, state.queue.new
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
            is_head = job_class.jobs[0] is entry and not state.ranking.is_dynamic
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
        if cycle.has_one_place and not state.placements.is_flat:
            # Its placement changes the best placements of the jobs behind it.
            return not any(state.placements.may_fit(entry[2].shape) for entry in new)
        return True

    def _has_patience(self, entry: Entry) -> bool:
        return self.state.ranking.has_patience(entry[2], entry[0])


def decide(snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> Plan:
    """Plan one cycle for a snapshot. Equal inputs give equal plans; the snapshot is not changed."""
    return Planner.from_snapshot(snapshot, settings, extensions).plan(snapshot.now)
