"""Searches [priority] for what serves a goal best: presets, settings drawn at random, then small steps from the best.

presets   each of them, on all jobs
drawn     evenly over the ranges, weights by their logarithm, since few of many settings matter and a grid would try
          the others again and again (Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012)
halved    all are tried on the first ninth of the jobs, the best third of them on the first third, the best third of
          those on all (successive halving: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and
          Hyperparameter Optimization, AISTATS 2016)
refined   one or two settings of the best are changed, by less and less

What is in force today is tried as well, so that what is found is never worse than that on the jobs of the search.
Whether it is better on others only other jobs can say, and whether that is more than chance only several parts of them
(`comparison`).

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

from gpusched.errors import Refused, UsageError
from gpusched.model.presets import FAIR, PRESETS, preset
from gpusched.model.settings import AUTO, PrioritySettings, Settings
from gpusched.model.units import format_duration, parse_duration_s
from gpusched.model.value import fields, replace
from gpusched.simulate import comparison
from gpusched.simulate.measures import WIDE_GPUS
from gpusched.simulate.outcome import Outcome, spread, width
from gpusched.simulate.trace import TraceJob

GOAL_EXAMPLE = "--goal 'wait_p95 of small, slowdown_mean of wide <= 20'"

_PARTS = ("mean", "median", "p95", "p99", "most")
_TIMES = ("wait", "completion")
MEASURES: Mapping[str, tuple[str, str]] = {
    f"{what}_{part}": (what, part) for what in (*_TIMES, "slowdown") for part in _PARTS
}
"""Name of each measure, of what it is and which number of that."""

_TERM = re.compile(r"(?P<measure>\w+)(?:\s+of\s+(?P<group>width[<>]=\d+|\S+?))?(?:\s*<=\s*(?P<limit>[^\s=<>]+))?")
_GROUP = re.compile(r"(?P<what>width|user|queue)(?P<how><=|>=|=)(?P<value>\S+)")


@dataclass(frozen=True, slots=True)
class Term:
    """One measure of one group of jobs."""

    measure: str
    group: str = "all"
    limit: float | None = None
    """Seconds, or slowdowns; None of the one that is made small."""

    @property
    def title(self) -> str:
        """Measure and group, in the words of the goal."""
        return self.measure if self.group == "all" else f"{self.measure} of {self.group}"

    def __str__(self) -> str:
        return self.title if self.limit is None else f"{self.title} <= {self.shown(self.limit)}"

    def shown(self, value: float) -> str:
        """A value of this measure, to be read."""
        if value == inf:
            return "-"
        return format_duration(value) if MEASURES[self.measure][0] in _TIMES else f"{value:.2f}"

    def has(self, job: TraceJob) -> bool:
        """Whether the job is one of the group."""
        return _member(self.group)(job)

    def value(self, outcome: Outcome) -> float:
        """What the schedule is worth by it: seconds, or slowdowns. At least one of its jobs must be of the group."""
        what, part = MEASURES[self.measure]
        columns = {"wait": outcome.wait_s, "completion": outcome.completion_s, "slowdown": outcome.slowdown}
        is_one = _member(self.group)
        values = [value for job, value in zip(outcome.jobs, columns[what], strict=True) if is_one(job)]
        found: float = getattr(spread(values), part)
        return found


@dataclass(frozen=True, slots=True)
class Score:
    """How near a schedule comes to a goal."""

    value: float
    """Of the measure that is made small."""
    limited: tuple[float, ...]
    """Of those with a limit, in the order of the goal."""
    excess: float
    """By what part limits are exceeded, all together; 0 when all are kept."""

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better: first limits are kept, or nearly, and then the measure counts.

        A thousandth of a limit is no difference: between two that exceed it alike the measure decides.
        """
        return round(self.excess, 3), self.value


@dataclass(frozen=True, slots=True)
class Objective:
    """One measure to be made small, others within limits."""

    target: Term
    limits: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.terms))

    @property
    def terms(self) -> tuple[Term, ...]:
        """All measures that it speaks of, that which is made small first."""
        return self.target, *self.limits

    def missing_in(self, jobs: Sequence[TraceJob]) -> str | None:
        """A group of which there is no job here; None when there are some of each."""
        for term in self.terms:
            is_one = _member(term.group)
            if not any(map(is_one, jobs)):
                return term.group
        return None

    def excess(self, outcome: Outcome) -> float:
        """By what part limits are exceeded, all together; those of groups without a job here are kept."""
        kept = [term for term in self.limits if any(map(_member(term.group), outcome.jobs))]
        return sum(max(0.0, term.value(outcome) / term.limit - 1.0) for term in kept if term.limit is not None)

    def score(self, outcome: Outcome) -> Score:
        """What a schedule is worth by it."""
        limited = tuple(term.value(outcome) for term in self.limits)
        return Score(self.target.value(outcome), limited, self.excess(outcome))


def objective_of(text: str) -> Objective:
    """The goal that a text states. Raises: UsageError for what cannot be read, naming what can."""
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
    """Whether a job is of this group. Raises: UsageError for a group that is not known."""
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
"""Of fewer jobs nothing can be learned, and nothing be said."""
MARGIN = 0.01
"""What is better by less than this part is not better."""

_ETA = 3
"""So many times as many jobs, and one of so many settings, in the next round."""
_LEAST_FIRST = 200
"""No round has fewer jobs: on so few hardly anybody waits."""
_DAY_S = 86400.0

