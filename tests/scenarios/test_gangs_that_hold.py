"""Jobs whose command runs on their first node while the others are held: how they end, whatever ends first."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.model.commands import Cancel, Requeue, Selection
from gpusched.model.execution import EnterOrder, StopOrder
from gpusched.model.job import Request, RetryRule, Run
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.testing import launch

FOREVER = SimulatedOutcome(runs_s=1e9)


def batch(nodes: int = 2, **parts: Any) -> dict[str, Any]:
    return {"request": Request(nodes=nodes, gpus=1, cpus=2), "launch": launch("true", slurm=True), **parts}


@pytest.fixture
def lab() -> Lab:
    return Lab(more_nodes=("n2", "n3"), outcome=FOREVER)


def turns(lab: Lab, count: int = 6, seconds: float = 1) -> None:
    for _ in range(count):
        lab.tick(seconds)


def runs(lab: Lab, job_id: int) -> list[Run]:
    return list(lab.store.runs([job_id]))


def holder(lab: Lab, run: str, node: str = "n2") -> Any:
    return lab.engines[node]._runs.get(run)


@pytest.mark.parametrize(("code", "state"), [(0, JobState.COMPLETED), (7, JobState.FAILED)])
def test_the_job_ends_with_its_first_node_and_nothing_is_left_on_the_others(
    lab: Lab, code: int, state: JobState
) -> None:
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=20, exit_code=code), "1.1@n2": FOREVER, "1.1@n3": FOREVER}
    job = lab.submit(**batch(3))
    turns(lab, 10)
    assert lab.scheduler.state.open_runs["1.1"].state is RunState.RUNNING
    assert holder(lab, "1.1").end is None
    turns(lab, 15)
    (run,) = runs(lab, job)
    assert (lab.job(job).state, run.exit_code) == (state, code)
    assert not lab.scheduler.state.holds
    assert not any(engine._runs for engine in lab.engines.values()), "forgotten on every node"


def test_what_ran_on_the_held_nodes_counts(lab: Lab) -> None:
    lab.outcomes = {
        "1.1": SimulatedOutcome(runs_s=5, cpu_s=3, peak_mem_mib=10),
        "1.1@n2": SimulatedOutcome(cpu_s=40, peak_mem_mib=70),
    }
    job = lab.submit(**batch())
    turns(lab, 10)
    (run,) = runs(lab, job)
    assert (run.outcome, run.cpu_s, run.peak_mem_mib) == (JobState.COMPLETED, 43, 70)


def test_memory_that_runs_out_on_a_held_node_is_the_cause_of_a_failure(lab: Lab) -> None:
    lab.outcomes = {
        "1.1": SimulatedOutcome(runs_s=5, exit_code=1),
        "1.1@n2": SimulatedOutcome(oom_kills=1, mem_limit_mib=1024),
    }
    job = lab.submit(**batch())
    turns(lab, 10)
    assert lab.job(job).state is JobState.OUT_OF_MEMORY
    assert "1G of host memory" in (lab.job(job).reason_text or "")


def test_a_holder_that_is_lost_ends_the_script_and_the_job_runs_again(lab: Lab) -> None:
    lab.outcomes = {"1.1@n2": SimulatedOutcome(runs_s=3, lost=True)}
    job = lab.submit(**batch())
    turns(lab, 12)
    first, second = runs(lab, job)
    assert (first.outcome, second.outcome) == (JobState.NODE_FAIL, None)
    assert (first.reason_text or "").startswith("on n2: ")
    assert not lab.engine._runs.keys() & {"1.1"}


def test_a_holder_that_is_lost_fails_a_job_that_is_not_requeued(lab: Lab) -> None:
    lab.outcomes = {"1.1@n2": SimulatedOutcome(runs_s=3, lost=True)}
    job = lab.submit(**batch(retry=RetryRule(requeue=False)))
    turns(lab, 12)
    assert lab.job(job).state is JobState.NODE_FAIL


def test_a_holder_that_nobody_starts_returns_the_job_to_the_queue(lab: Lab) -> None:
    lab.outcomes = {"1.1@n2": SimulatedOutcome(never_starts=True)}
    job = lab.submit(**batch())
    turns(lab, 12)
    first, *_ = runs(lab, job)
    assert first.outcome is JobState.NODE_FAIL
    assert "n2" in (first.reason_text or "")
    assert lab.job(job).state is JobState.RUNNING, "in its second run"


def test_a_first_node_that_starts_nothing_costs_the_job_nothing(lab: Lab) -> None:
    lab.outcomes = {"1.1": SimulatedOutcome(never_starts=True)}
    job = lab.submit(**batch())
    turns(lab, 12)
    first, second = runs(lab, job)
    assert (first.outcome, first.start_at) == (JobState.CANCELLED, None)
    assert (lab.job(job).state, lab.job(job).requeues, second.number) == (JobState.RUNNING, 0, 2)


def test_a_held_node_that_is_shut_down_ends_the_run(lab: Lab) -> None:
    job = lab.submit(**batch(retry=RetryRule(requeue=False)))
    turns(lab, 2)
    lab.engines["n2"].order("1.1", StopOrder("shutdown"))
    turns(lab, 5)
    assert lab.job(job).state is JobState.NODE_FAIL, "although nothing failed on the first"


def test_a_cancel_waits_for_the_script_alone_and_tells_it_once(lab: Lab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=1e9, stop_takes_s=20)
    job = lab.submit(**batch())
    turns(lab, 2)
    lab.ask(Cancel(ANN, Selection(ids=(job,))))
    turns(lab, 3)
    assert holder(lab, "1.1").end is not None, "nothing is there that would need time"
    assert lab.engine._runs["1.1"].given.stop == StopOrder("cancel"), "not by the end of the holder"
    assert lab.job(job).state is JobState.COMPLETING
    turns(lab, 20)
    assert lab.job(job).state is JobState.CANCELLED


def test_a_time_limit_is_one_although_each_node_keeps_it(lab: Lab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=1e9, stop_takes_s=3)
    job = lab.submit(**batch(time_limit_s=60))
    turns(lab, 10, 10)
    (run,) = runs(lab, job)
    assert (lab.job(job).state, run.signal) == (JobState.TIMEOUT, 15)


def test_a_requeued_job_starts_again_on_all_its_nodes(lab: Lab) -> None:
    job = lab.submit(**batch())
    turns(lab, 2)
    lab.ask(Requeue(ANN, (job,)))
    turns(lab, 6)
    assert [run.outcome for run in runs(lab, job)] == [JobState.PREEMPTED, None]
    assert [part.holds for part in runs(lab, job)[1].parts] == [False, True]
    assert holder(lab, "1.2").end is None


def test_a_door_is_opened_on_each_node(lab: Lab) -> None:
    lab.submit(**batch())
    turns(lab, 2)
    lab.scheduler.engine.order("1.1", EnterOrder("abc"))
    assert [lab.engines[name].entered for name in ("n1", "n2")] == [[("1.1", EnterOrder("abc"))]] * 2


@pytest.mark.parametrize("ends", ["while it is away", "afterwards"])
def test_a_new_daemon_ends_the_holders_after_the_first_node(lab: Lab, ends: str) -> None:
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=30, exit_code=7)}
    job = lab.submit(**batch())
    turns(lab, 3)
    if ends == "while it is away":
        lab.clock.advance(40)
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.scheduler.engine, lab.settings)
    turns(lab, 5, 10)
    assert (lab.job(job).state, lab.job(job).exit_code) == (JobState.FAILED, 7)
    assert not lab.scheduler.state.holds
    assert not any(engine._runs for engine in lab.engines.values())


def test_a_run_that_an_older_daemon_started_ends_although_it_holds_no_nodes(lab: Lab) -> None:
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=30, exit_code=7)}
    job = lab.submit(**batch())
    turns(lab, 2)
    # As it left them: nothing on the second node, and no word of it in the row.
    run = lab.scheduler.state.open_runs["1.1"]
    old = replace(run, parts=tuple(replace(part, holds=False) for part in run.parts))
    lab.store.commit(Changes(runs={old.id: old}))
    del lab.engines["n2"]._runs["1.1"]
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.scheduler.engine, lab.settings)
    turns(lab, 3)
    assert lab.job(job).state is JobState.RUNNING
    turns(lab, 4, 10)
    assert [(run.outcome, run.reason_text) for run in runs(lab, job)] == [(JobState.FAILED, "exit code 7 on n1")]
