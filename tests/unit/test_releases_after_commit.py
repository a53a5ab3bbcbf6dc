"""GPUs of ended runs stay booked until they are proven clean, whatever raises or dies on the way there."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_builders import UUID, reading, sample, whole
from lab import ANN, Lab
from life_builders import started

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.watch.releases import Releases
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Run
from gpusched.model.settings import FaultSettings, GpuSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.testing import request


def fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("a bug")


def one_gpu(**sections: Any) -> Lab:
    return Lab(gpus=1, **sections)


def submit(lab: Lab) -> int:
    return lab.submit(request=request(gpus=1))


def end_dirty(lab: Lab) -> None:
    """The run ends, and its memory does not come back yet."""
    lab.used[0] = 8000
    lab.tick(10)


# --- one call a tick -----------------------------------------------------------------------------------


def test_a_release_that_fails_to_begin_proves_nothing_and_begins_with_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = one_gpu()
    first, second = submit(lab), submit(lab)
    with monkeypatch.context() as patch:
        patch.setattr(GpuTracker, "begin_release", fail)
        end_dirty(lab)
        lab.tick(1)
        assert lab.job(first).state is JobState.COMPLETING
        assert "releases" in {failure.step for failure in lab.scheduler.failures.failing}
    lab.tick(1)
    lab.tick(1)
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETING, JobState.PENDING)
    lab.used[0] = 0
    lab.tick(1)
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETED, JobState.RUNNING)
    assert lab.scheduler.failures.failing == ()


def test_a_gpu_is_watched_from_the_commit_of_the_end_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = one_gpu()
    submit(lab)
    lab.store.is_full = True
    end_dirty(lab)
    assert not lab.scheduler.head.tracker.is_released("1.1")
    lab.store.is_full = False
    lab.tick(1)
    assert lab.scheduler.head.tracker.is_released("1.1")


def test_a_restart_watches_the_gpus_of_all_ended_runs() -> None:
    lab = one_gpu()
    first = submit(lab)
    end_dirty(lab)
    lab.restart()
    assert lab.scheduler.head.tracker.is_released("1.1")
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETING
    lab.used[0] = 0
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETED


def test_the_same_runs_change_nothing_and_others_are_no_longer_watched() -> None:
    tracker = GpuTracker(GpuSettings(release_wait_s=30.0))
    ((_, share),) = whole("1.1")[UUID]
    ended: dict[str, Run] = {"1.1": replace(started()[1], gpus=(share,))}
    tracker.observe(reading(100.0, sample(vram_used_mib=8000)), {}, whole("1.1"))
    tracker.reconcile_releases(ended, 110.0)
    tracker.reconcile_releases(ended, 135.0)
    assert tracker.release_state(UUID, 136.0, "1.1") == "waiting"
    tracker.observe(reading(137.0, sample()), {}, whole("1.1"))
    tracker.reconcile_releases(ended, 138.0)
    assert tracker.release_state(UUID, 138.0, "1.1") == "clean"
    tracker.reconcile_releases({"2.1": ended["1.1"]}, 139.0)
    assert not tracker.is_released("1.1")
    tracker.reconcile_releases({}, 140.0)
    assert tracker.release_state(UUID, 200.0) == "clean", "nobody waits for it any more"
    tracker.reconcile_releases(ended, 210.0)
    assert tracker.release_state(UUID, 240.0, "1.1") == "dirty"
    tracker.reconcile_releases({}, 241.0)
    assert tracker.release_state(UUID, 241.0) == "dirty", "until it is measured clean"


# --- ends that cannot be recorded at once ----------------------------------------------------------------


def test_observed_usage_of_a_run_survives_a_failed_commit() -> None:
    lab = one_gpu(outcome=SimulatedOutcome(runs_s=10))
    submit(lab)
    lab.tick(1)
    lab.held["1.1"] = 0, 7000
    lab.tick(1)
    lab.held.clear()
    lab.store.is_full = True
    lab.tick(10)
    lab.tick(1)
    lab.store.is_full = False
    lab.tick(1)
    (run,) = lab.store.runs([1])
    assert run.outcome is JobState.COMPLETED
    assert run.peak_vram_mib == 7000


def test_an_end_recorded_at_the_fifth_attempt_is_learned_once() -> None:
    lab = Lab()
    lab.scheduler.history.load()
    lab.submit()
    lab.store.is_full = True
    for _ in range(4):
        lab.tick(10)
    lab.store.is_full = False
    lab.tick(1)
    assert lab.job(1).state is JobState.COMPLETED
    assert [len(run_times_s) for run_times_s in lab.scheduler.history.run_times_s()[1].values()] == [1]
    lab.submit()
    lab.tick(10)
    assert [len(run_times_s) for run_times_s in lab.scheduler.history.run_times_s()[1].values()] == [2]


def test_jobs_are_held_for_a_fault_whose_first_tick_failed_to_commit() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1000), fault=FaultSettings(hold_after=1, xid_drain=()))
    running, waiting = submit(lab), submit(lab)
    lab.tick(1)
    lab.store.is_full = True
    lab.xids[0] = (48,)
    lab.tick(1)
    assert lab.scheduler.trouble
    lab.store.is_full = False
    lab.tick(1)
    assert lab.job(running).state is JobState.RUNNING
    assert lab.job(waiting).hold is not None


# --- verdicts --------------------------------------------------------------------------------------------


def test_a_judge_that_raises_delays_neither_ends_nor_starts() -> None:
    lab = one_gpu()
    first, second = submit(lab), submit(lab)
    (releases,) = [one for one in lab.scheduler.watches.all if isinstance(one, Releases)]
    releases._judges = (fail, lambda job, run, tick: run)
    lab.tick(10)
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETED
    assert lab.job(second).state is JobState.RUNNING
    assert lab.scheduler.failures.counts["verdict"] == 1


def test_a_cancelled_run_is_watched_like_any_other() -> None:
    lab = one_gpu(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=0))
    first = submit(lab)
    lab.tick(1)
    lab.ask(Cancel(ANN, Selection(ids=(first,))))
    lab.used[0] = 8000
    lab.tick(1)
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETING
    lab.used[0] = 0
    lab.tick(1)
    lab.tick(1)
    assert lab.job(first).state is JobState.CANCELLED
