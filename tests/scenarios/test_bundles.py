"""Jobs laid out over nodes by what is free: on as few nodes as possible, as evenly as possible, from plan to launch."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab
from scenarios.scenario import FIRST_COME, Outcome, Scenario, running, settings, wants

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api.resources import read_request
from gpusched.errors import Refused
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Job, Request, Run
from gpusched.model.planner_settings import STRATEGIES
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler.whatif import alternatives
from gpusched.testing import gpu_view, launch, node

FOREVER = SimulatedOutcome(runs_s=1e9)


def asked(**wanted: Any) -> Request:
    """The request of a submission with these keys, by their JSON names."""
    return read_request({"cpus": 0.0, **wanted}, Settings())[0]


def waits(job_id: int, limit: float | None = None, **wanted: Any) -> Job:
    made = wants(job_id, limit=limit)
    return replace(made, spec=replace(made.spec, request=asked(**wanted)))


def places(outcome: Outcome, job_id: int = 1) -> dict[str, int]:
    """Node -> number of GPUs, or of cores for a job without any, in the order of the ranks."""
    for start in outcome.plan.starts:
        if start.job_id == job_id:
            pieces = (start.placement, *start.placement.others)
            return {one.node: len(one.gpus) or int(one.cpus) for one in pieces}
    return {}


def taken(free: dict[str, int], gpus: int = 4) -> list[Any]:
    """Runs that leave so many of each node's GPUs free."""
    return [
        running(100 + number, f"{name}:{','.join(map(str, range(gpus - left)))}", ends_in=600, uid=9, user="bob")
        for number, (name, left) in enumerate(free.items())
        if left < gpus
    ]


ONE_EACH = {"n1": 1, "n2": 1, "n3": 1, "n4": 1}
CORES = {"n1": 4, "n2": 4, "n3": 8}
TWO_AND_FOUR = {"n1": 2, "n2": 4}
TWO_OF_THREE = [gpu_view(0, "n1", name="NVIDIA H100"), gpu_view(1, "n1"), gpu_view(2, "n1")]
PAIRS = [gpu_view(index, "n1", link_group=index // 2) for index in range(4)]


# --- where it goes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        # A range: on one node if it can be, otherwise on more.
        ({"n1": 4, "n2": 4}, {"nodes": 1, "nodes_max": 2, "gpus": 4}, {"n1": 4}),
        ({"n1": 2, "n2": 4}, {"nodes": 1, "nodes_max": 2, "gpus": 4}, {"n2": 4}),
        ({"n1": 2, "n2": 2}, {"nodes": 1, "nodes_max": 2, "gpus": 4}, {"n1": 2, "n2": 2}),
        ({"n1": 1, "n2": 3}, {"nodes": 1, "nodes_max": 2, "gpus": 4}, {"n1": 1, "n2": 3}),
        ({"n1": 4, "n2": 4}, {"nodes": 1, "nodes_max": 2, "gpus": 8}, {"n1": 4, "n2": 4}),
        ({"n1": 4, "n2": 3}, {"nodes": 1, "nodes_max": 2, "gpus": 8}, {}),
        (ONE_EACH, {"nodes": 1, "nodes_max": 4, "gpus": 4}, ONE_EACH),
        (ONE_EACH, {"nodes": 1, "nodes_max": 3, "gpus": 4}, {}),
        ({"n1": 2, "n2": 1, "n3": 3, "n4": 1}, {"nodes": 1, "nodes_max": 4, "gpus": 5}, {"n1": 2, "n3": 3}),
        ({"n1": 4, "n2": 4, "n3": 4}, {"nodes": 2, "nodes_max": 3, "gpus": 4}, {"n1": 2, "n2": 2}),
        # A total over a fixed number of nodes: even parts if it can be.
        ({"n1": 4, "n2": 2}, {"nodes": 2, "gpus": 6}, {"n1": 4, "n2": 2}),
        ({"n1": 4, "n2": 4}, {"nodes": 2, "gpus": 6}, {"n1": 3, "n2": 3}),
        ({"n1": 4, "n2": 4}, {"nodes": 2, "gpus": 7}, {"n1": 4, "n2": 3}),
        ({"n1": 3, "n2": 4}, {"nodes": 2, "gpus": 7}, {"n1": 3, "n2": 4}),
        ({"n1": 4, "n2": 1}, {"nodes": 2, "gpus": 6}, {}),
        ({"n1": 4, "n2": 1, "n3": 1}, {"nodes": 3, "gpus": 6}, {"n1": 4, "n2": 1, "n3": 1}),
        ({"n1": 4, "n2": 4, "n3": 1}, {"nodes": 3, "gpus": 6}, {"n1": 3, "n2": 2, "n3": 1}),
        # GPUs per node are what each node gives, and never any other number.
        ({"n1": 4, "n2": 2}, {"nodes": 2, "gpus_per_node": 3}, {}),
        ({"n1": 4, "n2": 4}, {"nodes": 2, "gpus_per_node": 3}, {"n1": 3, "n2": 3}),
        # Tasks keep their GPUs together.
        ({"n1": 3, "n2": 3}, {"nodes": 1, "nodes_max": 2, "ntasks": 2, "gpus_per_task": 2}, {"n1": 2, "n2": 2}),
        ({"n1": 3, "n2": 1}, {"nodes": 1, "nodes_max": 2, "ntasks": 2, "gpus_per_task": 2}, {}),
        ({"n1": 4, "n2": 2}, {"nodes": 2, "ntasks": 3, "gpus_per_task": 2}, {"n1": 4, "n2": 2}),
        ({"n1": 4, "n2": 2}, {"nodes": 2, "ntasks": 6, "gpus": 6}, {"n1": 4, "n2": 2}),
        ({"n1": 4, "n2": 2}, {"nodes": 2, "ntasks": 12, "ntasks_per_gpu": 2}, {"n1": 4, "n2": 2}),
        ({"n1": 4, "n2": 2}, {"nodes": 2, "ntasks": 6, "ntasks_per_node": 3, "gpus": 6}, {}),
        ({"n1": 4, "n2": 2}, {"nodes": 2, "ntasks": 2, "gpus": 6}, {"n1": 4, "n2": 2}),
    ],
)  # fmt: skip
def test_gpus_are_laid_out_over_as_few_nodes_as_possible(
    free: dict[str, int], wanted: dict[str, Any], expected: dict[str, int]
) -> None:
    machines = [node(name, gpus=4) for name in free]
    assert places(Scenario(machines, [waits(1, **wanted)], taken(free)).outcome()) == expected


