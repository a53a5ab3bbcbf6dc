"""The API for programs, `/api/v1/`: tokens only, some of the daemon's routes, the daemon's own answers.

The daemon decides what a token may do. Here requests are read within limits, cookies are ignored, and a web process
that was started read-only passes on nothing that changes anything.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from hashlib import sha256
from typing import Any

from aiohttp import web

from gpusched.addons.web.link import DaemonLink, RawAnswer
from gpusched.addons.web.tokens import PREFIX, READ, READ_ROUTES, SCOPES, WRITE_ROUTES, scope_of
from gpusched.api import transfer
from gpusched.api.rate_limits import TokenBucket, too_many
from gpusched.api.transfer import body_size, read_within
from gpusched.errors import Forbidden, GpuschedError, NotFound, SignedOut, UsageError

BASE = "/api"
"""The daemon's `/v1/jobs` is `/api/v1/jobs` here."""
MOST_BODY = 8 << 20
SMALL_BODY = 1 << 16
LARGE_BODIES = 8
"""Larger ones held in memory at once."""
BODY_S = 20.0
LONGEST_WAIT_S = 60.0
ANSWER_S = LONGEST_WAIT_S + 20.0
MOST_CONNECTIONS = 64
WRONG_BURST, WRONG_PER_S = 20.0, 1.0
"""Wrong tokens of all callers together; beyond that, only tokens that were valid a moment ago are checked."""
MOST_KNOWN = 1000
DESCRIBED_S = 60.0
"""How long the daemon's description of itself is used."""
LONGEST_TOKEN = 200
IDEMPOTENCY = "Idempotency-Key"
_IN_URLS = frozenset({"token", "access_token", "api_key", "key"})
_ID = re.compile(r"@|p?[0-9]{1,18}(?:_[0-9]{1,18})?")

_Forward = Callable[[web.Request], Awaitable[web.Response]]


class ApiProxy:
    """Passes requests with tokens on to the daemon."""

    def __init__(self, daemon_socket: str, allow: tuple[str, ...]) -> None:
        """Args: allow: scopes beyond read that this process passes on."""
        self.link = DaemonLink(daemon_socket, MOST_CONNECTIONS, ANSWER_S)
        self.scopes = frozenset({READ, *allow})
        self._described: tuple[float, bytes] | None = None
        self._wrong = TokenBucket(WRONG_BURST, time.monotonic())
        self._large = asyncio.Semaphore(LARGE_BODIES)
        self._known: dict[bytes, None] = {}
        """Hashes of tokens that were right; the newest last."""

    async def close(self) -> None:
        """End all connections."""
        await self.link.close()

    def add_to(self, app: web.Application) -> None:
        """Register the API's routes; any other path is 404."""
        app.router.add_get(f"{BASE}/v1/openapi.json", self._answer(self._describe))
        for method, path in routes():
            app.router.add_route(method, BASE + path, self._answer(self._forward))
        app.router.add_route("*", BASE + "{rest:(/.*)?}", self._answer(self._nowhere))

    def _answer(self, handler: _Forward) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Errors as JSON."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except GpuschedError as error:
                return error_response(error)

        return answer

    async def _describe(self, request: web.Request) -> web.Response:
        """Open to all: it says nothing about this site."""
        now = time.monotonic()
        if self._described is None or now - self._described[0] > DESCRIBED_S:
            document = await self.link.ask("GET", "/v1/openapi.json")
            self._described = now, json.dumps(describe(document, self.scopes)).encode()
        return web.Response(body=self._described[1], content_type="application/json")

    async def _nowhere(self, request: web.Request) -> web.Response:
        token_of(request)
        raise NotFound(f"there is no {request.method} {request.path}", f"see GET {BASE}/v1/openapi.json")

    async def _forward(self, request: web.Request) -> web.Response:
        text = token_of(request)
        mark = sha256(text.encode()).digest()
        if mark not in self._known and self._wrong.take(0.0, WRONG_BURST, WRONG_PER_S, time.monotonic()):
            raise too_many("too many wrong tokens were sent to this page", 1.0, "try again")
        assert request.match_info.route.resource is not None
        route = request.match_info.route.resource.canonical.removeprefix(BASE)
        needed = scope_of(request.method, route)
        if needed not in self.scopes:
            raise Forbidden(
                "this page is read-only" if self.scopes == {READ} else f"this page passes on no requests to {needed}",
                f"start it with: gpusched web --allow {needed}",
            )
        check_query(request)
        path, named = route, request.match_info.get("id")
        if named is not None:
            if _ID.fullmatch(named) is None:
                raise NotFound("there is no such job or pipeline", "list the jobs with: GET /api/v1/jobs")
            path = route.replace("{id}", named)
        query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
        if request.method == "GET":
            return passed_on(await self._ask(mark, "GET", path + query, text, None))
        if mark not in self._known:
            # Nothing is read of a caller who has not signed in.
            first = await self._ask(mark, "GET", "/v1/web/token", text, None)
            if first.status != 200:
                return passed_on(first)
        is_large = request.content_length is None or request.content_length > SMALL_BODY
        async with self._large if is_large else nullcontext():
            body = with_key(request, route, await read_body(request))
            return passed_on(await self._ask(mark, "POST", path + query, text, body))

    async def _ask(self, mark: bytes, method: str, path: str, text: str, body: bytes | None) -> RawAnswer:
        answer = await self.link.forward(method, path, text, body)
        self._note(mark, answer)
        return answer

    def _note(self, mark: bytes, answer: RawAnswer) -> None:
        self._known.pop(mark, None)
        if answer.status == SignedOut.http_status:
            self._wrong.owe(1.0)
            return
        self._known[mark] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]


