"""`python -m benchmarks.orders [TRACE...]`: what each preset makes of many traces, and whether it is fair to users.

Every trace (of the folder that GPUSCHED_TRACES names, or those given) is cut into cases, see `benchmarks.cases`.
Each case is replayed several times under the presets, or the policies named, and under two references:

    easy     first come, first served with EASY backfill, told every run time exactly, as in no lab
    greedy   first come, first served, whatever fits starts, and wide jobs starve

Figures are averaged over the replays before ratios are taken: mean completion over the better of both references, the
mean wait of jobs with 8 GPUs or more and the longest wait over those of easy. A ratio to less than ten minutes is left
out. Fairness is Jain's index of the users' mean slowdowns, in cases with several users or queues. Then come the cases
of `benchmarks.fairness`. --generated has cases drawn from stated distributions in place of traces and fairness cases,
see `benchmarks.generated`. Exit status 0 when the first policy meets all goals.

With --cache a run that was measured once is not repeated: references never, policies until the code that decides has
changed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from math import exp, log
from pathlib import Path
from statistics import mean

import msgspec

import gpusched
from benchmarks.cases import EXAMPLES, Case, cases_of, cut, disturbed, half, without_estimate
from benchmarks.fairness import GoalResult, judge, simulated
from benchmarks.generated import generated
from gpusched.addons.simulate.cluster import largest, nodes_of
from gpusched.addons.simulate.measures import Schedule
from gpusched.addons.simulate.outcome import size_of
from gpusched.addons.simulate.policies import Policy, policies_of
from gpusched.addons.simulate.trace import TraceJob, read_trace
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.presets import PRESETS

EASY, GREEDY = REFERENCES = ("fcfs+easy", "fcfs+greedy")
LEAST_BASE_S = 600.0
"""A ratio to less than this says nothing, unless the case has its own grain."""

GOALS: Mapping[str, tuple[float, float]] = {"completion": (1.45, 0.88), "wide": (1.60, 1.10), "longest": (2.60, 1.40)}
"""Of the default over four replays: the ratio of the worst case at most, and the geometric mean of all."""

HALVES = {1: "tuning half", 2: "held-out half"}

_DECIDING = ("lifecycle", "model", "predict", "scheduler", "simulate")
"""Packages that a schedule depends on."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a schedule is worth, in seconds; the mean over replays where there were several."""

    completion: float
    wide: float | None
    """None where no job is wide."""
    longest: float
    fairness: float | None
    """Jain's index of mean slowdowns; None with one user."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """One case under one policy, over the references; None where the base is too small."""

    case: str
    policy: str
    completion: float | None
    wide: float | None
    longest: float | None
    fairness: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One ratio of a policy over all cases that have it."""

    what: str
    worst: float
    worst_case: str
    typical: float
    """Geometric mean."""
    cases: int

    @property
    def holds(self) -> bool:
        """Whether it meets the goals of the default."""
        worst, typical = GOALS[self.what]
        return self.worst <= worst and self.typical <= typical

    def __str__(self) -> str:
        worst, typical = GOALS[self.what]
        return (
            f"{self.what}: worst {self.worst:.2f} ({self.worst_case}), geometric mean {self.typical:.2f} of "
            f"{self.cases} cases; goal: {worst:.2f} and {typical:.2f}: {'holds' if self.holds else 'MISSED'}"
        )


# --- one replay -----------------------------------------------------------------------------------


def figures_of(jobs: Sequence[TraceJob], case: Case, policy: Policy) -> Figures:
    """What one schedule is worth."""
    outcome = simulated(jobs, case.nodes, policy)
    made = Schedule(policy.name, outcome, size_of(case.nodes, jobs))
    by = "user" if len({job.user for job in jobs}) > 1 else "queue"
    is_alone = len({getattr(job, by) for job in jobs}) < 2
    fairness = made.user_fairness if by == "user" else made.queue_fairness
    return Figures(made.completion_s.mean, made.wide_wait_s, made.wait_s.most, None if is_alone else fairness)


@cache
def _code() -> str:
    """A digest of all code that a schedule depends on."""
    root = Path(gpusched.__file__).parent
    found = sha256()
    for package in _DECIDING:
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


