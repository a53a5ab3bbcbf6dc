"""Small executables named as Slurm's commands: a folder of them for people, and one for the daemon's jobs.

Each starts this very interpreter on `slurm_entry`. It is isolated: neither the current folder
nor variables such as PYTHONPATH, which a job may set for another Python, decide what it loads. Without `site`, which
takes a third of the start, it gets the folders of this installation by name.
"""

from __future__ import annotations

import errno
import os
import shlex
import site
import stat
import sys
from dataclasses import dataclass
from functools import lru_cache

from gpusched import entry_points
from gpusched.slurm_entry import COMMANDS

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_MARK = b"# One of gpusched's Slurm commands."
_FLAGS = "-IS"
_LONGEST_SHEBANG = 127
"""Bytes of a first line that every kernel reads whole; Linux before 5.1 cuts the rest off."""
_READ_BYTES = 4096
"""Enough of a file to find the mark of ours in it."""


def available_commands() -> tuple[str, ...]:
    """The commands of this installation, in the order of `COMMANDS`."""
    return tuple(name for name in COMMANDS if entry_points.where(f"slurm.{name}") is not None)


def import_folders() -> list[str]:
    """What follows the standard library in the path of the commands: this package's folder, then its libraries'."""
    folders = [os.path.dirname(_PACKAGE), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folder for folder in folders if os.path.isdir(folder)))


def executable_text(name: str, python: str | None = None) -> bytes:
    """The executable of one command.

    Args: python: the interpreter, absolute; by default this one.
    """
    python = python or sys.executable
    # !a: a folder may have a name that is not UTF-8.
    program = [
        "import sys",
        f"sys.path += {import_folders()!a}",
        "from gpusched.slurm_entry import main",
        "from gpusched.cli.output import leave",
        f"leave(main({name!r}))",
    ]
    first = os.fsencode(f"#!{python} {_FLAGS}")
    # The kernel splits the line at blanks and knows no quotes.
    if len(first) <= _LONGEST_SHEBANG and not any(letter.isspace() for letter in python):
        return b"\n".join([first, _MARK, *(line.encode("ascii") for line in program), b""])
    words = ["exec", shlex.quote(python), _FLAGS, "-c", shlex.quote("\n".join(program)), '"$@"']
    return b"\n".join([b"#!/bin/sh", _MARK, os.fsencode(" ".join(words)), b""])