Run = Callable[[Settings, Sequence[TraceJob]], Outcome]
"""The schedule of these jobs under these settings."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A number whose size matters, not its last digit."""

    name: str
    low: float
    high: float
    may_be_none: bool = False
    """0, which leaves it out, is a value too."""

    def draw(self, random: Random) -> float:
        """Any value."""
        if self.may_be_none and random.random() < 0.25:
            return 0.0
        return _rounded(exp(random.uniform(log(self.low), log(self.high))))

    def step(self, random: Random, value: Any, far: float) -> float:
        """A value near this one; `far` is the part of the range that a step has on average."""
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
        """Any value."""
        return random.choice(self.values)

    def step(self, random: Random, value: Any, far: float) -> Any:
        """Another value."""
        return random.choice([one for one in self.values if one != value])


Knob = Scale | Pick


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def knobs_of(jobs: Sequence[TraceJob], settings: Settings) -> tuple[Knob, ...]:
    """The settings of [priority] that can make a difference to these jobs.

    Greedy backfill is not among them: under it a wide job may wait for ever.
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
        # Where jobs ask for GPUs or processors alone it says the same as the size.
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
"""What matters where weights do not."""
_OF_RESPONSE_RATIO: tuple[Knob, ...] = (
    Scale("fairshare_step", 1, 16),
    Scale("reserve_after_s", 600, 7 * _DAY_S, True),
    Scale("reserve_after_runs", 0.5, 100, True),
    Scale("fence_s", 3600, 14 * _DAY_S),
    *_OF_OTHER_ORDERS,
)


def split(jobs: Sequence[TraceJob], goal: Objective, hold_out: float) -> tuple[list[TraceJob], list[TraceJob]]:
    """The jobs to search on, and those that were submitted later, to report on.

    Args: hold_out: which part of all jobs the later ones are, 0 to 1.
    Raises: UsageError when either are too few, or a group of the goal has no job among them.
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
            text = f"none of the {len(part)} jobs {use} is of the group {missing!r} of the goal"
            raise UsageError(text, "name another group, or another --hold-out")
    return parts


@dataclass(slots=True)
class Search:
    """One search. The same `seed` finds the same settings.

    Args: run: what makes a schedule of jobs. tries: how many settings are tried beside those of today.
    """

    jobs: Sequence[TraceJob]
    goal: Objective
    settings: Settings
    """Today's; all but [priority] stays."""
    run: Run
    tries: int
    seed: int = 0
    _random: Random = field(init=False)
    _knobs: tuple[Knob, ...] = field(init=False)
    _base: PrioritySettings = field(init=False)
    """Today's, under the name of one preset: nothing that is found can be a choice that is made every night."""
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
        """So many of the tries are small steps from the best."""
        return self.tries // 3

    def rounds(self) -> list[tuple[int, int]]:
        """How many settings are drawn, or left, in each round, and on how many jobs they are tried."""
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
        """How many jobs are replayed in all, under today's settings and the presets too."""
        whole = 1 + len(self._presets) + self.steps
        return sum(settings * jobs for settings, jobs in self.rounds()) + whole * len(self.jobs)

    def find(self) -> tuple[PrioritySettings, Score]:
        """The best settings for these jobs, and what they are worth there.

        Raises: Refused when none of all keeps the limits of the goal, with the nearest.
        """
        best = self.settings.priority
        score = self._score(best, self.jobs)
        for one in self._presets:
            found = self._score(one, self.jobs)
            if found.rank < score.rank:
                best, score = one, found
        left = [*self._drawn()]
        for _, count in self.rounds():
            # Equal ones stay in the order in which they were drawn.
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
            # In the other orders of the whole weights do nothing, nor does depth where nobody passes.
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
        """One that was not tried yet; None when none is found."""
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
    """Whether settings serve a goal better than others did, and not by a hair."""
    if after.rank[0] != before.rank[0]:
        return after.rank[0] < before.rank[0]
    return after.value < before.value * (1 - MARGIN)


def beyond_chance(goal: Objective, before: Outcome, after: Outcome) -> comparison.SignFlipResult:
    """Whether `after` serves the goal better in enough parts of the trace; limits first, where they are not kept alike.

    Args: before, after: schedules of the same jobs.
    """
    if goal.score(after).rank[0] != goal.score(before).rank[0]:
        return comparison.sign_flip_test(
            before, after, goal.excess, lambda job: any(term.has(job) for term in goal.limits)
        )
    return comparison.sign_flip_test(before, after, goal.target.value, goal.target.has)


def changes_of(priority: PrioritySettings, other: PrioritySettings) -> dict[str, Any]:
    """What these settings have that the others have not, by name."""
    return {
        one.name: getattr(priority, one.name)
        for one in fields(priority)
        if getattr(priority, one.name) != getattr(other, one.name)
    }


def section_of(priority: PrioritySettings) -> str:
    """The section [priority] of a config file that makes these settings, whatever it said before."""
    changes = {"preset": priority.preset, **changes_of(priority, preset(priority.preset))}
    lines = [f"{name} = {toml(value)}\n" for name, value in changes.items()]
    return "".join(["[priority]\n", *lines])


def toml(value: bool | int | float | str) -> str:
    """A value as the config file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)
