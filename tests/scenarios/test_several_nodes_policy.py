"""Where jobs go on several nodes, from the submission on: tables of ways to say so; drains; reservations."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import GpuschedError, Refused
from gpusched.model.cluster import GpuReading
from gpusched.model.commands import Command, Drain, Requeue, Reserve, Update
from gpusched.model.job import Request, Run
from gpusched.model.planner_settings import PlacementSettings, PrioritySettings
from gpusched.model.settings import LifeSettings, NodeSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace

FOREVER = SimulatedOutcome(runs_s=1e9)
LABELS = {"n2": ("nvlink", "old"), "n3": ("nvlink",), "n4": ()}


def make_lab(strategy: str = "pack", **sections: Any) -> Lab:
    """Four nodes of two GPUs."""
    placement = PlacementSettings(strategy=strategy)
    return Lab(more_nodes=("n2", "n3", "n4"), labels=LABELS, outcome=FOREVER, placement=placement, **sections)


@pytest.fixture
def lab() -> Lab:
    return make_lab()


def run_of(lab: Lab, job_id: int) -> Run:
    return lab.store.runs([job_id])[-1]


def nodes_of(lab: Lab, job_id: int) -> list[str]:
    """Nodes on which a job runs; none while it is pending."""
    return list(run_of(lab, job_id).nodes) if lab.job(job_id).state is JobState.RUNNING else []


def place_all(lab: Lab, *requests: Request) -> list[list[str]]:
    return [nodes_of(lab, job) for job in [lab.submit(request=one) for one in requests]]


PLACED = {
    "a node list names the only nodes": ([Request(1, nodelist=("n3",))], [["n3"]]),
    "a node list of several leaves a choice": ([Request(2, nodelist=("n3", "n4"))] * 2, [["n3"], ["n4"]]),
    "a full node list waits beside free nodes": ([Request(2, nodelist=("n3",))] * 2, [["n3"], []]),
    "an excluded node is left out": ([Request(1, exclude=("n1", "n2"))], [["n3"]]),
    "a required label": ([Request(2, constraint="nvlink")] * 3, [["n2"], ["n3"], []]),
    "a label that must be missing": ([Request(2, constraint="nvlink&!old")] * 2, [["n3"], []]),
    "a preferred label comes first, and others after": ([Request(2, prefer="nvlink")] * 3, [["n2"], ["n3"], ["n1"]]),
    "a gang is on nodes of its own": ([Request(1, nodes=3)], [["n1", "n2", "n3"]]),
    "a gang with a required label": ([Request(1, nodes=2, constraint="nvlink")], [["n2", "n3"]]),
    "a gang takes what it prefers first, and is in order of names": (
        [Request(2, nodes=3, prefer="nvlink")],
        [["n1", "n2", "n3"]],
    ),
    "a gang waits as a whole": ([Request(2, nodelist=("n4",)), Request(2, nodes=4)], [["n4"], []]),
    "an exclusive node": ([Request(0, nodelist=("n1",), is_exclusive=True), Request(1)], [["n1"], ["n2"]]),
}


@pytest.mark.parametrize(("requests", "expected"), PLACED.values(), ids=PLACED)
def test_requests_choose_nodes(requests: list[Request], expected: list[list[str]]) -> None:
    assert place_all(make_lab(), *requests) == expected


def refused(lab: Lab, command: Command) -> str:
    (answer,) = lab.ask(command)
    assert isinstance(answer, Refused), answer
    assert answer.about == "node"
    return str(answer)


@pytest.mark.parametrize("names", [("n9",), ("n2", "n9")])
def test_a_node_that_does_not_exist_cannot_be_left_out(lab: Lab, names: tuple[str, ...]) -> None:
    text = "asked to leave out node n9; the nodes here are n1, n2, n3 and n4"
    assert refused(lab, lab.submission(request=Request(1, exclude=names))) == text
    job = lab.submit(request=Request(1, exclude=("n1",)), hold=True)
    assert refused(lab, Update(ANN, (job,), {"exclude": names})) == text
    assert lab.job(job).spec.request.exclude == ("n1",)


def test_a_node_that_has_left_the_cluster_stays_left_out(lab: Lab) -> None:
    job = lab.submit(request=Request(1, exclude=("n4",)), hold=True)
    lab.more_nodes = ("n2", "n3")
    lab.restart()
    (answer,) = lab.ask(Update(ANN, (job,), {"cpus": 2.0}))
    assert "changed" in answer
    assert lab.job(job).spec.request.exclude == ("n4",)
    assert refused(lab, lab.submission(request=Request(1, exclude=("n4",)))).startswith("asked to leave out node n4")


STRATEGIES = {
    "pack fills a node before it opens another": ("pack", [["n1"], ["n1"], ["n2"]]),
    "spread opens one node after the other": ("spread", [["n1"], ["n2"], ["n3"]]),
    "first takes them in order": ("first", [["n1"], ["n1"], ["n2"]]),
}


@pytest.mark.parametrize(("strategy", "expected"), STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_choose_among_nodes(strategy: str, expected: list[list[str]]) -> None:
    assert place_all(make_lab(strategy), *[Request(1)] * 3) == expected


def test_a_job_for_one_node_is_never_spread_over_two(lab: Lab) -> None:
    for name in ("n1", "n2", "n3", "n4"):
        lab.submit(request=Request(1, nodelist=(name,)))
    assert place_all(lab, Request(2), Request(1, nodes=2)) == [[], ["n1", "n2"]]


def test_licenses_are_counted_over_all_nodes() -> None:
    lab = make_lab(license={"matlab": 2})
    wants = {name: Request(0, nodelist=(name,), licenses=(("matlab", 1),)) for name in ("n1", "n2", "n3")}
    assert place_all(lab, *wants.values()) == [["n1"], ["n2"], []]


def test_a_drained_node_gets_nothing_until_it_is_undrained(lab: Lab) -> None:
    lab.ask(Drain(ROOT, ("n2",), "fan"))
    job = lab.submit(request=Request(1, nodelist=("n2",)))
    assert nodes_of(lab, job) == []
    (reason,) = lab.scheduler.plan.reasons.values()
    assert reason.text == "needs 1 GPU; not available: node n2 is drained: fan"
    lab.ask(Drain(ROOT, ("n2",), None))
    assert nodes_of(lab, job) == ["n2"]


def test_a_gpu_is_drained_by_node_and_index(lab: Lab) -> None:
    (answer,) = lab.ask(Drain(ROOT, ("n2:1",), "hot"))
    assert answer["labels"] == {"GPU-n2-1": "GPU n2:1"}
    assert place_all(lab, Request(2, nodelist=("n2",)), Request(1, nodelist=("n2",))) == [[], ["n2"]]


def test_an_index_alone_is_refused_with_the_gpus_that_it_may_mean(lab: Lab) -> None:
    (answer,) = lab.ask(Drain(ROOT, ("1",), "hot"))
    assert isinstance(answer, GpuschedError)
    assert str(answer) == "'1' is more than one GPU here"
    assert answer.hint == "name one of them: n1:1, n2:1, n3:1 and 1 more"


# --- reservations -----------------------------------------------------------------------------------


def reserve(lab: Lab, **fields: Any) -> Any:
    command = Reserve(ROOT, "talk", start_at=lab.clock.now() + 1000, duration_s=3600, **fields)
    (answer,) = lab.ask(command)
    return answer


def held(lab: Lab, **fields: Any) -> dict[str, tuple[int, bool]]:
    """Number of reserved GPUs by node, and whether the whole node is reserved."""
    answer = reserve(lab, **fields)
    assert not isinstance(answer, GpuschedError), answer
    return {place.node: (len(place.gpus), place.is_exclusive) for place in answer["entry"].held}


RESERVED = {
    "so many GPUs of one node": ({"gpus": 2, "users": ("ann",)}, {"n1": (2, False)}),
    "so many GPUs of each named node": (
        {"gpus": 1, "nodelist": ("n3", "n2"), "users": ("ann",)},
        {"n2": (1, False), "n3": (1, False)},
    ),
    "a card by node and index": ({"cards": ("n4:1",), "users": ("ann",)}, {"n4": (1, False)}),
    "whole nodes": (
        {"is_node": True, "nodelist": ("n2", "n4"), "users": ("ann",)},
        {"n2": (2, True), "n4": (2, True)},
    ),
    "maintenance of named nodes": ({"is_maintenance": True, "nodelist": ("n3",)}, {"n3": (2, True)}),
}


@pytest.mark.parametrize(("fields", "expected"), RESERVED.values(), ids=RESERVED)
def test_reservations_are_made_on_nodes(
    lab: Lab, fields: dict[str, Any], expected: dict[str, tuple[int, bool]]
) -> None:
    assert held(lab, **fields) == expected


REFUSED = {
    "a whole node without a name": ({"is_node": True, "users": ("ann",)}, "there are 4 nodes, and none is named"),
    "maintenance without a name": ({"is_maintenance": True}, "there are 4 nodes, and none is named"),
    "an unknown node": (
        {"gpus": 1, "nodelist": ("n2", "n9"), "users": ("ann",)},
        "asked to reserve node n9; the nodes here are n1, n2, n3 and 1 more",
    ),
    "more GPUs than a node has": (
        {"gpus": 3, "nodelist": ("n2",), "users": ("ann",)},
        "asked to reserve 3 GPUs; there are 2 on node n2",
    ),
    "cards beside a node list": (
        {"cards": ("n2:1",), "nodelist": ("n2",), "users": ("ann",)},
        "--gpu names the node of each card already",
    ),
    "cards of two nodes": ({"cards": ("n2:1", "n3:1"), "users": ("ann",)}, "the cards are on different nodes"),
}


@pytest.mark.parametrize(("fields", "text"), REFUSED.values(), ids=REFUSED)
def test_reservations_that_cannot_be_made_are_refused(lab: Lab, fields: dict[str, Any], text: str) -> None:
    answer = reserve(lab, **fields)
    assert isinstance(answer, GpuschedError)
    assert str(answer) == text
    assert answer.hint


def test_maintenance_of_one_node_leaves_the_others_alone(lab: Lab) -> None:
    reserve(lab, is_maintenance=True, nodelist=("n1", "n2"))
    long = lab.submit(request=Request(2), time_limit_s=7200)
    short = lab.submit(request=Request(2, nodelist=("n1",)), time_limit_s=600)
    tied = lab.submit(request=Request(2, nodelist=("n2",)), time_limit_s=7200)
    assert [nodes_of(lab, job) for job in (long, short, tied)] == [["n3"], ["n1"], []]


def test_a_gang_runs_in_a_reservation_of_several_nodes(lab: Lab) -> None:
    reserve(lab, gpus=1, nodelist=("n2", "n4"), users=("ann",))
    inside = lab.submit(request=Request(1, nodes=2), reservation="talk", time_limit_s=600)
    assert nodes_of(lab, inside) == []
    lab.tick(1001)
    assert nodes_of(lab, inside) == ["n2", "n4"]


# --- what each node says of itself ------------------------------------------------------------------


def test_custom_resources_are_those_of_each_node() -> None:
    settings = NodeSettings(resources={"scratch": 2})
    lab = make_lab(node_settings={"n3": settings})
    wants = Request(0, resources=(("scratch", 1),))
    assert place_all(lab, wants, wants, wants) == [["n3"], ["n3"], []]


# --- readings of many nodes ---------------------------------------------------------------------------


def test_samples_of_all_nodes_follow_each_reading(lab: Lab) -> None:
    cluster = lab.scheduler.cluster
    names = {f"GPU-{node}-{index}" for node in ("n2", "n3", "n4") for index in (0, 1)} | {"GPU-0", "GPU-1"}
    assert cluster.samples().keys() == names
    assert [cluster.having(uuid).name for uuid in ("GPU-n3-1", "GPU-1", "GPU-unknown")] == ["n3", "n1", "n1"]
    node = cluster["n3"]
    assert node.reading is not None
    (first, second), at = node.reading.gpus, lab.clock.now()
    busy = replace(first, utilisation=0.75)
    lab.scheduler.observe_gpus(GpuReading(at, "simulated", (busy, second)), node)
    assert cluster.samples()["GPU-n3-0"].utilisation == 0.75
    lab.scheduler.observe_gpus(GpuReading(at, "simulated", (), "driver broken"), node)
    assert cluster.samples().keys() == {name for name in names if "n3" not in name}
    lab.scheduler.observe_gpus(GpuReading(at, "simulated", (first, second)), node)
    assert cluster.samples().keys() == names


def test_a_gang_is_measured_on_each_of_its_nodes(lab: Lab) -> None:
    """By the readings of one node after the other, each of which looks at the runs of that node."""
    job = lab.submit(request=Request(2, nodes=2))
    handle = run_of(lab, job).id
    for _ in range(3):
        lab.tick(1)
    meters = {node.name: node.tracker.meter(handle) for node in lab.scheduler.cluster}
    assert [name for name, meter in meters.items() if meter is not None] == ["n1", "n2"]
    assert lab.scheduler.cluster.meter(lab.scheduler.state.open_runs[handle]) is not None


@pytest.mark.parametrize(("shared", "told"), [(None, 1), ("/shared", 0)])
def test_a_job_that_goes_on_elsewhere_is_told_where_its_checkpoints_are(shared: str | None, told: int) -> None:
    lab = Lab(more_nodes=("n2", "n3"), life=LifeSettings(checkpoint_dir=shared))
    lab.outcome = lab.outcome.__class__(runs_s=10_000)
    job = lab.submit(request=Request(gpus=1, nodelist=("n2", "n3")))
    lab.tick()
    first = lab.job(job).run
    (node,) = lab.scheduler.state.open_runs[f"{job}.{first}"].nodes
    other = "n3" if node == "n2" else "n2"
    for drained, expected in ((None, node), (node, other)):
        if drained is not None:
            lab.ask(Drain(ROOT, (drained,), "fan"))
        lab.ask(Requeue(ROOT, (job,)))
        for _ in range(5):
            lab.tick(60)
        run = lab.scheduler.state.open_runs[f"{job}.{lab.job(job).run}"]
        assert run.nodes == (expected,)
    texts = [event.text for event in lab.store.events(job) if "checkpoint folder" in event.text]
    text = f"run 2 was on {node}, and its checkpoint folder is there; [life] checkpoint_dir names a shared one"
    assert texts == [text] * told


@pytest.mark.parametrize("order", ["response_ratio", "multifactor", "fifo"])
def test_a_job_behind_another_waits_for_its_turn_though_the_first_in_line_cannot_start(order: str) -> None:
    lab = Lab(more_nodes=("n2",), outcome=FOREVER, priority=PrioritySettings(order=order))
    lab.ask(Drain(ROOT, ("n2",), "fan"))
    wanted = [Request(2), Request(1, nodelist=("n2",)), Request(1), Request(1, cpus=2)]
    running, hopeless, first, behind = [lab.submit(request=one, time_limit_s=3600) for one in wanted]
    lab.tick()
    assert lab.job(running).state is JobState.RUNNING
    reasons = [lab.scheduler.answers.reason_for(lab.job(one)) for one in (hopeless, first, behind)]
    assert [str(one.code) for one in reasons if one] == ["ReqNodeNotAvail", "Resources", "Priority"]
    assert reasons[2] is not None
    assert "which needs 1 GPU, goes first" in reasons[2].text
