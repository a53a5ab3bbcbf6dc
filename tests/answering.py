"""Handlers of the API as the server calls them: with a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gpusched.api.routes import ROUTES


def answering(handler: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """What reads and checks requests for this handler."""
    (route,) = (route for route in ROUTES if route.handler is handler)
    return route.answerer()
