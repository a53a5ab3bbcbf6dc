"""Databases of old releases load; what was migrated equals what is made today; damage and the future are refused."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import saved

from gpusched.errors import NotReady, StoreBroken
from gpusched.model.cluster import DrainCause, DrainEntry
from gpusched.model.job import GpuShare
from gpusched.model.step import StepPart
from gpusched.ports import JobFilter
from gpusched.ports.tables import DRAINERS, DRAINS, FENCES, STEPS
from gpusched.store import schema
from gpusched.store.sqlite import SqliteStore

OLD_RELEASES = sorted(Path(__file__).parent.glob("release_*.sql"))


def restore(dump: Path, path: Path) -> Path:
    """The database that was saved in this file."""
    connection = sqlite3.connect(path)
    try:
        connection.executescript(dump.read_text(encoding="utf-8"))
    finally:
        connection.close()
    return path


def tables_of(path: Path) -> dict[str, str]:
    """Every table, index and trigger, with blanks and comments evened out."""
    connection = sqlite3.connect(path)
    try:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    finally:
        connection.close()
    return {name: " ".join(re.sub(r"--.*", "", text).split()) for name, text in found}


def version(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


def test_a_saved_database_exists() -> None:
    assert OLD_RELEASES[0].name == "release_0_1_0.sql"


@pytest.mark.parametrize("dump", OLD_RELEASES, ids=lambda dump: dump.stem)
def test_a_saved_database_loads_completely(tmp_path: Path, dump: Path) -> None:
    store = SqliteStore.open(restore(dump, tmp_path / "gpusched.db"))
    try:
        assert store.jobs(JobFilter()) == list(saved.JOBS)
        assert store.load_active() == ([job for job in saved.JOBS if not job.state.is_final], [saved.RUNS[-1]])
        assert store.runs([1, 2, 3, 4]) == list(saved.RUNS)
        assert store.events(1) + store.events(4) == list(saved.EVENTS)
        assert {sha: store.payload(sha) for sha in saved.PAYLOADS} == saved.PAYLOADS
        assert store.load(DRAINS) == saved.DRAINS
        assert store.next_job_id() == saved.PRUNED_ID + 1
        assert store.load(FENCES) == {}
        assert store.check() is None
        assert store._db.execute("SELECT uuid FROM gpus").fetchall() == [("GPU-1",)]
    finally:
        store.close()


@pytest.mark.parametrize("dump", OLD_RELEASES, ids=lambda dump: dump.stem)
def test_a_migrated_database_equals_a_fresh_one(tmp_path: Path, dump: Path) -> None:
    old, fresh = restore(dump, tmp_path / "old.db"), tmp_path / "fresh.db"
    SqliteStore.open(old).close()
    SqliteStore.open(fresh).close()
    assert tables_of(old) == tables_of(fresh)
    assert version(old) == version(fresh) == len(schema.MIGRATIONS)


def test_a_story_that_may_name_jobs_is_marked_and_stays_append_only(tmp_path: Path) -> None:
    path = restore(OLD_RELEASES[0], tmp_path / "gpusched.db")
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO job_events (job_id, at, kind, text) VALUES (1, 3, 'note', 'made room for job 7')")
    connection.commit()
    connection.close()
    store = SqliteStore.open(path)
    try:
        assert store.events(1)[-1].text == "\x02?\x1fmade room for job 7\x03"
        with pytest.raises(sqlite3.IntegrityError, match="only added to"):
            store._db.execute("UPDATE job_events SET text = 'another story'")
    finally:
        store.close()


def test_nodes_that_were_declared_down_stay_so(tmp_path: Path) -> None:
    path = restore(OLD_RELEASES[0], tmp_path / "gpusched.db")
    connection = sqlite3.connect(path)
    schema.ensure_schema(connection, str(path), schema.MIGRATIONS[: schema.MIGRATIONS.index("0020_cancelled_by")])
    told = {"n1": "declared down: the fan broke", "n2": "declared down: by job 7", "n3": "it was declared down: no"}
    connection.executemany("INSERT INTO drains VALUES (?, ?)", told.items())
    connection.executemany("INSERT INTO drainers VALUES (?, 'root', 5)", [(name,) for name in told])
    connection.commit()
    connection.close()
    store = SqliteStore.open(path)
    try:
        found = {name: drainer.down for name, drainer in store.load(DRAINERS).items()}
        assert found == {"n1": "the fan broke", "n2": "\x02?\x1fby job 7\x03", "n3": None}
    finally:
        store.close()


def test_drains_get_the_causes_that_their_messages_told(tmp_path: Path) -> None:
    path = restore(OLD_RELEASES[0], tmp_path / "gpusched.db")
    connection = sqlite3.connect(path)
    before_marks, before = map(schema.MIGRATIONS.index, ("0021_mentions", "0024_causes_of_drains"))
    schema.ensure_schema(connection, str(path), schema.MIGRATIONS[:before_marks])
    epilog = "the epilog ended with exit code 1 (job 7); once it is fixed: gctl undrain n2"
    early = "jobs of 2 users in a row failed here (ann's 1, bob's 2)"
    told = {
        "GPU-3": "suspect: was lost; once it works again: gctl undrain 3",
        "GPU-4": "suspect: XID 48 (memory error)",
        "GPU-5": f"suspect: {early}",
        "n1": "declared down: fan",
        "n2": epilog,
        "n3": "the user said once it is fixed: gctl undrain n3",
        "n4": "not suspect: XID 48",
    }
    connection.executemany("INSERT INTO drains VALUES (?, ?)", told.items())
    connection.executemany("INSERT INTO drainers VALUES (?, 'root', 5)", [("n1",), ("n3",)])
    connection.commit()
    schema.ensure_schema(connection, str(path), schema.MIGRATIONS[:before])
    told = {"GPU-6": f"suspect: {early}", "GPU-7": f'"suspect: {early} \\udcff"'}
    connection.executemany("INSERT INTO drains VALUES (?, ?)", told.items())
    connection.commit()
    connection.close()
    store = SqliteStore.open(path)
    try:
        found = store.load(DRAINS)
    finally:
        store.close()
    assert found == {
        **saved.DRAINS,
        "GPU-3": DrainEntry("was lost; once it works again: gctl undrain 3", DrainCause.GPU_LOST),
        "GPU-4": DrainEntry("XID 48 (memory error)", DrainCause.GPU_FAULT),
        "GPU-5": DrainEntry(f"\x02?\x1f{early}\x03", DrainCause.EARLY_FAILURES),
        "GPU-6": DrainEntry(early, DrainCause.EARLY_FAILURES),
        "GPU-7": DrainEntry(f"{early} \udcff", DrainCause.EARLY_FAILURES),
        "n1": DrainEntry("declared down: fan", DrainCause.DOWN),
        "n2": DrainEntry(f"\x02?\x1f{epilog}\x03", DrainCause.SITE_PROGRAM),
        "n3": DrainEntry("the user said once it is fixed: gctl undrain n3"),
        "n4": DrainEntry("not suspect: XID 48"),
    }


def test_steps_from_before_they_had_parts_load(tmp_path: Path) -> None:
    path = restore(OLD_RELEASES[0], tmp_path / "gpusched.db")
    connection = sqlite3.connect(path)
    before = schema.MIGRATIONS.index("0019_step_parts")
    schema.ensure_schema(connection, str(path), schema.MIGRATIONS[:before])
    row = (4, 1, "train", "python train.py", "n1", saved.NOW, "RUNNING", 2, 2.0, '[{"uuid":"GPU-1","index":0}]', 1, 1)
    for number in (0, 1):
        connection.execute(
            "INSERT INTO steps (job_id, run, number, name, command, node, start_at, state, tasks, cpus, gpus, "
            "is_exclusive, has_own_gpus) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row[:2], number, *row[2:]),
        )
    connection.execute("UPDATE steps SET state = 'COMPLETED', end_at = ? WHERE number = 0", (saved.NOW + 1,))
    connection.commit()
    connection.close()
    store = SqliteStore.open(path)
    try:
        ended, still_open = store.steps([4])
        assert list(store.load(STEPS).values()) == [still_open]
        assert (ended.end_at, ended.tasks, ended.nodes, ended.parts) == (saved.NOW + 1, 2, ("n1",), ())
        share = GpuShare("GPU-1", 0)
        assert still_open.on_each_node == (StepPart("n1", (0, 1), 2.0, (share,)),)
        assert store.check() is None
    finally:
        store.close()


# --- the next release ---------------------------------------------------------------------------


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a release with one migration more, which the test may rewrite."""
    folder = tmp_path / "sql"
    folder.mkdir()
    for name in schema.MIGRATIONS:
        (folder / f"{name}.sql").write_text((schema.SQL_FOLDER / f"{name}.sql").read_text())
    (folder / "9999_next.sql").write_text(
        "ALTER TABLE nodes ADD COLUMN rack TEXT;\nCREATE TABLE racks (\n    name TEXT -- where it stands;\n) STRICT;\n"
    )
    monkeypatch.setattr(schema, "SQL_FOLDER", folder)
    return folder


