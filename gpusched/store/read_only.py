"""Reads the table from outside, for the doctor: writes nothing, whether or not the daemon runs."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import quote

from gpusched import __version__
from gpusched.errors import Forbidden, GpuschedError, NotFound, NotReady, StoreBroken
from gpusched.store.database_file import damaged, explain, not_ours, too_new
from gpusched.store.schema import MIGRATIONS
from gpusched.store.sqlite import BUSY_TIMEOUT_S, SqliteStore


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Findings. With a problem, the rest may be unknown."""

    problem: str | None = None
    hint: str = ""
    schema: int | None = None
    newest_at: float | None = None
    """The last recorded submission or end."""

    @property
    def is_older(self) -> bool:
        """Whether the daemon will migrate it when it starts."""
        return self.schema is not None and self.schema < len(MIGRATIONS)


def store_status(path: str, *, thoroughly: bool) -> StoreStatus | None:
    """Examine the table; None when there is none. Args: thoroughly: also look for damage, which reads all of it."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return None
    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as db:
            return _look(db, path, thoroughly)
    except (sqlite3.Error, OSError) as error:
        return _problem(explain(error, path))


def open_to_read(path: str) -> SqliteStore:
    """Open the table for queries alone: SQLite refuses any write, whether or not the daemon runs.

    Raises: NotFound when there is none; Forbidden when the caller may not read the file; StoreBroken; NotReady.
    """
    try:
        is_there = os.stat(path).st_size > 0
    except FileNotFoundError:
        is_there = False
    except PermissionError:
        raise _not_yours(path) from None
    if not is_there:
        raise NotFound(f"there is no history: {path} does not exist", "submit a first job: gsub --wrap 'hostname'")
    if not os.access(path, os.R_OK):
        raise _not_yours(path)
    db = None
    try:
        db = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)
        found = _look(db, path, thoroughly=False)
        if found.problem is not None:
            raise StoreBroken(found.problem, found.hint)
        if found.is_older:
            raise NotReady(
                f"the database {path} was written by an older release",
                "start the daemon of this release to upgrade it: gpusched daemon start",
            )
        return SqliteStore(db, path)
    except (sqlite3.Error, OSError) as error:
        raise explain(error, path) from error
    except BaseException:
        if db is not None:
            db.close()
        raise


def _not_yours(path: str) -> Forbidden:
    return Forbidden(
        f"the history in {path} is not readable by you", "ask its owner or an admin for a copy, or use sudo"
    )


def _look(db: sqlite3.Connection, path: str, thoroughly: bool) -> StoreStatus:
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if "jobs" not in tables:
        return _problem(not_ours(path, sorted(tables) or ["nothing"]))
    if thoroughly and (problems := [text for (text,) in db.execute("PRAGMA quick_check(3)")]) != ["ok"]:
        return _problem(damaged(path, "; ".join(problems)))
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if schema > len(MIGRATIONS):
        return _problem(too_new(path, schema, len(MIGRATIONS), __version__))
    last = db.execute("SELECT submit_at FROM jobs ORDER BY id DESC LIMIT 1").fetchone()
    (end_at,) = db.execute("SELECT max(end_at) FROM jobs").fetchone()
    instants = [at for at in (end_at, last and last[0]) if at is not None]
    return StoreStatus(schema=schema, newest_at=max(instants, default=None))


def _problem(error: GpuschedError) -> StoreStatus:
    return StoreStatus(error.message, error.hint)
