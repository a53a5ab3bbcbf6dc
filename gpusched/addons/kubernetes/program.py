"""What a submission runs, as both kinds of file need it: the shell of a script, its name, the words of a command."""

from __future__ import annotations

import os

from gpusched.cli.environment import base_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})


def first_words(script: str) -> list[str]:
    """The interpreter of a script and, as the kernel passes it, one argument; empty without any."""
    first = script.partition("\n")[0]
    return first[2:].strip().split(None, 1) if first.startswith("#!") else []


def is_shell(script: str) -> bool:
    """Whether a shell reads the script, so that `sh -c` and `set --` mean what they mean there."""
    words = first_words(script)
    if words and os.path.basename(words[0]) == "env":
        # `env -S bash -e` is one argument, which is not the name of a program.
        words = words[1:]
    return bool(words) and os.path.basename(words[0]) in _SHELLS


def job_name(spec: dict[str, Any]) -> str:
    """The name that the scheduler would give the job."""
    argv = spec.get("argv") or [""]
    return str(spec.get("name") or spec.get("script_name") or base_name(argv[0]) or "job")


def named_environment(values: Values) -> dict[str, str]:
    """Variables that the submission names, with their values: `-E A=1`, `--export A,B=2`."""
    found: dict[str, str] = {}
    for word in str(values.get("export", "ALL")).split(","):
        name, equals, value = word.partition("=")
        if equals and name:
            found[name] = value
        elif name in os.environ and name not in ("ALL", "NONE"):
            found[name] = os.environ[name]
    found.update(values.get("extra_env", {}))
    return found
