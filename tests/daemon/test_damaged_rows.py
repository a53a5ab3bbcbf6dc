"""Rows that contradict each other: the daemon starts, says so, and gives no GPU twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

END_JOB = "UPDATE jobs SET state = 'COMPLETED', end_at = submit_at + 1 WHERE id = 1"


def damage(daemon: Daemon, *statements: str) -> None:
    with closing(sqlite3.connect(daemon.home / "gpusched.db", isolation_level=None)) as db:
        db.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            db.execute(statement)


def row(daemon: Daemon, query: str) -> tuple[object, ...] | None:
    with closing(sqlite3.connect(f"file:{daemon.home}/gpusched.db?mode=ro", uri=True)) as db:
        found: tuple[object, ...] | None = db.execute(query).fetchone()
        return found


def log_of(daemon: Daemon) -> str:
    return (daemon.home / "log" / "gpuschedd.log").read_text()


def running_on_the_only_gpu(daemon: Daemon, tmp_path: Path) -> Path:
    """Job 1, until this file is there."""
    end = tmp_path / "end"
    job = daemon.submit("/bin/sh", "-c", f"while [ ! -e {end} ]; do sleep 0.05; done", gpus=1, stdout="/dev/null")
    daemon.wait_state(job, "RUNNING")
    daemon.pid_of(job)
    return end


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param((END_JOB,), id="its job has ended"),
        pytest.param(("DELETE FROM job_events", "DELETE FROM jobs WHERE id = 1"), id="its job is gone"),
    ],
)
@pytest.mark.parametrize("lives_on", [True, False], ids=["alive", "ended meanwhile"])
def test_an_open_run_without_an_active_job_is_stopped_and_holds_its_gpu_until_then(
    make_daemon: Callable[..., Daemon], tmp_path: Path, statements: tuple[str, ...], lives_on: bool
) -> None:
    daemon = make_daemon(fake_gpus="1x8GiB")
    end = running_on_the_only_gpu(daemon, tmp_path)
    pid = row(daemon, "SELECT supervisor_pid FROM runs WHERE job_id = 1")
    assert pid is not None
    daemon.kill()
    damage(daemon, *statements)
    if not lives_on:
        end.touch()
        wait_until(lambda: not Path(f"/proc/{pid[0]}").exists(), what="the end of the run")
    daemon.start()
    next_job = daemon.submit("/bin/true", gpus=1, stdout="/dev/null")
    daemon.wait(next_job)
    assert not Path(f"/proc/{pid[0]}").exists()
    assert row(daemon, "SELECT state, outcome FROM runs WHERE job_id = 1") == ("ENDED", "CANCELLED")
    assert "run 1.1 is open in the job table, and its job has ended or is unknown" in log_of(daemon)
    # Once and for all.
    daemon.kill()
    daemon.start()
    assert log_of(daemon).count("run 1.1 is open in the job table") == 1
