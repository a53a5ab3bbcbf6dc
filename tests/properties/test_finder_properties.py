"""A finder that remembers gives the very places that a search of all nodes gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.job import Request
from gpusched.model.settings import STRATEGIES, PlacementSettings, Settings
from gpusched.policy.draft import Draft, Layout
from gpusched.policy.finder import Finder
from gpusched.policy.placement import Need, find, options
from gpusched.testing import node

REQUESTS = [
    Request(1, gpu_fraction=0.5),
    Request(1, gpu_fraction=0.3, cpus=2),
    Request(1, vram_mib=6000),
    Request(1),
    Request(2, cpus=4),
    Request(cpus=3, mem_mib=2048),
    Request(1, nodes=2),
    Request(1, constraint="big"),
    Request(1, licenses=(("matlab", 1),)),
]
NODES = [node("n1", gpus=1), node("n2", gpus=2), node("n3", gpus=2), node("n4", gpus=4, labels=("big",))]


@settings(deadline=None)
@given(
    st.sampled_from(STRATEGIES),
    st.lists(st.tuples(st.sampled_from(REQUESTS), st.sampled_from((1, 2)), st.integers(0, 9)), max_size=25),
)
def test_what_is_remembered_is_what_would_be_found(strategy, steps):
    layout = Layout(NODES, Settings(placement=PlacementSettings(strategy), license={"matlab": 2}))
    layout.typical = tuple((Need.of(request, 1), 0.2) for request in REQUESTS[:5])
    finder = Finder(Draft(layout))
    held = []
    for request, uid, turn in steps:
        need = Need.of(request, uid)
        if turn > 7 and held:
            finder.release(held.pop(turn % len(held)))
        booking = finder.find(need)
        assert booking == find(finder.draft, need)
        if request.nodes == 1 and not request.licenses:
            assert finder.places(need) == [option.booking for option in options(finder.draft, need)]
        if booking is not None and turn < 9:
            finder.book(booking)
            held.append(booking)
