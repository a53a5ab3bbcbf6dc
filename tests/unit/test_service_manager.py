"""What the daemon tells systemd, read from the socket at the other end, and its lines for the journal."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import wait_until

from gpusched.daemon import main, service_manager
from gpusched.daemon.service_manager import (
    JournalFormatter,
    LineFormatter,
    ServiceManager,
    journal_command,
    writes_to_journal,
)
from gpusched.errors import NotReady
from gpusched.model.settings import DaemonSettings, Settings


@pytest.fixture
def other_end(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(10)
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(service_manager.time, "monotonic", lambda: now[0])
    return now


def environ(server: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(server.getsockname()), **more}


def heard(server: socket.socket) -> list[str]:
    """Everything that has come so far."""
    server.setblocking(False)
    found = []
    while True:
        try:
            found.append(server.recv(4096).decode())
        except BlockingIOError:
            return found


def test_without_systemd_no_notification_is_sent() -> None:
    manager = ServiceManager({})
    assert (manager.watchdog_s, manager.unit) == (None, None)
    for tell in (manager.starting, manager.ready, manager.reloading, manager.alive, manager.stopping):
        tell()
    manager.status("x")


def test_a_service_reports_its_lifecycle(other_end: socket.socket) -> None:
    manager = ServiceManager(environ(other_end))
    manager.ready()
    manager.status("3 running")
    manager.status("3 running")
    manager.status("2 running")
    manager.reloading()
    manager.ready()
    manager.stopping()
    words = heard(other_end)
    assert [text.partition("\n")[0] for text in words] == [
        *("READY=1", "STATUS=3 running", "STATUS=2 running", "RELOADING=1", "READY=1", "STOPPING=1")
    ]
    assert "\nMONOTONIC_USEC=" in words[3]


def test_the_variables_are_not_inherited_by_children(other_end: socket.socket) -> None:
    found = environ(other_end, WATCHDOG_USEC="1", WATCHDOG_PID="1", HOME="/root")
    ServiceManager(found)
    assert found == {"HOME": "/root"}


def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0gpusched-test-{os.getpid()}")
        server.settimeout(10)
        ServiceManager({"NOTIFY_SOCKET": f"@gpusched-test-{os.getpid()}"}).ready()
        assert server.recv(100) == b"READY=1"


def test_a_missing_manager_does_no_harm(other_end: socket.socket, tmp_path: Path) -> None:
    manager = ServiceManager(environ(other_end))
    os.unlink(tmp_path / "notify")
    manager.ready()


def test_watchdog_pings_are_sent_in_time_and_not_at_every_tick(other_end: socket.socket, clock: list[float]) -> None:
    manager = ServiceManager(environ(other_end, WATCHDOG_USEC="120000000", WATCHDOG_PID=str(os.getpid())))
    assert manager.watchdog_s == 120.0
    for _ in range(1000):
        manager.alive()
    assert heard(other_end) == ["WATCHDOG=1"]
    clock[0] += 29.9
    manager.alive()
    assert heard(other_end) == []
    clock[0] += 0.2
    manager.alive()
    assert heard(other_end) == ["WATCHDOG=1"]


def test_a_watchdog_of_another_process_is_ignored(other_end: socket.socket) -> None:
    manager = ServiceManager(environ(other_end, WATCHDOG_USEC="120000000", WATCHDOG_PID=str(os.getpid() + 1)))
    assert manager.watchdog_s is None


def test_a_long_start_asks_for_time_until_it_is_over(other_end: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_manager, "_EXTEND_S", 0.03)
    manager = ServiceManager(environ(other_end))
    manager.starting()
    for _ in range(3):
        assert other_end.recv(200).startswith(b"EXTEND_TIMEOUT_USEC=30000\nSTATUS=starting")
    manager.ready()

    def is_over() -> bool:
        return "READY=1" in heard(other_end)

    wait_until(is_over, what="READY")
    wait_until(lambda: not [t for t in service_manager.threading.enumerate() if t.name == "starting"])


def test_a_start_that_never_ends_times_out(other_end: socket.socket, clock: list[float]) -> None:
    manager = ServiceManager(environ(other_end))
    assert not manager._has_started.wait(0)
    manager._has_started.wait = lambda timeout: clock.__setitem__(0, clock[0] + 1000.0)  # type: ignore[assignment, method-assign]
    manager._go_on_starting()
    assert len(heard(other_end)) == 4


def record(text: str, level: int = logging.INFO, trace: bool = False) -> logging.LogRecord:
    info = None
    if trace:
        try:
            raise ValueError("x")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("gpusched.daemon", level, "", 0, text, (), info)


@pytest.mark.parametrize(
    ("level", "number"),
    [(logging.CRITICAL, 3), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7)],
)
def test_lines_for_the_journal_begin_with_their_priority(level: int, number: int) -> None:
    assert JournalFormatter().format(record("hello", level)) == f"<{number}>gpusched.daemon: hello"


def test_every_line_of_a_traceback_has_a_priority() -> None:
    lines = JournalFormatter().format(record("bad", logging.ERROR, trace=True)).splitlines()
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)


@pytest.mark.parametrize("formatter", [JournalFormatter(), LineFormatter("%(levelname)s %(name)s: %(message)s")])
def test_user_text_cannot_forge_log_lines(formatter: logging.Formatter) -> None:
    forged = "x\n<3>gpusched.daemon: all is lost\r\x1b[2J\u2028ERROR gpusched.daemon: \x85y"
    (line,) = formatter.format(record(f"job 7 ({forged}) ended")).splitlines()
    assert line.isprintable()
    assert "\\n<3>" in line
    found = record("bad", logging.ERROR)
    try:
        raise ValueError(forged)
    except ValueError:
        found.exc_info = sys.exc_info()
    first, *trace = formatter.format(found).splitlines()
    assert first.endswith("gpusched.daemon: bad")
    assert all(line.removeprefix("<3>").startswith("    ") and line.isprintable() for line in trace)


def test_the_journal_is_recognized_by_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.fstat(2)
    for value, is_it in (
        (f"{found.st_dev}:{found.st_ino}", True),
        (f"{found.st_dev}:{found.st_ino + 1}", False),
        ("", False),
    ):
        monkeypatch.setenv("JOURNAL_STREAM", value)
        assert writes_to_journal() is is_it


def test_a_sandbox_is_recognized_by_inherited_restrictions() -> None:
    import subprocess

    code = "from gpusched.daemon.service_manager import is_locked_in as f; import ctypes; print(f(), end=' '); "
    code += "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0); print(f())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout in ("False True\n", "True True\n")


def test_runs_are_not_forked_into_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the bus did not answer at the start of a service that relies on it."""
    manager = ServiceManager({})
    manager.unit = "gpusched.service"
    monkeypatch.setattr(main.paths, "_root", "")
    monkeypatch.setattr(main, "is_locked_in", lambda: True)
    settings = Settings(daemon=DaemonSettings(launcher="fork"))
    with pytest.raises(NotReady, match="runs could not leave the daemon.s sandbox") as caught:
        main._begin(settings, manager)
    assert "gpusched system install" in caught.value.hint


def test_the_log_location_is_found() -> None:
    assert journal_command("gpusched.service", is_system=True) == "journalctl -u gpusched.service"
    assert journal_command(None, is_system=False) == "journalctl --user -u gpusched.service"


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/gpusched.service\n", "gpusched.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/gpusched.service\n", "gpusched.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_the_unit_is_read_from_the_control_group(
    text: str, unit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text(text)
    opened: Callable[..., object] = open
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened(tmp_path / "cgroup", *a, **k))
    assert service_manager._unit() == unit
