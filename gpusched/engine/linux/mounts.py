"""Private /tmp of a run: a folder mounted over the real one, visible only to its processes. Needs root."""

from __future__ import annotations

import ctypes
import os
import time

PLACES = ("/tmp", "/var/tmp")
_NEW_MOUNTS = 0x00020000
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 1 << 19
_INSIDE = "tmp"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(run: str) -> list[str]:
    """Create the folders to mount, one for each of PLACES and on its disk. Raises: OSError."""
    made: list[str] = []
    for place in PLACES:
        # Unguessable, and always new; only root can enter it, whatever is in `tmp`.
        path = f"{place}/gpusched-{run}-{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        made.append(path)
        os.mkdir(f"{path}/{_INSIDE}")
        os.chmod(f"{path}/{_INSIDE}", 0o1777)
    return made


def put_in_place(folders: list[str]) -> None:
    """Mount them for this process and its future children. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS))
    # Later mounts, such as a home on demand, propagate into here; none propagate back.
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE | _SLAVE), None))
    for place, folder in zip(PLACES, folders, strict=True):
        _check(libc.mount(f"{folder}/{_INSIDE}".encode(), place.encode(), None, ctypes.c_ulong(_BIND), None))


def remove(folders: list[str], patience_s: float = 60.0) -> None:
    """Remove them with all their content; the machine's own clean-up handles anything left.

    Args: patience_s: time limit, since the run does not end, and keeps its GPUs, meanwhile.
    """
    until = time.monotonic() + patience_s
    for folder in folders:
        try:
            inside = os.open(f"{folder}/{_INSIDE}", _FOLDER)
            try:
                while names := os.listdir(inside):
                    for name in names:
                        _remove_one(inside, name, until)
            finally:
                os.close(inside)
            os.rmdir(f"{folder}/{_INSIDE}")
            os.rmdir(folder)
        except OSError:
            continue


def _remove_one(top: int, name: str, until: float) -> None:
    """Remove it, or move its content one level up: users can nest folders deeper than any recursion can descend.

    Uses descriptors and follows no links, so that nothing a user left can redirect root. Raises: OSError.
    """
    if time.monotonic() > until:
        raise TimeoutError
    try:
        os.unlink(name, dir_fd=top)
        return
    except (IsADirectoryError, PermissionError):
        pass
    folder = os.open(name, _FOLDER, dir_fd=top)
    try:
        for child in os.listdir(folder):
            try:
                os.unlink(child, dir_fd=folder)
            except (IsADirectoryError, PermissionError):
                os.rename(child, os.urandom(16).hex(), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _check(answer: int) -> None:
    if answer:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
