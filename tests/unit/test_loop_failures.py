"""The daemon's loop when one of its own steps raises: the others go on, and people are told."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from loop_bench import LoopBench, loop_bench

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon import loop as loop_module
from gpusched.daemon.audit import Audit
from gpusched.daemon.checks import daemon_checks
from gpusched.daemon.failures import LOG_AGAIN_S, StepFailures
from gpusched.daemon.meters import page
from gpusched.daemon.watch.foreign import ForeignProcessWatch
from gpusched.errors import StoreFull
from gpusched.model.settings import AccessSettings, DaemonSettings
from gpusched.model.value import replace

# aiohttp's, of the gate that is put around the application.
pytestmark = pytest.mark.filterwarnings("ignore:Changing state of started")

TOO_MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def a_lab(**sections: Any) -> Lab:
    sections.setdefault("daemon", DaemonSettings(poll_s=0.01, idle_poll_s=0.01))
    return Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1e6), **sections)


def names_of_steps() -> tuple[list[str], list[str]]:
    worker_less = Lab(gpus=0)
    with loop_bench(worker_less, Path("/nonexistent")) as bench:
        return list(bench.loop.observers), list(bench.loop.after_tick)


OBSERVERS, AFTER_TICK = names_of_steps()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopBench]:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    monkeypatch.setattr(loop_module, "_BITE_GAP_S", 0.001)
    lab = a_lab()
    lab.submit()
    with loop_bench(lab, tmp_path) as made:
        made.loop.observers["audit"] = Audit(str(tmp_path), lab.clock.now, AccessSettings).poll
        made.loop.observers["foreign processes"] = ForeignProcessWatch(lab.scheduler).poll
        yield made


def counted(steps: dict[str, Any], broken: str, error: Exception) -> dict[str, int]:
    """Count the calls of all steps from now on, and have one raise."""
    calls = dict.fromkeys(steps, 0)

    def wrap(name: str, step: Any) -> Any:
        def called() -> None:
            calls[name] += 1
            if name == broken:
                raise error
            step()

        return called

    steps.update({name: wrap(name, step) for name, step in steps.items()})
    return calls


def check_of(lab: Lab) -> Any:
    (found,) = [check for check in daemon_checks(lab.ticker) if check.check == "daemon steps"]
    return found


@pytest.mark.parametrize("broken", OBSERVERS)
def test_an_observer_that_raises_stops_neither_others_nor_the_poll(bench: LoopBench, broken: str) -> None:
    calls = counted(bench.loop.observers, broken, TOO_MANY)
    ticks = bench.lab.ticker.ticks
    bench.run_until(lambda: calls[broken] >= 3)
    assert min(calls.values()) >= 2
    assert bench.lab.ticker.ticks > ticks
    (failure,) = bench.lab.scheduler.failures.failing
    assert (failure.step, failure.count) == (broken, calls[broken])
    found = check_of(bench.lab)
    assert not found.ok
    assert f"{broken} failed {calls[broken]} times" in found.text
    assert "Too many open files" in found.text


@pytest.mark.parametrize("broken", AFTER_TICK)
def test_a_step_after_the_tick_that_raises_stops_neither_others_nor_ticks(bench: LoopBench, broken: str) -> None:
    calls = counted(bench.loop.after_tick, broken, TOO_MANY)
    bench.run_until(lambda: calls[broken] >= 3)
    assert len(set(calls.values())) == 1
    assert [failure.step for failure in bench.lab.scheduler.failures.failing] == [broken]


def test_due_alerts_that_cannot_be_sent_delay_nothing_else(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def reconcile() -> None:
        calls.append("alerts")
        raise TOO_MANY

    monkeypatch.setattr(bench.dispatcher, "reconcile", reconcile)
    monkeypatch.setattr(bench.dispatcher, "due_s", lambda: 0.0)
    polls = counted(bench.loop.observers, "", TOO_MANY)
    bench.run_until(lambda: polls["host load"] >= 5)
    # Once with each poll, perhaps with a tick, and at last by its own timer: not as often as the loop turns.
    assert len(calls) <= polls["alerts"] + bench.lab.ticker.ticks + 5


def test_readings_pruning_alerts_and_checkpoints_continue_while_the_host_is_unreadable(
    bench: LoopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One OSError of psutil ended all of them until a restart."""
    calls: list[str] = []
    reading = bench.lab.scheduler.head.reading
    scheduler = bench.lab.scheduler

    def fail() -> Any:
        raise TOO_MANY

    monkeypatch.setattr(bench.host, "read", fail)
    monkeypatch.setattr(bench.worker, "poll", lambda: reading)
    monkeypatch.setattr(scheduler, "observe_gpus", lambda reading: calls.append("reading"))
    monkeypatch.setattr(bench.loop._pruner, "bite", lambda: calls.append("pruning"))
    monkeypatch.setattr(type(bench.lab.engine), "checkpoints", lambda engine: calls.append("checkpoints") or {})
    monkeypatch.setattr(bench.dispatcher, "reconcile", lambda: calls.append("alerts"))
    bench.run_until(lambda: all(calls.count(name) >= 3 for name in ("reading", "pruning", "checkpoints", "alerts")))
    assert bench.worker.requests >= 3
    assert [failure.step for failure in scheduler.failures.failing] == ["host load"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_due_steps_are_retried_with_a_pause_while_commits_fail(
    bench: LoopBench, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """A begin time that was over made the daemon turn without end while its table was lost."""
    lab = bench.lab
    lab.submit(begin_at=lab.clock.now() + 1)
    lab.clock.advance(2)
    lab.store.is_full = True
    if is_lost:
        monkeypatch.setattr(lab.store, "lost", lambda: StoreFull("the disk is full", "free some"), raising=False)
    ticks: list[int] = []
    tick = lab.ticker.tick
    monkeypatch.setattr(lab.ticker, "tick", lambda: (ticks.append(1), tick()))
    wakes: list[int] = []
    promote = bench.loop._next_promotion._action
    monkeypatch.setattr(bench.loop._next_promotion, "_action", lambda: (wakes.append(1), promote()))
    bench.run_until(lambda: len(ticks) >= 20)
    assert len(wakes) <= 3


def test_a_recovered_step_is_no_longer_shown(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [1, 2]
    sample = bench.lab.scheduler.head.host

    def read() -> Any:
        if left:
            left.pop()
            raise TOO_MANY
        return replace(sample, at=sample.at + 1)

    monkeypatch.setattr(bench.host, "read", read)
    bench.run_until(lambda: bench.lab.scheduler.head.host is not sample)
    assert bench.lab.scheduler.failures.failing == ()
    assert check_of(bench.lab).text == "all working; 2 failed earlier and recovered"
    facts = {"version": "1", "started_at": 0.0, "database": "/nonexistent"}
    assert "gpusched_step_failures_total 2" in page(bench.lab.scheduler, facts).text("prometheus")


def test_a_reading_that_fails_to_apply_stays_shown_until_one_succeeds(
    bench: LoopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two readings there is none to take in, which proves nothing."""
    scheduler, reading = bench.lab.scheduler, bench.lab.scheduler.head.reading
    polls: list[int] = []
    monkeypatch.setattr(bench.worker, "poll", lambda: polls.append(1) or (reading if len(polls) % 2 else None))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "observe_gpus", raises(TOO_MANY))
        bench.run_until(lambda: len(polls) >= 6)
        (failure,) = scheduler.failures.failing
        assert failure.count >= 3
    bench.run_until(lambda: scheduler.failures.failing == ())


def raises(error: Exception) -> Any:
    def call(*arguments: Any) -> Any:
        raise error

    return call


def test_failed_messages_to_foreign_users_stay_shown_while_processes_are_checked() -> None:
    lab = a_lab()
    foreign = ForeignProcessWatch(lab.scheduler)

    async def look(work_out: Callable[[], Any]) -> None:
        foreign._look_ahead.begin(foreign._decide, work_out)
        while foreign._look_ahead.is_open:
            await asyncio.sleep(0.01)
        assert lab.scheduler.failures.run("foreign processes", foreign.poll)

    asyncio.run(look(raises(RuntimeError("a bug"))))
    assert not check_of(lab).ok
    asyncio.run(look(dict))
    assert check_of(lab).ok


def test_a_reader_that_raises_is_called_again_after_a_pause(bench: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor stays readable: without the pause the loop would do nothing else."""
    monkeypatch.setattr(loop_module, "_RETRY_S", 0.02)
    calls = 0
    inside, outside = os.pipe()
    os.write(outside, b"x")

    def step() -> None:
        nonlocal calls
        calls += 1
        raise TOO_MANY

    turns = 0

    def busy() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(busy)

    def at_ready() -> None:
        bench.loop._watch(inside, "pipe", step)
        busy()

    monkeypatch.setattr(bench.manager, "ready", at_ready)
    bench.run_until(lambda: calls >= 3)
    os.close(inside)
    os.close(outside)
    assert turns > 3 * calls


def test_an_unguarded_callback_is_counted(bench: LoopBench) -> None:
    def fail() -> None:
        raise TOO_MANY

    bench.loop.observers["audit"] = lambda: asyncio.get_running_loop().call_soon(fail) and None
    bench.run_until(lambda: bench.lab.scheduler.failures.counts["event loop"])


def test_a_daemon_that_cannot_detect_shutdown_ends_at_term(tmp_path: Path) -> None:
    def fails() -> bool:
        raise TOO_MANY

    with loop_bench(a_lab(), tmp_path, fails) as bench:
        bench.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert not bench.lab.scheduler.is_going_down


# --- the account of them -------------------------------------------------------------------------------


@pytest.fixture
def account(caplog: pytest.LogCaptureFixture) -> StepFailures:
    caplog.set_level(logging.INFO, "gpusched.daemon")
    return StepFailures(lambda: 1000.0)


def fail(error: Exception) -> None:
    raise error


def test_a_failure_is_logged_once_and_so_is_the_recovery(
    account: StepFailures, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        assert not account.run("host", fail, OSError(f"of file {number}"))
    assert account.run("host", int)
    assert account.run("host", int)
    first, last = caplog.records
    assert first.getMessage() == "host failed: OSError: of file 0"
    assert first.exc_info
    assert last.getMessage() == "host works again after 5 failures"
    assert account.counts == {"host": 5}


def test_another_failure_of_the_same_step_is_logged_too(
    account: StepFailures, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (OSError("one"), ValueError("two"), OSError("three")):
        account.run("host", fail, error)
    assert [record.getMessage() for record in caplog.records] == [
        "host failed: OSError: one",
        "host failed: ValueError: two",
    ]


def test_a_refusal_is_logged_without_a_traceback(account: StepFailures, caplog: pytest.LogCaptureFixture) -> None:
    account.run("table", fail, StoreFull("the disk is full", "free some"))
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("table: the disk is full", None)


def test_a_recurring_failure_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpusched.daemon")
    now = [0.0]
    account = StepFailures(lambda: now[0], lambda: now[0])
    for _ in range(100):
        now[0] += 1
        account.run("host", fail, OSError("flaps"))
        account.run("host", int)
    assert len(caplog.records) == 2
    now[0] += LOG_AGAIN_S
    account.run("host", fail, OSError("flaps"))
    assert len(caplog.records) == 3


def test_a_failure_that_does_not_recur_is_eventually_forgotten() -> None:
    now = [0.0]
    account = StepFailures(lambda: now[0])
    account.note("event loop", OSError("once"))
    assert [found.step for found in account.failing] == ["event loop"]
    now[0] = 3601.0
    assert account.failing == ()
