"""Searches [priority] for the best settings for a goal: presets, random settings, then small steps from the best.

presets   each of them, on all jobs
drawn     uniform over the ranges, log-uniform for weights, since only few of many settings matter and a grid would
          repeat the others (Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012)
halved    all are tried on the first ninth of the jobs, the best third of them on the first third, the best third of
          those on all (successive halving: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and
          Hyperparameter Optimization, AISTATS 2016)
refined   one or two settings of the best are changed, in shrinking steps

The current settings are tried as well, so that the result is never worse than those on the jobs of the search. Other
jobs show whether it generalises, and several parts of them whether by more than chance (`comparison`).

A goal is one measure to minimise and others with a limit, `wait_p95 of small, slowdown_mean of wide <= 20`; a term is
`MEASURE [of GROUP] [<= LIMIT]`:

measures   wait, completion (times) and slowdown, each with _mean, _median, _p95, _p99 or _most; `wait_s_p95`, as in
           CSV, means the same
groups     all (default), small: at most one GPU, wide: 8 or more, width<=N, width>=N, user=NAME, queue=NAME; for jobs
           without GPUs their processors count
limits     a number for slowdowns; a time as 30m or 4h
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log
from random import Random
from typing import Any

from gpusched.addons.simulate import comparison
from gpusched.addons.simulate.measures import WIDE_GPUS
from gpusched.addons.simulate.outcome import Outcome, spread, width
from gpusched.addons.simulate.trace import TraceJob
from gpusched.errors import Refused, UsageError
from gpusched.model.planner_settings import AUTO, PrioritySettings
from gpusched.model.presets import FAIR, PRESETS, preset
from gpusched.model.settings import Settings
from gpusched.model.units import format_duration, parse_duration_s
from gpusched.model.value import fields, replace

GOAL_EXAMPLE = "--goal 'wait_p95 of small, slowdown_mean of wide <= 20'"

_PARTS = ("mean", "median", "p95", "p99", "most")
_TIMES = ("wait", "completion")
MEASURES: Mapping[str, tuple[str, str]] = {
    f"{what}_{part}": (what, part) for what in (*_TIMES, "slowdown") for part in _PARTS
}
"""By name: the column and its statistic."""

_TERM = re.compile(r"(?P<measure>\w+)(?:\s+of\s+(?P<group>width[<>]=\d+|\S+?))?(?:\s*<=\s*(?P<limit>[^\s=<>]+))?")
_GROUP = re.compile(r"(?P<what>width|user|queue)(?P<how><=|>=|=)(?P<value>\S+)")


@dataclass(frozen=True, slots=True)
class Term:
    """One measure of one group of jobs."""

    measure: str
    group: str = "all"
    limit: float | None = None
    """Seconds, or slowdowns; None for the minimised measure."""

    @property
    def title(self) -> str:
        """Measure and group, as written in the goal."""
        return self.measure if self.group == "all" else f"{self.measure} of {self.group}"

    def __str__(self) -> str:
        return self.title if self.limit is None else f"{self.title} <= {self.shown(self.limit)}"

    def shown(self, value: float) -> str:
        """Format a value of this measure."""
        if value == inf:
            return "-"
        return format_duration(value) if MEASURES[self.measure][0] in _TIMES else f"{value:.2f}"

    def has(self, job: TraceJob) -> bool:
        """Whether the job is in the group."""
        return _member(self.group)(job)

    def value(self, outcome: Outcome) -> float:
        """Value of the measure for a schedule: seconds, or slowdowns. Requires at least one job of the group."""
        what, part = MEASURES[self.measure]
        columns = {"wait": outcome.wait_s, "completion": outcome.completion_s, "slowdown": outcome.slowdown}
        is_one = _member(self.group)
        values = [value for job, value in zip(outcome.jobs, columns[what], strict=True) if is_one(job)]
        found: float = getattr(spread(values), part)
        return found


@dataclass(frozen=True, slots=True)
class Score:
    """How close a schedule comes to a goal."""

    value: float
    """Value of the minimised measure."""
    limited: tuple[float, ...]
    """Values of the measures with a limit, in the order of the goal."""
    excess: float
    """Total relative excess over the limits; 0 when all are met."""

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, smaller is better: excess over the limits first, then the minimised measure.

        Excess counts in thousandths of a limit, so that the measure decides between settings of about equal excess.
        """
        return round(self.excess, 3), self.value


