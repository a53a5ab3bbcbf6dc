"""Who sends a request to the web page: hosts, cookies, tokens against forgery, proxies that name the user."""

from __future__ import annotations

import pwd
import re
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest, new
from urllib.parse import urlsplit

from aiohttp import web

from gpusched.addons.web.link import DaemonLink
from gpusched.addons.web.settings import CONTROL
from gpusched.errors import Forbidden, SignedOut, UsageError

COOKIE = "gpusched_session"
LOGIN_COOKIE = "gpusched_login"
LONGEST_S = 7 * 86400
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})
FORM_FIELD = "csrf"
_UCRED = struct.Struct("3i")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9.-]{1,253})(?::(\d{1,5}))?")


class WrongHost(UsageError):
    """A request for another site: a rebound name, or a proxy that passes on what it should not."""

    code = "wrong_host"
    http_status = 421


@dataclass(slots=True)
class SignIn:
    """What the web process believes about requests."""

    link: DaemonLink
    public: str | None = None
    """Address by which a proxy serves the page, `https://gpu.lab.org`; None on loopback."""
    allow: tuple[str, ...] = ()
    user_header: str | None = None
    """As the daemon says; None unless it trusts a proxy."""
    proxy_users: Sequence[str] = ()
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _of_proxy: dict[str, str] = field(default_factory=dict)
    """Tokens by the user whom a proxy has named."""

    # --- requests ---------------------------------------------------------------------------------

    def check_host(self, request: web.Request) -> None:
        """Refuse names that are not this page's. Raises: WrongHost."""
        hosts = request.headers.getall("Host", [])
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is not None:
            if self.public is not None and hosts[0].lower() == urlsplit(self.public).netloc.lower():
                return
            # Any port: an ssh tunnel may end at another one than it began.
            if self.public is None and found[1].lower() in LOCAL:
                return
        raise WrongHost("this address is not that of the page", "open the address that gpusched web open prints")

    def origin_of(self, request: web.Request) -> str:
        """Scheme, host and port of the page as the browser sees it."""
        return (self.public or f"http://{request.headers['Host']}").rstrip("/")

    def check_form(self, request: web.Request, token: str | None, sent: object) -> None:
        """Refuse forms that this page did not send. Args: token: of the session or sign-in form. Raises: Forbidden."""
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        is_own = origin is not None and origin.lower() == self.origin_of(request).lower() and site == "same-origin"
        is_ours = token is not None and isinstance(sent, str)
        if not (is_own and is_ours and compare_digest(self.form_token(token or "").encode(), str(sent).encode())):
            raise Forbidden("this form is old, or not from this page", "reload the page and try again")

    def form_token(self, token: str) -> str:
        """Proof for forms of one session or sign-in; changes when the web process starts again."""
        return new(self._secret, token.encode("utf-8", "replace"), sha256).hexdigest()

    # --- sessions ---------------------------------------------------------------------------------

    def cookie_name(self, request: web.Request, name: str = COOKIE) -> str:
        """With the port: cookies of all ports of a host are one set."""
        port = _HOST.fullmatch(request.headers["Host"])
        return f"{name}_{(port and port[2]) or 'default'}"

    async def token_of(self, request: web.Request) -> str:
        """The token of the request's session. Raises: SignedOut, Forbidden, UsageError."""
        named = self._named_by_proxy(request)
        if named is not None:
            token = self._of_proxy.get(named)
            if token is None:
                token = self._of_proxy[named] = await self._begin(user=named)
            return token
        token = request.cookies.get(self.cookie_name(request))
        if not token or len(token) > 200:
            raise SignedOut("you are signed out", "sign in with a code from: gpusched web open")
        return token

    def forget(self, token: str) -> None:
        """Drop the session of a proxy's user: it has ended, and the next request begins another one."""
        for user in [user for user, known in self._of_proxy.items() if known == token]:
            del self._of_proxy[user]

    async def redeem(self, code: str) -> str:
        """The token of a new session. Raises: SignedOut, Forbidden."""
        return await self._begin(code=code)

    async def _begin(self, **who: str) -> str:
        allow = [word for word in self.allow if word == CONTROL]
        found = await self.link.ask("POST", "/v1/web/sessions", None, {**who, "allow": allow})
        return str(found["token"])

    def _named_by_proxy(self, request: web.Request) -> str | None:
        """The user whom a trusted proxy names; None without one. Raises: Forbidden, UsageError."""
        if self.user_header is None:
            return None
        values = request.headers.getall(self.user_header, [])
        if not values:
            return None
        if not self._is_proxy(request):
            raise Forbidden("only a proxy of [web] proxy_users may name a user", "sign in with a code")
        if len(values) > 1 or "," in values[0]:
            raise UsageError(f"{self.user_header} names several users", "the proxy must remove what the browser sends")
        return values[0]

    def _is_proxy(self, request: web.Request) -> bool:
        sock = None if request.transport is None else request.transport.get_extra_info("socket")
        if sock is None or sock.family != socket.AF_UNIX:
            return False
        _, uid, _ = _UCRED.unpack(_peer_credentials(sock))
        try:
            return uid != 0 and pwd.getpwuid(uid).pw_name in self.proxy_users
        except KeyError:
            return False


def _peer_credentials(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)


def local_path(text: str | None) -> str:
    """Where to go after signing in: a path of this page, whatever was asked for."""
    is_path = text is not None and re.fullmatch(r"/(?![/\\])[!-\[\]-~]{0,500}", text) is not None
    return text if is_path and text is not None else "/"
