"""Terminals of this machine and who has them."""

from __future__ import annotations

import os

FOLDER = "/dev/pts"


def owners(folder: str = FOLDER) -> frozenset[int]:
    """Uids of all users with terminals."""
    return frozenset(found.st_uid for _, found in entries(folder))


def entries(folder: str) -> list[tuple[str, os.stat_result]]:
    """Path and status of each terminal; empty where they cannot be listed."""
    found = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        if name.isdecimal():
            path = f"{folder}/{name}"
            try:
                found.append((path, os.lstat(path)))
            except OSError:
                continue  # closed just now
    return found
