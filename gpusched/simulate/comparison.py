"""Who gains and who loses when one schedule takes the place of another: per user, by mean bounded slowdown."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.simulate.metrics import Group, groups, party
from gpusched.simulate.outcome import Outcome

LEAST = 0.01
"""A mean slowdown that changes by less than this part of it is no change."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One user (or queue) under two schedules of the same jobs."""

    name: str
    before: Group
    after: Group

    @property
    def times(self) -> float:
        """Mean slowdown after over that before; below 1 is a gain."""
        return self.after.slowdown / self.before.slowdown

    @property
    def is_gain(self) -> bool:
        """Whether it is better off by more than a trifle."""
        return self.times < 1 - LEAST

    @property
    def is_loss(self) -> bool:
        """Whether it is worse off by more than a trifle."""
        return self.times > 1 + LEAST


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of them, who gains most first."""

    what: str
    """`user` or `queue`."""
    listed: tuple[Gain, ...]

    @property
    def winners(self) -> tuple[Gain, ...]:
        """Those who gain, the most first."""
        return tuple(one for one in self.listed if one.is_gain)

    @property
    def losers(self) -> tuple[Gain, ...]:
        """Those who lose, the most first."""
        return tuple(reversed([one for one in self.listed if one.is_loss]))


def compare(before: Outcome, after: Outcome, by: str | None = None) -> Comparison:
    """Each user under either schedule of the same jobs, or each queue; None: as `metrics.party` has it."""
    what, name_of = party(before.jobs, by)
    first, second = groups(before, name_of), groups(after, name_of)
    listed = [Gain(name, first[name], second[name]) for name in first]
    return Comparison(what, tuple(sorted(listed, key=lambda one: (one.times, one.name))))


def sentence(found: Comparison, before: str, after: str) -> str:
    """How many gain and lose when `after` takes the place of `before`, with how many of the jobs, and who the most."""
    winners, losers = found.winners, found.losers
    jobs = sum(one.before.jobs for one in found.listed)
    parts = []
    for word, some in (("gain", winners), ("lose", losers)):
        part = f"{len(some)} {word}{'s' if len(some) == 1 else ''}"
        if some:
            theirs = sum(one.before.jobs for one in some) / jobs
            part += f" ({theirs:.0%} of the jobs; most of all {_told(some[0], found.what)})"
        parts.append(part)
    same = len(found.listed) - len(winners) - len(losers)
    parts.append(f"{same} see{'s' if same == 1 else ''} no difference")
    return f"{after} instead of {before}: of {len(found.listed)} {found.what}s {', '.join(parts)}"


def _told(one: Gain, what: str) -> str:
    count = f"{one.before.jobs:,} job{'' if one.before.jobs == 1 else 's'}"
    name = f"{what} {one.name}" if one.name else f"those without a {what}"
    return f"{name} with {count}, mean slowdown {one.before.slowdown:.2f} to {one.after.slowdown:.2f}"