@pytest.mark.parametrize(
    ("cores", "wanted", "expected"),
    [
        (CORES, {"nodes": 1, "nodes_max": 2, "ntasks": 8, "cpus": 1.0}, {"n3": 8}),
        (CORES, {"nodes": 1, "nodes_max": 2, "ntasks": 6, "cpus": 2.0}, {"n1": 4, "n3": 8}),
        (CORES, {"nodes": 1, "nodes_max": 2, "ntasks": 8, "cpus": 2.0}, {}),
        (CORES, {"nodes": 1, "nodes_max": 3, "ntasks": 8, "cpus": 2.0}, CORES),
        ({"n1": 5, "n2": 5}, {"nodes": 1, "nodes_max": 2, "ntasks": 3, "cpus": 3.0}, {}),
        ({"n1": 5, "n2": 6}, {"nodes": 1, "nodes_max": 2, "ntasks": 3, "cpus": 3.0}, {"n1": 3, "n2": 6}),
    ],
)  # fmt: skip
def test_tasks_are_laid_out_over_as_few_nodes_as_possible(
    cores: dict[str, int], wanted: dict[str, Any], expected: dict[str, int]
) -> None:
    machines = [node(name, cpus=float(count)) for name, count in cores.items()]
    assert places(Scenario(machines, [waits(1, **wanted)]).outcome()) == expected


