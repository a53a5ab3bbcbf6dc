"""GPUs that use the host's memory: whatever is asked for, the memory of a node is handed out once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import held_by, queues, settings

from gpusched import testing
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, gpu_view, job, request


@st.composite
def machines(draw):
    """Nodes with one to four such cards."""
    mem_mib = draw(st.sampled_from([8192, 32_768]))
    cards = [
        gpu_view(
            index,
            "n0",
            name="Tesla T4",
            vram_total_mib=mem_mib,
            has_host_memory=True,
            foreign_mib=draw(st.sampled_from([0, 0, 700])),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return testing.node("n0", cards, cpus=16.0, mem_mib=mem_mib)


@given(machines(), queues(), queues(), settings())
def test_node_memory_is_allocated_once(machine, early, waiting, chosen):
    early = [replace(one, id=one.id + 100) for one in early]
    first = testing.snapshot(machine, waiting=early)
    running = held_by(decide(first, Settings()), early, NOW)
    assert check_invariants(replace(first, allocations=tuple(running))) == []
    second = testing.snapshot(machine, running=running, waiting=waiting)
    held = [*running, *held_by(decide(second, chosen), waiting, NOW)]
    assert check_invariants(replace(second, allocations=tuple(held))) == []


@given(machines(), queues())
def test_an_ended_job_returns_its_memory(machine, waiting):
    held = held_by(decide(testing.snapshot(machine, waiting=waiting), Settings()), waiting, NOW)
    layout = ClusterLayout([machine], Settings())
    draft = ClusterState(layout)
    bookings = [layout.booking(one.terms.uid, one) for one in held]
    for booking in bookings:
        draft.book(booking)
    assert min(draft.free_mem_mib) >= 0
    for booking in bookings[::-1]:
        draft.release(booking)
    assert draft.free_mem_mib == layout.mem_mib


@given(machines(), st.sampled_from([0, 1, 900, 4096]))
def test_a_whole_gpu_starts_on_an_idle_node_with_any_memory_request(machine, mem_mib):
    clean = replace(machine, gpus=tuple(replace(view, foreign_mib=0) for view in machine.gpus))
    wanted = job(1, request=request(gpus=len(clean.gpus), mem_mib=mem_mib))
    assert [start.job_id for start in decide(testing.snapshot(clean, waiting=[wanted]), Settings()).starts] == [1]
