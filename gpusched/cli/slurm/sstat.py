"""sstat: what the processes of running steps use now, read from the kernel by users who may see them."""

from __future__ import annotations

import os
import sys
import time

from gpusched.cli.query import quote
from gpusched.cli.slurm import processes
from gpusched.cli.slurm.accounting import WIDTHS, AccountingRecord, AccountingView, empty
from gpusched.cli.slurm.command import Command, Parsed, run
from gpusched.cli.slurm.format import render_table
from gpusched.cli.slurm.sacct import helpformat, read_columns, read_job_words, split_words
from gpusched.cli.slurm.values import long_duration
from gpusched.client import connect
from gpusched.errors import GpuschedError, NotFound, NotReady, UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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
STEP_WIDTHS = {name: WIDTHS.get(name, -20 if name == "Nodelist" else 20) for name in _NAMES}
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
        sys.stdout.write(helpformat(_NAMES))
        return 0
    form = ",".join(parsed.all("format")) or ("jobid,nodelist,pids" if parsed.has("pidformat") else _DEFAULT)
    columns = read_columns(COMMAND, form, STEP_WIDTHS, _CELLS)
    named = read_job_words(COMMAND, split_words(parsed.all("jobs")))
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
    except NotReady:
        raise
    except GpuschedError as error:
        raise COMMAND.error(printable(error.message, 400)) from None
    sys.stdout.write(render_table(parsed, columns, rows))
    return 1 if has_failed and not rows else 0


class _Running(AccountingRecord):
    """A running step or script, with its processes."""

    pids: tuple[int, ...] = ()
    cpu_s: float | None = None
    rss_kib: int | None = None
    """Of the largest process at its peak."""
    sum_rss_kib: int = 0
    vm_kib: int | None = None


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
    rows = [] if job["is_foreground"] else [_Running(view, job, "batch")]
    rows += [_Running(view, job, "step", step=step) for step in found]
    if not is_all:
        asked = steps - {""}
        rows = [
            row
            for at, row in enumerate(rows)
            if row.raw_id.partition(".")[2] in asked or ("" in steps and at == min(1, len(rows) - 1))
        ]
    main_pid = job["runs"][-1]["pid"] if job["runs"] else None
    by_step = {pid: _step_of(pid) for pid in (processes.tree(main_pid) if main_pid else ())}
    for row in rows:
        number = None if row.step is None else str(row.step["step"])
        _measure(row, [pid for pid, step in by_step.items() if step == number])
    return rows


def _step_of(pid: int) -> str | None:
    """The number of the step whose task a process was started as; None for the script."""
    text = processes.variables(pid).get("SLURM_STEP_ID", "")
    return text if text.isascii() and text.isdigit() and len(text) < 6 else None


def _measure(row: _Running, pids: Iterable[int]) -> None:
    ticks_s = 1 / os.sysconf("SC_CLK_TCK")
    there = []
    for pid in pids:
        fields = processes.stat(pid)
        sizes = _sizes(pid)
        if not fields or sizes is None:
            continue
        there.append(pid)
        # User and system time, and those of ended children.
        row.cpu_s = (row.cpu_s or 0.0) + sum(map(int, fields[11:15])) * ticks_s
        row.rss_kib = max(row.rss_kib or 0, sizes.get("VmHWM", 0))
        row.vm_kib = max(row.vm_kib or 0, sizes.get("VmPeak", 0))
        row.sum_rss_kib += sizes.get("VmRSS", 0)
    row.pids = tuple(there)


def _sizes(pid: int) -> dict[str, int] | None:
    """Sizes in KiB of /proc/PID/status by name; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    pairs = (line.split() for line in lines if line.startswith("Vm"))
    return {words[0][:-1]: int(words[1]) for words in pairs if len(words) == 3}


def _size(attribute: str) -> Callable[[_Running], str]:
    def cell(row: _Running) -> str:
        value = getattr(row, attribute)
        return "" if value is None else row.view.size(value)

    return cell


def _where(attribute: str, text: str = "") -> Callable[[_Running], str]:
    return lambda row: "" if getattr(row, attribute) is None else text or row.node


def _cpu(row: _Running) -> str:
    return "" if row.cpu_s is None else long_duration(row.cpu_s)


def _tasks(row: _Running) -> str:
    return "1" if row.step is None else str(row.step["tasks"])


def _mean_cpu(row: _Running) -> str:
    return "" if row.cpu_s is None else long_duration(row.cpu_s / int(_tasks(row)))


def _usage(row: _Running) -> str:
    parts = [] if row.cpu_s is None else [f"cpu={long_duration(row.cpu_s)}"]
    gpus = (row.job["gpus"] or []) if row.step is None else []
    used = [gpu["vram_used_mib"] for gpu in gpus if gpu.get("vram_used_mib") is not None]
    if used:
        parts.append(f"gres/gpumem={row.view.size(sum(used) * 1024)}")
    if row.rss_kib is not None:
        parts.append(f"mem={row.view.size(row.rss_kib)}")
    if row.vm_kib is not None:
        parts.append(f"vmem={row.view.size(row.vm_kib)}")
    return ",".join(parts)


_CELLS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(_NAMES, empty),
    "JobID": lambda row: row.job_id,
    "AveCPU": _mean_cpu,
    "AveRSS": _size("rss_kib"),
    "AveVMSize": _size("vm_kib"),
    "MaxRSS": _size("rss_kib"),
    "MaxRSSNode": _where("rss_kib"),
    "MaxRSSTask": _where("rss_kib", "0"),
    "MaxVMSize": _size("vm_kib"),
    "MaxVMSizeNode": _where("vm_kib"),
    "MaxVMSizeTask": _where("vm_kib", "0"),
    "MinCPU": _cpu,
    "MinCPUNode": _where("cpu_s"),
    "MinCPUTask": _where("cpu_s", "0"),
    "Nodelist": lambda row: row.node,
    "NTasks": _tasks,
    "Pids": lambda row: ",".join(map(str, row.pids)),
    **dict.fromkeys(("TRESUsageInAve", "TRESUsageInMax", "TRESUsageInMin", "TRESUsageInTot"), _usage),
}
