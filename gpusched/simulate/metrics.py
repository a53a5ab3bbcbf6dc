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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gpusched.model.cluster import NodeView
from gpusched.simulate.outcome import Outcome
from gpusched.simulate.trace import TraceJob

PREEMPTED = "preempted"
_FAILED = frozenset({"failed", "out_of_memory", "timeout", "node_fail"})

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


@dataclass(frozen=True, slots=True)
class QueueResult:
    """The jobs of one queue under one policy."""

    queue: str
    jobs: int
    wait_s: float
    """Mean, to the first start."""
    wait_p95_s: float
    completion_s: float
    """Mean, from submission to the end of the last run."""
    failed: int
    """Runs that did not end well: by themselves, or at their time limit."""
    preempted: int
    """Runs that were ended to make room."""
    lost_gpu_s: float
    """GPU seconds (core seconds of jobs without GPUs) of those, which were done once more."""


def worth(outcome: Outcome, size: float) -> Worth:
    """The numbers of a schedule on a cluster of so many GPUs (or processors, of a trace without GPUs)."""
    jobs = outcome.jobs
    makespan_s = max(outcome.end_s) - min(job.submit_s for job in jobs)
    if outcome.attempts:
        work = sum(width(jobs[one.job]) * (one.end_s - one.start_s) for one in outcome.attempts)
    else:
        work = sum(width(job) * job.run_s for job in jobs)
    preempted = [one for one in outcome.attempts if one.how == PREEMPTED]
    wide = [wait_s for job, wait_s in zip(jobs, outcome.wait_s, strict=True) if job.gpus >= WIDE_GPUS]
    return Worth(
        jobs=len(jobs),
        wait_s=spread(outcome.wait_s),
        completion_s=spread(outcome.completion_s),
        slowdown=spread(outcome.slowdown),
        makespan_s=makespan_s,
        jobs_per_hour=len(jobs) * 3600 / makespan_s,
        utilisation=work / (size * makespan_s),
        wide_wait_s=sum(wide) / len(wide) if wide else None,
        user_fairness=jain(group.slowdown for group in groups(outcome, USER).values()),
        queue_fairness=jain(group.slowdown for group in groups(outcome, QUEUE).values()),
        preemptions=len(preempted),
        preempted_gpu_s=sum(width(jobs[one.job]) * (one.end_s - one.start_s) for one in preempted),
    )


def width(job: TraceJob) -> float:
    """GPUs that a job holds, a part of one as a part; its processors where it has none."""
    return (job.gpus if job.gpu_fraction is None else job.gpu_fraction) or job.procs


def late(outcome: Outcome, wait_bound_s: int) -> Misses:
    """Jobs that waited for longer than a bound."""
    return _misses(len(outcome.jobs), [wait_s - wait_bound_s for wait_s in outcome.wait_s])


def past_deadline(outcome: Outcome) -> Misses:
    """Jobs that ended after their deadline, of those that have one."""
    by_s = [
        end_s - job.deadline_s
        for job, end_s in zip(outcome.jobs, outcome.end_s, strict=True)
        if job.deadline_s is not None
    ]
    return _misses(len(by_s), by_s)


def _misses(jobs: int, by_s: Iterable[int]) -> Misses:
    over = [one for one in by_s if one > 0]
    return Misses(jobs, len(over), sum(over) / len(over) if over else 0.0)


USER: Callable[[TraceJob], str] = attrgetter("user")
QUEUE: Callable[[TraceJob], str] = attrgetter("queue")


def party(jobs: Sequence[TraceJob], wanted: str | None = None) -> tuple[str, Callable[[TraceJob], str]]:
    """By whom jobs are told apart, and how: `user` or `queue` as wanted; else `queue` where there are no two users."""
    if wanted == "user" or (wanted is None and len({job.user for job in jobs}) > 1):
        return "user", USER
    return "queue", QUEUE


def size_of(nodes: Iterable[NodeView], jobs: Iterable[TraceJob]) -> float:
    """GPUs of the machines; their cores, where no job asks for a GPU."""
    if any(job.gpus for job in jobs):
        return sum(len(node.gpus) for node in nodes)
    return sum(node.cpus for node in nodes)


def groups(outcome: Outcome, by: Callable[[TraceJob], str]) -> dict[str, Group]:
    """The jobs of each user, queue or whatever `by` says, sorted by name."""
    sums: dict[str, list[float]] = {}
    for name, wait_s, slowdown in zip(map(by, outcome.jobs), outcome.wait_s, outcome.slowdown, strict=True):
        found = sums.get(name)
        if found is None:
            found = sums[name] = [0, 0, 0.0]
        found[0] += 1
        found[1] += wait_s
        found[2] += slowdown
    return {
        name: Group(int(count), waits_s / count, slowdowns / count)
        for name, (count, waits_s, slowdowns) in sorted(sums.items())
    }


def queue_results(outcome: Outcome) -> list[QueueResult]:
    """What became of the jobs of each queue, sorted by name, where runs could fail and make room."""
    places: dict[str, list[int]] = {}
    for number, job in enumerate(outcome.jobs):
        places.setdefault(job.queue, []).append(number)
    failed: Counter[str] = Counter()
    preempted: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for run in outcome.attempts:
        job = outcome.jobs[run.job]
        failed[job.queue] += run.how in _FAILED
        if run.how == PREEMPTED:
            preempted[job.queue] += 1
            lost[job.queue] += round((width(job) or job.cpus) * (run.end_s - run.start_s))
    made = []
    for queue, numbers in sorted(places.items()):
        waits = spread([outcome.wait_s[number] for number in numbers])
        completion_s = sum(outcome.completion_s[number] for number in numbers) / len(numbers)
        made.append(
            QueueResult(
                *(queue, len(numbers), waits.mean, waits.p95, completion_s),
                *(failed[queue], preempted[queue], float(lost[queue])),
            )
        )
    return made


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles (nearest rank) of at least one value."""
    ordered = sorted(values)
    count = len(ordered)

    def at(percent: int) -> float:
        return float(ordered[max(0, -(-count * percent // 100) - 1)])

    return Spread(sum(ordered) / count, at(50), at(95), at(99), float(ordered[-1]))


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: (sum of x)^2 / (n x sum of x^2); 1 of nothing.

    Source: Jain, Chiu and Hawe, A Quantitative Measure of Fairness (1984).
    """
    known = list(values)
    squares = sum(value * value for value in known)
    return sum(known) ** 2 / (len(known) * squares) if squares else 1.0
