"""Backups made while the daemon writes, and what is there after they were put back."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until
from warm import typed

from gpusched.errors import NotFound, Refused, StoreBroken
from gpusched.model.table_settings import BudgetTold, Credit, Membership, UserLimit
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import TABLE_SETTINGS, ChangedRows
from gpusched.store.backup import backup, restore
from gpusched.store.id_record import IdRecord, read_ids
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job

TABLES = (
    "table_settings",
    "jobs",
    "runs",
    "job_events",
    "payloads",
    "usage",
    "reservations",
    "estimates",
    "pipelines",
    "alerts",
)


def gpusched(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("gpusched", *words, env=daemon.env)


def content(path: str | Path) -> dict[str, list[tuple[object, ...]]]:
    db = sqlite3.connect(path)
    try:
        return {table: sorted(db.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in TABLES}
    finally:
        db.close()


def database(daemon: Daemon) -> Path:
    return Path(str(daemon.call("GET", "/v1/status")["daemon"]["database"]))


def test_a_backup_under_heavy_writes_is_consistent(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "copies" / "copy.db"
    file.parent.mkdir()
    done = threading.Event()
    sent: list[str] = []

    def submit() -> None:
        while not done.is_set():
            sent.append(daemon.submit("/bin/true", stdout="/dev/null"))

    writer = threading.Thread(target=submit)
    writer.start()
    try:
        for count in (10, 40, 80):
            wait_until(lambda count=count: len(sent) >= count, what="some jobs")
            before = len(sent)
            made = gpusched(daemon, "backup", str(file))
            assert made.returncode == 0, made.stderr
            store = SqliteStore.open(file)
            try:
                jobs = {one.id: one for one in store.jobs(JobFilter())}
                runs = store.runs(jobs)
            finally:
                store.close()
            # All that was acknowledged before is in it, without a gap, and every run is that of a job in it.
            assert set(jobs) == set(range(1, max(jobs) + 1))
            assert len(jobs) >= before
            assert all(jobs[run.job_id].run >= run.number for run in runs)
            assert all(any(run.job_id == one.id for run in runs) for one in jobs.values() if one.run)
    finally:
        done.set()
        writer.join()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [name for name in os.listdir(file.parent) if "part" in name] == []


def test_a_backup_restores_what_was_backed_up(daemon: Daemon, tmp_path: Path) -> None:
    where, file = database(daemon), tmp_path / "copy.db"
    ended = [daemon.submit("/bin/true", stdout="/dev/null") for _ in range(5)]
    waiting = daemon.submit("/bin/true", stdout="/dev/null", begin_at=4e9)
    daemon.wait(*ended)
    assert gpusched(daemon, "backup", str(file)).returncode == 0
    saved = content(file)
    later = daemon.submit("/bin/true", stdout="/dev/null")
    daemon.wait(later)

    refused = gpusched(daemon, "restore", str(file))
    assert refused.returncode == 1
    assert "a daemon is running" in refused.stderr
    assert "gpusched daemon stop" in refused.stderr

    daemon.kill()
    done = gpusched(daemon, "restore", "--no-hold", str(file))
    assert done.returncode == 0, done.stderr
    assert content(where) == saved
    kept = next(where.parent.glob("*.before-restore-*"))
    assert str(kept) in done.stderr
    assert int(later) in [row[0] for row in content(kept)["jobs"]]
    assert stat.S_IMODE(where.stat().st_mode) == 0o600
    daemon.start()
    assert daemon.job(waiting)["state"] == "PENDING"
    # No id is given twice, though the restored table has never heard of the later job.
    assert int(daemon.submit("/bin/true", stdout="/dev/null")) == int(later) + 1


def test_jobs_that_ran_after_the_backup_are_not_repeated(daemon: Daemon, tmp_path: Path) -> None:
    file, witness = tmp_path / "copy.db", tmp_path / "witness"
    gate = tmp_path / "gate"
    script = f"echo ran >> {witness}; while [ ! -e {gate} ]; do sleep 0.02; done"
    running = daemon.submit("/bin/sh", "-c", script, stdout="/dev/null")
    wait_until(witness.exists, what="the job to run")
    waiting = daemon.submit(
        "/bin/sh", "-c", f"echo ran >> {witness}", stdout="/dev/null", dependency=f"afterok:{running}"
    )
    assert gpusched(daemon, "backup", str(file)).returncode == 0
    gate.touch()
    daemon.wait(running, waiting)
    assert witness.read_text().count("ran") == 2
    spool = Path(str(daemon.call("GET", "/v1/status")["daemon"]["spool"]))
    wait_until(lambda: not list(spool.glob(f"{running}.1.*")), what="the files of the run to go")

    daemon.kill()
    done = gpusched(daemon, "restore", str(file))
    assert done.returncode == 0, done.stderr
    assert f"jobs {running} and {waiting}" in done.stderr
    daemon.start()
    daemon.wait(daemon.submit("/bin/true", stdout="/dev/null"))
    held = {"state": "PENDING", "reason": "JobHeldUser"}
    for one in (running, waiting):
        wait_until(lambda one=one: held.items() <= daemon.job(one).items(), what=f"job {one} to wait, held")
    assert witness.read_text().count("ran") == 2


def test_a_continuing_run_is_adopted_after_a_restore(daemon: Daemon, tmp_path: Path) -> None:
    file, gate = tmp_path / "copy.db", tmp_path / "gate"
    running = daemon.submit("/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.02; done", stdout="/dev/null")
    wait_until(lambda: daemon.job(running)["state"] == "RUNNING", what="the job to run")
    assert gpusched(daemon, "backup", str(file)).returncode == 0
    stranger = daemon.submit("/bin/sleep", "1000", stdout="/dev/null")
    wait_until(lambda: daemon.job(stranger)["state"] == "RUNNING", what="the other job to run")
    daemon.kill()
    done = gpusched(daemon, "restore", str(file))
    assert done.returncode == 0, done.stderr
    assert f"the daemon will end them: run {stranger}.1" in done.stderr
    daemon.start()
    assert daemon.job(running)["state"] == "RUNNING"
    gate.touch()
    (ended,) = daemon.wait(running)
    assert (ended["state"], len(ended["runs"])) == ("COMPLETED", 1)


def test_a_backup_works_after_the_daemon_was_killed(daemon: Daemon, tmp_path: Path) -> None:
    ids = [daemon.submit("/bin/true", stdout="/dev/null") for _ in range(20)]
    daemon.wait(*ids)
    daemon.kill()
    made = gpusched(daemon, "backup", str(tmp_path / "copy.db"))
    assert made.returncode == 0, made.stderr
    assert {row[0] for row in content(tmp_path / "copy.db")["jobs"]} == {int(one) for one in ids}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "gpusched.db"
    store = SqliteStore.open(path)
    store.commit(Changes(jobs={1: job(1), 2: job(2)}))
    store.close()
    return path


def test_a_file_that_is_not_a_backup_is_not_overwritten(table: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    for target, words in ((thesis, "not a gpusched backup"), (table, "the database itself"), (tmp_path, "is a folder")):
        with pytest.raises(Refused, match=words):
            backup(str(table), str(target))
    assert thesis.read_text() == "years of work"
    with pytest.raises(NotFound, match="no database"):
        backup(str(tmp_path / "nothing.db"), str(tmp_path / "copy.db"))
    with pytest.raises(NotFound, match=f"no folder {tmp_path}/my backups$") as raised:
        backup(str(table), str(tmp_path / "my backups" / "copy.db"))
    assert raised.value.hint == f"make it with: mkdir -p '{tmp_path}/my backups'"


def test_damaged_newer_and_foreign_backups_are_not_restored(table: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    before = content(table)
    backup(str(table), str(copy))
    whole = copy.read_bytes()
    middle = len(whole) // 2
    copy.write_bytes(whole[:4096] + os.urandom(middle) + whole[4096 + middle :])
    with pytest.raises(StoreBroken, match="damaged"):
        restore(str(copy), str(table), hold=True)
    copy.write_bytes(whole)
    db = sqlite3.connect(copy)
    db.execute("PRAGMA user_version = 999")
    db.close()
    with pytest.raises(StoreBroken, match="schema version 999"):
        restore(str(copy), str(table), hold=True)
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE songs (title TEXT)")
    db.close()
    with pytest.raises(StoreBroken, match="holds songs"):
        restore(str(other), str(table), hold=True)
    with pytest.raises(NotFound, match="no file"):
        restore(str(tmp_path / "nothing"), str(table), hold=True)
    assert content(table) == before
    assert sorted(os.listdir(table.parent)) == ["gpusched.db", "gpusched.db.lock"]


def test_a_damaged_table_is_replaced_and_kept(table: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(str(table), str(copy))
    table.write_bytes(b"no database at all" * 1000)
    found = restore(str(copy), str(table), hold=True, ids_in_use=[7])
    assert found.kept is not None
    assert Path(found.kept).read_bytes().startswith(b"no database")
    assert (found.jobs, found.held, found.next_id) == (2, (1, 2), 8)
    store = SqliteStore.open(table)
    try:
        assert store.check() is None
        assert [one.hold for one in store.jobs(JobFilter())] == ["user", "user"]
        assert "may have run meanwhile" in store.events(1)[-1].text
    finally:
        store.close()


def test_limits_credits_members_and_the_record_of_settings_are_in_a_backup(tmp_path: Path) -> None:
    table, copy, record = tmp_path / "gpusched.db", tmp_path / "copy.db", tmp_path / "settings.jsonl"
    rows = (
        Credit(1, "vision", 500.0, 1e9, "root", "grant"),
        UserLimit("bob", "vision", max_gpus=4, by="carla", is_of_coordinator=True, at=1e9, until_at=2e9),
        Membership("vision", "dora", True, 1e9, "carla"),
        BudgetTold("vision", "", 1e9, 7200.0, 80),
    )
    store = SqliteStore.open(table)
    store.commit(Changes(rows=ChangedRows({TABLE_SETTINGS: {one.key: one for one in rows}})))
    store.close()
    record.write_text('{"id": 0, "document": {}}\n{"id": 1, "cut sh')
    backup(str(table), str(copy), str(record))
    elsewhere = tmp_path / "elsewhere"
    new, told = elsewhere / "gpusched.db", elsewhere / "settings.jsonl"
    restore(str(copy), str(new), hold=True, record=str(told))
    assert told.read_text() == '{"id": 0, "document": {}}\n'
    assert stat.S_IMODE(told.stat().st_mode) == 0o600
    store = SqliteStore.open(new)
    assert store.load(TABLE_SETTINGS) == {one.key: one for one in rows}
    store.close()
    db = sqlite3.connect(new)
    assert db.execute("SELECT name FROM sqlite_master WHERE name LIKE 'backup%'").fetchall() == []
    db.close()
    # The record that is there knows what came after the backup.
    told.write_text("a later one\n")
    restore(str(copy), str(new), hold=True, record=str(told))
    assert told.read_text() == "a later one\n"
    # Backups of earlier releases have none.
    backup(str(table), str(copy))
    told.unlink()
    restore(str(copy), str(new), hold=True, record=str(told))
    assert not told.exists()


# --- a table that is lost -----------------------------------------------------------------------------


def empty(where: Path) -> None:
    for file in where.parent.glob(f"{where.name}-*"):
        file.unlink()
    where.write_bytes(b"")


def delete(where: Path) -> None:
    for file in where.parent.glob(f"{where.name}*"):
        file.unlink()


def replace_by_a_new_one(where: Path) -> None:
    delete(where)
    SqliteStore.open(where).close()


def drop_the_record(where: Path) -> None:
    (where.parent / "next-ids").unlink()
    empty(where)


@pytest.mark.parametrize(
    ("lose", "words", "next_id"),
    [
        (empty, "is empty, but a scheduler has run here before: beside it is next-ids (its last job was 2)", 3),
        (delete, "is missing, but a scheduler has run here before: beside it is next-ids (its last job was 2)", 3),
        (replace_by_a_new_one, "has never had a job, but a scheduler has run here before", 3),
        (drop_the_record, "is empty, but a scheduler has run here before: beside it is series.db", 3),
    ],
)
def test_a_lost_table_is_not_a_new_scheduler(
    daemon: Daemon, tmp_path: Path, lose: Callable[[Path], None], words: str, next_id: int
) -> None:
    where = database(daemon)
    daemon.wait(*(daemon.submit("/bin/true", stdout="/dev/null") for _ in range(2)))
    daemon.kill()
    copy = where.with_name(f"{where.name}.before-restore-20261124T120000")
    copy.write_bytes(where.read_bytes())
    aside = tmp_path / "aside"
    copy.rename(aside)
    lose(where)
    aside.rename(copy)

    refused = daemon.try_start()
    assert daemon.process is not None
    assert daemon.process.wait(60) == 1
    daemon.reap()
    assert words in refused
    assert str(copy) in refused
    assert "gpusched restore FILE" in refused
    assert "Traceback" not in (daemon.home / "daemon.out").read_text()
    checked = gpusched(daemon, "doctor", "--json")
    assert words in checked.stdout

    both = gpusched(daemon, "restore", "--empty", str(copy))
    assert (both.returncode, "exclude each other" in both.stderr) == (2, True)
    neither = gpusched(daemon, "restore")
    assert (neither.returncode, "no backup is named" in neither.stderr) == (2, True)

    done = gpusched(daemon, "restore", "--empty")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"began an empty job table; the next id is {next_id}\n"
    daemon.start()
    assert int(daemon.submit("/bin/true", stdout="/dev/null")) == next_id


def test_a_folder_in_which_no_table_was_ever_made_begins_with_job_1(daemon: Daemon) -> None:
    where = database(daemon)
    daemon.kill()
    # As after a kill before the first table was made.
    for name in ("next-ids", "series.db", "series.db-wal", "series.db-shm"):
        (where.parent / name).unlink(missing_ok=True)
    delete(where)
    daemon.start()
    assert daemon.submit("/bin/true", stdout="/dev/null") == "1"


def test_ids_do_not_go_back_with_an_older_table(daemon: Daemon) -> None:
    where = database(daemon)
    daemon.wait(daemon.submit("/bin/true", stdout="/dev/null"))
    daemon.kill()
    older = {file.name: file.read_bytes() for file in where.parent.glob(f"{where.name}*") if file.is_file()}
    daemon.start()
    daemon.wait(*(daemon.submit("/bin/true", stdout="/dev/null") for _ in range(3)))
    daemon.kill()
    delete(where)
    for name, data in older.items():
        (where.parent / name).write_bytes(data)
    daemon.start()
    assert daemon.submit("/bin/true", stdout="/dev/null") == "5"
    log = (where.parent / "log" / "gpuschedd.log").read_text()
    assert "jobs 2 to 4 are lost, and the next job is 5" in log


@pytest.mark.parametrize("content", [b"", b"12", b"12 x\n", b"\xff\xfe", b"-3 -4\n"])
def test_a_damaged_record_of_ids_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "next-ids").write_bytes(content)
    assert read_ids(str(tmp_path / "next-ids")) == (1, 1)


def test_the_record_of_ids_only_grows(tmp_path: Path) -> None:
    path = str(tmp_path / "next-ids")
    record = IdRecord(path)
    record.note(17, 3)
    record.note(5, 4)
    assert read_ids(path) == (17, 4)
    record.note(123456789, 4)
    record.close()
    assert read_ids(path) == (123456789, 4)
    store = SqliteStore.open(tmp_path / "gpusched.db", IdRecord(path))
    assert (store.next_job_id(), store.next_pipeline()) == (123456789, 4)
    store.close()
