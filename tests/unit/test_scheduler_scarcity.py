"""What is scarce, by hand."""

from __future__ import annotations

import pytest

from gpusched.model.job import Request
from gpusched.model.planner_settings import PlacementSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import CardShare, ClusterLayout, ClusterState
from gpusched.scheduler.placement import best_placement
from gpusched.scheduler.request_units import GpuDemand, RequestUnits, constraint_strength, micros_asked
from gpusched.scheduler.strategies.scarce_gpus import scarce_of, wanted_of
from gpusched.testing import allocation, gpu_view, node, snapshot

OLD = [node(f"a{number}", gpus=4) for number in range(3)]
NEW = node("b0", gpus=4, labels=("new",))


def draft_of(nodes, *requests):
    """An empty draft, with so many jobs that ask for something."""
    layout = ClusterLayout(nodes, Settings(placement=PlacementSettings("pack")))
    layout.wanted = GpuDemand()
    for request, times in requests:
        layout.wanted.add(constraint_strength(request), times * micros_asked(request))
    return ClusterState(layout)


def scarce_cards(draft):
    scarce = scarce_of(draft)
    return [] if scarce is None else [card.number for card in draft.layout.cards if scarce.holds(card.number)]


@pytest.mark.parametrize(
    ("request_", "micros"),
    [
        (Request(2), 2_000_000),
        (Request(8, nodes=2, tail_gpus=3), 19_000_000),
        (Request(1, gpu_fraction=0.25), 250_000),
        (Request(2, vram_mib=1024), 2_000_000),
        (Request(), 0),
    ],
)
def test_demand_is_counted_in_gpus(request_, micros):
    assert micros_asked(request_) == micros


def test_requirements_are_recognized_by_the_gpus_they_exclude():
    assert constraint_strength(Request(1, cpus=3, mem_mib=7, prefer="new", resources=(("x", 1),))) is None
    assert constraint_strength(Request(constraint="new")) is None
    alike = (
        constraint_strength(Request(2, gpu_type="A100")),
        constraint_strength(Request(4, cpus=9, nodes=2, gpu_type="A100")),
    )
    assert alike[0] == alike[1] != constraint_strength(Request(1, gpu_type="A100"))
    for one in ({"constraint": "new"}, {"min_vram_mib": 9}, {"nodelist": ("b0",)}, {"exclude": ("b0",)}):
        found = constraint_strength(Request(1, gpu_fraction=0.5, **one))
        assert found is not None
        assert found.shares_cards


def test_gpus_are_scarce_once_the_free_ones_are_just_enough():
    # A quarter insists on 4 of 16 cards: asked for once each, since 1/4 x 16 free / 4 free = 1.
    quarter = (Request(1, constraint="new"), 1), (Request(1), 3)
    assert scarce_cards(draft_of([*OLD, NEW], *quarter)) == [12, 13, 14, 15]
    # A sixth: 1/6 x 16/4 = 0.67 is less than 0.8, but with one of them taken 1/6 x 15/3 = 0.83 is not.
    draft = draft_of([*OLD, NEW], (Request(1, constraint="new"), 1), (Request(1), 5))
    assert scarce_cards(draft) == []
    need = RequestUnits.of(Request(1, nodelist=("b0",)), 1)
    draft.book(best_placement(draft, need))
    assert scarce_cards(draft) == [12, 13, 14, 15]
    # Others that are taken too make it less: 1/6 x 11/3 = 0.61.
    draft.book(best_placement(draft, RequestUnits.of(Request(4, nodelist=("a0",)), 1)))
    assert scarce_cards(draft) == []


def test_without_free_gpus_none_is_left_to_others():
    draft = draft_of([*OLD, node("b0", gpus=1, labels=("new",))], (Request(1, constraint="new"), 1), (Request(1), 3))
    assert scarce_cards(draft) == [12]
    draft.book(best_placement(draft, RequestUnits.of(Request(1, gpu_fraction=0.5, constraint="new"), 1)))
    assert scarce_cards(draft) == []
    # So a slice goes beside another, and opens no card.
    assert best_placement(draft, RequestUnits.of(Request(1, gpu_fraction=0.5), 1)).parts[0].card == 12


def test_gpus_are_not_scarce_when_unrequired_everywhere_or_absent():
    assert scarce_of(draft_of([*OLD, NEW], (Request(1), 3))) is None
    for anything in (Request(1, gpu_type="a100"), Request(1, constraint="!older"), Request(1, constraint="h100")):
        assert scarce_cards(draft_of([*OLD, NEW], (anything, 1))) == []


def test_jobs_that_accept_two_kinds_press_on_both():
    nodes = [node("a", gpus=2), node("b", gpus=2, labels=("x",)), node("c", gpus=4, labels=("y",))]
    # Half of all ask for any of 6 of 8 cards: 1/2 / 6 for each card, x 8 = 0.67. With two thirds it is 0.89.
    assert scarce_cards(draft_of(nodes, (Request(1, constraint="x|y"), 1), (Request(1), 1))) == []
    assert scarce_cards(draft_of(nodes, (Request(1, constraint="x|y"), 2), (Request(1), 1))) == [2, 3, 4, 5, 6, 7]
    # A quarter on x alone as well: (1/4 / 2 + 1/4 / 6) x 8 = 1.33 for x, 0.33 for y.
    both = (Request(1, constraint="x|y"), 1), (Request(1, constraint="x"), 1), (Request(1), 2)
    assert scarce_cards(draft_of(nodes, *both)) == [2, 3]


def test_unavailable_gpus_are_ignored():
    down = node("b1", gpus=8, labels=("new",), why_not="drained")
    draft = draft_of([*OLD, NEW, down], (Request(1, constraint="new"), 1), (Request(1), 3))
    assert scarce_cards(draft) == [12, 13, 14, 15]


def test_gpus_of_one_node_may_be_of_several_kinds():
    cards = [gpu_view(index, "n1", name=name) for index, name in enumerate(["NVIDIA H100", "NVIDIA A100"])]
    draft = draft_of([node("n1", cards)], (Request(1, gpu_type="h100"), 1), (Request(1), 1))
    assert scarce_cards(draft) == [0]
    assert best_placement(draft, RequestUnits.of(Request(1), 1)).parts == (CardShare(1, True),)


def test_pending_and_running_jobs_are_demand():
    held = [
        allocation(1, "b0", (0, 1), request=Request(2, constraint="new")),
        allocation(2, "a0", (0,), request=Request(1, gpu_fraction=0.5)),
        allocation(3, "a1", (0,)),
        allocation(4, "a2", (), request=Request(cpus=4)),
    ]
    wanted = wanted_of(snapshot(*OLD, NEW, running=held))
    assert (wanted.micros, list(wanted.insisted.values())) == (2_500_000, [2_000_000])


def test_ended_jobs_are_not_demand():
    wanted = GpuDemand()
    mark = constraint_strength(Request(1, constraint="new"))
    wanted.add(mark, 5)
    wanted.add(mark, -5)
    assert (wanted.micros, wanted.insisted) == (0, {})
