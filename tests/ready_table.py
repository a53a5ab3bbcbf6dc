"""New job tables and time series are copies of ones made once: that takes longer than the rest of a daemon's start.

What the migrations make, of nothing and of older tables, is tried in `tests/migrations`, and by each daemon that is not
forked, see `warm`.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import tempfile
from contextlib import suppress

from gpusched.store import schema, series

_migrate = schema._migrate
_connect = series.SeriesFile._connect


def use_ready_tables() -> None:
    """From now on, in this process and those that are forked from it."""
    schema._migrate = _copy_or_migrate
    series.SeriesFile._connect = _copy_and_connect  # type: ignore[method-assign]


def use_migrations() -> None:
    """Make new tables as users' are made again."""
    schema._migrate = _migrate
    series.SeriesFile._connect = _connect  # type: ignore[method-assign]


@functools.cache
def ready_table() -> bytes:
    """The file of one without rows, made by all migrations."""
    with tempfile.TemporaryDirectory(prefix="gpusched-table-") as folder:
        path = os.path.join(folder, "table")
        _migrate(path, schema.MIGRATIONS)
        return _whole(path)


@functools.cache
def ready_series() -> bytes:
    """The file of time series of which there are none."""
    with tempfile.TemporaryDirectory(prefix="gpusched-series-") as folder:
        made = series.SeriesFile(None)
        made._path = os.path.join(folder, "series")
        _connect(made).close()
        return _whole(made._path)


def _whole(path: str) -> bytes:
    """What a table is: it has all in one file once its last connection is closed."""
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    with open(path, "rb") as file:
        return file.read()


def _copy_or_migrate(path: str, names: tuple[str, ...]) -> None:
    if names != schema.MIGRATIONS or os.path.getsize(path):
        _migrate(path, names)
        return
    with open(path, "r+b") as file:
        file.write(ready_table())


def _copy_and_connect(made: series.SeriesFile) -> sqlite3.Connection:
    with suppress(FileExistsError):
        fd = os.open(made._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(ready_series())
    return _connect(made)
