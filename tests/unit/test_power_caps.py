"""Power limits of cards: set for runs that want a cap, read back, restored, also after a crash at any point."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeDevice, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.power import WithPowerCaps
from gpusched.gpu.source import NoGpus
from gpusched.model.cluster import GpuReading, GpuSample, PowerLimit


class Card:
    """A source of one card with a power limit; `calls_left` calls until the reader is killed."""

    def __init__(self, limit_w: float = 400.0, low_w: float = 100.0) -> None:
        self.limit_w, self.low_w = limit_w, low_w
        self.calls_left = 10**9

    def read(self) -> GpuReading:
        return GpuReading(0.0, "nvml", (GpuSample("GPU-0", 0, "A100", power_limit_w=self.limit_w),))

    def power_limit(self, uuid: str) -> PowerLimit | str:
        self._call()
        return PowerLimit(self.limit_w, self.low_w)

    def set_power_limit(self, uuid: str, limit_w: float) -> str | None:
        self._call()
        self.limit_w = limit_w
        return None

    def close(self) -> None:
        """Holds nothing."""

    def _call(self) -> None:
        if not self.calls_left:
            raise KeyboardInterrupt
        self.calls_left -= 1


Open = Callable[[FakeDevice], WithPowerCaps]


@pytest.fixture
def open_caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    def open_over(device: FakeDevice) -> WithPowerCaps:
        nvml = FakeNvml([device])
        monkeypatch.setitem(sys.modules, "pynvml", nvml.module())
        source = NvmlSource({}, kernel_log="/nonexistent")
        return WithPowerCaps(source, source, str(tmp_path / "power-limits.json"))

    return open_over


def device(**changes: Any) -> FakeDevice:
    return FakeDevice("GPU-0", **{"power_limit_mw": 400_000, "power_bounds_mw": (100_000, 400_000), **changes})


def test_a_cap_is_set_read_back_and_restored(open_caps: Open, tmp_path: Path) -> None:
    card = device()
    caps = open_caps(card)
    caps.want({"GPU-0": 300.0})
    (seen,) = caps.read().gpus
    assert (seen.power_cap_w, seen.power_limit_w, card.power_limit_mw) == (300.0, 300.0, 300_000)
    assert json.loads((tmp_path / "power-limits.json").read_text()) == {"GPU-0": {"before_w": 400.0, "cap_w": 300.0}}
    caps.want({})
    (seen,) = caps.read().gpus
    assert (seen.power_cap_w, card.power_limit_mw) == (None, 400_000)
    assert json.loads((tmp_path / "power-limits.json").read_text()) == {}


def test_the_next_cap_of_a_card_keeps_the_first_limit_to_go_back_to(open_caps: Open) -> None:
    card = device()
    caps = open_caps(card)
    for cap_w in (300.0, 200.0, 350.0):
        caps.want({"GPU-0": cap_w})
        assert caps.read().gpus[0].power_cap_w == cap_w
    caps.want({})
    caps.read()
    assert card.power_limit_mw == 400_000


def test_a_lower_limit_of_the_administrator_is_kept(open_caps: Open, tmp_path: Path) -> None:
    card = device(power_limit_mw=250_000)
    caps = open_caps(card)
    caps.want({"GPU-0": 300.0})
    assert caps.read().gpus[0].power_cap_w == 250.0
    assert card.power_limit_mw == 250_000
    assert not (tmp_path / "power-limits.json").exists()


def test_a_limit_that_the_administrator_changed_meanwhile_is_not_restored(open_caps: Open) -> None:
    card = device()
    caps = open_caps(card)
    caps.want({"GPU-0": 300.0})
    caps.read()
    card.power_limit_mw = 220_000
    caps.want({})
    caps.read()
    assert card.power_limit_mw == 220_000


@pytest.mark.parametrize(
    ("changes", "cap_w", "why"),
    [
        ({"codes": {"nvmlDeviceSetPowerManagementLimit": 4}}, 300.0, "only root may set it"),
        ({"power_limit_mw": None}, 300.0, "it has no power limit that can be set"),
        ({"power_bounds_mw": None}, 300.0, "it has no power limit that can be set"),
        ({}, 50.0, "50 W is below the 100 W that it accepts"),
    ],
    ids=["not root", "no limit", "no bounds", "below the bounds"],
)
def test_a_card_that_does_not_permit_a_cap_says_why_once(
    open_caps: Open, tmp_path: Path, changes: dict[str, Any], cap_w: float, why: str
) -> None:
    card = device(**changes)
    before = card.power_limit_mw
    caps = open_caps(card)
    caps.want({"GPU-0": cap_w})
    for _ in range(2):
        reading = caps.read()
        assert (reading.gpus[0].power_cap_w, reading.gpus[0].power_cap_refused) == (None, why)
        assert reading.power_troubles == (f"power cap of GPU 0: {why}",)
    assert card.power_limit_mw == before
    record = tmp_path / "power-limits.json"
    assert not record.exists() or json.loads(record.read_text()) == {}


def test_a_source_without_power_limits_says_so(tmp_path: Path) -> None:
    class Static(NoGpus):
        def read(self) -> GpuReading:
            return GpuReading(0.0, "static", (GpuSample("NPU-0", 0, "npu"),))

    caps = WithPowerCaps(Static(), None, str(tmp_path / "power-limits.json"))
    caps.want({"NPU-0": 300.0})
    assert caps.read().gpus[0].power_cap_refused == "this source of GPUs cannot set power limits"


def test_nothing_is_restored_before_it_is_known_what_runs_want(tmp_path: Path) -> None:
    card, path = Card(), str(tmp_path / "power-limits.json")
    first = WithPowerCaps(card, card, path)
    first.want({"GPU-0": 300.0})
    first.read()
    second = WithPowerCaps(card, card, path)
    second.read()
    assert card.limit_w == 300.0
    second.want({})
    second.read()
    assert card.limit_w == 400.0


def test_a_damaged_record_is_told_and_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "power-limits.json"
    path.write_text("[1]")
    card = Card()
    caps = WithPowerCaps(card, card, str(path))
    caps.want({"GPU-0": 300.0})
    reading = caps.read()
    assert reading.gpus[0].power_cap_w == 300.0
    assert reading.power_troubles == (
        f"power caps of an earlier daemon are unknown: {path}: it is damaged; see: nvidia-smi -q -d POWER",
    )


def test_a_cap_that_cannot_be_recorded_is_not_set(tmp_path: Path) -> None:
    card = Card()
    caps = WithPowerCaps(card, card, str(tmp_path / "missing" / "power-limits.json"))
    caps.want({"GPU-0": 300.0})
    assert "cannot be written" in (caps.read().gpus[0].power_cap_refused or "")
    assert card.limit_w == 400.0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([None, 150.0, 300.0, 300.4, 500.0]), st.integers(0, 8)), min_size=1, max_size=6
    )
)
def test_killed_at_any_call_a_card_gets_its_limit_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float | None, int]]
) -> None:
    """Each step wants another cap, and the reader is killed after so many calls of the driver."""
    path = str(tmp_path_factory.mktemp("caps") / "power-limits.json")
    card = Card()
    for cap_w, calls in steps:
        caps = WithPowerCaps(card, card, path)
        caps.want({} if cap_w is None else {"GPU-0": cap_w})
        card.calls_left = calls
        try:
            caps.read()
        except KeyboardInterrupt:
            continue
        assert card.limit_w == min(400.0, cap_w or 400.0) or abs(card.limit_w - (cap_w or 0)) <= 1
    card.calls_left = 10**9
    last = WithPowerCaps(card, card, path)
    last.want({})
    last.read()
    assert card.limit_w == 400.0
