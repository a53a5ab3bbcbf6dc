"""What holds for a card whatever the driver says and in whatever order it says it."""

from __future__ import annotations

from typing import Any

from gpu_builders import UUID, reading, sample
from hypothesis import given
from hypothesis import strategies as st

from gpusched.gpu.source import Answer
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuReading, GpuSample, GpuState
from gpusched.model.job import GpuShare
from gpusched.model.settings import GpuSettings
from gpusched.model.value import decode, encode

SETTINGS = GpuSettings()
TOTAL_MIB = 24576
OWNERS = {7: "1.1", 8: "2.1"}

amounts = st.none() | st.integers(0, TOTAL_MIB)
processes = st.none() | st.lists(
    st.tuples(st.sampled_from([7, 8, 9, 10]), amounts), max_size=4, unique_by=lambda found: found[0]
)


@st.composite
def samples(draw: st.DrawFn) -> GpuSample:
    """A card in any condition; every field may be unknown."""
    is_lost = draw(st.sampled_from([False, False, False, True]))
    return sample(
        vram_total_mib=draw(st.sampled_from([TOTAL_MIB, TOTAL_MIB, None])),
        vram_used_mib=draw(amounts),
        processes=draw(processes),
        utilisation=draw(st.none() | st.floats(0, 1)),
        power_w=draw(st.none() | st.floats(0, 700)),
        mig_enabled=draw(st.sampled_from([False, False, True])),
        compute_mode=draw(st.sampled_from([0, 0, 2, 3])),
        unified_memory=draw(st.booleans()),
        is_lost=is_lost,
        error=draw(st.sampled_from([None, None, "it must be reset"])),
    )


@st.composite
def readings(draw: st.DrawFn) -> list[tuple[GpuReading, dict[str, Any]]]:
    """Readings a second apart, of one card that may be missing, and what was booked at each."""
    series = []
    for second in range(draw(st.integers(1, 8))):
        found = [draw(samples())] if draw(st.integers(0, 5)) else []
        error = draw(st.sampled_from([None, None, None, "no answer from the driver"]))
        shares = draw(
            st.sampled_from(
                [[], [("1.1", GpuShare(UUID, 0))], [("1.1", GpuShare(UUID, 0, 4096)), ("2.1", GpuShare(UUID, 0, 8192))]]
            )
        )
        series.append((reading(100.0 + second, *found, error=error), {UUID: shares}))
    return series


def is_well(found: GpuReading) -> bool:
    """Whether the reading says all that is needed to place something."""
    if found.error is not None or not found.gpus:
        return False
    (gpu,) = found.gpus
    known = gpu.vram_total_mib is not None and gpu.vram_used_mib is not None
    return known and not gpu.is_lost and gpu.error is None


@given(readings(), st.floats(0, 40))
def test_a_gpu_is_placeable_only_after_consecutive_fresh_good_readings(
    series: list[tuple[GpuReading, dict[str, Any]]], age_s: float
) -> None:
    tracker = GpuTracker(SETTINGS)
    for found, booked in series:
        tracker.observe(found, OWNERS, booked)
    now = series[-1][0].at + age_s
    for view in tracker.views(now):
        if view.why_not is None:
            assert all(is_well(found) for found, _ in series[-SETTINGS.free_polls :])
            assert len(series) >= SETTINGS.free_polls
            assert age_s <= 15.0
            assert view.vram_total_mib is not None
            assert view.is_present
        if view.why_not is None and view.why_not_whole is None:
            assert view.foreign_mib <= SETTINGS.foreign_mib
        status = tracker.status(view.uuid, now=now)
        # One that MIG divides is there, but it is no GPU to have.
        assert view.is_divided or (status.state == GpuState.LOST) == (not view.is_present)
        assert not (view.is_divided and view.is_present)
        if status.state == GpuState.IDLE:
            assert view.why_not is None


@given(readings(), st.integers(0, 7), st.booleans())
def test_a_release_is_clean_only_after_a_later_reading_without_the_run(
    series: list[tuple[GpuReading, dict[str, Any]]], end: int, all_the_rest: bool
) -> None:
    tracker = GpuTracker(SETTINGS)
    end = min(end, len(series) - 1)
    for found, booked in series[: end + 1]:
        tracker.observe(found, OWNERS, booked)
    began_at = series[end][0].at
    tracker.begin_release(UUID, "1.1", began_at)
    assert tracker.release_state(UUID, began_at) != "clean"
    was_clean = False
    for found, booked in series[end + 1 :]:
        tracker.observe(found, OWNERS if all_the_rest else {}, booked)
        state = tracker.release_state(UUID, found.at)
        if state == "clean" and not was_clean:
            was_clean = True
            assert is_well(found)
            assert all(process.pid != 7 for process in found.gpus[0].processes or ()) or not all_the_rest


@given(st.lists(samples(), max_size=1), st.none() | st.text(), st.lists(st.text()))
def test_every_reading_survives_the_pipe(gpus: list[GpuSample], error: str | None, notes: list[str]) -> None:
    answer = Answer(1, GpuReading(1.5, "nvml", tuple(gpus), error, None, tuple(notes)))
    assert decode(encode(answer), Answer) == answer
