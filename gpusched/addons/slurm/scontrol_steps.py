"""The steps and processes of jobs, for scontrol."""

from __future__ import annotations

import sys

from gpusched.addons.slurm import processes
from gpusched.addons.slurm.command import CommandError
from gpusched.addons.slurm.nodes import tres, whole
from gpusched.addons.slurm.values import INVALID_ID, NULL, first_node, instant, is_job_id, long_duration
from gpusched.cli.query import quote
from gpusched.errors import NotFound, NotReady, UserError
from gpusched.model.units import printable, ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpusched.addons.slurm.scontrol import ControlLine

    Json = dict[str, Any]


OPEN = "RUNNING,SUSPENDED,COMPLETING"


def show_steps(line: ControlLine, names: list[str]) -> int:
    """`show step [ID[.STEP]]`: the steps that run now, the batch script first; returns the exit code."""
    word, _, step_word = names[0].partition(".") if names else ("", "", "")
    if names and not is_job_id(word):
        raise CommandError(f"scontrol: error: Invalid job id {printable(word)}")
    found: list[tuple[str, list[str]]] = []
    chosen = f"&ids={quote(word)}" if word else f"&states={OPEN}"
    try:
        jobs = line.client.call("GET", f"/v1/jobs?{chosen[1:]}")["jobs"]
        steps = line.client.call("GET", f"/v1/steps?open=1{chosen}")["steps"]
    except NotReady:
        raise
    except NotFound:
        jobs, steps = [], []
    for job in jobs:
        if job["state"] not in OPEN.split(",") or (job["task"] is None and job["array_id"] is not None):
            continue
        if job["is_batch"]:
            found.append(("batch", _batch_lines(job)))
        found += [(str(step["step"]), _step_lines(step)) for step in steps if step["job"] == job["id"]]
    shown = [lines for step, lines in found if step_word in ("", step)]
    for lines in shown:
        separator = " " if line.is_one_line else "\n   "
        sys.stdout.write(separator.join(lines) + ("\n" if line.is_one_line else "\n\n"))
    if shown:
        return 0
    if not names:
        sys.stdout.write("No job steps in the system\n")
        return 0
    if not line.is_quiet:
        sys.stdout.write(f"Job step {printable(names[0])} not found\n")
    return 1


def _batch_lines(job: Json) -> list[str]:
    return [
        f"StepId={job['id']}.batch UserId={job['uid']} "
        f"StartTime={instant(job['start_at'], 'Unknown')} TimeLimit=UNLIMITED",
        f"State={job['state']} Partition={printable(job['queue'])} NodeList={first_node(job['node'])}",
        f"Nodes=1 CPUs=0 Tasks=1 Name=batch Network={NULL}",
        f"TRES={NULL}",
        f"ResvPorts={NULL}",
        "CPUFreqReq=Default",
        f"SrunHost:Pid={NULL}:0",
    ]


def _step_lines(step: Json) -> list[str]:
    cpus = max(1, whole(step["cpus"]))
    return [
        f"StepId={step['id']} UserId={step['uid']} StartTime={instant(step['start_at'], 'Unknown')} "
        f"TimeLimit={long_duration(step['time_limit_s'])}",
        f"State={step['state']} Partition={printable(step['queue'])} NodeList={step['nodelist']}",
        f"Nodes={len(step['nodes'])} CPUs={cpus} Tasks={step['tasks']} Name={printable(step['name'])} Network={NULL}",
        f"TRES={tres(cpus, 0, len(step['gpus']), nodes=len(step['nodes']))}",
        f"ResvPorts={NULL}",
        f"CPUFreqReq=Default Dist={distribution([part['task_ids'] for part in step['parts']])}",
        f"SrunHost:Pid={step['node']}:{step['pid'] or 0}",
    ]


def distribution(nodes: Sequence[Sequence[int]]) -> str:
    """How the numbers of tasks are dealt out to the nodes of a step. Args: nodes: those on each, ascending."""
    blocks = [ranges(numbers).split(",") for numbers in nodes]
    if all(len(some) == 1 for some in blocks):
        return "Block"
    bounds = [block.partition("-") for some in blocks for block in some]
    sizes = [int(last or first) - int(first) + 1 for first, _, last in bounds]
    if max(sizes) == 1:
        return "Cyclic"
    return "Plane" if max(sizes) == sizes[0] else "Arbitrary"


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
            rows = line.client.call("GET", f"/v1/jobs?states={OPEN}&fields=id")["rows"]
            jobs = [line.client.call("GET", f"/v1/jobs/{quote(row[0])}")["job"] for row in rows]
    except UserError:
        raise CommandError(f"Job {job_word} does not exist on this node: {INVALID_ID}") from None
    lines = []
    for job in jobs:
        pid = job["runs"][-1]["pid"] if job["runs"] else None
        if pid is None or job["state"] not in OPEN.split(","):
            continue
        for one in processes.tree(pid):
            given = processes.variables(one)
            step, task, rank = given.get("SLURM_STEP_ID"), given.get("SLURM_LOCALID"), given.get("SLURM_PROCID")
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
