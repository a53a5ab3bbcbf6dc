"""The web process's connection to the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp

from gpusched.addons.web.sessions import SESSION_HEADER
from gpusched.addons.web.tokens import TOKEN_HEADER
from gpusched.client import error_from
from gpusched.errors import DaemonUnreachable, NotReady, UsageError

ANSWER_S = 20.0
MOST_CONNECTIONS = 16
"""Fewer than one user may have open at the daemon, [limit] connections_per_user."""
MOST_ANSWER = 64 << 20
"""Of one that is passed on as it is."""
_LONG_PATH = 100


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer to be passed on."""

    status: int
    body: bytes
    retry_after: str | None


class DaemonLink:
    """Asks the daemon on behalf of sessions and tokens; knows since when it has not answered."""

    def __init__(self, socket_path: str, most_connections: int = MOST_CONNECTIONS, answer_s: float = ANSWER_S) -> None:
        self.socket_path = socket_path
        self._most_connections, self._answer_s = most_connections, answer_s
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
            raise NotReady(f"the scheduler has not answered for {self._answer_s:g} s", "try again") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise self._away() from None
        self.away_since = None
        if answer.status != 200:
            raise error_from(document.get("error", {}))
        return document

    async def forward(self, method: str, path: str, token: str, body: bytes | None) -> RawAnswer:
        """One request with an API token, as it is. Raises: DaemonUnreachable, NotReady."""
        headers = {TOKEN_HEADER: token}
        if body is not None:
            headers["Content-Type"] = "application/json"
        is_sent = "" if method == "GET" else ", and may have done this; repeat a submission with an Idempotency-Key"
        try:
            url = f"http://gpusched{path}"
            async with self._session().request(method, url, data=body, headers=headers) as answer:
                found = bytearray()
                async for piece in answer.content.iter_any():
                    found += piece
                    if len(found) > MOST_ANSWER:
                        raise UsageError(f"the answer is larger than {MOST_ANSWER >> 20} MiB", "use limit= or fields=")
        except asyncio.TimeoutError:
            raise NotReady(
                f"the scheduler has not answered for {self._answer_s:g} s{is_sent}", "see: GET /api/v1/jobs"
            ) from None
        except (aiohttp.ClientError, OSError):
            raise self._away(is_sent) from None
        self.away_since = None
        return RawAnswer(answer.status, bytes(found), answer.headers.get("Retry-After"))

    def _away(self, more: str = "") -> DaemonUnreachable:
        if self.away_since is None:
            self.away_since = time.time()
        return DaemonUnreachable(f"the scheduler does not answer{more}", "see: gpusched doctor")

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            path = self.socket_path
            if len(os.fsencode(path)) >= _LONG_PATH:
                # An address holds 107 bytes; through its folder's descriptor any path is short.
                self._folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                path = f"/proc/self/fd/{self._folder}/{os.path.basename(path)}"
            # No cookies: nothing of one user may be kept for another.
            self._http = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, limit=self._most_connections),
                timeout=aiohttp.ClientTimeout(total=self._answer_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http
