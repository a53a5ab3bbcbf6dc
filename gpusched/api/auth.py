"""Identity of the peer on the socket: SO_PEERCRED, never a field of the request."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import struct
from weakref import WeakKeyDictionary

from aiohttp import web

from gpusched.access import user_name
from gpusched.api.service import ApiService, service_of
from gpusched.api.tokens import READ, SCOPES, TOKEN_HEADER, scope_of
from gpusched.api.web_sessions import SESSION_HEADER
from gpusched.errors import Forbidden, SignedOut
from gpusched.model.commands import THROUGH, THROUGH_HEADER, Caller, NodePeer

_RELAYED: WeakKeyDictionary[asyncio.BaseTransport, NodePeer] = WeakKeyDictionary()
"""Connections of programs on other nodes."""
_UCRED = struct.Struct("3i")
_CALLER = "caller"
DYNAMIC_USERS = "/run/systemd/dynamic-uid"
"""Root's: a link `direct:NAME` to the uid of each, see systemd's core/dynamic-user.c."""


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
    """The caller as reported by the kernel. Raises: Forbidden if a personal daemon is called by another user."""
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
    session, token = request.headers.get(SESSION_HEADER), request.headers.get(TOKEN_HEADER)
    if session is not None and token is not None:
        raise Forbidden("a request has a session or a token, not both", "send one of them")
    if session is not None:
        caller = _signed_in(request, caller, session)
    elif token is not None:
        caller = _with_token(request, caller, token)
    request[_CALLER] = caller
    return caller


def is_web_process(service: ApiService, caller: Caller) -> bool:
    """Whether the peer is the web process: the configured account, or the owner of a personal daemon."""
    if not service.daemon.serves_all:
        return True
    return caller.uid == _uid_of_service(service.settings.web.user)


def _uid_of_service(name: str) -> int | None:
    """The uid of an account, or of a service with DynamicUser=; None if there is neither."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        pass
    # Where libnss-systemd is not installed, as in a small Debian, only systemd's own record of such users has it.
    try:
        return int(os.readlink(os.path.join(DYNAMIC_USERS, f"direct:{name}")))
    except (OSError, ValueError):
        return None


def check_web_process(request: web.Request, caller: Caller) -> None:
    """Check that a request comes from the web process itself. Raises: Forbidden."""
    service = service_of(request)
    if node_peer_of(request) is not None or not is_web_process(service, caller):
        raise Forbidden(
            f"only the web process may do this, not {caller.user}", "its account is [web] user: gpusched config show"
        )


def _signed_in(request: web.Request, peer: Caller, token: str) -> Caller:
    """The user whose session the web process presents. Raises: Forbidden, SignedOut."""
    check_web_process(request, peer)
    session = service_of(request).web.find(token)
    user = None if session is None else known_user(session.uid)
    if session is None or user is None:
        raise SignedOut("you are signed out", "sign in with a code from: gpusched web open")
    resource = request.match_info.route.resource
    if not session.admits(request.method, "" if resource is None else resource.canonical):
        raise Forbidden(
            f"the web page may not use {request.method} {request.path}",
            "use the command line, or have it allowed: [web] allow",
        )
    return Caller(session.uid, user, peer.pid)


def _with_token(request: web.Request, peer: Caller, text: str) -> Caller:
    """The user whose token the web process presents. Raises: Forbidden, SignedOut, TooMany."""
    check_web_process(request, peer)
    service, resource = service_of(request), request.match_info.route.resource
    what = f"{request.method} {request.path}"
    try:
        token = service.tokens.find(text)
        if known_user(token.uid) != token.user:
            raise SignedOut(f"the account {token.user} of this token is gone", "ask an admin for an account")
    except SignedOut as error:
        service.daemon.audit_refusal(peer, what, error.message)
        raise
    caller = Caller(token.uid, token.user, peer.pid, through=f"token {token.name}", is_token=True)
    needed = scope_of(request.method, "" if resource is None else resource.canonical)
    problem = None
    if needed is None:
        problem = Forbidden(f"tokens may not use {what}", "see GET /api/v1/openapi.json")
    elif needed not in token.scope:
        problem = Forbidden(
            f"the token {token.name} may not {needed}, only {', '.join(sorted(token.scope))}",
            f"make one that may: gpusched web token create --name NAME --scope {needed}",
        )
    elif needed not in allowed_scopes(service):
        problem = Forbidden(f"tokens may not {needed} here", f'an admin can allow it: [web] allow = ["{needed}"]')
    if problem is not None:
        service.daemon.audit_refusal(caller, what, problem.message)
        raise problem
    return caller


def allowed_scopes(service: ApiService) -> frozenset[str]:
    """What tokens may do at all; on a personal scheduler its owner decides by the options of the web process."""
    return frozenset({READ, *service.settings.web.allow}) if service.daemon.serves_all else frozenset(SCOPES)


def known_user(uid: int) -> str | None:
    """The name of an account; None if there is no such account any more."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return user_name(uid) if uid == os.geteuid() else None
