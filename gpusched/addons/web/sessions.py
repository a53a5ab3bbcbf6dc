"""Who is signed in to the web page: one-time codes and sessions, as the daemon keeps them.

The web process holds nothing but the token that a browser shows it. The daemon looks each token up again for every
request, so that a web process that was broken into acts only for users who are signed in, and only within their scope.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from logging import getLogger
from secrets import choice, token_urlsafe
from typing import Any

from gpusched.addons.web.settings import CONTROL
from gpusched.paths import replace_file

log = getLogger("gpusched.api")

SESSION_HEADER = "Gpusched-Session"
"""Carries the token of a session from the web process to the daemon."""
IDLE_S = 12 * 3600.0
LONGEST_S = 7 * 86400.0
CODE_S = 60.0
CODE_TRIES = 5
MOST_SESSIONS = 20
"""Of one user; the one unused longest gives way."""
MOST_CODES = 3
"""Of one user, not yet redeemed."""
SAVE_S = 600.0
"""How much of a session's idle time a restart of the daemon may forget."""
SERVING_S = 60.0
"""A web process that has not said where it serves for this long is gone."""
_SIGNS = "23456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Of codes: none that looks like another one."""
_HALF = 4
_TOKEN_BYTES = 32

READ_ROUTES = frozenset(
    {
        *("/v1/accounts", "/v1/board", "/v1/budgets", "/v1/cluster", "/v1/history", "/v1/jobs/{id}"),
        *("/v1/jobs/{id}/limit-hint", "/v1/jobs/{id}/log", "/v1/jobs/{id}/tail", "/v1/jobs/{id}/why"),
        *("/v1/priorities", "/v1/qos", "/v1/queues", "/v1/reservations", "/v1/series", "/v1/starts", "/v1/statement"),
        *("/v1/status", "/v1/usage", "/v1/web/session"),
    }
)
"""What a session may read. Scripts, environments, settings and the doors into jobs are not for browsers."""
CONTROL_ROUTES = frozenset({"/v1/jobs/cancel", "/v1/jobs/hold", "/v1/jobs/release"})
END_ROUTE = "/v1/web/session/end"


@dataclass(slots=True)
class WebSession:
    """One browser that is signed in. Instants in UTC epoch seconds."""

    uid: int
    scope: frozenset[str]
    made_at: float
    used_at: float

    def end_at(self) -> float:
        return min(self.used_at + IDLE_S, self.made_at + LONGEST_S)

    def admits(self, method: str, route: str) -> bool:
        """Whether requests of the session may use a route, given as in the table of routes."""
        if method in ("GET", "HEAD"):
            return route in READ_ROUTES
        return route == END_ROUTE or (CONTROL in self.scope and route in CONTROL_ROUTES)


@dataclass(slots=True)
class _Code:
    uid: int
    secret: str
    ends_at: float
    tries: int = CODE_TRIES


