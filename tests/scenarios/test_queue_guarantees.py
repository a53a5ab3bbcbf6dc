"""Queues with guarantees: what is lent, who goes first, and how it is taken back."""

from __future__ import annotations

import pytest
from scenario import HOUR, Scenario, running, settings, wants

from gpusched.testing import node

FOUR = [node(gpus=4)]
HALVES = {"vision": {"guaranteed_gpus": 2.0}, "nlp": {"guaranteed_gpus": 2.0}}


def halves(**preempt):
    return settings(queue=HALVES, preempt={"min_run_s": 60.0, **preempt})


def has(job_id, where, queue, **parts):
    return running(job_id, where, queue=queue, user=parts.pop("user", queue), **parts)


def asks(job_id, gpus, queue, **parts):
    return wants(job_id, gpus, queue=queue, user=parts.pop("user", queue), **parts)


def test_an_idle_guarantee_is_lent():
    jobs = [asks(number, 1, "vision") for number in range(1, 5)]
    assert list(Scenario(FOUR, jobs, settings=halves()).outcome().starts) == [1, 2, 3, 4]


def test_a_queue_within_its_guarantee_goes_before_one_that_borrows():
    held = [has(8, "n1:0", "vision"), has(9, "n1:1", "vision")]
    jobs = [asks(1, 1, "vision", nice=-10_000), asks(2, 1, "nlp")]
    assert list(Scenario([node(gpus=3)], jobs, held, halves()).outcome().starts) == [2]


def test_queues_alternate_by_weight_beyond_their_guarantees():
    chosen = settings(queue={"vision": {"weight": 3.0}, "nlp": {"weight": 1.0}})
    jobs = [asks(number, 1, "vision" if number % 2 else "nlp") for number in range(1, 17)]
    outcome = Scenario([node(gpus=8)], jobs, settings=chosen).outcome()
    queues = ["vision" if number % 2 else "nlp" for number in outcome.starts]
    assert (queues.count("vision"), queues.count("nlp")) == (6, 2)


TAKING_BACK = {
    "what was lent is taken back": (
        [has(7, "n1:0,1", "vision"), has(8, "n1:2", "vision"), has(9, "n1:3", "vision")],
        asks(1, 1, "nlp"),
        1,
    ),
    "as much as is needed": (
        [has(number, f"n1:{number - 6}", "vision") for number in (6, 7, 8, 9)],
        asks(1, 2, "nlp"),
        2,
    ),
    "but no more than is guaranteed": (
        [has(number, f"n1:{number - 6}", "vision") for number in (6, 7, 8, 9)],
        asks(1, 3, "nlp"),
        0,
    ),
    "nothing while there is room": ([has(8, "n1:0,1,2", "vision")], asks(1, 1, "nlp"), 0),
    "nothing from a queue within its own guarantee": (
        [has(8, "n1:0,1", "vision"), has(9, "n1:2,3", "other")],
        asks(1, 1, "nlp"),
        0,
    ),
    "nothing for a queue that borrows itself": (
        [has(6, "n1:0,1", "nlp"), has(8, "n1:2", "vision"), has(9, "n1:3", "vision")],
        asks(1, 1, "nlp"),
        0,
    ),
}


@pytest.mark.parametrize(("held", "job", "victims"), TAKING_BACK.values(), ids=TAKING_BACK)
def test_a_queue_reclaims_its_guarantee(held, job, victims):
    chosen = settings(queue={**HALVES, "other": {"guaranteed_gpus": 2.0}}, preempt={"min_run_s": 60.0})
    outcome = Scenario(FOUR, [job], held, chosen).outcome()
    assert len(outcome.preempts) == victims
    if victims:
        assert outcome.codes == {1: "Preempting"}
        assert "takes back what queue vision has borrowed" in outcome.plan.preempts[0].text


