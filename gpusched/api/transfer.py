"""HTTP as the daemon and the web process both speak it: bodies are read within limits, errors are one document."""

from __future__ import annotations

import asyncio
import json
import math

from aiohttp import web

from gpusched.errors import GpuschedError, TooMany, TooSlow, UsageError


def body_size(request: web.Request, most: int) -> int | None:
    """The size of a request's body, if it says so. Raises: UsageError for one that is not to be read."""
    if "Content-Encoding" in request.headers:
        # A few bytes can unpack to gigabytes.
        raise UsageError("compressed requests are not accepted", "send it without Content-Encoding")
    size = request.content_length
    if size is not None and size > most:
        raise _too_large(most)
    return size


async def read_within(request: web.Request, most: int, wait_s: float) -> bytes:
    """The body of a request of at most so many bytes. Raises: TooSlow, UsageError."""

    async def read() -> bytes:
        body = bytearray()
        while piece := await request.content.readany():
            body += piece
            if len(body) > most:
                raise _too_large(most)
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), wait_s)
    except asyncio.TimeoutError:
        raise TooSlow(f"only part of the request arrived within {wait_s:.0f} s", "send it again") from None
    except ConnectionError:
        raise UsageError("the connection broke before the whole request arrived", "send it again") from None


def _too_large(most: int) -> UsageError:
    return UsageError(f"the request is larger than {most >> 20} MiB", "submit less at once")


def retry_after(error: TooMany) -> str:
    """The value of the header, in whole seconds."""
    return str(max(1, math.ceil(error.retry_after_s)))


def error_response(error: GpuschedError) -> web.Response:
    """An error as the answer to a request."""
    body = json.dumps(error.answer(), separators=(",", ":")).encode()
    response = web.Response(body=body, status=error.http_status, content_type="application/json")
    if isinstance(error, TooMany):
        response.headers["Retry-After"] = retry_after(error)
    return response