@dataclass(frozen=True, slots=True)
class Objective:
    """One measure to minimise, others with limits."""

    target: Term
    limits: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.terms))

    @property
    def terms(self) -> tuple[Term, ...]:
        """All measures, the minimised one first."""
        return self.target, *self.limits

    def missing_in(self, jobs: Sequence[TraceJob]) -> str | None:
        """A group without a job here; None if every group has some."""
        for term in self.terms:
            is_one = _member(term.group)
            if not any(map(is_one, jobs)):
                return term.group
        return None

    def excess(self, outcome: Outcome) -> float:
        """Total relative excess over the limits; limits of groups without a job here count as met."""
        kept = [term for term in self.limits if any(map(_member(term.group), outcome.jobs))]
        return sum(max(0.0, term.value(outcome) / term.limit - 1.0) for term in kept if term.limit is not None)

    def score(self, outcome: Outcome) -> Score:
        """Score a schedule."""
        limited = tuple(term.value(outcome) for term in self.limits)
        return Score(self.target.value(outcome), limited, self.excess(outcome))


def objective_of(text: str) -> Objective:
    """Parse a goal. Raises: UsageError for an invalid part, with the valid forms."""
    terms = [_term(part.strip()) for part in text.split(",")]
    targets = [term for term in terms if term.limit is None]
    if len(targets) != 1:
        what = f"{len(targets)} measures without a limit" if targets else "no measure without a limit"
        raise UsageError(f"the goal {text!r} has {what}, and exactly one is minimised", GOAL_EXAMPLE)
    return Objective(targets[0], tuple(term for term in terms if term.limit is not None))


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a term of a goal: MEASURE [of GROUP] [<= LIMIT]", GOAL_EXAMPLE)
    measure = match["measure"].replace("_s_", "_", 1)
    if measure not in MEASURES:
        raise UsageError(f"{match['measure']!r} is not a measure of a goal: {', '.join(MEASURES)}", GOAL_EXAMPLE)
    group = match["group"] or "all"
    _member(group)
    return Term(measure, group, None if match["limit"] is None else _limit(measure, match["limit"]))


def _limit(measure: str, text: str) -> float:
    if MEASURES[measure][0] in _TIMES:
        try:
            return float(parse_duration_s(text))
        except ValueError as error:
            raise UsageError(str(error), f"--goal 'slowdown_mean, {measure} <= 4h'") from None
    try:
        found = float(text)
    except ValueError:
        found = inf
    if not isfinite(found) or found < 1:
        raise UsageError(f"the limit {text!r} of {measure} is not a number of at least 1", GOAL_EXAMPLE)
    return found


def _member(group: str) -> Callable[[TraceJob], bool]:
    """Membership test of a group. Raises: UsageError for an unknown group."""
    if group == "all":
        return lambda job: True
    if group == "small":
        return lambda job: width(job) <= 1
    if group == "wide":
        return lambda job: width(job) >= WIDE_GPUS
    match = _GROUP.fullmatch(group)
    if match is not None:
        what, how, value = match["what"], match["how"], match["value"]
        if what == "user" and how == "=":
            return lambda job: job.user == value
        if what == "queue" and how == "=":
            return lambda job: job.queue == value
        if what == "width" and how != "=" and value.isdecimal():
            count = int(value)
            return (lambda job: width(job) <= count) if how == "<=" else (lambda job: width(job) >= count)
    known = "all, small, wide, width<=N, width>=N, user=NAME, queue=NAME"
    raise UsageError(f"{group!r} is not a group of jobs: {known}", GOAL_EXAMPLE)


LEAST_JOBS = 20
"""Minimum number of jobs for a search or a report."""
MARGIN = 0.01
"""Minimum relative improvement."""

