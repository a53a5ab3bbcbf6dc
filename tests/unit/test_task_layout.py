"""Tasks of a job: what each node books for them, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.api.resources import read_request
from gpusched.errors import UsageError
from gpusched.model.bundles import bundles_of, part_of
from gpusched.model.job import GpuShare, Request, RunPart, TaskLayout
from gpusched.model.layout import (
    arrange,
    as_asked,
    count_tasks,
    layout_values,
    rearranged,
    spread_tasks,
    tasks_on_nodes,
)
from gpusched.model.settings import Settings


def booked(default_cpus: float = 1.0, **wanted: Any) -> tuple[Any, ...]:
    """Nodes, tasks, and for each node cores, GPUs, memory."""
    found = arrange(wanted, default_cpus)
    return found.nodes, found.ntasks, found.cpus, found.gpus, found.mem_mib


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, (1, 1, 1, None, None)),
        ({"cpus": 4.0}, (1, 1, 4, None, None)),
        ({"cpus": 0.5, "ntasks": 3}, (1, 3, 1.5, None, None)),
        ({"cpus": 0.0, "ntasks": 3}, (1, 3, 0, None, None)),
        ({"ntasks": 4}, (1, 4, 4, None, None)),
        ({"nodes": 1, "ntasks": 4, "cpus": 2.0}, (1, 4, 8, None, None)),
        ({"nodes": 2, "cpus": 3.0}, (2, 2, 3, None, None)),
        ({"nodes": 2, "ntasks": 4, "cpus": 2.0}, (2, 4, 4, None, None)),
        ({"nodes": 2, "ntasks": 5, "cpus": 2.0}, (2, 5, 6, None, None)),
        ({"nodes": 2, "ntasks_per_node": 4}, (2, 8, 4, None, None)),
        ({"ntasks_per_node": 4, "cpus": 2.0}, (1, 4, 8, None, None)),
        ({"ntasks": 8, "ntasks_per_node": 4}, (2, 8, 4, None, None)),
        ({"ntasks": 5, "ntasks_per_node": 4}, (2, 5, 3, None, None)),
        ({"ntasks": 3, "ntasks_per_node": 4, "nodes": 1}, (1, 3, 3, None, None)),
        ({"ntasks": 2, "nodes": 1, "nodes_max": 2}, (1, 2, 2, None, None)),
        # GPUs
        ({"gpus": 4}, (1, 1, 1, 4, None)),
        ({"gpus": 0}, (1, 1, 1, 0, None)),
        ({"gpus": 4, "nodes": 2}, (2, 2, 1, 2, None)),
        ({"gpus": 4, "gpus_per_node": 2}, (2, 2, 1, 2, None)),
        ({"gpus_per_node": 2, "nodes": 3}, (3, 3, 1, 2, None)),
        ({"gpus_per_task": 1}, (1, 1, 1, 1, None)),
        ({"gpus_per_task": 2, "ntasks": 3}, (1, 3, 3, 6, None)),
        ({"gpus_per_task": 1, "ntasks_per_node": 4, "nodes": 2, "cpus": 2.0}, (2, 8, 8, 4, None)),
        ({"gpus_per_task": 1, "ntasks": 4, "gpus": 4}, (1, 4, 4, 4, None)),
        ({"gpus_per_task": 2, "gpus": 8}, (1, 4, 4, 8, None)),
        ({"ntasks_per_gpu": 2, "gpus": 2}, (1, 4, 4, 2, None)),
        ({"ntasks_per_gpu": 2, "gpus_per_node": 2, "nodes": 2}, (2, 8, 4, 2, None)),
        ({"ntasks_per_gpu": 2, "ntasks": 3}, (1, 3, 3, 2, None)),
        ({"cpus_per_gpu": 6, "gpus": 2}, (1, 1, 12, 2, None)),
        ({"cpus_per_gpu": 1, "gpus": 2, "ntasks": 4}, (1, 4, 4, 2, None)),
        ({"cpus_per_gpu": 3, "gpus_per_task": 1, "ntasks": 4}, (1, 4, 12, 4, None)),
        # least cores
        ({"min_cpus": 4}, (1, 1, 4, None, None)),
        ({"min_cpus": 4, "ntasks": 8}, (1, 8, 8, None, None)),
        ({"min_cpus": 4, "ntasks": 4, "nodes": 2}, (2, 4, 4, None, None)),
        ({"min_cpus": 9, "cpus_per_gpu": 2, "gpus": 2}, (1, 1, 9, 2, None)),
        ({"min_cpus": 4, "mem_per_cpu_mib": 100}, (1, 1, 4, None, 400)),
        # memory
        ({"mem_mib": 100, "ntasks": 4}, (1, 4, 4, None, 100)),
        ({"mem_mib": 0}, (1, 1, 1, None, 0)),
        ({"mem_mib": "all"}, (1, 1, 1, None, 0)),
        ({"mem_per_cpu_mib": 100, "ntasks": 4, "cpus": 2.0}, (1, 4, 8, None, 800)),
        ({"mem_per_cpu_mib": 100, "cpus": 1.5}, (1, 1, 1.5, None, 150)),
        ({"mem_per_cpu_mib": 101, "cpus": 1.5}, (1, 1, 1.5, None, 152)),
        ({"mem_per_cpu_mib": 100, "cpus": 0.0}, (1, 1, 0, None, 100)),
        ({"mem_per_cpu_mib": 100, "cpus_per_gpu": 4, "gpus": 2}, (1, 1, 8, 2, 800)),
        ({"mem_per_gpu_mib": 100, "gpus": 4, "nodes": 2}, (2, 2, 1, 2, 200)),
        ({"mem_per_gpu_mib": 100, "gpus_per_task": 1, "ntasks": 3}, (1, 3, 3, 3, 300)),
        # null is as good as absent
        ({"ntasks": None, "gpus": None, "mem_mib": None, "cpus": None, "nodes": None}, (1, 1, 1, None, None)),
    ],
)
def test_amounts_per_task_and_gpu_become_amounts_per_node(wanted: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert booked(**wanted) == expected


def test_the_default_number_of_cores_is_for_each_task() -> None:
    assert booked(2.0, ntasks=3)[2] == 6
    assert booked(0.0, ntasks=3)[2] == 0


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"ntasks": 1, "nodes": 2}, "2 nodes are requested for only 1 task"),
        (
            {"ntasks": 4, "nodes": 1, "ntasks_per_node": 2},
            "4 tasks are requested, but 1 node with 2 each has room for 2",
        ),
        (
            {"ntasks": 9, "nodes": 2, "ntasks_per_node": 4},
            "9 tasks are requested, but 2 nodes with 4 each have room for 8",
        ),
        ({"nodes": 3, "nodes_max": 2}, "the minimum of 3 nodes exceeds the maximum of 2"),
        ({"cpus": 2.0, "cpus_per_gpu": 2, "gpus": 1}, "cores per task and cores per GPU cannot be combined"),
        ({"ntasks_per_gpu": 2, "gpus_per_task": 1, "gpus": 1}, "tasks per GPU and GPUs per task cannot be combined"),
        (
            {"ntasks_per_gpu": 2, "ntasks_per_node": 2, "gpus": 1},
            "tasks per GPU and tasks per node cannot be combined",
        ),
        ({"mem_mib": 5, "mem_per_cpu_mib": 5}, "memory per node and memory per core cannot be combined"),
        ({"mem_mib": "all", "mem_per_gpu_mib": 5, "gpus": 1}, "memory per node and memory per GPU cannot be combined"),
        ({"mem_per_cpu_mib": 5, "mem_per_gpu_mib": 5}, "memory per core and memory per GPU cannot be combined"),
        ({"cpus_per_gpu": 2}, "cores per GPU are requested, but no GPUs"),
        ({"mem_per_gpu_mib": 2}, "memory per GPU is requested, but no GPUs"),
        ({"mem_per_gpu_mib": 2, "gpus": 0}, "memory per GPU is requested, but no GPUs"),
        ({"ntasks_per_gpu": 2, "gpus": 0}, "tasks per GPU are requested, but no GPUs"),
        ({"gpus_per_task": 2, "gpus": 0}, "GPUs per task are requested, but no GPUs"),
        ({"ntasks_per_gpu": 2}, "tasks per GPU are requested, but neither tasks nor GPUs"),
        ({"gpus_per_task": 2, "gpus": 5}, "5 GPUs cannot be divided into tasks with 2 each"),
        ({"gpus_per_task": 1, "ntasks": 2, "gpus": 4}, "4 GPUs and 2 tasks with 1 GPU each contradict each other"),
        (
            {"gpus_per_task": 1, "ntasks": 2, "gpus_per_node": 1},
            "1 GPU and 2 tasks with 1 GPU each contradict each other",
        ),
        ({"ntasks_per_gpu": 2, "ntasks": 2, "gpus": 4}, "4 GPUs and 2 tasks with 2 on each GPU contradict each other"),
        ({"gpus": 3, "nodes": 4}, "3 GPUs cannot be spread evenly over 4 nodes; the nearest that can: 4"),
        ({"gpus": 4, "gpus_per_node": 3, "nodes": 2}, "4 GPUs in all and 3 on each of 2 nodes contradict each other"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        arrange(wanted, 1.0)
    assert str(raised.value) == says
    with pytest.raises(UsageError):
        read_request(wanted, Settings())


@pytest.mark.parametrize(
    ("ntasks", "nodes", "expected"), [(4, 2, (2, 2)), (5, 2, (3, 2)), (1, 1, (1,)), (7, 3, (3, 2, 2))]
)
def test_tasks_are_spread_as_evenly_as_possible(ntasks: int, nodes: int, expected: tuple[int, ...]) -> None:
    assert spread_tasks(ntasks, nodes) == expected


@pytest.mark.parametrize(
    ("wanted", "bundles"),
    [
        # Count, most nodes, most on one, GPUs and tasks of each; cores and memory of each; the least of a node.
        ({"gpus": 4}, None),
        ({"gpus": 4, "nodes": 4}, None),
        ({"gpus_per_node": 2, "nodes": 2}, None),
        ({"gpus_per_node": 2, "nodes": 1, "nodes_max": 4}, None),
        ({"nodes": 1, "nodes_max": 4}, None),
        ({"nodes": 2, "ntasks": 8}, None),
        ({"nodes": 2, "gpus_per_task": 1, "ntasks_per_node": 2}, None),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 8, "cpus": 0.0}, None),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 8, "min_cpus": 4}, None),
        ({"gpus": 6, "nodes": 2}, (6, 2, 5, 1, 0, 0, 0, 1, 0)),
        ({"gpus": 6, "nodes": 2, "cpus": 4.0, "mem_mib": 100}, (6, 2, 5, 1, 0, 0, 0, 4, 100)),
        ({"gpus": 6, "nodes": 2, "cpus_per_gpu": 3, "mem_per_gpu_mib": 50}, (6, 2, 5, 1, 0, 3, 50, 0, 0)),
        ({"gpus": 6, "nodes": 1, "nodes_max": 9}, (6, 6, 6, 1, 0, 0, 0, 1, 0)),
        ({"gpus": 6, "nodes": 2, "ntasks_per_node": 3}, None),
        ({"gpus": 5, "nodes": 2, "ntasks_per_node": 3, "cpus": 2.0}, (5, 2, 4, 1, 0, 0, 0, 6, 0)),
        ({"gpus": 6, "nodes": 2, "ntasks": 2}, (6, 2, 5, 1, 0, 0, 0, 1, 0)),
        ({"gpus": 6, "nodes": 2, "ntasks": 6, "cpus": 2.0}, (6, 2, 5, 1, 1, 2, 0, 0, 0)),
        ({"gpus": 6, "nodes": 2, "ntasks": 12}, (6, 2, 5, 1, 2, 2, 0, 0, 0)),
        ({"gpus": 6, "nodes": 2, "ntasks": 3}, (3, 2, 2, 2, 1, 1, 0, 0, 0)),
        ({"gpus": 6, "nodes": 3, "ntasks": 4}, None),
        ({"gpus": 8, "nodes": 2, "gpus_per_task": 2, "mem_per_cpu_mib": 10}, (4, 2, 3, 2, 1, 1, 10, 0, 10)),
        ({"ntasks": 6, "nodes": 2, "ntasks_per_gpu": 2}, (3, 2, 2, 1, 2, 2, 0, 0, 0)),
        ({"ntasks": 5, "nodes": 2, "ntasks_per_gpu": 2}, None),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 8, "cpus": 2.0}, (8, 2, 8, 0, 1, 2, 0, 0, 0)),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 8, "ntasks_per_node": 4}, None),
        ({"nodes": 1, "nodes_max": 4, "ntasks": 8, "ntasks_per_node": 4}, (8, 4, 4, 0, 1, 1, 0, 0, 0)),
    ],
)
def test_totals_are_laid_out_in_bundles(wanted: dict[str, Any], bundles: tuple[float, ...] | None) -> None:
    found = arrange(wanted, 1.0)
    assert (None if found.bundles is None else tuple(found.bundles.values())) == (
        None if bundles is None else tuple(bundles)
    )


small = st.one_of(st.none(), st.integers(1, 6))
WANTED = st.fixed_dictionaries(
    {
        "nodes": small,
        "nodes_max": small,
        "ntasks": st.one_of(st.none(), st.integers(1, 40)),
        "ntasks_per_node": small,
        "ntasks_per_gpu": small,
        "gpus_per_task": small,
        "cpus_per_gpu": small,
        "gpus": st.one_of(st.none(), st.integers(0, 16)),
        "gpus_per_node": st.one_of(st.none(), st.integers(0, 8)),
        "cpus": st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])),
        "mem_mib": st.one_of(st.none(), st.just("all"), st.integers(0, 5000)),
        "mem_per_cpu_mib": small,
        "mem_per_gpu_mib": small,
    }
)


@given(WANTED)
def test_a_layout_books_enough_for_every_task_or_is_refused(wanted: dict[str, Any]) -> None:
    try:
        found = arrange(wanted, 1.0)
    except ValueError:
        return
    assert found.ntasks >= found.nodes >= 1
    tasks = spread_tasks(found.ntasks, found.nodes)
    if found.bundles is not None and (per_bundle := found.bundles["tasks"]):
        tasks = tuple(count * per_bundle for count in spread_tasks(found.bundles["count"], found.nodes))
    assert sum(tasks) == found.ntasks
    most, each = max(tasks), wanted["cpus"]
    if wanted["cpus_per_gpu"] is None:
        assert found.cpus >= most * (1.0 if each is None else each)
    else:
        assert found.cpus >= (found.gpus or 0) * wanted["cpus_per_gpu"]
    if wanted["gpus_per_task"]:
        assert (found.gpus or 0) >= most * wanted["gpus_per_task"]
    if wanted["ntasks_per_gpu"]:
        assert most <= (found.gpus or 0) * wanted["ntasks_per_gpu"]
    if wanted["ntasks_per_node"]:
        assert most <= wanted["ntasks_per_node"]
    if wanted["mem_per_cpu_mib"]:
        assert (found.mem_mib or 0) >= found.cpus * wanted["mem_per_cpu_mib"]


@given(WANTED, st.data())
def test_however_bundles_are_laid_out_every_node_books_enough_for_its_tasks(
    wanted: dict[str, Any], data: st.DataObject
) -> None:
    try:
        request, layout = read_request({name: value for name, value in wanted.items() if value is not None}, Settings())
    except UsageError:
        return
    bundles = request.bundles
    if bundles is None:
        return
    nodes = data.draw(st.integers(request.nodes, bundles.nodes_max))
    counts, left = [], bundles.count
    for others in reversed(range(nodes)):
        least = max(1, left - others * bundles.most)
        counts.append(data.draw(st.integers(least, min(bundles.most, left - others))) if others else left)
        left -= counts[-1]
    parts = [part_of(request, count) for count in counts]
    assert sum(part.gpus for part in parts) == request.total_gpus
    assert wanted["gpus"] in (None, 0, request.total_gpus)
    booked = [
        RunPart(f"n{at}", "b", (GpuShare("", 0),) * part.gpus, part.cpus, part.mem_mib) for at, part in enumerate(parts)
    ]
    tasks = tasks_on_nodes(request, layout, booked)
    assert sum(tasks) == count_tasks(request, layout, nodes)
    for part, own in zip(parts, tasks, strict=True):
        assert own >= 1
        assert part.cpus >= own * (wanted["cpus"] or 0)
        assert part.cpus >= part.gpus * (wanted["cpus_per_gpu"] or 0)
        assert part.mem_mib >= part.gpus * (wanted["mem_per_gpu_mib"] or 0)
        assert part.mem_mib >= part.cpus * (wanted["mem_per_cpu_mib"] or 0)
        assert part.gpus >= own * (wanted["gpus_per_task"] or 0)
        assert own <= (wanted["ntasks_per_node"] or own)


@given(WANTED)
def test_a_job_keeps_what_was_asked_and_an_empty_change_books_the_same(wanted: dict[str, Any]) -> None:
    try:
        request, layout = read_request({name: value for name, value in wanted.items() if value is not None}, Settings())
    except UsageError:
        return
    assert count_tasks(request, layout) == arrange(wanted, 1.0).ntasks
    again, stated = rearranged(request, layout, {})
    before = {"nodes": request.nodes, "cpus": request.cpus, "gpus": request.gpus, "mem_mib": request.mem_mib}
    assert {**before, **again.amounts()} == before
    assert (TaskLayout(**stated) if stated else None) == layout
    assert bundles_of(again) == request.bundles
    assert again.ntasks == count_tasks(request, layout)


def test_nothing_is_kept_of_a_submission_that_says_nothing_about_tasks() -> None:
    assert read_request({"gpus": 2, "mem_mib": 100}, Settings()) == (Request(gpus=2, mem_mib=100), None)
    assert layout_values({"nodes": 1}) == {}


@pytest.mark.parametrize(
    ("wanted", "changes", "expected"),
    [
        # One task more or less, and cores for each of them.
        ({"ntasks": 4, "cpus": 2}, {"cpus": 3.0}, {"cpus": 12.0}),
        ({"ntasks": 4, "cpus": 2}, {"ntasks": 2}, {"cpus": 4.0}),
        ({"ntasks": 4}, {"ntasks": 2}, {"cpus": 2.0}),
        ({"cpus": 2}, {"cpus": 3.0}, {"cpus": 3.0}),
        # Another way to say how much.
        ({"cpus_per_gpu": 2, "gpus": 2}, {"cpus": 3.0}, {"cpus": 3.0}),
        ({"mem_per_cpu_mib": 100, "cpus": 2}, {"mem_mib": 50}, {"mem_mib": 50}),
        ({"mem_mib": 50, "cpus": 2}, {"mem_per_cpu_mib": 100}, {"mem_mib": 200}),
        ({"mem_per_cpu_mib": 100, "cpus": 2}, {"cpus": 4.0}, {"mem_mib": 400}),
        ({"gpus_per_task": 1, "ntasks": 2}, {"ntasks": 4}, {"gpus": 4}),
        ({"gpus": 2}, {"gpus": 4, "nodes": 2}, {"gpus": 2, "nodes": 2}),
        ({"gpus": 2, "mem_per_gpu_mib": 10}, {"gpus": 4}, {"gpus": 4, "mem_mib": 40}),
    ],
)
def test_a_change_is_computed_from_what_was_asked(
    wanted: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    request, layout = read_request(wanted, Settings())
    found = rearranged(request, layout, changes)[0].amounts()
    assert {name: found[name] for name in expected} == expected
    assert as_asked(request, layout).keys() >= {"nodes"}
