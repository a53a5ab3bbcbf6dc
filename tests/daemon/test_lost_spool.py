"""The spool folder is removed while the daemon runs: it is made again, runs go on, and the log says so once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Daemon
from support import is_alive, wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "home")
    made.start()
    yield made
    made.close()


def spool_of(daemon: Daemon) -> Path:
    return Path(daemon.call("GET", "/v1/status")["daemon"]["spool"])


def log_lines(daemon: Daemon, words: str) -> list[str]:
    text = Path(daemon.call("GET", "/v1/status")["daemon"]["log"]).read_text()
    return [line for line in text.splitlines() if words in line]


def held(daemon: Daemon, gate: Path) -> str:
    waits = f"while [ ! -e {gate} ]; do sleep 0.02; done; exit 4"
    job = daemon.submit("/bin/sh", "-c", waits, stdout="/dev/null", work_dir="/")
    daemon.pid_of(job)
    return job


@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
def test_jobs_continue_without_their_spool_and_new_ones_start(
    daemon: Daemon, tmp_path: Path, is_replaced: bool
) -> None:
    gate = tmp_path / "gate"
    ends, cancelled = held(daemon, gate), held(daemon, tmp_path / "never")
    spool = spool_of(daemon)
    shutil.rmtree(spool)
    if is_replaced:
        spool.mkdir(mode=0o755)
    later = daemon.submit("/bin/sh", "-c", "exit 5", stdout="/dev/null")
    (job,) = daemon.wait(later)
    assert (job["state"], job["exit_code"]) == ("FAILED", 5)
    assert spool.stat().st_mode & 0o077 == (0o011 if os.geteuid() == 0 else 0)
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [cancelled]})
    assert daemon.wait(cancelled)[0]["state"] == "CANCELLED"
    gate.touch()
    (job,) = daemon.wait(ends)
    assert (job["state"], job["exit_code"], job["run"]) == ("FAILED", 4, 1)
    assert len(log_lines(daemon, "the spool folder")) == 1
    wait_until(lambda: not list(spool.glob("*.record")), what="files of ended runs to go")
    assert not log_lines(daemon, "cannot be settled")


def test_a_run_without_its_record_is_adopted_by_the_next_daemon(daemon: Daemon, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = held(daemon, gate)
    # Its start is on record with the next commit.
    daemon.submit("/bin/true", hold=True)
    shutil.rmtree(spool_of(daemon))
    daemon.kill()
    daemon.start()
    assert daemon.state(job) == "RUNNING"
    gate.touch()
    (ended,) = daemon.wait(job)
    assert (ended["exit_code"], ended["run"]) == (4, 1)


def test_an_unrecorded_run_is_ended_before_it_is_repeated(daemon: Daemon, tmp_path: Path) -> None:
    # Killed before the start is committed, and then its record is gone: neither says that it runs.
    job = daemon.submit(
        "/bin/sh", "-c", f"echo $$ >> {tmp_path}/pids; exec sleep 600", stdout="/dev/null", work_dir="/"
    )
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), what="the job to start")
    daemon.kill()
    shutil.rmtree(daemon.home / "spool")
    daemon.start()

    def alive() -> list[str]:
        return [pid for pid in pids.read_text().split() if is_alive(int(pid))]

    wait_until(lambda: daemon.state(job) == "RUNNING" and alive(), what="the job to run")
    assert len(alive()) == 1


def test_a_run_lost_with_its_record_says_so(daemon: Daemon, tmp_path: Path) -> None:
    job = daemon.submit("/bin/sleep", "600", stdout="/dev/null", work_dir="/", requeue=False)
    pid = daemon.pid_of(job)
    shutil.rmtree(spool_of(daemon))
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    (ended,) = daemon.wait(job)
    assert ended["state"] == "NODE_FAIL"
    assert "its record was removed from the spool" in ended["reason_text"]
    wait_until(lambda: not is_alive(pid), what="what it left to be ended")
