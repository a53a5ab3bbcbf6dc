"""What a run is recorded to have used."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_builders import reading, sample, slices, whole

from gpusched.gpu.tracker import GpuTracker, RunMeter
from gpusched.model.job import GpuShare
from gpusched.model.settings import GpuSettings


def metered(*series: Any, booked: Any, owners: Any = None) -> RunMeter | None:
    """What run 1.1 used over readings that are ten seconds apart."""
    tracker = GpuTracker(GpuSettings())
    for step, found in enumerate(series):
        samples = found if isinstance(found, tuple) else (found,)
        tracker.observe(reading(100.0 + 10 * step, *samples), {7: "1.1"} if owners is None else owners, booked)
    return tracker.meter("1.1")


def test_an_unread_run_has_no_meter() -> None:
    assert metered(booked={}) is None
    assert metered(sample(), booked=whole("2.1")) is None


def test_peak_mean_and_energy_of_a_whole_card() -> None:
    found = metered(
        sample(vram_used_mib=2100, processes=[(7, 2000)], utilisation=0.0, power_w=100.0),
        sample(vram_used_mib=8100, processes=[(7, 8000)], utilisation=1.0, power_w=300.0),
        sample(vram_used_mib=1100, processes=[(7, 1000)], utilisation=1.0, power_w=300.0),
        booked=whole("1.1"),
    )
    assert found == RunMeter(8000, pytest.approx(0.75), pytest.approx(200 * 10 + 300 * 10))


def test_one_reading_gives_a_level_but_no_energy() -> None:
    found = metered(sample(processes=[(7, 500)], utilisation=0.4, power_w=100.0), booked=whole("1.1"))
    assert found == RunMeter(500, 0.4, None)


def test_a_slice_has_its_own_memory_and_its_part_of_the_energy() -> None:
    found = metered(
        *[sample(vram_used_mib=9000, processes=[(7, 3000), (8, 6000)], utilisation=0.5, power_w=200.0)] * 2,
        booked=slices(r1=4096, r2=8192),
        owners={7: "1.1", 8: "2.1"},
    )
    # The card has never drawn less, so that all of it counts as idle power: a sixth of 200 W over ten seconds.
    assert found == RunMeter(3000, pytest.approx(0.5), pytest.approx(200 * 10 * 4096 / 24576))
    assert found.measured is not None
    assert found.measured.energy_source == "power+split"


@pytest.mark.parametrize(
    ("fields", "booked", "peak_mib"),
    [
        ({"vram_used_mib": 9000, "processes": None}, whole("1.1"), 9000),
        ({"vram_used_mib": 9000, "processes": [(8, 1000)]}, whole("1.1"), 8000),
        ({"vram_used_mib": 9000, "processes": [(7, None)]}, whole("1.1"), 9000),
        ({"vram_used_mib": None, "processes": None}, whole("1.1"), None),
        ({"vram_used_mib": 9000, "processes": None}, slices(r1=4096), None),
        ({"vram_used_mib": 9000, "processes": [(7, None)]}, slices(r1=4096), None),
        ({"vram_used_mib": 0, "processes": []}, slices(r1=4096), 0),
        ({"vram_used_mib": 9000, "processes": None, "unified_memory": True}, whole("1.1"), None),
    ],
)
def test_memory_is_metered_where_the_driver_reports_less(
    fields: dict[str, Any], booked: Any, peak_mib: int | None
) -> None:
    found = metered(sample(**fields), booked=booked)
    assert (found.peak_vram_mib if found else None) == peak_mib


def test_unknown_load_and_power_stay_unknown() -> None:
    found = metered(*[sample()] * 2, booked=whole("1.1"))
    assert found == RunMeter(0, None, None)


def test_gaps_in_the_load_count_for_nothing() -> None:
    loads = (0.2, 0.4, None, 0.8)
    found = metered(*[sample(utilisation=load) for load in loads], booked=whole("1.1"))
    assert found is not None
    assert found.mean_utilisation == pytest.approx(0.3)


def test_several_cards_are_added_up() -> None:
    booked = {f"GPU-{n}": [("1.1", GpuShare(f"GPU-{n}", n))] for n in range(2)}
    both = (
        sample("GPU-0", vram_used_mib=3000, processes=[(7, 3000)], utilisation=0.2, power_w=100.0),
        sample("GPU-1", vram_used_mib=4000, processes=[(7, 4000)], utilisation=0.6, power_w=200.0),
    )
    found = metered(both, both, booked=booked)
    assert found == RunMeter(7000, pytest.approx(0.4), pytest.approx(3000))


def test_a_meter_lasts_until_the_gpu_is_released_and_is_not_restarted() -> None:
    tracker = GpuTracker(GpuSettings())
    tracker.observe(reading(100.0, sample()), {}, whole("1.1"))
    assert tracker.meter("1.1") == tracker.meter("1.1") is not None
    tracker.begin_release("GPU-0", "1.1", 100.5)
    tracker.observe(reading(101.0, sample(vram_used_mib=8000)), {}, whole("1.1"))
    assert tracker.meter("1.1") is None
