"""The steps and processes of jobs, for scontrol."""

from __future__ import annotations

import os
import sys

from gpusched.cli.query import quote
from gpusched.cli.slurm.command import CommandError
from gpusched.cli.slurm.scontrol import INVALID_ID, is_job_id
from gpusched.errors import GpuschedError, NotReady

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.slurm.scontrol import ControlLine

    Json = dict[str, Any]


def list_pids(line: ControlLine, texts: list[str]) -> int:
    """Print the processes of one job, or of all running ones, with the step that each belongs to."""
    job_word, _, step_word = texts[0].partition(".") if texts else ("", "", "")
    if job_word == "*":
        job_word = ""
    if job_word and not is_job_id(job_word):
        raise CommandError(f"invalid job id specification: {texts[0]}")
    try:
        if job_word:
            jobs = [line.client.call("GET", f"/v1/jobs/{quote(job_word)}")["job"]]
        else:
            rows = line.client.call("GET", "/v1/jobs?states=RUNNING,SUSPENDED,COMPLETING&fields=id")["rows"]
            jobs = [line.client.call("GET", f"/v1/jobs/{quote(row[0])}")["job"] for row in rows]
    except NotReady:
        raise
    except GpuschedError:
        raise CommandError(f"Job {job_word} does not exist on this node: {INVALID_ID}") from None
    children = _children()
    lines = []
    for job in jobs:
        pid = job["runs"][-1]["pid"] if job["runs"] else None
        if pid is None or job["state"] not in ("RUNNING", "SUSPENDED", "COMPLETING"):
            continue
        for one in _tree(pid, children):
            step = _variable(one, b"SLURM_STEP_ID")
            task = _variable(one, b"SLURM_LOCALID") if step else None
            rank = _variable(one, b"SLURM_PROCID") if step else None
            if not step:
                step, task, rank = "batch", *(("0", "0") if one == pid else ("-", "-"))
            if not step_word or step == step_word:
                lines.append((one, job["id"], step, task or "-", rank or "-"))
    if not lines:
        raise CommandError(f"Job {job_word} has no processes on this node" if job_word else "No job has processes here")
    head = ("PID", "JOBID", "STEPID", "LOCALID", "GLOBALID")
    for process, job_id, step, local, rank in (head, *lines):
        sys.stdout.write(f"{process:<8} {job_id:<8} {step:<8} {local:<7} {rank:<8}\n")
    return 0


def _children() -> dict[int, list[int]]:
    """The processes of this machine by their parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has just ended
            found.setdefault(parent, []).append(int(name))
    return found


def _tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    found, left = [], [pid]
    while left:
        found.append(left.pop(0))
        left += sorted(children.get(found[-1], ()))
    return found


def _variable(pid: int, name: bytes) -> str | None:
    """A variable of a process's first environment; None where it has none or belongs to somebody else."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return None
    for word in words:
        key, _, value = word.partition(b"=")
        if key == name:
            return value.decode("utf-8", "replace")
    return None
