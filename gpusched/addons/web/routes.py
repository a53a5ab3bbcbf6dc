"""Signing in to the web page: codes and tokens for users, sessions for the web process."""

from __future__ import annotations

import pwd
import time
from typing import Annotated, Any

from aiohttp import web

from gpusched.access import check_admin, is_root
from gpusched.addons.web.door import allowed_scopes, check_web_process, door_of, known_user
from gpusched.addons.web.sessions import CODE_S, SESSION_HEADER
from gpusched.addons.web.settings import CONTROL, web_settings
from gpusched.addons.web.tokens import SCOPES, TOKEN_HEADER, ApiToken
from gpusched.api.asked import RequestBody, RequestQuery, about, one_of
from gpusched.api.requests import respond
from gpusched.api.route import Route
from gpusched.api.service import ApiService
from gpusched.api.visibility import Viewer
from gpusched.errors import Forbidden, SignedOut, UsageError
from gpusched.model.commands import Caller
from gpusched.model.units import printable

_LONGEST = 200


async def code(viewer: Viewer, _: RequestBody) -> web.Response:
    """A code with which the caller signs in to the web page once, within a minute; serving is null unless a web process
    runs."""
    service, caller = viewer.service, viewer.caller
    if service.daemon.serves_all:
        _refuse_root(caller.uid)
    text, ends_at = door_of(service).sessions.new_code(caller.uid)
    service.daemon.audit(caller, "sign in", "the web page: code")
    return respond(code=text, ends_at=ends_at, lasts_s=CODE_S, serving=door_of(service).sessions.serving())


class SessionBody(RequestBody):
    hint = 'for example: {"code": "KD4F-7QXM"}'
    code: str | None = None
    user: str | None = None
    allow: tuple[str, ...] = ()


async def begin(viewer: Viewer, body: SessionBody, request: web.Request) -> web.Response:
    """Begin a session of the web page, by a code or for a user whom a trusted proxy names; for the web process."""
    service, process = viewer.service, viewer.caller
    check_web_process(request, process)
    if (body.code is None) == (body.user is None):
        raise UsageError("a session begins with a code or a user", body.hint)
    if unknown := set(body.allow) - {CONTROL}:
        raise UsageError(f"{printable(min(unknown), 40)!r} cannot be allowed", f"known: {CONTROL}")
    uid = (
        _named(service, body.user[:_LONGEST])
        if body.user is not None
        else door_of(service).sessions.redeem((body.code or "")[:_LONGEST])
    )
    user = None if uid is None else known_user(uid)
    if uid is None or user is None:
        raise SignedOut("this code is wrong, older than a minute, or used", "get a new one with: gpusched web open")
    scope = frozenset(body.allow)
    if service.daemon.serves_all:
        _refuse_root(uid)
        scope &= frozenset(web_settings(service.settings).allow)
    token = door_of(service).sessions.begin(uid, scope)
    service.daemon.audit(process, "sign in", f"{user} to the web page")
    return respond(token=token, user=user, uid=uid, scope=sorted(scope))


async def session(viewer: Viewer, _: RequestQuery, request: web.Request) -> web.Response:
    """The session of the request."""
    service, caller = viewer.service, viewer.caller
    found = door_of(service).sessions.find(request.headers.get(SESSION_HEADER, ""))
    if found is None:
        raise SignedOut("you are signed out", "sign in with a code from: gpusched web open")
    return respond(user=caller.user, scope=sorted(found.scope), end_at=found.end_at())


class EndSessionBody(RequestBody):
    everywhere: bool = False


async def end(viewer: Viewer, body: EndSessionBody, request: web.Request) -> web.Response:
    """End the session of the request; without one, or with everywhere, all sessions and codes of the caller."""
    service, caller = viewer.service, viewer.caller
    token = request.headers.get(SESSION_HEADER)
    if token is None or body.everywhere:
        ended = door_of(service).sessions.end_all(caller.uid)
    else:
        door_of(service).sessions.end(token)
        ended = 1
    service.daemon.audit(caller, "sign out", "the web page")
    return respond(ended=ended)


class ServingBody(RequestBody):
    hint = 'for example: {"address": "http://127.0.0.1:8760", "port": 8760}'
    address: str
    port: int | None = None


