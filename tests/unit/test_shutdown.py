"""What the scheduler does while the machine is being shut down: runs end with notice, nothing starts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from loop_bench import loop_bench

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon import loop as loop_module
from gpusched.daemon.service_manager import ServiceManager
from gpusched.model.execution import StopOrder
from gpusched.model.settings import DaemonSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.testing import launch, request

# aiohttp's, of the gate that is put around the application.
pytestmark = pytest.mark.filterwarnings("ignore:Changing state of started")

FOREVER = SimulatedOutcome(runs_s=float("inf"), stop_takes_s=5, signal=15)


def reason(lab: Lab, job_id: int) -> str:
    found = lab.scheduler.answers.reason_for(lab.job(job_id))
    assert found is not None
    return found.text


def test_runs_are_ended_and_requeued_and_no_job_starts() -> None:
    lab = Lab(gpus=1, outcome=FOREVER)
    first = lab.submit(request=request(gpus=1))
    second = lab.submit(request=request(gpus=1))
    lab.tick()
    lab.ticker.go_down(60.0)
    lab.tick()
    assert lab.job(first).state is JobState.COMPLETING
    lab.tick(6)
    for _ in range(3):
        lab.tick(1)
        lab.read()
    lab.tick()
    assert (lab.job(first).state, lab.job(first).requeues) == (JobState.PENDING, 1)
    assert lab.job(first).reason is ReasonCode.NODE_DOWN
    assert lab.job(second).state is JobState.PENDING
    assert not lab.scheduler.state.open_runs
    for job_id in (first, second):
        assert "n1 is being shut down" in reason(lab, job_id)
    lab.ticker.stay_up()
    lab.tick()
    assert lab.job(first).state is JobState.RUNNING


def test_runs_on_other_nodes_go_on() -> None:
    lab = Lab(gpus=1, outcome=FOREVER, more_nodes=("n2", "n3"))
    here, there, gang, elsewhere = (
        lab.submit(request=request(gpus=0, **where))
        for where in (
            {"nodelist": ("n1",)},
            {"nodelist": ("n2",)},
            {"nodes": 2, "nodelist": ("n1", "n2")},
            {"nodes": 2, "nodelist": ("n2", "n3")},
        )
    )
    for _ in range(3):
        lab.tick(1)
    lab.ticker.go_down(60.0)
    assert lab.scheduler.runs_here == 2
    for _ in range(12):
        lab.tick(1)
    states = [lab.job(job_id).state for job_id in (here, there, gang, elsewhere)]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.PENDING, JobState.RUNNING]
    assert lab.scheduler.runs_here == 0


def test_a_run_gets_its_own_grace_up_to_the_shutdown_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(outcome=FOREVER)
    patient = lab.submit(launch=launch("true", grace_s=300.0))
    quick = lab.submit(launch=launch("true", grace_s=5.0))
    lab.tick()
    sent: dict[str, Any] = {}
    monkeypatch.setattr(type(lab.engine), "order", lambda self, run, order: sent.__setitem__(run, order))
    lab.ticker.go_down(60.0)
    assert sent == {
        f"{patient}.1": StopOrder("shutdown", grace_s=60.0),
        f"{quick}.1": StopOrder("shutdown", grace_s=5.0),
    }


def test_a_run_ended_by_systemd_is_not_restarted_in_the_same_tick() -> None:
    """Under systemd the units of runs are ended before the daemon hears anything."""
    lab = Lab(gpus=1, outcome=FOREVER)
    job_id = lab.submit(request=request())
    lab.tick()
    lab.engine.order(f"{job_id}.1", StopOrder("shutdown", grace_s=30.0))
    lab.tick(6)
    lab.tick()
    assert lab.scheduler.is_going_down
    assert (lab.job(job_id).state, lab.job(job_id).run) == (JobState.PENDING, 1)


def test_an_end_by_a_finished_shutdown_stops_nothing() -> None:
    """The daemon was gone before its runs: after the reboot their ends are read from the spool."""
    lab = Lab(gpus=1, outcome=FOREVER)
    job_id = lab.submit(request=request())
    lab.tick()
    lab.engine.order(f"{job_id}.1", StopOrder("shutdown", grace_s=30.0))
    lab.clock.advance(6)
    lab.scheduler.head.boot_id = "the next one"
    lab.tick()
    lab.tick()
    assert not lab.scheduler.is_going_down
    assert (lab.job(job_id).state, lab.job(job_id).run) == (JobState.RUNNING, 2)


# --- the loop ----------------------------------------------------------------------------------------


Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a loop until it ends by itself; answers with what systemd was told."""
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))

    def running(lab: Lab, goes_down: Callable[[], bool], at_ready: Callable[[], None]) -> list[str]:
        with loop_bench(lab, tmp_path, goes_down) as bench:
            bench.run(at_ready)
            return bench.manager.said

    return running


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def a_lab(**daemon: Any) -> Lab:
    lab = Lab(gpus=0, outcome=FOREVER, daemon=DaemonSettings(poll_s=0.02, **daemon))
    lab.submit()
    lab.tick()
    return lab


def test_a_plain_term_ends_the_daemon_at_once_and_leaves_runs_alone(run: Run) -> None:
    lab = a_lab()
    said = run(lab, lambda: False, term)
    assert "READY=1" in said
    assert "STOPPING=1" in said
    assert lab.job(1).state is JobState.RUNNING
    assert not any("coming to their end" in word for word in said)


def test_runs_are_waited_for_during_a_shutdown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    tick = lab.ticker.tick

    def ticking() -> None:
        lab.clock.advance(1.0)
        tick()

    monkeypatch.setattr(lab.ticker, "tick", ticking)
    said = run(lab, lambda: True, term)
    assert (lab.job(1).state, lab.job(1).reason) == (JobState.PENDING, ReasonCode.NODE_DOWN)
    assert any("1 run still running" in word for word in said)
    assert any(word.startswith("EXTEND_TIMEOUT_USEC=") for word in said)


def test_waiting_for_a_stubborn_run_times_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_LAST_WORDS_S", 0.1)
    lab = a_lab(shutdown_grace_s=0.1)
    run(lab, lambda: True, term)
    assert lab.job(1).state is JobState.COMPLETING


def test_a_machine_that_stays_up_starts_jobs_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    lab.scheduler.is_going_down = True

    def look() -> bool:
        # Asked at a poll; what follows is the end of the test, by a second TERM that asks again.
        asyncio.get_running_loop().call_later(0.05, term)
        return False

    run(lab, look, lambda: None)
    assert not lab.scheduler.is_going_down


def test_the_watchdog_is_pinged_only_by_completed_ticks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    alive: list[int] = []
    monkeypatch.setattr(ServiceManager, "alive", lambda self: alive.append(lab.ticker.ticks))
    run(lab, lambda: False, lambda: asyncio.get_running_loop().call_later(0.2, term))
    assert len(alive) > 1
    alive.clear()

    def failing() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(lab.ticker, "tick", failing)
    run(lab, lambda: False, lambda: asyncio.get_running_loop().call_later(0.2, term))
    assert alive == []


def test_systemd_shows_the_number_of_jobs_and_reloads(run: Run) -> None:
    lab = a_lab()

    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.get_running_loop().call_later(0.2, term)

    said = run(lab, lambda: False, hang_up)
    assert "STATUS=1 running" in said
    assert said.count("READY=1") == 2
    assert said.index("RELOADING=1") < len(said) - 1 - said[::-1].index("READY=1")
