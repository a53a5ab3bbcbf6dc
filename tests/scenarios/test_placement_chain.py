"""Filters and scores: labels, node lists, licenses, resources, exclusive nodes, linked cards, strategies."""

from __future__ import annotations

from collections import Counter

import pytest
from scenario import HOUR, Scenario, load, running, settings, wants

from gpusched.model.job import Request
from gpusched.model.snapshot import Placement
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.filters import Rejection
from gpusched.scheduler.placement import best_placement, candidates
from gpusched.scheduler.planner import decide
from gpusched.scheduler.request_units import RequestUnits
from gpusched.testing import NOW, gpu_view, job, node, snapshot, window

GIB = 1024


def linked(name, groups, **parts):
    """A node whose cards are in these link groups; None has no link."""
    cards = [gpu_view(index, name, link_group=group) for index, group in enumerate(groups)]
    return node(name, cards, **parts)


def near(name, numa, **parts):
    """A node without links whose cards are next to these parts of memory."""
    return node(name, [gpu_view(index, name, numa=number) for index, number in enumerate(numa)], **parts)


LABELLED = [
    node("n1", gpus=2, labels=("old",)),
    node("n2", gpus=2, labels=("coco", "nvlink")),
    node("n3", gpus=2, labels=("coco",)),
]
NODES = {
    "a label": (LABELLED, [], [wants(1, 1, constraint="nvlink")], {1: "n2:0"}),
    "not a label": (LABELLED, [], [wants(1, 1, constraint="!old")], {1: "n2:0"}),
    "labels in brackets": (LABELLED, [], [wants(1, 1, constraint="(old|coco)&!nvlink")], {1: "n1:0"}),
    "a label that no node has keeps it waiting": (LABELLED, [], [wants(1, 1, constraint="h100")], {}),
    "a label that cannot be read admits no node": (LABELLED, [], [wants(1, 1, constraint="a&")], {}),
    "a job without GPUs asks for labels too": (LABELLED, [], [wants(1, constraint="nvlink")], {1: "n2"}),
    "GPU types are no labels": (LABELLED, [], [wants(1, 1, constraint="a100")], {}),
    "node names are no labels": (LABELLED, [], [wants(1, 1, constraint="n1")], {}),
    "a node list": (LABELLED, [], [wants(1, 1, nodelist=("n3", "n2"))], {1: "n2:0"}),
    "excluded nodes": (LABELLED, [], [wants(1, 1, exclude=("n1", "n2"))], {1: "n3:0"}),
    "a node list without the excluded": (
        LABELLED,
        [],
        [wants(1, 1, nodelist=("n1", "n2"), exclude=("n1",))],
        {1: "n2:0"},
    ),
    "preferred labels come first": (LABELLED, [], [wants(1, 1, prefer="nvlink")], {1: "n2:0"}),
    "preferred labels come before a fuller node": (
        LABELLED,
        [running(9, "n1:0")],
        [wants(1, 1, prefer="coco")],
        {1: "n2:0"},
    ),
    "without preferred labels another will do": (
        LABELLED,
        [running(8, "n2:0,1"), running(9, "n3:0,1")],
        [wants(1, 1, prefer="coco")],
        {1: "n1:0"},
    ),
    "a full node list waits while others are free": (
        LABELLED,
        [running(9, "n2:0,1")],
        [wants(1, 1, nodelist=("n2",))],
        {},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), NODES.values(), ids=NODES)
def test_nodes_are_filtered(nodes, held, waiting, starts):
    assert Scenario(nodes, waiting, held).outcome().starts == starts