def test_a_job_partly_on_borrowed_gpus_is_reclaimed_only_as_a_last_resort():
    straddling = has(8, "n1:0,1,2,3", "vision")
    assert set(Scenario(FOUR, [asks(1, 2, "nlp")], [straddling], halves()).outcome().preempts) == {8}
    held = [has(7, "n1:0,1,2", "vision", since=HOUR), has(8, "n1:3", "vision", since=9 * HOUR)]
    assert set(Scenario(FOUR, [asks(1, 1, "nlp")], held, halves()).outcome().preempts) == {8}


def test_a_queue_reclaims_its_guarantee_once_for_any_number_of_pending_jobs():
    chosen = settings(
        queue={"vision": {"guaranteed_gpus": 1.0}, "nlp": {"guaranteed_gpus": 2.0}}, preempt={"min_run_s": 60.0}
    )
    held = [has(number, f"n1:{number - 6}", "vision") for number in (6, 7, 8, 9)]
    jobs = [asks(number, 1, "nlp", uid=number) for number in (1, 2, 3)]
    outcome = Scenario(FOUR, jobs, held, chosen).outcome()
    assert len(outcome.preempts) == 2
    # While they are being stopped, it is the same.
    stopping = [
        has(one.job_id, f"n1:{one.job_id - 6}", "vision", is_stopping=one.job_id in outcome.preempts) for one in held
    ]
    assert Scenario(FOUR, jobs, stopping, chosen).outcome().preempts == {}


SHARED = {
    "lab": {"max_gpus": 4.0},
    "vision": {"parent": "lab", "guaranteed_gpus": 2.0},
    "nlp": {"parent": "lab", "guaranteed_gpus": 2.0},
}


def test_a_guarantee_holds_when_siblings_borrowed_up_to_the_parents_maximum():
    chosen = settings(queue=SHARED, preempt={"min_run_s": 60.0})
    held = [has(number, f"n1:{number - 6}", "vision") for number in (6, 7, 8, 9)]
    outcome = Scenario([node(gpus=8)], [asks(1, 2, "nlp")], held, chosen).outcome()
    assert len(outcome.preempts) == 2
    assert outcome.codes == {1: "Preempting"}
    stopping = [
        has(one.job_id, f"n1:{one.job_id - 6}", "vision", is_stopping=one.job_id in outcome.preempts) for one in held
    ]
    again = Scenario([node(gpus=8)], [asks(1, 2, "nlp")], stopping, chosen).outcome()
    assert (again.starts, again.preempts) == ({}, {})
    assert again.codes == {1: "QueueMaxLimit"}
    assert 1 in again.reserved


def test_the_maximum_holds_for_what_is_beyond_the_guarantee():
    chosen = settings(queue=SHARED, preempt={"min_run_s": 60.0})
    held = [has(number, f"n1:{number - 6}", "vision") for number in (6, 7)]
    held += [has(number, f"n1:{number - 6}", "nlp") for number in (8, 9)]
    outcome = Scenario([node(gpus=8)], [asks(1, 1, "nlp")], held, chosen).outcome()
    assert (outcome.starts, outcome.preempts, outcome.codes) == ({}, {}, {1: "QueueMaxLimit"})


def test_a_preempted_job_does_not_reclaim_its_place():
    # Job 8 waits again; it asks for more than is guaranteed, so it preempts nobody.
    held = [has(1, "n1:0,1", "nlp")]
    outcome = Scenario(FOUR, [asks(8, 4, "vision", is_front=True)], held, halves()).outcome()
    assert outcome.preempts == {}


def test_a_queue_may_be_exempt_from_reclaiming():
    chosen = settings(
        queue={**HALVES, "vision": {"guaranteed_gpus": 2.0, "preemptible": False}}, preempt={"min_run_s": 0.0}
    )
    held = [has(8, "n1:0,1", "vision"), has(9, "n1:2,3", "vision")]
    assert Scenario(FOUR, [asks(1, 1, "nlp")], held, chosen).outcome().preempts == {}


