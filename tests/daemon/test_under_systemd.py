"""A real daemon as systemd starts one: what it tells, where it logs, and that a hung one tells nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import wait_until

from gpusched.client import DaemonConnection


class Service:
    """The daemon, and systemd's ends of its socket and its log."""

    def __init__(self, home: Path, watchdog_s: float) -> None:
        self.home = home
        (home / "config.toml").write_text('[daemon]\npoll_s = 0.05\n[gpu]\nsource = "none"\n')
        self.said: list[str] = []
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(home / "notify"))
        self._notify.setblocking(False)
        self.journal = home / "journal"
        with open(self.journal, "wb") as file:
            stream = os.fstat(file.fileno())
            env = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCHED_")}
            env |= {
                "GPUSCHED_HOME": str(home),
                "NOTIFY_SOCKET": str(home / "notify"),
                "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
                "JOURNAL_STREAM": f"{stream.st_dev}:{stream.st_ino}",
                "INVOCATION_ID": "0" * 32,
            }
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpusched.daemon"], env=env, stdout=file, stderr=file
            )

    def heard(self) -> list[str]:
        """Every field that was told so far."""
        while True:
            try:
                self.said += self._notify.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.said

    def hears(self, field: str, times: int = 1) -> None:
        wait_until(lambda: self.heard().count(field) >= times, what=f"{field}, {times} times")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(60)
        self._notify.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def start(watchdog_s: float = 60.0) -> Service:
        made.append(Service(tmp_path, watchdog_s))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_it_is_ready_when_its_socket_answers_and_announces_its_stop(service: Callable[..., Service]) -> None:
    found = service()
    found.hears("READY=1")
    with DaemonConnection(str(found.home / "run" / "api.sock")) as client:
        daemon = client.call("GET", "/v1/status")["daemon"]
    assert daemon["log"].startswith("journalctl --user -u ")
    found.hears("STATUS=no jobs")
    found.hears("WATCHDOG=1")
    found.process.terminate()
    assert found.process.wait(60) == 0
    assert "STOPPING=1" in found.heard()


def test_its_log_goes_only_to_the_journal_with_priorities(service: Callable[..., Service]) -> None:
    found = service()
    found.hears("READY=1")
    assert any(line.startswith("<6>gpusched.daemon: gpusched ") for line in found.journal.read_text().splitlines())
    assert not (found.home / "log" / "gpuschedd.log").exists()


def test_a_reload_is_announced_from_start_to_end(service: Callable[..., Service]) -> None:
    found = service()
    found.hears("READY=1")
    (found.home / "config.toml").write_text('nonsense\n[gpu]\nsource = "none"\n')
    found.process.send_signal(signal.SIGHUP)
    found.hears("RELOADING=1")
    found.hears("READY=1", times=2)
    wait_until(lambda: "<3>gpusched.daemon: the settings were not reloaded" in found.journal.read_text())


def test_watchdog_pings_continue_when_idle_and_stop_when_hanging(
    service: Callable[..., Service],
) -> None:
    found = service(watchdog_s=0.4)
    found.hears("WATCHDOG=1", times=5)
    found.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, found.process.pid, os.WSTOPPED | os.WNOWAIT)
    before = len(found.heard())
    # What systemd does then: ABRT, and a trace goes to the journal.
    found.process.send_signal(signal.SIGABRT)
    found.process.send_signal(signal.SIGCONT)
    assert found.process.wait(60) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in found.journal.read_text()
    assert "in run" in found.journal.read_text()
    assert len(found.heard()) == before


def test_invalid_settings_exit_with_the_code_that_systemd_does_not_restart(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("nonsense = 1\n")
    env = {**os.environ, "GPUSCHED_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpusched.daemon"], env=env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
