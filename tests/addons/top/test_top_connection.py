"""A task of gtop that asks the daemon ends when it is cancelled, whenever that happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpusched.addons.top import feed
from gpusched.addons.top.feed import TopConnection


@pytest.mark.parametrize("steps", range(6))
def test_an_answer_at_the_same_moment_does_not_undo_a_cancel(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """gtop waited for ever at its end for a task that had received the board and asked for the next."""

    async def story() -> None:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def call(self: TopConnection, method: str, path: str, body: object) -> dict[str, Any]:
            await answered
            return {}

        monkeypatch.setattr(TopConnection, "_call", call)
        task = asyncio.ensure_future(TopConnection("unused").call("GET", "/v1/board"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answered.set_result(None)
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert task.result() == {}

    asyncio.run(story())


def test_an_answer_that_does_not_come_closes_the_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(feed, "PATIENCE_S", 0.01)

    async def story() -> None:
        asked = asyncio.Event()

        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(swallow, tmp_path / "socket")
        connection = TopConnection(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="closed the connection"):
            await connection.call("GET", "/v1/board")
        await asked.wait()
        server.close()

    asyncio.run(story())
