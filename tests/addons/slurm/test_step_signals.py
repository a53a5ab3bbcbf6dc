"""Signals that come while srun starts its tasks: none of them misses the tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from slurm_lab import SlurmLab
from support import wait_until

from gpusched.engine.linux.proctree import read_process

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


@pytest.mark.parametrize("stop", ["scancel {}", "scontrol requeue {}"])
def test_a_step_that_comes_between_a_stop_and_its_signal_does_not_end_its_script(lab: SlurmLab, stop: str) -> None:
    # A script that went on after the refusal would end by itself, before the signal: as FAILED or COMPLETED.
    text = """#!/bin/bash
[ -z "$SLURM_RESTART_COUNT" ] || exec sleep 300
touch {0}.ready; until [ -e {0}.go ]; do sleep 0.01; done
srun true 2> {0}.err
touch {0}.on
"""
    name = stop.split()[0]
    (lab.work / f"{name}.sh").write_text(text.format(name))
    job = lab.submit(f"{name}.sh")
    lab.text(f"{name}.ready")
    wait_until(lambda: lab.job(job)["runs"][-1]["pid"], what="the start to be known")
    script = read_process(lab.job(job)["runs"][-1]["pid"])
    assert script is not None
    supervisor = script.ppid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        lab.ok(stop.format(job))
        (lab.work / f"{name}.go").touch()
        went_on = lab.work / f"{name}.on"
        wait_until(lambda: "is being ended" in lab.text(f"{name}.err") or went_on.exists(), what="the refusal")
    finally:
        os.kill(supervisor, signal.SIGCONT)
    if name == "scancel":
        lab.wait(job)
        assert lab.state(job) == "CANCELLED"
    else:
        wait_until(lambda: lab.job(job)["run"] == 2 and lab.wait_state(job, "RUNNING"), what="its second run")
        lab.ok(f"scancel {job}")
    assert not went_on.exists()