@pytest.mark.parametrize(
    ("machines", "wanted", "expected"),
    [
        # What a node books besides GPUs follows them, or is the same on each.
        ([node("n1", gpus=4, cpus=4.0), node("n2", gpus=4, cpus=8.0)], {"cpus_per_gpu": 2, "cpus": None}, TWO_AND_FOUR),
        ([node("n1", gpus=4, cpus=2.0), node("n2", gpus=4, cpus=8.0)], {"cpus": 4.0}, {}),
        ([node("n1", gpus=4, mem_mib=2048), node("n2", gpus=4)], {"mem_per_gpu_mib": 1024}, TWO_AND_FOUR),
        ([node("n1", gpus=4, mem_mib=2048), node("n2", gpus=4)], {"mem_mib": 3000}, {}),
        # Types, labels, links.
        ([node("n1", TWO_OF_THREE), node("n2", gpus=4)], {"gpu_type": "a100"}, TWO_AND_FOUR),
        ([node("n1", gpus=2), node("n2", gpus=4), node("n3", gpus=4, labels=("old",))],
         {"constraint": "!old"}, TWO_AND_FOUR),
        ([node("n1", gpus=4), node("n2", gpus=3), node("n3", gpus=3)], {"exclude": ["n1"]}, {"n2": 3, "n3": 3}),
        ([node("n1", gpus=4), node("n2", gpus=2, labels=("near",)), node("n3", gpus=4, labels=("near",))],
         {"prefer": "near"}, {"n2": 2, "n3": 4}),
        ([node("n1", PAIRS), node("n2", [gpu_view(at, "n2", link_group=0) for at in range(4)])],
         {"gpus_linked": True}, TWO_AND_FOUR),
    ],
)  # fmt: skip
def test_a_node_gives_what_its_other_resources_allow(
    machines: list[Any], wanted: dict[str, Any], expected: dict[str, int]
) -> None:
    wanted = {name: value for name, value in {"cpus": 0.0, **wanted}.items() if value is not None}
    request = read_request({"nodes": 1, "nodes_max": 2, "gpus": 6, **wanted}, Settings())[0]
    job = wants(1)
    assert places(Scenario(machines, [replace(job, spec=replace(job.spec, request=request))]).outcome()) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_finds_the_only_layout(strategy: str) -> None:
    machines = [node(name, gpus=4) for name in ("n1", "n2", "n3")]
    chosen = settings(placement={"strategy": strategy})
    free = {"n1": 1, "n2": 3, "n3": 2}
    outcome = Scenario(machines, [waits(1, nodes=1, nodes_max=3, gpus=6)], taken(free), chosen).outcome()
    assert places(outcome) == free


def test_slices_by_memory_are_laid_out_too() -> None:
    machines = [node(name, gpus=2) for name in ("n1", "n2")]
    outcome = Scenario(machines, [waits(1, nodes=1, nodes_max=2, gpus=3, vram_mib=4096)]).outcome()
    assert places(outcome) == {"n1": 2, "n2": 1}


# --- reservations, priority and what is said of it -----------------------------------------------------


def test_its_reservation_is_at_the_first_instant_at_which_any_layout_fits() -> None:
    held = [running(100, "n1:0,1", ends_in=300, uid=9), running(101, "n2:0,1,2", ends_in=900, uid=9)]
    machines = [node("n1", gpus=4), node("n2", gpus=4)]
    outcome = Scenario(machines, [waits(1, limit=600, nodes=1, nodes_max=2, gpus=5)], held).outcome()
    # In 300 s there are four and one; five on one node never, and three and two only in 900 s.
    assert outcome.reserved == {1: ("n1:0,1,2,3", 300.0)}
    (kept,) = outcome.plan.reservations
    assert [(piece.node, len(piece.gpus)) for piece in kept.placement.others] == [("n2", 1)]


@pytest.mark.parametrize(("limit", "starts"), [(200.0, True), (400.0, False)])
def test_no_later_job_delays_it_and_one_that_ends_in_time_passes(limit: float, starts: bool) -> None:
    held = [running(100, "n1:0,1", ends_in=300, uid=9), running(101, "n2:0,1,2", ends_in=900, uid=9)]
    machines = [node("n1", gpus=4), node("n2", gpus=4)]
    waiting = [waits(1, limit=600, nodes=1, nodes_max=2, gpus=5), wants(2, gpus=1, limit=limit, nodelist=("n2",))]
    assert (2 in Scenario(machines, waiting, held).outcome().starts) is starts


def test_it_starts_on_more_nodes_where_fewer_would_delay_a_reservation() -> None:
    held = [running(100, "n1:0", ends_in=300, uid=9), running(101, "n2:0,1", uid=9), running(102, "n3:0,1", uid=9)]
    machines = [node(name, gpus=4) for name in ("n1", "n2", "n3")]
    waiting = [wants(1, gpus=4, limit=600), waits(2, limit=9000, nodes=1, nodes_max=3, gpus=3)]
    assert places(Scenario(machines, waiting, held).outcome(), 2) == {"n2": 2, "n3": 1}


