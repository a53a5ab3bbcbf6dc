"""The web process's connection to the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp

from gpusched.api.web_sessions import SESSION_HEADER
from gpusched.client import error_from
from gpusched.errors import DaemonUnreachable, NotReady

ANSWER_S = 20.0
MOST_CONNECTIONS = 16
"""Fewer than one user may have open at the daemon, [limit] connections_per_user."""
_LONG_PATH = 100


class DaemonLink:
    """Asks the daemon on behalf of sessions; knows since when it has not answered."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.away_since: float | None = None
        """UTC epoch seconds; None while it answers."""
        self._http: aiohttp.ClientSession | None = None
        self._folder: int | None = None

    async def close(self) -> None:
        """End all connections."""
        if self._http is not None:
            await self._http.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    async def get(self, path: str, token: str, **query: Any) -> dict[str, Any]:
        """An answer to a session. Raises: as `ask`."""
        shown = {name: str(value) for name, value in query.items() if value is not None}
        return await self.ask("GET", f"{path}?{urlencode(shown)}" if shown else path, token)

    async def ask(
        self, method: str, path: str, token: str | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """One request. Raises: the daemon's error; DaemonUnreachable, NotReady."""
        headers = {} if token is None else {SESSION_HEADER: token}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            async with self._session().request(method, f"http://gpusched{path}", data=data, headers=headers) as answer:
                document: dict[str, Any] = json.loads(await answer.read())
        except asyncio.TimeoutError:
            raise NotReady(f"the scheduler has not answered for {ANSWER_S:g} s", "try again") from None
        except (aiohttp.ClientError, OSError, ValueError):
            if self.away_since is None:
                self.away_since = time.time()
            raise DaemonUnreachable("the scheduler does not answer", "see: gpusched doctor") from None
        self.away_since = None
        if answer.status != 200:
            raise error_from(document.get("error", {}))
        return document

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            path = self.socket_path
            if len(os.fsencode(path)) >= _LONG_PATH:
                # An address holds 107 bytes; through its folder's descriptor any path is short.
                self._folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                path = f"/proc/self/fd/{self._folder}/{os.path.basename(path)}"
            # No cookies: nothing of one user may be kept for another.
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=MOST_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http
