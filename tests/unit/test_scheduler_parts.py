"""The small parts that decisions are made of: ranks, drafts, reservations, invariants."""

from __future__ import annotations

from math import inf

import pytest

from gpusched.model.job import GpuShare
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import PendingJob, Placement, Usage
from gpusched.model.units import about, name_some, plural
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout, ClusterState
from gpusched.scheduler.events import JobQueued, TasksQueued, UsageCharged
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.placement import best_placement, candidates, fits
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.plugins import Extensions
from gpusched.scheduler.priority import age_factor, class_key, nice_factor, short_factor, whole_factor
from gpusched.scheduler.request_units import RequestUnits, micros_of, squeeze
from gpusched.scheduler.state import PlannerState
from gpusched.scheduler.timeline import RunningJob, Timeline, end_of
from gpusched.testing import NOW, allocation, gpu_view, job, node, pending, request, share, snapshot

SETTINGS = Settings()
DAY = 86400.0


def planner_of(settings):
    made = Planner.from_snapshot(snapshot(), settings)
    made.state.move_to(NOW)
    return made


# --- order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waited_s", "max_age_s", "factor"),
    [(0, 10, 0.0), (5, 10, 0.5), (10, 10, 1.0), (99, 10, 1.0), (-5, 10, 0.0), (5, 0, 0.0)],
)
def test_age_counts_up_to_its_maximum(waited_s, max_age_s, factor):
    assert age_factor(waited_s, max_age_s) == factor


@pytest.mark.parametrize(
    ("nice", "factor"), [(-10_000, 1.0), (0, 0.5), (10_000, 0.0), (100, 0.495), (-99_999, 1.0), (99_999, 0.0)]
)
def test_nice_counts_from_most_to_least_urgent(nice, factor):
    assert nice_factor(nice) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("length_s", "factor"),
    [(inf, 0.0), (0, 1.0), (60, 0.722), (3600, 0.445), (86400, 0.23), (30 * 86400, 0.0), (1e9, 0.0)],
)
def test_each_doubling_of_a_length_counts_as_much(length_s, factor):
    assert short_factor(length_s) == pytest.approx(factor, abs=0.001)
    if 60 <= length_s <= 86400:
        step = short_factor(length_s) - short_factor(2 * length_s)
        assert step == pytest.approx(1 / 21.3, rel=0.03)


@pytest.mark.parametrize(
    ("asked", "factor"),
    [
        (request(1), 0.125),
        (request(8), 1.0),
        (request(8, nodes=4), 1.0),
        (request(), 0.0),
        (request(1, vram_mib=1024), 0.0),
    ],
)
def test_whole_nodes_are_hard_to_get(asked, factor):
    assert whole_factor(asked, 8) == factor
    assert whole_factor(asked, 0) == 0.0


def test_the_shorter_of_two_equally_old_jobs_goes_first():
    weights = replace(SETTINGS, priority=PrioritySettings(weight_short=2000.0))
    short, long = job(1, time_limit_s=600), job(2, time_limit_s=86400)
    queue = planner_of(weights).state.queue
    short_one, long_one = queue.class_of_key(class_key(short)), queue.class_of_key(class_key(long))
    assert queue.rank(short_one, NOW, 9) < queue.rank(long_one, NOW, 3)
    # The long one has waited for two weeks: nothing is put off for ever.
    assert queue.rank(long_one, NOW - 14 * DAY, 3) < queue.rank(short_one, NOW, 9)


def test_the_rank_is_the_sum_of_its_parts():
    rank = planner_of(SETTINGS).state.ranking.priority(class_key(job(nice=-100)), NOW - 3.5 * DAY)
    parts = dict(rank.parts)
    assert parts == {
        "age": pytest.approx(500.0),
        "fairshare": 500.0,
        "size": 0.0,
        "queue": 0.0,
        "qos": 0.0,
        "nice": pytest.approx(10_100.0),
        "deadline": 0.0,
        "fit": 0.0,
        "short": 0.0,
        "whole": 0.0,
    }
    assert rank.total == pytest.approx(11_100.0)


