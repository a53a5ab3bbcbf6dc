"""Timers of a run: whatever is due at some instant wakes the supervisor at that instant, and no other is done."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.supervisor.run_control import RunTimers, Timer
from gpusched.engine.supervisor.supervisor import Home, supervisor_of

INSTANTS = st.integers(0, 100).map(float)


class Clocked:
    """A run's timers on a clock of their own, driven as a supervisor drives them: sleep until the next one, act."""

    def __init__(self, resting: list[float | None], always: list[float | None], again_s: float) -> None:
        self.now = 0.0
        self.done: list[tuple[float, int]] = []
        self._again_s = again_s
        self.resting = [self._timer(number, at) for number, at in enumerate(resting)]
        self.always = [self._timer(number, at) for number, at in enumerate(always, len(resting))]
        self.timers = RunTimers([*self.resting], [*self.always])
        self.suspended_at: float | None = None

    def _timer(self, number: int, at: float | None) -> Timer:
        def note(now: float) -> None:
            self.done.append((now, number))
            if number % 3 == 0 and now < 100.0:
                timer.due_at = now + self._again_s

        timer = Timer(note)
        timer.due_at = at
        return timer

    def run_until(self, end: float) -> None:
        while (at := self.timers.next_at()) is not None and at <= end:
            assert at >= self.now, "it sleeps past nothing"
            self.now = at
            before = len(self.done)
            self.timers.act(self.now)
            assert len(self.done) > before, "a wake-up is for something that is then done: the loop does not spin"
        self.now = end

    def suspend(self) -> None:
        self.suspended_at = self.now
        self.timers.suspend()

    def resume(self) -> None:
        assert self.suspended_at is not None
        self.timers.resume(self.now - self.suspended_at)


@given(
    st.lists(INSTANTS | st.none(), max_size=5),
    st.lists(INSTANTS | st.none(), max_size=5),
    INSTANTS,
    INSTANTS,
    st.integers(1, 30).map(float),
)
def test_everything_is_done_at_its_instant_and_what_rests_later_by_the_suspension(
    resting: list[float | None], always: list[float | None], first: float, second: float, again_s: float
) -> None:
    begin, end = sorted((first, second))
    run = Clocked(resting, always, again_s)
    run.run_until(begin)
    run.suspend()
    before = len(run.done)
    run.run_until(end)
    assert all(number >= len(resting) for _, number in run.done[before:]), "what rests is left alone"
    run.resume()
    run.run_until(1000.0)
    times: dict[int, list[float]] = {}
    for at, number in run.done:
        times.setdefault(number, []).append(at)
    for number, at in enumerate([*resting, *always]):
        expected = [at] if at is not None else []
        while expected and number % 3 == 0 and expected[-1] < 100.0:
            expected.append(expected[-1] + again_s)
        found = times.get(number, [])
        if number >= len(resting):
            assert found == expected
        elif at is not None:
            # On the run's own clock, which stood still meanwhile. What was about to happen then happens afterwards.
            own = [one if one <= begin else one - (end - begin) for one in found]
            assert own[0] == at
            assert all(one == pytest.approx(before + again_s) for before, one in pairwise(own))
    assert all(timer.due_at is None for timer in (*run.resting, *run.always))


@given(st.lists(INSTANTS, min_size=1))
def test_of_several_instants_the_first_counts(instants: list[float]) -> None:
    timer = Timer(lambda now: None)
    for at in instants:
        timer.set_by(at)
    assert timer.due_at == min(instants)


def test_what_one_action_makes_due_is_done_in_the_same_round() -> None:
    killed: list[float] = []
    kills = Timer(killed.append)
    leftovers = Timer(kills.set_by)
    leftovers.due_at = 5.0
    RunTimers([], [leftovers, kills]).act(5.0)
    assert killed == [5.0]


@pytest.mark.parametrize("kind", [{}, {"holds": True}, {"adopt": {"pid": 1, "start_ticks": 1}, "user": "root"}])
def test_every_timer_of_a_run_wakes_its_supervisor(tmp_path: Path, kind: dict[str, Any]) -> None:
    """A timer that somebody adds and nobody lists would be due unnoticed."""
    run = supervisor_of({"run": "1.1", "script": None, "uid": 0, **kind}, Home(str(tmp_path), "boot", -1))
    parts = (run, run.events, run.control, run.control.suspension)
    found = {name: one for part in parts for name, one in vars(part).items() if isinstance(one, Timer)}
    assert found.keys() == {"prolog", "timer", "notice", "limit", "linger", "kills", "rounds"}
    at = time.monotonic() + 1000.0
    for timer in found.values():
        timer.due_at = at
        assert run.control.timers.next_at() == at
        assert 0.0 < (run.control.left_s() or 0.0) <= 1000.0
        timer.due_at = None
        assert run.control.left_s() is None