@pytest.mark.parametrize("off", [{"reclaim": False}, {"mode": "off"}])
def test_reclaiming_can_be_disabled(off):
    held = [has(8, "n1:0,1", "vision"), has(9, "n1:2,3", "vision")]
    assert Scenario(FOUR, [asks(1, 1, "nlp")], held, halves(**off)).outcome().preempts == {}


def test_borrowed_capacity_is_reclaimed_before_a_lower_qos():
    chosen = settings(
        queue=HALVES,
        qos={"urgent": {"tier": 1, "preempts": ("normal",)}, "normal": {}},
        preempt={"min_run_s": 0.0},
    )
    held = [
        has(6, "n1:0", "nlp", qos="normal"),
        has(7, "n1:1", "vision", qos="urgent", since=99 * HOUR),
        has(8, "n1:2", "vision", qos="urgent", since=98 * HOUR),
        has(9, "n1:3", "vision", qos="urgent", since=97 * HOUR),
    ]
    outcome = Scenario(FOUR, [asks(1, 1, "nlp", qos="urgent")], held, chosen).outcome()
    assert set(outcome.preempts) == {9}


LIMITS = {
    "the maximum of a queue": (
        {"vision": {"max_gpus": 2.0}},
        asks(1, 1, "vision"),
        [has(9, "n1:0,1", "vision")],
        "QueueMaxLimit",
    ),
    "the maximum of the queue above": (
        {"lab": {"max_gpus": 2.0}, "vision": {"parent": "lab"}, "nlp": {"parent": "lab"}},
        asks(1, 1, "vision"),
        [has(9, "n1:0,1", "nlp")],
        "QueueMaxLimit",
    ),
    "the limit of a user in a queue": (
        {"vision": {"max_gpus_per_user": 1.0}},
        asks(1, 1, "vision"),
        [has(9, "n1:0", "vision")],
        "QueueMaxPerUserLimit",
    ),
    "the number of jobs of a user in a queue": (
        {"vision": {"max_running_per_user": 1}},
        asks(1, 0, "vision"),
        [has(9, "n1:0", "vision")],
        "QueueMaxPerUserLimit",
    ),
}


@pytest.mark.parametrize(("queues", "job", "held", "code"), LIMITS.values(), ids=LIMITS)
def test_a_job_over_a_limit_waits_and_blocks_no_other(queues, job, held, code):
    other = wants(2, 2, queue="free", user="other")
    outcome = Scenario(FOUR, [job, other], held, settings(queue={**queues, "free": {}})).outcome()
    assert outcome.codes == {1: code}
    assert list(outcome.starts) == [2]


def test_limits_count_starts_of_the_same_cycle():
    chosen = settings(queue={"vision": {"max_gpus": 3.0}})
    jobs = [asks(number, 1, "vision") for number in range(1, 5)]
    outcome = Scenario(FOUR, jobs, settings=chosen).outcome()
    assert list(outcome.starts) == [1, 2, 3]
    assert outcome.codes == {4: "QueueMaxLimit"}


QOS_LIMITS = {
    "GPUs of all its jobs": ({"max_gpus": 1.0}, "QOSGrpGRES"),
    "GPUs of a user": ({"max_gpus_per_user": 1.0}, "QOSMaxGRESPerUser"),
    "jobs of a user": ({"max_running_per_user": 1}, "QOSMaxJobsPerUserLimit"),
    "GPUs of a job": ({"max_gpus_per_job": 0.5}, "QOSMaxGRESPerJob"),
}


@pytest.mark.parametrize(("limits", "code"), QOS_LIMITS.values(), ids=QOS_LIMITS)
def test_limits_of_a_qos_are_enforced(limits, code):
    held = [running(9, "n1:0", qos="capped", user="ann")]
    chosen = settings(qos={"capped": limits})
    assert Scenario(FOUR, [wants(1, 1, qos="capped")], held, chosen).outcome().codes == {1: code}
    assert Scenario(FOUR, [wants(1, 1)], held, chosen).outcome().starts


