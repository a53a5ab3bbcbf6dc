"""Real NVIDIA GPUs, read the way the daemon reads them. Skipped, with the reason, where there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gpusched.gpu.choose import nvidia_signs
from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.tracker import GpuTracker
from gpusched.gpu.worker import GpuWorker
from gpusched.model.cluster import GpuReading
from gpusched.model.settings import GpuSettings

pytestmark = pytest.mark.hardware


@pytest.fixture(scope="module")
def source() -> Iterator[NvmlSource]:
    """The real source, when it finds a GPU."""
    found = NvmlSource({})
    reading = found.read()
    if not reading.gpus:
        found.close()
        traces = ", ".join(nvidia_signs()) or "none"
        why = reading.error or "NVML finds no NVIDIA GPU"
        pytest.skip(f"no GPU to test with: {why} (traces of NVIDIA hardware: {traces})")
    yield found
    found.close()


def test_figures_are_sane(source: NvmlSource) -> None:
    reading = source.read()
    assert reading.source == "nvml"
    assert reading.error is None
    assert reading.driver_version
    for gpu in reading.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.name
        assert gpu.error is None
        assert not gpu.is_lost
        assert gpu.vram_total_mib is not None
        assert 1024 <= gpu.vram_total_mib < 4 * 1024 * 1024
        assert gpu.vram_used_mib is not None
        assert 0 <= gpu.vram_used_mib <= gpu.vram_total_mib
        assert 0 <= gpu.vram_reserved_mib < gpu.vram_total_mib
        assert gpu.utilisation is None or 0 <= gpu.utilisation <= 1
        assert gpu.temperature_c is None or 0 < gpu.temperature_c < 120
        assert gpu.power_w is None or 0 < gpu.power_w < 2000
        for process in gpu.processes or ():
            assert process.pid > 0


def test_identity_is_stable(source: NvmlSource) -> None:
    def identity(reading: GpuReading) -> list[tuple[object, ...]]:
        return [(gpu.uuid, gpu.index, gpu.name, gpu.pci_bus_id, gpu.minor) for gpu in reading.gpus]

    first, second = source.read(), source.read()
    assert identity(first) == identity(second)
    assert len({gpu.uuid for gpu in first.gpus}) == len(first.gpus)


def test_a_reading_is_quick(source: NvmlSource, capsys: pytest.CaptureFixture[str]) -> None:
    costs_s = []
    for _ in range(20):
        began = time.perf_counter()
        source.read()
        costs_s.append(time.perf_counter() - began)
    costs_s.sort()
    with capsys.disabled():
        print(f"\none NVML reading: median {costs_s[10] * 1e3:.2f} ms, slowest {costs_s[-1] * 1e3:.2f} ms")
    assert costs_s[10] < 0.5


def test_the_worker_and_the_tracker_agree_with_the_source(source: NvmlSource) -> None:
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    settings = GpuSettings(source="nvml", deadline_s=10.0)
    worker = GpuWorker(settings, environ)
    tracker = GpuTracker(settings)
    try:
        for _ in range(settings.free_polls):
            reading = worker.read_blocking(60.0)
            assert reading.error is None
            tracker.observe(reading, {}, {})
    finally:
        worker.close()
    views = {view.uuid: view for view in tracker.views(reading.at)}
    assert views.keys() == {gpu.uuid for gpu in source.read().gpus}
    for gpu in reading.gpus:
        view = views[gpu.uuid]
        if not gpu.mig_enabled and gpu.compute_mode == 0:
            assert view.why_not is None
            assert view.vram_total_mib == (gpu.vram_total_mib or 0) - gpu.vram_reserved_mib


def test_links_and_memory_are_sane(source: NvmlSource) -> None:
    first, second = source.read().gpus, source.read().gpus
    assert [(gpu.link_group, gpu.numa) for gpu in first] == [(gpu.link_group, gpu.numa) for gpu in second]
    groups = [gpu.link_group for gpu in first if gpu.link_group is not None]
    for group in groups:
        # A group is named after its lowest card, and nobody is linked alone.
        assert group == min(gpu.index for gpu in first if gpu.link_group == group)
        assert groups.count(group) > 1
    assert all(gpu.numa is None or 0 <= gpu.numa < 1024 for gpu in first)
