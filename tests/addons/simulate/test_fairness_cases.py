"""The fairness cases tell an order that is fair between users from one that is not."""

from __future__ import annotations

import pytest

from benchmarks import fairness as fair
from gpusched.addons.simulate.outcome import Outcome, size_of
from gpusched.addons.simulate.planner_run import OWN_PREDICTION
from gpusched.addons.simulate.policies import Policy, policies_of
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings

(FIRST_COME,) = policies_of(["fcfs+easy"])
SHARES_RULE = Policy(
    "shares rule",
    Settings(priority=PrioritySettings(order="multifactor", weight_fairshare=100_000.0, backfill_by="limit")),
    predict=OWN_PREDICTION,
)
"""Whoever has used least of their share goes first, whatever else speaks for a job."""


def test_two_users_distinguish_ordering_by_usage_from_arrival():
    assert fair.judge_two_users(SHARES_RULE).holds
    verdict = fair.judge_two_users(FIRST_COME)
    assert not verdict.holds
    # The heavy user asks for half as much again as there is, so that the queue of 2.3 days is two thirds as long.
    assert verdict.figure > 24 * fair.HOUR_S


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param((1.0, 1.0), id="1:1", marks=pytest.mark.nightly),
        pytest.param((2.0, 1.0), id="2:1"),
        pytest.param((1.0, 2.0), id="1:2", marks=pytest.mark.nightly),
    ],
)
def test_group_shares_hold_where_shares_rule(shares):
    verdict = fair.judge_group_shares(SHARES_RULE, *shares, days=4)
    assert verdict.holds, verdict.text


def test_group_shares_do_not_hold_first_come_first_served():
    assert not fair.judge_group_shares(FIRST_COME, 2.0, 1.0, days=4).holds


def test_both_groups_have_jobs_pending_all_the_time():
    jobs, nodes = fair.group_shares(days=4)
    outcome = fair.simulated(jobs, nodes, FIRST_COME)
    for account in (fair.NARROW, fair.WIDE):
        rows = [
            (job.submit_s, start_s)
            for job, start_s in zip(jobs, outcome.start_s, strict=True)
            if job.account == account
        ]
        for instant in range(0, 4 * fair.DAY_S, fair.HOUR_S):
            assert any(submit_s <= instant < start_s for submit_s, start_s in rows) or instant == 0


def test_thirty_users_keep_the_cluster_busy_without_filling_it():
    jobs, nodes = fair.thirty_users()
    busy = sum(job.run_s * job.gpus for job in jobs) / (14 * fair.DAY_S * size_of(nodes, jobs))
    assert busy == pytest.approx(0.65, abs=0.01)
    assert len({job.user for job in jobs}) == 30
    assert all(job.gpus <= 8 for job in jobs)
    assert len(fair.flood()) == 2000
    assert {job.user for job in fair.flood()} == {fair.FLOODER}


def test_a_flood_that_others_wait_behind_misses_the_goal():
    together, each = fair.judge_thirty_users(FIRST_COME, replays=2)
    assert not together.holds
    assert not each.holds
    assert each.figure > together.figure > 0.2


def test_a_mean_wait_grows_by_the_excess_over_floor_and_noise():
    assert fair.growth([1000.0, 1000.0], [1110.0, 1110.0]) == 0
    assert fair.growth([1000.0, 1000.0], [1500.0, 1500.0]) == 0.5
    # The second replay differs from the first by as much as the wait grows.
    assert fair.growth([1000.0, 1000.0], [1000.0, 2000.0]) == 0
    assert fair.growth([0.0], [121.0]) > fair.GROWTH


def test_served_time_counts_within_the_window_alone():
    jobs = [fair.made(1, 0, 100, 2, "ann", "a"), fair.made(2, 0, 100, 1, "bob", "b")]
    served = fair.served_gpu_s(Outcome(jobs, [0, 90], 2), 50, 150)
    assert served == {"a": 100.0, "b": 60.0}
