"""Jobs whose every run raises a fault that drains its GPU: they are held before they have taken out all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from accidents import AccidentLab
from lab import ANN, BOB, ROOT

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.lifecycle.failures import FaultyRun, GpuFault, Origin, fault_runs_text, repeated
from gpusched.model.commands import Drain, Hold, Release
from gpusched.model.job import Alerting, ArraySpec, RetryRule
from gpusched.model.settings import AlertSettings, FaultSettings, GpuSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.ports.tables import ALERTS, DRAINS
from gpusched.testing import NOW, launch, request

MakeLab = Callable[..., AccidentLab]
QUICK = GpuSettings(free_polls=1, release_wait_s=4)
POISON = launch("python", "poison.py")
CRASH = SimulatedOutcome(runs_s=10, exit_code=1)


# --- which runs show it -------------------------------------------------------------------------------


def faulty(
    job_id: int,
    card: int,
    *,
    run: int = 1,
    xid: int | None = 79,
    at: float = NOW,
    user: str = "ann",
    program: str = "a.py",
    array: int | None = None,
) -> FaultyRun:
    origin = Origin(user, program, job_id, array)
    return FaultyRun(origin, str(job_id), run, GpuFault(f"GPU-{card}", card, xid, at))


SHOWN = {
    "a first fault": ([faulty(1, 0)], 0),
    "a second one of the same job": ([faulty(1, 0), faulty(1, 1, run=2)], 2),
    "a second one of the same job on the same card": ([faulty(1, 0), faulty(1, 0, run=2)], 2),
    "another fault": ([faulty(1, 0), faulty(1, 1, run=2, xid=48)], 0),
    "a loss after the fault of a loss": ([faulty(1, 0), faulty(1, 1, run=2, xid=None)], 2),
    "another task of the array": ([faulty(11, 0, program="x", array=10), faulty(12, 1, program="y", array=10)], 2),
    "another task, on the same card": ([faulty(11, 0, array=10), faulty(12, 0, array=10)], 0),
    "the same program again": ([faulty(1, 0), faulty(2, 1)], 2),
    "the same program again, on the same card": ([faulty(1, 0), faulty(2, 0)], 0),
    "the same program again, days later": ([faulty(1, 0), faulty(2, 1, at=NOW + 100_000)], 0),
    "the same job, days later": ([faulty(1, 0), faulty(1, 1, run=2, at=NOW + 100_000)], 2),
    "another program": ([faulty(1, 0), faulty(2, 1, program="b.py")], 0),
    "another user's": ([faulty(1, 0), faulty(2, 1, user="bob")], 0),
    "jobs of no array are not tasks of one": ([faulty(1, 0, program="x"), faulty(2, 1, program="y")], 0),
}


@pytest.mark.parametrize("name", SHOWN)
def test_repeated_faults_identify_a_job_that_takes_out_gpus(name: str) -> None:
    runs, expected = SHOWN[name]
    assert len(repeated(runs[-1], runs, 2)) == expected


def test_the_number_of_required_runs_is_a_setting() -> None:
    runs = [faulty(1, card, run=card + 1) for card in range(3)]
    assert [len(repeated(runs[-1], runs, most)) for most in (0, 1, 3, 4)] == [0, 3, 3, 0]


def test_the_sentence_names_the_fault_the_gpus_and_the_runs() -> None:
    runs = [faulty(41, card, run=card + 1) for card in range(6)]
    assert fault_runs_text(runs[:1]) == "XID 79 (fallen off the bus) on GPU 0 (job 41, run 1)"
    assert fault_runs_text(runs[:2]) == "XID 79 (fallen off the bus) on GPU 0 (job 41, run 1) and GPU 1 (job 41, run 2)"
    assert fault_runs_text(runs).startswith("XID 79 (fallen off the bus) on 2 more, GPU 2 (job 41, run 3), ")
    assert fault_runs_text([faulty(41, 0, xid=None)]) == "lost GPU 0 (job 41, run 1)"


# --- in the daemon ------------------------------------------------------------------------------------


@pytest.fixture
def lab(accidents: MakeLab) -> AccidentLab:
    """Eight GPUs; every run fails after 10 s."""
    return accidents(8, outcome=CRASH, gpu=QUICK, alert=AlertSettings(admin=("root@localhost",)))


def play(lab: AccidentLab, seconds: int, xid: int = 48, program: str = "poison.py") -> None:
    """Every running job of the program raises the fault on its GPUs shortly before it fails."""
    done: set[str] = set()
    for _ in range(seconds):
        for run in list(lab.scheduler.state.open_runs.values()):
            job = lab.scheduler.state.jobs[run.job_id]
            if run.id in done or program not in job.spec.launch.argv:
                continue
            if run.start_at is not None and lab.clock.now() - run.start_at >= 9:
                done.add(run.id)
                for share in run.gpus:
                    lab.raise_xid(share.index, xid)
        lab.tick(1)


def reason_of(lab: AccidentLab, job_id: int) -> tuple[ReasonCode, str]:
    job = lab.scheduler.state.find(job_id)
    assert job is not None
    reason = lab.scheduler.answers.reason_for(job)
    assert reason is not None
    return reason.code, reason.text


def test_a_job_is_held_after_its_second_fault_and_the_other_gpus_stay(lab: AccidentLab) -> None:
    alerting = Alerting(on=("fail",))
    job_id = lab.submit(request=request(gpus=1), launch=POISON, alerting=alerting)
    other = lab.submit(request=request(gpus=1), launch=launch("python", "good.py"))
    play(lab, 40)
    runs = lab.store.runs([job_id])
    assert [run.reason for run in runs] == [ReasonCode.GPU_FAILED] * 2
    assert len(lab.store.load(DRAINS)) == 2
    assert lab.job(job_id).state is JobState.PENDING
    first, second = (run.gpus[0].index for run in runs)
    shown = (
        f"XID 48 (memory error that cannot be corrected) on GPU {first} (job 1, run 1) and GPU {second} (job 1, run 2)"
    )
    assert reason_of(lab, job_id) == (
        ReasonCode.JOB_HELD_GPU_FAULT,
        f"{shown}; find the cause, then: gctl release 1",
    )
    assert lab.job(other).hold is None
    alerts = {alert.event: dict(alert.facts)["message"] for alert in lab.store.load(ALERTS).values()}
    assert alerts["held"] == f"{shown}; find the cause, then: gctl release 1"
    assert alerts["job_held"] == f"held 1 job of ann (1): {shown}"


def test_an_array_is_held_with_its_unstarted_tasks(lab: AccidentLab) -> None:
    array = lab.submit(request=request(gpus=1), launch=POISON, array=ArraySpec("0-99", throttle=2))
    play(lab, 60)
    assert len(lab.store.load(DRAINS)) == 2
    assert reason_of(lab, array)[0] is ReasonCode.JOB_HELD_GPU_FAULT
    assert lab.scheduler.state.open_runs == {}
    assert lab.scheduler.state.census.held == {ReasonCode.JOB_HELD_GPU_FAULT: 100}
    lab.ask(Release(ANN, (array,)))
    lab.tick(1)
    assert lab.scheduler.state.open_runs
    assert lab.scheduler.state.census.held == {}


def test_many_jobs_of_one_program_are_held_together(lab: AccidentLab) -> None:
    lab.ask(*(Drain(ROOT, (str(gpu),), "not now") for gpu in range(1, 8)))
    ids = [
        lab.submit(request=request(gpus=1), launch=launch(*POISON.argv, str(seed)), retry=RetryRule(requeue=False))
        for seed in range(5)
    ]
    (theirs,) = lab.ask(lab.submission(BOB, request=request(gpus=1), launch=POISON))
    play(lab, 15)
    for gpu in "12":
        lab.ask(Drain(ROOT, (gpu,), None))
        play(lab, 15)
    held = [job_id for job_id in ids if lab.job(job_id).hold]
    assert held == ids[2:]
    assert not lab.job(int(theirs["ids"][0])).hold


def test_a_resubmitted_job_is_held_after_its_first_fault(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1), launch=POISON)
    play(lab, 40)
    assert lab.job(first).hold == "user"
    again = lab.submit(request=request(gpus=1), launch=POISON)
    play(lab, 40)
    assert len(lab.store.runs([again])) == 1
    assert reason_of(lab, again)[0] is ReasonCode.JOB_HELD_GPU_FAULT
    assert len(lab.store.load(DRAINS)) == 3


def test_a_released_job_runs_and_a_later_hold_is_a_users(lab: AccidentLab) -> None:
    job_id = lab.submit(request=request(gpus=1), launch=POISON)
    play(lab, 40)
    lab.ask(Release(ANN, (job_id,)), Hold(ANN, (job_id,)))
    assert reason_of(lab, job_id)[0] is ReasonCode.JOB_HELD_USER
    lab.outcome = SimulatedOutcome(runs_s=5)
    lab.ask(Release(ANN, (job_id,)))
    lab.tick(6)
    lab.tick(1)
    assert lab.job(job_id).state is JobState.COMPLETED


def test_no_job_is_held_when_disabled(accidents: MakeLab) -> None:
    lab = accidents(3, outcome=CRASH, gpu=QUICK, fault=FaultSettings(hold_after=0))
    job_id = lab.submit(request=request(gpus=1), launch=POISON)
    play(lab, 40)
    assert len(lab.store.load(DRAINS)) == 3
    assert lab.job(job_id).hold is None


def test_a_full_disk_only_delays_the_hold(lab: AccidentLab) -> None:
    job_id = lab.submit(request=request(gpus=1), launch=POISON)
    play(lab, 22)
    lab.store.is_full = True
    play(lab, 3)
    lab.store.is_full = False
    play(lab, 15)
    assert lab.job(job_id).hold == "user"
    assert len(lab.store.runs([job_id])) == 2
