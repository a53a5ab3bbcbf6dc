"""More than one reservation: room for the first so many blocked jobs, and nobody delays any of them."""

from __future__ import annotations

import sys

import pytest
from scenario import HOUR, MINUTE, Scenario, running, settings, wants

from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, node

FOUR = [node(gpus=4, cpus=64.0)]
HELD = [running(90, "n1:0,1", ends_in=HOUR), running(91, "n1:2,3", ends_in=2 * HOUR)]


def keeping(depth):
    return settings(priority={"backfill_depth": depth})


def test_each_of_the_first_jobs_gets_the_earliest_instant_beside_those_before_it():
    waiting = [wants(1, 4, limit=HOUR), wants(2, 2, limit=HOUR), wants(3, 2, limit=4 * HOUR)]
    outcome = Scenario(FOUR, waiting, HELD, keeping(3)).outcome()
    assert outcome.reserved == {
        1: ("n1:0,1,2,3", 2 * HOUR),
        # from the first hour until the four cards are needed: exactly an hour
        2: ("n1:0,1", HOUR),
        3: ("n1:0,1", 3 * HOUR),
    }
    assert outcome.codes == {1: "Resources", 2: "Resources", 3: "Resources"}


def test_later_jobs_get_no_reservation():
    waiting = [wants(i, 4, limit=HOUR) for i in range(1, 5)]
    outcome = Scenario(FOUR, waiting, HELD, keeping(2)).outcome()
    assert outcome.reserved == {1: ("n1:0,1,2,3", 2 * HOUR), 2: ("n1:0,1,2,3", 3 * HOUR)}


def test_jobs_of_one_class_get_separate_reservations():
    waiting = [wants(i, 2, limit=HOUR) for i in range(1, 4)]
    outcome = Scenario([node(gpus=2)], waiting, [running(90, "n1:0,1", ends_in=HOUR)], keeping(10)).outcome()
    assert [outcome.reserved[i][1] for i in (1, 2, 3)] == [HOUR, 2 * HOUR, 3 * HOUR]


PASSING = {
    # name: (depth, the newcomer's limit, whether it starts)
    "with one reservation a job that ends before it passes": (1, HOUR, True),
    "with one reservation a job may delay the second blocked job": (1, 2 * HOUR, True),
    "with two reservations a job that ends before both passes": (2, HOUR, True),
    "with two reservations none delays the second either": (2, 2 * HOUR, False),
}


@pytest.mark.parametrize(("depth", "limit", "starts"), PASSING.values(), ids=PASSING)
def test_backfill_depends_on_the_reservations(depth, limit, starts):
    # Cards 2 and 3 are free. Job 1 needs three cards, after two hours; job 2 needs two, after one hour.
    held = [running(90, "n1:0", ends_in=HOUR), running(91, "n1:1", ends_in=2 * HOUR)]
    nodes = [node(gpus=3)]
    waiting = [wants(1, 3, limit=HOUR), wants(2, 2, limit=HOUR), wants(3, 1, limit=limit)]
    outcome = Scenario(nodes, waiting, held, keeping(depth)).outcome()
    assert (3 in outcome.starts) is starts


def test_a_reservation_moves_to_other_gpus_rather_than_refusing_a_job():
    held = [running(90, "n1:0", ends_in=HOUR), running(91, "n1:1", ends_in=HOUR), running(92, "n1:2", ends_in=HOUR)]
    waiting = [wants(1, 2, limit=HOUR), wants(2, 2, limit=HOUR), wants(3, 1)]
    outcome = Scenario(FOUR, waiting, held, keeping(2)).outcome()
    # Four cards, all free after an hour; job 3 runs for ever on card 3, so job 2 must come after job 1.
    assert outcome.starts == {} or outcome.reserved[2][1] == HOUR
    assert outcome.reserved[1][1] == HOUR


def test_a_job_without_a_limit_never_delays_a_reservation():
    waiting = [wants(1, 4, limit=HOUR), wants(2, 1)]
    held = [running(90, "n1:0,1", ends_in=HOUR)]
    assert Scenario(FOUR, waiting, held, keeping(5)).outcome().starts == {}


def test_two_jobs_without_a_limit_are_queued_in_order_without_a_time():
    held = [running(90, "n1:0,1", since=HOUR)]
    waiting = [wants(1, 2), wants(2, 1, limit=MINUTE)]
    outcome = Scenario([node(gpus=2)], waiting, held, keeping(2)).outcome()
    assert outcome.reserved[1] == ("n1:0,1", None)
    assert outcome.starts == {}


def test_cores_are_reserved_like_gpus():
    machine = [node(cpus=4.0)]
    held = [running(90, "n1", ends_in=HOUR, cpus=3.0)]
    waiting = [wants(1, cpus=4, limit=HOUR), wants(2, cpus=2, limit=HOUR), wants(3, cpus=1, limit=2 * HOUR)]
    assert list(Scenario(machine, waiting, held, keeping(1)).outcome().starts) == []
    short = [*waiting[:2], wants(3, cpus=1, limit=HOUR)]
    assert list(Scenario(machine, short, held, keeping(2)).outcome().starts) == [3]


