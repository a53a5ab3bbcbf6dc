"""What a card measures of itself: memory errors, repairs, heat, modes that change; and drivers that were updated."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_builders import UUID, reading, sample, whole
from hypothesis import given
from hypothesis import strategies as st
from lab import ROOT, Lab

from gpusched.daemon.watch.gpus import GpuAlerts
from gpusched.gpu.history import Heat, ailments
from gpusched.gpu.nvml import LOOK_S, LibraryFile, loaded_version
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import Clearance, GpuProcess, GpuSample
from gpusched.model.commands import Drain
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports.tables import CLEARANCES, DRAINS
from gpusched.testing import request

SETTINGS = GpuSettings(free_polls=1)
OFF = replace(SETTINGS, ecc_errors=0, remap_failed=False)
CLEARED = Clearance(UUID, 5.0, 3)

SICK: dict[str, tuple[GpuSample, GpuSettings, Clearance | None, str | None]] = {
    "nothing is told": (sample(), SETTINGS, None, None),
    "nothing is wrong": (sample(ecc_errors=0, remap_failed=False, remap_pending=False), SETTINGS, None, None),
    "a memory error": (sample(ecc_errors=1), SETTINGS, None, "1 uncorrectable memory error; reset it"),
    "more of them": (sample(ecc_errors=3), SETTINGS, None, "3 uncorrectable memory errors; reset it"),
    "fewer than count": (sample(ecc_errors=3), replace(SETTINGS, ecc_errors=4), None, None),
    "accepted ones": (sample(ecc_errors=3), SETTINGS, CLEARED, None),
    "new ones beside accepted ones": (sample(ecc_errors=5), SETTINGS, CLEARED, "2 uncorrectable memory errors"),
    "new ones after a reset": (sample(ecc_errors=2), SETTINGS, CLEARED, "2 uncorrectable memory errors"),
    "cleared without a count": (sample(ecc_errors=2), SETTINGS, Clearance(UUID, 5.0), "2 uncorrectable memory errors"),
    "errors that nobody counts": (sample(ecc_errors=3), OFF, None, None),
    "a failed repair": (sample(remap_failed=True), SETTINGS, None, "could not be replaced; the card needs repair"),
    "a failed repair, switched off": (sample(remap_failed=True), OFF, None, None),
    "a repair that waits": (sample(remap_pending=True), SETTINGS, None, None),
    "a repair that waits, switched on": (
        sample(remap_pending=True),
        replace(SETTINGS, remap_pending=True),
        None,
        "a broken memory row waits for a reset: nvidia-smi -r -i 0",
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_faults_make_a_gpu_suspect(name: str) -> None:
    found, settings, clearance, expected = SICK[name]
    told = ailments(found, False, settings, clearance)
    assert (not told) if expected is None else (len(told) == 1 and expected in told[0])
    tracker = GpuTracker(settings)
    tracker.set_clearances({} if clearance is None else {UUID: clearance})
    tracker.observe(reading(10.0, found), {}, {})
    (view,) = tracker.views(10.0)
    status = tracker.status(UUID)
    if expected is None:
        assert (view.why_not, status.state) == (None, "idle")
    else:
        assert (view.why_not, status.state) == (f"suspect: {told[0]}", "suspect")


def test_a_pending_repair_is_shown_and_does_not_close_the_gpu() -> None:
    tracker = GpuTracker(SETTINGS)
    tracker.observe(reading(10.0, sample(remap_pending=True)), {}, {})
    assert tracker.status(UUID).why == "a broken memory row waits for a reset: nvidia-smi -r -i 0"


def test_a_reset_gpu_is_healthy_again() -> None:
    tracker = GpuTracker(SETTINGS)
    for at, errors in ((10.0, 1), (11.0, 0)):
        tracker.observe(reading(at, sample(ecc_errors=errors)), {}, {})
    assert tracker.status(UUID).state == "idle"


def hot(*temperatures: float | None, every_s: float = 10.0, settings: GpuSettings = SETTINGS) -> list[bool]:
    heat = Heat()
    told = []
    for number, temperature in enumerate(temperatures):
        heat.fold(number * every_s, sample(temperature_c=temperature, slowdown_c=90.0), settings)
        told.append(heat.is_hot)
    return told


def test_a_gpu_becomes_hot_after_a_while_and_healthy_after_as_long() -> None:
    assert hot(*[95.0] * 7, *[80.0] * 7) == [False] * 6 + [True] * 7 + [False]
    assert not any(hot(*[95.0] * 6, 89.0, *[95.0] * 6))
    assert hot(*[90.0] * 7, *[80.0] * 3, 95.0, *[80.0] * 6)[6:] == [True] * 11
    assert not any(hot(*[95.0] * 20, settings=replace(SETTINGS, hot_s=0)))
    assert hot(*[95.0] * 7, *[None] * 20)[6:] == [True] * 21


@given(st.lists(st.sampled_from([80.0, 89.9, 90.0, 99.0, None]), min_size=1, max_size=40))
def test_a_gpu_changes_state_only_after_a_full_period(temperatures: list[float | None]) -> None:
    told = hot(*temperatures)
    for at, (before, after) in enumerate(zip([False, *told[:-1]], told, strict=True)):
        if before is not after:
            spell = [one >= 90.0 for one in temperatures[max(0, at - 6) : at + 1] if one is not None]
            assert set(spell) == {after}


def test_without_a_threshold_no_gpu_is_hot() -> None:
    heat = Heat()
    for at in range(1000):
        heat.fold(at, sample(temperature_c=120.0), SETTINGS)
    assert not heat.is_hot


def test_a_hot_gpu_says_so_with_its_limit() -> None:
    tracker = GpuTracker(SETTINGS)
    for at in (0.0, 30.0, 60.0):
        tracker.observe(reading(at, sample(temperature_c=95.0, slowdown_c=92.0)), {}, {})
    assert tracker.status(UUID).why == (
        "suspect: it was too hot (92 C) for 1:00 and throttles; check its fans and airflow"
    )


# --- MIG --------------------------------------------------------------------------------------------


def test_a_gpu_whose_mig_mode_changes_is_unused_until_settled() -> None:
    tracker = GpuTracker(replace(SETTINGS, free_polls=2))

    def seen(at: float, **fields: object) -> tuple[str, str | None]:
        tracker.observe(reading(at, sample(**fields)), {}, {})
        return tracker.status(UUID).state, tracker.views(at)[0].why_not

    assert [seen(at)[0] for at in (1, 2)] == ["unknown", "idle"]
    state, why = seen(3, mig_pending=True)
    assert (state, why) == ("drained", "MIG is switched on after a reset: nvidia-smi -r -i 0")
    assert seen(4, mig_pending=True, mig_enabled=True)[0] == "drained"
    assert seen(5, mig_pending=False, mig_enabled=True)[0] == "drained"
    assert seen(6, mig_pending=False)[1] == "healthy in 1 of 2 readings in a row, needed before its first use"
    assert seen(7, mig_pending=False) == ("idle", None)


def test_a_job_on_a_gpu_with_a_pending_mode_continues_and_the_gpu_says_why() -> None:
    tracker = GpuTracker(SETTINGS)
    tracker.observe(reading(1.0, sample(mig_pending=True)), {}, whole("1.1"))
    status = tracker.status(UUID)
    assert status.state == "allocated"
    assert status.why is not None
    assert status.why.startswith("MIG is switched on after a reset")


# --- in the daemon ----------------------------------------------------------------------------------


def test_accepted_errors_stay_accepted_across_a_restart() -> None:
    lab = Lab(gpus=2)
    lab.health[0] = {"ecc_errors": 2}
    lab.tick(1)
    job_id = lab.submit(request=request(gpus=1))
    assert lab.store.runs([job_id])[0].gpus[0].index == 1
    assert lab.scheduler.head.tracker.status("GPU-0").state == "suspect"
    assert lab.store.load(DRAINS) == {}
    lab.ask(Drain(ROOT, ("0",), None))
    job_id = lab.submit(request=request(gpus=1))
    assert lab.store.runs([job_id])[0].gpus[0].index == 0
    assert list(lab.store.load(CLEARANCES).values()) == [Clearance("GPU-0", lab.clock.now(), 2)]
    lab.restart()
    lab.tick(1)
    assert lab.scheduler.head.tracker.status("GPU-0").state == "allocated"
    lab.health[0] = {"ecc_errors": 3}
    lab.tick(1)
    assert lab.scheduler.head.tracker.views(lab.clock.now())[0].why_not is not None
    assert lab.job(job_id).state is JobState.RUNNING


# --- drivers that were updated ----------------------------------------------------------------------


def test_a_replaced_library_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "libnvidia-ml.so.570.86"
    file.write_text("old")
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f0000000000-7f0000001000 r-xp 00000000 08:01 42   /usr/lib/libc.so\n"
        f"7f0000002000-7f0000003000 r-xp 00000000 08:01 43   {file}\n"
    )
    found = LibraryFile.of_this_process(str(maps))
    assert found is not None
    assert not found.was_replaced(0.0)
    file.unlink()
    assert not found.was_replaced(LOOK_S - 1)
    assert found.was_replaced(LOOK_S)
    file.write_text("new one")
    assert found.was_replaced(2 * LOOK_S)


def test_an_unloaded_library_is_not_watched(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n")
    assert LibraryFile.of_this_process(str(maps)) is None
    assert LibraryFile.of_this_process(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version:  gcc 12\n",
            "535.183.01",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("nothing of the kind", None),
    ],
)
def test_the_loaded_module_is_found(tmp_path: Path, text: str, version: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert loaded_version(str(path)) == version
    assert loaded_version(str(tmp_path / "none")) is None


def test_the_admin_sees_the_holder_and_the_problem_of_a_gpu() -> None:
    watch, tracker = GpuAlerts(Lab().scheduler.alerts), GpuTracker(SETTINGS)
    busy = sample(vram_used_mib=8000, processes=[GpuProcess(7, 8000, "eva", name="python")])
    tracker.observe(reading(10.0, busy), {7: "1.1"}, whole("1.1"))
    tracker.begin_release(UUID, "1.1", 11.0)
    told = []
    for at, found in ((20.0, busy), (60.0, busy), (61.0, busy), (70.0, sample()), (71.0, sample(remap_failed=True))):
        tracker.observe(reading(at, found), {7: "1.1"}, whole("1.1"))
        tracker.release_state(UUID, at)
        told += [news.message for news in watch.new_faults(tracker, reading(at, found), "n1")]
    holder, repair = told
    assert holder == "GPU 0 (A100, GPU-0) is suspect: process 7 (python, of eva) of run 1.1 still holds 7.8G"
    assert repair.endswith("is suspect: a broken memory row could not be replaced; the card needs repair")
