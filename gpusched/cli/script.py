"""Scripts: reading them, their #GSUB and #SBATCH lines, and what is wrong with them in a sentence."""

from __future__ import annotations

import os

from gpusched.cli.job_options import ONLY_TYPED
from gpusched.cli.parse import UsageErrors, parse, split_words
from gpusched.errors import Refused, UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpusched.cli.parse import OptionTable, Values

_INTERPRETERS = {".py": "python", ".R": "Rscript", ".r": "Rscript", ".jl": "julia", ".pl": "perl", ".js": "node"}
"""Who runs a script, by the ending of its name; every other one is taken for one of the shell."""
_MARKS = (b"#GSUB", b"#SBATCH")


def read_file(path: str, what: str = "script", hint: str = "") -> bytes:
    """The bytes of a file that is called `what` when it cannot be read. Raises: Refused with a sentence."""
    shown = printable(path)
    try:
        with open(path, "rb") as file:
            return file.read()
    except IsADirectoryError:
        raise Refused(f"{shown} is a folder, not a {what}", hint or "name a file, for example: gsub train.sh") from None
    except FileNotFoundError:
        raise Refused(f"there is no {what} {shown}", hint or "run a command with: gsub -- COMMAND [ARGS...]") from None
    except OSError as error:
        raise Refused(f"the {what} {shown} cannot be read: {error.strerror}", f"look at: ls -l {shown}") from None


def command_line(typed: Sequence[str], words: Sequence[str]) -> str:
    """The line that submits a command with the options that were typed: without them it would get no GPU."""
    import shlex  # serves a mistake only

    return printable(shlex.join(["gsub", *typed, "--", *words]))


def _without_options(words: Sequence[str]) -> str:
    return command_line((), words)


def check(body: bytes, name: str, line: Callable[[Sequence[str]], str] = _without_options) -> None:
    """What every script must be. Raises: Refused.

    Args: line: that submits this command in place of the script.
    """
    shown = printable(name)
    if not body.strip():
        raise Refused(f"the script {shown} is empty", f"give it a first line {_first_line(name)} and a command")
    if b"\0" in body:
        path = name if "/" in name else f"./{name}"
        raise Refused(f"{shown} holds a NUL byte: it is a program, not a script", f"run it with: {line([path])}")
    if not body.startswith(b"#!"):
        interpreter = _INTERPRETERS.get(os.path.splitext(name)[1])
        run = f"run it with: {line([interpreter, name])}; or " if interpreter else ""
        raise Refused(f"the script {shown} does not begin with #!", f"{run}make its first line {_first_line(name)}")
    if body.split(b"\n", 1)[0].endswith(b"\r"):
        raise Refused(f"the script {shown} has DOS line ends", f"convert it with: sed -i 's/\\r$//' {shown}")


def _first_line(name: str) -> str:
    interpreter = _INTERPRETERS.get(os.path.splitext(name)[1])
    return f"#!/usr/bin/env {interpreter}" if interpreter else "#!/bin/bash"


def directives(table: OptionTable, body: bytes, name: str) -> Values:
    """Values of all #GSUB and #SBATCH lines before the first command.

    Raises: UsageError naming file, line and option of every mistake; an option that is not supported is never ignored.
    """
    values: Values = {}
    mistakes = UsageErrors()
    for number, line in enumerate(body.split(b"\n"), 1):
        stripped = line.strip()
        if not stripped:
            continue
        if not stripped.startswith(b"#"):
            break
        for mark in _MARKS:
            if line.startswith(mark) and line[len(mark) : len(mark) + 1].strip() == b"":
                text = line[len(mark) :].decode("utf-8", "surrogateescape")
                _read_line(table, text, f"{printable(name)}, line {number}: ", values, mistakes)
    mistakes.check()
    return values


def _read_line(table: OptionTable, text: str, where: str, values: Values, mistakes: UsageErrors) -> None:
    try:
        found, operands, _ = parse(table, split_words(text), operands_first=True)
    except ValueError as error:
        mistakes.add(UsageError(str(error), "see: gsub --help"), where)
        return
    except UsageError as error:
        mistakes.add(error, where)
        return
    if operands:
        said = f"{printable(operands[0], 40)!r} is not an option"
        mistakes.add(UsageError(said, "quote a value that holds blanks"), where)
    for key in found:
        if key in ONLY_TYPED:
            name = "--" + key.replace("_", "-")
            mistakes.add(UsageError(f"{name} makes no sense in a script", "give it on the command line"), where)
    for key, value in found.items():
        before = values.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            before.update(value)
        else:
            values[key] = value


def base_name(path: str) -> str:
    """What the job is called after."""
    return os.path.basename(path)
