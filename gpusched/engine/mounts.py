"""A /tmp of a run's own: a folder that only its processes see in the place of the real one. Needs root."""

from __future__ import annotations

import ctypes
import os

PLACES = ("/tmp", "/var/tmp")
_NEW_MOUNTS = 0x00020000
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 1 << 19
_INSIDE = "tmp"


def make(run: str) -> list[str]:
    """Folders to put in place, one for each of PLACES and on its disk. Raises: OSError."""
    made: list[str] = []
    for place in PLACES:
        # Unguessable, and never one that is there; nobody but root can go into it, whatever is in `tmp`.
        path = f"{place}/gpusched-{run}-{os.urandom(8).hex()}"
        os.mkdir(path, 0o700)
        made.append(path)
        os.mkdir(f"{path}/{_INSIDE}")
        os.chmod(f"{path}/{_INSIDE}", 0o1777)
    return made


def put_in_place(folders: list[str]) -> None:
    """Let this process, and those that it starts, see them. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS))
    # What is mounted later on, a home on demand, still shows up here; nothing goes the other way.
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE | _SLAVE), None))
    for place, folder in zip(PLACES, folders, strict=True):
        _check(libc.mount(f"{folder}/{_INSIDE}".encode(), place.encode(), None, ctypes.c_ulong(_BIND), None))


def remove(folders: list[str]) -> None:
    """Remove them with all that the run left in them; what cannot be removed is the machine's own clean-up's."""
    from shutil import rmtree  # few runs have such folders

    for folder in folders:
        # It walks by descriptors and follows no links, so root is not led astray by what a user left.
        rmtree(folder, ignore_errors=True)


def _check(answer: int) -> None:
    if answer:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
