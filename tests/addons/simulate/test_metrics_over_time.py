"""Measures that depend on who held what, when, on schedules that can be worked out by hand."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import usable

from gpusched.addons.simulate import cluster, occupancy, planner_run, policies
from gpusched.addons.simulate.measures import Schedule
from gpusched.addons.simulate.occupancy import Fragments, Series, Share
from gpusched.addons.simulate.outcome import Outcome, RunLog
from gpusched.addons.simulate.trace import TraceJob, request_of
from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import GpuShare
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout, ClusterState
from gpusched.scheduler.request_units import RequestUnits


def job(submit_s, run_s, gpus=1, user="ann", **more):
    return TraceJob("j", submit_s, run_s, run_s, gpus=gpus, user=user, **more)


def on(node, *cards, cpus=0.0, mem_mib=0):
    return Placement(node, tuple(GpuShare(f"{node}-{card}", card) for card in cards), cpus, mem_mib)


def over_time(outcome, series=None, by=None):
    return Schedule("a", outcome, 1, series=series, by=by)


def schedule(jobs, nodes, *runs):
    """Of runs (job, begin, end, place)."""
    placed = RunLog(nodes)
    for number, begin_s, end_s, place in runs:
        placed.add(number, begin_s, end_s, place)
    starts = [min(run[1] for run in runs if run[0] == number) for number in range(len(jobs))]
    ends = [max(run[2] for run in runs if run[0] == number) for number in range(len(jobs))]
    return Outcome(jobs, starts, 0, ends_s=ends, runs=placed)


# --- fragments ----------------------------------------------------------------------------------------


def test_gpus_unusable_by_every_waiting_job_are_fragments():
    # Two nodes of two; a job of one on each, from 0 to 10 and to 20; one of two waits from 4 on.
    # 0-4 nobody waits. 4-10 two GPUs are idle on two nodes: the pair fits nowhere. 10-15 it runs on the first.
    jobs = [job(0, 10), job(0, 20), job(4, 5, 2)]
    made = over_time(
        schedule(jobs, cluster.nodes_of("2x2"), (0, 0, 10, on("node0", 0)), (1, 0, 20, on("node1", 0)),
                 (2, 10, 15, on("node0", 0, 1)))
    )  # fmt: skip
    assert made.fragmentation == 1
    # The same, but the policy lets it wait until 13 though the first node is free from 10 on: 2 of 3 are of use.
    made = over_time(
        schedule(jobs, cluster.nodes_of("2x2"), (0, 0, 10, on("node0", 0)), (1, 0, 20, on("node1", 0)),
                 (2, 13, 18, on("node0", 0, 1)))
    )  # fmt: skip
    assert made.fragmentation == pytest.approx((2 * 6 + 1 * 3) / (2 * 6 + 3 * 3))


def test_without_waiting_jobs_there_are_no_fragments():
    made = over_time(schedule([job(0, 10)], cluster.nodes_of("1x8"), (0, 0, 10, on("node0", 0))))
    assert made.fragmentation == 0


def test_without_gpus_idle_cores_are_counted():
    # Of 10 processors 6 are held until 8; one of 5 waits from 2 on, and 4 are of no use to it.
    jobs = [replace(job(0, 8, 0), procs=6), replace(job(2, 1, 0), procs=5)]
    made = over_time(
        schedule(jobs, cluster.processors(10), (0, 0, 8, on("machine", cpus=6)), (1, 8, 9, on("machine", cpus=5)))
    )
    assert (made.fragmentation, made.fgd_fragmentation, made.node_spread) == (1, None, 0)


def test_cores_are_counted_on_machines_with_unwanted_gpus():
    nodes = tuple(replace(node, cpus=4.0) for node in cluster.nodes_of("2x2"))
    jobs = [replace(job(0, 10, 0), cpus=4.0), replace(job(0, 5, 0), cpus=2.0), replace(job(2, 5, 0), cpus=3.0)]
    made = over_time(
        schedule(jobs, nodes, (0, 0, 10, on("node0", cpus=4)), (1, 0, 5, on("node1", cpus=2)),
                 (2, 5, 10, on("node1", cpus=3)))
    )  # fmt: skip
    assert (made.fragmentation, made.fgd_fragmentation) == (1, None)
    assert made.node_spread == pytest.approx((1 - (10 + 15) / 40) / 2)


def test_the_fragmentation_of_fgd_is_measured():
    # One node of two; the usual job is half of the time one of 1, half of the time one of 2.
    # 0-10 one of 1 runs: of one idle GPU half is a fragment. 10-14 the pair runs: nothing is idle.
    jobs = [job(0, 10), job(0, 4, 2)]
    made = over_time(
        schedule(jobs, cluster.nodes_of("1x2"), (0, 0, 10, on("node0", 0)), (1, 10, 14, on("node0", 0, 1)))
    )
    assert made.fgd_fragmentation == pytest.approx(0.5)


def test_gang_pieces_are_the_usual_jobs_of_fgd():
    # Twelve on nodes of eight are a piece of eight and one of four. From 0 to 10 both run and twelve are idle on two
    # nodes of eight: on the one with four idle the half of the usual pieces that want eight find nothing.
    jobs = [job(0, 10, 12)]
    gang = Placement("node0", on("node0", *range(8)).gpus, 0, 0, others=(on("node1", 0, 1, 2, 3),))
    made = over_time(schedule(jobs, cluster.nodes_of("2x8"), (0, 0, 10, gang)))
    assert made.fgd_fragmentation == pytest.approx(0.5 * 4 / 4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_usable_gpus_equal_trying_every_choice(data):
    count, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    nodes = cluster.nodes_of(f"{count}x{size}")
    layout = ClusterLayout(nodes, Settings())
    draft = ClusterState(layout)
    kinds = sorted(data.draw(st.sets(st.integers(1, count * size), min_size=1, max_size=4)))
    needs = [RequestUnits.of(request_of(job(0, 1, gpus), nodes), 1) for gpus in kinds]
    known = Fragments(draft, needs)
    waiting = dict.fromkeys(range(len(kinds)), 0)
    held = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            kind = data.draw(st.sampled_from(sorted(waiting)))
            sign = -1 if waiting[kind] and data.draw(st.booleans()) else 1
            waiting[kind] += sign
            known.waits(kind, sign)
        else:
            card = data.draw(st.integers(0, count * size - 1))
            booking = held.pop(card, None)
            if booking is not None:
                draft.release(booking)
            else:
                held[card] = booking = AllocationUnits(card // size, 1, 0, 0, (CardShare(card, True),))
                draft.book(booking)
            known.changed(booking.node)
        free = draft.free_cards
        wanted = [kinds[kind] for kind, number in waiting.items() if number]
        assert known.idle == sum(free) * 1_000_000
        assert known.is_wanted == bool(wanted)
        assert known.usable() == usable(free, wanted, size) * 1_000_000


def parts_of(need, cards):
    """What a job would take of these cards."""
    if not need.is_slice:
        return tuple(CardShare(card.number, True) for card in cards)
    return tuple(
        CardShare(card.number, False, card.slice_total_mib * need.micros // 1_000_000, need.micros) for card in cards
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_usable_gpus_equal_bookable_ones(data):
    """Cores, memory, slices and two kinds of nodes, against every booking that has room."""
    node = NodeView("a", 4.0, 100, tuple(GpuView(f"a{index}", index, "A100", 10_000) for index in range(3)))
    other = NodeView("b", 2.0, 200, tuple(GpuView(f"b{index}", index, "T4", 5_000) for index in range(2)))
    layout = ClusterLayout((node, other), Settings())
    draft = ClusterState(layout)
    asked = st.tuples(
        st.integers(1, 3),
        st.sampled_from((None, 0.25, 0.5)),
        st.sampled_from((0.0, 1.0, 2.0)),
        st.sampled_from((0, 60)),
    )
    jobs = [
        job(0, 1, 1 if part else gpus, gpu_fraction=part, cpus=cpus, mem_mib=mem_mib)
        for gpus, part, cpus, mem_mib in data.draw(st.lists(asked, min_size=1, max_size=4))
    ]
    needs = [RequestUnits.of(request_of(one, layout.nodes), number % 2) for number, one in enumerate(jobs)]
    known = Fragments(draft, needs)
    waiting = set()
    held = []
    for _ in range(data.draw(st.integers(1, 14))):
        kind = data.draw(st.integers(0, len(needs) - 1))
        if data.draw(st.booleans()):
            known.waits(kind, -1 if kind in waiting else 1)
            waiting ^= {kind}
        elif held and data.draw(st.booleans()):
            booking = held.pop()
            draft.release(booking)
            known.changed(booking.node)
        else:
            able = list(bookings(draft, needs[kind]))
            if able:
                held.append(data.draw(st.sampled_from(able)))
                draft.book(held[-1])
                known.changed(held[-1].node)
        of_use = {part.card for kind in waiting for booking in bookings(draft, needs[kind]) for part in booking.parts}
        assert known.usable() == sum(room_on(draft, layout.cards[card]) for card in of_use)
        assert known.idle == sum(room_on(draft, card) for card in layout.cards)


def bookings(draft, need):
    """Every way to book this on one node now."""
    for node, cards in enumerate(draft.layout.cards_of):
        for chosen in combinations(cards, need.request.gpus):
            booking = AllocationUnits(node, need.uid, need.millicpus, need.request.mem_mib, parts_of(need, chosen))
            if draft.has_room(booking):
                yield booking


def room_on(draft, card):
    if draft.wholes[card.number]:
        return 0
    return 1_000_000 - draft.micros[card.number]


def test_a_shared_gpu_is_usable_by_its_own_user_only():
    node = NodeView("n", 8.0, 1024, (GpuView("u", 0, "A100", 1000),))
    layout = ClusterLayout((node,), Settings())
    draft = ClusterState(layout)
    half = job(0, 1, gpu_fraction=0.5)
    known = Fragments(draft, [RequestUnits.of(request_of(half, (node,)), uid) for uid in (1, 2)])
    draft.book(AllocationUnits(0, 1, 0, 0, (CardShare(0, False, 0, 400_000),)))
    known.changed(0)
    known.waits(1, 1)
    assert (known.idle, known.usable()) == (600_000, 0)
    known.waits(0, 1)
    assert known.usable() == 600_000


def test_cores_and_memory_can_strand_a_gpu():
    node = NodeView("n", 4.0, 1024, (GpuView("u0", 0, "T4", None), GpuView("u1", 1, "T4", None)))
    draft = ClusterState(ClusterLayout((node,), Settings()))
    known = Fragments(draft, [RequestUnits.of(request_of(job(0, 1, cpus=3.0, mem_mib=64), (node,)), 1)])
    known.waits(0, 1)
    assert known.usable() == 2_000_000
    draft.book(AllocationUnits(0, 1, 2000, 0, (CardShare(0, True),)))
    known.changed(0)
    assert (known.idle, known.usable()) == (1_000_000, 0)


def test_a_job_without_gpus_requests_none():
    draft = ClusterState(ClusterLayout(cluster.nodes_of("1x2"), Settings()))
    jobs = job(0, 1, 0, cpus=1.0), job(0, 1)
    known = Fragments(draft, [RequestUnits.of(request_of(one, draft.layout.nodes), 1) for one in jobs])
    known.waits(0, 1)
    assert not known.is_wanted
    known.waits(1, 1)
    assert known.is_wanted


# --- balance ------------------------------------------------------------------------------------------


def test_the_load_of_two_nodes_is_measured():
    # The first node is full for 10 of 20 s, the second half full for 20 s: both are used by half in all,
    # while at each instant they are 1/4 apart from their mean.
    jobs = [job(0, 10, 2), job(0, 20, 1)]
    made = over_time(schedule(jobs, cluster.nodes_of("2x2"), (0, 0, 10, on("node0", 0, 1)), (1, 0, 20, on("node1", 0))))
    assert made.node_spread == pytest.approx(0)
    assert made.node_spread_now == pytest.approx(0.25)


def test_a_node_without_gpus_is_excluded_from_the_gpu_balance():
    nodes = (*cluster.nodes_of("1x2"), NodeView("zero", 8.0, 1024))
    made = over_time(schedule([job(0, 10, 2)], nodes, (0, 0, 10, on("node0", 0, 1))))
    assert (made.node_spread, made.node_spread_now) == (0, 0)


# --- shares -------------------------------------------------------------------------------------------


def test_the_dominant_share_of_each_user_is_measured():
    # Ann: 2 of 4 GPUs for 10 s, then nothing while her next one waits for 10 s, then 1 of 4 for 10 s.
    # Bob: one GPU, and 6 of 8 cores, which is more: 20 s.
    nodes = tuple(replace(node, cpus=4.0) for node in cluster.nodes_of("2x2"))
    jobs = [job(0, 10, 2), job(5, 10), job(0, 20, 1, "bob")]
    made = over_time(
        schedule(
            jobs,
            nodes,
            (0, 0, 10, on("node0", 0, 1)),
            (1, 20, 30, on("node0", 0)),
            (2, 0, 20, on("node1", 0, cpus=6)),
        )
    )
    assert made.dominant_share == {
        "ann": Share(pytest.approx((0.5 * 10 + 0.25 * 10) / 30), 0.5),
        "bob": Share(0.75, 0.75),
    }
    assert made.dominant_fairness == pytest.approx((0.25 + 0.75) ** 2 / (2 * (0.25**2 + 0.75**2)))


def test_without_users_queues_have_shares():
    jobs = [job(0, 10, 1, "", queue="q"), job(0, 10, 1, "", queue="r")]
    made = over_time(schedule(jobs, cluster.nodes_of("1x4"), (0, 0, 10, on("node0", 0)), (1, 0, 10, on("node0", 1))))
    assert made.dominant_share == {"q": Share(0.25, 0.25), "r": Share(0.25, 0.25)}


def test_queues_have_shares_on_request():
    jobs = [job(0, 10, 1, queue="q"), job(0, 10, 1, "bob", queue="q")]
    ran = schedule(jobs, cluster.nodes_of("1x4"), (0, 0, 10, on("node0", 0)), (1, 0, 10, on("node0", 1)))
    assert set(over_time(ran).dominant_share) == {"ann", "bob"}
    assert over_time(ran, by="queue").dominant_share == {"q": Share(0.5, 0.5)}


# --- a fair share for each ----------------------------------------------------------------------------


def test_finish_time_fairness_is_measured():
    # Two jobs of one GPU on one GPU, both there from 0 to 10, the second alone until 20.
    # The first: rivals 2, on half a GPU it would have taken 20 s: 10 / 20. The second: on average 1.5 there: 20 / 15.
    jobs = [job(0, 10), job(0, 10)]
    made = over_time(schedule(jobs, cluster.nodes_of("1x1"), (0, 0, 10, on("node0", 0)), (1, 10, 20, on("node0", 0))))
    assert made.finish_time_fairness.mean == pytest.approx((0.5 + 20 / 15) / 2)
    assert made.finish_time_fairness.most == pytest.approx(20 / 15)
    assert made.unfair == 0.5


def test_a_job_with_its_share_is_as_fast_as_alone():
    jobs = [job(0, 10), job(0, 10)]
    made = over_time(schedule(jobs, cluster.nodes_of("1x4"), (0, 0, 10, on("node0", 0)), (1, 0, 10, on("node0", 1))))
    assert (made.finish_time_fairness.most, made.unfair) == (1, 0)


# --- runs that were not the last ----------------------------------------------------------------------


def test_a_preempted_job_waits_again():
    # It runs 0-4, waits 4-10 while one of two GPUs is idle and of use to it, and runs 10-16.
    jobs = [job(0, 10), job(4, 6)]
    outcome = schedule(
        jobs,
        cluster.nodes_of("1x2"),
        (0, 0, 4, on("node0", 0)),
        (1, 4, 10, on("node0", 1)),
        (0, 10, 16, on("node0", 0)),
    )
    series = Series()
    made = over_time(outcome, series)
    assert made.fragmentation == 0
    assert list(zip(series.at_s, series.used, series.waiting, strict=True)) == [
        (0, 0.5, 0), (4, 0.5, 1), (10, 0.5, 0), (16, 0.0, 0),
    ]  # fmt: skip
    # Both were there from 4 to 10: (1 x 4 + 2 x 6 + 1 x 6) / 16 jobs at a time for the first.
    assert made.finish_time_fairness.most == pytest.approx(16 / 10)


def test_a_job_that_ends_shortly_after_its_last_run_waits_no_longer():
    jobs = [job(0, 10), job(0, 20)]
    ran = schedule(jobs, cluster.nodes_of("1x2"), (0, 0, 10, on("node0", 0)), (1, 0, 20, on("node0", 1)))
    series = Series()
    over_time(dataclasses.replace(ran, ends_s=[12, 20]), series)
    assert list(series.waiting) == [0, 0, 0]


def test_the_series_of_a_schedule_are_measured():
    jobs = [job(0, 10), job(0, 20, 1, "bob"), job(4, 5, 2)]
    series = Series()
    over_time(
        schedule(jobs, cluster.nodes_of("2x2"), (0, 0, 10, on("node0", 0)), (1, 0, 20, on("node1", 0)),
                 (2, 10, 15, on("node0", 0, 1))),
        series,
    )  # fmt: skip
    assert list(series.at_s) == [0, 4, 10, 15, 20]
    assert list(series.used) == [0.5, 0.5, 0.75, 0.25, 0]
    assert list(series.stranded) == [0, 0.5, 0, 0, 0]
    assert series.shares == {"ann": [(0, 0.25), (10, 0.5), (15, 0.0)], "bob": [(0, 0.25), (20, 0.0)]}


def test_a_schedule_without_placements_is_refused():
    with pytest.raises(BrokenInvariant, match="where its jobs ran"):
        occupancy.over_time(Outcome([job(0, 10)], [0], 1))


def test_the_walk_agrees_with_the_sums_of_the_jobs():
    jobs = [job(number * 7, 30 + number % 11 * 10, 1 + number % 9, f"u{number % 3}") for number in range(300)]
    outcome = planner_run.run(
        jobs, cluster.nodes_of("3x8"), policies.rules_of("fcfs+easy").settings(), keeps_places=True
    )
    series = Series()
    over_time(outcome, series)
    spans = [after - before for before, after in zip(series.at_s, series.at_s[1:], strict=False)]
    held_s = sum(used * 24 * for_s for used, for_s in zip(series.used, spans, strict=False))
    assert held_s == pytest.approx(sum(one.gpus * one.run_s for one in jobs))
    waited_s = sum(waiting * for_s for waiting, for_s in zip(series.waiting, spans, strict=False))
    assert waited_s == sum(start - one.submit_s for one, start in zip(jobs, outcome.start_s, strict=True))
