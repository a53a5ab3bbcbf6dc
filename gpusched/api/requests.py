"""Reading requests and writing answers, for all handlers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from time import perf_counter, thread_time
from typing import Any, TypeVar

from aiohttp import web

from gpusched.api.auth import caller_of
from gpusched.api.rate_limits import BODY_S, LEAST_BYTES_PER_S, MAX_BODY
from gpusched.api.render import document, encode
from gpusched.api.schema import read_object
from gpusched.api.service import service_of
from gpusched.api.transfer import body_size, read_within
from gpusched.errors import UsageError
from gpusched.model.states import JobState
from gpusched.model.units import printable

MOST_PARTS = 2_000_000
MOST_NAMES = 500_000
"""Values, and names of values, in one request."""
TURN_S = 0.001
"""A list is built for this long before other requests get a turn."""
_PAUSE_S = 0.02
"""The longest of their turns."""
_NOTHING = 4
"""An idle round of the event loop takes less processor time than this multiple of the shortest one."""
_PIECE = 32
"""Items between two looks at the clock."""
_SMALL = 1 << 16
_LONGEST_NUMBER = 400
"""Digits. Python's time to parse longer numbers grows with the square of their length."""
Item = TypeVar("Item")
_DIGITS = bytes.maketrans(b"123456789", b"000000000")


async def read_body(request: web.Request) -> dict[str, Any]:
    """The request's JSON object. Raises: UsageError."""
    content = await whole_body(request)
    check_parts(content)
    try:
        # With json: lone surrogates are bytes that are not UTF-8 and must survive.
        body = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        raise UsageError("the request is not JSON", "see GET /v1/openapi.json") from None
    return read_object(body, "the request")


def check_parts(content: bytes) -> None:
    """Refuse a JSON text that is slow to parse: the daemon is blocked meanwhile. Raises: UsageError.

    Each value takes at least twenty times its bytes in memory, and each distinct name more than a value.
    """
    if len(content) <= _SMALL:
        return
    # Contents of texts are left out; every value has at most one text and a name.
    plain = content.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    texts = plain.count(b'"') // 2
    if texts <= 2 * MOST_PARTS:
        plain = b"".join(plain.split(b'"')[::2])
        parts, names = sum(map(plain.count, (b",", b"[", b"{"))), plain.count(b":")
        if b"0" * _LONGEST_NUMBER in plain.translate(_DIGITS):
            raise UsageError(f"the request has a number of more than {_LONGEST_NUMBER} digits", "write a smaller one")
    else:
        parts, names = texts // 2, 0
    if parts > MOST_PARTS:
        raise UsageError(f"the request has {parts} values; the maximum is {MOST_PARTS}", "submit less at once")
    if names > MOST_NAMES:
        raise UsageError(f"the request has {names} names; the maximum is {MOST_NAMES}", "submit less at once")


def respond(**content: Any) -> web.Response:
    """A compact JSON document."""
    return web.Response(
        body=json.dumps(document(**content), separators=(",", ":")).encode(), content_type="application/json"
    )


class _Rounds:
    """Rounds of the event loop, and the processor time of the shortest one so far, to know idle ones by."""

    shortest_s = 25e-6

    async def is_next_busy(self) -> bool:
        """Let everybody take a step; whether anybody has."""
        before_s = thread_time()
        await asyncio.sleep(0)
        round_s = thread_time() - before_s
        self.shortest_s = max(1e-6, min(self.shortest_s, round_s))
        return round_s > _NOTHING * self.shortest_s


_rounds = _Rounds()


async def give_way() -> None:
    """Let other requests take all their steps: a submission has some ten, and would wait for a piece behind each."""
    ends_at = perf_counter() + _PAUSE_S
    while perf_counter() < ends_at and await _rounds.is_next_busy():
        pass


async def in_pieces(items: Iterable[Item]) -> AsyncIterator[list[Item]]:
    """Cut a long iterable, which may be lazy; other requests get turns between the pieces."""
    left, ends_at = iter(items), perf_counter() + TURN_S
    while piece := list(islice(left, _PIECE)):
        yield piece
        if perf_counter() > ends_at:
            await give_way()
            ends_at = perf_counter() + TURN_S


async def respond_list(
    name: str, items: Iterable[object], before: dict[str, Any], after: dict[str, Any]
) -> web.Response:
    """A JSON document with a long list, built `in_pieces`, between other keys."""
    text = bytearray(encode(document(**before))[:-1])
    text += f',"{name}":['.encode()
    comma = b""
    async for piece in in_pieces(items):
        text += comma
        text += encode(piece)[1:-1]
        comma = b","
    text += b"]"
    text += b"," + encode(after)[1:] if after else b"}"
    return web.Response(body=text, content_type="application/json")


def words(text: str) -> frozenset[str]:
    """The words of a comma-separated query parameter."""
    return frozenset(word for word in text.split(",") if word)


def states_of(names: Iterable[str]) -> frozenset[JobState]:
    """Job states by name or two-letter form, in any case; `all` is every state. Raises: UsageError."""
    by_name = {state.value: state for state in JobState} | {state.compact: state for state in JobState}
    found = set()
    for name in names:
        if name.lower() == "all":
            return frozenset(JobState)
        state = by_name.get(name.upper())
        if state is None:
            raise UsageError(
                f"{printable(name, 40)!r} is not a job state",
                "states: " + ", ".join(state.value for state in JobState),
            )
        found.add(state)
    return frozenset(found)


async def whole_body(request: web.Request) -> bytes:
    """The body of a request, which must arrive at the rate of a local client. Raises: TooMany, TooSlow, UsageError."""
    if not request.body_exists:
        return b""
    size = body_size(request, MAX_BODY)
    if size is None:
        raise UsageError("the request has no Content-Length", "send it with Content-Length")
    with service_of(request).pace.body(caller_of(request), size):
        return await read_within(request, MAX_BODY, BODY_S + size / LEAST_BYTES_PER_S)
