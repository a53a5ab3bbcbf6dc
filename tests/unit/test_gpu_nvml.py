"""What NVML says in its odd moods, and what becomes of it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import NOT_AVAILABLE, FakeDevice, FakeNvml

from gpusched.gpu import device, faults, procinfo
from gpusched.gpu.nvml import Gateway, LibraryFile, NvmlSource, visible_indexes
from gpusched.gpu.topology import EVERY_S, sysfs_numa
from gpusched.model.cluster import GpuSample, Xid

ME = os.getpid()


class Bench:
    """A source over a fake library, and the seconds on its clock."""

    def __init__(self, nvml: FakeNvml, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml.module())
        # The addresses of these cards may be those of real devices.
        monkeypatch.setattr("gpusched.gpu.topology.sysfs_numa", lambda bus_id: None)
        self.nvml = nvml
        self.now = 0.0
        self.source = NvmlSource(environ, clock=lambda: 1e9 + self.now, monotonic=lambda: self.now, kernel_log="")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Make a bench over devices."""

    def make(*devices: FakeDevice, environ: dict[str, str] | None = None, **library: Any) -> Bench:
        return Bench(FakeNvml(list(devices), **library), environ or {}, monkeypatch)

    return make


def gpu(**fields: Any) -> FakeDevice:
    """A device."""
    return FakeDevice(**{"uuid": "GPU-aaaa", **fields})


def one(made: Bench) -> GpuSample:
    """The only device's sample."""
    (found,) = made.source.read().gpus
    return found


def test_the_installed_binding_has_the_used_functions() -> None:
    import pynvml

    asked = FakeNvml(has_events=True).module()
    assert [name for name in dir(asked) if name.lower().startswith("nvml") and not hasattr(pynvml, name)] == []
    assert (pynvml.nvmlEventTypeXidCriticalError, pynvml.NVML_ERROR_TIMEOUT) == (
        faults.XID_EVENT,
        faults.TIMEOUT,
    )
    assert "version" in inspect.signature(pynvml.nvmlDeviceGetMemoryInfo).parameters
    assert pynvml.NVMLError(15).value == 15
    gateway = Gateway(pynvml)
    assert gateway.ask("nvmlNoSuchFunction") == (None, 13)
    assert gateway.constant("nvmlMemory_v2") is not None


def test_the_library_is_initialised_once_for_life(bench: Callable[..., Bench]) -> None:
    made = bench(gpu())
    for _ in range(5):
        made.now += 100
        made.source.read()
    made.source.close()
    assert (made.nvml.calls["nvmlInit"], made.nvml.calls["nvmlShutdown"]) == (1, 1)
    assert made.nvml.calls["nvmlDeviceGetHandleByIndex"] == 1


def test_a_failed_initialisation_is_retried_only_later(bench: Callable[..., Bench]) -> None:
    made = bench(gpu(), init_code=18)
    for _ in range(5):
        assert "the NVIDIA driver was updated, but its old kernel module is still loaded" in made.source.read().error
    assert made.nvml.calls["nvmlInit"] == 1
    made.nvml.init_code, made.now = 0, 10.0
    assert made.source.read().error is None
    assert made.nvml.calls["nvmlInit"] == 2


def test_rarely_changing_fields_are_queried_rarely(bench: Callable[..., Bench]) -> None:
    made = bench(gpu())
    for _ in range(10):
        made.source.read()
    for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetDisplayActive"):
        assert made.nvml.calls[name] == 1
    made.nvml.devices[0].compute_mode = 3
    made.now = device.SLOW_S
    assert one(made).compute_mode == 3


def test_no_slow_query_is_made_at_every_reading(bench: Callable[..., Bench]) -> None:
    made = bench(gpu())
    made.source.read()
    made.nvml.calls.clear()
    made.source.read()
    assert sum(made.nvml.calls.values()) == 7
    assert not any("PcieThroughput" in name or "Event" in name for name in made.nvml.calls)


def test_memory_excludes_the_reserve(bench: Callable[..., Bench]) -> None:
    found = one(bench(gpu(used_mib=1, reserved_mib=317)))
    assert (found.vram_total_mib, found.vram_reserved_mib, found.vram_used_mib) == (81920, 317, 1)


