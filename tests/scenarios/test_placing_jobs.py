"""Where jobs go when there is room: whole cards, slices, fractions, cores, memory, ceilings."""

from __future__ import annotations

import pytest
from scenario import Scenario, load, running, settings, wants

from gpusched.model.cluster import GpuView, NodeView
from gpusched.testing import gpu_view, node, share

NO_HEADROOM = settings(gpu={"share_headroom_mib": 0})


def mixed_node() -> NodeView:
    return node(
        gpus=[
            gpu_view(0, name="NVIDIA A100-SXM4-80GB", vram_total_mib=81920),
            gpu_view(1, name="Tesla T4", vram_total_mib=15360),
            gpu_view(2, name="NVIDIA A100-SXM4-80GB", vram_total_mib=81920),
            gpu_view(3, name="NVIDIA GeForce RTX 4090", vram_total_mib=24564),
        ]
    )


WHOLE_CARDS = {
    "a job without GPUs takes none": ([node(gpus=2)], [wants(1)], {1: "n1"}),
    "one GPU is the lowest free index": ([node(gpus=4)], [wants(1, 1)], {1: "n1:0"}),
    "two jobs get different cards": ([node(gpus=4)], [wants(1, 1), wants(2, 2)], {1: "n1:0", 2: "n1:1,2"}),
    "a job for one card leaves the large cards free": ([mixed_node()], [wants(1, 1)], {1: "n1:1"}),
    "three cards are the three smallest": ([mixed_node()], [wants(1, 3)], {1: "n1:0,1,3"}),
    "a type takes that card only": ([mixed_node()], [wants(1, 1, gpu_type="a100")], {1: "n1:0"}),
    "a type is matched without case, blanks and dashes": (
        [mixed_node()],
        [wants(1, 1, gpu_type="RTX-4090"), wants(2, 1, gpu_type="geforcertx"), wants(3, 2, gpu_type="a100 sxm4")],
        {1: "n1:3", 3: "n1:0,2"},
    ),
    "least VRAM goes to the smallest card that has it": (
        [mixed_node()],
        [wants(1, 1, min_vram_mib=20_000), wants(2, 1, min_vram_mib=20_000)],
        {1: "n1:3", 2: "n1:0"},
    ),
    "a card of unknown VRAM is no answer to least VRAM": (
        [node(gpus=[gpu_view(0, vram_total_mib=None)])],
        [wants(1, 1, min_vram_mib=1)],
        {},
    ),
    "a card of unknown VRAM can be had whole, after the known ones": (
        [node(gpus=[gpu_view(0, vram_total_mib=None), gpu_view(1)])],
        [wants(1, 1), wants(2, 1)],
        {1: "n1:1", 2: "n1:0"},
    ),
    "all cards of a job are on one node": (
        [node("n1", gpus=2), node("n2", gpus=3)],
        [wants(1, 3), wants(2, 3)],
        {1: "n2:0,1,2"},
    ),
    "the first node by name comes first": ([node("b", gpus=1), node("a", gpus=1)], [wants(1, 1)], {1: "a:0"}),
    "a job without GPUs goes to the node with fewest of them": (
        [node("n1", gpus=4), node("n2", gpus=1), node("n3", gpus=2)],
        [wants(1)],
        {1: "n2"},
    ),
    "a node without enough cores is passed over": (
        [node("n1", gpus=2, cpus=4), node("n2", gpus=2, cpus=8)],
        [wants(1, 1, cpus=6)],
        {1: "n2:0"},
    ),
    "a job for no core at all starts on a full node": (
        [node(cpus=1)],
        [wants(1, cpus=1), wants(2, cpus=0)],
        {1: "n1", 2: "n1"},
    ),
    "tenths of cores add up exactly": (
        [node(cpus=1)],
        [wants(number, cpus=0.1) for number in range(1, 12)],
        dict.fromkeys(range(1, 11), "n1"),
    ),
    "memory is booked to the last MiB": (
        [node(mem_mib=1000)],
        [wants(1, mem_mib=999), wants(2, mem_mib=2), wants(3, mem_mib=1), wants(4, mem_mib=1)],
        {1: "n1", 3: "n1"},
    ),
}


