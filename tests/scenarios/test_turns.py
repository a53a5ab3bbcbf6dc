"""Turns between users who compete for all GPUs: who gets which of the next starts, wave after wave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import pytest
from scenario import HOUR, Scenario, running, wants

from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.value import replace
from gpusched.scheduler.planner import Planner
from gpusched.testing import NOW, node

FOUR = [node(gpus=4, cpus=64.0)]
UIDS = {"ann": 1000, "bob": 1001, "cyd": 1002}
USED = {"ann": 82.0, "bob": 39.0}
"""GPU-hours."""


def jobs_of(user: str, count: int, gpus: int = 1, limit: float | None = HOUR, account: str = "lab"):
    first = 1 + 100 * sorted(UIDS).index(user)
    parts = {"user": user, "uid": UIDS[user], "account": account}
    return [wants(first + number, gpus, limit=limit, waited=10 * 60.0, **parts) for number in range(count)]


def played(
    waiting: Sequence,
    used: Mapping[str, float],
    starts: int,
    run_s: Mapping[str, float] = {},
    held: Sequence = (),
    accounts: Mapping[str, AccountSettings] = {},
    nodes=FOUR,
) -> list[str]:
    """Users of the first starts, as cycles follow each other. Args: run_s: of each user's jobs; 1 h unless given."""
    account_of = {one.user: one.spec.account for one in [*waiting]}
    usage = [
        Usage(account_of.get(user, "lab"), user, Resources(gpus=hours * HOUR), NOW) for user, hours in used.items()
    ]
    settings = replace(Settings(), priority=PrioritySettings(), account=dict(accounts))
    planner = Planner.from_snapshot(Scenario(nodes, waiting, held, settings, usage=usage).snapshot(), settings)
    user_of = {one.id: one.user for one in waiting}
    ends: list[tuple[float, int]] = [(one.expected_end_at, one.job_id) for one in held]
    now, found = NOW, []
    while True:
        for start in planner.schedule(now):
            found.append(user_of[start.job_id])
            heappush(ends, (now + run_s.get(found[-1], HOUR), start.job_id))
        if len(found) >= starts or not ends:
            return found[:starts]
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            planner.state.run_ended(heappop(ends)[1])


LENGTHS = (0.1, 1.0, 2.0, 5.0, 10.0)


@pytest.mark.parametrize("hours", LENGTHS)
@pytest.mark.parametrize("is_first", [True, False], ids=["who used less came first", "who used more came first"])
def test_a_user_who_has_used_half_as_much_gets_two_of_three_starts(hours: float, is_first: bool) -> None:
    light, heavy = ("ann", "bob") if is_first else ("bob", "ann")
    waiting = [*jobs_of(light, 15, limit=hours * HOUR), *jobs_of(heavy, 15, limit=hours * HOUR)]
    length_s = dict.fromkeys(UIDS, hours * HOUR)
    found = Counter(played(waiting, {light: 39.0, heavy: 82.0}, 12, length_s))
    assert 7 <= found[light] <= 9


def gpu_hours(found: Sequence[str], gpus: Mapping[str, int] = {}, hours: Mapping[str, float] = {}) -> dict[str, float]:
    """GPU-hours of these starts, by user."""
    return {user: count * gpus.get(user, 1) * hours.get(user, 1.0) for user, count in Counter(found).items()}


def test_wide_jobs_are_charged_by_their_gpus() -> None:
    """Two of eight GPUs for each job of the user who has used less: two thirds of the GPU time, not of the starts."""
    waiting = [*jobs_of("ann", 60, gpus=1), *jobs_of("bob", 40, gpus=2)]
    found = gpu_hours(played(waiting, USED, 40, nodes=[node(gpus=8, cpus=64.0)]), {"bob": 2})
    assert found["bob"] / sum(found.values()) == pytest.approx(2 / 3, abs=0.1)


