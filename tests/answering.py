"""Handlers of the API as the server calls them: with a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from lab import Lab

from gpusched.api.routes import ROUTES
from gpusched.api.service import SERVICE, ApiService
from gpusched.daemon.facade import DaemonFacade


def answering(handler: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """What reads and checks requests for this handler."""
    (route,) = (route for route in ROUTES if route.handler is handler)
    return route.answerer()


def service(lab: Lab) -> ApiService:
    return ApiService(DaemonFacade(lab.ticker))


def get(lab: Lab, handler: Any, query: str = "") -> dict[str, Any]:
    """The answer of a handler to a request with this query."""
    app = web.Application()
    app[SERVICE] = service(lab)
    answer = asyncio.run(answering(handler)(make_mocked_request("GET", f"/v1/x?{query}", app=app)))

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    return dict(json.loads(answer.body, parse_constant=refuse))