_ETA = 3
"""Each round has this many times as many jobs, and one in this many settings, as the previous one."""
_LEAST_FIRST = 200
"""Minimum number of jobs in a round, as with fewer hardly any job waits."""
_DAY_S = 86400.0

Run = Callable[[Settings, Sequence[TraceJob]], Outcome]
"""Computes the schedule of these jobs under these settings."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A number searched on a logarithmic scale."""

    name: str
    low: float
    high: float
    may_be_none: bool = False
    """Whether 0, which disables it, is also a value."""

    def draw(self, random: Random) -> float:
        """A random value."""
        if self.may_be_none and random.random() < 0.25:
            return 0.0
        return _rounded(exp(random.uniform(log(self.low), log(self.high))))

    def step(self, random: Random, value: Any, far: float) -> float:
        """A random value near this one; `far` is the mean step as a fraction of the range."""
        if not self.low <= value <= self.high or (self.may_be_none and random.random() < 0.1):
            return self.draw(random)
        moved = log(value) + random.gauss(0.0, far * log(self.high / self.low))
        return _rounded(exp(min(log(self.high), max(log(self.low), moved))))


@dataclass(frozen=True, slots=True)
class Pick:
    """One of a few values."""

    name: str
    values: tuple[Any, ...]

    def draw(self, random: Random) -> Any:
        """A random value."""
        return random.choice(self.values)

    def step(self, random: Random, value: Any, far: float) -> Any:
        """Another random value."""
        return random.choice([one for one in self.values if one != value])


Knob = Scale | Pick


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def knobs_of(jobs: Sequence[TraceJob], settings: Settings) -> tuple[Knob, ...]:
    """Settings of [priority] that can affect these jobs.

    Excludes greedy backfill, under which a wide job may wait forever.
    """
    made: list[Knob] = [Scale("weight_age", 10, 1e5, True), Scale("max_age_s", 3600, 400 * _DAY_S)]
    if len({job.user or job.queue for job in jobs}) > 1:
        made += [Scale("weight_fairshare", 10, 1e5, True), Scale("half_life_s", 3600, 60 * _DAY_S)]
    if len({width(job) for job in jobs}) > 1:
        made += [Scale("weight_size", 10, 1e5, True), Pick("favor_small", (False, True))]
    if len({job.estimate_s for job in jobs}) > 1:
        made.append(Scale("weight_short", 10, 1e5, True))
    if len({job.gpus for job in jobs}) > 1:
        made.append(Scale("weight_whole", 10, 1e5, True))
    if any(job.spec is not None or job.cpus or job.mem_mib for job in jobs):
        # If jobs request only GPUs or only processors, it equals the size factor.
        made.append(Scale("weight_fit", 10, 1e5, True))
    if len({queue.factor for queue in settings.queue.values()}) > 1:
        made.append(Scale("weight_queue", 10, 1e5, True))
    if len({qos.factor for qos in settings.qos.values()}) > 1:
        made.append(Scale("weight_qos", 10, 1e5, True))
    return (*made, *_OF_ALL_ORDERS)


_OF_ALL_ORDERS: tuple[Knob, ...] = (
    Pick("backfill_depth", (1, 2, 4, 8, 16)),
    Pick("backfill_order", ("line", "shortest")),
)
_OF_OTHER_ORDERS: tuple[Knob, ...] = (
    *_OF_ALL_ORDERS,
    Pick("backfill_by", ("limit", "prediction")),
    Scale("max_wait_s", 3600, 60 * _DAY_S),
)
"""Settings that matter in orders without weights."""
_OF_RESPONSE_RATIO: tuple[Knob, ...] = (
    Scale("fairshare_step", 1, 16),
    Scale("reserve_after_s", 600, 7 * _DAY_S, True),
    Scale("reserve_after_runs", 0.5, 100, True),
    Scale("fence_s", 3600, 14 * _DAY_S),
    *_OF_OTHER_ORDERS,
)


