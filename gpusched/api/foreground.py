"""Who is at a job in the foreground, and how long its lease lasts: asked of the run itself, when somebody asks."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from gpusched.api.service import Service
from gpusched.client import reach
from gpusched.engine import proctree
from gpusched.engine.frames import QUERY, STATUS, frame, take_frames
from gpusched.engine.spool import attach_path
from gpusched.model.job import Interactive, Job, run_id
from gpusched.model.states import JobState

ANSWER_S = 2.0
"""A supervisor answers within milliseconds, unless somebody has stopped it."""


async def foreground_json(job: Job, service: Service) -> dict[str, Any] | None:
    """For `gshow`; None for a job in the background. `client` is null also when nobody knows: see `is_known`."""
    spec = job.spec.interactive
    if spec is None:
        return None
    facts: dict[str, Any] = {
        "terminal": spec.pty,
        "keep": spec.keep,
        "lease_s": spec.lease_s,
        "client": None,
        "lease_ends_at": None,
        "is_known": True,
    }
    if job.state is JobState.PENDING:
        return {**facts, "client": _waiting(job, spec)}
    if job.state.is_final:
        return facts
    status = await _ask(attach_path(service.scheduler.site.spool, run_id(job.id, job.run)))
    if status is None:
        return {**facts, "is_known": False}
    pid, since_at, lease_ends_at = status
    if pid is not None:
        facts["client"] = {"pid": int(pid), "since_at": since_at}
    if job.state is not JobState.SUSPENDED:
        facts["lease_ends_at"] = lease_ends_at
    return facts


def _waiting(job: Job, spec: Interactive) -> dict[str, Any] | None:
    client = spec.client
    if client is None or not proctree.lives(client.pid, client.start_ticks):
        return None
    return {"pid": client.pid, "since_at": job.submit_at}


async def _ask(path: str) -> tuple[float | None, float | None, float | None] | None:
    """Pid of the client, since when it is there, when the lease ends; None without an answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            reach(sock, path)
            return await asyncio.wait_for(_converse(sock), ANSWER_S)
        except (OSError, ValueError, asyncio.TimeoutError):
            return None


async def _converse(sock: socket.socket) -> tuple[float | None, float | None, float | None] | None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, frame(QUERY))
    buffer = bytearray()
    while data := await loop.sock_recv(sock, 4096):
        buffer += data
        for kind, content in take_frames(buffer):
            if kind == STATUS:
                words = [None if word == b"-" else float(word) for word in content.split()[:3]]
                return words[0], words[1], words[2]
    return None
