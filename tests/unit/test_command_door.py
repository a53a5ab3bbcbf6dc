"""Sockets of an agent and of its head that lead to the other machine."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from support import wait_until

from gpusched.engine.remote.agent_server import AgentServer
from gpusched.engine.remote.channel import StreamChannel
from gpusched.engine.remote.command_door import MOST_PER_USER, CommandDoor
from gpusched.engine.remote.streams import StreamMux


class NoAgent:
    """Answers nothing."""

    def set_waker(self, wake: object) -> None:
        pass

    def run_of(self, pid: int) -> str | None:
        return None


def test_an_agent_that_cannot_make_its_socket_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = socket.socketpair()
    agent: Any = NoAgent()

    async def serve() -> None:
        channel = StreamChannel(there)
        server = AgentServer(agent, channel, socket=str(tmp_path / "missing" / "api.sock"))
        task = asyncio.create_task(server.serve())
        await asyncio.sleep(0)
        assert not task.done()
        here.close()
        await task
        channel.close()

    asyncio.run(serve())
    assert "programs of jobs cannot reach the daemon" in caplog.text


def test_a_command_door_has_a_limit_for_each_user(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")

    async def knock() -> None:
        mux = StreamMux(lambda frame: None, is_head=False)
        door = CommandDoor(path, mux, serves_all=False, run_of=lambda pid: "1.1")
        clients = []
        for _ in range(MOST_PER_USER + 1):
            client = socket.socket(socket.AF_UNIX)
            client.connect(path)
            client.setblocking(False)
            clients.append(client)
            await asyncio.sleep(0)
        while len(mux._streams) < MOST_PER_USER:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(clients[-1], 1), 10)
        assert len(mux._streams) == MOST_PER_USER
        for stream in list(mux._streams.values()):
            stream.break_off()
        for client in clients:
            client.close()
        door.close()

    asyncio.run(knock())
    wait_until(lambda: not os.path.exists(path), what="the socket to be gone")
