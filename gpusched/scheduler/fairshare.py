"""Decayed use of each user under each account, maintained incrementally, and its effect on the ranks of their jobs.

Use is that of `sharing.usage`, decayed the same way; it is brought up to date for a user whenever that user's runs
begin or end, and for all users when ranks are computed. The tree on top is `sharing.accounts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, fsum, inf, log2

from gpusched.model.queue_settings import EVERYBODY, AccountSettings, parent_in
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.usage import accrued, decayed, over


@dataclass(frozen=True, slots=True)
class AccountShare:
    """One account, or one user in it: the columns of `sshare -l`."""

    account: str
    """Empty for the root of the tree."""
    user: str | None
    """None in the row of the account itself."""
    depth: int
    shares: float
    norm_shares: float
    """Shares divided by those of all siblings, 0 to 1."""
    used: Resources
    """Decayed amounts times seconds; of an account including its descendants."""
    usage: float
    """Dominant share of `used`, in seconds of the whole cluster."""
    effective_usage: float
    """Usage divided by that of all siblings, 0 to 1."""
    level_fs: float
    """norm_shares / effective_usage: above 1 means below its share; infinite means nothing used."""
    factor: float | None
    """Of a user, in (0, 1]; 1 is the first in rank. None for an account."""


@dataclass(slots=True)
class _Node:
    account: str
    user: str | None
    shares: float
    children: list[_Node] = field(default_factory=list)
    used: Resources = NOTHING
    usage: float = 0.0
    norm_shares: float = 1.0
    effective_usage: float = 0.0
    level_fs: float = inf
    factor: float | None = None

    @property
    def has_user(self) -> bool:
        """Whether it is a user, or has one at any depth."""
        return self.user is not None or any(child.has_user for child in self.children)

    @property
    def place(self) -> tuple[bool, str]:
        """Sort key among its siblings for listings: users first, then accounts, by name."""
        return self.user is None, self.user or self.account


class AccountTree:
    """Accounts with users as leaves, ranked by use. `usage` and `seen` are per (account, user).

    Source: Slurm's Fair Tree (Levinthal and Cox, priority/multifactor since 14.11). At each level a node's LevelFS is
    its fraction of the shares divided by its fraction of the use; siblings are sorted by it, and users are ranked in
    the order of a depth-first walk of the sorted tree. So an account below its share puts all of its users
    before those of an account above its share.

    Leaves are the users listed by an account, those with past use and those in `seen`.
    An account with use but no configuration is at the top with 1 share; the account `""` is the root
    itself. `capacity` is what shares are fractions of.
    """

    def __init__(
        self,
        accounts: Mapping[str, AccountSettings],
        usage: Mapping[tuple[str, str], Resources],
        capacity: Resources,
        seen: Iterable[tuple[str, str]],
    ) -> None:
        leaves = {*usage, *seen}
        for account in accounts.values():
            leaves.update((account.name, user) for user in account.users if user != EVERYBODY)
        self._root = _plant(accounts, leaves)
        _add_up(self._root, usage, capacity)
        _weigh([self._root])
        self._factors = _rank(self._root, len(leaves))

    def factor(self, account: str, user: str) -> float:
        """Fair-share factor in [0, 1], 1 for the first in rank; unseen users have one too."""
        return self._factors.get((account, user), 1.0)

    def shares(self) -> tuple[AccountShare, ...]:
        """The whole tree from the root down: the users of an account, then its child accounts, by name."""
        return tuple(_list(self._root, 0))


def parts_of(
    accounts: Mapping[str, AccountSettings], leaves: Collection[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    """Fraction of all shares due to each of these accounts and users: members without jobs take no part of it."""
    found: dict[tuple[str, str], float] = {}

    def divide(node: _Node, part: float) -> None:
        if node.user is not None:
            found[node.account, node.user] = part
        present = [child for child in node.children if child.has_user]
        shares = sum(child.shares for child in present)
        for child in present:
            divide(child, part * child.shares / shares if shares else 0.0)

    divide(_plant(accounts, leaves), 1.0)
    return found


def factors_without_accounts(usage: Mapping[str, float]) -> dict[str, float]:
    """Factor of each user without accounts and with equal shares; same values as from `AccountTree`.

    Args: usage: the dominant share of each user's use, as in `AccountShare.usage`.
    """
    names = sorted(usage)
    used = [max(0.0, usage[name]) for name in names]
    total, share = sum(used), 1.0 / max(1, len(names))
    level = {name: _level_fs(share, amount / total if total else 0.0) for name, amount in zip(names, used, strict=True)}
    factors: dict[str, float] = {}
    before, rank = -1.0, len(names)
    for number, name in enumerate(sorted(names, key=lambda name: (-level[name], name))):
        if level[name] != before:
            before, rank = level[name], len(names) - number
        factors[name] = rank / len(names)
    return factors


def _plant(accounts: Mapping[str, AccountSettings], leaves: Iterable[tuple[str, str]]) -> _Node:
    """Build the bare tree: accounts under their parents, users under their accounts."""
    root = _Node("", None, 1.0)
    nodes = {"": root}
    ordered = sorted(leaves)
    for name in [*accounts, *(account for account, _ in ordered)]:
        if name not in nodes:
            known = accounts.get(name)
            nodes[name] = _Node(name, None, 1.0 if known is None else max(0.0, known.shares))
    for name, node in nodes.items():
        if node is not root:
            nodes[parent_in(name, accounts) or ""].children.append(node)
    for account, user in ordered:
        named = accounts[account].users if account in accounts else {}
        nodes[account].children.append(_Node(account, user, max(0.0, named.get(user, named.get(EVERYBODY, 1.0)))))
    for node in nodes.values():
        node.children.sort(key=lambda child: child.place)
    return root


def _add_up(node: _Node, usage: Mapping[tuple[str, str], Resources], capacity: Resources) -> None:
    """Sum up use from the leaves to the root."""
    if node.user is not None:
        node.used = usage.get((node.account, node.user), NOTHING)
    for child in node.children:
        _add_up(child, usage, capacity)
        node.used += child.used
    node.usage = max(0.0, node.used.dominant_share(capacity))


def _weigh(siblings: list[_Node]) -> None:
    """Normalise shares and use of each node against its siblings, recursively."""
    shares = sum(node.shares for node in siblings)
    usage = sum(node.usage for node in siblings)
    for node in siblings:
        node.norm_shares = node.shares / shares if shares else 0.0
        node.effective_usage = node.usage / usage if usage else 0.0
        node.level_fs = _level_fs(node.norm_shares, node.effective_usage)
        _weigh(node.children)


def _level_fs(norm_shares: float, effective_usage: float) -> float:
    """LevelFS; a node without shares is last, used or not, and one without use is first."""
    if norm_shares <= 0:
        return 0.0
    return norm_shares / effective_usage if effective_usage > 0 else inf


def _rank(root: _Node, count: int) -> dict[tuple[str, str], float]:
    """Factor of each user: rank / number of users, equal for ties."""
    factors: dict[tuple[str, str], float] = {}
    last_rank = count
    for node, is_tied in _in_order(root.children, False):
        rank = last_rank if is_tied else count - len(factors)
        last_rank = rank
        node.factor = rank / count
        factors[node.account, node.user or ""] = node.factor
    return factors


def _in_order(siblings: Iterable[_Node], starts_tied: bool) -> Iterable[tuple[_Node, bool]]:
    """Users in order of rank, and whether each is tied with the previous one.

    Tied accounts are merged: their children compete as siblings, as in Slurm.
    """
    # Users precede accounts of the same LevelFS; names only make the order deterministic.
    ordered = sorted(siblings, key=lambda node: (-node.level_fs, node.place))
    position = 0
    is_tied = starts_tied
    while position < len(ordered):
        node = ordered[position]
        if position:
            is_tied = ordered[position - 1].level_fs == node.level_fs
        if node.user is not None:
            yield node, is_tied
            position += 1
            continue
        merged: list[_Node] = []
        while position < len(ordered) and ordered[position].level_fs == node.level_fs:
            merged.extend(ordered[position].children)
            position += 1
        yield from _in_order(merged, is_tied)


def _list(node: _Node, depth: int) -> Iterable[AccountShare]:
    yield AccountShare(
        account=node.account,
        user=node.user,
        depth=depth,
        shares=node.shares,
        norm_shares=node.norm_shares,
        used=node.used,
        usage=node.usage,
        effective_usage=node.effective_usage,
        level_fs=node.level_fs,
        factor=node.factor,
    )
    for child in node.children:
        yield from _list(child, depth + 1)


Amounts = tuple[float, float, float, float]
"""The fields of `Resources`, in its order; plain tuples because all users are updated every period."""

NO_AMOUNTS: Amounts = 0.0, 0.0, 0.0, 0.0


def amounts_of(resources: Resources) -> Amounts:
    """Convert to plain numbers."""
    return resources.gpus, resources.vram_mib, resources.cpus, resources.mem_mib


def orders_of(settings: Settings) -> frozenset[str]:
    """All orders in force anywhere."""
    own = (queue.order for queue in settings.queue.values())
    return frozenset({settings.priority.order, *(order for order in own if order)})


def counts_use(settings: Settings) -> bool:
    """Whether any order depends on past use."""
    orders = orders_of(settings)
    return "response_ratio" in orders or _counts_factors(settings)


def _counts_factors(settings: Settings) -> bool:
    """Whether any order uses Fair-Tree factors."""
    orders = orders_of(settings)
    by_weight = settings.priority.weight_fairshare > 0 and not orders.isdisjoint({"multifactor", "hybrid"})
    return by_weight or "fairshare" in orders


_LEAST_SHARE, _MOST_SHARE = 1 / 64, 64.0
"""Users below the first, or above the second, multiple of their share rank equal."""

_PER_OCTAVE = 8
"""Resolution of shares: number of steps per doubling."""


_LEAST_PATIENCE = 0.1
"""Minimum factor on the wait for a reservation, for users who have used least of their share."""


class FairShareEntity:
    """One user under one account."""

    def __init__(self, account: str, user: str, points: float) -> None:
        self.account = account
        self.user = user
        self.is_counted = True
        """Whether others are compared with this user: not without any use and demand."""
        self.factor = 1.0
        self.share = 1.0
        """Use relative to their share: 1 as much as other active users, 2 twice that; rounded."""
        self.band = 0
        """The same in steps of `fairshare_step`."""
        self.is_idle = False
        """Whether none of their jobs ran at the last comparison."""
        self.patience = 1.0
        """Factor on their wait for a reservation."""
        self.points = points
        """Fair-share points in the weighted sum."""
        self.pending = 0
        """Number of their pending jobs."""
        self.running = 0
        self.rate = NO_AMOUNTS
        """Current holdings."""
        self.used, self.at = NO_AMOUNTS, -inf
        """Amounts times seconds, as of an instant."""
        self.ranked, self.ranked_at = NO_AMOUNTS, -inf
        """The same, as of the last ranking."""

    @property
    def mark(self) -> tuple[str, str]:
        return self.account, self.user


State = tuple[Amounts, int, Amounts, float, Amounts, float]
"""Of an entity: rate, runs, used, at, ranked, ranked_at."""


class FairShare:
    """All users ever seen, compared as of one instant."""

    def __init__(self, settings: Settings, capacity: Resources) -> None:
        self._settings = settings
        self._set_capacity(capacity)
        self._half_life_s = settings.priority.half_life_s
        self._over = 0.0, 1.0, 0.0
        """Cached coefficients for the last elapsed time, which is mostly the same for all users."""
        self._entities: dict[tuple[str, str], FairShareEntity] = {}
        self._pending: dict[FairShareEntity, None] = {}
        """Users with pending jobs."""
        self._at = -inf
        self.is_due = False
        """Whether the comparison as of then is still to be made."""
        self.counts_use = counts_use(settings)
        """Whether use counts at all."""
        self._first = settings.priority.weight_fairshare
        """Points of the user with the least use."""
        self._counts_factors = _counts_factors(settings)
        self._ranks_shares = "response_ratio" in orders_of(settings)
        """Whether the used fraction of the share affects ranks."""
        self.first_band = 0
        """Band of the users with the least use."""
        self._divided = frozenset[tuple[str, str]]()
        """Accounts and users among whom all shares were divided last, ..."""
        self._parts: dict[tuple[str, str], float] = {}
        """... and the fraction due to each."""

    def _set_capacity(self, capacity: Resources) -> None:
        self._capacity = capacity
        self._counted = tuple((number, amount) for number, amount in enumerate(amounts_of(capacity)) if amount > 0)
        """Index in `Amounts` and total, for nonzero totals only."""

    def reconfigure(self, capacity: Resources) -> None:
        if capacity != self._capacity:
            self._set_capacity(capacity)
            self.is_due = self.counts_use

    def copy(self) -> tuple[FairShare, dict[FairShareEntity, FairShareEntity]]:
        """Return an independent copy, and a mapping from old to new entities."""
        twin = take_over(FairShare(self._settings, self._capacity), self)
        twins = {
            one: take_over(FairShareEntity(one.account, one.user, one.points), one) for one in self._entities.values()
        }
        twin._entities = {mark: twins[one] for mark, one in self._entities.items()}
        twin._pending = {twins[one]: None for one in self._pending}
        return twin, twins

    def of(self, account: str, user: str) -> FairShareEntity:
        """The entity with these names; a new one changes the comparison of the others."""
        found = self._entities.get((account, user))
        if found is None:
            found = self._entities[account, user] = FairShareEntity(account, user, self._first)
            self.is_due = self.counts_use
        return found

    def factor(self, account: str, user: str) -> float:
        """Fair-Tree factor of a user under an account; 1 if there is no other user."""
        found = self._entities.get((account, user))
        return 1.0 if found is None else found.factor

    def add_pending(self, entity: FairShareEntity, jobs: int = 1) -> None:
        """Count pending jobs of a user; a negative number removes them."""
        if jobs < 0:
            entity.pending += jobs + 1
            self.remove_pending(entity)
            return
        if not entity.pending:
            self._pending[entity] = None
            if len(self._pending) == 2 or (self._ranks_shares and not entity.running):
                self.is_due = self.counts_use
            self._count(entity)
        entity.pending += jobs

    def remove_pending(self, entity: FairShareEntity) -> None:
        entity.pending -= 1
        if not entity.pending:
            del self._pending[entity]
            if len(self._pending) == 1 or (self._ranks_shares and not entity.running):
                self.is_due = self.counts_use
            if not entity.running and entity.used == NO_AMOUNTS and entity.rate is NO_AMOUNTS:
                entity.is_counted, self.is_due = False, self.counts_use

    def _count(self, entity: FairShareEntity) -> None:
        if not entity.is_counted:
            entity.is_counted, self.is_due = True, self.counts_use

    def reset(self, usage: Iterable[Usage]) -> None:
        """Restart from recorded use at an instant, open runs included."""
        for one in usage:
            entity = self.of(one.account, one.user)
            self._count(entity)
            entity.used, entity.at = amounts_of(one.used), one.at
            entity.ranked, entity.ranked_at = entity.used, one.at
            self.is_due = self.counts_use

    def recount(
        self, mark: tuple[str, str], row: Usage | None, open_runs: Sequence[tuple[Amounts, float]], at: float
    ) -> None:
        """Recompute a user's use as of `at` from ended runs and from open runs given as rate and start."""
        half_life_s = self._half_life_s
        total = NOTHING if row is None else decayed(row.used, at - row.at, half_life_s)
        for rate, start_at in open_runs:
            total += accrued(Resources(*rate), start_at, at, at, half_life_s)
        entity = self.of(*mark)
        self._count(entity)
        entity.used, entity.at, entity.rate, entity.running = amounts_of(total), at, NO_AMOUNTS, 0
        entity.ranked, entity.ranked_at = entity.used, at
        for rate, start_at in sorted(open_runs, key=lambda run: run[1]):
            self.hold(entity, rate, start_at)
        if row is None and not open_runs and not entity.pending:
            entity.is_counted = False
        self.is_due = self.counts_use

    def hold(self, entity: FairShareEntity, rate: Amounts, since: float = -inf) -> None:
        """Add to a user's holdings, since this instant or since before the recorded use was computed.

        Runs that began after that must be added in order of their starts.
        """
        self._count(entity)
        if since > entity.at > -inf:
            self._move(entity, since)
        if self._ranks_shares and not entity.running:
            self.is_due = True
        entity.running += 1
        gpus, vram_mib, cpus, mem_mib = entity.rate
        entity.rate = gpus + rate[0], vram_mib + rate[1], cpus + rate[2], mem_mib + rate[3]

    def begin(self, entity: FairShareEntity, rate: Amounts, now: float) -> None:
        """Add to a user's holdings from now on."""
        if entity.ranked_at != self._at:
            self._rank(entity)
        self._move(entity, now)
        self.hold(entity, rate)

    def end(self, entity: FairShareEntity, rate: Amounts, now: float) -> None:
        """End one run of the user and subtract its rate from now on."""
        self.leave(entity)
        self.charge(entity, rate, now)

    def leave(self, entity: FairShareEntity) -> None:
        """End one run of the user whose use has yet to be charged."""
        entity.running -= 1
        if self._ranks_shares and not entity.running:
            self.is_due = True

    def charge(self, entity: FairShareEntity, rate: Amounts, now: float) -> None:
        """Subtract a rate from now on; after the last run set it to zero, against rounding errors."""
        if entity.ranked_at != self._at:
            self._rank(entity)
        self._move(entity, now)
        gpus, vram_mib, cpus, mem_mib = entity.rate
        less = gpus - rate[0], vram_mib - rate[1], cpus - rate[2], mem_mib - rate[3]
        entity.rate = less if entity.running else NO_AMOUNTS

    @staticmethod
    def state_of(entity: FairShareEntity) -> State:
        """State changed by `begin`, for `restore`."""
        return entity.rate, entity.running, entity.used, entity.at, entity.ranked, entity.ranked_at

    @staticmethod
    def restore(entity: FairShareEntity, state: State) -> None:
        """Undo `begin`."""
        entity.rate, entity.running, entity.used, entity.at, entity.ranked, entity.ranked_at = state

    def _move(self, entity: FairShareEntity, at: float) -> None:
        """Accumulate use until then, as `decayed` and `accrued` do."""
        elapsed_s = at - entity.at
        if elapsed_s <= 0:
            return
        is_new, entity.at = entity.at == -inf, at
        if is_new or (entity.used is NO_AMOUNTS and entity.rate is NO_AMOUNTS):
            return
        if self._over[0] != elapsed_s:
            self._over = elapsed_s, *over(elapsed_s, self._half_life_s)
        _, kept, seconds = self._over
        (gpus, vram_mib, cpus, mem_mib), rate = entity.used, entity.rate
        entity.used = (
            gpus * kept + rate[0] * seconds,
            vram_mib * kept + rate[1] * seconds,
            cpus * kept + rate[2] * seconds,
            mem_mib * kept + rate[3] * seconds,
        )

    def _rank(self, entity: FairShareEntity) -> None:
        if entity.ranked_at != self._at:
            self._move(entity, self._at)
            entity.ranked, entity.ranked_at = entity.used, self._at

    def used(self) -> tuple[Usage, ...]:
        """Use of all users as of the last comparison."""
        return tuple(Usage(*mark, used, self._at) for mark, used in self._ranked().items())

    def _ranked(self) -> dict[tuple[str, str], Resources]:
        found = {}
        for mark, entity in self._entities.items():
            if entity.is_counted:
                self._rank(entity)
                found[mark] = Resources(*entity.ranked)
        return found

    def compare(self, at: float) -> Collection[FairShareEntity]:
        """Compare all users as of this instant and return those whose points change.

        Does nothing while at most one user has pending jobs: there is no other user to compare with.
        """
        if at != self._at:
            self._at, self.is_due = at, True
        if not self.is_due:
            return ()
        if len(self._pending) <= 1:
            return self._compare_with_nobody()
        self.is_due = False
        weight, changed = self._settings.priority.weight_fairshare, set[FairShareEntity]()
        if self._ranks_shares:
            changed.update(self._compare_shares())
        if not self._counts_factors:
            return changed
        factors = self._factors()
        for mark, entity in self._entities.items():
            factor = factors.get(mark, 1.0)
            if factor != entity.factor:
                entity.factor = factor
                changed.add(entity)
            entity.points = weight * factor
        return changed

    def _compare_with_nobody(self) -> Collection[FairShareEntity]:
        # Jobs that have waited `max_wait_s` are in the first band, regardless of user.
        is_moved, self.first_band = self.first_band != 0, 0
        usual = (1.0, 1.0, 1.0)
        alone = [one for one in self._pending if is_moved or (one.factor, one.share, one.patience) != usual]
        for entity in alone:
            entity.factor, entity.points, entity.patience = 1.0, self._first, 1.0
            self._set_share(entity, 1.0)
        return alone

    def _compare_shares(self) -> Collection[FairShareEntity]:
        """Compute the used fraction of the share of each user with a job; return those for whom it changed."""
        changed = set[FairShareEntity]()
        active = self._active()
        # Exact sums: the order of arrival of users must not matter.
        used, shares = fsum(usage for _, usage, _ in active), fsum(part for _, _, part in active)
        for entity, usage, part in active:
            share = 1.0
            if used > 0 and part > 0:
                share = min(_MOST_SHARE, max(_LEAST_SHARE, usage / used / (part / shares)))
            elif part <= 0:
                share = _MOST_SHARE
            # Rounded, so that a little more use changes nothing.
            is_other = self._set_share(entity, 2.0 ** (round(_PER_OCTAVE * log2(share)) / _PER_OCTAVE))
            if is_other or entity.is_idle is bool(entity.running):
                entity.is_idle = not entity.running
                changed.add(entity)
        first_band = min((one.band for one, _, _ in active), default=0)
        last_band = max((one.band for one, _, _ in active), default=0)
        for entity, _, _ in active:
            # Users who have used less than other active ones need not be patient with them.
            patience = 0.0 if entity.band < last_band else min(1.0, max(_LEAST_PATIENCE, entity.share))
            if patience != entity.patience:
                entity.patience = patience
                changed.add(entity)
        if first_band != self.first_band:
            # Jobs that have waited `max_wait_s` are there, regardless of user.
            self.first_band = first_band
            changed.update(self._pending)
        return changed

    def _active(self) -> list[tuple[FairShareEntity, float, float]]:
        """Users with a job, their use, and their fraction of all shares."""
        active = [one for one in self._entities.values() if one.pending or one.running]
        accounts, parts = self._settings.account, dict[tuple[str, str], float]()
        if accounts or any(one.account for one in active):
            marks = frozenset([one.mark for one in active])
            if marks != self._divided:
                # Who has a job changes less often than what they have used.
                self._divided, self._parts = marks, parts_of(accounts, marks)
            parts = self._parts
        found = []
        for entity in active:
            if entity.ranked_at != self._at:
                self._rank(entity)
            used, ranked = 0.0, entity.ranked
            for number, amount in self._counted:
                part = ranked[number] / amount
                if part > used:
                    used = part
            found.append((entity, used, parts[entity.mark] if parts else 1.0))
        return found

    def _set_share(self, entity: FairShareEntity, share: float) -> bool:
        if share == entity.share:
            return False
        entity.share = share
        step = self._settings.priority.fairshare_step
        entity.band = floor(log2(share) / log2(step) + 0.5) if step > 1 else 0
        return True

    def _factors(self) -> dict[tuple[str, str], float]:
        """Factor of each account and user, as given by `AccountTree`."""
        accounts = self._settings.account
        if accounts or any(account for account, _ in self._entities):
            tree = AccountTree(accounts, self._ranked(), self._capacity, ())
            return {mark: tree.factor(*mark) for mark in self._entities}
        used = {}
        for (_, user), entity in self._entities.items():
            if not entity.is_counted:
                continue
            if entity.ranked_at != self._at:
                self._rank(entity)
            share, ranked = 0.0, entity.ranked
            for number, amount in self._counted:
                part = ranked[number] / amount
                if part > share:
                    share = part
            used[user] = share
        found = factors_without_accounts(used)
        return {mark: found[mark[1]] for mark in self._entities if mark[1] in found}
