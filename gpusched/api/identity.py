"""Who is at the other end of the socket: SO_PEERCRED, never a field of the request."""

from __future__ import annotations

import os
import pwd
import socket
import struct

from aiohttp import web

from gpusched.daemon.selection import Caller
from gpusched.errors import Forbidden

_UCRED = struct.Struct("3i")


def user_name(uid: int) -> str:
    """Name of a user, or the number as text when the account is gone."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def pid_of(request: web.Request) -> int | None:
    """The kernel's word on which process connected; None when it is gone or not visible from here."""
    transport = request.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        return None
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid or None


def caller_of(request: web.Request) -> Caller:
    """The kernel's word on who connected. Raises: Forbidden for anybody but the owner of this daemon."""
    transport = request.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None:
        raise Forbidden("the connection is gone", "try again")
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise Forbidden(
            f"this scheduler belongs to {user_name(os.geteuid())}, not to {user_name(uid)}",
            "unset GPUSCHED_SOCKET and GPUSCHED_HOME to use your own",
        )
    return Caller(uid, user_name(uid))
