"""`gpusched web`: serve the web page, and sign in to it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gpusched import paths
from gpusched.cli import output
from gpusched.client import connect
from gpusched.errors import DaemonUnreachable, NotReady
from gpusched.model.units import printable

app = typer.Typer(
    help="A web page with cards, queue, timeline and jobs; sign in with: gpusched web open.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def serve(
    context: typer.Context,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="IP:PORT", help="Loopback address; default: 127.0.0.1:8760; port 0 picks a free one."
        ),
    ] = None,
    socket: Annotated[
        str | None, typer.Option("--socket", metavar="FILE", help="Unix socket for a reverse proxy, with --public.")
    ] = None,
    public: Annotated[
        str | None,
        typer.Option(
            "--public", metavar="URL", help="Address at which the proxy serves the page: https://gpu.lab.org."
        ),
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(
            "--allow",
            metavar="WHAT",
            help="control: let users cancel, hold and release their jobs; a system scheduler needs [web] allow, too.",
        ),
    ] = None,
) -> None:
    """Serve a web page with cards, queue, timeline and jobs, until stopped; read-only unless --allow control.

    Each user signs in with a code from `gpusched web open` and sees what the commands would show. It runs as yourself
    for your own scheduler, and under systemd for all users: sudo systemctl enable --now gpusched-web

    example: gpusched web
    """
    if context.invoked_subcommand is not None:
        return
    try:
        from gpusched.web.server import read_address  # an HTTP server, not needed by other commands
        from gpusched.web.server import serve as serve_page
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise NotReady("the web page needs jinja2", "pip install 'gpusched-lab[web]'") from None

    words = () if allow is None else tuple(word.strip() for word in allow.split(","))
    serve_page(read_address(listen, socket, public), words)


@app.command("open")
def open_page(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document with schema_version.")] = False,
    sign_out: Annotated[
        bool, typer.Option("--sign-out", help="Instead, sign out in all browsers; unused codes end, too.")
    ] = False,
) -> None:
    """Print how to open the web page: the ssh tunnel, the address, and a code that signs you in once within a minute.

    example: gpusched web open
    """
    try:
        client = connect(autostart=False)
    except DaemonUnreachable as error:
        raise DaemonUnreachable(error.message, f"start it with: {paths.start_command()}") from None
    with client:
        if sign_out:
            ended = client.call("POST", "/v1/web/session/end", {"everywhere": True})["ended"]
            typer.echo(f"signed out of {ended} browser{'' if ended == 1 else 's'}")
            return
        found = client.call("POST", "/v1/web/code", {})
    serving = found["serving"]
    if serving is None:
        start = "sudo systemctl enable --now gpusched-web" if paths.finds_system() else "gpusched web"
        raise NotReady("no web page is served", f"start it with: {start}")
    if as_json:
        output.print_json({"address": serving["address"], "code": found["code"], "ends_at": found["ends_at"]})
        return
    port = serving["port"]
    if port is not None:
        typer.echo(f"tunnel:   ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}")
    typer.echo(f"address:  {printable(serving['address'])}")
    typer.echo(f"code:     {found['code']}  (once, within {found['lasts_s']:.0f} s)")
