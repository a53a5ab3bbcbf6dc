"""A feed of the caller's jobs that end, for programs that wait for many of them with one open request.

A client asks once for a cursor, submits, and then asks for what has ended after the cursor. The feed is memory
alone: after a restart, or for a client that was away for too long, `missed` tells it to look at its jobs itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from aiohttp import web

from gpusched.api.identity import caller_of
from gpusched.api.jobs import MAX_WAIT_S, respond
from gpusched.api.service import number, service_of
from gpusched.model.job import Job

KEPT = 100_000
"""How many ends are remembered."""
_MOST = 5000
"""Ends in one answer."""


class Feed:
    """Ids of jobs in the order of their ends, numbered without gaps."""

    def __init__(self, kept: int = KEPT) -> None:
        self.token = f"{os.getpid():x}-{time.time_ns():x}"
        """Tells this feed from that of the daemon before."""
        self._ids: deque[int] = deque(maxlen=kept)
        self._last = 0
        self._news = asyncio.Event()

    def cursor(self, behind: int = 0) -> str:
        """Where the feed is now, or so many ends before."""
        return f"{self.token}.{self._last - behind}"

    def announce(self, job_ids: Iterable[int], active: Mapping[int, object]) -> None:
        """Take in the jobs whose row has changed; those that are no longer active have ended."""
        ended = [job_id for job_id in job_ids if job_id not in active]
        if ended:
            self._ids.extend(ended)
            self._last += len(ended)
            self._news.set()

    def after(self, cursor: str) -> list[int] | None:
        """Ids that ended after a cursor, oldest first; None when that is no longer known."""
        token, _, text = cursor.rpartition(".")
        if token != self.token or not (text.isascii() and text.isdigit()):
            return None
        missing = self._last - int(text)
        if not 0 <= missing <= len(self._ids):
            return None
        return list(islice(reversed(self._ids), missing))[::-1]

    async def wait(self, timeout_s: float) -> None:
        """Return when something has ended since the last call, or after the timeout."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except asyncio.TimeoutError:
            pass  # the caller looks again either way


FEED: web.AppKey[Feed] = web.AppKey("feed", Feed)


async def ended(request: web.Request) -> web.Response:
    """GET /v1/ended"""
    service, caller, feed = service_of(request), caller_of(request), request.app[FEED]
    after = request.query.get("after")
    timeout_s = number(request, "timeout_s", 30.0, 0, MAX_WAIT_S) or 0.0
    if after is None:
        return respond(cursor=feed.cursor(), missed=False, jobs=[])
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        ids = feed.after(after)
        if ids is None:
            return respond(cursor=feed.cursor(), missed=True, jobs=[])
        found = service.find_all(ids[:_MOST])
        jobs = [found[job_id] for job_id in ids[:_MOST] if job_id in found and found[job_id].uid == caller.uid]
        left_s = deadline - loop.time()
        if jobs or left_s <= 0:
            return respond(cursor=feed.cursor(len(ids[_MOST:])), missed=False, jobs=[_outcome(job) for job in jobs])
        # Others' ends need not be looked at again.
        after = feed.cursor(len(ids[_MOST:]))
        if not ids[_MOST:]:
            await feed.wait(left_s)


def _outcome(job: Job) -> dict[str, Any]:
    return {
        "id": job.shown_id,
        "state": job.state.value,
        "exit_code": job.exit_code,
        "signal": job.signal,
        "run": job.run,
        "reason": job.reason and str(job.reason),
        "reason_text": job.reason_text,
    }