WITH_SCRATCH = [node("n1", resources=(("scratch", 2),)), node("n2", resources=(("fpga", 1), ("scratch", 3)))]
LICENSED = settings(license={"matlab": 2})
COUNTS = {
    "licenses are of the whole cluster": (
        [node("n1"), node("n2")],
        [],
        [wants(number, licenses=(("matlab", 1),)) for number in (1, 2, 3)],
        {1: "n1", 2: "n1"},
    ),
    "licenses of running jobs count": (
        [node("n1"), node("n2")],
        [running(9, "n2", licenses=(("matlab", 1),))],
        [wants(1, licenses=(("matlab", 2),)), wants(2, licenses=(("matlab", 1),))],
        {},
    ),
    "a license that a short job gives back in time may be lent": (
        [node("n1")],
        [running(9, "n1", licenses=(("matlab", 1),), ends_in=HOUR)],
        [wants(1, licenses=(("matlab", 2),)), wants(2, licenses=(("matlab", 1),), limit=60)],
        {2: "n1"},
    ),
    "a resource is of the node": (
        WITH_SCRATCH,
        [],
        [wants(number, resources=(("scratch", 2),)) for number in (1, 2, 3)],
        {1: "n1", 2: "n2"},
    ),
    "several resources together": (
        WITH_SCRATCH,
        [],
        [wants(1, resources=(("fpga", 1), ("scratch", 1)))],
        {1: "n2"},
    ),
    "a resource of running jobs counts": (
        WITH_SCRATCH,
        [running(9, "n2", resources=(("scratch", 1),))],
        [wants(1, resources=(("scratch", 3),))],
        {},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), COUNTS.values(), ids=COUNTS)
def test_licenses_and_resources_are_checked(nodes, held, waiting, starts):
    assert Scenario(nodes, waiting, held, LICENSED).outcome().starts == starts


