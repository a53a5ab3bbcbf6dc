"""Connections of asyncio programs to one daemon, the counterpart of `gpusched.sdk.link`.

One connection a request: a request that is cancelled closes its own, and no other sees a part of its answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp

from gpusched import client as plain
from gpusched import errors, quickjson
from gpusched.errors import DaemonUnreachable, NotReady
from gpusched.sdk.link import PATIENCE_S, RECONNECT_S, WAIT_S, Link, unknown_effect

T = TypeVar("T")

MOST_WAITS, MOST_OTHERS = 80, 20
"""Connections at the same time, of requests that wait for something and of others, which no wait keeps waiting.

Together fewer than one user may have open at the daemon, [limit] connections_per_user.
"""
_CROWDED_S = 2.0
_LONG_PATH = 100


class AsyncLink:
    """Requests to one daemon, in one event loop."""

    def __init__(self, socket_path: str | None = None, autostart: bool = True) -> None:
        self.blocking = Link(socket_path, autostart)
        self._http: aiohttp.ClientSession | None = None
        self._folder: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits, self._others = asyncio.Semaphore(MOST_WAITS), asyncio.Semaphore(MOST_OTHERS)
        """Places for connections; waiters are served in turn."""
        self._open = 0
        """Requests in progress that wait for something."""
        self._has_been_there = False
        self._is_lost = False
        """The socket was found closed: look for the daemon, and start a personal one, before the next request."""
        self._path = ""

    @property
    def wait_s(self) -> float:
        """How long one request may wait for something to happen: less while others wait for a connection."""
        return WAIT_S if self._open < MOST_WAITS // 2 else _CROWDED_S

    async def call(self, method: str, path: str, body: object = None, *, again: bool | None = None) -> dict[str, Any]:
        """Send one request; see Link.call. A cancelled one that changes something may have taken effect."""
        is_wait = "timeout_s=" in path and not path.endswith(("timeout_s=0", "timeout_s=0.000"))
        may_repeat = method == "GET" if again is None else again
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                session = await self._session()
            except NotReady:
                # A daemon that was never reached is not restarting.
                if not self._has_been_there or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RECONNECT_S)
                continue
            self._open += is_wait
            try:
                return await self._asked(session, self._waits if is_wait else self._others, method, path, body)
            except aiohttp.ClientConnectorError as error:
                # Nothing was sent.
                self._is_lost = True
                if time.monotonic() > deadline:
                    raise DaemonUnreachable(
                        f"no daemon answers on {self._path}: {os.strerror(error.errno or 0)}",
                        "see what is wrong with: gpusched doctor",
                    ) from None
            except (aiohttp.ClientError, ConnectionError) as error:
                if not may_repeat or time.monotonic() > deadline:
                    raise unknown_effect(f"{method} {path}") from error
            finally:
                self._open -= is_wait
            await asyncio.sleep(RECONNECT_S)

    async def _asked(
        self, session: aiohttp.ClientSession, places: asyncio.Semaphore, method: str, path: str, body: object
    ) -> dict[str, Any]:
        """The document of one answer; a rate-limited request, which was not carried out, is repeated."""
        data = None if body is None else quickjson.dumps(body).encode()
        deadline = time.monotonic() + plain.PATIENCE_S
        while True:
            async with places, session.request(method, f"http://gpusched{path}", data=data) as answer:
                content = await answer.read()
            document: dict[str, Any] = quickjson.loads(content)
            if answer.status == 200:
                return document
            pause_s = min(plain.MAX_WAIT_S, max(0.05, float(answer.headers.get("Retry-After", "1"))))
            if answer.status != errors.TooMany.http_status or time.monotonic() + pause_s > deadline:
                raise plain.error_from(document.get("error", {}))
            await asyncio.sleep(pause_s)

    async def run(self, work: Callable[[], T]) -> T:
        """Do what may block, in a thread. Cancelled, it ends first: what it works on is closed afterwards."""
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
            raise

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        if self._http is not None:
            await self._http.close()
            self._http = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        self.blocking.close()

    async def _session(self) -> aiohttp.ClientSession:
        """Raises: DaemonUnreachable, or the error with which the daemon failed to start."""
        loop = asyncio.get_running_loop()
        if self._http is not None and self._loop is not loop:
            # Of an event loop that is over, with all its connections.
            self._http = None
            self._waits, self._others = asyncio.Semaphore(MOST_WAITS), asyncio.Semaphore(MOST_OTHERS)
        if self._http is None or self._is_lost:
            path = self._path = await asyncio.to_thread(self._found)
            self._is_lost = False
        if self._http is None:
            if len(os.fsencode(path)) >= _LONG_PATH:
                # An address holds 107 bytes; through its folder's descriptor any path is short.
                self._folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                path = f"/proc/self/fd/{self._folder}/{os.path.basename(path)}"
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json"},
            )
            self._loop, self._has_been_there = loop, True
        return self._http

    def _found(self) -> str:
        """The daemon's socket; starts the personal daemon if necessary."""
        path = self.blocking.socket_path
        self.blocking.close()
        return path
