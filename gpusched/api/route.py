"""What a route is: a path, and the handler behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from aiohttp import web

from gpusched.api.asked import PATH_ID, Asked, RequestBody, read_asked
from gpusched.api.requests import read_body
from gpusched.api.schema import unknown_field
from gpusched.api.visibility import viewer_of


@dataclass(frozen=True, slots=True)
class Route:
    """One operation."""

    method: str
    path: str
    handler: Callable[..., Awaitable[web.StreamResponse]]
    """Gets who asks and what is asked, which is of the kind that its signature names; then the request itself if it
    takes that. Its docstring says what the operation does."""
    answers: str
    """Keys of the document that hold the result."""
    content: str = "application/json"
    """Media type of the answer."""

    @property
    def summary(self) -> str:
        return " ".join((self.handler.__doc__ or "").split())

    @property
    def asks(self) -> type[Asked]:
        """What it is asked."""
        _, asked, *_ = signature(self.handler, eval_str=True).parameters.values()
        kind: type[Asked] = asked.annotation
        return kind

    def answerer(self) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """What answers requests: it finds out who asks, and reads and checks what is asked."""
        handler, kind = self.handler, self.asks
        has_body, has_id = issubclass(kind, RequestBody), "{id}" in self.path
        takes_request = len(signature(handler).parameters) == 3

        async def answer(request: web.Request) -> web.StreamResponse:
            viewer = viewer_of(request)
            said: dict[str, Any] = await read_body(request) if has_body else dict(request.query)
            if has_id:
                if has_body and PATH_ID in said:
                    raise unknown_field(PATH_ID, [name for name in kind.__struct_fields__ if name != PATH_ID])
                said = {**said, PATH_ID: request.match_info["id"]}
            asked = read_asked(said, kind, is_text=not has_body)
            return await (handler(viewer, asked, request) if takes_request else handler(viewer, asked))

        return answer
