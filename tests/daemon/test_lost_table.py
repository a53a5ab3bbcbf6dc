"""The database is deleted, replaced, emptied or overwritten while the daemon runs: refused, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

from gpusched.errors import StoreBroken


class Home:
    """A daemon with one job that has ended, and one that runs until it is let go."""

    def __init__(self, folder: Path) -> None:
        self.daemon = Daemon(folder / "home")
        self.daemon.start()
        facts = self.daemon.call("GET", "/v1/status")["daemon"]
        self.table, self.log = Path(facts["database"]), facts["log"]
        self.gate = folder / "gate"
        self.ended = self.daemon.submit("/bin/true", stdout="/dev/null")
        self.daemon.wait(self.ended)
        waits = f"while [ ! -e {self.gate} ]; do sleep 0.02; done; exit 4"
        self.running = self.daemon.submit("/bin/sh", "-c", waits, stdout="/dev/null", work_dir="/")
        self.pid = self.daemon.pid_of(self.running)

    def refused(self) -> StoreBroken:
        with pytest.raises(StoreBroken) as caught:
            self.daemon.submit("/bin/true", stdout="/dev/null")
        return caught.value

    def end_running(self) -> None:
        self.gate.touch()
        wait_until(lambda: not Path(f"/proc/{self.pid}").exists(), what="the job to end")

    def goes_on(self) -> None:
        """The end of the running job is on record, and ids go on where they were."""
        (job,) = self.daemon.wait(self.running)
        assert (job["state"], job["exit_code"], job["run"]) == ("FAILED", 4, 1)
        assert self.daemon.submit("/bin/true", stdout="/dev/null") == str(int(self.running) + 1)
        assert self.daemon.job(self.ended)["state"] == "COMPLETED"

    def log_lines(self, words: str) -> list[str]:
        text = Path(self.log).read_text()
        return [line for line in text.splitlines() if words in line]

    def restart(self) -> None:
        self.daemon.stop()
        self.daemon.start()

    def beside(self) -> list[str]:
        """What lies beside the table and its log."""
        own = {self.table.name + suffix for suffix in ("", "-wal", "-shm", ".lock")}
        return [path.name for path in self.table.parent.glob(f"{self.table.name}*") if path.name not in own]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.end_running()
    # No job is left, and a daemon without its table would not end any.
    made.daemon.stop()


def delete(home: Home) -> None:
    for suffix in ("", "-wal", "-shm"):
        os.unlink(f"{home.table}{suffix}")


def replace(home: Home) -> None:
    other = home.table.with_name("other")
    other.write_bytes(b"")
    other.replace(home.table)


def empty(home: Home) -> None:
    os.truncate(home.table, 0)


def overwrite(home: Home) -> None:
    home.table.write_bytes(b"\0" * home.table.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "word"),
    [(delete, "deleted"), (replace, "replaced by another file"), (empty, "emptied"), (overwrite, "overwritten")],
)
def test_nothing_is_accepted_into_a_lost_table(home: Home, harm: Callable[[Home], None], word: str) -> None:
    harm(home)
    error = home.refused()
    assert f"the database {home.table} was {word}" in error.message
    assert error.hint
    home.refused()
    checks = home.daemon.call("GET", "/v1/doctor")["checks"]
    assert [word in check["text"] for check in checks if check["check"] == "database"] == [True]
    assert any(word in text for text in home.daemon.call("GET", "/v1/status")["daemon"]["warnings"])
    assert home.daemon.state(home.running) == "RUNNING", "what runs goes on"
    wait_until(lambda: home.log_lines("cannot record"))
    home.end_running()
    home.refused()
    assert len(home.log_lines("cannot record")) == 1, "once, not with every retry"


def test_a_deleted_table_is_restored_on_restart(home: Home) -> None:
    delete(home)
    home.refused()
    home.end_running()
    home.restart()
    home.goes_on()
    assert home.beside() == []


def test_a_restored_table_is_used_again(home: Home) -> None:
    away = home.table.with_name("away")
    home.table.rename(away)
    home.refused()
    home.end_running()
    away.rename(home.table)
    wait_until(lambda: home.log_lines("the job table is back"))
    home.goes_on()
    assert home.beside() == []
    home.restart()
    assert home.daemon.state(home.running) == "FAILED"


def test_a_table_restored_before_a_restart_takes_precedence(home: Home) -> None:
    away = home.table.with_name("away")
    home.table.rename(away)
    home.refused()
    home.daemon.stop()
    away.rename(home.table)
    home.daemon.start()
    home.end_running()
    home.goes_on()
    assert home.beside() == [f"{home.table.name}.replaced"]


def test_a_table_overwritten_by_an_older_copy_is_noticed(home: Home) -> None:
    copy = home.table.with_name("copy")
    shutil.copy(home.table, copy)
    wait_until(lambda: grows(home), timeout_s=120, what="the table to be written to")
    shutil.copyfile(copy, home.table)
    assert "overwritten" in home.refused().message


def grows(home: Home) -> bool:
    """Whether a commit has made SQLite bring its log into the table."""
    before = home.table.stat().st_size
    home.daemon.submit("/bin/true", hold=True, stdout="/dev/null", env={"FILL": os.urandom(400_000).hex()})
    return home.table.stat().st_size > before


@pytest.mark.parametrize("suffixes", [("-wal",), ("-shm",), ("-wal", "-shm")])
def test_a_lost_write_ahead_log_loses_nothing(home: Home, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        os.unlink(f"{home.table}{suffix}")
    waiting = home.daemon.submit("/bin/true", hold=True, stdout="/dev/null")
    assert int(waiting) == int(home.running) + 1
    assert home.log_lines("nothing is lost, it was recreated")
    home.daemon.kill()
    home.end_running()
    home.daemon.start()
    assert home.daemon.job(waiting)["state"] == "PENDING"
    assert home.daemon.wait(home.running)[0]["exit_code"] == 4
