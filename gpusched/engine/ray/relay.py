"""The detached actor on each node: starts the node's agent and passes its streams on.

Its code travels from the head by value, so it needs nothing of the node's gpusched, which may be another version: the
agent that it starts says so itself. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from typing import IO

RELAY_VERSION = 1
"""Part of the actor's name: a new one does not find the old code."""
AGENT_VARIABLE = "GPUSCHED_AGENT"
CHUNK_BYTES = 1 << 16
"""At most this much travels in one call: Ray then needs no shared memory for it."""
_TAIL_BYTES = 2000
_END_S = 2.0
# Set by Ray for its own workers; the agent and its children are none.
_OF_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", AGENT_VARIABLE)


class AgentRelay:
    """One connection at a time; a new one ends the one before."""

    def __init__(self) -> None:
        self._connection = ""
        self._child: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] | None = None
        self._changing = asyncio.Lock()

    async def open(self, connection: str) -> int:
        """Start an agent for this connection; returns its pid."""
        async with self._changing:
            await self._end()
            return await self._start(connection)

    async def _start(self, connection: str) -> int:
        command = json.loads(os.environ[AGENT_VARIABLE])
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key not in _OF_RAY}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the child
        self._child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            env=kept,
            cwd="/",
            start_new_session=True,
        )
        self._connection = connection
        return self._child.pid

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
        return b"", f"the agent ended with {code}{self._last_words()}"

    async def close(self, connection: str) -> None:
        """End the agent of this connection, if there is no newer one; its runs go on."""
        async with self._changing:
            if connection == self._connection:
                await self._end()

    def _of(self, connection: str) -> asyncio.subprocess.Process:
        if connection != self._connection or self._child is None:
            raise ConnectionError("another connection has taken over")
        return self._child

    async def _end(self) -> None:
        child, self._child, self._connection = self._child, None, ""
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _END_S)
        except asyncio.TimeoutError:
            # It may be killed at any moment; the next one goes on from its journal.
            child.kill()
            await child.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
        words = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {words[-1][:200]}" if words else ""
