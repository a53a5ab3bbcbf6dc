"""`gpusched web`: serve the web page, and sign in to it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gpusched import paths
from gpusched.cli import output, tables
from gpusched.cli.admin.daemon import Json
from gpusched.client import DaemonConnection, connect
from gpusched.errors import DaemonUnreachable, NotReady, UsageError
from gpusched.instants import instant
from gpusched.model.units import parse_duration_s, printable

app = typer.Typer(
    help="A web page with cards, queue, timeline and jobs; sign in with: gpusched web open.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


token_app = typer.Typer(
    help="Tokens with which programs use the API at /api/v1/ of the web page.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(token_app, name="token")


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
            help="control: let users cancel, hold and release their jobs; submit: let tokens submit jobs; both as "
            "control,submit. A system scheduler needs [web] allow, too.",
        ),
    ] = None,
    reports: Annotated[
        str | None,
        typer.Option(
            "--reports",
            metavar="DIR",
            help="Show reports of the simulator from this folder: FILE.json from gpusched simulate --json.",
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
    from gpusched.addons.web.server import read_address  # an HTTP server, not needed by other commands
    from gpusched.addons.web.server import serve as serve_page

    words = () if allow is None else tuple(word.strip() for word in allow.split(","))
    serve_page(read_address(listen, socket, public), words, reports)


@app.command("open")
def open_page(
    as_json: Json = False,
    sign_out: Annotated[
        bool, typer.Option("--sign-out", help="Instead, sign out in all browsers; unused codes end, too.")
    ] = False,
) -> None:
    """Print how to open the web page: the ssh tunnel, the address, and a code that signs you in once within a minute.

    example: gpusched web open
    """
    with _connected() as client:
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


# --- tokens ---------------------------------------------------------------------------------------


@token_app.command("create")
def create_token(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What it is for; stories of jobs name it.")],
    scope: Annotated[
        str,
        typer.Option(
            "--scope",
            metavar="SCOPES",
            help="read (always), submit, control (cancel, hold, release, suspend, resume, requeue); "
            "several as submit,control.",
        ),
    ] = "read",
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="How long it lasts, as in 12h or 90d; at most 366d.")
    ] = "90d",
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once; its holder may do with your jobs what its scope says.

    example: gpusched web token create --name ci --scope submit --expires 90d
    """
    try:
        lasts_s = parse_duration_s(expires)
    except ValueError as error:
        raise UsageError(f"--expires: {error}", "for example: --expires 90d") from None
    scopes = [word.strip() for word in scope.split(",")]
    with _connected() as client:
        found = client.call("POST", "/v1/web/tokens", {"name": name, "scope": scopes, "lasts_s": lasts_s})
    if as_json:
        output.print_json(found)
        return
    typer.echo(found["token"])
    rights = ", ".join(found["scope"])
    typer.echo(f"gpusched: {rights} until {instant(found['expires_at'])}; it is not shown again", err=True)


@token_app.command("list")
def list_tokens(
    all_users: Annotated[bool, typer.Option("--all", help="Those of all users, for admins.")] = False,
    as_json: Json = False,
) -> None:
    """List your tokens: scope, last use and end, never the tokens themselves.

    example: gpusched web token list
    """
    with _connected() as client:
        found = client.call("GET", f"/v1/web/tokens{'?all=1' if all_users else ''}")["tokens"]
    if as_json:
        output.print_json({"tokens": found})
        return
    if not found:
        typer.echo("no tokens; make one with: gpusched web token create", err=True)
        return
    titles = ["NAME", *(["USER"] if all_users else []), "SCOPE", "CREATED", "LAST USED", "EXPIRES"]
    rows = [
        [
            one["name"],
            *([one["user"]] if all_users else []),
            ",".join(one["scope"]),
            *(instant(one[key]) for key in ("made_at", "used_at", "expires_at")),
        ]
        for one in found
    ]
    tables.print_table(titles, rows)


@token_app.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As listed.", show_default=False)],
    user: Annotated[str | None, typer.Option("--user", metavar="USER", help="Whose it is; for admins.")] = None,
) -> None:
    """End a token at once.

    example: gpusched web token revoke ci
    """
    with _connected() as client:
        client.call("POST", "/v1/web/tokens/revoke", {"name": name} | ({} if user is None else {"user": user}))
    typer.echo(f"revoked the token {printable(name, 60)}")


def _connected() -> DaemonConnection:
    try:
        return connect(autostart=False)
    except DaemonUnreachable as error:
        raise DaemonUnreachable(error.message, f"start it with: {paths.start_command()}") from None
