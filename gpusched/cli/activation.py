"""--venv and --conda: finds the environment as the user that submits, and runs conda's own scripts.

The job's PATH and variables are set where the job is launched. What scripts of the environment set beyond that
(`etc/conda/activate.d`) is found out here, once, and belongs to the captured environment from then on.
"""

from __future__ import annotations

import os

from gpusched.errors import Refused, UsageError
from gpusched.model.units import closest, printable
from gpusched.paths import MAX_TEXT, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_SCRIPT = 'found=$("$0" shell.posix activate "$1") && eval "$found" >&2 && exec env -0'
_LONGEST_S = 60.0
_OF_SHELLS = ("_", "SHLVL", "PWD", "OLDPWD", "PS1")


def resolve(spec: dict[str, Any]) -> None:
    """Replace `venv` and `conda` of a spec by absolute folders. Raises: UsageError, Refused."""
    if "venv" in spec and "conda" in spec:
        raise UsageError("--venv and --conda were both given", "use one of them")
    if "venv" in spec:
        spec["venv"] = _venv(spec["venv"])
    if "conda" in spec:
        spec["conda"] = conda_prefix(spec["conda"], os.environ)


def _venv(text: str) -> str:
    folder = os.path.abspath(os.path.expanduser(text))
    if os.access(f"{folder}/bin/python", os.X_OK):
        return folder
    parent = os.path.dirname(folder)
    try:
        known = sorted(entry.name for entry in os.scandir(parent) if os.path.exists(f"{entry.path}/pyvenv.cfg"))
    except OSError:
        known = []
    raise Refused(
        f"there is no virtual environment {printable(text, 100)}",
        _those(os.path.basename(folder), known, f"in {printable(parent, 100)}")
        or f"make it with: python3 -m venv {printable(text, 100)}",
    )


def conda_prefix(text: str, env: Mapping[str, str]) -> str:
    """The folder of a conda environment that is given by name or path. Raises: Refused."""
    known = _environments(env)
    folder = os.path.abspath(os.path.expanduser(text)) if "/" in text else known.get(text)
    if folder is not None and os.path.isdir(f"{folder}/conda-meta"):
        return folder
    raise Refused(
        f"there is no conda environment {printable(text, 100)}",
        _those(text, sorted(known), "known to conda") or "give its folder: --conda /path/to/envs/NAME",
    )


def _those(word: str, known: list[str], where: str) -> str:
    if not known:
        return ""
    near = closest(word, known)
    shown = ", ".join(printable(name, 40) for name in known[:8]) + (", ..." if len(known) > 8 else "")
    return (f"did you mean {printable(near)}? " if near else "") + f"{where}: {shown}"


def _conda(env: Mapping[str, str]) -> str | None:
    """The program, as a shell that was set up for conda knows it, or from PATH."""
    for path in (env.get("CONDA_EXE"), *(f"{folder}/conda" for folder in env.get("PATH", "").split(":") if folder)):
        if path and os.access(path, os.X_OK):
            return path
    return None


def _environments(env: Mapping[str, str]) -> dict[str, str]:
    """Folders of environments by name."""
    home = os.path.expanduser("~")
    exe = _conda(env)
    root = env.get("MAMBA_ROOT_PREFIX") or (
        None if exe is None else os.path.dirname(os.path.dirname(os.path.realpath(exe)))
    )
    folders = [*env.get("CONDA_ENVS_PATH", "").split(":"), f"{home}/.conda/envs"]
    found = {}
    try:
        path = f"{home}/.conda/environments.txt"
        with open(path, "rb") as file:
            content = read_at_most(file, MAX_TEXT, printable(path), f"look at: ls -l {path}")
        lines = (line.strip() for line in os.fsdecode(content).split("\n"))
        found.update({os.path.basename(line): line for line in lines if line})
    except OSError:
        pass
    if root:
        folders.insert(0, f"{root}/envs")
        found["base"] = root
    for folder in reversed([folder for folder in folders if folder]):
        try:
            found.update({entry.name: entry.path for entry in os.scandir(folder)})
        except OSError:
            continue
    return {name: path for name, path in found.items() if os.path.isdir(f"{path}/conda-meta")}


def with_scripts(env: dict[str, str], text: str) -> dict[str, str]:
    """A captured environment as conda's own activation makes it. Raises: Refused.

    Unchanged without a conda to ask: then only PATH and conda's variables are set, where the job is launched.
    """
    prefix, exe = conda_prefix(text, os.environ), _conda(os.environ)
    if exe is None or not os.path.isdir(f"{prefix}/etc/conda/activate.d"):
        return env
    import subprocess  # few environments have scripts

    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _SCRIPT, exe, prefix],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{printable(exe)} cannot be asked: {printable(str(error), 200)}", f"try: {exe} info") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise Refused(
            f"conda cannot activate {printable(prefix)}: {printable(said[-1], 200)}",
            f'try: eval "$({printable(exe)} shell.posix activate {printable(prefix)})"',
        )
    words = (word.partition("=") for word in done.stdout.decode("utf-8", "surrogateescape").split("\0"))
    found = {name: value for name, equals, value in words if equals and name not in _OF_SHELLS}
    return {**found, **{name: env[name] for name in _OF_SHELLS if name in env}}
