"""Gangs: one run over several nodes, from the submission to the end, with simulated engines and GPUs on each node."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.errors import GpuschedError
from gpusched.model.commands import Cancel, Selection
from gpusched.model.execution import StopOrder
from gpusched.model.job import Request, RetryRule, Run
from gpusched.model.states import JobState, RunState
from gpusched.ports.tables import USAGE
from gpusched.testing import launch

FOREVER = SimulatedOutcome(runs_s=1e9)


def gang(nodes: int = 2, gpus: int = 1, **parts: Any) -> dict[str, Any]:
    return {"request": Request(nodes=nodes, gpus=gpus, cpus=2, mem_mib=1024), **parts}


def run_of(lab: Lab, job_id: int) -> Run:
    return lab.store.runs([job_id])[-1]


def tickets(lab: Lab, run: str) -> dict[str, Any]:
    """Ticket of each node that was asked to start the run: the others once the first has."""
    lab.tick(1)
    return {name: engine._runs[run].ticket for name, engine in lab.engines.items() if run in engine._runs}


@pytest.fixture
def lab() -> Lab:
    return Lab(more_nodes=("n2", "n3"), outcome=FOREVER)


def test_a_gang_starts_on_as_many_nodes_as_it_asks_for(lab: Lab) -> None:
    job = lab.submit(**gang(3))
    run = run_of(lab, job)
    assert run.nodes == ("n1", "n2", "n3")
    assert [part.cpus for part in run.parts] == [2, 2, 2]
    assert (len(run.gpus), run.cpus, run.mem_mib) == (3, 6, 3072)
    assert set(tickets(lab, run.id)) == {"n1", "n2", "n3"}
    lab.tick(1)
    assert lab.scheduler.state.open_runs[run.id].state is RunState.RUNNING


def test_a_gang_is_told_its_own_gpus_on_each_node(lab: Lab) -> None:
    lab.submit(request=Request(gpus=1, nodelist=("n2",)))
    job = lab.submit(**gang(2, 2))
    run = run_of(lab, job)
    assert run.nodes == ("n1", "n3")
    seen = {name: ticket.env["CUDA_VISIBLE_DEVICES"] for name, ticket in tickets(lab, run.id).items()}
    assert seen == {"n1": "0,1", "n3": "0,1"}
    assert {share.uuid for share in run.parts[1].gpus} == {"GPU-n3-0", "GPU-n3-1"}


def test_each_node_learns_its_rank_and_where_the_first_one_is(lab: Lab) -> None:
    run = run_of(lab, lab.submit(**gang(3)))
    names = ("SLURM_NODEID", "NODE_RANK", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURMD_NODENAME", "MASTER_ADDR")
    seen = [[ticket.env[name] for name in names] for ticket in tickets(lab, run.id).values()]
    assert seen == [[str(rank), str(rank), "n[1-3]", "3", f"n{rank + 1}", "n1"] for rank in range(3)]
    assert len({ticket.env["MASTER_PORT"] for ticket in tickets(lab, run.id).values()}) == 1


def test_a_batch_script_of_slurm_runs_on_the_first_node_alone(lab: Lab) -> None:
    run = run_of(lab, lab.submit(**gang(2, launch=launch("true", slurm=True))))
    first, other = tickets(lab, run.id).values()
    assert [part.holds for part in run.parts] == [False, True]
    assert (first.holds, other.holds) == (False, True)
    assert (first.launch.argv, other.launch.argv, other.stdout_path) == (("true",), (), "/dev/null")
    assert (other.env["SLURM_NODEID"], other.env["SLURMD_NODENAME"], other.env["CUDA_VISIBLE_DEVICES"]) == (
        "1",
        "n2",
        "0",
    )


def test_a_job_on_one_node_has_no_gang_variables(lab: Lab) -> None:
    run = run_of(lab, lab.submit(**gang(1)))
    (ticket,) = tickets(lab, run.id).values()
    assert not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} & set(ticket.env)


def test_each_node_of_a_gang_writes_a_file_of_its_own(lab: Lab) -> None:
    run = run_of(lab, lab.submit(**gang(2)))
    first, second = (ticket.stdout_path for ticket in tickets(lab, run.id).values())
    assert second == f"{first}.n1"


def test_a_gang_holds_its_resources_on_every_node_until_it_ends(lab: Lab) -> None:
    job = lab.submit(**gang(3, 2))
    waiting = lab.submit(request=Request(gpus=1))
    held = [one for one in lab.scheduler.state.holds.values() if one.job_id == job]
    assert [one.node for one in held] == ["n1", "n2", "n3"]
    assert lab.job(waiting).state is JobState.PENDING
    lab.ask(Cancel(ANN, Selection(ids=(job,))))
    for _ in range(3):
        lab.tick(1)
    assert lab.job(job).state is JobState.CANCELLED
    assert lab.job(waiting).state is JobState.RUNNING
    assert {one.job_id for one in lab.scheduler.state.holds.values()} == {waiting}


def test_more_nodes_than_there_are_is_refused(lab: Lab) -> None:
    with pytest.raises(GpuschedError, match="4 nodes"):
        lab.submit(**gang(4))


def test_a_gang_completes_when_its_last_rank_has(lab: Lab) -> None:
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=5, cpu_s=1), "1.1@n2": SimulatedOutcome(runs_s=20, cpu_s=2)}
    job = lab.submit(**gang(2))
    lab.tick(10)
    assert lab.job(job).state is JobState.RUNNING
    for _ in range(3):
        lab.tick(10)
    run = run_of(lab, job)
    assert (lab.job(job).state, run.outcome, run.exit_code) == (JobState.COMPLETED, JobState.COMPLETED, 0)
    assert run.end_at is not None
    assert run.start_at is not None
    assert run.end_at - run.start_at == 20
    assert run.cpu_s == 3


@pytest.mark.parametrize("failing", ["n1", "n2", "n3"])
def test_the_first_rank_that_fails_ends_the_gang_with_its_exit_code(lab: Lab, failing: str) -> None:
    mark = "1.1" if failing == "n1" else f"1.1@{failing}"
    lab.outcomes = {mark: SimulatedOutcome(runs_s=5, exit_code=3)}
    if failing == "n1":
        lab.outcomes |= {"1.1@n2": FOREVER, "1.1@n3": FOREVER}
    job = lab.submit(**gang(3))
    lab.tick()
    for _ in range(10):
        lab.tick(1)
    found = lab.job(job)
    assert (found.state, found.exit_code) == (JobState.FAILED, 3)
    assert not lab.scheduler.state.holds
    for engine in lab.engines.values():
        assert not engine._runs, "forgotten on every node"


def test_a_failed_gang_is_retried_as_a_whole(lab: Lab) -> None:
    lab.outcomes = {"1.1@n2": SimulatedOutcome(runs_s=5, exit_code=3)}
    job = lab.submit(**gang(2, retry=RetryRule(retries=1, backoff_s=1)))
    for _ in range(12):
        lab.tick(1)
    assert (lab.job(job).state, lab.job(job).failures) == (JobState.RUNNING, 1)
    assert run_of(lab, job).nodes == ("n1", "n2")
    assert set(tickets(lab, "1.2")) == {"n1", "n2"}


def test_a_gang_with_a_rank_that_nobody_starts_returns_to_the_queue(lab: Lab) -> None:
    lab.outcomes = {"1.1@n2": SimulatedOutcome(never_starts=True)}
    job = lab.submit(**gang(2))
    for _ in range(12):
        lab.tick(1)
    first, *_ = lab.store.runs([job])
    assert first.outcome in (JobState.NODE_FAIL, JobState.CANCELLED)
    assert "n2" in (first.reason_text or "")
    assert lab.job(job).state is JobState.RUNNING, "in its second run"


def test_a_gang_whose_rank_is_lost_is_a_node_failure_of_the_whole(lab: Lab) -> None:
    lab.outcomes = {"1.1@n2": SimulatedOutcome(runs_s=3, lost=True)}
    job = lab.submit(**gang(2))
    for _ in range(12):
        lab.tick(1)
    first, second = lab.store.runs([job])
    assert (first.outcome, second.outcome) == (JobState.NODE_FAIL, None)
    assert (first.reason_text or "").startswith("on n2: ")


def test_a_new_daemon_takes_over_the_ranks_of_a_gang(lab: Lab) -> None:
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=30), "1.1@n2": SimulatedOutcome(runs_s=40)}
    job = lab.submit(**gang(2, 2))
    lab.tick(1)
    lab.tick(1)
    before = lab.scheduler.state.holds
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.scheduler.engine, lab.settings)
    assert lab.scheduler.state.holds.keys() == before.keys()
    lab.tick(1)
    assert lab.scheduler.state.holds == before, "with the start that the engines report again"
    assert lab.job(job).state is JobState.RUNNING
    for _ in range(8):
        lab.tick(10)
    assert lab.job(job).state is JobState.COMPLETED
    assert not lab.scheduler.state.holds


def test_usage_counts_every_node_of_a_gang(lab: Lab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=100)
    lab.submit(**gang(2, 2))
    for _ in range(12):
        lab.tick(10)
    (usage,) = lab.scheduler.state.rows[USAGE].values()
    assert 380 < usage.used.gpus <= 400


# --- nodes that are shut down ------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [("n2",), ("n1", "n2")])
def test_nothing_is_started_on_a_node_that_is_being_shut_down_until_it_has_booted(
    lab: Lab, nodes: tuple[str, ...]
) -> None:
    job = lab.submit(request=Request(nodes=len(nodes), gpus=1, nodelist=nodes))
    run = run_of(lab, job)
    lab.tick(2)
    lab.engines["n2"].order(run.id, StopOrder("shutdown"))
    other = lab.submit(request=Request(gpus=1, nodelist=("n1",)))
    for _ in range(20):
        lab.tick(1)
    assert lab.job(job).state is JobState.PENDING
    assert len(lab.store.runs([job])) == 1, "it waits for the node instead of being refused by it again and again"
    assert lab.job(other).state is JobState.RUNNING, "the others are used"
    lab.scheduler.cluster["n2"].boot_id = "the next one"
    for _ in range(5):
        lab.tick(1)
    assert (lab.job(job).state, len(lab.store.runs([job]))) == (JobState.RUNNING, 2)
