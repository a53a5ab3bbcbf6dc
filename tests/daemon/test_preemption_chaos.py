"""Suspend, resume, requeue and kill the daemon at random; then look at the processes themselves."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

from gpusched.engine.linux import proctree
from gpusched.errors import GpuschedError

# A first process that ends by the signal, one that was forked away and ignores it, and one that saves its work.
TREE = """
echo "begin $GPUSCHED_RUN" >> "$HOME_DIR/witness"
(setsid bash -c 'while :; do sleep 0.05; done' &)
bash -c 'trap "exit 75" TERM; while :; do sleep 0.05; done'
"""


def states_of_run(run: str, spool: Path) -> set[str]:
    """States of all live processes that carry the mark of this run."""
    marks = {f"GPUSCHED_RUN={run}".encode(), f"GPUSCHED_SPOOL={spool}".encode()}
    found = set()
    for pid in proctree.all_pids():
        try:
            variables = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        process = proctree.read_process(pid)
        if marks <= variables and process is not None and process.is_alive:
            found.add(process.state)
    return found


def agrees(daemon: Daemon, job_id: str, spool: Path) -> bool:
    """Whether the processes of a job's current run do what the table says, and no other run has any."""
    job = daemon.job(job_id)
    for number in range(1, job["run"]):
        assert not states_of_run(f"{job_id}.{number}", spool), f"run {number} of job {job_id} lives on"
    states = states_of_run(f"{job_id}.{job['run']}", spool)
    if job["state"] == "SUSPENDED":
        return states == {"T"}
    return job["state"] == "RUNNING" and bool(states) and "T" not in states


def run_chaos(daemon: Daemon, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    env = {"HOME_DIR": str(daemon.home)}
    ids = [daemon.submit("/bin/bash", "-c", TREE, env=env, grace_s=1, stdout="/dev/null") for _ in range(4)]
    for job_id in ids:
        daemon.pid_of(job_id)
    (spool,) = {path.parent for path in daemon.home.rglob("*.record")}
    for _ in range(rounds):
        for _ in range(dice.randint(1, 6)):
            action = dice.choice(["suspend", "suspend", "resume", "resume", "requeue"])
            try:
                daemon.call("POST", f"/v1/jobs/{action}", {"ids": [dice.choice(ids)]})
            except GpuschedError:
                # Not to be done in the state that the job is in.
                continue
        if dice.random() < 0.6:
            daemon.kill()
            daemon.start()
        for job_id in ids:
            what = f"the processes of job {job_id} to do as it says"
            wait_until(lambda job_id=job_id: agrees(daemon, job_id, spool), what=what)
    begun = (daemon.home / "witness").read_text().split()[1::2]
    assert len(begun) == len(set(begun)), "a run was started twice"
    for job_id in ids:
        job = daemon.job(job_id)
        assert [run["run"] for run in job["runs"]] == list(range(1, job["run"] + 1))
        for run in job["runs"][:-1]:
            # A daemon that is killed between a start's record and the start leaves a run that nobody took.
            assert run["outcome"] == "PREEMPTED" or run["reason_text"].startswith("was not started"), run
        assert job["failures"] == 0


def test_random_preemption_survives_daemon_kills(make_daemon: Callable[..., Daemon]) -> None:
    run_chaos(make_daemon(), rounds=6, seed=int(os.environ.get("KILL_SEED", "1")))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_much_random_preemption_survives_daemon_kills(make_daemon: Callable[..., Daemon], seed: int) -> None:
    run_chaos(make_daemon(), rounds=30, seed=seed)
