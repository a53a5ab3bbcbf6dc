"""Backups of the job table: made while the daemon writes, and restored while none runs.

A backup is one file, checked before it gets its name, so that every existing backup can be restored. Restoring copies
it; the replaced table is kept beside it.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from urllib.parse import quote

from gpusched import __version__
from gpusched.errors import GpuschedError, NotFound, Refused, StoreBroken
from gpusched.store.database_file import SIDE_FILES, damaged, explain, not_ours, remove_if_there, too_new
from gpusched.store.schema import MIGRATIONS
from gpusched.store.sqlite import BUSY_TIMEOUT_S, SqliteStore, check_library


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """Contents of a backup."""

    path: str
    size_bytes: int
    jobs: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """What was restored."""

    path: str
    kept: str | None
    """Where the replaced table is now; None when there was none."""
    jobs: int
    held: tuple[int, ...]
    """Unfinished jobs that were put on hold."""
    open_runs: frozenset[str]
    """Runs that had not ended when the backup was made."""
    next_id: int


def backup(database: str, target: str, record: str | None = None) -> BackupSummary:
    """Back up the table's state at one instant to a file readable by its owner alone; replaces a backup of that name.

    Args: record: the record of settings, kept in the backup too.
    Raises: NotFound when there is no table, or no folder for the target; Refused when the target is something else;
    StoreBroken when the copy, and thus the table, is damaged; StoreFull, NotReady.
    """
    check_library()
    if not os.path.exists(database):
        raise NotFound(f"there is no database {database} yet", "the first gsub creates it; see: gpusched doctor")
    target = os.path.abspath(target)
    _refuse_target(database, target)
    with _explained(target):
        is_safe = _is_ours_alone(os.path.dirname(target))
        # Otherwise it is made beside the table, where no other user can replace it.
        part = f"{target if is_safe else database}.part-{os.getpid()}"
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with closing(_open(database, "ro")) as source, closing(sqlite3.connect(part)) as copy:
                with _explained(database):
                    _check_version(source, database)
                # In one step: writers continue, and their changes do not restart it.
                source.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
                _check_sound(copy, database)
                if record is not None:
                    _keep_record(copy, record)
                jobs, unfinished = _counts(copy)
            if is_safe:
                _sync(part)
                os.replace(part, target)
                _sync(os.path.dirname(target))
            else:
                _copy_out(part, target)
        finally:
            _remove(part, *(part + suffix for suffix in (*SIDE_FILES, "-journal")))
        return BackupSummary(target, os.path.getsize(target), jobs, unfinished)


def restore(
    source: str | None,
    database: str,
    *,
    hold: bool,
    ids_in_use: Iterable[int] = (),
    pipelines_in_use: Iterable[int] = (),
    by: str = "",
    record: str | None = None,
) -> RestoreSummary:
    """Replace the table with a backup. The caller holds the daemon's lock.

    The copy is migrated to the schema of this release; ids assigned since the backup are not assigned again.

    Args: source: the backup; None: an empty table. hold: put unfinished jobs on hold, since they may have run
    meanwhile. ids_in_use, pipelines_in_use: those known from elsewhere to have been assigned. by: the user named in the
    history of those jobs. record: where the record of settings belongs; one that is there says more than that of the
    backup and stays.
    Raises: NotFound, Refused, StoreBroken when the backup is damaged, of a newer release or something else; StoreFull.
    """
    check_library()
    part, taken = f"{database}.restoring", f"{database}.taken"
    with _explained(source or database):
        os.makedirs(os.path.dirname(database), mode=0o700, exist_ok=True)
        _remove(part, *(part + suffix for suffix in SIDE_FILES), taken)
        try:
            if source is not None:
                _take_copy(os.path.abspath(source), database, part, taken)
            SqliteStore.open(part).close()
            with closing(_open(part, "rw")) as copy:
                _use_ids_up(copy, database, ids_in_use, pipelines_in_use)
                held = _hold(copy, by) if hold else ()
                kept_record = _take_record(copy)
                copy.commit()
                # One file again; what later jobs leave free can then be given back to the disk.
                copy.execute("PRAGMA journal_mode = DELETE")
                copy.execute("PRAGMA auto_vacuum = INCREMENTAL")
                copy.execute("VACUUM")
                jobs, _ = _counts(copy)
                runs = frozenset(
                    f"{job_id}.{number}"
                    for job_id, number in copy.execute("SELECT job_id, number FROM runs WHERE end_at IS NULL")
                )
                last = copy.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
            _sync(part)
            if record is not None and kept_record is not None and not os.path.lexists(record):
                _write_record(record, kept_record)
            kept = _put_aside(database)
            os.replace(part, database)
            _sync(os.path.dirname(database))
        finally:
            _remove(*(file + suffix for file in (part, taken) for suffix in ("", *SIDE_FILES, "-journal")))
    return RestoreSummary(database, kept, jobs, held, runs, 1 if last is None else int(last[0]) + 1)


def _take_copy(source: str, database: str, part: str, taken: str) -> None:
    """Copy a backup to `part`; to `taken` first, if others could change it meanwhile."""
    if not os.path.isfile(source):
        raise NotFound(f"there is no file {source}", "name a backup that was made with: gpusched backup FILE")
    if os.path.exists(database) and os.path.samefile(source, database):
        raise Refused(f"{source} is the database itself, not a backup", "name a backup")
    if _is_ours_alone(os.path.dirname(source)):
        _check_trusted(source, os.stat(source))
        copied = source
    else:
        # Without what lies beside it, which SQLite would apply to it, and which any user may have put there.
        _copy_in(source, taken, lambda found: _check_trusted(source, found))
        copied = taken
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(_open(copied, "ro")) as backup_of, closing(sqlite3.connect(part)) as copy:
        _check_version(backup_of, source)
        backup_of.backup(copy)
        _check_sound(copy, source)


_RECORD = "backup_record"
"""A table that only backups have."""


def _keep_record(copy: sqlite3.Connection, record: str) -> None:
    try:
        with open(record, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return
    copy.execute(f"CREATE TABLE {_RECORD} (content BLOB NOT NULL)")
    # A line that is being written now is not whole yet.
    copy.execute(f"INSERT INTO {_RECORD} VALUES (?)", (content[: content.rfind(b"\n") + 1],))
    copy.commit()


def _take_record(copy: sqlite3.Connection) -> bytes | None:
    """The record of settings in a backup, which the table has no place for."""
    if _RECORD not in _tables(copy):
        return None
    found = copy.execute(f"SELECT content FROM {_RECORD}").fetchone()
    copy.execute(f"DROP TABLE {_RECORD}")
    return None if found is None else bytes(found[0])


def _write_record(path: str, content: bytes) -> None:
    part = f"{path}.restoring"
    _remove(part)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    _sync(part)
    os.replace(part, path)


def _refuse_target(database: str, target: str) -> None:
    """Refuse to overwrite the table itself or a file that is not a backup."""
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise NotFound(f"there is no folder {folder}", f"make it with: mkdir -p {shlex.quote(folder)}")
    if os.path.isdir(target):
        raise Refused(f"{target} is a folder", f"name a file in it: gpusched backup {target.rstrip('/')}/gpusched.db")
    own = {os.path.realpath(database + suffix) for suffix in ("", *SIDE_FILES)}
    if os.path.realpath(target) in own:
        raise Refused(f"{target} is the database itself", "name another file")
    if os.path.lexists(target) and not _is_ours(target):
        raise Refused(f"{target} exists and is not a gpusched backup", "name another file, or remove it")


def _check_trusted(source: str, found: os.stat_result) -> None:
    """Refuse a file that others wrote, or could have: its jobs run as any user it names, including root."""
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{source} is not a file", "name a backup that was made with: gpusched backup FILE")
    if found.st_uid not in (0, os.geteuid()):
        who = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o022:
        who = "can be written to by others"
    else:
        return
    raise Refused(
        f"{source} {who}, who could make its jobs run as any user",
        f"if you know what is in it, make it yours: install -m 600 {source} OWN_COPY, and restore that",
    )


def _is_ours(path: str) -> bool:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with closing(_open(path, "ro")) as db:
            return "_sqlite_migrations" in _tables(db)
    except (sqlite3.Error, OSError):
        return False


def _open(path: str, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(path)}?mode={mode}", uri=True, timeout=BUSY_TIMEOUT_S)


def _tables(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def _check_version(db: sqlite3.Connection, path: str) -> None:
    (found,) = db.execute("PRAGMA user_version").fetchone()
    tables = _tables(db)
    if "_sqlite_migrations" not in tables or "jobs" not in tables:
        raise not_ours(path, sorted(tables) or ["nothing"])
    if found > len(MIGRATIONS):
        raise too_new(path, found, len(MIGRATIONS), __version__)


def _check_sound(db: sqlite3.Connection, path: str) -> None:
    problems = [text for (text,) in db.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise damaged(path, "; ".join(problems))
    if db.execute("PRAGMA foreign_key_check").fetchone() is not None:
        raise damaged(path, "it has records of deleted jobs")


def _counts(db: sqlite3.Connection) -> tuple[int, int]:
    jobs, ended = db.execute("SELECT count(*), count(end_at) FROM jobs").fetchone()
    return int(jobs), int(jobs - ended)


def _use_ids_up(copy: sqlite3.Connection, database: str, jobs: Iterable[int], pipelines: Iterable[int]) -> None:
    """Reserve ids that the replaced table, as far as readable, has assigned, and these."""
    last = {"jobs": max(jobs, default=0), "pipelines": max(pipelines, default=0)}
    try:
        if os.path.exists(database):
            with closing(_open(database, "rw")) as old:
                for name, seq in old.execute("SELECT name, seq FROM sqlite_sequence"):
                    last[name] = max(last.get(name, 0), int(seq))
    except (sqlite3.Error, ValueError, TypeError):
        pass  # it is replaced because it is broken; the files of runs still tell some of its ids
    for name, seq in last.items():
        if (
            seq
            and not copy.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?", (seq, name)).rowcount
        ):
            copy.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, seq))


def _hold(copy: sqlite3.Connection, by: str) -> tuple[int, ...]:
    """Hold jobs that may have run since the backup was made, so that none starts by itself."""
    found = copy.execute("SELECT id FROM jobs WHERE end_at IS NULL AND hold IS NULL ORDER BY id").fetchall()
    ids = tuple(int(job_id) for (job_id,) in found)
    now = time.time()
    text = f"held by {by or 'gpusched restore'}: the job table was restored, and this job may have run meanwhile"
    copy.executemany("UPDATE jobs SET hold = 'user' WHERE id = ?", [(job_id,) for job_id in ids])
    if "fences" in _tables(copy):
        copy.execute("DELETE FROM fences")
        copy.execute("DELETE FROM kept_places")
    if "batches" in _tables(copy):
        # Their jobs that are to be made may have been made and have run, too.
        copy.execute("UPDATE batches SET spec = json_set(spec, '$.hold', json('true')) WHERE made < jobs")
    copy.executemany(
        "INSERT INTO job_events (job_id, at, kind, text) VALUES (?, ?, 'held', ?)", [(one, now, text) for one in ids]
    )
    return ids


def _put_aside(database: str) -> str | None:
    """Give the existing table a second name, merged into one file if it can be opened at all."""
    if not os.path.exists(database):
        _remove(*(database + suffix for suffix in SIDE_FILES))
        return None
    stamp = time.strftime("%Y%m%dT%H%M%S")
    kept, again = f"{database}.before-restore-{stamp}", 1
    while os.path.lexists(kept):
        again += 1
        kept = f"{database}.before-restore-{stamp}-{again}"
    try:
        with closing(_open(database, "rw")) as old:
            old.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error:
        pass  # damaged: its log of changes goes along as it is
    # The new table must not meet the log of the old one: SQLite would apply it.
    for suffix in SIDE_FILES:
        if os.path.lexists(database + suffix):
            os.replace(database + suffix, kept + suffix)
    os.link(database, kept)
    _sync(os.path.dirname(database))
    return kept


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except GpuschedError:
        raise
    except (sqlite3.Error, OSError) as error:
        where = getattr(error, "filename", None) or path
        found = explain(error, str(where))
        if isinstance(found, StoreBroken):
            raise StoreBroken(found.message, "name another backup") from error
        raise found from error


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(*paths: str) -> None:
    for path in paths:
        remove_if_there(path)


# --- files in folders that others may change -----------------------------------------------------------
#
# Anyone who may write in a folder can replace a file there by a link or another file between any two steps, and SQLite
# opens by name again and again. So SQLite works on a file of ours, and only bytes go in and out.

_PIECE = 1 << 20


def _is_ours_alone(folder: str) -> bool:
    """Whether no other user can create files in a folder, or replace it."""
    own = {0, os.geteuid()}
    step, is_last = os.path.realpath(folder), True
    while True:
        found = os.stat(step)
        if found.st_uid not in own:
            return False
        # In a sticky folder such as /tmp no one removes another's file, but anyone may create a missing one.
        if found.st_mode & 0o022 and (is_last or not found.st_mode & stat.S_ISVTX):
            return False
        if step == "/":
            return True
        step, is_last = os.path.dirname(step), False


def _copy_out(source: str, target: str) -> None:
    """Copy our file to a name in another folder, completely or not at all, for its owner alone. Raises: OSError."""
    folder, name = os.path.split(target)
    part = f"{name}.part-{os.getpid()}"
    around = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        into = os.open(part, flags, 0o600, dir_fd=around)
        try:
            out = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _copy(out, into)
            finally:
                os.close(out)
            os.fsync(into)
            os.replace(part, name, src_dir_fd=around, dst_dir_fd=around)
            os.fsync(around)
        except BaseException:
            try:
                os.unlink(part, dir_fd=around)
            except OSError:
                pass  # another process was faster
            raise
        finally:
            os.close(into)
    finally:
        os.close(around)


def _copy_in(source: str, target: str, check: Callable[[os.stat_result], None]) -> None:
    """Copy an outside file to a new one of ours. Raises: OSError; errors of `check` on the very file being copied."""
    # Without waiting for a peer at the other end of a pipe.
    out = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check(os.fstat(out))
        into = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _copy(out, into)
        finally:
            os.close(into)
    finally:
        os.close(out)


def _copy(out: int, into: int) -> None:
    while piece := os.read(out, _PIECE):
        while piece:
            piece = piece[os.write(into, piece) :]
