"""Parts of the supervisor that need no job: orders, limits, the tail of a log, a result that will not be written."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched.engine import going_down
from gpusched.engine import spool as files
from gpusched.engine.launchers import PACKAGE_ROOT
from gpusched.engine.linux import proctree
from gpusched.engine.supervisor import interactive, processes, prolog_epilog, supervisor
from gpusched.engine.supervisor.processes import RunProcesses
from gpusched.engine.supervisor.result import RunResult
from gpusched.engine.supervisor.run_control import COMES_BACK
from gpusched.engine.supervisor.supervisor import EventSender, Home, Supervisor, supervisor_of
from gpusched.engine.wire import PIPE_BUF
from gpusched.model import execution


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Supervisor]:
    def made(**ticket: Any) -> Supervisor:
        base: dict[str, Any] = {
            "run": "3.2",
            "time_limit_s": None,
            "notice": None,
            "grace_s": 30.0,
            "has_gpus": False,
            "script": None,
        }
        return supervisor_of({**base, **ticket}, Home(str(tmp_path), "boot", -1))

    return made


@pytest.fixture
def running(make: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """One that started 100 s ago on a clock that stands at 1,100."""
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: 1100.0)
    made = make(notice={"signal": int(signal.SIGUSR1), "before_s": 60, "main_only": False}, stop_signal=15)
    made.control.start_at, made.control.started = 5.0, 1000.0
    return made


def in_a_child(action: Callable[[], str | None]) -> str:
    """What it returns in a process of its own: a supervisor takes the signals of the whole process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, repr(action()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def foreground(*, keep: bool = False, client: tuple[int, int, str] | None = None) -> dict[str, Any]:
    named = client and dict(zip(("pid", "start_ticks", "boot_id"), client, strict=True))
    return {"pty": False, "keep": keep, "lease_s": None, "client": named}


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [(False, "'its client did not attach within 0.2 s'"), (True, "None")],
    ids=["not kept", "kept"],
)
def test_a_run_waits_for_its_client_only_for_a_while(
    make: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch, keep: bool, sentence: str
) -> None:
    monkeypatch.setattr(interactive, "ATTACH_S", 0.2)
    lives = (os.getpid(), proctree.read_process(os.getpid()).start_ticks, "boot")  # type: ignore[union-attr]
    made = make(uid=os.geteuid(), log_mib=0.0, interactive=foreground(keep=keep, client=lives))
    assert in_a_child(made.await_client) == sentence


@pytest.mark.parametrize("client", [(1, 0, "boot"), (os.getpid(), -1, "boot"), (1, 1, "other")])
def test_a_run_does_not_wait_for_a_client_that_left(
    make: Callable[..., Supervisor], client: tuple[int, int, str]
) -> None:
    made = make(uid=os.geteuid(), log_mib=0.0, interactive=foreground(client=client))

    def stopped_by() -> str | None:
        assert made.await_client() is None
        return made.control.stopped_by

    assert in_a_child(stopped_by) == "'client_lost'"


@pytest.mark.parametrize(
    ("limit_s", "limit_at", "notice_at"),
    [(None, None, None), (300.0, 1300.0, 1240.0), (90.0, 1090.0, 1030.0), (10.0, 1010.0, 1000.0)],
)
def test_limit_and_notice_count_from_the_start(
    running: Supervisor, limit_s: float | None, limit_at: float | None, notice_at: float | None
) -> None:
    running.handle_order(["limit", "-" if limit_s is None else str(limit_s), "."])
    assert (running.control.limit.due_at, running.control.notice.due_at) == (limit_at, notice_at)


def test_the_clock_is_checked_while_processes_end_constantly(
    make: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = iter(range(2, 10_000_000))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(processes.os, "wait4", lambda pid, options: (next(ended), 0, usage))
    sent: list[int] = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: sent.append(number))
    assert make().processes.reap(lambda pid, status: None)
    assert sent == [signal.SIGCHLD], "it comes back for the rest"


def test_flushing_output_does_not_outlive_the_limit(running: Supervisor) -> None:
    control = running.control
    control.set_limit(90.0)
    running.processes.status, control.linger.due_at = 0, 1100.2
    control.timers.act(1100.0)
    assert (control.stopped_by, control.limit.due_at) == (None, 1100.2)


def test_a_limit_before_the_start_is_kept_for_it(make: Callable[..., Supervisor]) -> None:
    made = make()
    made.handle_order(["limit", "7.5", "."])
    assert made.ticket["time_limit_s"] == 7.5
    assert made.control.limit.due_at is None


