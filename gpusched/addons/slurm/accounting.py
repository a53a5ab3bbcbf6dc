"""Records of sacct: jobs, their batch scripts and steps, and what each column shows of them."""

from __future__ import annotations

from gpusched.addons.slurm.format import AccountingColumn
from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.nodes import whole
from gpusched.addons.slurm.values import first_node, instant, long_duration, slurm_reason, state_of_row
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Json = dict[str, Any]

JOB, BATCH, STEP = "job", "batch", "step"

BASE_KEYS = (
    "id job_id uid array_id task tasks_left throttle name user account state reason cancelled_by start_at end_at "
    "submit_at eligible_at suspended_at suspended_s run exit_code signal node cpus is_foreground is_batch"
).split()
"""JSON keys of a job that every record reads."""

_WAITING = ("PENDING",)
_OWN_EXIT = ("COMPLETED", "FAILED")
"""States in which the exit status of a job is the one of its script."""
_OUT_OF_MEMORY_EXIT = (0, 125)
_LAUNCH_FAILURE_EXIT = (0, 53)
_TERM = 15
_SIGNALLED = 128
UNITS = "KMGTP"


class AccountingView:
    """How records are shown: at which instant, in which units, of which cluster."""

    def __init__(self, now: float, cluster: str, units: str = "", converts: bool = True) -> None:
        self.now = now
        self.cluster = cluster
        self.units = units
        """One of `UNITS`; empty: the largest that shows an amount exactly."""
        self.converts = converts

    def size(self, kib: float, unit: str = "K") -> str:
        """An amount of memory, `1234K`, `2G`.

        Args: unit: the one that the amount has if units are not converted.
        """
        whole = round(kib)
        if self.units:
            return _scaled(whole / 1024 ** UNITS.index(self.units)) + self.units
        if not self.converts:
            return f"{whole // 1024 ** UNITS.index(unit)}{unit}"
        if not whole:
            return "0"
        at = 0
        while not whole % 1024 and at + 1 < len(UNITS):
            whole, at = whole // 1024, at + 1
        return f"{whole}{UNITS[at]}"

    def count(self, number: float) -> str:
        """An amount without a unit, in thousands if it is that large: `512`, `12.50K`."""
        at = -1
        if self.converts:
            while number >= 1000 and at + 1 < len(UNITS):
                number, at = number / 1000, at + 1
        return _scaled(number) + ("" if at < 0 else UNITS[at])


def _scaled(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:.2f}"


