"""File access with the rights of the job's user, and the error of a failed launch."""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _Result = TypeVar("_Result")


DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH of a job that was submitted without one."""


class LaunchError(Exception):
    """Why the job could not be started, in one sentence."""


class Owner:
    """The user of a run, with the account's groups at its start."""

    def __init__(self, name: str, uid: int, gid: int) -> None:
        """Raises: LaunchError when the groups cannot be read."""
        self.name = name
        self.uid = uid
        self.gid = gid
        try:
            self.groups = os.getgrouplist(name, gid)
        except OSError as error:
            raise LaunchError(f"cannot take the groups of user {name}: {text_of(error)}") from None

    def become(self) -> None:
        """Change the identity of this process for good. Raises: OSError."""
        os.setgroups(self.groups)
        os.setgid(self.gid)
        os.setuid(self.uid)


def as_user(owner: Owner | None, action: Callable[[], _Result]) -> _Result:
    """Access files with the rights of a user; None: with our own. Raises: LaunchError."""
    if owner is None:
        return action()
    # Only the effective ids change, and only here: the real ones stay root's, so that the user can
    # neither trace nor signal this process meanwhile.
    groups = os.getgroups()
    own_gid = os.getegid()
    try:
        os.setgroups(owner.groups)
        os.setegid(owner.gid)
        os.seteuid(owner.uid)
        return action()
    except OSError as error:
        raise LaunchError(f"cannot become user {owner.name} (uid {owner.uid}): {text_of(error)}") from None
    finally:
        os.seteuid(0)
        os.setegid(own_gid)
        os.setgroups(groups)


def write_as(uid: int | None, fd: int, data: bytes) -> int:
    """Write into a user's file as that user, or as ourselves for None. Raises: OSError.

    Writes by root bypass the user's quota and consume the file system's blocks reserved for root; and some kernel files
    check the writer, not the opener.
    """
    if uid is None:
        return os.write(fd, data)
    os.seteuid(uid)
    try:
        return os.write(fd, data)
    finally:
        os.seteuid(0)


def why_unsafe(folder: str, *, for_others: bool) -> str | None:
    """Return why a user could replace another's files in this folder; None when no user can. Raises: OSError.

    Other users may write where the sticky bit protects each user's files. Before root creates something there for
    others, every component of the path counts, including links: no user may redirect root.
    """
    paths = (folder, os.path.realpath(folder))
    steps = [step for path in paths for step in _steps(path)] if for_others else paths
    for step in steps:
        found = os.lstat(step)
        if found.st_uid not in (0, os.geteuid()):
            return f"{step} belongs to uid {found.st_uid}"
        is_shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if is_shared and not stat.S_ISLNK(found.st_mode):
            return f"others can write {step} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _steps(path: str) -> list[str]:
    """`/a/b`: `/`, `/a`, `/a/b`."""
    steps = [path]
    while (above := os.path.dirname(path)) != path:
        path = above
        steps.append(path)
    return steps[::-1]


def text_of(error: BaseException) -> str:
    """The error as text, without its number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
