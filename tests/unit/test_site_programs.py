"""What follows when the site's prolog or epilog fails: the job goes elsewhere, and the node is drained, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import ANN, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.cli.admin import doctor
from gpusched.cli.admin.doctor import untrusted_programs
from gpusched.config import load_settings
from gpusched.errors import Refused
from gpusched.model.commands import Cancel, Drain, Reload, Selection
from gpusched.model.job import RetryRule
from gpusched.model.mentions import render
from gpusched.model.settings import EpilogSettings, PrologSettings
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports.tables import DRAINS
from gpusched.testing import request

FAULT = "the prolog /etc/gpusched/prolog ended with exit code 1: no driver"
NO_PROLOG = SimulatedOutcome(prolog_fault=FAULT)


def drained(lab: Lab) -> dict[str, str]:
    return {name: render(drain.message) for name, drain in lab.scheduler.state.rows[DRAINS].items()}


def test_a_job_whose_node_is_not_prepared_starts_on_another_one() -> None:
    lab = Lab(more_nodes=("n2",))
    lab.outcomes["1.1"] = NO_PROLOG
    job_id = lab.submit(request=request(gpus=1), retry=RetryRule(requeue=False))
    lab.tick(2)
    assert drained(lab) == {"n1": f"{FAULT} (job 1); once it is fixed: gctl undrain n1"}
    for _ in range(3):
        lab.tick(12)
    job = lab.job(job_id)
    assert (job.state, job.run, job.requeues, job.failures) == (JobState.COMPLETED, 2, 0, 0)
    first, second = lab.store.runs([job_id])
    assert (first.node, first.reason_text, first.start_at) == ("n1", f"was not started: {FAULT}", None)
    assert second.node == "n2"


def test_runs_that_begin_together_drain_their_node_once_and_wait() -> None:
    lab = Lab(outcome=NO_PROLOG)
    ids = [lab.submit(request=request(gpus=1)) for _ in range(2)]
    lab.tick(2)
    lab.tick(600)
    assert drained(lab)["n1"].endswith("(job 1); once it is fixed: gctl undrain n1")
    assert [lab.job(one).state for one in ids] == [JobState.PENDING] * 2
    assert max(lab.job(one).run for one in ids) == 1, "none was tried again on a drained node"
    lab.outcome = SimulatedOutcome(runs_s=1)
    lab.ask(Drain(ROOT, ("n1",), None))
    for _ in range(4):
        lab.tick(5)
    assert [lab.job(one).state for one in ids] == [JobState.COMPLETED] * 2


def test_a_cancelled_job_does_not_come_back_from_a_failed_prolog() -> None:
    lab = Lab(more_nodes=("n2",), outcome=NO_PROLOG)
    (answer,) = lab.ask(lab.submission(request=request(gpus=1)))
    lab.ticker.submit(Cancel(ANN, Selection(ids=(answer["ids"][0],))), lambda _: None)
    lab.tick(2)
    assert lab.job(1).state is JobState.CANCELLED


@pytest.mark.parametrize(("code", "state"), [(0, JobState.COMPLETED), (3, JobState.FAILED)])
def test_a_failed_epilog_drains_the_node_and_leaves_the_result(code: int, state: JobState) -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1, exit_code=code, epilog_fault="the epilog /e ended with exit code 2"))
    job_id = lab.submit(request=request(gpus=1))
    for _ in range(3):
        lab.tick(2)
    assert (lab.job(job_id).state, lab.job(job_id).exit_code) == (state, code)
    assert drained(lab)["n1"].startswith("the epilog /e ended with exit code 2 (job 1)")
    assert "the epilog /e ended with exit code 2" in [one.text for one in lab.store.events(job_id)]


def test_a_killed_supervisor_drains_its_node_where_the_site_has_an_epilog() -> None:
    for path, reason in ((None, None), ("/e", "the epilog /e was not executed: the supervisor of the run was killed")):
        lab = Lab(outcome=SimulatedOutcome(runs_s=1, lost=True), epilog=EpilogSettings(path=path))
        lab.submit(request=request(gpus=1), retry=RetryRule(requeue=False))
        lab.tick(2)
        assert (drained(lab).get("n1") or "").partition(" (job")[0] == (reason or "")


def test_a_gang_is_not_prepared_unless_each_of_its_nodes_is() -> None:
    lab = Lab(more_nodes=("n2", "n3"))
    lab.outcomes["1.1@n2"] = NO_PROLOG
    lab.submit(request=request(gpus=1, nodes=2))
    for _ in range(6):
        lab.tick(20)
    assert list(drained(lab)) == ["n2"]
    job = lab.job(1)
    assert (job.state, job.run) == (JobState.COMPLETED, 2)
    assert lab.store.runs([1])[1].nodes == ("n1", "n3")
    assert all(run.state is RunState.ENDED for run in lab.store.runs([1]))


def test_a_program_that_root_would_not_execute_is_refused_in_the_file_and_at_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("GPUSCHED_CONFIG", str(file))
    file.write_text(f'[prolog]\npath = "{tmp_path}/none"\n')
    (problem,) = untrusted_programs(load_settings(str(file), {}))
    assert f"{file}, line 2" in problem.message
    assert problem.message in str(doctor._config())
    lab = Lab()
    lab.config = lambda: replace(lab.settings, prolog=PrologSettings(path=str(tmp_path / "none")))
    (answer,) = lab.ask(Reload(ROOT))
    assert isinstance(answer, Refused)
    assert lab.scheduler.settings.prolog.path is None
