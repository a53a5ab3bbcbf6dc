"""Idle GPUs in the daemon: what is recorded and ordered, also over restarts. Simulated engine, clock by hand."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.facade import DaemonFacade
from gpusched.lifecycle.idle import Activity
from gpusched.model.job import Alerting, ArraySpec, RetryRule
from gpusched.model.queue_settings import QueueSettings
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
        lab.tick(POLL_S)
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
    lab.ticker.flush()
    lab.restart()
    pass_time(lab, 30)
    assert lab.job(job_id).spec.nice == 500
    assert len(story(lab, job_id)) == 2


def test_a_requeue_policy_returns_the_run_behind_others_after_its_notice() -> None:
    lab = lab_with(then="requeue", notice_s=100.0)
    lab.outcome = SimulatedOutcome(runs_s=1e9, stop_takes_s=1e9)
    job_id = lab.submit(request=request(gpus=1), launch=launch("true", grace_s=1))
    other = lab.submit(request=request(gpus=1), ignore_idle=True)
    waiting = lab.submit(request=request(gpus=1))
    pass_time(lab, 30.5)
    assert lab.job(job_id).state is JobState.COMPLETING
    lab.tick(60)
    assert lab.job(job_id).state is JobState.COMPLETING
    lab.tick(41)
    lab.tick(1)
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


# --- requeued for somebody alone ----------------------------------------------------------------------

SPARED = "its GPUs are still idle; no job waits that could use them, so it continues, and is requeued once one does"


def idle_lab(other: str = "default", **sections: Any) -> tuple[Lab, int]:
    """Two GPUs: one job has been idle on the first for longer than it may be, one of another queue has the second."""
    settings = IdleSettings(after_s=600.0, lower_after_s=1200.0, then="requeue", then_after_s=1800.0, notice_s=100.0)
    forever = SimulatedOutcome(runs_s=1e9, stop_takes_s=5)
    lab = Lab(gpus=2, outcome=forever, **{"idle": settings, "models": {"n1": "NVIDIA A100-SXM4-80GB"}, **sections})
    idle = lab.submit(request=request(gpus=1))
    lab.submit(request=request(gpus=1), ignore_idle=True, queue=other)
    pass_time(lab, 60)
    return lab, idle


def test_an_idle_run_continues_while_nobody_waits_and_says_so_once() -> None:
    lab, idle = idle_lab()
    assert (lab.job(idle).state, lab.job(idle).run) == (JobState.RUNNING, 1)
    assert story(lab, idle)[2:] == [SPARED]
    assert (
        why(lab, idle) == "its GPUs have been idle for 59:30; it will be requeued once a job waits that could use them"
    )
    lab.ticker.flush()
    lab.restart()
    pass_time(lab, 60)
    assert (lab.job(idle).state, story(lab, idle).count(SPARED)) == (JobState.RUNNING, 1)


def why(lab: Lab, job_id: int) -> str | None:
    run = lab.scheduler.state.open_runs[f"{job_id}.1"]
    text = lab.scheduler.idle.why(run, lab.job(job_id), lab.settings, lab.clock.now())
    assert text == DaemonFacade(lab.ticker).findings(run).idle
    return text


WAITING: dict[str, tuple[dict[str, Any], bool]] = {
    # what waits, and whether it could use the idle GPU
    "a job for any GPU": ({"request": request(gpus=1)}, True),
    "a job for a slice of one": ({"request": request(gpus=1, vram_mib=1024)}, True),
    "a job for this node and type": ({"request": request(gpus=1, gpu_type="a100", nodelist=("n1",))}, True),
    "an array": ({"request": request(gpus=1), "array": ArraySpec("1-3")}, True),
    "a job without GPUs": ({"request": request(cpus=8)}, False),
    "a job that is held": ({"request": request(gpus=1), "hold": True}, False),
    "a job that begins later": ({"request": request(gpus=1), "begin_at": 1e9}, False),
    "a job at a limit of its queue": ({"request": request(gpus=1), "queue": "small"}, False),
}


@pytest.mark.parametrize("name", WAITING)
def test_an_idle_run_is_requeued_only_for_jobs_that_could_use_its_gpus(name: str) -> None:
    asked, is_wanted = WAITING[name]
    queues = {"default": QueueSettings("default"), "small": QueueSettings("small", max_gpus=1)}
    lab, idle = idle_lab("small", queue=queues)
    waiting = lab.submit(**asked)
    assert lab.job(waiting).state is JobState.PENDING
    pass_time(lab, 5)
    if is_wanted:
        (first, *_) = lab.store.runs([idle])
        assert (first.outcome, first.reason) == (JobState.PREEMPTED, ReasonCode.GPU_IDLE)
        # Not on the same GPU again, however long it has been in the queue.
        assert (lab.job(idle).state, lab.job(idle).run) == (JobState.PENDING, 1)
        assert len(lab.scheduler.state.open_runs) == 2
    else:
        assert (lab.job(idle).state, lab.job(idle).run) == (JobState.RUNNING, 1)


@pytest.mark.parametrize("waiting", [1, 3])
def test_no_more_idle_runs_are_requeued_than_jobs_wait(waiting: int) -> None:
    lab = lab_with(then="requeue", notice_s=100.0)
    lab.gpus = 4
    lab.tick()
    idle = [lab.submit(request=request(gpus=1)) for _ in range(4)]
    pass_time(lab, 60)
    busy = [lab.submit(request=request(gpus=1), ignore_idle=True) for _ in range(waiting)]
    pass_time(lab, 60)
    assert [lab.job(job).state for job in busy] == [JobState.RUNNING] * waiting
    # Those that wait again have no idle run requeued for themselves.
    states = [lab.job(job).state for job in idle]
    assert (states.count(JobState.PENDING), states.count(JobState.RUNNING)) == (waiting, 4 - waiting)
    assert [lab.job(job).run for job in idle] == [1] * 4


def test_idle_runs_that_make_no_room_together_continue() -> None:
    lab, idle = idle_lab()
    both = lab.submit(request=request(gpus=2))
    pass_time(lab, 5)
    assert (lab.job(both).state, lab.job(idle).state) == (JobState.PENDING, JobState.RUNNING)


def test_idle_runs_that_make_room_together_are_requeued_together() -> None:
    lab = lab_with(then="requeue", notice_s=100.0)
    idle = [lab.submit(request=request(gpus=1)) for _ in range(2)]
    pass_time(lab, 60)
    both = lab.submit(request=request(gpus=2))
    pass_time(lab, 5)
    assert [lab.job(job).state for job in (both, *idle)] == [JobState.RUNNING, JobState.PENDING, JobState.PENDING]


def test_a_job_for_another_node_or_type_requeues_nothing() -> None:
    lab, idle = idle_lab(more_nodes=("n2",), models={"n1": "NVIDIA A100-SXM4-80GB", "n2": "NVIDIA H100"})
    fillers = [lab.submit(request=request(gpus=1, nodelist=("n2",)), ignore_idle=True) for _ in range(2)]
    assert [lab.job(job).state for job in fillers] == [JobState.RUNNING] * 2
    for wanted in ({"gpu_type": "h100"}, {"nodelist": ("n2",)}, {"exclude": ("n1",)}):
        assert lab.job(lab.submit(request=request(gpus=1, **wanted))).state is JobState.PENDING
    pass_time(lab, 5)
    assert lab.job(idle).state is JobState.RUNNING
    lab.submit(request=request(gpus=1))
    pass_time(lab, 5)
    assert lab.job(idle).state is JobState.PENDING


def test_work_begun_before_somebody_waits_spares_the_run() -> None:
    lab, idle = idle_lab()
    lab.load[0] = 0.9
    pass_time(lab, 1)
    lab.submit(request=request(gpus=1))
    pass_time(lab, 5)
    assert (lab.job(idle).state, why(lab, idle)) == (JobState.RUNNING, None)


def test_a_cancel_policy_waits_for_nobody() -> None:
    lab = lab_with(then="cancel")
    idle = lab.submit(request=request(gpus=1))
    pass_time(lab, 20)
    expected = "its GPUs have been idle for 19:00; if that lasts for another 11:00, it will be cancelled"
    assert why(lab, idle) == expected
    pass_time(lab, 20)
    assert lab.job(idle).state is JobState.CANCELLED


OUTLOOKS = {
    "nothing is configured": ({"then": "off"}, {}, (), "no action is configured"),
    "it cannot be requeued": (
        {"then": "requeue"},
        {"retry": RetryRule(requeue=False)},
        (),
        "it cannot be requeued, so it continues",
    ),
    "nobody can look at its logs": (
        {"then": "cancel"},
        {},
        None,
        "it continues, since nothing shows that its processes are idle too",
    ),
}


@pytest.mark.parametrize("name", OUTLOOKS)
def test_what_comes_of_an_idle_run_is_said(name: str) -> None:
    settings, asked, marks, expected = OUTLOOKS[name]
    lab = lab_with(**settings)
    idle = lab.submit(request=request(gpus=1), **asked)
    pass_time(lab, 45, marks=marks)
    assert why(lab, idle) == f"its GPUs have been idle for 44:00; {expected}"
