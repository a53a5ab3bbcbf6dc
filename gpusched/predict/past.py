"""Run times of ended jobs by marks, and a guess for one more.

A job comes with a chain of marks, from those of jobs very much like it (same user, limit and size) to wide ones (same
user). Two numbers are guessed, since planning and ordering want different ones:

    plan_s      what a run is planned with: the mean of the last two that were alike
    expected_s  what the order goes by: long runs count by their mean, short ones by what waiting costs them

Without a limit there is nothing to mix with, and run times differ by powers of ten: then the order goes by the mean of
the newest runs alike, which are many, and what a run is planned with is what three in five of them kept to.

With a limit the second is the geometric mean of the arithmetic and the harmonic mean. Of jobs that cannot be
interrupted, those with the smallest E[s] / E[1/s] go first where the mean of wait / s is to be small (weighted
shortest expected processing time, with weight 1/s); E[s] / E[1/s] is the square of that number. A newer run counts
twice what the one before it does, and all of a mark are mixed with those of wider marks, and in the end with the
limit, as if one run had been so.

Sources: Tsafrir, Etsion and Feitelson, Backfilling Using System-Generated Predictions Rather than User Runtime
Estimates (2007), for the last two; Rothkopf, Scheduling with Random Service Times (1966), for the order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf, log, sqrt

from gpusched.model.value import Value

KEPT = 50
"""So many run times are kept under each mark: enough for the mean where a few long ones make most of it."""

_MIXED = 8
"""So many of them are mixed; older ones would count next to nothing."""

_USUAL = 0.6
"""The part of runs that keep to what one without a limit is planned with."""

MOST_MARKS = 20000
"""Marks that have not been heard of for longest are forgotten beyond these."""

SHORT_S = 10.0
"""Shorter runs count as so long, as they do in the bounded slowdown."""

_HALVES = 0.5
"""What an older run counts of the next newer one."""

_WIDER = 1.0
"""Runs that all wider marks together count for, beside those of a mark."""

_STEP = 1.1
_LOG_OF_STEP = log(_STEP)

Marks = Sequence[Hashable]
"""Narrowest first."""


class Guess(Value):
    """How long one job will run, in whole seconds, rounded in steps of a tenth so that like jobs stay alike."""

    plan_s: int
    expected_s: int


class Past:
    """The newest run times in seconds under each mark."""

    def __init__(self) -> None:
        self._run_times_s: dict[Hashable, tuple[float, ...]] = {}

    def learn(self, marks: Marks, run_s: float) -> None:
        """A job with these marks has ended."""
        known = self._run_times_s
        for mark in marks:
            known[mark] = (*known.pop(mark, ()), run_s)[-KEPT:]
        while len(known) > MOST_MARKS:
            del known[next(iter(known))]

    def learn_older(self, marks: Marks, run_times_s: Sequence[float]) -> None:
        """Jobs with these marks had ended before all that is known of them; oldest first."""
        for mark in marks:
            self._run_times_s[mark] = (*run_times_s, *self._run_times_s.get(mark, ()))[-KEPT:]

    def known(self, marks: Marks) -> list[tuple[float, ...]]:
        """The newest run times under each of these marks that has any, oldest first."""
        return [found for mark in marks if (found := self._run_times_s.get(mark))]


Method = Callable[[Past, Marks, int | None], Guess | None]
"""A guess for a job with these marks and this limit in seconds (None without); None where nothing can be said."""


def by_last_two(past: Past, marks: Marks, limit_s: int | None) -> Guess | None:
    """The mean of the last two under the narrowest mark that has any; never more than the limit."""
    known = past.known(marks)
    if not known:
        return None if limit_s is None else Guess(limit_s, limit_s)
    last = known[0][-2:]
    guess_s = in_steps(sum(last) / len(last), limit_s)
    return Guess(guess_s, guess_s)


def by_last_two_of_user(past: Past, marks: Marks, limit_s: int | None) -> Guess | None:
    """The mean of the last two under the widest mark, whatever they were."""
    return by_last_two(past, marks[-1:], limit_s)


def by_all_alike(past: Past, marks: Marks, limit_s: int | None) -> Guess | None:
    """Planned as the last two, of any size; ordered by a mixture of all that are alike."""
    plan = by_last_two(past, marks[1:] or marks, limit_s)
    if plan is None:
        return None
    newest = [run_times_s[-_MIXED:] for run_times_s in past.known(marks)]
    return Guess(plan.plan_s, in_steps(_mixed_s(newest, limit_s), limit_s))


def by_mean(past: Past, marks: Marks, limit_s: int | None) -> Guess | None:
    """Ordered by the mean under the narrowest mark that has any, planned with what three in five of those kept to."""
    known = past.known(marks)
    if not known:
        return None if limit_s is None else Guess(limit_s, limit_s)
    ordered = sorted(known[0])
    usual_s = ordered[min(len(ordered) - 1, int(_USUAL * len(ordered)))]
    return Guess(in_steps(usual_s, limit_s), in_steps(sum(ordered) / len(ordered), limit_s))


METHODS: Mapping[str, Method] = {
    "last2": by_last_two_of_user,
    "similar": by_last_two,
    "mixed": by_all_alike,
    "mean": by_mean,
}
"""By the names that people type."""


def _mixed_s(known: Sequence[Sequence[float]], limit_s: int | None) -> float:
    left, mean_s, inverse = 1.0, 0.0, 0.0
    most_s = inf if limit_s is None else limit_s
    for number, run_times_s in enumerate(known):
        weights, total = _WEIGHTS[len(run_times_s)]
        is_last = limit_s is None and number == len(known) - 1
        part = left if is_last else left * total / (total + _WIDER)
        sum_s = of_inverses = 0.0
        for weight, run_s in zip(weights, run_times_s, strict=True):
            bounded_s = max(SHORT_S, min(run_s, most_s))
            sum_s += weight * bounded_s
            of_inverses += weight / bounded_s
        share = part / total
        mean_s += share * sum_s
        inverse += share * of_inverses
        left -= part
    if limit_s is not None:
        mean_s += left * limit_s
        inverse += left / max(SHORT_S, limit_s)
    return sqrt(mean_s / inverse)


def _weights(count: int) -> tuple[tuple[float, ...], float]:
    """What each of so many runs counts, oldest first, and all of them together."""
    weights = tuple(_HALVES**age for age in reversed(range(count)))
    return weights, sum(weights)


_WEIGHTS = tuple(map(_weights, range(_MIXED + 1)))


def in_steps(length_s: float, limit_s: int | None) -> int:
    """A whole number of seconds, one of few; never more than the limit, at least one."""
    rounded = max(1, round(_STEP ** round(log(max(1.0, length_s)) / _LOG_OF_STEP)))
    return rounded if limit_s is None else min(rounded, limit_s)