def test_weights_are_settings():
    weights = replace(SETTINGS, priority=PrioritySettings(weight_age=0.0, weight_fairshare=0.0, weight_nice=2.0))
    assert planner_of(weights).state.ranking.priority(class_key(job()), NOW - DAY).total == 1.0


def test_jobs_of_a_class_are_indistinguishable_to_the_policy():
    one = job(1, request=request(2), nice=3, account="lab", time_limit_s=60)
    assert class_key(one) == class_key(replace(one, id=2, queued_at=5.0))
    assert class_key(one) != class_key(replace(one, uid=1))


def in_order(*jobs, front=None):
    classes = pending(jobs) if front is None else pending(jobs, front=front)
    made = Planner.from_snapshot(replace(snapshot(), pending=tuple(classes)), SETTINGS)
    return [one.id for _, one in made.in_order(NOW)]


def test_jobs_are_ordered_by_class_and_arrival():
    assert in_order(job(1), job(2, nice=5), job(3), job(4, nice=5)) == [1, 3, 2, 4]


def test_a_partly_shown_class_leaves_the_rest_of_the_queue_open():
    assert in_order(job(1), job(2), job(3, nice=5), front=1) == [1]


# --- drafts -----------------------------------------------------------------------------------------


def draft_of(*nodes, running=()):
    layout = ClusterLayout(nodes, SETTINGS)
    draft = ClusterState(layout)
    for one in runs(layout, running):
        draft.book(one.booking)
    return draft


def runs(layout, running):
    return [
        RunningJob(held.job_id, held.start_at, end_of(held, NOW), layout.booking(held.terms.uid, held))
        for held in running
    ]


def state_of(draft):
    return [
        list(getattr(draft, name))
        for name in ("free_millicpus", "free_mem_mib", "wholes", "slices", "vram_mib", "micros")
    ]


def need(gpus=0, uid=1000, **parts):
    return RequestUnits.of(request(gpus, **parts), uid)


def test_rolling_back_leaves_no_trace():
    draft = draft_of(node(gpus=4), running=[allocation(1, gpus=[0]), allocation(2, gpus=[share(1, vram_mib=7)])])
    before = state_of(draft)
    mark = draft.checkpoint()
    for wanted in (need(1), need(1, vram_mib=100), need(1, gpu_fraction=1 / 3), need(cpus=0.1)):
        booking = best_placement(draft, wanted)
        assert booking is not None
        draft.book(booking)
    draft.release(AllocationUnits(0, 1000, 1000, 0, (CardShare(0, True),)))
    assert state_of(draft) != before
    draft.rollback(mark)
    assert state_of(draft) == before


def test_rolling_back_a_release_gives_the_card_back_to_its_user():
    held = allocation(1, gpus=[share(0, vram_mib=100)], uid=5)
    draft = draft_of(node(gpus=1), running=[held])
    booking = draft.layout.booking(5, held)
    assert booking is not None
    mark = draft.checkpoint()
    draft.release(booking)
    assert fits(draft, need(1, uid=6, vram_mib=100))
    draft.rollback(mark)
    assert fits(draft, need(1, uid=5, vram_mib=100))
    assert not fits(draft, need(1, uid=6, vram_mib=100))


def test_a_copy_is_independent():
    draft = draft_of(node(gpus=1))
    twin = draft.copy()
    booking = best_placement(twin, need(1))
    assert booking is not None
    twin.book(booking)
    assert fits(draft, need(1))
    assert not fits(twin, need(1))


