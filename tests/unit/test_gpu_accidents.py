"""Accidents of GPUs while jobs wait for them: what is placed, and who is charged. See `accidents`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from accidents import AccidentLab
from lab import ROOT

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.cluster import GpuState
from gpusched.model.commands import Drain, Submit
from gpusched.model.job import RetryRule
from gpusched.model.settings import GpuSettings, NodeSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.testing import request

MakeLab = Callable[..., AccidentLab]
QUICK = GpuSettings(free_polls=1, release_wait_s=4)
LEFT_MIB = 20 * 1024


@pytest.fixture
def lab(accidents: MakeLab) -> AccidentLab:
    """Four GPUs that are free after one good reading; runs last 10 s."""
    return accidents(gpu=QUICK)


def state(lab: AccidentLab, gpu: int) -> str:
    return lab.scheduler.head.tracker.status(f"GPU-{gpu}", now=lab.clock.now()).state


def test_the_player_reports_run_processes_on_unbooked_gpus(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1))
    lab.tick()
    (booked,) = (share.index for share in lab.scheduler.state.open_runs[f"{first}.1"].gpus)
    lab.use(first, booked, 100)
    lab.use(first, 3, 1000)
    reading = lab.take_reading()
    pid = lab.scheduler.state.open_runs[f"{first}.1"].pid
    assert [(gpu.vram_used_mib, [(one.pid, one.vram_mib) for one in gpu.processes or ()]) for gpu in reading.gpus] == [
        (100, [(pid, 100)]),
        (0, []),
        (0, []),
        (1000, [(pid, 1000)]),
    ]


def test_the_player_keeps_memory_after_the_run_until_cleaned(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1))
    lab.tick()
    lab.use(first, 0, 30_000, leaves=LEFT_MIB)
    lab.clock.advance(11)
    lab.engine.events()
    left = lab.take_reading().gpus[0]
    assert (left.vram_used_mib, left.processes) == (LEFT_MIB, ())
    lab.clean(0)
    assert lab.take_reading().gpus[0].vram_used_mib == 0


def test_the_player_loses_and_finds_gpus_and_delivers_faults(lab: AccidentLab) -> None:
    lab.submit(request=request(gpus=4))
    lab.submit(request=request(gpus=4))
    lab.raise_xid(1, 31)
    assert [[xid.number for xid in gpu.xids] for gpu in lab.take_reading().gpus] == [[], [31], [], []]
    lab.lose(2)
    lab.tick()
    assert state(lab, 2) == GpuState.LOST
    lab.find(2)
    lab.tick(31)  # a lost device is looked at again after a while
    assert state(lab, 2) != GpuState.LOST


def test_the_player_serves_unified_memory(accidents: MakeLab) -> None:
    lab = accidents(1, unified=True)
    (gpu,) = lab.take_reading().gpus
    assert gpu.unified_memory
    assert (gpu.vram_total_mib, gpu.vram_used_mib) == (24_000, 4_000)


# --- memory that does not come back -----------------------------------------------------------------


def test_a_gpu_that_becomes_suspect_is_not_given_out_in_the_same_tick(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=4))
    lab.tick()
    for gpu in range(4):
        lab.use(first, gpu, 60_000, leaves=LEFT_MIB)
    second = lab.submit(request=request(gpus=4))
    lab.outcome = SimulatedOutcome(gpu_oom=True, exit_code=1)
    for _ in range(40):
        lab.tick(0.5)
        assert lab.job(second).state is JobState.PENDING
    assert lab.job(first).state is JobState.COMPLETED
    assert [state(lab, gpu) for gpu in range(4)] == [GpuState.SUSPECT] * 4
    for gpu in range(4):
        lab.clean(gpu)
    lab.tick(0.5)
    assert lab.job(second).state is JobState.RUNNING


def test_a_pending_job_starts_on_gpus_that_came_back_clean(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=4))
    lab.tick()
    lab.use(first, 1, 60_000, leaves=LEFT_MIB)
    second = lab.submit(request=request(gpus=3))
    while lab.job(second).state is JobState.PENDING:
        lab.tick(0.5)
    assert [share.index for share in lab.scheduler.state.open_runs[f"{second}.1"].gpus] == [0, 2, 3]


def test_leftover_memory_is_foreign_while_it_is_there(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1))
    lab.tick()
    lab.use(first, 0, 60_000, leaves=LEFT_MIB)
    lab.submit(request=request(gpus=4))

    def foreign_mib() -> int:
        (node,) = lab.scheduler.nodes(lab.clock.now())
        return node.gpus[0].foreign_mib

    lab.tick(11)
    assert foreign_mib() == 0  # the booking of the ended run still stands for it
    for _ in range(10):
        lab.tick(0.5)
    assert (state(lab, 0), foreign_mib()) == (GpuState.SUSPECT, LEFT_MIB)
    lab.clean(0)
    lab.tick(0.5)
    assert foreign_mib() == 0


def test_a_neighbour_that_runs_out_of_leftover_memory_is_repeated_free(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1, vram_mib=30_000))
    lab.tick()
    lab.use(first, 0, 30_000, leaves=70_000)
    lab.tick(11)
    lab.outcome = SimulatedOutcome(runs_s=5, gpu_oom=True, exit_code=1)
    victim = lab.submit(request=request(gpus=1, vram_mib=40_000), retry=RetryRule(retries=0))
    waiting = lab.submit(request=request(gpus=4))
    lab.outcome = SimulatedOutcome(runs_s=10)
    for _ in range(30):
        lab.tick(0.5)
    one, two = lab.store.runs([victim])
    assert (one.gpus[0].index, one.outcome, one.reason) == (0, JobState.NODE_FAIL, ReasonCode.GPU_FOREIGN_USE)
    assert two.gpus[0].index != 0
    assert (lab.job(victim).failures, lab.job(victim).requeues) == (0, 1)
    assert lab.job(waiting).state is JobState.PENDING


# --- what happens to a GPU in a tick counts in the plan of that tick ------------------------------------


def test_a_gpu_drained_for_a_fault_is_not_given_to_a_pending_job(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=4))
    second = lab.submit(request=request(gpus=4))
    lab.tick()
    lab.clock.advance(10)
    lab.raise_xid(1, 79)
    for _ in range(4):
        lab.tick(0.5)
    assert lab.job(first).state is JobState.COMPLETED
    assert lab.job(second).state is JobState.PENDING
    lab.ask(Drain(ROOT, ("1",), None))
    assert lab.job(second).state is JobState.RUNNING


def test_a_gpu_drained_and_undrained_in_one_tick_accepts_work(lab: AccidentLab) -> None:
    lab.submit(request=request(gpus=4))
    second = lab.submit(request=request(gpus=4))
    lab.tick(11)
    lab.clock.advance(0.5)  # the tick that finds the GPUs clean is that of the commands
    lab.ask(Drain(ROOT, ("1",), "dust"), Drain(ROOT, ("1",), None))
    assert lab.job(second).state is JobState.RUNNING


# --- a reading from before the job came -----------------------------------------------------------------


def tick(lab: AccidentLab, *commands: Submit) -> None:
    """A tick without a reading, as when a request wakes the daemon."""
    for command in commands:
        lab.ticker.submit(command, lambda answer: None)
    lab.ticker.tick()


@pytest.fixture
def idle_lab(accidents: MakeLab) -> AccidentLab:
    """Two GPUs, last read 4 s ago; since then a process of no job has taken the first of them."""
    lab = accidents(2, gpu=QUICK)
    lab.tick()
    lab.clock.advance(4)
    lab.strangers[0] = 60_000
    return lab


def test_a_job_after_an_idle_time_waits_for_a_new_reading_and_avoids_foreign_use(idle_lab: AccidentLab) -> None:
    lab = idle_lab
    tick(lab, lab.submission(request=request(gpus=1)), lab.submission(request=request(gpus=1)))
    assert [lab.job(job_id).state for job_id in (1, 2)] == [JobState.PENDING, JobState.PENDING]
    assert lab.scheduler.decide_step.awaited == {"n1"}
    lab.read()
    tick(lab)
    assert not lab.scheduler.decide_step.awaited
    assert [share.index for share in lab.scheduler.state.open_runs["1.1"].gpus] == [1]
    assert lab.job(2).state is JobState.PENDING


def test_jobs_without_gpus_start_while_a_reading_is_awaited(idle_lab: AccidentLab) -> None:
    lab = idle_lab
    tick(lab, lab.submission(request=request(gpus=1)), lab.submission(request=request(cpus=1)))
    assert [lab.job(job_id).state for job_id in (1, 2)] == [JobState.PENDING, JobState.RUNNING]


def test_the_place_of_a_job_awaiting_a_reading_is_kept_until_the_driver_times_out(idle_lab: AccidentLab) -> None:
    lab = idle_lab
    tick(lab, lab.submission(request=request(gpus=1, cpus=8)), lab.submission(request=request(cpus=8)))
    assert [lab.job(job_id).state for job_id in (1, 2)] == [JobState.PENDING, JobState.PENDING]
    lab.scheduler.observe_gpus(replace(lab.take_reading(), error="no answer from the driver for 2.0 s"))
    tick(lab)
    assert [lab.job(job_id).state for job_id in (1, 2)] == [JobState.PENDING, JobState.RUNNING]
    assert not lab.scheduler.decide_step.awaited


def test_a_reading_that_failed_to_apply_confirms_no_start(
    idle_lab: AccidentLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = idle_lab
    reading = lab.take_reading()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
        patch.setattr(type(lab.engine), "owners", raises(OSError("too many open files")))
        lab.scheduler.observe_gpus(reading)
    tick(lab, lab.submission(request=request(gpus=1)))
    assert lab.job(1).state is JobState.PENDING
    assert lab.scheduler.decide_step.awaited == {"n1"}
    lab.read()
    tick(lab)
    assert [share.index for share in lab.scheduler.state.open_runs["1.1"].gpus] == [1]


def raises(error: Exception) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        raise error

    return call


def test_a_job_starts_at_once_on_a_reading_of_the_last_poll(accidents: MakeLab) -> None:
    lab = accidents(2, gpu=QUICK)
    lab.tick()
    lab.clock.advance(lab.settings.daemon.poll_s)
    tick(lab, lab.submission(request=request(gpus=1)))
    assert lab.job(1).state is JobState.RUNNING


def test_a_slow_reading_confirms_a_start(idle_lab: AccidentLab) -> None:
    lab = idle_lab
    tick(lab, lab.submission(request=request(gpus=1)))
    reading = lab.take_reading()
    lab.clock.advance(3)  # the driver took its time, within its deadline
    lab.scheduler.observe_gpus(reading)
    tick(lab)
    assert lab.job(1).state is JobState.RUNNING


# --- GPUs that use the host's memory ----------------------------------------------------------------------


def test_a_whole_unified_gpu_and_booked_memory_do_not_run_together(accidents: MakeLab) -> None:
    lab = accidents(1, unified=True, gpu=QUICK, node=NodeSettings(name="n1", cpus=8, mem_mib=24_000))
    first = lab.submit(request=request(gpus=1))
    second = lab.submit(request=request(mem_mib=20_000))
    third = lab.submit(request=request(gpus=1, vram_mib=6_000))
    assert [lab.job(job_id).state for job_id in (first, second, third)] == [
        JobState.RUNNING,
        JobState.PENDING,
        JobState.PENDING,
    ]
    while lab.job(first).state is not JobState.COMPLETED:
        lab.tick(1)
    assert [lab.job(job_id).state for job_id in (second, third)] == [JobState.RUNNING, JobState.PENDING]
    while lab.job(second).state is not JobState.COMPLETED:
        lab.tick(1)
    assert lab.job(third).state is JobState.RUNNING


def test_booked_host_memory_is_not_foreign_use_of_a_unified_gpu(accidents: MakeLab) -> None:
    lab = accidents(1, unified=True, gpu=QUICK, node=NodeSettings(name="n1", cpus=8, mem_mib=24_000))
    first = lab.submit(request=request(mem_mib=10_000))
    lab.host_used_mib += 10_000
    lab.tick()
    second = lab.submit(request=request(gpus=1, vram_mib=8_000))
    third = lab.submit(request=request(gpus=1, vram_mib=8_000))
    assert [lab.job(job_id).state for job_id in (first, second, third)] == [
        JobState.RUNNING,
        JobState.RUNNING,
        JobState.PENDING,
    ]


def test_used_host_memory_excuses_no_oom_on_a_unified_gpu(accidents: MakeLab) -> None:
    lab = accidents(1, unified=True, gpu=QUICK, node=NodeSettings(name="n1", cpus=8, mem_mib=24_000))
    lab.outcome = SimulatedOutcome(gpu_oom=True, exit_code=1)
    job = lab.submit(request=request(gpus=1, vram_mib=6_000))
    for _ in range(5):
        lab.tick(1)
    assert lab.job(job).state is JobState.OUT_OF_MEMORY
