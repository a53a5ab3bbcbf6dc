"""Removes snapshots that no job needs, and reports their number and size."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

ABOUT = "about.json"
_ABANDONED_S = 86400
"""Age of unfinished copies whose process was killed."""
_YOUNG_S = 3600
"""One chosen this recently may belong to a submission that the daemon has not received yet."""


@dataclass(frozen=True)
class StoredSnapshot:
    name: str
    root: str
    files: int
    size: int
    """Bytes of its files."""
    used_at: float
    """When it was last used in a submission, UTC epoch seconds."""


def stored_snapshots(home: str) -> list[StoredSnapshot]:
    """The complete snapshots in a folder, least recently used first."""
    found = []
    for name in os.listdir(home) if os.path.isdir(home) else ():
        if name.startswith("."):
            continue
        try:
            with open(os.path.join(home, name, ABOUT), encoding="utf-8") as file:
                about = json.load(file)
                used_at = os.fstat(file.fileno()).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue  # the lock, or gone already
        found.append(StoredSnapshot(name, about["root"], about["files"], about["bytes"], used_at))
    return sorted(found, key=lambda one: (one.used_at, one.name))


def prune(
    home: str,
    keep_days: float,
    total_mib: float,
    needed: Callable[[], set[str]],
    alone: Callable[[], AbstractContextManager[None]],
) -> list[str]:
    """Remove snapshots that no unfinished job needs.

    These are the ones not used for `keep_days`, and, when all exceed `total_mib`, the least recently used.
    A job that is pending, running or may be retried is unfinished. Returns the names of removed snapshots.
    """
    now = time.time()
    if not _due(home, now, keep_days, total_mib, set()):
        return []
    # Asked before the lock, so that no submission waits for it. A snapshot chosen meanwhile is young.
    names = needed()
    dropped = []
    with alone():
        for name in _due(home, now, keep_days, total_mib, names):
            gone = os.path.join(home, f".gone-{name.lstrip('.')}-{os.getpid()}")
            os.rename(os.path.join(home, name), gone)
            dropped.append(name)
    for name in os.listdir(home):
        if name.startswith(".gone-"):
            remove(os.path.join(home, name))
    return dropped


def _due(home: str, now: float, keep_days: float, total_mib: float, needed: set[str]) -> list[str]:
    """Names of snapshots to remove."""
    due = []
    for name in os.listdir(home):
        if name.startswith(".new-"):
            try:
                if now - os.stat(os.path.join(home, name)).st_mtime > _ABANDONED_S:
                    due.append(name)
            except FileNotFoundError:
                continue  # finished meanwhile
    here = stored_snapshots(home)
    too_much = sum(one.size for one in here) - total_mib * (1 << 20)
    for one in here:
        age_s = now - one.used_at
        is_over = age_s > keep_days * 86400 or too_much > 0
        if is_over and age_s > _YOUNG_S and one.name not in needed:
            due.append(one.name)
            too_much -= one.size
    return due


def remove(folder: str) -> None:
    """Remove a folder with read-only folders inside; a missing one is fine."""
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