def test_a_booking_fits_exactly_where_it_would_be_placed():
    draft = draft_of(node(gpus=2), running=[allocation(1, gpus=[0])])
    assert not draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(0, True),)))
    assert not draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(0, False, 1),)))
    assert draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(1, True),)))
    assert draft.has_room(AllocationUnits(0, 1000, 15_000, 64 * 1024, ()))
    assert not draft.has_room(AllocationUnits(0, 1000, 15_001, 0, ()))
    assert not draft.has_room(AllocationUnits(0, 1000, 0, 64 * 1024 + 1, ()))
    draft.book(AllocationUnits(0, 1000, 0, 0, (CardShare(1, False, 24_000, 600_000),)))
    assert draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(1, False, 64, 400_000),)))
    assert not draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(1, False, 65),)))
    assert not draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(1, False, 1, 400_001),)))
    assert not draft.has_room(AllocationUnits(0, 1001, 0, 0, (CardShare(1, False, 1),)))
    assert not draft.has_room(AllocationUnits(0, 1000, 0, 0, (CardShare(1, True),)))


def test_an_overbooked_node_still_takes_a_job_that_needs_none_of_it():
    draft = draft_of(node(cpus=2), running=[allocation(1, cpus=4)])
    assert fits(draft, need(cpus=0))
    assert not fits(draft, need(cpus=0.5))
    assert draft.has_room(AllocationUnits(0, 1000, 0, 0, ()))


def test_bookings_of_a_removed_gpu_are_forgotten_but_not_the_cores():
    gone = allocation(1, gpus=[GpuShare("GPU-gone", 7)], cpus=3)
    draft = draft_of(node(gpus=1), running=[gone])
    assert draft.free_millicpus == [13_000]
    assert fits(draft, need(1))
    assert ClusterLayout([node()], SETTINGS).booking(1, allocation(1, "elsewhere")) is None