class WebSessions:
    """Codes in memory; sessions also in a file, by the hashes of their tokens."""

    def __init__(self, path: str | None = None, now: Callable[[], float] = time.time) -> None:
        """Args: path: private to the daemon; None to keep sessions in memory alone."""
        self._path = path
        self._now = now
        self._codes: dict[str, _Code] = {}
        self._sessions: dict[str, WebSession] = {}
        self._saved_at = 0.0
        self._served: tuple[float, Mapping[str, Any]] | None = None
        self._load()

    # --- codes ------------------------------------------------------------------------------------

    def new_code(self, uid: int) -> tuple[str, float]:
        """A code for the sign-in form, and when it ends."""
        now = self._now()
        self._codes = {name: code for name, code in self._codes.items() if code.ends_at > now}
        own = [name for name, code in self._codes.items() if code.uid == uid]
        for name in own[: max(0, len(own) - MOST_CODES + 1)]:
            del self._codes[name]
        name = _letters()
        while name in self._codes:
            name = _letters()
        code = self._codes[name] = _Code(uid, _letters(), now + CODE_S)
        return f"{name}-{code.secret}", code.ends_at

    def redeem(self, text: str) -> int | None:
        """The user whose code this is; None for a wrong, old or used one. A code ends with its fifth wrong half."""
        letters = "".join(text.upper().split()).replace("-", "")
        name, secret = letters[:_HALF], letters[_HALF:]
        code = self._codes.get(name)
        if code is None:
            return None
        if code.ends_at <= self._now():
            del self._codes[name]
            return None
        if not compare_digest(code.secret.encode(), secret.encode("utf-8", "replace")):
            code.tries -= 1
            if not code.tries:
                del self._codes[name]
            return None
        del self._codes[name]
        return code.uid

    # --- sessions ---------------------------------------------------------------------------------

    def begin(self, uid: int, scope: frozenset[str]) -> str:
        """Sign a user in; returns the token, which is stored nowhere."""
        now = self._now()
        self._sessions = {key: one for key, one in self._sessions.items() if one.end_at() > now}
        own = sorted((one.used_at, key) for key, one in self._sessions.items() if one.uid == uid)
        for _, key in own[: max(0, len(own) - MOST_SESSIONS + 1)]:
            del self._sessions[key]
        token = token_urlsafe(_TOKEN_BYTES)
        self._sessions[_key(token)] = WebSession(uid, scope, now, now)
        self._save()
        return token

    def find(self, token: str) -> WebSession | None:
        """The session of a token, which is in use from now on; None if it has ended."""
        now, session = self._now(), self._sessions.get(_key(token))
        if session is None or session.end_at() <= now:
            return None
        session.used_at = now
        if now - self._saved_at > SAVE_S:
            self._save()
        return session

    def end(self, token: str) -> None:
        """Sign a browser out."""
        if self._sessions.pop(_key(token), None) is not None:
            self._save()

    def end_all(self, uid: int) -> int:
        """Sign a user out everywhere, unredeemed codes included; returns the number of sessions."""
        self._codes = {name: code for name, code in self._codes.items() if code.uid != uid}
        own = [key for key, one in self._sessions.items() if one.uid == uid]
        for key in own:
            del self._sessions[key]
        if own:
            self._save()
        return len(own)

    # --- where the page is ------------------------------------------------------------------------

    def serve(self, facts: Mapping[str, Any]) -> None:
        """Note where the web process serves; it says so again and again."""
        self._served = self._now(), facts

    def serving(self) -> Mapping[str, Any] | None:
        """Where the page is served; None if no web process runs."""
        if self._served is None or self._now() - self._served[0] > SERVING_S:
            return None
        return self._served[1]

    # --- file -------------------------------------------------------------------------------------

    def _load(self) -> None:
        try:
            for row in load_rows(self._path, "sessions"):
                self._sessions[str(row["token"])] = WebSession(
                    int(row["uid"]), frozenset(row["scope"]), float(row["made_at"]), float(row["used_at"])
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # Users sign in again.
            log.warning("the sessions of the web page are lost: %s", error)
            self._sessions.clear()

    def _save(self) -> None:
        self._saved_at = self._now()
        rows = [
            {"token": key, "uid": one.uid, "scope": sorted(one.scope), "made_at": one.made_at, "used_at": one.used_at}
            for key, one in self._sessions.items()
        ]
        try:
            save_rows(self._path, "sessions", rows)
        except OSError as error:
            # They last until the next start of the daemon.
            log.warning("the sessions of the web page cannot be saved: %s", error)


def load_rows(path: str | None, name: str) -> list[dict[str, Any]]:
    """The rows of a private file; none without one. Raises: OSError, ValueError, KeyError, TypeError."""
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            return list(json.load(file)[name])
    except FileNotFoundError:
        return []  # nothing was saved yet


def save_rows(path: str | None, name: str, rows: list[dict[str, Any]]) -> None:
    """Replace a file that only the daemon reads. Raises: OSError."""
    if path is not None:
        replace_file(path, json.dumps({name: rows}).encode())


def _key(token: str) -> str:
    return sha256(token.encode("utf-8", "replace")).hexdigest()


def _letters() -> str:
    return "".join(choice(_SIGNS) for _ in range(_HALF))
