"""Which nodes, tasks, CPUs and GPUs a step gets: srun(1), option by option, on jobs with two and three nodes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpusched.addons.slurm.step_layout import StepJob, lay_out, level, numbered, rooms, spread
from gpusched.errors import Refused
from gpusched.model.job import GpuShare
from gpusched.model.step import JobStep, StepPart, StepRequest

Held = list[tuple[str, float, tuple[GpuShare, ...]]]


def held(*nodes: tuple[int, int]) -> Held:
    """A job on n1, n2 ... with so many CPUs and GPUs."""
    return [
        (f"n{place}", float(cpus), tuple(GpuShare(f"GPU-{place}-{index}", index) for index in range(gpus)))
        for place, (cpus, gpus) in enumerate(nodes, 1)
    ]


TWO = held((4, 2), (4, 2))
THREE = held((2, 1), (2, 1), (2, 1))
UNEVEN = held((4, 4), (2, 2))
ONE = held((4, 2))
JOB = {1: 1, 2: 4, 3: 3}
"""Tasks of the job by its nodes."""


def laid_out(
    nodes: Held,
    steps: list[JobStep] | None = None,
    *,
    ntasks: int | None = None,
    per_node: int | None = None,
    near: str = "n1",
    **parts: Any,
) -> tuple[StepPart, ...] | None:
    request = StepRequest(**parts)
    job = StepJob("7", ntasks or JOB[len(nodes)], per_node)
    return lay_out(request, rooms(nodes, steps or [], request), job, near)


def tasks(found: tuple[StepPart, ...] | None) -> dict[str, str]:
    """Task numbers by node."""
    assert found is not None
    return {part.node: ",".join(map(str, part.tasks)) for part in found}


BLOCK, CYCLIC = "block", "cyclic"


@pytest.mark.parametrize(
    ("nodes", "asked", "wanted"),
    [
        # Nothing said: all nodes, the job's tasks.
        (ONE, {}, {"n1": "0"}),
        (TWO, {}, {"n1": "0,1", "n2": "2,3"}),
        (THREE, {}, {"n1": "0", "n2": "1", "n3": "2"}),
        # -n: on as many nodes as it has tasks for, as evenly as possible.
        (TWO, {"tasks": 1}, {"n1": "0"}),
        (TWO, {"tasks": 2}, {"n1": "0", "n2": "1"}),
        (TWO, {"tasks": 3}, {"n1": "0,1", "n2": "2"}),
        (TWO, {"tasks": 8}, {"n1": "0,1,2,3", "n2": "4,5,6,7"}),
        (THREE, {"tasks": 2}, {"n1": "0", "n2": "1"}),
        (THREE, {"tasks": 4}, {"n1": "0,1", "n2": "2", "n3": "3"}),
        (UNEVEN, {"tasks": 6}, {"n1": "0,1,2,3", "n2": "4,5"}),
        (UNEVEN, {"tasks": 5}, {"n1": "0,1,2", "n2": "3,4"}),
        # -N: so many, or as many as possible of a range.
        (TWO, {"nodes_min": 1}, {"n1": "0"}),
        (TWO, {"nodes_min": 1, "nodes_max": 2}, {"n1": "0,1", "n2": "2,3"}),
        (TWO, {"nodes_min": 2}, {"n1": "0,1", "n2": "2,3"}),
        (THREE, {"nodes_min": 2}, {"n1": "0", "n2": "1"}),
        (THREE, {"nodes_min": 1, "nodes_max": 9}, {"n1": "0", "n2": "1", "n3": "2"}),
        (TWO, {"nodes_min": 1, "tasks": 4}, {"n1": "0,1,2,3"}),
        (TWO, {"nodes_min": 2, "tasks": 1}, {"n1": "0"}),
        (THREE, {"nodes_min": 3, "tasks": 2}, {"n1": "0", "n2": "1"}),
        (THREE, {"nodes_min": 1, "nodes_max": 2, "tasks": 4}, {"n1": "0,1", "n2": "2,3"}),
        # --ntasks-per-node: so many on each, or with -n at most so many.
        (TWO, {"ntasks_per_node": 3}, {"n1": "0,1,2", "n2": "3,4,5"}),
        (THREE, {"nodes_min": 2, "ntasks_per_node": 2}, {"n1": "0,1", "n2": "2,3"}),
        (UNEVEN, {"tasks": 4, "ntasks_per_node": 2}, {"n1": "0,1", "n2": "2,3"}),
        (THREE, {"tasks": 2, "ntasks_per_node": 2}, {"n1": "0", "n2": "1"}),
        # -w: all that are named, others if -N or -n asks for more.
        (THREE, {"nodelist": ("n2",)}, {"n2": "0"}),
        (THREE, {"nodelist": ("n3", "n1")}, {"n1": "0", "n3": "1"}),
        (THREE, {"nodelist": ("n3",), "nodes_min": 2}, {"n1": "0", "n3": "1"}),
        (THREE, {"nodelist": ("n3",), "tasks": 2}, {"n3": "0,1"}),
        (THREE, {"nodelist": ("n3",), "tasks": 4}, {"n1": "0,1", "n3": "2,3"}),
        (THREE, {"nodelist": ("n2", "n3"), "tasks": 1}, {"n2": "0"}),
        (THREE, {"nodelist": ("n2", "n3"), "nodes_min": 1}, {"n2": "0"}),
        (TWO, {"nodelist": ("localhost",), "near": "n2"}, {"n2": "0"}),
        # -x and --relative.
        (THREE, {"exclude": ("n2",)}, {"n1": "0", "n3": "1"}),
        (THREE, {"exclude": ("n1", "n2")}, {"n3": "0"}),
        (THREE, {"relative": 1}, {"n2": "0", "n3": "1"}),
        (THREE, {"relative": 2, "nodes_min": 1}, {"n3": "0"}),
        (THREE, {"relative": 1, "tasks": 1}, {"n2": "0"}),
        # -m: the same numbers of tasks, other numbers on them.
        (TWO, {"tasks": 4, "distribution": CYCLIC}, {"n1": "0,2", "n2": "1,3"}),
        (THREE, {"tasks": 4, "distribution": CYCLIC}, {"n1": "0,3", "n2": "1", "n3": "2"}),
        (UNEVEN, {"tasks": 6, "distribution": CYCLIC}, {"n1": "0,2,4,5", "n2": "1,3"}),
        (TWO, {"tasks": 8, "distribution": "plane=2"}, {"n1": "0,1,4,5", "n2": "2,3,6,7"}),
        (TWO, {"tasks": 5, "distribution": "plane=4"}, {"n1": "0,1,2", "n2": "3,4"}),
        (
            THREE,
            {"distribution": "arbitrary", "hosts": ("n3", "n1", "n3")},
            {"n1": "1", "n3": "0,2"},
        ),
        (TWO, {"distribution": "arbitrary", "hosts": ("n2", "n2", "n1"), "tasks": 2}, {"n2": "0,1"}),
        # -c.
        (TWO, {"tasks": 2, "cpus_per_task": 4}, {"n1": "0", "n2": "1"}),
        (TWO, {"tasks": 16, "cpus_per_task": 0.5}, {"n1": "0,1,2,3,4,5,6,7", "n2": "8,9,10,11,12,13,14,15"}),
        (UNEVEN, {"tasks": 1, "nodes_min": 1, "cpus_per_task": 4}, {"n1": "0"}),
        (list(reversed(UNEVEN)), {"tasks": 1, "cpus_per_task": 3}, {"n1": "0"}),
        # --overcommit: up to the CPUs first.
        (UNEVEN, {"tasks": 8, "overcommits": True}, {"n1": "0,1,2,3,4", "n2": "5,6,7"}),
        (TWO, {"tasks": 2, "cpus_per_task": 9, "overcommits": True}, {"n1": "0", "n2": "1"}),
    ],
)
def test_nodes_and_tasks(nodes: Held, asked: dict[str, Any], wanted: dict[str, str]) -> None:
    assert tasks(laid_out(nodes, **asked)) == wanted


def test_a_part_of_the_nodes_has_as_many_tasks_each_as_the_job() -> None:
    assert tasks(laid_out(TWO, nodes_min=1, per_node=2)) == {"n1": "0,1"}
    assert tasks(laid_out(TWO, nodes_min=1, ntasks=2)) == {"n1": "0"}


def gpus(found: tuple[StepPart, ...] | None) -> dict[str, list[int]]:
    assert found is not None
    return {part.node: [share.index for share in part.gpus] for part in found}


@pytest.mark.parametrize(
    ("nodes", "asked", "wanted"),
    [
        (TWO, {}, {"n1": [0, 1], "n2": [0, 1]}),
        (TWO, {"gpus": 0}, {"n1": [], "n2": []}),
        (TWO, {"gpus": 1}, {"n1": [0]}),
        (TWO, {"gpus": 2}, {"n1": [0], "n2": [0]}),
        (TWO, {"gpus": 3}, {"n1": [0, 1], "n2": [0]}),
        (TWO, {"gpus": 4}, {"n1": [0, 1], "n2": [0, 1]}),
        (UNEVEN, {"gpus": 6}, {"n1": [0, 1, 2, 3], "n2": [0, 1]}),
        (TWO, {"gpus": 2, "nodes_min": 1}, {"n1": [0, 1]}),
        (TWO, {"gpus": 1, "tasks": 2}, {"n1": [0]}),
        (TWO, {"gpus_per_node": 1}, {"n1": [0], "n2": [0]}),
        (TWO, {"gpus_per_node": 2, "nodes_min": 1, "nodelist": ("n2",)}, {"n2": [0, 1]}),
        (TWO, {"gpus": 2, "gpus_per_node": 2}, {"n1": [0, 1]}),
        (TWO, {"gpus_per_task": 1}, {"n1": [0, 1], "n2": [0, 1]}),
        (TWO, {"gpus_per_task": 1, "tasks": 1}, {"n1": [0]}),
        (TWO, {"gpus_per_task": 2, "tasks": 2}, {"n1": [0, 1], "n2": [0, 1]}),
        (UNEVEN, {"gpus_per_task": 2, "tasks": 3}, {"n1": [0, 1, 2, 3], "n2": [0, 1]}),
        (UNEVEN, {"gpus_per_task": 4, "tasks": 1}, {"n1": [0, 1, 2, 3]}),
        (TWO, {"gpus": 4, "gpus_per_task": 2}, {"n1": [0, 1], "n2": [0, 1]}),
    ],
)
def test_gpus(nodes: Held, asked: dict[str, Any], wanted: dict[str, list[int]]) -> None:
    assert gpus(laid_out(nodes, **asked)) == wanted


CPUS = "or let tasks share CPUs with --overcommit"


@pytest.mark.parametrize(
    ("nodes", "asked", "about", "text", "hint"),
    [
        (ONE, {"tasks": 5}, "cpus", "the step requests 5 CPUs, but job 7 has 4", CPUS),
        (TWO, {"tasks": 9}, "cpus", "the step requests 9 CPUs, but job 7 has 8 on its 2 nodes", CPUS),
        (TWO, {"cpus_per_task": 4}, "cpus", "the step requests 16 CPUs, but job 7 has 8 on its 2 nodes", CPUS),
        (TWO, {"tasks": 5, "nodes_min": 1}, "cpus", "5 CPUs, but job 7 has 4 on 1 node", "use more nodes of the job, "),
        (
            TWO,
            {"tasks": 1, "cpus_per_task": 5},
            "cpus",
            "the step requests 5 CPUs, but job 7 has 4 on 1 node",
            "request more",
        ),
        (
            TWO,
            {"tasks": 3, "cpus_per_task": 2.5},
            "cpus",
            "the step requests 3 tasks with 2.5 CPUs each, but job 7 has room for 2 on its 2 nodes",
            CPUS,
        ),
        (
            TWO,
            {"distribution": "arbitrary", "hosts": ("n1",) * 5},
            "cpus",
            "the step requests 5 CPUs, but job 7 has 4 on 1 node",
            CPUS,
        ),
        (
            TWO,
            {"distribution": "arbitrary", "hosts": (*("n1",) * 5, "n2")},
            "cpus",
            "the host file has more tasks with 1 CPUs on a node than job 7 has room for there",
            CPUS,
        ),
        (TWO, {"nodes_min": 3}, "nodes", "the step requests 3 nodes, but job 7 has 2 for it", "scontrol show job 7"),
        (TWO, {"nodelist": ("n9",)}, "nodes", "node n9 does not belong to job 7", "scontrol show job 7"),
        (TWO, {"exclude": ("n2", "n9")}, "nodes", "node n9 does not belong to job 7", "scontrol show job 7"),
        (TWO, {"exclude": ("n1", "n2")}, "nodes", "the step excludes all nodes of job 7", "scontrol show job 7"),
        (TWO, {"nodelist": ("n1",), "exclude": ("n1",)}, "nodes", "asks for node n1 and excludes it", "once"),
        (TWO, {"relative": 2}, "nodes", "the step begins with node 2, but job 7 has 2 nodes", "scontrol show job 7"),
        (TWO, {"relative": 1, "nodes_min": 2}, "nodes", "requests 2 nodes, but job 7 has 1 for it", "scontrol"),
        (
            TWO,
            {"tasks": 5, "ntasks_per_node": 2},
            "nodes",
            "the step requests 5 tasks, but 2 nodes of job 7 with at most 2 each have room for 4",
            "fewer tasks",
        ),
        (
            TWO,
            {"distribution": "arbitrary", "hosts": ("n1",), "tasks": 2},
            "nodes",
            "the step requests 2 tasks, but its host file names nodes for 1",
            "",
        ),
        (TWO, {"distribution": "arbitrary", "hosts": ("n9",)}, "nodes", "node n9 does not belong to job 7", ""),
        (
            TWO,
            {"distribution": "arbitrary", "hosts": ("n1",), "exclude": ("n1",)},
            "nodes",
            "the host file names a node that the step excludes",
            "",
        ),
        (ONE, {"gpus": 3}, "gpus", "the step requests 3 GPUs, but job 7 has 2", "request more"),
        (TWO, {"gpus": 5}, "gpus", "the step requests 5 GPUs, but job 7 has 4 on its 2 nodes", "request more"),
        (TWO, {"gpus": 3, "nodes_min": 1}, "gpus", "requests 3 GPUs, but job 7 has 2 on 1 node", "request more"),
        (UNEVEN, {"gpus_per_node": 3}, "gpus", "requests 3 GPUs on each node, but job 7 has 2 on n2", "request more"),
        (TWO, {"gpus": 1, "nodes_min": 2}, "gpus", "1 GPU on 2 nodes of job 7", "use as many nodes as GPUs: -N 1"),
        (
            held((4, 3), (4, 3)),
            {"gpus_per_task": 2, "tasks": 3},
            "gpus",
            "the step requests 3 tasks with 2 GPUs each, but job 7 has room for 2 on its 2 nodes",
            "request more",
        ),
        (TWO, {"gpus_per_task": 3, "tasks": 1}, "gpus", "requests 3 GPUs, but job 7 has 2 on 1 node", "request more"),
    ],
)
def test_what_the_job_can_never_give(nodes: Held, asked: dict[str, Any], about: str, text: str, hint: str) -> None:
    with pytest.raises(Refused) as refused:
        laid_out(nodes, **asked)
    assert (refused.value.about, text in refused.value.message) == (about, True), refused.value.message
    assert hint in refused.value.hint


def test_the_hint_of_too_few_cpus_works() -> None:
    assert tasks(laid_out(held((1, 1), (1, 1)), tasks=4, overcommits=True)) == {"n1": "0,1", "n2": "2,3"}
    assert tasks(laid_out(TWO, tasks=5)) == {"n1": "0,1,2", "n2": "3,4"}


def step(number: int, parts: tuple[StepPart, ...] | None, **asked: Any) -> JobStep:
    """An open step that got these parts."""
    assert parts is not None
    request = StepRequest(**asked)
    return JobStep(
        job_id=7,
        run=1,
        number=number,
        name="a",
        command="a",
        node="n1",
        start_at=0.0,
        tasks=sum(len(part.tasks) for part in parts),
        cpus=sum(part.cpus for part in parts),
        gpus=tuple(share for part in parts for share in part.gpus),
        is_exclusive=request.is_exclusive,
        has_own_gpus=request.has_own_gpus,
        parts=parts,
    )


def begun(nodes: Held, *requests: dict[str, Any]) -> list[JobStep]:
    """Steps that began one after the other."""
    found: list[JobStep] = []
    for asked in requests:
        found.append(step(len(found), laid_out(nodes, found, **asked), **asked))
    return found


def test_exact_steps_fill_one_node_after_the_other_and_then_wait() -> None:
    asked = {"tasks": 2, "nodes_min": 1, "is_exact": True}
    steps = begun(TWO, asked, asked, asked, asked)
    assert [one.nodes for one in steps] == [("n1",), ("n2",), ("n1",), ("n2",)]
    assert laid_out(TWO, steps, **asked) is None
    assert laid_out(TWO, steps, **asked, overlaps=True) is not None


def test_an_exact_step_takes_the_cpus_that_others_leave() -> None:
    steps = begun(TWO, {"tasks": 3, "nodes_min": 1, "is_exact": True})
    assert tasks(laid_out(TWO, steps, tasks=4, is_exact=True)) == {"n1": "0", "n2": "1,2,3"}
    assert laid_out(TWO, steps, tasks=6, is_exact=True) is None


def test_a_step_on_one_node_prefers_one_that_no_other_step_uses() -> None:
    one = {"tasks": 1}
    assert [part.nodes for part in begun(THREE, one, one, one, one)] == [("n1",), ("n2",), ("n3",), ("n1",)]
    steps = begun(THREE, one)
    assert tasks(laid_out(THREE, steps, tasks=1, overlaps=True)) == {"n1": "0"}


def test_gpus_of_other_steps_are_waited_for() -> None:
    steps = begun(TWO, {"gpus_per_node": 1}, {"gpus": 1, "tasks": 1})
    assert [gpus(one.parts) for one in steps] == [{"n1": [0], "n2": [0]}, {"n1": [1]}]
    assert laid_out(TWO, steps, gpus_per_node=1) is None
    assert gpus(laid_out(TWO, steps, gpus=1)) == {"n2": [1]}
    assert gpus(laid_out(TWO, steps, gpus_per_node=1, overlaps=True)) == {"n1": [0], "n2": [1]}
    assert gpus(laid_out(TWO, steps)) == {"n1": [0, 1], "n2": [0, 1]}


def test_cpus_are_the_nodes_unless_the_step_is_exact() -> None:
    (first, second) = laid_out(UNEVEN) or ()
    assert (first.cpus, second.cpus) == (4.0, 2.0)
    (first, second) = laid_out(UNEVEN, is_exact=True, tasks=3, cpus_per_task=2) or ()
    assert (first.cpus, second.cpus) == (4.0, 2.0)
    (first,) = laid_out(UNEVEN, is_exact=True, tasks=9, nodes_min=1, overcommits=True) or ()
    assert first.cpus == 4.0


def test_a_job_with_part_of_a_core_runs_a_task() -> None:
    assert tasks(laid_out([("n1", 0.5, ())], tasks=1)) == {"n1": "0"}


def test_spreading_evens_out_what_is_there() -> None:
    assert spread(7, [9, 1, 9]) == [3, 1, 3]
    assert level(3, [2, 0, 1], [4, 4, 4]) == [0, 2, 1]
    assert spread(65_000, [65_533, 65_533, 3]) == [32_499, 32_498, 3]
    assert numbered([2, 0, 1], 1) == [[0, 2], [], [1]]


def test_a_thousand_nodes_are_looked_through_a_few_times_only() -> None:
    nodes = held(*[(8, 4)] * 1000)
    began = time.process_time()
    with pytest.raises(Refused, match="requests 4995 GPUs, but job 7 has 3996 on 999 nodes"):
        laid_out(nodes, ntasks=1000, tasks=999, gpus_per_task=5)
    # It happens in a tick; trying every number of nodes took seconds.
    assert time.process_time() - began < 1.0


def test_no_node_of_a_step_with_gpus_of_its_own_is_without_one() -> None:
    nodes = held((4, 2), (4, 0), (4, 1))
    assert gpus(laid_out(nodes, gpus=2, tasks=2)) == {"n1": [0], "n3": [0]}
    assert gpus(laid_out(nodes, gpus=3, tasks=3)) == {"n1": [0, 1], "n3": [0]}
