"""Measures of a schedule, each declared once as a column: name, unit, formula, source and function.

JSON, CSV, the lines of `--details` and the tables of docs/reference/simulation.md come from these declarations. Names
and order of columns are stable: columns are only ever added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

from gpusched.addons.simulate.occupancy import OverTime, Series, Share, over_time
from gpusched.addons.simulate.outcome import (
    PARTS,
    QUEUE,
    USER,
    Group,
    Outcome,
    Spread,
    grouping,
    groups,
    jain,
    spread,
    width,
)
from gpusched.model.units import format_duration

PREEMPTED = "preempted"
_FAILED = frozenset({"failed", "out_of_memory", "timeout", "node_fail"})

WIDE_GPUS = 8
"""Jobs with at least this many GPUs are wide."""

_T = TypeVar("_T")

_SHOWN: Mapping[str, Callable[[float], str]] = {
    "s": format_duration,
    "GPU s": format_duration,
    "0 to 1": "{:.1%}".format,
    "jobs": "{:,}".format,
    "runs": "{:,}".format,
}
"""Formats by unit; other values are numbers with two decimals."""

Part = tuple[str, str, str]
"""One of several numbers in a column: name, line in `--details` (empty: none), unit."""


class Measure(cached_property[_T]):
    """One column of a `Schedule`; the name of the method is its name in JSON and CSV."""

    name: str

    def __init__(
        self,
        function: Callable[[Any], _T],
        section: str,
        unit: str,
        formula: str,
        line: str,
        source: str,
        parts: Sequence[Part],
        when: Callable[[Any], bool],
    ) -> None:
        super().__init__(function)
        self.section = section
        self.unit = unit
        self.formula = formula
        self.line = line
        self.source = source
        self.parts = parts
        self.when = when

    def __set_name__(self, owner: type[Any], name: str) -> None:
        super().__set_name__(owner, name)
        self.name = name

    @property
    def numbers(self) -> list[Part]:
        """Its single numbers: name in CSV, line in `--details` (empty: none), unit."""
        if not self.parts:
            return [(self.name, self.line, self.unit)]
        return [(f"{self.name}_{part}", line, unit) for part, line, unit in self.parts]


def measure(
    section: str,
    unit: str,
    formula: str,
    *,
    line: str = "",
    source: str = "",
    parts: Sequence[Part] = (),
    when: Callable[[Any], bool] = lambda schedule: True,
) -> Callable[[Callable[[Any], _T]], Measure[_T]]:
    """Declare a measure.

    Args:
        line: its name in `--details`. parts: for a measure with several numbers.
        when: whether its lines are informative for a schedule; they are printed if so for at least one.
    """
    return lambda function: Measure(function, section, unit, formula, line, source, parts, when)


def _five(line: str, unit: str) -> list[Part]:
    return [(part, f"{line}, {part}", unit) for part in PARTS]


JOBS, FRAGMENTS, BALANCE, FAIRNESS, PROMISES = (
    "One number for each job",
    "Fragments",
    "Balance over nodes",
    "Fairness",
    "Promises",
)
NOTES = {
    BALANCE: "In a cluster with GPUs, nodes without any do not count.",
    PROMISES: "Both have `jobs` (those with something to keep), `missed`, `part` (missed / jobs) and `by_s` (mean "
    "lateness of those that missed).",
}
"""Notes below the tables in the reference, by section."""

_FEITELSON = "Feitelson, Metrics for Parallel Job Scheduling and Their Convergence (JSSPP 2001)"


class Schedule:
    """One policy's schedule of a trace. Columns are computed on demand.

    Args:
        size: GPUs of the cluster, or processors if no job asks for GPUs (`outcome.size_of`).
        wait_bound_s: threshold of `late`.
        series: filled with values over time, for plots.
        by: grouping of shares, `user` or `queue`; None: see `outcome.grouping`.
    """

    def __init__(
        self,
        policy: str,
        outcome: Outcome,
        size: float,
        wait_bound_s: int | None = None,
        series: Series | None = None,
        by: str | None = None,
    ) -> None:
        self.policy = policy
        self.starts_sha = outcome.starts_sha
        self.what, _ = grouping(outcome.jobs, by)
        """What shares are grouped by: `user` or `queue`."""
        self._outcome = outcome
        self._size = size
        self._wait_bound_s = wait_bound_s
        self._over_time: OverTime | None = None if outcome.runs is None else over_time(outcome, series, by)
        """None for a schedule that does not know where its jobs ran."""

    @cached_property
    def users(self) -> Mapping[str, Group]:
        return groups(self._outcome, USER)

    @cached_property
    def queues(self) -> Mapping[str, Group]:
        return groups(self._outcome, QUEUE)

    @property
    def groups(self) -> Mapping[str, Group]:
        """Users or queues, by the grouping of shares."""
        return self.users if self.what == "user" else self.queues

    # --- per job ----------------------------------------------------------------------------------

    @measure(JOBS, "jobs", "jobs simulated; those left out are in `dropped`", line="jobs")
    def jobs(self) -> int:
        return len(self._outcome.jobs)

    @measure(JOBS, "s", "queueing delay: *b - s*; five numbers", parts=_five("wait", "s"), source=_FEITELSON)
    def wait_s(self) -> Spread:
        return spread(self._outcome.wait_s)

    @measure(
        JOBS,
        "s",
        "job completion time (JCT), also called response or turnaround time: *e - s*; five numbers",
        parts=_five("completion", "s"),
        source="the same",
    )
    def completion_s(self) -> Spread:
        return spread(self._outcome.completion_s)

    @measure(
        JOBS,
        "",
        "bounded slowdown: max(1, (*e - s*) / max(*p*, 10 s)); five numbers",
        parts=_five("slowdown", ""),
        source="the same",
    )
    def slowdown(self) -> Spread:
        return spread(self._outcome.slowdown)

    @measure(JOBS, "s", "last *e* less first *s*", line="makespan")
    def makespan_s(self) -> int:
        return max(self._outcome.end_s) - min(job.submit_s for job in self._outcome.jobs)

    @measure(JOBS, "1/h", "throughput: `jobs` / makespan", line="jobs per hour")
    def jobs_per_hour(self) -> float:
        return self.jobs * 3600 / self.makespan_s

    @measure(JOBS, "0 to 1", "sum of *g* x time it held them / (*C* x makespan)", line="utilisation")
    def utilisation(self) -> float:
        outcome = self._outcome
        if outcome.attempts:
            work = sum(width(outcome.jobs[one.job]) * (one.end_s - one.start_s) for one in outcome.attempts)
        else:
            work = sum(width(job) * job.run_s for job in outcome.jobs)
        return work / (self._size * self.makespan_s)

    @measure(
        JOBS,
        "s",
        f"mean wait of jobs with {WIDE_GPUS} GPUs or more; null if there are none",
        line=f"wait of {WIDE_GPUS} GPUs and more, mean",
    )
    def wide_wait_s(self) -> float | None:
        jobs, waits_s = self._outcome.jobs, self._outcome.wait_s
        wide = [wait_s for job, wait_s in zip(jobs, waits_s, strict=True) if job.gpus >= WIDE_GPUS]
        return sum(wide) / len(wide) if wide else None

    # --- fairness between groups, preemption --------------------------------------------------------

    @measure(
        FAIRNESS,
        "1/n to 1",
        "Jain's index (sum *x*)^2 / (n x sum *x*^2) of the users' mean slowdowns; 1 if all are equal",
        line="fairness of users' slowdowns",
        source="Jain, Chiu and Hawe, A Quantitative Measure of Fairness (1984)",
        when=lambda schedule: len(schedule.users) > 1,
    )
    def user_fairness(self) -> float:
        return jain(group.slowdown for group in self.users.values())

    @measure(
        FAIRNESS,
        "1/n to 1",
        "the same for queues",
        line="fairness of queues' slowdowns",
        source="the same",
        when=lambda schedule: len(schedule.queues) > 1,
    )
    def queue_fairness(self) -> float:
        return jain(group.slowdown for group in self.queues.values())

    @measure(
        JOBS, "runs", "runs ended to make room", line="runs preempted", when=lambda schedule: bool(schedule.preemptions)
    )
    def preemptions(self) -> int:
        return sum(one.how == PREEMPTED for one in self._outcome.attempts)

    @measure(
        JOBS,
        "GPU s",
        "sum of *g* x length of those runs",
        line="GPU time of those",
        when=lambda schedule: bool(schedule.preemptions),
    )
    def preempted_gpu_s(self) -> float:
        outcome = self._outcome
        preempted = (one for one in outcome.attempts if one.how == PREEMPTED)
        return sum(width(outcome.jobs[one.job]) * (one.end_s - one.start_s) for one in preempted)

    # --- over time ----------------------------------------------------------------------------------

    @measure(
        FRAGMENTS,
        "0 to 1",
        "over time, while a job waits for room: idle room that no pending job could use / idle room. A GPU is usable "
        "if a pending job could be placed on what is idle now such that it has (a part of) that GPU. Usable idle room "
        "is what the policy keeps free on purpose",
        line="idle, unusable for pending jobs",
    )
    def fragmentation(self) -> float | None:
        return None if self._over_time is None else self._over_time.fragmentation

    @measure(
        FRAGMENTS,
        "0 to 1",
        "over time: GPUs that the usual jobs could not use / idle GPUs. The usual jobs are the mix of the trace; null "
        "if no job asks for GPUs",
        line="idle, unusable for usual jobs",
        source="Weng et al., Beware of Fragmentation (ATC 2023), section 3.2",
    )
    def fgd_fragmentation(self) -> float | None:
        return None if self._over_time is None else self._over_time.fgd_fragmentation

    @measure(
        BALANCE,
        "0 to 1",
        "standard deviation over the nodes of the fraction of their room that was used over the whole time",
        line="nodes, spread of their use",
        when=lambda schedule: bool(schedule.node_spread_now),
    )
    def node_spread(self) -> float | None:
        return None if self._over_time is None else self._over_time.node_spread

    @measure(
        BALANCE,
        "0 to 1",
        "the same deviation at each instant, averaged over time",
        line="nodes, spread at each instant",
        when=lambda schedule: bool(schedule.node_spread_now),
    )
    def node_spread_now(self) -> float | None:
        return None if self._over_time is None else self._over_time.node_spread_now

    @measure(
        FAIRNESS,
        "",
        "per job rho = (*e - s*) / time on a fair share to itself; five numbers. With *n* the mean number of jobs "
        "pending or running between *s* and *e*, its share is *C/n*, and a wider job takes proportionally longer "
        "there: *p* x max(1, *g* x *n* / *C*). At most 1 is fair",
        parts=_five("against a fair share", ""),
        source="Mahajan et al., Themis: Fair and Efficient GPU Cluster Scheduling (NSDI 2020), section 3",
    )
    def finish_time_fairness(self) -> Spread | None:
        return None if self._over_time is None else spread(self._over_time.rhos)

    @measure(FAIRNESS, "0 to 1", "fraction of the jobs with rho above 1", line="jobs slower than that")
    def unfair(self) -> float | None:
        if self._over_time is None:
            return None
        rhos = self._over_time.rhos
        return sum(rho > 1 for rho in rhos) / len(rhos)

    @measure(
        FAIRNESS,
        "1/n to 1",
        "Jain's index of the mean dominant shares: of each user the largest of its fractions of all GPUs, cores and "
        "memory, in `users` as `dominant_share`: its `mean` while the user has jobs pending or running, and `most`. Of "
        "each queue if the trace names only one user, or with `--by queue`",
        line="fairness of dominant shares",
        source="Ghodsi et al., Dominant Resource Fairness (NSDI 2011)",
        when=lambda schedule: len(schedule.users) > 1 or len(schedule.queues) > 1,
    )
    def dominant_fairness(self) -> float | None:
        return None if self._over_time is None else jain(share.mean for share in self.dominant_share.values())

    @cached_property
    def dominant_share(self) -> Mapping[str, Share]:
        """Per user (or queue, see `what`); empty for a schedule without places."""
        return {} if self._over_time is None else self._over_time.dominant_share

    # --- waits and deadlines -----------------------------------------------------------------------

    @measure(
        PROMISES,
        "",
        "jobs that waited longer than `--wait-bound` (`bound_s`); null without it",
        parts=[
            ("jobs", "", "jobs"),
            ("missed", "waited beyond the bound", "jobs"),
            ("by_s", "beyond it by, mean", "s"),
            ("part", "part of all jobs", "0 to 1"),
            ("bound_s", "", "s"),
        ],
    )
    def late(self) -> Mapping[str, float] | None:
        bound_s = self._wait_bound_s
        if bound_s is None:
            return None
        return {**_missed([wait_s - bound_s for wait_s in self._outcome.wait_s]), "bound_s": bound_s}

    @measure(
        PROMISES,
        "",
        "jobs that ended after their deadline, of those that have one (column `deadline_s` of a table, `gsub "
        "--deadline` in your own history, without those that never ran because of it); null if none has",
        parts=[
            ("jobs", "jobs with a deadline", "jobs"),
            ("missed", "missed", "jobs"),
            ("by_s", "late by, mean", "s"),
            ("part", "part of those", "0 to 1"),
        ],
    )
    def overdue(self) -> Mapping[str, float] | None:
        jobs, ends_s = self._outcome.jobs, self._outcome.end_s
        by_s = [end_s - job.deadline_s for job, end_s in zip(jobs, ends_s, strict=True) if job.deadline_s is not None]
        return _missed(by_s) if by_s else None

    # --- output formats -----------------------------------------------------------------------------

    def finish(self) -> Schedule:
        """Compute all columns and free the jobs and runs."""
        _ = [getattr(self, one.name) for one in MEASURES], self.users, self.queues, self.dominant_share
        del self._outcome, self._over_time
        return self

    def document(self) -> dict[str, Any]:
        """All measures for JSON. Unknown values are null."""
        made: dict[str, Any] = {"policy": self.policy}
        for one in MEASURES:
            value = getattr(self, one.name)
            made[one.name] = asdict(value) if isinstance(value, Spread) else value
        for what, listed in (("user", self.users), ("queue", self.queues)):
            shares = self.dominant_share if what == self.what else {}
            made[f"{what}s"] = [
                {"name": name, **asdict(group), "dominant_share": asdict(shares[name]) if name in shares else None}
                for name, group in listed.items()
            ]
        return {**made, "starts_sha": self.starts_sha}

    def row(self) -> dict[str, Any]:
        """One row of CSV: the document without users and queues; names of parts are joined by `_`."""
        found = self.document()
        made: dict[str, Any] = {"policy": self.policy}
        for one in MEASURES:
            value = found[one.name]
            if one.parts:
                made |= {f"{one.name}_{part}": None if value is None else value[part] for part, _, _ in one.parts}
            else:
                made[one.name] = value
        return {**made, "starts_sha": self.starts_sha}


MEASURES: tuple[Measure[Any], ...] = tuple(one for one in vars(Schedule).values() if isinstance(one, Measure))
"""In the order of JSON and CSV."""


def by_section() -> Iterable[tuple[str, list[Measure[Any]]]]:
    """Columns of each section of the reference."""
    for section in (JOBS, FRAGMENTS, BALANCE, FAIRNESS, PROMISES):
        yield section, [one for one in MEASURES if one.section == section]


def detail_lines(schedules: Sequence[Schedule]) -> list[list[str]]:
    """Lines of `--details`: the name of a measure and a cell per policy, without uninformative lines."""
    rows = [schedule.row() for schedule in schedules]
    made = []
    for _, measures in by_section():
        for one in measures:
            if not any(map(one.when, schedules)):
                continue
            for name, line, unit in one.numbers:
                values = [row[name] for row in rows]
                if line and any(value is not None for value in values):
                    shown = _SHOWN.get(unit, "{:,.2f}".format)
                    made.append([line, *("-" if value is None else shown(value) for value in values)])
    return made


def _missed(by_s: Sequence[int]) -> dict[str, float]:
    over = [one for one in by_s if one > 0]
    mean_s = sum(over) / len(over) if over else 0.0
    return {"jobs": len(by_s), "missed": len(over), "by_s": mean_s, "part": len(over) / len(by_s)}


# --- by queue ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueResult:
    """The jobs of one queue under one policy, if runs can fail and be preempted."""

    queue: str
    jobs: int
    wait_s: float
    """Mean, to the first start."""
    wait_p95_s: float
    completion_s: float
    """Mean, from submission to the end of the last run."""
    failed: int
    """Runs that failed or reached their time limit."""
    preempted: int
    """Runs ended to make room."""
    lost_gpu_s: float
    """GPU seconds (core seconds for jobs without GPUs) of those runs, which were repeated."""


def queue_results(outcome: Outcome) -> list[QueueResult]:
    """The result of each queue, sorted by name."""
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
        counts = failed[queue], preempted[queue], float(lost[queue])
        made.append(QueueResult(queue, len(numbers), waits.mean, waits.p95, completion_s, *counts))
    return made