def routes() -> list[tuple[str, str]]:
    """Methods and paths of the daemon that tokens may use."""
    return sorted(
        {("GET", path) for path in READ_ROUTES}.union(
            *({("POST", path) for path in paths} for paths in WRITE_ROUTES.values())
        )
    )


def describe(document: Mapping[str, Any], scopes: frozenset[str]) -> dict[str, Any]:
    """The OpenAPI document of this API, cut from the daemon's. Args: scopes: those that are passed on."""
    paths: dict[str, Any] = {}
    for method, path in routes():
        operation = dict(document["paths"][path][method.lower()])
        needed = scope_of(method, path)
        operation["security"] = [{"token": []}]
        operation["x-scope"] = needed
        if path == "/v1/jobs" and method == "POST":
            operation["parameters"] = [
                {
                    "name": IDEMPOTENCY,
                    "in": "header",
                    "required": False,
                    "description": "As `key` in spec: the same key again returns the first job.",
                    "schema": {"type": "string"},
                }
            ]
        if needed in scopes:
            paths.setdefault(BASE + path, {})[method.lower()] = operation
    components = dict(document["components"])
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    responses = components["responses"] = dict(components["responses"])
    responses["Error"] = {
        **responses["Error"],
        "description": "400 usage, 401 no valid token, 403 forbidden, 404 not found, 409 refused, 429 too many "
        "requests, 500 bug, 503 not ready, 507 disk full",
    }
    return {
        **document,
        "info": {
            **document["info"],
            "description": "HTTP and JSON with tokens from `gpusched web token create`, as `Authorization: Bearer`. "
            f"x-scope is the scope that an operation needs, of: {', '.join(SCOPES)}.",
        },
        "paths": paths,
        "components": components,
    }


# --- requests -------------------------------------------------------------------------------------


def token_of(request: web.Request) -> str:
    """The request's token. Raises: SignedOut."""
    values = request.headers.getall("Authorization", [])
    word, _, text = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    text = text.strip()
    if word.lower() != "bearer" or not text:
        raise SignedOut(
            "the API takes a token in the header Authorization: Bearer, and no cookies",
            "make one with: gpusched web token create --scope read --name NAME",
        )
    if len(text) > LONGEST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise SignedOut("this is not a gpusched token", "make one with: gpusched web token create")
    return text


def is_token(request: web.Request) -> bool:
    """Whether a request to a page bears a token of the API."""
    return any(PREFIX in value for value in request.headers.getall("Authorization", []))


def check_query(request: web.Request) -> None:
    """Refuse what does not belong in an address. Raises: UsageError."""
    if named := sorted(_IN_URLS.intersection(request.query)):
        raise UsageError(
            f"{named[0]} is in the address, which ends in logs", "send the token in the header Authorization: Bearer"
        )
    wait = request.query.get("timeout_s", "0")
    try:
        is_long = not 0 <= float(wait) <= LONGEST_WAIT_S
    except ValueError:
        return  # the daemon says what is wrong with it
    if is_long:
        raise UsageError(f"timeout_s is at most {LONGEST_WAIT_S:g} here", "ask again while done is false")


async def read_body(request: web.Request) -> bytes:
    """A JSON body. Raises: UsageError, TooSlow."""
    body_size(request, MOST_BODY)
    if request.body_exists and request.content_type != "application/json":
        # Forms of browsers can send other types to any site.
        raise UsageError("the request is not JSON", "send it with Content-Type: application/json")
    return await read_within(request, MOST_BODY, BODY_S) or b"{}"


def with_key(request: web.Request, route: str, body: bytes) -> bytes:
    """The body with the request's Idempotency-Key as the job's key. Raises: UsageError."""
    values = request.headers.getall(IDEMPOTENCY, [])
    if not values or scope_of("POST", route) != "submit":
        # Other requests may be repeated as they are.
        return body
    if route != "/v1/jobs" or len(values) > 1:
        raise UsageError(f"one {IDEMPOTENCY} identifies one job", "give it with POST /api/v1/jobs alone")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    spec = found.get("spec") if isinstance(found, dict) else None
    if not isinstance(spec, dict) or "batch" in found or "resubmit" in found:
        raise UsageError(f"one {IDEMPOTENCY} identifies one job", 'send {"spec": {...}}')
    if spec.setdefault("key", values[0]) != values[0]:
        raise UsageError(f"the request has another key than {IDEMPOTENCY}", "give one of them")
    return json.dumps(found).encode()


# --- answers --------------------------------------------------------------------------------------


def passed_on(answer: RawAnswer) -> web.Response:
    """The daemon's answer."""
    response = web.Response(body=answer.body, status=answer.status, content_type="application/json")
    if answer.retry_after is not None:
        response.headers["Retry-After"] = answer.retry_after
    return _asking(response)


def error_response(error: GpuschedError) -> web.Response:
    """An error in the daemon's format."""
    return _asking(transfer.error_response(error))


def _asking(response: web.Response) -> web.Response:
    if response.status == SignedOut.http_status:
        response.headers["WWW-Authenticate"] = 'Bearer realm="gpusched"'
    return response
