"""Energy counters, and the division of what a card used among its runs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_nvml import FakeDevice, FakeNvml
from gpu_builders import reading, sample, slices, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.gpu.energy import CardEnergy, CounterReading, EnergyClaim, EnergyCounters, divide, instance_part
from gpusched.gpu.meter import RunMeter
from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuProcess, GpuSample
from gpusched.model.job import GpuShare
from gpusched.model.settings import GpuSettings
from gpusched.model.tariff import Tariff, TariffRow


def card(energy_mj: int | None = None, power_w: float | None = 100.0, limit_w: float | None = 400.0) -> GpuSample:
    return sample(energy_mj=energy_mj, power_w=power_w, power_limit_w=limit_w)


@pytest.mark.parametrize(
    ("first", "second", "seconds", "expected"),
    [
        pytest.param(card(5_000), card(3_005_000), 10, (3000.0, "counter"), id="the counter goes first"),
        pytest.param(card(5_000, None), card(905_000, None), 10, (900.0, "counter"), id="without any power"),
        pytest.param(card(), card(None, 200.0), 10, (1500.0, "power"), id="no counter: power"),
        pytest.param(card(9_000_000), card(1_000), 10, (1000.0, "power"), id="a reset is filled by power"),
        pytest.param(card(2**32 - 5), card(40), 10, (1000.0, "power"), id="so is a wrap"),
        pytest.param(card(0), card(9_000_000_000), 10, (1000.0, "power"), id="and more than the card can draw"),
        pytest.param(card(0), card(4_800_000), 10, (4800.0, "counter"), id="up to 1.2 times its limit"),
        pytest.param(card(0), card(10_000_000, 100.0, None), 10, (10000.0, "counter"), id="an unknown limit is high"),
        pytest.param(card(0, None), card(-5, None), 10, None, id="a reset without power: unknown"),
        pytest.param(card(None, None), card(None, 100.0), 10, None, id="one power is no time"),
        pytest.param(card(None, 0.0), card(None, 0.0), 10, (0.0, "power"), id="zero is known"),
        pytest.param(card(), card(), 3600, None, id="power says nothing of an hour"),
        pytest.param(card(0), card(360_000_000), 3600, (360000.0, "counter"), id="a counter does"),
        pytest.param(card(0), card(50_000), -900, (50.0, "counter"), id="clock set back, a plausible amount"),
        pytest.param(card(0), card(9_000_000), -900, (0.0, "power"), id="clock set back, an implausible one"),
        pytest.param(card(0), card(50_000), 86400, (50.0, "counter"), id="clock set forward"),
    ],
)
def test_energy_between_two_readings(
    first: GpuSample, second: GpuSample, seconds: float, expected: tuple[float, str] | None
) -> None:
    counters = EnergyCounters("boot")
    assert counters.take(1000.0, [first]) == {}
    found = counters.take(1000.0 + seconds, [second]).get(first.uuid)
    assert (None if found is None else (found.joules, found.source)) == expected


@pytest.mark.parametrize(
    ("boot_id", "expected"),
    [pytest.param("boot", 500.0, id="the same boot"), pytest.param("later", None, id="another boot")],
)
def test_counters_go_on_over_a_restart(boot_id: str, expected: float | None) -> None:
    before = EnergyCounters("boot")
    before.take(1000.0, [card(1_000_000)])
    after = EnergyCounters()
    after.restore(before.readings(), boot_id)
    found = after.take(1060.0, [card(1_500_000)]).get("GPU-0")
    assert (None if found is None else found.joules) == expected


def test_a_lost_card_leaves_the_last_reading() -> None:
    counters = EnergyCounters("boot")
    counters.take(1000.0, [card(0)])
    assert counters.take(1010.0, [sample(is_lost=True, error="gone")]) == {}
    assert counters.take(1020.0, [card(2_000_000)])["GPU-0"].joules == 2000.0


@pytest.mark.parametrize(
    ("claims", "foreign_sm", "expected"),
    [
        pytest.param([EnergyClaim("a", 1.0)], 0.0, {"a": 1000.0}, id="a whole card"),
        pytest.param([EnergyClaim("a", 0.25)], 0.0, {"a": 850.0}, id="a slice alone: its idle part, all the work"),
        pytest.param(
            [EnergyClaim("a", 0.5), EnergyClaim("b", 0.25)], 0.0, {"a": 100 + 800 * 2 / 3, "b": 50 + 800 / 3}, id="book"
        ),
        pytest.param(
            [EnergyClaim("a", 0.5, 0.9), EnergyClaim("b", 0.5, 0.1)], 0.0, {"a": 820.0, "b": 180.0}, id="by SM time"
        ),
        pytest.param(
            [EnergyClaim("a", 0.5, 0.9), EnergyClaim("b", 0.5)], 0.0, {"a": 500.0, "b": 500.0}, id="one SM unknown"
        ),
        pytest.param([EnergyClaim("a", 1.0, 0.3)], 0.3, {"a": 600.0}, id="half of the work is foreign"),
        pytest.param([EnergyClaim("a", 1.0, 0.0)], 0.0, {"a": 1000.0}, id="no SM time at all: by booking"),
        pytest.param([EnergyClaim("a", 1.0), EnergyClaim("b", 1.0)], 0.0, {"a": 500.0, "b": 500.0}, id="booked twice"),
        pytest.param([EnergyClaim("a", 0.0)], 0.0, {"a": 0.0}, id="nothing booked"),
        pytest.param([], 0.5, {}, id="nobody"),
    ],
)
def test_division_of_a_card(claims: list[EnergyClaim], foreign_sm: float, expected: dict[str, float]) -> None:
    energy = CardEnergy(1000.0, "counter", 10.0, 0.0, idle_j=200.0)
    assert divide(energy, claims, foreign_sm) == pytest.approx(expected)


_AMOUNT = st.floats(0, 1e9, allow_nan=False)
_PART = st.floats(0, 1, allow_nan=False)


@given(
    joules=_AMOUNT,
    idle_j=_AMOUNT,
    claims=st.lists(st.builds(EnergyClaim, st.sampled_from("abcde"), _PART, st.none() | _PART)),
    foreign_sm=st.floats(0, 4),
)
def test_parts_and_what_is_nobodys_are_the_counter(
    joules: float, idle_j: float, claims: list[EnergyClaim], foreign_sm: float
) -> None:
    parts = divide(CardEnergy(joules, "counter", 1.0, 0.0, idle_j), claims, foreign_sm)
    assert all(part >= 0 for part in parts.values())
    assert sum(parts.values()) <= joules * (1 + 1e-9)
    if joules and not foreign_sm and sum(claim.booking for claim in claims) >= 1:
        assert sum(parts.values()) == pytest.approx(joules), "a full card leaves nothing to nobody"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_runs_and_the_rest_sum_up_to_the_counter(data: st.DataObject) -> None:
    """Through the tracker: slices, MIG instances, foreign processes, resets."""
    draw = data.draw
    is_mig = draw(st.booleans())
    profiles = draw(st.lists(st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb"]), max_size=3)) if is_mig else []
    tracker = GpuTracker(GpuSettings())
    booked: dict[str, list[tuple[str, GpuShare]]] = {}
    if is_mig:
        for slot in range(draw(st.integers(0, len(profiles)))):
            booked[f"MIG-{slot}"] = [(f"{slot}.1", GpuShare(f"MIG-{slot}", slot))]
    else:
        booked["GPU-0"] = [
            (f"{number}.1", GpuShare("GPU-0", 0, draw(st.integers(1, 8192))))
            for number in range(draw(st.integers(0, 3)))
        ]
    owners = {100 + number: f"{number}.1" for number in range(3)}
    energy_mj, total_j = 0, 0.0
    for step in range(draw(st.integers(2, 6))):
        if draw(st.integers(0, 9)) == 0:
            energy_mj = 0
        energy_mj += draw(st.integers(0, 400_000))
        processes = draw(
            st.lists(st.builds(GpuProcess, st.integers(100, 104), st.just(10), sm=st.none() | _PART), max_size=3)
        )
        parent = sample(
            energy_mj=energy_mj,
            power_w=draw(st.floats(0, 400)),
            mig_enabled=is_mig,
            processes=() if is_mig else processes,
        )
        instances = [
            sample(f"MIG-{slot}", mig_parent="GPU-0", mig_profile=profile, index=slot)
            for slot, profile in enumerate(profiles)
        ]
        tracker.observe(reading(1000.0 + step, parent, *instances), owners, booked)
        found = tracker.card_energies.get("GPU-0")
        if step and found is not None:
            total_j += found.joules
    meters = [meter for number in range(3) if (meter := tracker.meter(f"{number}.1")) is not None]
    parts = [meter.energy_j for meter in meters if meter.energy_j is not None]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= total_j * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    ("profile", "name", "part"),
    [
        ("1g.10gb", "NVIDIA A100-SXM4-80GB", 1 / 7),
        ("7g.80gb", "NVIDIA H100", 1.0),
        ("1c.3g.40gb", "NVIDIA H100", 3 / 7),
        ("2g.12gb", "NVIDIA A30", 0.5),
        ("unknown", "NVIDIA A100", 0.0),
        (None, "NVIDIA A100", 0.0),
    ],
)
def test_an_instance_has_its_part_of_the_slices(profile: str | None, name: str, part: float) -> None:
    assert instance_part(profile, name) == pytest.approx(part)


def metered(*readings: tuple[float, GpuSample], booked: Any, tariff: Tariff | None = None) -> RunMeter:
    tracker = GpuTracker(GpuSettings())
    tracker.tariff = tariff
    for at, found in readings:
        tracker.observe(reading(at, found), {}, booked)
    meter = tracker.meter("1.1")
    assert meter is not None
    return meter


def test_a_run_has_the_energy_of_its_card_and_where_it_comes_from() -> None:
    found = metered((0, card(0)), (10, card(3_000_000)), (20, card(0)), booked=whole("1.1"))
    assert found.energy_j == 3000 + 1000
    assert found.measured is not None
    assert found.measured.energy_source == "counter+power"
    assert found.measured.cards[0].mean_power_w == pytest.approx(200.0)
    assert found.measured.cards[0].power_limit_w == 400.0


def test_a_run_is_charged_by_the_rows_of_the_tariff() -> None:
    tariff = Tariff(
        price_per_kwh=0.30, g_per_kwh=400, currency="EUR", pue=1.5, rows=(TariffRow(15.0, 0.10, 100), TariffRow(17.0))
    )
    found = metered((0, card(0)), (10, card(3_600_000)), (20, card(7_200_000)), booked=whole("1.1"), tariff=tariff)
    assert found.measured is not None
    kwh = 0.001 * 1.5
    assert found.measured.cost == pytest.approx(kwh * 0.30 + kwh * (0.5 * 0.30 + 0.2 * 0.10 + 0.3 * 0.30))
    assert found.measured.grams == pytest.approx(kwh * 400 + kwh * (0.5 * 400 + 0.2 * 100 + 0.3 * 400))
    assert (found.measured.currency, found.measured.pue) == ("EUR", 1.5)


def test_a_cost_that_lacks_a_part_is_unknown_rather_than_too_low() -> None:
    tariff = Tariff(rows=(TariffRow(0.0, 0.30),), end_at=12.0)
    found = metered(
        (0, card(0)), (10, card(1_000)), (20, card(2_000)), (30, card(3_000)), booked=whole("1.1"), tariff=tariff
    )
    assert found.measured is not None
    assert (found.measured.cost, found.measured.grams) == (None, None)


def test_idle_time_counts_while_no_card_is_busy() -> None:
    busy, idle = sample(utilisation=0.9), sample(utilisation=0.0)
    found = metered((0, busy), (10, busy), (20, idle), (50, idle), (60, busy), booked=whole("1.1"))
    assert found.measured is not None
    assert found.measured.idle_s == 40
    unknown = metered((0, sample()), (10, sample()), booked=whole("1.1"))
    assert unknown.measured is not None
    assert unknown.measured.idle_s is None


def test_a_meter_goes_on_over_a_restart() -> None:
    before = GpuTracker(GpuSettings())
    before.restore_meters("boot", (), {})
    for at, mj in ((0, 0), (10, 3_000_000)):
        before.observe(reading(at, card(mj)), {}, whole("1.1"))
    after = GpuTracker(GpuSettings())
    after.restore_meters("boot", before.counters.readings(), before.meter_states())
    assert after.meter_states() == before.meter_states(), "a second restart before a reading loses nothing"
    after.observe(reading(300, card(33_000_000)), {}, whole("1.1"))
    meter = after.meter("1.1")
    assert meter is not None
    assert meter.energy_j == 33_000, "the counter has gone on while the daemon was away"


def test_a_meter_of_a_run_that_is_gone_is_forgotten() -> None:
    tracker = GpuTracker(GpuSettings())
    tracker.restore_meters("boot", (CounterReading("GPU-0", "boot", 0.0, 5),), {})
    tracker.observe(reading(0, card(0)), {}, whole("1.1"))
    tracker.observe(reading(1, card(0)), {}, {})
    assert tracker.meter_states() == {}


def read(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> GpuSample:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml([gpu]).module())
    source = NvmlSource({}, kernel_log="/dev/null")
    for _ in range(times):
        found = source.read().gpus[0]
    source.close()
    return found


def test_nvml_tells_counter_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(FakeDevice("GPU-0", energy_mj=2**33, power_limit_mw=400_000), monkeypatch)
    assert (found.energy_mj, found.power_limit_w) == (2**33, 400.0)
    found = read(FakeDevice("GPU-0"), monkeypatch, times=2)
    assert (found.energy_mj, found.power_limit_w) == (None, None)


def test_sm_time_is_read_only_where_processes_share_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    me, parent = __import__("os").getpid(), __import__("os").getppid()
    samples = [(me, 1, 80), (me, 2, 60), (0, 3, 7), (parent, 4, 900)]
    alone = read(FakeDevice("GPU-0", compute=[(me, 10)], sm=samples), monkeypatch)
    assert [process.sm for process in alone.processes or ()] == [None]
    found = read(FakeDevice("GPU-0", compute=[(me, 10), (parent, 10)], sm=samples), monkeypatch)
    assert {process.pid: process.sm for process in found.processes or ()} == {me: pytest.approx(0.7), parent: 0.0}


def test_slices_are_charged_by_sm_time() -> None:
    tracker = GpuTracker(GpuSettings())
    processes = [GpuProcess(7, 10, sm=0.75), GpuProcess(8, 10, sm=0.25)]
    for at in (0, 10):
        found = sample(energy_mj=at * 100_000, power_w=0.0, processes=processes)
        tracker.observe(reading(at, found), {7: "1.1", 8: "2.1"}, slices(r1=4096, r2=4096))
    meters = [tracker.meter("1.1"), tracker.meter("2.1")]
    assert [meter.energy_j for meter in meters if meter] == pytest.approx([750.0, 250.0])
