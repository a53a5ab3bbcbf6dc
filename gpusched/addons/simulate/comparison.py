"""Compares two schedules of the same jobs: which users gain and lose, and whether one is better beyond chance.

Jobs influence each other: one long job can make a hundred others wait. The sign-flip test therefore compares contiguous
parts of a trace instead of jobs, each with equally many jobs, long enough that one part says little about the next
(batch means: Law, Simulation Modeling and Analysis, section 9.5). Both policies replay the whole trace, and each part
gives one difference. If neither policy is better, each difference could as well have the opposite sign. The p-value is
the fraction of all 2^n sign assignments whose mean is at least as large as the observed one (Fisher, The Design of
Experiments, 1935, section 21; Good, Permutation, Parametric and Bootstrap Tests of Hypotheses, 2005). All assignments
are counted, so nothing is random.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import fsum
from typing import Any

from gpusched.addons.simulate.outcome import Group, Outcome, grouping, groups
from gpusched.addons.simulate.preset_choice import ALPHA
from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.units import plural

LEAST_CHANGE = 0.01
"""A mean slowdown that changes by a smaller fraction has not changed."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One user (or queue) under two schedules of the same jobs."""

    name: str
    before: Group
    after: Group

    @property
    def times(self) -> float:
        """Mean slowdown after over mean slowdown before; below 1 is a gain."""
        return self.after.slowdown / self.before.slowdown


@dataclass(frozen=True, slots=True)
class Comparison:
    """All users (or queues) under two policies, the largest gain first."""

    before: str
    after: str
    what: str
    """`user` or `queue`."""
    listed: tuple[Gain, ...]

    @property
    def winners(self) -> list[Gain]:
        return [one for one in self.listed if one.times < 1 - LEAST_CHANGE]

    @property
    def losers(self) -> list[Gain]:
        """The largest loss first."""
        return [one for one in reversed(self.listed) if one.times > 1 + LEAST_CHANGE]

    @property
    def same(self) -> int:
        return len(self.listed) - len(self.winners) - len(self.losers)

    def document(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "before": self.before,
            "after": self.after,
            "what": self.what,
            "gain": len(self.winners),
            "lose": len(self.losers),
            "same": self.same,
            "listed": [asdict(one) for one in self.listed],
        }

    def __str__(self) -> str:
        jobs = sum(one.before.jobs for one in self.listed)
        parts = []
        for word, some in (("gain", self.winners), ("lose", self.losers)):
            part = f"{len(some)} {word}{'s' if len(some) == 1 else ''}"
            if some:
                theirs = sum(one.before.jobs for one in some) / jobs
                part += f" ({theirs:.0%} of the jobs; most of all {self._shown(some[0])})"
            parts.append(part)
        parts.append(f"{self.same} see{'s' if self.same == 1 else ''} no difference")
        return f"{self.after} instead of {self.before}: of {len(self.listed)} {self.what}s {', '.join(parts)}"

    def _shown(self, one: Gain) -> str:
        name = f"{self.what} {one.name}" if one.name else f"those without a {self.what}"
        slowdowns = f"mean slowdown {one.before.slowdown:.2f} to {one.after.slowdown:.2f}"
        return f"{name} with {plural(one.before.jobs, 'job')}, {slowdowns}"


def compare_users(before: str, old: Outcome, after: str, new: Outcome, by: str | None = None) -> Comparison:
    """Each user (or queue) under two schedules of the same jobs. `by`: see `outcome.grouping`."""
    what, name_of = grouping(old.jobs, by)
    first, second = groups(old, name_of), groups(new, name_of)
    listed = [Gain(name, first[name], second[name]) for name in first]
    return Comparison(before, after, what, tuple(sorted(listed, key=lambda one: (one.times, one.name))))


# --- better, or by chance? --------------------------------------------------------------------------

PARTS = 12
LEAST_PARTS = 6
"""With fewer, a gain in every part would still be chance once three policies have been compared: 3 in 2^5."""
LEAST_IN_PART = 10


@dataclass(frozen=True, slots=True)
class SignFlipResult:
    """Result of a comparison over parts of a trace."""

    parts: int
    """Number of parts; 0 when there are too few jobs."""
    better: int
    """Number of parts with an improvement."""
    worse: int
    p: float
    """Probability of at least this result by chance, 0 to 1; corrected for the number of comparisons."""

    @property
    def is_significant(self) -> bool:
        """Whether it is an improvement beyond chance."""
        return self.p < ALPHA

    def __str__(self) -> str:
        if not self.parts:
            return f"too few jobs to rule out chance (in {LEAST_PARTS} parts, {LEAST_IN_PART} in each)"
        if self.p >= 0.5:
            often = "chance alone does as well in every second case"
        else:
            often = f"chance alone does as well in 1 of {round(1 / self.p):,} tries"
        equal = self.parts - self.better - self.worse
        where = f"{self.better} and worse in {self.worse}" if equal else f"{self.better}"
        return f"better in {where} of {plural(self.parts, 'part')}, {often}"


def sign_flip_test(
    before: Outcome,
    after: Outcome,
    loss: Callable[[Outcome], float],
    is_counted: Callable[[TraceJob], bool] = lambda job: True,
    comparisons: int = 1,
) -> SignFlipResult:
    """Whether `after` has less of the loss than `before`, two schedules of the same jobs.

    Args:
        loss: what a schedule of some of the jobs is worth, at least one of which is counted; smaller is better.
        is_counted: which jobs the loss looks at. Parts have equally many of them.
        comparisons: of how many policies this is the best; the p-value is that many times as large (Bonferroni).
    """
    order = sorted(range(len(before.jobs)), key=lambda number: before.jobs[number].submit_s)
    counted = [place for place, number in enumerate(order) if is_counted(before.jobs[number])]
    count = min(PARTS, len(counted) // LEAST_IN_PART)
    if count < LEAST_PARTS:
        return SignFlipResult(0, 0, 0, 1.0)
    starts = [0, *(counted[len(counted) * part // count] for part in range(1, count)), len(order)]
    gains = []
    for first, last in pairwise(starts):
        numbers = order[first:last]
        gains.append(loss(part_of(before, numbers)) - loss(part_of(after, numbers)))
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return SignFlipResult(count, better, worse, min(1.0, comparisons * sign_flip_p(gains)))


def part_of(outcome: Outcome, numbers: Sequence[int]) -> Outcome:
    """The schedule of some of its jobs, as scheduled together with all others."""
    ends_s = outcome.ends_s
    return Outcome(
        [outcome.jobs[number] for number in numbers],
        [outcome.start_s[number] for number in numbers],
        outcome.cycles,
        None if ends_s is None else [ends_s[number] for number in numbers],
    )


def sign_flip_p(gains: Sequence[float]) -> float:
    """Fraction of all sign assignments to these differences with at least their sum, 0 to 1.

    Exact, from the sums of two halves: 24 differences take some thousand steps.
    """
    scale = max(map(abs, gains), default=0.0)
    if not scale:
        return 1.0
    # Equal sums differ in the last digits if added in different orders.
    wanted = fsum(gains) - 1e-9 * scale * len(gains)
    half = len(gains) // 2
    first, second = _sums(gains[:half]), sorted(_sums(gains[half:]))
    found = sum(len(second) - bisect_left(second, wanted - one) for one in first)
    return found / (len(first) * len(second))


def _sums(gains: Sequence[float]) -> list[float]:
    sums = [0.0]
    for gain in gains:
        sums = [one + sign for one in sums for sign in (gain, -gain)]
    return sums
