"""Identity of the peer on the socket: SO_PEERCRED, never a field of the request."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from weakref import WeakKeyDictionary

from aiohttp import web

from gpusched.access import user_name
from gpusched.api.service import service_of
from gpusched.errors import Forbidden
from gpusched.model.commands import THROUGH, THROUGH_HEADER, Caller, NodePeer

_RELAYED: WeakKeyDictionary[asyncio.BaseTransport, NodePeer] = WeakKeyDictionary()
"""Connections of programs on other nodes."""
_UCRED = struct.Struct("3i")
_CALLER = "caller"


def note_relayed(transport: asyncio.BaseTransport, peer: NodePeer) -> None:
    """Note who is at the other end of a connection from another node."""
    _RELAYED[transport] = peer


def node_peer_of(request: web.Request) -> NodePeer | None:
    """The program on another node that sent the request; None for one on the daemon's own."""
    return None if request.transport is None else _RELAYED.get(request.transport)


def pid_of(request: web.Request) -> int | None:
    """The peer's process as reported by the kernel; None if it has exited or is not visible from here."""
    if node_peer_of(request) is not None:
        return None
    peer = peer_of(request.transport)
    return None if peer is None else peer[1]


def peer_of(transport: asyncio.BaseTransport | None) -> tuple[int, int | None] | None:
    """The peer's uid and process as reported by the kernel; None if it has disconnected."""
    relayed = None if transport is None else _RELAYED.get(transport)
    if relayed is not None:
        return relayed.uid, relayed.pid
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        return None
    try:
        pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError:
        return None
    return uid, pid or None


def known_caller(request: web.Request) -> Caller | None:
    """The caller of a request that `caller_of` has admitted."""
    return request.get(_CALLER)


def caller_of(request: web.Request) -> Caller:
    """The caller as reported by the kernel, or whom the door of an add-on takes it for.

    Raises: Forbidden if a personal daemon is called by another user; what the door raises.
    """
    known = request.get(_CALLER)
    if known is not None:
        return known  # type: ignore[no-any-return]
    peer = peer_of(request.transport)
    if peer is None:
        raise Forbidden("the client closed the connection", "try again")
    uid, pid = peer
    if uid != os.geteuid() and not service_of(request).daemon.serves_all:
        raise Forbidden(
            f"this scheduler belongs to {user_name(os.geteuid())}, not to {user_name(uid)}",
            "unset GPUSCHED_SOCKET and GPUSCHED_HOME to use your own",
        )
    relayed = node_peer_of(request)
    if relayed is not None and relayed.run is None:
        raise Forbidden(
            f"process {relayed.pid} on node {relayed.node} belongs to no running job of {user_name(uid)} there",
            "use gpusched's commands on the daemon's own node, or in a job",
        )
    through = THROUGH.get(request.headers.get(THROUGH_HEADER, ""), "")
    caller = Caller(uid, user_name(uid), pid, through=through)
    door = service_of(request).door
    if door is not None:
        caller = door.caller_of(request, caller)
    request[_CALLER] = caller
    return caller
