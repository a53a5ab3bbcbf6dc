"""When a card counts as given back after a run."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_builders import UUID, reading, sample, slices, whole

from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuProcess, GpuSample
from gpusched.model.settings import GpuSettings
from gpusched.model.value import replace

SETTINGS = GpuSettings(release_wait_s=30.0, baseline_mib=256)
BUSY = sample(vram_used_mib=8000, processes=[(7, 8000)])


def ended(booked: Any = None, busy: GpuSample = BUSY, before: GpuSample | None = None) -> GpuTracker:
    """A tracker whose card was read twice, then with the run 1.1 on it; the run ended at 110."""
    tracker = GpuTracker(SETTINGS)
    for second in range(2):
        tracker.observe(reading(100.0 + second, before or sample()), {}, {})
    tracker.observe(reading(109.0, busy), {7: "1.1"}, booked or whole("1.1"))
    tracker.begin_release(UUID, "1.1", 110.0)
    return tracker


def after(tracker: GpuTracker, found: GpuSample, at: float = 111.0, owners: Any = None, booked: Any = None) -> str:
    """State of the release after one more reading."""
    tracker.observe(reading(at, found), owners or {}, whole("1.1") if booked is None else booked)
    return tracker.release_state(UUID, at)


def test_without_a_release_a_gpu_is_clean() -> None:
    assert GpuTracker(SETTINGS).release_state(UUID, 0.0) == "clean"


def test_a_reading_from_before_the_end_proves_nothing() -> None:
    tracker = ended()
    assert tracker.release_state(UUID, 110.0) == "waiting"
    assert after(tracker, sample(), at=109.9) == "waiting"
    assert after(tracker, sample(), at=110.1) == "clean"


def test_a_clean_gpu_is_used_again_at_once() -> None:
    tracker = ended()
    assert after(tracker, sample(), booked={}) == "clean"
    (view,) = tracker.views(111.0)
    assert (view.why_not, view.why_not_whole, view.foreign_mib) == (None, None, 0)


def test_a_process_that_briefly_outlives_its_run_is_never_foreign() -> None:
    tracker = ended()
    for second in (110.5, 111.0):
        assert after(tracker, sample(vram_used_mib=8500, processes=[(7, 8000), (8, 500)]), at=second) == "waiting"
        assert tracker.views(second)[0].foreign_mib == 500
    assert after(tracker, sample(vram_used_mib=500, processes=[(8, 500)]), at=112.0) == "clean"
    assert tracker.views(112.0)[0].foreign_mib == 500
    lasting = ended()
    after(lasting, sample(vram_used_mib=8000, processes=[(7, 8000)]), at=141.0)
    # It was given up on, and its booking is gone.
    lasting.observe(reading(142.0, sample(vram_used_mib=8000, processes=[(7, 8000)])), {}, {})
    assert lasting.views(142.0)[0].foreign_mib == 8000


@pytest.mark.parametrize(
    ("found", "state", "why"),
    [
        (sample(vram_used_mib=256), "clean", ""),
        (sample(vram_used_mib=257), "waiting", "257M of its memory was not released after run 1.1; no visible process"),
        (sample(vram_used_mib=50, processes=[(7, 50)]), "waiting", "process 7 of run 1.1 still holds 50M"),
        (sample(vram_used_mib=50, processes=[(7, None)]), "waiting", "process 7 of run 1.1 still holds an unknown"),
        (sample(vram_used_mib=None), "waiting", "no reading since the run ended"),
        (sample(error="it must be reset"), "waiting", "no reading since the run ended"),
        (sample(vram_used_mib=5200, processes=[(8, 5000)]), "clean", ""),
        (sample(vram_used_mib=5000, processes=None), "waiting", "was not released"),
        (sample(vram_used_mib=100, processes=None), "clean", ""),
        (sample(vram_used_mib=9000, unified_memory=True), "clean", ""),
        (sample(vram_used_mib=9000, unified_memory=True, processes=None), "clean", ""),
        (sample(vram_used_mib=9000, unified_memory=True, processes=[(7, 1)]), "waiting", "process 7"),
    ],
)
def test_clean_gpus_are_recognized(found: GpuSample, state: str, why: str) -> None:
    tracker = ended()
    assert after(tracker, found, owners={7: "1.1"}) == state
    assert tracker.release_state(UUID, 140.0) == ("clean" if state == "clean" else "dirty")
    if state != "clean":
        suspicion = tracker.views(111.0)[0].why_not or ""
        assert why in suspicion or suspicion in ("its memory cannot be read", "it must be reset")


def test_a_former_process_is_known_when_its_run_is_forgotten() -> None:
    assert after(ended(), sample(vram_used_mib=50, processes=[(7, 50)]), owners={}) == "waiting"


def test_a_reused_pid_is_another_process() -> None:
    busy = replace(BUSY, processes=(GpuProcess(7, 8000, started_at=50.0),))
    other = sample(vram_used_mib=50, processes=[GpuProcess(7, 50, started_at=110.5)])
    assert after(ended(busy=busy), other) == "clean"


def test_a_slice_is_judged_beside_its_neighbours() -> None:
    both = slices(r1=8192, r2=4096)
    tracker = ended(booked=both)
    neighbour = sample(vram_used_mib=4000, processes=[(9, 4000)])
    assert after(tracker, neighbour, owners={9: "2.1"}, booked=both) == "clean"
    tracker = ended(booked=both)
    leftover = sample(vram_used_mib=9000, processes=[(9, 4000)])
    assert after(tracker, leftover, owners={9: "2.1"}, booked=both) == "waiting"


def test_two_slices_that_end_together_do_not_excuse_each_other() -> None:
    both = slices(r1=8192, r2=4096)
    tracker = ended(booked=both)
    tracker.begin_release(UUID, "2.1", 110.0)
    assert after(tracker, sample(vram_used_mib=8000), booked=both) == "waiting"
    assert tracker.release_state(UUID, 111.0, run="2.1") == "waiting"
    assert after(tracker, sample(), at=112.0, booked=both) == "clean"


def test_memory_held_before_the_run_is_not_its_fault() -> None:
    held = sample(vram_used_mib=3000)
    assert after(ended(before=held), held) == "clean"


def test_a_gpu_that_stays_dirty_is_suspect_and_names_the_holder() -> None:
    tracker = ended()
    held = sample(vram_used_mib=8000, processes=[GpuProcess(7, 8000, "eva", name="python")])
    assert after(tracker, held, at=139.0, owners={7: "1.1"}) == "waiting"
    assert after(tracker, held, at=140.0, owners={7: "1.1"}) == "dirty"
    assert after(tracker, held, at=141.0, owners={7: "1.1"}, booked={}) == "dirty"
    (view,) = tracker.views(141.0)
    assert view.why_not == "suspect: process 7 (python, of eva) of run 1.1 still holds 7.8G"
    assert tracker.status(UUID).state == "suspect"


def test_a_process_with_the_gpu_open_is_named_when_the_driver_lists_none() -> None:
    tracker = ended()
    eva, others = GpuProcess(7, None, "eva", name="python"), [GpuProcess(pid, None) for pid in (8, 9, 10)]
    for at, openers in ((140.0, (eva,)), (141.0, (eva, *others))):
        assert after(tracker, sample(vram_used_mib=8000, openers=openers), at=at) == "dirty"
        (view,) = tracker.views(at)
        assert view.why_not is not None
        assert "no visible process holds it, but open: 7 (python, of eva)" in view.why_not
    assert view.why_not.endswith(", 8, 9 and 1 more")


def test_a_dirty_gpu_is_healthy_again_once_measured_clean() -> None:
    tracker = ended()
    assert after(tracker, sample(vram_used_mib=8000), at=141.0) == "dirty"
    assert after(tracker, sample(vram_used_mib=8000), at=142.0, booked={}) == "dirty"
    assert after(tracker, sample(vram_used_mib=10), at=143.0, booked={}) == "clean"
    (view,) = tracker.views(143.0)
    assert (view.why_not, view.why_not_whole, view.foreign_mib) == (None, None, 0)


def test_a_lost_gpu_does_not_delay_its_run() -> None:
    assert after(ended(), sample(is_lost=True, vram_used_mib=None)) == "dirty"
    tracker = ended()
    tracker.observe(reading(111.0, sample("GPU-1")), {}, whole("1.1"))
    assert tracker.release_state(UUID, 111.0) == "dirty"


def test_a_silent_driver_makes_the_gpu_dirty_after_the_wait() -> None:
    tracker = ended()
    tracker.observe(reading(112.0, BUSY, error="no answer from the driver"), {}, whole("1.1"))
    assert tracker.release_state(UUID, 139.0) == "waiting"
    assert tracker.release_state(UUID, 140.0) == "dirty"


def test_a_release_may_begin_before_the_first_reading_after_a_restart() -> None:
    tracker = GpuTracker(SETTINGS)
    tracker.begin_release(UUID, "1.1", 110.0)
    assert tracker.release_state(UUID, 111.0) == "waiting"
    assert after(tracker, sample(vram_used_mib=8000)) == "waiting"
    assert after(tracker, sample(), at=112.0) == "clean"
    never_there = GpuTracker(SETTINGS)
    never_there.begin_release("GPU-9", "1.1", 110.0)
    assert never_there.release_state("GPU-9", 140.0) == "dirty"


def test_a_clock_set_back_restarts_the_wait() -> None:
    tracker = ended()
    assert tracker.release_state(UUID, 50.0) == "waiting"
    assert after(tracker, sample(), at=51.0) == "clean"


def test_beginning_twice_does_not_prolong_the_wait() -> None:
    tracker = ended()
    tracker.begin_release(UUID, "1.1", 135.0)
    assert tracker.release_state(UUID, 140.0) == "dirty"
