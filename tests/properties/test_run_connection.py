"""A client's connection to a visit, broken at every byte of either way: nothing is lost, doubled or begun twice."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import wait_until

from gpusched.cli import run_connection
from gpusched.cli.run_connection import BACK, LOST, OVER, RunConnection, Way, way_of
from gpusched.engine.attach_protocol import ERR, EXIT, GONE, OUT, WELCOME, Wanted, frame
from gpusched.engine.supervisor.visits import FACTS, VisitSession
from gpusched.errors import NotReady

WANTED = Wanted(["x"], {}, is_terminal=False, umask=0o22, work_dir="")
TYPED = b"typed into it"
TICKET: dict[str, Any] = {
    "run": "1.1",
    "uid": os.geteuid(),
    "log_mib": 1,
}
OK = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


class Host(threading.Thread):
    """The host of a visit whose command says what it was told."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = str(folder / "1.1.door-0a")
        self.starts = 0
        self._session = VisitSession(TICKET, FACTS, str(folder), "boot", lambda: 0.0, self.path)

    def run(self) -> None:
        session = self._session
        while not session.was_entered:
            session.wait(0.02)
        streams, got = session.open_streams(), b""
        self.starts += 1
        taken, out, err = streams._theirs
        streams._theirs = []
        os.set_blocking(taken, False)
        while True:
            session.wait(0.002)
            try:
                piece = os.read(taken, 65536)
            except BlockingIOError:
                continue
            if not piece:
                break
            got += piece
        os.write(out, b"got " + got)
        os.write(err, b"bad")
        for fd in (taken, out, err):
            os.close(fd)
        session.drain()
        session.farewell((3, None), None, None, time.monotonic() + 5)
        session.close()
        session.listener.close()
        os.close(session.wake_fd)
        os.close(session.wake_in)


class Relay:
    """The way between: a daemon that upgrades, and breaks once after so many bytes of a direction. -1: never."""

    def __init__(self, folder: Path, door: str, cut: tuple[str, int]) -> None:
        self.path, self._door = str(folder / "api.sock"), door
        self._cut: tuple[str, int] | None = cut
        self._passed = {"up": 0, "down": 0}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._left: set[socket.socket] = set()
        """Clients that have ended what they send."""
        self._heads: dict[socket.socket, bytes] = {}
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.targets: list[str] = []
        self.is_silent = False
        """Nothing gets through, and nobody hears of it."""

    def step(self) -> None:
        if self.is_silent:
            return
        try:
            client, _ = self._listener.accept()
            client.setblocking(False)
            self._heads[client] = b""
        except BlockingIOError:
            pass
        for client in list(self._heads):
            try:
                self._heads[client] += client.recv(65536)
            except BlockingIOError:
                continue
            if self._heads[client].endswith(b"\r\n\r\n"):
                self.targets.append(self._heads.pop(client).split()[1].decode())
                host = socket.socket(socket.AF_UNIX)
                host.connect(self._door)
                host.setblocking(False)
                client.sendall(OK)
                self._pairs.append((client, host))
        for client, host in list(self._pairs):
            is_up = self._copy("up", client, host) if client not in self._left else True
            if not (is_up and self._copy("down", host, client)):
                self._pairs.remove((client, host))
                client.close()
                host.close()

    def _copy(self, way: str, source: socket.socket, to: socket.socket) -> bool:
        left = 65536
        if self._cut is not None and self._cut[0] == way:
            left = self._cut[1] - self._passed[way]
            if left <= 0:
                self._cut = None
                return False
        try:
            data = source.recv(left)
            self._passed[way] += len(data)
            to.sendall(data)
        except BlockingIOError:
            return True
        except ConnectionError:
            if to in self._left:
                # Nobody is there to read it, as the relay of the daemon knows.
                return True
            data = b""
        if not data and way == "up":
            # The client has left, which is not the same as a break.
            to.shutdown(socket.SHUT_WR)
            self._left.add(source)
            return True
        return bool(data)

    def close(self) -> None:
        self._listener.close()
        for sock in (*self._heads, *(one for pair in self._pairs for one in pair)):
            sock.close()


