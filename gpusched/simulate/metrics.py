"""What a schedule is worth, in the words of the field. All times are seconds.

queueing delay (wait)   start - submission
job completion time     end - submission, also called response time
bounded slowdown        completion time over run time, where less than 10 s counts as 10; at least 1
makespan                last end - first submission
utilisation             processors or GPUs in use over those there are, from the first submission to the last end
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.simulate.runner import Outcome
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


def worth(outcome: Outcome, size: int) -> Worth:
    """The numbers of a schedule on a cluster of so many GPUs (or processors, of a trace without GPUs)."""
    jobs, starts = outcome.jobs, outcome.start_s
    waits = [start - job.submit_s for job, start in zip(jobs, starts, strict=True)]
    slowdowns = [slowdown(job, wait) for job, wait in zip(jobs, waits, strict=True)]
    makespan_s = max(start + job.run_s for job, start in zip(jobs, starts, strict=True)) - min(
        job.submit_s for job in jobs
    )
    work = sum((job.gpus or job.procs) * job.run_s for job in jobs)
    wide = [wait for job, wait in zip(jobs, waits, strict=True) if job.gpus >= WIDE_GPUS]
    return Worth(
        jobs=len(jobs),
        wait_s=spread(waits),
        completion_s=spread([wait + job.run_s for job, wait in zip(jobs, waits, strict=True)]),
        slowdown=spread(slowdowns),
        makespan_s=makespan_s,
        jobs_per_hour=len(jobs) * 3600 / makespan_s,
        utilisation=work / (size * makespan_s),
        wide_wait_s=sum(wide) / len(wide) if wide else None,
        user_fairness=jain(means(jobs, slowdowns, lambda job: job.user).values()),
        queue_fairness=jain(means(jobs, slowdowns, lambda job: job.queue).values()),
    )


def slowdown(job: TraceJob, wait_s: float) -> float:
    """Bounded slowdown of one job that waited so long."""
    return max(1.0, (wait_s + job.run_s) / max(job.run_s, SHORT_S))


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


def gains(before: Outcome, after: Outcome) -> list[tuple[str, float, float]]:
    """Who gains and who loses: per user the mean slowdown under either schedule of the same jobs, best first."""
    jobs = before.jobs
    first, second = (
        means(
            jobs,
            [slowdown(job, start - job.submit_s) for job, start in zip(jobs, one.start_s, strict=True)],
            lambda job: job.user,
        )
        for one in (before, after)
    )
    return sorted(((user, first[user], second[user]) for user in first), key=lambda one: (one[2] - one[1], one[0]))
