"""Whether root may run this installation: nobody else can change what is run, and everybody can run the commands."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator

import gpusched

_PLAIN = re.compile(r"/[A-Za-z0-9/._+@-]*")
_MOST_LINKS = 40


def parts_of_installation(folder: str) -> Iterator[str]:
    """Everything that root would run from: commands in `folder`, interpreter, libraries, this package."""
    yield os.path.join(folder, "gpuschedd")
    yield sys.executable
    package = os.path.dirname(os.path.abspath(gpusched.__file__))
    yield from (path for path in sys.path if os.path.exists(path))
    yield from _below(sys.prefix if sys.prefix != sys.base_prefix else package)
    if not package.startswith(sys.prefix + os.sep):
        yield from _below(package)


def _below(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        yield root
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(root, name)))):
            yield os.path.join(root, name)


def first_doubt(paths: Iterable[str]) -> str | None:
    """Why root should not run from one of these, the first found; each part of each path is looked at, links too."""
    known: dict[str, str | None] = {}
    for path in paths:
        for step in _steps(path):
            if step not in known:
                known[step] = doubt(step)
            if known[step] is not None:
                return known[step]
    return None


def is_plain(path: str) -> bool:
    """Whether a unit file takes this path as it is, without quotes."""
    return _PLAIN.fullmatch(path) is not None


def _steps(path: str) -> Iterator[str]:
    """The path and all that leads to it, from the root; where links lead, too."""
    at, left, links = "/", deque(part for part in path.split("/") if part), 0
    yield at
    while left:
        part = left.popleft()
        if part == ".":
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        step = os.path.join(at, part)
        yield step
        try:
            target = os.readlink(step)
        except OSError:
            at = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        at = "/" if target.startswith("/") else at
        left.extendleft(reversed([part for part in target.split("/") if part]))


def doubt(path: str) -> str | None:
    """Why root should not run what is here, or why others cannot; None when all is well."""
    try:
        found = os.lstat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != 0:
        return f"{path} belongs to {_user(found.st_uid)}, who could have root run anything"
    if stat.S_ISLNK(found.st_mode):
        return None
    if mode & 0o002:
        return f"everybody can write {path} (mode {mode:o})"
    if mode & 0o020 and (others := _others_in(found.st_gid)):
        return f"{others} can write {path} through its group (mode {mode:o})"
    if stat.S_ISDIR(found.st_mode) and not mode & 0o001:
        return f"users cannot enter {path} (mode {mode:o}), and so not run the commands"
    # Python makes its own when it cannot read a compiled file.
    if stat.S_ISREG(found.st_mode) and not mode & 0o004 and not path.endswith(".pyc"):
        return f"users cannot read {path} (mode {mode:o}), and so not run the commands"
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _others_in(gid: int) -> str:
    """Somebody other than root who is in a group; empty when nobody is."""
    if gid == 0:
        return ""
    try:
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        return f"group {gid}"
    members = [*members, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid and user.pw_uid)]
    return next((name for name in members if name != "root"), "")
