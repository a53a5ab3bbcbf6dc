"""Leanings choose among places and never change whether a job starts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.job import Request
from gpusched.model.leaning import NodeLeaning
from gpusched.model.settings import GpuSettings, Settings
from gpusched.model.snapshot import Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import allocation, gpu_view, job, node, share, snapshot

NODES = ("n1", "n2", "n3", "n4")
LEANINGS = st.builds(
    NodeLeaning,
    st.dictionaries(st.sampled_from((*NODES, "gone")), st.integers(-8, -1)).map(
        lambda found: tuple(sorted(found.items()))
    ),
    st.sets(st.tuples(st.sampled_from(NODES), st.just("coco"))).map(lambda found: tuple(sorted(found))),
)


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    """Four nodes with some cards taken, and one pending job."""
    views = []
    held = []
    for number, name in enumerate(NODES):
        models = draw(st.lists(st.sampled_from(("A100", "V100")), min_size=1, max_size=4))
        data = ("coco",) if draw(st.booleans()) else ()
        views.append(node(name, [gpu_view(index, name, name=model) for index, model in enumerate(models)], data=data))
        taken = draw(st.integers(0, len(models)))
        held += [allocation(100 * (number + 1) + index, name, [share(index, name)]) for index in range(taken)]
    request = Request(
        gpus=draw(st.integers(0, 3)),
        nodes=draw(st.integers(1, 3)),
        near=("coco",) if draw(st.booleans()) else (),
        exclude=("n1",) if draw(st.booleans()) else (),
    )
    return snapshot(*views, running=held, waiting=[job(1, request=request)])


@given(clusters(), LEANINGS, st.sampled_from((0.2, 0.5, 1.0, 3.0)))
def test_a_job_starts_whatever_it_leans_to(before: Snapshot, leaning: NodeLeaning, speed: float) -> None:
    (pending,) = before.pending
    plain = replace(pending, key=pending.key.with_terms(request=replace(pending.key.terms.request, near=())))
    leant = replace(pending, key=replace(pending.key, leaning=leaning))
    settings = Settings(gpu=GpuSettings(speed={"V100": speed}))
    starts = decide(replace(before, pending=(plain,)), Settings()).starts
    others = decide(replace(before, pending=(leant,)), settings).starts
    assert [start.job_id for start in others] == [start.job_id for start in starts]


@given(clusters(), LEANINGS)
def test_a_single_job_takes_the_node_it_leans_to_most(before: Snapshot, leaning: NodeLeaning) -> None:
    (pending,) = before.pending
    request = replace(pending.key.terms.request, gpus=0, nodes=1)
    leant = replace(pending, key=replace(pending.key.with_terms(request=request), leaning=leaning))
    (start,) = decide(replace(before, pending=(leant,)), Settings()).starts

    def points(name: str) -> int:
        declared = any(view.name == name and "coco" in view.data for view in before.nodes)
        is_near = bool(request.near) and (declared or (name, "coco") in leaning.read)
        return dict(leaning.points).get(name, 0) + 2 * is_near

    usable = [name for name in NODES if name not in request.exclude]
    assert points(start.placement.node) == max(map(points, usable))
