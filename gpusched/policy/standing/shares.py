"""What users have used and use, kept from one change to the next, and what that does to the ranks of their jobs.

Use is that of `sharing.usage`, decayed in the same way; it is brought up to date for a user when that user's runs begin
or end, and for all when ranks are worked out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.policy.ordering import weighs_use
from gpusched.policy.sharing.accounts import AccountTree, factors_without_accounts
from gpusched.policy.sharing.usage import over

Amounts = tuple[float, float, float, float]
"""Those of `Resources`, in its order: all users are brought up to date for every period that passes."""

_NONE: Amounts = 0.0, 0.0, 0.0, 0.0


def amounts_of(resources: Resources) -> Amounts:
    """The same as plain numbers."""
    return resources.gpus, resources.vram_mib, resources.cpus, resources.mem_mib


class Sharer:
    """One user under one account."""

    __slots__ = ("account", "at", "points", "ranked", "ranked_at", "rate", "running", "used", "user", "waiting")

    def __init__(self, account: str, user: str, points: float) -> None:
        self.account = account
        self.user = user
        self.points = points
        """Of the weighted sum, for fair share."""
        self.waiting = 0
        """How many of their jobs wait."""
        self.running = 0
        self.rate = _NONE
        """What they hold."""
        self.used, self.at = _NONE, -inf
        """Amounts times seconds, as of an instant."""
        self.ranked, self.ranked_at = _NONE, -inf
        """The same, as of when ranks were worked out."""


class Shares:
    """All users that were ever seen, with the instant as of which they are compared."""

    def __init__(self, settings: Settings, capacity: Resources) -> None:
        self._settings = settings
        self._capacity = capacity
        self._counted = tuple((number, amount) for number, amount in enumerate(amounts_of(capacity)) if amount > 0)
        """Of what there is any, the place among `Amounts` and how much."""
        self._half_life_s = settings.priority.half_life_s
        self._over = 0.0, 1.0, 0.0
        """The last time that passed, and what it does to use: mostly the same for one user after the other."""
        self._sharers: dict[tuple[str, str], Sharer] = {}
        self._waiting = 0
        """Of how many somebody waits."""
        self._at = -inf
        self.is_due = False
        """Whether they were not compared yet as of then."""
        self.weigh = weighs_use(settings)
        """Whether use counts at all."""
        self._first = settings.priority.weight_fairshare
        """Points of who has used least."""

    def of(self, account: str, user: str) -> Sharer:
        """The one with these names; new ones change what others are compared with."""
        found = self._sharers.get((account, user))
        if found is None:
            found = self._sharers[account, user] = Sharer(account, user, self._first)
            self.is_due = self.weigh
        return found

    def waits(self, sharer: Sharer) -> None:
        """One more job of theirs waits."""
        self._waiting += not sharer.waiting
        sharer.waiting += 1

    def waits_no_more(self, sharer: Sharer) -> None:
        """One job less of theirs waits."""
        sharer.waiting -= 1
        self._waiting -= not sharer.waiting

    def adopt(self, usage: Iterable[Usage]) -> None:
        """Go on from what they had used by then."""
        for one in usage:
            sharer = self.of(one.account, one.user)
            sharer.used, sharer.at = amounts_of(one.used), one.at

    def holds(self, sharer: Sharer, rate: Amounts) -> None:
        """They hold so much more, and have since before they were seen."""
        sharer.running += 1
        gpus, vram_mib, cpus, mem_mib = sharer.rate
        sharer.rate = gpus + rate[0], vram_mib + rate[1], cpus + rate[2], mem_mib + rate[3]

    def began(self, sharer: Sharer, rate: Amounts, now: float) -> None:
        """They hold so much more from now on."""
        self._rank(sharer)
        self._move(sharer, now)
        self.holds(sharer, rate)

    def ended(self, sharer: Sharer, rate: Amounts, now: float) -> None:
        """They hold so much less from now on; nothing where it was the last, whatever the sums have lost in digits."""
        self._rank(sharer)
        self._move(sharer, now)
        sharer.running -= 1
        gpus, vram_mib, cpus, mem_mib = sharer.rate
        less = gpus - rate[0], vram_mib - rate[1], cpus - rate[2], mem_mib - rate[3]
        sharer.rate = less if sharer.running else _NONE

    def _move(self, sharer: Sharer, at: float) -> None:
        """Count what was used until then, as `decayed` and `accrued` do."""
        elapsed_s = at - sharer.at
        if elapsed_s <= 0:
            return
        is_new, sharer.at = sharer.at == -inf, at
        if is_new or (sharer.used is _NONE and sharer.rate is _NONE):
            return
        if self._over[0] != elapsed_s:
            self._over = elapsed_s, *over(elapsed_s, self._half_life_s)
        _, kept, seconds = self._over
        (gpus, vram_mib, cpus, mem_mib), rate = sharer.used, sharer.rate
        sharer.used = (
            gpus * kept + rate[0] * seconds,
            vram_mib * kept + rate[1] * seconds,
            cpus * kept + rate[2] * seconds,
            mem_mib * kept + rate[3] * seconds,
        )

    def _rank(self, sharer: Sharer) -> None:
        if sharer.ranked_at != self._at:
            self._move(sharer, self._at)
            sharer.ranked, sharer.ranked_at = sharer.used, self._at

    def used(self) -> tuple[Usage, ...]:
        """What everybody had used when they were last compared."""
        return tuple(Usage(*mark, used, self._at) for mark, used in self._ranked().items())

    def _ranked(self) -> dict[tuple[str, str], Resources]:
        for sharer in self._sharers.values():
            self._rank(sharer)
        return {mark: Resources(*one.ranked) for mark, one in self._sharers.items()}

    def compare(self, at: float) -> Collection[Sharer]:
        """Work out who has used least as of this instant; those whose points that changes.

        Nothing is worked out while the jobs of no more than one wait: there is nobody to be compared with.
        """
        if at != self._at:
            self._at, self.is_due = at, True
        if not self.is_due or self._waiting <= 1:
            return ()
        self.is_due = False
        factors = self._factors()
        weight, changed = self._settings.priority.weight_fairshare, set[Sharer]()
        for mark, sharer in self._sharers.items():
            points = weight * factors[mark]
            if points != sharer.points:
                sharer.points = points
                changed.add(sharer)
        return changed

    def _factors(self) -> dict[tuple[str, str], float]:
        """Of each account and user, the factor that `AccountTree` gives."""
        accounts = self._settings.account
        if accounts or any(account for account, _ in self._sharers):
            tree = AccountTree(accounts, self._ranked(), self._capacity, ())
            return {mark: tree.factor(*mark) for mark in self._sharers}
        used = {}
        for (_, user), sharer in self._sharers.items():
            self._rank(sharer)
            share, ranked = 0.0, sharer.ranked
            for number, amount in self._counted:
                part = ranked[number] / amount
                if part > share:
                    share = part
            used[user] = share
        found = factors_without_accounts(used)
        return {mark: found[mark[1]] for mark in self._sharers}
