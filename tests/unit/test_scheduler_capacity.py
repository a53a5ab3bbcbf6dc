"""What can never fit is refused, with the largest that would."""

from __future__ import annotations

import pytest

from gpusched.model.cluster import HostSample
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.infeasible import refusal
from gpusched.testing import gpu_view, node, request

GIB = 1024
EIGHT = [node(gpus=8)]
MIXED = [
    node(
        gpus=[
            gpu_view(0, name="NVIDIA A100", vram_total_mib=80 * GIB),
            gpu_view(1, name="NVIDIA A100", vram_total_mib=40 * GIB),
            gpu_view(2, name="Tesla T4", vram_total_mib=15 * GIB),
        ]
    )
]
NO_GPUS = [node()]

GRANTED = {
    "nothing": (NO_GPUS, request(cpus=0)),
    "all cores and all memory": (NO_GPUS, request(cpus=16, mem_mib=64 * GIB)),
    "all cards": (EIGHT, request(8)),
    "both cards of a type": (MIXED, request(2, gpu_type="a100")),
    "the largest card": (MIXED, request(1, min_vram_mib=80 * GIB)),
    "the largest slice": (MIXED, request(1, vram_mib=80 * GIB - 512)),
    "slices on every card": (MIXED, request(3, vram_mib=10 * GIB)),
    "nearly a card": (MIXED, request(1, gpu_fraction=0.999)),
    "drained hardware": (
        [node(gpus=[gpu_view(0, why_not="drained")], why_not="drained")],
        request(1, cpus=16),
    ),
    "hardware in foreign use": (
        [node(gpus=[gpu_view(0, foreign_mib=20 * GIB, why_not_whole="bob")])],
        request(1, vram_mib=23 * GIB),
    ),
    "any GPUs while the driver is broken": ([node(gpu_error="mismatch")], request(64, gpu_type="h100")),
    "a whole card of unknown size": ([node(gpus=[gpu_view(0, vram_total_mib=None)])], request(1)),
}


@pytest.mark.parametrize(("nodes", "wanted"), GRANTED.values(), ids=GRANTED)
def test_a_possible_request_is_granted(nodes, wanted):
    assert refusal(wanted, nodes, Settings()) is None


