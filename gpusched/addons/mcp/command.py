"""`gpusched mcp`: the scheduler as tools of an agent."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from gpusched.errors import NotReady, UsageError
from gpusched.extras import install_command
from gpusched.model.units import printable


def mcp(
    allow: Annotated[
        str | None,
        typer.Option(
            "--allow",
            metavar="WHAT",
            help="submit, control (cancel, hold, release), or both: submit,control. Otherwise read-only.",
        ),
    ] = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print what to paste into the settings of an agent, and exit.")
    ] = False,
) -> None:
    """Serve jobs, queue and cards to an agent, over the Model Context Protocol on standard input and output.

    The agent acts as you, with your rights at most; without --allow it can only look, and plan submissions.

    example: gpusched mcp --config --allow submit
    """
    # ALLOWANCES of gpusched.addons.mcp.tools, which takes longer to import than this.
    words = [] if allow is None else [word.strip() for word in allow.split(",")]
    for word in words:
        if word not in ("submit", "control"):
            raise UsageError(f"--allow {printable(word, 40)!r} is neither submit nor control", "try: submit,control")
    try:
        import mcp as sdk  # noqa: F401  an extra
    except ModuleNotFoundError as error:
        if error.name != "mcp":
            raise
        raise NotReady("gpusched mcp needs the SDK of MCP, which is not installed", install_command("mcp")) from None
    if config:
        typer.echo(json.dumps(_config(words), indent=2))
        return
    if sys.stdin.isatty():
        raise UsageError(
            "gpusched mcp is started by an agent, and talks to it on standard input",
            "print what to paste into its settings with: gpusched mcp --config",
        )
    from gpusched.addons.mcp.server import serve  # takes half a second

    serve(frozenset(words))


def _config(words: list[str]) -> dict[str, object]:
    """What clients keep under `mcpServers`: the command with its whole path, and which scheduler it asks."""
    own = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "gpusched")
    command = own if os.path.exists(own) else "gpusched"
    args = ["mcp", *(["--allow", ",".join(words)] if words else [])]
    env = {name: os.environ[name] for name in ("GPUSCHED_SOCKET", "GPUSCHED_HOME") if name in os.environ}
    return {"mcpServers": {"gpusched": {"command": command, "args": args, **({"env": env} if env else {})}}}
