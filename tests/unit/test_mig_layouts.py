"""MIG layouts: how they are typed, which fit on a card, and how they are made by the driver whatever happens."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from fake_nvml import A100, FakeDevice, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from gpusched.gpu import mig_layout
from gpusched.gpu.nvml import NvmlSource
from gpusched.gpu.simulated import SimulatedSource
from gpusched.model.mig import (
    LayoutError,
    MigLayout,
    MigOrder,
    MigProfile,
    check_layout,
    layout_of,
    layout_with,
    parse_layout,
    placements,
)

PROFILES = tuple(
    MigProfile(name, kind, slices, mib, size, starts, most) for name, kind, slices, mib, size, starts, most in A100
)
OFF = MigLayout(False)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("off", "off"),
        ("ON", "on"),
        ("2g.20gb,3g.40gb,2g.20gb", "3g.40gb,2x2g.20gb"),
        ("7x1g.10gb", "7x1g.10gb"),
        ("1g.10gb+me, 3G.40GB", "3g.40gb,1g.10gb+me"),
    ],
)
def test_a_layout_is_read_and_written(typed: str, shown: str) -> None:
    layout = parse_layout(typed)
    assert str(layout) == shown
    assert parse_layout(shown) == layout


@pytest.mark.parametrize("typed", ["", ",", "3g", "1c.3g.40gb", "0x1g.10gb", "99x1g.10gb", "3g.40gb;rm", "\x1b[31m"])
def test_what_is_no_layout_is_refused(typed: str) -> None:
    with pytest.raises(LayoutError):
        parse_layout(typed)


@pytest.mark.parametrize(
    ("typed", "why", "hint"),
    [
        ("5g.60gb", "the card has no profile 5g.60gb", "it has: 1g.10gb, 1g.10gb+me, 1g.20gb"),
        ("4x2g.20gb", "4 instances of 2g.20gb do not fit on the card, which has at most 3", "3x2g.20gb"),
        ("2x3g.40gb,1g.10gb", "2x3g.40gb,1g.10gb does not fit on one card; 2x3g.40gb does", "gctl mig"),
        ("7g.80gb,1g.10gb", "7g.80gb,1g.10gb does not fit on one card; 7g.80gb does", "gctl mig"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_can(typed: str, why: str, hint: str) -> None:
    with pytest.raises(LayoutError) as error:
        check_layout(parse_layout(typed), PROFILES, "0")
    assert str(error.value) == why
    assert hint in error.value.hint


def test_profiles_that_the_driver_does_not_name_refuse_nothing() -> None:
    check_layout(parse_layout("3g.40gb"), (), "0")


def test_a_layout_for_a_profile_keeps_what_it_can() -> None:
    now = parse_layout("3g.40gb,2x2g.20gb")
    assert str(layout_with("4g.40gb", now, PROFILES)) == "4g.40gb,3g.40gb"
    assert str(layout_with("1g.10gb", OFF, PROFILES)) == "1g.10gb"
    assert layout_with("5g.60gb", now, PROFILES) is None


@given(st.lists(st.sampled_from([one.name for one in PROFILES]), max_size=8))
def test_places_overlap_nowhere_and_no_layout_is_missed(names: list[str]) -> None:
    layout, known = layout_of(names), {one.name: one for one in PROFILES}
    found = placements(layout, PROFILES)
    if found is not None:
        taken = list(chain.from_iterable(range(start, start + one.size) for one, start in found))
        assert Counter(one.name for one, _ in found) == Counter(names)
        assert len(set(taken)) == len(taken)
        assert all(start in one.starts for one, start in found)
    elif sum(known[name].size for name in names) <= 4 and len(names) < 3:
        # Any two that take half of the memory fit, unless there may be one of them only.
        assert any(count > known[name].most for name, count in Counter(names).items()) or "4g.40gb" in names


# --- the driver -----------------------------------------------------------------------------------


class Bench:
    """A source over one A100, and orders for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        self.now = 1000.0
        self.card = FakeDevice("GPU-0", "NVIDIA A100-SXM4-80GB", kinds=A100, **fields)
        self.nvml = FakeNvml([self.card], has_events=True)
        monkeypatch.setitem(sys.modules, "pynvml", self.nvml.module())
        monkeypatch.setattr("gpusched.gpu.topology.sysfs_numa", lambda bus_id: None)
        monkeypatch.setattr("gpusched.gpu.procinfo.openers", lambda paths: dict.fromkeys(paths, ()))
        monkeypatch.setattr(mig_layout.os, "geteuid", lambda: 0)
        self.number = 0
        self.restart()

    def restart(self) -> None:
        self.source = NvmlSource({}, clock=lambda: self.now, monotonic=lambda: self.now, kernel_log="")

    def order(self, typed: str, before: str = "off", number: int | None = None, is_wanted: bool = True) -> str | None:
        """Carry an order out and read; returns why it was given up."""
        self.number = self.number + 1 if number is None else number
        order = MigOrder(self.number, "GPU-0", parse_layout(typed), parse_layout(before))
        self.source.carry_out([order], lambda: is_wanted)
        state = self.read()[0].mig
        assert state is not None
        assert state.order == self.number
        return state.failure

    def read(self) -> Any:
        self.now += 1.0
        return self.source.read().gpus

    @property
    def layout(self) -> str:
        """As the card has it, with instances that are not listed in brackets."""
        if not self.card.mig:
            return "off"
        there = [one for one in self.card.instances if one is not None]
        names = [str(one.name).rpartition(" ")[2] for one in there]
        return str(layout_of(names)) if all(one.has_part for one in there) else f"[{layout_of(names)}]"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Bench(monkeypatch)
    yield found
    found.source.close()