class AccountingRecord:
    """One row: a job, its batch script, or one of its steps.

    Attributes:
        kind: JOB, BATCH or STEP.
        run: the run that the row is about; None for the current or last one whose figures were not asked for.
    """

    def __init__(
        self, view: AccountingView, job: SlurmJob, kind: str = JOB, run: Json | None = None, step: Json | None = None
    ) -> None:
        self.view = view
        self.job = job
        self.kind = kind
        self.run = run
        self.step = step
        self.is_job = kind == JOB
        self.derived_exit = (0, 0)
        """Highest exit code and signal of the steps, for a job."""
        self.killed_by = 0
        """Signal that ended the step of srun's own job, whose exit code repeats it."""
        self.state = self._state()
        # The row of an array represents its tasks that have not started; its start is the one of the first other task.
        has_start = self.state not in _WAITING and not job.get("is_unstarted") and not job["tasks_left"]
        source = step or (run if run is not None and run.get("is_former") else job)
        self.start_at: float | None = source["start_at"] if has_start else None
        self.end_at: float | None = None if self.state in ACTIVE else source["end_at"]
        if has_start and self.start_at is None and job["reason"] == "DependencyNeverSatisfied":
            self.start_at = self.end_at
        self.is_started = self.start_at is not None and (self.start_at != self.end_at or job["node"] is not None)

    def _state(self) -> str:
        if self.step is not None:
            is_killed = self.step["state"] == "FAILED" and self.step["signal"]
            return "CANCELLED" if is_killed else str(self.step["state"])
        job, run = self.job, self.run
        if run is not None and run.get("is_former"):
            if not self.is_job and (run["signal"] or run["reason"] in ("Requeued", "Preempted")):
                return "CANCELLED"
            if run["reason"] in ("Requeued", "Preempted"):
                return "REQUEUED" if run["reason"] == "Requeued" else "PREEMPTED"
            return str(run["outcome"] or "NODE_FAIL")
        state = state_of_row(job.row)
        return self._batch_state(state) if self.kind == BATCH else state

    def _batch_state(self, state: str) -> str:
        if state in ("COMPLETED", "OUT_OF_MEMORY", *ACTIVE):
            return state
        if state == "FAILED" and not self.job["signal"] and self.job["reason"] != "JobLaunchFailure":
            return "FAILED" if self.job["exit_code"] else "COMPLETED"
        return "CANCELLED"

    # --- ids --------------------------------------------------------------------------------------

    @property
    def _suffix(self) -> str:
        if self.step is not None:
            return f".{self.step['step']}"
        return ".batch" if self.kind == BATCH else ""

    @property
    def job_id(self) -> str:
        """`42`, `42_7`, `42_[8-99%4]`, `42.batch`, `42_7.0`."""
        job = self.job
        return job.shown_id if job["tasks_left"] and job["task"] is None else f"{job['id']}{self._suffix}"

    @property
    def raw_id(self) -> str:
        """The id as a number, also for a task."""
        return f"{self.job['job_id']}{self._suffix}"

    @property
    def name(self) -> str:
        if self.step is not None:
            return printable(self.step["name"])
        return "batch" if self.kind == BATCH else printable(self.job["name"])

    # --- how it ended -----------------------------------------------------------------------------

    @property
    def shown_state(self) -> str:
        """The state, with who cancelled the job."""
        uid = self.canceller
        return self.state if uid is None else f"{self.state} by {uid}"

    @property
    def canceller(self) -> int | None:
        """Uid of the user who cancelled it."""
        if self.state != "CANCELLED":
            return None
        if self.step is not None:
            uid = self.step["cancel_uid"]
            return None if uid is None else int(uid)
        job = self.job
        if not self.is_job or job["reason"] != "CancelledByUser":
            return None
        return int(job["uid"]) if job["cancelled_by"] in (None, job["user"]) else _uid_of(job["cancelled_by"])

    @property
    def exit_status(self) -> tuple[int, int]:
        """Exit code and signal."""
        if self.step is not None:
            return self.step["exit_code"] or 0, self.step["signal"] or 0
        source = self.run if self.run is not None and self.run.get("is_former") else self.job
        code, signal = source["exit_code"] or 0, source["signal"] or 0
        if self.job["reason"] == "JobLaunchFailure" and self.state in ("FAILED", "CANCELLED"):
            return _LAUNCH_FAILURE_EXIT
        if self.state == "OUT_OF_MEMORY":
            return _OUT_OF_MEMORY_EXIT
        if self.state in ACTIVE:
            return 0, 0
        if self.is_job:
            if code > _SIGNALLED and self.killed_by == code - _SIGNALLED:
                code, signal = 0, self.killed_by
            return (code, signal) if self.state in _OWN_EXIT else (0, 0)
        if self.state == "CANCELLED" and not (code or signal):
            return 0, _TERM
        return (0, signal) if signal else (code, 0)

    # --- times and amounts ------------------------------------------------------------------------

    @property
    def elapsed_s(self) -> int:
        """Run time without suspensions, in whole seconds."""
        if self.start_at is None:
            return 0
        job = self.job
        is_former = self.run is not None and self.run.get("is_former")
        until = self.end_at or (None if is_former else job["suspended_at"]) or self.view.now
        suspended_s = self.run["suspended_s"] if is_former and self.run else job["suspended_s"]
        paused_s = 0 if self.step is not None else suspended_s or 0
        return max(0, int(until) - int(self.start_at) - int(paused_s))

    @property
    def waited_s(self) -> int:
        """From when the job could start until it started, or until now."""
        until = self.start_at or self.job["end_at"] or self.view.now
        return max(0, int(until) - int(self.job["eligible_at"] or self.job["submit_at"]))

    @property
    def cpus(self) -> int:
        """On all of its nodes together."""
        if self.step is not None:
            return max(1, whole(self.step["cpus"]))
        # The script runs on the first node.
        return self.job.total_cpus if self.is_job else self.job.cpus

    @property
    def nodes(self) -> int:
        if self.step is not None:
            return len(self.step["nodes"])
        return int(self.job.get("nodes") or 1) if self.is_job else 1

    @property
    def node(self) -> str:
        """Its nodes as one text."""
        if not (self.is_started and self.job["node"]):
            return "None assigned"
        if self.step is not None:
            return str(self.step["nodelist"])
        return str(self.job["node"]) if self.is_job else first_node(self.job["node"])

    def figure(self, key: str) -> float | None:
        """What was measured of a step; of the run for the job and its script."""
        source = self.run if self.step is None else self.step
        value = None if source is None else source.get(key)
        return None if value is None else float(value)

    @property
    def cpu_times(self) -> tuple[float, float, float] | None:
        """Seconds of CPU in all, in programs, and in the kernel; None if unknown."""
        if self.step is not None:
            user_s, system_s = self.figure("user_cpu_s"), self.figure("system_cpu_s")
            return None if user_s is None or system_s is None else (user_s + system_s, user_s, system_s)
        whole_s, system_s = self.figure("cpu_s"), self.figure("system_cpu_s") or 0.0
        return None if whole_s is None else (whole_s, max(0.0, whole_s - system_s), system_s)

    @property
    def tasks(self) -> int:
        return 1 if self.step is None else int(self.step["tasks"])

    def peak(self, key: str, scale: float = 1024) -> str:
        """A measured size in MiB, in the row of the script; like Slurm, jobs show none."""
        value = self.figure(key)
        return "" if value is None or self.is_job else self.view.size(value * scale)

    @property
    def requested(self) -> dict[str, int]:
        """Trackable resources and their amounts, memory in MiB; of a job alone."""
        return self._amounts(int(self.job["total_gpus"] or 0), billing=True) if self.is_job else {}

    @property
    def allocated(self) -> dict[str, int]:
        """Likewise, once it has started."""
        return self._amounts(self._gpus_held, billing=self.is_job) if self.is_started else {}

    @property
    def _gpus_held(self) -> int:
        """GPUs on all of its nodes together."""
        if self.step is not None:
            return len(self.step["gpus"])
        found = (self.run or self.job).get("gpus") or ()
        node = None if self.is_job else self.node
        return sum(node in (None, gpu.get("node", node)) for gpu in found)

    def _amounts(self, gpus: int, billing: bool) -> dict[str, int]:
        job = self.job
        parts = {"cpu": self.cpus, "node": self.nodes}
        if billing:
            parts["billing"] = self.cpus
        if gpus:
            parts["gres/gpu"] = gpus
            if job.get("gpu_type"):
                parts[f"gres/gpu:{job['gpu_type']}"] = gpus
        mem_mib = int(job["total_mem_mib"] or 0) if self.is_job else int(job["mem_mib"] or 0) * self.nodes
        if mem_mib or not billing:
            parts["mem"] = mem_mib
        if self.is_job:
            parts.update({f"license/{name}": number for name, number in (job.get("licenses") or {}).items()})
        return {name: parts[name] for name in sorted(parts)}

    def tres(self, amounts: dict[str, int]) -> str:
        """`cpu=2,gres/gpu=1,mem=4G,node=1`."""
        sized = (
            (name, self.view.size(number * 1024, "M") if name == "mem" else number) for name, number in amounts.items()
        )
        return ",".join(f"{name}={number}" for name, number in sized)

    def usage(self, of: str) -> str:
        """`cpu=00:00:09,energy=1200,gres/gpumem=2G,mem=1234K` of what was measured.

        Args: of: Tot, or Ave, Max or Min of the tasks. Of several the most and least CPU time are not known.
        """
        if self.is_job:
            return ""
        parts = []
        is_alone = self.tasks == 1
        cpu = self.cpu_times
        if cpu is not None and (is_alone or of in ("Tot", "Ave")):
            parts.append(f"cpu={long_duration(cpu[0] / (self.tasks if of == 'Ave' else 1))}")
        parts.append(f"energy={int(self.figure('energy_j') or 0)}")
        if (vram_mib := self.figure("peak_vram_mib")) is not None:
            parts.append(f"gres/gpumem={self.view.size(vram_mib * 1024)}")
        if (fraction := self.figure("mean_utilisation")) is not None:
            parts.append(f"gres/gpuutil={fraction * 100:.0f}")
        mem_mib = self.figure("peak_mem_mib" if is_alone or of == "Max" else "mean_mem_mib")
        if mem_mib is not None and (is_alone or of != "Min"):
            parts.append(f"mem={self.view.size(mem_mib * (1 if is_alone or of != 'Tot' else self.tasks) * 1024)}")
        return ",".join(parts)