class Cache:
    """Figures in a folder, one file each; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def figures(self, jobs: Sequence[TraceJob], mark: str, case: Case, policy: Policy) -> Figures:
        """What a schedule is worth, measured where that is not known. Args: mark: the digest of the jobs."""
        if self._folder is None:
            return figures_of(jobs, case, policy)
        rules: tuple[object, ...] = policy.settings, policy.predict, policy.orders_by_run_time, _code()
        if policy.name in REFERENCES:
            rules = (policy.name,)  # tests see to it that they stay what they are
        shape = [(node.name, node.cpus, len(node.gpus)) for node in case.nodes]
        made_of = repr((mark, shape, rules))
        path = self._folder / f"{sha256(made_of.encode()).hexdigest()[:32]}.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Figures)
        found = figures_of(jobs, case, policy)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(found))
        part.replace(path)
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be replayed."""

    cases: Sequence[Case]
    policies: Sequence[Policy]
    """The references first."""
    replays: int
    cache: Cache

    def replay(self, task: tuple[int, int]) -> list[Figures]:
        """One replay of a case under each policy. Args: task: places of the case and of the replay."""
        case, number = self.cases[task[0]], task[1]
        jobs: Sequence[TraceJob] = case.jobs
        if number:
            jobs = disturbed(case.jobs, f"{case.name} {number}", case.grain_s / 2)
        exact = list(map(without_estimate, jobs))
        digests = digest(jobs), digest(exact)
        return [
            self.cache.figures(exact if is_exact else jobs, digests[is_exact], case, policy)
            for policy in self.policies
            for is_exact in [policy.name in REFERENCES]
        ]


def digest(jobs: Sequence[TraceJob]) -> str:
    """Equal for jobs that make equal schedules."""
    known = [(*job.mark, job.submit_s, job.run_s, job.estimate_s, job.name) for job in jobs]
    return sha256(msgspec.msgpack.encode(known)).hexdigest()


def averaged(replays: Sequence[Figures]) -> Figures:
    """The mean of each figure; of those that not every replay has, over those that do."""

    def over(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return mean(known) if known else None

    return Figures(
        mean(one.completion for one in replays),
        over(one.wide for one in replays),
        mean(one.longest for one in replays),
        over(one.fairness for one in replays),
    )


# --- all cases ------------------------------------------------------------------------------------

_plan: Plan
"""Of this process and those that it forks, so that no case is copied to them."""


def _replay(task: tuple[int, int]) -> list[Figures]:
    return _plan.replay(task)


def measure(plan: Plan, parallel: int = 1) -> Iterator[tuple[Case, dict[str, Figures]]]:
    """Each case with what every policy makes of it, as they get ready, in their order."""
    tasks = [(place, number) for place in range(len(plan.cases)) for number in range(plan.replays)]
    names = [policy.name for policy in plan.policies]

    def collected(results: Iterable[list[Figures]]) -> Iterator[tuple[Case, dict[str, Figures]]]:
        rows: list[list[Figures]] = []
        for (place, number), row in zip(tasks, results, strict=True):
            rows.append(row)
            if number == plan.replays - 1:
                means = [averaged(replays) for replays in zip(*rows, strict=True)]
                yield plan.cases[place], dict(zip(names, means, strict=True))
                rows = []

    if parallel == 1:
        yield from collected(map(plan.replay, tasks))
        return
    global _plan
    _plan = plan
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("fork")) as pool:
        yield from collected(pool.map(_replay, tasks))


def ratios(case: str, policy: str, found: Mapping[str, Figures], least_s: float = LEAST_BASE_S) -> Ratios:
    """A policy over the references. Args: least_s: a ratio to less says nothing."""
    own, easy, greedy = found[policy], found[EASY], found[GREEDY]

    def over(value: float | None, base: float | None) -> float | None:
        return value / base if value is not None and base is not None and base >= least_s else None

    return Ratios(
        case,
        policy,
        over(own.completion, min(easy.completion, greedy.completion)),
        over(own.wide, easy.wide),
        over(own.longest, easy.longest),
        own.fairness,
    )


def summaries(found: Sequence[Ratios]) -> list[Summary]:
    """The worst case and the geometric mean of each ratio that any case has."""
    made = []
    for what in GOALS:
        known = [(value, one.case) for one in found if (value := getattr(one, what)) is not None]
        if known:
            typical = exp(mean(log(max(value, 1e-3)) for value, _ in known))
            made.append(Summary(what, *max(known), typical, len(known)))
    return made


def gather(paths: Sequence[Path], nodes: str | None) -> list[Case]:
    """The cases of these traces, or of the usual folder; on these nodes a trace is one case, with the limits it has."""
    if nodes is not None:
        machines = nodes_of(nodes)
        gpus, procs = largest(machines)
        found = []
        for path in paths:
            trace = read_trace(path)
            trace.keep_those_that_fit(gpus=gpus, procs=procs)
            found.append(Case(f"{path.name.partition('.')[0]} @{nodes}", tuple(trace.jobs), machines))
        return found
    if paths:
        return [case for path in paths for case in cut(read_trace(path))]
    named = os.environ.get("GPUSCHED_TRACES")
    return list(cases_of(Path(named) if named else EXAMPLES))


def table(found: Mapping[str, Sequence[Ratios]], judged: Mapping[str, Sequence[GoalResult]]) -> Iterator[str]:
    """Lines in Markdown: of each policy geometric means with the worst case behind, and what the fairness cases say."""
    cases = [verdict.case for verdict in next(iter(judged.values()), ())]
    titles = ["preset", *(f"{what}: typical, worst" for what in GOALS), "fairness: mean, lowest", *cases]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for name, rows in found.items():
        known = {one.what: f"{one.typical:.2f}, {one.worst:.2f}" for one in summaries(rows)}
        fairness = [one.fairness for one in rows if one.fairness is not None]
        jain = f"{mean(fairness):.2f}, {min(fairness):.2f}" if fairness else "-"
        shown = [one.shown for one in judged[name]]
        yield f"| `{name}` | {' | '.join([*(known.get(what, '-') for what in GOALS), jain, *shown])} |"


