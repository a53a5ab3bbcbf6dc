"""Whatever fails, is resumed, cancelled, held or restarted in between: a pipeline comes to its end, and says so."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ANN, ENV, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.lifecycle.pipelines import fallbacks_of, parse_needs, pipeline_status, steps_of
from gpusched.model.commands import Cancel, Hold, PipelineStep, Release, ResumePipeline, Selection, SubmitPipeline
from gpusched.model.job import ArraySpec, Job, RetryRule
from gpusched.model.states import JobState
from gpusched.ports import JobFilter
from gpusched.testing import launch, spec

KINDS = ("afterok", "afterok", "afterany", "afternotok", "after", "aftercorr")
OUTCOMES = (SimulatedOutcome(runs_s=3), SimulatedOutcome(runs_s=3, exit_code=1), SimulatedOutcome(runs_s=2, lost=True))


def a_step(number: int, dice: Random) -> PipelineStep:
    terms = [f"{dice.choice(KINDS)}:s{dice.randrange(number)}" for _ in range(dice.randint(0, 2))] if number else []
    parts: dict[str, Any] = {"fallback": dice.choice([None, "x"])}
    if dice.random() < 0.3:
        parts["array"] = ArraySpec("0-2", throttle=dice.choice([None, 1]))
    if dice.random() < 0.3:
        parts["retry"] = RetryRule(retries=1, backoff_s=2.0)
    name = f"s{number}"
    made = spec(name=name, launch=launch("true"), **parts)
    return PipelineStep(name, made, parse_needs(dice.choice(",?").join(dict.fromkeys(terms))), name)


def jobs_of(lab: Lab) -> list[Job]:
    return lab.store.jobs(JobFilter(pipelines=frozenset({"p1"})))


def disturb(lab: Lab, dice: Random) -> None:
    what = dice.randrange(6)
    active = sorted(lab.scheduler.state.jobs)
    if what == 0:
        adopt_open_runs(lab.restart().state, lab.engine)
    elif what == 1:
        lab.ask(ResumePipeline(ANN, 1))
    elif what == 2 and dice.random() < 0.3:
        lab.ask(Cancel(ANN, Selection(pipelines=frozenset({1}))))
    elif what == 3 and active:
        lab.ask(dice.choice([Hold, Release])(ANN, (dice.choice(active),)))


def let_all_end(lab: Lab) -> None:
    for _ in range(60):
        held = tuple(job.id for job in lab.scheduler.state.jobs.values() if job.hold)
        if held:
            lab.ask(Release(ANN, held))
        lab.tick(4)


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_pipeline_terminates(dice: Random) -> None:
    lab = Lab(gpus=0, cpus=dice.choice([2, 8]))
    steps = [a_step(number, dice) for number in range(dice.randint(2, 7))]
    lab.ask(SubmitPipeline(ANN, "p", "text", steps, {"0" * 64: ENV}))
    for _ in range(dice.randint(2, 12)):
        lab.outcome = dice.choice(OUTCOMES)
        disturb(lab, dice)
        lab.tick(dice.uniform(0.5, 4))
    lab.outcome = SimulatedOutcome(runs_s=3)
    let_all_end(lab)
    assert all(job.state.is_final for job in jobs_of(lab)), [job for job in jobs_of(lab) if not job.state.is_final]
    assert pipeline_status(jobs_of(lab)).state in ("COMPLETED", "FAILED", "CANCELLED")
    # Nothing fails any more: what is run again now ends well, and with it the pipeline.
    for _ in range(len(steps) + 1):
        (answer,) = lab.ask(ResumePipeline(ANN, 1))
        if not isinstance(answer, dict):
            break
        let_all_end(lab)
    steps_now = steps_of(jobs_of(lab))
    stands = pipeline_status(jobs_of(lab))
    assert all(job.state is JobState.COMPLETED or name in stands.not_needed for name, job in steps_now.items()) == (
        stands.state == "COMPLETED"
    )
    assert "all of its steps have completed" in answer.message, (answer, steps_now)
    assert not fallbacks_of(jobs_of(lab))