async def serving(viewer: Viewer, body: ServingBody, request: web.Request) -> web.Response:
    """Report where the page is served, at least once a minute; for the web process."""
    service, process = viewer.service, viewer.caller
    check_web_process(request, process)
    facts = {"address": printable(body.address, _LONGEST), "port": body.port, "user": process.user}
    door_of(service).sessions.serve(facts)
    settings = web_settings(service.settings)
    header = settings.user_header if service.daemon.serves_all else None
    return respond(
        now=time.time(),
        user_header=header,
        proxy_users=list(settings.proxy_users),
        allow=list(settings.allow) if service.daemon.serves_all else [CONTROL],
    )


class TokenBody(RequestBody):
    hint = 'for example: {"name": "ci", "scope": ["submit"], "lasts_s": 7776000}'
    name: str
    scope: list[Annotated[str, one_of(SCOPES)]]
    lasts_s: float


async def make_token(viewer: Viewer, body: TokenBody) -> web.Response:
    """Make a token with which a program uses /api/v1/ of the web page; its text is in this answer alone."""
    service, caller = viewer.service, viewer.caller
    if service.daemon.serves_all:
        _refuse_root(caller.uid)
    if refused := sorted(set(body.scope).intersection(SCOPES) - allowed_scopes(service)):
        raise Forbidden(f"tokens may not {refused[0]} here", f'an admin can allow it: [web] allow = ["{refused[0]}"]')
    text, made = door_of(service).tokens.make(caller.uid, caller.user, body.name, frozenset(body.scope), body.lasts_s)
    service.daemon.audit(caller, "token", f"made {body.name}: {', '.join(sorted(made.scope))}")
    return respond(token=text, **_token_json(made))


class TokensQuery(RequestQuery):
    all: Annotated[bool, about("1: those of all users; for admins")] = False


async def tokens(viewer: Viewer, query: TokensQuery) -> web.Response:
    """The caller's tokens."""
    service, caller = viewer.service, viewer.caller
    if query.all:
        check_admin(caller, "list the tokens of all users", service.settings)
    found = door_of(service).tokens.listing(None if query.all else caller.uid)
    return respond(tokens=[_token_json(one) for one in found])


class RevokeBody(RequestBody):
    hint = "list tokens with: gpusched web token list"
    name: str
    user: str | None = None


async def revoke_token(viewer: Viewer, body: RevokeBody) -> web.Response:
    """End a token at once; those of another user for admins."""
    service, caller = viewer.service, viewer.caller
    name, user = body.name, body.user or caller.user
    uid = caller.uid
    if user != caller.user:
        check_admin(caller, "revoke tokens of others", service.settings)
        # Also of an account that is gone.
        uid = next((one.uid for one in door_of(service).tokens.listing(None) if one.user == user), -1)
    door_of(service).tokens.revoke(uid, name)
    service.daemon.audit(caller, "token", f"revoked {printable(name, 60)} of {printable(user, 60)}")
    return respond(revoked=name)


async def token(viewer: Viewer, _: RequestQuery, request: web.Request) -> web.Response:
    """The token of the request."""
    text = request.headers.get(TOKEN_HEADER)
    if text is None:
        raise SignedOut("the request has no token", "list yours with: gpusched web token list")
    return respond(**_token_json(door_of(viewer.service).tokens.find(text)))


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
    if not service.daemon.serves_all or web_settings(service.settings).user_header is None:
        raise Forbidden("users sign in with a code here", "a proxy needs [web] user_header: gpusched config show")
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise Forbidden(f"there is no user {printable(name, 60)} here", "ask for an account") from None


def _refuse_root(uid: int) -> None:
    if is_root(Caller(uid, "")):
        raise Forbidden("root does not sign in to the web page", "use an account of your own, see [access] admin_group")


ROUTES = (
    Route("POST", "/v1/web/code", code, "code, ends_at, lasts_s, serving (address, port, user)"),
    Route("POST", "/v1/web/sessions", begin, "token (for the header Gpusched-Session), user, uid, scope"),
    Route("GET", "/v1/web/session", session, "user, scope, end_at"),
    Route("POST", "/v1/web/session/end", end, "ended"),
    Route("POST", "/v1/web/tokens", make_token, "token, name, user, scope, made_at, used_at, expires_at"),
    Route("GET", "/v1/web/tokens", tokens, "tokens"),
    Route("POST", "/v1/web/tokens/revoke", revoke_token, "revoked"),
    Route("GET", "/v1/web/token", token, "name, user, scope, made_at, used_at, expires_at"),
    Route("POST", "/v1/web/serving", serving, "now, user_header, proxy_users, allow"),
)