@pytest.mark.parametrize(("nodes", "waiting", "starts"), WHOLE_CARDS.values(), ids=WHOLE_CARDS)
def test_whole_gpus_are_placed(nodes, waiting, starts):
    assert Scenario(nodes, waiting).outcome().starts == starts


def test_a_job_uses_a_node_with_room_when_the_first_is_busy():
    outcome = Scenario([node("n1", gpus=2), node("n2", gpus=2)], [wants(9, 2)], [running(1, "n1:0")]).outcome()
    assert outcome.starts == {9: "n2:0,1"}


SLICES = {
    "two slices of one user share a card": (
        [node(gpus=2)],
        [],
        [wants(1, 1, vram_mib=8192), wants(2, 1, vram_mib=8192)],
        {1: "n1:0", 2: "n1:0"},
    ),
    "slices of two users do not share a card": (
        [node(gpus=2)],
        [],
        [wants(1, 1, vram_mib=8192, uid=1), wants(2, 1, vram_mib=8192, uid=2)],
        {1: "n1:0", 2: "n1:1"},
    ),
    "a slice that does not fit beside the first takes another card": (
        [node(gpus=2)],
        [],
        [wants(1, 1, vram_mib=20_000), wants(2, 1, vram_mib=8192)],
        {1: "n1:0", 2: "n1:1"},
    ),
    "a slice goes to the fullest card on which it fits": (
        [node(gpus=3)],
        [running(1, "n1:1", vram=10_000), running(2, "n1:2", vram=14_000)],
        [wants(9, 1, vram_mib=8192)],
        {9: "n1:2"},
    ),
    "a slice goes to a shared card rather than to an empty one": (
        [node(gpus=3)],
        [running(1, "n1:2", vram=1000)],
        [wants(9, 1, vram_mib=1000)],
        {9: "n1:2"},
    ),
    "a slice on an empty node takes the smallest card": ([mixed_node()], [], [wants(1, 1, vram_mib=8192)], {1: "n1:1"}),
    "a slice does not join a card that is booked whole": (
        [node(gpus=1)],
        [running(1, "n1:0")],
        [wants(9, 1, vram_mib=1)],
        {},
    ),
    "a whole card is not one that holds a slice": (
        [node(gpus=2)],
        [running(1, "n1:0", vram=1000)],
        [wants(9, 1)],
        {9: "n1:1"},
    ),
    "slices on two cards take two different cards": (
        [node(gpus=2)],
        [],
        [wants(1, 2, vram_mib=4096)],
        {1: "n1:0,1"},
    ),
    "the headroom of a card is never booked": (
        [node(gpus=1)],
        [],
        [wants(1, 1, vram_mib=24 * 1024 - 512), wants(2, 1, vram_mib=1)],
        {1: "n1:0"},
    ),
    "a slice larger than the card less its headroom waits": (
        [node(gpus=1)],
        [],
        [wants(1, 1, vram_mib=24 * 1024 - 511)],
        {},
    ),
    "foreign memory counts as booked": (
        [node(gpus=[gpu_view(0, foreign_mib=16 * 1024)])],
        [],
        [wants(1, 1, vram_mib=8 * 1024 - 512), wants(2, 1, vram_mib=1)],
        {1: "n1:0"},
    ),
    "a slice avoids a card of unknown size": (
        [node(gpus=[gpu_view(0, vram_total_mib=None), gpu_view(1)])],
        [],
        [wants(1, 1, vram_mib=1)],
        {1: "n1:1"},
    ),
    "a slice avoids a card for one process only": (
        [node(gpus=[gpu_view(0, can_share=False), gpu_view(1)])],
        [],
        [wants(1, 1, vram_mib=1), wants(2, 1)],
        {1: "n1:1", 2: "n1:0"},
    ),
    "a slice may use a card whose foreign use keeps whole jobs away": (
        [node(gpus=[gpu_view(0, foreign_mib=2048, why_not_whole="in foreign use")])],
        [],
        [wants(1, 1), wants(2, 1, vram_mib=8192)],
        {2: "n1:0"},
    ),
    "two halves fill a card and a third half takes another": (
        [node(gpus=2)],
        [],
        [wants(number, 1, gpu_fraction=0.5) for number in (1, 2, 3)],
        {1: "n1:0", 2: "n1:0", 3: "n1:1"},
    ),
    "three thirds fill a card": (
        [node(gpus=1)],
        [],
        [wants(number, 1, gpu_fraction=1 / 3) for number in (1, 2, 3, 4)],
        {1: "n1:0", 2: "n1:0", 3: "n1:0"},
    ),
    "a fraction and a slice share a card while both sums hold": (
        [node(gpus=1)],
        [],
        [wants(1, 1, gpu_fraction=0.5), wants(2, 1, vram_mib=12_032), wants(3, 1, vram_mib=1)],
        {1: "n1:0", 2: "n1:0"},
    ),
    "a fraction does not fit where slices hold the memory": (
        [node(gpus=1)],
        [running(1, "n1:0", vram=12_033)],
        [wants(9, 1, gpu_fraction=0.5)],
        {},
    ),
}


