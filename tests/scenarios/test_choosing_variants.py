"""Jobs with variants: which one starts, for which one room is kept, and what is said of each."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import FIRST_COME, HOUR, MINUTE, Scenario, running, settings, wants

from gpusched.model.job import ArraySpec, Job, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, Placement
from gpusched.model.states import ReasonCode
from gpusched.model.value import replace
from gpusched.model.variants import of_specs
from gpusched.scheduler.forecast import StartForecast
from gpusched.scheduler.planner import Planner, decide
from gpusched.testing import NOW, gpu_view, node, share, snapshot, window


def cards(node_name: str, count: int, model: str) -> Any:
    return node(node_name, [gpu_view(index, node_name, name=f"NVIDIA {model}") for index in range(count)])


A, R = cards("n1", 2, "A100"), cards("n2", 4, "RTX 3090")
BOTH = [A, R]
A2 = {"gpus": 2, "gpu_type": "a100"}
R4 = {"gpus": 4, "gpu_type": "rtx3090"}


def either(job_id: int, *variants: dict[str, Any], **parts: Any) -> Job:
    """A job with these variants, each by fields of its request and `limit`, in the order preferred."""
    made = wants(job_id, **parts)
    specs = []
    for one in variants or (A2, R4):
        limit = one.get("limit", made.spec.time_limit_s)
        request = {name: value for name, value in one.items() if name != "limit"}
        specs.append(replace(made.spec, request=Request(**request), time_limit_s=limit))
    return replace(made, spec=of_specs(specs, [()] * len(specs)))


STARTS = {
    "all are free: the one preferred": ([], [either(1)], {1: "n1:0,1"}, [0]),
    "the order counts, not the size": ([], [either(1, R4, A2)], {1: "n2:0,1,2,3"}, [0]),
    "the first is busy: the second starts now": (
        [running(9, "n1:0", ends_in=MINUTE)],
        [either(1)],
        {1: "n2:0,1,2,3"},
        [1],
    ),
    "it does not wait for the first even if that ends at once": (
        [running(9, "n1:0", ends_in=1)],
        [either(1)],
        {1: "n2:0,1,2,3"},
        [1],
    ),
    "both are busy": ([running(9, "n1:0", ends_in=60), running(8, "n2:0", ends_in=60)], [either(1)], {}, []),
    "two jobs share it by their variants": ([], [either(1), either(2)], {1: "n1:0,1", 2: "n2:0,1,2,3"}, [0, 1]),
    "a third waits": ([], [either(1), either(2), either(3)], {1: "n1:0,1", 2: "n2:0,1,2,3"}, [0, 1]),
    "a later job passes through its second variant beside what is kept for an earlier one": (
        [running(9, "n1:0", ends_in=HOUR)],
        [wants(1, 2, gpu_type="a100"), either(2)],
        {2: "n2:0,1,2,3"},
        [1],
    ),
    "a short variant fits before a reservation, the long one would delay it": (
        [running(9, "n1:0", ends_in=HOUR)],
        [wants(1, 2, gpu_type="a100"), either(2, {"gpus": 1, "gpu_type": "a100", "limit": 7200},
                                               {"gpus": 1, "gpu_type": "a100", "limit": 1800})],
        {2: "n1:1"},
        [1],
    ),
    "only the number of cores differs": (
        [running(9, "n1", cpus=10.0)],
        [either(1, {"cpus": 8.0, "nodelist": ("n1",)}, {"cpus": 4.0, "nodelist": ("n1",)})],
        {1: "n1"},
        [1],
    ),
    "three variants, the last one is free": (
        [running(9, "n1:0", ends_in=60), running(8, "n2:0", ends_in=60)],
        [either(1, A2, R4, {"gpus": 3, "gpu_type": "rtx3090"})],
        {1: "n2:1,2,3"},
        [2],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("held", "waiting", "starts", "variants"), STARTS.values(), ids=STARTS)
def test_the_first_variant_that_can_start_now_starts(held, waiting, starts, variants):
    outcome = Scenario(BOTH, waiting, held).outcome()
    assert outcome.starts == starts
    assert [start.variant for start in outcome.plan.starts] == variants


KEPT = {
    "for the one that ends sooner": (60, 600, ("n1:0,1", 60)),
    "also if that is the less preferred": (600, 60, ("n2:0,1,2,3", 60)),
    "of equal ones for the more preferred": (60, 60, ("n1:0,1", 60)),
    "an unknown end is later than any known one": (None, 600, ("n2:0,1,2,3", 600)),
}


@pytest.mark.parametrize(("first_s", "second_s", "kept"), KEPT.values(), ids=KEPT)
def test_room_is_kept_for_the_variant_that_is_expected_to_start_first(first_s, second_s, kept):
    held = [running(9, "n1:0", ends_in=first_s), running(8, "n2:0", ends_in=second_s)]
    outcome = Scenario(BOTH, [either(1)], held).outcome()
    assert outcome.reserved == {1: kept}


def test_room_is_kept_for_one_variant_alone_so_that_others_may_pass_on_the_other():
    held = [running(9, "n1:0", ends_in=60), running(8, "n2:0", ends_in=600)]
    later = [wants(2, 1, gpu_type="a100", limit=HOUR), wants(3, 3, gpu_type="rtx3090", limit=HOUR)]
    outcome = Scenario(BOTH, [either(1), *later], held).outcome()
    assert (outcome.reserved[1], outcome.starts) == (("n1:0,1", 60), {3: "n2:1,2,3"})


def test_the_reason_says_what_each_variant_waits_for_and_when_the_sooner_one_is_expected():
    held = [running(9, "n1:0", ends_in=600), running(8, "n2:0", ends_in=60)]
    outcome = Scenario(BOTH, [either(1)], held).outcome()
    reason = outcome.reasons[1]
    assert reason.code is ReasonCode.RESOURCES
    assert reason.text == (
        "with -g a100:2: needs 2 a100 on one node, the most free on one is 1 (1 of 2 in all) | "
        "with -g rtx3090:4: needs 4 rtx3090 on one node, the most free on one is 3 (3 of 4 in all); "
        "expected in about 1 min, when job 8 ends"
    )
    assert reason.facts["variant"] == 1
    assert reason.facts["expected_at"] == NOW + 60
    assert [one["request"] for one in reason.facts["variants"]] == ["-g a100:2", "-g rtx3090:4"]


# --- rules hold for each variant ------------------------------------------------------------------------

QUEUE_OF_3 = settings(queue={"default": {"max_gpus": 3}})
USER_OF_3 = settings(queue={"default": {"max_gpus_per_user": 3}})


@pytest.mark.parametrize("limits", [QUEUE_OF_3, USER_OF_3])
def test_a_limit_blocks_the_variants_beyond_it_and_no_others(limits: Settings):
    held = [running(9, "n2:0", user="ann", queue="default", ends_in=HOUR)]
    # With job 9, four GPUs more would be too many, and two are not.
    outcome = Scenario(BOTH, [either(1, R4, A2, queue="default")], held, limits).outcome()
    assert outcome.starts == {1: "n1:0,1"}


def test_what_a_limit_says_of_one_variant_is_beside_what_the_other_waits_for():
    held = [running(9, "n1:0", user="ann", queue="default", ends_in=60)]
    outcome = Scenario(BOTH, [either(1, queue="default")], held, QUEUE_OF_3).outcome()
    assert outcome.reserved == {1: ("n1:0,1", 60)}
    first, second = outcome.reasons[1].facts["variants"]
    assert first["code"] == "Resources"
    assert second["code"] != "Resources"
    assert "4" in second["text"]


def test_a_budget_that_is_spent_for_one_variant_leaves_the_other():
    budget = Budget("ann", ("ann",), gpu_s=2 * HOUR, until_at=NOW + 1e6)
    jobs = [either(1, {**R4, "limit": 3600}, {**A2, "limit": 3600}, account="ann")]
    outcome = Scenario(BOTH, jobs, budgets=[budget]).outcome()
    assert outcome.starts == {1: "n1:0,1"}


def test_a_spent_budget_makes_a_filler_of_the_job_once_nothing_else_is_left():
    budget = Budget("ann", ("ann",), gpu_s=0.0, until_at=NOW + 1e6, when_spent="filler")
    held = [running(9, "n1:0", ends_in=HOUR)]
    outcome = Scenario(BOTH, [either(1, {**A2, "limit": 60}, {**R4, "limit": 60}, account="ann")], held,
                       budgets=[budget]).outcome()  # fmt: skip
    assert outcome.starts == {1: "n2:0,1,2,3"}
    assert outcome.plan.starts[0].is_filler


def test_a_variant_beyond_the_limit_per_job_does_not_keep_the_other_from_running_as_a_filler():
    budget = Budget("ann", ("ann",), gpu_s=10.0, until_at=NOW + 1e6, when_spent="filler")
    rules = settings(queue={"default": {"max_gpus_per_job": 3}}, account={"ann": {"when_spent": "filler"}})
    jobs = [either(1, {**R4, "limit": 1}, {**A2, "limit": 60}, account="ann", queue="default")]
    outcome = Scenario(BOTH, jobs, (), rules, budgets=[budget]).outcome()
    assert outcome.starts == {1: "n1:0,1"}
    assert outcome.plan.starts[0].is_filler


def test_a_variant_that_would_not_end_by_the_deadline_does_not_start():
    jobs = [either(1, {**A2, "limit": 7200}, {**R4, "limit": 600}, deadline_at=NOW + 3600)]
    assert Scenario(BOTH, jobs).outcome().starts == {1: "n2:0,1,2,3"}


def test_an_urgent_job_starts_beside_others_before_it_preempts_any():
    urgent = settings(qos={"low": {}, "high": {"tier": 1, "preempts": ("low",)}}, preempt={"min_run_s": 0.0})
    held = [running(9, "n1:0,1", qos="low", ends_in=HOUR, user="bob")]
    free = Scenario(BOTH, [either(1, qos="high")], held, urgent).outcome()
    assert (free.starts, free.preempts) == ({1: "n2:0,1,2,3"}, {})
    held.append(running(8, "n2:0", qos="", ends_in=HOUR, user="bob"))
    full = Scenario(BOTH, [either(1, qos="high")], held, urgent).outcome()
    assert (full.starts, full.preempts) == ({}, {9: ("requeue", 1)})


def test_an_array_limit_counts_the_tasks_whatever_variant_they_run_with():
    tasks = [replace(either(number, queue="default"), array_id=10, task=number) for number in (1, 2)]
    tasks = [replace(one, spec=replace(one.spec, array=ArraySpec("1-2", throttle=1))) for one in tasks]
    assert Scenario(BOTH, tasks).outcome().starts == {1: "n1:0,1"}


# --- estimates, fences, and a planner that stays -------------------------------------------------------------


def test_an_estimate_is_of_the_variant_that_is_expected_to_start_first():
    held = [running(9, "n1:0", ends_in=600), running(8, "n2:0", ends_in=60)]
    state = Scenario(BOTH, [either(1, limit=3600), either(2, limit=3600)], held).snapshot()
    found = StartForecast(state, Settings(), lambda _: None).ranges([1, 2])
    assert [(found[job].low_at, found[job].high_at) for job in (1, 2)] == [
        (NOW + 60, NOW + 60),
        (NOW + 600, NOW + 600),
    ]


def test_a_settled_reservation_stays_with_its_variant_while_predictions_move():
    chosen = settings(priority={"fence_s": 60.0, "backfill_by": "prediction"})
    places = set()
    for first_s, second_s in ((60, 600), (600, 60), (60, 600)):
        held = [
            running(9, "n1:0", since=2 * HOUR, predicted_end_at=NOW + first_s),
            running(8, "n2:0", since=HOUR, predicted_end_at=NOW + second_s),
        ]
        state = Scenario(BOTH, [either(1)], held, chosen).snapshot()
        (waiting,) = state.pending
        fenced = replace(waiting, jobs=(replace(waiting.jobs[0], fence_at=NOW - 1000),))
        plan = decide(replace(state, pending=(fenced,)), chosen)
        places.add(plan.reservations[0].placement.node)
    # The run that holds it back has had a start for longest.
    assert places == {"n1"}


def test_a_planner_that_stays_frees_what_the_variant_held_and_takes_it_back():
    state = snapshot(*BOTH, waiting=[either(1), either(2), either(3, limit=60)])
    planner = Planner.from_snapshot(state, FIRST_COME)
    first = planner.plan(NOW)
    assert [(start.job_id, start.variant) for start in first.starts] == [(1, 0), (2, 1)]
    # A plan that is not carried out leaves no trace.
    assert planner.plan(NOW).starts == first.starts
    assert [start.job_id for start in planner.schedule(NOW)] == [1, 2]
    twin = planner.fork()
    for one in (planner, twin):
        one.state.run_ended(2)
        assert [(start.job_id, start.variant) for start in one.schedule(NOW + 1)] == [(3, 1)]


def test_jobs_of_one_class_with_variants_start_in_order():
    jobs = [
        either(number, {"gpus": 1, "gpu_type": "a100"}, {"gpus": 1, "gpu_type": "rtx3090"}) for number in range(1, 8)
    ]
    outcome = Scenario(BOTH, jobs).outcome()
    assert list(outcome.starts) == [1, 2, 3, 4, 5, 6]
    assert [start.variant for start in outcome.plan.starts] == [0, 0, 1, 1, 1, 1]


def test_a_job_of_a_reservation_starts_inside_it_with_the_variant_that_is_there():
    reserved = Placement("n2", tuple(share(at, "n2") for at in range(4)), 4.0, 0)
    windows = [window("course", reserved, begins_in=-60, ends_in=HOUR, users=["ann"])]
    jobs = [either(1, {**A2, "limit": 600}, {**R4, "limit": 600}, reservation="course")]
    outcome = Scenario(BOTH, jobs, windows=windows).outcome()
    assert (outcome.starts, outcome.plan.starts[0].variant) == ({1: "n2:0,1,2,3"}, 1)
    # Once the reservation is full, the job waits inside it and takes nothing outside.
    held = [running(9, "n2:0", ends_in=HOUR, reservation="course")]
    full = Scenario(BOTH, jobs, held, windows=windows).outcome()
    assert full.starts == {}
    assert {one["code"] for one in full.reasons[1].facts["variants"]} == {"Reservation"}


def test_a_job_that_must_still_be_patient_is_told_of_its_soonest_variant():
    patient = replace(Settings(), priority=PrioritySettings(reserve_after_s=HOUR))
    held = [running(9, "n1:0", ends_in=600), running(8, "n2:0", ends_in=60)]
    outcome = Scenario(BOTH, [either(1, waited=1.0)], held, patient).outcome()
    assert outcome.reserved == {}
    reason = outcome.reasons[1]
    assert (reason.facts["variant"], reason.facts["expected_at"]) == (1, NOW + 60)
    assert reason.facts["reserves_at"] > NOW + HOUR


def test_a_gang_and_one_node_are_variants_like_any_other():
    three = [cards("n1", 2, "A100"), cards("n2", 1, "A100"), cards("n3", 1, "A100")]
    jobs = [either(1, {"gpus": 2}, {"gpus": 1, "nodes": 2})]
    assert Scenario(three, jobs).outcome().starts == {1: "n1:0,1"}
    outcome = Scenario(three, jobs, [running(9, "n1:0", ends_in=60)]).outcome()
    (start,) = outcome.plan.starts
    assert (start.variant, len(start.placement.others)) == (1, 1)
