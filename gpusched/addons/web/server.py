"""The process that serves the web page: address, rights, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from gpusched.addons.web.api import ApiProxy
from gpusched.addons.web.app import build_app
from gpusched.addons.web.link import DaemonLink
from gpusched.addons.web.pages import PAGES
from gpusched.addons.web.reports import Reports
from gpusched.addons.web.settings import CONTROL, SUBMIT
from gpusched.addons.web.sign_in import SignIn
from gpusched.client import chosen_socket
from gpusched.errors import DaemonUnreachable, Forbidden, GpuschedError, NotReady, UsageError
from gpusched.model.units import is_digits, printable

PORT = 8760
ANNOUNCE_S = 15.0
"""How often the daemon is notified where the page is; it forgets after a minute."""
_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where the page is served: on loopback, or on a Unix socket for a reverse proxy."""

    host: str = "127.0.0.1"
    port: int = PORT
    socket_path: str | None = None
    public: str | None = None
    """Address of the proxy, as in `https://gpu.lab.org`."""

    @property
    def shown(self) -> str:
        """What a browser opens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.public or f"http://{host}:{self.port}"


def read_address(listen: str | None, socket_path: str | None, public: str | None) -> WebAddress:
    """What the options say. Raises: UsageError."""
    if socket_path is not None:
        if listen is not None:
            raise UsageError("--socket excludes --listen", "see: gpusched web --help")
        if public is None:
            raise UsageError("--socket needs --public", "give the proxy's address: --public https://gpu.lab.org")
    elif public is not None:
        raise UsageError("--public is for a proxy", "add --socket /run/gpusched-web/web.sock")
    if public is not None:
        parts = urlsplit(public)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise UsageError(
                f"{printable(public, 80)!r} is not an address of a site", "for example: --public https://gpu.lab.org"
            )
        return WebAddress(socket_path=os.path.abspath(socket_path or ""), public=public.rstrip("/"))
    if listen is None:
        return WebAddress()
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        is_local = ip_address(host).is_loopback
        number = int(port) if is_digits(port) else -1
        if not 0 <= number <= 65535:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{printable(listen, 60)!r} is not an IP address and port", "for example: --listen 127.0.0.1:8760"
        ) from None
    if not is_local:
        raise UsageError(
            f"{host} is not this machine alone: passwords and sessions would cross the network in the clear",
            "listen on 127.0.0.1 and use an ssh tunnel, or --socket with a reverse proxy that speaks TLS",
        )
    return WebAddress(host, number)


def serve(address: WebAddress, allow: tuple[str, ...], reports: str | None = None) -> None:
    """Serve until stopped. Raises: NotReady, Forbidden, UsageError."""
    if unknown := set(allow) - {CONTROL, SUBMIT}:
        raise UsageError(f"{printable(min(unknown), 40)!r} cannot be allowed", f"known: {CONTROL}, {SUBMIT}")
    if 0 in (os.getuid(), os.geteuid()):
        raise Forbidden(
            "root does not serve the web page: an intruder would be root",
            "run it as yourself, or for all users: sudo systemctl enable --now gpusched-web",
        )
    if reports is not None and not os.path.isdir(reports):
        raise UsageError(
            f"--reports: {printable(reports)} is not a directory", "create it and make it readable by this account"
        )
    asyncio.run(run(address, allow, chosen_socket()[0], reports))


async def run(address: WebAddress, allow: tuple[str, ...], daemon_socket: str, reports: str | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises: NotReady; Forbidden if the daemon does not accept this account."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    link = DaemonLink(daemon_socket)
    site = SignIn(link, address.public, allow)
    api = ApiProxy(daemon_socket, allow)
    runner = web.AppRunner(
        build_app(site, PAGES, api, Reports(reports)),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    announcer: asyncio.Task[None] | None = None
    try:
        address = await _listen(runner, address)
        # Not accepted is reported at once; a daemon that is away may come.
        with contextlib.suppress(DaemonUnreachable):
            await announce(site, address)
        announcer = asyncio.create_task(_keep_announcing(site, address))
        print(f"{address.shown} serves {printable(daemon_socket)}; sign in with: gpusched web open", flush=True)
        await stop.wait()
    finally:
        if announcer is not None:
            announcer.cancel()
        await runner.cleanup()
        await link.close()
        await api.close()
        if address.socket_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.socket_path)


async def announce(site: SignIn, address: WebAddress) -> None:
    """Tell the daemon where the page is, and learn whom it trusts. Raises: the daemon's error."""
    port = None if address.public else address.port
    found = await site.link.ask("POST", "/v1/web/serving", None, {"address": address.shown, "port": port})
    site.user_header = found["user_header"] if address.public else None
    site.proxy_users = tuple(found["proxy_users"])


async def _keep_announcing(site: SignIn, address: WebAddress) -> None:
    problem = ""
    while True:
        await asyncio.sleep(ANNOUNCE_S)
        try:
            await announce(site, address)
            found = ""
        except GpuschedError as error:
            found = error.message
        if found != problem:
            problem = found
            print(f"gpusched web: {printable(found or 'the scheduler answers again')}", file=sys.stderr, flush=True)


async def _listen(runner: web.AppRunner, address: WebAddress) -> WebAddress:
    """Listen; returns the address with its real port. Raises: NotReady."""
    where = address.socket_path or address.shown
    try:
        if address.socket_path is None:
            await web.TCPSite(runner, address.host, address.port).start()
            bound = runner.addresses[0]
            return WebAddress(str(bound[0]), int(bound[1]))
        await web.SockSite(runner, _unix_socket(address.socket_path)).start()
        return address
    except OSError as error:
        raise NotReady(
            f"cannot listen on {printable(where)}: {os.strerror(error.errno or 0)}",
            "choose another one with --listen or --socket; 127.0.0.1:0 picks a free port",
        ) from None


def _unix_socket(path: str) -> socket.socket:
    """A socket at a path, in place of one that a dead process left. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        before = os.umask(0o117)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
    except OSError:
        sock.close()
        raise
    return sock
