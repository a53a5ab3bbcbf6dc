"""Fair share over time: whoever ranks first is served, again and again, and use comes to stand as the shares do."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.queue_settings import AccountSettings
from gpusched.model.resources import Resources
from gpusched.model.snapshot import Usage
from gpusched.scheduler.fairshare import AccountTree, factors_without_accounts
from gpusched.scheduler.usage import charged, decayed

MACHINES = Resources(gpus=8, cpus=64)
HOUR = 3600.0
Leaf = tuple[str, str]


class Lab:
    """Users who never run out of jobs of one hour, one after the other on the machine."""

    def __init__(self, accounts: list[AccountSettings], half_life_s: float = inf) -> None:
        self.accounts = {account.name: account for account in accounts}
        self.half_life_s = half_life_s
        self.now = 0.0
        self.usage: dict[Leaf, Usage] = {}
        self.served: Counter[Leaf] = Counter()
        self.leaves = [(account.name, user) for account in accounts for user in account.users]

    def tree(self) -> AccountTree:
        used = {leaf: decayed(usage.used, self.now - usage.at, self.half_life_s) for leaf, usage in self.usage.items()}
        return AccountTree(self.accounts, used, MACHINES, self.leaves)

    def serve(self, asked: dict[Leaf, Resources] | None = None, among: list[Leaf] | None = None) -> Leaf:
        """One job of whoever ranks first; ties go by name."""
        tree = self.tree()
        first = min(among or self.leaves, key=lambda leaf: (-tree.factor(*leaf), leaf))
        rate = (asked or {}).get(first, Resources(gpus=1.0))
        start_at, self.now = self.now, self.now + HOUR
        before = self.usage.get(first)
        self.usage[first] = charged(before, *first, rate, start_at, self.now, self.now, self.half_life_s)
        self.served[first] += 1
        return first


def account(name: str, parent: str | None, shares: float, **users: float) -> AccountSettings:
    return AccountSettings(name, parent=parent, shares=shares, users=users)


@pytest.mark.parametrize(
    ("shares", "steps"),
    [((1.0, 1.0), 10), ((3.0, 1.0), 40), ((1.0, 2.0, 5.0), 80), ((0.1, 0.4), 50)],
)
def test_users_are_served_by_their_shares(shares, steps):
    users = {f"u{number}": share for number, share in enumerate(shares)}
    lab = Lab([account("lab", None, 1.0, **users)])
    for _ in range(steps):
        lab.serve()
    for user, share in users.items():
        assert lab.served["lab", user] == pytest.approx(steps * share / sum(shares), abs=1)


def test_accounts_are_served_by_shares_for_any_number_of_users():
    lab = Lab([account("many", None, 1.0, a=1, b=1, c=1, d=1), account("one", None, 1.0, z=1)])
    for _ in range(80):
        lab.serve()
    assert lab.served["one", "z"] == pytest.approx(40, abs=1)
    assert all(lab.served["many", user] == pytest.approx(10, abs=1) for user in "abcd")


def test_unused_shares_go_to_users_of_the_same_account():
    lab = Lab([account("left", None, 1.0, a=1, b=1), account("right", None, 1.0, c=1)])
    for _ in range(60):
        lab.serve(among=[("left", "a"), ("right", "c")])
    assert lab.served["left", "a"] == pytest.approx(30, abs=1)


def test_a_returning_user_catches_up_only_until_level():
    lab = Lab([account("lab", None, 1.0, a=1, b=1)])
    for _ in range(10):
        lab.serve(among=[("lab", "a")])
    back = [lab.serve()[1] for _ in range(14)]
    assert back[:9] == ["b"] * 9
    assert back[10:].count("a") == 2


def test_a_short_half_life_soon_forgives_old_usage():
    def jobs_until_even(half_life_s: float) -> int:
        lab = Lab([account("lab", None, 1.0, a=1, b=1)], half_life_s)
        for _ in range(50):
            lab.serve(among=[("lab", "a")])
        for count in range(60):
            if lab.serve()[1] == "a":
                return count
        return 60

    short, long, for_ever = jobs_until_even(5 * HOUR), jobs_until_even(50 * HOUR), jobs_until_even(inf)
    assert short < long < for_ever
    assert short <= 6
    assert for_ever == pytest.approx(50, abs=1)


def test_core_users_and_gpu_users_reach_the_same_dominant_share():
    lab = Lab([account("lab", None, 1.0, cores=1, gpus=1)])
    asked = {("lab", "cores"): Resources(cpus=16), ("lab", "gpus"): Resources(gpus=4, cpus=1)}
    for _ in range(60):
        lab.serve(asked)
    # A quarter of the cores against half of the GPUs: two jobs to one.
    assert lab.served["lab", "cores"] == pytest.approx(40, abs=1)
    assert lab.served["lab", "gpus"] == pytest.approx(20, abs=1)


shares = st.sampled_from([1.0, 1.0, 2.0, 3.0])


@st.composite
def labs(draw: st.DrawFn) -> list[AccountSettings]:
    """Two levels of accounts, users in the lower ones."""
    made = []
    for top in "AB"[: draw(st.integers(1, 2))]:
        made.append(AccountSettings(top, shares=draw(shares)))
        for number in range(draw(st.integers(1, 2))):
            users = {f"u{user}": draw(shares) for user in range(draw(st.integers(1, 2)))}
            made.append(AccountSettings(f"{top}{number}", parent=top, shares=draw(shares), users=users))
    return made


@given(labs())
def test_long_run_usage_matches_shares_at_every_level(accounts):
    lab = Lab(accounts)
    steps = 240
    for _ in range(steps):
        lab.serve()
    for row in lab.tree().shares():
        if row.depth == 0 or row.usage == 0:
            continue
        # Each level is within one job of what it should be; 240 jobs give the smallest at least six.
        siblings_jobs = row.usage / row.effective_usage / HOUR * 8
        assert abs(row.effective_usage - row.norm_shares) * siblings_jobs <= 2


@given(labs(), st.integers(1, 60))
def test_every_user_is_served(accounts, steps):
    """Within as many jobs as all shares together, in units of the smallest, everybody has had one."""
    lab = Lab(accounts)
    for _ in range(200 + steps):
        lab.serve()
    assert all(lab.served[leaf] for leaf in lab.leaves)


@given(labs(), st.floats(1.0, 100.0))
def test_the_unit_of_usage_does_not_matter(accounts, factor):
    lab = Lab(accounts)
    for _ in range(25):
        lab.serve()
    used = {leaf: usage.used for leaf, usage in lab.usage.items()}
    scaled = {leaf: amount.times(2.0 ** round(factor)) for leaf, amount in used.items()}
    one = AccountTree(lab.accounts, used, MACHINES, lab.leaves)
    other = AccountTree(lab.accounts, scaled, MACHINES, lab.leaves)
    assert [one.factor(*leaf) for leaf in lab.leaves] == [other.factor(*leaf) for leaf in lab.leaves]


@given(labs(), st.integers(0, 40), st.integers(1, 8))
def test_time_alone_changes_no_ranking(accounts, steps, half_lives):
    """All use fades at the same pace, so nobody gains on others by waiting."""
    lab = Lab(accounts, half_life_s=4 * HOUR)
    for _ in range(steps):
        lab.serve()
    before = lab.tree().shares()
    lab.now += half_lives * lab.half_life_s
    for row, early in zip(lab.tree().shares(), before, strict=True):
        assert row.usage == pytest.approx(early.usage * 0.5**half_lives)
        assert row.effective_usage == pytest.approx(early.effective_usage)


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 3), st.floats(0, 1e9)), max_size=8))
def test_the_shortcut_without_accounts_gives_the_same(amounts):
    # Ties are frequent among small whole numbers, and each kind of amount can be the dominant one.
    used = {user: Resources(gpus=float(gpus), cpus=cpus if gpus > 1 else 0.0) for user, (gpus, cpus) in amounts.items()}
    tree = AccountTree({}, {("", user): amount for user, amount in used.items()}, MACHINES, ())
    shares = {user: amount.dominant_share(MACHINES) for user, amount in used.items()}
    assert factors_without_accounts(shares) == {user: tree.factor("", user) for user in used}
