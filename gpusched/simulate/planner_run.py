"""The planner alone on the clock of a trace, on the settings of the daemon; jobs run for as long as the trace says."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.queue import JobClass
from gpusched.simulate.event_loop import Progress, play
from gpusched.simulate.outcome import Outcome, RunLog
from gpusched.simulate.predicting import Foresight
from gpusched.simulate.rules import request_of
from gpusched.simulate.trace import TraceJob


def run(
    jobs: Sequence[TraceJob],
    nodes: Sequence[NodeView],
    settings: Settings,
    *,
    orders_by_run_time: bool = False,
    predict: str | None = None,
    keeps_places: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """The schedule of these jobs on these machines.

    Args:
        orders_by_run_time: tell the policy how long each will run, as a prediction that is always right.
        predict: plan, and order where the order asks for it, by what `predicting` makes of the jobs that have ended.
        keeps_places: put down where each ran, for what depends on time (`metrics_over_time`) and for plots.
    Raises: BrokenInvariant when jobs wait that nothing can ever start.
    """
    body = PlannerRun(
        jobs, nodes, settings, orders_by_run_time=orders_by_run_time, predict=predict, keeps_places=keeps_places
    )
    return body.outcome(play([job.submit_s for job in jobs], body, progress))


class PlannerRun:
    """The planner as a body of `event_loop.play`; it is played once. Ids of jobs are their places from 1."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        nodes: Sequence[NodeView],
        settings: Settings,
        *,
        orders_by_run_time: bool = False,
        predict: str | None = None,
        keeps_places: bool = False,
    ) -> None:
        self.planner = Planner(nodes, settings)
        self.starts = [-1] * len(jobs)
        self._jobs = jobs
        self._runs = RunLog(self.planner.layout.nodes, settings) if keeps_places else None
        self._ends: list[tuple[int, int]] = []
        """When each running job ends, with its id, as a heap."""
        self._now = 0
        keys = _Keys(self.planner.layout.nodes, orders_by_run_time=orders_by_run_time)
        self._foresight = None if predict is None else Foresight(predict, jobs, self.planner, keys.of)
        self._classes = [] if self._foresight else keys.classes(jobs, self.planner)

    def next_at(self, arrives_at: float) -> float:
        """The next arrival, or the next end if it is not later."""
        ends = self._ends
        return ends[0][0] if ends and ends[0][0] <= arrives_at else arrives_at

    def advance(self, now: float) -> None:
        """End the runs that end now."""
        self._now = int(now)
        ends = self._ends
        if not ends or ends[0][0] > now:
            return
        while ends and ends[0][0] <= now:
            self.end(heappop(ends)[1])
        if self._foresight is not None:
            self._foresight.renew()

    def end(self, job_id: int) -> None:
        """A run is over."""
        self.planner.run_ended(job_id)
        if self._foresight is not None:
            self._foresight.ended(job_id - 1)

    def arrive(self, job: int) -> None:
        """A job waits from now on."""
        job_class = self._classes[job] if self._foresight is None else self._foresight.arrived(job)
        self.planner.job_queued(job_class, self._now, job + 1)

    def settle(self, now: float) -> None:
        """Start what the planner starts."""
        for start in self.planner.schedule(now):
            number = start.job_id - 1
            self.starts[number] = self._now
            end_s = self._now + self._jobs[number].run_s
            heappush(self._ends, (end_s, start.job_id))
            if self._foresight is not None:
                self._foresight.started(number)
            if self._runs is not None:
                self._runs.add(number, self._now, end_s, start.placement)

    def outcome(self, cycles: int) -> Outcome:
        """The schedule. Raises: BrokenInvariant when jobs are left."""
        stuck = [job.id for job, start_s in zip(self._jobs, self.starts, strict=True) if start_s < 0]
        if stuck:
            raise BrokenInvariant(f"{len(stuck)} jobs never start on this cluster, the first of them {stuck[0]}")
        return Outcome(self._jobs, self.starts, cycles, runs=self._runs)


class _Keys:
    """What each job of a trace is to the policy. Where it tells no users, it is queues among which use is shared."""

    def __init__(self, nodes: Sequence[NodeView], *, orders_by_run_time: bool) -> None:
        self._nodes = nodes
        self._orders_by_run_time = orders_by_run_time
        self._users: dict[str, int] = {}

    def of(self, job: TraceJob) -> ClassKey:
        """Its key, the same for equal jobs."""
        return ClassKey(
            uid=1000 + self._users.setdefault(job.user, len(self._users)),
            account=job.account,
            queue=job.queue or "default",
            nice=0,
            time_limit_s=job.estimate_s,
            request=request_of(job, self._nodes),
            user=job.user or job.queue,
            predicted_s=job.run_s if self._orders_by_run_time else None,
        )

    def classes(self, jobs: Sequence[TraceJob], planner: Planner) -> list[JobClass]:
        """What each job is to the planner, worked out once for all that are equal to it."""
        known: dict[object, JobClass] = {}
        found = []
        for job in jobs:
            mark = (*job.mark, job.estimate_s, job.run_s if self._orders_by_run_time else None)
            found_class = known.get(mark)
            if found_class is None:
                found_class = known[mark] = planner.own_class(self.of(job))
            found.append(found_class)
        return found
