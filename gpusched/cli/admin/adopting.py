"""gpusched adopt: from what was typed to the request, and what is said of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from gpusched.cli import output
from gpusched.cli.readers import size, time_limit
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import gpu_list, parse_duration_s, printable

_READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "time": time_limit,
    "vram": size("vram_mib"),
    "grace": lambda value: {"grace_s": float(parse_duration_s(value))},
}


def adopt_process(pid: str, wishes: dict[str, str | None], as_json: bool) -> None:
    """Have the daemon adopt it. Raises: UsageError, and what the daemon refuses."""
    if not (pid.isascii() and pid.isdigit()):
        raise UsageError(
            f"{printable(pid, 40)!r} is not the number of a process", "see who is on a GPU with: ginfo --foreign"
        )
    body: dict[str, Any] = {"pid": int(pid)}
    for name, value in wishes.items():
        if value is None:
            continue
        try:
            body.update(_READERS[name](value) if name in _READERS else {name: value})
        except ValueError as error:
            raise UsageError(f"--{name}: {error}", "see: gpusched adopt --help") from None
    with connect() as client:
        adopted = client.call("POST", "/v1/adopt", body)["adopted"]
    if as_json:
        output.print_json({"adopted": adopted})
        return
    gpus = gpu_list(adopted["gpus"])
    typer.echo(f"Adopted process {int(pid)} as job {adopted['id']} (GPU {gpus})")
