"""Runs over their booking in the daemon: what is recorded, ordered and told. Simulated engine, clock by hand."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.model.execution import NoteOrder, Order
from gpusched.model.job import Alerting, Interactive, RetryRule
from gpusched.model.mentions import render
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.scheduler.invariants import check_invariants
from gpusched.testing import request

GIB = 1024


def lab_with(**gpu: Any) -> Lab:
    """One card of 80 GiB."""
    settings = GpuSettings(**{"free_polls": 1, "vram_over": "kill", "vram_over_grace_s": 30.0, **gpu})
    return Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1e9, stop_takes_s=1), gpu=settings)


def slice_of(lab: Lab, gib: int, **parts: Any) -> int:
    job_id = lab.submit(request=request(gpus=1, vram_mib=gib * GIB), **parts)
    lab.tick(1)
    return job_id


def hold(lab: Lab, run: str, gib: float | None) -> None:
    lab.held[run] = (0, None if gib is None else int(gib * GIB))


def live(lab: Lab, seconds: float) -> None:
    for _ in range(round(seconds / 5)):
        lab.tick(5)


def story(lab: Lab, job_id: int, kind: str) -> list[str]:
    return [render(event.text) for event in lab.store.events(job_id) if event.kind == kind]


def test_an_overuser_is_warned_ended_and_retried_with_more() -> None:
    lab = lab_with()
    job_id = slice_of(lab, 8, retry=RetryRule(retries=1, backoff_s=1), alerting=Alerting(on=("vram_over",)))
    hold(lab, f"{job_id}.1", 20)
    live(lab, 15)
    (told,) = story(lab, job_id, "vram")
    assert told == (
        "it holds 20G of GPU 0, of which it booked 8G; ask for what it needs: --vram 20G; its run will be ended if "
        "this continues for 0:30"
    )
    assert lab.job(job_id).state is JobState.RUNNING
    assert [alert.event for alert in lab.scheduler.alerts.rows.values()] == ["vram_over"]
    live(lab, 60)
    first = lab.store.runs([job_id])[0]
    assert (first.outcome, first.reason) == (JobState.OUT_OF_MEMORY, ReasonCode.GPU_MEMORY_OVER)
    assert first.reason_text == "held 20G of GPU 0, of which it booked 8G"
    assert first.peak_vram_mib == 20 * GIB
    # What it was seen to use, and a quarter more.
    assert lab.job(job_id).spec.request.vram_mib == 25 * GIB
    assert lab.job(job_id).failures == 1


def test_without_the_setting_it_is_warned_and_continues() -> None:
    lab = lab_with(vram_over="warn")
    job_id = slice_of(lab, 8)
    hold(lab, f"{job_id}.1", 20)
    live(lab, 600)
    assert len(story(lab, job_id, "vram")) == 1
    assert (lab.job(job_id).state, lab.job(job_id).run) == (JobState.RUNNING, 1)


SPARED: dict[str, dict[str, Any]] = {
    "nobody knows how much it holds": {"gib": None},
    "the driver lists no processes": {"unlisted": True},
    "it is ignored": {"gpu": {"vram_over": "ignore"}},
    "the card is its own": {"whole": True},
}


@pytest.mark.parametrize("name", SPARED)
def test_exempt_runs_are_neither_warned_nor_ended(name: str) -> None:
    how = SPARED[name]
    lab = lab_with(**how.get("gpu", {}))
    job_id = slice_of(lab, 8) if not how.get("whole") else lab.submit(request=request(gpus=1))
    lab.tick(1)
    hold(lab, f"{job_id}.1", how.get("gib", 20))
    if how.get("unlisted"):
        lab.unlisted.add(0)
    live(lab, 600)
    assert story(lab, job_id, "vram") == []
    assert (lab.job(job_id).state, lab.job(job_id).run) == (JobState.RUNNING, 1)


def test_a_restart_repeats_no_warning_and_restarts_the_grace() -> None:
    lab = lab_with()
    over, neighbour = slice_of(lab, 8), slice_of(lab, 30)
    hold(lab, f"{over}.1", 60)
    live(lab, 25)
    lab.ticker.flush()
    lab.restart()
    live(lab, 25)
    assert lab.job(over).state is JobState.RUNNING
    assert (len(story(lab, over, "vram")), len(story(lab, neighbour, "crowded"))) == (1, 1)
    live(lab, 30)
    assert lab.job(over).state is JobState.OUT_OF_MEMORY


def test_an_order_lost_in_a_crash_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_with()
    job_id = slice_of(lab, 8)
    hold(lab, f"{job_id}.1", 20)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "order", lambda engine, run, order: None)
        live(lab, 60)
    assert lab.job(job_id).state is JobState.COMPLETING
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.engine)
    live(lab, 15)
    assert (lab.job(job_id).state, lab.job(job_id).reason) == (JobState.OUT_OF_MEMORY, ReasonCode.GPU_MEMORY_OVER)


def test_a_neighbour_is_warned_once_why_it_may_fail() -> None:
    lab = lab_with(vram_over="warn")
    over, neighbour = slice_of(lab, 8), slice_of(lab, 30)
    hold(lab, f"{over}.1", 60)
    hold(lab, f"{neighbour}.1", 10)
    live(lab, 300)
    assert story(lab, neighbour, "crowded") == [
        f"job {over} holds 60G of GPU 0, of which it booked 8G; 20G of the 30G that this job booked there can be had"
    ]
    assert story(lab, neighbour, "vram") == []


def test_a_neighbour_with_enough_room_is_not_warned() -> None:
    lab = lab_with(vram_over="warn")
    over, neighbour = slice_of(lab, 8), slice_of(lab, 30)
    hold(lab, f"{over}.1", 20)
    hold(lab, f"{neighbour}.1", 10)
    live(lab, 300)
    assert story(lab, neighbour, "crowded") == []


def test_a_neighbour_out_of_memory_by_overuse_runs_again_elsewhere_free() -> None:
    lab = lab_with(vram_over="warn")
    over = slice_of(lab, 8)
    lab.outcomes["2.1"] = SimulatedOutcome(runs_s=100, exit_code=1, gpu_oom=True)
    victim = slice_of(lab, 30, retry=RetryRule(retries=0))
    hold(lab, f"{over}.1", 60)
    hold(lab, f"{victim}.1", 10)
    live(lab, 130)
    first = lab.store.runs([victim])[0]
    assert (first.outcome, first.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_CROWDED)
    job = lab.job(victim)
    # It waits: what the other holds is not given away a second time.
    assert (job.state, job.failures, job.requeues, job.run) == (JobState.PENDING, 0, 1, 1)
    assert job.spec.request.vram_mib == 30 * GIB
    hold(lab, f"{over}.1", 8)
    live(lab, 330)
    assert lab.job(victim).run == 2


def test_memory_held_beyond_a_booking_is_not_given_to_others() -> None:
    lab = lab_with(vram_over="ignore")
    over = slice_of(lab, 8)
    hold(lab, f"{over}.1", 60)
    live(lab, 10)
    large, small = slice_of(lab, 30), slice_of(lab, 16)
    live(lab, 10)
    assert (lab.job(large).state, lab.job(small).state) == (JobState.PENDING, JobState.RUNNING)
    # What it frees for a moment it may take again.
    hold(lab, f"{over}.1", 8)
    live(lab, 60)
    assert lab.job(large).state is JobState.PENDING
    live(lab, 300)
    assert lab.job(large).state is JobState.RUNNING
    assert check_invariants(lab.scheduler.snapshot(lab.clock.now()), lab.settings) == []


def test_contexts_fit_the_headroom() -> None:
    lab = lab_with()
    first = lab.submit(request=request(gpus=1, gpu_fraction=0.5))
    lab.tick(1)
    hold(lab, f"{first}.1", 40)
    live(lab, 10)
    second = lab.submit(request=request(gpus=1, gpu_fraction=0.5))
    lab.tick(1)
    assert lab.job(second).state is JobState.RUNNING


def test_a_user_at_a_terminal_is_notified_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_with(vram_over="warn")
    job_id = slice_of(lab, 8)
    # The simulated engine has no terminals; here it is only asked what it is told.
    job = lab.scheduler.state.jobs[job_id]
    lab.scheduler.state.jobs[job_id] = replace(job, spec=replace(job.spec, interactive=Interactive(keep=True)))
    said: list[Order] = []
    monkeypatch.setattr(SimulatedEngine, "order", lambda engine, run, order: said.append(order))
    hold(lab, f"{job_id}.1", 20)
    live(lab, 30)
    (note,) = said
    assert isinstance(note, NoteOrder)
    assert "it holds 20G of GPU 0" in note.text


def test_the_owner_is_warned_despite_a_failed_first_commit() -> None:
    lab = lab_with(vram_over="warn")
    job_id = slice_of(lab, 8)
    hold(lab, f"{job_id}.1", 20)
    live(lab, 5)
    lab.store.is_full = True
    live(lab, 20)
    assert lab.scheduler.trouble is not None
    lab.store.is_full = False
    live(lab, 20)
    assert [event.kind for event in lab.store.events(job_id)].count("vram") == 1


def test_a_reload_can_enable_and_disable_it() -> None:
    lab = lab_with(vram_over="ignore")
    job_id = slice_of(lab, 8)
    hold(lab, f"{job_id}.1", 20)
    live(lab, 60)
    assert story(lab, job_id, "vram") == []
    lab.scheduler.settings = replace(lab.settings, gpu=replace(lab.settings.gpu, vram_over="warn"))
    live(lab, 15)
    assert len(story(lab, job_id, "vram")) == 1