def migrate(path: Path) -> None:
    """What opening the database does in the next release."""
    connection = sqlite3.connect(path)
    try:
        schema.ensure_schema(connection, str(path), (*schema.MIGRATIONS, "9999_next"))
    finally:
        connection.close()


@pytest.mark.usefixtures("next_release")
def test_a_later_migration_applies_to_old_and_fresh_databases(tmp_path: Path) -> None:
    old, fresh = restore(OLD_RELEASES[0], tmp_path / "old.db"), tmp_path / "fresh.db"
    migrate(old)
    migrate(fresh)
    assert tables_of(old) == tables_of(fresh)
    assert "racks" in tables_of(old)
    assert version(old) == version(fresh) == len(schema.MIGRATIONS) + 1
    connection = sqlite3.connect(old)
    assert connection.execute("SELECT name, rack FROM nodes").fetchall() == [("n1", None)]
    connection.close()
    migrate(old)


def test_a_migration_that_fails_leaves_no_trace(tmp_path: Path, next_release: Path) -> None:
    path = restore(OLD_RELEASES[0], tmp_path / "old.db")
    # Each migration is a transaction of its own: those before the one that fails stay.
    SqliteStore.open(path).close()
    before = tables_of(path)
    good = (next_release / "9999_next.sql").read_text()
    (next_release / "9999_next.sql").write_text(good + "ALTER TABLE no_such_table ADD COLUMN x TEXT;\n")
    with pytest.raises(sqlite3.OperationalError, match="no_such_table"):
        migrate(path)
    assert tables_of(path) == before
    assert version(path) == len(schema.MIGRATIONS)
    # With the mended release it goes through.
    (next_release / "9999_next.sql").write_text(good)
    migrate(path)
    assert version(path) == len(schema.MIGRATIONS) + 1


