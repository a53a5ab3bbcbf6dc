"""What holds of every step, whatever it asks for, on whatever nodes and beside whatever other steps."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm.step_layout import NodeRoom, StepJob, lay_out, level, numbered, rooms
from gpusched.errors import Refused
from gpusched.model.job import GpuShare
from gpusched.model.step import JobStep, StepPart, StepRequest

Held = list[tuple[str, float, tuple[GpuShare, ...]]]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Held, StepJob]:
    """A job on up to four nodes with up to six CPUs and four GPUs each."""
    nodes: Held = []
    for place in range(draw(st.integers(1, 4))):
        cpus = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 6.0]))
        shares = tuple(GpuShare(f"GPU-{place}-{index}", index) for index in range(draw(st.integers(0, 4))))
        nodes.append((f"n{place}", cpus, shares))
    ntasks = draw(st.integers(len(nodes), 3 * len(nodes)))
    return nodes, StepJob("7", ntasks, draw(st.sampled_from([None, 1, 2])))


def small(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, most)


@st.composite
def requests(draw: st.DrawFn) -> StepRequest:
    names = st.lists(st.sampled_from(["n0", "n1", "n2", "n3"]), max_size=2).map(tuple)
    asked: dict[str, Any] = {
        "tasks": draw(small(10)),
        "ntasks_per_node": draw(small(4)),
        "cpus_per_task": draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
        "relative": draw(st.sampled_from([0, 0, 0, 1])),
        "nodelist": draw(names),
        "exclude": draw(st.just(()) | names),
        "distribution": draw(st.sampled_from(["block", "cyclic", "plane=2", "plane=3"])),
        **{name: draw(st.booleans()) for name in ("is_exact", "overlaps", "overcommits")},
    }
    if draw(st.booleans()):
        asked["nodes_min"] = draw(st.integers(1, 4))
        asked["nodes_max"] = asked["nodes_min"] + draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["", "", "gpus", "gpus_per_node", "gpus_per_task"]))
    if kind:
        asked[kind] = draw(st.integers(0, 4))
    if draw(st.integers(0, 5)) == 0:
        asked["distribution"] = "arbitrary"
        asked["hosts"] = tuple(draw(st.lists(st.sampled_from(["n0", "n1"]), min_size=1, max_size=8)))
    return StepRequest(**asked)


def opened(number: int, request: StepRequest, parts: tuple[StepPart, ...]) -> JobStep:
    return JobStep(
        job_id=7,
        run=1,
        number=number,
        name="a",
        command="a",
        node="n0",
        start_at=0.0,
        tasks=sum(len(part.tasks) for part in parts),
        cpus=sum(part.cpus for part in parts),
        gpus=tuple(share for part in parts for share in part.gpus),
        is_exclusive=request.is_exclusive,
        has_own_gpus=request.has_own_gpus,
        parts=parts,
    )


@given(jobs(), st.lists(requests(), min_size=1, max_size=8))
def test_every_step_is_laid_out_within_its_job(job: tuple[Held, StepJob], asked: list[StepRequest]) -> None:
    nodes, of_job = job
    steps: list[JobStep] = []
    for request in asked:
        room = rooms(nodes, steps, request)
        parts = laid_out(request, room, of_job)
        if isinstance(parts, Refused):
            assert parts.about in ("cpus", "gpus", "nodes")
            assert parts.hint
            # It does not depend on other steps.
            assert isinstance(laid_out(request, rooms(nodes, [], request), of_job), Refused)
            continue
        assert parts == laid_out(request, rooms(nodes, steps, request), of_job)
        if parts is None:
            # It has to wait for others.
            assert steps
            assert lay_out(request, rooms(nodes, [], request), of_job) is not None
            continue
        check_parts(request, parts, {one.node: one for one in room}, [one.node for one in room])
        check_others(request, parts, steps)
        steps.append(opened(len(steps), request, parts))
    check_exact(nodes, steps, asked)


def laid_out(request: StepRequest, room: list[NodeRoom], job: StepJob) -> tuple[StepPart, ...] | Refused | None:
    try:
        return lay_out(request, room, job)
    except Refused as refused:
        return refused


def check_parts(request: StepRequest, parts: tuple[StepPart, ...], room: dict[str, NodeRoom], order: list[str]) -> None:
    """Every task is on one node, which has room for it; nodes are the job's, in its order."""
    numbers = [number for part in parts for number in part.tasks]
    assert sorted(numbers) == list(range(len(numbers)))
    assert numbers
    places = [order.index(part.node) for part in parts]
    assert places == sorted(set(places))
    assert min(places) >= request.relative
    assert not {part.node for part in parts} & set(request.exclude)
    for part in parts:
        there = room[part.node]
        assert part.tasks == tuple(sorted(part.tasks))
        assert part.tasks
        assert part.cpus <= there.cpus
        assert set(part.gpus) <= set(there.gpus)
        if not request.overcommits:
            assert len(part.tasks) * request.cpus_per_task <= there.cpus
        if request.ntasks_per_node is not None:
            assert len(part.tasks) <= request.ntasks_per_node
        if request.gpus_per_task:
            assert len(part.gpus) >= len(part.tasks) * request.gpus_per_task
        if request.gpus_per_node is not None:
            assert len(part.gpus) == request.gpus_per_node
        if not request.has_own_gpus:
            assert part.gpus == there.gpus
    if request.tasks is not None:
        assert len(numbers) == request.tasks
    if request.gpus is not None and not request.gpus_per_task:
        assert sum(len(part.gpus) for part in parts) == request.gpus
    if request.distribution == "arbitrary":
        host_of = {number: part.node for part in parts for number in part.tasks}
        assert [host_of[number] for number in sorted(numbers)] == list(request.hosts[: len(numbers)])
    elif request.nodes_min is not None:
        assert len(parts) <= (request.nodes_max or request.nodes_min)
        assert len(parts) >= min(request.nodes_min, len(numbers))
    elif request.nodelist and len(numbers) >= len(set(request.nodelist)):
        assert set(request.nodelist) <= {part.node for part in parts}