# --- the command ----------------------------------------------------------------------------------


def _asked(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.orders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="default: all of the folder GPUSCHED_TRACES")
    add("--nodes", help="8x8: each trace as it is on these machines, with its users' limits")
    add("--policy", default=",".join(PRESETS), help="presets and other policies of gpusched simulate, with commas")
    add("--config", type=Path, help="the settings of the policy `default`")
    add("--only", default="", metavar="WORD", help="cases with this in their names")
    add("--generated", action="store_true", help="cases drawn from distributions instead, see benchmarks.generated")
    add("--half", type=int, choices=(1, 2), help="cases of every other source: choose settings on 1, report 2")
    add("--jobs", type=int, metavar="N", help="no cases with more jobs")
    add("--replays", type=int, default=4, help="1: a quick look; goals are for 4, the default")
    add("--parallel", type=int, default=1, help="replays at once")
    add("--cache", type=Path, metavar="FOLDER", help="figures that are measured already")
    add("--table", action="store_true", help="a row for each policy at the end, as docs/howto/presets.md has it")
    add("--json", type=Path, metavar="FILE", help="all figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and say whether the first policy meets the goals."""
    asked = _asked(argv)
    if asked.replays < 1 or asked.parallel < 1:
        raise UsageError("--replays and --parallel are at least 1", "--replays 4 --parallel 2")
    policies = policies_of(asked.policy.split(","), asked.config)
    cases = generated() if asked.generated else gather(asked.traces, asked.nodes)
    if asked.half is not None:
        cases = half(cases, asked.half)
    cases = [case for case in cases if asked.only in case.name]
    if asked.jobs is not None:
        cases = [case for case in cases if len(case.jobs) <= asked.jobs]
    references = policies_of([name for name in REFERENCES if name not in asked.policy.split(",")], is_exact=True)
    plan = Plan(cases, [*references, *policies], asked.replays, Cache(asked.cache))
    by_policy: dict[str, list[Ratios]] = {policy.name: [] for policy in policies}
    figures: dict[str, dict[str, Figures]] = {}
    if cases:
        print(f"{'case':36} {'policy':14} completion   wide longest fairness   completion, wide, longest in ks")
    for case, found in measure(plan, asked.parallel):
        figures[case.name] = found
        for policy in policies:
            row = ratios(case.name, policy.name, found, case.grain_s)
            by_policy[policy.name].append(row)
            print(_line(row, found[policy.name]), flush=True)
    holds = True
    numbers = HALVES if asked.half is None else ()
    halves = {HALVES[number]: {case.name for case in half(cases, number)} for number in numbers}
    for place, policy in enumerate(policies):
        for summary in summaries(by_policy[policy.name]):
            print(f"{policy.name}: {summary}", flush=True)
            holds &= summary.holds or place > 0
        for name, names in halves.items():
            for summary in summaries([row for row in by_policy[policy.name] if row.case in names]):
                print(f"{policy.name}, {name}: {summary}", flush=True)
    verdicts: dict[str, list[GoalResult]] = {}
    for place, policy in enumerate(policies):
        is_judged = not asked.generated
        verdicts[policy.name] = list(judge(policy, 2 * asked.replays, only=asked.only)) if is_judged else []
        for one in verdicts[policy.name]:
            print(f"{policy.name}: {one.case}: {one.text}: {'holds' if one.holds else 'MISSED'}", flush=True)
            holds &= one.holds or place > 0
    if asked.table:
        print("\n".join(["", *table(by_policy, verdicts)]))
    if asked.json is not None:
        rows = [asdict(one) for found in by_policy.values() for one in found]
        judged = {name: [asdict(one) for one in found] for name, found in verdicts.items()}
        plain = {case: {name: asdict(one) for name, one in found.items()} for case, found in figures.items()}
        asked.json.write_text(json.dumps({"figures": plain, "ratios": rows, "fairness": judged}, indent=1) + "\n")
    return 0 if holds else 1


def _line(row: Ratios, own: Figures) -> str:
    cells = [
        f"{'-' if value is None else f'{value:.2f}':>{width}}"
        for value, width in ((row.completion, 10), (row.wide, 6), (row.longest, 7), (row.fairness, 8))
    ]
    plain = own.completion, own.wide, own.longest
    seconds = [f"{'-' if value is None else f'{value / 1e3:.1f}':>7}" for value in plain]
    return f"{row.case:36} {row.policy:14} {' '.join(cells)}   {' '.join(seconds)}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GpuschedError as error:
        sys.exit(f"{error}\n{error.hint}" if error.hint else str(error))