@pytest.mark.usefixtures("next_release")
def test_a_database_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpusched.db"
    migrate(path)
    before = path.read_bytes()
    known = len(schema.MIGRATIONS)
    with pytest.raises(StoreBroken, match=f"schema version {known + 1}, but gpusched .* only up to {known}") as caught:
        SqliteStore.open(path)
    assert str(path) in caught.value.message
    assert "install that one again" in caught.value.hint
    assert path.read_bytes() == before


def test_migrations_and_files_correspond() -> None:
    assert tuple(sorted(file.stem for file in schema.SQL_FOLDER.glob("*.sql"))) == schema.MIGRATIONS


def test_a_file_of_statements_is_split_only_at_their_ends() -> None:
    found = list(schema.statements(schema.MIGRATIONS[0]))
    assert sum("CREATE TRIGGER" in text for text in found) == 1
    assert all(sqlite3.complete_statement(text) for text in found)
    assert all(re.search(r"^CREATE ", text, re.M) for text in found)


# --- opening --------------------------------------------------------------------------------------


def spawn(script: str, path: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_concurrent_openers_of_a_new_database_all_succeed(tmp_path: Path) -> None:
    path = tmp_path / "gpusched.db"
    script = """
import sys
import sqlite_utils, filelock  # so that all of them are at the database in the same instant
from gpusched.store.sqlite import SqliteStore
print("ready", flush=True)
sys.stdin.readline()
store = SqliteStore.open(sys.argv[1])
print(store.load_active(), store.check())
store.close()
"""
    processes = [spawn(script, path) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate()
        assert (process.returncode, output) == (0, "([], []) None\n")
    connection = sqlite3.connect(path)
    applied = connection.execute("SELECT name FROM _sqlite_migrations").fetchall()
    connection.close()
    assert applied == [(name,) for name in schema.MIGRATIONS]


def test_opening_a_current_database_does_not_import_migrations(tmp_path: Path) -> None:
    path = tmp_path / "gpusched.db"
    SqliteStore.open(path).close()
    script = """
import sys
from gpusched.store.sqlite import SqliteStore
SqliteStore.open(sys.argv[1]).close()
print([name for name in ("sqlite_utils", "filelock", "click") if name in sys.modules])
"""
    output, _ = spawn(script, path).communicate()
    assert output == "[]\n"


def test_waiting_for_an_upgrade_by_another_process_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    path = tmp_path / "gpusched.db"
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_S", 0.05)
    with FileLock(f"{path}.lock"), pytest.raises(NotReady, match="another process has been upgrading the database"):
        SqliteStore.open(path)
    SqliteStore.open(path).close()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to look like one\n" * 90, b"SQLite format 3\0" * 300]
)
def test_a_corrupt_file_is_refused_with_a_hint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gpusched.db"
    path.write_bytes(content)
    with pytest.raises(StoreBroken, match=re.escape(f"the database {path} is damaged")) as caught:
        SqliteStore.open(path)
    assert "gpusched doctor" in caught.value.hint
    assert path.read_bytes() == content


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpusched.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE jobs (what TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreBroken, match="not gpusched's: it holds jobs"):
        SqliteStore.open(path)
    assert path.read_bytes() == before
