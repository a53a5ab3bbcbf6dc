"""Commands on a machine with a scheduler for everybody: whom they talk to while it is away, and what is root's."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon

from gpusched import client, errors, paths
from gpusched.cli.admin import backups, daemon, doctor


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of its socket; it is installed, and its daemon does not answer."""
    (tmp_path / "gpusched.service").touch()
    folder = tmp_path / "run"
    monkeypatch.setattr(paths, "SYSTEM_UNIT", str(tmp_path / "gpusched.service"))
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(folder / "api.sock"))
    monkeypatch.setattr(paths, "_root", None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("GPUSCHED_HOME", "GPUSCHED_SOCKET", "GPUSCHED_CONFIG", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def start() -> Iterator[Callable[..., FakeDaemon]]:
    running: list[FakeDaemon] = []

    def begin(answer: Callable[[str, str, Any], Any], path: Path) -> FakeDaemon:
        running.append(FakeDaemon(path, answer))
        return running[-1]

    yield begin
    for one in running:
        one.close()


def test_no_personal_daemon_is_started_while_the_system_one_is_stopped(away: Path, tmp_path: Path) -> None:
    assert paths.finds_system()
    began = time.monotonic()
    with pytest.raises(errors.DaemonUnreachable, match=r"no daemon answers on .*/run/api\.sock") as caught:
        client.connect()
    assert time.monotonic() - began < 20, "one that was stopped is not waited for"
    assert caught.value.hint == "see what is wrong with: systemctl status gpusched"
    assert not (tmp_path / "home").exists()


def test_a_restarting_daemon_is_waited_for(
    away: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    away.mkdir()
    came = threading.Event()
    opened = client.DaemonConnection.open

    def open_(self: client.DaemonConnection) -> None:
        if not came.is_set():
            came.set()
            raise errors.DaemonUnreachable("not yet")
        if not os.path.exists(self.socket_path):
            start(lambda *_: {"who": "system"}, Path(self.socket_path))
        opened(self)

    monkeypatch.setattr(client.DaemonConnection, "open", open_)
    with client.connect() as found:
        assert found.call("GET", "/") == {"who": "system"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_daemon_that_disappears_before_the_request_is_waited_for(
    away: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A connection that waited in the old daemon's queue is reset; then nobody listens until the new one does."""
    away.mkdir()
    path = Path(paths.SYSTEM_SOCKET)
    old = socket.socket(socket.AF_UNIX)
    old.bind(str(path))
    old.listen()
    refused = []
    opened = client.DaemonConnection.open

    def open_(self: client.DaemonConnection) -> None:
        try:
            opened(self)
        except errors.DaemonUnreachable as error:
            refused.append(error.message)
            if len(refused) == 3:
                path.unlink()
                start(lambda *_: {"who": "new"}, path)
            raise

    monkeypatch.setattr(client.DaemonConnection, "open", open_)
    with client.connect() as found:
        old.close()
        assert found.call(method, "/") == {"who": "new"}
    assert refused == [f"no daemon answers on {path}: Connection refused"] * 3


def test_a_daemon_stopped_before_the_request_is_not_waited_for(away: Path) -> None:
    away.mkdir()
    path = Path(paths.SYSTEM_SOCKET)
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
        old.listen()
        found = client.connect()
    path.unlink()
    away.rmdir()
    began = time.monotonic()
    with pytest.raises(errors.DaemonUnreachable):
        found.call("GET", "/")
    assert time.monotonic() - began < 20


def test_a_daemon_that_does_not_return_times_out(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away.mkdir()
    monkeypatch.setattr(client, "START_TIMEOUT_S", 0.2)
    with pytest.raises(errors.DaemonUnreachable):
        client.connect()


def test_looking_does_not_wait(away: Path) -> None:
    away.mkdir()
    began = time.monotonic()
    with pytest.raises(errors.DaemonUnreachable):
        client.connect(autostart=False)
    assert time.monotonic() - began < 20


def test_another_socket_is_not_waited_for(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away.mkdir()
    monkeypatch.setenv("GPUSCHED_SOCKET", str(away / "other.sock"))
    assert not paths.finds_system()
    with pytest.raises(errors.DaemonUnreachable):
        client.connect()


def test_systemd_starts_and_stops_the_daemon(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.start_command() == "sudo systemctl start gpusched"
    assert paths.stop_command() == "sudo systemctl stop gpusched"
    with pytest.raises(errors.Refused, match="this machine has a system scheduler"):
        daemon.daemon_start()
    monkeypatch.setenv("GPUSCHED_HOME", "/somewhere")
    assert paths.start_command() == "gpusched daemon start"
    assert paths.stop_command() == "gpusched daemon stop"


def test_a_daemon_kept_running_by_systemd_is_not_stopped_directly(
    away: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    away.mkdir()
    asked: list[str] = []

    def answer(method: str, path: str, *_: Any) -> dict[str, Any]:
        asked.append(f"{method} {path}")
        return {"daemon": {"pid": 1, "unit": "gpusched.service"}}

    start(answer, Path(paths.SYSTEM_SOCKET))
    with pytest.raises(errors.Refused, match=r"systemd keeps gpusched\.service running") as caught:
        daemon.daemon_stop()
    assert "sudo systemctl stop gpusched" in caught.value.hint
    assert asked == ["GET /v1/status"]


def test_the_job_table_belongs_to_root(away: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for act in (
        lambda: backups.make(str(tmp_path / "b"), False),
        lambda: backups.put_back(str(tmp_path / "b"), True, False),
    ):
        with pytest.raises(errors.Forbidden, match="is root's") as caught:
            act()
        assert "sudo gpusched " in caught.value.hint
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    backups._choose_table("gpusched backup")
    assert paths.database() == "/var/lib/gpusched/gpusched.db"


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"ActiveState": "active", "UnitFileState": "enabled", "NRestarts": "0"}, "ok", "starts at boot"),
        ({"ActiveState": "reloading", "UnitFileState": "enabled"}, "ok", "is running"),
        ({"ActiveState": "failed", "UnitFileState": "enabled"}, "fail", "is failed"),
        ({}, "fail", "is unknown"),
        ({"ActiveState": "active", "UnitFileState": "disabled"}, "warn", "but disabled"),
        ({"ActiveState": "active", "UnitFileState": "enabled", "NRestarts": "3"}, "warn", "3 times"),
    ],
)
def test_the_doctor_judges_the_service(facts: dict[str, str], level: str, words: str) -> None:
    found, text, hint = doctor.judge_service(facts)
    assert (found, words in text, bool(hint)) == (level, True, level != "ok")


def test_the_doctor_checks_root_files_for_root_alone(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvml_module", lambda: doctor.passed("left out"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = {one.check: one for one in doctor.examine()}
    assert "sudo gpusched doctor" in found["folders"].text
    assert not {"disk", "spool", "permissions", "database"} & found.keys()
    assert (found["daemon"].ok, "systemctl start gpusched" in found["daemon"].hint) == (False, True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = {one.check: one for one in doctor.examine()}
    assert {"disk", "spool", "permissions", "database", "service"} <= found.keys()
    assert paths.state_dir() == "/var/lib/gpusched"
