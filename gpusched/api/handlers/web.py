"""Signing in to the web page: codes for users, sessions for the web process."""

from __future__ import annotations

import pwd
import time

from aiohttp import web

from gpusched.access import is_root
from gpusched.api.auth import caller_of, check_web_process, known_user
from gpusched.api.requests import check_keys, read_body, respond
from gpusched.api.service import ApiService, service_of
from gpusched.api.web_sessions import CODE_S, SESSION_HEADER
from gpusched.errors import Forbidden, SignedOut, UsageError
from gpusched.model.commands import Caller
from gpusched.model.settings import CONTROL
from gpusched.model.units import printable

_LONGEST = 200


async def code(request: web.Request) -> web.Response:
    """POST /v1/web/code"""
    service, caller = service_of(request), caller_of(request)
    check_keys(await read_body(request))
    if service.daemon.serves_all:
        _refuse_root(caller.uid)
    text, ends_at = service.web.new_code(caller.uid)
    service.daemon.audit(caller, "sign in", "the web page: code")
    return respond(code=text, ends_at=ends_at, lasts_s=CODE_S, serving=service.web.serving())


async def begin(request: web.Request) -> web.Response:
    """POST /v1/web/sessions"""
    service, process = service_of(request), caller_of(request)
    check_web_process(request, process)
    body = await read_body(request)
    check_keys(body, "code", "user", "allow")
    text, name, allow = body.get("code"), body.get("user"), body.get("allow", [])
    if (text is None) == (name is None) or not all(isinstance(one, str) for one in (text or name, *allow)):
        raise UsageError("a session begins with a code or a user", 'for example: {"code": "KD4F-7QXM"}')
    if unknown := set(allow) - {CONTROL}:
        raise UsageError(f"{printable(min(unknown), 40)!r} cannot be allowed", f"known: {CONTROL}")
    uid = service.web.redeem(str(text)[:_LONGEST]) if name is None else _named(service, str(name)[:_LONGEST])
    user = None if uid is None else known_user(uid)
    if uid is None or user is None:
        raise SignedOut("this code is wrong, older than a minute, or used", "get a new one with: gpusched web open")
    scope = frozenset(allow)
    if service.daemon.serves_all:
        _refuse_root(uid)
        scope &= frozenset(service.settings.web.allow)
    token = service.web.begin(uid, scope)
    service.daemon.audit(process, "sign in", f"{user} to the web page")
    return respond(token=token, user=user, uid=uid, scope=sorted(scope))


async def session(request: web.Request) -> web.Response:
    """GET /v1/web/session"""
    service, caller = service_of(request), caller_of(request)
    found = service.web.find(request.headers.get(SESSION_HEADER, ""))
    if found is None:
        raise SignedOut("you are signed out", "sign in with a code from: gpusched web open")
    return respond(user=caller.user, scope=sorted(found.scope), end_at=found.end_at())


async def end(request: web.Request) -> web.Response:
    """POST /v1/web/session/end"""
    service, caller = service_of(request), caller_of(request)
    body = await read_body(request)
    check_keys(body, "everywhere")
    token = request.headers.get(SESSION_HEADER)
    if token is None or body.get("everywhere") is True:
        ended = service.web.end_all(caller.uid)
    else:
        service.web.end(token)
        ended = 1
    service.daemon.audit(caller, "sign out", "the web page")
    return respond(ended=ended)


async def serving(request: web.Request) -> web.Response:
    """POST /v1/web/serving"""
    service, process = service_of(request), caller_of(request)
    check_web_process(request, process)
    body = await read_body(request)
    check_keys(body, "address", "port")
    address, port = body.get("address"), body.get("port")
    if not isinstance(address, str) or not isinstance(port, (int, type(None))):
        raise UsageError("address is no text", 'for example: {"address": "http://127.0.0.1:8760", "port": 8760}')
    service.web.serve({"address": printable(address, _LONGEST), "port": port, "user": process.user})
    settings = service.settings.web
    header = settings.user_header if service.daemon.serves_all else None
    return respond(
        now=time.time(),
        user_header=header,
        proxy_users=list(settings.proxy_users),
        allow=list(settings.allow) if service.daemon.serves_all else [CONTROL],
    )


def _named(service: ApiService, name: str) -> int:
    """The user whom a proxy has signed in. Raises: Forbidden."""
    if not service.daemon.serves_all or service.settings.web.user_header is None:
        raise Forbidden("users sign in with a code here", "a proxy needs [web] user_header: gpusched config show")
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise Forbidden(f"there is no user {printable(name, 60)} here", "ask for an account") from None


def _refuse_root(uid: int) -> None:
    if is_root(Caller(uid, "")):
        raise Forbidden("root does not sign in to the web page", "use an account of your own, see [access] admin_group")
