"""What users have used and use, kept from one change to the next, and what that does to the ranks of their jobs.

Use is that of `sharing.usage`, decayed in the same way; it is brought up to date for a user when that user's runs begin
or end, and for all when ranks are worked out.
"""

from __future__ import annotations

from math import inf

from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.policy.ordering import weighs_use
from gpusched.policy.sharing.accounts import AccountTree, factors_without_accounts
from gpusched.policy.sharing.usage import accrued, decayed


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
        self.rate = NOTHING
        """What they hold."""
        self.used, self.at = NOTHING, -inf
        """Amounts times seconds, as of an instant."""
        self.ranked, self.ranked_at = NOTHING, -inf
        """The same, as of when ranks were worked out."""

    def move_to(self, at: float, half_life_s: float) -> None:
        """Count what was used until then."""
        if at <= self.at:
            return
        if self.at > -inf:
            self.used = decayed(self.used, at - self.at, half_life_s)
            if self.rate is not NOTHING:
                self.used += accrued(self.rate, self.at, at, at, half_life_s)
        self.at = at


class Shares:
    """All users that were ever seen, with the instant as of which they are compared."""

    def __init__(self, settings: Settings, capacity: Resources) -> None:
        self._settings = settings
        self._capacity = capacity
        self._sharers: dict[tuple[str, str], Sharer] = {}
        self._at = -inf
        self._is_due = False
        """Whether they were not compared yet as they stand."""
        self.weigh = weighs_use(settings)
        """Whether use counts at all."""
        self._first = settings.priority.weight_fairshare
        """Points of who has used least."""

    def of(self, account: str, user: str) -> Sharer:
        """The one with these names; new ones change what others are compared with."""
        found = self._sharers.get((account, user))
        if found is None:
            found = self._sharers[account, user] = Sharer(account, user, self._first)
            self._is_due = True
        return found

    def waits(self, sharer: Sharer) -> None:
        """One more job of theirs waits."""
        sharer.waiting += 1
        if sharer.waiting == 1:
            self._is_due = True

    def began(self, sharer: Sharer, rate: Resources, now: float) -> None:
        """They hold so much more from now on."""
        self._rank(sharer)
        sharer.move_to(now, self._settings.priority.half_life_s)
        sharer.running += 1
        sharer.rate = sharer.rate + rate

    def ended(self, sharer: Sharer, rate: Resources, now: float) -> None:
        """They hold so much less from now on; nothing where it was the last, whatever the sums have lost in digits."""
        self._rank(sharer)
        sharer.move_to(now, self._settings.priority.half_life_s)
        sharer.running -= 1
        sharer.rate = sharer.rate - rate if sharer.running else NOTHING

    def _rank(self, sharer: Sharer) -> None:
        if sharer.ranked_at != self._at:
            sharer.move_to(self._at, self._settings.priority.half_life_s)
            sharer.ranked, sharer.ranked_at = sharer.used, self._at

    def used(self) -> tuple[Usage, ...]:
        """What everybody had used when they were last compared."""
        for sharer in self._sharers.values():
            self._rank(sharer)
        return tuple(Usage(account, user, one.ranked, self._at) for (account, user), one in self._sharers.items())

    def compare(self, at: float) -> bool:
        """Work out who has used least as of this instant; whether that changes the points of anybody.

        Nothing is worked out while the jobs of no more than one wait: there is nobody to be compared with.
        """
        if at != self._at:
            self._at, self._is_due = at, True
        if not self._is_due or sum(one.waiting > 0 for one in self._sharers.values()) <= 1:
            return False
        self._is_due = False
        for sharer in self._sharers.values():
            self._rank(sharer)
        factors = self._factors()
        weight, changed = self._settings.priority.weight_fairshare, False
        for mark, sharer in self._sharers.items():
            points = weight * factors[mark]
            if points != sharer.points:
                sharer.points, changed = points, True
        return changed

    def _factors(self) -> dict[tuple[str, str], float]:
        """Of each account and user, the factor that `AccountTree` gives."""
        accounts = self._settings.account
        if not accounts and not any(account for account, _ in self._sharers):
            used = {user: one.ranked for (_, user), one in self._sharers.items()}
            found = factors_without_accounts(used, self._capacity)
            return {mark: found[mark[1]] for mark in self._sharers}
        usage = {mark: one.ranked for mark, one in self._sharers.items()}
        tree = AccountTree(accounts, usage, self._capacity, ())
        return {mark: tree.factor(*mark) for mark in self._sharers}