REFUSED = {
    "more cards than there are": (
        EIGHT,
        request(9),
        "asked for 9 GPUs; the largest this scheduler can give is -g 8",
        "ask for at most that many: -g 8",
    ),
    "a card where there is none": (
        NO_GPUS,
        request(1),
        "asked for 1 GPU; this scheduler has no GPU",
        "see what there is with: ginfo; to try it without one, restart the daemon with GPUSCHED_FAKE_GPUS=4x24GiB",
    ),
    "a card where the only one is lost": (
        [node(gpus=[gpu_view(0, is_present=False)])],
        request(1),
        "asked for 1 GPU; this scheduler has no GPU",
        "see what there is with: ginfo; to try it without one, restart the daemon with GPUSCHED_FAKE_GPUS=4x24GiB",
    ),
    "more cards of a type than there are": (
        MIXED,
        request(3, gpu_type="a100"),
        "asked for 3 a100 GPUs; the largest this scheduler can give is -g a100:2",
        "ask for at most that many: -g a100:2",
    ),
    "a type that is not here": (
        MIXED,
        request(1, gpu_type="H100"),
        "asked for a GPU of type 'H100'; the types here are NVIDIA A100, Tesla T4",
        "a part of the name is enough, in any case: see ginfo",
    ),
    "a card larger than the largest": (
        MIXED,
        request(1, min_vram_mib=96 * GIB),
        "asked for GPUs with 96G or more; the largest has 80G",
        "ask for less: --min-vram 80G",
    ),
    "a card larger than the largest of its type": (
        MIXED,
        request(1, gpu_type="t4", min_vram_mib=24 * GIB),
        "asked for GPUs with 24G or more; the largest has 15G",
        "ask for less: --min-vram 15G",
    ),
    "more large cards than there are": (
        MIXED,
        request(3, min_vram_mib=20 * GIB),
        "asked for 3 GPUs; the largest this scheduler can give is -g 2 --min-vram 20G",
        "ask for at most that many: -g 2 --min-vram 20G",
    ),
    "a size where none can be read": (
        [node(gpus=[gpu_view(0, vram_total_mib=None)])],
        request(1, min_vram_mib=GIB),
        "asked for GPUs with 1G or more; the size of the GPUs here cannot be read",
        "leave --min-vram out",
    ),
    "a slice larger than a card": (
        MIXED,
        request(1, vram_mib=80 * GIB),
        "asked for 80G of VRAM; the largest slice of a card is 81408M",
        "ask for less: --vram 81408M, or a whole card: -g 1",
    ),
    "more slices than cards that can hold one": (
        MIXED,
        request(3, vram_mib=20 * GIB),
        "asked for 20G of VRAM on each of 3 GPUs; the largest this scheduler can give is -g 2 --vram 20G",
        "ask for at most that many: -g 2 --vram 20G",
    ),
    "a slice of a kind that cannot be shared": (
        [node(gpus=[gpu_view(0, can_share=False)])],
        request(gpu_type="A100", gpus=1, vram_mib=1024),
        "asked for 1G of VRAM; no GPU of type 'A100' can be shared (unknown size, MIG, or for one process only)",
        "ask for whole GPUs: -g A100:1",
    ),
    "a slice where no card can be shared": (
        [node(gpus=[gpu_view(0, can_share=False)])],
        request(1, vram_mib=GIB),
        "asked for 1G of VRAM; none of the GPUs can be shared (unknown size, MIG, or for one process only)",
        "ask for whole GPUs: -g 1",
    ),
    "a fraction where no size can be read": (
        [node(gpus=[gpu_view(0, vram_total_mib=None)])],
        request(1, gpu_fraction=0.5),
        "asked for 0.5 of a GPU; none of the GPUs can be shared (unknown size, MIG, or for one process only)",
        "ask for whole GPUs: -g 1",
    ),
    "more cores than there are": (
        NO_GPUS,
        request(cpus=17),
        "asked for 17 CPUs; the most this scheduler can give is 16",
        "ask for less: -c 16",
    ),
    "more memory than there is": (
        [node(mem_mib=64 * GIB + 100)],
        request(mem_mib=65 * GIB),
        "asked for 65G of memory; the most this scheduler can give is 65636M",
        "ask for less: -m 65636M",
    ),
    "more cores than there are, while the driver is broken": (
        [node(gpu_error="mismatch")],
        request(1, cpus=17),
        "asked for 17 CPUs; the most this scheduler can give is 16",
        "ask for less: -c 16",
    ),
    "more cards than any one node has": (
        [node("n1", gpus=4), node("n2", gpus=2)],
        request(6),
        "asked for 6 GPUs; the largest this scheduler can give on one node is -g 4",
        "ask for at most that many: -g 4",
    ),
    "all cores of one node with all memory of another": (
        [node("n1", cpus=8, mem_mib=4 * GIB), node("n2", cpus=4, mem_mib=8 * GIB)],
        request(cpus=8, mem_mib=8 * GIB),
        "asked for 8 CPUs and 8G of memory; no single node has all of that",
        "ask for less of one of them; see what each node has with: ginfo",
    ),
    "the largest slice, more often than there are such cards": (
        MIXED,
        request(2, vram_mib=80 * GIB - 512),
        "asked for 79.5G of VRAM on each of 2 GPUs; the largest this scheduler can give is -g 1 --vram 79.5G",
        "ask for at most that many: -g 1 --vram 79.5G",
    ),
    "what only two nodes together have": (
        [node("n1", gpus=4, cpus=8), node("n2", cpus=64)],
        request(4, cpus=16),
        "asked for 4 GPUs and 16 CPUs; no single node has all of that",
        "ask for less of one of them; see what each node has with: ginfo",
    ),
}


@pytest.mark.parametrize(("nodes", "wanted", "text", "hint"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_request_is_refused(nodes, wanted, text, hint):
    found = refusal(wanted, nodes, Settings())
    assert found is not None
    assert (found.text, found.hint) == (text, hint)


def test_memory_above_the_measured_ceiling_would_wait_for_ever():
    load = HostSample(0.0, "n1", 16, 64 * GIB, 1 * GIB)
    half = replace(Settings(), ceiling=CeilingSettings(mem_fraction=0.5))
    assert refusal(request(mem_mib=32 * GIB), [node(load=load)], half) is None
    found = refusal(request(mem_mib=33 * GIB), [node(load=load)], half)
    assert found is not None
    assert found.text == "asked for 33G of memory; jobs start only while at most 50% of memory is in use, which is 32G"
    assert found.hint.startswith("ask for less: -m 32G")


def test_the_other_nodes_stay_open_while_one_driver_is_broken():
    nodes = [node("n1", gpu_error="mismatch"), node("n2", gpus=2)]
    assert refusal(request(4), nodes, Settings()) is None
