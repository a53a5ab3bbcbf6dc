"""Lost GPUs and faults read late: who is a victim, what is drained, and how a GPU comes back. See `accidents`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from accidents import AccidentLab
from lab import ROOT

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.cluster import DrainCause, DrainEntry, GpuState
from gpusched.model.commands import Drain
from gpusched.model.job import RetryRule
from gpusched.model.settings import AlertSettings, FaultSettings, GpuSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports.tables import ALERTS, DRAINS
from gpusched.testing import request

MakeLab = Callable[..., AccidentLab]
QUICK = GpuSettings(free_polls=1, release_wait_s=4)
AUTO = FaultSettings(return_to_service="auto", xid_drain=())
CRASH = SimulatedOutcome(runs_s=10, exit_code=1)
LOST = DrainEntry("was lost; once it works again: gctl undrain 0", DrainCause.GPU_LOST)
FELL = DrainEntry("XID 79 (fallen off the bus); once it works again: gctl undrain 0", DrainCause.GPU_FAULT)


@pytest.fixture
def lab(accidents: MakeLab) -> AccidentLab:
    """Two GPUs that are free after one good reading; runs last 10 s."""
    return accidents(2, gpu=QUICK)


def state(lab: AccidentLab, gpu: int) -> str:
    return lab.scheduler.head.tracker.status(f"GPU-{gpu}", now=lab.clock.now()).state


def crash_on_first(lab: AccidentLab) -> int:
    """A job with exit code 1 that runs on GPU 0, and another that waits for a GPU."""
    lab.ask(Drain(ROOT, ("1",), "not now"))
    lab.outcomes["1.1"] = CRASH
    job_id = lab.submit(request=request(gpus=1), retry=RetryRule(retries=0))
    lab.submit(request=request(gpus=1))
    return job_id


def test_an_xid_of_a_lost_gpu_drains_it_and_its_job_is_a_victim(lab: AccidentLab) -> None:
    job_id = crash_on_first(lab)
    lab.tick(9)
    lab.raise_xid(0, 79, before_loss=True)
    lab.tick(1)
    for _ in range(3):
        lab.tick(1)
    (run,) = lab.store.runs([job_id])
    assert (run.outcome, run.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FAILED)
    assert run.reason_text is not None
    assert "XID 79 (fallen off the bus)" in run.reason_text
    assert (lab.job(job_id).state, lab.job(job_id).failures) == (JobState.PENDING, 0)
    assert lab.store.load(DRAINS)["GPU-0"] == FELL


def test_a_job_that_dies_of_a_loss_without_xid_is_a_victim(lab: AccidentLab) -> None:
    job_id = crash_on_first(lab)
    lab.clock.advance(10)
    lab.lose(0)
    lab.ticker.tick()  # the end of the run is heard of before any reading shows the loss
    lab.tick(1)
    lab.tick(1)
    (run,) = lab.store.runs([job_id])
    assert (run.outcome, run.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FAILED)
    assert run.reason_text == "lost GPU 0; it had ended as FAILED"
    assert (lab.job(job_id).state, lab.job(job_id).failures, lab.job(job_id).requeues) == (JobState.PENDING, 0, 1)
    assert lab.store.load(DRAINS)["GPU-0"] == LOST


def test_a_run_that_survives_the_loss_is_ended_as_a_victim(lab: AccidentLab) -> None:
    job_id = crash_on_first(lab)
    lab.tick(2)
    lab.lose(0)
    for _ in range(3):
        lab.tick(1)
    (run,) = lab.store.runs([job_id])
    assert (run.outcome, run.reason, run.reason_text) == (
        JobState.NODE_FAIL,
        ReasonCode.GPU_FAILED,
        "lost GPU 0",
    )


def test_a_gpu_lost_during_the_release_makes_a_victim_of_a_failed_run_only(lab: AccidentLab) -> None:
    for outcome, expected in ((CRASH, JobState.NODE_FAIL), (SimulatedOutcome(runs_s=10), JobState.COMPLETED)):
        lab.outcome = outcome
        job_id = lab.submit(request=request(gpus=2), retry=RetryRule(requeue=False))
        lab.use(job_id, 0, 100, leaves=20_000)
        lab.tick(11)
        lab.tick(1)
        assert lab.job(job_id).state is JobState.COMPLETING
        lab.lose(0)
        for _ in range(4):
            lab.tick(1)
        assert lab.store.runs([job_id])[0].outcome is expected
        lab.find(0)
        lab.clean(0)
        lab.tick(31)
        lab.ask(Drain(ROOT, ("0",), None))
        lab.tick(1)


def test_a_lost_gpu_returns_only_by_undrain(lab: AccidentLab) -> None:
    lab.lose(0)
    lab.tick(1)
    assert (state(lab, 0), lab.store.load(DRAINS)) == (GpuState.LOST, {"GPU-0": LOST})
    lab.find(0)
    lab.tick(31)
    lab.tick(1)
    assert state(lab, 0) == GpuState.SUSPECT
    lab.restart()
    lab.tick(1)
    assert state(lab, 0) == GpuState.SUSPECT
    lab.ask(Drain(ROOT, ("0",), None))
    lab.tick(1)
    assert (state(lab, 0), lab.store.load(DRAINS)) == (GpuState.IDLE, {})


def test_a_lost_gpu_returns_by_itself_when_configured(accidents: MakeLab) -> None:
    lab = accidents(2, gpu=QUICK, fault=AUTO)
    lab.lose(0)
    lab.tick(1)
    lab.find(0)
    lab.tick(31)
    lab.tick(1)
    assert (state(lab, 0), lab.store.load(DRAINS)) == (GpuState.IDLE, {})


def test_a_gpu_undrained_while_lost_is_not_drained_again(lab: AccidentLab) -> None:
    lab.lose(0)
    lab.tick(1)
    lab.ask(Drain(ROOT, ("0",), None))
    lab.tick(1)
    assert (state(lab, 0), lab.store.load(DRAINS)) == (GpuState.LOST, {})
    lab.find(0)
    lab.tick(31)
    lab.tick(1)
    assert state(lab, 0) == GpuState.IDLE
    lab.lose(0)
    lab.tick(1)
    assert lab.store.load(DRAINS) == {"GPU-0": LOST}


def test_a_driver_reload_loses_no_gpu(lab: AccidentLab) -> None:
    lab.tick(1)
    for code in (9, 12, 999):
        lab.nvml.is_initialised, lab.nvml.init_code = False, code
        for _ in range(3):
            lab.tick(11)
            assert state(lab, 0) == GpuState.UNKNOWN
        lab.nvml.init_code = 0
        lab.tick(11)
        lab.tick(1)
        assert (state(lab, 0), lab.store.load(DRAINS)) == (GpuState.IDLE, {})


def test_a_gpu_missing_after_a_reload_is_lost_and_its_run_is_ended(lab: AccidentLab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=1000)
    job_id = lab.submit(request=request(gpus=2), retry=RetryRule(requeue=False))
    lab.tick(1)
    lab.nvml.is_initialised = False
    lab.tick(1)
    gone = lab.devices.pop()
    lab.gpus = 1
    lab.tick(11)
    assert lab.store.load(DRAINS) == {}, "one reading may come from a driver that is still coming up"
    for _ in range(3):
        lab.tick(1)
    assert lab.store.load(DRAINS) == {"GPU-1": replace(LOST, message=LOST.message.replace("undrain 0", "undrain 1"))}
    assert lab.job(job_id).reason_text == "lost GPU 1"
    lab.devices.append(gone)


def test_a_gpu_lost_before_its_reader_restarted_keeps_its_name(lab: AccidentLab) -> None:
    lab.tick(1)
    lab.lose(0)
    lab.nvml.is_initialised = False
    lab.tick(1)
    lab.tick(11)
    assert [view.uuid for view in lab.scheduler.head.tracker.views(lab.clock.now())] == ["GPU-0", "GPU-1"]
    assert state(lab, 0) == GpuState.LOST
    assert lab.store.load(DRAINS) == {"GPU-0": LOST}


def test_a_gpu_lost_before_the_start_loses_its_number_once_it_answers(lab: AccidentLab) -> None:
    lab.lose(0)
    lab.restart()
    assert [view.uuid for view in lab.scheduler.head.tracker.views(0)] == ["GPU-unknown-at-index-0", "GPU-1"]
    lab.find(0)
    lab.tick(31)
    assert [view.uuid for view in lab.scheduler.head.tracker.views(0)] == ["GPU-0", "GPU-1"]


def test_the_admin_is_alerted_once_of_a_lost_gpu(accidents: MakeLab) -> None:
    lab = accidents(2, gpu=QUICK, alert=AlertSettings(admin=("root@localhost",)))
    lab.lose(0)
    for _ in range(3):
        lab.tick(1)
    assert [alert.event for alert in lab.store.load(ALERTS).values()] == ["gpu_lost"]


def test_the_admin_is_alerted_once_of_a_driver_that_reports_no_gpu(accidents: MakeLab) -> None:
    lab = accidents(2, gpu=QUICK, alert=AlertSettings(admin=("root@localhost",)))
    lab.tick(1)
    lab.nvml.is_initialised, lab.nvml.init_code = False, 9
    for _ in range(6):
        lab.tick(11)
    (alert,) = lab.store.load(ALERTS).values()
    assert dict(alert.facts)["message"] == "cannot read the GPUs of n1: the driver no longer lists any GPU"
    lab.nvml.init_code = 0


# --- faults that are read late ----------------------------------------------------------------------


def test_a_failed_run_is_judged_by_a_fault_not_yet_fetched(lab: AccidentLab) -> None:
    job_id = crash_on_first(lab)
    lab.tick(9)
    lab.nvml.stall(True)
    lab.raise_xid(0, 94)
    lab.tick(2)
    lab.tick(1)
    assert lab.job(job_id).state is JobState.COMPLETING, "its card is clean, but its fault may be unread"
    lab.nvml.stall(False)
    lab.tick(0.5)
    run = lab.store.runs([job_id])[0]
    assert (run.outcome, run.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FAILED)


def test_a_silent_listener_delays_a_failed_run_only_briefly(lab: AccidentLab) -> None:
    job_id = crash_on_first(lab)
    lab.tick(9)
    lab.nvml.stall(True)
    lab.tick(2)
    lab.tick(2)
    assert lab.job(job_id).state is JobState.COMPLETING
    lab.tick(2)
    assert lab.job(job_id).state is JobState.FAILED
    assert state(lab, 0) != GpuState.SUSPECT
    lab.nvml.stall(False)


def test_a_successful_run_waits_for_no_fault(lab: AccidentLab) -> None:
    job_id = lab.submit(request=request(gpus=1))
    lab.tick(9)
    lab.nvml.stall(True)
    lab.tick(2)
    lab.tick(0.5)
    assert lab.job(job_id).state is JobState.COMPLETED
    lab.nvml.stall(False)