@pytest.mark.parametrize(
    ("free", "wanted", "says"),
    [
        ({"n1": 4, "n2": 1}, {"nodes": 2, "gpus": 6},
         "needs 6 GPUs on 2 nodes, the most free on 2 nodes is 5 (of 8 in all)"),
        ({"n1": 1, "n2": 2}, {"nodes": 1, "nodes_max": 2, "gpus": 4},
         "needs 4 GPUs on 1 to 2 nodes, the most free on 2 nodes is 3 (of 8 in all)"),
        ({"n1": 0, "n2": 3}, {"nodes": 2, "gpus": 4}, "needs 4 GPUs on 2 nodes, 1 of 2 has 1 GPU free"),
        ({"n1": 0, "n2": 0}, {"nodes": 2, "gpus": 4}, "needs 4 GPUs on 2 nodes, none of 2 has 1 GPU free"),
    ],
)  # fmt: skip
def test_what_it_waits_for_is_the_most_over_nodes(free: dict[str, int], wanted: dict[str, Any], says: str) -> None:
    machines = [node(name, gpus=4) for name in free]
    outcome = Scenario(machines, [waits(1, **wanted)], taken(free)).outcome()
    assert outcome.text(1).split(";")[0] == says
    assert outcome.codes == {1: "Resources"}


@pytest.mark.parametrize(
    ("free", "wanted", "proposed"),
    [
        ({"n1": 2, "n2": 1, "n3": 1}, {"nodes": 1, "nodes_max": 2, "gpus": 4}, ["-N 1-3", "-g 3"]),
        ({"n1": 2, "n2": 2, "n3": 1}, {"nodes": 2, "gpus": 5}, ["-N 2-3", "-g 4"]),
        ({"n1": 2, "n2": 2}, {"nodes": 2, "gpus": 6}, ["-g 4"]),
        ({"n1": 2, "n2": 1}, {"nodes": 1, "nodes_max": 2, "ntasks": 2, "gpus_per_task": 2}, []),
    ],
)
def test_it_is_told_which_other_layout_would_start_now(
    free: dict[str, int], wanted: dict[str, Any], proposed: list[str]
) -> None:
    snapshot = Scenario([node(name, gpus=4) for name in free], [waits(1, **wanted)], taken(free)).snapshot()
    found = alternatives(snapshot, FIRST_COME, 1)
    assert [one.option for one in found] == proposed
    assert all(one.is_now for one in found)


# --- in the daemon --------------------------------------------------------------------------------------


@pytest.fixture
def lab() -> Lab:
    """Three nodes of two GPUs and eight cores."""
    return Lab(more_nodes=("n2", "n3"), outcome=FOREVER)


def submit(lab: Lab, **wanted: Any) -> int:
    """A job that starts a rank for each task that it asks for."""
    request, layout = read_request(wanted, lab.settings)
    return lab.submit(request=request, layout=layout, launch=launch("true", ranks=True))


def run_of(lab: Lab, job_id: int) -> Run:
    return lab.store.runs([job_id])[-1]


def environments(lab: Lab, run: Run) -> list[dict[str, str]]:
    """What the first process on each node of a run finds, by rank."""
    lab.tick(1)
    return [lab.engines[name]._runs[run.id].ticket.env for name in run.nodes]


def test_a_range_starts_on_one_node_or_on_more_by_what_is_free(lab: Lab) -> None:
    first = submit(lab, nodes=1, nodes_max=3, gpus=2)
    assert run_of(lab, first).nodes == ("n1",)
    submit(lab, gpus=1, nodelist=["n2"])
    submit(lab, gpus=1, nodelist=["n3"])
    second = submit(lab, nodes=1, nodes_max=3, gpus=2)
    assert [(part.node, len(part.gpus)) for part in run_of(lab, second).parts] == [("n2", 1), ("n3", 1)]
    third = submit(lab, nodes=1, nodes_max=3, gpus=2)
    assert lab.job(third).state is JobState.PENDING
    lab.ask(Cancel(ANN, Selection(ids=(first,))))
    for _ in range(3):
        lab.tick(1)
    assert run_of(lab, third).nodes == ("n1",)


def test_uneven_parts_are_told_to_each_node_as_slurm_does(lab: Lab) -> None:
    submit(lab, gpus=1, nodelist=["n2"])
    run = run_of(lab, submit(lab, nodes=2, gpus=5, ntasks=5, cpus=1.0, nodes_max=3))
    names = "SLURM_JOB_NUM_NODES SLURM_JOB_CPUS_PER_NODE SLURM_TASKS_PER_NODE SLURM_GPUS SLURM_NTASKS".split()
    found = environments(lab, run)
    assert [[env[name] for name in names] for env in found] == [["3", "2,1,2", "2,1,2", "5", "5"]] * 3
    each = "SLURM_NODEID SLURM_CPUS_ON_NODE SLURM_GPUS_ON_NODE SLURM_GTIDS LOCAL_WORLD_SIZE OMP_NUM_THREADS".split()
    assert [[env[name] for name in each] for env in found] == [
        ["0", "2", "2", "0,1", "2", "1"],
        ["1", "1", "1", "2", "1", "1"],
        ["2", "2", "2", "3,4", "2", "1"],
    ]
    assert not any("SLURM_GPUS_PER_NODE" in env for env in found)
    assert (len(run.gpus), run.cpus) == (5, 5)


