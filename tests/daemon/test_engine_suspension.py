"""Real trees of processes that are stopped in place, go on, or are ended while they stand still."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import LocalBench, to_start

from gpusched.engine.linux import proctree
from gpusched.model.execution import LimitOrder, ResumeOrder, RunSuspended, SignalOrder, StopOrder, SuspendOrder
from gpusched.model.job import Notice

COUNTS = "while :; do echo x >> {name}; sleep 0.02; done"
DOUBLE_FORKED = f"""
(setsid sh -c '{COUNTS.format(name="orphan")}' &) &
wait
{COUNTS.format(name="main")} &
echo ready
{COUNTS.format(name="other")}
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def start(bench: LocalBench, text: str, **changes: object) -> None:
    bench.start("1.1", argv=("bash", "-c", text), **changes)
    bench.ready("1.1")


def sizes(bench: LocalBench, *names: str) -> list[int]:
    return [(bench.folder / name).stat().st_size if (bench.folder / name).exists() else 0 for name in names]


def suspend(bench: LocalBench) -> None:
    bench.engine.order("1.1", SuspendOrder())
    bench.until("1.1", RunSuspended)


def are_stopped(bench: LocalBench) -> bool:
    """Whether all processes are stopped, or wait in the kernel for a stopped child.

    dash starts commands with vfork: stopped before its exec, the child holds its parent in state D, where a
    pending STOP cannot take effect.
    """
    processes = bench.processes()
    stopped = {process.ppid for process in processes if process.state == "T"}
    return all(process.state == "T" or (process.state == "D" and process.pid in stopped) for process in processes)


def test_every_process_of_the_tree_is_suspended_and_resumed(bench: LocalBench) -> None:
    start(bench, DOUBLE_FORKED)
    names = ("orphan", "main", "other")
    bench.wait(lambda: all(sizes(bench, *names)), what="all three loops")
    suspend(bench)
    bench.wait(lambda: are_stopped(bench), what="all to stand still")
    before = sizes(bench, *names)
    bench.let_pass(0.4)
    assert sizes(bench, *names) == before
    assert len(bench.processes()) >= 3
    bench.engine.order("1.1", ResumeOrder())
    bench.wait(lambda: all(now > then for now, then in zip(sizes(bench, *names), before, strict=True)), what="growth")


def test_a_constantly_forking_process_is_suspended_too(bench: LocalBench) -> None:
    start(bench, "echo ready; while :; do (:) & (:) & wait; done")
    suspend(bench)
    bench.wait(lambda: are_stopped(bench), what="all to stand still")
    bench.let_pass(0.2)
    assert are_stopped(bench)


def test_a_process_that_catches_the_notice_may_act_and_is_still_stopped(bench: LocalBench) -> None:
    text = (
        "import signal, time\n"
        "signal.signal(signal.SIGTSTP, lambda *_: print('noticed', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.02)\n"
    )
    bench.start("1.1", argv=(sys.executable, "-c", text))
    bench.ready("1.1")
    suspend(bench)
    assert "noticed" in bench.output("1.1")
    bench.wait(lambda: are_stopped(bench), what="all to stand still")


def test_the_notice_before_the_limit_pauses_and_is_sent_once(bench: LocalBench) -> None:
    text = "trap 'echo told' USR1; echo ready; while :; do sleep 0.02; done"
    start(bench, text, time_limit_s=600.0, notice=Notice(signal.SIGUSR1, 2, main_only=True))
    suspend(bench)
    bench.engine.order("1.1", LimitOrder(3.0))
    bench.let_pass(1.5)
    bench.engine.order("1.1", ResumeOrder())
    assert "told" not in bench.output("1.1")
    bench.wait(lambda: "told" in bench.output("1.1"), what="the notice")
    suspend(bench)
    bench.engine.order("1.1", ResumeOrder())
    end = bench.end_of("1.1")
    assert end.stopped_by == "timeout"
    assert end.start_at is not None
    assert end.end_at - end.start_at >= 3.0 + end.suspended_s - 0.05
    assert bench.output("1.1").count("told") == 1


def test_killing_the_first_process_of_a_suspended_tree_ends_the_others(bench: LocalBench) -> None:
    start(bench, "sleep 600 & echo ready; sleep 600", time_limit_s=600)
    suspend(bench)
    bench.wait(lambda: are_stopped(bench), what="all to stand still")
    first = min(bench.processes(), key=lambda process: process.pid)
    proctree.send(first, signal.SIGKILL)
    end = bench.end_of("1.1")
    assert (end.signal, end.stopped_by) == (signal.SIGKILL, None)
    assert end.suspended_s > 0
    assert bench.processes() == []


def test_a_suspended_tree_may_save_its_work_when_stopped(bench: LocalBench) -> None:
    start(bench, "trap 'echo saved; exit 7' TERM; echo ready; while :; do sleep 0.02; done", grace_s=600)
    suspend(bench)
    bench.engine.order("1.1", StopOrder("preempt"))
    end = bench.end_of("1.1")
    assert (end.exit_code, end.stopped_by) == (7, "preempt")
    assert "saved" in bench.output("1.1")


def test_a_sigcont_is_not_a_resume(bench: LocalBench) -> None:
    start(bench, "echo ready; " + COUNTS.format(name="main"))
    suspend(bench)
    bench.wait(lambda: are_stopped(bench), what="all to stand still")
    before = sizes(bench, "main")
    bench.engine.order("1.1", SignalOrder(signal.SIGCONT))
    bench.let_pass(0.3)
    assert sizes(bench, "main") == before


def test_a_cancel_without_grace_ends_a_suspended_tree_at_once(bench: LocalBench) -> None:
    start(bench, "trap '' TERM; echo ready; while :; do sleep 0.02; done", grace_s=600)
    suspend(bench)
    bench.engine.order("1.1", StopOrder("cancel", grace_s=0))
    assert bench.end_of("1.1").signal == signal.SIGKILL


def test_a_suspension_ordered_before_the_start_applies_from_the_start(bench: LocalBench) -> None:
    ticket = bench.ticket("1.1", argv=("bash", "-c", COUNTS.format(name="main")))
    bench.folder.joinpath("spool", "1.1.order").write_text("\nsuspend .\n")
    bench.engine.reconcile(to_start([ticket]))
    bench.until("1.1", RunSuspended)
    bench.wait(lambda: are_stopped(bench), what="all to stand still")
    bench.engine.order("1.1", LimitOrder(None))
    bench.engine.order("1.1", ResumeOrder())
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").suspended_s > 0.4
