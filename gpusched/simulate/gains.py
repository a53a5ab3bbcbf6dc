"""Who gains and who loses when one schedule takes the place of another: per user, by mean bounded slowdown."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.simulate.metrics import Group, groups, party
from gpusched.simulate.runner import Outcome

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
class Gains:
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


def gains(before: Outcome, after: Outcome) -> Gains:
    """Each user under either schedule of the same jobs; each queue, where the trace names no users."""
    what, by = party(before.jobs)
    first, second = groups(before, by), groups(after, by)
    listed = [Gain(name, first[name], second[name]) for name in first]
    return Gains(what, tuple(sorted(listed, key=lambda one: (one.times, one.name))))


def sentence(found: Gains, before: str, after: str) -> str:
    """How many gain and lose when `after` takes the place of `before`, and who the most. Names are as in the trace."""
    count = len(found.listed)
    winners, losers = found.winners, found.losers
    parts = [f"{after} instead of {before}: of {count} {found.what}s {len(winners)} {_verb('gain', len(winners))}"]
    if winners:
        parts.append(f" ({_most(winners[0])})")
    parts.append(f", {len(losers)} {_verb('lose', len(losers))}")
    if losers:
        parts.append(f" ({_most(losers[0])})")
    same = count - len(winners) - len(losers)
    parts.append(f", {same} {_verb('see', same)} no difference; by mean bounded slowdown")
    return "".join(parts)


def _verb(word: str, count: int) -> str:
    return f"{word}s" if count == 1 else word


def _most(one: Gain) -> str:
    jobs = f"{one.before.jobs:,} job{'' if one.before.jobs == 1 else 's'}"
    return f"most {one.name or 'without a name'}, {jobs}: {one.before.slowdown:.2f} to {one.after.slowdown:.2f}"
