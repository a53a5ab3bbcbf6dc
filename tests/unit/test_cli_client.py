"""The thin client against a fake daemon: answers, errors, lost connections, sockets that are odd or absent."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import Answer, FakeDaemon

from gpusched import errors, paths
from gpusched.cli import gwait
from gpusched.client import DaemonConnection, connect, error_from

Start = Callable[..., FakeDaemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[FakeDaemon] = []

    def begin(answer: Callable[[str, str, Any], Answer], path: Path = tmp_path / "api.sock") -> FakeDaemon:
        running.append(FakeDaemon(path, answer))
        return running[-1]

    yield begin
    for daemon in running:
        daemon.close()


def test_the_last_job_is_waited_for_despite_later_submissions(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """`@` went to the daemon with each poll, and named another job as soon as there was one."""
    ended = {"id": "7", "state": "COMPLETED"}
    polls = iter([False, False, True])

    def answer(method: str, path: str, body: Any) -> Answer:
        return {"job": ended} if path == "/v1/jobs/@" else {"done": next(polls), "jobs": [ended]}

    daemon = start(answer)
    monkeypatch.setenv("GPUSCHED_SOCKET", str(daemon.path))
    assert gwait.body(["5", "@"]) == 0
    asked = [path.partition("&")[0] for _, path, _ in daemon.requests]
    assert asked == ["/v1/jobs/@", *["/v1/wait?ids=5,7"] * 3]


def test_one_connection_serves_many_calls_and_large_documents(start: Start) -> None:
    daemon = start(lambda method, path, body: {"path": path, "body": body, "blank": "x" * 3_000_000})
    with DaemonConnection(str(daemon.path)) as client:
        first = client.call("GET", "/v1/jobs?ids=1")
        assert (first["path"], first["body"], len(first["blank"])) == ("/v1/jobs?ids=1", None, 3_000_000)
        sent = {"name": "ü\udcff\n", "numbers": [1, 0.5, None]}
        assert client.call("POST", "/v1/jobs", sent)["body"] == sent
    assert (daemon.connections, [method for method, _, _ in daemon.requests]) == (1, ["GET", "POST"])


def test_an_answer_is_available_as_raw_bytes(start: Start) -> None:
    refusal = 404, {"error": {"message": "there is no job 7", "code": "not_found"}}
    daemon = start(lambda method, path, body: refusal if "7" in path else {"jobs": ["x" * 500_000]})
    with DaemonConnection(str(daemon.path)) as client:
        for _ in range(2):
            assert json.loads(client.raw("/v1/jobs")) == {"jobs": ["x" * 500_000]}
        with pytest.raises(errors.NotFound, match="there is no job 7"):
            client.raw("/v1/jobs?ids=7")
    assert daemon.connections == 1


@pytest.mark.parametrize(
    ("status", "code", "kind", "exit_code"),
    [
        (400, "usage", errors.UsageError, 2),
        (403, "forbidden", errors.Forbidden, 1),
        (404, "not_found", errors.NotFound, 1),
        (409, "refused", errors.Refused, 1),
        (503, "not_ready", errors.NotReady, 1),
        (503, "store_broken", errors.StoreBroken, 1),
        (507, "disk_full", errors.StoreFull, 1),
        (500, "bug", errors.BrokenInvariant, 1),
        (418, "news", errors.GpuschedError, 1),
    ],
)
def test_an_error_document_becomes_its_error(
    start: Start, status: int, code: str, kind: type[errors.GpuschedError], exit_code: int
) -> None:
    words = {"message": "no", "hint": "try yes", "code": code}
    daemon = start(lambda *_: (status, {"schema_version": 1, "error": words}))
    with DaemonConnection(str(daemon.path)) as client, pytest.raises(errors.GpuschedError) as raised:
        client.call("GET", "/v1/jobs")
    assert type(raised.value) is kind
    assert (raised.value.message, raised.value.hint, raised.value.exit_code) == ("no", "try yes", exit_code)


def test_an_error_without_text_is_still_an_error() -> None:
    assert type(error_from({})) is errors.GpuschedError


def test_reads_are_retried_silently_after_a_restart_but_changes_never(start: Start) -> None:
    lost: list[str] = []

    def answer(method: str, path: str, body: Any) -> Answer:
        if path == "/lost" and len(lost) < 1:
            lost.append(method)
            return None
        return {"ok": True}

    daemon = start(answer)
    with DaemonConnection(str(daemon.path)) as client:
        client.call("GET", "/first")
        assert client.call("GET", "/lost") == {"ok": True}
        lost.clear()
        with pytest.raises(ConnectionError):
            client.call("POST", "/lost", {})
        assert client.call("GET", "/after") == {"ok": True}
    assert [path for method, path, _ in daemon.requests if method == "POST"] == ["/lost"]


def test_a_partial_answer_is_discarded(start: Start) -> None:
    def answer(method: str, path: str, body: Any) -> Answer:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{" if path == "/half" else {"whole": True}

    daemon = start(answer)
    with DaemonConnection(str(daemon.path)) as client:
        with pytest.raises(ConnectionResetError):
            client.call("POST", "/half", {})
        assert client.call("GET", "/whole") == {"whole": True}


def test_a_silent_daemon_times_out(tmp_path: Path) -> None:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with DaemonConnection(str(path)) as client, pytest.raises(TimeoutError):
            client.call("GET", "/v1/jobs", timeout_s=0.05)


def test_a_path_longer_than_a_socket_address_works(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    start(lambda *_: {"ok": True}, Path("api.sock"))
    assert len(str(folder / "api.sock")) > 200
    with DaemonConnection(str(folder / "api.sock")) as client:
        assert client.call("GET", "/") == {"ok": True}


def test_a_missing_daemon_is_reported_with_the_path(tmp_path: Path) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    for path, why in ((stale, "refused"), (tmp_path / "none.sock", "No such file")):
        with pytest.raises(errors.DaemonUnreachable, match=why) as raised:
            DaemonConnection(str(path)).open()
        assert str(path) in raised.value.message


def test_a_chosen_socket_is_used_and_starts_no_daemon(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPUSCHED_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(errors.DaemonUnreachable):
        connect()
    daemon = start(lambda *_: {"ok": True})
    monkeypatch.setenv("GPUSCHED_SOCKET", os.path.relpath(daemon.path))
    with connect() as client:
        assert client.call("GET", "/") == {"ok": True}
    assert not (tmp_path / "home").exists()


def test_without_autostart_a_missing_daemon_is_only_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GPUSCHED_SOCKET", raising=False)
    with pytest.raises(errors.DaemonUnreachable):
        connect(autostart=False)
    assert not (tmp_path / "home").exists()


def test_the_system_daemon_precedes_the_personal_one_unless_a_home_is_chosen(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = start(lambda *_: {"who": "system"}, tmp_path / "system.sock")
    (tmp_path / "home" / "run").mkdir(parents=True)
    start(lambda *_: {"who": "personal"}, tmp_path / "home" / "run" / "api.sock")
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(system.path))
    monkeypatch.delenv("GPUSCHED_SOCKET", raising=False)
    monkeypatch.delenv("GPUSCHED_HOME", raising=False)
    with connect(autostart=False) as client:
        assert client.call("GET", "/") == {"who": "system"}
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))
    with connect(autostart=False) as client:
        assert client.call("GET", "/") == {"who": "personal"}
