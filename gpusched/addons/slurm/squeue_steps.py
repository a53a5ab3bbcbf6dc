"""`squeue -s`: the steps of running jobs, the batch script as `42.batch` among them."""

from __future__ import annotations

import os
import sys
import time

from gpusched.addons.slurm.command import CommandError, comma_list
from gpusched.addons.slurm.format import PrintField, long_pieces, percent_pieces, render
from gpusched.addons.slurm.nodes import whole
from gpusched.addons.slurm.squeue import COMMAND, JobChoice, is_id, jobs_of
from gpusched.addons.slurm.values import first_node, instant, short_duration
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.addons.slurm.command import Parsed
    from gpusched.client import DaemonConnection

    Json = dict[str, Any]

DEFAULT = "%.15i %.8j %.9P %.8u %.9M %N"
_KEYS = ("user", "uid", "node", "start_at", "cpus", "nodes", "is_batch", "suspended_s", "suspended_at", "account")
_ORDER_OF_NAMES = {"extern": -2, "batch": -1}


def _time_limit(step: Json) -> str:
    return short_duration(step["time_limit_s"])


def _time_used(step: Json) -> str:
    return short_duration(time.time() - step["start_at"])


def _gres(step: Json) -> str:
    """GPUs on each node; where the nodes have different numbers, see `_gres_in_all`."""
    counts = {len(part["gpus"]) for part in step["parts"]}
    return f"gres:gpu:{counts.pop()}" if len(counts) == 1 and step["gpus"] else "N/A"


def _gres_in_all(step: Json) -> str:
    is_uneven = len({len(part["gpus"]) for part in step["parts"]}) > 1
    return f"gres:gpu:{len(step['gpus'])}" if is_uneven else "N/A"


PERCENT: dict[str, PrintField] = {
    "A": PrintField("TASKS", lambda step: str(step["tasks"])),
    "b": PrintField("TRES_PER_NODE", _gres),
    "i": PrintField("STEPID", lambda step: step["id"]),
    "j": PrintField("NAME", lambda step: printable(step["name"])),
    "l": PrintField("TIME_LIMIT", _time_limit, is_whole=True),
    "M": PrintField("TIME", _time_used, is_whole=True),
    "N": PrintField("NODELIST", lambda step: step["nodelist"], is_whole=True),
    "P": PrintField("PARTITION", lambda step: printable(step["queue"])),
    "S": PrintField("START_TIME", lambda step: instant(step["start_at"])),
    "u": PrintField("USER", lambda step: printable(step["user"])),
    "U": PrintField("UID", lambda step: str(step["uid"])),
}
"""The letters of `-o` for steps."""


def _unset(title: str, value: str = "N/A") -> PrintField:
    return PrintField(title, lambda step: value)


LONG: dict[str, PrintField] = {
    "arrayjobid": PrintField("ARRAY_JOB_ID", lambda step: step["job"].partition("_")[0]),
    "arraytaskid": PrintField("ARRAY_TASK_ID", lambda step: step["job"].partition("_")[2] or "N/A"),
    "cluster": _unset("CLUSTER", "(null)"),
    "container": _unset("CONTAINER", "(null)"),
    "containerid": _unset("CONTAINERID", "(null)"),
    "cpufreq": _unset("CPU_FREQ"),
    "cpus-per-tres": _unset("CPUS_PER_TRES"),
    "gres": PERCENT["b"],
    "jobid": PrintField("JOBID", lambda step: str(step["job_id"])),
    "mem-per-tres": _unset("MEM_PER_TRES"),
    "network": _unset("NETWORK", "(null)"),
    "nodes": PERCENT["N"],
    "numcpus": PrintField("CPUS", lambda step: str(max(1, whole(step["cpus"])))),
    "numtasks": PERCENT["A"],
    "partition": PERCENT["P"],
    "resvports": _unset("RESV_PORTS", "(null)"),
    "starttime": PERCENT["S"],
    "stepid": PERCENT["i"],
    "stepname": PERCENT["j"],
    "stepstate": PrintField("STATE", lambda step: step["state"]),
    "timelimit": PERCENT["l"],
    "timeused": PERCENT["M"],
    "tres-bind": _unset("TRES_BIND"),
    "tres-freq": _unset("TRES_FREQ"),
    "tres-per-job": _unset("TRES_PER_STEP"),
    "tres-per-node": PERCENT["b"],
    "tres-per-socket": _unset("TRES_PER_SOCKET"),
    "tres-per-step": PrintField("TRES_PER_STEP", _gres_in_all),
    "tres-per-task": _unset("TRES_PER_TASK"),
    "userid": PERCENT["U"],
    "username": PERCENT["u"],
}
"""The names of `-O` for steps."""


