"""Pipelines in a daemon that is turned by hand: what comes between the steps."""

from __future__ import annotations

from typing import Any

from lab import ANN, BOB, ENV, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused
from gpusched.lifecycle.pipelines import parse_needs, pipeline_status
from gpusched.model.commands import Cancel, PipelineStep, ResumePipeline, Selection, SubmitPipeline
from gpusched.model.job import ArraySpec
from gpusched.model.settings import LifeSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.ports import JobFilter
from gpusched.testing import launch, request, spec


def step(name: str, needs: str = "", **parts: Any) -> PipelineStep:
    made = spec(name=name, launch=launch("true"), **parts)
    return PipelineStep(name, made, parse_needs(needs), f"p.toml: step {name}")


def ask(lab: Lab, command: Any) -> Any:
    (answer,) = lab.ask(command)
    if isinstance(answer, GpuschedError):
        raise answer
    return answer


def submit(lab: Lab, *steps: PipelineStep) -> dict[str, int]:
    answer = ask(lab, SubmitPipeline(ANN, "p", "text", steps, {"0" * 64: ENV}))
    return {name: int(job_id) for name, job_id in answer["jobs"].items()}


def states(lab: Lab) -> dict[str, JobState]:
    return {job.spec.name: job.state for job in lab.store.jobs(JobFilter(pipelines=frozenset({"p1"})))}


def test_cancelling_a_pipeline_as_a_step_fails_includes_its_fallback() -> None:
    """Both in one turn: the fallback was made after the cancel, and ran."""
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=5, exit_code=1))
    submit(lab, step("a", fallback="echo no"), step("b", "a"))
    lab.clock.advance(6)
    answer = ask(lab, Cancel(ANN, Selection(pipelines=frozenset({1}))))
    assert answer["cancelled"] == ["2", "3"]
    lab.tick(1)
    assert states(lab) == {"a": JobState.FAILED, "b": JobState.CANCELLED, "a-fallback": JobState.CANCELLED}


def test_an_unknown_pipeline_cannot_be_cancelled() -> None:
    lab = Lab(gpus=0)
    (answer,) = lab.ask(Cancel(ANN, Selection(pipelines=frozenset({7}))))
    assert isinstance(answer, NotFound)
    assert answer.message == "there is no pipeline p7"


def test_unneeded_steps_do_not_delay_the_end_of_a_pipeline() -> None:
    """Where hopeless jobs are kept to be mended, it waited for ever, and gwait with it."""
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=5), life=LifeSettings(never_satisfied="wait"))
    ids = submit(lab, step("a"), step("mend", "afternotok:a"), step("then", "mend"), step("b", "a"))
    plain = lab.submit(dependency=f"afternotok:{ids['a']}")
    kept = submit(lab, step("c"), step("d", "afternotok:c", never_satisfied="wait"))["d"]
    lab.tick(6)
    lab.restart()
    lab.tick(6)
    assert lab.job(ids["then"]).reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    found = pipeline_status(lab.store.jobs(JobFilter(pipelines=frozenset({"p1"}))))
    assert (found.state, found.not_needed) == ("COMPLETED", {"mend", "then"})
    assert {lab.job(plain).state, lab.job(kept).state} == {JobState.PENDING}


def test_steps_behind_a_failure_are_kept_when_repairable() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=5, exit_code=1), life=LifeSettings(never_satisfied="wait"))
    submit(lab, step("a"), step("b", "a"), step("c", "b"))
    lab.tick(6)
    assert states(lab) == {"a": JobState.FAILED, "b": JobState.PENDING, "c": JobState.PENDING}


def test_a_rerun_step_is_not_held_and_drops_a_past_deadline() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=5, exit_code=1))
    now = lab.clock.now()
    ids = submit(lab, step("a", deadline_at=now + 8, hold=True), step("b", deadline_at=now + 1000))
    lab.tick(9)
    assert [lab.job(job_id).state for job_id in ids.values()] == [JobState.DEADLINE, JobState.FAILED]
    again = {name: int(job_id) for name, job_id in ask(lab, ResumePipeline(ANN, 1))["jobs"].items()}
    assert (lab.job(again["a"]).spec.deadline_at, lab.job(again["b"]).spec.deadline_at) == (None, now + 1000)
    assert {lab.job(job_id).state for job_id in again.values()} == {JobState.RUNNING}
    told = [event.text for event in lab.store.events(again["a"])]
    assert told[0].endswith("after job 1, without its deadline, which it can no longer meet")


def test_a_step_that_cannot_be_rerun_is_named() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=5, exit_code=1))
    submit(lab, step("a"), step("b", request=request(gpus=1)))
    lab.tick(6)
    lab.tick(1)
    lab.gpus = 0
    lab.restart()
    (answer,) = lab.ask(ResumePipeline(ANN, 1))
    assert isinstance(answer, Refused)
    assert answer.message.startswith("step b: asked for 1 GPU"), answer.message


def test_a_step_after_either_of_two_follows_the_rerun_one() -> None:
    """It went on waiting for the job that had failed, and was cancelled when the other one failed as well."""
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=5))
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=5, exit_code=1), "2.1": SimulatedOutcome(runs_s=12, exit_code=1)}
    ids = submit(lab, step("a"), step("b"), step("c", "a?b"), step("d", "after:a,b"))
    lab.tick(6)
    again = ask(lab, ResumePipeline(ANN, 1))["jobs"]
    assert again == {"a": "5"}
    assert lab.job(ids["c"]).spec.dependency == "afterok:5?afterok:2"
    for _ in range(3):
        lab.tick(6)
    assert lab.job(ids["b"]).state is JobState.FAILED
    assert lab.job(ids["c"]).state is JobState.COMPLETED


def test_started_steps_are_left_alone_when_others_are_rerun() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=100))
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=5, exit_code=1)}
    ids = submit(lab, step("a"), step("b", "after:a", array=ArraySpec("0-9", throttle=1)))
    lab.tick(6)
    assert ask(lab, ResumePipeline(ANN, 1))["jobs"] == {"a": "13"}
    assert lab.job(ids["b"]).spec.dependency == "after:1"


def test_users_cannot_resume_or_cancel_foreign_pipelines() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=5, exit_code=1))
    submit(lab, step("a"), step("b"))
    cancelled, resumed = lab.ask(Cancel(BOB, Selection(pipelines=frozenset({1}))), ResumePipeline(BOB, 1))
    assert isinstance(cancelled, Forbidden)
    assert isinstance(resumed, Forbidden)
    assert (resumed.message, resumed.hint) == ("pipeline p1 belongs to ann, not to bob", "see it with: gshow p1")
    assert set(states(lab).values()) == {JobState.RUNNING}