def test_a_fraction_of_unknown_memory_books_its_share_of_the_gpu():
    layout = ClusterLayout([node(gpus=1)], SETTINGS)
    booking = layout.booking(1, allocation(1, gpus=[share(0, fraction=0.25)]))
    assert booking is not None
    assert booking.parts == (CardShare(0, False, (24 * 1024 - 512) // 4, 250_000),)
    unknown = ClusterLayout([node(gpus=[gpu_view(0, vram_total_mib=None)])], SETTINGS)
    booking = unknown.booking(1, allocation(1, gpus=[share(0, fraction=0.25)]))
    assert booking is not None
    assert booking.parts == (CardShare(0, False, 0, 250_000),)


def test_a_placement_equals_its_booking():
    layout = ClusterLayout([node("n1", gpus=2), node("n2", gpus=2)], SETTINGS)
    for shares in ((share(1, "n2"),), (share(0, "n2", vram_mib=5), share(1, "n2", vram_mib=5))):
        placement = Placement("n2", shares, 1.5, 100)
        booking = layout.booking(7, placement)
        assert booking is not None
        assert layout.placement(booking) == placement


def test_the_smallest_fraction_still_counts():
    assert micros_of(1e-9) == 1
    assert micros_of(0.5) == 500_000


def test_types_are_compared_ignoring_blanks_dashes_and_case():
    assert squeeze("NVIDIA A100-SXM4 80GB") == "nvidiaa100sxm480gb"
    # Slurm's spelling of a detected GPU.
    assert squeeze("NVIDIA GeForce RTX 3090").endswith(squeeze("geforce_rtx_3090"))


def test_gpus_to_avoid_are_used_last():
    draft = draft_of(node("n1", gpus=2), node("n2", gpus=2))
    best = min(candidates(draft, need(1), avoid=frozenset({0})))
    assert best.booking.parts == (CardShare(1, True),)
    best = min(candidates(draft, need(1), avoid=frozenset({0, 1})))
    assert best.booking.node == 1
    best = min(candidates(draft, need(1), avoid=frozenset({0, 1, 2, 3})))
    assert best.booking.parts == (CardShare(0, True),)


def test_slices_avoid_gpus_too():
    draft = draft_of(node(gpus=2), running=[allocation(1, gpus=[share(0, vram_mib=9000)])])
    assert min(candidates(draft, need(1, vram_mib=100))).booking.parts[0].card == 0
    assert min(candidates(draft, need(1, vram_mib=100), avoid=frozenset({0}))).booking.parts[0].card == 1


def test_smaller_gpus_of_all_nodes_come_first():
    large, small = gpu_view(0, "n1", vram_total_mib=81_920), gpu_view(0, "n2", vram_total_mib=16_384)
    draft = draft_of(node("n1", [large]), node("n2", [small]))
    assert min(candidates(draft, need(1))).booking.node == 1
    assert min(candidates(draft, need(1, vram_mib=100))).booking.node == 1


def test_fractions_end_at_one_gpu_even_with_negligible_memory():
    draft = draft_of(node(gpus=[gpu_view(0, vram_total_mib=514)]))
    for _ in range(2):
        booking = best_placement(draft, need(1, gpu_fraction=0.4))
        assert booking is not None
        assert booking.parts[0].vram_mib == 0
        draft.book(booking)
    assert not fits(draft, need(1, gpu_fraction=0.4))
    assert fits(draft, need(1, gpu_fraction=0.2))


# --- reservations -----------------------------------------------------------------------------------


def reserved(*nodes, running, wanted):
    draft = draft_of(*nodes, running=running)
    before = state_of(draft)
    timeline = Timeline(draft, runs(draft.layout, running), NOW)
    made = timeline.reserve(99, wanted, inf)
    assert state_of(draft) == before
    return timeline, made


def waited_for(*nodes, running, wanted):
    _, made = reserved(*nodes, running=running, wanted=wanted)
    return made.waits_for(draft_of(*nodes, running=running), NOW)


def test_impossible_jobs_get_no_reservation():
    assert reserved(node(gpus=2), running=[], wanted=need(3))[1] is None


def test_only_jobs_in_the_way_are_waited_for():
    running = [
        allocation(1, gpus=[0], expected_end_at=NOW + 10),
        allocation(2, gpus=[1], expected_end_at=NOW + 20),
        allocation(3, gpus=[], expected_end_at=NOW + 5),
    ]
    _, made = reserved(node(gpus=2), running=running, wanted=need(2))
    assert (made.start_at, made.pass_until) == (NOW + 20, NOW + 20)
    assert waited_for(node(gpus=2), running=running, wanted=need(2)) == (1, 2)
    assert waited_for(node(gpus=2, cpus=4), running=running, wanted=need(cpus=2)) == (3,)


def test_a_reservation_without_a_start_is_passed_within_the_age_of_the_youngest_blocker():
    running = [
        allocation(1, gpus=[0], start_at=NOW - 500),
        allocation(2, gpus=[1], start_at=NOW - 90),
        allocation(3, gpus=[2], start_at=NOW - 10),
    ]
    _, made = reserved(node(gpus=3), running=running, wanted=need(2))
    assert (made.start_at, made.pass_until, made.cards) == (None, NOW + 90, frozenset({0, 1}))
    _, made = reserved(node(gpus=3), running=[allocation(1, gpus=[0], start_at=NOW + 9)], wanted=need(3))
    assert made.pass_until == NOW


def test_a_refused_booking_leaves_the_reservation_unchanged():
    timeline, made = reserved(node(gpus=2), running=[allocation(1, gpus=[0])], wanted=need(2))
    kept, cards = made.booking, made.cards
    assert not timeline.admits(AllocationUnits(0, 1, 0, 0, (CardShare(1, True),)), inf)
    assert (made.booking, made.cards) == (kept, cards)
    assert timeline.admits(AllocationUnits(0, 1, 15_000, 0, ()), inf)
    timeline.start(RunningJob(7, NOW, inf, AllocationUnits(0, 1, 15_000, 0, ())))
    assert not timeline.admits(AllocationUnits(0, 1, 1_000, 0, ()), inf)


def test_reserved_gpus_are_idle_from_the_ends_of_their_runs_to_its_start():
    draft = draft_of(node("n1", gpus=2), node("n2", gpus=2))
    cards = [(CardShare(number, True),) for number in range(4)]
    gang = AllocationUnits(1, 1, 1, 0, cards[2], others=(AllocationUnits(0, 1, 1, 0, cards[1]),))
    ends_in = ((10, AllocationUnits(0, 1, 1, 0, cards[0])), (30, gang), (99, AllocationUnits(1, 1, 1, 0, cards[3])))
    running = [RunningJob(number, NOW, NOW + end_s, booking) for number, (end_s, booking) in enumerate(ends_in, 1)]
    for one in running:
        draft.book(one.booking)
    made = Timeline(draft, running, NOW).reserve(99, need(2), inf)
    assert (made.start_at, made.cards) == (NOW + 30, {0, 1})
    assert [made.idle_s(NOW + after_s) for after_s in (0, 15, 30)] == [20, 15, 0]


def test_an_end_without_a_limit_is_infinitely_far():
    assert end_of(allocation(1, gpus=[0]), NOW) == inf


# --- invariants -------------------------------------------------------------------------------------

BROKEN = {
    "a card with two whole jobs": ([allocation(1, gpus=[0]), allocation(2, gpus=[0])], "booked both whole and shared"),
    "a whole job beside a slice": (
        [allocation(1, gpus=[0]), allocation(2, gpus=[share(0, vram_mib=5)])],
        "booked both whole and shared",
    ),
    "slices of two users": (
        [
            allocation(1, gpus=[share(0, vram_mib=5)], uid=1),
            allocation(2, gpus=[share(0, vram_mib=5)], uid=2),
        ],
        "shared by several users, by jobs 1, 2",
    ),
    "more slices than VRAM": (
        [allocation(number, gpus=[share(0, vram_mib=13_000)]) for number in (1, 2)],
        "26000 MiB of GPU GPU-n1-0 of node n1 are booked, which has 24576",
    ),
    "more than one card in fractions": (
        [allocation(number, gpus=[share(0, fraction=0.6)]) for number in (1, 2)],
        "fractions of 1.2",
    ),
    "a card twice in one job": ([allocation(1, gpus=[0, 0])], "job 1 books one GPU of node n1 more than once"),
    "more cores than there are": ([allocation(1, cpus=16.5)], "16.5 CPUs are booked on node n1, which has 16"),
    "more memory than there is": ([allocation(1, mem_mib=65 * 1024)], "66560 MiB of memory are booked"),
    "a node that is not known": ([allocation(1, "n9")], "job 1 holds part of node n9, which is not known"),
    "a card that left the machine, twice": (
        [allocation(number, gpus=[GpuShare("GPU-gone", 7)]) for number in (1, 2)],
        "GPU GPU-gone of node n1 is booked both whole and shared",
    ),
}


@pytest.mark.parametrize(("held", "text"), BROKEN.values(), ids=BROKEN)
def test_double_promises_are_found(held, text):
    found = check_invariants(snapshot(node(gpus=2), running=held))
    assert any(text in problem for problem in found), found


SOUND = {
    "nothing": [],
    "a full node": [allocation(1, gpus=[0, 1], cpus=16, mem_mib=64 * 1024)],
    "slices of one user up to the last MiB": [
        allocation(number, gpus=[share(0, vram_mib=12_288)]) for number in (1, 2)
    ],
    "three thirds": [allocation(number, gpus=[share(0, fraction=1 / 3)]) for number in (1, 2, 3)],
    "a card that left the machine": [allocation(1, gpus=[GpuShare("GPU-gone", 7)])],
}


@pytest.mark.parametrize("held", SOUND.values(), ids=SOUND)
def test_sound_plans_are_left_alone(held):
    assert check_invariants(snapshot(node(gpus=2), running=held)) == []


def test_a_slice_on_a_gpu_of_unknown_size_is_not_called_too_large():
    nodes = node(gpus=[gpu_view(0, vram_total_mib=None)])
    assert check_invariants(snapshot(nodes, running=[allocation(1, gpus=[share(0, vram_mib=10**6)])])) == []


def test_jobs_of_a_node_that_was_not_reached_yet_are_not_called_too_large():
    away = replace(node(gpus=0), cpus=0.0, mem_mib=0, is_unknown=True)
    held = [allocation(1, gpus=[share(0)], cpus=4, mem_mib=1024), allocation(2, gpus=[share(1)], cpus=4, mem_mib=1024)]
    assert check_invariants(snapshot(away, running=held)) == []
    twice = [allocation(number, gpus=[share(0)], cpus=4) for number in (1, 2)]
    (text,) = check_invariants(snapshot(away, running=twice))
    assert text.endswith("is booked both whole and shared, by jobs 1, 2")


# --- words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than a minute"),
        (59.9, "less than a minute"),
        (60, "about 1 min"),
        (720, "about 12 min"),
        (5399, "about 90 min"),
        (5400, "about 2 h"),
        (2 * DAY, "about 2 days"),
        (10 * DAY, "about 10 days"),
    ],
)
def test_durations_are_printed_readably(seconds, text):
    assert about(seconds) == text