def test_layouts_are_made_one_after_the_other(bench: Bench) -> None:
    assert bench.read()[0].mig.profiles == ()  # this driver names them only with MIG on
    before = "off"
    for layout in ("3g.40gb,2x2g.20gb", "7x1g.10gb", "on", "4g.40gb,1g.20gb,1g.10gb+me", "off", "7g.80gb", "off"):
        assert bench.order(layout, before) is None
        assert bench.layout == before if layout == before else bench.layout == layout
        card, *instances = bench.read()
        assert card.mig_enabled is (layout != "off")
        assert str(layout_of(one.mig_profile for one in instances)) == ("on" if layout in ("on", "off") else layout)
        before = layout


def test_the_smaller_instances_leave_room_for_the_larger_one(bench: Bench) -> None:
    # The driver's own choice for the first 2g.20gb may be a place that leaves no half of the card for the 3g.40gb.
    assert bench.order("2g.20gb,2g.20gb,3g.40gb") is None
    assert sorted((one.place, one.slices[0]) for one in bench.card.instances if one) == [(0, 3), (4, 2), (6, 2)] or (
        sorted((one.place, one.slices[0]) for one in bench.card.instances if one) == [(0, 2), (2, 2), (4, 3)]
    )


def test_an_order_is_carried_out_once(bench: Bench) -> None:
    bench.order("3g.40gb", number=7)
    made = bench.nvml.made
    bench.order("3g.40gb", number=7)
    bench.restart()
    assert bench.order("3g.40gb", number=7) is None
    assert bench.nvml.made == made


@pytest.mark.parametrize("code", [4, 19, 23, 999])
@pytest.mark.parametrize(
    "function", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
)
def test_a_layout_that_cannot_be_made_gives_back_the_one_from_before(bench: Bench, function: str, code: int) -> None:
    bench.order("3g.40gb,4g.40gb")
    calls = 0

    def fail_at_the_third(name: str) -> None:
        nonlocal calls
        calls += name == function
        bench.nvml.codes = {function: code} if name == function and calls == 3 else {}

    bench.nvml.before_step = fail_at_the_third
    failure = bench.order("7x1g.10gb", "4g.40gb,3g.40gb")
    assert failure is not None
    assert failure.startswith("1g.10gb could not be made: ")
    assert failure.endswith("; the layout from before, 4g.40gb,3g.40gb, is back")
    assert bench.layout == "4g.40gb,3g.40gb"


