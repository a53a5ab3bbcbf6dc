"""The detached actor on each node: starts the node's agent, with a stream of its own to the bridge.

A call through Ray costs two milliseconds of CPU time, however little it carries. So calls open a stream and wait for
its end, and the bytes go directly: the bridge connects to a port of this machine with the secret that it passed in a
call, and the agent gets that socket. Where there is no way to the port, the bytes go in calls.

Its code travels from the head by value, so it needs nothing of the node's gpusched, which may be another version: the
agent that it starts says so itself. Standard library only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
import tempfile
import time
from typing import IO

RELAY_VERSION = 3
"""Part of the actor's name: a new one does not find the old code."""
AGENT_VARIABLE = "GPUSCHED_AGENT"
"""The command of the node's agent as a JSON list, in the environment of its raylet and so of its relay."""
STREAM_VARIABLE = "GPUSCHED_AGENT_STREAM"
"""Address and ports to listen on for streams, in the environment of the raylet."""
SECRET_BYTES = 32
CHUNK_BYTES = 1 << 16
"""At most this much travels in one call: Ray then needs no shared memory for it."""
_TAIL_BYTES = 2000
_FRESH_S = 5.0
"""What the agent wrote this long before its end is not why it ended."""
_END_S = 2.0
_CONNECT_S = 10.0
"""How long a port is open for a stream."""
_SECRET_S = 2.0
# Set by Ray for its own workers; the agent and its children are none.
_OF_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", AGENT_VARIABLE, STREAM_VARIABLE)


class AgentRelay:
    """One connection at a time; a new one ends the one before."""

    def __init__(self) -> None:
        self._connection = ""
        self._child: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None
        self._changing = asyncio.Lock()
        self._stream: socket.socket | None = None
        """That of the agent, if it has one."""
        self._admitting: asyncio.Task[None] | None = None

    async def listen(self, connection: str, secret: bytes) -> int:
        """Await the stream of this connection, which begins with its secret; returns the port, 0 if there is none."""
        async with self._changing:
            await self._end()
            listener = _listener()
            if listener is None:
                return 0
            self._connection = connection
            self._admitting = asyncio.create_task(self._admit(listener, secret))
            port: int = listener.getsockname()[1]
            return port

    async def serve(self, connection: str) -> int:
        """Wait until the stream of this connection has an agent; returns its pid. Raises: ConnectionError."""
        if connection == self._connection and self._admitting is not None:
            await asyncio.wait([self._admitting])
        return self._of(connection).pid

    async def ended(self, connection: str) -> str:
        """Wait for the end of the agent; a sentence about it."""
        child = self._of(connection)
        code = await child.wait()
        return f"the agent ended with {code}{self._last_words(code)}"

    async def open(self, connection: str) -> int:
        """Start an agent for this connection, whose bytes go in calls; returns its pid."""
        async with self._changing:
            await self._end()
            await self._start(asyncio.subprocess.PIPE)
            self._connection = connection
            return self._of(connection).pid

    async def _admit(self, listener: socket.socket, secret: bytes) -> None:
        """Give the first stream that knows the secret to an agent."""
        try:
            stream = await asyncio.wait_for(_accept(listener, secret), _CONNECT_S)
        except (OSError, asyncio.TimeoutError):
            return
        finally:
            listener.close()
        # The agent reads it as a pipe.
        stream.setblocking(True)
        try:
            await self._start(stream.fileno())
        except BaseException:
            stream.close()
            raise
        self._stream = stream

    async def _start(self, stream: int) -> None:
        """Start an agent. Args: stream: its standard input and output."""
        command = json.loads(os.environ[AGENT_VARIABLE])
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key not in _OF_RAY}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the child
        self._child = await asyncio.create_subprocess_exec(
            *command,
            stdin=stream,
            stdout=stream,
            stderr=self._errors,
            env=kept,
            cwd="/",
            start_new_session=True,
        )

    async def write(self, connection: str, data: bytes) -> None:
        """Pass data to the agent; calls of a connection must not overlap."""
        child = self._of(connection)
        assert child.stdin is not None
        child.stdin.write(data)
        await child.stdin.drain()

    async def read(self, connection: str) -> tuple[bytes, str | None]:
        """Wait for data of the agent; at its end a sentence about it."""
        child = self._of(connection)
        assert child.stdout is not None
        data = await child.stdout.read(CHUNK_BYTES)
        if data:
            return data, None
        code = await child.wait()
        return b"", f"the agent ended with {code}{self._last_words(code)}"

    async def close(self, connection: str) -> None:
        """End the agent of this connection, if there is no newer one; its runs continue."""
        async with self._changing:
            if connection == self._connection:
                await self._end()

    def _of(self, connection: str) -> asyncio.subprocess.Process:
        if connection != self._connection or self._child is None:
            raise ConnectionError("another connection has taken over")
        return self._child

    async def _end(self) -> None:
        self._connection = ""
        admitting, self._admitting = self._admitting, None
        if admitting is not None:
            admitting.cancel()
            await asyncio.wait([admitting])
        child, self._child = self._child, None
        stream, self._stream = self._stream, None
        if child is None:
            return
        if stream is not None:
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # its other end is gone
        if child.stdin is not None:
            child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _END_S)
        except asyncio.TimeoutError:
            # It may be killed at any moment; the next one continues from its journal.
            child.kill()
            await child.wait()
        if stream is not None:
            stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _last_words(self, code: int) -> str:
        """The last line that may say why the agent ended. What was killed could say nothing about it."""
        if self._errors is None or code == -signal.SIGKILL:
            return ""
        if time.time() - os.fstat(self._errors.fileno()).st_mtime > _FRESH_S:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
        words = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {words[-1][:200]}" if words else ""


def _listener() -> socket.socket | None:
    """A port of this machine that is free, of those for streams."""
    address, *ports = json.loads(os.environ.get(STREAM_VARIABLE, '[""]'))
    for port in ports:
        try:
            listener = socket.create_server((address, port))
        except OSError:
            continue
        listener.setblocking(False)
        return listener
    return None


async def _accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """The first stream that begins with the secret."""
    loop = asyncio.get_running_loop()
    while True:
        stream, _ = await loop.sock_accept(listener)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hmac.compare_digest(await asyncio.wait_for(_first(stream, len(secret)), _SECRET_S), secret):
                return stream
        except (OSError, asyncio.TimeoutError):
            pass
        except BaseException:
            stream.close()
            raise
        stream.close()


async def _first(stream: socket.socket, size: int) -> bytes:
    """The first bytes of a stream; fewer at its end."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size and (more := await loop.sock_recv(stream, size - len(data))):
        data += more
    return data
