"""Signing in to the web page: codes and tokens for users, sessions for the web process."""

from __future__ import annotations

import pwd
import time
from typing import Any

from aiohttp import web

from gpusched.access import check_admin, is_root
from gpusched.api.auth import allowed_scopes, caller_of, check_web_process, known_user
from gpusched.api.requests import check_keys, read_body, respond
from gpusched.api.service import ApiService, service_of
from gpusched.api.tokens import SCOPES, TOKEN_HEADER, ApiToken
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


async def make_token(request: web.Request) -> web.Response:
    """POST /v1/web/tokens"""
    service, caller = service_of(request), caller_of(request)
    body = await read_body(request)
    check_keys(body, "name", "scope", "lasts_s")
    name, scope, lasts_s = body.get("name"), body.get("scope"), body.get("lasts_s")
    if not isinstance(name, str) or not isinstance(scope, list) or not all(isinstance(one, str) for one in scope):
        raise UsageError("a token has a name and a scope", 'for example: {"name": "ci", "scope": ["submit"]}')
    if not isinstance(lasts_s, (int, float)) or isinstance(lasts_s, bool):
        raise UsageError("lasts_s is no number of seconds", 'for example: {"lasts_s": 7776000}')
    if service.daemon.serves_all:
        _refuse_root(caller.uid)
    if refused := sorted(set(scope).intersection(SCOPES) - allowed_scopes(service)):
        raise Forbidden(f"tokens may not {refused[0]} here", f'an admin can allow it: [web] allow = ["{refused[0]}"]')
    text, made = service.tokens.make(caller.uid, caller.user, name, frozenset(scope), float(lasts_s))
    service.daemon.audit(caller, "token", f"made {name}: {', '.join(sorted(made.scope))}")
    return respond(token=text, **_token_json(made))


async def tokens(request: web.Request) -> web.Response:
    """GET /v1/web/tokens"""
    service, caller = service_of(request), caller_of(request)
    is_all = request.query.get("all") == "1"
    if is_all:
        check_admin(caller, "list the tokens of all users", service.settings)
    found = service.tokens.listing(None if is_all else caller.uid)
    return respond(tokens=[_token_json(one) for one in found])


async def revoke_token(request: web.Request) -> web.Response:
    """POST /v1/web/tokens/revoke"""
    service, caller = service_of(request), caller_of(request)
    body = await read_body(request)
    check_keys(body, "name", "user")
    name, user = body.get("name"), body.get("user") or caller.user
    if not isinstance(name, str) or not isinstance(user, str):
        raise UsageError("name is no name of a token", "list them with: gpusched web token list")
    uid = caller.uid
    if user != caller.user:
        check_admin(caller, "revoke tokens of others", service.settings)
        # Also of an account that is gone.
        uid = next((one.uid for one in service.tokens.listing(None) if one.user == user), -1)
    service.tokens.revoke(uid, name)
    service.daemon.audit(caller, "token", f"revoked {printable(name, 60)} of {printable(user, 60)}")
    return respond(revoked=name)


async def token(request: web.Request) -> web.Response:
    """GET /v1/web/token"""
    service = service_of(request)
    caller_of(request)
    text = request.headers.get(TOKEN_HEADER)
    if text is None:
        raise SignedOut("the request has no token", "list yours with: gpusched web token list")
    return respond(**_token_json(service.tokens.find(text)))


def _token_json(one: ApiToken) -> dict[str, Any]:
    return {
        "name": one.name,
        "user": one.user,
        "scope": sorted(one.scope),
        "made_at": one.made_at,
        "used_at": one.used_at,
        "expires_at": one.expires_at,
    }


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