def _uid_of(name: str) -> int:
    """The uid of a user; 0 for the scheduler, and for a user who is gone."""
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return 0


def short_cpu_time(seconds: float) -> str:
    """CPU time: `00:00.014`, `01:00:00`, `1-00:00:00`; `00:00:00` for none."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    if whole >= 3600 or not thousandths:
        return long_duration(whole)
    return f"{whole // 60:02}:{whole % 60:02}.{thousandths:03}"


def records_of(
    view: AccountingView, job: Json, steps: Iterable[Json], *, only_job: bool, duplicates: bool
) -> list[AccountingRecord]:
    """The rows of a job, with `duplicates` also of its earlier runs.

    Args: steps: of all of its runs, in order. only_job: without rows of its script and steps.
    """
    runs: list[Json] = list(job.get("runs") or ())
    is_waiting = job["state"] == "PENDING" or job.get("is_unstarted")
    seen = SlurmJob(job, view.now)
    former = runs if is_waiting else runs[:-1]
    found: list[AccountingRecord] = []
    if duplicates:
        for run in former:
            run["is_former"] = True
            found += _rows_of_run(view, seen, run, [step for step in steps if step["run"] == run["run"]], only_job)
    last = None if is_waiting or not runs else runs[-1]
    found += _rows_of_run(view, seen, last, [step for step in steps if step["run"] == job["run"]], only_job)
    return found


def _rows_of_run(
    view: AccountingView, job: SlurmJob, run: Json | None, steps: list[Json], only_job: bool
) -> list[AccountingRecord]:
    whole = AccountingRecord(view, job, run=run)
    rows = [whole]
    if not whole.is_started:
        return rows
    whole.derived_exit = max(((step["exit_code"] or 0, step["signal"] or 0) for step in steps), default=(0, 0))
    if job["is_foreground"] and steps:
        whole.killed_by = steps[-1]["signal"] or 0
    if not only_job:
        if job["is_batch"]:
            rows.append(AccountingRecord(view, job, BATCH, run))
        rows += [AccountingRecord(view, job, STEP, run, step) for step in steps]
    return rows


# --- columns --------------------------------------------------------------------------------------

_SIZE = "nodes total_cpus"


def _unfilled(text: str) -> list[AccountingColumn]:
    """Columns that nothing here can fill, from their names and widths."""
    words = text.split()
    return [AccountingColumn(name, int(width), empty) for name, width in zip(words[::2], words[1::2])]  # noqa: B905  costs less


def empty(row: AccountingRecord) -> str:
    """The text of a column that nothing here can fill."""
    return ""


def _of_job(key: str) -> Callable[[AccountingRecord], str]:
    """The text of a job's key, empty in rows of steps."""
    return lambda row: printable(str(row.job.get(key) or "")) if row.is_job else ""


