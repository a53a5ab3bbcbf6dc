"""Limits on connections: their number, per user and in total, and how long an idle or slow one is kept.

Sits between the event loop and aiohttp's protocol. If there is no room, the connection idle longest is closed for the
new one: clients reconnect by themselves. Only if all are busy is the new one refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from typing import cast

from aiohttp import web

from gpusched.access import is_root, user_name
from gpusched.api.auth import note_relayed, peer_of
from gpusched.api.rate_limits import too_many
from gpusched.api.transfer import retry_after
from gpusched.errors import TooMany
from gpusched.model.commands import Caller, NodePeer
from gpusched.model.settings import LimitSettings

log = getLogger("gpusched.api")

BEGIN_S = 10.0
"""A connection that has sent no complete request head within this time is closed."""
IDLE_S = 120.0
"""An idle connection is closed after this time."""
STUCK_S = 60.0
"""A client that reads nothing of its answer for this long is disconnected: the answer occupies memory."""


class ConnectionLimiter:
    """Creates the protocol of each new connection, and tracks all open ones."""

    def __init__(
        self,
        inner: Callable[[], asyncio.Protocol],
        limits: Callable[[], LimitSettings],
        refused: Callable[[Caller, str, str], None] = lambda caller, what, why: None,
    ) -> None:
        """Args: inner: makes aiohttp's protocol; refused: called for each refused connection."""
        self._inner = inner
        self._limits = limits
        self._refused = refused
        self._of: dict[int, set[LimitedConnection]] = {}
        self._by_inner: dict[object, LimitedConnection] = {}

    def __call__(self) -> LimitedConnection:
        return LimitedConnection(self, self._inner())

    def relayed(self, peer: NodePeer) -> LimitedConnection:
        """The protocol of a connection from another node."""
        return LimitedConnection(self, self._inner(), peer)

    def __len__(self) -> int:
        return len(self._by_inner)

    def unread_of(self, uid: int) -> int:
        """Bytes of answers that a user has not read yet."""
        return sum(door.unread for door in self._of.get(uid, ()))

    @contextmanager
    def in_use(self, request: web.Request) -> Iterator[None]:
        """Mark the request's connection as busy while the request is answered."""
        door = self._by_inner.get(request.protocol)
        if door is None:
            yield
            return
        door.begin()
        try:
            yield
        finally:
            door.end()

    def take_over(self, request: web.Request, on_lost: Callable[[], None]) -> socket.socket | None:
        """The socket of a request's connection, which is HTTP no more; see `LimitedConnection.take_over`."""
        door = self._by_inner.get(request.protocol)
        return None if door is None else door.take_over(on_lost)

    def cut_taken(self) -> None:
        """Close the connections that are HTTP no more: none of them ends by itself soon."""
        for door in list(self._by_inner.values()):
            if door.is_taken:
                door.cut()

    def enter(self, door: LimitedConnection, uid: int, pid: int | None) -> TooMany | None:
        """Register a new connection; returns the error if there is no room."""
        caller = Caller(uid, user_name(uid), pid)
        if not is_root(caller):
            problem = self._make_room(caller)
            if problem is not None:
                self._refused(caller, "connect", problem.message)
                return problem
        # Only now: making room may have closed the user's only connection.
        self._of.setdefault(uid, set()).add(door)
        self._by_inner[door.inner] = door
        return None

    def leave(self, door: LimitedConnection) -> None:
        self._by_inner.pop(door.inner, None)
        doors = self._of.get(door.uid, set())
        doors.discard(door)
        if not doors:
            self._of.pop(door.uid, None)

    def _make_room(self, caller: Caller) -> TooMany | None:
        limits = self._limits()
        own = self._of.get(caller.uid, set())
        if len(own) >= limits.connections_per_user and not _give_up(own):
            return too_many(
                f"{caller.user} has {len(own)} connections open and all are busy",
                1.0,
                "end some commands that wait or follow",
            )
        if len(self) >= limits.connections:
            # At the cost of the user with the most, so that no user can lock out others.
            most = max((doors for uid, doors in self._of.items() if not is_root(Caller(uid, ""))), key=len, default=own)
            if not (
                _give_up(most) or any(_give_up(doors) for doors in sorted(self._of.values(), key=len, reverse=True))
            ):
                if len(own) + 1 >= len(most):
                    return too_many(f"all {len(self)} connections are busy", 1.0, "try again")
                max(most, key=lambda door: door.since).cut()
        return None


class LimitedConnection(asyncio.Protocol):
    """One connection: forwards everything to aiohttp's protocol, and enforces time limits."""

    def __init__(self, limiter: ConnectionLimiter, inner: asyncio.Protocol, relayed: NodePeer | None = None) -> None:
        self._relayed = relayed
        self.inner = inner
        self.uid = -1
        self.since = 0.0
        """Time of the last change between idle and busy."""
        self._limiter = limiter
        self._is_in = False
        self._was_let_in = False
        self._requests = 0
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] | None = None
        self._stuck: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self._requests == 0

    @property
    def is_taken(self) -> bool:
        """Whether it is HTTP no more."""
        return self._on_lost is not None

    def take_over(self, on_lost: Callable[[], None]) -> socket.socket | None:
        """Another descriptor of the socket, on which nothing is read or written here from now on. It still counts as
        one of its user's connections until this one is closed.

        Args: on_lost: called when that happens. Returns: None for a client that has left answers unread.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return None
        transport.pause_reading()
        self._on_lost = on_lost
        return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))

    @property
    def unread(self) -> int:
        """Bytes that the client has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def begin(self) -> None:
        self._requests += 1
        self._set_timer(None)

    def end(self) -> None:
        self._requests -= 1
        if self.is_idle and self._is_in:
            self._set_timer(IDLE_S)

    def cut(self) -> None:
        self._limiter.leave(self)
        self._is_in = False
        self._set_timer(None)
        if self._transport is not None:
            self._transport.abort()

    def _set_timer(self, wait_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_s is None else loop.call_later(wait_s, self.cut)

    # --- what the event loop calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, or answer with the reason that it is refused."""
        self._transport = cast("asyncio.Transport", transport)
        if self._relayed is not None:
            note_relayed(transport, self._relayed)
        peer = peer_of(transport)
        if peer is None:
            self._transport.abort()
            return
        self.uid = peer[0]
        problem = self._limiter.enter(self, *peer)
        if problem is not None:
            self._transport.write(_answer(problem))
            self._transport.close()
            return
        self._is_in = self._was_let_in = True
        self._set_timer(BEGIN_S)
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._stuck):
            if timer is not None:
                timer.cancel()
        self._limiter.leave(self)
        self._is_in = False
        if self._on_lost is not None:
            self._on_lost()
        if self._was_let_in:
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._is_in else None

    def pause_writing(self) -> None:
        if self._transport is not None and self._stuck is None:
            self._stuck = asyncio.get_running_loop().call_later(STUCK_S, self.cut)
        if self._is_in:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        if self._is_in:
            self.inner.resume_writing()


def _give_up(doors: set[LimitedConnection]) -> bool:
    """Close the connection idle longest; False if none is idle."""
    idle = [door for door in doors if door.is_idle]
    if not idle:
        return False
    min(idle, key=lambda door: door.since).cut()
    return True


def _answer(error: TooMany) -> bytes:
    body = json.dumps(error.answer()).encode()
    head = (
        f"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {retry_after(error)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


CONNECTION_LIMITER: web.AppKey[ConnectionLimiter] = web.AppKey("connection_limiter", ConnectionLimiter)
