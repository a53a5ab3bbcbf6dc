"""A finder that remembers gives the very places that a search of all nodes gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.addons.simulate.packing import Finder
from gpusched.model.job import Request
from gpusched.model.planner_settings import STRATEGIES, PlacementSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import ClusterLayout, ClusterState
from gpusched.scheduler.placement import best_placement, candidates
from gpusched.scheduler.request_units import GpuDemand, RequestUnits, constraint_strength
from gpusched.testing import gpu_view, node

REQUESTS = [
    Request(1, gpu_fraction=0.5),
    Request(1, gpu_fraction=0.3, cpus=2),
    Request(1, vram_mib=6000),
    Request(1),
    Request(2, cpus=4),
    Request(cpus=3, mem_mib=2048),
    Request(1, nodes=2),
    Request(1, constraint="big"),
    Request(1, gpu_type="h100"),
    Request(1, licenses=(("matlab", 1),)),
]
MIXED = [gpu_view(0, "n5", name="NVIDIA H100"), gpu_view(1, "n5"), gpu_view(2, "n5")]
NODES = [
    *(node("n1", gpus=1), node("n2", gpus=2), node("n3", gpus=2)),
    *(node("n4", gpus=4, labels=("big",)), node("n5", MIXED)),
]


@settings(deadline=None)
@given(
    st.sampled_from(STRATEGIES),
    st.sampled_from([(0, 0), (1, 9), (3, 4), (9, 9)]),
    st.lists(st.tuples(st.sampled_from(REQUESTS), st.sampled_from((1, 2)), st.integers(0, 9)), max_size=30),
)
def test_cached_results_equal_fresh_ones(strategy, insisting, steps):
    layout = ClusterLayout(NODES, Settings(placement=PlacementSettings(strategy), license={"matlab": 2}))
    layout.typical = tuple((RequestUnits.of(request, 1), 0.2) for request in REQUESTS[:5])
    layout.wanted = GpuDemand()
    layout.wanted.add(None, 20)
    for request, count in zip((Request(1, constraint="big"), Request(1, gpu_type="h100")), insisting, strict=True):
        layout.wanted.add(constraint_strength(request), count)
    finder = Finder(ClusterState(layout))
    held = []
    for request, uid, tick in steps:
        need = RequestUnits.of(request, uid)
        if tick > 7 and held:
            finder.release(held.pop(tick % len(held)))
        booking = finder.find(need)
        assert booking == best_placement(finder.draft, need)
        if request.nodes == 1 and not request.licenses:
            assert finder.places(need) == [option.booking for option in candidates(finder.draft, need)]
        if booking is not None and tick < 9:
            finder.book(booking)
            held.append(booking)
