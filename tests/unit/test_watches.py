"""A watch that raises is left out alone: commands and starts go on, nothing of it is half done, and people are told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from lab import ANN, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.checks import daemon_checks
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.failures import StepFailures
from gpusched.daemon.watch.gpus import GpuFaults
from gpusched.daemon.watch.power_caps import PowerCaps
from gpusched.daemon.watch.releases import Releases
from gpusched.daemon.watches import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NodeReading,
    Stage,
    Watch,
    WatchGuard,
    WatchRaised,
)
from gpusched.model.cluster import DrainCause
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Alerting, JobEvent, Run
from gpusched.model.settings import QueueSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports.tables import DRAINS
from gpusched.testing import request

PARTS: dict[str, tuple[Any, str]] = {
    "alerts of a job": (AlertOutbox, "_collect_of"),
    "GPUs of an ended run": (Releases, "_finish_release"),
}
"""What is left out for one job or run alone, and the method that acts on it."""
END = Alerting(("end",))


@dataclass
class Fault:
    """Breaks a watch, which has done a half of its work by then."""

    is_on: bool = False
    calls: int = 0
    only: int | str | None = None
    """The only job or run that it raises for."""

    def break_in(self, owner: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        usual = getattr(owner, method)

        def broken(*arguments: Any, **named: Any) -> Any:
            tx = next(one for one in arguments if isinstance(one, TickTransaction))
            found = usual(*arguments, **named)
            if self.is_on and (self.only is None or any(getattr(one, "id", None) == self.only for one in arguments)):
                self.calls += 1
                tx.drain("n1", "half done", DrainCause.ADMIN)
                for job in list(tx.state.jobs.values()):
                    tx.put_job(
                        replace(job, spec=replace(job.spec, nice=7)), JobEvent(job.id, tx.now, "note", "half done")
                    )
                raise KeyError("a bug")
            return found

        monkeypatch.setattr(owner, method, broken)


def a_lab(gpus: int = 3) -> Lab:
    capped = QueueSettings("default", power_cap_w=200)
    lab = Lab(gpus=gpus, outcome=SimulatedOutcome(runs_s=1000), queue={"default": capped})
    lab.health = {index: {"power_cap_w": 200.0} for index in range(gpus)}
    lab.scheduler.guard._monotonic = lab.clock.now
    return lab


def check_of(lab: Lab) -> Any:
    (found,) = [check for check in daemon_checks(lab.ticker) if check.check == "daemon steps"]
    return found


WATCHES = {
    watch.name: (type(watch), "carry_out")
    for watch in a_lab().scheduler.watches.all
    if type(watch).carry_out is not Watch.carry_out
} | PARTS


@pytest.mark.parametrize("name", WATCHES)
def test_a_watch_that_raises_is_dropped_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault()
    fault.break_in(*WATCHES[name], monkeypatch)
    lab = a_lab()
    old, cancelled = lab.submit(request=request(1), alerting=END), lab.submit(request=request(1), alerting=END)
    lab.tick(1)
    assert lab.job(old).state is lab.job(cancelled).state is JobState.RUNNING
    fault.is_on = True
    if name == "alerts of a job":
        fault.only = cancelled
    answers = lab.ask(lab.submission(request=request(1), alerting=END), Cancel(ANN, Selection((cancelled,))))
    assert [isinstance(one, dict) for one in answers] == [True, True]
    new = int(answers[0]["ids"][0])
    for _ in range(3):
        lab.tick(1)
    assert fault.calls == 1
    assert lab.job(new).state is JobState.RUNNING
    assert {run for run, one in lab.engine._runs.items() if one.end is None} == {f"{old}.1", f"{new}.1"}
    # Nothing half done.
    assert not lab.store.load(DRAINS)
    assert not lab.scheduler.state.rows[DRAINS]
    assert {lab.job(one).spec.nice for one in (old, cancelled, new)} == {0}
    assert not [event for one in (old, cancelled, new) for event in lab.store.events(one) if event.text == "half done"]
    check_memory(lab)
    # People are told.
    assert f"watch on {name} failed 1 time" in check_of(lab).text
    assert "KeyError" in check_of(lab).text
    # Metrics count them.
    assert lab.scheduler.failures.counts == {f"watch on {name}": 1}
    # It works again when it can.
    fault.is_on = False
    lab.tick(FIRST_PAUSE_S)
    lab.ask(Cancel(ANN, Selection((old,))))
    for _ in range(3):
        lab.tick(1)
    assert {lab.job(one).state for one in (old, cancelled)} == {JobState.CANCELLED}
    lab.tick(LONGEST_PAUSE_S)
    lab.tick(1)
    assert check_of(lab).text == "all working; 1 failed earlier and recovered"
    check_memory(lab)


def test_each_watch_has_a_name_of_its_own_and_each_stage_has_one() -> None:
    watches = a_lab().scheduler.watches.all
    assert len({watch.name for watch in watches} | PARTS.keys()) == len(watches) + len(PARTS)
    assert {watch.stage for watch in watches} == set(Stage)


def test_several_watches_that_raise_in_one_tick_are_all_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault()
    for name, (owner, method) in WATCHES.items():
        if name != "GPUs of an ended run":
            fault.break_in(owner, method, monkeypatch)
    lab = a_lab()
    fault.is_on = True
    job_id = lab.submit(request=request(1), alerting=END)
    lab.tick(1)
    assert lab.job(job_id).state is JobState.RUNNING
    assert lab.job(job_id).spec.nice == 0
    assert fault.calls == len(lab.scheduler.failures.failing) == len(WATCHES) - 1
    check_memory(lab)


def test_one_run_whose_release_raises_keeps_its_gpu_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(is_on=True, only="1.1")
    fault.break_in(*WATCHES["GPUs of an ended run"], monkeypatch)
    lab = a_lab(gpus=2)
    lab.outcome = SimulatedOutcome(runs_s=10)
    first, second, third, fourth = (lab.submit(request=request(1)) for _ in range(4))
    for _ in range(8):
        lab.tick(2)
    assert lab.job(first).state is JobState.COMPLETING
    assert lab.job(second).state is JobState.COMPLETED
    assert lab.job(third).state in (JobState.RUNNING, JobState.COMPLETED)
    assert lab.job(fourth).state is JobState.PENDING
    fault.is_on = False
    for _ in range(12):
        lab.tick(2)
    assert {lab.job(one).state for one in (first, second, third)} == {JobState.COMPLETED}
    assert lab.job(fourth).start_at is not None


OBSERVERS = [type(one) for one in a_lab().scheduler.watches.all if type(one).observe is not Watch.observe]


@pytest.mark.parametrize("owner", OBSERVERS)
def test_what_raises_at_a_reading_hides_nothing_from_the_others(
    owner: type[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[type[Watch]] = []
    usual = {one: one.observe for one in OBSERVERS}

    def observe(self: Watch, found: NodeReading) -> None:
        if is_on[0] and type(self) is owner:
            raise KeyError("a bug")
        usual[type(self)](self, found)
        observed.append(type(self))

    is_on = [True]
    for one in OBSERVERS:
        monkeypatch.setattr(one, "observe", observe)
    lab = a_lab()
    lab.xids = {0: (95,)}
    lab.tick(1)
    assert set(observed) == set(OBSERVERS) - {owner}
    assert ("GPU-0" in lab.store.load(DRAINS)) == (owner is not GpuFaults)
    job_id = lab.submit(request=request(1))
    lab.tick(1)
    assert lab.job(job_id).state is JobState.RUNNING
    assert f"reading for {owner.name} failed" in check_of(lab).text
    assert set(lab.scheduler.failures.counts) == {f"reading for {owner.name}"}
    # The next reading is tried at once: what it tells of may be told only once.
    is_on[0] = False
    lab.xids = {0: (95,)}
    lab.tick(1)
    assert owner in observed
    assert "GPU-0" in lab.store.load(DRAINS)
    assert "failed earlier and recovered" in check_of(lab).text


@pytest.mark.parametrize("method", ["reload", "next_due"])
def test_no_reload_and_no_timer_hangs_on_one_watch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    is_on = [True]
    watches = [one for one in lab.scheduler.watches.all if getattr(type(one), method) is not getattr(Watch, method)]
    for owner in map(type, watches):
        usual = getattr(owner, method)

        def broken(*arguments: Any, usual: Any = usual) -> Any:
            if is_on[0]:
                raise KeyError("a bug")
            return usual(*arguments)

        monkeypatch.setattr(owner, method, broken)
    lab = a_lab()
    begin_at = lab.clock.now() + 500
    job_id = lab.submit(request=request(1), begin_at=begin_at)
    lab.ticker.reload()
    lab.tick(1)
    assert lab.ticker.next_due() == begin_at
    assert len(lab.scheduler.failures.failing) == len(watches)
    lab.tick(500)
    assert lab.job(job_id).state is JobState.RUNNING
    is_on[0] = False
    lab.ticker.reload()
    assert lab.ticker.next_due() is None
    assert not lab.scheduler.failures.failing


def test_what_raises_for_a_run_that_waits_for_its_card_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    usual = PowerCaps.is_awaited
    poison = ""

    def is_awaited(self: PowerCaps, run: Run) -> bool:
        if run.id == poison:
            raise KeyError("a bug")
        return usual(self, run)

    monkeypatch.setattr(PowerCaps, "is_awaited", is_awaited)
    monkeypatch.setattr(PowerCaps, "carry_out", lambda self, tx: self._answered.update(tx.state.open_runs))
    poison = "1.1"
    first, second = lab.submit(request=request(1)), lab.submit(request=request(1))
    lab.tick(1)
    lab.tick(1)
    assert lab.engine._runs.keys() == {f"{second}.1"}
    poison = ""
    lab.tick(1)
    assert lab.engine._runs.keys() == {f"{first}.1", f"{second}.1"}


def test_pauses_grow_while_it_raises_and_shrink_once_it_has_worked_for_as_long() -> None:
    now = [0.0]
    failures = StepFailures(lambda: now[0], lambda: now[0])
    guard = WatchGuard(failures, lambda: now[0])
    raised: list[float] = []
    is_on = [True]

    def watch() -> None:
        if is_on[0]:
            raised.append(now[0])
            raise KeyError("a bug")

    def tick_until(end: float) -> None:
        while now[0] < end:
            try:
                guard.run("it", watch)
            except WatchRaised:
                assert guard.is_left_out("it")
            now[0] += 1.0

    tick_until(3000.0)
    gaps = [after - before for before, after in pairwise(raised)]
    assert gaps == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    assert [(one.step, one.count) for one in failures.failing] == [("watch on it", 10)]
    is_on[0] = False
    tick_until(3020.0)
    assert len(failures.failing) == 1  # not tried yet
    tick_until(3500.0)
    assert not failures.failing
    # It has not worked for as long as it was left out.
    is_on[0] = True
    tick_until(3502.0)
    is_on[0] = False
    tick_until(4000.0)
    assert guard.is_left_out("it")
    tick_until(6000.0)
    is_on[0] = True
    tick_until(6001.0)
    is_on[0] = False
    tick_until(6015.0)
    assert not guard.is_left_out("it")
