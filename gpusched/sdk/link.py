"""Connections of Python programs to one daemon: one per thread, reopened after a fork or a restart of the daemon."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gpusched import client as plain
from gpusched.errors import DaemonUnreachable, NotReady

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long repeatable requests tolerate an unreachable daemon."""
WAIT_S = 60.0
"""How long one request waits for something to happen."""
RECONNECT_S = 0.2


def unknown_effect(what: str) -> NotReady:
    """The error about a request whose answer was lost."""
    return NotReady(
        f"the daemon went away during {what}, which may or may not have taken effect",
        "look with client.jobs(); a submission with key= is safe to repeat",
    )


class Link:
    """Requests to one daemon. Thread-safe."""

    def __init__(self, socket_path: str | None = None, autostart: bool = True) -> None:
        self._socket_path = socket_path
        self._autostart = autostart
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._open: list[plain.DaemonConnection] = []
        self._busy: set[plain.DaemonConnection] = set()
        """Connections with a request in progress."""
        self._to_close: set[plain.DaemonConnection] = set()
        """Busy connections to close once the answer has arrived."""
        self._has_been_there = False

    def call(self, method: str, path: str, body: object = None, *, again: bool | None = None) -> dict[str, Any]:
        """Send one request. Requests without side effects are repeated if the daemon restarts meanwhile.

        Args: again: whether it may be repeated; by default only a GET.
        Raises: as gpusched.client.DaemonConnection.call; NotReady if it is unknown whether it was carried out.
        """
        may_repeat = method == "GET" if again is None else again
        return self._send(f"{method} {path}", may_repeat, lambda client: client.call(method, path, body))

    def raw(self, path: str) -> bytearray:
        """The bytes of the answer to a GET. Raises: as `call`."""
        return self._send(f"GET {path}", True, lambda client: client.raw(path))

    def _send(self, what: str, may_repeat: bool, send: Callable[[plain.DaemonConnection], T]) -> T:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                client = self._client()
            except NotReady:
                # A daemon that was never reached is not restarting.
                if not self._has_been_there or time.monotonic() > deadline:
                    raise
                time.sleep(RECONNECT_S)
                continue
            try:
                with self._in_use(client):
                    return send(client)
            except (DaemonUnreachable, ConnectionError) as error:
                self._drop()
                # If no daemon listens, nothing was sent yet.
                is_harmless = may_repeat or isinstance(error, DaemonUnreachable)
                if is_harmless and time.monotonic() < deadline:
                    time.sleep(RECONNECT_S)
                elif isinstance(error, DaemonUnreachable):
                    raise
                else:
                    raise unknown_effect(what) from error

    @property
    def wait_s(self) -> float:
        """How long one request may wait for something to happen."""
        return WAIT_S

    @property
    def blocking(self) -> Link:
        """The link for what blocks its thread, on both kinds of client."""
        return self

    def run(self, work: Callable[[], T]) -> T:
        """Do what may block for long."""
        return work()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    @property
    def socket_path(self) -> str:
        """The daemon's socket. Raises: DaemonUnreachable."""
        return self._client().socket_path

    def close(self) -> None:
        """Close all connections, busy ones once they are answered; the next request opens new ones."""
        with self._lock:
            self._to_close |= self._busy
            for client in self._open:
                if client not in self._busy:
                    client.close()
            self._open.clear()

    @contextmanager
    def _in_use(self, client: plain.DaemonConnection) -> Iterator[None]:
        """Keep other threads from closing the connection while this one uses it."""
        with self._lock:
            self._busy.add(client)
            if client not in self._open:
                # Closed by `close`; it reopens itself.
                self._open.append(client)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(client)
                if client in self._to_close:
                    self._to_close.discard(client)
                    client.close()

    def _client(self) -> plain.DaemonConnection:
        pid = os.getpid()
        client: plain.DaemonConnection | None = getattr(self._mine, "client", None)
        if client is None or self._mine.pid != pid:
            # The child of a fork must not use its parent's connection.
            client = self._connected()
            self._mine.client, self._mine.pid = client, pid
            self._has_been_there = True
            with self._lock:
                self._open.append(client)
        return client

    def _connected(self) -> plain.DaemonConnection:
        if self._socket_path is None:
            return plain.connect(self._autostart)
        client = plain.DaemonConnection(os.path.abspath(self._socket_path))
        client.open()
        return client

    def _drop(self) -> None:
        client: plain.DaemonConnection | None = getattr(self._mine, "client", None)
        if client is not None:
            self._mine.client = None
            client.close()
            with self._lock:
                if client in self._open:
                    self._open.remove(client)
