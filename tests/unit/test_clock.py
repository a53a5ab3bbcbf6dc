"""A clock that jumps: what a jump makes due waits until it has lasted, and what it was about is judged again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab import ANN, ROOT, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.clock import ADOPTED_AFTER_S, STEP_S, SystemClock
from gpusched.model.commands import Reserve, SetUserLimit
from gpusched.model.execution import EngineEvent, RunEnded
from gpusched.model.job import RetryRule
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports.tables import CALENDAR, TABLE_SETTINGS, USAGE
from gpusched.testing import NOW, FakeClock, request

DAY = 86400.0
HALF_HOUR = 1800.0
LONG = SimulatedOutcome(runs_s=1e7, stop_takes_s=1)


class Machine(FakeClock):
    """A machine whose time passes by `advance`, and whose clock anybody may set: `ahead_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0
        self.told: list[str] = []
        self.clock = SystemClock(self.wall, self.since_boot, self.told.append)

    def wall(self) -> float:
        return self.at + self.ahead_s

    def since_boot(self) -> float:
        return self.at - NOW + 1000.0

    def now(self) -> float:
        return self.clock.now()


# --- the clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [DAY, -DAY, 60.0, -60.0, 30 * 365 * DAY])
def test_a_jump_that_does_not_last_is_not_followed(jump_s: float) -> None:
    machine = Machine()
    for _ in range(100):
        machine.advance(10)
        machine.ahead_s = jump_s
        for _ in range(3):
            machine.advance(1)
            assert machine.now() == pytest.approx(machine.at)
        machine.ahead_s = 0.0
        assert machine.now() == pytest.approx(machine.at)
    assert len(machine.told) == 200
    assert machine.told[0].endswith(": not followed unless it stays so for 1:00")
    assert machine.told[1] == "the clock of this machine is right again"


@pytest.mark.parametrize("jump_s", [DAY, -DAY, 60.0, -60.0])
def test_a_jump_that_lasts_is_followed(jump_s: float) -> None:
    machine = Machine()
    machine.ahead_s = jump_s
    machine.now()
    machine.advance(ADOPTED_AFTER_S - 1)
    assert machine.now() == pytest.approx(machine.at)
    machine.advance(1)
    assert machine.now() == pytest.approx(machine.at + jump_s)
    assert [text.endswith(": following it") for text in machine.told] == [False, True]
    machine.advance(1)
    assert machine.now() == pytest.approx(machine.wall())


def test_one_jump_after_the_other_is_no_jump_that_lasts() -> None:
    machine = Machine()
    for number in range(1, 20):
        machine.ahead_s = number * 100.0
        machine.now()
        machine.advance(ADOPTED_AFTER_S - 1)
        assert machine.now() == pytest.approx(machine.at)


def test_small_corrections_are_followed_at_once() -> None:
    machine = Machine()
    for _ in range(1000):
        machine.advance(1)
        machine.ahead_s += 0.9 * STEP_S
        assert machine.now() == pytest.approx(machine.wall())


def test_time_while_the_machine_is_suspended_passes() -> None:
    machine = Machine()
    machine.advance(DAY)
    assert machine.now() == pytest.approx(machine.at)


# --- what goes by it --------------------------------------------------------------------------------


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr("lab.FakeClock", Machine)
    return Lab(outcome=LONG)


def machine_of(lab: Lab) -> Machine:
    assert isinstance(lab.clock, Machine)
    return lab.clock


def jump(lab: Lab, ahead_s: float = DAY, lasts_s: float = 3.0) -> None:
    machine_of(lab).ahead_s = ahead_s
    for _ in range(round(lasts_s)):
        lab.tick(1)
    machine_of(lab).ahead_s = 0.0
    lab.tick(1)


def begin(lab: Lab) -> Callable[[], bool]:
    job = lab.submit(begin_at=NOW + HALF_HOUR)
    return lambda: lab.job(job).run > 0


def deadline(lab: Lab) -> Callable[[], bool]:
    lab.submit(request=request(2))
    job = lab.submit(request=request(2), time_limit_s=600, deadline_at=NOW + 600 + HALF_HOUR)
    return lambda: lab.job(job).state is JobState.DEADLINE


def backoff(lab: Lab) -> Callable[[], bool]:
    lab.outcomes["1.1"] = SimulatedOutcome(runs_s=1, exit_code=1)
    job = lab.submit(retry=RetryRule(retries=1, backoff_s=HALF_HOUR))
    lab.tick(1)
    lab.tick(1)
    assert lab.job(job).state is JobState.PENDING
    return lambda: lab.job(job).run > 1


def reservation(lab: Lab) -> Callable[[], bool]:
    lab.ask(Reserve(ROOT, name="course", start_at=NOW + HALF_HOUR, duration_s=2 * DAY, gpus=2, users=("ann",)))
    assert lab.scheduler.state.rows[CALENDAR]
    job = lab.submit(request=request(1), reservation="course", time_limit_s=600)
    return lambda: lab.job(job).run > 0


def limit_of_a_user(lab: Lab) -> Callable[[], bool]:
    lab.ask(SetUserLimit(ROOT, "ann", max_jobs=0, message="for a while", until_at=NOW + HALF_HOUR))
    assert lab.scheduler.state.rows[TABLE_SETTINGS]
    job = lab.submit(request=request(1))
    return lambda: lab.job(job).run > 0


DUE: dict[str, Callable[[Lab], Callable[[], bool]]] = {
    "a begin": begin,
    "a deadline": deadline,
    "a backoff": backoff,
    "a reservation": reservation,
    "a limit with an end": limit_of_a_user,
}


@pytest.mark.parametrize("name", DUE)
def test_a_jump_for_three_seconds_makes_nothing_due(lab: Lab, name: str) -> None:
    has_come = DUE[name](lab)
    lab.tick(1)
    jump(lab)
    jump(lab, -DAY)
    assert not has_come()
    lab.clock.advance(NOW + HALF_HOUR / 3 - lab.clock.at)
    lab.tick()
    assert not has_come()
    lab.clock.advance(NOW + HALF_HOUR + 5 - lab.clock.at)
    for _ in range(3):
        lab.tick(HALF_HOUR / 10)
    assert has_come()
    check_memory(lab)


@pytest.mark.parametrize("name", DUE)
def test_a_clock_that_was_put_right_makes_due_what_is_due_by_it(lab: Lab, name: str) -> None:
    has_come = DUE[name](lab)
    machine_of(lab).ahead_s = DAY
    lab.tick(1)
    assert not has_come()
    lab.tick(ADOPTED_AFTER_S)
    lab.tick(1)
    lab.tick(1)
    assert has_come()
    check_memory(lab)


def test_what_a_wrong_clock_had_released_waits_again_once_it_is_right(lab: Lab) -> None:
    lab.submit(request=request(2))
    job = lab.submit(request=request(2), begin_at=NOW + HALF_HOUR)
    machine_of(lab).ahead_s = DAY
    for _ in range(10):
        lab.tick(10)
    # It is eligible, though its GPUs are taken.
    assert lab.scheduler.state.class_of(job) is not None
    machine_of(lab).ahead_s = 0.0
    for _ in range(10):
        lab.tick(10)
    assert lab.scheduler.state.class_of(job) is None
    reason = lab.scheduler.answers.reason_for(lab.job(job))
    assert reason is not None
    assert reason.code is ReasonCode.BEGIN_TIME
    assert lab.ticker.check_planner() == []
    check_memory(lab)


# --- what supervisors tell of while it is wrong -------------------------------------------------------


class Shifted:
    """An engine whose supervisors read a wrong time of day as a run begins, or ends."""

    def __init__(self, engine: SimulatedEngine, of_ends: bool, by_s: float) -> None:
        self.engine = engine
        self.of_ends, self.by_s = of_ends, by_s

    def events(self) -> list[EngineEvent]:
        return [self._shifted(event) for event in self.engine.events()]

    def _shifted(self, event: EngineEvent) -> EngineEvent:
        if isinstance(event, RunEnded):
            start_at = event.start_at
            if self.of_ends or start_at is None:
                return replace(event, end_at=event.end_at + self.by_s)
            return replace(event, start_at=start_at + self.by_s)
        return event if self.of_ends else replace(event, at=event.at + self.by_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("ahead_s", [DAY, -DAY])
@pytest.mark.parametrize("of_ends", [False, True], ids=["begins", "ends"])
def test_a_run_that_begins_or_ends_in_a_jump_is_charged_for_what_it_took(
    lab: Lab, of_ends: bool, ahead_s: float
) -> None:
    lab.scheduler.engine = Shifted(lab.engine, of_ends, ahead_s)
    lab.outcomes["1.1"] = SimulatedOutcome(runs_s=100, exit_code=1)
    job = lab.submit(request=request(1), retry=RetryRule(retries=1, backoff_s=10))
    for _ in range(13):
        lab.tick(10)
    (run, *_) = lab.store.runs([job])
    assert run.start_at is not None
    assert run.end_at is not None
    assert 90 <= run.end_at - run.start_at <= 120
    (usage,) = lab.store.load(USAGE).values()
    assert usage.user == ANN.user
    for _ in range(4):
        lab.tick(10)
    # Its backoff is over.
    assert lab.job(job).run == 2
