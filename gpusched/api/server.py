"""The aiohttp application: routes, and every error as one JSON document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from logging import getLogger
from typing import Any

from aiohttp import web

from gpusched.api.ended import FEED, Feed
from gpusched.api.jobs import respond
from gpusched.api.openapi import build
from gpusched.api.routes import ROUTES
from gpusched.api.service import DOCUMENT, SERVICE, Service
from gpusched.errors import BrokenInvariant, GpuschedError, NotFound, UsageError

log = getLogger("gpusched.api")

MAX_BODY = 96 << 20
"""A script at its limit can grow sixfold as JSON escapes; beyond this nothing is read."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(service: Service) -> web.Application:
    """The application with all routes."""
    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
    app[SERVICE] = service
    app[DOCUMENT] = build()
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
    app[FEED] = feed = Feed()
    service.scheduler.listeners.append(service.announce)
    service.scheduler.listeners.append(lambda job_ids: feed.announce(job_ids, service.scheduler.world.jobs))
    return app


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GpuschedError as error:
        return _error(error)
    except web.HTTPNotFound:
        return _error(NotFound(f"there is no {request.method} {request.path}", "see GET /v1/openapi.json"))
    except web.HTTPMethodNotAllowed:
        return _error(UsageError(f"{request.path} does not take {request.method}", "see GET /v1/openapi.json"))
    except web.HTTPRequestEntityTooLarge:
        return _error(UsageError(f"the request is larger than {MAX_BODY >> 20} MiB", "submit less at once"))
    except web.HTTPException:
        raise
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error(BrokenInvariant("the daemon met an error of its own", "the log has it: gpusched daemon status"))


def _error(error: GpuschedError) -> web.Response:
    words: dict[str, Any] = {"message": error.message, "hint": error.hint, "code": error.code}
    if error.mistakes:
        words["mistakes"] = [{"message": one.message, "hint": one.hint} for one in error.mistakes]
    response = respond(error=words)
    response.set_status(error.http_status)
    return response