def test_a_card_in_use_is_left_as_it_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.order("3g.40gb")
    (instance,) = (one for one in bench.card.instances if one)
    instance.compute = [(1, 100)]
    failure = bench.order("off", "3g.40gb")
    assert failure == (
        "3g.40gb could not be removed: a program still uses the GPU; the layout from before, 3g.40gb, is back"
    )
    assert bench.layout == "3g.40gb"


@pytest.mark.parametrize(
    ("status", "words"), [(19, "a program has it open, perhaps a monitor such as DCGM"), (16, "nvidia-smi -r -i GPU-0")]
)
def test_a_mode_that_waits_for_a_reset_is_taken_back(bench: Bench, status: int, words: str) -> None:
    bench.card.mig_status, bench.card.generation = status, 7
    failure = bench.order("3g.40gb")
    assert failure is not None
    assert failure.startswith("MIG could not be switched on: ")
    assert words in failure
    assert (bench.layout, bench.card.mig_pending) == ("off", None)
    assert bench.read()[0].mig.needs_reset


def test_a_daemon_that_is_not_root_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mig_layout.os, "geteuid", lambda: 1000)
    assert (bench.order("3g.40gb") or "").startswith("MIG is changed by root")
    assert bench.read()[0].mig.why_not == bench.read()[0].mig.failure
    assert bench.layout == "off"


def test_a_killed_process_leaves_nothing_that_the_next_one_cannot_finish(bench: Bench) -> None:
    """Killed before each step in turn; then either the same order is repeated, or the one back."""

    class Killed(BaseException):
        """Nothing catches it."""

    last = "off"
    for target, back in (("3g.40gb,2x2g.20gb", False), ("7x1g.10gb", True), ("off", False), ("2x3g.40gb", True)):
        for step in range(100):
            steps = 0

            def kill(_: str, at: int = step) -> None:
                nonlocal steps
                steps += 1
                if steps > at:
                    raise Killed

            bench.order(last, last)
            bench.nvml.before_step = kill
            try:
                bench.order(target, last)
            except Killed:
                bench.nvml.before_step = lambda name: None
                bench.restart()
                wanted = last if back else target
                assert bench.order(wanted, last) is None
                assert bench.layout == wanted
            else:
                break
        assert 1 < step < 99
        bench.nvml.before_step = lambda name: None
        last = target


def test_a_process_whose_daemon_is_gone_stops_before_the_next_step(bench: Bench) -> None:
    with pytest.raises(mig_layout.Abandoned):
        bench.order("3g.40gb", is_wanted=False)
    assert bench.layout == "off"


def test_an_unknown_card_and_a_broken_driver_are_told(bench: Bench) -> None:
    order = MigOrder(9, "GPU-9", parse_layout("3g.40gb"), OFF)
    bench.source.carry_out([order], lambda: True)
    assert bench.read()[0].mig.order == 0
    bench.source.close()
    bench.nvml.init_code = 18
    bench.source.carry_out([MigOrder(9, "GPU-0", parse_layout("3g.40gb"), OFF)], lambda: True)
    assert "was updated" in (bench.source.read().error or "")
    assert bench.layout == "off"


def test_simulated_cards_are_divided_by_the_same_rules() -> None:
    source = SimulatedSource("1xA100:80GiB+1xT4:16GiB")
    card, other = source.read().gpus
    assert other.mig is None
    assert card.mig is not None
    for number, (typed, failure) in enumerate([("3g.40gb,2x2g.20gb", None), ("9g.90gb", "the card has no profile")], 1):
        source.carry_out([MigOrder(number, card.uuid, parse_layout(typed), OFF)], lambda: True)
        state = source.read().gpus[0].mig
        assert state is not None
        assert (state.order, (state.failure or "")[:23]) == (number, (failure or "")[:23])
    profiles = [gpu.mig_profile for gpu in source.read().gpus]
    assert profiles == [None, None, "3g.40gb", "2g.20gb", "2g.20gb"]