def test_names_are_listed_and_truncated():
    assert name_some("job", []) == ""
    assert name_some("job", ["7"]) == "job 7"
    assert name_some("job", ["7", "8"]) == "jobs 7 and 8"
    assert name_some("job", list("78945")) == "jobs 7, 8, 9 and 2 more"


def test_singular_and_plural_are_distinguished():
    assert (plural(1, "GPU"), plural(2, "GPU"), plural(0.5, "CPU")) == ("1 GPU", "2 GPUs", "0.5 CPUs")


# --- forks of a planner -------------------------------------------------------------------------------


def test_a_fork_computes_usage_independently():
    """It cleared the list of users whose use the planner it was made from had yet to work out."""
    state = snapshot(waiting=[job(1, user="ann"), job(2, user="bob", uid=1001)])
    made = Planner.from_snapshot(state, SETTINGS)
    made.plan(NOW)
    made.state.apply(UsageCharged(Usage("", "ann", Resources(gpus=1000.0, cpus=1000.0), NOW)))
    made.fork().plan(NOW + 1000)
    made.state.move_to(NOW + 1000)
    assert {one.user: one.used.cpus > 0 for one in made.state.fairshare.used()} == {"ann": True, "bob": False}


# --- plans that are not carried out ---------------------------------------------------------------------


