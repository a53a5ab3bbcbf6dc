"""Nodes n1 (the head), n2, ... with simulated GPUs, and a shell on n1 in which Slurm's commands are typed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusters import Cluster
from slurm_lab import Typed
from support import wait_until

from gpusched.slurm_commands import write_commands

HEAD = """#!/bin/bash
export J=$SLURM_JOB_ID
await() { while [ ! -e $1 ]; do sleep 0.02; done; }
export -f await"""
"""Beginning of every script: its id, and a way to wait for a file."""


class SlurmCluster:
    """Jobs run in one folder, which all nodes see."""

    def __init__(self, root: Path, nodes: Sequence[str] = ("n2",), *, settings: str = "", gpu: str = "") -> None:
        self.cluster = Cluster(root, nodes, address="127.0.0.1", settings=settings, gpu=gpu)
        self.head = self.cluster.head
        self.work, self.bin = root / "work", root / "bin"
        for folder in (self.work, self.bin):
            folder.mkdir()
        write_commands(str(self.bin))
        self.env = {**self.head.env, "PATH": f"{self.bin}:{os.environ['PATH']}", "TZ": "UTC"}

    def type(self, line: str, stdin: bytes = b"", timeout_s: float = 120.0, **env: str) -> Typed:
        """Run one line of shell on n1, in the work folder, without a terminal."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.work,
            env={**self.env, **env},
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
        )
        return Typed(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, text: str, words: str = "-N 2 --ntasks-per-node=2 --gpus-per-node=2 -c 1") -> str:
        """Submit a script; returns the job's id. Its output is ID.out."""
        name = f"script-{time.monotonic_ns()}.sh"
        (self.work / name).write_text(f"{HEAD}\n{text}\n")
        done = self.type(f"sbatch --parsable -t 5 -o %j.out {words} {name}")
        assert done.code == 0, done
        return done.out.strip()

    def wait(self, job: str, timeout_s: float = 90.0) -> dict[str, Any]:
        ended: dict[str, Any] = self.head.wait(job, timeout_s=timeout_s)[0]
        return ended

    def run(self, text: str, words: str = "-N 2 --ntasks-per-node=2 --gpus-per-node=2 -c 1") -> str:
        """Run a script as a job; returns what it wrote."""
        job = self.start(text, words)
        self.wait(job)
        return self.text(f"{job}.out")

    def coded(self, line: str, words: str = "-N 2 --ntasks-per-node=2 --gpus-per-node=2 -c 1") -> Typed:
        """Exit code, output and errors of one line in a job; ids of jobs are replaced by JOB, instants by TIME."""
        job = self.start(f"( {line} ) >out-$SLURM_JOB_ID 2>err-$SLURM_JOB_ID; echo $? >code-$SLURM_JOB_ID", words)
        self.wait(job)
        out, err = (
            self.text(f"{name}-{job}").replace(f"{job}.", "JOB.").replace(f"job {job}", "job JOB")
            for name in ("out", "err")
        )
        return Typed(int(self.text(f"code-{job}")), out, re.sub(r"AT [0-9T:-]{19}", "AT TIME", err))

    def text(self, name: str) -> str:
        return (self.work / name).read_text()

    def steps(self, job: str) -> list[dict[str, Any]]:
        return list(self.head.call("GET", f"/v1/steps?ids={job}")["steps"])

    def await_file(self, name: str, timeout_s: float = 60.0) -> str:
        """What a file says, once it is there."""
        path = self.work / name
        wait_until(lambda: path.exists() and path.read_text() != "", timeout_s, what=name)
        return path.read_text()

    def reset(self) -> None:
        """Without jobs and with every node there, for the next test."""
        self.cluster.reset()
        jobs = [job["id"] for job in self.head.call("GET", "/v1/jobs")["jobs"]]
        if jobs:
            self.head.call("POST", "/v1/jobs/cancel", {"ids": jobs})
            self.head.wait(*jobs)
        for path in self.work.iterdir():
            path.unlink()

    def close(self) -> None:
        self.head.close()
