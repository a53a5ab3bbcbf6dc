"""Preemption by QOS: who makes room, how, for whom, and who is left alone."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, running, settings, wants

from gpusched.model.mentions import render
from gpusched.model.snapshot import Urgency
from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, node

TWO = [node(gpus=2)]
TIERS = {
    "urgent": {"tier": 2, "preempts": ("normal", "scavenge")},
    "normal": {"tier": 1, "preempts": ("scavenge",)},
    "scavenge": {"tier": 0},
    "sacred": {"tier": 0, "preemptible": False},
}


def rules(**preempt):
    return settings(qos=TIERS, preempt={"min_run_s": 60.0, **preempt})


def has(job_id, where, qos="scavenge", **parts):
    return running(job_id, where, qos=qos, **parts)


URGENT = wants(1, 1, qos="urgent", limit=HOUR)

VICTIMS = {
    "a lower QOS makes room": ([has(8, "n1:0,1")], URGENT, {8: ("requeue", 1)}),
    "the lowest QOS first": ([has(8, "n1:0", "normal"), has(9, "n1:1")], URGENT, {9: ("requeue", 1)}),
    "who has lost least work": (
        [has(8, "n1:0", since=5 * HOUR), has(9, "n1:1", since=HOUR)],
        URGENT,
        {9: ("requeue", 1)},
    ),
    "what a checkpoint has saved is not lost": (
        [has(8, "n1:0", since=5 * HOUR, checkpoint_at=NOW - MINUTE), has(9, "n1:1", since=HOUR)],
        URGENT,
        {8: ("requeue", 1)},
    ),
    "one large job that is needed rather than two": (
        [has(7, "n1:0,1", since=2 * HOUR)],
        wants(1, 2, qos="urgent"),
        {7: ("requeue", 1)},
    ),
    "no more than are needed": (
        [has(8, "n1:0"), has(9, "n1:1")],
        wants(1, 2, qos="urgent"),
        {8: ("requeue", 1), 9: ("requeue", 1)},
    ),
    "one that does not accept to run again is ended for good, but only as the last resort": (
        [has(8, "n1:0", can_requeue=False, since=HOUR), has(9, "n1:1", since=5 * HOUR)],
        URGENT,
        {9: ("requeue", 1)},
    ),
    "ended for good when there is no other": (
        [has(8, "n1:0,1", can_requeue=False)],
        URGENT,
        {8: ("cancel", 1)},
    ),
    "equal QOS is left alone": ([has(8, "n1:0,1", "urgent")], URGENT, {}),
    "a QOS that it may not preempt is left alone": ([has(8, "n1:0,1", "sacred")], URGENT, {}),
    "higher QOS is left alone": ([has(8, "n1:0,1", "normal")], wants(1, 1, qos="scavenge"), {}),
    "jobs without a QOS are nobody's to take": ([has(8, "n1:0,1", "")], URGENT, {}),
    "a young run is protected": ([has(8, "n1:0,1", since=59.0)], URGENT, {}),
    "nobody is asked for what no end would make possible": ([has(8, "n1:0,1")], wants(1, 3, qos="urgent"), {}),
    "nobody is asked when it fits anyway": ([has(8, "n1:0")], URGENT, {}),
    "nobody is asked when some, but not enough, could make room": (
        [has(8, "n1:0"), has(9, "n1:1", "sacred")],
        wants(1, 2, qos="urgent"),
        {},
    ),
}


@pytest.mark.parametrize(("held", "job", "preempts"), VICTIMS.values(), ids=VICTIMS)
def test_victims_are_chosen(held, job, preempts):
    outcome = Scenario(TWO, [job], held, rules()).outcome()
    assert outcome.preempts == preempts
    if preempts:
        assert outcome.codes == {1: "Preempting"}
        assert outcome.reserved[1][1] == 30.0


def test_freed_gpus_are_reserved_for_the_preempting_job():
    waiting = [wants(1, 2, qos="urgent"), wants(2, 1, qos="normal")]
    held = [has(8, "n1:0", grace_s=120.0)]
    outcome = Scenario(TWO, waiting, held, rules()).outcome()
    assert outcome.preempts == {8: ("requeue", 1)}
    assert outcome.reserved == {1: ("n1:0,1", 120.0)}
    assert outcome.starts == {}


def test_no_second_victim_is_chosen_while_the_first_is_being_stopped():
    held = [has(8, "n1:0", is_stopping=True, ends_in=20.0), has(9, "n1:1")]
    outcome = Scenario(TWO, [URGENT], held, rules()).outcome()
    assert outcome.preempts == {}
    assert outcome.reserved == {1: ("n1:0", 20.0)}


def test_freed_room_is_reserved_even_behind_other_reservations():
    held = [has(8, "n1:0", is_stopping=True, ends_in=20.0), has(9, "n1:1", "sacred")]
    first = wants(2, 2, qos="urgent", nice=-5)
    outcome = Scenario(TWO, [first, URGENT], held, rules()).outcome()
    assert outcome.reserved[1] == ("n1:0", 20.0)
    assert outcome.preempts == {}


def test_no_victim_is_chosen_for_room_reserved_for_an_earlier_job():
    """Its QOS may preempt, but the queue of job 2 goes first, so job 2 would get what job 8 leaves."""
    queues = {"nlp": {}, "vision": {}, "other": {"weight": 2}}
    found = Scenario(
        [node(gpus=4)],
        [wants(1, 2, qos="urgent", queue="nlp"), wants(2, 3, queue="vision")],
        [has(8, "n1:0,1,2", queue="nlp")],
        settings(qos=TIERS, queue=queues, preempt={"min_run_s": 60.0}, priority={"backfill_depth": 1}),
    ).outcome()
    assert found.preempts == {}
    assert found.reserved == {2: ("n1:0,1,2", None)}
    assert found.codes[1] == "Priority"


def test_room_left_by_others_is_not_taken_once_reserved():
    """Two cards will be free for job 2 soon, but not for as long as it runs: no reservation beyond the number."""
    found = Scenario(
        [node(gpus=4)],
        [wants(1, 3, limit=HOUR), wants(2, 2, limit=2 * HOUR)],
        [has(8, "n1:0", is_stopping=True, ends_in=30.0), has(9, "n1:1,2", ends_in=HOUR)],
        settings(priority={"backfill_depth": 1}),
    ).outcome()
    assert found.reserved.keys() == {1}


def test_each_victim_makes_room_once():
    waiting = [wants(1, 1, qos="urgent"), wants(2, 1, qos="urgent", uid=5), wants(3, 1, qos="urgent", uid=6)]
    outcome = Scenario(TWO, waiting, [has(8, "n1:0"), has(9, "n1:1")], rules()).outcome()
    assert set(outcome.preempts) == {8, 9}
    assert {for_job for _, for_job in outcome.preempts.values()} == {1, 2}


def test_the_cheaper_node_is_chosen_for_a_job_of_one_node():
    nodes = [node("n1", gpus=2), node("n2", gpus=2)]
    held = [
        has(6, "n1:0", since=10 * HOUR),
        has(7, "n1:1", since=10 * HOUR),
        has(8, "n2:0,1", since=6 * HOUR),
    ]
    outcome = Scenario(nodes, [wants(1, 2, qos="urgent")], held, rules()).outcome()
    assert set(outcome.preempts) == {8}


def test_disabled_preemption_chooses_no_victim():
    outcome = Scenario(TWO, [URGENT], [has(8, "n1:0,1")], rules(mode="off")).outcome()
    assert outcome.preempts == {}
    assert outcome.codes == {1: "Resources"}


def test_a_qos_may_protect_its_runs_for_longer():
    tiers = {**TIERS, "scavenge": {"tier": 0, "min_run_s": 7200.0}}
    chosen = settings(qos=tiers, preempt={"min_run_s": 0.0})
    assert Scenario(TWO, [URGENT], [has(8, "n1:0,1", since=HOUR)], chosen).outcome().preempts == {}
    assert set(Scenario(TWO, [URGENT], [has(8, "n1:0,1", since=3 * HOUR)], chosen).outcome().preempts) == {8}


def test_a_dependency_of_an_urgent_job_preempts_in_its_name():
    base = Scenario(TWO, [wants(1, 1, qos="scavenge")], [has(8, "n1:0,1", "normal")], rules())
    assert base.outcome().preempts == {}
    snapshot = base.snapshot()
    (waiting,) = snapshot.pending
    key = replace(waiting.key, inherited=Urgency(0, "urgent"))
    plan = decide(replace(snapshot, pending=(replace(waiting, key=key),)), rules())
    assert [one.job_id for one in plan.preempts] == [8]
    assert render(plan.preempts[0].text) == "made room for job 1 (QOS urgent goes before QOS normal)"


@pytest.mark.parametrize(
    ("limits", "held", "preempts"),
    [
        ({}, [], True),
        ({"max_gpus_per_user": 1.0}, [], True),
        ({"max_gpus_per_user": 1.0}, ["sacred"], False),
        ({"max_gpus_per_user": 2.0}, ["sacred"], True),
        ({"max_gpus": 1.0}, ["sacred"], False),
        ({"max_running_per_user": 1}, [""], False),
        ({"max_gpus_per_job": 0.5}, [], False),
    ],
)
def test_a_dependency_preempts_in_the_name_of_a_qos_within_its_limits_alone(limits, held, preempts):
    """Otherwise all jobs that one job of a high QOS depends on could preempt, for none of them is of that QOS."""
    chosen = settings(qos={**TIERS, "urgent": {**TIERS["urgent"], **limits}}, preempt={"min_run_s": 60.0})
    mine = [running(20 + n, f"n1:{2 + n}", qos=qos, user="ann") for n, qos in enumerate(held)]
    victim = has(8, "n1:0,1", "normal", user="bob")
    waiting = [wants(1, 1, qos="scavenge", user="ann")]
    snapshot = Scenario([node(gpus=2 + len(held))], waiting, [victim, *mine], chosen).snapshot()
    (pending,) = snapshot.pending
    key = replace(pending.key, inherited=Urgency(0, "urgent"))
    plan = decide(replace(snapshot, pending=(replace(pending, key=key),)), chosen)
    assert [one.job_id for one in plan.preempts] == ([8] if preempts else [])


# --- suspension -----------------------------------------------------------------------------------------

CPU_ONLY = [node(cpus=4.0)]


def test_a_job_without_gpus_is_suspended_instead():
    held = [has(8, "n1", cpus=4.0, can_suspend=True)]
    outcome = Scenario(CPU_ONLY, [wants(1, cpus=2, qos="urgent")], held, rules(mode="suspend")).outcome()
    assert outcome.preempts == {8: ("suspend", 1)}


def test_a_suspended_job_resumes_when_there_is_room():
    held = [has(8, "n1", cpus=0.0, is_suspended=True, suspended_cpus=4.0)]
    outcome = Scenario(CPU_ONLY, [wants(1, cpus=4, qos="scavenge")], held, rules(mode="suspend")).outcome()
    assert [one.job_id for one in outcome.plan.resumes] == [8]
    assert outcome.starts == {}


def test_a_suspended_job_resumes_after_those_that_could_suspend_it():
    held = [has(8, "n1", cpus=0.0, is_suspended=True, suspended_cpus=4.0)]
    outcome = Scenario(CPU_ONLY, [wants(1, cpus=4, qos="urgent")], held, rules(mode="suspend")).outcome()
    assert outcome.plan.resumes == ()
    assert outcome.starts == {1: "n1"}


def test_a_suspended_job_resumes_after_those_that_could_suspend_it_whoever_is_first():
    """It resumed before the first, which could not suspend it, and was suspended for the second, without end."""
    held = [has(8, "n1", cpus=0.0, is_suspended=True, suspended_cpus=4.0), has(9, "n1", "normal", cpus=2.0)]
    queue = [wants(1, cpus=5, qos="first"), wants(2, cpus=4, qos="urgent", limit=MINUTE)]
    rule = settings(qos={**TIERS, "first": {"tier": 3}}, preempt={"mode": "suspend"}, priority={"order": "fifo"})
    outcome = Scenario([node(cpus=6.0)], queue, held, rule).outcome()
    assert outcome.plan.resumes == ()
    assert outcome.starts == {2: "n1"}


def test_a_suspended_job_stays_suspended_while_there_is_no_room():
    held = [has(8, "n1", cpus=0.0, is_suspended=True, suspended_cpus=4.0), has(9, "n1", cpus=1.0)]
    assert Scenario(CPU_ONLY, [], held, rules(mode="suspend")).outcome().plan.resumes == ()


MEMORY = {
    "suspended when its cores are enough": (8, {8: ("suspend", 1)}),
    "ended when its memory is needed, which it would keep": (32, {8: ("requeue", 1)}),
}


@pytest.mark.parametrize(("gib", "preempted"), MEMORY.values(), ids=MEMORY)
def test_a_job_is_not_suspended_for_resources_it_would_keep(gib, preempted):
    held = [has(8, "n1", cpus=4.0, mem_mib=40 * 1024, can_suspend=True)]
    job = wants(1, cpus=2, mem_mib=gib * 1024, qos="urgent")
    assert Scenario(CPU_ONLY, [job], held, rules(mode="suspend")).outcome().preempts == preempted


def test_an_exclusive_job_suspends_no_job_on_its_node():
    held = [has(8, "n1", cpus=4.0, can_suspend=True)]
    job = wants(1, cpus=1, is_exclusive=True, qos="urgent")
    assert Scenario(CPU_ONLY, [job], held, rules(mode="suspend")).outcome().preempts == {8: ("requeue", 1)}


def test_memory_of_a_suspended_job_is_not_promised():
    held = [has(8, "n1", cpus=4.0, mem_mib=40 * 1024, can_suspend=True)]
    urgent = wants(1, cpus=4, qos="urgent", limit=MINUTE)
    large = wants(2, cpus=1, mem_mib=32 * 1024, limit=MINUTE)
    rule = settings(qos=TIERS, preempt={"min_run_s": 60.0, "mode": "suspend"}, priority={"backfill_depth": 5})
    outcome = Scenario(CPU_ONLY, [urgent, large], held, rule).outcome()
    assert outcome.preempts == {8: ("suspend", 1)}
    assert outcome.reserved[2] == ("n1", None)


def test_a_preempted_run_keeps_its_gpus_until_its_epilogs_have_ended():
    outcome = Scenario(TWO, [URGENT], [has(8, "n1:0,1", grace_s=20.0, epilog_s=100.0)], rules()).outcome()
    assert outcome.preempts == {8: ("requeue", 1)}
    assert outcome.reserved[1][1] == 120.0


def test_room_for_short_jobs_until_the_epilogs_of_a_victim_have_ended_is_used():
    """The other card is free until then."""
    waiting = [
        wants(1, 2, qos="urgent"),
        wants(2, 1, qos="normal", limit=100.0),
        wants(3, 1, qos="normal", limit=200.0),
    ]
    held = [has(8, "n1:0", is_stopping=True, ends_in=110.0, grace_s=20.0, epilog_s=100.0)]
    outcome = Scenario(TWO, waiting, held, rules()).outcome()
    assert outcome.starts == {2: "n1:1"}
    assert outcome.reserved[1][1] == 110.0


def test_the_reason_names_epilogs_and_counts_down():
    held = [has(8, "n1:0,1", is_stopping=True, ends_in=90.0, grace_s=20.0, epilog_s=100.0)]
    outcome = Scenario(TWO, [URGENT], held, rules()).outcome()
    assert outcome.reserved == {1: ("n1:0", 90.0)}
    assert outcome.text(1).endswith(
        "; expected in about 2 min: job 8 is being stopped, and its epilogs may take about 2 min"
    )


def test_a_suspended_run_has_no_epilog():
    held = [has(8, "n1", cpus=16.0, can_suspend=True, grace_s=20.0, epilog_s=100.0)]
    outcome = Scenario(TWO, [wants(1, cpus=16.0, qos="urgent")], held, rules(mode="suspend")).outcome()
    assert outcome.preempts == {8: ("suspend", 1)}
    assert outcome.reserved[1][1] == 20.0
