"""`gpusched debug snapshot`: the scheduler's current input as a file."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Annotated

import typer

from gpusched import quickjson
from gpusched.cli import output
from gpusched.client import connect
from gpusched.errors import NotFound, UserError
from gpusched.model.units import plural, printable

app = typer.Typer(help="Collect information for bug reports.", no_args_is_help=True, rich_markup_mode=None)


@app.command("snapshot")
def debug_snapshot(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Destination, readable by you alone; default: standard output."),
    ] = None,
) -> None:
    """Write the scheduler's current input, settings included, as JSON: for `gpusched replay` or a bug report.

    It lists all pending and running jobs with users, accounts and requests, but no commands and no paths. On a system
    scheduler only admins may read it.

    example: gpusched debug snapshot now.json
    """
    _write(file)


def _write(file: str | None) -> None:
    """Write the policy's current input to a file readable by its owner only; without a name to standard output.

    Raises: Forbidden for non-admins, since it contains all users' jobs.
    """
    with connect() as client:
        found = client.call("GET", "/v1/snapshot")
    if file is None or file == "-":
        output.print_json(found)
        return
    _replace(file, quickjson.dumps(found) + "\n")
    snapshot = found["snapshot"]
    waiting = sum(one["total"] for one in snapshot["pending"])
    running = len({held["job_id"] for held in snapshot["allocations"]})
    sys.stdout.write(f"wrote {printable(file)}: {how_many(running, waiting)}\n")


def how_many(running: int, waiting: int) -> str:
    """`1 job runs, 3 wait`."""
    return f"{plural(running, 'job')} run{'s' if running == 1 else ''}, {waiting} wait{'s' if waiting == 1 else ''}"


def _replace(path: str, text: str) -> None:
    if os.path.isdir(path):
        raise UserError(f"{printable(path)} is a folder, not a file", "name a file in it")
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise NotFound(f"no folder {printable(folder)}", "create it: mkdir -p")
    # Created with mode 600, atomically.
    fd, draft = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
