"""What every source of GPUs must do, run over the simulated one, and NVML and AMD SMI with fake libraries."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_amdsmi import FakeAmdSmi, FakeCard
from fake_nvml import FakeDevice, FakeNvml

from gpusched.gpu.amd import AmdSource
from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.simulated import SimulatedSource, simulated_uuid
from gpusched.gpu.static import StaticSource
from gpusched.model.cluster import GpuProcess, GpuReading
from gpusched.ports import GpuSource

ME = os.getpid()


@dataclass
class Gpu:
    """A card as both kinds of source can show it."""

    name: str = "A100"
    total_mib: int = 81920
    used_mib: int | None = 0
    processes: list[tuple[int, int | None]] | None = field(default_factory=list)
    busy_percent: int = 0
    lost: bool = False
    mig: bool = False
    instances: list[tuple[str, int, list[tuple[int, int | None]]]] = field(default_factory=list)
    """MIG instances: profile, MiB in use, processes."""
    compute_mode: int = 0
    link_group: int | None = None
    numa: int | None = None


class Bench:
    """A source over cards that the test may change between readings."""

    idle_mib: int | None = 0
    """Memory in use of an idle card, as it is told."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.init_code = 0
        self.now = 1000.0

    def source(self) -> GpuSource:
        """A new source over the cards."""
        raise NotImplementedError

    def apply(self) -> None:
        """Make changes of the cards visible to the sources."""
        raise NotImplementedError


class SimulatedBench(Bench):
    """Writes the JSON file."""

    def __init__(self, gpus: list[Gpu], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gpus)
        self._path = folder / "gpus.json"
        self._version = 0

    def source(self) -> GpuSource:
        self.apply()
        return SimulatedSource(str(self._path), clock=lambda: self.now)

    def apply(self) -> None:
        self._version += 1
        document: dict[str, Any] = {"gpus": [self._entry(gpu) for gpu in self.gpus]}
        if self.init_code:
            document["init_error"] = self.init_code
        draft = self._path.with_suffix(f".{self._version}")
        draft.write_text(json.dumps(document))
        draft.replace(self._path)

    @staticmethod
    def _entry(gpu: Gpu) -> dict[str, Any]:
        processes = None if gpu.processes is None else [{"pid": pid, "vram": mib} for pid, mib in gpu.processes]
        mig = [
            {"profile": profile, "vram_used": mib, "processes": [{"pid": pid, "vram": held} for pid, held in listed]}
            for profile, mib, listed in gpu.instances
        ]
        return {
            **({"mig": mig} if gpu.mig else {}),
            "name": gpu.name,
            "vram": gpu.total_mib,
            "vram_used": gpu.used_mib,
            "processes": processes,
            "utilisation": gpu.busy_percent / 100,
            "lost": gpu.lost,
            "compute_mode": gpu.compute_mode,
            "link_group": gpu.link_group,
            "numa": gpu.numa,
        }


class NvmlBench(Bench):
    """Drives a fake pynvml."""

    def __init__(self, gpus: list[Gpu], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gpus)
        self._nvml = FakeNvml()
        monkeypatch.setitem(sys.modules, "pynvml", self._nvml.module())
        # The addresses of these cards may be those of real devices.
        monkeypatch.setattr("gpusched.gpu.topology.sysfs_numa", lambda bus_id: None)

    def source(self) -> GpuSource:
        self.apply()
        return NvmlSource({}, clock=lambda: self.now, monotonic=lambda: self.now)

    def apply(self) -> None:
        self._nvml.init_code = self.init_code
        if not self._nvml.devices:
            self._nvml.devices = [FakeDevice(simulated_uuid(number)) for number in range(len(self.gpus))]
        self._nvml.peers = {
            frozenset((simulated_uuid(one), simulated_uuid(other)))
            for one, mine in enumerate(self.gpus)
            for other, theirs in enumerate(self.gpus)
            if one != other and mine.link_group is not None and mine.link_group == theirs.link_group
        }
        for number, (device, gpu) in enumerate(zip(self._nvml.devices, self.gpus, strict=True)):
            device.name, device.minor, device.total_mib = gpu.name, number, gpu.total_mib
            device.used_mib, device.compute = gpu.used_mib or 0, gpu.processes or []
            device.gpu_percent, device.lost = gpu.busy_percent, gpu.lost
            device.mig, device.compute_mode = gpu.mig, gpu.compute_mode
            device.instances = [
                FakeDevice(
                    f"MIG-{number}-{slot}",
                    f"{gpu.name} MIG {profile}",
                    int(profile.partition(".")[2].removesuffix("gb")) * 1024,
                    mib,
                    reserved_mib=0,
                    compute=list(listed),
                )
                for slot, (profile, mib, listed) in enumerate(gpu.instances)
            ]
            device.codes = {}
            device.links = {} if gpu.link_group is None else {0: "switch"}
            device.numa = None if gpu.numa is None else (gpu.numa,)
            if gpu.used_mib is None:
                device.codes = {"nvmlDeviceGetMemoryInfo_v2": 999, "nvmlDeviceGetMemoryInfo": 999}
            if gpu.processes is None:
                device.codes["nvmlDeviceGetComputeRunningProcesses_v3"] = 4