def test_stops_before_the_start_are_remembered_and_cancel_wins(make: Callable[..., Supervisor]) -> None:
    made = make()
    made.handle_order(["stop", "preempt", "-", "-", "."])
    assert made.control.stopped_by == "preempt"
    made.handle_order(["stop", "cancel", "-", "-", "."])
    made.handle_order(["stop", "preempt", "-", "-", "."])
    assert made.control.stopped_by == "cancel"


@pytest.mark.parametrize("is_over", [True, False], ids=["ended and not reaped", "alive"])
@pytest.mark.parametrize("why", ["requeue", "cancel"])
def test_a_stop_that_comes_after_the_end_of_the_command_did_not_stop_it(
    running: Supervisor, monkeypatch: pytest.MonkeyPatch, is_over: bool, why: str
) -> None:
    monkeypatch.setattr(RunProcesses, "deliver", lambda *_, **__: None)
    command = subprocess.Popen(["/bin/true"] if is_over else ["/bin/sleep", "600"])
    try:
        if is_over:
            os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
        running.processes.first_pid = command.pid
        running.handle_order(["stop", why, "-", "60", "."])
        assert (running.control.stopping, running.control.stopped_by) == ((None, None) if is_over else (why, why))
        assert running.control.kills.due_at is not None
    finally:
        command.kill()
        command.wait()


@pytest.mark.parametrize(
    ("content", "is_done"),
    [
        (None, False),
        ("", False),
        ("done\n", True),
        ("done", True),
        ("done at step 900\n", True),
        ("undone\n", False),
        ("step 900 done\n", False),
    ],
)
@pytest.mark.parametrize(
    ("stopped_by", "code"),
    [("requeue", 0), ("preempt", 0), ("shutdown", 0), ("head_lost", 0), ("requeue", 7), ("timeout", 0), (None, 0)],
)
def test_a_run_told_to_stop_for_a_requeue_says_in_its_checkpoint_file_that_it_is_done(
    running: Supervisor, tmp_path: Path, content: str | None, is_done: bool, stopped_by: str | None, code: int
) -> None:
    path = Path(files.checkpoint_path(str(tmp_path), "3.2"))
    if content is not None:
        path.write_text(content)
    running.control.stopped_by, running.processes.status = stopped_by, code << 8
    result = RunResult(running)
    # What an epilog writes says nothing about the command.
    path.write_text("step 3")
    assert result.is_done is (is_done and code == 0 and stopped_by in COMES_BACK)


def test_the_supervisor_and_the_daemon_agree_on_which_stops_another_run_follows() -> None:
    assert COMES_BACK == execution.COMES_BACK
    assert set(prolog_epilog.STATES_UNLESS_DONE) == set(COMES_BACK)


def test_a_pipe_for_a_checkpoint_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(files.checkpoint_path(str(tmp_path), "3.2"))
    assert not files.says_done(str(tmp_path), "3.2")


@pytest.mark.parametrize(("goes_down", "why"), [(True, "shutdown"), (False, "cancel")])
def test_the_meaning_of_an_unsolicited_term_depends_on_the_machine(
    running: Supervisor, monkeypatch: pytest.MonkeyPatch, goes_down: bool, why: str
) -> None:
    monkeypatch.setattr(going_down, "machine_goes_down", lambda: goes_down)
    monkeypatch.setattr(RunProcesses, "deliver", lambda *_, **__: None)
    running.handle_signals((signal.SIGTERM,))
    assert (running.control.stopped_by, running.control.kills.due_at) == (why, 1130.0)


def test_a_cancel_overrides_an_earlier_shutdown(running: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunProcesses, "deliver", lambda *_, **__: None)
    running.handle_order(["stop", "shutdown", "-", "60", "."])
    running.handle_order(["stop", "cancel", "-", "-", "."])
    assert (running.control.stopped_by, running.control.kills.due_at) == ("cancel", 1130.0)


@pytest.mark.parametrize("line", ["stop canc", "stop", "limit x .", "signal", "", "limit 5", "stop cancel x - ."])
def test_torn_orders_are_ignored(
    running: Supervisor, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunProcesses, "deliver", lambda *_, **__: pytest.fail("a signal was sent"))
    files.append_order(str(tmp_path), "3.2", line)
    running.read_orders()
    control = running.control
    assert (control.limit.due_at, control.stopping, control.kills.due_at) == (None, None, None)


