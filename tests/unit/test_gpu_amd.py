"""AMD GPUs behind AMD SMI: what it says in other words and units, and how jobs get theirs. A fake library, no card."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_amdsmi import FakeAmdSmi, FakeCard
from gpu_builders import UUID

from gpusched.daemon.launch.environment import job_environment, visible_words
from gpusched.engine.linux import device_rule as rules
from gpusched.gpu import source
from gpusched.gpu.amd import AmdSource, visible
from gpusched.gpu.energy import POWER, EnergyCounters
from gpusched.model.cluster import GpuReading, is_amd
from gpusched.model.execution import LaunchSite
from gpusched.model.job import GpuShare
from gpusched.model.settings import GpuSettings, Settings
from gpusched.testing import job, run

ONE, TWO = "GPU-f980f88ef31631a2", "GPU-0000000000000007"
Make = Callable[..., AmdSource]


class Clock:
    """Stands still unless it is moved."""

    now = 1000.0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeAmdSmi:
    found = FakeAmdSmi([FakeCard()])
    monkeypatch.setitem(sys.modules, "amdsmi", found.module())
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(library: FakeAmdSmi, clock: Clock, tmp_path: Path) -> Make:
    def of(environ: dict[str, str] | None = None, **options: Any) -> AmdSource:
        return AmdSource(
            environ or {}, clock=lambda: clock.now, monotonic=lambda: clock.now, sysfs=str(tmp_path), **options
        )

    return of


def test_figures_come_in_our_units(library: FakeAmdSmi, make: Make, tmp_path: Path) -> None:
    (tmp_path / "0000:0c:00.0" / "drm" / "renderD129").mkdir(parents=True)
    (tmp_path / "0000:0c:00.0" / "drm" / "card1").mkdir()
    card = library.cards[0]
    card.processes, card.uncorrectable, card.busy = [(os.getpid(), 512)], 2, 37
    reading = make().read()
    (gpu,) = reading.gpus
    assert (reading.source, reading.driver_version, reading.notes) == ("amdsmi", "6.12.12", ())
    assert (gpu.uuid, gpu.name, gpu.pci_bus_id, gpu.minor) == (ONE, "AMD Instinct MI300X", "0000:0c:00.0", 129)
    assert (gpu.vram_total_mib, gpu.vram_used_mib, gpu.utilisation, gpu.memory_utilisation) == (196592, 284, 0.37, 0.37)
    assert (gpu.temperature_c, gpu.slowdown_c, gpu.power_w, gpu.power_limit_w) == (41.0, 100.0, 141.0, 750.0)
    assert (gpu.energy_mj, gpu.ecc_errors, gpu.numa) == (72_688_712, 2, 0)
    (process,) = gpu.processes or ()
    assert (process.pid, process.vram_mib) == (os.getpid(), 512)


def test_what_the_library_does_not_know_is_unknown(library: FakeAmdSmi, make: Make) -> None:
    card = library.cards[0]
    card.busy, card.power, card.temperatures = "N/A", {"current_socket_power": "N/A", "average_socket_power": 0}, {}
    card.energy, card.cap_microwatts, card.processes = 0, 0, [(os.getpid(), None)]
    card.codes = {"amdsmi_get_gpu_total_ecc_count": 2, "amdsmi_get_gpu_memory_usage": 43}
    (gpu,) = make().read().gpus
    assert (gpu.vram_used_mib, gpu.utilisation, gpu.power_w, gpu.temperature_c) == (None, None, None, None)
    assert (gpu.energy_mj, gpu.power_limit_w, gpu.ecc_errors) == (None, None, None)
    assert [process.vram_mib for process in gpu.processes or ()] == [None]


@pytest.mark.parametrize(
    ("power", "watts"),
    [
        ({"socket_power": 90, "current_socket_power": "N/A", "average_socket_power": "N/A"}, 90.0),
        ({"current_socket_power": 4294967295, "average_socket_power": 55}, 55.0),
        ({"average_socket_power": 65535}, None),
    ],
)
def test_power_has_another_name_in_each_generation(
    library: FakeAmdSmi, make: Make, power: dict[str, Any], watts: float | None
) -> None:
    library.cards[0].power = power
    assert make().read().gpus[0].power_w == watts


def test_thousandths_of_degrees_and_cards_without_a_hotspot(library: FakeAmdSmi, make: Make) -> None:
    library.cards[0].temperatures = {(0, 0): 48_500}
    assert make().read().gpus[0].temperature_c == 48.5


@pytest.mark.parametrize(
    "processes", [[(os.getpid(), 400_000)], [(2**22 + 1, 100)]], ids=["more than the card has", "no such process"]
)
def test_an_implausible_list_of_processes_is_none(
    library: FakeAmdSmi, make: Make, processes: list[tuple[int, int]]
) -> None:
    library.cards[0].processes = list(processes)
    assert make().read().gpus[0].processes is None


def test_energy_that_runs_backwards_is_filled_by_power(library: FakeAmdSmi, make: Make, clock: Clock) -> None:
    card, counters, amd = library.cards[0], EnergyCounters("boot"), make()
    counters.take(clock.now, amd.read().gpus)
    card.energy -= 13_952_401  # as in amdsmi#115
    clock.now += 1
    (energy,) = counters.take(clock.now, amd.read().gpus).values()
    assert (energy.source, energy.joules) == (POWER, pytest.approx(141.0))
    card.energy += 9_215_686  # 141 J
    clock.now += 1
    (energy,) = counters.take(clock.now, amd.read().gpus).values()
    assert energy.joules == pytest.approx(141.0, abs=0.1)


def test_cards_are_numbered_as_rocr_does(library: FakeAmdSmi, make: Make) -> None:
    library.cards = [
        FakeCard(hip_uuid=TWO, bdf="0000:05:00.0", node=3),
        FakeCard(hip_uuid=ONE, bdf="0000:83:00.0", node=2),
    ]
    assert [(gpu.index, gpu.uuid) for gpu in make().read().gpus] == [(0, ONE), (1, TWO)]
    library.cards[0].node = "N/A"
    assert [(gpu.index, gpu.uuid) for gpu in make().read().gpus] == [(0, TWO), (1, ONE)]


def test_older_libraries_tell_the_uuid_by_its_number(library: FakeAmdSmi, make: Make) -> None:
    library.cards[0].hip_uuid = None
    assert make().read().gpus[0].uuid == ONE
    library.cards[0].serial = "0x0000000000000000"
    assert make().read().gpus[0].uuid == "AMD-0000:0c:00.0"


def test_partitions_are_cards_of_their_own(library: FakeAmdSmi, make: Make, tmp_path: Path) -> None:
    (tmp_path / "0000:0c:00.0" / "drm" / "renderD128").mkdir(parents=True)
    library.cards = [FakeCard(node=node, partition="CPX") for node in (2, 3)]
    reading = make().read()
    assert [gpu.uuid for gpu in reading.gpus] == ["AMD-0000:0c:00.0", "AMD-0000:0c:00.0-1"]
    assert [gpu.minor for gpu in reading.gpus] == [None, None]
    assert reading.notes[0] == "GPU 0 is partitioned (CPX); gpusched reads that, and does not change it"


def test_a_reloaded_driver_is_connected_again(library: FakeAmdSmi, make: Make, clock: Clock) -> None:
    amd = make()
    assert amd.read().gpus
    library.gone = True
    assert "unloaded or reloaded" in (amd.read().error or "")
    clock.now += 30
    assert amd.read().gpus


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'amdsmi'", name="amdsmi"), "-m pip install 'amdsmi>="),
        (KeyError("libamd_smi.so"), "libamd_smi.so is not installed"),
        (AttributeError("undefined symbol: amdsmi_get_x"), "cannot be imported: AttributeError: undefined symbol"),
    ],
)
def test_a_library_that_does_not_load_is_told_in_a_sentence(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(name: str, *arguments: Any) -> Any:
        raise error

    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.setattr("gpusched.gpu.amd.importlib.import_module", refuse)
    reading = make().read()
    assert words in (reading.error or "")
    # A processor with AMD graphics, which nobody asked for: no error.
    reading = make(is_wanted=False).read()
    assert (reading.source, reading.error) == ("none", None)
    assert words in reading.notes[0]


def test_the_daemons_own_variable_restricts_it(library: FakeAmdSmi, make: Make) -> None:
    library.cards.append(FakeCard(hip_uuid=TWO, bdf="0000:83:00.0", node=3))
    for value, expected in (("1", [1]), (TWO.upper(), [1]), ("0,1", [0, 1]), ("7,0", []), ("", [])):
        reading = make({"ROCR_VISIBLE_DEVICES": value}).read()
        assert [gpu.index for gpu in reading.gpus] == expected, value
        assert "restricts the daemon" in reading.notes[-1]
    assert visible("-1", [ONE]) == frozenset()


# --- which source ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "kind"),
    [((), "nvml"), (("dev/kfd",), "amdsmi"), (("dev/kfd", "dev/nvidiactl"), "nvml"), (("dev/nvidia0",), "nvml")],
)
def test_the_hardware_chooses_the_source(tmp_path: Path, paths: tuple[str, ...], kind: str) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert source.vendor_here(str(tmp_path)) == kind


def test_the_setting_names_the_source(library: FakeAmdSmi) -> None:
    choice = source.choose(GpuSettings(source="amdsmi"), {})
    found, _ = source.build(choice, {})
    reading = found.read()
    assert (reading.source, [gpu.uuid for gpu in reading.gpus]) == ("amdsmi", [ONE])
    found.close()


# --- what a job sees ------------------------------------------------------------------------------


def environment(shares: tuple[GpuShare, ...], index_of: dict[str, int], **base: str) -> dict[str, str]:
    return job_environment(job(1), run(job(1), gpus=shares), base, LaunchSite("n1", "/socket"), Settings(), index_of)


def test_a_job_sees_its_cards_alone() -> None:
    index_of = {ONE: 0, TWO: 1}
    both = (GpuShare(TWO, 1), GpuShare(ONE, 0))
    env = environment(both, index_of, HIP_VISIBLE_DEVICES="5", GPU_DEVICE_ORDINAL="5", ROCR_VISIBLE_DEVICES="5")
    assert env["ROCR_VISIBLE_DEVICES"] == f"{TWO},{ONE}"
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not env.keys() & {"HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
    assert visible_words(run(job(1), gpus=both), "uuid", index_of) == ["0", "1"]


def test_a_card_without_a_uuid_is_named_by_rocrs_number() -> None:
    env = environment((GpuShare("AMD-0000:0c:00.0", 7),), {"AMD-0000:0c:00.0": 3, ONE: 0})
    assert (env["ROCR_VISIBLE_DEVICES"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "0")


def test_a_job_without_gpus_sees_none() -> None:
    env = environment((), {ONE: 0}, HIP_VISIBLE_DEVICES="0")
    assert (env["ROCR_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"], env["CUDA_VISIBLE_DEVICES"]) == ("", "-1", "")


def test_nvidia_nodes_leave_the_variables_of_amd_alone() -> None:
    env = environment((GpuShare(UUID, 0),), {UUID: 0}, HIP_VISIBLE_DEVICES="2")
    assert env["HIP_VISIBLE_DEVICES"] == "2"
    assert "ROCR_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize(
    ("uuid", "expected"),
    [(ONE, True), ("AMD-0000:0c:00.0", True), ("GPU-8f6b5a0c-1c2d-3e4f-5a6b-7c8d9e0f1a2b", False), ("MIG-1", False)],
)
def test_whose_a_card_is_shows_in_its_uuid(uuid: str, expected: bool) -> None:
    assert is_amd(uuid) is expected


def drm(folder: Path, names: dict[str, tuple[int, int]]) -> str:
    """A /sys of AMD cards: node -> minor, card."""
    for name, (minor, card) in names.items():
        device = folder / "devices" / str(card)
        (device / "drm" / name).mkdir(parents=True)
        (device / "vendor").write_text("0x1002\n")
        node = folder / "class" / "drm" / name
        node.mkdir(parents=True)
        (node / "dev").write_text(f"226:{minor}\n")
        (node / "device").symlink_to(device)
    return str(folder)


def test_the_nodes_of_other_cards_are_closed(tmp_path: Path) -> None:
    sysfs = drm(tmp_path, {"card0": (0, 0), "renderD128": (128, 0), "card1": (1, 1), "renderD129": (129, 1)})
    nodes = rules.drm_nodes([129], sysfs, has_amd=True)
    assert nodes == {0: False, 128: False, 1: True, 129: True}
    assert rules.drm_nodes([129], sysfs) == {}
    majors = {"kfd": 235}
    assert rules.job_rule([129], (), majors, nodes)[1:] == [(226, (0, 128), False)]
    without = rules.drm_nodes([], sysfs, has_amd=True)
    assert rules.job_rule([], (), majors, without)[1:] == [(235, (), True), (226, (0, 1, 128, 129), False)]


def test_majors_include_amds_compute_node(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    path.write_text("Character devices:\n  1 mem\n235 kfd\n\nBlock devices:\n  8 sd\n")
    assert rules.driver_majors(str(path)) == {"kfd": 235}


def test_readings_travel_as_json(make: Make) -> None:
    from gpusched.model.value import decode, encode

    reading = make().read()
    assert decode(encode(reading), GpuReading) == reading
