"""A wide job below the maximum of its queue, user or QOS: small ones may pass it, but not for ever."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, apply_plan, running, settings, wants
from support import patches_the_planner

from gpusched.model.states import ReasonCode
from gpusched.model.value import replace
from gpusched.scheduler.limit_reservations import LimitReservations
from gpusched.scheduler.planner import decide
from gpusched.testing import node, snapshot

LIMITS = {
    "of a queue": ({"queue": "nlp"}, settings(queue={"nlp": {"max_gpus": 4}}), "QueueMaxLimit"),
    "of a queue above": (
        {"queue": "nlp"},
        settings(queue={"lab": {"max_gpus": 4}, "nlp": {"parent": "lab"}}),
        "QueueMaxLimit",
    ),
    "of one user in a queue": (
        {"queue": "nlp"},
        settings(queue={"nlp": {"max_gpus_per_user": 4}}),
        "QueueMaxPerUserLimit",
    ),
    "of a QOS": ({"qos": "big"}, settings(qos={"big": {"max_gpus": 4}}), "QOSGrpGRES"),
    "of one user in a QOS": ({"qos": "big"}, settings(qos={"big": {"max_gpus_per_user": 4}}), "QOSMaxGRESPerUser"),
}


@pytest.fixture(params=LIMITS, ids=LIMITS)
def limit(request):
    return LIMITS[request.param]


def has(job_id, where, group, **parts):
    return running(job_id, where, user="ann", **group, **parts)


def need(job_id, gpus, group, **parts):
    return wants(job_id, gpus, user="ann", **group, **parts)


def test_a_job_that_would_take_the_reserved_quota_waits_behind_it(limit):
    group, rules, code = limit
    found = Scenario(
        [node(gpus=8)],
        [need(1, 4, group, limit=HOUR), need(2, 1, group, limit=HOUR)],
        [has(8, "n1:0", group, ends_in=HOUR / 2), has(9, "n1:1", group, ends_in=HOUR / 4)],
        rules,
    ).outcome()
    assert found.starts == {}
    assert found.codes == {1: code, 2: "Priority"}
    assert "may still hold, and job 1 goes first" in found.text(2)


def test_a_job_that_ends_in_time_may_pass(limit):
    group, rules, _ = limit
    found = Scenario(
        [node(gpus=8)],
        [need(1, 4, group, limit=HOUR), need(2, 1, group, limit=HOUR / 2), need(3, 1, group, limit=MINUTE)],
        [has(8, "n1:0", group, ends_in=HOUR / 2), has(9, "n1:1", group, ends_in=HOUR / 4)],
        rules,
    ).outcome()
    assert found.starts.keys() == {2, 3}


def test_a_job_that_leaves_enough_quota_may_pass(limit):
    group, rules, _ = limit
    found = Scenario(
        [node(gpus=8)],
        [need(1, 3, group), need(2, 1, group), need(3, 1, group, cpus=0.5)],
        [has(8, "n1:0,1", group, ends_in=HOUR)],
        rules,
    ).outcome()
    assert found.starts.keys() == {2}, "one GPU is left beside the three; the second one would use up what job 1 needs"


def test_only_short_jobs_pass_beside_runs_without_a_limit(limit):
    group, rules, _ = limit
    found = Scenario(
        [node(gpus=8)],
        [need(1, 4, group), need(2, 1, group, limit=HOUR), need(3, 1, group, limit=3 * HOUR)],
        [has(8, "n1:0,1", group, since=2 * HOUR)],
        rules,
    ).outcome()
    assert found.starts.keys() == {2}


def test_other_users_are_unaffected(limit):
    group, rules, _ = limit
    found = Scenario(
        [node(gpus=8)],
        [need(1, 4, group), wants(2, 4, user="bob"), wants(3, 1, user="bob")],
        [has(8, "n1:0,1", group)],
        rules,
    ).outcome()
    assert found.starts.keys() == {2, 3}


def test_a_waiting_job_finds_its_quota_as_promised():
    """Job 1 is below the limit, but there is no place for it yet: job 2 must not use up what it will need."""
    group = {"qos": "big"}
    found = Scenario(
        [node(gpus=4)],
        [need(1, 3, group), need(2, 1, group, limit=2 * HOUR), need(3, 1, group, limit=MINUTE)],
        [running(7, "n1:0,1", user="bob", ends_in=HOUR)],
        settings(qos={"big": {"max_gpus": 3}}),
    ).outcome()
    assert found.starts.keys() == {3}
    assert found.reserved.keys() >= {1}


def test_a_queue_need_not_yield_its_guarantee():
    rules = settings(
        queue={
            "lab": {"max_gpus": 4},
            "nlp": {"parent": "lab", "guaranteed_gpus": 2},
            "vision": {"parent": "lab"},
        }
    )
    found = Scenario(
        [node(gpus=8)],
        [wants(1, 4, queue="vision", waited=90000), wants(2, 1, queue="nlp")],
        [running(8, "n1:0", queue="vision", ends_in=HOUR)],
        rules,
    ).outcome()
    assert found.starts.keys() == {2}


@patches_the_planner
def test_each_running_job_is_examined_once_for_any_number_of_limited_users(monkeypatch):
    looked_at = []
    add = LimitReservations._add
    monkeypatch.setattr(LimitReservations, "_add", lambda self, one: looked_at.append(one) or add(self, one))
    users = [f"user{number}" for number in range(6)]
    state = snapshot(
        node(gpus=8),
        running=[running(1 + number, f"n1:{number}", user=user, queue="nlp") for number, user in enumerate(users)],
        waiting=[wants(10 + number, 2, user=user, queue="nlp") for number, user in enumerate(users)],
    )
    plan = decide(state, settings(queue={"nlp": {"max_gpus_per_user": 2}}))
    assert {reason.code for reason in plan.reasons.values()} == {ReasonCode.QUEUE_MAX_PER_USER}
    assert sorted(one.terms.user for one in looked_at) == users


@pytest.mark.parametrize("steps", [60])
def test_a_wide_job_starts_despite_a_stream_of_small_ones(limit, steps):
    """Every quarter of an hour a run ends and another small job comes, the wide one was there first."""
    group, rules, _ = limit
    waiting = [need(1, 4, group, limit=HOUR)]
    held = [has(number, f"n1:{number - 100}", group, ends_in=HOUR / 4 * (number - 99)) for number in range(100, 103)]
    state = snapshot(node(gpus=8), running=held, waiting=waiting)
    for step in range(steps):
        waiting.append(need(10 + step, 1, group, limit=HOUR, waited=10.0 - step))
        state = snapshot(*state.nodes, running=state.allocations, waiting=waiting, now=state.now)
        plan = decide(state, rules)
        started = {start.job_id for start in plan.starts}
        if 1 in started:
            return
        after = apply_plan(state, waiting, plan)
        waiting = [one for one in waiting if one.id not in started]
        now = state.now + HOUR / 4
        still = tuple(one for one in after.allocations if one.expected_end_at is None or one.expected_end_at > now)
        state = replace(after, now=now, allocations=still)
    pytest.fail("the wide job still waits")
