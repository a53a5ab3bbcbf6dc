"""Fair share over the tree of accounts, against Slurm's own answers and by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.queue_settings import AccountSettings
from gpusched.model.resources import NOTHING, Resources
from gpusched.scheduler.fairshare import AccountShare, AccountTree

MACHINES = Resources(gpus=8, vram_mib=8 * 24 * 1024, cpus=64, mem_mib=256 * 1024)


def account(name, parent=None, shares=1.0, **users):
    return AccountSettings(name, parent=parent, shares=shares, users={user: float(own) for user, own in users.items()})


def tree(*accounts, used=None, seen=(), capacity=MACHINES):
    """A tree of these accounts; `used` is GPU seconds per (account, user)."""
    usage = {mark: Resources(gpus=seconds) for mark, seconds in (used or {}).items()}
    return AccountTree({one.name: one for one in accounts}, usage, capacity, seen)


def factors(made: AccountTree) -> dict[tuple[str, str], float]:
    return {(row.account, row.user): row.factor for row in made.shares() if row.user is not None}


def row_of(made: AccountTree, name: str, user: str | None = None) -> AccountShare:
    return next(row for row in made.shares() if (row.account, row.user) == (name, user))


# Slurm 22.05.8, `sshare -a`: the root with its own user, and three accounts with one user each.

SLURM_ACCOUNTS = (
    account("chem", shares=1, bob=1),
    account("lab", shares=1, root=1),
    account("physics", shares=3, alice=1),
)
ROOT_USER = ("", "root")

SLURM_AFTER = {
    # account, user: RawShares, NormShares, EffectvUsage, FairShare
    ("", "root"): (1, 0.166667, 0.0, 1.000000),
    ("chem", None): (1, 0.166667, 0.838975, None),
    ("chem", "bob"): (1, 1.000000, 1.000000, 0.250000),
    ("lab", None): (1, 0.166667, 0.0, None),
    ("lab", "root"): (1, 1.000000, 0.0, 1.000000),
    ("physics", None): (3, 0.500000, 0.161025, None),
    ("physics", "alice"): (1, 1.000000, 1.000000, 0.500000),
}
"""With RawUsage 791 of bob and 152 of alice. Slurm rounds what it prints of the usage down."""


def slurm_tree() -> AccountTree:
    # 0.838975 : 0.161025 are the exact parts; 791 and 152 are what Slurm prints of them.
    used = {("chem", "bob"): 0.838975 * 944, ("physics", "alice"): 0.161025 * 944}
    return tree(*SLURM_ACCOUNTS, used=used, seen=[ROOT_USER])


@pytest.mark.parametrize(("place", "wanted"), SLURM_AFTER.items(), ids=str)
def test_slurm_gives_the_same_fair_share_for(place, wanted):
    shares, norm_shares, effective_usage, factor = wanted
    row = row_of(slurm_tree(), *place)
    assert row.shares == shares
    assert row.norm_shares == pytest.approx(norm_shares, abs=1e-6)
    assert row.effective_usage == pytest.approx(effective_usage, abs=1e-6)
    assert row.factor == factor


def test_slurm_lists_the_tree_in_the_same_order():
    assert [(row.account, row.user) for row in slurm_tree().shares()] == [("", None), *SLURM_AFTER]


def test_slurm_gives_the_same_answers_from_its_printed_usage():
    made = tree(*SLURM_ACCOUNTS, used={("chem", "bob"): 791, ("physics", "alice"): 152}, seen=[ROOT_USER])
    assert factors(made) == {place: wanted[3] for place, wanted in SLURM_AFTER.items() if place[1] is not None}
    assert row_of(made, "chem").effective_usage == pytest.approx(0.838975, abs=2e-4)


SLURM_LEVEL_FS = {("", "root"): inf, ("lab", None): inf, ("lab", "root"): inf}
"""`sshare -l` of the same accounts while only jobs of alice had ended: infinite for who has used nothing.

