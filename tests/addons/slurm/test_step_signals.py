"""Signals that come while srun starts its tasks: none of them misses the tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

STEP = """
import ctypes, os, signal, sys
from gpusched.addons.slurm.command import parse
from gpusched.addons.slurm.srun import COMMAND
from gpusched.addons.slurm.step import Step
from gpusched.addons.slurm.step_tasks import NodeShare
from gpusched.cli.tasks import Tasks

# Signals come from the supervisor of the job, as which this process poses, by itself or for a client, or from others.
sender, when = sys.argv[1:]
kill = os.kill if sender != "client" else lambda pid, number: ctypes.CDLL(None).sigqueue(pid, number, None)
job = dict.fromkeys(("name", "queue", "user", "uid", "account", "cpus"), "1")
job |= {"supervisor_pid": 1 if sender == "other" else os.getpid(), "job_id": 3, "node": "n1", "nodes": ["n1"]}
step = Step(COMMAND, parse(COMMAND, ["sleep", "600"]), job, None)
step.shares = [NodeShare({"node": "n1", "nodeid": 0, "tasks": [0], "gpus": [], "address": "127.0.0.1"})]
step.count, step.tasks = 1, Tasks(own_groups=True)
if when == "before":
    kill(os.getpid(), signal.SIGTERM)
step.start()
if when == "after":
    kill(os.getpid(), signal.SIGTERM)
step.follow()
step.tasks.close()
print(step.ends)
"""


# What the supervisor sends by itself afterwards, tasks have got as well.
@pytest.mark.parametrize(
    ("sender", "when"),
    [("supervisor", "before"), *((sender, when) for sender in ("client", "other") for when in ("before", "after"))],
)
def test_a_signal_reaches_tasks_that_start_meanwhile(sender: str, when: str) -> None:
    argv = [sys.executable, "-c", STEP, sender, when]
    done = subprocess.run(argv, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"[(0, -{int(signal.SIGTERM)})]\n"), done.stderr
    assert ("CANCELLED" in done.stderr) == (sender != "other")
