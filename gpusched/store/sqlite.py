"""The job table in a SQLite file: WAL, `synchronous=FULL`, one writer, one commit per tick.

A commit is durable when it returns. On a power cut, NORMAL loses acknowledged commits and FULL does not.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain
from json import dumps
from logging import getLogger
from typing import Any, TypeVar

from gpusched.errors import GpuschedError, NotReady, StoreBroken
from gpusched.model.batch import Batch
from gpusched.model.cluster import GpuReading
from gpusched.model.history import GROUPS, KNOWN_LATER, AccountUse, UsageSum, cards_in, models_in
from gpusched.model.job import Job, JobEvent, JobSpec, Run
from gpusched.model.states import FINAL_STATES, JobState
from gpusched.model.step import JobStep
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import BATCHES, STEPS, Table
from gpusched.store import rows
from gpusched.store import statements as sql
from gpusched.store.database_file import RESTART, DatabaseFile, damaged, explain
from gpusched.store.id_record import IdRecord
from gpusched.store.schema import MIGRATIONS, ensure_schema, statements
from gpusched.store.tables import STORED

log = getLogger("gpusched.store")

OLDEST_SQLITE = (3, 37, 0)
"""The first with STRICT tables."""
BUSY_TIMEOUT_S = 5.0
WAL_KEPT_BYTES = 64 << 20
"""A write-ahead log that grew larger in a burst is truncated to this."""

_INCREMENTAL = 2
"""Value of `PRAGMA auto_vacuum`."""
_KEPT_FREE = 16
"""One page in this many may stay free: the next jobs use it."""

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class SqliteStore:
    """The job table on disk; see `ports.Store` for its methods. For one thread."""

    def __init__(self, connection: sqlite3.Connection, path: str, ids: IdRecord | None = None) -> None:
        self._db = connection
        self._path = path
        self._ids = ids
        self._file: DatabaseFile | None = None
        """Of one that is written to."""
        self._version = self._data_version()
        self._packed: tuple[JobSpec, list[Any]] | None = None
        self._recorded: dict[int, JobSpec] = {}
        """The spec with which each active job is in the table: only changed specs are written again."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], ids: IdRecord | None = None) -> SqliteStore:
        """Open the table, creating or migrating it if needed; readable by its owner alone.

        Args: ids: ids below those in this record are not assigned again, whatever the table says.
        Raises: StoreBroken when the file is damaged or newer than this release; NotReady when it is not
        writable, or another process holds it; StoreFull.
        """
        path = os.path.abspath(os.fspath(path))
        check_library()
        connection = None
        try:
            _make_private(path)
            connection = _connect(path)
            ensure_schema(connection, path)
            made = cls(connection, path, ids)
            made._warn_of_lost_jobs()
            made._file = DatabaseFile(path)
            return made
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, (sqlite3.Error, OSError)):
                raise explain(error, path) from error
            raise

    @classmethod
    def in_memory(cls) -> SqliteStore:
        """An empty table that is gone with the object, for simulations and tests."""
        connection = _memory()
        _empty_table().backup(connection)
        return cls(connection, ":memory:")

    # --- the daemon's loop ----------------------------------------------------------------------

    def load_active(self) -> tuple[list[Job], list[Run]]:
        return self._rows(rows.JobReader().job, sql.ACTIVE_JOBS), self._rows(rows.RUNS.read, sql.OPEN_RUNS)

    def begin(self, jobs: Iterable[Job]) -> None:
        self._recorded = {job.id: job.spec for job in jobs}

    def load(self, table: Table[K, V], limit: int | None = None) -> dict[K, V]:
        stored = STORED[table]
        query = stored.load if limit is None else f"{stored.load} LIMIT {limit}"
        return dict(self._rows(stored.read, query))

    def find(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        stored = STORED[table]
        return dict(row for key in keys for row in self._rows(stored.read, stored.find, stored.key_row(key)))

    def next_job_id(self) -> int:
        return max(self._next(sql.LARGEST_ID_EVER), self._ids.job if self._ids else 1)

    def next_pipeline(self) -> int:
        return max(self._next(sql.LAST_PIPELINE), self._ids.pipeline if self._ids else 1)

    def _next(self, statement: str) -> int:
        found = self._rows(_first, statement)
        return int(found[0]) + 1 if found else 1

    def _warn_of_lost_jobs(self) -> None:
        expected = self._next(sql.LARGEST_ID_EVER)
        if self._ids is not None and expected < self._ids.job:
            log.error(
                "the job table %s is older than the jobs that it has had: %s lost, and the next job is %d",
                *(self._path, f"jobs {expected} to {self._ids.job - 1} are", self._ids.job),
            )

    def commit(self, changes: Changes) -> None:
        if not changes:
            return
        with self._transaction() as db:
            self._write_jobs(db, changes.jobs)
            if changes.runs:
                db.executemany(sql.PUT_RUN, map(rows.RUNS.row, changes.runs.values()))
            if changes.events:
                db.executemany(sql.TELL, map(rows.EVENTS.row, changes.events))
            if changes.payloads:
                db.executemany(sql.PUT_PAYLOAD, changes.payloads.items())
            for table, changed in changes.rows.items():
                STORED[table].write(db, changed)
            for batch in filter(None, changes.rows.get(BATCHES, {}).values()):
                # The ids of the jobs that are still to be made are taken, too.
                db.execute(sql.USE_IDS_UP, (batch.last_id,))
        for job in changes.jobs.values():
            if job.state.is_final:
                self._recorded.pop(job.id, None)
            else:
                self._recorded[job.id] = job.spec

    def _write_jobs(self, db: sqlite3.Connection, jobs: dict[int, Job]) -> None:
        recorded = self._recorded
        moved = [job for job in jobs.values() if recorded.get(job.id) is job.spec]
        if moved:
            cursor = db.executemany(sql.MOVE_JOB, ((*rows.state_row(job), job.id) for job in moved))
            if cursor.rowcount != len(moved):
                # Another process deleted one of them meanwhile; write all of them in full.
                moved = []
        if len(moved) < len(jobs):
            known = {job.id for job in moved}
            whole = [rows.job_row(job, self._spec_row(job.spec)) for job in jobs.values() if job.id not in known]
            db.executemany(sql.PUT_JOB, whole)
            last_id = max(job.last_id for job in jobs.values())
            if last_id not in jobs:
                # Tasks that have no row yet have their ids all the same.
                db.execute(sql.USE_IDS_UP, (last_id,))

    def _spec_row(self, spec: JobSpec) -> list[Any]:
        """Its columns; cached, as consecutive tasks of an array have the same spec."""
        if self._packed is None or self._packed[0] is not spec:
            self._packed = spec, rows.spec_row(spec)
        return self._packed[1]

    def lost(self) -> GpuschedError | None:
        """Why the open file is not the one there, see the port; recreates a lost write-ahead log."""
        if self._file is None:
            return None
        problem = self._file.problem(self._db)
        if problem is None and (side_file := self._file.lost_side_file()) is not None:
            problem = self._reopen(self._file, side_file)
        return problem

    def _reopen(self, file: DatabaseFile, side_file: str) -> StoreBroken | None:
        """Merge the lost file, which is still open, into the database, and begin a new one."""
        try:
            busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                self._db.close()
                self._db = _connect(self._path)
                self._version = self._data_version()
        except sqlite3.Error as error:
            busy, log_text = 1, str(error)
        else:
            log_text = "another process reads it"
        if busy:
            return StoreBroken(
                f"{side_file} was deleted or replaced while the daemon runs ({log_text}); nothing is recorded",
                f"restart the daemon: {RESTART}",
            )
        log.warning("%s was deleted or replaced; nothing is lost, it was recreated", side_file)
        file.forget_side_files()
        file.note_write()
        return None

    def changed(self) -> bool:
        before, self._version = self._version, self._data_version()
        return before != self._version

    def _data_version(self) -> int:
        with self._explained():
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # --- questions --------------------------------------------------------------------------------

    def jobs(self, wanted: JobFilter) -> list[Job]:
        conditions, values = _conditions(wanted)
        if wanted.since is not None:
            # A long queue need not be read for those that have ended.
            is_of_ended = bool(wanted.states) and wanted.states <= FINAL_STATES
            of_many = sql.ONLY_ENDED_SINCE if is_of_ended else sql.ENDED_SINCE
            conditions.append(sql.ENDED_SINCE_OF_FEW if wanted.ids else of_many)
            values["since"] = wanted.since
        if wanted.before is not None:
            conditions.append("id < :before")
            values["before"] = wanted.before
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        order = " ORDER BY id"
        if wanted.limit is not None:
            order = " ORDER BY id DESC LIMIT :limit"
            values["limit"] = max(0, wanted.limit)
        jobs = self._rows(rows.JobReader().job, sql.JOBS + where + order, values)
        return jobs if wanted.limit is None else jobs[::-1]

    def runs(self, job_ids: Iterable[int]) -> list[Run]:
        return self._rows(rows.RUNS.read, sql.RUNS_OF_JOBS, (dumps(list(job_ids)),))

    def steps(self, job_ids: Iterable[int]) -> list[JobStep]:
        return [step for _, step in self._rows(STORED[STEPS].read, sql.STEPS_OF_JOBS, (dumps(list(job_ids)),))]

    def next_step(self, job_id: int, run: int) -> int:
        return int(self._rows(_first, sql.NEXT_STEP, (job_id, run))[0])

    def events(self, job_id: int) -> list[JobEvent]:
        return self._rows(rows.EVENTS.read, sql.EVENTS_OF_JOB, (job_id,))

    def task_tallies(self, array_ids: Iterable[int]) -> list[tuple[int, JobState, int, int | None]]:
        wanted = dumps(sorted(array_ids))
        return self._rows(lambda row: (row[0], JobState(row[1]), row[2], row[3]), sql.TASK_TALLIES, (wanted,))

    def array_around(self, job_id: int) -> Job | None:
        found = self._rows(rows.JobReader().job, sql.ARRAY_BEFORE, (job_id,))
        return found[0] if found and job_id <= found[0].last_id else None

    def known_payloads(self, shas: Iterable[str]) -> set[str]:
        return set(self._rows(_first, sql.KNOWN_PAYLOADS, (dumps(list(shas)),)))

    def payload_bytes_of(self, uid: int) -> int:
        return int(self._rows(_first, sql.PAYLOAD_BYTES_OF_USER, {"uid": uid})[0])

    def payload(self, sha: str) -> bytes:
        found = self._rows(_first, sql.PAYLOAD, (sha,))
        if not found:
            raise KeyError(sha)
        return bytes(found[0])

    def usage_sums(self, by: str, wanted: JobFilter, since: float, now: float) -> list[UsageSum]:
        if by not in GROUPS:
            raise KeyError(by)
        conditions, values = _conditions(wanted)
        where = " AND ".join([*conditions, sql.ENDED_SINCE_OF_FEW])
        named = {**values, "since": since, "now": now}
        sizes = dict(self._rows(tuple, sql.CARD_SIZES))
        sums: dict[str, UsageSum] = {}
        for row in self._rows(tuple, sql.USAGE_SUMS.format(by=by, where=where), named):
            _add(sums, row, sizes)
        return [sums[name] for name in sorted(sums)]

    def account_uses(self, since: float, until: float, now: float, user: str | None = None) -> list[AccountUse]:
        named = {"since": since, "until": until, "now": now, "user": None if user is None else rows.pack_text(user)}
        cards = self._cards()
        found: dict[tuple[str, str], AccountUse] = {}
        for account, name, jobs in self._rows(tuple, sql.ACCOUNT_JOBS, named):
            mark = rows.unpack_text(account), rows.unpack_text(name)
            found[mark] = AccountUse(*mark, jobs=jobs)
        for account, name, gpus, is_free, is_filler, runs, open_runs, seconds, busy_s, cpu_s, *rest in self._rows(
            tuple, sql.ACCOUNT_USES, named
        ):
            total = found[rows.unpack_text(account), rows.unpack_text(name)]
            models = models_in(rows.unpack_gpus(gpus), cards)
            total.runs += runs
            total.open_runs += open_runs
            total.cpu_s += cpu_s
            held = {model: amount * seconds for model, amount in models.items()}
            total.add_cards(held, is_free=bool(is_free), is_filler=bool(is_filler))
            total.add_known(
                busy_gpu_s=None if busy_s is None or not models else busy_s * sum(models.values()),
                **dict(zip(KNOWN_LATER[1:], rest, strict=True)),
            )
        return [found[mark] for mark in sorted(found)]

    def budget_sums(self, since: float, now: float) -> dict[tuple[str, str, str], float]:
        cards = self._cards()
        sums: dict[tuple[str, str, str], float] = {}
        for account, user, gpus, seconds in self._rows(tuple, sql.BUDGET_SUMS, {"since": since, "now": now}):
            for model, amount in models_in(rows.unpack_gpus(gpus), cards).items():
                mark = rows.unpack_text(account), rows.unpack_text(user), model
                sums[mark] = sums.get(mark, 0.0) + seconds * amount
        return sums

    def _cards(self) -> dict[str, tuple[str, int | None]]:
        """Model and VRAM of each card, by UUID."""
        return {uuid: (rows.unpack_text(name), size) for uuid, name, size in self._rows(tuple, sql.CARD_MODELS)}

    def last_job_id(self, uid: int) -> int | None:
        found = self._rows(_first, sql.LAST_JOB_OF_USER, (uid,))[0]
        return None if found is None else int(found)

    def job_of_key(self, uid: int, key: str) -> Job | None:
        found = self._rows(rows.JobReader().job, sql.JOB_OF_KEY, (uid, rows.pack_text(key)))
        return found[0] if found else None

    def batch_of_key(self, uid: int, key: str) -> Batch | None:
        found = self._rows(STORED[BATCHES].read, sql.BATCH_OF_KEY, (uid, rows.pack_text(key)))
        return found[0][1] if found else None

    def states_of_batch(self, batch: Batch) -> set[JobState]:
        return set(self._rows(lambda row: JobState(row[0]), sql.STATES_OF_BATCH, (batch.first_id, batch.last_id)))

    # --- jobs that ended long ago --------------------------------------------------------------------

    def ended_jobs(self, before: float, after: tuple[float, int], limit: int) -> list[Job]:
        return self._rows(rows.JobReader().job, sql.ENDED_JOBS, (before, *after, limit))

    def pipeline_ends(self, pipeline: str) -> list[tuple[int, float | None]]:
        return self._rows(tuple, sql.PIPELINE_ENDS, (rows.pack_text(pipeline),))

    def prune(self, jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        with self._unhurried() as db:
            db.execute(sql.PRUNE_JOBS, (dumps(list(jobs)),))
            db.execute(sql.PRUNE_PIPELINES, (dumps(list(pipelines)),))
            db.execute(sql.PRUNE_BATCHES)

    def used_payloads(self, after: int, limit: int) -> tuple[int | None, set[str]]:
        found = self._rows(tuple, sql.USED_PAYLOADS, (after, limit))
        return (found[-1][0] if found else None), {sha for row in found for sha in row[1:] if sha is not None}

    def payload_shas(self, after: str, limit: int) -> list[str]:
        return [sha for (sha,) in self._rows(tuple, sql.PAYLOAD_SHAS, (after, limit))]

    def drop_payloads(self, shas: Iterable[str]) -> None:
        with self._unhurried() as db:
            db.execute(sql.DROP_PAYLOADS, (dumps(list(shas)),))

    def give_back(self, pages: int) -> bool:
        if self.lost() is not None or self._pragma("auto_vacuum") != _INCREMENTAL:
            return False
        spare = self._pragma("freelist_count") - self._pragma("page_count") // _KEPT_FREE
        if spare <= 0:
            return False
        with self._explained():
            # The statement takes a step for each page, and of one without columns `execute` takes only the first. Not
            # durable is as good: a page that is free in the end is given back the next time.
            self._db.executescript(f"PRAGMA incremental_vacuum({min(pages, spare)})")
            self._note_write()
        return spare > pages

    # --- upkeep -----------------------------------------------------------------------------------

    def save_gpus(self, node: str, reading: GpuReading) -> None:
        with self._transaction() as db:
            node = rows.pack_text(node)
            db.execute(sql.SEE_NODE, {"name": node, "driver": reading.driver_version, "at": reading.at})
            for gpu in reading.gpus:
                seen = {
                    "uuid": gpu.uuid,
                    "node": node,
                    "index": gpu.index,
                    "name": rows.pack_text(gpu.name),
                    "vram_total_mib": gpu.vram_total_mib,
                    "at": reading.at,
                }
                db.execute(sql.SEE_GPU, seen)

    def last_gpus(self) -> list[tuple[str, int, str, int | None]]:
        """UUID, index, model and memory (MiB) of the cards last seen, by index."""
        return self._rows(lambda row: (row[0], row[1], rows.unpack_text(row[2]), row[3]), sql.LAST_GPUS)

    def check(self) -> str | None:
        try:
            problems = self._rows(_first, "PRAGMA quick_check(3)")
            orphans = self._rows(_first, "PRAGMA foreign_key_check")
        except GpuschedError as error:
            return error.message
        if problems != ["ok"]:
            return f"the database {self._path} is damaged: {'; '.join(map(str, problems))}"
        if orphans:
            return f"the database {self._path} has {len(orphans)} records of deleted jobs"
        return None

    def close(self) -> None:
        self._db.close()
        if self._file is not None:
            self._file.close()

    # --- how --------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Raises: StoreFull, StoreBroken, NotReady, BrokenInvariant."""
        if (problem := self.lost()) is not None:
            raise problem
        db = self._db
        with self._explained():
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled back by itself.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            finally:
                self._note_write()

    def _pragma(self, name: str) -> int:
        return int(self._rows(tuple, f"PRAGMA {name}")[0][0])

    @contextmanager
    def _unhurried(self) -> Iterator[sqlite3.Connection]:
        """A transaction that does not wait for the disk: the next durable commit includes it, in order."""
        with self._explained():
            self._db.execute("PRAGMA synchronous = NORMAL")
        try:
            with self._transaction() as db:
                yield db
        finally:
            with self._explained():
                self._db.execute("PRAGMA synchronous = FULL")

    def _note_write(self) -> None:
        if self._file is not None:
            self._file.note_write()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError, ValueError, TypeError) as error:
            raise explain(error, self._path) from error

    def _rows(
        self, make: Callable[[rows.Row], T], query: str, values: Iterable[Any] | Mapping[str, Any] = ()
    ) -> list[T]:
        """Convert every row of a result. Raises: StoreBroken for an invalid one."""
        try:
            cursor = self._db.execute(query, values if isinstance(values, Mapping) else tuple(values))
        except (sqlite3.Error, OverflowError) as error:
            raise explain(error, self._path) from error
        made = []
        try:
            for row in cursor:
                made.append(make(row))
        except sqlite3.Error as error:
            raise explain(error, self._path) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(self._path, f"a record that begins {row[:2]} cannot be read: {error}") from error
        return made


def _conditions(wanted: JobFilter) -> tuple[list[str], dict[str, str | float]]:
    """Conditions of a filter's words, and their parameters; a list is passed as one JSON document."""
    conditions: list[str] = []
    values: dict[str, str | float] = {}
    named = [(column, ids) for column, ids in (("id", wanted.ids), ("array_id", wanted.arrays)) if ids]
    if named:
        conditions.append(f"({' OR '.join(sql.ONE_OF.format(column) for column, _ in named)})")
        values.update({column: dumps(sorted(ids)) for column, ids in named})
    if wanted.leaves_out_arrays:
        conditions.append("tasks_left IS NOT ''")
    for column, words in (
        ("state", sorted(state.value for state in wanted.states)),
        ("user", sorted(map(rows.pack_text, wanted.users))),
        ("name", sorted(map(rows.pack_text, wanted.names))),
        ("queue", sorted(map(rows.pack_text, wanted.queues))),
        ("pipeline", sorted(map(rows.pack_text, wanted.pipelines))),
    ):
        if words:
            conditions.append(sql.NAMED if column == "name" else sql.ONE_OF.format(column))
            values[column] = dumps(words)
    return conditions, values


def _memory(*, is_shared: bool = False) -> sqlite3.Connection:
    connection = _connect(":memory:", is_shared=is_shared)
    # Large sorts would write files, which a trial of presets may not.
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


@cache
def _empty_table() -> sqlite3.Connection:
    """What every table in memory is a copy of: migrating each would take a hundred times as long."""
    connection = _memory(is_shared=True)
    for statement in chain.from_iterable(map(statements, MIGRATIONS)):
        connection.execute(statement)
    return connection


def _connect(path: str, *, is_shared: bool = False) -> sqlite3.Connection:
    """Args: is_shared: between threads."""
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=not is_shared, cached_statements=256
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def check_library(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    """Raises: NotReady when Python's SQLite is too old for STRICT tables."""
    if version < OLDEST_SQLITE:
        found, wanted = (".".join(map(str, numbers)) for numbers in (version, OLDEST_SQLITE))
        raise NotReady(
            f"this Python has SQLite {found}, and gpusched needs {wanted} or newer",
            "use a newer Python, for example: uv python install 3.12",
        )


def _make_private(path: str) -> None:
    """Create missing folder and empty file, for the owner alone; SQLite's side files take the file's mode."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        # By name: opening and closing the file would drop the locks of another connection in this process.
        status = os.stat(path)
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.chmod(path, 0o600)


def _first(row: rows.Row) -> Any:
    return row[0]


def _add(sums: dict[str, UsageSum], row: rows.Row, sizes: Mapping[str, int]) -> None:
    """Add a row of USAGE_SUMS to the sums of its name."""
    packed, gpus, runs, seconds, cpu_s, mem_mib_s, wait_s, started, *energy = row
    name = rows.unpack_text(packed)
    found = sums.setdefault(name, UsageSum(name))
    if gpus is None:
        found.jobs = runs
        return
    found.runs += runs
    found.gpu_s += seconds * cards_in(rows.unpack_gpus(gpus), sizes)
    found.cpu_s += cpu_s
    found.mem_mib_s += mem_mib_s
    found.wait_s += wait_s
    found.started += started
    found.add_energy(*energy)
