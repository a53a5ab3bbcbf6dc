"""Writes to the terminals of a user of this machine.

Runs as that user, in a separate process with a deadline. A terminal is written to only if it is one, below
/dev/pts, belongs to that user, and accepts messages (`mesg y`). A stopped one takes what fits, without blocking.
"""

from __future__ import annotations

import os
import stat

from gpusched.engine.linux.terminals import FOLDER, entries
from gpusched.model.units import printable

TERMINALS, MAIL = "terminals:", "sendmail:"
"""In place of the address of a service."""
BUILT_IN = {"@write": TERMINALS, "@mail": MAIL}
"""Names of targets that every user has."""

_MOST_TERMINALS = 8
"""Maximum per user, the most recently used."""
_MOST_TEXT = 2000
_COLUMNS = 400


class Unreached(Exception):
    """Why the user was not reached, in one sentence. `is_final` when a retry would change nothing."""

    def __init__(self, text: str, *, is_final: bool) -> None:
        super().__init__(text)
        self.is_final = is_final


def lines_of(text: str) -> str:
    """Remove everything from the text that a terminal would interpret."""
    return "\n".join(printable(line, _COLUMNS) for line in text[:_MOST_TEXT].strip().splitlines())


def write_to_terminals(text: str, folder: str = FOLDER) -> int:
    """Write to the user's terminals; returns to how many. Raises: Unreached."""
    message = ("\r\n" + lines_of(text).replace("\n", "\r\n") + "\r\n").encode("utf-8", "replace")
    told, deaf = 0, 0
    for path in _terminals(folder)[:_MOST_TERMINALS]:
        try:
            is_told = _write(path, message)
        except OSError:
            # Closed just now, or full because it is stopped.
            is_told = False
        told += is_told
        deaf += not is_told
    if not told:
        why = f"{deaf} refuse messages (mesg n)" if deaf else "none is open"
        # Later the message would be out of date.
        raise Unreached(f"no terminal to write to: {why}", is_final=True)
    return told


def _terminals(folder: str) -> list[str]:
    """The user's own terminals, most recently used first."""
    mine = [(found.st_atime, path) for path, found in entries(folder) if found.st_uid == os.geteuid()]
    return [path for _, path in sorted(mine, reverse=True)]


def _write(path: str, message: bytes) -> bool:
    """Return whether the terminal accepted the message. Raises: OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        is_open = bool(found.st_mode & stat.S_IWGRP)
        if not (stat.S_ISCHR(found.st_mode) and found.st_uid == os.geteuid() and is_open and os.isatty(fd)):
            return False
        return os.write(fd, message) > 0
    finally:
        os.close(fd)
