"""Opens programs that the daemon's own user, root under the system's daemon, executes for the site.

Root executes only what no user could have put there: the path is walked by descriptor, without following a link, and
each folder and the file must be root's alone. What was checked is what is executed, since the descriptor is.
"""

from __future__ import annotations

import os
import stat

from gpusched.engine.linux.as_user import text_of

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class SiteProgramError(Exception):
    """Why a program of the site is not executed, as a sentence."""


def open_site_program(path: str) -> int:
    """Open a program for execution by descriptor. Raises: SiteProgramError."""
    try:
        fd = _open_trusted(path) if os.geteuid() == 0 else os.open(path, _FILE & ~os.O_NOFOLLOW)
    except OSError as error:
        raise SiteProgramError(f"{path} cannot be opened: {text_of(error)}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise SiteProgramError(f"{path} is not a file")
        if not found.st_mode & 0o111:
            raise SiteProgramError(f"{path} is not executable (mode {stat.S_IMODE(found.st_mode):o})")
    except BaseException:
        os.close(fd)
        raise
    return fd


def why_not_executed(path: str) -> str | None:
    """Why a daemon that runs as this process's user would not execute a program of the site, as a sentence."""
    try:
        os.close(open_site_program(path))
    except SiteProgramError as error:
        return str(error)
    return None


def _open_trusted(path: str) -> int:
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or [""]
    shown = "/"
    fd = os.open("/", _FOLDER)
    try:
        _check(fd, shown)
        for part in folders:
            shown = os.path.join(shown, part)
            _refuse_link(fd, part, shown)
            above, fd = fd, os.open(part, _FOLDER, dir_fd=fd)
            os.close(above)
            _check(fd, shown)
        _refuse_link(fd, name, path)
        file = os.open(name, _FILE, dir_fd=fd)
    finally:
        os.close(fd)
    try:
        _check(file, path)
    except BaseException:
        os.close(file)
        raise
    return file


def _refuse_link(folder: int, name: str, shown: str) -> None:
    """A full sentence; a file replaced by a link after this check is not opened either."""
    if name == "..":
        raise SiteProgramError(f"{shown} holds ..: name it by its plain path")
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise SiteProgramError(f"{shown} is a symbolic link: name what it leads to")


def _check(fd: int, shown: str) -> None:
    found = os.fstat(fd)
    if found.st_uid != 0:
        raise SiteProgramError(f"{shown} belongs to uid {found.st_uid}, and root executes only what is root's")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise SiteProgramError(f"others than root can write {shown} (mode {mode:o}), and root executes what is in it")
