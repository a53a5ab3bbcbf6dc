"""The orders of the whole queue by name, and the factors of the weighted one."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, load, running, settings, wants

from gpusched.model.planner_settings import ORDERS
from gpusched.model.resources import Resources
from gpusched.model.snapshot import Usage
from gpusched.testing import NOW, node

ONE = [node(gpus=1)]
FOUR = [node(gpus=4)]


def by(order, **priority):
    return settings(priority={"order": order, **priority})


def used(user, gpu_hours, account="lab"):
    return Usage(account, user, Resources(gpus=gpu_hours * HOUR), NOW)


ANN, BOB = {"user": "ann", "uid": 1, "account": "lab"}, {"user": "bob", "uid": 2, "account": "lab"}

WHO_GOES_FIRST = {
    "fifo: who came first, whatever nice says": (by("fifo"), [wants(1, 1, nice=500), wants(2, 1, nice=-500)], 1),
    "priority: nice alone, whatever the age": (
        by("priority"),
        [wants(1, 1, waited=7 * 86400), wants(2, 1, nice=-1, waited=0)],
        2,
    ),
    "priority: at equal nice who came first": (by("priority"), [wants(2, 1), wants(1, 1)], 1),
    "sjf: the shortest time limit": (
        by("sjf"),
        [wants(1, 1, limit=HOUR), wants(2, 1, limit=MINUTE), wants(3, 1)],
        2,
    ),
    "sjf: no time limit comes last": (by("sjf"), [wants(1, 1), wants(2, 1, limit=100 * HOUR)], 2),
    "hybrid: a small demand outweighs some age": (
        by("hybrid", weight_nice=0.0, weight_fairshare=0.0),
        [wants(1, 1, cpus=12, waited=HOUR), wants(2, 1, cpus=1, waited=HOUR / 2)],
        # 1 GPU of 1 is all of it for both: nothing is left of either priority, and age decides
        1,
    ),
    "multifactor: age, when all else is equal": (by("multifactor"), [wants(1, 1), wants(2, 1)], 1),
    "multifactor: a deadline that is near": (
        by("multifactor", weight_deadline=5000.0),
        [wants(1, 1, limit=HOUR), wants(2, 1, limit=HOUR, deadline_at=NOW + 2 * HOUR)],
        2,
    ),
    "multifactor: a far deadline adds nothing": (
        by("multifactor", weight_deadline=5000.0),
        [wants(1, 1, limit=HOUR), wants(2, 1, limit=HOUR, deadline_at=NOW + 30 * 86400)],
        1,
    ),
    "multifactor: who asks for much, when size weighs": (
        by("multifactor", weight_size=5000.0),
        [wants(1, cpus=1), wants(2, cpus=16)],
        2,
    ),
    "multifactor: who asks for little, when small is favoured": (
        by("multifactor", weight_size=5000.0, favor_small=True),
        [wants(1, cpus=16), wants(2, cpus=1)],
        2,
    ),
    "multifactor: a small dominant share, when fit weighs": (
        by("multifactor", weight_fit=5000.0),
        [wants(1, cpus=16), wants(2, cpus=8, mem_mib=1024)],
        2,
    ),
}


@pytest.mark.parametrize(("chosen", "waiting", "first"), WHO_GOES_FIRST.values(), ids=WHO_GOES_FIRST)
def test_jobs_are_ordered(chosen, waiting, first):
    assert next(iter(Scenario(ONE, waiting, settings=chosen).outcome().starts)) == first


def test_hybrid_multiplies_priority_by_the_resources_left_to_others():
    chosen = by("hybrid", weight_nice=0.0, weight_fairshare=0.0)
    small, large = wants(2, 1, waited=100), wants(1, 3, waited=250)
    # 250 x (100 - 75) is less than 100 x (100 - 25); with 400 s of age the large one is ahead
    assert next(iter(Scenario(FOUR, [large, small], settings=chosen).outcome().starts)) == 2
    assert next(iter(Scenario(FOUR, [wants(1, 3, waited=400), small], settings=chosen).outcome().starts)) == 1


@pytest.mark.parametrize("order", ["fairshare", "multifactor"])
def test_the_user_with_less_usage_of_their_share_goes_first(order):
    waiting = [wants(1, 1, **ANN), wants(2, 1, **BOB)]
    before = Scenario(ONE, waiting, settings=by(order)).outcome()
    assert list(before.starts) == [1]
    after = Scenario(ONE, waiting, settings=by(order), usage=[used("ann", 5), used("bob", 1)]).outcome()
    assert list(after.starts) == [2]


def test_usage_counts_relative_to_shares():
    waiting = [wants(1, 1, **ANN), wants(2, 1, **BOB)]
    accounts = {"lab": {"users": {"ann": 10.0, "bob": 1.0}}}
    chosen = settings(priority={"order": "fairshare"}, account=accounts)
    assert list(Scenario(ONE, waiting, settings=chosen, usage=[used("ann", 5), used("bob", 1)]).outcome().starts) == [1]


def test_running_jobs_count_as_usage():
    waiting = [wants(1, 1, **ANN), wants(2, 1, **BOB)]
    held = [running(9, "n1:0", user="ann", account="lab")]
    assert list(Scenario([node(gpus=2)], waiting, held, by("fairshare")).outcome().starts) == [2]


def test_a_tier_takes_precedence_over_everything_else():
    chosen = settings(qos={"urgent": {"tier": 1}})
    waiting = [wants(1, 1, nice=-10_000), wants(2, 1, qos="urgent", nice=10_000)]
    assert list(Scenario(ONE, waiting, settings=chosen).outcome().starts) == [2]


def test_a_preempted_job_waits_at_the_front_of_its_tier_behind_higher_ones():
    chosen = settings(qos={"urgent": {"tier": 1}})
    waiting = [wants(1, 1), wants(2, 1, is_front=True, nice=100), wants(3, 1, qos="urgent")]
    assert list(Scenario([node(gpus=2)], waiting, settings=chosen).outcome().starts) == [3, 2]


def test_drf_fills_the_smallest_dominant_share_first():
    # Ghodsi et al., section 4.1: 9 CPUs and 18 GB; A asks for <1, 4 GB>, B for <3, 1 GB>: 3 jobs of A and 2 of B.
    machine = [node(cpus=9.0, mem_mib=18 * 1024)]
    jobs_of_a = [wants(i, cpus=1, mem_mib=4 * 1024, user="a", uid=1) for i in range(1, 20)]
    jobs_of_b = [wants(i, cpus=3, mem_mib=1 * 1024, user="b", uid=2) for i in range(21, 40)]
    outcome = Scenario(machine, jobs_of_a + jobs_of_b, settings=by("drf")).outcome()
    assert sorted(job_id // 20 for job_id in outcome.starts) == [0, 0, 0, 1, 1]


def test_drf_counts_held_resources():
    held = [running(9, "n1:0", user="ann")]
    waiting = [wants(1, 1, **ANN), wants(2, 1, **BOB), wants(3, 1, **BOB)]
    assert list(Scenario([node(gpus=3)], waiting, held, by("drf")).outcome().starts) == [2, 1]


def test_utilisation_starts_jobs_that_fit_the_measured_load_first():
    busy = [node(gpus=2, load=load(cpu_fraction=0.5))]
    waiting = [wants(1, 1, cpus=12), wants(2, 1, cpus=4)]
    assert list(Scenario(busy, waiting, settings=by("fifo")).outcome().starts) == [1, 2]
    outcome = Scenario(busy, waiting, settings=by("utilisation")).outcome()
    assert next(iter(outcome.starts)) == 2


def test_utilisation_admits_no_job_to_a_busy_node():
    busy = [node(gpus=2, load=load(cpu_fraction=0.95))]
    outcome = Scenario(busy, [wants(1, 1)], settings=by("utilisation")).outcome()
    assert outcome.codes == {1: "LoadCeiling"}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_total_and_starts_jobs_that_fit(order):
    waiting = [wants(i, i % 3, limit=None if i % 2 else i * MINUTE, user=f"u{i % 4}", uid=i % 4) for i in range(1, 9)]
    outcome = Scenario([node(gpus=16, load=load())], waiting, settings=by(order)).outcome()
    assert sorted(outcome.starts) == list(range(1, 9))
