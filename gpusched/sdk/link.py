"""Connections to the daemon for a program with threads: one each, made anew after a fork or a restart."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpusched import client as plain
from gpusched.errors import DaemonUnreachable, NotReady

PATIENCE_S = 30.0
"""How long requests that may be repeated put up with a daemon that is away."""
_RECONNECT_S = 0.2


class Link:
    """Requests to one daemon, from any thread."""

    def __init__(self, socket_path: str | None = None, autostart: bool = True) -> None:
        self._socket_path = socket_path
        self._autostart = autostart
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._open: list[plain.Client] = []
        self._busy: set[plain.Client] = set()
        """On which an answer is awaited."""
        self._to_close: set[plain.Client] = set()
        """Of those, the ones that are closed as soon as the answer has come."""
        self._has_been_there = False

    def call(self, method: str, path: str, body: object = None, *, again: bool | None = None) -> dict[str, Any]:
        """One request. One that changes nothing is made again when the daemon is restarted under it.

        Args: again: whether it may be repeated; by default a GET may.
        Raises: as gpusched.client.Client.call; NotReady when it is not known whether it was carried out.
        """
        may_repeat = method == "GET" if again is None else again
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                client = self._client()
            except NotReady:
                # A daemon that was never there is not one that is restarted.
                if not self._has_been_there or time.monotonic() > deadline:
                    raise
                time.sleep(_RECONNECT_S)
                continue
            try:
                with self._in_use(client):
                    return client.call(method, path, body)
            except (DaemonUnreachable, ConnectionError) as error:
                self._drop()
                # When nobody listens, nothing has been asked for yet.
                is_harmless = may_repeat or isinstance(error, DaemonUnreachable)
                if is_harmless and time.monotonic() < deadline:
                    time.sleep(_RECONNECT_S)
                elif isinstance(error, DaemonUnreachable):
                    raise
                else:
                    raise NotReady(
                        f"the daemon went away under {method} {path}; it may have been carried out or not",
                        "look with client.jobs(); a submission with key= is safe to repeat",
                    ) from error

    @property
    def socket_path(self) -> str:
        """The daemon's socket. Raises: DaemonUnreachable."""
        return self._client().socket_path

    def close(self) -> None:
        """Drop all connections, those of requests under way once they are answered; the next request makes new ones."""
        with self._lock:
            self._to_close |= self._busy
            for client in self._open:
                if client not in self._busy:
                    client.close()
            self._open.clear()

    @contextmanager
    def _in_use(self, client: plain.Client) -> Iterator[None]:
        """Keep others from closing the connection under this thread."""
        with self._lock:
            self._busy.add(client)
            if client not in self._open:
                # It was dropped by `close`, and opens itself again.
                self._open.append(client)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(client)
                if client in self._to_close:
                    self._to_close.discard(client)
                    client.close()

    def _client(self) -> plain.Client:
        pid = os.getpid()
        client: plain.Client | None = getattr(self._mine, "client", None)
        if client is None or self._mine.pid != pid:
            # The child of a fork must not talk on its parent's connection.
            client = self._connected()
            self._mine.client, self._mine.pid = client, pid
            self._has_been_there = True
            with self._lock:
                self._open.append(client)
        return client

    def _connected(self) -> plain.Client:
        if self._socket_path is None:
            return plain.connect(self._autostart)
        client = plain.Client(os.path.abspath(self._socket_path))
        client.open()
        return client

    def _drop(self) -> None:
        client: plain.Client | None = getattr(self._mine, "client", None)
        if client is not None:
            self._mine.client = None
            client.close()
            with self._lock:
                if client in self._open:
                    self._open.remove(client)
