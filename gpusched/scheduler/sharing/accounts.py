"""Fair share over the tree of accounts: who has used least of what is theirs goes first.

Source: Slurm's Fair Tree (Levinthal and Cox, priority/multifactor since 14.11). At each level a node's
LevelFS is its part of the shares over its part of the use; siblings are sorted by it, and the users are
ranked in the order in which a walk down the sorted tree meets them. So an account that has had less than
its share puts all of its users before those of one that has had more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import EVERYBODY, AccountSettings
from gpusched.scheduler.sharing.upward import parent_in


@dataclass(frozen=True, slots=True)
class Standing:
    """How one account, or one user in it, stands: the columns of `sshare -l`."""

    account: str
    """Empty for the root of the tree."""
    user: str | None
    """None in the row of the account itself."""
    depth: int
    """0 for the root."""
    shares: float
    norm_shares: float
    """Shares over those of all siblings, 0 to 1."""
    used: Resources
    """Decayed amounts times seconds, of an account with all below it."""
    usage: float
    """Dominant share of what was used: seconds of the whole cluster."""
    effective_usage: float
    """Usage over that of all siblings, 0 to 1."""
    level_fs: float
    """norm_shares / effective_usage: above 1 has had less than its share; infinite has used nothing."""
    factor: float | None
    """Of a user, in (0, 1]: 1 is the first in rank. None of an account."""


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
    def place(self) -> tuple[bool, str]:
        """Where it stands among its siblings when they are listed: users first, then accounts, by name."""
        return self.user is None, self.user or self.account


class AccountTree:
    """Accounts with users as leaves, ranked by use. `usage` and `seen` are per (account, user).

    Leaves are the users that an account names, those that have used something and those that were seen.
    An account that is used but not configured is at the top with 1 share; the account `""` is the root
    itself. `capacity` is what a share is a part of.
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
        """Fair-share factor in [0, 1], 1 for the first in rank; also for one that was never seen."""
        return self._factors.get((account, user), 1.0)

    def parts(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Of each account and user what they have used, and their part of all shares."""
        found: dict[tuple[str, str], tuple[float, float]] = {}

        def add(node: _Node, part: float) -> None:
            part *= node.norm_shares
            if node.user is not None:
                found[node.account, node.user] = node.usage, part
            for child in node.children:
                add(child, part)

        add(self._root, 1.0)
        return found

    def standings(self) -> tuple[Standing, ...]:
        """The whole tree from the root down: the users of an account, then the accounts below it, by name."""
        return tuple(_list(self._root, 0))


def factors_without_accounts(usage: Mapping[str, float]) -> dict[str, float]:
    """The factor of each user where there are no accounts and all have as many shares: those of `AccountTree`.

    Args: usage: the dominant share of what each has used, as in `Standing.usage`.
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
    """The bare tree: accounts under their parents, users under their accounts."""
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
    """What was used, from the leaves up."""
    if node.user is not None:
        node.used = usage.get((node.account, node.user), NOTHING)
    for child in node.children:
        _add_up(child, usage, capacity)
        node.used += child.used
    node.usage = max(0.0, node.used.dominant_share(capacity))


def _weigh(siblings: list[_Node]) -> None:
    """Shares and use of each against its siblings, all the way down."""
    shares = sum(node.shares for node in siblings)
    usage = sum(node.usage for node in siblings)
    for node in siblings:
        node.norm_shares = node.shares / shares if shares else 0.0
        node.effective_usage = node.usage / usage if usage else 0.0
        node.level_fs = _level_fs(node.norm_shares, node.effective_usage)
        _weigh(node.children)


def _level_fs(norm_shares: float, effective_usage: float) -> float:
    """Who has no shares is last, used or not; who has used nothing is first."""
    if norm_shares <= 0:
        return 0.0
    return norm_shares / effective_usage if effective_usage > 0 else inf


def _rank(root: _Node, count: int) -> dict[tuple[str, str], float]:
    """Factor of each user: rank / number of users, the same for those that are tied."""
    factors: dict[tuple[str, str], float] = {}
    last_rank = count
    for node, is_tied in _in_order(root.children, False):
        rank = last_rank if is_tied else count - len(factors)
        last_rank = rank
        node.factor = rank / count
        factors[node.account, node.user or ""] = node.factor
    return factors


def _in_order(siblings: Iterable[_Node], starts_tied: bool) -> Iterable[tuple[_Node, bool]]:
    """Users from the first in rank to the last, and whether each is tied with the one before.

    Accounts that are tied are walked as one: their children compete as siblings, as in Slurm.
    """
    # Users go before accounts of the same LevelFS; names only make the order the same every time.
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


def _list(node: _Node, depth: int) -> Iterable[Standing]:
    yield Standing(
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
