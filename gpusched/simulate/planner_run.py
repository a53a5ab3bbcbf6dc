"""Lets the time pass: at each instant first what ends, then what arrives, then one cycle of the policy.

The clock is virtual and goes from event to event. What decides is `policy.standing`, on the settings of the daemon;
what is simulated is that jobs run for as long as the trace says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import heappop, heappush

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingJob
from gpusched.policy.standing import Kind, Standing
from gpusched.simulate.predicting import Foresight
from gpusched.simulate.rules import request_of
from gpusched.simulate.timeline import Timeline
from gpusched.simulate.trace import TraceJob

Progress = Callable[[int, int], None]
"""Told now and then how many jobs have started, and of how many."""

Watch = Callable[[int, Standing, Sequence[int], Sequence[int]], None]
"""Told of each cycle: the instant, what stands then, who has come and waits, who has ended; by place in the trace."""

_TOLD_EVERY = 4096


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job, where a job may have several: it failed and was tried again, or it made room."""

    job: int
    """Its place in `Outcome.jobs`."""
    start_s: int
    end_s: int
    how: str
    """A state in small letters: `completed`, `failed`, `timeout`, `preempted`, `cancelled`, `node_fail`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A schedule: when each job started first, in the order of the trace."""

    jobs: Sequence[TraceJob]
    start_s: Sequence[int]
    cycles: int
    """How often the policy was asked."""
    ends_s: Sequence[int] | None = None
    """When each was over for good; None where each ran once, for as long as the trace says."""
    attempts: Sequence[Attempt] = ()
    """Every run of every job, by start; empty where each ran once."""
    timeline: Timeline | None = None
    """Where each ran, if that was asked for."""

    def end_s(self, number: int) -> int:
        """When the job at this place was over for good."""
        return self.start_s[number] + self.jobs[number].run_s if self.ends_s is None else self.ends_s[number]

    @property
    def starts_sha(self) -> str:
        """The first 16 digits of the SHA-256 of all starts, one a line: equal for equal schedules."""
        return sha256("\n".join(map(str, self.start_s)).encode()).hexdigest()[:16]


def run(
    jobs: Sequence[TraceJob],
    nodes: Sequence[NodeView],
    settings: Settings,
    *,
    orders_by_run_time: bool = False,
    predict: str | None = None,
    keeps_places: bool = False,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The schedule of these jobs on these machines.

    Args:
        orders_by_run_time: tell the policy how long each will run, as a prediction that is always right.
        predict: plan, and order where the order asks for it, by what `predicting` makes of the jobs that have ended.
        watch: called after each cycle.
        keeps_places: put down where each ran, for what depends on time (`metrics_over_time`) and for plots.
    Raises: BrokenInvariant when jobs wait that nothing can ever start.
    """
    standing = Standing(nodes, settings)
    key_of = _Keys(standing.nodes, orders_by_run_time)
    foresight = None if predict is None else Foresight(predict, jobs, standing, key_of)
    kinds = [] if foresight else _kinds(jobs, standing, key_of)
    starts = [-1] * len(jobs)
    timeline = Timeline(standing.nodes, settings) if keeps_places else None
    arrivals = sorted(range(len(jobs)), key=lambda number: jobs[number].submit_s)
    ends: list[tuple[int, int]] = []
    coming, last, cycles = 0, len(arrivals), 0
    while coming < last or ends:
        came: list[int] = []
        over: list[int] = []
        now = jobs[arrivals[coming]].submit_s if coming < last else ends[0][0]
        if ends and ends[0][0] <= now:
            now = ends[0][0]
            while ends and ends[0][0] == now:
                job_id = heappop(ends)[1]
                standing.ended(job_id)
                over.append(job_id - 1)
                if foresight is not None:
                    foresight.ended(job_id - 1)
            if foresight is not None:
                foresight.renew()
        while coming < last and jobs[arrivals[coming]].submit_s == now:
            number = arrivals[coming]
            kind = foresight.arrived(number) if foresight is not None else kinds[number]
            standing.arrived(kind, PendingJob(number + 1, now))
            came.append(number)
            coming += 1
        cycles += 1
        for start in standing.decide(now).starts:
            number = start.job_id - 1
            starts[number] = now
            if foresight is not None:
                foresight.started(number)
            heappush(ends, (now + jobs[number].run_s, start.job_id))
            if timeline is not None:
                timeline.add(number, now, now + jobs[number].run_s, start.placement)
        if watch is not None:
            watch(now, standing, [number for number in came if starts[number] < 0], over)
        if progress is not None and cycles % _TOLD_EVERY == 0:
            progress(coming, last)
    stuck = [jobs[number].id for number, at in enumerate(starts) if at < 0]
    if stuck:
        raise BrokenInvariant(f"{len(stuck)} jobs never start on this cluster, the first of them {stuck[0]}")
    return Outcome(jobs, starts, cycles, timeline=timeline)


class _Keys:
    """What each job of a trace is to the policy. Where it tells no users, it is queues among which use is shared."""

    def __init__(self, nodes: Sequence[NodeView], orders_by_run_time: bool) -> None:
        self._nodes = nodes
        self._orders_by_run_time = orders_by_run_time
        self._users: dict[str, int] = {}

    def __call__(self, job: TraceJob) -> ClassKey:
        """Its key, the same for equal jobs."""
        return ClassKey(
            uid=1000 + self._users.setdefault(job.user, len(self._users)),
            account="",
            queue=job.queue or "default",
            nice=0,
            time_limit_s=job.estimate_s,
            request=request_of(job, self._nodes),
            user=job.user or job.queue,
            predicted_s=job.run_s if self._orders_by_run_time else None,
        )

    def mark(self, job: TraceJob) -> object:
        """What the key is made of, in a form that is made faster than the key."""
        return (
            job.procs,
            job.gpus,
            job.estimate_s,
            job.run_s if self._orders_by_run_time else None,
            job.user,
            job.queue,
            job.cpus,
            job.mem_mib,
            job.gpu_fraction,
        )


def _kinds(jobs: Sequence[TraceJob], standing: Standing, key_of: _Keys) -> list[Kind]:
    """What each job is to the policy, worked out once for all that are equal to it."""
    known: dict[object, Kind] = {}
    found = []
    for job in jobs:
        mark = key_of.mark(job)
        kind = known.get(mark)
        if kind is None:
            kind = known[mark] = standing.kind_of(key_of(job))
        found.append(kind)
    return found