def split(jobs: Sequence[TraceJob], goal: Objective, hold_out: float) -> tuple[list[TraceJob], list[TraceJob]]:
    """Split the jobs into those for the search and later ones for the report.

    Args: hold_out: fraction of later jobs, 0 to 1.
    Raises: UsageError if either part is too small, or lacks a job of some group of the goal.
    """
    if not 0 < hold_out < 1:
        raise UsageError(f"--hold-out {hold_out:g} is not between 0 and 1", "--hold-out 0.3")
    ordered = sorted(jobs, key=lambda job: job.submit_s)
    held = round(len(ordered) * hold_out)
    parts = ordered[: len(ordered) - held], ordered[len(ordered) - held :]
    for part, use in zip(parts, ("to search on", "to report on"), strict=True):
        if len(part) < LEAST_JOBS:
            text = (
                f"of {len(ordered)} jobs --hold-out {hold_out:g} leaves {len(part)} {use}, and {LEAST_JOBS} are needed"
            )
            raise UsageError(text, "give a longer trace, or another --hold-out")
        missing = goal.missing_in(part)
        if missing is not None:
            text = f"none of the {len(part)} jobs {use} belongs to the group {missing!r} of the goal"
            raise UsageError(text, "name another group, or another --hold-out")
    return parts


@dataclass(slots=True)
class Search:
    """One search. Deterministic for a given `seed`.

    Args: run: computes schedules. tries: number of settings tried in addition to the current ones.
    """

    jobs: Sequence[TraceJob]
    goal: Objective
    settings: Settings
    """Current settings; only [priority] is varied."""
    run: Run
    tries: int
    seed: int = 0
    _random: Random = field(init=False)
    _knobs: tuple[Knob, ...] = field(init=False)
    _base: PrioritySettings = field(init=False)
    """Current [priority], under the name of one preset, as the result must not be `auto`, a nightly choice."""
    _presets: list[PrioritySettings] = field(init=False)
    _seen: set[PrioritySettings] = field(init=False)

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise UsageError(f"--tries {self.tries} is less than 1", "--tries 40")
        self._random = Random(self.seed)
        self._knobs = knobs_of(self.jobs, self.settings)
        today = self.settings.priority
        self._base = replace(today, preset=FAIR) if today.preset == AUTO else today
        self._presets = [one for one in map(preset, PRESETS) if one != self._base]
        self._seen = {self._base, *self._presets}

    @property
    def steps(self) -> int:
        """Number of tries that are small steps from the best."""
        return self.tries // 3

    def rounds(self) -> list[tuple[int, int]]:
        """Number of settings in each round, and the number of jobs they are tried on."""
        settings, sizes = self.tries - self.steps, [len(self.jobs)]
        while settings > 1 and len(sizes) < 3:
            count = sizes[0] // _ETA
            if count < _LEAST_FIRST or self.goal.missing_in(self.jobs[:count]):
                break
            sizes.insert(0, count)
        found = []
        for count in sizes:
            found.append((settings, count))
            settings = -(-settings // _ETA)
        return found

    def cost(self) -> int:
        """Total number of replayed jobs, including those under the current settings and the presets."""
        whole = 1 + len(self._presets) + self.steps
        return sum(settings * jobs for settings, jobs in self.rounds()) + whole * len(self.jobs)

    def find(self) -> tuple[PrioritySettings, Score]:
        """The best settings for these jobs, with their score.

        Raises: Refused if no settings meet the limits of the goal, with the closest.
        """
        best = self.settings.priority
        score = self._score(best, self.jobs)
        for one in self._presets:
            found = self._score(one, self.jobs)
            if found.rank < score.rank:
                best, score = one, found
        left = [*self._drawn()]
        for _, count in self.rounds():
            # Ties keep the order of the draw.
            scored = [(one, self._score(one, self.jobs[:count])) for one in left]
            scored.sort(key=lambda pair: pair[1].rank)
            left = [one for one, _ in scored[: -(-len(scored) // _ETA)]]
        if scored and scored[0][1].rank < score.rank:
            best, score = scored[0]
        for number in range(self.steps):
            near = self._near(best, 0.25 * (1 - number / self.steps) + 0.02)
            if near is None:
                break
            found = self._score(near, self.jobs)
            if found.rank < score.rank:
                best, score = near, found
        if score.excess > 0:
            raise self._unmet(best, score)
        return best, score

    def _score(self, priority: PrioritySettings, jobs: Sequence[TraceJob]) -> Score:
        return self.goal.score(self.run(replace(self.settings, priority=priority), jobs))

    def _drawn(self) -> Iterator[PrioritySettings]:
        def draw() -> PrioritySettings:
            # Weights have no effect in the other orders, nor does depth without backfill.
            drawn: dict[str, Any] = {one.name: one.draw(self._random) for one in self._knobs}
            return replace(self._base, **{"order": "multifactor", "backfill": True, **drawn})

        for _ in range(self.tries - self.steps):
            made = self._new(draw)
            if made is not None:
                yield made

    def _near(self, best: PrioritySettings, far: float) -> PrioritySettings | None:
        start = self._base if best.preset == AUTO else best
        of_order = {"multifactor": self._knobs, "response_ratio": _OF_RESPONSE_RATIO}
        knobs = of_order.get(best.order, _OF_OTHER_ORDERS)

        def step() -> PrioritySettings:
            chosen = self._random.sample(knobs, self._random.choice((1, 2)))
            changed: dict[str, Any] = {one.name: one.step(self._random, getattr(best, one.name), far) for one in chosen}
            return replace(start, **{"backfill": True, **changed})

        return self._new(step)

    def _new(self, make: Callable[[], PrioritySettings]) -> PrioritySettings | None:
        """New settings that were not tried yet; None if none is found."""
        for _ in range(100):
            made = make()
            if made not in self._seen:
                self._seen.add(made)
                return made
        return None

    def _unmet(self, best: PrioritySettings, score: Score) -> Refused:
        missed = " and ".join(
            f"{term} (it has {term.shown(value)})"
            for term, value in zip(self.goal.limits, score.limited, strict=True)
            if term.limit is not None and value > term.limit
        )
        changes = changes_of(best, self.settings.priority)
        near = ", ".join(f"{name} = {toml(value)}" for name, value in changes.items()) or "those of today"
        return Refused(
            f"none of {self.tries} settings tried, no preset and not the current settings meet the goal: the "
            f"nearest misses {missed}, with {near}",
            "allow more, or try more: --tries",
        )


def is_better(after: Score, before: Score) -> bool:
    """Whether settings serve a goal better than others, by at least the margin."""
    if after.rank[0] != before.rank[0]:
        return after.rank[0] < before.rank[0]
    return after.value < before.value * (1 - MARGIN)


def beyond_chance(goal: Objective, before: Outcome, after: Outcome) -> comparison.SignFlipResult:
    """Test whether `after` serves the goal better in enough parts of the trace; differing excess counts first.

    Args: before, after: schedules of the same jobs.
    """
    if goal.score(after).rank[0] != goal.score(before).rank[0]:
        return comparison.sign_flip_test(
            before, after, goal.excess, lambda job: any(term.has(job) for term in goal.limits)
        )
    return comparison.sign_flip_test(before, after, goal.target.value, goal.target.has)


def changes_of(priority: PrioritySettings, other: PrioritySettings) -> dict[str, Any]:
    """Settings that differ from the others, by name."""
    return {
        one.name: getattr(priority, one.name)
        for one in fields(priority)
        if getattr(priority, one.name) != getattr(other, one.name)
    }


def section_of(priority: PrioritySettings) -> str:
    """The section [priority] of a config file for these settings; complete, whatever the file said before."""
    changes = {"preset": priority.preset, **changes_of(priority, preset(priority.preset))}
    lines = [f"{name} = {toml(value)}\n" for name, value in changes.items()]
    return "".join(["[priority]\n", *lines])


def toml(value: bool | int | float | str) -> str:
    """Format a value for the config file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)
