"""Devices that the settings declare: how they are written, chosen, booked, named to jobs and released."""

from __future__ import annotations

import pytest

from gpusched.daemon.launch.environment import job_environment
from gpusched.errors import UsageError
from gpusched.gpu.source import choose
from gpusched.gpu.static import StaticSource
from gpusched.gpu.tracker import CLEAN, GpuTracker
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.execution import LaunchSite
from gpusched.model.job import GpuShare, Run
from gpusched.model.settings import GpuSettings, Settings
from gpusched.model.states import RunState
from gpusched.model.static_gpus import StaticGroup, parse_static
from gpusched.testing import job


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("2xnpu:16GiB", [(2, "npu", 16384)]),
        ("2x16GiB:npu", [(2, "npu", 16384)]),
        ("npu:16G", [(1, "npu", 16384)]),
        ("1xAscend 910B:64GiB + 3xfpga:8GiB", [(1, "Ascend 910B", 65536), (3, "fpga", 8192)]),
    ],
)
def test_how_devices_are_written(text: str, groups: list[tuple[int, str, int]]) -> None:
    assert parse_static(text) == tuple(StaticGroup(*group) for group in groups)


@pytest.mark.parametrize("text", ["", "npu", "2x16GiB", "0xnpu:16GiB", "npu:", ":16GiB", "npu:x", "a+", "2000xnpu:1G"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        parse_static(text)


def test_the_source_is_chosen_by_its_declaration() -> None:
    declared = GpuSettings(static="2xnpu:16GiB", static_variable="ASCEND_RT_VISIBLE_DEVICES")
    assert choose(declared, {}).static == ("2xnpu:16GiB", "ASCEND_RT_VISIBLE_DEVICES", None)
    assert choose(declared, {"GPUSCHED_FAKE_GPUS": "1x8G"}).kind == "simulated"
    assert choose(GpuSettings(source="nvml", static="2xnpu:16GiB"), {}).kind == "nvml"
    with pytest.raises(UsageError, match="static GPUs are configured, but not declared"):
        choose(GpuSettings(source="static"), {})


def test_a_declared_gpu_is_free_unless_it_is_booked_and_clean_when_its_run_has_ended() -> None:
    source = StaticSource("2xnpu:16GiB", host="lab1", clock=lambda: 100.0)
    tracker = GpuTracker(GpuSettings(free_polls=1), 60.0)
    seen = source.read()
    tracker.observe(seen, {}, {}, {})
    tracker.observe(seen, {}, {}, {})
    views = tracker.views(100.0)
    assert [(view.why_not, view.why_not_whole, view.vram_total_mib) for view in views] == [(None, None, 16384)] * 2
    share = GpuShare("STATIC-lab1-0", 0)
    tracker.begin_release("STATIC-lab1-0", "1.1", 100.0)
    later = StaticSource("2xnpu:16GiB", host="lab1", clock=lambda: 101.0).read()
    tracker.observe(later, {}, {"STATIC-lab1-0": [("1.1", share)]}, {})
    assert tracker.release_state("STATIC-lab1-0", 101.0) == CLEAN


def test_an_unreadable_gpu_that_is_not_declared_is_still_not_free() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1), 60.0)
    tracker.observe(GpuReading(100.0, "nvml", (GpuSample("GPU-0", 0, "A100", 81920),)), {}, {}, {})
    assert "its memory cannot be read" in (tracker.views(100.0)[0].why_not or "")


@pytest.mark.parametrize("form", ["index", "uuid"])
def test_jobs_find_their_devices_in_the_variable_of_the_node(form: str) -> None:
    run = Run(1, 1, RunState.STARTING, "n1", "boot", 0.0, gpus=(GpuShare("STATIC-n1-1", 1), GpuShare("STATIC-n1-0", 0)))
    settings = Settings(gpu=GpuSettings(ids=form))
    index_of = {"STATIC-n1-0": 0, "STATIC-n1-1": 1}
    base = {"ASCEND_RT_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "7"}
    site = LaunchSite("n1", "/sock")
    env = job_environment(job(), run, base, site, settings, index_of, variable="ASCEND_RT_VISIBLE_DEVICES")
    assert (env["ASCEND_RT_VISIBLE_DEVICES"], env["CUDA_VISIBLE_DEVICES"]) == ("1,0", "")
