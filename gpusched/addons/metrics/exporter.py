"""`gpusched metrics`: the daemon's numbers on standard output, in a file, or over HTTP from a separate process.

It only reads `GET /v1/metrics` from the daemon's socket and never starts a daemon. The daemon itself does not
listen on the network.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from ipaddress import ip_address

from aiohttp import web

from gpusched import paths
from gpusched.client import DaemonConnection, chosen_socket, connect
from gpusched.errors import DaemonUnreachable, GpuschedError, NotReady, UsageError
from gpusched.model import series
from gpusched.model.metrics import CONTENT_TYPES, OPENMETRICS, PROMETHEUS, Page
from gpusched.model.units import is_digits, printable

ASK_TIMEOUT_S = 5.0
"""Below Prometheus's own scrape timeout of ten seconds."""
_INDEX = b"<title>gpusched</title><a href='/metrics'>metrics</a>\n"


def read(form: str) -> str:
    """The metrics page of a running daemon. Raises: DaemonUnreachable, NotReady, or the daemon's error."""
    try:
        with connect(autostart=False) as client:
            return _ask(client, form)
    except DaemonUnreachable as error:
        raise DaemonUnreachable(error.message, f"start it with: {paths.start_command()}") from None


def _ask(client: DaemonConnection, form: str) -> str:
    try:
        return client.text(f"/v1/metrics?format={form}", ASK_TIMEOUT_S)
    except TimeoutError:
        raise NotReady(
            f"the daemon has not answered for {ASK_TIMEOUT_S:g} s", "see its log, or: gpusched doctor"
        ) from None
    except ConnectionError as error:
        raise NotReady(f"the daemon went away: {error.strerror or error}", "try again") from None


def nothing(form: str) -> str:
    """The metrics page without a daemon."""
    page = Page()
    page.put(series.UP, 0)
    return page.text(form)


def write(path: str, form: str) -> None:
    """Write the page to a file atomically; without a daemon, a page that says so. Raises: as `read`."""
    try:
        text = read(form)
    except GpuschedError:
        # Stale numbers would look healthy.
        _replace(path, nothing(form))
        raise
    _replace(path, text)


def _replace(path: str, text: str) -> None:
    folder, name = os.path.split(os.path.abspath(path))
    # Not ending in .prom: the collector reads every such file, even a partial one.
    fd, draft = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            # The collector runs as another user.
            os.fchmod(file.fileno(), 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


# --- over HTTP ------------------------------------------------------------------------------------


def address(text: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:9835`, `[::1]:9835` or `:9835` (this machine alone). Raises: UsageError."""
    host, colon, port = text.rpartition(":")
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if not colon or not is_digits(port) or int(port) > 65535:
            raise ValueError
        if inner:
            ip_address(inner)
        if ":" in inner and inner == host:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{printable(text, 60)!r} is not an IP address and port",
            "for example: gpusched metrics --listen 127.0.0.1:9835",
        ) from None
    return inner or "127.0.0.1", int(port)


class Exporter:
    """Serves GET /metrics. At most one request to the daemon is in flight, regardless of the number of clients."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._trouble: str | None = None

    def app(self) -> web.Application:
        """The application; other pages are 404, methods other than GET and HEAD are 405."""
        app = web.Application(client_max_size=0)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/", self._index)
        return app

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(body=_INDEX, content_type="text/html")

    async def _metrics(self, request: web.Request) -> web.Response:
        form = OPENMETRICS if "application/openmetrics-text" in request.headers.get("Accept", "") else PROMETHEUS
        async with self._lock:
            text = await asyncio.get_running_loop().run_in_executor(None, self._page, form)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPES[form]})

    def _page(self, form: str) -> str:
        trouble = None
        try:
            return read(form)
        except (GpuschedError, OSError) as error:
            # Prometheus must be able to distinguish a dead daemon from a dead exporter.
            trouble = str(error)
            return nothing(form)
        finally:
            if trouble != self._trouble:
                self._trouble = trouble
                say(trouble or "the daemon answers again")


def say(text: str) -> None:
    """One line for the journal."""
    sys.stderr.write(f"gpusched metrics: {printable(text)}\n")
    sys.stderr.flush()


def serve(where: str) -> None:
    """Serve until stopped. Raises: UsageError; NotReady if the address cannot be bound."""
    host, port = address(where)
    if os.geteuid() == 0 and chosen_socket()[0] == paths.SYSTEM_SOCKET:
        say("running as root is not necessary: any user can read the system daemon")
    asyncio.run(_serve(host, port))


async def _serve(host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(Exporter().app(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise NotReady(
                f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
                "choose another address or port; 127.0.0.1:0 picks a free port",
            ) from None
        bound = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        print(f"http://{shown}:{bound[1]}/metrics serves {printable(chosen_socket()[0])}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