def drive(connection: RunConnection, step: Callable[[], None], timeout_s: float = 20) -> dict[int, bytes]:
    """Type, and gather all events by kind until the connection is over."""
    found: dict[int, bytes] = {}
    typed, until = bytearray(TYPED), time.monotonic() + timeout_s
    while connection.is_open:
        assert time.monotonic() < until, found
        step()
        poll = select.poll()
        if connection.fileno() >= 0:
            poll.register(connection.fileno(), connection.events)
        ready = poll.poll(min(1.0, connection.pause_ms() or 1.0))
        for kind, content in connection.on_ready(ready[0][1] if ready else 0):
            found[kind] = found.get(kind, b"") + content
            if kind in (OUT, ERR):
                connection.acknowledge(kind, len(content))
        if WELCOME in found and typed:
            # Byte by byte, so that many frames are under way.
            connection.send_input(bytes(typed[:1]))
            del typed[:1]
            if not typed:
                connection.end_input()
    return found


def through(folder: Path, cut: tuple[str, int]) -> tuple[dict[int, bytes], Relay, Host]:
    host = Host(folder)
    relay = Relay(folder, host.path, cut)
    host.start()
    connection = RunConnection(Way(relay.path, "/v1/jobs/1/connect?run=1.1", "n3"), WANTED)
    try:
        found = drive(connection, relay.step)
        connection.close()
    finally:
        until = time.monotonic() + 20
        while host.is_alive() and time.monotonic() < until:
            relay.step()
            host.join(0.005)
        relay.close()
    assert connection.end.code == 3
    return found, relay, host


def folders(parent: Path) -> Iterator[Path]:
    for number in range(10**6):
        folder = parent / str(number)
        folder.mkdir()
        yield folder


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_break_at_any_byte_loses_and_doubles_nothing(tmp_path: Path, way: str, apart: int) -> None:
    made = folders(tmp_path)
    found, relay, _ = through(next(made), (way, 10**9))
    assert LOST not in found
    whole = relay._passed[way]
    assert whole > 100
    for position in range(1, whole, apart):
        found, relay, host = through(next(made), (way, position))
        assert (found[OUT], found[ERR]) == (b"got " + TYPED, b"bad"), position
        assert found[EXIT] == b"3 - - .\n", position
        assert (found[WELCOME], host.starts) == (b"pipes", 1), position
        # The end of what is sent may be cut behind its last byte.
        assert (LOST in found) == (BACK in found) == (len(relay.targets) == 2), position


@pytest.mark.parametrize("tries", [0, 3])
def test_a_silence_loses_nothing_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int) -> None:
    """Args: tries: how many other connections fall silent as well before all of them are heard again."""
    monkeypatch.setattr(run_connection, "SILENCE_S", 0.05)
    monkeypatch.setattr(run_connection, "ANSWER_S", 0.1)
    host = Host(tmp_path)
    relay = Relay(tmp_path, host.path, ("up", 10**9))
    host.start()
    connection = RunConnection(Way(relay.path, "/v1/jobs/1/connect?run=1.1", "n3"), WANTED)
    try:
        wait_until(lambda: (relay.step(), WELCOME in dict(connection.on_ready(select.POLLIN)))[1], what="a welcome")
        for count in range(1 + tries):
            relay.is_silent = True
            wait_until(lambda: LOST in dict(connection.on_ready(select.POLLIN)), what="the silence to be noticed")
            # What fell silent is heard from time to time, always too late.
            relay.is_silent = False
            if count < tries:
                wait_until(
                    lambda: (relay.step(), BACK in dict(connection.on_ready(select.POLLIN)))[1], what="to be back"
                )
        connection.send_input(TYPED)
        connection.end_input()
        found = drive(connection, relay.step)
        connection.close()
    finally:
        until = time.monotonic() + 20
        while host.is_alive() and time.monotonic() < until:
            relay.step()
            host.join(0.005)
        relay.close()
    assert (found[OUT], found[ERR], host.starts) == (b"got " + TYPED, b"bad", 1)
    assert connection.end.code == 3