class AmdBench(Bench):
    """Drives a fake amdsmi."""

    def __init__(self, gpus: list[Gpu], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gpus)
        self._library = FakeAmdSmi()
        monkeypatch.setitem(sys.modules, "amdsmi", self._library.module())

    def source(self) -> GpuSource:
        self.apply()
        return AmdSource({}, clock=lambda: self.now, monotonic=lambda: self.now, sysfs="/nonexistent")

    def apply(self) -> None:
        library = self._library
        # The nearest of its codes to those of NVML.
        library.init_code = {9: 34, 12: 34, 28: 31, 4: 10, 999: 4294967295}.get(self.init_code, self.init_code)
        if not library.cards:
            library.cards = [
                FakeCard(hip_uuid=f"GPU-{number + 1:016x}", bdf=f"0000:{number:02X}:00.0", node=number + 1)
                for number in range(len(self.gpus))
            ]
        for card, gpu in zip(library.cards, self.gpus, strict=True):
            card.name, card.total_mib, card.used_mib = gpu.name, gpu.total_mib, gpu.used_mib or 0
            card.busy, card.lost, card.processes = gpu.busy_percent, gpu.lost, gpu.processes or []
            card.link = gpu.link_group
            card.temperatures = {(1, 0): 35}
            card.numa = 0xFFFFFFFF if gpu.numa is None else gpu.numa
            card.codes = {}
            if gpu.used_mib is None:
                card.codes["amdsmi_get_gpu_memory_usage"] = 43
            if gpu.processes is None:
                card.codes["amdsmi_get_gpu_process_list"] = 10


class StaticBench(Bench):
    """Declares the cards, which are there as long as their device files are."""

    idle_mib = None

    def __init__(self, gpus: list[Gpu], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gpus)
        self._folder = folder

    def source(self) -> GpuSource:
        self.apply()
        text = "+".join(f"1x{gpu.name}:{gpu.total_mib}MiB" for gpu in self.gpus)
        return StaticSource(text, "ZE_AFFINITY_MASK", f"{self._folder}/dev{{index}}", clock=lambda: self.now)

    def apply(self) -> None:
        for index, gpu in enumerate(self.gpus):
            file = self._folder / f"dev{index}"
            file.unlink(missing_ok=True) if gpu.lost else file.touch()


MakeBench = Callable[..., Bench]
_MAKERS = {"simulated": SimulatedBench, "nvml": NvmlBench, "amdsmi": AmdBench, "static": StaticBench}
_ONLY_NVIDIA = {
    "driver mismatch": "AMD's library does not tell that its driver has another version",
    "test_modes_that_forbid_sharing_are_reported": "AMD SMI knows no mode for one process",
    "test_a_partitioned_gpu_is_followed_by_its_instances": "partitions of AMD's cards are cards of their own",
    "test_a_recreated_instance_is_a_new_one": "partitions of AMD's cards are cards of their own",
}


def bench_maker(source: str, request: pytest.FixtureRequest, folder: Path, patch: pytest.MonkeyPatch) -> MakeBench:
    name = "driver mismatch" if "18-reboot" in request.node.name else request.node.originalname
    if source == "amdsmi" and (why := _ONLY_NVIDIA.get(name)):
        pytest.skip(why)
    return lambda *gpus: _MAKERS[source](list(gpus), folder, patch)


@pytest.fixture(params=["simulated", "nvml", "amdsmi"])
def make_bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    """Make a bench over some cards, of every source that reads them."""
    return bench_maker(request.param, request, tmp_path, monkeypatch)


@pytest.fixture(params=["simulated", "nvml", "amdsmi", "static"])
def make_any_bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    """Make a bench over some cards, of every source: also where nothing is read."""
    return bench_maker(request.param, request, tmp_path, monkeypatch)


def read(source: GpuSource) -> GpuReading:
    """One reading and no more."""
    try:
        return source.read()
    finally:
        source.close()


