"""The application of the web page: headers, hosts and forms, errors as pages, signing in and out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from secrets import token_urlsafe
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web

from gpusched.addons.web.api import BASE, ApiProxy, error_response, is_token
from gpusched.addons.web.reports import REPORTS, Reports
from gpusched.addons.web.settings import CONTROL
from gpusched.addons.web.sign_in import FORM_FIELD, LOGIN_COOKIE, LONGEST_S, SignIn, WrongHost, local_path
from gpusched.addons.web.text import environment
from gpusched.errors import DaemonUnreachable, Forbidden, GpuschedError, NotFound, NotReady, SignedOut, UsageError

log = getLogger("gpusched.addons.web")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Under no-referrer, browsers send forms with `Origin: null`, and they could not be told from those of other sites.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
LIVE = "Gpusched-Live"
"""Header of the script's requests: answers are for it and not for a person."""
MOST_FORM = 1 << 14
LEAST_GZIP = 1 << 10
AGAIN_S = 5
"""A page that says that the scheduler is away looks again after this time."""
_STATIC = Path(__file__).parent / "static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Viewing:
    """One request of a signed-in user."""

    def __init__(self, request: web.Request, site: SignIn, token: str) -> None:
        self.request, self.site, self.token = request, site, token

    @property
    def reports(self) -> Reports:
        return self.request.app[REPORTS]

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The daemon's answer to this user. Raises: the daemon's error."""
        return await self.site.link.get(path, self.token, **query)

    async def page(self, template: str, **values: Any) -> web.Response:
        """The page, or 304 if the browser has it already."""
        session = await self.get("/v1/web/session")
        values |= {
            "user": session["user"],
            "has_reports": self.reports.is_there,
            "may_control": CONTROL in session["scope"] and CONTROL in self.site.allow,
            "form_token": self.site.form_token(self.token),
        }
        return draw(self.request, template, **values)


SITE: web.AppKey[SignIn] = web.AppKey("site", SignIn)


def build_app(
    site: SignIn,
    pages: dict[str, Callable[[Viewing], Awaitable[web.Response]]],
    api: ApiProxy,
    reports: Reports,
) -> web.Application:
    """The application. Args: pages: by path."""
    app = web.Application(middlewares=[_secure, _errors], client_max_size=MOST_FORM)
    app[SITE], app[REPORTS] = site, reports
    for name in environment().list_templates():
        # Compiled now rather than while the first visitor waits.
        environment().get_template(name)
    for path, page in pages.items():
        app.router.add_get(path, _signed_in(page))
    app.router.add_get("/login", _login)
    app.router.add_post("/login", _redeem)
    app.router.add_post("/logout", _logout)
    app.router.add_post("/jobs/{id}/{act:cancel|hold|release}", _act)
    app.router.add_get("/static/{digest}/{name}", _static)
    api.add_to(app)
    return app


def draw(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    """A page. One that was not changed is 304 for the script, which asks every few seconds."""
    values.setdefault("user", None)
    values.setdefault("has_reports", False)
    text = environment().get_template(template).render(path=request.path, static=static_path, **values)
    body = text.encode("utf-8", "replace")
    tag = f'"{sha256(body).hexdigest()[:32]}"'
    if status == 200 and request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers={"ETag": tag})
    return _answer(request, body, "text/html", {"ETag": tag}, status)


def _answer(request: web.Request, body: bytes, kind: str, headers: dict[str, str], status: int = 200) -> web.Response:
    """An answer, with gzip if the browser takes it and it is worth it.

    Lengths would tell others what is on a page that shows their words, but they get none: the cookie is for this site.
    """
    headers = {**headers, "Vary": "Accept-Encoding"}
    response = web.Response(body=body, status=status, content_type=kind, charset="utf-8", headers=headers)
    if len(body) >= LEAST_GZIP and "gzip" in request.headers.get("Accept-Encoding", ""):
        response.enable_compression(web.ContentCoding.gzip)
    return response


# --- what holds for every request -----------------------------------------------------------------


@web.middleware
async def _secure(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPException as error:
        # aiohttp's own errors get the headers, too.
        response = _error_page(request, _of_http(error))
        if error.status == 405:
            response.set_status(405)
            response.headers["Allow"] = error.headers.get("Allow", "GET")
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["Server"] = "gpusched"
    return response


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        request.app[SITE].check_host(request)
        if is_token(request) and not is_api(request):
            raise Forbidden("tokens are for /api/v1/ and open no pages", "sign in with a code from: gpusched web open")
        return await handler(request)
    except SignedOut as error:
        if request.headers.get(LIVE) or request.method != "GET":
            return _error_page(request, error)
        wanted = local_path(request.path_qs)
        where = "/login" if wanted == "/" else "/login?" + urlencode({"next": wanted})
        return web.Response(status=303, headers={"Location": where})
    except GpuschedError as error:
        return _error_page(request, error)
    except web.HTTPException:
        raise
    except Exception:
        # Without the query: what users type there is private.
        log.exception("%s %s", request.method, quote(request.path))
        return _error_page(request, NotReady("could not render this page", "see the log of gpusched web"))


def _of_http(error: web.HTTPException) -> GpuschedError:
    if error.status == 404:
        return NotFound("there is no such page", "go to the overview")
    if error.status == 405:
        return UsageError("this address does not take that method", "see the Allow header")
    return UsageError(error.reason.lower(), "go to the overview")


def is_api(request: web.Request) -> bool:
    """Whether a program asks, rather than a browser."""
    return request.path == BASE or request.path.startswith(f"{BASE}/")


def _error_page(request: web.Request, error: GpuschedError, **who: str) -> web.Response:
    """The page of an error. Args: who: what the menu needs of the signed-in user, if that is known."""
    if is_api(request):
        return error_response(error)
    values: dict[str, Any] = {"error": error, "since": None, "number": error.http_status, **who}
    values["has_reports"] = request.app[REPORTS].is_there
    is_away = isinstance(error, DaemonUnreachable)
    if is_away:
        values["since"] = request.app[SITE].link.away_since or time.time()
    if isinstance(error, SignedOut):
        # Not a page to continue from: the script redirects to the form.
        return web.Response(status=401, text="signed out")
    response = draw(request, "error.html", status=error.http_status, **values)
    if isinstance(error, NotReady):
        response.headers["Refresh"] = str(AGAIN_S)
    if isinstance(error, WrongHost):
        response.headers["Connection"] = "close"
    return response


def _signed_in(page: Callable[[Viewing], Awaitable[web.Response]]) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        site = request.app[SITE]
        token = await site.token_of(request)
        try:
            return await page(Viewing(request, site, token))
        except SignedOut:
            site.forget(token)
            raise
        except NotReady:
            raise
        except GpuschedError as error:
            # The page of the error keeps the menu of whom it is shown to.
            session = await site.link.get("/v1/web/session", token)
            return _error_page(request, error, user=session["user"], form_token=site.form_token(token))

    return handle


# --- signing in and out ---------------------------------------------------------------------------


async def _login(request: web.Request) -> web.Response:
    site = request.app[SITE]
    mark = request.cookies.get(site.cookie_name(request, LOGIN_COOKIE)) or token_urlsafe(16)
    return _login_page(request, mark, request.query.get("next"))


def _login_page(
    request: web.Request, mark: str, wanted: str | None, problem: GpuschedError | None = None
) -> web.Response:
    site = request.app[SITE]
    response = draw(
        request,
        "login.html",
        form_token=site.form_token(mark),
        wanted=local_path(wanted),
        problem=problem,
        status=200 if problem is None else problem.http_status,
    )
    _set_cookie(request, response, LOGIN_COOKIE, mark, 3600)
    return response


async def _redeem(request: web.Request) -> web.Response:
    site, form = request.app[SITE], await request.post()
    mark = request.cookies.get(site.cookie_name(request, LOGIN_COOKIE))
    site.check_form(request, mark, form.get(FORM_FIELD))
    wanted, code = str(form.get("next", "/")), str(form.get("code", ""))
    try:
        token = await site.redeem(code[:100])
    except (SignedOut, Forbidden, UsageError) as error:
        return _login_page(request, mark or "", wanted, error)
    response = web.Response(status=303, headers={"Location": local_path(wanted)})
    _set_cookie(request, response, "", token, LONGEST_S)
    response.del_cookie(site.cookie_name(request, LOGIN_COOKIE), path="/")
    return response


def _set_cookie(request: web.Request, response: web.Response, name: str, value: str, age_s: int) -> None:
    site = request.app[SITE]
    response.set_cookie(
        site.cookie_name(request, name) if name else site.cookie_name(request),
        value,
        max_age=age_s,
        path="/",
        httponly=True,
        samesite="Strict",
        secure=site.origin_of(request).startswith("https://"),
    )


async def _logout(request: web.Request) -> web.Response:
    site = request.app[SITE]
    token = await site.token_of(request)
    site.check_form(request, token, (await request.post()).get(FORM_FIELD))
    try:
        await site.link.ask("POST", "/v1/web/session/end", token, {})
    except SignedOut:
        pass  # it had ended
    site.forget(token)
    response = web.Response(status=303, headers={"Location": "/login"})
    response.del_cookie(site.cookie_name(request), path="/")
    return response


# --- actions --------------------------------------------------------------------------------------


async def _act(request: web.Request) -> web.Response:
    site = request.app[SITE]
    token = await site.token_of(request)
    form = await request.post()
    site.check_form(request, token, form.get(FORM_FIELD))
    if CONTROL not in site.allow:
        raise Forbidden("this page is read-only", "start it with: gpusched web --allow control")
    job, act = request.match_info["id"], request.match_info["act"]
    # Ids of single jobs and tasks: no lists and no words for several.
    if not job.replace("_", "").isdigit() or not job.isascii():
        raise NotFound(f"there is no job {job[:40]}", "go to the queue")
    await site.link.ask("POST", f"/v1/jobs/{act}", token, {"ids": [job]})
    return web.Response(status=303, headers={"Location": f"/jobs/{job}"})


# --- files ----------------------------------------------------------------------------------------


def _files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in _STATIC.iterdir() if path.suffix in _TYPES}


FILES = _files()
_DIGEST = sha256(b"".join(FILES[name] for name in sorted(FILES))).hexdigest()[:16]


def static_path(name: str) -> str:
    """Address of a file, which changes with the content of any."""
    return f"/static/{_DIGEST}/{name}"


async def _static(request: web.Request) -> web.Response:
    body = FILES.get(request.match_info["name"])
    if body is None or request.match_info["digest"] != _DIGEST:
        raise NotFound("there is no such file", "reload the page")
    kind = _TYPES[Path(request.match_info["name"]).suffix]
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return _answer(request, body, kind, headers)
