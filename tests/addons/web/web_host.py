"""The web page of a daemon, served by a thread of the test, and browsers without a screen or any at all."""

from __future__ import annotations

import asyncio
import http.client
import re
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from gpusched.addons.web.api import ApiProxy
from gpusched.addons.web.app import build_app
from gpusched.addons.web.link import DaemonLink
from gpusched.addons.web.pages import PAGES
from gpusched.addons.web.reports import Reports
from gpusched.addons.web.server import WebAddress, announce
from gpusched.addons.web.sign_in import SignIn


class WebHost:
    """Serves on a free port of loopback until closed."""

    def __init__(
        self, daemon_socket: str, allow: tuple[str, ...] = (), public: str | None = None, reports: str | None = None
    ) -> None:
        self.site = SignIn(DaemonLink(daemon_socket), public, allow)
        self.api = ApiProxy(daemon_socket, allow)
        self.reports = Reports(reports)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self._is_ready.wait(30)

    def _serve(self) -> None:
        runner = web.AppRunner(
            build_app(self.site, PAGES, self.api, self.reports), access_log=None, shutdown_timeout=1.0
        )

        async def begin() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]

        self._loop.run_until_complete(begin())
        self._loop.call_soon(self._is_ready.set)
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(self.site.link.close())
        self._loop.run_until_complete(self.api.close())
        # The connector closes its sockets in the next turn.
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    def announce(self) -> None:
        """Tell the daemon where the page is."""
        address = WebAddress(port=self.port)
        asyncio.run_coroutine_threadsafe(announce(self.site, address), self._loop).result(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)


@dataclass(frozen=True)
class Answer:
    """What the page answered."""

    status: int
    headers: http.client.HTTPMessage
    text: str
    body: bytes
    """As it was sent."""

    @property
    def cookies(self) -> dict[str, str]:
        found = (line.partition(";")[0].partition("=") for line in self.headers.get_all("Set-Cookie", []))
        return {name: value.strip('"') for name, _, value in found}

    @property
    def form_token(self) -> str:
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.text)
        assert found is not None, self.text[:500]
        return found[1]


@dataclass
class Visitor:
    """A browser without a screen: keeps cookies, sends forms as browsers do."""

    host: WebHost
    cookies: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.host.port}"

    @property
    def cookie_name(self) -> str:
        return f"gpusched_session_{self.host.port}"

    def ask(self, method: str, path: str, body: str | None = None, **headers: str | None) -> Answer:
        """One request. Args: headers: with _ for -; None to leave one out."""
        sent = {"Host": f"127.0.0.1:{self.host.port}"}
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        if body is not None:
            sent |= {"Content-Type": "application/x-www-form-urlencoded", "Origin": self.origin}
        sent |= {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
        for name in [name for name, value in headers.items() if value is None]:
            sent.pop(name.replace("_", "-"), None)
        connection = http.client.HTTPConnection("127.0.0.1", self.host.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            content = b"" if body is None else body.encode()
            if body is not None:
                connection.putheader("Content-Length", str(len(content)))
            connection.endheaders(content)
            found = connection.getresponse()
            content = found.read()
            text = "" if found.headers["Content-Encoding"] else content.decode()
            answer = Answer(found.status, found.headers, text, content)
        finally:
            connection.close()
        for name, value in answer.cookies.items():
            if value:
                self.cookies[name] = value
            else:
                self.cookies.pop(name, None)
        return answer

    def get(self, path: str, **headers: str | None) -> Answer:
        return self.ask("GET", path, **headers)

    def send(self, path: str, _headers: dict[str, str | None] | None = None, **fields: str) -> Answer:
        """Send a form."""
        return self.ask("POST", path, urlencode(fields), **(_headers or {}))

    def sign_in(self, person: Any, wanted: str = "/") -> Answer:
        """Sign in with a code that somebody gets from the daemon."""
        code = person.call("POST", "/v1/web/code", {})["code"]
        return self.send("/login", csrf=self.get("/login").form_token, code=code, next=wanted)
