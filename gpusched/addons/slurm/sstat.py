"""sstat: what the tasks of running steps use now, as the nodes on which they run tell the daemon."""

from __future__ import annotations

import sys
import time

from gpusched.addons.slurm.accounting import COLUMNS, AccountingRecord, AccountingView, empty
from gpusched.addons.slurm.command import Command, Parsed, run
from gpusched.addons.slurm.format import AccountingColumn, choose_columns, helpformat, render_table
from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.sacct import read_job_words
from gpusched.addons.slurm.values import first_node, long_duration
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import Forbidden, NotFound, UsageError, UserError
from gpusched.model.units import printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.client import DaemonConnection

    Json = dict[str, Any]

COMMAND = Command(
    "sstat",
    "sstat [OPTIONS] -j LIST",
    """
    -a --allsteps  all running steps of the jobs, and their scripts
    -e --helpformat --helpfields  list all columns
    -h --help  show this help
    -i --pidformat  the columns JobID, Nodelist and Pids
    -j --jobs LIST  these jobs and steps: 42, 42_7, 42.batch, 42.0
    --noconvert  do not convert units
    -n --noheader  print no header
    -o --format --fields LIST  columns: NAME or NAME%WIDTH; see --helpformat
    -p --parsable  separate columns by |, with one at the end of the line
    -P --parsable2  separate columns by |
    -v --verbose  accepted
    """,
    permutes=True,
    has_h=True,
)
_NAMES = """
AveCPU AveCPUFreq AveDiskRead AveDiskWrite AvePages AveRSS AveVMSize ConsumedEnergy ConsumedEnergyRaw JobID MaxDiskRead
MaxDiskReadNode MaxDiskReadTask MaxDiskWrite MaxDiskWriteNode MaxDiskWriteTask MaxPages MaxPagesNode MaxPagesTask MaxRSS
MaxRSSNode MaxRSSTask MaxVMSize MaxVMSizeNode MaxVMSizeTask MinCPU MinCPUNode MinCPUTask Nodelist NTasks Pids ReqCPUFreq
ReqCPUFreqGov ReqCPUFreqMax ReqCPUFreqMin TRESUsageInAve TRESUsageInMax TRESUsageInMaxNode TRESUsageInMaxTask
TRESUsageInMin TRESUsageInMinNode TRESUsageInMinTask TRESUsageInTot TRESUsageOutAve TRESUsageOutMax TRESUsageOutMaxNode
TRESUsageOutMaxTask TRESUsageOutMin TRESUsageOutMinNode TRESUsageOutMinTask TRESUsageOutTot
""".split()
_DEFAULT = (
    "jobid,maxvmsize,maxvmsizenode,maxvmsizetask,avevmsize,maxrss,maxrssnode,maxrsstask,averss,maxpages,maxpagesnode,"
    "maxpagestask,avepages,mincpu,mincpunode,mincputask,avecpu,ntasks,avecpufreq,reqcpufreqmin,reqcpufreqmax,"
    "reqcpufreqgov,consumedenergy,maxdiskread,maxdiskreadnode,maxdiskreadtask,avediskread,maxdiskwrite,"
    "maxdiskwritenode,maxdiskwritetask,avediskwrite,tresusageinave,tresusageinmax,tresusageinmaxnode,"
    "tresusageinmaxtask,tresusageinmin,tresusageinminnode,tresusageinmintask,tresusageintot,tresusageoutave,"
    "tresusageoutmax,tresusageoutmaxnode,tresusageoutmaxtask,tresusageoutmin,tresusageoutminnode,"
    "tresusageoutmintask,tresusageouttot"
)


def main() -> int:
    return run(COMMAND, body)


