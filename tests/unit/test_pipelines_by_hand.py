"""Pipelines in a daemon that is turned by hand: what comes between the steps."""

from __future__ import annotations

from typing import Any

from lab import ANN, ENV, Lab

from gpusched.daemon.commands import Cancel
from gpusched.daemon.pipelines import Step, SubmitPipeline
from gpusched.daemon.selection import Selection
from gpusched.engine.simulated import Outcome
from gpusched.errors import GpuschedError, NotFound
from gpusched.model.states import JobState
from gpusched.policy.life.pipelines import parse_needs
from gpusched.ports import JobFilter
from gpusched.testing import launch, spec


def step(name: str, needs: str = "", **parts: Any) -> Step:
    made = spec(name=name, launch=launch("true", env_sha="e"), **parts)
    return Step(name, made, parse_needs(needs), f"p.toml: step {name}")


def ask(lab: Lab, command: Any) -> Any:
    (answer,) = lab.ask(command)
    if isinstance(answer, GpuschedError):
        raise answer
    return answer


def submit(lab: Lab, *steps: Step) -> dict[str, int]:
    answer = ask(lab, SubmitPipeline(ANN, "p", "text", steps, {"e": ENV}))
    return {name: int(job_id) for name, job_id in answer["jobs"].items()}


def states(lab: Lab) -> dict[str, JobState]:
    return {job.spec.name: job.state for job in lab.store.jobs(JobFilter(pipelines=frozenset({"p1"})))}


def test_who_cancels_a_pipeline_as_a_step_fails_meets_its_fallback() -> None:
    """Both in one turn: the fallback was made after the cancel, and ran."""
    lab = Lab(gpus=0, outcome=Outcome(runs_s=5, exit_code=1))
    submit(lab, step("a", fallback="echo no"), step("b", "a"))
    lab.clock.advance(6)
    answer = ask(lab, Cancel(ANN, Selection(pipelines=frozenset({1}))))
    assert answer["cancelled"] == ["2", "3"]
    lab.turn(1)
    assert states(lab) == {"a": JobState.FAILED, "b": JobState.CANCELLED, "a-fallback": JobState.CANCELLED}


def test_a_pipeline_that_there_is_not_cannot_be_cancelled() -> None:
    lab = Lab(gpus=0)
    (answer,) = lab.ask(Cancel(ANN, Selection(pipelines=frozenset({7}))))
    assert isinstance(answer, NotFound)
    assert answer.message == "there is no pipeline p7"