def test_identity_is_stable_across_readings_and_restarts(make_any_bench: MakeBench) -> None:
    bench = make_any_bench(Gpu("A100"), Gpu("T4", 15360))
    source = bench.source()
    first, second = source.read(), source.read()
    again = read(bench.source())
    names = [(gpu.uuid, gpu.index, gpu.name, gpu.pci_bus_id, gpu.minor) for gpu in first.gpus]
    assert len({uuid for uuid, *_ in names}) == 2
    assert [(index, name) for _, index, name, *_ in names] == [(0, "A100"), (1, "T4")]
    for reading in (second, again):
        assert [(gpu.uuid, gpu.index, gpu.name, gpu.pci_bus_id, gpu.minor) for gpu in reading.gpus] == names
    source.close()


def test_figures_have_their_units(make_bench: MakeBench) -> None:
    (gpu,) = read(make_bench(Gpu(used_mib=3072, processes=[(ME, 3000)], busy_percent=40)).source()).gpus
    assert (gpu.vram_total_mib, gpu.vram_used_mib, gpu.utilisation) == (81920, 3072, 0.4)
    assert gpu.temperature_c == pytest.approx(35)
    assert gpu.power_w is not None
    assert 0 < gpu.power_w < 1000
    assert gpu.processes is not None
    assert [(process.pid, process.vram_mib) for process in gpu.processes] == [(ME, 3000)]
    assert gpu.error is None
    assert not gpu.is_lost


def test_a_reading_carries_its_start_time(make_any_bench: MakeBench) -> None:
    bench = make_any_bench(Gpu())
    source = bench.source()
    bench.now = 1234.5
    assert source.read().at == 1234.5
    source.close()


def test_unknown_is_none_and_no_processes_is_empty(make_bench: MakeBench) -> None:
    bench = make_bench(
        Gpu(used_mib=None), Gpu(processes=None), Gpu(used_mib=700, processes=[(ME, None)]), Gpu(processes=[])
    )
    dark, unlisted, untold, empty = read(bench.source()).gpus
    assert dark.vram_used_mib is None
    assert unlisted.processes is None
    assert untold.processes is not None
    assert [process.vram_mib for process in untold.processes] == [None]
    assert empty.processes == ()


def test_a_lost_gpu_keeps_its_name_and_the_others_continue(make_any_bench: MakeBench) -> None:
    bench = make_any_bench(Gpu("A100"), Gpu("T4"), Gpu("V100"))
    source = bench.source()
    before = source.read()
    bench.gpus[1].lost = True
    bench.apply()
    after = source.read()
    assert [gpu.uuid for gpu in after.gpus] == [gpu.uuid for gpu in before.gpus]
    assert [gpu.is_lost for gpu in after.gpus] == [False, True, False]
    lost = after.gpus[1]
    assert (lost.name, lost.index, lost.vram_used_mib, lost.processes) == ("T4", 1, None, None)
    assert after.error is None
    assert after.gpus[2].vram_used_mib == bench.idle_mib
    source.close()


def test_a_lost_gpu_may_return(make_any_bench: MakeBench) -> None:
    bench = make_any_bench(Gpu(lost=True), Gpu())
    source = bench.source()
    assert source.read().gpus[0].is_lost
    bench.gpus[0].lost = False
    bench.apply()
    bench.now += 60.0
    back = source.read().gpus[0]
    assert not back.is_lost
    assert back.vram_used_mib == bench.idle_mib
    source.close()


@pytest.mark.parametrize("code", [9, 12, 28])
def test_a_machine_without_gpus_is_not_an_error(make_bench: MakeBench, code: int) -> None:
    bench = make_bench()
    bench.init_code = code
    reading = read(bench.source())
    assert (reading.source, reading.gpus, reading.error) == ("none", (), None)
    assert len(reading.notes) == 1
    assert "driver" in reading.notes[0]


@pytest.mark.parametrize(("code", "words"), [(18, "reboot or reload"), (4, "permission"), (999, "unknown error")])
def test_a_broken_driver_is_an_error_until_repaired(make_bench: MakeBench, code: int, words: str) -> None:
    bench = make_bench(Gpu())
    bench.init_code = code
    source = bench.source()
    broken = source.read()
    assert broken.gpus == ()
    assert broken.error is not None
    assert words in broken.error
    bench.init_code = 0
    bench.apply()
    bench.now += 60.0
    mended = source.read()
    assert mended.error is None
    assert len(mended.gpus) == 1
    source.close()


def test_modes_that_forbid_sharing_are_reported(make_bench: MakeBench) -> None:
    plain, exclusive, mig = read(make_bench(Gpu(), Gpu(compute_mode=3), Gpu(mig=True)).source()).gpus
    assert (plain.compute_mode, plain.mig_enabled) == (0, False)
    assert exclusive.compute_mode == 3
    assert mig.mig_enabled