EXCLUSIVE = {
    "it takes an empty node": (
        [node("n1", gpus=2), node("n2", gpus=2)],
        [running(9, "n1")],
        [wants(1, 1, is_exclusive=True)],
        {1: "n2:0"},
    ),
    "nobody joins it": (
        [node("n1", gpus=2)],
        [running(9, "n1:0", is_exclusive=True)],
        [wants(1, 1), wants(2, cpus=0)],
        {},
    ),
    "nobody joins it in the cycle in which it starts": (
        [node("n1", gpus=2)],
        [],
        [wants(1, is_exclusive=True), wants(2, 1)],
        {1: "n1"},
    ),
    "it does not join others": ([node("n1")], [running(9, "n1", cpus=0.0)], [wants(1, is_exclusive=True)], {}),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_exclusive_nodes_are_respected(nodes, held, waiting, starts):
    assert Scenario(nodes, waiting, held).outcome().starts == starts


@pytest.mark.parametrize(("whole", "starts"), [(True, {1: "n1"}), (False, {})])
def test_only_a_whole_node_reservation_allows_exclusive_jobs(whole, starts):
    place = Placement("n1", (), 16.0 if whole else 4.0, 64 * GIB if whole else GIB, is_exclusive=whole)
    kept = window("class", place, begins_in=-60, ends_in=HOUR, users=("ann",))
    waiting = [wants(1, is_exclusive=True, reservation="class", limit=60)]
    assert Scenario([node("n1")], waiting, windows=[kept]).outcome().starts == starts


PAIRS = linked("n1", (0, 0, 1, 1))
LINKS = {
    "linked cards are of one group": ([PAIRS], [running(9, "n1:0")], [wants(1, 2, is_linked=True)], {1: "n1:2,3"}),
    "without enough in one group it waits": (
        [PAIRS],
        [running(8, "n1:0"), running(9, "n1:2")],
        [wants(1, 2, is_linked=True)],
        {},
    ),
    "who does not insist takes cards that are not linked": (
        [PAIRS],
        [running(8, "n1:0"), running(9, "n1:2")],
        [wants(1, 2)],
        {1: "n1:1,3"},
    ),
    "several cards are linked where they can be": ([PAIRS], [running(9, "n1:0")], [wants(1, 2)], {1: "n1:2,3"}),
    "linked cards come before a fuller node": (
        [linked("n1", (0, 1)), linked("n2", (0, 0, 0, 0))],
        [],
        [wants(1, 2)],
        {1: "n2:0,1"},
    ),
    "three cards break up one group only": (
        [linked("n1", (0, 0, 1, 1, 2, 2))],
        [running(9, "n1:1")],
        [wants(1, 3)],
        {1: "n1:0,2,3"},
    ),
    "a single card does not break up a group": ([PAIRS], [running(9, "n1:3")], [wants(1, 1)], {1: "n1:2"}),
    "a card without a link goes before those with one": (
        [linked("n1", (0, 0, None))],
        [],
        [wants(1, 1), wants(2, 2, is_linked=True)],
        {1: "n1:2", 2: "n1:0,1"},
    ),
    "cards without a link are not linked with each other where others are": (
        [linked("n1", (0, None, None))],
        [],
        [wants(1, 2, is_linked=True)],
        {},
    ),
    "without links the same memory will do": (
        [near("n1", (0, 1, 1))],
        [],
        [wants(1, 2, is_linked=True)],
        {1: "n1:1,2"},
    ),
    "without links different memory will not": ([near("n1", (0, 1))], [], [wants(1, 2, is_linked=True)], {}),
    "where nobody knows any cards will do": (
        [node("n1", gpus=3)],
        [running(9, "n1:0")],
        [wants(1, 2, is_linked=True)],
        {1: "n1:1,2"},
    ),
    "one linked card is any card": ([PAIRS], [running(9, "n1:0,2")], [wants(1, 1, is_linked=True)], {1: "n1:1"}),
    "slices on several cards are linked too": (
        [PAIRS],
        [running(8, "n1:0")],
        [wants(1, 2, vram_mib=GIB, is_linked=True)],
        {1: "n1:2,3"},
    ),
    "linked cards are not cards of two sizes where one group is alike": (
        [
            node(
                "n1",
                [gpu_view(i, "n1", link_group=i // 2, vram_total_mib=(40 if i < 2 else 24) * GIB) for i in range(4)],
            )
        ],
        [],
        [wants(1, 2)],
        {1: "n1:2,3"},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), LINKS.values(), ids=LINKS)
def test_linked_gpus_are_preferred(nodes, held, waiting, starts):
    assert Scenario(nodes, waiting, held).outcome().starts == starts


THREE = [node(f"n{number}", gpus=8) for number in (1, 2, 3)]
BUSY = [running(8, "n2:0,1,2"), running(9, "n3:0,1,2,3,4,5")]
WHERE = {
    # Free: n1 8, n2 5, n3 2.
    ("pack", 1): "n3:6",
    ("pack", 2): "n3:6,7",
    ("pack", 3): "n2:3,4,5",
    ("pack", 6): "n1:0,1,2,3,4,5",
    ("spread", 1): "n1:0",
    ("spread", 6): "n1:0,1,2,3,4,5",
    ("first", 1): "n1:0",
    ("first", 3): "n1:0,1,2",
    ("best_fit", 1): "n3:6",
    ("best_fit", 3): "n2:3,4,5",
}


@pytest.mark.parametrize(("strategy", "gpus"), WHERE, ids=lambda value: str(value))
def test_equal_gpus_are_given_by_free_ones_of_each_node(strategy, gpus):
    chosen = settings(placement={"strategy": strategy})
    assert Scenario(THREE, [wants(1, gpus)], BUSY, chosen).outcome().starts == {1: WHERE[strategy, gpus]}


@pytest.mark.parametrize("strategy", ["pack", "spread", "first", "best_fit", "dot_product", "fgd", "outlook"])
def test_of_equal_nodes_the_first_is_taken(strategy):
    chosen = settings(placement={"strategy": strategy})
    assert Scenario(THREE, [wants(1, 2)], settings=chosen).outcome().starts == {1: "n1:0,1"}


STRATEGIES = {
    "pack puts slices on a card in use, however large": (
        "pack",
        [node("n1", [gpu_view(0, vram_total_mib=16 * GIB), gpu_view(1, vram_total_mib=80 * GIB)])],
        [running(9, "n1:1", vram=GIB)],
        wants(1, 1, vram_mib=8 * GIB),
        "n1:1",
    ),
    "pack opens no card for a slice while one in use has room, on whatever node": (
        "pack",
        [node("n1", gpus=1), node("n2", gpus=4)],
        [running(9, "n2:0", vram=GIB)],
        wants(1, 1, vram_mib=GIB),
        "n2:0",
    ),
    "pack puts slices on the node with the least room, not on the fullest card": (
        "pack",
        [node("n1", gpus=3), node("n2", gpus=2)],
        [running(7, "n1:0", vram=20 * GIB), running(8, "n2:0", vram=GIB), running(9, "n2:1")],
        wants(1, 1, vram_mib=GIB),
        "n2:0",
    ),
    "pack puts jobs without GPUs on nodes without, even when no GPU is free on others": (
        "pack",
        [node("n1", gpus=1), node("n2")],
        [running(9, "n1:0", cpus=3)],
        wants(1),
        "n2",
    ),
    "pack puts jobs without GPUs where no GPU is free any more": (
        "pack",
        [node("n1", gpus=1), node("n2", gpus=2)],
        [running(9, "n2:0,1")],
        wants(1),
        "n2",
    ),
    "best_fit puts a slice where more of a card is taken by it": (
        "best_fit",
        [node("n1", [gpu_view(0, "n1", vram_total_mib=80 * GIB)]), node("n2", [gpu_view(0, "n2")])],
        [],
        wants(1, 1, vram_mib=8 * GIB),
        "n2:0",
    ),
    "first takes single cards in order, though it breaks up a group": (
        "first",
        [PAIRS],
        [running(9, "n1:3")],
        wants(1, 1),
        "n1:0",
    ),
    "spread puts slices on the emptiest card": (
        "spread",
        [node("n1", gpus=3)],
        [running(8, "n1:0", vram=2 * GIB), running(9, "n1:1", vram=GIB), running(7, "n1:2", vram=3 * GIB)],
        wants(1, 1, vram_mib=GIB),
        "n1:1",
    ),
    "spread puts slices on the emptiest node": (
        "spread",
        [node("n1", gpus=2), node("n2", gpus=2)],
        [running(9, "n1:0")],
        wants(1, 1, vram_mib=GIB),
        "n2:0",
    ),
    "spread puts jobs without GPUs where most cores are free": (
        "spread",
        [node("n1"), node("n2")],
        [running(9, "n1", cpus=3)],
        wants(1),
        "n2",
    ),
    "spread leaves nodes with GPUs to those that need them": (
        "spread",
        [node("n1", gpus=2), node("n2")],
        [running(9, "n2", cpus=3)],
        wants(1),
        "n2",
    ),
    "pack puts jobs without GPUs where fewest cores are free": (
        "pack",
        [node("n1"), node("n2")],
        [running(9, "n2", cpus=3)],
        wants(1),
        "n2",
    ),
    "first takes the first card with room": (
        "first",
        [node("n1", gpus=2)],
        [running(9, "n1:1", vram=GIB)],
        wants(1, 1, vram_mib=GIB),
        "n1:0",
    ),
    "best_fit looks at cores as well": (
        "best_fit",
        [node("n1", gpus=4), node("n2", gpus=4)],
        [running(9, "n2", cpus=12)],
        wants(1, 1, cpus=2),
        "n2:0",
    ),
    "best_fit does not look at memory": (
        "best_fit",
        [node("n1", gpus=4), node("n2", gpus=4)],
        [running(9, "n2", cpus=0.0, mem_mib=32 * GIB)],
        wants(1, 1),
        "n1:0",
    ),
    "dot_product goes where fewer cores are free to a job that asks for many": (
        "dot_product",
        [node("n1", gpus=2), node("n2", gpus=4)],
        [running(9, "n2", cpus=12)],
        # Of 16 cores and 4 GPUs at most: n1 4/16 x 16/16 + 1/4 x 2/4 = 0.375, n2 4/16 x 4/16 + 1/4 x 4/4 = 0.3125.
        wants(1, 1, cpus=4),
        "n2:0",
    ),
    "dot_product goes where fewer GPUs are free to a job that asks for few cores": (
        "dot_product",
        [node("n1", gpus=2), node("n2", gpus=4)],
        [running(9, "n2", cpus=12)],
        # n1 1/16 + 1/8 = 0.1875, n2 1/64 + 1/4 = 0.265625.
        wants(1, 1, cpus=1),
        "n1:0",
    ),
    "spread takes single cards from the group with the most free": (
        "spread",
        [PAIRS],
        [running(9, "n1:3")],
        wants(1, 1),
        "n1:0",
    ),
}


@pytest.mark.parametrize(("strategy", "nodes", "held", "one", "place"), STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_choose_nodes(strategy, nodes, held, one, place):
    chosen = settings(placement={"strategy": strategy})
    assert Scenario(nodes, [one], held, chosen).outcome().starts == {1: place}


# --- cards that others insist on --------------------------------------------------------------------

RARE = [node("n1", gpus=2, labels=("rare",)), node("n2", gpus=4), node("n3", gpus=4)]
FOR_RARE = {
    "who may go anywhere leaves it to who insists and waits": (
        RARE,
        [],
        [wants(1, 1), wants(2, 1, constraint="rare")],
        {1: "n2:0", 2: "n1:0"},
    ),
    "to the like of those who insist and run": (
        RARE,
        [running(9, "n1:0", request=Request(1, constraint="rare"))],
        [wants(1, 1)],
        {1: "n2:0"},
    ),
    "a run that insists on nothing says nothing of the kind": (
        RARE,
        [running(9, "n1:0", request=Request(1))],
        [wants(1, 1)],
        {1: "n1:1"},
    ),
    "slices too, though a card is opened for them elsewhere": (
        RARE,
        [running(9, "n1:0", vram=GIB, request=Request(1, vram_mib=GIB, constraint="rare"))],
        [wants(1, 1, vram_mib=GIB)],
        {1: "n2:0"},
    ),
    "where nothing else is free it is taken": (
        RARE,
        [running(8, "n2:0,1,2,3"), running(9, "n3:0,1,2")],
        [wants(1, 2), wants(2, 1), wants(3, 1, constraint="rare")],
        {1: "n1:0,1", 2: "n3:3"},
    ),
    "what is insisted on little is filled as ever": (
        RARE,
        [],
        [wants(1, 1), wants(2, 1, constraint="rare"), *(wants(number, 4) for number in range(3, 8))],
        {1: "n1:0", 2: "n1:1", 3: "n2:0,1,2,3", 4: "n3:0,1,2,3"},
    ),
    "jobs without GPUs go where they just fit": (
        RARE,
        [running(9, "n1:0", request=Request(1, constraint="rare"))],
        [wants(1)],
        {1: "n1"},
    ),
    "of like nodes those are left that are named": (
        [node("n1", gpus=4), node("n2", gpus=4)],
        [],
        [wants(1, 2), wants(2, 4, nodelist=("n1",))],
        {1: "n2:0,1", 2: "n1:0,1,2,3"},
    ),
    "of the cards of one node those are left that are asked for by type": (
        [node("n1", [gpu_view(0, name="NVIDIA H100"), gpu_view(1), gpu_view(2)])],
        [],
        [wants(1, 1), wants(2, 1, gpu_type="h100")],
        {1: "n1:1", 2: "n1:0"},
    ),
    "what is kept for a blocked job is not on them": (
        RARE,
        [running(8, "n1:0,1", ends_in=HOUR, request=Request(2, constraint="rare")), running(9, "n2:0,1,2,3")],
        [wants(1, 4), wants(2, 1, constraint="rare")],
        {1: "n3:0,1,2,3"},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), FOR_RARE.values(), ids=FOR_RARE)
def test_gpus_are_left_to_jobs_that_require_them(nodes, held, waiting, starts):
    assert Scenario(nodes, waiting, held).outcome().starts == starts


# --- more than there is ------------------------------------------------------------------------------


def test_cores_are_overbooked_until_they_are_busy():
    twice = settings(oversubscribe={"cpus": 2.0})
    held = [running(8, "n1", cpus=8), running(9, "n1", cpus=8)]
    jobs = [wants(number, cpus=8) for number in range(1, 6)]
    idle = [node(load=load(cpu_fraction=0.1))]
    assert Scenario(idle, jobs, held).outcome().starts == {}
    assert set(Scenario(idle, jobs, held, twice).outcome().starts) == {1, 2}
    busy = Scenario([node(load=load(cpu_fraction=0.95))], jobs, held, twice).outcome()
    assert busy.starts == {}
    assert busy.text(1) == "the CPU load of node n1 is 95%, the ceiling is 90%, since 2 times the cores may be booked"
    unmeasured = Scenario([node(load=None)], jobs, held, twice).outcome()
    assert unmeasured.text(1) == "the load of node n1 is not known"


def test_memory_is_overbooked_until_it_is_in_use():
    twice = settings(oversubscribe={"mem": 2.0})
    held = [running(9, "n1", mem_mib=60 * GIB)]
    waiting = [wants(1, mem_mib=30 * GIB)]
    assert Scenario([node(load=load())], waiting, held, twice).outcome().starts == {1: "n1"}
    full = Scenario([node(load=load(mem_available_mib=32 * GIB))], waiting, held, twice).outcome()
    assert full.text(1) == (
        "memory in use on node n1 would be 97% with this job, the ceiling is 90%, "
        "since 2 times the memory may be booked"
    )


def test_vram_is_overbooked_until_the_gpu_is_busy():
    twice = settings(oversubscribe={"vram": 2.0})
    held = [running(9, "n1:0", vram=20 * GIB)]
    waiting = [wants(1, 1, vram_mib=20 * GIB)]
    calm = Scenario([node(gpus=[gpu_view(0, utilisation=0.5)])], waiting, held, twice).outcome()
    assert calm.starts == {1: "n1:0"}
    busy = Scenario([node(gpus=[gpu_view(0, utilisation=0.95)])], waiting, held, twice).outcome()
    assert busy.text(1) == (
        "GPU 0 is shared and busy 95% of the time, the ceiling is 90%, since 2 times the VRAM may be booked"
    )


def test_a_configured_ceiling_is_kept():
    chosen = settings(oversubscribe={"cpus": 2.0}, ceiling={"cpu_fraction": 0.5})
    outcome = Scenario([node(load=load(cpu_fraction=0.6))], [wants(1)], settings=chosen).outcome()
    assert outcome.text(1) == "the CPU load of node n1 is 60%, the ceiling is 50%"


def test_one_job_gets_no_more_than_the_capacity():
    twice = settings(oversubscribe={"cpus": 2.0, "mem": 2.0, "vram": 2.0})
    waiting = [wants(1, cpus=17), wants(2, mem_mib=65 * GIB), wants(3, 1, vram_mib=25 * GIB)]
    assert Scenario([node(gpus=1, load=load())], waiting, settings=twice).outcome().starts == {}


# --- reasons -----------------------------------------------------------------------------------------

WHY = {
    "a license": (
        [node("n1")],
        [running(9, "n1", licenses=(("matlab", 1),), user="ann", ends_in=60)],
        wants(1, licenses=(("matlab", 2),)),
        "needs 2 licenses matlab, 1 of 2 free (in use by job 9 of ann)",
        {"license:matlab": 2},
    ),
    "a resource": (
        WITH_SCRATCH,
        [running(8, "n1", resources=(("scratch", 1),)), running(9, "n2", resources=(("scratch", 2),))],
        wants(1, resources=(("scratch", 2),)),
        "needs 2 of scratch on one node, the most free on one is 1 (2 of 5 in all)",
        {"resource:scratch": 2},
    ),
    "an exclusive node": (
        [node("n1"), node("n2")],
        [running(8, "n1"), running(9, "n2")],
        wants(1, is_exclusive=True),
        "needs an exclusive node, and other jobs are on all 2",
        {"nodes": 1},
    ),
    "a node that another job has alone": (
        [node("n1")],
        [running(9, "n1", is_exclusive=True)],
        wants(1, cpus=0),
        "needs next to nothing, and the node is held by a job that must be alone",
        {"nodes": 1},
    ),
    "cards of a node that another job has alone": (
        [node("n1", gpus=2)],
        [running(9, "n1", is_exclusive=True)],
        wants(1, 1, cpus=0),
        "needs 1 GPU, none of 2 free",
        {"gpus": 1},
    ),
    "linked cards": (
        [PAIRS],
        [running(8, "n1:0"), running(9, "n1:2")],
        wants(1, 2, is_linked=True),
        "needs 2 linked GPUs, the most free in one group is 1 (of 2)",
        {"linked_gpus": 2},
    ),
    "cards of labelled nodes": (
        LABELLED,
        [running(9, "n2:0,1")],
        wants(1, 1, constraint="nvlink"),
        "needs 1 GPU, none of 2 free (on nodes with nvlink)",
        {"gpus": 1},
    ),
    "cards of named nodes": (
        LABELLED,
        [running(9, "n2:0,1")],
        wants(1, 2, nodelist=("n2",)),
        "needs 2 GPUs, none of 2 free (on node n2)",
        {"gpus": 2},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "one", "text", "needed"), WHY.values(), ids=WHY)
def test_missing_resources_are_named(nodes, held, one, text, needed):
    outcome = Scenario(nodes, [one], held, LICENSED).outcome()
    assert outcome.codes == {1: "Licenses" if any(name.startswith("license:") for name in needed) else "Resources"}
    assert outcome.text(1).partition("; expected")[0] == text
    assert outcome.reasons[1].facts["needed"] == needed


def test_conditions_are_part_of_the_facts():
    outcome = Scenario(LABELLED, [wants(1, 1, constraint="nvlink")], [running(9, "n2:0,1")]).outcome()
    facts = outcome.reasons[1].facts
    assert facts["only"] == {"constraint": "nvlink", "nodes": [], "not": []}
    assert facts["rejected"][str(Rejection.NODE_LABELS)] == 2


def test_only_obstacles_on_requested_nodes_are_named():
    nodes = [node("n1", gpus=1, why_not="n1 is drained", labels=("a",)), node("n2", gpus=1, why_not="n2 is drained")]
    outcome = Scenario(nodes, [wants(1, 1, constraint="a")]).outcome()
    assert outcome.text(1) == "needs 1 GPU; not available: n1 is drained"
    gone = Scenario(nodes, [wants(1, 1, constraint="b")]).outcome()
    assert gone.text(1) == "needs 1 GPU on nodes with b; no node has that now"


# --- guards ------------------------------------------------------------------------------------------


class Never:
    """Turns down every place that touches one of these cards or nodes."""

    def __init__(self, cards=(), nodes=()):
        self.cards, self.nodes = set(cards), set(nodes)

    def why_not(self, booking: AllocationUnits) -> str | None:
        for piece in booking.pieces():
            if piece.node in self.nodes or any(part.card in self.cards for part in piece.parts):
                return "no"
        return None


def place_with(nodes, guard, **wanted):
    booking = best_placement(
        ClusterState(ClusterLayout(nodes, settings())), RequestUnits.of(Request(**wanted), 1000), guard=guard
    )
    return None if booking is None else (booking.node, [part.card for part in booking.parts])


def test_a_guard_sends_a_job_to_another_node():
    nodes = [node("n1", gpus=2), node("n2", gpus=4)]
    assert place_with(nodes, None, gpus=1) == (0, [0])
    assert place_with(nodes, Never(nodes=[0]), gpus=1) == (1, [2])
    assert place_with(nodes, Never(nodes=[0, 1]), gpus=1) is None


def test_a_guard_sends_a_job_to_another_group_of_the_same_node():
    assert place_with([PAIRS], Never(cards=[0]), gpus=2) == (0, [2, 3])
    assert place_with([PAIRS], Never(cards=[0, 2]), gpus=2, is_linked=True) is None
    assert place_with([PAIRS], Never(cards=[0, 3]), gpus=1) == (0, [2])
    assert place_with([PAIRS], Never(cards=[0, 2]), gpus=1) == (0, [1])


def test_a_guard_sees_every_group_of_the_node():
    assert place_with([linked("n1", (0, 0, 1, 1, 2, 2))], Never(cards=[0, 2]), gpus=2) == (0, [4, 5])


def test_a_guard_sends_a_job_to_other_gpus_without_links():
    assert place_with([node(gpus=4)], Never(cards=[0]), gpus=2) == (0, [2, 3])


def test_gpus_to_avoid_stay_unused_even_when_only_they_are_linked():
    draft = ClusterState(ClusterLayout([linked("n1", (0, 0, 1, 2))], settings()))
    (option,) = candidates(draft, RequestUnits.of(Request(gpus=2), 1), avoid=frozenset({0}))
    assert {part.card for part in option.booking.parts} == {1, 2}


def test_as_few_gpus_to_avoid_as_possible_are_used():
    layout = ClusterLayout([node(gpus=3)], settings())
    draft = ClusterState(layout)
    for held in (running(8, "n1:0", vram=GIB), running(9, "n1:1", vram=GIB)):
        booking = layout.booking(1, held)
        assert booking is not None
        draft.book(booking)
    (option,) = candidates(draft, RequestUnits.of(Request(gpus=2, vram_mib=GIB), 1), avoid=frozenset({0, 1}))
    assert {part.card for part in option.booking.parts} == {0, 2}


def test_placements_refused_by_a_guard_are_counted():
    tally: Counter[Rejection] = Counter()
    draft = ClusterState(ClusterLayout([node(gpus=2)], settings()))
    assert candidates(draft, RequestUnits.of(Request(gpus=1), 1), tally=tally, guard=Never(nodes=[0])) == []
    assert tally == {Rejection.GUARD: 1}


def test_a_strategy_is_rebuilt_with_each_layout():
    nodes = [node("n1", gpus=1), node("n2", gpus=2)]
    waiting = [job(1, request=Request(gpus=1), submit_at=NOW - 5)]
    for strategy, place in (("pack", "n1"), ("spread", "n2")):
        plan = decide(snapshot(*nodes, waiting=waiting), settings(placement={"strategy": strategy}))
        assert plan.starts[0].placement.node == place
