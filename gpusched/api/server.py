"""The aiohttp application: routes, and every error as one JSON document."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import nullcontext
from functools import partial
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web
from aiohttp.http import HttpProcessingError

from gpusched import entry_points
from gpusched.access import Hidden, is_admin, is_root
from gpusched.api.auth import caller_of, known_caller
from gpusched.api.connection_limits import CONNECTION_LIMITER, ConnectionLimiter
from gpusched.api.handlers.completions import FEED, CompletionFeed
from gpusched.api.openapi import build
from gpusched.api.rate_limits import MAX_BODY, too_many
from gpusched.api.routes import ROUTES
from gpusched.api.service import DOCUMENT, SERVICE, ApiService, service_of
from gpusched.api.transfer import error_response
from gpusched.api.visibility import viewer_of
from gpusched.errors import BrokenInvariant, Forbidden, GpuschedError, NotFound, TooMany, UsageError
from gpusched.model.commands import Caller, NodePeer
from gpusched.model.mentions import has_mentions, render_json

log = getLogger("gpusched.api")

UNREAD_PER_USER = 256 << 20
"""Unread bytes of answers held in memory for one user; a single answer may be larger."""
WARNING = "Gpusched-Warning"
"""Header with a percent-encoded text that commands print on stderr."""
MOST_WARNING = 1000
_SHUTDOWN_S = 2.0
HTTP_LOG = getLogger("gpusched.http")
"""aiohttp's logger."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(service: ApiService) -> web.Application:
    app = web.Application(middlewares=[_errors, _admit], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app[DOCUMENT] = functools.cache(lambda: json.dumps(build(ROUTES)))
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.answerer())
    app.on_response_prepare.append(_warn)
    app.on_shutdown.append(_hang_up)
    app[FEED] = feed = CompletionFeed()
    service.scheduler.signals.jobs_changed.connect(service.announce)
    service.scheduler.signals.jobs_changed.connect(lambda job_ids: feed.announce(job_ids, service.scheduler.state.jobs))
    for attach in entry_points.all_of("attach").values():
        attach(app, service)
    return app


def _is_ours(record: LogRecord) -> bool:
    """Whether a record concerns the daemon; invalid HTTP does not, since the sender gets an error answer.

    Logging each such request would take 40 KB, at no cost to its sender.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


HTTP_LOG.addFilter(_is_ours)


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return _rendered(await handler(request), request)
    except GpuschedError as error:
        if isinstance(error, (Forbidden, Hidden, TooMany)):
            _record(request, error)
        return _rendered(error_response(error), request)
    except web.HTTPNotFound:
        return error_response(NotFound(f"there is no {request.method} {request.path}", "see GET /v1/openapi.json"))
    except web.HTTPMethodNotAllowed:
        return error_response(UsageError(f"{request.path} does not take {request.method}", "see GET /v1/openapi.json"))
    except web.HTTPRequestEntityTooLarge:
        return error_response(UsageError(f"the request is larger than {MAX_BODY >> 20} MiB", "submit less at once"))
    except web.HTTPException:
        raise
    except RecursionError:
        return error_response(UsageError("the request is nested too deeply", "flatten it"))
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return error_response(
            BrokenInvariant("the daemon hit an internal error", "the log has it: gpusched daemon status")
        )


def _rendered(response: web.StreamResponse, request: web.Request) -> web.StreamResponse:
    """The answer with what its texts mention shown only where the caller may know it."""
    if isinstance(response, web.Response) and response.content_type == "application/json":
        body = response.body
        if isinstance(body, (bytes, bytearray)) and has_mentions(body):
            response.body = render_json(body, viewer_of(request).audience.knows)
    return response


async def _warn(request: web.Request, response: web.StreamResponse) -> None:
    """Warn admins with every answer that the config file is not in force."""
    service = service_of(request)
    problem = service.scheduler.parts.settings_problem()
    caller = known_caller(request)
    if problem is not None and caller is not None and is_admin(caller, service.settings):
        response.headers[WARNING] = quote("; ".join(problem)[:MOST_WARNING])


async def _hang_up(app: web.Application) -> None:
    """End what is HTTP no more: its clients come back to the next daemon, and nobody waits for them here."""
    if CONNECTION_LIMITER in app:
        app[CONNECTION_LIMITER].cut_taken()


@web.middleware
async def _admit(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Reject unknown callers, and callers over their rate limit."""
    service = service_of(request)
    caller = caller_of(request)
    service.pace.request(caller, service.settings.limit)
    limiter = request.app.get(CONNECTION_LIMITER)
    with service.door.turn(caller) if service.door is not None and caller.is_token else nullcontext():
        return await _timed(request, handler, caller, limiter)


