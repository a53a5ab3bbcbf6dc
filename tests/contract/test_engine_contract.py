"""What every engine must do: over real processes, in units of systemd, simulated, and behind an agent."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench import (
    ENDS,
    FOREVER,
    Bench,
    ClusterBench,
    Does,
    LocalBench,
    SimulatedBench,
    StandInBench,
    UnitBench,
    open_run,
    to_start,
)
from ray_bench import RayBench
from remote_bench import LossyRemoteBench, RemoteBench
from support import wait_until

from gpusched.model.execution import (
    EnterOrder,
    LimitOrder,
    NoteOrder,
    OpenRun,
    ResumeOrder,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
    SignalOrder,
    StopOrder,
    SuspendOrder,
)
from gpusched.model.job import Interactive, Notice
from gpusched.model.value import replace

SLEEPS = Does(lasts_s=FOREVER)
STUBBORN = Does(lasts_s=FOREVER, ignores_stop=True)


ENGINES = {
    "local": LocalBench,
    "stand-in": StandInBench,
    "systemd": UnitBench,
    "simulated": SimulatedBench,
    "remote": RemoteBench,
    "remote-lossy": LossyRemoteBench,
    "cluster": ClusterBench,
    "ray": RayBench,
}


def engines(*through_the_night: str) -> list[Any]:
    return [
        pytest.param(made, id=name, marks=pytest.mark.nightly if name in through_the_night else ())
        for name, made in ENGINES.items()
    ]


takes_seconds = pytest.mark.parametrize("bench", engines("stand-in", "remote-lossy", "cluster", "ray"), indirect=True)
"""For tests in which time passes that a supervisor measures: each engine has the same one, an agent at most between."""


@pytest.fixture(params=engines("ray"))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param is UnitBench and (why := UnitBench.missing()):
        pytest.skip(why)
    if request.param is RayBench and (why := RayBench.missing()):
        pytest.skip(why)
    made: Bench = request.param(tmp_path)
    yield made
    made.close()


# --- runs that end by themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_returned(bench: Bench, code: int) -> None:
    bench.start("1.1", Does(exit_code=code))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.signal, end.stopped_by) == (code, None, None)


def test_the_terminating_signal_is_returned(bench: Bench) -> None:
    bench.start("1.1", Does(signal=signal.SIGABRT))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.signal, end.stopped_by) == (None, signal.SIGABRT, None)


def test_the_start_precedes_the_end_and_both_carry_timestamps(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=0.25))
    end = bench.end_of("1.1")
    started, last = bench.of("1.1")
    assert isinstance(started, RunStarted)
    assert last is end
    assert end.start_at == started.at
    assert 0.25 <= end.end_at - started.at < 60


def test_concurrent_runs_are_distinguished(bench: Bench) -> None:
    tickets = [bench.ticket(f"{job}.1", Does(exit_code=job)) for job in range(1, 11)]
    bench.engine.reconcile(to_start(tickets))
    assert [bench.end_of(ticket.run).exit_code for ticket in tickets] == list(range(1, 11))
    for ticket in tickets:
        # A run that is over before a slow machine has told of its start is told of by its end alone, start included.
        kinds = [type(event) for event in bench.of(ticket.run)]
        assert kinds in ([RunStarted, RunEnded], [RunEnded])
        assert bench.end_of(ticket.run).start_at is not None


def test_a_missing_command_is_a_launch_error_and_starts_nothing(bench: Bench) -> None:
    bench.start("1.1", Does(missing_command=True))
    end = bench.end_of("1.1")
    assert end.launch_error is not None
    assert "no-such-command" in end.launch_error
    assert (end.start_at, end.exit_code, end.signal) == (None, None, None)
    assert bench.of("1.1") == [end]


def test_a_handle_is_started_only_once(bench: Bench) -> None:
    bench.start("1.1", Does(exit_code=4))
    bench.engine.reconcile(to_start([bench.ticket("1.1", Does(exit_code=5))]))
    bench.start("2.1", Does(lasts_s=0.3))
    bench.end_of("2.1")
    assert [type(event) for event in bench.of("1.1")] in ([RunStarted, RunEnded], [RunEnded])
    assert bench.end_of("1.1").exit_code == 4


def test_leftovers_are_ended_and_named(bench: Bench) -> None:
    bench.start("1.1", Does(exit_code=3, leaves_one_behind=True))
    end = bench.end_of("1.1")
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunStopping, RunEnded]
    assert bench.until("1.1", RunStopping).why == "leftovers"
    assert (end.exit_code, end.stopped_by) == (3, None)
    assert [name.partition("(")[0] for name in end.leftovers] == ["sleep"]


@takes_seconds
def test_leftovers_exceeding_the_time_limit_cause_a_timeout(bench: Bench) -> None:
    does = Does(ignores_stop=True, leaves_one_behind=True)
    bench.start("1.1", does, time_limit_s=1.5, grace_s=2.0, leftover_grace_s=2.0)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (0, "timeout")
    assert [event.why for event in bench.of("1.1") if isinstance(event, RunStopping)][-1] == "timeout"


def test_leftovers_that_end_before_the_time_limit_cause_no_timeout(bench: Bench) -> None:
    bench.start("1.1", Does(leaves_one_behind=True), time_limit_s=600)
    assert bench.end_of("1.1").stopped_by is None


# --- orders --------------------------------------------------------------------------------------------


def test_cancel_ends_a_run_by_its_stop_signal(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert bench.until("1.1", RunStopping).why == "cancel"
    assert (end.signal, end.stopped_by) == (signal.SIGTERM, "cancel")


def test_a_stop_order_may_name_another_signal(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt", signal=signal.SIGINT))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGINT, "preempt")


NOTICE = Notice(signal.SIGUSR1, before_s=60, main_only=False)


@pytest.mark.parametrize("why", ["cancel", "preempt", "shutdown", "vram_over"])
@pytest.mark.parametrize("main_only", [False, True])
def test_a_stop_begins_with_the_signal_the_job_requested(bench: Bench, why: str, main_only: bool) -> None:
    notice = replace(NOTICE, main_only=main_only)
    bench.start("1.1", SLEEPS, stop_signal=None, notice=notice, time_limit_s=600)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder(why))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGUSR1, why)


def test_a_stop_begins_with_term_by_default(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, stop_signal=None)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").signal == signal.SIGTERM


def test_a_job_stop_signal_takes_precedence_over_the_notice(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, stop_signal=int(signal.SIGINT), notice=NOTICE, time_limit_s=600)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    assert bench.end_of("1.1").signal == signal.SIGINT


@pytest.mark.parametrize(
    ("why", "says_done", "is_done"),
    [("requeue", False, False), ("requeue", True, True), ("preempt", True, True), ("cancel", True, False)],
)
def test_a_run_whose_handler_ends_with_0_was_stopped_and_may_say_that_it_is_done(
    bench: Bench, why: str, says_done: bool, is_done: bool
) -> None:
    bench.start("1.1", Does(lasts_s=FOREVER, stop_code=0, says_done=says_done))
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder(why))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.signal, end.stopped_by, end.is_done) == (0, None, why, is_done)


def test_a_stop_that_finds_only_leftovers_did_not_stop_the_command(bench: Bench) -> None:
    bench.start("1.1", Does(leaves_one_behind=True), leftover_grace_s=600.0)
    bench.until("1.1", RunStopping)
    bench.engine.order("1.1", StopOrder("requeue", grace_s=0))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (0, None)


def test_a_run_that_ignores_the_stop_signal_is_killed_after_the_grace(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=0.3)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert end.signal == signal.SIGKILL
    assert end.end_at - bench.until("1.1", RunStopping).at >= 0.3


def test_a_second_cancel_without_grace_kills_at_once(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=600)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.until("1.1", RunStopping)
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    assert bench.end_of("1.1").signal == signal.SIGKILL
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunStopping, RunEnded]


def test_a_later_stop_never_lengthens_the_grace(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=0.3)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.engine.order("1.1", StopOrder("cancel", grace_s=600))
    assert bench.end_of("1.1").signal == signal.SIGKILL


def test_cancel_wins_over_preemption(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=600)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    bench.until("1.1", RunStopping)
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_the_time_limit_stops_a_run(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, time_limit_s=0.3)
    end = bench.end_of("1.1")
    assert end.stopped_by == "timeout"
    assert end.start_at is not None
    assert end.end_at - end.start_at >= 0.3


@takes_seconds
def test_a_run_that_ignores_its_time_limit_is_killed_after_its_grace(bench: Bench) -> None:
    stubborn = Does(lasts_s=FOREVER, ignores_stop=True)
    bench.start("1.1", stubborn, time_limit_s=0.5, grace_s=3600.0, limit_grace_s=0.5)
    bench.ready("1.1")
    end = bench.end_of("1.1")
    assert (end.stopped_by, end.signal) == ("timeout", signal.SIGKILL)


def test_a_note_has_no_effect_on_a_background_run(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=0.3))
    bench.engine.order("1.1", NoteOrder("somebody is there?"))
    assert (bench.end_of("1.1").exit_code, bench.end_of("1.1").stopped_by) == (0, None)


def test_a_door_that_nobody_uses_has_no_effect_on_a_run(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=0.5, exit_code=3))
    bench.ready("1.1")
    bench.engine.order("1.1", EnterOrder("a1"))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by, end.leftovers) == (3, None, ())


@takes_seconds
def test_a_limit_can_be_raised_and_lifted(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=4.5), time_limit_s=4.0)
    bench.start("2.1", Does(lasts_s=4.5), time_limit_s=4.0)
    bench.engine.order("1.1", LimitOrder(600))
    bench.engine.order("2.1", LimitOrder(None))
    assert [bench.end_of(run).stopped_by for run in ("1.1", "2.1")] == [None, None]


def test_a_limit_can_be_set_later_and_counts_from_the_start(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.let_pass(0.3)
    bench.engine.order("1.1", LimitOrder(0.2))
    end = bench.end_of("1.1")
    assert end.stopped_by == "timeout"


def test_a_signal_order_only_signals(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.engine.order("1.1", SignalOrder(signal.SIGKILL))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGKILL, None)
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunEnded]


def test_a_signal_right_after_the_ticket_is_not_lost(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.engine.order("1.1", SignalOrder(signal.SIGKILL))
    assert bench.end_of("1.1").signal == signal.SIGKILL


# --- standing still --------------------------------------------------------------------------------------


def suspended(bench: Bench, run: str) -> RunSuspended:
    """Let it stand still, and wait until it does."""
    bench.ready(run)
    bench.engine.order(run, SuspendOrder())
    return bench.until(run, RunSuspended)


@takes_seconds
def test_a_resumed_run_continues_and_reports_its_suspended_time(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=4.0, exit_code=4))
    suspended(bench, "1.1")
    bench.let_pass(2.0)
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunSuspended]
    bench.engine.order("1.1", ResumeOrder())
    end = bench.end_of("1.1")
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunSuspended, RunResumed, RunEnded]
    assert (end.exit_code, end.stopped_by) == (4, None)
    assert 2.0 <= end.suspended_s < 60
    assert bench.until("1.1", RunResumed).suspended_s == end.suspended_s


def test_a_run_that_was_never_suspended_says_so(bench: Bench) -> None:
    bench.start("1.1")
    assert bench.end_of("1.1").suspended_s == 0


@takes_seconds
def test_the_time_limit_pauses_while_the_run_is_suspended(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, time_limit_s=3.0)
    suspended(bench, "1.1")
    bench.let_pass(3.5)
    assert not [event for event in bench.of("1.1") if isinstance(event, RunEnded)]
    bench.engine.order("1.1", ResumeOrder())
    end = bench.end_of("1.1")
    assert end.stopped_by == "timeout"
    assert end.start_at is not None
    assert end.end_at - end.start_at >= 3.0 + end.suspended_s - 0.01
    assert end.suspended_s >= 3.5


@takes_seconds
def test_a_limit_set_during_suspension_excludes_the_suspended_time(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    suspended(bench, "1.1")
    bench.engine.order("1.1", LimitOrder(1.5))
    bench.let_pass(2.0)
    assert bench.of("1.1")[-1] is bench.until("1.1", RunSuspended)
    bench.engine.order("1.1", ResumeOrder())
    end = bench.end_of("1.1")
    assert end.stopped_by == "timeout"
    assert end.start_at is not None
    assert end.end_at - end.start_at >= 1.5 + end.suspended_s - 0.01


@takes_seconds
def test_suspended_times_add_up(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    for times in (1, 2):
        bench.engine.order("1.1", SuspendOrder())
        bench.wait(lambda times=times: len([e for e in bench.of("1.1") if isinstance(e, RunSuspended)]) == times)
        bench.let_pass(0.3)
        bench.engine.order("1.1", ResumeOrder())
        bench.wait(lambda times=times: len([e for e in bench.of("1.1") if isinstance(e, RunResumed)]) == times)
    bench.engine.order("1.1", StopOrder("cancel"))
    first, second = (event for event in bench.of("1.1") if isinstance(event, RunResumed))
    assert first.suspended_s >= 0.3
    assert second.suspended_s >= first.suspended_s + 0.3
    assert bench.end_of("1.1").suspended_s == second.suspended_s


@pytest.mark.parametrize("why", ["cancel", "preempt"])
def test_a_suspended_run_can_react_to_its_stop_signal(bench: Bench, why: str) -> None:
    bench.start("1.1", SLEEPS, grace_s=600)
    suspended(bench, "1.1")
    bench.engine.order("1.1", StopOrder(why))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGTERM, why)
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunSuspended, RunResumed, RunStopping, RunEnded]


def test_a_suspended_run_that_ignores_its_stop_signal_is_killed_after_the_grace(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=0.4)
    suspended(bench, "1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert end.signal == signal.SIGKILL
    assert end.end_at - bench.until("1.1", RunStopping).at >= 0.4


@takes_seconds
def test_a_run_being_stopped_is_not_suspended(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=1.2)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.engine.order("1.1", SuspendOrder())
    end = bench.end_of("1.1")
    assert end.suspended_s == 0
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunStopping, RunEnded]


def test_suspending_twice_and_resuming_a_running_run_change_nothing(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    bench.engine.order("1.1", ResumeOrder())
    suspended(bench, "1.1")
    bench.engine.order("1.1", SuspendOrder())
    bench.let_pass(0.2)
    bench.engine.order("1.1", ResumeOrder())
    bench.engine.order("1.1", ResumeOrder())
    bench.until("1.1", RunResumed)
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    kinds = [RunStarted, RunSuspended, RunResumed, RunStopping, RunEnded]
    assert [type(event) for event in bench.of("1.1")] == kinds


def test_a_second_preempt_does_not_notify_the_run_again(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=0.5)
    bench.ready("1.1")
    bench.engine.order("1.1", StopOrder("preempt"))
    bench.engine.order("1.1", StopOrder("preempt", grace_s=0))
    end = bench.end_of("1.1")
    assert end.end_at - bench.until("1.1", RunStopping).at >= 0.5


def test_orders_to_unknown_and_ended_runs_are_ignored(bench: Bench) -> None:
    bench.engine.order("9.1", StopOrder("cancel"))
    bench.start("1.1")
    end = bench.end_of("1.1")
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.engine.order("1.1", LimitOrder(1))
    bench.start("2.1", Does(lasts_s=0.2))
    bench.end_of("2.1")
    assert bench.of("1.1")[-1] is end
    assert bench.of("9.1") == []


# --- brought in line with the table ------------------------------------------------------------------------


def wanted(bench: Bench, run: str, does: Does | None = None, **parts: Any) -> OpenRun:
    """What the table says of a run; with its ticket when it says what it does."""
    ticket = None if does is None else bench.ticket(run, does, **parts.pop("of_ticket", {}))
    return replace(open_run(run), ticket=ticket, **parts)


def test_reconcile_starts_a_run_once_however_often_it_is_called(bench: Bench) -> None:
    runs = [wanted(bench, f"{job}.1", Does(exit_code=job)) for job in (1, 2, 3)]
    bench.engine.reconcile(runs[:2])
    bench.engine.reconcile(runs)
    bench.engine.reconcile(runs)
    assert [bench.end_of(known.run).exit_code for known in runs] == [1, 2, 3]
    for known in runs:
        assert len([event for event in bench.of(known.run) if isinstance(event, RunEnded)]) == 1


def test_reconcile_stops_a_run_and_never_takes_that_back(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, grace_s=0.5)
    started = bench.ready("1.1")
    known = open_run("1.1", started, order=StopOrder("preempt"))
    for _ in range(3):
        bench.engine.reconcile([known])
    bench.engine.reconcile([open_run("1.1", started)])
    end = bench.end_of("1.1")
    assert end.stopped_by == "preempt"
    assert end.end_at - bench.until("1.1", RunStopping).at >= 0.5
    assert [type(event) for event in bench.of("1.1")] == [RunStarted, RunStopping, RunEnded]


def test_reconcile_suspends_and_resumes_a_run_as_the_table_says(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    moving = open_run("1.1", bench.ready("1.1"))
    for _ in range(2):
        bench.engine.reconcile([moving])
        bench.engine.reconcile([replace(moving, pending_order=SuspendOrder())])
    bench.until("1.1", RunSuspended)
    bench.engine.reconcile([replace(moving, pending_order=SuspendOrder())])
    bench.engine.reconcile([moving])
    bench.until("1.1", RunResumed)
    bench.engine.reconcile([replace(moving, pending_order=StopOrder("cancel"))])
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_reconcile_sets_and_lifts_a_time_limit(bench: Bench) -> None:
    known = wanted(bench, "1.1", SLEEPS, limit=LimitOrder(None))
    other = wanted(bench, "2.1", Does(lasts_s=1.0, exit_code=3), of_ticket={"time_limit_s": 0.5}, limit=LimitOrder(0.5))
    bench.engine.reconcile([known, other])
    for _ in range(2):
        bench.engine.reconcile([replace(known, limit=LimitOrder(0.2)), replace(other, limit=LimitOrder(None))])
    assert bench.end_of("1.1").stopped_by == "timeout"
    assert (bench.end_of("2.1").exit_code, bench.end_of("2.1").stopped_by) == (3, None)


def test_reconcile_returns_a_run_that_never_started(bench: Bench) -> None:
    for _ in range(2):
        bench.engine.reconcile([wanted(bench, "1.1", pending_order=StopOrder("cancel"))])
    end = bench.until("1.1", *ENDS)
    assert isinstance(end, RunNeverStarted)
    assert bench.of("1.1") == [end]
    bench.engine.reconcile([wanted(bench, "1.1", Does())])
    bench.let_pass(0.5)
    assert bench.of("1.1") == [end]


def test_reconcile_forgets_ends_idempotently(bench: Bench) -> None:
    bench.start("1.1", Does(exit_code=4))
    bench.end_of("1.1")
    bench.start("2.1", SLEEPS)
    bench.ready("2.1")
    for _ in range(2):
        bench.engine.reconcile([], ["1.1", "2.1", "9.1"])
    bench.restart()
    bench.seen.clear()
    # The one lives and was not ended by that; the other has left nothing.
    bench.engine.adopt([open_run("2.1")])
    assert bench.until("2.1", RunStarted)
    bench.engine.reconcile([wanted(bench, "2.1", pending_order=StopOrder("cancel", grace_s=0))])
    assert bench.end_of("2.1").stopped_by == "cancel"
    assert bench.of("1.1") == []


def test_reconcile_reports_a_start_that_the_table_lost(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    first = bench.ready("1.1")
    bench.seen.clear()
    bench.engine.reconcile([open_run("1.1", first)])
    bench.let_pass(0.1)
    assert bench.of("1.1") == []
    bench.engine.reconcile([wanted(bench, "1.1", SLEEPS)])
    assert bench.until("1.1", RunStarted) == first
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")


def test_a_time_limit_is_set_on_adoption(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    first = bench.ready("1.1")
    bench.restart()
    bench.engine.adopt([replace(open_run("1.1", first), limit=LimitOrder(0.2))])
    assert bench.end_of("1.1").stopped_by == "timeout"


# --- restarts of the daemon ------------------------------------------------------------------------------


def test_a_living_run_is_adopted_and_its_end_is_not_lost(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    first = bench.ready("1.1")
    bench.restart()
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1", first)])
    assert bench.until("1.1", RunStarted) == first
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_an_end_is_delivered_until_it_is_forgotten(bench: Bench) -> None:
    bench.start("1.1", Does(exit_code=7))
    end = bench.end_of("1.1")
    bench.restart()
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1")])
    assert bench.end_of("1.1") == end
    assert bench.of("1.1") == [end]


def test_an_unrequested_run_can_be_returned(bench: Bench) -> None:
    bench.engine.adopt([open_run("1.1")])
    end = bench.until("1.1", *ENDS)
    assert isinstance(end, RunNeverStarted)
    bench.engine.reconcile((), ["1.1"])
    bench.start("1.1", Does(exit_code=5))
    bench.let_pass(0.5)
    assert not [event for event in bench.of("1.1") if isinstance(event, RunStarted)]


def test_a_run_of_an_earlier_boot_is_lost(bench: Bench) -> None:
    bench.engine.adopt([open_run("1.1", boot="boot-0")])
    end = bench.until("1.1", *ENDS)
    assert isinstance(end, RunLost)
    assert "restarted" in end.detail


def test_a_run_of_this_boot_is_adopted_whatever_boot_the_table_names(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    first = bench.ready("1.1")
    bench.restart()
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1", boot="boot-0")])
    assert bench.until("1.1", RunStarted) == first
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_a_recorded_stop_is_sent_again_on_adoption(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    first = bench.ready("1.1")
    bench.restart()
    bench.engine.adopt([open_run("1.1", first, order=StopOrder("cancel"))])
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_a_suspended_run_stays_suspended_across_a_restart(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=1.5))
    suspended(bench, "1.1")
    first = bench.until("1.1", RunStarted)
    bench.restart()
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1", first, order=SuspendOrder())])
    bench.let_pass(2.0)
    assert bench.of("1.1") == [first]
    bench.engine.order("1.1", ResumeOrder())
    assert bench.end_of("1.1").suspended_s > 1.95


def test_a_recorded_suspension_without_an_order_is_applied_on_adoption(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=3.0))
    first = bench.ready("1.1")
    bench.restart()
    bench.seen.clear()
    bench.engine.adopt([open_run("1.1", first, order=SuspendOrder())])
    bench.let_pass(3.5)
    assert not [event for event in bench.of("1.1") if isinstance(event, RunEnded)]
    bench.engine.order("1.1", ResumeOrder())
    assert bench.end_of("1.1").suspended_s > 0


def test_a_run_recorded_as_resumed_is_resumed_on_adoption(bench: Bench) -> None:
    bench.start("1.1", Does(lasts_s=1.5, exit_code=2))
    suspended(bench, "1.1")
    bench.let_pass(0.2)
    bench.restart()
    bench.engine.adopt([open_run("1.1", bench.until("1.1", RunStarted))])
    end = bench.end_of("1.1")
    assert end.exit_code == 2
    assert end.suspended_s > 0


# --- around the runs ---------------------------------------------------------------------------------------


def test_no_events_is_an_empty_list(bench: Bench) -> None:
    assert bench.engine.events() == []
    bench.start("1.1", SLEEPS)
    bench.ready("1.1")
    assert bench.engine.events() == []


def test_an_event_is_delivered_once(bench: Bench) -> None:
    bench.start("1.1")
    bench.end_of("1.1")
    bench.engine.reconcile((), ["1.1"])
    bench.let_pass(0.1)
    assert len(bench.of("1.1")) == 2


def test_only_processes_of_runs_have_owners(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    started = bench.ready("1.1")
    assert bench.engine.owners([started.pid, 1]) == {started.pid: "1.1"}
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    assert bench.engine.owners([started.pid]) == {}


def test_the_waker_is_called_inside_the_event_loop(bench: Bench) -> None:
    async def run() -> None:
        news = asyncio.Event()
        bench.engine.set_waker(news.set)
        bench.start("1.1", Does(lasts_s=0.0, exit_code=6))
        while not any(isinstance(event, ENDS) for event in bench.seen):
            await asyncio.wait_for(news.wait(), 60)
            news.clear()
            bench.seen += bench.engine.events()
        bench.engine.set_waker(None)

    asyncio.run(run())
    assert bench.end_of("1.1").exit_code == 6


def test_a_run_reports_its_checkpoint(bench: Bench) -> None:
    bench.start("1.1", SLEEPS)
    bench.start("2.1", SLEEPS)
    bench.ready("1.1")
    bench.ready("2.1")
    assert bench.engine.checkpoints() == {}
    bench.save("1.1", 1_234_567.5)
    assert bench.engine.checkpoints() == {"1.1": 1_234_567.5}
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    assert bench.engine.checkpoints() == {}


def test_a_foreground_run_cancelled_before_attachment_ends_once_without_starting(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, interactive=Interactive())
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    # An engine without terminals refuses it with a sentence.
    assert (end.start_at, end.stopped_by == "cancel") == (None, end.launch_error is None)
    assert bench.of("1.1") == [end]


def test_only_live_runs_report_cpu_time(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, argv=("sh", "-c", "(while :; do :; done) & echo ready; wait"))
    bench.ready("1.1")
    bench.burn("1.1", 0.1)
    wait_until(lambda: bench.engine.cpu_seconds(["1.1", "2.1"]).get("1.1", 0.0) >= 0.1, what="CPU time to be seen")
    assert set(bench.engine.cpu_seconds(["1.1", "2.1"])) == {"1.1"}
    bench.engine.order("1.1", StopOrder("cancel"))
    bench.end_of("1.1")
    assert bench.engine.cpu_seconds(["1.1"]) == {}


# --- parts that hold their nodes ---------------------------------------------------------------------------


def test_a_part_that_holds_its_node_ends_after_the_job(bench: Bench) -> None:
    bench.start("1.1", Does(exit_code=3), holds=True)
    bench.until("1.1", RunStarted)
    bench.let_pass(0.5)
    assert [type(event) for event in bench.of("1.1")] == [RunStarted]
    bench.engine.order("1.1", StopOrder("job_ended"))
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by, end.leftovers) == (None, None, ())
    assert end.start_at is not None


def test_a_part_that_holds_its_node_needs_no_grace_when_nothing_runs_there(bench: Bench) -> None:
    bench.start("1.1", STUBBORN, holds=True, grace_s=600)
    bench.until("1.1", RunStarted)
    bench.engine.order("1.1", StopOrder("cancel"))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (None, "cancel")
    assert bench.until("1.1", RunStopping).why == "cancel"


def test_a_part_that_holds_its_node_keeps_the_time_limit(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, holds=True, time_limit_s=600)
    bench.until("1.1", RunStarted)
    bench.engine.order("1.1", LimitOrder(0.5))
    assert bench.end_of("1.1").stopped_by == "timeout"


def test_a_part_that_holds_its_node_is_suspended_and_adopted_like_any(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, holds=True)
    known = bench.until("1.1", RunStarted)
    bench.engine.order("1.1", SuspendOrder())
    bench.until("1.1", RunSuspended)
    bench.restart()
    bench.engine.adopt([open_run("1.1", known, order=SuspendOrder())])
    bench.let_pass(0.5)
    bench.engine.order("1.1", ResumeOrder())
    bench.engine.order("1.1", StopOrder("job_ended"))
    end = bench.end_of("1.1")
    assert end.stopped_by is None
    assert end.suspended_s >= 0.5


def test_a_part_that_is_to_hold_its_node_ends_before_it_began(bench: Bench) -> None:
    bench.start("1.1", SLEEPS, holds=True)
    bench.engine.order("1.1", StopOrder("job_ended"))
    assert bench.end_of("1.1").signal is None
