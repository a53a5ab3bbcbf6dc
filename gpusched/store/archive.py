"""How the SQLite table lets go of jobs that ended long ago, and of the space that they took."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from json import dumps
from typing import Any, TypeVar

from gpusched.errors import GpuschedError
from gpusched.model.job import Job
from gpusched.store import rows as stored
from gpusched.store import statements as sql

T = TypeVar("T")

_INCREMENTAL = 2
_KEPT_FREE = 16
"""One page of so many may stay free: the next jobs take it."""


class SqliteArchive:
    """`ports.Archive` on a connection that the class below this one opens."""

    _db: sqlite3.Connection
    _rows: Callable[..., list[Any]]
    _transaction: Callable[[], AbstractContextManager[sqlite3.Connection]]
    _explained: Callable[[], AbstractContextManager[None]]
    _note_write: Callable[[], None]
    lost: Callable[[], GpuschedError | None]

    def ended_jobs(self, before: float, after: tuple[float, int], limit: int) -> list[Job]:
        """The first so many jobs that ended before an instant, by end and id, behind this end and id."""
        return self._rows(stored.JobReader().job, sql.ENDED_JOBS, (before, *after, limit))

    def pipeline_ends(self, pipeline: str) -> list[tuple[int, float | None]]:
        """Every job of a pipeline with its end, by id."""
        return self._rows(tuple, sql.PIPELINE_ENDS, (stored.pack_text(pipeline),))

    def prune(self, jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        """Forget these jobs with all that is theirs, and these pipelines; all or nothing."""
        with self._unhurried() as db:
            db.execute(sql.PRUNE_JOBS, (dumps(list(jobs)),))
            db.execute(sql.PRUNE_PIPELINES, (dumps(list(pipelines)),))

    def used_payloads(self, after: int, limit: int) -> tuple[int | None, set[str]]:
        """What the next so many jobs behind this id need: the last id, None at the end, and SHA-256s."""
        rows = self._rows(tuple, sql.USED_PAYLOADS, (after, limit))
        return (rows[-1][0] if rows else None), {sha for row in rows for sha in row[1:] if sha is not None}

    def payload_shas(self, after: str, limit: int) -> list[str]:
        """The next so many SHA-256s of stored scripts and environments."""
        return [sha for (sha,) in self._rows(tuple, sql.PAYLOAD_SHAS, (after, limit))]

    def drop_payloads(self, shas: Iterable[str]) -> None:
        """Forget these scripts and environments."""
        with self._unhurried() as db:
            db.execute(sql.DROP_PAYLOADS, (dumps(list(shas)),))

    def give_back(self, pages: int) -> bool:
        """Give free pages back to the disk; whether there are more. Never of a table that was not made for it."""
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

    def _pragma(self, name: str) -> int:
        return int(self._rows(tuple, f"PRAGMA {name}")[0][0])

    @contextmanager
    def _unhurried(self) -> Iterator[sqlite3.Connection]:
        """A transaction that does not wait for the disk: the next commit that does takes it along, in order."""
        with self._explained():
            self._db.execute("PRAGMA synchronous = NORMAL")
        try:
            with self._transaction() as db:
                yield db
        finally:
            with self._explained():
                self._db.execute("PRAGMA synchronous = FULL")