(The rows of chem and physics in that answer are not compared: Slurm had not worked them out yet and
printed an effective usage of 0 next to a raw usage of 59.)
"""


@pytest.mark.parametrize(("place", "level_fs"), SLURM_LEVEL_FS.items(), ids=str)
def test_slurm_has_the_same_level_fs_for(place, level_fs):
    made = tree(*SLURM_ACCOUNTS, used={("physics", "alice"): 59}, seen=[ROOT_USER])
    row = row_of(made, *place)
    assert row.level_fs == level_fs
    assert row.factor in (None, 1.0)


# Ranks by hand

RANKS = {
    "nobody is there": ([], {}, [], {}),
    "one user who has used all": ([], {("a", "ann"): 50}, [], {("a", "ann"): 1.0}),
    "no usage at all: everybody is first": (
        [account("a", ann=1, amy=5), account("b", shares=9, bob=1)],
        {},
        [],
        {("a", "ann"): 1.0, ("a", "amy"): 1.0, ("b", "bob"): 1.0},
    ),
    "usage that is nothing is no usage": (
        [],
        {("a", "ann"): 0, ("b", "bob"): 0},
        [],
        {("a", "ann"): 1.0, ("b", "bob"): 1.0},
    ),
    "of two equal users the one who used less": (
        [account("a", ann=1, bob=1)],
        {("a", "ann"): 10, ("a", "bob"): 20},
        [],
        {("a", "ann"): 1.0, ("a", "bob"): 0.5},
    ),
    "who has more shares may have used more": (
        [account("a", ann=3, bob=1)],
        {("a", "ann"): 20, ("a", "bob"): 10},
        [],
        {("a", "ann"): 1.0, ("a", "bob"): 0.5},
    ),
    "everybody in an open account has the shares of `*`": (
        [AccountSettings("a", users={"*": 1.0, "ann": 3.0})],
        {("a", "ann"): 20, ("a", "bob"): 10},
        [],
        {("a", "ann"): 1.0, ("a", "bob"): 0.5},
    ),
    "more shares for everybody than for one who is named": (
        [AccountSettings("a", users={"*": 4.0, "ann": 1.0})],
        {("a", "ann"): 10, ("a", "bob"): 20},
        [],
        {("a", "ann"): 0.5, ("a", "bob"): 1.0},
    ),
    "use in the ratio of the shares is a tie": (
        [account("a", ann=3, bob=1)],
        {("a", "ann"): 30, ("a", "bob"): 10},
        [],
        {("a", "ann"): 1.0, ("a", "bob"): 1.0},
    ),
    "after a tie the rank goes on as if there had been none": (
        [account("a", ann=1, amy=1, bob=1)],
        {("a", "ann"): 10, ("a", "amy"): 10, ("a", "bob"): 30},
        [],
        {("a", "ann"): 1.0, ("a", "amy"): 1.0, ("a", "bob"): 1 / 3},
    ),
    "an account's hog goes before the best of an account that had more": (
        [account("a", ann=1, amy=1), account("b", bob=1, bea=1)],
        {("a", "ann"): 9, ("a", "amy"): 1, ("b", "bob"): 100, ("b", "bea"): 0},
        [],
        {("a", "amy"): 1.0, ("a", "ann"): 0.75, ("b", "bea"): 0.5, ("b", "bob"): 0.25},
    ),
    "no shares is last though nothing was used": (
        [account("a", ann=0, bob=1)],
        {("a", "bob"): 10},
        [],
        {("a", "bob"): 1.0, ("a", "ann"): 0.5},
    ),
    "an account without shares is last with all its users": (
        [account("a", shares=0, ann=1), account("b", bob=1)],
        {("b", "bob"): 10},
        [],
        {("b", "bob"): 1.0, ("a", "ann"): 0.5},
    ),
    "nobody has shares: a tie": (
        [account("a", ann=0, bob=0)],
        {("a", "bob"): 10},
        [],
        {("a", "ann"): 1.0, ("a", "bob"): 1.0},
    ),
    "a user that the account does not name has one share": (
        [account("a", ann=2)],
        {("a", "ann"): 15, ("a", "bob"): 10},
        [],
        {("a", "ann"): 1.0, ("a", "bob"): 0.5},
    ),
    "an account that is not configured is at the top with one share": (
        [account("a", shares=2, ann=1)],
        {("a", "ann"): 15, ("x", "xen"): 10},
        [],
        {("a", "ann"): 1.0, ("x", "xen"): 0.5},
    ),
    "a user who only waits is ranked too": (
        [],
        {("a", "ann"): 15},
        [("b", "bob")],
        {("b", "bob"): 1.0, ("a", "ann"): 0.5},
    ),
    "a user who is named but has never come is ranked too": (
        [account("a", ann=1, amy=1)],
        {("a", "ann"): 15},
        [],
        {("a", "amy"): 1.0, ("a", "ann"): 0.5},
    ),
    "accounts that are tied are walked as one": (
        [account("a", ann=1, amy=1), account("b", bob=1, bea=1)],
        {("a", "ann"): 8, ("a", "amy"): 2, ("b", "bob"): 9, ("b", "bea"): 1},
        [],
        {("b", "bea"): 1.0, ("a", "amy"): 0.75, ("a", "ann"): 0.5, ("b", "bob"): 0.25},
    ),
    "a user of the root goes before the accounts of the same level": (
        [account("a", ann=1)],
        {("", "root"): 5, ("a", "ann"): 5, ("b", "bob"): 500},
        [],
        {("", "root"): 1.0, ("a", "ann"): 1.0, ("b", "bob"): 1 / 3},
    ),
    "two levels of accounts": (
        [
            account("science", shares=1),
            account("physics", "science", shares=3, ann=1),
            account("chem", "science", shares=1, bob=1),
            account("arts", shares=1, eve=1),
        ],
        {("physics", "ann"): 60, ("chem", "bob"): 30, ("arts", "eve"): 80},
        [],
        {("arts", "eve"): 1.0, ("physics", "ann"): 2 / 3, ("chem", "bob"): 1 / 3},
    ),
    "one user in two accounts stands twice": (
        [account("a", ann=1), account("b", ann=1)],
        {("a", "ann"): 10},
        [],
        {("b", "ann"): 1.0, ("a", "ann"): 0.5},
    ),
    "an account without users takes no rank": (
        [account("empty"), account("a", ann=1)],
        {("a", "ann"): 10},
        [],
        {("a", "ann"): 1.0},
    ),
}


@pytest.mark.parametrize(("accounts", "used", "seen", "wanted"), RANKS.values(), ids=RANKS)
def test_users_are_ranked(accounts, used, seen, wanted):
    made = tree(*accounts, used=used, seen=seen)
    assert factors(made) == pytest.approx(wanted)
    for (name, user), factor in wanted.items():
        assert made.factor(name, user) == pytest.approx(factor)


@pytest.mark.parametrize(("accounts", "used", "seen", "wanted"), RANKS.values(), ids=RANKS)
def test_the_order_of_accounts_and_users_does_not_matter(accounts, used, seen, wanted):
    turned = tree(*reversed(accounts), used=dict(reversed(used.items())), seen=list(reversed(seen)))
    assert turned.shares() == tree(*accounts, used=used, seen=seen).shares()


# Usage


def test_usage_is_counted_by_its_dominant_share():
    usage = {
        ("a", "gpus"): Resources(gpus=4, cpus=1),
        ("b", "cores"): Resources(cpus=48),
        ("c", "memory"): Resources(mem_mib=64 * 1024, cpus=2),
    }
    made = AccountTree({}, usage, MACHINES, ())
    assert row_of(made, "a").usage == 0.5
    assert row_of(made, "b").usage == 0.75
    assert row_of(made, "c").usage == 0.25
    assert factors(made) == pytest.approx({("c", "memory"): 1.0, ("a", "gpus"): 2 / 3, ("b", "cores"): 1 / 3})


def test_usage_of_an_account_includes_all_below_it():
    made = tree(
        account("top"), account("mid", "top", ann=1), account("low", "mid"), used={("low", "bob"): 3, ("mid", "ann"): 4}
    )
    assert row_of(made, "low").used.gpus == 3
    assert row_of(made, "mid").used.gpus == 7
    assert row_of(made, "top").used.gpus == 7
    assert row_of(made, "").used.gpus == 7


def test_usage_of_different_kinds_is_added_before_the_share_is_taken():
    usage = {("a", "ann"): Resources(gpus=4), ("a", "bob"): Resources(cpus=32)}
    made = AccountTree({}, usage, MACHINES, ())
    assert row_of(made, "a").usage == 0.5


def test_without_machines_all_usage_is_zero():
    made = tree(used={("a", "ann"): 5, ("b", "bob"): 50}, capacity=NOTHING)
    assert factors(made) == {("a", "ann"): 1.0, ("b", "bob"): 1.0}


def test_negative_usage_counts_as_none():
    made = tree(used={("a", "ann"): -5, ("b", "bob"): 5})
    assert row_of(made, "a", "ann").usage == 0
    assert factors(made) == {("a", "ann"): 1.0, ("b", "bob"): 0.5}


def test_an_unseen_user_has_no_usage():
    assert tree(used={("a", "ann"): 5}).factor("a", "new") == 1.0


# The listing


def test_the_listing_walks_the_tree_users_first_then_accounts_by_name():
    made = tree(account("z", zoe=1, abe=1), account("m", "z", moe=1), account("b", "z", bob=1), used={("", "root"): 1})
    assert [(row.depth, row.account, row.user) for row in made.shares()] == [
        (0, "", None),
        (1, "", "root"),
        (1, "z", None),
        (2, "z", "abe"),
        (2, "z", "zoe"),
        (2, "b", None),
        (3, "b", "bob"),
        (2, "m", None),
        (3, "m", "moe"),
    ]


def test_shares_are_normed_among_siblings():
    made = tree(account("a", shares=1), account("b", shares=3, bob=2, bea=6))
    assert row_of(made, "a").norm_shares == 0.25
    assert row_of(made, "b").norm_shares == 0.75
    assert row_of(made, "b", "bob").norm_shares == 0.25
    assert row_of(made, "").norm_shares == 1.0


@pytest.mark.parametrize("shares", [-1.0, -0.001])
def test_negative_shares_are_none(shares):
    assert row_of(tree(account("a", shares=shares), account("b")), "a").norm_shares == 0.0


# Settings that no configuration should have

BROKEN = {
    "a parent that is not there": [account("a", "nobody", ann=1)],
    "its own parent": [account("a", "a", ann=1)],
    "a circle of two": [account("a", "b", ann=1), account("b", "a")],
    "below a circle": [account("a", "b", ann=1), account("b", "c"), account("c", "b")],
}


@pytest.mark.parametrize("accounts", BROKEN.values(), ids=BROKEN)
def test_every_user_is_ranked_even_with(accounts):
    made = tree(*accounts, used={("a", "ann"): 5, ("b", "bob"): 7})
    assert set(factors(made)) == {("a", "ann"), ("b", "bob")}
    assert {row.account for row in made.shares()} >= {one.name for one in accounts}


# For any tree

names = st.sampled_from(["a", "b", "c", "d", "e"])


@st.composite
def trees(draw):
    """Accounts in a tree (a parent comes earlier in the alphabet), use of some users."""
    accounts = []
    for position, name in enumerate("abcde"[: draw(st.integers(0, 5))]):
        above = draw(st.sampled_from([None, *"abcde"[:position]]))
        users = draw(st.dictionaries(st.sampled_from(["u", "v", "w"]), st.sampled_from([0, 1, 1, 2, 5]), max_size=3))
        accounts.append(account(name, above, draw(st.sampled_from([0.0, 1.0, 1.0, 3.0])), **users))
    marks = st.tuples(st.sampled_from(["", "a", "b", "c", "x"]), st.sampled_from(["u", "v", "w"]))
    used = draw(st.dictionaries(marks, st.sampled_from([0, 1, 1, 2, 10, 100]), max_size=8))
    return accounts, used, draw(st.lists(marks, max_size=3))


@given(trees())
def test_factors_are_ranks(case):
    accounts, used, seen = case
    found = sorted(factors(tree(*accounts, used=used, seen=seen)).values(), reverse=True)
    count = len(found)
    for position, factor in enumerate(found):
        assert 0 < factor <= 1
        is_rank = factor == pytest.approx((count - position) / count)
        assert is_rank or factor == found[position - 1], "who does not have the next rank is tied"
    assert not found or found[0] == 1.0


@given(trees())
def test_siblings_share_the_whole(case):
    accounts, used, seen = case
    made = tree(*accounts, used=used, seen=seen)
    rows = list(made.shares())
    for position, above in enumerate(rows):
        if above.user is not None:
            continue
        below = []
        for row in rows[position + 1 :]:
            if row.depth <= above.depth:
                break
            if row.depth == above.depth + 1:
                below.append(row)
        if any(row.shares for row in below):
            assert sum(row.norm_shares for row in below) == pytest.approx(1)
        if any(row.usage for row in below):
            assert sum(row.effective_usage for row in below) == pytest.approx(1)


@given(trees(), st.integers(1, 1000))
def test_using_more_never_improves_the_rank(case, more):
    accounts, used, seen = case
    if not used:
        return
    who = min(used)
    before = tree(*accounts, used=used, seen=seen).factor(*who)
    after = tree(*accounts, used={**used, who: used[who] + more}, seen=seen).factor(*who)
    assert after <= before + 1e-12


@given(trees())
def test_a_sibling_with_a_higher_level_fs_is_never_behind(case):
    accounts, used, seen = case
    rows = [row for row in tree(*accounts, used=used, seen=seen).shares() if row.user is not None]
    for one in rows:
        for other in rows:
            if one.account == other.account and one.level_fs > other.level_fs:
                assert (one.factor or 0) > (other.factor or 0)


# Against a second, plainer account of the algorithm: two counters that are passed down, as Slurm has it


class Counters:
    """`rank` is what the next user gets when tied with the one before, `next_rank` when not."""

    def __init__(self, users: int) -> None:
        self.rank = self.next_rank = self.users = users
        self.factors: dict[tuple[str, str], float] = {}


def walk(
    rows: list[AccountShare], below: dict[AccountShare, list[AccountShare]], counters: Counters, is_tied: bool
) -> None:
    """Siblings by LevelFS, users before accounts; accounts that are tied are walked as one."""
    ordered = sorted(rows, key=lambda row: (-row.level_fs, row.user is None, row.user or row.account, row.account))
    before: float | None = None
    skipped = 0
    for position, row in enumerate(ordered):
        if skipped:
            skipped -= 1
            continue
        tied = is_tied if position == 0 else before == row.level_fs
        if row.user is not None:
            if not tied:
                counters.rank = counters.next_rank
            counters.factors[row.account, row.user] = counters.rank / counters.users
            counters.next_rank -= 1
        else:
            same = [other for other in ordered[position + 1 :] if other.level_fs == row.level_fs]
            skipped = len(same)
            walk([child for one in (row, *same) for child in below[one]], below, counters, tied)
        before = row.level_fs


@given(trees())
def test_factors_equal_the_plain_walk(case):
    accounts, used, seen = case
    made = tree(*accounts, used=used, seen=seen)
    rows = list(made.shares())
    below: dict[AccountShare, list[AccountShare]] = {row: [] for row in rows}
    path: list[AccountShare] = []
    for row in rows:
        path[row.depth :] = [row]
        if row.depth:
            below[path[row.depth - 1]].append(row)
    found = factors(made)
    counters = Counters(len(found))
    walk(below[rows[0]], below, counters, False)
    assert found == pytest.approx(counters.factors)
