"""What only a table on a disk can promise, and what its disk can do to it."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.errors import NotReady, StoreBroken, StoreFull
from gpusched.model.cluster import DrainEntry, GpuReading, GpuSample
from gpusched.model.job import JobEvent
from gpusched.model.states import FINAL_STATES, JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import DRAINS, ChangedRows
from gpusched.store import database_file, rows, statements
from gpusched.store.sqlite import SqliteStore, check_library
from gpusched.testing import NOW, job, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "gpusched.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore.open(path)
    yield made
    made.close()


def execute(path: Path, *statements: str) -> None:
    """Do this to the table as somebody else would, foreign keys on."""
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("PRAGMA foreign_keys = ON")
        for statement in statements:
            other.execute(statement)
    finally:
        other.close()


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    other = sqlite3.connect(path)
    try:
        return other.execute(query).fetchall()
    finally:
        other.close()


def python(script: str, *args: object, **options: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


# --- files and durability -------------------------------------------------------------------------


def test_only_the_owner_can_read_it_and_its_side_files(store: SqliteStore, path: Path) -> None:
    store.commit(Changes(jobs={1: job(1)}))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    files = sorted(path.parent.iterdir())
    assert {"gpusched.db", "gpusched.db-wal"} <= {file.name for file in files}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_permissions_of_a_readable_file_are_tightened(store: SqliteStore, path: Path) -> None:
    store.close()
    path.chmod(0o644)
    SqliteStore.open(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_commit_is_synced_to_disk(store: SqliteStore) -> None:
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA foreign_keys").fetchone() == (1,)


def test_a_kill_keeps_acknowledged_commits_and_drops_others(path: Path) -> None:
    script = """