@pytest.mark.parametrize(("nodes", "held", "waiting", "starts"), SLICES.values(), ids=SLICES)
def test_shared_gpus_are_placed(nodes, held, waiting, starts):
    assert Scenario(nodes, waiting, held).outcome().starts == starts


def test_a_slice_books_its_memory_and_a_fraction_books_both():
    outcome = Scenario([node(gpus=1)], [wants(1, 1, vram_mib=1000), wants(2, 1, gpu_fraction=0.25)]).outcome()
    booked = {start.job_id: start.placement.gpus for start in outcome.plan.starts}
    assert booked[1] == (share(0, vram_mib=1000),)
    assert booked[2] == (share(0, vram_mib=(24 * 1024 - 512) // 4, fraction=0.25),)


def test_without_headroom_a_slice_may_fill_a_gpu():
    outcome = Scenario([node(gpus=1)], [wants(1, 1, vram_mib=24 * 1024)], settings=NO_HEADROOM).outcome()
    assert outcome.starts == {1: "n1:0"}


UNAVAILABLE: dict[str, list[GpuView]] = {
    "drained": [gpu_view(0, why_not="drained: fan"), gpu_view(1)],
    "lost": [gpu_view(0, is_present=False, why_not="lost"), gpu_view(1)],
    "lost, with no reason given": [gpu_view(0, is_present=False), gpu_view(1)],
    "in foreign use": [gpu_view(0, why_not_whole="python (pid 7) of bob holds 9G"), gpu_view(1)],
}


@pytest.mark.parametrize("gpus", UNAVAILABLE.values(), ids=UNAVAILABLE)
def test_an_unusable_gpu_is_skipped(gpus):
    assert Scenario([node(gpus=gpus)], [wants(1, 1)]).outcome().starts == {1: "n1:1"}


def test_a_drained_node_gets_nothing():
    outcome = Scenario([node("n1", why_not="drained"), node("n2")], [wants(1)]).outcome()
    assert outcome.starts == {1: "n2"}


def test_with_a_broken_driver_gpu_jobs_wait_and_others_start():
    outcome = Scenario([node(gpus=2, gpu_error="version mismatch")], [wants(1, 1), wants(2)]).outcome()
    assert outcome.starts == {2: "n1"}


CEILINGS = {
    "CPU load at its ceiling still admits": ({"cpu_fraction": 0.5}, load(cpu_fraction=0.5), wants(1), True),
    "CPU load above its ceiling does not": ({"cpu_fraction": 0.5}, load(cpu_fraction=0.51), wants(1), False),
    "unknown CPU load is not low load": ({"cpu_fraction": 0.5}, load(cpu_fraction=None), wants(1), False),
    "no measurement at all is not low load": ({"cpu_fraction": 0.5}, None, wants(1), False),
    "memory in use with the job's own request below the ceiling admits": (
        {"mem_fraction": 0.5},
        load(mem_available_mib=48 * 1024),
        wants(1, mem_mib=16 * 1024),
        True,
    ),
    "memory in use with the job's own request above the ceiling does not": (
        {"mem_fraction": 0.5},
        load(mem_available_mib=48 * 1024),
        wants(1, mem_mib=16 * 1024 + 1),
        False,
    ),
    "disk traffic above its ceiling does not": ({"disk_mib_s": 100.0}, load(disk_mib_s=101.0), wants(1), False),
    "unknown disk traffic is not low traffic": ({"disk_mib_s": 100.0}, load(disk_mib_s=None), wants(1), False),
    "network traffic above its ceiling does not": ({"net_mib_s": 10.0}, load(net_mib_s=11.0), wants(1), False),
    "disk traffic at its ceiling admits": ({"disk_mib_s": 100.0}, load(disk_mib_s=100.0), wants(1), True),
    "network traffic below its ceiling admits": ({"net_mib_s": 10.0}, load(net_mib_s=9.0), wants(1), True),
    "without ceilings any load admits": ({}, load(cpu_fraction=1.0, mem_available_mib=0), wants(1), True),
    "without ceilings no measurement is needed": ({}, None, wants(1), True),
}


@pytest.mark.parametrize(("ceiling", "measured", "waiting", "starts"), CEILINGS.values(), ids=CEILINGS)
def test_measured_load_limits_placement(ceiling, measured, waiting, starts):
    outcome = Scenario([node(load=measured)], [waiting], settings=settings(ceiling=ceiling)).outcome()
    assert bool(outcome.starts) is starts
    if not starts:
        assert outcome.codes == {1: "LoadCeiling"}


def test_jobs_started_since_the_sample_count_by_their_requests():
    jobs = [wants(number, cpus=4) for number in range(1, 5)]
    ceiling = settings(ceiling={"cpu_fraction": 0.5})
    assert set(Scenario([node(load=load())], jobs, settings=ceiling).outcome().starts) == {1, 2, 3}
    fresh = [running(9, "n1", cpus=4, since=0.0)]
    assert set(Scenario([node(load=load())], jobs, fresh, ceiling).outcome().starts) == {1, 2}
    half = settings(ceiling={"mem_fraction": 0.5})
    large = [wants(number, mem_mib=12 * 1024) for number in range(1, 5)]
    assert set(Scenario([node(load=load())], large, settings=half).outcome().starts) == {1, 2}
    measured = [running(9, "n1", cpus=4, since=1.0)]
    assert set(Scenario([node(load=load())], jobs, measured, ceiling).outcome().starts) == {1, 2, 3}


SHARED = [running(1, "n1:0", vram=8192)]
GPU_CEILINGS = {
    "a slice joins a card that is at its ceiling": ([gpu_view(0, utilisation=0.5)], SHARED, {9: "n1:0"}),
    "a slice does not join a card above its ceiling": ([gpu_view(0, utilisation=0.51)], SHARED, {}),
    "a slice does not join a card of unknown load": ([gpu_view(0)], SHARED, {}),
    "a slice takes an empty card instead": (
        [gpu_view(0, utilisation=0.9), gpu_view(1, utilisation=0.0)],
        SHARED,
        {9: "n1:1"},
    ),
    "the first slice on a card does not ask": ([gpu_view(0, utilisation=0.9)], [], {9: "n1:0"}),
}


@pytest.mark.parametrize(("cards", "held", "starts"), GPU_CEILINGS.values(), ids=GPU_CEILINGS)
def test_load_of_shared_gpus_limits_placement(cards, held, starts):
    ceiling = settings(ceiling={"gpu_fraction": 0.5})
    outcome = Scenario([node(gpus=cards)], [wants(9, 1, vram_mib=8192)], held, ceiling).outcome()
    assert outcome.starts == starts
    if not starts:
        assert outcome.codes == {9: "LoadCeiling"}
        assert "GPU 0" in outcome.text(9)
        assert outcome.reserved == {}
    assert Scenario([node(gpus=cards)], [wants(9, 1, vram_mib=8192)], held).outcome().starts
