"""A daemon of a few lines: answers over a Unix socket as it is told, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any] | tuple[int, dict[str, Any]] | bytes | None
"""A document (200), a status with one, raw bytes, or None: close the connection without a word."""


class FakeDaemon:
    """Serves one connection at a time in a thread of its own; `close` ends it."""

    def __init__(self, path: Path, answer: Callable[[str, str, Any], Answer]) -> None:
        self.path = path
        self.requests: list[tuple[str, str, Any]] = []
        self.connections = 0
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        # shutdown, not close alone: it wakes an accept that is under way.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=20)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection, connection.makefile("rb") as reader:
                while self._serve_one(connection, reader):
                    pass

    def _serve_one(self, connection: socket.socket, reader: Any) -> bool:
        line = reader.readline().decode()
        if not line:
            return False
        method, path, _ = line.split()
        length = 0
        while (header := reader.readline().decode().strip()) != "":
            name, _, value = header.partition(":")
            if name.lower() == "content-length":
                length = int(value)
        body = json.loads(reader.read(length)) if length else None
        self.requests.append((method, path, body))
        answer = self._answer(method, path, body)
        if answer is None:
            return False
        if isinstance(answer, bytes):
            connection.sendall(answer)
            return False
        status, document = answer if isinstance(answer, tuple) else (200, answer)
        content = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        # In two pieces: a client must not take the first for all of it.
        connection.sendall(head.encode() + content[:7])
        connection.sendall(content[7:])
        return True
