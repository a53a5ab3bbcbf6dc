"""Real NVIDIA GPUs, read the way the daemon reads them. Skipped, with the reason, where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.source import nvidia_signs
from gpusched.gpu.tracker import GpuTracker
from gpusched.gpu.usage import enforcement
from gpusched.gpu.worker import GpuWorker
from gpusched.model.cluster import GpuReading
from gpusched.model.job import GpuShare
from gpusched.model.settings import GpuSettings

pytestmark = pytest.mark.hardware

HELD_MIB = 2048
HOLD = """
import ctypes, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
cuda, size = ctypes.CDLL("libcuda.so.1"), int(sys.argv[2]) << 20
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0)]
codes.append(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
codes.append(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
print("holds" if not any(codes) else codes, flush=True)
sys.stdin.read()
"""
"""A process that allocates this much on the card, with nothing but the driver."""


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
        assert gpu.uuid.startswith("GPU-" if gpu.mig_parent is None else "MIG-")
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
        if not gpu.mig_enabled and gpu.mig_parent is None and gpu.compute_mode == 0:
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


def test_instances_are_parts_of_mig_partitioned_gpus(source: NvmlSource) -> None:
    gpus = source.read().gpus
    cards = {gpu.uuid: gpu for gpu in gpus if gpu.mig_parent is None}
    parts = [gpu for gpu in gpus if gpu.mig_parent is not None]
    for uuid, card in cards.items():
        mine = [part for part in parts if part.mig_parent == uuid]
        assert card.mig_instances == len(mine)
        assert card.mig_enabled or not mine
    for part in parts:
        assert part.uuid.startswith("MIG-")
        assert part.mig_profile
        assert "g." in part.mig_profile
        assert part.vram_total_mib is not None
        assert part.vram_total_mib < (cards[part.mig_parent or ""].vram_total_mib or 0) + 1
    if not parts:
        pytest.skip("no card here is divided by MIG, so no instance could be looked at")


def test_process_memory_is_reported_and_attributed_to_its_run(source: NvmlSource) -> None:
    """What watching stands on: the driver tells the memory of a process, and it is that of the run."""
    card = next((gpu for gpu in source.read().gpus if not gpu.mig_enabled), None)
    if card is None:
        pytest.skip("every card here is divided by MIG")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, card.uuid, str(HELD_MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        said = holder.stdout.readline().strip()
        if said != b"holds":
            pytest.skip(f"no memory could be allocated through libcuda.so.1: {said.decode() or 'it died'}")
        found = next(gpu for gpu in source.read().gpus if gpu.uuid == card.uuid)
        pids = {process.pid: process.vram_mib for process in found.processes or ()}
        if holder.pid not in pids:
            pytest.skip(f"the driver lists {sorted(pids)}, not {holder.pid}: pids of another namespace")
        tracker = GpuTracker(GpuSettings(free_polls=1))
        share = GpuShare(card.uuid, card.index, HELD_MIB // 4)
        tracker.observe(source.read(), {holder.pid: "1.1"}, {card.uuid: [("1.1", share)]})
        (use,) = tracker.shares()[card.uuid]
        assert use.used_mib is not None, "the driver does not tell how much a process holds"
        assert HELD_MIB <= use.used_mib <= HELD_MIB + 2048
        assert use.over_mib >= HELD_MIB - HELD_MIB // 4
        assert enforcement(found, GpuSettings(), None)[0] == "watched"
    finally:
        holder.kill()
        holder.wait()