import os, signal, sys
from gpusched.ports import Changes
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job
store = SqliteStore.open(sys.argv[1])
store.commit(Changes(jobs={1: job(1), 2: job(2)}))
store._db.execute("BEGIN IMMEDIATE")
store._db.execute("UPDATE jobs SET nice = 7")
os.kill(os.getpid(), signal.SIGKILL)
"""
    with python(script, path) as process:
        assert process.wait() == -9
    store = SqliteStore.open(path)
    assert store.load_active() == ([job(1), job(2)], [])
    assert store.check() is None
    store.close()


def test_everything_survives_closing_and_opening(store: SqliteStore, path: Path) -> None:
    running = job(2, state=JobState.RUNNING, run=1)
    changes = Changes(
        jobs={1: job(1), 2: running},
        runs={"2.1": run(running)},
        events=[JobEvent(1, NOW, "submitted", "by ann")],
        payloads={"a" * 64: b"#!/bin/sh"},
        rows=ChangedRows({DRAINS: {"n1": DrainEntry("fan")}}),
    )
    store.commit(changes)
    store.close()
    store.close()
    again = SqliteStore.open(path)
    assert again.load_active() == ([job(1), running], [run(running)])
    assert again.events(1) == changes.events
    assert again.payload("a" * 64) == b"#!/bin/sh"
    assert again.load(DRAINS) == {"n1": DrainEntry("fan")}
    assert again.next_job_id() == 3
    again.close()


def test_an_old_sqlite_version_is_refused_by_name() -> None:
    with pytest.raises(NotReady, match=r"SQLite 3\.36\.0, and gpusched needs 3\.37\.0"):
        check_library((3, 36, 0))


# --- the table guards itself ----------------------------------------------------------------------


def test_columns_are_the_fields_of_the_values(store: SqliteStore) -> None:
    def columns(table: str) -> set[str]:
        return {row[1] for row in store._db.execute(f"PRAGMA table_info({table})")}

    assert columns("jobs") == set(rows.JOB_COLUMNS)
    assert columns("runs") == set(rows.RUNS.names)
    assert columns("job_events") == {"id", *rows.EVENTS.names}
    of_job = {*type(job()).__struct_fields__} - {"spec"}
    assert of_job == {*rows.IDENTITY_COLUMNS, *rows.STATE_COLUMNS}
    of_spec = {*type(job().spec).__struct_fields__} - {"hold"}
    assert of_spec == {*rows.SPEC_COLUMNS, *rows.EXTRAS} - {"submit_hold", "extras"}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE jobs SET state = 'ASLEEP'",
        "UPDATE jobs SET state = 'COMPLETED'",
        "UPDATE jobs SET end_at = 5",
        "UPDATE jobs SET nice = 'high'",
        "UPDATE jobs SET request = 'no document'",
        "UPDATE runs SET state = 'ASLEEP'",
        "UPDATE runs SET outcome = 'FAILED'",
        "UPDATE runs SET end_at = 5, state = 'ENDED'",
        "UPDATE runs SET gpus = ''",
        "UPDATE runs SET job_id = 99",
        "UPDATE job_events SET text = 'another story'",
        "INSERT INTO job_events (job_id, at, kind, text) VALUES (99, 0, 'note', 'of no job')",
        "INSERT INTO payloads VALUES ('short', x'00')",
    ],
)
def test_the_schema_refuses_invalid_rows(store: SqliteStore, path: Path, statement: str) -> None:
    store.commit(Changes(jobs={1: job(1)}, runs={"1.1": run(job(1))}, events=[JobEvent(1, NOW, "note", "x")]))
    with pytest.raises(sqlite3.IntegrityError):
        execute(path, statement)


def test_a_pruned_job_takes_its_runs_and_history_and_its_id_is_not_reused(store: SqliteStore, path: Path) -> None:
    store.commit(Changes(jobs={5: job(5)}, runs={"5.1": run(job(5))}, events=[JobEvent(5, NOW, "note", "x")]))
    execute(path, "DELETE FROM jobs")
    assert store.runs([5]) == []
    assert store.events(5) == []
    assert store.next_job_id() == 6
    store.close()
    again = SqliteStore.open(path)
    assert again.next_job_id() == 6
    again.close()


def test_a_foreign_write_is_seen_once(store: SqliteStore, path: Path) -> None:
    store.commit(Changes(jobs={1: job(1)}))
    assert not store.changed()
    execute(path, "UPDATE jobs SET nice = 7")
    assert store.changed()
    assert not store.changed()
    assert store.load_active()[0][0].spec.nice == 7


def test_a_foreign_checkpoint_is_not_a_loss(store: SqliteStore, path: Path) -> None:
    for number in range(4):
        texts = {f"{number}{place:063d}": os.urandom(3000) for place in range(40)}
        store.commit(Changes(payloads=texts))
        before = path.stat().st_size
        execute(path, "PRAGMA wal_checkpoint")
        assert path.stat().st_size > before
        assert store.lost() is None


def test_a_foreign_vacuum_is_not_a_loss(store: SqliteStore, path: Path) -> None:
    store.commit(Changes(payloads={f"{place:064d}": os.urandom(3000) for place in range(400)}))
    execute(path, "PRAGMA wal_checkpoint", "DELETE FROM payloads", "PRAGMA wal_checkpoint(TRUNCATE)")
    assert store.lost() is None
    before = path.stat().st_size
    execute(path, "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)")
    assert path.stat().st_size < before
    assert store.lost() is None
    store.commit(Changes(rows=ChangedRows({DRAINS: {"node": DrainEntry("after it")}})))
    assert store.load(DRAINS) == {"node": DrainEntry("after it")}


def test_a_check_during_a_checkpoint_is_not_a_loss(store: SqliteStore, path: Path) -> None:
    """The checkpoint of somebody else copies the pages by their number, the header first."""
    store.commit(Changes(payloads={f"{place:064d}": os.urandom(3000) for place in range(40)}))
    begin = path.stat().st_size
    execute(path, "PRAGMA wal_checkpoint")
    whole = path.read_bytes()
    for size in (begin, begin + 4096, len(whole)):
        with path.open("r+b") as file:
            file.truncate(begin)
            file.seek(0)
            file.write(whole[:size])
        assert store.lost() is None


def test_a_copy_that_did_not_fit_is_not_retried_at_every_check(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    real = database_file._copy

    def full(connection: sqlite3.Connection, target: str) -> str:
        tries.append(target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(database_file, "_copy", full)
    path.unlink()
    for _ in range(3):
        problem = store.lost()
        assert problem is not None
        assert "no copy of it can be made ([Errno 28] No space left on device)" in problem.message
    assert len(tries) == 1
    monkeypatch.setattr(database_file, "_copy", real)
    later = time.monotonic() + database_file.COPY_AGAIN_S
    monkeypatch.setattr(database_file.time, "monotonic", lambda: later)
    problem = store.lost()
    assert problem is not None
    assert f"the copy {path}.rescued" in problem.hint


def test_a_job_deleted_by_another_process_is_rewritten_whole(store: SqliteStore, path: Path) -> None:
    first, second = job(1), job(2)
    store.commit(Changes(jobs={1: first, 2: second}))
    execute(path, "DELETE FROM jobs WHERE id = 1")
    first, second = (replace(one, state=JobState.RUNNING, run=1) for one in (first, second))
    store.commit(Changes(jobs={1: first, 2: second}))
    assert store.jobs(JobFilter()) == [first, second]


def test_the_inventory_keeps_first_and_last_sighting(store: SqliteStore, path: Path) -> None:
    card = GpuSample("GPU-1", 0, "A100 \udcff", vram_total_mib=40960)
    store.save_gpus("n1", GpuReading(NOW, "nvml", (card,), driver_version="550"))
    store.save_gpus("n1", GpuReading(NOW + 9, "nvml", (replace(card, index=2, vram_total_mib=None),)))
    assert ask(path, 'SELECT uuid, node, "index", name, vram_total_mib, first_seen_at, last_seen_at FROM gpus') == [
        ("GPU-1", "n1", 2, rows.pack_text("A100 \udcff"), 40960, NOW, NOW + 9)
    ]
    assert ask(path, "SELECT name, first_seen_at, last_seen_at FROM nodes") == [("n1", NOW, NOW + 9)]


# --- what can go wrong ------------------------------------------------------------------------------


def test_a_full_disk_rolls_back_the_commit_and_the_table_recovers(store: SqliteStore) -> None:
    store.commit(Changes(jobs={1: job(1)}))
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = Changes(jobs={1: replace(job(1), hold="user"), 2: job(2)}, payloads={"a" * 64: bytes(1 << 20)})
    with pytest.raises(StoreFull, match="is full; nothing was recorded") as caught:
        store.commit(big)
    assert "df -h" in caught.value.hint
    assert store.jobs(JobFilter()) == [job(1)]
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.commit(big)
    assert len(store.jobs(JobFilter())) == 2
    assert store.check() is None


FILL_A_DISK = """
import sys
from gpusched.errors import StoreFull
from gpusched.ports import Changes, JobFilter
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job
store = SqliteStore.open(sys.argv[1] + "/gpusched.db")
kept = 0
try:
    while True:
        number = kept + 1
        store.commit(Changes(jobs={number: job(number)}, payloads={f"{number:064}": bytes(20000)}))
        kept = number
