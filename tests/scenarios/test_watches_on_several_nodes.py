"""What readings count for on several nodes: each for the node it is of, once, and as long as it is recent."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.watch.foreign import ForeignProcessWatch
from gpusched.daemon.watch.gpus import GpuFaults
from gpusched.daemon.watches import NodeReading
from gpusched.lifecycle.idle import Activity
from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample
from gpusched.model.mentions import render
from gpusched.model.settings import ForeignSettings, GpuSettings, IdleSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.testing import request

GIB = 1024


def make_lab(**sections: Any) -> Lab:
    """Two nodes of one card of 80 GiB."""
    gpu = GpuSettings(free_polls=1, vram_over="kill", vram_over_polls=3, vram_over_grace_s=30.0, astray="end")
    forever = SimulatedOutcome(runs_s=1e9, stop_takes_s=1)
    return Lab(gpus=1, more_nodes=("n2",), outcome=forever, **{"gpu": gpu, **sections})


def start_gang(lab: Lab, **parts: Any) -> str:
    """A job with a slice of the card of each node; its run."""
    job = lab.submit(request=request(gpus=1, nodes=2, vram_mib=8 * GIB), **parts)
    lab.tick(1)
    run = f"{job}.1"
    assert lab.scheduler.state.open_runs[run].nodes == ("n1", "n2")
    return run


def hold(lab: Lab, node: str, run: str, gib: int) -> None:
    if node == "n1":
        lab.held[run] = 0, gib * GIB
    else:
        lab.held_on[node, run] = 0, gib * GIB


def live(lab: Lab, seconds: float) -> None:
    for _ in range(round(seconds / 5)):
        lab.tick(5)


def told(lab: Lab, run: str, kind: str) -> list[str]:
    return [render(event.text) for event in lab.store.events(int(run[:-2])) if event.kind == kind]


# --- more memory than booked --------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_overuse_on_either_node_of_a_gang_is_told_and_ended(node: str) -> None:
    lab = make_lab()
    run = start_gang(lab)
    hold(lab, "n1", run, 8)
    hold(lab, "n2", run, 8)
    live(lab, 30)
    assert told(lab, run, "vram") == []
    hold(lab, node, run, 20)
    live(lab, 10)
    assert told(lab, run, "vram") == []
    live(lab, 5)
    (text,) = told(lab, run, "vram")
    assert text.startswith(f"it holds 20G of GPU 0 on {node}, of which it booked 8G; ask for what it needs: --vram 20G")
    findings = DaemonFacade(lab.ticker).findings(lab.scheduler.state.open_runs[run])
    assert findings.vram_over is not None
    assert findings.vram_over.startswith(
        f"it holds 20G of GPU 0 on {node}, of which it booked 8G; its run will be ended in"
    )
    assert [fact.enforcement for fact in findings.shares.values()] == ["watched", "watched"]
    live(lab, 60)
    (ended,) = lab.store.runs([1])
    assert (ended.outcome, ended.reason) == (JobState.OUT_OF_MEMORY, ReasonCode.GPU_MEMORY_OVER)
    assert ended.reason_text == f"held 20G of GPU 0 on {node}, of which it booked 8G"


def test_overuse_that_moves_between_nodes_is_counted_for_each() -> None:
    lab = make_lab()
    run = start_gang(lab)
    for _ in range(6):
        for over, within in (("n1", "n2"), ("n2", "n1")):
            hold(lab, over, run, 20)
            hold(lab, within, run, 8)
            live(lab, 10)
    assert told(lab, run, "vram") == []


def test_no_run_is_told_and_ended_in_one_tick() -> None:
    lab = make_lab(gpu=GpuSettings(free_polls=1, vram_over="kill", vram_over_grace_s=0.0))
    run = start_gang(lab)
    hold(lab, "n1", run, 20)
    hold(lab, "n2", run, 20)
    live(lab, 15)
    assert (len(told(lab, run, "vram")), lab.job(1).state) == (1, JobState.RUNNING)
    live(lab, 5)
    assert lab.job(1).state is JobState.COMPLETING


def test_a_node_that_is_silent_says_nothing_more_about_its_gpus() -> None:
    lab = make_lab()
    run = start_gang(lab)
    hold(lab, "n2", run, 20)
    live(lab, 20)
    assert len(told(lab, run, "vram")) == 1
    lab.silent.add("n2")
    live(lab, 300)
    assert lab.job(1).state is JobState.RUNNING
    lab.silent.clear()
    live(lab, 15)
    assert lab.job(1).state is JobState.RUNNING, "how long it has been over starts again"
    live(lab, 60)
    assert lab.job(1).state is JobState.OUT_OF_MEMORY


def same_again(lab: Lab, times: int) -> None:
    """The newest readings of both nodes, delivered so often, with a tick after each."""
    for _ in range(times):
        for node in lab.scheduler.cluster:
            assert node.reading is not None
            pids = {pid: run for (name, run), pid in lab.pids_on().items() if name == node.name}
            lab.scheduler.observe_gpus(node.reading, node, pids or None)
        lab.ticker.tick()


def test_the_same_reading_again_counts_once() -> None:
    lab = make_lab()
    run = start_gang(lab)
    stray = lab.submit(request=request())
    hold(lab, "n1", run, 20)
    hold(lab, "n2", run, 20)
    hold(lab, "n2", f"{stray}.1", 20)
    lab.tick(5)
    same_again(lab, 10)
    assert (told(lab, run, "vram"), told(lab, f"{stray}.1", "unbooked")) == ([], [])
    live(lab, 10)
    assert (len(told(lab, run, "vram")), len(told(lab, f"{stray}.1", "unbooked"))) == (1, 1)


# --- GPUs that were not booked ------------------------------------------------------------------------


def test_unbooked_use_on_a_silent_node_ends_no_run() -> None:
    lab = make_lab()
    stray = lab.submit(request=request(nodelist=("n2",)))
    lab.tick(1)
    run = f"{stray}.1"
    hold(lab, "n2", run, 20)
    live(lab, 15)
    assert len(told(lab, run, "unbooked")) == 1
    lab.silent.add("n2")
    live(lab, 300)
    assert lab.job(stray).state is JobState.RUNNING
    lab.silent.clear()
    live(lab, 60)
    assert lab.job(stray).reason is ReasonCode.GPU_UNBOOKED_USE


# --- GPUs that do nothing -----------------------------------------------------------------------------

IDLE = IdleSettings(after_s=600.0, lower_after_s=1200.0, then="cancel", then_after_s=1800.0)


def pass_minutes(lab: Lab, minutes: int) -> None:
    for _ in range(2 * minutes):
        lab.tick(30)
        known = {name: Activity(lab.clock.now(), 0.0, ()) for name in lab.scheduler.idle.suspects()}
        lab.scheduler.idle.note(known, lab.settings)


def test_a_gang_is_idle_only_while_all_its_nodes_say_so() -> None:
    lab = make_lab(idle=IDLE)
    run = start_gang(lab)
    lab.silent.add("n2")
    pass_minutes(lab, 60)
    assert (told(lab, run, "idle"), lab.job(1).state) == ([], JobState.RUNNING)
    lab.silent.clear()
    pass_minutes(lab, 15)
    assert len(told(lab, run, "idle")) == 1
    lab.silent.add("n2")
    pass_minutes(lab, 60)
    assert (lab.scheduler.state.open_runs[run].idle_at, lab.job(1).state) == (None, JobState.RUNNING)
    lab.silent.clear()
    pass_minutes(lab, 60)
    assert (lab.job(1).state, lab.job(1).reason) == (JobState.CANCELLED, ReasonCode.GPU_IDLE)


# --- faults -------------------------------------------------------------------------------------------


def test_a_failed_gang_waits_for_the_faults_of_each_of_its_nodes() -> None:
    lab = make_lab()
    run = lab.scheduler.state.open_runs[start_gang(lab)]
    now = lab.clock.now()
    failed = replace(run, outcome=JobState.FAILED, end_at=now)
    faults, tx = GpuFaults(), lab.scheduler.transaction(now, is_query=True)

    def observe(node: str, faults_until: float) -> None:
        reading = GpuReading(now, "nvml", faults_until=faults_until)
        faults.observe(NodeReading(lab.scheduler.cluster[node], reading, lab.scheduler.state, lab.settings, now))

    observe("n1", now + 1)
    observe("n2", now - 1)
    assert faults.may_be_unread(failed, tx)
    observe("n2", now + 1)
    assert not faults.may_be_unread(failed, tx)


# --- processes of no job ------------------------------------------------------------------------------


@pytest.fixture
def innocent() -> Iterator[int]:
    """A process of this machine."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize(("node", "is_known"), [("n1", True), ("n2", False)])
def test_a_pid_of_another_node_is_nobody_here(innocent: int, node: str, is_known: bool) -> None:
    lab = make_lab(foreign=ForeignSettings(message=("write",), kill_after_s=1.0))
    scheduler = lab.scheduler
    card = GpuSample(
        f"GPU-{node}", 0, "A100", 81920, vram_used_mib=40 * GIB, processes=(GpuProcess(innocent, 40 * GIB),)
    )
    scheduler.observe_gpus(GpuReading(lab.clock.now(), "nvml", (card,)), scheduler.cluster[node], {})
    watch = ForeignProcessWatch(scheduler)

    async def poll() -> None:
        watch.poll()

    asyncio.run(poll())
    assert (watch.notes_of(innocent) is not None) is is_known