@pytest.mark.parametrize("code", [13, 25])
def test_the_old_memory_call_reveals_the_reserve_on_an_empty_gpu(bench: Callable[..., Bench], code: int) -> None:
    made = bench(gpu(reserved_mib=317, used_mib=4000, compute=[(ME, 4000)]))
    made.nvml.devices[0].codes["nvmlDeviceGetMemoryInfo_v2"] = code
    assert one(made).vram_used_mib == 4317
    made.nvml.devices[0].used_mib, made.nvml.devices[0].compute = 0, []
    empty = one(made)
    assert (empty.vram_used_mib, empty.vram_reserved_mib) == (0, 317)
    made.nvml.devices[0].used_mib = 4000
    assert one(made).vram_used_mib == 4000
    assert made.nvml.calls["nvmlDeviceGetMemoryInfo_v2"] == 1


def test_an_old_binding_is_used_and_named(bench: Callable[..., Bench]) -> None:
    made = bench(gpu(), missing=frozenset({"nvmlMemory_v2", "nvmlDeviceGetMigMode"}))
    reading = made.source.read()
    assert reading.gpus[0].vram_used_mib == 0
    assert any("old pynvml" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetMinorNumber", "minor"),
        ("nvmlDeviceGetPciInfo", "pci_bus_id"),
        ("nvmlDeviceGetMemoryInfo_v2", "vram_used_mib"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "processes"),
    ],
)
@pytest.mark.parametrize("code", [4, 999])
def test_a_field_that_fails_is_unknown_and_the_rest_is_read(
    bench: Callable[..., Bench], function: str, field: str, code: int
) -> None:
    found = one(bench(gpu(codes={function: code})))
    assert getattr(found, field) is None
    assert found.error is None
    others = {"utilisation", "temperature_c", "power_w", "minor", "pci_bus_id", "vram_used_mib", "processes"} - {field}
    assert all(getattr(found, other) is not None for other in others)


@pytest.mark.parametrize("code", [3, 6, 13])
@pytest.mark.parametrize("kind", ["Graphics", "MPSCompute"])
def test_unsupported_lists_are_empty(bench: Callable[..., Bench], kind: str, code: int) -> None:
    found = one(bench(gpu(compute=[(ME, 10)], codes={f"nvmlDeviceGet{kind}RunningProcesses_v3": code})))
    assert found.processes is not None
    assert [process.pid for process in found.processes] == [ME]


def test_a_refused_list_makes_the_whole_unknown(bench: Callable[..., Bench]) -> None:
    assert one(bench(gpu(codes={"nvmlDeviceGetGraphicsRunningProcesses_v3": 4}))).processes is None


def test_an_older_driver_has_older_lists(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(gpu(compute=[(ME, 10)], codes={"nvmlDeviceGetComputeRunningProcesses_v3": 13}))
    module = sys.modules["pynvml"]
    newest = "nvmlDeviceGetGraphicsRunningProcesses_v3"
    monkeypatch.setattr(module, "nvmlDeviceGetComputeRunningProcesses_v2", _list_of(ME), raising=False)
    monkeypatch.delattr(module, newest)
    monkeypatch.setattr(module, "nvmlDeviceGetGraphicsRunningProcesses", _mismatch(module), raising=False)
    found = one(made)
    assert found.processes is not None
    assert [process.pid for process in found.processes] == [ME]


def _list_of(pid: int) -> Callable[[Any], list[Any]]:
    return lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=None)]


def _mismatch(module: Any) -> Callable[[Any], Any]:
    def call(handle: Any) -> Any:
        raise module.NVMLLibraryMismatchError("use a versioned function")

    return call


def test_a_process_in_several_lists_is_one_with_its_largest_figure(bench: Callable[..., Bench]) -> None:
    parent = os.getppid()
    found = one(bench(gpu(compute=[(ME, 100), (parent, None)], graphics=[(ME, 120)], mps=[(parent, 40)])))
    assert found.processes is not None
    assert {process.pid: process.vram_mib for process in found.processes} == {ME: 120, parent: 40}