def answering(path: Path, answer: bytes) -> threading.Thread:
    """A daemon that gives this answer to each connection until the test is over."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener:
            listener.settimeout(5)
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.settimeout(5)
                    sock.recv(65536)
                    sock.sendall(answer)
                    # Until the client has read it.
                    while sock.recv(65536):
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def far(path: Path) -> Way:
    door = {"job": "1", "run": "1.1", "node": "n3", "token": "0a", "path": None}
    return way_of(door, str(path))


def document(status: str, **words: str) -> bytes:
    body = json.dumps({"error": words}).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_what_the_daemon_refuses_ends_the_connection_with_its_sentence(tmp_path: Path) -> None:
    answer = document("503 x", code="not_ready", message="node n3 does not answer", hint="see: ginfo")
    answering(tmp_path / "api", answer)
    connection = RunConnection(far(tmp_path / "api"), WANTED)
    assert drive(connection, lambda: None) == {OVER: b"node n3 does not answer"}
    assert isinstance(connection.error, NotReady)
    assert connection.error.hint == "see: ginfo"
    assert not connection.was_there


def test_a_door_where_nobody_listens_is_over(tmp_path: Path) -> None:
    answering(tmp_path / "api", OK + frame(GONE))
    connection = RunConnection(far(tmp_path / "api"), WANTED)
    assert drive(connection, lambda: None) == {OVER: b""}
    assert connection.fileno() == -1


def test_the_search_for_a_way_back_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_connection, "RETURN_S", 0.3)
    ours, theirs = socket.socketpair()
    connection = RunConnection(far(tmp_path / "nobody"), WANTED, sock=ours)
    theirs.sendall(frame(WELCOME, b"1.1 pipes 0a"))
    theirs.close()
    found = drive(connection, lambda: None)
    assert connection.end.gave_up
    assert LOST in found
    assert BACK not in found


def test_time_for_which_the_client_was_stopped_is_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_connection, "RETURN_S", 0.5)
    monkeypatch.setattr(run_connection, "STOOD_STILL_S", 0.6)
    ours, theirs = socket.socketpair()
    connection = RunConnection(far(tmp_path / "nobody"), WANTED, sock=ours)
    theirs.sendall(frame(WELCOME, b"1.1 pipes 0a"))
    theirs.close()
    wait_until(lambda: LOST in dict(connection.on_ready(select.POLLIN)), what="the connection to be lost")
    # As if its job had been suspended.
    time.sleep(1.2)
    assert OVER not in dict(connection.on_ready(0))
    assert OVER in drive(connection, lambda: None)
    assert connection.end.gave_up


def test_the_place_of_a_client_is_kept_while_the_job_stands_still(tmp_path: Path) -> None:
    """What was started for it stands still, and so does a client in the same job."""
    session = VisitSession(TICKET, FACTS, str(tmp_path), "boot", lambda: 0.0, str(tmp_path / "1.1.door-0a"))
    with subprocess.Popen(["sleep", "100"]) as first:
        session.first_pid = first.pid
        first.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        now = time.monotonic()
        session.return_until = now - 1.0
        session.act(now)
        assert session.orders == []
        assert session.return_until > now + 60.0
        first.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, first.pid, os.WCONTINUED)
        session.act(session.return_until)
        assert session.orders == ["stop client_lost 1 - ."]
        first.kill()
    session.close()
    session.listener.close()


def test_it_imports_nothing_slow() -> None:
    code = "import sys; from gpusched.cli import run_connection; print(' '.join(sys.modules))"
    root = Path(run_connection.__file__).parents[2]
    words = [sys.executable, "-ISc", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"]
    loaded = set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"re", "json", "typing", "dataclasses", "socket", "enum", "subprocess", "msgspec", "logging"}
