"""Limits that were too short: how long jobs take that are ended at their limit, for the order alone.

A run that is ended at its limit does not say how long it would have taken, only that it would have taken longer: its
length is censored. The mean length of jobs like it is then estimated by the time that all of them ran, over the number
of those that ended by themselves, which is the estimate of greatest likelihood where runs end at a constant rate. While
none did, the limit of the job in question counts as one that ran so long and ended:

    run times of all / those that ended by themselves

So a job that is stated to take 10 minutes, is ended, and is stated to take 10 minutes again, is expected to take 20,
then 30, up to `KEPT` times its limit, until one ends by itself and says how long they really take. A limit `BELIEVED`
times as long as what was cut short is new information: that no longer counts against it.

A command that has no runs yet is judged by its user's others, in multiples of their limits, where more of these were
ended at their limits than ended by themselves: a new name for the same script changes nothing.

Source: Epstein and Sobel, Life Testing (1953).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from gpusched.model.value import Value
from gpusched.predict.past import Guess, in_steps

KEPT = 50
"""The newest runs of a family, and of a user, that count."""

MOST_MARKS = 5000
"""Families and users that have had no run for longest are forgotten beyond these."""

BELIEVED = 2
"""A limit so many times as long as what was cut short is believed."""


class Ended(Value):
    """A run with a time limit that has ended, in seconds; `is_cut`: at its limit, with nothing to go on from."""

    run_s: float
    limit_s: int | None
    is_cut: bool

    @property
    def multiple(self) -> float:
        """Of its limit."""
        return self.run_s / self.limit_s if self.limit_s else 0.0


class _Newest:
    """Runs of a family or user, oldest first, with how many of them were ended at their limits: asked for each job."""

    __slots__ = ("cuts", "runs")

    def __init__(self, runs: Iterable[Ended] = ()) -> None:
        self.runs = deque(runs, KEPT)
        self.cuts = sum(one.is_cut for one in self.runs)

    def add(self, ended: Ended) -> None:
        """One more, the newest."""
        if len(self.runs) == KEPT:
            self.cuts -= self.runs[0].is_cut
        self.runs.append(ended)
        self.cuts += ended.is_cut


_NONE = _Newest()


class Overruns:
    """The newest ends under each family of jobs and each user."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Newest] = {}
        self._users: dict[Hashable, _Newest] = {}

    def learn(self, kind: Hashable, user: str, ended: Ended) -> None:
        """A job of this family and user has ended by itself, or was ended at its limit."""
        for known, mark in ((self._families, kind), (self._users, user)):
            if known is self._users and ended.limit_s is None:
                continue
            # As the last, so that those without a run for longest are the first to go.
            known[mark] = newest = known.pop(mark, None) or _Newest()
            newest.add(ended)
            if len(known) > MOST_MARKS:
                del known[next(iter(known))]

    def learn_older(self, ended: Iterable[tuple[Hashable, str, Ended]]) -> None:
        """Jobs of these families and users had ended before all that is known; oldest first."""
        families: dict[Hashable, list[Ended]] = {}
        users: dict[str, list[Ended]] = {}
        for kind, user, one in ended:
            families.setdefault(kind, []).append(one)
            if one.limit_s is not None:
                users.setdefault(user, []).append(one)
        for kind, older in families.items():
            self._families[kind] = _Newest((*older, *self._families.get(kind, _NONE).runs))
        for user, older in users.items():
            self._users[user] = _Newest((*older, *self._users.get(user, _NONE).runs))

    def ended(self, kind: Hashable) -> tuple[Ended, ...]:
        """The newest runs of a family, oldest first."""
        return tuple(self._families.get(kind, _NONE).runs)

    def count(self, kind: Hashable, user: str, limit_s: int) -> int:
        """How many of the newest runs, of the family or else of the user, were ended and speak against this limit."""
        return sum(one.is_cut for one in self._against(kind, user, limit_s))

    def least_s(self, kind: Hashable, user: str, limit_s: int) -> int | None:
        """What a job with this limit is expected to take at least; None where nothing speaks against its limit."""
        known = self._against(kind, user, limit_s)
        if not known:
            return None
        ended = sum(not one.is_cut for one in known)
        if kind in self._families:
            total_s = sum(one.run_s for one in known)
        else:
            total_s = limit_s * sum(one.multiple for one in known)
        return in_steps(total_s / ended if ended else total_s + limit_s, None)

    def _against(self, kind: Hashable, user: str, limit_s: int) -> list[Ended]:
        """The runs that count for such a job, where any of them speaks against its limit."""
        family = self._families.get(kind)
        if family is None:
            theirs = self._users.get(user, _NONE)
            return list(theirs.runs) if 2 * theirs.cuts > len(theirs.runs) else []
        if not family.cuts:
            return []
        known = [one for one in family.runs if not one.is_cut or limit_s < BELIEVED * one.run_s]
        return known if any(one.is_cut for one in known) else []


class Expectation(Value):
    """How long a job that waits is expected to run, and what that goes by."""

    length_s: int | None
    """None when nobody knows."""
    by: str
    """`limit`, `prediction` or `overruns`: runs like it that were ended at their limits; `unknown`."""
    overruns: int = 0
    """How many such runs."""


def at_least(guess: Guess | None, limit_s: int, least_s: int | None) -> Guess | None:
    """What is gone by where a job is expected to take at least so long; None: its limit. Planned is as before."""
    if least_s is None or least_s <= (limit_s if guess is None else guess.expected_s):
        return guess
    return Guess(limit_s if guess is None else guess.plan_s, least_s)
