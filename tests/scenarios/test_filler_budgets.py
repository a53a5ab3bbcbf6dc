"""Jobs on a spent budget with `when_spent = "filler"`: where they start, and that they take nothing from others."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, running, settings, wants

from gpusched.model.snapshot import Budget
from gpusched.model.value import replace
from gpusched.testing import NOW, node

TWO, FOUR = [node(gpus=2)], [node(gpus=4)]
SPENT = Budget("poor", ("poor",), gpu_s=0.0, period=" of November 2026", again="1 Dec", when_spent="filler")
RULES = settings(account={"poor": {"gpu_hours": 0.0, "when_spent": "filler"}, "rich": {}})
TIERS = {"urgent": {"tier": 2, "preempts": ("low",)}, "low": {}, "safe": {"tier": 3, "preemptible": False}}


def poor(job_id, gpus=1, **parts):
    """A job whose budget is spent."""
    return wants(job_id, gpus, account="poor", **{"limit": 10 * HOUR, "user": "pat", **parts})


def rich(job_id, gpus=1, **parts):
    """A job within its budget, of somebody else."""
    return wants(job_id, gpus, **{"account": "rich", "limit": HOUR, "uid": 7, **parts})


def filler(job_id, where, **parts):
    return running(job_id, where, **{"account": "poor", "is_filler": True, "ends_in": 9 * HOUR, **parts})


def decided(nodes, waiting, held=(), rules=RULES, budgets=(SPENT,), **parts):
    return Scenario(nodes, waiting, held, rules, budgets=budgets, **parts).outcome()


STARTS = {
    "idle GPUs are used": (TWO, [poor(1)], [], {1: "n1:0"}, {}),
    "earlier fillers do not pass jobs within their budget": (TWO, [poor(1, 2), rich(2, 2)], [], {2: "n1:0,1"}, {}),
    "what is left beside them is used": (TWO, [poor(1), poor(2), rich(3)], [], {3: "n1:0", 1: "n1:1"}, {}),
    "no reservation is delayed": (TWO, [rich(1, 2), poor(2)], [running(8, "n1:0", ends_in=HOUR)], {}, {1: HOUR}),
    "a gap before a reservation is used": (
        TWO,
        [rich(1, 2), poor(2, limit=30 * MINUTE)],
        [running(8, "n1:0", ends_in=HOUR)],
        {2: "n1:1"},
        {1: HOUR},
    ),
    "nothing is reserved for a filler": (TWO, [poor(1, 2)], [running(8, "n1:0", ends_in=HOUR)], {}, {}),
    "no filler is preempted for another": (TWO, [poor(1)], [filler(8, "n1:0,1")], {}, {}),
    "other jobs are preempted by no filler": (
        TWO,
        [poor(1, qos="urgent")],
        [running(8, "n1:0,1", qos="low")],
        {},
        {},
    ),
    "jobs that must not be requeued are no fillers": (TWO, [poor(1, retry={"requeue": False})], [], {}, {}),
    "nothing is planned around a filler": (
        FOUR,
        [rich(1, 4), rich(2, 1, limit=2 * HOUR)],
        [running(7, "n1:0,1", ends_in=HOUR), filler(8, "n1:2")],
        {},
        {1: HOUR},
    ),
}


@pytest.mark.parametrize(("nodes", "waiting", "held", "starts", "reserved"), STARTS.values(), ids=STARTS)
def test_fillers_start_beside_all_others(nodes, waiting, held, starts, reserved):
    rules = settings(qos=TIERS, account={"poor": {"gpu_hours": 0.0, "when_spent": "filler"}, "rich": {}})
    outcome = decided(nodes, waiting, held, rules)
    assert outcome.starts == starts
    assert {job_id: at for job_id, (_, at) in outcome.reserved.items()} == reserved
    assert outcome.preempts == {}
    fillers = {start.job_id for start in outcome.plan.starts if start.is_filler}
    assert fillers == {job.id for job in waiting if job.spec.account == "poor"} & set(starts)


YIELD = {
    "for any job within its budget": ([filler(8, "n1:0,1")], rich(1), {8}),
    "at any age": ([filler(8, "n1:0,1", since=1.0)], rich(1), {8}),
    "whatever its QOS": ([filler(8, "n1:0,1", qos="safe")], rich(1), {8}),
    "for cores": ([filler(8, "n1:0", cpus=16.0)], rich(1, 0, cpus=4.0), {8}),
    "before others of a lower QOS": (
        [filler(8, "n1:0", qos="urgent", since=5 * HOUR), running(9, "n1:1", qos="low", since=HOUR)],
        rich(1, qos="urgent"),
        {8},
    ),
    "no more of them than needed": ([filler(8, "n1:0"), filler(9, "n1:1")], rich(1), {9}),
}


@pytest.mark.parametrize(("held", "job", "victims"), YIELD.values(), ids=YIELD)
def test_fillers_make_room(held, job, victims):
    rules = settings(qos=TIERS, account={"poor": {"gpu_hours": 0.0, "when_spent": "filler"}, "rich": {}})
    outcome = decided(TWO, [job], held, rules)
    assert outcome.preempts == dict.fromkeys(victims, ("requeue", 1))
    assert outcome.reserved[1][1] == 30.0
    assert outcome.codes == {1: "Preempting"}
    (preempt,) = outcome.plan.preempts
    if preempt.job_id == 8:
        assert "it was a filler: the budget of account poor was spent" in preempt.text


def test_fillers_make_room_also_after_the_setting_was_changed():
    """Runs that were started as fillers stay fillers."""
    outcome = decided(TWO, [rich(1)], [filler(8, "n1:0,1")], settings(), ())
    assert outcome.preempts == {8: ("requeue", 1)}


@pytest.mark.parametrize(
    ("limit", "job"),
    [
        ({"queue": {"narrow": {"max_gpus": 2}}}, {"queue": "narrow"}),
        ({"qos": {"few": {"max_gpus": 2}}}, {"qos": "few"}),
    ],
    ids=["queue", "qos"],
)
def test_a_limit_that_a_filler_uses_up_is_freed(limit, job):
    rules = replace(settings(**limit), account=RULES.account)
    outcome = decided(FOUR, [rich(1, **job)], [filler(8, "n1:0"), filler(9, "n1:1,2", **job)], rules)
    assert outcome.preempts == {9: ("requeue", 1)}
    assert outcome.codes == {1: "Preempting"}


def test_a_limit_that_others_use_up_preempts_no_filler():
    rules = replace(settings(queue={"narrow": {"max_gpus": 2}}), account=RULES.account)
    held = [filler(8, "n1:0"), running(9, "n1:1,2", queue="narrow")]
    outcome = decided(FOUR, [rich(1, queue="narrow")], held, rules)
    assert outcome.preempts == {}
    assert outcome.codes == {1: "QueueMaxLimit"}


def test_a_filler_obeys_the_limits_of_its_queue():
    rules = replace(settings(queue={"narrow": {"max_gpus": 2}}), account=RULES.account)
    waiting = [poor(number, queue="narrow") for number in (1, 2, 3)]
    assert decided(FOUR, waiting, rules=rules).starts == {1: "n1:0", 2: "n1:1"}


def test_a_license_that_a_filler_uses_is_freed():
    rules = replace(settings(license={"matlab": 1}), account=RULES.account)
    held = [filler(8, "n1:0", licenses=(("matlab", 1),))]
    outcome = decided(FOUR, [rich(1, licenses=(("matlab", 1),))], held, rules)
    assert outcome.preempts == {8: ("requeue", 1)}


def test_fillers_use_up_no_guarantee():
    """The queue gets back what it has lent, though a filler of its own holds as much."""
    queues = {"vision": {"guaranteed_gpus": 2}, "nlp": {"guaranteed_gpus": 2}}
    rules = replace(settings(queue=queues, preempt={"min_run_s": 0.0}), account=RULES.account)
    held = [running(7, "n1:0", queue="nlp"), running(6, "n1:1,2", queue="nlp"), filler(8, "n1:3", queue="vision")]
    outcome = decided(FOUR, [rich(1, 2, queue="vision")], held, rules)
    assert set(outcome.preempts) == {7, 8}


def test_use_of_fillers_does_not_count_for_fair_share():
    rules = replace(
        settings(priority={"order": "fairshare"}),
        account=settings(account={"poor": {"gpu_hours": 9.0, "when_spent": "filler"}}).account,
    )
    waiting = [rich(1, 2, user="ann", account="rich"), rich(2, 2, user="pat", account="poor", waited=20_000.0)]
    held = [filler(8, "n1:0,1", user="pat", since=100 * HOUR)]
    outcome = decided([node(gpus=4)], waiting, held, rules, (replace(SPENT, gpu_s=1000 * HOUR),))
    assert outcome.starts == {2: "n1:2,3"}


def test_every_budget_that_lacks_something_must_admit_fillers():
    above = Budget("lab", ("lab", "poor"), gpu_s=0.0)
    outcome = decided(TWO, [poor(1)], budgets=(SPENT, above))
    assert outcome.starts == {}
    assert outcome.text(1).startswith("lab used 0 of 0 GPU-hours")
    assert "filler" not in outcome.text(1)


def test_a_waiting_filler_says_when_it_starts():
    outcome = decided(TWO, [poor(1)], [running(8, "n1:0,1", ends_in=HOUR)])
    assert outcome.codes == {1: "BudgetSpent"}
    assert outcome.text(1) == (
        "poor used 0 of 0 GPU-hours of November 2026, 0 booked; 0 left, this asks 10; "
        "runs as a filler once GPUs are idle that no other job needs"
    )
    outcome = decided(TWO, [poor(1, retry={"requeue": False})])
    assert outcome.text(1).endswith("; with --requeue it may run as a filler")


def test_a_filler_starts_beside_a_reservation_of_the_calendar():
    from gpusched.model.snapshot import Placement
    from gpusched.testing import share, window

    course = window("course", Placement("n1", (share(0),), 0.0, 0), begins_in=HOUR, ends_in=2 * HOUR)
    assert course.start_at == NOW + HOUR
    outcome = decided(TWO, [poor(1), poor(2)], windows=[course])
    assert outcome.starts == {1: "n1:1"}
