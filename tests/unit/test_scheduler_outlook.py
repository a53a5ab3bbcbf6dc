"""What usual jobs would still take of a node, worked out by hand, and where jobs go for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.job import Request
from gpusched.model.planner_settings import PlacementSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState
from gpusched.scheduler.placement import best_placement
from gpusched.scheduler.request_units import WHOLE_CARD, GpuDemand, RequestUnits, constraint_strength
from gpusched.scheduler.strategies.expected_capacity import ExpectedCapacity
from gpusched.testing import allocation, gpu_view, node, share

HALF, WHOLE, PAIR = Request(1, gpu_fraction=0.5), Request(1), Request(2)


def need(request, uid=1000):
    return RequestUnits.of(request, uid)


def draft_of(nodes, running=(), usual=(), strategy="outlook"):
    layout = ClusterLayout(nodes, Settings(placement=PlacementSettings(strategy)))
    layout.typical = tuple((need(one), 1 / len(usual)) for one in usual)
    draft = ClusterState(layout)
    for held in running:
        booking = layout.booking(held.terms.uid, held)
        assert booking is not None
        draft.book(booking)
    return draft


def part_of(card, fraction=0.5, uid=1000):
    return allocation(9, gpus=[share(card, fraction=fraction)], uid=uid)


LOST = {
    # Two cards, 16 cores. What nobody takes, and a tenth of the fragments.
    "on an empty node all is taken": ([WHOLE], [], 0.0),
    "so it is by jobs that fill it together": ([HALF], [], 0.0),
    "half a card is not taken by whole jobs, and is a fragment": ([WHOLE], [part_of(0)], 0.5 + 0.05),
    "of half a card a third of a card leaves a rest that is no fragment yet": (
        [Request(1, gpu_fraction=0.3)],
        [part_of(0), allocation(8, gpus=[1])],
        0.2,
    ),
    "cards without cores are not taken, which no measure of fragments sees": ([Request(1, cpus=10)], [], 1.0),
    "nor are cards without memory": ([Request(1, mem_mib=40 * 1024)], [], 1.0),
    "nothing is taken beside the slices of another user": ([HALF], [part_of(0, uid=7)], 0.5 + 0.05),
    "a pair takes nothing when one card is in use": ([PAIR], [part_of(0)], 1.5 + 0.15),
    "jobs without GPUs take none": ([Request(cpus=1)], [], 2.0 + 0.2),
    "booked cards are not lost": ([PAIR], [allocation(9, gpus=[0, 1])], 0.0),
    "slices of VRAM take the part of the card that they fill": (
        [Request(1, vram_mib=13 * 1024)],
        [allocation(8, gpus=[1])],
        pytest.approx(1 - 13 / 24, abs=0.02),
    ),
}


@pytest.mark.parametrize(("usual", "running", "amount"), LOST.values(), ids=LOST)
def test_unused_resources_are_predicted(usual, running, amount):
    draft = draft_of([node(gpus=2)], running, usual)
    known = ExpectedCapacity(draft.layout, draft.layout.typical)
    expected = amount if not isinstance(amount, float) else pytest.approx(amount, abs=1e-6)
    assert known.amount(draft, 0) == expected


def test_gpus_of_two_kinds_are_each_used_by_jobs_that_request_them():
    """Of an A100 and a T4, jobs for an A100 take the one: the other is lost, and a fragment."""
    cards = [gpu_view(0, name="NVIDIA A100"), gpu_view(1, name="Tesla T4")]
    draft = draft_of([node(gpus=cards)], usual=[Request(1, gpu_type="a100")])
    assert ExpectedCapacity(draft.layout, draft.layout.typical).amount(draft, 0) == pytest.approx(1.1)


def where(draft, request):
    booking = best_placement(draft, need(request))
    assert booking is not None
    return booking


def test_cores_are_used_where_no_gpu_needs_them():
    """A job for 8 cores: on n1 (12 free for 2 GPUs) it costs a usual job its cores, on n2 (16 free) it costs none."""
    usual = [Request(1, cpus=4)]
    held = [allocation(9, "n1", cpus=4.0)]
    nodes = [node("n1", gpus=2), node("n2", gpus=2)]
    assert where(draft_of(nodes, held, usual), Request(cpus=8)).node == 1
    # Fragments alone do not tell the two apart.
    assert where(draft_of(nodes, held, usual, "fgd"), Request(cpus=8)).node == 0


def test_a_slice_goes_beside_its_complement():
    """0.3 goes beside 0.4, where another 0.3 fits, not beside 0.5, where a fifth would be left to nobody."""
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    held = [
        allocation(8, "n1", gpus=[share(0, "n1", fraction=0.5)]),
        allocation(9, "n2", gpus=[share(0, "n2", fraction=0.4)]),
    ]
    usual = [Request(1, gpu_fraction=0.3)]
    assert where(draft_of(nodes, held, usual), usual[0]).node == 1


def test_wide_jobs_keep_their_nodes():
    nodes = [node("n1", gpus=4), node("n2", gpus=4)]
    held = [allocation(9, "n2", gpus=[0])]
    assert where(draft_of(nodes, held, [WHOLE, Request(4)]), WHOLE).node == 1


ONLY_X = Request(1, constraint="x")


def test_pressure_on_a_node_comes_from_jobs_that_could_run_there():
    """Half of the jobs run anywhere (4 cards), half on n1 alone (2 cards): (1/8 + 1/4) x 4 and 1/8 x 4."""
    draft = draft_of([node("n1", gpus=2, labels=("x",)), node("n2", gpus=2)], usual=[WHOLE, ONLY_X])
    assert ExpectedCapacity(draft.layout, draft.layout.typical).pressure == pytest.approx([1.5, 0.5])


def test_a_two_gpu_job_presses_only_on_nodes_with_two_gpus():
    draft = draft_of([node("n1", gpus=1), node("n2", gpus=2)], usual=[PAIR, WHOLE, Request(9)])
    # Of three GPUs asked for one is asked for of 3 cards and two of 2; nobody could run the ninth.
    assert ExpectedCapacity(draft.layout, draft.layout.typical).pressure == pytest.approx([1 / 3, 1 / 3 + 1])


def test_flexible_jobs_leave_rare_gpus_to_jobs_that_require_them():
    draft = draft_of([node("n1", gpus=2, labels=("x",)), node("n2", gpus=2)], usual=[WHOLE, ONLY_X])
    assert where(draft, WHOLE).node == 1
    assert where(draft, ONLY_X).node == 0


def test_scarce_gpus_are_left_at_any_cost():
    nodes = [node("n1", gpus=2, labels=("rare",)), node("n2", gpus=2, cpus=2)]
    # Two cores for two cards: a job with two leaves a card without. Nobody else would want those of n1.
    usual = [Request(1)]
    draft = draft_of(nodes, usual=usual)
    assert where(draft, Request(1, cpus=2)).node == 0
    draft.layout.wanted = GpuDemand()
    for one in (Request(1), Request(1, constraint="rare")):
        draft.layout.wanted.add(constraint_strength(one), WHOLE_CARD)
    assert where(draft, Request(1, cpus=2)).node == 1


def test_without_usual_jobs_nodes_are_packed():
    assert where(draft_of([node("n1", gpus=3), node("n2", gpus=2)]), WHOLE).node == 1


REQUESTS = [HALF, WHOLE, PAIR, Request(cpus=2), Request(1, gpu_fraction=0.3, cpus=3), Request(1, cpus=6, mem_mib=9000)]


@given(
    st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from([0, 300_000, 500_000, 700_000, WHOLE_CARD]), min_size=1, max_size=4),
    st.integers(0, 16_000),
)
def test_gpus_of_one_kind_are_filled_like_any(usual, rooms, millicpus):
    """The quick way and the general one take the same, whatever is left on the cards."""
    draft = draft_of([node(gpus=len(rooms))], usual=usual)
    known = ExpectedCapacity(draft.layout, draft.layout.typical)
    cards = [(0, left, -1) for left in rooms]
    for jobs in known._lists:
        quick = known._fill(jobs, millicpus, 65536, sorted(rooms), known._needs[0])
        assert quick == known._fill_any(jobs, millicpus, 65536, list(cards))
