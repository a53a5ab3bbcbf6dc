"""MIG instances behind NVML: what drivers leave out, and what one that vanishes does to the others."""

from __future__ import annotations

import sys

import pytest
from fake_nvml import FakeDevice, FakeNvml
from gpu_builders import reading, sample, whole
from lab import Lab

from gpusched.daemon.watch.gpus import GpuAlerts
from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.tracker import CLEAN, GpuTracker
from gpusched.model.cluster import DrainEntry, GpuProcess, GpuSample
from gpusched.model.settings import GpuSettings
from gpusched.model.units import gpu_label, mig_index
from gpusched.model.value import replace


class Bench:
    """A source over one divided card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, card: FakeDevice) -> None:
        self.now = 1000.0
        self.nvml = FakeNvml([card])
        monkeypatch.setitem(sys.modules, "pynvml", self.nvml.module())
        monkeypatch.setattr("gpusched.gpu.topology.sysfs_numa", lambda bus_id: None)
        self.source = NvmlSource({}, clock=lambda: self.now, monotonic=lambda: self.now)

    def read(self, after_s: float = 1.0) -> tuple[GpuSample, ...]:
        self.now += after_s
        return self.source.read().gpus


def divided(*instances: FakeDevice | None, **fields: object) -> FakeDevice:
    return FakeDevice("GPU-0", "A100", mig=True, instances=list(instances), **fields)  # type: ignore[arg-type]


def instance(slot: int, name: str = "A100 MIG 1g.10gb", **fields: object) -> FakeDevice:
    return FakeDevice(f"MIG-{slot}", name, 9856, **fields)  # type: ignore[arg-type]


def test_empty_slots_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, divided(None, instance(1), None, instance(3)))
    assert [gpu.index for gpu in bench.read()] == [0, 1001, 1003]


@pytest.mark.parametrize(
    ("slices", "mib", "profile"), [((1, 1), 9856, "1g.10gb"), ((3, 3), 40192, "3g.39gb"), ((3, 1), 40960, "1c.3g.40gb")]
)
def test_older_drivers_tell_the_profile_in_parts(
    monkeypatch: pytest.MonkeyPatch, slices: tuple[int, int], mib: int, profile: str
) -> None:
    bench = Bench(monkeypatch, divided(FakeDevice("MIG-GPU-0/1/0", "A100", mib, slices=slices)))
    _, only = bench.read()
    assert (only.mig_profile, only.name) == (profile, f"A100 MIG {profile}")


def test_a_transient_list_failure_removes_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, divided(instance(0)))
    assert len(bench.read()) == 2
    bench.nvml.devices[0].codes["nvmlDeviceGetMaxMigDeviceCount"] = 999
    assert len(bench.read(60)) == 2
    bench.nvml.devices[0].codes = {"nvmlDeviceGetMigDeviceHandleByIndex": 999}
    assert len(bench.read(60)) == 2


def test_unreported_instance_fields_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"nvmlDeviceGetMemoryInfo": 999, "nvmlDeviceGetComputeRunningProcesses_v3": 4}
    bench = Bench(monkeypatch, divided(instance(0, codes=codes)))
    _, only = bench.read()
    assert (only.vram_total_mib, only.vram_used_mib, only.processes) == (None, None, None)


def test_the_list_is_not_read_at_every_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, divided(instance(0)))
    for _ in range(20):
        bench.read()
    assert bench.nvml.calls["nvmlDeviceGetMaxMigDeviceCount"] == 1
    bench.read(30)
    assert bench.nvml.calls["nvmlDeviceGetMaxMigDeviceCount"] == 2


def test_a_vanished_instance_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = instance(0), instance(1)
    bench = Bench(monkeypatch, divided(first, second))
    bench.read()
    first.gone = True
    bench.nvml.devices[0].instances[0] = None
    assert [gpu.uuid for gpu in bench.read()] == ["GPU-0", "MIG-1"]


def test_a_card_that_is_lost_takes_its_instances_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, divided(instance(0)))
    bench.read()
    bench.nvml.devices[0].lost = True
    (card,) = bench.read()
    assert card.is_lost


def test_an_environment_limit_applies_to_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, divided(instance(0)))
    bench.nvml.devices.append(FakeDevice("GPU-1"))
    for limit, expected in (("0", [0, 1000]), ("1", [1])):
        source = NvmlSource({"CUDA_VISIBLE_DEVICES": limit}, clock=lambda: 0.0, monotonic=lambda: 0.0)
        source.read()
        assert [gpu.index for gpu in source.read().gpus] == expected


@pytest.mark.parametrize(("parent", "slot", "label"), [(0, 0, "0:0"), (3, 6, "3:6"), (12, 1, "12:1")])
def test_an_instance_has_a_display_name(parent: int, slot: int, label: str) -> None:
    assert gpu_label(mig_index(parent, slot)) == label
    assert gpu_label(parent) == str(parent)


# --- over time ------------------------------------------------------------------------------------


def card() -> GpuSample:
    return sample("GPU-0", mig_enabled=True, mig_instances=1)


def part(uuid: str = "MIG-0") -> GpuSample:
    return sample(uuid, index=1000, name="A100 MIG 2g.20gb", mig_parent="GPU-0", mig_profile="2g.20gb")


def test_a_process_on_an_instance_is_not_counted_on_its_gpu() -> None:
    # The driver tells of the card what is on all of its instances, of jobs and of others.
    own, stranger = (7, 4096), (8, 9216)
    whole_card = replace(card(), vram_used_mib=13312, processes=(GpuProcess(*own), GpuProcess(*stranger)))
    instance = replace(part(), vram_used_mib=9216, processes=(GpuProcess(*stranger),))
    tracker = GpuTracker(GpuSettings(free_polls=1))
    tracker.observe(reading(1.0, whole_card, instance), {7: "1.1"}, {})
    assert tracker.status("GPU-0").intruders == ()
    assert [process.pid for process in tracker.status("MIG-0").intruders] == [8]
    assert [(found.foreign_mib, found.why_not_whole is None) for found in tracker.views(1.0)] == [
        (0, True),
        (9216, False),
    ]


def test_a_partitioned_gpu_is_not_placeable_and_names_its_instances() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    tracker.observe(reading(1.0, card(), part()), {}, {})
    parent, instance = tracker.views(1.0)
    assert (parent.is_present, parent.is_divided) == (False, True)
    assert parent.why_not == "MIG is on: 1 instance is in its place"
    assert (instance.why_not, instance.can_share, instance.mig_profile) == (None, False, "2g.20gb")
    tracker.observe(reading(2.0, sample("GPU-0", mig_enabled=True)), {}, {})
    assert (tracker.views(2.0)[0].why_not or "").startswith("MIG is on without instances; create some with: ")


def test_a_removed_instance_is_forgotten_when_unused() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    tracker.observe(reading(1.0, card(), part()), {}, {})
    tracker.observe(reading(2.0, card(), part("MIG-1")), {}, {})
    assert [view.uuid for view in tracker.views(2.0)] == ["GPU-0", "MIG-1"]


def test_a_removed_instance_in_use_is_gone_after_two_readings() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    booked = whole("1.1", "MIG-0")
    tracker.observe(reading(1.0, card(), part()), {}, booked)
    tracker.observe(reading(2.0, card()), {}, booked)
    assert not tracker.is_gone("MIG-0")
    tracker.observe(reading(3.0, card()), {}, booked)
    assert tracker.is_gone("MIG-0")
    tracker.begin_release("MIG-0", "1.1", 3.0)
    assert tracker.release_state("MIG-0", 4.0, "1.1") == CLEAN


def test_draining_or_suspecting_a_gpu_closes_its_instances() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    tracker.observe(reading(1.0, card(), part()), {}, {})
    tracker.set_drains({"GPU-0": DrainEntry("fan is broken")})
    assert tracker.views(1.0)[1].why_not == "drained: fan is broken"
    assert tracker.status("MIG-0").state == "drained"


def test_problems_of_a_gpu_are_reported_once_and_not_per_instance() -> None:
    settings = GpuSettings(free_polls=1)
    tracker, watch = GpuTracker(settings), GpuAlerts(Lab().scheduler.alerts)
    sick = reading(1.0, replace(card(), ecc_errors=1), replace(part(), ecc_errors=1))
    tracker.observe(sick, {}, {})
    assert [(news.event, news.about) for news in watch.new_faults(tracker, sick, "n1")] == [("gpu_suspect", "GPU-0")]
    (_, instance) = tracker.views(1.0)
    assert "nvidia-smi -r -i 0)" in (instance.why_not or "")
    assert (instance.why_not or "").endswith("gctl undrain 0:0")