@pytest.mark.parametrize("told", [None, NOT_AVAILABLE])
def test_memory_of_a_process_may_be_unknown(bench: Callable[..., Bench], told: int | None) -> None:
    found = one(bench(gpu(compute=[(ME, told)])))
    assert found.processes is not None
    assert [process.vram_mib for process in found.processes] == [None]


def test_an_invalid_list_is_dropped(bench: Callable[..., Bench]) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        child.wait()
        gone = child.pid
    for entry in ((gone, 100), (0, 100), (-1, 100), (2**40, 100), (ME, 81921)):
        found = one(bench(gpu(compute=[(ME, 10), entry])))
        assert found.processes is None
        assert found.vram_used_mib == 0


def test_a_process_is_described(bench: Callable[..., Bench]) -> None:
    import psutil

    found = one(bench(gpu(compute=[(ME, 10)])))
    assert found.processes is not None
    (process,) = found.processes
    mine = psutil.Process()
    assert process.user == mine.username()
    assert process.name == mine.name()
    assert process.started_at == pytest.approx(mine.create_time(), abs=2.0)


def test_names_may_be_bytes(bench: Callable[..., Bench]) -> None:
    found = one(bench(gpu(uuid=b"GPU-bbbb", name=b"Tesla T4")))
    assert (found.uuid, found.name, found.pci_bus_id) == ("GPU-bbbb", "Tesla T4", "00000000:00:00.0")


def test_a_gpu_lost_from_the_start_is_shown_without_a_name(bench: Callable[..., Bench]) -> None:
    made = bench(gpu(lost=True), gpu(uuid="GPU-cccc"))
    lost, well = made.source.read().gpus
    assert (lost.uuid, lost.is_lost, lost.index) == ("GPU-unknown-at-index-0", True, 0)
    assert well.vram_used_mib == 0


def test_a_lost_gpu_is_queried_on_the_slow_timer_only(bench: Callable[..., Bench]) -> None:
    made = bench(gpu())
    made.source.read()
    made.nvml.devices[0].lost = True
    for _ in range(5):
        assert one(made).is_lost
    assert made.nvml.calls["nvmlDeviceGetHandleByIndex"] == 1
    made.now = device.SLOW_S
    assert one(made).is_lost
    assert made.nvml.calls["nvmlDeviceGetHandleByIndex"] == 2


def test_a_gpu_that_cannot_be_opened_says_why(bench: Callable[..., Bench]) -> None:
    found = one(bench(gpu(codes={"nvmlDeviceGetHandleByIndex": 4})))
    assert (found.is_lost, found.error) == (False, "the NVIDIA driver refuses access to this user (no permission)")


@pytest.mark.parametrize("code", [1, 9])
def test_a_reloaded_driver_is_initialised_again(bench: Callable[..., Bench], code: int) -> None:
    made = bench(gpu())
    made.source.read()
    made.nvml.devices[0].codes["nvmlDeviceGetMemoryInfo_v2"] = code
    assert "unloaded or reloaded" in (made.source.read().error or "")
    made.nvml.devices[0].codes.clear()
    assert made.source.read().error is None
    assert made.nvml.calls["nvmlInit"] == 2


def test_a_gpu_without_its_own_memory_uses_that_of_the_host(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.Device.__init__, "__defaults__", (lambda: (100_000, 70_000),))
    codes = {"nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetMigMode": 3}
    found = one(bench(gpu(codes=codes)))
    assert found.unified_memory
    assert (found.vram_total_mib, found.vram_used_mib) == (100_000, 30_000)


@pytest.mark.parametrize(
    "device_fields",
    [
        {"mig": True, "codes": {"nvmlDeviceGetMemoryInfo_v2": 3}},
        {"codes": {"nvmlDeviceGetMemoryInfo_v2": 3, "nvmlDeviceGetMigMode": 999}},
        {"codes": {"nvmlDeviceGetMemoryInfo_v2": 999}},
    ],
)
def test_other_gpus_are_not_mistaken_for_unified_memory(
    bench: Callable[..., Bench], device_fields: dict[str, Any]
) -> None:
    found = one(bench(gpu(**device_fields)))
    assert not found.unified_memory
    assert (found.vram_total_mib, found.vram_used_mib) == (None, None)


