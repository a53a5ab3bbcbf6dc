"""Touching files with the rights of the user whose job it is, and what a launch that failed says."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _Result = TypeVar("_Result")


class LaunchError(Exception):
    """One sentence: why the job could not be started."""


def as_user(user: str, uid: int, gid: int, action: Callable[[], _Result]) -> _Result:
    """Touch files with the rights of a user. Raises: LaunchError."""
    # Only the effective ids change, and only here: the real ones stay root's, so that the user can
    # neither trace nor signal this process meanwhile.
    groups = os.getgroups()
    own_gid = os.getegid()
    try:
        os.initgroups(user, gid)
    except OSError as error:
        raise LaunchError(f"cannot take the groups of user {user}: {text_of(error)}") from None
    try:
        os.setegid(gid)
        os.seteuid(uid)
        return action()
    except OSError as error:
        raise LaunchError(f"cannot become user {user} (uid {uid}): {text_of(error)}") from None
    finally:
        os.seteuid(0)
        os.setegid(own_gid)
        os.setgroups(groups)


def write_as(uid: int | None, fd: int, data: bytes) -> int:
    """Write into a user's file as that user, or as ourselves for None. Raises: OSError.

    What root writes passes the user's quota and takes the blocks that a file system keeps for root; and some files
    of the kernel ask who writes, not who opened them.
    """
    if uid is None:
        return os.write(fd, data)
    os.seteuid(uid)
    try:
        return os.write(fd, data)
    finally:
        os.seteuid(0)


def text_of(error: BaseException) -> str:
    """What went wrong, without the number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
