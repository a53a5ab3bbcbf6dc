"""Jobs on GPUs that they did not book, and intruders on GPUs that jobs did: notices, ends and victims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from accidents import AccidentLab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs, pending_order
from gpusched.lifecycle.overuse import intruders_of, unbooked_text
from gpusched.model.cluster import GpuProcess
from gpusched.model.execution import NoteOrder, Order, StopOrder
from gpusched.model.job import AdoptedProcess, Alerting, Interactive, RetryRule
from gpusched.model.mentions import render
from gpusched.model.settings import ForeignSettings, GpuSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.testing import job, request, share

GIB = 1024
FOREVER = SimulatedOutcome(runs_s=1e9, stop_takes_s=1)
MakeLab = Callable[..., AccidentLab]


@pytest.fixture
def lab(accidents: MakeLab) -> AccidentLab:
    """Two GPUs; jobs run until they are ended."""
    return accidents(gpus=2, outcome=FOREVER)


def start(lab: AccidentLab, **parts: Any) -> int:
    job_id = lab.submit(**{"request": request(gpus=1), **parts})
    assert lab.job(job_id).state is JobState.RUNNING
    lab.tick()
    return job_id


def live(lab: AccidentLab, seconds: float) -> None:
    for _ in range(round(seconds / 5)):
        lab.tick(5)


def told(lab: AccidentLab, job_id: int, kind: str) -> list[str]:
    return [render(event.text) for event in lab.store.events(job_id) if event.kind == kind]


def ends_with(lab: AccidentLab, **gpu: Any) -> None:
    lab.scheduler.settings = replace(lab.settings, gpu=replace(lab.settings.gpu, **gpu))


# --- unbooked use -------------------------------------------------------------------------------------


def test_the_owner_of_a_job_on_an_unbooked_gpu_is_notified_once(lab: AccidentLab) -> None:
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 10)
    assert told(lab, job_id, "unbooked") == []
    live(lab, 60)
    (text,) = told(lab, job_id, "unbooked")
    assert text.startswith("unbooked use of GPU 1: process ")
    assert "holds 20G, and the job booked GPU 0; leave CUDA_VISIBLE_DEVICES as the job is given it" in text
    assert "ended" not in text
    assert lab.job(job_id).state is JobState.RUNNING


def test_each_gpu_is_reported_separately(accidents: MakeLab) -> None:
    lab = accidents(gpus=3, outcome=FOREVER)
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 20)
    lab.use(job_id, 2, 20 * GIB)
    live(lab, 20)
    assert [text.partition(":")[0] for text in told(lab, job_id, "unbooked")] == [
        "unbooked use of GPU 1",
        "unbooked use of GPU 2",
    ]


def test_each_run_is_reported_separately(lab: AccidentLab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=30, exit_code=1)
    job_id = start(lab, retry=RetryRule(retries=1, backoff_s=1))
    for run in (f"{job_id}.1", f"{job_id}.2"):
        lab.use(run, 1, 20 * GIB)
    live(lab, 80)
    told_in = [event.run for event in lab.store.events(job_id) if event.kind == "unbooked"]
    assert told_in == [1, 2]


def test_a_job_without_gpus_is_advised_to_request_one(lab: AccidentLab) -> None:
    job_id = start(lab, request=request())
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 20)
    (text,) = told(lab, job_id, "unbooked")
    assert "and the job booked no GPU; ask for one with -g 1" in text


def test_a_restart_notifies_no_owner_twice(lab: AccidentLab) -> None:
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 20)
    adopt_open_runs(lab.restart().state, lab.engine)
    live(lab, 20)
    assert len(told(lab, job_id, "unbooked")) == 1


def test_the_owner_is_notified_despite_a_failed_first_commit(lab: AccidentLab) -> None:
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 10)
    lab.store.is_full = True
    live(lab, 10)
    assert lab.scheduler.trouble is not None
    lab.store.is_full = False
    live(lab, 30)
    assert len(told(lab, job_id, "unbooked")) == 1


def test_the_owners_terminal_and_alerts_are_notified(lab: AccidentLab, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = start(lab, alerting=Alerting(on=("gpu_unbooked",)))
    # The simulated engine has no terminals; here it is only asked what it is told.
    job = lab.scheduler.state.jobs[job_id]
    lab.scheduler.state.jobs[job_id] = replace(job, spec=replace(job.spec, interactive=Interactive(keep=True)))
    said: list[Order] = []
    monkeypatch.setattr(SimulatedEngine, "order", lambda engine, run, order: said.append(order))
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 30)
    (text,) = told(lab, job_id, "unbooked")
    assert said == [NoteOrder(f"job {job_id}: {text}")]
    (alert,) = lab.scheduler.alerts.rows.values()
    assert (alert.event, dict(alert.facts)["message"]) == ("gpu_unbooked", text)


def test_an_owner_without_alerts_is_notified_like_owners_of_foreign_processes(accidents: MakeLab) -> None:
    lab = accidents(gpus=2, outcome=FOREVER, foreign=ForeignSettings(message=("write", "mail", "wall")))
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 30)
    (alert,) = lab.scheduler.alerts.rows.values()
    assert (alert.event, alert.uid, alert.targets) == ("gpu_unbooked", 1000, ("@write", "@mail"))


def test_astray_end_ends_the_job_after_the_grace_without_a_retry(lab: AccidentLab) -> None:
    ends_with(lab, astray="end", vram_over_grace_s=30.0)
    job_id = start(lab, retry=RetryRule(retries=3, backoff_s=1, retry_on=("exit", "signal", "oom")))
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 30)
    (text,) = told(lab, job_id, "unbooked")
    assert text.endswith("; its run will be ended if this continues for 0:30")
    assert lab.job(job_id).state is JobState.RUNNING
    live(lab, 40)
    job = lab.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, ReasonCode.GPU_UNBOOKED_USE)
    assert job.reason_text == "used GPU 1 (20G), which it did not book"
    assert job.run == 1


def test_unbooked_use_that_stops_within_the_grace_ends_nothing(lab: AccidentLab) -> None:
    ends_with(lab, astray="end", vram_over_grace_s=30.0)
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 30)
    lab.uses.clear()
    live(lab, 60)
    assert lab.job(job_id).state is JobState.RUNNING


def test_end_is_ordered_again_after_a_restart(lab: AccidentLab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=1e9, stop_takes_s=1e6)
    ends_with(lab, astray="end", vram_over_grace_s=0.0)
    job_id = start(lab)
    lab.use(job_id, 1, 20 * GIB)
    live(lab, 30)
    assert lab.job(job_id).state is JobState.COMPLETING
    assert pending_order(lab.job(job_id), lab.settings) == StopOrder("unbooked_use")


# --- intruders on booked GPUs ---------------------------------------------------------------------------


def test_the_owner_is_notified_of_a_foreign_process_on_its_gpu_once(lab: AccidentLab) -> None:
    job_id = start(lab, alerting=Alerting(on=("gpu_intruder",)))
    lab.strangers[0] = 4 * GIB
    live(lab, 60)
    (text,) = told(lab, job_id, "intruder")
    assert text == "foreign process 1 on GPU 0 (python, of eva) holds 4G of what this job booked"
    assert [alert.event for alert in lab.scheduler.alerts.rows.values()] == ["gpu_intruder"]
    adopt_open_runs(lab.restart().state, lab.engine)
    live(lab, 30)
    assert len(told(lab, job_id, "intruder")) == 1


def test_negligible_use_is_not_reported(lab: AccidentLab) -> None:
    job_id = start(lab)
    lab.strangers[0] = 100
    live(lab, 60)
    assert told(lab, job_id, "intruder") == []


def test_the_owner_of_another_gpu_is_not_notified(lab: AccidentLab) -> None:
    job_id = start(lab)
    lab.strangers[1] = 4 * GIB
    live(lab, 60)
    assert told(lab, job_id, "intruder") == []


def test_the_owner_is_notified_of_a_job_that_did_not_book_its_gpu(lab: AccidentLab) -> None:
    astray, booker = start(lab), start(lab)
    lab.use(astray, 1, 20 * GIB)
    live(lab, 60)
    assert told(lab, booker, "intruder") == [
        f"job {astray}, which did not book GPU 1, holds 20G of it; its owner is notified"
    ]
    assert told(lab, booker, "unbooked") == []
    assert told(lab, astray, "intruder") == []


# --- victims --------------------------------------------------------------------------------------------


def test_a_victim_of_an_intruding_job_is_repeated_free(accidents: MakeLab) -> None:
    lab = accidents(gpus=2, outcome=FOREVER)
    astray = start(lab)
    lab.outcome = SimulatedOutcome(runs_s=300, exit_code=1, gpu_oom=True)
    victim = start(lab, retry=RetryRule(retries=0))
    lab.use(victim, 1, 50 * GIB)
    lab.use(astray, 1, 20 * GIB)
    live(lab, 320)
    job = lab.job(victim)
    assert (job.state, job.failures, job.requeues) == (JobState.PENDING, 0, 1)
    (run, *_) = lab.store.runs([victim])
    assert (run.outcome, run.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_CROWDED)
    assert (
        render(run.reason_text or "")
        == f"job {astray}, which did not book GPU 1, held 20G of it; it had ended as OUT_OF_MEMORY"
    )


def test_a_job_that_runs_out_of_memory_by_itself_is_charged(accidents: MakeLab) -> None:
    lab = accidents(gpus=2, outcome=FOREVER)
    astray = start(lab)
    lab.outcome = SimulatedOutcome(runs_s=300, exit_code=1, gpu_oom=True)
    own = start(lab, retry=RetryRule(retries=0))
    lab.use(own, 1, 50 * GIB)
    # A context is no matter.
    lab.use(astray, 1, 400)
    live(lab, 320)
    assert lab.job(own).state is JobState.OUT_OF_MEMORY


def test_an_adopted_job_is_reported_with_its_booking_at_adoption() -> None:
    process = GpuProcess(4711, 9 * GIB, "ann", 1.0, "python", "1.1")
    (one,) = intruders_of("GPU-1", 1, [process])
    adopted = job(1, adopted=AdoptedProcess(4711, 99, "boot"))
    text = unbooked_text(one, adopted, [share(0)], GpuSettings())
    assert text == (
        "unbooked use of GPU 1: process 4711 (python) holds 9G, and the job booked GPU 0 when it was adopted"
    )


def test_processes_of_one_run_are_one_intruder() -> None:
    processes = [GpuProcess(pid, mib, "ann", 1.0, "python", "1.1") for pid, mib in ((7, 100), (8, 4000), (9, None))]
    (one,) = intruders_of("GPU-1", 1, processes[:2])
    assert (one.process.pid, one.vram_mib) == (8, 4100)
    (one,) = intruders_of("GPU-1", 1, processes)
    assert (one.vram_mib, one.held) == (None, "memory")


@pytest.mark.parametrize(("own_gib", "is_victim"), [(30, True), (45, False)], ids=["keeps to it", "is over it"])
def test_a_slice_is_a_victim_only_within_its_booking(accidents: MakeLab, own_gib: int, is_victim: bool) -> None:
    lab = accidents(gpus=2, outcome=FOREVER)
    astray = start(lab)
    lab.outcome = SimulatedOutcome(runs_s=300, exit_code=1, gpu_oom=True)
    victim = start(lab, request=request(gpus=1, vram_mib=40 * GIB))
    lab.use(victim, 1, own_gib * GIB)
    lab.use(astray, 1, (80 - own_gib) * GIB - 100)
    live(lab, 320)
    (run, *_) = lab.store.runs([victim])
    assert (run.reason is ReasonCode.GPU_CROWDED) is is_victim
