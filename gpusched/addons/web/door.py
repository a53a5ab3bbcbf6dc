"""The daemon's end of the web page: for whom a request of the web process counts, and what it may be.

The peer of the socket is the web process, which the kernel names; a session or a token in a header says for whom it
asks. Neither counts from anybody else.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

from aiohttp import web

from gpusched import paths
from gpusched.access import user_name
from gpusched.addons.web.sessions import SESSION_HEADER, WebSessions
from gpusched.addons.web.settings import web_settings
from gpusched.addons.web.tokens import READ, SCOPES, TOKEN_HEADER, ApiTokens, scope_of
from gpusched.api.auth import node_peer_of
from gpusched.api.service import ApiService, service_of
from gpusched.errors import Forbidden, SignedOut
from gpusched.model.commands import Caller

DYNAMIC_USERS = "/run/systemd/dynamic-uid"
"""Root's: a link `direct:NAME` to the uid of each, see systemd's core/dynamic-user.c."""


class WebDoor:
    """Sessions and tokens of one daemon, which is what its service has as `door`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.sessions = WebSessions(os.path.join(paths.state_dir(), "web-sessions.json"), now)
        self.tokens = ApiTokens(os.path.join(paths.state_dir(), "web-tokens.json"), now)

    def caller_of(self, request: web.Request, peer: Caller) -> Caller:
        """For whom a request counts: the peer, or whose session or token it presents.

        Raises: Forbidden, SignedOut, TooMany.
        """
        session, token = request.headers.get(SESSION_HEADER), request.headers.get(TOKEN_HEADER)
        if session is not None and token is not None:
            raise Forbidden("a request has a session or a token, not both", "send one of them")
        if session is not None:
            return self._signed_in(request, peer, session)
        return peer if token is None else self._with_token(request, peer, token)

    def turn(self, caller: Caller) -> AbstractContextManager[None]:
        """One request of a token while it is being answered. Raises: TooMany."""
        return self.tokens.turn(caller)

    def _signed_in(self, request: web.Request, peer: Caller, token: str) -> Caller:
        check_web_process(request, peer)
        session = self.sessions.find(token)
        user = None if session is None else known_user(session.uid)
        if session is None or user is None:
            raise SignedOut("you are signed out", "sign in with a code from: gpusched web open")
        if not session.admits(request.method, _route_of(request)):
            raise Forbidden(
                f"the web page may not use {request.method} {request.path}",
                "use the command line, or have it allowed: [web] allow",
            )
        return Caller(session.uid, user, peer.pid)

    def _with_token(self, request: web.Request, peer: Caller, text: str) -> Caller:
        check_web_process(request, peer)
        service, what = service_of(request), f"{request.method} {request.path}"
        try:
            token = self.tokens.find(text)
            if known_user(token.uid) != token.user:
                raise SignedOut(f"the account {token.user} of this token is gone", "ask an admin for an account")
        except SignedOut as error:
            service.daemon.audit_refusal(peer, what, error.message)
            raise
        caller = Caller(token.uid, token.user, peer.pid, through=f"token {token.name}", is_token=True)
        needed = scope_of(request.method, _route_of(request))
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


def door_of(service: ApiService) -> WebDoor:
    """The door of a daemon; its routes exist with it alone."""
    return cast("WebDoor", service.door)


def is_web_process(service: ApiService, caller: Caller) -> bool:
    """Whether the peer is the web process: the configured account, or the owner of a personal daemon."""
    if not service.daemon.serves_all:
        return True
    return caller.uid == _uid_of_service(web_settings(service.settings).user)


def check_web_process(request: web.Request, caller: Caller) -> None:
    """Check that a request comes from the web process itself. Raises: Forbidden."""
    if node_peer_of(request) is not None or not is_web_process(service_of(request), caller):
        raise Forbidden(
            f"only the web process may do this, not {caller.user}", "its account is [web] user: gpusched config show"
        )


def allowed_scopes(service: ApiService) -> frozenset[str]:
    """What tokens may do at all; on a personal scheduler its owner decides by the options of the web process."""
    return frozenset({READ, *web_settings(service.settings).allow}) if service.daemon.serves_all else frozenset(SCOPES)


def known_user(uid: int) -> str | None:
    """The name of an account; None if there is no such account any more."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return user_name(uid) if uid == os.geteuid() else None


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


def _route_of(request: web.Request) -> str:
    """As in the table of routes."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical
