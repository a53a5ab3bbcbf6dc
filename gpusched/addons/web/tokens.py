"""Tokens with which programs use the API of the web page: made by users on the socket, kept by the daemon as hashes.

As with sessions, the web process holds nothing but the token that a request shows it, and the daemon looks each up
again for every request: an attacker in the web process can use only tokens that are presented meanwhile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from logging import getLogger
from secrets import token_urlsafe

from gpusched.addons.web.sessions import SAVE_S, load_rows, save_rows
from gpusched.addons.web.settings import CONTROL, SUBMIT
from gpusched.api.rate_limits import TokenBucket, too_many
from gpusched.errors import NotFound, NotReady, Refused, SignedOut, UsageError
from gpusched.model.commands import Caller
from gpusched.model.units import format_duration, printable

log = getLogger("gpusched.api")

TOKEN_HEADER = "Gpusched-Token"
"""Carries a token from the web process to the daemon."""
PREFIX = "gpusched_"
"""Of every token, so that programs that look for leaked secrets find it."""
READ = "read"
SCOPES = (READ, SUBMIT, CONTROL)
LONGEST_S = 366 * 86400.0
MOST_TOKENS = 20
"""Of one user."""
KEPT_S = 30 * 86400.0
"""An expired token is listed, and named in errors to those who still use it, for this long."""
PER_S, BURST = 20.0, 100.0
"""Requests with one token."""
MOST_AT_ONCE = 8
"""Requests of one user's tokens that are being answered: the web process has a bounded number of connections."""
_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")

READ_ROUTES = frozenset(
    {
        *("/v1/accounts", "/v1/board", "/v1/budgets", "/v1/cluster", "/v1/history", "/v1/jobs", "/v1/jobs/{id}"),
        *("/v1/jobs/{id}/limit-hint", "/v1/jobs/{id}/log", "/v1/jobs/{id}/tail", "/v1/jobs/{id}/why"),
        *("/v1/pipelines", "/v1/pipelines/{id}"),
        *("/v1/priorities", "/v1/qos", "/v1/queues", "/v1/reservations", "/v1/series", "/v1/starts", "/v1/statement"),
        *("/v1/status", "/v1/steps", "/v1/usage", "/v1/wait", "/v1/web/token"),
    }
)
"""What every token may read; scripts, environments, settings and the doors into jobs are not for the network."""
WRITE_ROUTES = {
    SUBMIT: frozenset({"/v1/jobs", "/v1/pipelines", "/v1/pipelines/{id}/resume"}),
    # Updates are left out: they can change what a job runs.
    CONTROL: frozenset(f"/v1/jobs/{act}" for act in ("cancel", "hold", "release", "suspend", "resume", "requeue")),
}
"""What a scope adds. No route is for admins alone."""


def scope_of(method: str, route: str) -> str | None:
    """The scope that a request needs; None for one that no token may make."""
    if method in ("GET", "HEAD"):
        return READ if route in READ_ROUTES else None
    if method != "POST":
        return None
    return next((scope for scope, routes in WRITE_ROUTES.items() if route in routes), None)


@dataclass(slots=True)
class ApiToken:
    """One token of a user. Instants in UTC epoch seconds."""

    uid: int
    user: str
    """The uid's name when the token was made: a uid that was given to another user has no tokens."""
    name: str
    scope: frozenset[str]
    made_at: float
    expires_at: float
    used_at: float | None = None


