"""Idle GPUs in the daemon: what is recorded and ordered, also over restarts. Simulated engine, clock by hand."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab

from gpusched.engine.simulated import SimulatedOutcome
from gpusched.lifecycle.idle import Activity
from gpusched.model.job import Alerting, RetryRule
from gpusched.model.settings import IdleSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.testing import launch, request

POLL_S = 30.0


def lab_with(**idle: Any) -> Lab:
    settings = IdleSettings(**{"after_s": 600.0, "lower_after_s": 1200.0, "then_after_s": 1800.0, **idle})
    return Lab(gpus=2, outcome=SimulatedOutcome(runs_s=1e9, stop_takes_s=5), idle=settings)


def pass_time(lab: Lab, minutes: float, *, marks: tuple[object, ...] | None = ()) -> None:
    """Turn at every reading; processes use no CPU time."""
    for _ in range(round(minutes * 60 / POLL_S)):
        lab.turn(POLL_S)
        idle = lab.scheduler.idle
        known = {name: Activity(lab.clock.now(), 0.0, marks) for name in idle.suspects()}
        idle.note(known, lab.settings)


def story(lab: Lab, job_id: int) -> list[str]:
    return [event.text for event in lab.store.events(job_id) if event.kind == "idle"]


def test_the_owner_is_notified_once_and_the_run_is_marked_until_it_works() -> None:
    lab = lab_with()
    job_id = lab.submit(request=request(gpus=1))
    began = lab.clock.now()
    pass_time(lab, 15)
    (run,) = lab.store.runs([job_id])
    assert run.idle_step == 1
    assert run.idle_at == pytest.approx(began, abs=2 * POLL_S)
    assert [text.partition(" for ")[0] for text in story(lab, job_id)] == ["its GPUs have been idle"]
    lab.load[0] = 0.9
    pass_time(lab, 1)
    assert lab.store.runs([job_id])[0].idle_at is None
    lab.load[0] = 0.0
    pass_time(lab, 15)
    assert lab.store.runs([job_id])[0].idle_at is not None
    assert len(story(lab, job_id)) == 1


def test_subscribers_get_one_alert_per_run() -> None:
    lab = lab_with()
    job_id = lab.submit(request=request(gpus=1), alerting=Alerting(on=("gpu_idle",)))
    pass_time(lab, 30)
    (alert,) = [alert for alert in lab.scheduler.alerts.rows.values() if alert.event == "gpu_idle"]
    assert (alert.job_id, alert.run) == (job_id, 1)


def test_the_next_run_waits_behind_others() -> None:
    lab = lab_with()
    job_id = lab.submit(request=request(gpus=1), nice=10)
    pass_time(lab, 60)
    assert lab.job(job_id).spec.nice == 510
    assert lab.job(job_id).state is JobState.RUNNING
    assert len(story(lab, job_id)) == 2


def test_a_restart_repeats_no_step() -> None:
    lab = lab_with()
    job_id = lab.submit(request=request(gpus=1))
    pass_time(lab, 30)
    assert lab.store.runs([job_id])[0].idle_step == 2
    lab.scheduler.flush()
    lab.restart()
    pass_time(lab, 30)
    assert lab.job(job_id).spec.nice == 500
    assert len(story(lab, job_id)) == 2


def test_a_requeue_policy_returns_the_run_behind_others_after_its_notice() -> None:
    lab = lab_with(then="requeue", notice_s=100.0)
    lab.outcome = SimulatedOutcome(runs_s=1e9, stop_takes_s=1e9)
    job_id = lab.submit(request=request(gpus=1), launch=launch("true", env_sha="e", grace_s=1))
    other = lab.submit(request=request(gpus=1), ignore_idle=True)
    waiting = lab.submit(request=request(gpus=1))
    pass_time(lab, 30.5)
    assert lab.job(job_id).state is JobState.COMPLETING
    lab.turn(60)
    assert lab.job(job_id).state is JobState.COMPLETING
    lab.turn(41)
    lab.turn(1)
    first, *_ = lab.store.runs([job_id])
    assert (first.outcome, first.reason) == (JobState.PREEMPTED, ReasonCode.GPU_IDLE)
    job = lab.job(job_id)
    assert (job.state, job.is_front, job.failures, job.requeues) == (JobState.PENDING, False, 0, 0)
    assert lab.job(waiting).state is JobState.RUNNING
    assert lab.job(other).state is JobState.RUNNING


def test_a_cancel_policy_cancels_the_run_without_a_fallback() -> None:
    lab = lab_with(then="cancel")
    job_id = lab.submit(request=request(gpus=1), fallback="echo", retry=RetryRule(requeue=False))
    pass_time(lab, 40)
    job = lab.job(job_id)
    assert (job.state, job.reason, job.fallback_id) == (JobState.CANCELLED, ReasonCode.GPU_IDLE, None)
    assert job.reason_text is not None
    assert "have been idle" in job.reason_text


@pytest.mark.parametrize(
    ("what", "asked"),
    [("no GPU", {}), ("told to ignore it", {"request": request(gpus=1), "ignore_idle": True})],
)
def test_other_runs_are_not_watched(what: str, asked: dict[str, Any]) -> None:
    lab = lab_with(then="cancel")
    job_id = lab.submit(**asked)
    pass_time(lab, 60)
    assert story(lab, job_id) == [], what
    assert lab.job(job_id).state is JobState.RUNNING


@pytest.mark.parametrize("load", [(0.0, 0.6), (None, 0.0), (None, 0.6)])
def test_a_busy_or_unreadable_gpu_counts_for_all(load: tuple[float | None, float | None]) -> None:
    lab = lab_with(then="cancel")
    job_id = lab.submit(request=request(gpus=2))
    lab.load.update(enumerate(load))
    pass_time(lab, 60)
    assert story(lab, job_id) == []


def test_without_readings_no_run_is_idle() -> None:
    lab = lab_with(then="cancel")
    job_id = lab.submit(request=request(gpus=1))
    lab.gpu_error = "the driver does not answer"
    pass_time(lab, 60)
    assert story(lab, job_id) == []