async def _timed(
    request: web.Request, handler: _Handler, caller: Caller, limiter: ConnectionLimiter | None
) -> web.StreamResponse:
    """The answer; the time that it blocked others counts against the caller."""
    service, timed = service_of(request), Timed(handler(request))
    service.asked_at = time.monotonic()
    try:
        if limiter is None:
            return await timed
        with limiter.in_use(request):
            response = await timed
        unread = 0 if is_root(caller) else limiter.unread_of(caller.uid)
        if unread and unread + len(getattr(response, "body", None) or b"") > UNREAD_PER_USER:
            raise too_many(f"{unread >> 20} MiB of answers to {caller.user} are unread", 1.0, "read them first")
        return response
    finally:
        service.asked_at = time.monotonic()
        service.pace.spent(caller, timed.busy_s, service.settings.limit)


class Timed:
    """Awaits a coroutine and measures how long it blocks the event loop."""

    def __init__(self, work: Awaitable[web.StreamResponse]) -> None:
        self._work = work
        self.busy_s = 0.0

    def __await__(self) -> Generator[Any, Any, web.StreamResponse]:
        steps = self._work.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            began = time.perf_counter()
            try:
                awaited = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self.busy_s += time.perf_counter() - began
            try:
                step = partial(steps.send, (yield awaited))
            except BaseException as error:
                step = partial(steps.throw, error)


def _record(request: web.Request, error: GpuschedError) -> None:
    if (caller := known_caller(request)) is not None:
        service_of(request).daemon.audit_refusal(caller, f"{request.method} {request.path}", error.message)


class HttpServer:
    """Serves the API on a Unix socket, which all users can connect to if the daemon is the system's."""

    def __init__(self, service: ApiService) -> None:
        self._app = build_app(service)
        self._mode = 0o666 if service.daemon.serves_all else 0o600
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._path = ""

    async def start(self, socket_path: str) -> None:
        """Listen. Replaces a socket file left by a dead daemon; the caller holds the lock."""
        self._path = socket_path
        self._runner = web.AppRunner(
            self._app, access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN_S, logger=HTTP_LOG
        )
        await self._runner.setup()
        self._listener = await _listen(limiter_for(self._app, self._runner), socket_path, self._mode)

    async def adopt(self, sock: socket.socket, peer: NodePeer) -> None:
        """Serve a connection from another node. Args: sock: connected; closed in the end."""
        limiter = self._app[CONNECTION_LIMITER]
        await asyncio.get_running_loop().connect_accepted_socket(lambda: limiter.relayed(peer), sock)

    async def close(self) -> None:
        """Wait briefly for requests in progress; remove the socket."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        Path(self._path).unlink(missing_ok=True)


async def _listen(limiter: ConnectionLimiter, socket_path: str, mode: int) -> asyncio.Server:
    Path(socket_path).unlink(missing_ok=True)  # an earlier daemon's
    folder, name = os.path.split(socket_path)
    before = os.umask(0o777 & ~mode)
    try:
        # A path in a deep home can pass the 107 bytes that a socket address holds; a short one through
        # the folder's descriptor never does.
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            path = socket_path if len(os.fsencode(socket_path)) < 100 else f"/proc/self/fd/{fd}/{name}"
            return await asyncio.get_running_loop().create_unix_server(limiter, path, backlog=1024)
        finally:
            os.close(fd)
    finally:
        os.umask(before)


def limiter_for(app: web.Application, runner: web.AppRunner) -> ConnectionLimiter:
    """Create the connection limiter of this application."""
    service = app[SERVICE]
    assert runner.server is not None
    app[CONNECTION_LIMITER] = limiter = ConnectionLimiter(
        runner.server, lambda: service.settings.limit, service.daemon.audit_refusal
    )
    return limiter