def body(parsed: Parsed) -> int:
    """Print the usage of the running steps of the jobs; returns the exit code."""
    if parsed.operands:
        raise COMMAND.error(f"Unknown arguments: {' '.join(printable(word, 40) for word in parsed.operands)}")
    if parsed.has("helpformat"):
        sys.stdout.write(helpformat(STEP_COLUMNS.values()))
        return 0
    form = ",".join(parsed.all("format")) or ("jobid,nodelist,pids" if parsed.has("pidformat") else _DEFAULT)
    columns = choose_columns(COMMAND, form, STEP_COLUMNS.values())
    named = read_job_words(COMMAND, split_ids(",".join(parsed.all("jobs"))))
    if not named:
        raise COMMAND.error("You didn't give me any jobs to stat.")
    view = AccountingView(time.time(), "", converts=not parsed.has("noconvert"))
    rows: list[_Running] = []
    has_failed = False
    try:
        with connect() as client:
            for word, steps in named.items():
                found = _running(client, view, word, steps, parsed.has("allsteps"))
                if not found:
                    has_failed = True
                    sys.stderr.write(f"sstat: error: no steps running for job {printable(word, 60)}\n")
                rows += found
    except UserError as error:
        raise COMMAND.error(printable(error.message, 400)) from None
    sys.stdout.write(render_table(parsed, columns, rows))
    return 1 if has_failed and not rows else 0


class _Running(AccountingRecord):
    """A running step or script, with what its tasks use: nothing is known where a node of it does not answer."""

    used: list[tuple[str, Json]] | None = None
    """Node and figures of each task that has processes; None if they are not known of all nodes."""

    @property
    def pids(self) -> list[int]:
        return [pid for _, task in self.used or () for pid in task["pids"]]

    @property
    def cpu_s(self) -> float | None:
        return sum(task["cpu_s"] for _, task in self.used) if self.used else None

    def most(self, key: str) -> tuple[str, Json] | None:
        """Where a figure is highest: node and task."""
        return max(self.used, key=lambda one: one[1][key]) if self.used else None

    def mean(self, key: str) -> float | None:
        return sum(task[key] for _, task in self.used) / len(self.used) if self.used else None

    @property
    def least_cpu(self) -> tuple[str, Json] | None:
        """Node and task with the least CPU time, if all tasks are known apart."""
        known = self.used is not None and len(self.used) == self.tasks
        return min(self.used, key=lambda one: one[1]["cpu_s"]) if known and self.used else None


def _running(
    client: DaemonConnection, view: AccountingView, word: str, steps: set[str], is_all: bool
) -> list[_Running]:
    """The rows of one job: by default its first step, or its script if it has no step."""
    try:
        job = client.call("GET", f"/v1/jobs/{quote(word)}")["job"]
        found = client.call("GET", f"/v1/steps?open=1&ids={job['job_id']}")["steps"]
    except (NotFound, UsageError):
        return []
    if job["state"] not in ("RUNNING", "SUSPENDED", "COMPLETING") or not job["node"]:
        return []
    seen = SlurmJob(job, view.now)
    rows = [_Running(view, seen, "batch")] if job["is_batch"] else []
    rows += [_Running(view, seen, "step", step=step) for step in found]
    if not is_all:
        asked = steps - {""}
        rows = [
            row
            for at, row in enumerate(rows)
            if row.raw_id.partition(".")[2] in asked or ("" in steps and at == min(1, len(rows) - 1))
        ]
    if rows:
        _measure(client, word, rows)
    return rows


def _measure(client: DaemonConnection, word: str, rows: list[_Running]) -> None:
    """Give each row the figures of its tasks, as far as all of its nodes tell."""
    try:
        nodes = client.call("GET", f"/v1/jobs/{quote(word)}/usage")["usage"]["nodes"]
    except (Forbidden, NotFound):
        # Another user's, or it has just ended.
        return
    told = {node["node"]: node["tasks"] for node in nodes}
    for row in rows:
        places = [first_node(row.node)] if row.step is None else row.step["nodes"]
        if any(told.get(node) is None for node in places):
            continue
        number = None if row.step is None else row.step["step"]
        row.used = [(node, task) for node in places for task in told[node] if task["step"] == number and task["pids"]]


def _size(mib: float | None, row: _Running) -> str:
    return "" if mib is None else row.view.size(mib * 1024)


