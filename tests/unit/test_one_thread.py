"""What is asked on other threads is a copy; plug-ins are called in one thread; getters change nothing."""

from __future__ import annotations

import asyncio
import io
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab import ANN, ROOT, Lab
from loop_bench import loop_bench

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.forecast import JobNames, QueueForecast, RunTimeForecast
from gpusched.errors import NotReady
from gpusched.model.cluster import DrainEntry
from gpusched.model.commands import Cancel, Drain, Reserve, Selection
from gpusched.model.job import ArraySpec
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import DaemonSettings
from gpusched.model.value import replace
from gpusched.plugins import OneThread, Plugins, hookimpl
from gpusched.ports.tables import DRAINS
from gpusched.testing import request

pytestmark = pytest.mark.filterwarnings("ignore:Changing state of started")

OWN = (QueueForecast, RunTimeForecast, JobNames)


class Strict(pickle.Pickler):
    """Refuses whatever belongs to the daemon's memory, also as the owner of a method."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__.startswith("gpusched.daemon") and kind not in OWN:
            raise AssertionError(f"{kind.__module__}.{kind.__qualname__} can be reached from a question")
        return NotImplemented


def copied(outlook: QueueForecast) -> QueueForecast:
    """The same from its bytes alone. Raises when it is more than values."""
    buffer = io.BytesIO()
    Strict(buffer).dump(outlook)
    found: QueueForecast = pickle.loads(buffer.getvalue())
    return found


@pytest.fixture
def lab() -> Lab:
    """Runs, waits, an array, a job that begins later, one that depends; a past to predict by."""
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=50), priority=PrioritySettings(predict=True))
    for _ in range(4):
        lab.submit(request=request(gpus=2))
        lab.tick(51)
        lab.tick(1)
    lab.outcome = SimulatedOutcome(runs_s=1000)
    for _ in range(3):
        lab.submit(request=request(gpus=2))
    lab.submit(request=request(gpus=1), array=ArraySpec("0-3"))
    lab.submit(request=request(gpus=1), begin_at=lab.clock.now() + 60)
    lab.submit(request=request(gpus=1), dependency="afterok:6")
    lab.tick()
    return lab


def answers(outlook: QueueForecast) -> object:
    first = outlook.first(50)
    return first, outlook.starts(first), [outlook.place(job_id) for job_id in first]


def test_a_forecast_query_is_a_value(lab: Lab) -> None:
    outlook = QueueForecast.of(lab.scheduler)
    assert len(outlook.first(50)) >= 4
    assert answers(copied(outlook)) == answers(outlook)


def test_the_check_finds_non_values(lab: Lab) -> None:
    outlook = QueueForecast.of(lab.scheduler)
    for live in (lab.scheduler.state, lab.scheduler.state.name_of, lab.scheduler.history.predict):
        object.__setattr__(outlook, "predict", live)
        with pytest.raises(AssertionError, match=r"gpusched\.daemon\.\w+"):
            copied(outlook)


def test_concurrent_changes_do_not_affect_an_answer(lab: Lab) -> None:
    outlook = QueueForecast.of(lab.scheduler)
    before = answers(copied(outlook))
    names = [outlook.snapshot.name_of(job_id) for job_id in range(1, 20)]
    assert names == [lab.scheduler.state.name_of(job_id) for job_id in range(1, 20)]
    lab.ask(Cancel(ANN, Selection(ids=(6, 8))), Drain(ROOT, ("0",), "is smoking"))
    for _ in range(3):
        lab.tick(500)
    assert answers(outlook) == before
    assert [outlook.snapshot.name_of(job_id) for job_id in range(1, 20)] == names


# --- plug-ins ------------------------------------------------------------------------------------------


class Calls:
    """Plug-ins that note who calls them, and whether two do at once."""

    def __init__(self) -> None:
        self.threads: dict[str, set[int]] = {}
        self.overlaps = 0
        self._is_in = False

    def enter(self, hook: str) -> None:
        self.threads.setdefault(hook, set()).add(threading.get_ident())
        self.overlaps += self._is_in
        self._is_in = True
        # Lets any other thread run: two that may call at the same time will.
        time.sleep(0.0002)
        self._is_in = False

    def module(self) -> Any:
        @hookimpl
        def gpusched_queue_sort(key: Any) -> float:
            self.enter("sort")
            return 1.0

        @hookimpl
        def gpusched_filter(key: Any, node: Any) -> None:
            self.enter("filter")

        @hookimpl
        def gpusched_score(key: Any, node: Any) -> float:
            self.enter("score")
            return 1.0

        @hookimpl
        def gpusched_permit(key: Any, job: Any, place: Any) -> None:
            self.enter("permit")

        @hookimpl
        def gpusched_job_changed(before: Any, after: Any) -> None:
            self.enter("changed")

        found = [gpusched_queue_sort, gpusched_filter, gpusched_score, gpusched_permit, gpusched_job_changed]
        return SimpleNamespace(**{one.__name__: one for one in found})


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_plugins_are_called_only_in_the_loop_thread(
    lab: Lab, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    scheduler = lab.scheduler
    scheduler.settings = replace(lab.settings, daemon=DaemonSettings(poll_s=0.01))
    scheduler.plugins = plugins = Plugins()
    plugins.register(calls.module(), "site")
    scheduler.extensions = plugins.extensions()
    asked: list[object] = []
    with loop_bench(lab, tmp_path) as bench:

        def ask() -> None:
            loop = asyncio.get_running_loop()
            for _ in range(3):
                loop.run_in_executor(None, answers, QueueForecast.of(scheduler)).add_done_callback(
                    lambda done: asked.append(done.result())
                )

        def submit() -> None:
            lab.ticker.submit(lab.submission(request=request(gpus=1)), lambda answer: None)

        monkeypatch.setattr(bench.manager, "ready", ask)
        bench.loop.observers["audit"] = submit
        bench.run_until(lambda: len(asked) == 3)
    assert asked[0] == asked[1] == asked[2]
    assert set(calls.threads) == {"sort", "filter", "score", "permit", "changed"}
    assert set().union(*calls.threads.values()) == {threading.get_ident()}
    assert calls.overlaps == 0
    assert plugins.troubles == []


def test_a_call_from_another_thread_is_refused_without_a_running_loop() -> None:
    home = OneThread()
    assert home.call(threading.get_ident, ()) == threading.get_ident()
    with ThreadPoolExecutor(1) as other, pytest.raises(NotReady):
        other.submit(home.call, int, ()).result(10)


def test_a_call_to_a_stopping_loop_is_refused() -> None:
    home = OneThread()

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        home.attach(loop)
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(home.call, int, ())
            while not home._awaited:
                time.sleep(0.001)
            # The loop has not come back to it yet.
            home.attach(None)
            return waiting.exception(10)

    assert isinstance(asyncio.run(run()), NotReady)


def test_an_exception_of_a_call_is_returned() -> None:
    home = OneThread()

    def fail() -> None:
        raise KeyError("x")

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        home.attach(loop)
        return await loop.run_in_executor(None, home.call, fail, ())

    with pytest.raises(KeyError):
        asyncio.run(run())


# --- getters -------------------------------------------------------------------------------------------


def state_of(lab: Lab) -> object:
    """All that getters could change by accident."""
    tracker, windows = lab.scheduler.head.tracker, lab.scheduler.planner_sync.windows
    cards = {uuid: {name: repr(value) for name, value in vars(card).items()} for uuid, card in tracker._cards.items()}
    # Views are computed from all the rest, and kept as long as they hold.
    derived = {"_cards", "_views", "_views_from", "_views_until"}
    rest = {name: repr(value) for name, value in vars(tracker).items() if name not in derived}
    return cards, rest, windows.edge_at, repr(lab.scheduler.plan), lab.scheduler.decide_step.must_look


def test_getters_of_the_scheduler_change_nothing(lab: Lab) -> None:
    scheduler = lab.scheduler
    now = lab.clock.now()
    lab.ask(
        Reserve(ROOT, name="night", start_at=now + 100, duration_s=100, cards=("0",), users=("ann",), ignore_jobs=True)
    )
    lab.tick()
    # Both behind the scheduler's back: only who changes them may tell the tracker.
    scheduler.state.rows[DRAINS]["GPU-1"] = DrainEntry("is smoking")
    before = state_of(lab)
    lab.clock.advance(150)
    scheduler.nodes(lab.clock.now())
    scheduler.nodes(lab.clock.now(), lab.settings)
    scheduler.snapshot(lab.clock.now())
    scheduler.planner()
    for job in scheduler.state.jobs.values():
        scheduler.answers.reason_for(job)
        scheduler.answers.position(job)
    for one, attributes in ((scheduler, ("has_work", "awaits_release")), (lab.ticker, ("has_backlog", "is_quiet"))):
        for attribute in attributes:
            getattr(one, attribute)
    lab.ticker.next_due()
    scheduler.answers.files_of("5.1")
    QueueForecast.of(scheduler)
    assert state_of(lab) == before


def test_a_window_that_begins_between_ticks_is_planned_whoever_read_meanwhile() -> None:
    """A look of a client moved the edge on, so that the next tick saw nothing that had begun."""
    lab = Lab()
    scheduler = lab.scheduler
    now = lab.clock.now()
    lab.ask(
        Reserve(ROOT, name="night", start_at=now + 100, duration_s=100, cards=("0",), users=("ann",), ignore_jobs=True)
    )
    lab.tick()
    assert lab.ticker.next_due() == now + 100
    lab.clock.advance(110)
    scheduler.snapshot(lab.clock.now())
    assert lab.ticker.next_due() == now + 100
    scheduler.decide_step.must_look = False
    lab.ticker.tick()
    assert lab.ticker.next_due() == now + 200


def test_the_tracker_learns_of_drains_and_undrains_within_the_tick(lab: Lab) -> None:
    lab.ask(Drain(ROOT, ("0",), "is smoking"))
    assert lab.scheduler.head.tracker.is_drained("GPU-0")
    lab.store.is_full = True
    lab.ask(Drain(ROOT, ("0",), None), Drain(ROOT, ("1",), "is smoking"))
    assert (lab.scheduler.head.tracker.is_drained("GPU-0"), lab.scheduler.head.tracker.is_drained("GPU-1")) == (
        True,
        False,
    )
    lab.store.is_full = False
    lab.ask(Drain(ROOT, ("0",), None))
    assert not lab.scheduler.head.tracker.is_drained("GPU-0")
    lab.scheduler.state.rows[DRAINS]["GPU-1"] = DrainEntry("behind its back")
    assert not lab.scheduler.head.tracker.is_drained("GPU-1")
