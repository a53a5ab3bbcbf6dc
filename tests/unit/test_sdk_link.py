"""Connections of a program with threads: dropped by one, never under the request of another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpusched.sdk.link import Link

CONTENT = b'{"answer": 42}'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONTENT)


class Halting:
    """Answers each request with a first half, and with the second when it is let."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_amid = threading.Event()
        self.goes_on = threading.Event()
        self.taken = 0
        self.closed = threading.Semaphore(0)
        """Raised once for each connection whose other end has closed it."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.taken += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while connection.recv(65536):
                connection.sendall(HEAD[:10])
                self.is_amid.set()
                assert self.goes_on.wait(20)
                connection.sendall(HEAD[10:] + CONTENT)
            self.closed.release()

    def close(self) -> None:
        self.goes_on.set()
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Halting]:
    made = Halting(tmp_path / "s")
    yield made
    made.close()


def test_a_request_in_flight_is_answered_when_another_thread_closes(server: Halting) -> None:
    link = Link(str(server.path))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(link.call, "GET", "/v1/status")
        assert server.is_amid.wait(20)
        link.close()
        server.goes_on.set()
        assert under_way.result(20) == {"answer": 42}
        assert server.taken == 1
        assert server.closed.acquire(timeout=20), "it is closed once it was answered"


def test_a_request_after_close_makes_a_new_closable_connection(server: Halting) -> None:
    server.goes_on.set()
    link = Link(str(server.path))
    for taken in (1, 2, 3):
        assert link.call("GET", "/v1/status") == {"answer": 42}
        assert server.taken == taken
        link.close()
        assert server.closed.acquire(timeout=20)
