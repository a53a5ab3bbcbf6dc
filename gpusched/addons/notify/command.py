"""`gpusched notify`: try the user's own targets."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.addons.notify.own_targets import send_test
from gpusched.cli import output
from gpusched.cli.admin.daemon import Json
from gpusched.model.units import printable

app = typer.Typer(help="Where your jobs send alerts.", no_args_is_help=True, rich_markup_mode=None)


@app.command("test")
def notify_test(
    target: Annotated[str | None, typer.Argument(help="A target of your notify.toml; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Send a test message and report whether it arrived. Exit code 1 when a target was not reached."""
    results = send_test(target)
    if as_json:
        output.print_json({"targets": results})
    else:
        for result in results:
            text = "sent" if result["told"] else f"not sent: {result['error']}"
            typer.echo(f"{result['target']}: {printable(text)}")
    if not all(result["told"] for result in results):
        raise typer.Exit(1)
