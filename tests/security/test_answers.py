"""Answers that a user asks for, and does not take in or has to be thought about: they are bounded."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest
from aiohttp import web
from lab import Lab

from gpusched.api import server
from gpusched.api.server import build_app, gate_for
from gpusched.api.service import MOST_QUESTIONS, Service
from gpusched.daemon.access import Caller
from gpusched.errors import TooMany

ASKED = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.filterwarnings("ignore")  # of aiohttp's, about keys
def test_answers_that_nobody_takes_in_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_PER_USER", 1 << 20)
    # Whoever runs the tests is the daemon's own user, who is not counted.
    monkeypatch.setattr(server, "is_root", lambda caller: False)
    path = str(tmp_path / "api.sock")

    async def ask() -> tuple[list[bytes], int]:
        app = build_app(Service(Lab().scheduler, wake=lambda: None, stop=lambda: None, facts={}))
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        gate = gate_for(app, runner)
        listener = await asyncio.get_running_loop().create_unix_server(gate, path)
        held = []
        for _ in range(60):
            sock = socket.socket(socket.AF_UNIX)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(path)
            sock.setblocking(False)
            sock.sendall(ASKED * 8)
            held.append(sock)
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        said = [await loop.sock_recv(sock, 4096) for sock in held]
        unread = gate.unread_of(os.getuid())
        for sock in held:
            sock.close()
        listener.close()
        await runner.cleanup()
        return said, unread

    said, unread = asyncio.run(ask())
    heads = [answer.split(b"\r\n")[0] for answer in said]
    assert heads.count(b"HTTP/1.1 200 OK") > 2
    assert heads.count(b"HTTP/1.1 429 Too Many Requests") > 2
    assert unread <= 1 << 20
    assert any(b"are not taken in" in answer for answer in said)


def test_questions_that_take_long_are_bounded() -> None:
    service = Service(Lab().scheduler, wake=lambda: None, stop=lambda: None, facts={})
    ann, bob = Caller(4242, "ann"), Caller(4243, "bob")
    done = threading.Event()

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(service.work_out(done.wait, ann)) for _ in range(MOST_QUESTIONS)]
        await asyncio.sleep(0)
        with pytest.raises(TooMany, match=f"ann has {MOST_QUESTIONS} questions about what is to come open"):
            await service.work_out(done.wait, ann)
        other = loop.create_task(service.work_out(done.wait, bob))
        await asyncio.sleep(0)
        done.set()
        assert await asyncio.gather(*asked, other) == [True] * (MOST_QUESTIONS + 1)
        assert await service.work_out(done.wait, ann)
        assert service.thinking == {}

    try:
        asyncio.run(ask())
    finally:
        service.thinker.shutdown()
