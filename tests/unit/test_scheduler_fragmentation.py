"""Free GPUs that the usual jobs could not use, worked out by hand, and what a placement does about them."""

from __future__ import annotations

from math import exp, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.job import Request
from gpusched.model.planner_settings import PlacementSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState
from gpusched.scheduler.placement import best_placement, candidates
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.strategies.fragmentation import Fragmentation, most_typical, typical_of
from gpusched.testing import allocation, gpu_view, job, node, share, snapshot

FGD = Settings(placement=PlacementSettings("fgd"))
HALF, WHOLE, PAIR = Request(1, gpu_fraction=0.5), Request(1), Request(2)


def need(request, uid=1000):
    return RequestUnits.of(request, uid)


def draft_of(nodes, running=(), typical=()):
    layout = ClusterLayout(nodes, FGD)
    layout.typical = typical
    draft = ClusterState(layout)
    for held in running:
        booking = layout.booking(held.terms.uid, held)
        assert booking is not None
        draft.book(booking)
    return draft


def half_of(card, job_id=9, uid=1000):
    return allocation(job_id, gpus=[share(card, fraction=0.5)], uid=uid)


AMOUNTS = {
    "an empty node is no fragment for a job that fits": ([WHOLE], [], 0.0),
    "a job that needs more cards than there are makes all of it a fragment": ([Request(3)], [], 2.0),
    "half a card is a fragment for whole jobs": ([WHOLE], [half_of(0)], 0.5),
    "half a card is none for halves": ([HALF], [half_of(0)], 0.0),
    "half a card of another user is": ([HALF], [half_of(0, uid=7)], 0.5),
    "the other card is of no use to a pair": ([PAIR], [half_of(0)], 1.5),
    "a job without enough cores makes all of it a fragment": ([Request(1, cpus=17)], [], 2.0),
    "a job without enough memory does too": ([Request(1, mem_mib=65 * 1024)], [], 2.0),
    "a job of another type does too": ([Request(1, gpu_type="h100")], [], 2.0),
    "a job with other labels does too": ([Request(1, constraint="x")], [], 2.0),
    "a job without GPUs cannot use any": ([Request()], [], 2.0),
    "a booked card is no fragment": ([PAIR], [allocation(9, gpus=[0])], 1.0),
    "a large slice cannot use a small rest": ([Request(1, vram_mib=16 * 1024)], [half_of(0)], 0.5),
    "a small slice can": ([Request(1, vram_mib=1024)], [half_of(0)], 0.0),
    "kinds are weighted": ([WHOLE, HALF], [half_of(0)], 0.25),
}


@pytest.mark.parametrize(("usual", "running", "amount"), AMOUNTS.values(), ids=AMOUNTS)
def test_fragments_are_counted(usual, running, amount):
    draft = draft_of([node(gpus=2)], running)
    known = Fragmentation(draft.layout, tuple((need(one), 1 / len(usual)) for one in usual))
    assert known.amount(draft, 0) == pytest.approx(amount)


def test_unusable_gpus_are_not_fragments():
    cards = [gpu_view(0, why_not="drained"), gpu_view(1, is_present=False), gpu_view(2)]
    draft = draft_of([node(gpus=cards)])
    assert Fragmentation(draft.layout, ((need(PAIR), 1.0),)).amount(draft, 0) == 1.0


def test_the_score_is_the_coarse_gain_of_the_authors_simulator():
    draft = draft_of([node(gpus=2)], [half_of(0)])
    known = Fragmentation(draft.layout, ((need(WHOLE), 0.5), (need(PAIR), 0.5)))
    # Before: 0.5 of card 0 for whole jobs, 1.5 of both for pairs: 1.0. With the other half taken: 0 and 1: 0.5.
    filling = next(one.booking for one in candidates(draft, need(HALF)) if one.booking.parts[0].card == 0)
    assert known.gain(draft, filling) == pytest.approx(0.5)
    assert known.score(draft, filling) == floor(100 / (1 + exp(-0.5))) == 62
    # A whole job on card 1 leaves 0.5 that nobody can use: 1.0 before, 0.5 after.
    whole = candidates(draft, need(WHOLE))[0].booking
    assert known.gain(draft, whole) == pytest.approx(0.5)


USUAL_WHOLE = ((need(WHOLE), 0.9), (need(HALF), 0.1))


def test_a_slice_goes_where_it_leaves_whole_gpus():
    nodes = [node("n1", gpus=1), node("n2", gpus=2)]
    held = [allocation(9, "n2", gpus=[share(1, "n2", fraction=0.5)])]
    draft = draft_of(nodes, held, USUAL_WHOLE)
    booking = best_placement(draft, need(HALF))
    assert booking is not None
    assert (booking.node, booking.parts[0].card) == (1, 2)