def check_others(request: StepRequest, parts: tuple[StepPart, ...], steps: list[JobStep]) -> None:
    """No GPU is the own one of two exclusive steps."""
    if not (request.is_exclusive and request.has_own_gpus):
        return
    own = {share.uuid for part in parts for share in part.gpus}
    for step in steps:
        if step.is_exclusive and step.has_own_gpus:
            assert own.isdisjoint(share.uuid for share in step.gpus)


def check_exact(nodes: Held, steps: list[JobStep], asked: list[StepRequest]) -> None:
    """Exact steps that do not overlap never have more CPUs of a node than the job."""
    if any(request.has_own_gpus and not request.is_exact for request in asked):
        return
    for name, cpus, _ in nodes:
        taken = sum(part.cpus for step in steps if step.is_exclusive for part in step.parts if part.node == name)
        assert taken <= max(1, int(cpus))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 40))
def test_levelling_fills_the_lowest_first(places: list[tuple[int, int]], count: int) -> None:
    have = [start for start, _ in places]
    most = [start + more for start, more in places]
    count = min(count, sum(most) - sum(have))
    slow = list(have)
    for _ in range(count):
        place = min((place for place in range(len(slow)) if slow[place] < most[place]), key=lambda place: slow[place])
        slow[place] += 1
    assert level(count, have, most) == [now - before for now, before in zip(slow, have, strict=True)]


@given(st.lists(st.integers(0, 7), max_size=5), st.integers(1, 9))
def test_dealing_numbers_out_keeps_the_counts(counts: list[int], plane: int) -> None:
    found = numbered(counts, plane)
    assert [len(some) for some in found] == counts
    assert sorted(number for some in found for number in some) == list(range(sum(counts)))
    assert all(some == sorted(some) for some in found)
