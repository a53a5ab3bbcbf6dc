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


def run_of_a_job(daemon: Daemon, tmp_path: Path, *, requeue: bool = True) -> tuple[Path, int]:
    """Job 1 runs on the only GPU until this file is there; also the pid of its process."""
    end = tmp_path / "end"
    script = f"while [ ! -e {end} ]; do sleep 0.05; done"
    job = daemon.submit("/bin/sh", "-c", script, gpus=1, stdout="/dev/null", requeue=requeue)
    daemon.wait_state(job, "RUNNING")
    return end, daemon.pid_of(job)


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
    end, pid = run_of_a_job(daemon, tmp_path)
    daemon.kill()
    damage(daemon, *statements)
    if not lives_on:
        end.touch()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the run")
    daemon.start()
    next_job = daemon.submit("/bin/true", gpus=1, stdout="/dev/null")
    daemon.wait(next_job)
    assert not Path(f"/proc/{pid}").exists()
    assert row(daemon, "SELECT state, outcome FROM runs WHERE job_id = 1") == ("ENDED", "CANCELLED")
    assert "run 1.1 is open in the job table, and no active job has it" in log_of(daemon)
    # Once and for all.
    daemon.kill()
    daemon.start()
    assert log_of(daemon).count("run 1.1 is open in the job table") == 1


RUNS_ON = "UPDATE jobs SET state = ?, end_at = NULL WHERE id = 1"


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "COMPLETING"])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_job_whose_run_has_ended_ends_as_that_did(make_daemon: Callable[..., Daemon], state: str, gpus: int) -> None:
    daemon = make_daemon(fake_gpus="1x8GiB")
    job = daemon.submit("/bin/sh", "-c", "exit 3", gpus=gpus, stdout="/dev/null")
    daemon.wait(job)
    daemon.kill()
    damage(daemon, RUNS_ON.replace("?", f"'{state}'"))
    daemon.start()
    (found,) = daemon.wait(job)
    assert (found["state"], found["exit_code"], found["run"]) == ("FAILED", 3, 1)
    says = "job 1 is RUNNING in the job table, and its run 1.1 has ended: the job goes on as after FAILED"
    # One that is COMPLETING may just wait for its GPUs to be clean.
    assert log_of(daemon).count(says.replace("RUNNING", state)) == (state != "COMPLETING")
    (after,) = daemon.wait(daemon.submit("/bin/true", gpus=gpus, stdout="/dev/null"))
    assert after["state"] == "COMPLETED"
    daemon.kill()
    daemon.start()
    assert log_of(daemon).count("job 1 is ") == (state != "COMPLETING")


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "COMPLETING"])
@pytest.mark.parametrize("requeue", [True, False], ids=["requeued", "ended"])
def test_a_job_whose_run_is_missing_counts_as_lost(
    make_daemon: Callable[..., Daemon], tmp_path: Path, state: str, requeue: bool
) -> None:
    daemon = make_daemon(fake_gpus="1x8GiB")
    end, pid = run_of_a_job(daemon, tmp_path, requeue=requeue)
    daemon.kill()
    damage(daemon, RUNS_ON.replace("?", f"'{state}'"), "DELETE FROM runs WHERE job_id = 1")
    daemon.start()
    text = f"job 1 is {state} in the job table, and its run is missing in the job table: it counts as lost"
    assert log_of(daemon).count(text) == 1
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of what was left of it")
    if requeue:
        # The next run is another one.
        wait_until(lambda: row(daemon, "SELECT number FROM runs WHERE job_id = 1") == (2,), what="the next run")
        end.touch()
    (found,) = daemon.wait("1")
    assert found["state"] == ("COMPLETED" if requeue else "NODE_FAIL")
    if not requeue:
        assert (found["reason"], found["reason_text"]) == ("SupervisorLost", "its run is missing in the job table")
    daemon.kill()
    daemon.start()
    assert log_of(daemon).count(text) == 1


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(("UPDATE jobs SET state = 'PENDING', start_at = NULL WHERE id = 1",), id="its job waits"),
        pytest.param(("UPDATE jobs SET run = 2 WHERE id = 1",), id="its job is in another run"),
    ],
)
def test_an_open_run_that_is_not_the_one_of_its_job_is_stopped(
    make_daemon: Callable[..., Daemon], tmp_path: Path, statements: tuple[str, ...]
) -> None:
    daemon = make_daemon(fake_gpus="1x8GiB")
    end, pid = run_of_a_job(daemon, tmp_path)
    daemon.kill()
    damage(daemon, *statements)
    daemon.start()
    assert "run 1.1 is open in the job table, and no active job has it" in log_of(daemon)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the run")
    end.touch()
    (found,) = daemon.wait("1")
    assert found["state"] == "COMPLETED"
    assert found["run"] > 1
    assert row(daemon, "SELECT state, outcome FROM runs WHERE job_id = 1 AND number = 1") == ("ENDED", "CANCELLED")
    assert daemon.call("GET", "/v1/jobs")["jobs"] == []