def test_a_job_joins_those_like_it_whose_starts_failed():
    """It got a class of its own, so that a plug-in that keeps it waiting no longer kept those behind it waiting."""

    def permit(key, waiting, place):
        return "not yet" if waiting.id == 2 else None

    first = job(1, request=request(cpus=1))
    extensions = Extensions(permits=(("gate", permit),))
    made = Planner.from_snapshot(snapshot(node(), waiting=[first]), SETTINGS, extensions)
    assert [start.job_id for start in made.plan(NOW).starts] == [1]
    made.state.apply(JobQueued(class_key(first), PendingJob(2, first.queued_at - 10.0)))
    shown = made.state.snapshot(NOW)
    assert [one.id for view in shown.pending for one in view.jobs] == [2, 1]
    rebuilt = Planner.from_snapshot(shown, SETTINGS, extensions)
    assert made.plan(NOW).starts == rebuilt.plan(NOW).starts == ()


def test_tasks_stay_behind_one_whose_start_failed():
    """They were forgotten: while the plan stood, its class was not among those that wait."""
    key = class_key(job(1, request=request(cpus=1)))
    made = Planner(PlannerState((node(),), SETTINGS))
    made.state.apply(TasksQueued(1, key, NOW, (range(2, 3),)))
    assert [start.job_id for start in made.plan(NOW).starts] == [2]
    made.state.apply(TasksQueued(1, key, NOW, (range(2, 6),)))
    assert [view.total for view in made.state.snapshot(NOW).pending] == [4]
