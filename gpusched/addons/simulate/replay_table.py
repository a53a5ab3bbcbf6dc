"""The job table of one replay of the daemon, which goes to SQL only if somebody asks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from gpusched.model.job import Run, run_id
from gpusched.ports import Changes
from gpusched.ports.tables import ALERTS, ESTIMATES
from gpusched.store.rows import Row
from gpusched.store.sqlite import SqliteStore

T = TypeVar("T")


class ReplayTable(SqliteStore):
    """Keeps what was committed, newest row by newest row, and writes it before the first query that needs it.

    Few replays have one. SQL for each commit would take a tenth of a replay's time. Stories of jobs are not kept.
    """

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._waiting = Changes()
        self._written: set[int] = set()
        """Jobs that are in SQL, as their runs may be."""
        self._payloads: dict[str, bytes] = {}
        super().__init__(connection, path)

    def commit(self, changes: Changes) -> None:
        waiting = self._waiting
        waiting.jobs.update(changes.jobs)
        waiting.runs.update(changes.runs)
        waiting.payloads.update(changes.payloads)
        self._payloads.update(changes.payloads)
        for table, changed in changes.rows.items():
            waiting.rows[table].update(changed)

    def known_payloads(self, shas: Iterable[str]) -> set[str]:
        return self._payloads.keys() & shas

    def payload(self, sha: str) -> bytes:
        return self._payloads[sha]

    def runs(self, job_ids: Iterable[int]) -> list[Run]:
        wanted = set(job_ids)
        if not wanted.isdisjoint(self._written):
            return super().runs(wanted)
        known = sorted(self._waiting.jobs.keys() & wanted)
        return [run for job_id in known for handle in self._handles(job_id) if (run := self._waiting.runs.get(handle))]

    def prune(self, jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        gone = set(jobs)
        if pipelines or not gone.isdisjoint(self._written):
            self._write()
            super().prune(gone, pipelines)
            return
        waiting = self._waiting
        for job_id in gone & waiting.jobs.keys():
            for handle in self._handles(job_id):
                waiting.runs.pop(handle, None)
            del waiting.jobs[job_id]
        for table in (ESTIMATES, ALERTS):
            rows: dict[Any, Any] = waiting.rows.get(table, {})
            for key in [key for key, one in rows.items() if one and one.job_id in gone]:
                del rows[key]

    def _handles(self, job_id: int) -> Iterable[str]:
        return (run_id(job_id, number) for number in range(1, self._waiting.jobs[job_id].run + 1))

    def _rows(self, make: Callable[[Row], T], query: str, values: Iterable[Any] | Mapping[str, Any] = ()) -> list[T]:
        self._write()
        return super()._rows(make, query, values)

    def _write(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, Changes()
            self._written.update(waiting.jobs)
            super().commit(waiting)