def is_ours(path: str) -> bool:
    """Whether this file was written by `write_commands`. A link is not, wherever it leads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        lines = os.read(descriptor, _READ_BYTES).split(b"\n", 2)
    finally:
        os.close(descriptor)
    return len(lines) == 3 and lines[0].startswith(b"#!") and lines[1] == _MARK


def foreign_commands(folder: str) -> list[str]:
    """Names of `COMMANDS` that something else has in this folder: a real Slurm."""
    paths = {name: os.path.join(folder, name) for name in COMMANDS}
    return [name for name, path in paths.items() if os.path.lexists(path) and not is_ours(path)]


def other_slurm(folder: str, search: str) -> str | None:
    """The first real Slurm's command in the folders of `search`, apart from `folder`.

    Args: search: folders with colons between them, as in PATH.
    """
    for one in search.split(":"):
        if one.startswith("/") and not _is_same(one, folder):
            for name in COMMANDS:
                path = os.path.join(one, name)
                if os.access(path, os.X_OK) and not os.path.isdir(path) and not is_ours(os.path.realpath(path)):
                    return path
    return None


def is_on(folder: str, search: str) -> bool:
    """Whether a folder is among those of `search`."""
    return any(one and _is_same(one, folder) for one in search.split(":"))


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


@dataclass(frozen=True, slots=True)
class WrittenCommands:
    """What `write_commands` and `remove_commands` did, by command."""

    changed: tuple[str, ...]
    """Written or removed."""
    kept: tuple[str, ...]
    """Already as they should be, or not ours to remove."""


def write_commands(folder: str) -> WrittenCommands:
    """Write the executables into an existing folder, each at once, and remove those of commands that are gone.

    Without any command there are executables of all, which say so. Files that gpusched did not write stay: see
    `foreign_commands`. Raises: OSError.
    """
    names = [name for name in available_commands() or COMMANDS if name not in foreign_commands(folder)]
    changed = [name for name in names if _write(os.path.join(folder, name), executable_text(name))]
    for name in COMMANDS:
        path = os.path.join(folder, name)
        if name not in names and is_ours(path):
            os.unlink(path)
    return WrittenCommands(tuple(changed), tuple(name for name in names if name not in changed))


def remove_commands(folder: str) -> WrittenCommands:
    """Remove ours from a folder. Raises: OSError."""
    removed = [name for name in COMMANDS if is_ours(os.path.join(folder, name))]
    for name in removed:
        os.unlink(os.path.join(folder, name))
    return WrittenCommands(tuple(removed), tuple(foreign_commands(folder)))


def _write(path: str, text: bytes, mode: int = 0o755) -> bool:
    """Replace a file at once unless it is the same; returns whether it was written."""
    try:
        with open(path, "rb") as file:
            if file.read(len(text) + 1) == text and stat.S_IMODE(os.fstat(file.fileno()).st_mode) == mode:
                return False
    except OSError:
        pass  # none yet, or one that is to be replaced
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        with open(
            os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700), "wb"
        ) as out:
            out.write(text)
            # Regardless of the umask: all users run what root installs, and nothing in it is private.
            os.fchmod(out.fileno(), mode)
        os.rename(draft, path)
    except BaseException:
        try:
            os.unlink(draft)
        except OSError:
            pass  # the first error says why
        raise
    return True


def write_for_jobs(folder: str, *, for_others: bool) -> str | None:
    """Write the folder that the daemon's jobs have at the end of their PATH; returns why they cannot use it, if so.

    It and the folder above it are the daemon's alone.

    Args: for_others: whether jobs run as other users than the daemon.
    """
    if ":" in folder:
        return f"{folder} has a colon in its name, which PATH cannot hold"
    try:
        for one in (os.path.dirname(folder), folder):
            os.makedirs(one, exist_ok=True)
            found = os.lstat(one)
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), one)
            if found.st_uid != os.geteuid():
                return f"{one} belongs to uid {found.st_uid}, not to the scheduler"
            os.chmod(one, 0o755)
        write_commands(folder)
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return f"{folder} is mounted noexec"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    return unreachable_part([folder, sys.executable, *import_folders()]) if for_others else None


def slurm_conf(
    cluster: str, node: str, cpus: int, mem_mib: int, partitions: dict[str, int | None], default: str
) -> str:
    """The text of SLURM_CONF: this machine in Slurm's words, for programs that look into that file.

    Args: partitions: name -> longest time limit in seconds.
    """
    lines = [
        "# Written by gpusched for programs that read slurm.conf; changing it has no effect.",
        f"ClusterName={cluster}",
        f"SlurmctldHost={node}",
        f"NodeName={node} CPUs={cpus} RealMemory={mem_mib} State=UNKNOWN",
    ]
    for name, limit_s in partitions.items():
        limit = "UNLIMITED" if limit_s is None else str(-(-limit_s // 60))
        is_default = "YES" if name == default else "NO"
        lines.append(f"PartitionName={name} Nodes={node} Default={is_default} MaxTime={limit} State=UP")
    return "\n".join(lines) + "\n"


def write_conf(folder: str, text: str) -> None:
    """Put SLURM_CONF beside the folder of the commands, see `conf_beside`. Raises: OSError."""
    _write(conf_beside(folder), text.encode("utf-8"), 0o644)


@lru_cache(maxsize=8)
def conf_beside(folder: str) -> str:
    """Path of SLURM_CONF for a folder of commands."""
    return os.path.join(os.path.dirname(folder), "slurm.conf")


def write_login_path(folder: str) -> None:
    """Put what a login shell reads beside the folder of the commands, see `login_path_beside`. Raises: OSError."""
    quoted = shlex.quote(folder)
    lines = [
        "# Written by gpusched: a login shell resets PATH, and this returns Slurm's commands to its end.",
        "unset BASH_ENV",
        f'case ":$PATH:" in *:{quoted}:*) ;; *) PATH=$PATH:{quoted} ;; esac',
    ]
    _write(login_path_beside(folder), os.fsencode("\n".join(lines) + "\n"), 0o644)


def login_path_beside(folder: str) -> str:
    """Path of the file that adds a folder of commands to the PATH of a login shell, for BASH_ENV."""
    return os.path.join(os.path.dirname(folder), "login-path.sh")


def is_login_bash(script: bytes) -> bool:
    """Whether a script starts with `#!/bin/bash -l`: a bash that reads the profile, and BASH_ENV after it."""
    words = script.partition(b"\n")[0].removeprefix(b"#!").split()
    if words[:2] == [b"/usr/bin/env", b"-S"]:
        del words[:2]
    if not script.startswith(b"#!") or len(words) != 2 or os.path.basename(words[0]) != b"bash":
        return False
    option = words[1]
    return option == b"--login" or (option.startswith(b"-") and not option.startswith(b"--") and b"l" in option)


def unreachable_part(paths: list[str]) -> str | None:
    """A sentence about the first folder or file on the way to these that others than its owner cannot use, if any."""
    for path in paths:
        for at in (path, os.path.realpath(path)):
            parts = at.split("/")
            for part in ("/".join(parts[:number]) for number in range(2, len(parts) + 1)):
                try:
                    mode = os.stat(part).st_mode
                except OSError as error:
                    return f"{part}: {error.strerror}"
                shown = f"{part} (mode {stat.S_IMODE(mode):o})"
                if not mode & 0o001:
                    return f"users cannot {'enter' if stat.S_ISDIR(mode) else 'run'} {shown}"
                if part == at and not mode & 0o004:
                    return f"users cannot read {shown}"
    return None