except StoreFull:
    pass
assert kept > 5, kept
assert [one.id for one in store.load_active()[0]] == list(range(1, kept + 1))
store.close()
store = SqliteStore.open(sys.argv[1] + "/gpusched.db")
assert len(store.jobs(JobFilter())) == kept and store.check() is None
store.close()
print("kept what was acknowledged")
"""


def test_a_disk_that_fills_up_loses_no_acknowledged_commit(tmp_path: Path) -> None:
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare to make a small disk with")
    mount = f"mount -t tmpfs -o size=1500k tmpfs {tmp_path}"
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*namespace, mount], check=False, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small disk of its own")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [*namespace, f'{mount} && exec "$@"', "sh", sys.executable, "-c", FILL_A_DISK, str(tmp_path)]
    assert subprocess.check_output(argv, env=env, text=True) == "kept what was acknowledged\n"


def test_a_file_that_is_not_a_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"these are my notes, not a database\n" * 100)
    with pytest.raises(StoreBroken, match="is damaged") as caught:
        SqliteStore.open(path)
    assert str(path) in caught.value.message
    assert "gpusched doctor" in caught.value.hint
    assert path.read_bytes().startswith(b"these are my notes")


def test_a_damaged_page_is_reported_by_check_and_by_loading(store: SqliteStore, path: Path) -> None:
    store.commit(Changes(jobs={number: job(number, name="x" * 150) for number in range(1, 2000)}))
    store.close()
    half = path.stat().st_size // 2
    with open(path, "r+b") as file:
        file.seek(half)
        file.write(b"\xff" * (half - 4096))
    store = SqliteStore.open(path)
    problem = store.check()
    with pytest.raises(StoreBroken, match="damaged"):
        store.load_active()
    store.close()
    assert problem is not None
    assert "damaged" in problem


def test_an_unreadable_record_is_named(store: SqliteStore, path: Path) -> None:
    store.commit(Changes(jobs={3: job(3)}))
    execute(path, """UPDATE jobs SET request = '{"gpus": 1, "unheard_of": 2}'""")
    with pytest.raises(StoreBroken, match=r"record that begins \(3, 1000\)"):
        store.load_active()


def test_orphans_are_found(store: SqliteStore) -> None:
    store.commit(Changes(jobs={3: job(3)}, events=[JobEvent(3, NOW, "note", "x")]))
    store._db.execute("PRAGMA foreign_keys = OFF")
    store._db.execute("DELETE FROM jobs")
    assert "1 records of deleted jobs" in str(store.check())


def test_an_unwritable_location_is_refused_by_name() -> None:
    script = """
