"""Who goes first, what is kept free for the first blocked job, and who may pass it."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, running, settings, wants

from gpusched.testing import gpu_view, node

ONE_GPU = [node(gpus=1)]

ORDER = {
    "jobs start in the order in which they came": ([wants(2, 1), wants(1, 1)], [1]),
    "a lower nice value goes first": ([wants(1, 1), wants(2, 1, nice=-1)], [2]),
    "a higher nice value goes last": ([wants(1, 1, nice=5), wants(2, 1)], [2]),
    "a week of waiting is worth a thousand nice steps": (
        [wants(1, 1, nice=999, waited=7 * 86400), wants(2, 1, waited=0)],
        [1],
    ),
    "waiting longer than sixteen weeks adds nothing": (
        [wants(1, 1, waited=700 * 86400), wants(2, 1, waited=112 * 86400, nice=-1)],
        [2],
    ),
    "at equal age the lower id goes first": ([wants(8, 1, waited=60), wants(7, 1, uid=5, waited=60)], [7]),
    "a job that asked to begin later has waited less": (
        [wants(1, 1, queued_at=999_999.0), wants(2, 1, queued_at=999_998.0)],
        [2],
    ),
}


@pytest.mark.parametrize(("waiting", "starts"), ORDER.values(), ids=ORDER)
def test_jobs_start_in_order(waiting, starts):
    assert list(Scenario(ONE_GPU, waiting).outcome().starts) == starts


def test_classes_take_turns_by_the_age_of_their_next_job():
    jobs = [wants(number, 1, uid=1000 + number % 2) for number in range(1, 7)]
    assert list(Scenario([node(gpus=4)], jobs).outcome().starts) == [1, 2, 3, 4]


def test_jobs_that_a_snapshot_only_counts_are_not_planned():
    jobs = [wants(number, 1) for number in range(1, 6)] + [wants(9, 1, uid=7)]
    assert list(Scenario([node(gpus=8)], jobs, front=3).outcome().starts) == [1, 2, 3, 9]


# --- the reservation --------------------------------------------------------------------------------

TWO = [node(gpus=2)]
FOUR = [node(gpus=4)]

RESERVATIONS = {
    "room is kept from when the last job in the way reaches its limit": (
        FOUR,
        [running(1, "n1:0", ends_in=60), running(2, "n1:1", ends_in=600)],
        wants(9, 4),
        ("n1:0,1,2,3", 600),
    ),
    "jobs that are not in the way do not matter": (
        FOUR,
        [running(1, "n1:0", ends_in=60), running(2, "n1:1", ends_in=600)],
        wants(9, 3),
        ("n1:0,2,3", 60),
    ),
    "a job without a limit ends after all others, at no known time": (
        TWO,
        [running(1, "n1:0"), running(2, "n1:1", ends_in=9e6)],
        wants(9, 2),
        ("n1:0,1", None),
    ),
    "of jobs without a limit the one that started first ends first": (
        TWO,
        [running(1, "n1:0", since=10), running(2, "n1:1", since=20)],
        wants(9, 1),
        ("n1:1", None),
    ),
    "a job past its limit ends now": (TWO, [running(1, "n1:0", ends_in=-50)], wants(9, 2), ("n1:0,1", 0)),
    "the node that is free first is the one": (
        [node("n1", gpus=2), node("n2", gpus=2)],
        [running(1, "n1:0", ends_in=900), running(2, "n2:0,1", ends_in=300)],
        wants(9, 2),
        ("n2:0,1", 300),
    ),
    "cores are waited for like cards": (
        [node(cpus=4)],
        [running(1, "n1", cpus=3, ends_in=120), running(2, "n1", cpus=1, ends_in=60)],
        wants(9, cpus=2),
        ("n1", 120),
    ),
    "jobs that end at once make room together": (
        FOUR,
        [running(number + 1, f"n1:{number}", ends_in=300) for number in range(4)],
        wants(9, 2),
        ("n1:0,1", 300),
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "kept"), RESERVATIONS.values(), ids=RESERVATIONS)
def test_a_blocked_job_gets_a_reservation(nodes, held, waiting, kept):
    outcome = Scenario(nodes, [waiting], held).outcome()
    assert outcome.starts == {}
    assert outcome.plan.first_blocked == 9
    assert outcome.reserved == {9: kept}


def test_only_the_first_blocked_job_gets_a_reservation():
    outcome = Scenario(TWO, [wants(8, 2), wants(9, 2, uid=7)], [running(1, "n1:0", ends_in=60)]).outcome()
    assert set(outcome.reserved) == {8}


def test_a_job_started_in_this_cycle_is_waited_for_like_any_other():
    outcome = Scenario(TWO, [wants(1, 1, limit=120), wants(2, 2)]).outcome()
    assert outcome.starts == {1: "n1:0"}
    assert outcome.reserved == {2: ("n1:0,1", 120)}


# --- passing the first blocked job ------------------------------------------------------------------

HELD_10_MIN = [running(1, "n1:0", ends_in=10 * MINUTE)]

PASSING = {
    "a job that ends by the reserved start may pass": (wants(9, 1, limit=10 * MINUTE), "n1:1"),
    "a job that ends after it may not": (wants(9, 1, limit=10 * MINUTE + 1), None),
    "a job without a limit may not": (wants(9, 1), None),
    "a job that needs nothing of what is reserved may pass": (wants(9), "n1"),
    "a job without a limit that takes all cores would delay it": (wants(9, cpus=15), None),
    "a job without a limit that leaves it the cores it needs may pass": (wants(9, cpus=14), "n1"),
    "a slice without a limit may not": (wants(9, 1, vram_mib=1), None),
    "a short slice may": (wants(9, 1, vram_mib=1, limit=MINUTE), "n1:1"),
    "a job that does not fit now may not, however short": (wants(9, 2, limit=1), None),
}


@pytest.mark.parametrize(("later", "place"), PASSING.values(), ids=PASSING)
def test_backfill_passes_a_job_that_waits_for_both_gpus(later, place):
    outcome = Scenario(TWO, [wants(2, 2, cpus=2), later], HELD_10_MIN).outcome()
    assert outcome.plan.first_blocked == 2
    assert outcome.reserved == {2: ("n1:0,1", 10 * MINUTE)}
    assert outcome.starts == ({} if place is None else {9: place})


def test_a_job_without_a_limit_takes_an_unreserved_gpu():
    held = [running(1, "n1:0", ends_in=60), running(2, "n1:1", ends_in=60)]
    outcome = Scenario(FOUR, [wants(8, 3), wants(9, 1)], held).outcome()
    assert outcome.starts == {9: "n1:3"}
    assert outcome.reserved == {8: ("n1:0,1,2", 60)}


def test_the_reservation_moves_when_the_blocked_job_fits_elsewhere_at_the_same_time():
    held = [running(1, "n1:0,1", ends_in=60), running(2, "n2:0", ends_in=60)]
    nodes = [node("n1", gpus=2), node("n2", gpus=2)]
    outcome = Scenario(nodes, [wants(8, 2), wants(9, 1)], held).outcome()
    assert outcome.starts == {9: "n2:1"}
    assert outcome.reserved == {8: ("n1:0,1", 60)}

    # The other way round only the reserved node has a free card: the reservation moves to n2.
    held = [running(1, "n1:0", ends_in=60), running(2, "n2:0,1", ends_in=60)]
    outcome = Scenario(nodes, [wants(8, 2), wants(9, 1)], held).outcome()
    assert outcome.starts == {9: "n1:1"}
    assert outcome.reserved == {8: ("n2:0,1", 60)}


def test_backfilled_jobs_together_leave_the_reserved_place():
    held = [running(1, "n1:0,1", ends_in=60), running(2, "n1:2", ends_in=60)]
    jobs = [wants(7, 4), *(wants(number, 1, uid=number) for number in (8, 9, 10))]
    outcome = Scenario([node(gpus=6)], jobs, held).outcome()
    assert outcome.starts == {8: "n1:4", 9: "n1:5"}
    assert outcome.codes == {7: "Resources", 10: "Priority"}


def test_without_backfill_no_job_passes_the_first_blocked_one():
    no_backfill = settings(priority={"backfill": False})
    outcome = Scenario(TWO, [wants(2, 2), wants(8, 1, limit=1), wants(9)], HELD_10_MIN, no_backfill).outcome()
    assert outcome.starts == {}
    assert outcome.codes == {2: "Resources", 8: "Priority", 9: "Priority"}


UNLIMITED = {
    "shorter than the job without a limit has run": (30 * MINUTE, True),
    "as long as the job without a limit has run": (HOUR, True),
    "longer than the job without a limit has run": (HOUR + 1, False),
    "without a limit of its own": (None, False),
}


@pytest.mark.parametrize(("limit", "passes"), UNLIMITED.values(), ids=UNLIMITED)
def test_backfill_passes_a_job_that_waits_for_one_without_a_limit(limit, passes):
    held = [running(1, "n1:0", since=HOUR)]
    outcome = Scenario(TWO, [wants(2, 2), wants(9, 1, limit=limit)], held).outcome()
    assert outcome.reserved == {2: ("n1:0,1", None)}
    assert bool(outcome.starts) is passes


NO_RESERVATION = {
    "its cards are drained": (
        [node(gpus=[gpu_view(0, why_not="drained"), gpu_view(1)])],
        wants(8, 2),
    ),
    "a card is lost": ([node(gpus=[gpu_view(0, is_present=False), gpu_view(1)])], wants(8, 2)),
    "a card is in foreign use": ([node(gpus=[gpu_view(0, why_not_whole="bob"), gpu_view(1)])], wants(8, 2)),
    "there is no card of its type any more": ([node(gpus=1)], wants(8, 1, gpu_type="h100")),
}


@pytest.mark.parametrize(("nodes", "unlucky"), NO_RESERVATION.values(), ids=NO_RESERVATION)
def test_a_job_blocked_beyond_running_jobs_blocks_no_other_when(nodes, unlucky):
    outcome = Scenario(nodes, [unlucky, wants(9, 1)]).outcome()
    assert 9 in outcome.starts
    assert outcome.reserved == {}
    assert outcome.plan.first_blocked is None
    assert outcome.codes == {8: "ReqNodeNotAvail"}


def test_the_next_job_gets_the_reservation_of_a_hopeless_one():
    nodes = [node(gpus=[gpu_view(0), gpu_view(1), gpu_view(2, why_not="drained")])]
    outcome = Scenario(nodes, [wants(7, 3), wants(8, 2), wants(9, 1)], [running(1, "n1:0", ends_in=60)]).outcome()
    assert outcome.reserved == {8: ("n1:0,1", 60)}
    assert outcome.starts == {}
    assert outcome.codes == {7: "ReqNodeNotAvail", 8: "Resources", 9: "Priority"}


def test_no_job_passes_while_only_a_gpu_is_being_cleaned():
    being_cleaned = [running(1, "n1:0", ends_in=0, cpus=0)]
    outcome = Scenario(TWO, [wants(2, 2), wants(9, 1, limit=1)], being_cleaned).outcome()
    assert outcome.reserved == {2: ("n1:0,1", 0)}
    assert outcome.starts == {}