class ApiTokens:
    """Tokens by their hashes, in a file."""

    def __init__(
        self,
        path: str | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: path: private to the daemon; None to keep tokens in memory alone; clock: monotonic, for rates."""
        self._path = path
        self._now = now
        self._clock = clock
        self._tokens: dict[str, ApiToken] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._at_once: dict[int, int] = {}
        self._saved_at = 0.0
        self._load()

    def make(self, uid: int, user: str, name: str, scope: frozenset[str], lasts_s: float) -> tuple[str, ApiToken]:
        """A new token: its text, which is stored nowhere, and what is. Raises: NotReady, Refused, UsageError."""
        now = self._now()
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{printable(repr(name), 60)} is not a valid token name: letters, digits and ._- up to 40",
                "for example: --name ci",
            )
        if not scope or not scope <= frozenset(SCOPES):
            wrong = printable(min(scope - frozenset(SCOPES), default=""), 40)
            raise UsageError(f"{wrong!r} is not a token scope", f"scopes: {', '.join(SCOPES)}")
        if not 60 <= lasts_s <= LONGEST_S:
            raise UsageError("a token lasts from one minute to 366 days", "for example: --expires 90d")
        self._tokens = {key: one for key, one in self._tokens.items() if one.expires_at + KEPT_S > now}
        own = {one.name: key for key, one in self._tokens.items() if one.uid == uid}
        if name in own and self._tokens[own[name]].expires_at > now:
            raise Refused(f"{user} has a token {name} already", f"end it with: gpusched web token revoke {name}")
        if len(own) - (name in own) >= MOST_TOKENS:
            raise Refused(f"{user} has {len(own)} tokens, the maximum", "end some with: gpusched web token revoke NAME")
        text = PREFIX + token_urlsafe(_TOKEN_BYTES)
        made = ApiToken(uid, user, name, scope | {READ}, now, now + lasts_s)
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in self._tokens}
        before = dict(self._tokens)
        self._tokens.pop(own.get(name, ""), None)
        self._tokens[_key(text)] = made
        try:
            self._save()
        except OSError as error:
            self._tokens = before
            raise NotReady(f"the token cannot be saved: {error.strerror}", "see: gpusched doctor") from None
        return text, made

    def find(self, text: str) -> ApiToken:
        """The token behind a text, which is in use from now on. Raises: SignedOut, TooMany."""
        now, key = self._now(), _key(text)
        token = self._tokens.get(key)
        if token is None:
            raise SignedOut("this token is wrong or was revoked", "make another one with: gpusched web token create")
        if token.expires_at <= now:
            raise SignedOut(
                f"the token {token.name} expired {format_duration(now - token.expires_at)} ago",
                f"make another one with: gpusched web token create --name {token.name}",
            )
        moment = self._clock()
        wait_s = self._buckets.setdefault(key, TokenBucket(BURST, moment)).take(1.0, BURST, PER_S, moment)
        if wait_s:
            raise too_many(
                f"the token {token.name} makes more than {PER_S:g} requests per second",
                wait_s,
                "ask for many jobs in one request: ids=1,2,3",
            )
        token.used_at = now
        if now - self._saved_at > SAVE_S:
            try:
                self._save()
            except OSError as error:
                # Only the time of the last use would be lost.
                log.warning("the tokens of the web page cannot be saved: %s", error)
        return token

    @contextmanager
    def turn(self, caller: Caller) -> Iterator[None]:
        """One request of a user's token while it is being answered. Raises: TooMany."""
        count = self._at_once.get(caller.uid, 0)
        if count >= MOST_AT_ONCE:
            raise too_many(f"{count} requests with tokens of {caller.user} are open, the maximum", 1.0, "ask in turn")
        self._at_once[caller.uid] = count + 1
        try:
            yield
        finally:
            self._at_once[caller.uid] -= 1
            if not self._at_once[caller.uid]:
                del self._at_once[caller.uid]

    def listing(self, uid: int | None) -> list[ApiToken]:
        """Tokens of a user, or of all, by user and name."""
        found = (one for one in self._tokens.values() if uid is None or one.uid == uid)
        return sorted(found, key=lambda one: (one.user, one.name))

    def revoke(self, uid: int, name: str) -> None:
        """End a token at once. Raises: NotFound; NotReady if that cannot be saved."""
        key = next((key for key, one in self._tokens.items() if (one.uid, one.name) == (uid, name)), None)
        if key is None:
            raise NotFound(f"there is no token {printable(name, 60)}", "list them with: gpusched web token list")
        del self._tokens[key]
        self._buckets.pop(key, None)
        try:
            self._save()
        except OSError as error:
            raise NotReady(
                f"the token is revoked, but only until the daemon restarts: {error.strerror}", "see: gpusched doctor"
            ) from None

    def _load(self) -> None:
        try:
            for row in load_rows(self._path, "tokens"):
                self._tokens[str(row["token"])] = ApiToken(
                    int(row["uid"]),
                    str(row["user"]),
                    str(row["name"]),
                    frozenset(row["scope"]),
                    float(row["made_at"]),
                    float(row["expires_at"]),
                    None if row["used_at"] is None else float(row["used_at"]),
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # Programs are refused until their users make new ones.
            log.warning("the tokens of the web page are lost: %s", error)
            self._tokens.clear()

    def _save(self) -> None:
        """Raises: OSError."""
        self._saved_at = self._now()
        save_rows(
            self._path,
            "tokens",
            [
                {
                    "token": key,
                    "uid": one.uid,
                    "user": one.user,
                    "name": one.name,
                    "scope": sorted(one.scope),
                    "made_at": one.made_at,
                    "expires_at": one.expires_at,
                    "used_at": one.used_at,
                }
                for key, one in self._tokens.items()
            ],
        )


def _key(text: str) -> str:
    return sha256(text.encode("utf-8", "replace")).hexdigest()