def _order_of_id(step: Json) -> tuple[int, int, int]:
    array, _, task = step["job"].partition("_")
    name = step["id"].rpartition(".")[2]
    return int(array), int(task or -1), _ORDER_OF_NAMES[name] if name in _ORDER_OF_NAMES else int(name)


_ORDERS: dict[str, Callable[[Json], Any]] = {
    "i": _order_of_id,
    "N": lambda step: step["nodelist"],
    "P": lambda step: step["queue"],
    "l": lambda step: float("inf") if step["time_limit_s"] is None else step["time_limit_s"],
    "M": lambda step: -step["start_at"],
    "S": lambda step: step["start_at"],
    "u": lambda step: step["user"],
    "U": lambda step: step["uid"],
}


def print_steps(parsed: Parsed, selection: JobChoice, client: DaemonConnection) -> int:
    """Print the selected steps. Raises: CommandError."""
    wanted = _wanted(parsed)
    steps = [step for step in steps_of(selection, client) if _is_wanted(step, wanted)]
    pieces, unknown = _pieces(parsed)
    for name in unknown:
        COMMAND.note(f"error: Invalid job step format specification: {printable(name, 60)}")
    for letter, is_reversed in reversed(_order(parsed)):
        steps.sort(key=_ORDERS[letter], reverse=is_reversed)
    sys.stdout.write(render(pieces, steps, header=not parsed.has("noheader")))
    return 0


def steps_of(selection: JobChoice, client: DaemonConnection) -> list[Json]:
    """The steps of the selected jobs that run now."""
    selection.states = frozenset(ACTIVE)
    jobs = [
        job
        for job in jobs_of(selection, client, ("job_id", *_KEYS), each_task=True)
        if job["state"] != "PENDING" and job["start_at"] is not None
    ]
    known = {job["id"] for job in jobs}
    found = [step for step in client.call("GET", "/v1/steps?open=1")["steps"] if step["job"] in known]
    return [*found, *(_batch(job) for job in jobs if job["is_batch"])]


def _batch(job: Json) -> Json:
    """The step of a job's script."""
    return {
        **{key: job[key] for key in ("job_id", "user", "uid", "start_at", "cpus", "queue")},
        "id": f"{job['id']}.batch",
        "job": job["id"],
        "name": "batch",
        "state": "RUNNING",
        "nodelist": first_node(job["node"]),
        "tasks": 1,
        "gpus": [],
        "parts": [],
        "time_limit_s": None,
    }


def _wanted(parsed: Parsed) -> list[str]:
    """The texts of -s: jobs and steps. Raises: CommandError."""
    texts = [parsed.get("steps"), *(parsed.operands if not parsed.get("steps") else ())]
    words = comma_list(texts)
    for word in words:
        job, dot, step = word.partition(".")
        if not is_id(job) or (dot and not is_digits(step) and step not in _ORDER_OF_NAMES):
            raise COMMAND.error(f"Invalid job_step id: {printable(word, 60)}")
    return words


def _is_wanted(step: Json, wanted: list[str]) -> bool:
    if not wanted:
        return True
    number = step["id"].rpartition(".")[2]
    names = (step["job"], str(step["job_id"]), step["job"].partition("_")[0])
    return any(word in names or word in [f"{name}.{number}" for name in names] for word in wanted)


def _pieces(parsed: Parsed) -> tuple[list[Any], list[str]]:
    if parsed.has("Format") or (not parsed.has("format") and "SQUEUE_FORMAT2" in os.environ):
        return long_pieces(parsed.get("Format") or os.environ.get("SQUEUE_FORMAT2", ""), LONG)
    unknown: list[str] = []
    form = parsed.get("format") if parsed.has("format") else DEFAULT
    if form.lower() == "%all":
        form = "|".join(f"%{letter}" for letter in PERCENT)
    return percent_pieces(form, PERCENT, unknown), unknown


def _order(parsed: Parsed) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    is_reversed = False
    for char in (parsed.get("sort") or "P,i").replace("cluster", ""):
        if char in ",+-":
            is_reversed = char == "-"
            continue
        if char not in _ORDERS:
            raise CommandError(f"squeue: error: Invalid sort specification: {printable(char)}")
        found.append((char, is_reversed))
        is_reversed = False
    return found
