"""What settings are to be good for: one measure that is made small, and others that are kept below a limit.

    wait_p95 of small, slowdown_mean of wide <= 20

A term is `MEASURE [of GROUP] [<= LIMIT]`. The one without a limit is the goal.

measures   wait, completion (times) and slowdown, each with _mean, _median, _p95, _p99 or _most, as `metrics` has them;
           `wait_s_p95`, as CSV has it, means the same
groups     all (as without), small: at most one GPU, wide: 8 or more, width<=N, width>=N, user=NAME, queue=NAME. Where
           a job has no GPUs its processors count
limits     a number of slowdowns; a time as 30m or 4h
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from gpusched.errors import UsageError
from gpusched.model.units import format_duration, parse_duration_s
from gpusched.simulate.metrics import WIDE_GPUS, spread, width
from gpusched.simulate.outcome import Outcome
from gpusched.simulate.trace import TraceJob

EXAMPLE = "--goal 'wait_p95 of small, slowdown_mean of wide <= 20'"

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
        raise UsageError(f"the goal {text!r} has {what}, and just one is made small", EXAMPLE)
    return Objective(targets[0], tuple(term for term in terms if term.limit is not None))


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no part of a goal: MEASURE [of GROUP] [<= LIMIT]", EXAMPLE)
    measure = match["measure"].replace("_s_", "_", 1)
    if measure not in MEASURES:
        raise UsageError(f"{match['measure']!r} is no measure of a goal: {', '.join(MEASURES)}", EXAMPLE)
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
        raise UsageError(f"the limit {text!r} of {measure} is no number from 1", EXAMPLE)
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
    raise UsageError(f"{group!r} is no group of jobs that a goal can name: {known}", EXAMPLE)