def test_linked_gpus_share_a_group_and_others_have_none(make_bench: MakeBench) -> None:
    groups = (0, None, 0, 3, 3)
    bench = make_bench(*(Gpu(link_group=group, numa=None if group is None else group // 3) for group in groups))
    source = bench.source()
    for _ in range(2):
        gpus = source.read().gpus
        assert [gpu.link_group for gpu in gpus] == [0, None, 0, 3, 3]
        assert [gpu.numa for gpu in gpus] == [0, None, 0, 1, 1]
    source.close()


def test_a_lost_gpu_keeps_its_position(make_bench: MakeBench) -> None:
    bench = make_bench(Gpu(link_group=0, numa=0), Gpu(link_group=0, numa=0), Gpu(link_group=0, numa=1))
    source = bench.source()
    source.read()
    bench.gpus[2].lost = True
    bench.apply()
    lost = source.read().gpus[2]
    assert (lost.is_lost, lost.link_group, lost.numa) == (True, 0, 1)
    assert [gpu.link_group for gpu in source.read().gpus] == [0, 0, 0]
    source.close()


def test_changes_show_in_the_next_reading(make_bench: MakeBench) -> None:
    bench = make_bench(Gpu())
    source = bench.source()
    assert source.read().gpus[0].processes == ()
    bench.gpus[0].used_mib, bench.gpus[0].processes = 2048, [(ME, 2000)]
    bench.apply()
    processes = source.read().gpus[0].processes
    assert processes is not None
    assert isinstance(processes[0], GpuProcess)
    source.close()


def test_a_partitioned_gpu_is_followed_by_its_instances(make_bench: MakeBench) -> None:
    instances = [("2g.20gb", 3000, [(ME, 2900)]), ("1g.10gb", 0, [])]
    bench = make_bench(Gpu("A100"), Gpu("A100", mig=True, instances=instances, numa=1), Gpu("A100", mig=True))
    whole, divided, empty, first, second = read(bench.source()).gpus
    assert [gpu.index for gpu in (whole, divided, empty, first, second)] == [0, 1, 2, 1010, 1011]
    assert [(gpu.mig_enabled, gpu.mig_instances) for gpu in (whole, divided, empty)] == [
        (False, 0),
        (True, 2),
        (True, 0),
    ]
    for found, (profile, total_mib) in zip((first, second), (("2g.20gb", 20480), ("1g.10gb", 10240)), strict=True):
        assert found.uuid.startswith("MIG-")
        assert (found.name, found.mig_profile, found.mig_parent) == (f"A100 MIG {profile}", profile, divided.uuid)
        assert (found.vram_total_mib, found.mig_enabled, found.numa, found.link_group) == (total_mib, False, 1, None)
        # How busy an instance is, nobody is told.
        assert (found.utilisation, found.memory_utilisation) == (None, None)
    assert (first.vram_used_mib, second.vram_used_mib) == (3000, 0)
    assert [[(one.pid, one.vram_mib) for one in gpu.processes or ()] for gpu in (first, second)] == [[(ME, 2900)], []]


def test_a_recreated_instance_is_a_new_one(make_bench: MakeBench) -> None:
    bench = make_bench(Gpu("A100", mig=True, instances=[("3g.40gb", 0, []), ("3g.40gb", 0, [])]))
    source = bench.source()
    assert len(source.read().gpus) == 3
    if isinstance(bench, NvmlBench):
        # The old handles mean nothing any more.
        for old in bench._nvml.devices[0].instances:
            assert old is not None
            old.gone = True
    bench.gpus[0].instances = [("7g.80gb", 0, [])]
    bench.apply()
    bench.now += 1
    divided, only = source.read().gpus
    assert (divided.mig_instances, only.mig_profile) == (1, "7g.80gb")
    source.close()


def test_what_is_not_read_is_unknown_and_said(tmp_path: Path) -> None:
    source = StaticSource("2xnpu:16GiB+1x8GiB:fpga", "ASCEND_RT_VISIBLE_DEVICES", host="lab1")
    reading = read(source)
    assert [(gpu.uuid, gpu.index, gpu.name, gpu.vram_total_mib) for gpu in reading.gpus] == [
        ("STATIC-lab1-0", 0, "npu", 16384),
        ("STATIC-lab1-1", 1, "npu", 16384),
        ("STATIC-lab1-2", 2, "fpga", 8192),
    ]
    for gpu in reading.gpus:
        assert (gpu.vram_used_mib, gpu.utilisation, gpu.power_w, gpu.processes) == (None, None, None, None)
        assert gpu.is_declared
    assert (reading.source, reading.variable) == ("static", "ASCEND_RT_VISIBLE_DEVICES")
    assert "use outside of jobs cannot be seen" in reading.notes[0]