def test_a_missing_or_foreign_module_is_an_error_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = NvmlSource({}).read()
    assert "nvidia-ml-py cannot be imported" in (reading.error or "")
    foreign = type(sys)("pynvml")
    foreign.__file__ = "/somewhere/pynvml.py"
    monkeypatch.setitem(sys.modules, "pynvml", foreign)
    assert "/somewhere/pynvml.py" in (NvmlSource({}).read().error or "")


# --- CUDA_VISIBLE_DEVICES -------------------------------------------------------------------------

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", None]


@pytest.mark.parametrize(
    ("value", "indexes"),
    [
        ("0", {0}),
        ("2, 0", {0, 2}),
        ("", set()),
        ("-1", set()),
        ("NoDevFiles", set()),
        ("0,9,1", {0}),
        ("0,-1,1", {0}),
        ("1,1", set()),
        ("0,GPU-aaaa", set()),
        ("GPU-cc", {2}),
        ("GPU-aabb,GPU-aaaa", {0, 1}),
        ("GPU-aa", set()),
        ("GPU-dddd,0", set()),
        ("MIG-1234", set()),
        ("3", {3}),
        ("99999999999999999999", set()),
    ],
)
def test_cuda_visible_devices_restricts_the_gpus(value: str, indexes: set[int]) -> None:
    assert visible_indexes(value, UUIDS) == indexes


def test_the_daemons_own_limit_is_honoured_and_reported(bench: Callable[..., Bench]) -> None:
    devices = [gpu(uuid=f"GPU-{n}") for n in range(3)]
    reading = bench(*devices, environ={"CUDA_VISIBLE_DEVICES": "2,0"}).source.read()
    assert [(found.index, found.uuid) for found in reading.gpus] == [(0, "GPU-0"), (2, "GPU-2")]
    (note,) = reading.notes
    assert "CUDA_VISIBLE_DEVICES='2,0'" in note
    assert "0, 2" in note


# --- topology -----------------------------------------------------------------------------------


def cards(*links: dict[int, str | None]) -> list[FakeDevice]:
    """Cards GPU-0, GPU-1 and so on with these links."""
    return [gpu(uuid=f"GPU-{number}", minor=number, links=found) for number, found in enumerate(links)]


def pairs(*found: tuple[int, int]) -> set[frozenset[str]]:
    return {frozenset((f"GPU-{one}", f"GPU-{other}")) for one, other in found}


def groups(made: Bench) -> list[int | None]:
    return [sample.link_group for sample in made.source.read().gpus]


BRIDGES = [{0: "GPU-1", 1: "GPU-1"}, {0: "GPU-0", 1: "GPU-0"}, {0: "GPU-3"}, {0: "GPU-2"}]
SWITCHED: list[dict[int, str | None]] = [dict.fromkeys(range(18), "switch") for _ in range(4)]


def test_bridges_link_pairs(bench: Callable[..., Bench]) -> None:
    assert groups(bench(*cards(*BRIDGES), peers=pairs((0, 1), (2, 3)))) == [0, 0, 2, 2]


def test_a_switch_links_all_gpus(bench: Callable[..., Bench]) -> None:
    everyone = pairs(*((one, other) for one in range(4) for other in range(one)))
    assert groups(bench(*cards(*SWITCHED), peers=everyone)) == [0, 0, 0, 0]


def test_transitively_linked_gpus_are_one_group(bench: Callable[..., Bench]) -> None:
    assert groups(bench(*cards(*SWITCHED), peers=pairs((1, 3), (3, 2), (2, 0)))) == [0, 0, 0, 0]


def test_a_link_that_is_down_links_nothing(bench: Callable[..., Bench]) -> None:
    made = bench(*cards({0: None, 1: None}, {0: None, 1: None}), peers=pairs((0, 1)))
    assert groups(made) == [None, None]
    assert made.nvml.calls["nvmlDeviceGetP2PStatus"] == 0


def test_one_active_link_of_several_is_enough(bench: Callable[..., Bench]) -> None:
    links = {0: None, 1: None, 2: "switch"}
    assert groups(bench(*cards(dict(links), dict(links)), peers=pairs((0, 1)))) == [0, 0]


