"""GPUs that use the host's memory (GB10, Jetson): what is booked of them and of the host comes out of one pool."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import Outcome, Scenario, running, settings, wants

from gpusched import testing
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import Job
from gpusched.model.mentions import render
from gpusched.model.settings import Settings
from gpusched.model.snapshot import CalendarEntry, Placement
from gpusched.scheduler.calendar import conflicts
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.infeasible import refusal
from gpusched.testing import NOW, gpu_view, request, share

GIB = 1024
POOL_MIB = 24 * GIB
PLAIN = settings(gpu={"share_headroom_mib": 0})


def machine(cards: int = 1, **parts: Any) -> NodeView:
    """16 cores, 24 GiB, and GPUs that use them."""
    views = [gpu_view(index, vram_total_mib=POOL_MIB, has_host_memory=True, **parts) for index in range(cards)]
    return testing.node("n1", views, cpus=16, mem_mib=POOL_MIB)


def outcome(*waiting: Job, held: tuple[Allocation, ...] = (), node: NodeView | None = None) -> Outcome:
    return Scenario([machine() if node is None else node], waiting, held, PLAIN).outcome()


def whole(job_id: int) -> Job:
    return wants(job_id, gpus=1)


def slice_of(job_id: int, gib: int, mem_gib: int = 0) -> Job:
    return wants(job_id, gpus=1, vram_mib=gib * GIB, mem_mib=mem_gib * GIB)


def memory(job_id: int, gib: int) -> Job:
    return wants(job_id, mem_mib=gib * GIB)


TOGETHER: dict[str, tuple[list[Job], list[int]]] = {
    # case: waiting jobs in their order, ids of those that start
    "a whole GPU leaves no memory": ([whole(1), memory(2, 20)], [1]),
    "booked memory is not there for a whole GPU": ([memory(1, 20), whole(2)], [1]),
    "jobs that book no memory run beside a whole GPU": ([whole(1), wants(2, cpus=4.0)], [1, 2]),
    "a whole GPU's own memory is a part of its own": ([wants(1, gpus=1, mem_mib=20 * GIB)], [1]),
    "slices and memory fill the pool": ([slice_of(1, 10), memory(2, 6), slice_of(3, 8)], [1, 2, 3]),
    "a slice beyond the pool waits": ([slice_of(1, 10), memory(2, 8), slice_of(3, 8)], [1, 2]),
    "memory beyond the pool waits": ([slice_of(1, 16), memory(2, 10)], [1]),
    "a slice's memory is booked beside it": ([slice_of(1, 10, mem_gib=10), slice_of(2, 8)], [1]),
    "half a GPU leaves half the memory": ([wants(1, gpus=1, gpu_fraction=0.5), memory(2, 12)], [1, 2]),
    "half a GPU leaves no more than half": ([wants(1, gpus=1, gpu_fraction=0.5), memory(2, 13)], [1]),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_jobs_share_one_memory_pool(case: str) -> None:
    waiting, started = TOGETHER[case]
    assert sorted(outcome(*waiting).starts) == started


def test_running_bookings_of_a_gpu_count_as_memory() -> None:
    assert outcome(memory(2, 20), held=(running(1, "n1:0"),)).starts == {}
    assert outcome(memory(2, 20), held=(running(1, "n1:0", vram=6 * GIB),)).starts == {}
    assert outcome(memory(2, 20), held=(running(1, "n1:0", vram=4 * GIB),)).starts == {2: "n1"}


def test_several_gpus_have_equal_parts_of_the_pool() -> None:
    assert outcome(whole(1), memory(2, 12), node=machine(2)).starts == {1: "n1:0", 2: "n1"}
    assert outcome(whole(1), memory(2, 13), node=machine(2)).starts == {1: "n1:0"}
    assert sorted(outcome(whole(1), whole(2), memory(3, 1), node=machine(2)).starts) == [1, 2]


def test_foreign_use_of_the_gpu_is_taken_from_slices() -> None:
    node = machine(foreign_mib=8 * GIB)
    assert sorted(outcome(memory(1, 10), slice_of(2, 6), node=node).starts) == [1, 2]
    assert sorted(outcome(memory(1, 10), slice_of(2, 7), node=node).starts) == [1]


def test_memory_is_reserved_for_a_whole_gpu_until_it_is_free() -> None:
    found = outcome(
        wants(2, gpus=1, limit=3600),
        wants(3, mem_mib=2 * GIB, limit=7200),
        held=(running(1, "n1", ends_in=600, mem_mib=20 * GIB),),
    )
    assert found.reserved == {2: ("n1:0", 600.0)}
    assert 3 not in found.starts


REASONS: dict[str, tuple[Job, tuple[Allocation, ...], str]] = {
    "a whole GPU waits for memory": (
        whole(2),
        (running(1, "n1", mem_mib=20 * GIB),),
        "needs 24G of memory (its GPU uses the host's), 4G of 24G free",
    ),
    "a slice waits for memory": (
        slice_of(2, 8),
        (running(1, "n1", mem_mib=20 * GIB),),
        "needs 8G of VRAM on one card, the most room on one is 4G",
    ),
    "memory waits for a GPU": (memory(2, 20), (running(1, "n1:0"),), "needs 20G of memory, none of 24G free"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_names_the_missing_memory(case: str) -> None:
    waiting, held, text = REASONS[case]
    assert outcome(waiting, held=held).text(2).partition(";")[0] == text


# --- reservations -------------------------------------------------------------------------------------


COURSE = Placement("n1", (share(0),), 8.0, 4 * GIB)
"""The GPU, and on paper less memory than comes with it."""


def test_a_reservation_of_the_gpu_reserves_its_memory() -> None:
    open_now = testing.window("course", COURSE, begins_in=-60, ends_in=3600, users=("ann",))
    inside = wants(1, gpus=1, cpus=1.0, limit=600, reservation="course")
    outside = wants(2, mem_mib=1 * GIB, cpus=1.0, limit=600)
    found = Scenario([machine()], [inside, outside], (), PLAIN, windows=[open_now]).outcome()
    assert found.starts == {1: "n1:0"}


def test_reservations_of_the_gpu_and_of_memory_conflict() -> None:
    layout = ClusterLayout([machine()], PLAIN)
    course = CalendarEntry("course", NOW + 3600, 3600, (COURSE,), users=("ann",))
    other = CalendarEntry("other", NOW + 3600, 3600, (Placement("n1", (), 1.0, 8 * GIB),), users=("bob",))
    assert [render(found.text) for found in conflicts(other, [course], [], layout, NOW)] == [
        "node n1 does not have that many CPUs and that much memory beside reservation course"
    ]
    late = running(7, "n1", mem_mib=8 * GIB, ends_in=9000)
    assert [found.job_id for found in conflicts(course, [], [late], layout, NOW)] == [7]


def test_impossible_requests_are_refused_with_a_possible_one() -> None:
    def refused(**parts: Any) -> str | None:
        found = refusal(request(gpus=1, **parts), [machine()], PLAIN)
        return None if found is None else f"{found.text}; {found.hint}"

    assert refused(mem_mib=POOL_MIB) is None
    assert refused(vram_mib=20 * GIB, mem_mib=4 * GIB) is None
    assert refused(vram_mib=20 * GIB, mem_mib=5 * GIB) == (
        "asked for 20G of VRAM and 5G of memory; GPUs here use the host's memory, of which this scheduler can give "
        "24G in all; ask for less with --vram or -m, together at most 24G"
    )
    assert refused(vram_mib=25 * GIB) == (
        "asked for 25G of VRAM; the largest slice of a card is 24G; ask for less: --vram 24G, or a whole card: -g 1"
    )


def test_bookings_add_up_in_the_node() -> None:
    layout = ClusterLayout([machine()], Settings())
    held = running(1, "n1:0", vram=6 * GIB, mem_mib=2 * GIB)
    assert layout.node_mem_mib(held) == 8 * GIB
    assert layout.node_mem_mib(running(1, "n1:0", mem_mib=2 * GIB)) == POOL_MIB
    other = ClusterLayout([testing.node("n1", 1, mem_mib=POOL_MIB)], Settings())
    assert other.node_mem_mib(held) == 2 * GIB