def _exit(status: tuple[int, int]) -> str:
    return f"{status[0]}:{status[1]}"


def _of_step(text: str, of_job: str = "") -> Callable[[AccountingRecord], str]:
    return lambda row: of_job if row.is_job else text


def _measured_at(key: str) -> Callable[[AccountingRecord], str]:
    """The node of a maximum: the only one; of several it was not recorded which."""
    return lambda row: "" if row.is_job or row.nodes > 1 or row.figure(key) is None else row.node


def _measured_by(key: str) -> Callable[[AccountingRecord], str]:
    """The task of a maximum: the only one; among several it was not recorded which."""
    return lambda row: "" if row.is_job or row.tasks > 1 or row.figure(key) is None else "0"


def _limit(row: AccountingRecord, seconds: Callable[[float], str], unlimited: str) -> str:
    if not row.is_job:
        return ""
    limit_s = row.job.limit_s
    return unlimited if limit_s is None else seconds(limit_s)


def _cpu_time(part: int) -> Callable[[AccountingRecord], str]:
    """CPU time by its place in `cpu_times`."""
    return lambda row: short_cpu_time((row.cpu_times or (0.0, 0.0, 0.0))[part])


def _mean_cpu(row: AccountingRecord) -> str:
    cpu = None if row.is_job else row.cpu_times
    return "" if cpu is None else long_duration(cpu[0] / row.tasks)