def test_writing_a_result_is_retried_until_the_disk_accepts_it(
    make: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = waiting(make, tmp_path, monkeypatch, fails=3)
    RunResult(made).record()
    assert len(told) == 4, "the daemon is told each time, and may record it"
    assert json.loads(told[0])["event"] == "ended"
    record = files.read_record(str(tmp_path), "3.2")
    assert record is not None
    assert record.result == told[0].rstrip(b"\n")
    made.close()


@pytest.mark.parametrize(
    ("serves_more", "recorded", "flushed"),
    [(False, (), 1), (True, (), 1), (True, ("3.2",), 0)],
    ids=["it exits", "the daemon has not said that it is recorded", "recorded"],
)
def test_a_result_is_on_disk_unless_the_table_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves_more: bool, recorded: tuple[str, ...], flushed: int
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    home = Home(str(tmp_path), "boot", writer, serves_more=serves_more)
    ticket = {"run": "3.2", "uid": os.geteuid(), "script": None, "grace_s": 1.0, "interactive": None, "has_gpus": False}
    done: list[tuple[str, int]] = []

    def note(fd: int) -> None:
        done.append((os.readlink(f"/proc/self/fd/{fd}"), len(os.read(reader, 4096))))

    monkeypatch.setattr(supervisor.os, "fsync", note)
    monkeypatch.setattr(Supervisor, "may_start", lambda _: False)
    is_free = supervisor_of(ticket, home).supervise()
    assert is_free
    assert bool(done) is not serves_more, "one that may serve another run leaves it for later"
    home.flush_result(recorded)
    home.flush_result()
    assert [path for path, _ in done] == flushed * [files.record_path(str(tmp_path), "3.2")]
    assert all(told for _, told in done), "the daemon is told first"
    os.close(reader)
    os.close(writer)


def test_a_supervisor_exits_when_its_end_was_recorded_without_a_result(
    make: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = waiting(make, tmp_path, monkeypatch, fails=10**9)
    monkeypatch.setattr(supervisor.time, "sleep", lambda _: files.remove([files.record_path(str(tmp_path), "3.2")]))
    RunResult(made).record()
    assert len(told) == 1
    assert not made.events.is_heard, "a process that cannot write must not serve another run"
    made.close()


def waiting(
    make: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> tuple[Supervisor, list[bytes]]:
    """A supervisor at its end, whose disk is full for so many attempts, and what it says."""
    made = make()
    fd = files.take_claim(str(tmp_path), "3.2", os.getpid(), 1, 0, "boot")
    assert fd is not None
    made.record_fd = fd
    told: list[bytes] = []
    left = [fails]
    write_result = files.write_result

    def write(to: int, content: bytes) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "full")
        write_result(to, content)

    monkeypatch.setattr(files, "write_result", write)
    monkeypatch.setattr(supervisor.time, "sleep", lambda _: None)
    monkeypatch.setattr(EventSender, "send", lambda _, content: told.append(content))
    return made, told


def test_supervisors_and_the_fork_server_import_neither_structs_nor_dataclasses() -> None:
    parts = [
        "forkserver",
        "unit",
        *(f"supervisor.{part}" for part in "supervisor adopted interactive rotation".split()),
    ]
    wanted = ", ".join(f"gpusched.engine.{part}" for part in parts)
    code = f"import sys; sys.path.append({PACKAGE_ROOT!r}); import {wanted}"
    argv = [sys.executable, "-I", "-S", "-c", f"{code}; print(*sys.modules)"]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert {"msgspec", "dataclasses", "json", "gpusched.model.value"} & set(loaded) == set()


def test_the_start_is_sent_before_the_next_event_and_in_one_write_where_both_fit() -> None:
    reader, writer = os.pipe2(os.O_DIRECT)
    settled: list[bytes] = []
    one = EventSender("3.2", writer, settled.append)
    try:
        for second, written in ((b"second\n", [b"first\nsecond\n"]), (b"x" * PIPE_BUF, [b"first\n", b"x" * PIPE_BUF])):
            one.send_later(b"first\n", 1.0, b"start\n")
            one.send(second)
            assert settled.pop() == b"start\n"
            assert one.take_start_line() == b""
            assert one.is_heard
            assert one.timer.due_at is None
            # Each read of such a pipe is one write.
            assert [os.read(reader, 2 * PIPE_BUF) for _ in written] == written
    finally:
        os.close(reader)
        os.close(writer)


def test_a_start_without_a_following_event_is_sent_by_the_timer(make: Callable[..., Supervisor]) -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    one = make()
    one.events._fd = writer
    one.events.send_later(b"first\n", 5.0)
    try:
        one.control.timers.act(4.9)
        with pytest.raises(BlockingIOError):
            os.read(reader, 100)
        assert one.control.timers.next_at() == 5.0
        one.control.timers.act(5.0)
        assert os.read(reader, 100) == b"first\n"
    finally:
        os.close(reader)
        os.close(writer)