@pytest.mark.parametrize(
    ("asked", "total", "each"),
    [({"nodes": 2, "gpus_per_node": 2}, None, "2"), ({"nodes": 2, "gpus": 4}, "4", None), ({"gpus": 2}, "2", "2")],
)
def test_a_total_of_gpus_is_told_where_one_was_asked_for(
    lab: Lab, asked: dict[str, Any], total: str | None, each: str | None
) -> None:
    found = environments(lab, run_of(lab, submit(lab, **asked)))
    assert {(env.get("SLURM_GPUS"), env.get("SLURM_GPUS_PER_NODE")) for env in found} == {(total, each)}


def test_each_rank_has_its_gpus_on_its_node(lab: Lab) -> None:
    submit(lab, gpus=1, nodelist=["n1"])
    run = run_of(lab, submit(lab, nodes=1, nodes_max=2, ntasks=3, gpus_per_task=1))
    lab.tick(1)
    ranks = {name: lab.engines[name]._runs[run.id].ticket.ranks for name in run.nodes}
    seen = {name: [(one.number, one.env["CUDA_VISIBLE_DEVICES"]) for one in some] for name, some in ranks.items()}
    assert seen == {"n2": [(0, "0"), (1, "1")], "n3": [(2, "0")]}


@pytest.mark.parametrize(
    ("wanted", "says", "hint"),
    [
        ({"nodes": 1, "nodes_max": 2, "gpus": 8},
         "asked for 8 GPUs on 1 to 2 nodes; the largest that fits is -N 2 -g 4",
         "ask for at most that: -N 2 -g 4"),
        ({"nodes": 1, "nodes_max": 2, "gpus": 6},
         "asked for 6 GPUs on 1 to 2 nodes; the largest that fits is -N 2 -g 4",
         "ask for at most that: -N 2 -g 4, or for more nodes: -N 3 -g 6"),
        ({"nodes": 3, "gpus": 7},
         "asked for 7 GPUs on 3 nodes; the largest that fits is -N 3 -g 6",
         "ask for at most that: -N 3 -g 6"),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 20},
         "asked for 20 CPUs on 1 to 2 nodes; the largest that fits is -N 2 -n 16",
         "ask for at most that: -N 2 -n 16, or for more nodes: -N 3 -n 20"),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 4, "gpus_per_task": 2, "gpu_type": "a100"},
         "asked for 8 a100 GPUs on 1 to 2 nodes; the largest that fits is -N 2 -n 2 -g a100:4",
         "ask for at most that: -N 2 -n 2 -g a100:4, or for more nodes: -N 4 -n 4 -g a100:8"),
        ({"nodes": 2, "gpus": 3, "gpu_type": "h100"},
         "asked for a GPU of type 'h100'; the types here are A100",
         "a part of the name is enough, in any case: see ginfo"),
        ({"nodes": 1, "nodes_max": 2, "ntasks": 4, "cpus": 9.0},
         "asked for 9 CPUs; the most any node can give is 8",
         "ask for fewer tasks (-n), or for fewer cores for each of them (-c)"),
        ({"nodes": 4, "gpus": 8}, "asked for 4 nodes; this scheduler has 3", "ask for at most that many: -N 3"),
        ({"nodes": 2, "nodes_max": 3, "gpus": 6, "exclude": ["n2", "n3"]},
         "asked for 2 nodes not on nodes n2 and n3; there is 1", "ask for at most that many: -N 1"),
    ],
)  # fmt: skip
def test_what_fits_on_no_number_of_nodes_is_refused_with_the_most_that_does(
    lab: Lab, wanted: dict[str, Any], says: str, hint: str
) -> None:
    if wanted.get("gpus_per_task"):
        lab = Lab(more_nodes=("n2", "n3", "n4"), outcome=FOREVER)
    with pytest.raises(Refused) as raised:
        submit(lab, **wanted)
    assert (str(raised.value), raised.value.hint) == (says, hint)


def test_it_counts_with_all_its_parts(lab: Lab) -> None:
    job = submit(lab, nodes=2, gpus=3)
    held = [one for one in lab.scheduler.state.holds.values() if one.job_id == job]
    assert [(one.node, len(one.gpus), one.cpus) for one in held] == [("n1", 2, 1.0), ("n2", 1, 1.0)]
    assert lab.job(job).spec.request.total_gpus == 3
