"""The aiohttp application: routes, and every error as one JSON document."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from logging import LogRecord, getLogger
from typing import Any
from urllib.parse import quote

from aiohttp import web
from aiohttp.http import HttpProcessingError

from gpusched.access import Hidden, is_admin, is_root
from gpusched.api.ended import FEED, Feed
from gpusched.api.gate import GATE, Gate, retry_after
from gpusched.api.identity import SERVES_ALL, caller_of, known_caller
from gpusched.api.jobs import respond
from gpusched.api.openapi import build
from gpusched.api.pace import MAX_BODY, PACE, too_many
from gpusched.api.routes import ROUTES
from gpusched.api.service import DOCUMENT, SERVICE, Service, service_of
from gpusched.errors import BrokenInvariant, Forbidden, GpuschedError, NotFound, TooMany, UsageError

log = getLogger("gpusched.api")

UNREAD_PER_USER = 256 << 20
"""Bytes of answers that are in memory for one user, beside a single one, which may be larger."""
WARNING = "Gpusched-Warning"
"""Header with a text, percent-encoded, that commands print on stderr."""
MOST_WARNING = 1000
HTTP_LOG = getLogger("gpusched.http")
"""Where aiohttp says what it met."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(service: Service) -> web.Application:
    """The application with all routes."""
    app = web.Application(middlewares=[_errors, _admit], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app[SERVES_ALL] = service.serves_all
    app[PACE] = service.pace
    app[DOCUMENT] = build()
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
    app.on_response_prepare.append(_warn)
    app[FEED] = feed = Feed()
    service.scheduler.listeners.append(service.announce)
    service.scheduler.listeners.append(lambda job_ids: feed.announce(job_ids, service.scheduler.world.jobs))
    return app


def _is_ours(record: LogRecord) -> bool:
    """Whether it is about the daemon: of bytes that are no HTTP the answer tells whoever sent them, and that is all.

    Each of them is 40 KB of the log when it is written down, and costs its sender nothing.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


HTTP_LOG.addFilter(_is_ours)


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GpuschedError as error:
        if isinstance(error, (Forbidden, Hidden, TooMany)):
            _record(request, error)
        return _error(error)
    except web.HTTPNotFound:
        return _error(NotFound(f"there is no {request.method} {request.path}", "see GET /v1/openapi.json"))
    except web.HTTPMethodNotAllowed:
        return _error(UsageError(f"{request.path} does not take {request.method}", "see GET /v1/openapi.json"))
    except web.HTTPRequestEntityTooLarge:
        return _error(UsageError(f"the request is larger than {MAX_BODY >> 20} MiB", "submit less at once"))
    except web.HTTPException:
        raise
    except RecursionError:
        return _error(UsageError("something in the request is nested too deeply", "write it flatter"))
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error(BrokenInvariant("the daemon met an error of its own", "the log has it: gpusched daemon status"))


async def _warn(request: web.Request, response: web.StreamResponse) -> None:
    """Say with every answer to those who can mend it that the config file is not in force."""
    service = service_of(request)
    problem = service.scheduler.settings_problem()
    caller = known_caller(request)
    if problem is not None and caller is not None and is_admin(caller, service.settings):
        response.headers[WARNING] = quote("; ".join(problem)[:MOST_WARNING])


@web.middleware
async def _admit(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Nobody unknown gets further, and nobody too often."""
    service = service_of(request)
    caller = caller_of(request)
    service.pace.request(caller, service.settings.limit)
    timed = Timed(handler(request))
    gate = request.app.get(GATE)
    try:
        if gate is None:
            return await timed
        with gate.in_use(request):
            response = await timed
        unread = 0 if is_root(caller) else gate.unread_of(caller.uid)
        if unread and unread + len(getattr(response, "body", None) or b"") > UNREAD_PER_USER:
            raise too_many(f"{unread >> 20} MiB of answers to {caller.user} are not taken in", 1.0, "read them first")
        return response
    finally:
        service.pace.spent(caller, timed.busy_s, service.settings.limit)


class Timed:
    """Awaits a coroutine, and knows for how long it has kept the event loop to itself."""

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
    audit = service_of(request).audit
    if audit is not None and (caller := known_caller(request)) is not None:
        audit.refused(caller, f"{request.method} {request.path}", error.message)


def gate_for(app: web.Application, runner: web.AppRunner) -> Gate:
    """The door through which this application's connections come."""
    service = app[SERVICE]
    assert runner.server is not None
    audit = service.audit
    refused = audit.refused if audit is not None else lambda caller, what, why: None
    app[GATE] = gate = Gate(runner.server, lambda: service.settings.limit, refused)
    return gate


def _error(error: GpuschedError) -> web.Response:
    words: dict[str, Any] = {"message": error.message, "hint": error.hint, "code": error.code}
    if error.mistakes:
        words["mistakes"] = [{"message": one.message, "hint": one.hint} for one in error.mistakes]
    response = respond(error=words)
    response.set_status(error.http_status)
    if isinstance(error, TooMany):
        response.headers["Retry-After"] = retry_after(error)
    return response
