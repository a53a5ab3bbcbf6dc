"""A feed of the caller's ended jobs, for programs that wait for many with one open request.

A client fetches a cursor, submits, and then requests the ends after the cursor. The feed is kept in memory only: after
a restart, or for a client that was away for too long, `missed` says that it must check its jobs itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated

from aiohttp import web

from gpusched.api.asked import RequestQuery, Timeout, about
from gpusched.api.requests import respond
from gpusched.api.visibility import Viewer
from gpusched.model.job import Job
from gpusched.model.units import is_digits

KEPT = 100_000
"""Ends remembered for each user."""
_MOST = 5000
"""Ends in one answer."""


class CompletionFeed:
    """Ends of jobs, kept per user: a cursor must not reveal how many jobs other users have."""

    def __init__(self) -> None:
        self._token = f"{os.getpid():x}-{time.time_ns():x}"
        self._of: dict[int, UserCompletions] = {}

    def of(self, uid: int) -> UserCompletions:
        return self._of.setdefault(uid, UserCompletions(self._token))

    def of_all(self, uids: Iterable[int]) -> UsersCompletions:
        return UsersCompletions(tuple(self.of(uid) for uid in sorted(set(uids))))

    def announce(self, jobs: Mapping[int, Job], active: Mapping[int, object]) -> None:
        """Record jobs whose row has changed; those that are no longer active have ended."""
        ended: dict[int, list[int]] = {}
        for job_id, job in jobs.items():
            if job_id not in active:
                ended.setdefault(job.uid, []).append(job_id)
        for uid, ids in ended.items():
            self.of(uid).add(ids)


class UserCompletions:
    """Ids of one user's jobs in the order of their ends, numbered without gaps."""

    def __init__(self, token: str, kept: int = KEPT) -> None:
        self.token = token
        """Distinguishes this feed from that of an earlier daemon."""
        self._ids: deque[int] = deque(maxlen=kept)
        self._last = 0
        self._news = asyncio.Event()

    def cursor(self, behind: int = 0) -> str:
        """The current position of the feed, or the position `behind` ends earlier."""
        return f"{self.token}.{self._last - behind}"

    def add(self, ended: Sequence[int]) -> None:
        self._ids.extend(ended)
        self._last += len(ended)
        self._news.set()

    def after(self, cursor: str) -> list[int] | None:
        """Ids that ended after a cursor, oldest first; None if the cursor is too old or unknown."""
        token, _, text = cursor.rpartition(".")
        if token != self.token or not is_digits(text):
            return None
        missing = self._last - int(text)
        if not 0 <= missing <= len(self._ids):
            return None
        return list(islice(reversed(self._ids), missing))[::-1]

    async def wait(self, timeout_s: float) -> None:
        """Block until a job ends or the timeout expires."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except asyncio.TimeoutError:
            pass  # the caller checks again anyway


class UsersCompletions:
    """Ends of several users' jobs, for callers who may read them all; its cursor has one position per user."""

    def __init__(self, parts: tuple[UserCompletions, ...]) -> None:
        self._parts = parts

    def cursor(self) -> str:
        return ",".join(part.cursor() for part in self._parts)

    def after(self, cursor: str) -> list[int] | None:
        """Ids that ended after a cursor, oldest first for each user; None if the cursor is too old or unknown."""
        texts = cursor.split(",")
        if len(texts) != len(self._parts):
            return None
        found: list[int] = []
        for part, text in zip(self._parts, texts, strict=True):
            ended = part.after(text)
            if ended is None:
                return None
            found += ended
        return found


FEED: web.AppKey[CompletionFeed] = web.AppKey("feed", CompletionFeed)


class EndedQuery(RequestQuery):
    after: Annotated[str | None, about("the cursor of an earlier answer")] = None
    timeout_s: Timeout = 30.0


async def ended(viewer: Viewer, query: EndedQuery, request: web.Request) -> web.Response:
    """The caller's jobs that end after a cursor, as they end; without one, the current cursor."""
    service = viewer.service
    caller = viewer.caller
    feed = request.app[FEED].of(caller.uid)
    after = query.after
    if after is None:
        return respond(cursor=feed.cursor(), missed=False, jobs=[])
    loop = asyncio.get_running_loop()
    deadline = loop.time() + query.timeout_s
    while True:
        ids = feed.after(after)
        if ids is None:
            return respond(cursor=feed.cursor(), missed=True, jobs=[])
        found = service.find_all(ids[:_MOST])
        jobs = [found[job_id] for job_id in ids[:_MOST] if job_id in found and found[job_id].uid == caller.uid]
        left_s = deadline - loop.time()
        if jobs or left_s <= 0:
            return respond(
                cursor=feed.cursor(len(ids[_MOST:])), missed=False, jobs=[viewer.outcome(job) for job in jobs]
            )
        # Ends of other jobs need not be checked again.
        after = feed.cursor(len(ids[_MOST:]))
        if not ids[_MOST:]:
            await feed.wait(left_s)