def test_without_the_peer_query_the_remote_ends_count(bench: Callable[..., Bench]) -> None:
    made = bench(*cards(*BRIDGES), missing=frozenset({"nvmlDeviceGetP2PStatus"}))
    assert groups(made) == [0, 0, 2, 2]


def test_links_to_a_switch_say_nothing_without_the_peer_query(bench: Callable[..., Bench]) -> None:
    made = bench(*cards(*SWITCHED), missing=frozenset({"nvmlDeviceGetP2PStatus"}))
    assert groups(made) == [None] * 4


def test_an_old_driver_without_links_is_still_read(bench: Callable[..., Bench]) -> None:
    missing = frozenset({"nvmlDeviceGetNvLinkState", "nvmlDeviceGetMemoryAffinity"})
    sample = one(bench(gpu(links={0: "switch"}, numa=(1,)), missing=missing))
    assert (sample.link_group, sample.numa, sample.error) == (None, None, None)
    assert sample.vram_used_mib == 0


@pytest.mark.parametrize(("nodes", "expected"), [((1,), 1), ((0,), 0), ((65,), 65), ((0, 1), None), (None, None)])
def test_the_numa_node_is_known_when_there_is_only_one(
    bench: Callable[..., Bench], nodes: tuple[int, ...] | None, expected: int | None
) -> None:
    assert one(bench(gpu(minor=0xFE, numa=nodes))).numa == expected


def test_the_topology_is_read_seldom(bench: Callable[..., Bench]) -> None:
    made = bench(*cards(*BRIDGES), peers=pairs((0, 1), (2, 3)))
    for _ in range(5):
        made.source.read()
        made.now += 1
    first = made.nvml.calls["nvmlDeviceGetP2PStatus"]
    assert first == 6
    made.nvml.peers = pairs((0, 1))
    made.now += EVERY_S
    assert groups(made) == [0, 0, None, None]
    assert made.nvml.calls["nvmlDeviceGetP2PStatus"] == 2 * first


def test_a_lost_gpu_leaves_the_links_of_the_others_unchanged(bench: Callable[..., Bench]) -> None:
    devices = cards(*BRIDGES)
    made = bench(*devices, peers=pairs((0, 1), (2, 3)))
    made.source.read()
    devices[3].lost = True
    made.now += 1
    assert groups(made) == [0, 0, None, 2]
    devices[3].lost = False
    made.now += 100
    assert groups(made) == [0, 0, 2, 2]


