"""gpusched daemon: start, stop and inspect the daemon."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from gpusched import paths
from gpusched.cli import output
from gpusched.client import connect, start_daemon
from gpusched.errors import DaemonUnreachable, NotReady, Refused
from gpusched.model.units import format_duration, printable

Json = Annotated[bool, typer.Option("--json", help="One JSON document with schema_version.")]


daemon_app = typer.Typer(help="Start, stop and inspect the daemon.", no_args_is_help=True, rich_markup_mode=None)


@daemon_app.command("start")
def daemon_start() -> None:
    """Start your personal daemon if it is not running. The first gsub does so too."""
    if paths.finds_system():
        raise Refused(
            "this machine has a system scheduler, which systemd starts",
            "start it with: sudo systemctl start gpusched; for a personal one set GPUSCHED_HOME",
        )
    typer.echo("started" if start_daemon() else "already running")


@daemon_app.command("stop")
def daemon_stop() -> None:
    """Stop the daemon; running jobs keep running, and the next daemon takes them over."""
    typer.echo("stopped; jobs keep running" if stop_daemon() else "not running")


def stop_daemon() -> bool:
    """Stop the personal daemon and wait until it is gone; False if none runs. Raises: Refused, NotReady."""
    try:
        client = connect(autostart=False)
    except DaemonUnreachable:
        return False
    with client:
        daemon = client.call("GET", "/v1/status")["daemon"]
        pid = int(daemon["pid"])
        if daemon.get("unit") and paths.finds_system():
            raise Refused(
                f"systemd keeps {daemon['unit']} running and would restart it",
                "stop it with: sudo systemctl stop gpusched; jobs keep running",
            )
        client.call("POST", "/v1/shutdown", {})
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and _is_alive(pid):
        if time.monotonic() > deadline:
            raise NotReady(f"the daemon (pid {pid}) is still running after 30 s", f"kill it with: kill {pid}")
        time.sleep(0.01)
    return True


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@daemon_app.command("status")
def daemon_status(as_json: Json = False) -> None:
    """Show whether the daemon is running, its files and its health. Exit code 1 when it is not running."""
    try:
        client = connect(autostart=False)
    except DaemonUnreachable as error:
        raise DaemonUnreachable(error.message, f"start it with: {paths.start_command()}") from None
    with client:
        facts = client.call("GET", "/v1/status")
    if as_json:
        output.print_json(facts)
        return
    daemon = facts["daemon"]
    jobs = ", ".join(f"{count} {state}" for state, count in daemon["jobs"].items())
    tick = daemon["tick"]
    pace = "-" if tick["p95_ms"] is None else f"{tick['count']} ticks, last {tick['last_ms']:.1f} ms"
    lines = [
        ("version", daemon["version"]),
        ("pid", f"{daemon['pid']}, up {format_duration(daemon['now'] - daemon['started_at'])}"),
        ("jobs", jobs),
        ("GPUs", daemon["gpu_source"] or "not read yet"),
        ("pace", pace),
        ("launcher", daemon["launcher"]),
        *((key, daemon[key]) for key in ("home", "socket", "database", "spool", "log", "config")),
        *(("warning", warning) for warning in daemon["warnings"]),
    ]
    for name, value in lines:
        typer.echo(f"{name + ':':<10} {printable(str(value))}")