def test_a_queue_may_have_its_own_order():
    chosen = settings(queue={"short": {"order": "sjf"}, "plain": {}})
    jobs = [asks(1, 1, "short", limit=2 * HOUR), asks(2, 1, "short", limit=HOUR)]
    assert list(Scenario([node(gpus=1)], jobs, settings=chosen).outcome().starts) == [2]
    jobs = [asks(1, 1, "plain", limit=2 * HOUR), asks(2, 1, "plain", limit=HOUR)]
    assert list(Scenario([node(gpus=1)], jobs, settings=chosen).outcome().starts) == [1]


URGENT = {"urgent": {"tier": 1, "preempts": ("low",)}, "low": {}}


def test_a_job_that_would_reclaim_its_place_is_not_preempted():
    chosen = settings(queue={"lab": {"guaranteed_gpus": 1.0}, "guests": {}}, qos=URGENT, preempt={"min_run_s": 60.0})
    machine = [node(gpus=1)]
    mine = Scenario(machine, [asks(1, 1, "guests", qos="urgent")], [has(9, "n1:0", "lab", qos="low")], chosen)
    assert mine.outcome().preempts == {}
    borrowed = Scenario(machine, [asks(9, 1, "lab", qos="low")], [has(1, "n1:0", "guests", qos="urgent")], chosen)
    assert borrowed.outcome().preempts == {1: ("requeue", 9)}


def test_the_next_victim_replaces_one_that_would_reclaim_its_place():
    queues = {"lab": {"guaranteed_gpus": 1.0}, "guests": {}}
    chosen = settings(queue=queues, qos=URGENT, preempt={"min_run_s": 60.0})
    held = [has(8, "n1:0", "lab", qos="low", since=HOUR), has(9, "n1:1", "guests", qos="low", since=2 * HOUR)]
    outcome = Scenario([node(gpus=2)], [asks(1, 1, "guests", qos="urgent")], held, chosen).outcome()
    assert outcome.preempts == {9: ("requeue", 1)}


def test_queues_with_different_guarantees_do_not_reclaim_in_turns():
    queues = {"gpus": {"guaranteed_gpus": 2.0}, "cores": {"guaranteed_cpus": 2.0}}
    chosen = settings(queue=queues, preempt={"min_run_s": 60.0})
    held = [has(1, "n1:0", "cores", cpus=2.0), has(2, "n1:1", "gpus", cpus=4.0)]
    outcome = Scenario([node(gpus=4, cpus=8.0)], [asks(3, 1, "gpus", cpus=4)], held, chosen).outcome()
    assert outcome.preempts == {}


STANDS_STILL = {"cpus": 0.0, "is_suspended": True, "suspended_cpus": 4.0}


def test_a_suspended_job_does_not_reclaim_cores_its_queue_borrowed():
    queues = {"lab": {"guaranteed_cpus": 4.0}, "guests": {}}
    chosen = settings(queue=queues, preempt={"mode": "suspend", "min_run_s": 60.0})
    held = [has(8, "n1", "guests", can_suspend=True, **STANDS_STILL)]
    outcome = Scenario([node(cpus=4.0)], [asks(1, 0, "lab", cpus=4)], held, chosen).outcome()
    assert outcome.starts == {1: "n1"}
    assert outcome.plan.resumes == ()


@pytest.mark.parametrize(("most", "goes_on"), [(4.0, False), (8.0, True)])
def test_a_suspended_job_resumes_only_below_the_maximum_of_its_queue(most, goes_on):
    chosen = settings(queue={"guests": {"max_cpus": most}}, preempt={"mode": "suspend"})
    held = [has(7, "n1", "guests", cpus=4.0), has(8, "n1", "guests", **STANDS_STILL)]
    outcome = Scenario([node(cpus=8.0)], [asks(1, 0, "guests", cpus=1)], held, chosen).outcome()
    assert [one.job_id for one in outcome.plan.resumes] == ([8] if goes_on else [])
    assert outcome.starts == {}
