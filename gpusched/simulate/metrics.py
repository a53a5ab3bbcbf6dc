"""What a schedule is worth, job by job, in the words of the field. All times are seconds.

queueing delay (wait)   first start - submission
job completion time     end - submission, also called response time
bounded slowdown        completion time over run time, where less than 10 s counts as 10; at least 1
makespan                last end - first submission
utilisation             processors or GPUs in use over those there are, from the first submission to the last end

What depends on who held what, when, is in `metrics_over_time`; who gains and who loses in `comparison`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.model.cluster import NodeView
from gpusched.simulate.outcome import Outcome
from gpusched.simulate.trace import TraceJob

SHORT_S = 10
"""A job that ran less is taken to have run so long, or its slowdown would say little."""

WIDE_GPUS = 8
"""A job of so many GPUs is a wide one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One number of all jobs: its mean and where 50, 95 and 99 of 100 are at or below."""

    mean: float
    median: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Worth:
    """A schedule in numbers."""

    jobs: int
    wait_s: Spread
    completion_s: Spread
    slowdown: Spread
    makespan_s: int
    jobs_per_hour: float
    utilisation: float
    wide_wait_s: float | None
    """Mean wait of jobs of 8 or more GPUs; None where there are none."""
    user_fairness: float
    """Jain's index of the users' mean slowdowns, 1 when all are alike, 1/n when one has it all."""
    queue_fairness: float
    preemptions: int = 0
    preempted_gpu_s: float = 0.0
    """GPU seconds of runs that were ended to make room."""


@dataclass(frozen=True, slots=True)
class Misses:
    """Jobs that were late."""

    jobs: int
    """Jobs that had something to keep: a deadline; or all, for a bound on waits."""
    missed: int
    by_s: float
    """How late those were, on average."""

    @property
    def part(self) -> float:
        """Of those that had something to keep, 0 to 1."""
        return self.missed / self.jobs if self.jobs else 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """The jobs of one user or queue."""

    jobs: int
    wait_s: float
    """Mean."""
    slowdown: float
    """Mean."""


def worth(outcome: Outcome, size: float) -> Worth:
    """The numbers of a schedule on a cluster of so many GPUs (or processors, of a trace without GPUs)."""
    jobs = outcome.jobs
    waits = [start - job.submit_s for job, start in zip(jobs, outcome.start_s, strict=True)]
    completions = [outcome.end_s(number) - job.submit_s for number, job in enumerate(jobs)]
    slowdowns = slowdowns_of(outcome)
    ends = [outcome.end_s(number) for number in range(len(jobs))]
    makespan_s = max(ends) - min(job.submit_s for job in jobs)
    if outcome.attempts:
        work = sum(width(jobs[one.job]) * (one.end_s - one.start_s) for one in outcome.attempts)
    else:
        work = sum(width(job) * job.run_s for job in jobs)
    preempted = [one for one in outcome.attempts if one.how == "preempted"]
    wide = [wait for job, wait in zip(jobs, waits, strict=True) if job.gpus >= WIDE_GPUS]
    return Worth(
        jobs=len(jobs),
        wait_s=spread(waits),
        completion_s=spread(completions),
        slowdown=spread(slowdowns),
        makespan_s=makespan_s,
        jobs_per_hour=len(jobs) * 3600 / makespan_s,
        utilisation=work / (size * makespan_s),
        wide_wait_s=sum(wide) / len(wide) if wide else None,
        user_fairness=jain(means(jobs, slowdowns, lambda job: job.user).values()),
        queue_fairness=jain(means(jobs, slowdowns, lambda job: job.queue).values()),
        preemptions=len(preempted),
        preempted_gpu_s=sum(width(jobs[one.job]) * (one.end_s - one.start_s) for one in preempted),
    )


def width(job: TraceJob) -> float:
    """GPUs that a job holds, a part of one as a part; its processors where it has none."""
    return (job.gpus if job.gpu_fraction is None else job.gpu_fraction) or job.procs


def slowdown(job: TraceJob, wait_s: float) -> float:
    """Bounded slowdown of one job that waited so long and then ran once.

    Source: Feitelson, Metrics for Parallel Job Scheduling and Their Convergence (JSSPP 2001).
    """
    return max(1.0, (wait_s + job.run_s) / max(job.run_s, SHORT_S))


def slowdowns_of(outcome: Outcome) -> list[float]:
    """Bounded slowdown of each job; what it takes beyond its run time counts as waiting."""
    return [slowdown(job, outcome.end_s(number) - job.submit_s - job.run_s) for number, job in enumerate(outcome.jobs)]


def late(outcome: Outcome, wait_bound_s: int) -> Misses:
    """Jobs that waited for longer than a bound."""
    over = [
        start - job.submit_s - wait_bound_s
        for job, start in zip(outcome.jobs, outcome.start_s, strict=True)
        if start - job.submit_s > wait_bound_s
    ]
    return Misses(len(outcome.jobs), len(over), sum(over) / len(over) if over else 0.0)


def past_deadline(outcome: Outcome) -> Misses:
    """Jobs that ended after their deadline, of those that have one."""
    left = [
        (job.deadline_s - outcome.end_s(number))
        for number, job in enumerate(outcome.jobs)
        if job.deadline_s is not None
    ]
    over = [-one for one in left if one < 0]
    return Misses(len(left), len(over), sum(over) / len(over) if over else 0.0)


def party(jobs: Sequence[TraceJob], wanted: str | None = None) -> tuple[str, Callable[[TraceJob], str]]:
    """By whom jobs are told apart, and how: `user` or `queue` as wanted; else `queue` where there are no two users."""
    if wanted == "user" or (wanted is None and len({job.user for job in jobs}) > 1):
        return "user", lambda job: job.user
    return "queue", lambda job: job.queue


def size_of(nodes: Iterable[NodeView], jobs: Iterable[TraceJob]) -> float:
    """GPUs of the machines; their cores, where no job asks for a GPU."""
    if any(job.gpus for job in jobs):
        return sum(len(node.gpus) for node in nodes)
    return sum(node.cpus for node in nodes)


def groups(outcome: Outcome, by: Callable[[TraceJob], str]) -> dict[str, Group]:
    """The jobs of each user, queue or whatever `by` says, sorted by name."""
    jobs = outcome.jobs
    waits = [start - job.submit_s for job, start in zip(jobs, outcome.start_s, strict=True)]
    counts = Counter(map(by, jobs))
    mean_wait, mean_slowdown = means(jobs, waits, by), means(jobs, slowdowns_of(outcome), by)
    return {name: Group(counts[name], mean_wait[name], mean_slowdown[name]) for name in mean_wait}


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles (nearest rank) of at least one value."""
    ordered = sorted(values)
    count = len(ordered)

    def at(percent: int) -> float:
        return float(ordered[max(0, -(-count * percent // 100) - 1)])

    return Spread(sum(ordered) / count, at(50), at(95), at(99), float(ordered[-1]))


def means(jobs: Sequence[TraceJob], values: Sequence[float], group: Callable[[TraceJob], str]) -> Mapping[str, float]:
    """Mean of a value by user, queue or whatever `group` says."""
    sums: dict[str, tuple[float, int]] = {}
    for job, value in zip(jobs, values, strict=True):
        total, count = sums.get(group(job), (0.0, 0))
        sums[group(job)] = total + value, count + 1
    return {name: total / count for name, (total, count) in sorted(sums.items())}


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: (sum of x)^2 / (n x sum of x^2); 1 of nothing.

    Source: Jain, Chiu and Hawe, A Quantitative Measure of Fairness (1984).
    """
    known = list(values)
    squares = sum(value * value for value in known)
    return sum(known) ** 2 / (len(known) * squares) if squares else 1.0
