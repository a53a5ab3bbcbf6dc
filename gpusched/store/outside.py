"""Files in folders that are others' to change: gone into once, and held from then on.

Whoever may write in a folder can put links and other files in the place of those that are made there, between any two
steps. So SQLite, which opens by name and again and again, works on a file of ours, and only bytes go in and out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

_PIECE = 1 << 20


def is_ours_alone(folder: str) -> bool:
    """Whether nobody else can put anything into a folder, or another one in its place."""
    own = {0, os.geteuid()}
    step, is_last = os.path.realpath(folder), True
    while True:
        found = os.stat(step)
        if found.st_uid not in own:
            return False
        # In a folder such as /tmp nobody takes away what is another's; what is not there yet, anybody makes.
        if found.st_mode & 0o022 and (is_last or not found.st_mode & stat.S_ISVTX):
            return False
        if step == "/":
            return True
        step, is_last = os.path.dirname(step), False


def put(source: str, target: str) -> None:
    """Copy a file of ours to a name there, whole or not at all, for its owner alone. Raises: OSError."""
    folder, name = os.path.split(target)
    part = f"{name}.part-{os.getpid()}"
    around = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        into = os.open(part, flags, 0o600, dir_fd=around)
        try:
            out = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _copy(out, into)
            finally:
                os.close(out)
            os.fsync(into)
            os.replace(part, name, src_dir_fd=around, dst_dir_fd=around)
            os.fsync(around)
        except BaseException:
            try:
                os.unlink(part, dir_fd=around)
            except OSError:
                pass  # somebody else was faster
            raise
        finally:
            os.close(into)
    finally:
        os.close(around)


def take(source: str, target: str, check: Callable[[os.stat_result], None]) -> None:
    """Copy a file there to a new one of ours. Raises: OSError; what `check` raises of the very file that is copied."""
    # Without waiting for somebody at the other end of a pipe.
    out = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check(os.fstat(out))
        into = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _copy(out, into)
        finally:
            os.close(into)
    finally:
        os.close(out)


def _copy(out: int, into: int) -> None:
    while piece := os.read(out, _PIECE):
        while piece:
            piece = piece[os.write(into, piece) :]
