"""Scripts that train on two nodes, as the manuals of the tools have them, and what each must find there.

The scripts and the stand-ins for tools that are not installed are in `tests/addons/slurm/scripts`. `TwoNodes` types
Slurm's commands on the head of a cluster whose nodes are `n1` and `n2`, with two GPUs each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from support import wait_until

from gpusched.slurm_commands import write_commands

FOLDER = Path(__file__).parent / "addons" / "slurm" / "scripts"

Place = tuple[str, tuple[int, ...]]
"""Node of a rank, and the GPUs that it sees."""

BOTH = (0, 1)
ALL_SEE_BOTH: tuple[Place, ...] = (("n1", BOTH), ("n1", BOTH), ("n2", BOTH), ("n2", BOTH))
TABLES: dict[str, tuple[Place, ...]] = {
    "torchrun": ALL_SEE_BOTH,
    "torchrun_c10d": ALL_SEE_BOTH,
    "ddp": ALL_SEE_BOTH,
    "lightning": ALL_SEE_BOTH,
    "deepspeed": ALL_SEE_BOTH,
    "accelerate": ALL_SEE_BOTH,
    "hugging_face": ALL_SEE_BOTH,
    "ray": (("n1", BOTH), ("n2", BOTH)),
    "mpi": ALL_SEE_BOTH,
    "jax": (("n1", (0,)), ("n1", (1,)), ("n2", (0,)), ("n2", (1,))),
}
"""What the ranks of each script report, in their order."""


PAGE = Path(__file__).parents[1] / "docs" / "howto" / "training-on-several-nodes.md"
_OF_PAGE = {
    "torchrun": "train.py",
    "lightning": "train_lightning.py 2 2",
    "deepspeed": "train.py",
    "accelerate": "train.py",
    "ray": 'train_ray.py "$RAY_ADDRESS" 2',
}
"""Stands in for the reader's train.py."""


def scripts_of_the_page() -> dict[str, str]:
    """The scripts of the page for users, by the name of the job."""
    blocks = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found = {re.findall(r"--job-name=(\w+)", block)[0]: block for block in blocks}
    assert found.keys() == _OF_PAGE.keys()
    return {name: block.replace("train.py", _OF_PAGE[name]) for name, block in found.items()}


class Cluster(Protocol):
    """What both kinds of cluster offer here."""

    head: Any


class TwoNodes:
    """Types commands on the head, in a folder that both nodes see.

    Args: prefix: what runs a command on the head. env: of commands and jobs, beside what they need.
    """

    def __init__(self, cluster: Cluster, work: Path, prefix: Sequence[str] = (), env: Mapping[str, str] = {}) -> None:
        self.head, self.work, self._prefix = cluster.head, work, list(prefix)
        shutil.copytree(FOLDER, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        commands = work / "commands"
        commands.mkdir()
        write_commands(str(commands))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GPUSCHED_", "SLURM_", "CUDA_"))}
        path = f"{work / 'bin'}:{commands}:{os.environ['PATH']}"
        self.env = {
            **kept,
            "PATH": path,
            # A login shell of a script reads this profile: not that of whoever runs the tests, which may wait.
            "HOME": str(work),
            "GPUSCHED_HOME": str(self.head.home),
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
        }

    def type(self, line: str, *, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run a line of shell in the folder."""
        return subprocess.run(
            [*self._prefix, "bash", "-c", f"cd {self.work} && {line}"],
            env={**self.env, **env},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def ok(self, line: str, **env: str) -> str:
        done = self.type(line, **env)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def run(self, script: str, **env: str) -> tuple[dict[str, Any], str]:
        """Submit a script and wait for its end; returns the job and its output."""
        job = self.ok(f"sbatch --parsable {script}", **env).strip()
        (ended,) = self.head.wait(job)
        return ended, Path(ended["stdout_path"]).read_text()

    def reset(self) -> None:
        """Leave no job to the next test."""
        jobs = [job["id"] for job in self.head.call("GET", "/v1/jobs")["jobs"]]
        if jobs:
            self.head.call("POST", "/v1/jobs/cancel", {"ids": jobs})
            self.head.wait(*jobs)

    def nothing_runs(self) -> bool:
        """Whether no process of a script is left, on any node that this machine sees."""
        return not [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_of(pid, str(self.work))]

    def await_quiet(self) -> None:
        wait_until(self.nothing_runs, what="all processes of the script to be gone")


def _is_of(pid: str, folder: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return os.readlink(f"/proc/{pid}/cwd") == folder and b"bash" not in words[0]
    except OSError:
        return False


def table_of(output: str) -> list[dict[str, Any]]:
    """What the ranks found, from the one line that reports it; with or without the label of its task."""
    (line,) = [line for line in output.splitlines() if "TABLE " in line]
    table: list[dict[str, Any]] = json.loads(line.partition("TABLE ")[2])
    return table


def check_table(script: str, output: str, addresses: Mapping[str, str]) -> None:
    """Check node and GPUs of each rank, and that those of the other node came from there."""
    table = table_of(output)
    assert [(one["node"], tuple(one["gpus"])) for one in table] == list(TABLES[script]), output
    assert [one["from"] for one in table] == [addresses[one["node"]] for one in table]
    locals_ = [one["local"] for one in table if "local" in one]
    assert locals_ == ([0, 1, 0, 1] if locals_ else [])
