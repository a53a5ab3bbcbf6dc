"""Time series in a separate SQLite file, `series.db`: blocks of fixed-size records, one transaction a minute.

    series     a record a minute in blocks of an hour, kept for a day; a record in ten minutes in blocks of a day, kept
               for a year; zlib over each block
    runs       the folded curve of each run on each card, for 90 days after its end
    counters   the last reading of each card's energy counter
    meters     what open runs have used so far

Nothing here decides about a job. A file that is damaged, deleted or of another version is replaced by an empty one, and
what cannot be written is lost, with a line in the log. WAL without a sync per commit: a power cut costs some minutes.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING

from gpusched.model.samples import KINDS, FoldingSeries, SampleKind, Values, fold

if TYPE_CHECKING:
    from collections.abc import Iterator

log = getLogger("gpusched.store")

VERSION = 1
MINUTE_S, TEN_MINUTES_S = 60, 600
BLOCK_S = {MINUTE_S: 3600, TEN_MINUTES_S: 86400}
"""Length of a block by the step of its records."""
KEPT_S = {MINUTE_S: 86400, TEN_MINUTES_S: 366 * 86400}
RUNS_KEPT_S = 90 * 86400
_FUTURE_S = 86400
"""Records that lie further ahead were written while the clock was wrong."""
_JUMP_S = 2 * 86400
_TABLES = """
CREATE TABLE series (
    kind TEXT NOT NULL, subject TEXT NOT NULL, step_s INTEGER NOT NULL, start_at INTEGER NOT NULL, data BLOB NOT NULL,
    UNIQUE (step_s, start_at, kind, subject)
) STRICT;
CREATE TABLE runs (
    run TEXT NOT NULL, uuid TEXT NOT NULL, start_at REAL NOT NULL, end_at REAL NOT NULL, step_s INTEGER NOT NULL,
    data BLOB NOT NULL, PRIMARY KEY (run, uuid)
) STRICT, WITHOUT ROWID;
CREATE INDEX runs_by_end ON runs (end_at);
CREATE TABLE counters (uuid TEXT PRIMARY KEY, state TEXT NOT NULL) STRICT;
CREATE TABLE meters (node TEXT NOT NULL, run TEXT NOT NULL, state TEXT NOT NULL, PRIMARY KEY (node, run)) STRICT;
"""

Key = tuple[str, str, int]
"""Kind, subject, step."""


@dataclass(slots=True)
class _Block:
    start_at: int
    data: bytearray


@dataclass(frozen=True, slots=True)
class RunCurve:
    """The curve of one run on one card."""

    run: str
    uuid: str
    series: FoldingSeries


class SeriesFile:
    """The file. Args: path: None for none, and nothing is kept."""

    def __init__(self, path: str | None) -> None:
        self._has_file = path is not None
        self._path = path or ""
        self._db: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._blocks: dict[Key, _Block] = {}
        """The blocks that are being written."""
        self._is_failing = False
        self._pruned_at: int | None = None
        self._prune_from = 0
        self._written_at: int | None = None
        self._open()

    def close(self) -> None:
        self._blocks.clear()
        self._drop_connection()

    def _drop_connection(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    # --- the file -------------------------------------------------------------------------------

    def _open(self) -> None:
        for _ in range(2 if self._has_file else 0):
            try:
                self._db = self._connect()
                return
            except (sqlite3.Error, OSError) as error:
                self._drop_connection()
                if not _is_damage(error):
                    self._failed(error)
                    return
                self._set_aside(error)

    def _connect(self) -> sqlite3.Connection:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.close(fd)
        db = sqlite3.connect(self._path, isolation_level=None, timeout=1.0, cached_statements=32)
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_size_limit = 4194304")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and not tables:
                db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"it has version {version}, this release reads {VERSION}")
            status = os.stat(self._path)
            self._identity = status.st_dev, status.st_ino
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, error: Exception) -> None:
        """Move a damaged file out of the way; one earlier one is kept to look at."""
        log.error(
            "%s cannot be read (%s): it is now %s.damaged, and the time series begin again",
            *(self._path, error, os.path.basename(self._path)),
        )
        with suppress(OSError):
            os.replace(self._path, f"{self._path}.damaged")
        for suffix in ("-wal", "-shm"):
            with suppress(OSError):
                os.unlink(self._path + suffix)

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            log.error("time series are not kept: %s: %s", self._path, error)
        self._is_failing = True

    def _look(self) -> None:
        """Open the file again if it was deleted or could not be opened."""
        if self._db is not None:
            with suppress(OSError):
                status = os.stat(self._path)
                if (status.st_dev, status.st_ino) == self._identity:
                    return
            log.warning("%s was deleted: the time series begin again", self._path)
            self._drop_connection()
            self._blocks.clear()
            for suffix in ("-wal", "-shm"):
                with suppress(OSError):
                    os.unlink(self._path + suffix)
        self._open()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection | None]:
        """A transaction, or None where there is no file. Errors of the file are logged, not raised."""
        self._look()
        db = self._db
        if db is None:
            yield None
            return
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
            if self._is_failing:
                log.info("time series are kept again")
            self._is_failing = False
        except (sqlite3.Error, OSError) as error:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            # What is in memory is not what is in the file.
            self._blocks.clear()
            if _is_damage(error):
                self._drop_connection()
                self._set_aside(error)
                self._open()
            else:
                self._failed(error)

    def _read(self, what: Callable[[sqlite3.Connection], list[tuple[object, ...]]]) -> list[tuple[object, ...]]:
        """Rows; none where the file cannot be read, which the next write deals with."""
        if self._db is None:
            return []
        try:
            return what(self._db)
        except sqlite3.Error as error:
            log.error("time series cannot be read: %s", error)
            return []

    # --- the minute -----------------------------------------------------------------------------

    def write(
        self,
        now: float,
        minute_at: int,
        rows: Iterable[tuple[str, str, Values]],
        *,
        curves: Iterable[RunCurve] = (),
        counters: Mapping[str, str] | None = None,
        meters: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """Write one minute, fold it into its ten minutes, and drop what is too old.

        Args: minute_at: its start; rows: kind, subject, values; counters: state by UUID; meters: state by node and run,
        of all open runs.
        """
        with self._transaction() as db:
            if db is None:
                return
            for kind_name, subject, values in rows:
                kind = KINDS[kind_name]
                minutes = self._put(db, kind, subject, MINUTE_S, minute_at, values)
                window_at = minute_at - minute_at % TEN_MINUTES_S
                first = (window_at - minutes.start_at) // MINUTE_S
                size = kind.record.size
                window = minutes.data[first * size : (first + TEN_MINUTES_S // MINUTE_S) * size]
                ten = fold(kind, (kind.unpack(window[at : at + size]) for at in range(0, len(window), size)))
                self._put(db, kind, subject, TEN_MINUTES_S, window_at, ten)
            for curve in curves:
                series = curve.series
                data = zlib.compress(series.pack())
                db.execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?)",
                    (curve.run, curve.uuid, series.start_at, series.end_at, series.step_s, data),
                )
            if counters is not None:
                db.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?)", list(counters.items()))
            if meters is not None:
                db.execute("DELETE FROM meters")
                db.executemany("INSERT INTO meters VALUES (?, ?, ?)", [(*key, state) for key, state in meters.items()])
            self._prune(db, int(now))

    def _put(
        self, db: sqlite3.Connection, kind: SampleKind, subject: str, step_s: int, at: int, values: Values
    ) -> _Block:
        start_at = at - at % BLOCK_S[step_s]
        key = kind.name, subject, step_s
        block = self._blocks.get(key)
        if block is None or block.start_at != start_at:
            count = BLOCK_S[step_s] // step_s
            found = db.execute(
                "SELECT data FROM series WHERE step_s = ? AND start_at = ? AND kind = ? AND subject = ?",
                (step_s, start_at, kind.name, subject),
            ).fetchone()
            data = bytearray(_inflated(kind, found[0]) if found else b"")
            data.extend(kind.nothing * (count - len(data) // kind.record.size))
            block = self._blocks[key] = _Block(start_at, data)
        place = (at - start_at) // step_s * kind.record.size
        block.data[place : place + kind.record.size] = kind.pack(values)
        db.execute(
            "INSERT INTO series VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (step_s, start_at, kind, subject) DO UPDATE SET data = excluded.data",
            (kind.name, subject, step_s, start_at, _deflated(kind, block.data)),
        )
        return block

    def _prune(self, db: sqlite3.Connection, now: int) -> None:
        hour, before = now // 3600, self._written_at
        self._written_at = now
        if before is None or abs(now - before) > _JUMP_S:
            # A clock that is wrong, as before NTP has set it, must not cost a year of samples.
            self._prune_from = now + (3600 if before is None else 86400)
        if self._pruned_at == hour or now < self._prune_from:
            return
        for step_s, kept_s in KEPT_S.items():
            db.execute(
                "DELETE FROM series WHERE step_s = ? AND (start_at < ? OR start_at > ?)",
                (step_s, now - kept_s - BLOCK_S[step_s], now + _FUTURE_S),
            )
        db.execute("DELETE FROM runs WHERE end_at < ? OR end_at > ?", (now - RUNS_KEPT_S, now + _FUTURE_S))
        # Subjects that are gone leave nothing behind in memory either.
        self._blocks = {key: block for key, block in self._blocks.items() if now - block.start_at < 2 * 86400}
        db.execute("PRAGMA incremental_vacuum(64)").fetchall()
        self._pruned_at = hour

    # --- reading --------------------------------------------------------------------------------

    def records(self, kind: SampleKind, subject: str, step_s: int, start_at: int, end_at: int) -> bytes:
        """The records from one instant to before another, both multiples of the step; unknown ones included."""
        block_s, size = BLOCK_S[step_s], kind.record.size
        starts = range(start_at - start_at % block_s, end_at, block_s)
        blocks: dict[int, bytes] = {}
        current = self._blocks.get((kind.name, subject, step_s))
        if current is not None:
            blocks[current.start_at] = bytes(current.data)
        wanted = [at for at in starts if at not in blocks]
        found = self._read(
            lambda db: db.execute(
                "SELECT start_at, data FROM series WHERE step_s = ? AND kind = ? AND subject = ? AND start_at IN ("
                + ",".join(map(str, wanted))
                + ")",
                (step_s, kind.name, subject),
            ).fetchall()
        )
        for at, data in found:
            assert isinstance(at, int)
            assert isinstance(data, bytes)
            blocks[at] = _inflated(kind, data)
        whole = block_s // step_s * size
        joined = b"".join(blocks.get(at, b"").ljust(whole, b"\xff") for at in starts)
        first = (start_at - starts.start) // step_s * size if starts else 0
        return joined[first : first + (end_at - start_at) // step_s * size]

    def subjects(self, kind: SampleKind, start_at: int, end_at: int) -> list[str]:
        """What there are records of in these days."""
        found = self._read(
            lambda db: db.execute(
                "SELECT DISTINCT subject FROM series WHERE step_s = ? AND start_at BETWEEN ? AND ? AND kind = ?",
                (TEN_MINUTES_S, start_at - 86400, end_at, kind.name),
            ).fetchall()
        )
        return sorted(str(subject) for (subject,) in found)

    def curves(self, runs: Iterable[str], kind: SampleKind) -> list[RunCurve]:
        wanted = list(runs)
        marks = ",".join("?" * len(wanted))
        found = self._read(
            lambda db: db.execute(
                f"SELECT run, uuid, start_at, step_s, data FROM runs WHERE run IN ({marks}) ORDER BY run, uuid", wanted
            ).fetchall()
        )
        made = []
        for run, uuid, start_at, step_s, data in found:
            assert isinstance(data, bytes)
            try:
                series = FoldingSeries.unpack(
                    kind, float(str(start_at)), int(str(step_s)), zlib.decompress(data, bufsize=8192)
                )
            except (ValueError, zlib.error):
                continue
            made.append(RunCurve(str(run), str(uuid), series))
        return made

    def holders(self, uuid: str, start_at: float, end_at: float, most: int) -> list[tuple[str, float, float]]:
        """The newest runs that used a card between two instants: handle, first and last instant."""
        found = self._read(
            lambda db: db.execute(
                "SELECT run, start_at, end_at FROM runs WHERE uuid = ? AND end_at > ? AND start_at < ?"
                " ORDER BY start_at DESC LIMIT ?",
                (uuid, start_at, end_at, most),
            ).fetchall()
        )
        return [(str(run), float(str(start)), float(str(end))) for run, start, end in found]

    def counters(self) -> list[str]:
        """Kept states of energy counters."""
        found = self._read(lambda db: db.execute("SELECT state FROM counters").fetchall())
        return [str(state) for (state,) in found]

    def meters(self) -> dict[tuple[str, str], str]:
        """Kept states of the meters of runs, by node and run."""
        found = self._read(lambda db: db.execute("SELECT node, run, state FROM meters").fetchall())
        return {(str(node), str(run)): str(state) for node, run, state in found}


def _inflated(kind: SampleKind, data: bytes) -> bytes:
    """The records of a block; of a damaged one none."""
    try:
        found = zlib.decompress(data)
    except zlib.error:
        return b""
    count, rest = divmod(len(found), kind.record.size)
    if rest:
        return b""
    records = bytearray(len(found))
    for at in range(kind.record.size):
        records[at :: kind.record.size] = found[at * count : (at + 1) * count]
    return bytes(records)


def _deflated(kind: SampleKind, data: bytearray) -> bytes:
    """A block with the first bytes of all records first: a fifth smaller, as neighbours are alike."""
    size = kind.record.size
    return zlib.compress(b"".join(data[at::size] for at in range(size)))


def _is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault, rather than the disk or its permissions."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.IntegrityError)
    )
