"""Conservative backfill on a machine of processors alone, where a reservation needs a number and no search.

The scheduler makes the same plans and searches for the place of each reservation, which takes ten times as long where
every pending job has one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from math import inf

from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.cluster import NodeView
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Start
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout
from gpusched.scheduler.fairshare import FairShare
from gpusched.scheduler.plugins import NO_EXTENSIONS
from gpusched.scheduler.priority import Rank, Ranking
from gpusched.scheduler.queue import Entry, JobClass, PendingQueue
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.timeline import foreseen_end
from gpusched.scheduler.usage import capacity_of


class FreeSteps:
    """Free amount of one resource over time, as a step function. The last step extends to infinity.

    Invariant: the instants are increasing, and no step is negative.
    """

    __slots__ = ("_at", "_free")

    def __init__(self, now: float, free: int, ends: Iterable[tuple[float, int]]) -> None:
        """Args: ends: instants after `now` in order, each with the amount freed then."""
        self._at, self._free = [now], [free]
        for at, amount in ends:
            free += amount
            if at == self._at[-1]:
                self._free[-1] = free
            else:
                self._at.append(at)
                self._free.append(free)

    def move_on(self, now: float) -> None:
        """Drop the steps before now."""
        gone = bisect_left(self._at, now)
        if gone == len(self._at) or self._at[gone] > now:
            gone -= 1
        del self._at[:gone], self._free[:gone]
        self._at[0] = now

    def take(self, amount: int, duration_s: float) -> float | None:
        """Take `amount` for `duration_s` from the earliest instant at which it is free throughout.

        Returns: that instant; None if there is never enough, in which case nothing was taken.
        """
        at, free = self._at, self._free
        first, count = 0, len(at)
        while first < count:
            if free[first] < amount:
                first += 1
                continue
            end = at[first] + duration_s
            last = first + 1
            while last < count and at[last] < end and free[last] >= amount:
                last += 1
            if last < count and at[last] < end:
                first = last + 1
                continue
            if last == count or at[last] > end:
                at.insert(last, end)
                free.insert(last, free[last - 1])
            for step in range(first, last):
                free[step] -= amount
            return at[first]
        return None


def is_covered(jobs: Sequence[TraceJob], nodes: Sequence[NodeView], settings: Settings) -> bool:
    """Whether `ProcessorsPlanner` plans as the scheduler does.

    Only cores count, each job has a reservation, and each ends within its limit.
    """
    priority = settings.priority
    return (
        len(nodes) == 1
        and not nodes[0].gpus
        and priority.backfill
        and priority.backfill_depth > 1
        and priority.backfill_depth >= len(jobs)
        and priority.backfill_by == "prediction"
        and priority.order in ("fifo", "sjf", "saf", "spf")
        and not (settings.queue or settings.qos or settings.account)
        and settings.limit.running_per_user is None
        and settings.ceiling == CeilingSettings()
        and all(job.procs and not job.gpus and job.spec is None and 0 < job.estimate_s >= job.run_s for job in jobs)
    )


class ProcessorsPlanner:
    """Stands in for the scheduler's planner where `is_covered`."""

    def __init__(self, nodes: Sequence[NodeView], settings: Settings) -> None:
        self.layout = layout = ClusterLayout(tuple(nodes), settings)
        fairshare, quotas = FairShare(settings, capacity_of(layout)), Quotas(settings, layout)
        ranking = Ranking(settings, layout, quotas, fairshare, NO_EXTENSIONS)
        self.queue = PendingQueue(layout, settings, ranking, fairshare)
        self._free = layout.millicpus[0]
        self._running: dict[int, tuple[float, float, JobClass]] = {}
        """Planned end, start and class of each running job."""
        self._ends: list[tuple[float, int, int]] = []
        """Planned end, id and millicores of each running job, in order."""
        self._steps: FreeSteps | None = None
        """Free cores from the last plan on, all reservations taken."""
        self._next_at = inf
        """First start of a reservation."""
        self._last_rank: Rank = ()
        """Of the last job planned."""

    def predict(self, job_class: JobClass, predicted_s: int | None, plan_s: int | None) -> None:
        self.queue.predict(job_class, predicted_s, plan_s)
        self._steps = None

    def job_queued(self, job_class: JobClass, queued_at: float, job_id: int) -> None:
        self.queue.add(job_class, queued_at, job_id)

    def run_ended(self, job_id: int) -> None:
        end_at, _, job_class = self._running.pop(job_id)
        del self._ends[bisect_left(self._ends, (end_at, job_id))]
        self._free += job_class.shape.millicpus
        self._steps = None

    def schedule(self, now: float) -> list[Start]:
        """Plan once, and start the jobs planned for now."""
        queue, steps, starts = self.queue, self._steps, list[Start]()
        entries: Sequence[Entry]
        has_moved = self._move_ends(now)
        if queue.rank_as_of(now) or has_moved or self._next_at <= now:
            steps = None
        new = sorted((queue.rank(one[2], one[0], one[1]), one) for one in queue.new)
        if steps is None or (new and new[0][0] < self._last_rank):
            steps = self._steps = FreeSteps(now, self._free, ((at, amount) for at, _, amount in self._ends))
            self._next_at, entries = inf, queue.in_order()
        else:
            steps.move_on(now)
            entries = [entry for _, entry in new]
        for entry in entries:
            queued_at, job_id, job_class = entry
            at = steps.take(job_class.shape.millicpus, job_class.planned_s)
            if at is None:
                continue
            self._last_rank = queue.rank(job_class, queued_at, job_id)
            if at <= now:
                queue.remove(job_id)
                starts.append(self._start(job_class, job_id, now))
            else:
                self._next_at = min(self._next_at, at)
        queue.seen()
        return starts

    def _start(self, job_class: JobClass, job_id: int, now: float) -> Start:
        shape, end_at = job_class.shape, now + job_class.planned_s
        self._free -= shape.millicpus
        self._running[job_id] = end_at, now, job_class
        insort(self._ends, (end_at, job_id, shape.millicpus))
        return Start(job_id, self.layout.placement(AllocationUnits(0, shape.need.uid, shape.millicpus, 0, ())))

    def _move_ends(self, now: float) -> bool:
        """Replace predictions that have passed; return whether there were any."""
        ends, moved = self._ends, False
        while ends and ends[0][0] <= now:
            before_at, job_id, amount = ends.pop(0)
            _, start_at, job_class = self._running[job_id]
            end_at = foreseen_end(start_at, before_at, start_at + job_class.limit_s, now)
            self._running[job_id] = end_at, start_at, job_class
            insort(ends, (end_at, job_id, amount))
            moved = True
        return moved
