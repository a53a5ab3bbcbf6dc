"""Which nodes a step asks for: -N, -w, -x, -r and -m of srun, and files with names of nodes."""

from __future__ import annotations

import os

from gpusched.model.hostlist import expand_all
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.addons.slurm.command import Command
    from gpusched.addons.slurm.step_options import Options

_LONGEST_FILE = 1 << 20


def nodes_asked_for(command: Command, options: Options) -> dict[str, Any]:
    """The fields of POST /v1/steps about nodes and the order of tasks on them. Raises: CommandError."""
    found: dict[str, Any] = {}
    if (text := options.text("nodes")) is not None:
        found["nodes_min"], found["nodes_max"] = _counts(command, text)
    found["relative"] = options.number("relative", None, least=0)
    names = _names(command, options, "nodelist")
    found["exclude"] = None if (out := _names(command, options, "exclude")) is None else _once(out)
    kind = distribution(command, options)
    hostfile = options.text("hostfile")
    if kind is None and hostfile is not None and names is None:
        kind = "arbitrary"
    if kind == "arbitrary":
        if names is None and hostfile is not None:
            names = _read(command, hostfile, "hostfile")
        if names is None:
            raise command.error(
                "-m arbitrary needs a node for each task: name them with -w, or in the file of SLURM_HOSTFILE", 255
            )
        # As in srun the first -n of them count.
        found["hosts"] = names if options.tasks is None else names[: options.tasks]
        if options.tasks is not None and len(names) < options.tasks:
            raise command.error(f"-m arbitrary names {len(names)} nodes for {options.tasks} tasks", 255)
    elif names is not None:
        found["nodelist"] = _once(names)
    found["distribution"] = kind
    return found


def distribution(command: Command, options: Options) -> str | None:
    """The order of tasks over nodes: `block`, `cyclic`, `plane=N`, `arbitrary`; None if not asked for.

    What follows a colon or comma is about sockets and cores, which are not distinguished. Raises: CommandError.
    """
    text = options.text("distribution")
    if text is None:
        return None
    kind = text.lower().partition(",")[0].partition(":")[0]
    if kind in ("", "*", "pack", "nopack"):
        return None
    name, equals, size = kind.partition("=")
    if name == "plane":
        if not equals:
            size = os.environ.get("SLURM_DIST_PLANESIZE", "")
        if is_digits(size) and 0 < len(size) < 6 and int(size):
            return f"plane={int(size)}"
    elif kind in ("block", "cyclic", "arbitrary"):
        return kind
    raise command.error(f'Invalid --distribution specification "{printable(text)}"', 255)


def _counts(command: Command, text: str) -> tuple[int, int | None]:
    low, dash, high = text.partition("-")
    numbers = [low, high] if dash else [low]
    if not all(is_digits(word) and len(word) < 6 and int(word) for word in numbers) or (dash and int(high) < int(low)):
        raise command.error(f'"{printable(text)}" is not a valid node count\nInvalid --nodes specification', 255)
    return int(low), int(high) if dash else None


def _names(command: Command, options: Options, name: str) -> list[str] | None:
    text = options.text(name)
    if text is None:
        return None
    if "/" in text:
        return _read(command, text, name)
    try:
        return expand_all(text)
    except ValueError:
        raise command.error(f"Invalid --{name} specification", 255) from None


def _read(command: Command, path: str, name: str) -> list[str]:
    """Names in a file, one a line, `NAME*TASKS` or lists; what follows a # is a comment."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(_LONGEST_FILE).splitlines()
    except OSError as error:
        raise command.error(f"Unable to open file {printable(path)}: {error.strerror}", 255) from None
    found: list[str] = []
    for line in lines:
        for word in line.partition("#")[0].split():
            names, _, times = word.partition("*")
            try:
                found += [one for one in expand_all(names) for _ in range(min(int(times or 1), 1 << 16))]
            except ValueError:
                raise command.error(f"Invalid --{name} specification: {printable(word)}", 255) from None
    if not found:
        raise command.error(f"file {printable(path)} names no nodes", 255)
    return found


def _once(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))
