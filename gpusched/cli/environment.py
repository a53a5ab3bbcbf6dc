"""What a job takes over from its submission: environment, folder, file mode mask. Nothing heavy is imported here."""

from __future__ import annotations

import os

from gpusched.errors import Refused, UsageError
from gpusched.model.units import is_variable, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Values


_BASICS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "TZ")
"""Variables kept with --export=NONE: enough to find programs and files."""


def captured(values: Values) -> dict[str, str]:
    """The environment passed to the job."""
    export = values.get("export", "ALL")
    env: dict[str, str] = {}
    names = export.split(",")
    if "ALL" in names:
        env.update(os.environ)
    else:
        env.update({name: os.environ[name] for name in _BASICS if name in os.environ})
    for name in names:
        key, equals, value = name.partition("=")
        if equals and key:
            if not is_variable(key):
                raise UsageError(
                    f"--export: {printable(key, 40)!r} is not the name of a variable: letters, digits and _",
                    "for example: --export ALL,LR=0.1",
                )
            env[key] = value
        elif name in os.environ:
            env[name] = os.environ[name]
    if values.get("conda") is not None:
        from gpusched.cli.activation import with_scripts  # few jobs name an environment

        env = with_scripts(env, values["conda"])
    env.update(values.get("extra_env", {}))
    # The scheduler sets the first two for the job; the last says how the job around this process was submitted.
    for name in ("GPUSCHED_SOCKET", "CUDA_VISIBLE_DEVICES", "SLURM_EXPORT_ENV"):
        env.pop(name, None)
    return env


def named_variables(values: Values) -> list[str]:
    """Variables requested by name, which the scheduler's settings never exclude."""
    names = (name.partition("=")[0] for name in values.get("export", "ALL").split(","))
    return sorted({*(name for name in names if name not in ("", "ALL", "NONE")), *values.get("extra_env", ())})


def umask() -> int:
    """The file mode mask of this process."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def current_folder() -> str:
    """Raises: Refused if it no longer exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise Refused("the current folder no longer exists", "change to another folder, or use -D DIR") from None


def absolute(path: str) -> str:
    """A path from the root on, as short as it can be without following links. Raises: Refused."""
    path = os.path.join(current_folder(), path)
    # What `..` leads to may depend on a link before it.
    return path if ".." in path.split("/") else os.path.normpath(path)


def base_name(path: str) -> str:
    """Default name of a job with this program."""
    return os.path.basename(path)