def test_a_job_goes_where_the_rest_suits_the_usual_jobs():
    """Usual are pairs: a single card comes from the node with an odd number of free cards, though it is not fuller."""
    nodes = [node("n1", gpus=2), node("n2", gpus=3)]
    draft = draft_of(nodes, typical=((need(PAIR), 1.0),))
    booking = best_placement(draft, need(WHOLE))
    assert booking is not None
    assert booking.node == 1


def test_without_usual_jobs_nodes_are_packed():
    draft = draft_of([node("n1", gpus=3), node("n2", gpus=2)])
    booking = best_placement(draft, need(WHOLE))
    assert booking is not None
    assert booking.node == 1


def test_usual_jobs_are_the_pending_and_running_ones():
    waiting = [job(number, request=PAIR) for number in (1, 2, 3)]
    running = [allocation(9, gpus=[0], cpus=1.0)]
    found = typical_of(snapshot(node(gpus=4), waiting=waiting, running=running))
    assert [(one.request.gpus, weight) for one, weight in found] == [(2, 0.75), (1, 0.25)]


def test_requirements_of_a_running_job_belong_to_its_kind():
    asked = Request(2, nodes=2, cpus=9, constraint="big", licenses=(("matlab", 1),))
    found = typical_of(snapshot(node(gpus=4), running=[allocation(9, gpus=[0, 1], request=asked)]))
    assert [one.request for one, _ in found] == [Request(2, cpus=1.0, constraint="big")]


def test_cluster_wide_resources_do_not_distinguish_kinds():
    waiting = [
        job(1, request=Request(1, licenses=(("matlab", 1),))),
        job(2, request=Request(1), uid=7),
        job(3, request=Request(1, nodes=2)),
    ]
    found = typical_of(snapshot(node(gpus=4), waiting=waiting))
    assert [(one.request, weight) for one, weight in found] == [(Request(1), 1.0)]


def test_slices_of_two_users_are_two_kinds():
    waiting = [job(number, request=HALF, uid=number) for number in (1, 2)]
    assert [one.uid for one, _ in typical_of(snapshot(node(gpus=1), waiting=waiting))] == [1, 2]


def test_rare_kinds_of_wide_jobs_are_not_forgotten():
    counts = {need(Request(1, cpus=number)): 100.0 + number for number in range(1, 31)}
    counts |= {need(Request(8, cpus=number)): 1.0 for number in (8, 16)}
    found = most_typical(counts, 20)
    asked = [(one.request.gpus, one.request.cpus) for one, _ in found]
    # The 15 commonest by themselves, the 15 others as one, and the wide ones as one.
    assert sorted(asked) == sorted([*((1, float(number)) for number in range(16, 31)), (1, 8.173), (8, 12.0)])
    assert sum(weight for _, weight in found) == pytest.approx(1.0)
    assert found[-1][1] == pytest.approx(2 / sum(counts.values()))


def test_few_kinds_are_used_unchanged():
    counts = {need(Request(1, cpus=number)): float(number) for number in range(1, 11)}
    found = most_typical(counts)
    assert [one.request.cpus for one, _ in found] == list(range(10, 0, -1))
    assert sum(weight for _, weight in found) == pytest.approx(1.0)
    assert most_typical({}) == ()


def test_kinds_do_not_exceed_the_requested_number():
    counts = {need(Request(gpus)): 1.0 for gpus in range(1, 41)}
    found = most_typical(counts, 20)
    assert len(found) == 20
    assert {40, 39, 38, 37, 36} <= {one.request.gpus for one, _ in found}


REQUESTS = [HALF, WHOLE, PAIR, Request(), Request(1, vram_mib=6000), Request(1, gpu_fraction=0.3), Request(1, cpus=6)]


@given(
    st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(REQUESTS), st.sampled_from((1, 2))), max_size=8),
)
def test_a_gain_equals_the_effect_of_booking(usual, placed):
    """The gain that is foretold for a place is the change of the node's fragments when it is taken."""
    draft = draft_of(
        [node("n1", gpus=2), node("n2", gpus=3)], typical=tuple((need(one), 1 / len(usual)) for one in usual)
    )
    known = Fragmentation(draft.layout, draft.layout.typical)
    for request, uid in placed:
        booking = best_placement(draft, need(request, uid))
        if booking is None:
            continue
        before = known.amount(draft, booking.node)
        foretold = known.gain(draft, booking)
        draft.book(booking)
        after = known.amount(draft, booking.node)
        assert foretold == pytest.approx(before - after)
        free = sum(1 for card in draft.layout.cards_of[booking.node] if not draft.wholes[card.number])
        assert 0 <= after <= free + 1e-9