def test_the_kernel_is_queried_for_the_numa_node_first(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def fake_open(path: str, mode: str) -> Any:
        opened.append(path)
        return open(tmp_path / "numa_node", mode)

    monkeypatch.setattr("gpusched.gpu.topology.open", fake_open, raising=False)
    for text, expected in (("1", 1), ("-1", None), ("odd", None)):
        (tmp_path / "numa_node").write_text(text + "\n")
        assert sysfs_numa("00000000:3B:00.0") == expected
    assert set(opened) == {"/sys/bus/pci/devices/0000:3b:00.0/numa_node"}
    (tmp_path / "numa_node").unlink()
    assert sysfs_numa("00000000:3B:00.0") is None


def test_faults_reported_by_the_driver_come_with_the_next_reading(bench: Callable[..., Bench]) -> None:
    made = bench(gpu(), has_events=True)
    assert one(made).xids == ()
    made.nvml.raise_xid(made.nvml.devices[0], 79)
    assert [xid.number for xid in one(made).xids] == [79]
    assert one(made).xids == ()
    made.source.close()


def test_memory_errors_are_read(bench: Callable[..., Bench]) -> None:
    made = bench(gpu(ecc_errors=2, rows=(5, 1, 1, 0), slowdown_c=92))
    found = one(made)
    assert (found.ecc_errors, found.remap_pending, found.remap_failed, found.slowdown_c) == (2, True, False, 92.0)
    card = made.nvml.devices[0]
    card.rows, card.ecc_errors = (5, 1, 0, 1), 3
    # An answer that fails once says nothing new.
    card.codes["nvmlDeviceGetTotalEccErrors"] = 999
    made.now += device.SLOW_S
    found = one(made)
    assert (found.ecc_errors, found.remap_pending, found.remap_failed) == (2, False, True)
    card.codes["nvmlDeviceGetRemappedRows"] = 999
    card.rows = (0, 0, 0, 0)
    made.now += device.SLOW_S
    assert one(made).remap_failed is True


def test_older_gpus_retire_pages_and_others_report_nothing(bench: Callable[..., Bench]) -> None:
    found = one(bench(gpu(pages_pending=1)))
    assert (found.remap_pending, found.remap_failed, found.ecc_errors, found.slowdown_c) == (True, None, None, None)
    found = one(bench(gpu()))
    assert (found.remap_pending, found.remap_failed) == (None, None)


def test_enabling_mig_is_seen_at_once(bench: Callable[..., Bench]) -> None:
    made = bench(gpu(mig_pending=True))
    found = one(made)
    assert (found.mig_enabled, found.mig_pending) == (False, True)
    card = made.nvml.devices[0]
    card.mig, card.codes = True, {"nvmlDeviceGetUtilizationRates": 3}
    made.now += 1
    assert one(made).mig_enabled
    card.mig, card.mig_pending, card.codes = False, False, {}
    made.now += 1
    found = one(made)
    assert (found.mig_enabled, found.mig_pending) == (False, False)


def test_an_updated_driver_is_queried_again_and_shows_the_loaded_version(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    library.write_text("old")
    stat = library.stat()
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    monkeypatch.setattr("gpusched.gpu.nvml.LibraryFile.of_this_process", lambda: LibraryFile(str(library), stamp))
    monkeypatch.setattr("gpusched.gpu.nvml.loaded_version", lambda: "570.86.10")
    made = bench(gpu())
    assert made.source.read().error is None
    library.unlink()
    made.now += 100
    assert made.source.read().error == "the NVIDIA driver's library was replaced; reading it again"
    made.nvml.init_code = 18
    error = made.source.read().error
    assert error is not None
    assert error.endswith("when no process uses a GPU (loaded: 570.86.10)")


def test_the_kernels_log_is_read_with_the_devices(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, into = os.pipe2(os.O_DIRECT)
    made = bench(gpu(minor=0x3B))
    made.source = NvmlSource({}, clock=lambda: 1000.0, monotonic=lambda: 100.0, kernel_log=f"/proc/self/fd/{out}")
    os.write(into, b"3,7,50000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    reading = made.source.read()
    assert (reading.gpus[0].xids, reading.log_trouble) == ((Xid(79, 950.0, 7),), None)
    made.source.close()
    made.source = NvmlSource({}, kernel_log=str(tmp_path / "none"))
    assert "cannot be read (No such file or directory)" in (made.source.read().log_trouble or "")
    made.source.close()
    for fd in (out, into):
        os.close(fd)


def test_holders_of_unattributed_memory_are_found(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def openers(paths: Any) -> dict[str, tuple[int, ...]]:
        asked.append(sorted(paths))
        return dict.fromkeys(paths, (ME, os.getppid()))

    monkeypatch.setattr("gpusched.gpu.nvml.procinfo.openers", openers)
    made = bench(gpu(minor=2, used_mib=9000, compute=[(ME, 1000)]), gpu(uuid="GPU-bbbb", used_mib=100))
    for _ in range(3):
        first, second = made.source.read().gpus
        made.now += 1
    assert asked == [["/dev/nvidia2"]]
    assert [process.pid for process in first.openers] == [os.getppid()]
    assert second.openers == ()
    made.now += device.SLOW_S
    made.source.read()
    assert len(asked) == 2
    with monkeypatch.context() as patch:
        patch.setattr("gpusched.gpu.nvml._KEEPER", procinfo.describe(os.getppid(), None).name)
        assert made.source.read().gpus[0].openers == ()
    made.nvml.devices[0].used_mib = 1000
    assert made.source.read().gpus[0].openers == ()


def test_open_devices_are_found_by_their_holders(tmp_path: Path) -> None:
    held = tmp_path / "nvidia0"
    held.write_text("")
    command = [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"]
    with subprocess.Popen([*command, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with held.open():
            assert procinfo.openers([str(held), "/dev/none"]) == {str(held): (child.pid,), "/dev/none": ()}
        child.communicate()
