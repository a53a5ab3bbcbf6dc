"""Runs that hold more of a shared card than they booked: who is told, who is ended, who is a victim, who is spared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.lifecycle.overuse import (
    OveruseStep,
    OveruseStreak,
    SharedGpuReading,
    add_reading,
    crowded_victim,
    due_step,
    endangered,
)
from gpusched.model.cluster import ShareUse
from gpusched.model.job import Run
from gpusched.model.mentions import render
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import Value, replace
from gpusched.testing import NOW, job, run, share

KILL = GpuSettings(vram_over="kill", vram_over_mib=512, vram_over_polls=3, vram_over_grace_s=60.0)
WARN = replace(KILL, vram_over="warn")
GAP_S = 30.0
BOOKED = 8192
POLL_S = 5.0


class Stretch(Value):
    """A time in which all readings say that the run holds so much (GiB; None: nobody knows)."""

    seconds: float
    held: float | None = 12.0
    poll_s: float = POLL_S


def use(
    held: float | None, *, of: str = "1.1", left: float | None = 24, index: int = 0, booked: int = BOOKED
) -> ShareUse:
    mib = [None if gib is None else int(gib * 1024) for gib in (held, left)]
    return ShareUse(of, f"GPU-n1-{index}", index, BOOKED, mib[0], mib[1])


def live(
    stretches: list[Stretch], settings: GpuSettings, *, told_at: float | None = None
) -> list[tuple[float, OveruseStep]]:
    """Each step with the second in which it was due."""
    now, seen, steps = 0.0, None, []
    for stretch in stretches:
        end_at = now + stretch.seconds
        while now < end_at:
            seen = add_reading(seen, now, [use(stretch.held)], settings, GAP_S)
            step = due_step(seen, told_at, now, settings, GAP_S)
            if step is not None:
                steps.append((now, step))
                if step is OveruseStep.END:
                    return steps
                told_at = now
            now += stretch.poll_s
    return steps


TOLD, ENDED = OveruseStep.TELL, OveruseStep.END
TABLE: dict[str, tuple[list[Stretch], list[OveruseStep], list[OveruseStep]]] = {
    # what happened: stretches, steps where `warn` is set, steps where `kill` is
    "over for long": ([Stretch(300)], [TOLD], [TOLD, ENDED]),
    "within its booking": ([Stretch(300, 8.0)], [], []),
    "over by a context": ([Stretch(300, 8.4)], [], []),
    "over by no more than the tolerance": ([Stretch(300, 8.5)], [], []),
    "over by a little more": ([Stretch(300, 8.51)], [TOLD], [TOLD, ENDED]),
    "over in a single reading": ([Stretch(300, 4.0), Stretch(5), Stretch(300, 4.0)], [], []),
    "over in two": ([Stretch(300, 4.0), Stretch(10), Stretch(300, 4.0)], [], []),
    "over in three": ([Stretch(300, 4.0), Stretch(15), Stretch(300, 4.0)], [TOLD], [TOLD]),
    "over, and again and again well before the grace is over": ([Stretch(50), Stretch(10, 4.0)] * 20, [TOLD], [TOLD]),
    "told, well for an hour, then over for long": (
        [Stretch(50), Stretch(3600, 4.0), Stretch(90)],
        [TOLD],
        [TOLD, ENDED],
    ),
    "what nobody knows": ([Stretch(300, None)], [], []),
    "a reading without a figure begins the time anew": ([Stretch(55), Stretch(5, None)] * 20, [TOLD], [TOLD]),
    "a pause of the daemon begins it anew": ([Stretch(50), Stretch(1, poll_s=60)] * 20, [TOLD], [TOLD]),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("settings", [WARN, KILL], ids=["warn", "kill"])
def test_steps_fall_due(name: str, settings: GpuSettings) -> None:
    stretches, warned, killed = TABLE[name]
    assert [step for _, step in live(stretches, settings)] == (killed if settings is KILL else warned)
    assert live(stretches, replace(settings, vram_over="ignore")) == []


def test_each_step_comes_at_its_time() -> None:
    assert live([Stretch(20, 4.0), Stretch(300)], KILL) == [(30.0, TOLD), (90.0, ENDED)]


def test_a_restart_repeats_no_warning_and_restarts_the_grace() -> None:
    assert live([Stretch(300)], KILL, told_at=-1000.0) == [(60.0, ENDED)]


def test_zero_grace_still_warns_first() -> None:
    assert live([Stretch(300)], replace(KILL, vram_over_grace_s=0)) == [(10.0, TOLD), (15.0, ENDED)]


def test_one_of_several_gpus_suffices_and_an_unknown_one_is_no_excuse() -> None:
    seen: OveruseStreak | None = None
    for second in range(3):
        seen = add_reading(seen, second, [use(2.0), use(12.0, index=1), use(None, index=2)], KILL, GAP_S)
    assert seen is not None
    assert (seen.readings, seen.worst and seen.worst.index) == (3, 1)


# --- neighbours -----------------------------------------------------------------------------------


def look(*uses: ShareUse, at: float = NOW) -> SharedGpuReading:
    return SharedGpuReading(at, uses)


ENDANGERED: dict[str, tuple[list[ShareUse], list[str]]] = {
    "the card is full because of another": ([use(12, of="1.1", left=20), use(4, of="2.1", left=4)], ["2.1"]),
    "there is room for what it booked": ([use(12, of="1.1", left=20), use(4, of="2.1", left=12)], []),
    "it is over as well": ([use(12, of="1.1", left=6), use(10, of="2.1", left=4)], []),
    "nobody is over, strangers fill the card": ([use(8, of="1.1", left=6), use(4, of="2.1", left=4)], []),
    "what others hold is not known": ([use(12, of="1.1", left=None), use(4, of="2.1", left=None)], []),
    "two neighbours": (
        [use(12, of="1.1", left=20), use(4, of="2.1", left=4), use(1, of="3.1", left=5)],
        ["2.1", "3.1"],
    ),
}


@pytest.mark.parametrize("name", ENDANGERED)
def test_affected_neighbours_are_notified(name: str) -> None:
    uses, expected = ENDANGERED[name]
    found = endangered(look(*uses), KILL)
    assert [one.run for one, _ in found] == expected
    assert all(worst.run == "1.1" for _, worst in found)


def ended(**parts: object) -> Run:
    fields = {"outcome": JobState.OUT_OF_MEMORY, "reason": ReasonCode.OUT_OF_MEMORY, "end_at": NOW, **parts}
    return run(job(2), state=RunState.ENDED, gpus=(share(0, vram_mib=BOOKED),), start_at=NOW - 600, **fields)


FULL = (use(12, of="1.1", left=20), use(4, of="2.1", left=4))
VICTIMS: dict[str, tuple[Run, list[SharedGpuReading], bool]] = {
    "memory ran out while another held what it had booked": (ended(), [look(*FULL, at=NOW - 1)], True),
    "seen only in the reading after": (
        ended(),
        [look(use(12, of="1.1", left=20), use(0, of="2.1", left=4), at=NOW + 1)],
        True,
    ),
    "long before its end": (ended(), [look(*FULL, at=NOW - 60)], False),
    "long after": (ended(), [look(*FULL, at=NOW + 60)], False),
    "another failure has another cause": (
        ended(outcome=JobState.FAILED, reason=ReasonCode.RAISED_SIGNAL),
        [look(*FULL)],
        False,
    ),
    "one that was ended for having too much itself": (ended(reason=ReasonCode.GPU_MEMORY_OVER), [look(*FULL)], False),
    "it was over itself": (ended(), [look(use(12, of="1.1", left=6), use(10, of="2.1", left=4))], False),
    "its booking was there to be had": (ended(), [look(use(12, of="1.1", left=20), use(4, of="2.1", left=12))], False),
    "nobody else was over": (ended(), [look(use(8, of="1.1", left=20), use(4, of="2.1", left=4))], False),
    "nobody knows what the others held": (
        ended(),
        [look(use(None, of="1.1", left=20), use(4, of="2.1", left=None))],
        False,
    ),
    "no reading at all": (ended(), [], False),
}


@pytest.mark.parametrize("name", VICTIMS)
def test_victims_of_a_neighbour_are_recognized(name: str) -> None:
    before, looks, is_victim = VICTIMS[name]
    after = crowded_victim(before, looks, KILL, lambda handle: handle.partition(".")[0])
    if is_victim:
        assert (after.outcome, after.reason) == (JobState.NODE_FAIL, ReasonCode.GPU_CROWDED)
        assert (
            render(after.reason_text or "")
            == "job 1 held 12G of GPU 0, of which it booked 8G; it had ended as OUT_OF_MEMORY"
        )
    else:
        assert after is before


# --- whatever happens -----------------------------------------------------------------------------

STRETCHES = st.lists(
    st.builds(
        Stretch,
        seconds=st.floats(0.1, 200),
        held=st.none() | st.sampled_from([0.0, 4.0, 8.0, 8.5, 9.0, 20.0]),
        poll_s=st.sampled_from([1.0, 5.0, 29.0, 31.0]),
    ),
    min_size=1,
    max_size=8,
)
ANY_SETTINGS = st.builds(
    GpuSettings,
    vram_over=st.sampled_from(["ignore", "warn", "kill"]),
    vram_over_mib=st.sampled_from([0, 512, 2048]),
    vram_over_polls=st.integers(2, 5),
    vram_over_grace_s=st.sampled_from([0.0, 10.0, 60.0]),
)


@given(STRETCHES, ANY_SETTINGS)
def test_no_run_is_ended_without_a_warning_or_when_disabled(stretches: list[Stretch], settings: GpuSettings) -> None:
    steps = [step for _, step in live(stretches, settings)]
    assert steps in ([], [TOLD], [TOLD, ENDED])
    assert ENDED not in steps or settings.vram_over == "kill"
    assert not steps or settings.vram_over != "ignore"


@given(STRETCHES, ANY_SETTINGS, st.sampled_from([None, 0.0, 8.0]))
def test_no_step_is_due_for_unknown_or_respected_bookings(
    stretches: list[Stretch], settings: GpuSettings, held: float | None
) -> None:
    assert live([replace(one, held=held) for one in stretches], settings) == []


@given(STRETCHES, ANY_SETTINGS)
def test_the_last_readings_before_any_step_all_exceed_the_booking(
    stretches: list[Stretch], settings: GpuSettings
) -> None:
    readings = []
    now = 0.0
    for stretch in stretches:
        end_at = now + stretch.seconds
        while now < end_at:
            readings.append((now, stretch.held))
            now += stretch.poll_s
    for at, _ in live(stretches, settings):
        last = [held for when, held in readings if when <= at][-settings.vram_over_polls :]
        assert len(last) == settings.vram_over_polls
        assert all(held is not None and held * 1024 - BOOKED > settings.vram_over_mib for held in last)
