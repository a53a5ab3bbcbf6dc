"""Dropping snapshots that no job needs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

_ABANDONED_S = 86400
"""Unfinished copies of processes that were killed."""


def prune(
    home: str, keep_days: float, needed: Callable[[], set[str]], alone: Callable[[], AbstractContextManager[None]]
) -> list[str]:
    """Drop the snapshots that nothing was submitted with for so many days, and no unfinished job needs.

    A job that waits, runs or may be tried again is unfinished. Returns the names of what was dropped.
    """
    now = time.time()
    if not _old(home, now, keep_days):
        return []
    # Asked before the lock: nobody who submits shall wait for it. What is chosen anew meanwhile is young.
    kept = needed()
    dropped = []
    with alone():
        for name in _old(home, now, keep_days):
            if name in kept:
                continue
            gone = os.path.join(home, f".gone-{name.lstrip('.')}-{os.getpid()}")
            os.rename(os.path.join(home, name), gone)
            dropped.append(name)
    for name in os.listdir(home):
        if name.startswith(".gone-"):
            path = os.path.join(home, name)
            for folder, _, _ in os.walk(path):
                os.chmod(folder, 0o700)
            shutil.rmtree(path, ignore_errors=True)
    return dropped


def _old(home: str, now: float, keep_days: float) -> list[str]:
    found = []
    for name in sorted(os.listdir(home)):
        is_new = name.startswith(".new-")
        mark = os.path.join(home, name) if is_new else os.path.join(home, name, "about.json")
        try:
            age_s = now - os.stat(mark).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue  # the lock, or gone already
        if age_s > (_ABANDONED_S if is_new else keep_days * 86400):
            found.append(name)
    return found