import os, sys
from gpusched.errors import NotReady
from gpusched.store.sqlite import SqliteStore
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root may write anywhere
for place in ("gpusched.db", "sub/gpusched.db", "old.db"):
    try:
        SqliteStore.open(os.path.join(sys.argv[1], place))
    except NotReady as error:
        print(error.message, "|", error.hint)
"""
    folder = tempfile.mkdtemp(prefix="gpusched-test-")
    try:
        SqliteStore.open(f"{folder}/old.db").close()
        os.chmod(f"{folder}/old.db", 0o444)
        os.chmod(folder, 0o555)
        with python(script, folder) as process:
            lines = process.communicate()[0].splitlines()
        assert process.returncode == 0
        assert len(lines) == 3
        for line, name in zip(lines, ("gpusched.db", "sub/gpusched.db", "old.db"), strict=True):
            assert f"the database {folder}/{name} cannot be" in line
            assert "GPUSCHED_HOME" in line
    finally:
        os.chmod(folder, 0o700)
        shutil.rmtree(folder)


def test_a_folder_instead_of_the_file_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(NotReady, match="cannot be written"):
        SqliteStore.open(path)


def test_a_table_locked_by_another_process_is_waited_for_and_then_reported(store: SqliteStore, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._db.execute("PRAGMA busy_timeout = 20")
    with pytest.raises(NotReady, match="another process holds the database"):
        store.commit(Changes(jobs={1: job(1)}))
    other.execute("ROLLBACK")
    other.close()
    store.commit(Changes(jobs={1: job(1)}))
    assert store.next_job_id() == 2


def test_an_ended_run_leaves_the_open_runs_in_one_step(store: SqliteStore) -> None:
    running = job(1, state=JobState.RUNNING, run=1)
    attempt = run(running)
    store.commit(Changes(jobs={1: running}, runs={attempt.id: attempt}))
    over = replace(attempt, state=RunState.ENDED, end_at=NOW, outcome=JobState.COMPLETED)
    store.commit(Changes(jobs={1: replace(running, state=JobState.COMPLETED, end_at=NOW)}, runs={over.id: over}))
    assert store.load_active() == ([], [])


def test_looks_for_jobs_that_have_ended_do_not_read_the_queue(store: SqliteStore) -> None:
    over = replace(job(1), state=JobState.COMPLETED, end_at=NOW)
    steps: list[int] = []
    for pending in (range(2, 3), range(3, 3000)):
        store.commit(Changes(jobs={number: job(number) for number in pending} | {1: over}))
        asked = iter(range(10**9))
        store._db.set_progress_handler(lambda asked=asked: next(asked) < 0, 10)
        assert store.jobs(JobFilter(states=FINAL_STATES, since=NOW, limit=300)) == [over]
        store._db.set_progress_handler(None, 0)
        steps.append(next(asked))
    assert steps[1] <= steps[0] + 2


@pytest.mark.parametrize(
    ("query", "index"),
    [
        (statements.ACTIVE_JOBS, "SEARCH jobs USING INDEX jobs_by_end"),
        (statements.OPEN_RUNS, "SCAN runs USING INDEX runs_open"),
        (statements.LAST_JOB_OF_USER, "SEARCH jobs USING COVERING INDEX jobs_by_uid"),
        (statements.RUNS_OF_JOBS, "SEARCH runs USING PRIMARY KEY"),
        (statements.EVENTS_OF_JOB, "SEARCH job_events USING INDEX job_events_by_job"),
    ],
)
def test_no_daemon_query_scans_or_sorts_the_whole_table(store: SqliteStore, query: str, index: str) -> None:
    plan = str([row[3] for row in store._db.execute(f"EXPLAIN QUERY PLAN {query}", ("1",) * query.count("?"))])
    assert index in plan
    assert "TEMP B-TREE" not in plan