def test_conservative_backfill_of_every_job_equals_planning_in_order():
    # Rule R6 of conservative backfill by re-planning: each at the earliest time at which it fits for its whole limit.
    machine = [node(cpus=10.0)]
    held = [running(90, "n1", ends_in=100, cpus=6.0)]
    sizes = {1: (8, 50), 2: (4, 100), 3: (5, 30), 4: (4, 200), 5: (2, 120), 6: (10, 10)}
    waiting = [wants(number, cpus=cpus, limit=limit) for number, (cpus, limit) in sizes.items()]
    outcome = Scenario(machine, waiting, held, keeping(1000)).outcome()
    assert outcome.starts == {2: "n1"}
    assert {number: at for number, (_, at) in outcome.reserved.items()} == {
        1: 100,
        3: 150,
        4: 150,
        5: 180 - 30 + 30,
        6: 350,
    }


# --- predictions ---------------------------------------------------------------------------------------


def snapshot_with(scenario, **predicted):
    """The scenario's snapshot, its waiting classes with run times learned from earlier jobs."""
    before = scenario.snapshot()
    classes = [
        replace(one, key=replace(one.key, predicted_s=predicted.get(f"job{one.jobs[0].id}"))) for one in before.pending
    ]
    return replace(before, pending=tuple(classes))


def test_a_job_without_a_limit_is_backfilled_when_similar_jobs_were_short():
    scenario = Scenario(FOUR, [wants(1, 4, limit=HOUR), wants(2, 1)], [running(90, "n1:0,1", ends_in=HOUR)])
    assert scenario.outcome().starts == {}
    trusting = settings(priority={"backfill_by": "prediction"})
    starts = decide(snapshot_with(scenario, job2=600), trusting).starts
    assert [start.job_id for start in starts] == [2]
    assert decide(snapshot_with(scenario, job2=4000), trusting).starts == ()


def test_by_default_predictions_allow_no_backfill():
    waiting = [wants(1, 4, limit=HOUR), wants(2, 1), wants(3, 1, limit=HOUR // 2)]
    scenario = Scenario(FOUR, waiting, [running(90, "n1:0,1", ends_in=HOUR)])
    starts = decide(snapshot_with(scenario, job2=600), settings()).starts
    assert [start.job_id for start in starts] == [3]


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [(HOUR, HOUR), (600.0, 1.25 * 4200 + 600), (-1.0, 4497.75), (-1800.0, 1800 * 2.25**2 - HOUR)],
)
def test_a_running_job_without_a_limit_that_outlives_its_prediction_is_planned_to_continue(predicted, expected):
    """It has run for an hour. Past three quarters of what was predicted, that is taken to be 2.25 times as long."""
    held = [running(90, "n1:0,1,2,3", predicted_end_at=NOW + predicted)]
    outcome = Scenario(FOUR, [wants(1, 4)], held).outcome()
    assert outcome.reserved == {1: ("n1:0,1,2,3", expected)}


def test_a_time_limit_takes_precedence_over_the_prediction():
    waiting = [wants(1, 4, limit=HOUR), wants(2, 1, limit=2 * HOUR)]
    scenario = Scenario(FOUR, waiting, [running(90, "n1:0", ends_in=HOUR)])
    assert decide(snapshot_with(scenario, job2=60), settings()).starts == ()


def test_a_job_is_backfilled_before_reservations_it_ends_before():
    nodes = [node("n1", gpus=2), node("n2", gpus=2)]
    held = [running(8, "n1:0", ends_in=2 * HOUR), running(9, "n2:0,1", ends_in=HOUR / 2)]
    waiting = [
        wants(1, 2, limit=HOUR, nodelist=("n1",)),
        wants(2, 1, limit=3 * HOUR),
        wants(3, 2, limit=HOUR, nodelist=("n2",)),
        wants(4, 1, limit=HOUR),
    ]
    assert Scenario(nodes, waiting, held, keeping(10)).outcome().starts == {4: "n1:1"}


def test_a_class_without_a_possible_reservation_is_considered_once():
    # The first is promised all cards for as long as anybody can tell, so that nothing is left for the others.
    held = [running(90, "n1:0,1"), running(91, "n1:2,3")]
    waiting = [wants(1, 4), *(wants(number, 2) for number in range(2, 500))]
    case = Scenario(FOUR, waiting, held, keeping(10))
    outcome = case.outcome()
    assert outcome.reserved == {1: ("n1:0,1,2,3", None)}
    assert outcome.codes == {1: "Resources", 2: "Priority"}
    assert searches(case) < 50


def searches(case):
    """How often a place for a job is looked for in one cycle."""
    snapshot, found = case.snapshot(), 0

    def count(frame, event, _):
        nonlocal found
        found += event == "call" and frame.f_code.co_name == "options"

    sys.setprofile(count)
    try:
        decide(snapshot, case.settings)
    finally:
        sys.setprofile(None)
    return found