def _most(key: str) -> Callable[[_Running], str]:
    return lambda row: "" if (most := row.most(key)) is None else _size(most[1][key], row)


def _mean(key: str) -> Callable[[_Running], str]:
    return lambda row: _size(row.mean(key), row)


def _node_of(find: Callable[[_Running], tuple[str, Json] | None]) -> Callable[[_Running], str]:
    return lambda row: "" if (found := find(row)) is None else found[0]


def _task_of(find: Callable[[_Running], tuple[str, Json] | None]) -> Callable[[_Running], str]:
    """The number of a task: 0 of the script, and of a task that hides its environment if there is one."""

    def cell(row: _Running) -> str:
        found = find(row)
        if found is None:
            return ""
        task = found[1]["task"]
        return str(task) if task is not None else "0" if row.tasks == 1 else ""

    return cell


def _tasks(row: _Running) -> str:
    return str(row.tasks)


def _least_cpu(row: _Running) -> str:
    return "" if row.least_cpu is None else long_duration(row.least_cpu[1]["cpu_s"])


def _mean_cpu(row: _Running) -> str:
    return "" if row.cpu_s is None else long_duration(row.cpu_s / row.tasks)


def _usage(of: str) -> Callable[[_Running], str]:
    """`cpu=00:00:09,mem=1234K`: of all tasks, Tot, or Ave, Max or Min of them."""

    def cell(row: _Running) -> str:
        if not row.used:
            return ""
        figures = {key: _FOLDS[of]([task[key] for _, task in row.used]) for key in ("cpu_s", *_SIZES)}
        parts = [f"cpu={long_duration(figures['cpu_s'])}"]
        gpus = (row.job["gpus"] or []) if row.step is None else []
        used = [gpu["vram_used_mib"] for gpu in gpus if gpu.get("vram_used_mib") is not None]
        if used:
            parts.append(f"gres/gpumem={row.view.size(sum(used) * 1024)}")
        parts += [f"{name}={_size(figures[key], row)}" for key, name in _SIZES.items()]
        return ",".join(parts)

    return cell


_FOLDS: dict[str, Callable[[list[float]], float]] = {
    "Tot": sum,
    "Max": max,
    "Min": min,
    "Ave": lambda some: sum(some) / len(some),
}
_SIZES = {"peak_mem_mib": "mem", "peak_virtual_mib": "vmem"}


def _rss(row: _Running) -> tuple[str, Json] | None:
    return row.most("peak_mem_mib")


def _virtual(row: _Running) -> tuple[str, Json] | None:
    return row.most("peak_virtual_mib")


def _least(row: _Running) -> tuple[str, Json] | None:
    return row.least_cpu


_CELLS: dict[str, Callable[[Any], str]] = {
    "JobID": lambda row: row.job_id,
    "AveCPU": _mean_cpu,
    "AveRSS": _mean("peak_mem_mib"),
    "AveVMSize": _mean("peak_virtual_mib"),
    "MaxRSS": _most("peak_mem_mib"),
    "MaxRSSNode": _node_of(_rss),
    "MaxRSSTask": _task_of(_rss),
    "MaxVMSize": _most("peak_virtual_mib"),
    "MaxVMSizeNode": _node_of(_virtual),
    "MaxVMSizeTask": _task_of(_virtual),
    "MinCPU": _least_cpu,
    "MinCPUNode": _node_of(_least),
    "MinCPUTask": _task_of(_least),
    "Nodelist": lambda row: row.node,
    "NTasks": _tasks,
    "Pids": lambda row: ",".join(map(str, row.pids)),
    **{f"TRESUsageIn{of}": _usage(of) for of in ("Ave", "Max", "Min", "Tot")},
}
"""The text of each column; the others are always empty here."""
_WIDTHS = {**{name: column.width for name, column in COLUMNS.items()}, "Nodelist": -20}
STEP_COLUMNS = {name: AccountingColumn(name, _WIDTHS.get(name, 20), _CELLS.get(name, empty)) for name in _NAMES}