@pytest.mark.parametrize("longer", ["ann", "bob"])
def test_long_jobs_are_charged_for_as_long_as_they_run(longer: str) -> None:
    hours = {"ann": 1.0, "bob": 1.0, longer: 4.0}
    length_s = {user: amount * HOUR for user, amount in hours.items()}
    waiting = [one for user in ("ann", "bob") for one in jobs_of(user, 80, limit=length_s[user])]
    found = gpu_hours(played(waiting, {"ann": 820.0, "bob": 390.0}, 40, length_s), hours=hours)
    assert found["bob"] / sum(found.values()) == pytest.approx(2 / 3, abs=0.12)


def test_three_users_who_have_used_different_amounts() -> None:
    """Of six GPUs each is due two; who has used half as much as is due to them three, and half as much again one."""
    used = {"ann": 1500.0, "bob": 1000.0, "cyd": 500.0}
    waiting = [one for user in used for one in jobs_of(user, 40)]
    found = Counter(played(waiting, used, 60, nodes=[node(gpus=6, cpus=64.0)]))
    assert found["cyd"] == pytest.approx(30, abs=3)
    assert found["bob"] == pytest.approx(20, abs=3)
    assert found["ann"] == pytest.approx(10, abs=3)


def test_a_user_with_two_shares_of_an_account_gets_twice_as_much() -> None:
    accounts = {"lab": AccountSettings("lab", users={"ann": 2.0, "bob": 1.0})}
    waiting = [*jobs_of("ann", 60), *jobs_of("bob", 60)]
    nodes = [node(gpus=6, cpus=64.0)]
    found = Counter(played(waiting, {"ann": 2000.0, "bob": 1000.0}, 30, accounts=accounts, nodes=nodes))
    assert found["ann"] == pytest.approx(20, abs=2)


def test_what_a_user_runs_counts_before_the_next_start() -> None:
    """Ann runs on three GPUs; of equal users it is Bob's turn until he has as many."""
    held = [running(90 + n, f"n1:{n}", since=0.0, ends_in=HOUR, user="ann", account="lab") for n in range(3)]
    waiting = [*jobs_of("ann", 15), *jobs_of("bob", 15)]
    equal = {"ann": 50.0, "bob": 50.0}
    found = played(waiting, equal, 4, held=held, nodes=[node(gpus=7, cpus=64.0)])
    assert Counter(found)["bob"] >= 3
    assert Counter(played(waiting, equal, 4))["bob"] == 2


@pytest.mark.parametrize("user", ["ann", "bob"])
def test_jobs_that_end_early_cost_what_they_used(user: str) -> None:
    """Of ten hours that were allowed they run one: the other user is not paid for the nine that nobody used."""
    limit_s = dict.fromkeys(USED, HOUR) | {user: 10 * HOUR}
    waiting = [one for name in USED for one in jobs_of(name, 15, limit=limit_s[name])]
    assert 7 <= Counter(played(waiting, USED, 12))["bob"] <= 9


@pytest.mark.parametrize("is_first", [True, False], ids=["who used less came first", "who used more came first"])
def test_places_in_line_are_the_order_of_the_next_starts(is_first: bool) -> None:
    light, heavy = ("ann", "bob") if is_first else ("bob", "ann")
    waiting = [*jobs_of(light, 15), *jobs_of(heavy, 15)]
    used = {light: 39.0, heavy: 82.0}
    usage = [Usage("lab", user, Resources(gpus=hours * HOUR), NOW) for user, hours in used.items()]
    planner = Planner.from_snapshot(Scenario(FOUR, waiting, usage=usage).snapshot(), Settings())
    order = [job.id for _, job in planner.in_order(NOW)]
    user_of = {one.id: one.user for one in waiting}
    assert sorted(order) == sorted(user_of)
    assert [start.job_id for start in planner.fork().plan(NOW).starts] == order[:4]
    assert [user_of[job_id] for job_id in order[:8]] == played(waiting, used, 8)
    assert 7 <= [user_of[job_id] for job_id in order[:12]].count(light) <= 9
    # Asking changes nothing.
    assert [job.id for _, job in planner.in_order(NOW)] == order