def _only_cpu(cell: Callable[[AccountingRecord], str]) -> Callable[[AccountingRecord], str]:
    """A column about the task with the least CPU time, known if there is one task."""
    return lambda row: "" if row.tasks > 1 or not _mean_cpu(row) else cell(row)


def _energy(row: AccountingRecord) -> str:
    energy_j = row.figure("energy_j")
    if energy_j is None:
        return "" if row.is_job else "0"
    return row.view.count(int(energy_j))


def _start(row: AccountingRecord) -> str:
    return instant(row.start_at, "Unknown" if row.state in _WAITING else "None")


def _tasks(row: AccountingRecord) -> str:
    if row.is_job:
        return ""
    return "1" if row.step is None else str(row.step["tasks"])


def _submitted(row: AccountingRecord) -> str:
    return instant(row.job["submit_at"] if row.is_job else row.start_at, "Unknown")


def _priority(row: AccountingRecord) -> str:
    return str(round(row.job["priority"] or 0)) if row.is_job else ""


def _used(of: str) -> Callable[[AccountingRecord], str]:
    return lambda row: row.usage(of)


COLUMNS: dict[str, AccountingColumn] = {
    column.title: column
    for column in (
        AccountingColumn("Account", 10, lambda row: printable(row.job["account"])),
        AccountingColumn(
            "AdminComment", 19, lambda row: (row.job.admin_comment or "") if row.is_job else "", "native_id"
        ),
        AccountingColumn("AllocCPUS", 10, lambda row: str(row.cpus), _SIZE),
        AccountingColumn("AllocNodes", 10, lambda row: str(row.nodes if row.is_started else 0), "nodes"),
        AccountingColumn(
            "AllocTRES",
            10,
            lambda row: row.tres(row.allocated),
            f"gpus mem_mib total_mem_mib gpu_type licenses {_SIZE}",
        ),
        AccountingColumn("AssocID", 7, lambda row: "0"),
        AccountingColumn("AveCPU", 10, _mean_cpu, is_measured=True),
        AccountingColumn("AveCPUFreq", 10, _of_step("0")),
        *_unfilled("AveDiskRead 14 AveDiskWrite 14 AvePages 10"),
        AccountingColumn(
            "AveRSS", 10, lambda row: row.peak("peak_mem_mib" if row.step is None else "mean_mem_mib"), is_measured=True
        ),
        *_unfilled("AveVMSize 10 BlockID 16"),
        AccountingColumn("Cluster", 10, lambda row: row.view.cluster),
        AccountingColumn("Comment", 14, _of_job("comment"), "comment"),
        AccountingColumn("Constraints", 19, _of_job("constraint"), "constraint"),
        AccountingColumn("ConsumedEnergy", 14, _energy, is_measured=True),
        AccountingColumn("ConsumedEnergyRaw", 17, lambda row: str(int(row.figure("energy_j") or 0)), is_measured=True),
        *_unfilled("Container 19"),
        AccountingColumn("CPUTime", 10, lambda row: long_duration(row.elapsed_s * row.cpus), _SIZE),
        AccountingColumn("CPUTimeRAW", 10, lambda row: str(row.elapsed_s * row.cpus), _SIZE),
        AccountingColumn("DBIndex", 10, lambda row: str(row.job["job_id"])),
        AccountingColumn("DerivedExitCode", 15, lambda row: _exit(row.derived_exit) if row.is_job else ""),
        AccountingColumn("Elapsed", 10, lambda row: long_duration(row.elapsed_s)),
        AccountingColumn("ElapsedRaw", 10, lambda row: str(row.elapsed_s)),
        AccountingColumn(
            "Eligible", 19, lambda row: instant(row.job["eligible_at"] if row.is_job else row.start_at, "Unknown")
        ),
        AccountingColumn("End", 19, lambda row: instant(row.end_at, "Unknown")),
        AccountingColumn("ExitCode", 8, lambda row: _exit(row.exit_status)),
        *_unfilled("Flags 20"),
        AccountingColumn(
            "GID", 6, lambda row: "" if not row.is_job or row.job.group[0] is None else str(row.job.group[0])
        ),
        AccountingColumn("Group", 9, lambda row: row.job.group[1] if row.is_job else ""),
        AccountingColumn("JobID", -12, lambda row: row.job_id),
        AccountingColumn("JobIDRaw", -12, lambda row: row.raw_id),
        AccountingColumn("JobName", 10, lambda row: row.name),
        AccountingColumn("Layout", 9, _of_step("Unknown")),
        *_unfilled(
            "MaxDiskRead 12 MaxDiskReadNode 15 MaxDiskReadTask 15 MaxDiskWrite 12 MaxDiskWriteNode 16 "
            "MaxDiskWriteTask 16 MaxPages 8 MaxPagesNode 12 MaxPagesTask 14"
        ),
        AccountingColumn("MaxRSS", 10, lambda row: row.peak("peak_mem_mib"), is_measured=True),
        AccountingColumn("MaxRSSNode", 10, _measured_at("peak_mem_mib"), is_measured=True),
        AccountingColumn("MaxRSSTask", 10, _measured_by("peak_mem_mib"), is_measured=True),
        *_unfilled("MaxVMSize 10 MaxVMSizeNode 14 MaxVMSizeTask 14 McsLabel 10"),
        AccountingColumn("MinCPU", 10, _only_cpu(_mean_cpu), is_measured=True),
        AccountingColumn("MinCPUNode", 10, _only_cpu(lambda row: row.node), is_measured=True),
        AccountingColumn("MinCPUTask", 10, _only_cpu(lambda row: "0"), is_measured=True),
        AccountingColumn("NCPUS", 10, lambda row: str(row.cpus), _SIZE),
        AccountingColumn("NNodes", 8, lambda row: str(row.nodes), "nodes"),
        AccountingColumn("NodeList", 15, lambda row: row.node),
        AccountingColumn("NTasks", 8, _tasks, "num_tasks"),
        AccountingColumn("Partition", 10, _of_job("queue"), "queue"),
        AccountingColumn("Priority", 10, _priority, "priority"),
        AccountingColumn("QOS", 10, lambda row: row.job.qos if row.is_job else "", "qos"),
        AccountingColumn("QOSRAW", 6, _of_step("", "1")),
        AccountingColumn("Reason", 22, lambda row: slurm_reason(row.job["reason"]) if row.is_job else ""),
        AccountingColumn("ReqCPUFreq", 10, _of_step("0", "Unknown")),
        AccountingColumn("ReqCPUFreqGov", 13, _of_step("0", "Unknown")),
        AccountingColumn("ReqCPUFreqMax", 13, _of_step("0", "Unknown")),
        AccountingColumn("ReqCPUFreqMin", 13, _of_step("0", "Unknown")),
        AccountingColumn("ReqCPUS", 8, lambda row: str(row.cpus), _SIZE),
        AccountingColumn(
            "ReqMem",
            10,
            lambda row: row.view.size(int(row.job["mem_mib"] or 0) * 1024, "M") if row.is_job else "",
            "mem_mib",
        ),
        AccountingColumn("ReqNodes", 8, lambda row: str(row.nodes), "nodes"),
        AccountingColumn(
            "ReqTRES", 10, lambda row: row.tres(row.requested), f"total_gpus total_mem_mib gpu_type licenses {_SIZE}"
        ),
        AccountingColumn("Reservation", 20, _of_job("reservation"), "reservation"),
        *_unfilled("ReservationId 15"),
        AccountingColumn("Reserved", 10, lambda row: long_duration(row.waited_s) if row.is_job else ""),
        AccountingColumn(
            "ResvCPU", 10, lambda row: long_duration(row.waited_s * row.cpus) if row.is_job else "", _SIZE
        ),
        AccountingColumn("ResvCPURAW", 10, lambda row: str(row.waited_s * row.cpus) if row.is_job else "", _SIZE),
        AccountingColumn("Start", 19, _start),
        AccountingColumn("State", 10, lambda row: row.shown_state),
        AccountingColumn("Submit", 19, _submitted),
        AccountingColumn(
            "SubmitLine",
            20,
            lambda row: printable(row.job.get("submit_line") or "") if row.step is None else "",
            "submit_line",
        ),
        AccountingColumn("Suspended", 10, lambda row: long_duration(row.job["suspended_s"] if row.step is None else 0)),
        *_unfilled("SystemComment 19"),
        AccountingColumn("SystemCPU", 10, _cpu_time(2), is_measured=True),
        AccountingColumn("Timelimit", 10, lambda row: _limit(row, long_duration, "UNLIMITED"), "time_limit_s"),
        AccountingColumn(
            "TimelimitRaw",
            12,
            lambda row: _limit(row, lambda seconds: str(int(seconds) // 60), "UNLIMITED"),
            "time_limit_s",
        ),
        AccountingColumn("TotalCPU", 10, _cpu_time(0), is_measured=True),
        AccountingColumn("TRESUsageInAve", 14, _used("Ave"), is_measured=True),
        AccountingColumn("TRESUsageInMax", 14, _used("Max"), is_measured=True),
        *_unfilled("TRESUsageInMaxNode 18 TRESUsageInMaxTask 18"),
        AccountingColumn("TRESUsageInMin", 14, _used("Min"), is_measured=True),
        *_unfilled("TRESUsageInMinNode 18 TRESUsageInMinTask 18"),
        AccountingColumn("TRESUsageInTot", 14, _used("Tot"), is_measured=True),
        AccountingColumn("TRESUsageOutAve", 15, _of_step("energy=0")),
        *_unfilled(
            "TRESUsageOutMax 15 TRESUsageOutMaxNode 19 TRESUsageOutMaxTask 19 TRESUsageOutMin 15 "
            "TRESUsageOutMinNode 19 TRESUsageOutMinTask 19"
        ),
        AccountingColumn("TRESUsageOutTot", 15, _of_step("energy=0")),
        AccountingColumn("UID", 6, lambda row: str(row.job["uid"]) if row.is_job else ""),
        AccountingColumn("User", 9, _of_job("user")),
        AccountingColumn("UserCPU", 10, _cpu_time(1), is_measured=True),
        AccountingColumn("WCKey", 10, _of_job("wckey"), "wckey"),
        AccountingColumn("WCKeyID", 10, _of_step("", "0")),
        AccountingColumn("WorkDir", 20, _of_job("work_dir"), "work_dir"),
    )
}
"""Every column in the order of --helpformat."""
