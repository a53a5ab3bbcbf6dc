"""Migration of a database, one numbered SQL file after the other.

sqlite-utils records what was applied, each migration in one transaction with its record and
the new `PRAGMA user_version`: one that fails leaves no trace. It is imported only when there is something
to do, which is once per upgrade; it costs as much as the rest of the daemon's start. Two processes that
migrate at once would collide, so a file lock beside the database is held.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpusched import __version__
from gpusched.errors import NotReady
from gpusched.store.database_file import not_ours, too_new

SQL_FOLDER = Path(__file__).with_name("sql")
MIGRATIONS = (
    *("0001_job_table", "0002_policy", "0003_workflows", "0004_gpu_clearances", "0005_operation"),
    *("0006_fences", "0007_steps", "0008_usage_of_steps", "0009_run_priority"),
    *("0010_drainers", "0011_gangs", "0012_master_ports", "0013_handed_over"),
    *("0014_measured_runs", "0015_mig_layouts", "0016_table_settings", "0017_fillers", "0018_batches"),
    *("0019_step_parts", "0020_cancelled_by", "0021_mentions", "0022_declared_down"),
    *("0023_events_about", "0024_causes_of_drains"),
)
"""In order; a released one never changes. The database's `user_version` counts the applied ones."""

LOCK_TIMEOUT_S = 60.0
SET_NAME = "gpusched"


def ensure_schema(connection: sqlite3.Connection, path: str, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Migrate the database if it is behind; leave a current one alone.

    Raises: StoreBroken when it is newer than this release or another program's, NotReady when another process
    migrates it for too long, and sqlite3.Error.
    """
    if _is_current(connection, path, migrations):
        return
    from filelock import FileLock, Timeout

    try:
        with FileLock(path + ".lock", timeout=LOCK_TIMEOUT_S, mode=0o600):
            if not _is_current(connection, path, migrations):
                _refuse_foreign(connection, path)
                _migrate(path, migrations)
    except Timeout:
        raise NotReady(
            f"another process has been upgrading the database {path} for {LOCK_TIMEOUT_S:.0f} s",
            f"see which one with: fuser {path}.lock",
        ) from None


def _is_current(connection: sqlite3.Connection, path: str, migrations: tuple[str, ...]) -> bool:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
    if found > len(migrations):
        raise too_new(path, found, len(migrations), __version__)
    return bool(found == len(migrations) and journal == "wal")


def _refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "_sqlite_migrations" not in tables:
        raise not_ours(path, sorted(tables))


def _migrate(path: str, names: tuple[str, ...]) -> None:
    from sqlite_utils import Database, Migrations

    steps = Migrations(SET_NAME)
    for version, name in enumerate(names, start=1):
        steps(name=name)(_step(name, version))
    # A separate connection: sqlite-utils changes settings of the one that it is given.
    connection = sqlite3.connect(path)
    try:
        # Counts for a table that is made now; of an older one the space is given back by `gpusched restore`.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        steps.apply(Database(connection, execute_plugins=False))
    finally:
        connection.close()


def _step(name: str, version: int) -> Any:
    def step(db: Any) -> None:
        for statement in statements(name):
            db.conn.execute(statement)
        db.conn.execute(f"PRAGMA user_version = {version}")

    return step


def statements(name: str) -> Iterator[str]:
    """Statements of a migration; run one by one, since `executescript` would commit first."""
    text = ""
    for line in (SQL_FOLDER / f"{name}.sql").read_text(encoding="utf-8").splitlines(keepends=True):
        text += line
        if line.rstrip().endswith(";") and sqlite3.complete_statement(text):
            yield text
            text = ""
