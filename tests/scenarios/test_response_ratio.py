"""The order out of the box: users by what they have used, their jobs by wait over length, reservations with a fence."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from scenario import HOUR, MINUTE, Scenario, place_of, running, wants

from gpusched.model.cluster import JobTerms
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingJob, Usage
from gpusched.model.value import replace
from gpusched.scheduler import events
from gpusched.scheduler.planner import Planner, decide
from gpusched.testing import NOW, node, request

DAY = 24 * HOUR
NEVER = 300 * DAY
ANN = {"user": "ann", "uid": 1000, "account": "lab"}
BOB = {"user": "bob", "uid": 1001, "account": "lab"}
ONE, FOUR = [node(gpus=1)], [node(gpus=4, cpus=64.0)]


def by_default(**priority):
    """What an empty config says, but for these settings of [priority]."""
    return replace(Settings(), priority=replace(PrioritySettings(), **priority))


def used(**gpu_hours):
    return [Usage("lab", user, Resources(gpus=hours * HOUR), NOW) for user, hours in gpu_hours.items()]


def in_order(waiting, usage=(), config=None, nodes=ONE):
    """Ids of waiting jobs as they stand in the queue."""
    config = config or by_default()
    planner = Planner.from_snapshot(Scenario(nodes, waiting, usage=usage).snapshot(), config)
    found = [job.id for _, job in planner.in_order(NOW)]
    # The first of the queue is the one that a single free card goes to.
    if nodes is ONE and not any(one.spec.queue != "default" for one in waiting):
        started = list(Scenario(nodes, waiting, usage=usage, settings=config).outcome().starts)
        assert started == found[:1]
    return found


# --- between users ------------------------------------------------------------------------------------

SHORT, LONG = {"limit": 30 * MINUTE}, {"limit": 2 * DAY}

USERS = {
    # name: (what Ann and Bob have used, settings, waiting, in which order)
    "a long job of a user who has used less goes before short ones": (
        used(ann=100, bob=10),
        {},
        [wants(1, 1, waited=HOUR, **SHORT, **ANN), wants(2, 1, waited=2 * MINUTE, **LONG, **BOB)],
        [2, 1],
    ),
    "so does one without a limit before new jobs of ten minutes": (
        used(ann=100, bob=10),
        {},
        [
            wants(1, 1, waited=3 * HOUR, **BOB),
            *(wants(number, 1, limit=10 * MINUTE, waited=2 * MINUTE, **ANN) for number in (2, 3, 4)),
        ],
        [1, 2, 3, 4],
    ),
    "users within fairshare_step stand alike, and the shorter job goes first": (
        used(ann=12, bob=10),
        {},
        [wants(1, 1, waited=HOUR, **SHORT, **ANN), wants(2, 1, waited=HOUR, **LONG, **BOB)],
        [1, 2],
    ),
    "a larger step makes users alike who are not by default": (
        used(ann=30, bob=10),
        {"fairshare_step": 100.0},
        [wants(1, 1, waited=HOUR, **SHORT, **ANN), wants(2, 1, waited=HOUR, **LONG, **BOB)],
        [1, 2],
    ),
    "the same users are told apart by the default step": (
        used(ann=30, bob=10),
        {},
        [wants(1, 1, waited=HOUR, **SHORT, **ANN), wants(2, 1, waited=HOUR, **LONG, **BOB)],
        [2, 1],
    ),
    "with a step of 1 what was used ranks nobody": (
        used(ann=10_000, bob=1),
        {"fairshare_step": 1.0},
        [wants(1, 1, waited=HOUR, **SHORT, **ANN), wants(2, 1, waited=HOUR, **LONG, **BOB)],
        [1, 2],
    ),
    "length orders jobs within a user's turn": (
        used(ann=100, bob=10),
        {},
        [
            wants(1, 1, waited=HOUR, **SHORT, **ANN),
            wants(2, 1, waited=HOUR, **LONG, **BOB),
            wants(3, 1, waited=HOUR, **LONG, **ANN),
            wants(4, 1, waited=HOUR - MINUTE, **SHORT, **ANN),
        ],
        [2, 1, 4, 3],
    ),
    "short of max_wait_s a heavy user's job stays behind": (
        used(ann=100, bob=10),
        {"max_wait_s": 3 * DAY},
        [wants(1, 1, waited=3 * DAY - HOUR, **ANN), wants(2, 1, waited=2 * MINUTE, **BOB)],
        [2, 1],
    ),
    "past max_wait_s it is in the first turn, where it has waited longest": (
        used(ann=100, bob=10),
        {"max_wait_s": 3 * DAY},
        [wants(1, 1, waited=3 * DAY + HOUR, **ANN), wants(2, 1, waited=2 * MINUTE, **BOB)],
        [1, 2],
    ),
    "a user alone is compared with nobody": (
        used(ann=100),
        {},
        [wants(1, 1, waited=HOUR, **LONG, **ANN), wants(2, 1, waited=HOUR, **SHORT, **ANN)],
        [2, 1],
    ),
}


@pytest.mark.parametrize(("usage", "priority", "waiting", "expected"), USERS.values(), ids=USERS)
def test_users_who_have_used_less_of_their_share_go_first(usage, priority, waiting, expected):
    assert in_order(waiting, usage, by_default(**priority)) == expected


# --- within a user's turn -----------------------------------------------------------------------------

LENGTHS = {
    # name: (limit and wait of job 1, limit and wait of job 2, which goes first)
    "the shorter of equal waits": ((2 * HOUR, HOUR), (HOUR, HOUR), 2),
    "twice the wait for twice the length is as good, and a little more is better": (
        (2 * HOUR, 2 * HOUR + 10 * MINUTE),
        (HOUR, HOUR),
        1,
    ),
    "a little less is worse": ((2 * HOUR, 2 * HOUR - 10 * MINUTE), (HOUR, HOUR), 2),
    "below half an hour shorter is no better": ((30 * MINUTE, HOUR + 5 * MINUTE), (MINUTE, HOUR), 1),
    "of nothing is known counts as an hour": ((None, HOUR), (HOUR + 10 * MINUTE, HOUR), 1),
    "which is longer than half an hour": ((None, HOUR), (50 * MINUTE, HOUR), 2),
}


@pytest.mark.parametrize(("one", "other", "first"), LENGTHS.values(), ids=LENGTHS)
def test_jobs_go_by_wait_over_length(one, other, first):
    waiting = [
        wants(number, 1, limit=limit, waited=waited) for number, (limit, waited) in enumerate((one, other), start=1)
    ]
    assert in_order(waiting)[0] == first


MORE_URGENT = {
    # name: (fields of the job that waits half as long, fields of the other)
    "nice": ({}, {"nice": 1000}),
    "QOS": ({"qos": "high"}, {}),
    "queue": ({"queue": "fast"}, {"queue": "slow"}),
}


@pytest.mark.parametrize(("urgent", "plain"), MORE_URGENT.values(), ids=MORE_URGENT)
@pytest.mark.parametrize(("waited", "first"), [(1.9, 1), (2.1, 2)])
def test_a_thousand_points_count_like_twice_the_wait(urgent, plain, waited, first):
    config = replace(
        by_default(),
        qos={"high": QosSettings("high", factor=1.0)},
        queue={"fast": QueueSettings("fast", factor=1.0), "slow": QueueSettings("slow")} if "queue" in urgent else {},
    )
    waiting = [
        wants(1, 1, limit=HOUR, waited=HOUR, **urgent),
        wants(2, 1, limit=HOUR, waited=waited * HOUR, **plain),
    ]
    assert in_order(waiting, config=config)[0] == first


# --- patience -----------------------------------------------------------------------------------------

# Three of four cards are held for good; job 1 wants four.
HELD = [running(90, "n1:0,1,2")]


def test_a_narrow_job_uses_the_fourth_gpu_while_a_wide_one_waits_without_limits():
    waiting = [wants(1, 4, waited=5 * HOUR), wants(2, 1, waited=MINUTE)]
    outcome = Scenario(FOUR, waiting, HELD, by_default()).outcome()
    assert outcome.starts == {2: "n1:3"}
    assert outcome.reserved == {}


PATIENCE = {
    # name: (settings, limit of the job, hours until something is reserved for it)
    "six hours and ten times an hour": ({}, HOUR, 16),
    "ten times its length": ({"reserve_after_s": 0.0}, 3 * HOUR, 30),
    "an hour for nothing known": ({"reserve_after_s": 0.0}, None, 10),
    "time alone": ({"reserve_after_s": 2 * HOUR, "reserve_after_runs": 0.0}, 3 * HOUR, 2),
}


@pytest.mark.parametrize(("priority", "limit", "hours"), PATIENCE.values(), ids=PATIENCE)
def test_a_job_gets_a_reservation_only_after_a_long_wait(priority, limit, hours):
    held = [running(90, "n1:0,1,2", ends_in=HOUR)]
    for waited, expected in ((hours * HOUR - 2 * MINUTE, False), (hours * HOUR + 2 * MINUTE, True)):
        waiting = [wants(1, 4, limit=limit, waited=waited), wants(2, 1, limit=2 * HOUR, waited=MINUTE)]
        outcome = Scenario(FOUR, waiting, held, by_default(**priority)).outcome()
        assert (1 in outcome.reserved) is expected
        # Before that whatever fits starts; afterwards what would be in the way does not.
        assert (2 in outcome.starts) is not expected


BOUNDS = {
    # name: (planned length of the other runs, seconds until something is reserved for a job of this limit, limit)
    "runs of a second": ((1, 1, 1), 10, 16),
    "the longest of them counts": ((1, 60, 1), 10, 1024),
    "a job of hours as well": ((1, 1, 1), 5 * HOUR, 16),
    "runs of a day leave the patience of the settings": ((1, DAY, 1), HOUR, 16 * HOUR),
    "and so do those of half an hour": ((HOUR / 2,) * 3, MINUTE, 11 * HOUR),
}


@pytest.mark.parametrize(("lengths", "limit", "waits_s"), BOUNDS.values(), ids=BOUNDS)
def test_no_job_is_patient_for_longer_than_sixteen_of_the_runs_that_pass_it(lengths, limit, waits_s):
    held = [
        running(90 + card, f"n1:{card}", since=0.0, predicted_end_at=NOW + length_s)
        for card, length_s in enumerate(lengths)
    ]
    for waited, expected in ((0.9 * waits_s, False), (waits_s + 61, True)):
        outcome = Scenario(FOUR, [wants(1, 4, limit=limit, waited=waited)], held, by_default()).outcome()
        assert (1 in outcome.reserved) is expected


def test_without_a_run_or_a_prediction_the_patience_of_the_settings_holds():
    for held in ([], [running(90, "n1:0,1,2", since=0.0)]):
        planner = Planner.from_snapshot(Scenario(FOUR, [wants(1, 4, waited=HOUR)], held).snapshot(), by_default())
        planner.plan(NOW)
        assert planner.state.ranking.most_patience_s == inf


def test_zero_patience_reserves_at_once():
    config = by_default(reserve_after_s=0.0, reserve_after_runs=0.0)
    waiting = [wants(1, 4, limit=HOUR, waited=0.0)]
    assert list(Scenario(FOUR, waiting, [running(90, "n1:0", ends_in=HOUR)], config).outcome().reserved) == [1]


DEAR = [
    running(90, "n1:0,1,2", since=HOUR, predicted_end_at=NOW + HOUR),
    running(91, "n1:3", since=HOUR, predicted_end_at=NOW + 5 * HOUR),
]
"""Room for four GPUs is expected in five hours, and leaves three of them idle for four hours."""


def beside(narrow, waited, fence_at=None, held=DEAR):
    """A job of four GPUs that has waited this long, and so many of one GPU that have just come."""
    waiting = [wants(1, 4, limit=HOUR, waited=waited), *(wants(2 + n, 1, waited=MINUTE) for n in range(narrow))]
    snapshot = Scenario(FOUR, waiting, held).snapshot()
    return snapshot if fence_at is None else fenced(snapshot, job1=fence_at)


@pytest.mark.parametrize(("narrow", "hours"), [(0, 16), (3, 16), (4, 60), (400, 60)])
def test_under_overload_a_reservation_leaves_idle_at_most_a_twentieth_of_the_time_since_submission(narrow, hours):
    for waited, expected in ((hours * HOUR - 10 * MINUTE, []), (hours * HOUR + 10 * MINUTE, [1])):
        plan = decide(beside(narrow, waited), by_default())
        assert [one.job_id for one in plan.reservations] == expected
        (reason,) = [reason for key, reason in plan.reasons.items() if key.terms.request.gpus == 4]
        if not expected:
            # Within the period as of which waits count.
            assert reason.facts["reserves_at"] == pytest.approx(NOW + 10 * MINUTE, abs=25 * MINUTE)


def test_a_reservation_that_runs_make_dearer_is_dropped_until_its_bound_is_reached():
    """A day ago they were expected to end soon; the place is kept once nothing may delay the job any more."""
    for fence_at, expected in ((NOW + DAY, []), (NOW - 3 * DAY, []), (NOW - 5 * DAY, [1])):
        plan = decide(beside(4, 30 * HOUR, fence_at), by_default())
        assert [one.job_id for one in plan.reservations] == expected


def test_patience_of_zero_reserves_at_any_cost():
    config = by_default(reserve_after_s=0.0, reserve_after_runs=0.0)
    assert [one.job_id for one in decide(beside(400, HOUR), config).reservations] == [1]


def test_a_kept_planner_drops_a_reservation_when_jobs_come_and_goes_on_when_they_start_like_a_new_one():
    planner = Planner.from_snapshot(beside(2, 20 * HOUR), by_default())
    small = ClassKey(JobTerms(1001, "bob", "lab", "default", request=request(1)), 0, None, predicted_s=600)
    seen = []
    for number, over in ((50, None), (51, None), (52, None), (53, 90), (54, None)):
        planner.state.apply(events.JobQueued(small, PendingJob(number, NOW)))
        if over is not None:
            planner.state.apply(events.RunReleased(over))
        kept, again = planner.plan(NOW), decide(planner.state.snapshot(NOW), by_default())
        assert (kept.starts, kept.reservations) == (again.starts, again.reservations)
        seen.append([one.job_id for one in kept.reservations])
        planner.schedule(NOW)
    # A narrow job in its place costs nothing: it waits for one end alone.
    assert seen[:3] == [[1], [2], [2]]


EIGHT = [node(gpus=4, cpus=64.0), node("n2", gpus=4, cpus=64.0)]


def test_wide_jobs_go_first_once_patience_ends_and_by_length_before():
    waiting = [wants(1, 1, limit=HOUR, waited=40 * HOUR), wants(2, 4, limit=2 * HOUR, waited=30 * HOUR)]
    assert in_order(waiting, nodes=EIGHT) == [2, 1]
    assert in_order(waiting, config=by_default(reserve_after_s=NEVER), nodes=EIGHT) == [1, 2]


def test_the_older_of_two_wide_jobs_past_their_patience_goes_first_at_any_length():
    config = by_default(reserve_after_runs=0.0)
    waiting = [wants(1, 4, limit=20 * HOUR, waited=30 * HOUR), wants(2, 4, limit=HOUR, waited=20 * HOUR)]
    assert in_order(waiting, config=config, nodes=EIGHT) == [1, 2]
    assert in_order(waiting, config=by_default(reserve_after_s=NEVER), nodes=EIGHT) == [2, 1]


SHARES = {
    # name: (GPU hours of Ann and Bob, hours until something is reserved for Bob's job)
    "as much as others: all of it": ((10, 10), 10.0),
    "more than their share: all of it, and not more": ((10, 30), 10.0),
    "half of their share: half": ((30, 10), 5.0),
    "next to nothing: a tenth": ((100, 0.1), 1.0),
    "nothing: a tenth": ((100, 0), 1.0),
}


def of_two_wide_jobs(usage_h, waited, **priority):
    """What is reserved when Ann's wide job has come just now, and Bob's has waited for so long."""
    held = [running(90, "n1:0,1,2", since=1.0, **ANN)]
    waiting = [wants(1, 4, waited=0.0, **ANN), wants(2, 4, waited=waited, **BOB)]
    config = by_default(reserve_after_s=10 * HOUR, reserve_after_runs=0.0, **priority)
    return Scenario(FOUR, waiting, held, config, usage=used(ann=usage_h[0], bob=usage_h[1])).outcome().reserved


@pytest.mark.parametrize(("usage_h", "until"), SHARES.values(), ids=SHARES)
def test_equally_ranked_users_with_less_usage_wait_less_for_a_reservation(usage_h, until):
    # With a step as large as this all users stand alike.
    assert list(of_two_wide_jobs(usage_h, 0.95 * until * HOUR, fairshare_step=1e6)) == []
    assert list(of_two_wide_jobs(usage_h, 1.05 * until * HOUR, fairshare_step=1e6)) == [2]


@pytest.mark.parametrize(("usage_h", "expected"), [((30, 10), [2]), ((100, 0), [2]), ((10, 10), []), ((10, 30), [1])])
def test_room_is_reserved_at_once_for_preferred_users(usage_h, expected):
    assert list(of_two_wide_jobs(usage_h, MINUTE)) == expected


def foreseen(snapshot, **lengths):
    """The same with predictions for jobs without a limit: `foreseen(snapshot, job2=HOUR)`."""
    known = {int(name.removeprefix("job")): int(length_s) for name, length_s in lengths.items()}
    pending = [
        replace(one, key=replace(one.key, predicted_s=known.get(one.jobs[0].id, one.key.predicted_s)))
        for one in snapshot.pending
    ]
    return replace(snapshot, pending=tuple(pending))


@pytest.mark.parametrize(
    ("usage_h", "guess", "limit", "starts"),
    [
        ((10, 10), 4 * HOUR, None, True),
        ((100, 1), 4 * HOUR, None, False),
        ((100, 1), 38 * MINUTE, None, False),
        ((100, 1), 37 * MINUTE, None, True),
        ((100, 1), 4 * HOUR, 4 * HOUR, True),
        ((1, 100), 4 * HOUR, None, True),
    ],
    ids=["users alike", "a lighter user's job", "by a guess of an eighth", "by less", "by a limit", "a heavier user's"],
)
def test_backfill_respects_a_reservation_in_five_hours(usage_h, guess, limit, starts):
    """The guesses of users who have used more count twice for each band, up to eight times."""
    held = [running(90, "n1:0,1,2", ends_in=5 * HOUR, since=1.0, **ANN)]
    waiting = [wants(1, 4, limit=HOUR, waited=DAY, **BOB), wants(2, 1, limit=limit, waited=MINUTE, **ANN)]
    snapshot = Scenario(FOUR, waiting, held, usage=used(ann=usage_h[0], bob=usage_h[1])).snapshot()
    plan = decide(foreseen(snapshot, job2=guess), by_default())
    assert ([start.job_id for start in plan.starts] == [2]) is starts
    assert 1 in {one.job_id for one in plan.reservations}


# --- the fence ----------------------------------------------------------------------------------------

AT_ONCE = by_default(reserve_after_s=0.0, reserve_after_runs=0.0, fence_s=2 * DAY)


def fenced(snapshot, **fences):
    """The same with fences: `fenced(snapshot, job1=NOW)`."""
    known = {int(name.removeprefix("job")): at for name, at in fences.items()}
    pending = [
        replace(one, jobs=tuple(replace(job, fence_at=known.get(job.id)) for job in one.jobs))
        for one in snapshot.pending
    ]
    return replace(snapshot, pending=tuple(pending))


@pytest.mark.parametrize(
    ("ends_in", "since", "config", "fence_in"),
    [
        (HOUR, DAY, AT_ONCE, 2 * DAY),
        (3 * DAY, DAY, AT_ONCE, 3 * DAY),
        (None, DAY, AT_ONCE, 2 * DAY),
        (MINUTE, 4.0, by_default(), 1024.0),
    ],
    ids=[
        "fence_s from now",
        "its first expected start if that is later",
        "of an unknown start",
        "no longer than any job is patient where runs take a minute",
    ],
)
def test_a_job_gets_its_fence_with_its_first_reservation(ends_in, since, config, fence_in):
    waiting, held = [wants(1, 4, limit=HOUR, waited=HOUR)], [running(90, "n1:0", since=since, ends_in=ends_in)]
    (kept,) = Scenario(FOUR, waiting, held, config).outcome().plan.reservations
    assert kept.fence_at == NOW + fence_in
    # What it has already is not given anew.
    known = fenced(Scenario(FOUR, waiting, [running(90, "n1:0", ends_in=ends_in)]).snapshot(), job1=NOW + 7)
    assert decide(known, AT_ONCE).reservations[0].fence_at == NOW + 7


def test_without_fences_others_may_always_delay_a_job():
    waiting = [wants(1, 4, limit=HOUR, waited=HOUR)]
    config = by_default(reserve_after_s=0.0, reserve_after_runs=0.0, fence_s=inf)
    (kept,) = Scenario(FOUR, waiting, [running(90, "n1:0", ends_in=HOUR)], config).outcome().plan.reservations
    assert kept.fence_at is None


@pytest.mark.parametrize(("fence_in", "starts"), [(HOUR, True), (2 * MINUTE, True), (0.0, False), (-DAY, False)])
def test_after_the_fence_no_job_passes_even_if_expected_to_end_in_time(fence_in, starts):
    held = [running(90, "n1:0,1,2", ends_in=5 * HOUR)]
    waiting = [wants(1, 4, limit=HOUR, waited=HOUR), wants(2, 1, limit=30 * MINUTE, waited=MINUTE)]
    snapshot = fenced(Scenario(FOUR, waiting, held).snapshot(), job1=NOW + fence_in)
    plan = decide(snapshot, AT_ONCE)
    assert [start.job_id for start in plan.starts] == ([2] if starts else [])
    assert [one.job_id for one in plan.reservations] == [1]


def test_a_fence_closes_only_the_reserved_resources():
    nodes = [node(gpus=2), node("n2", gpus=2)]
    held = [running(90, "n1:0", ends_in=5 * HOUR), running(91, "n2:0", ends_in=50 * HOUR)]
    waiting = [wants(1, 2, limit=HOUR, waited=HOUR), wants(2, 1, limit=30 * MINUTE, waited=MINUTE)]
    plan = decide(fenced(Scenario(nodes, waiting, held).snapshot(), job1=NOW - DAY), AT_ONCE)
    assert [(start.job_id, place_of(start.placement)) for start in plan.starts] == [(2, "n2:1")]


def predicted(job_id, in_h, where, since_h, **parts):
    """A run without a limit that is predicted to end so many hours from now."""
    return running(job_id, where, since=since_h * HOUR, predicted_end_at=NOW + in_h * HOUR, **parts)


def kept_place(planner, now):
    """Where room is reserved for job 1, as a plan of this instant has it."""
    return {one.job_id: place_of(one.placement) for one in planner.plan(now).reservations}.get(1)


TWO_NODES = [node(gpus=2), node("n2", gpus=2)]


def two_nodes_held():
    """Runs without a limit on both cards of both nodes; those of n2 are predicted to end sooner."""
    return [
        *(predicted(90 + card, 30, f"n1:{card}", 40) for card in (0, 1)),
        *(predicted(92 + card, 1, f"n2:{card}", 1) for card in (0, 1)),
    ]


@pytest.mark.parametrize(
    ("fence_at", "later_h", "place"),
    [
        (NOW + DAY, 40, "n1:0,1"),
        (NOW - DAY, 40, "n2:0,1"),
        (NOW - DAY, 100, "n1:0,1"),
        (NOW - 5 * DAY, 40, "n2:0,1"),
        (NOW - 5 * DAY, 100, "n2:0,1"),
    ],
    ids=["before the fence", "past it, a little later", "past it, much later", "settled", "settled, much later"],
)
def test_the_reserved_place_follows_predictions_until_it_is_fixed(fence_at, later_h, place):
    snapshot = Scenario(TWO_NODES, [wants(1, 2, waited=HOUR)], two_nodes_held()).snapshot()
    planner = Planner.from_snapshot(fenced(snapshot, job1=fence_at), AT_ONCE)
    assert kept_place(planner, NOW) == "n2:0,1"
    for job_id in (92, 93):
        held = planner.state.runs[job_id].allocations
        expected = tuple(replace(one, predicted_end_at=NOW + later_h * HOUR) for one in held)
        planner.state.apply(events.RunChanged(expected))
    for minutes in (1, 2, 3):
        assert kept_place(planner, NOW + minutes * MINUTE) == place


def test_past_the_bound_others_start_elsewhere_and_the_job_at_its_reserved_place():
    snapshot = Scenario(TWO_NODES, [wants(1, 2, waited=HOUR)], two_nodes_held()).snapshot()
    planner = Planner.from_snapshot(fenced(snapshot, job1=NOW - 5 * DAY), AT_ONCE)
    assert planner.schedule(NOW) == []
    small = ClassKey(JobTerms(1000, "ann", "", "default", request=request(1)), 0, None, predicted_s=1800)
    now, seen, over = NOW, [], 90
    for number in range(100, 106):
        now += 5 * MINUTE
        planner.state.apply(events.RunReleased(over))
        planner.state.apply(events.JobQueued(small, PendingJob(number, now)))
        seen += [(start.job_id, place_of(start.placement)) for start in planner.schedule(now)]
        assert kept_place(planner, now) == "n2:0,1"
        over = number
    assert seen == [(number, "n1:0") for number in range(100, 106)]
    # One of its own cards is free, and closed to others.
    planner.state.apply(events.RunReleased(92))
    planner.state.apply(events.JobQueued(small, PendingJob(200, now)))
    assert list(planner.schedule(now)) == []
    assert kept_place(planner, now) == "n2:0,1"
    planner.state.apply(events.RunReleased(93))
    (start,) = planner.schedule(now)
    assert (start.job_id, place_of(start.placement)) == (1, "n2:0,1")


@pytest.mark.parametrize("seed", range(8))
def test_a_wide_job_starts_within_its_bound_under_an_endless_stream_of_small_jobs_without_limits(seed):
    """Every small job is taken to be over in half an hour; one in ten runs for up to ten hours."""
    dice, config, longest_s = Random(seed), by_default(fence_s=6 * HOUR), 10 * HOUR
    wide = wants(1, 4, waited=0.0, **ANN)
    small = ClassKey(JobTerms(1001, "bob", "lab", "default", request=request(1)), 0, None, predicted_s=1800)
    planner = Planner.from_snapshot(Scenario(FOUR, [wide]).snapshot(), config)
    ends, now, next_id, fence_at = {}, NOW, 10, None
    for card in range(4):
        # The cards are taken when the wide job comes.
        planner.state.apply(
            events.RunHolds((running(2 + card, f"n1:{card}", since=MINUTE, predicted_end_at=NOW + HOUR),))
        )
        ends[2 + card] = NOW + dice.uniform(MINUTE, 3 * HOUR)
    while 1 not in ends:
        while sum(job.id != 1 for _, job in planner.in_order(now)) < 3:
            planner.state.apply(events.JobQueued(small, PendingJob(next_id, now)))
            next_id += 1
        for start in planner.schedule(now):
            runs_s = dice.uniform(5 * HOUR, longest_s) if dice.random() < 0.1 else dice.uniform(MINUTE, HOUR)
            ends[start.job_id] = now + runs_s
        fence_at = planner.state.fences.get(1, fence_at)
        if 1 in ends:
            break
        assert now < NOW + 30 * DAY, "the wide job starves"
        over = min(ends, key=lambda job_id: ends[job_id])
        now = max(now, ends.pop(over))
        planner.state.apply(events.RunReleased(over))
    # Three fences after it was first reserved nothing starts on its cards any more but itself.
    assert fence_at is None or now <= fence_at + 2 * 6 * HOUR + longest_s


SECONDS = ClassKey(JobTerms(1000, "ann", "lab", "default", request=request(1)), 0, None, predicted_s=1)


@pytest.mark.parametrize("limit", [10, None])
def test_a_wide_job_starts_within_a_minute_under_a_stream_of_jobs_of_a_second_by_its_user(limit):
    planner = Planner.from_snapshot(Scenario(FOUR, []).snapshot(), by_default())
    wide = replace(SECONDS, terms=replace(SECONDS.terms, request=request(4)), time_limit_s=limit, predicted_s=None)
    ends, next_id, now, started_at, starts = {}, 10, NOW, None, 0
    for tenth in range(600):
        now = NOW + tenth / 10
        if tenth == 30:
            planner.state.apply(events.JobQueued(wide, PendingJob(1, now)))
        planner.state.apply(events.JobQueued(SECONDS, PendingJob(next_id, now)))
        next_id += 1
        for over in [job_id for job_id, at in ends.items() if at <= now]:
            del ends[over]
            planner.state.apply(events.RunReleased(over))
        if not tenth % 50:
            # A planner that is built now decides the same as the one that is kept.
            again = decide(planner.state.snapshot(now), by_default())
            kept = planner.plan(now)
            assert ([one.job_id for one in again.starts], again.reservations) == (
                [one.job_id for one in kept.starts],
                kept.reservations,
            )
        for start in planner.schedule(now):
            ends[start.job_id] = now + (2.0 if start.job_id == 1 else 1.0)
            starts += 1
            if start.job_id == 1:
                started_at = now
    assert started_at is not None, "the wide job starves"
    # It was passed for a while, and the GPUs stood idle for a second or two.
    assert 16 <= started_at - (NOW + 3) < 45
    assert starts > 4 * 50


# --- runs that outlive what was predicted of them -----------------------------------------------------


def start_in_h(held, **priority):
    config = replace(AT_ONCE, priority=replace(AT_ONCE.priority, **priority))
    outcome = Scenario(ONE, [wants(1, 1, limit=HOUR, waited=HOUR)], [held], config).outcome()
    _, start_in = outcome.reserved[1]
    return None if start_in is None else start_in / HOUR


def test_a_run_without_a_limit_that_outlives_its_prediction_is_assumed_to_continue():
    assert start_in_h(predicted(90, 2, "n1:0", 3)) == 2
    # Five hours were predicted, ten are over: a prediction grows each time most of it is over.
    outlived = start_in_h(predicted(90, -5, "n1:0", 10))
    assert outlived == 5 * 2.25**2 - 10


def test_the_expected_end_moves_later_the_longer_a_run_continues():
    found = [start_in_h(predicted(90, 5 - since_h, "n1:0", since_h)) for since_h in (6, 12, 24, 48)]
    assert all(one is not None and one > 0 for one in found)
    assert found == sorted(found)


def test_a_run_with_a_limit_that_outlives_its_prediction_is_assumed_to_use_it_all():
    held = running(90, "n1:0", since=10 * HOUR, ends_in=3 * HOUR, predicted_end_at=NOW - HOUR)
    assert start_in_h(held) == 3


def test_a_kept_planner_extends_the_run_like_a_new_one():
    held = [predicted(90, 1, "n1:0", 1)]
    snapshot = Scenario(ONE, [wants(1, 1, limit=HOUR, waited=HOUR)], held).snapshot()
    planner = Planner.from_snapshot(snapshot, AT_ONCE)
    found = []
    for hours in (0, 1, 2, 4, 8, 16):
        now = NOW + hours * HOUR
        kept = planner.plan(now)
        assert kept.reservations == decide(planner.state.snapshot(now), AT_ONCE).reservations
        assert kept.starts == ()
        found.append(kept.reservations[0].start_at - now)
    assert all(one > 0 for one in found)


@pytest.mark.parametrize(
    ("end", "is_reserved"),
    [("predicted_end_at", True), ("reported_end_at", False)],
    ids=["earlier runs were as short", "it reports to end soon"],
)
def test_a_run_does_not_shorten_patience_by_what_it_reports(end, is_reserved):
    """Else a user would have room reserved for a wide job by having the progress of short ones lie."""
    now_running = [running(1, "n1:0", since=60, **{end: NOW + 5}, **ANN)]
    waiting = [wants(2, 4, waited=HOUR, **ANN)]
    assert (2 in Scenario(FOUR, waiting, now_running, by_default()).outcome().reserved) is is_reserved


def test_room_is_reserved_where_runs_report_to_end_first():
    two = [node("n1", gpus=1), node("n2", gpus=1)]
    ends = {"predicted_end_at": NOW + 2 * HOUR}
    runs = [running(1, "n1:0", **ends, **ANN), running(2, "n2:0", reported_end_at=NOW + 600, **ends, **ANN)]
    found = Scenario(two, [wants(3, 1, waited=DAY, **ANN)], runs, by_default(reserve_after_s=0.0)).outcome()
    assert found.reserved == {3: ("n2:0", 600.0)}
