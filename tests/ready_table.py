"""New job tables copied from one that the migrations have made: that takes longer than the rest of a daemon's start.

What the migrations make, of nothing and of older tables, is tried in `tests/migrations`, and by each daemon that is not
forked, see `warm`.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing

from gpusched.store import schema

_migrate = schema._migrate


def use_ready_tables() -> None:
    """From now on, in this process and those that are forked from it."""
    schema._migrate = _copy_or_migrate


def use_migrations() -> None:
    """Make new tables as users' are made again."""
    schema._migrate = _migrate


@functools.cache
def ready_table() -> str:
    """Path of one without rows, made by all migrations."""
    folder = tempfile.mkdtemp(prefix="gpusched-table-")
    atexit.register(_remove, folder, os.getpid())
    path = os.path.join(folder, "table")
    _migrate(path, schema.MIGRATIONS)
    return path


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # and not one that was forked from it
        shutil.rmtree(folder)


def _copy_or_migrate(path: str, names: tuple[str, ...]) -> None:
    if names != schema.MIGRATIONS or os.path.getsize(path):
        _migrate(path, names)
        return
    with closing(sqlite3.connect(ready_table())) as ready, closing(sqlite3.connect(path)) as new:
        new.execute("PRAGMA journal_mode = WAL")
        ready.backup(new)
