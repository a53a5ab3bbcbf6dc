"""Whether the job table belongs to the rest of the scheduler's folder: an emptied table is not a new scheduler."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import quote

from gpusched import paths
from gpusched.engine.spool import runs_in
from gpusched.errors import StoreBroken
from gpusched.model.units import plural, printable
from gpusched.store.database_file import SIDE_FILES
from gpusched.store.id_record import read_ids

_SHOWN_COPIES = 3


@dataclass(frozen=True, slots=True)
class EarlierLife:
    """Traces of an earlier scheduler in its folder, beside the job table. Paths of files."""

    database: str
    id_record: str
    series: str
    checkpoints: str
    runs: frozenset[str]
    """Runs in the spool."""

    @property
    def next_job(self) -> int:
        """A job id above all that are known to have been assigned."""
        return max(read_ids(self.id_record)[0], *(int(run.partition(".")[0]) + 1 for run in self.runs), 1)

    def lost_table(self) -> StoreBroken | None:
        """Why the job table cannot be the one that the traces belong to; None where it can, or there are no traces."""
        state = _state_of(self.database)
        if state is None:
            return None
        traces = self._traces(state)
        if not traces:
            return None
        found = _copies(self.database)
        copies = f" (found beside it: {', '.join(map(printable, found))})" if found else ""
        restore = "sudo gpusched restore" if paths.is_system() or paths.finds_system() else "gpusched restore"
        return StoreBroken(
            f"the job table {self.database} {state}, but a scheduler has run here before: "
            f"beside it is {', '.join(traces)}",
            f"put a copy of it back{copies}: {restore} FILE; or begin with an empty table on purpose, whose first job "
            f"is {self.next_job}: {restore} --empty",
        )

    def _traces(self, state: str) -> list[str]:
        traces = []
        if (job := read_ids(self.id_record)[0]) > 1:
            traces.append(f"{os.path.basename(self.id_record)} (its last job was {job - 1})")
        if state == _NEVER_USED:
            return traces
        if os.path.exists(self.series):
            traces.append(os.path.basename(self.series))
        if self.runs:
            traces.append(f"the spool with {plural(len(self.runs), 'run')}")
        if os.path.isdir(self.checkpoints) and os.listdir(self.checkpoints):
            traces.append(os.path.basename(self.checkpoints))
        return traces


def earlier_life() -> EarlierLife:
    """Traces in the folders of this process's scheduler."""
    runs = runs_in(paths.spool_dir()) if os.path.isdir(paths.spool_dir()) else set()
    files = paths.database(), paths.id_record(), paths.series_file(), paths.checkpoint_dir()
    return EarlierLife(*files, frozenset(runs))


_NEVER_USED = "has never had a job"


def _state_of(database: str) -> str | None:
    """What is wrong with a table without any job; None for one that has had a job, or is damaged."""
    try:
        if not os.path.getsize(database):
            return "is empty"
    except FileNotFoundError:
        return "is missing"
    try:
        with closing(sqlite3.connect(f"file:{quote(database)}?mode=ro", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                return "is empty"
            if "jobs" not in tables or "sqlite_sequence" not in tables:
                return None
            last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
    except sqlite3.Error:
        return None  # opening it says why
    return None if last is not None and last[0] else _NEVER_USED


def _copies(database: str) -> list[str]:
    """The newest copies of the table beside it: of a restore, or rescued by a daemon."""
    folder, name = os.path.split(database)
    found = []
    for entry in os.scandir(folder):
        is_copy = entry.name.startswith(f"{name}.") and not entry.name.endswith((".lock", ".part", *SIDE_FILES))
        if is_copy and entry.is_file() and entry.stat().st_size:
            found.append((entry.stat().st_mtime, entry.path))
    return [path for _, path in sorted(found, reverse=True)[:_SHOWN_COPIES]]
