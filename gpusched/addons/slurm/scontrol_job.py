"""`scontrol show job`: everything about a job, as Slurm's lines of `Key=Value`."""

from __future__ import annotations

from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.nodes import gpu_type
from gpusched.addons.slurm.values import NULL, first_node, instant, long_duration, memory
from gpusched.model.hostlist import expand, fold
from gpusched.model.units import printable, ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    Json = dict[str, Any]

UNKNOWN = "Unknown"


JOB_KEYS = (
    "start_at end_at state mem_mib nice account qos reason requeue id submit_at deadline_at preempt_at suspended_at "
    "nodes queue nodelist exclude node num_tasks ntasks_per_node gpus mem_per_cpu_mib constraint reservation licenses "
    "exclusive work_dir comment stderr_path stdout_path stdin_path never_satisfied gpus_per_task run array_id name "
    "throttle task tasks_left job_id user uid hold priority cpus cpus_per_task ntasks gpus_per_node gpu_type "
    "nodes_max total_gpus total_cpus total_mem_mib "
    "is_batch suspended_s eligible_at time_limit_s dependency command script_path exit_code signal native_id"
).split()
"""What the lines of a job read of its document."""


class JobSurroundings:
    """What the lines of a job tell beyond its own document.

    Args:
        states: of jobs that others depend on, by id.
        kinds: GPU types by UUID, for details.
        derived: highest exit code of a job's steps, by id, for details.
        starts: of /v1/starts, when and where pending jobs are expected to start, by id.
    """

    def __init__(
        self,
        states: Mapping[str, str] | None = None,
        kinds: Mapping[str, str] | None = None,
        derived: Mapping[str, int] | None = None,
        starts: Mapping[str, Json] | None = None,
    ) -> None:
        self.states = states or {}
        self.kinds = kinds or {}
        self.derived = derived or {}
        self.starts = starts or {}


def job_lines(row: Json, around: JobSurroundings, *, is_detailed: bool, now: float) -> list[str]:
    """The lines of one job. Args: now: UTC epoch seconds."""
    job = SlurmJob(row, now, around.starts.get(row["id"]) or around.starts.get(row["id"].partition("_")[0]))
    cpus = job.total_cpus
    lines = [
        _identity(job),
        f"UserId={_user_of(row)} GroupId={_group_of(job)} MCS_label=N/A",
        f"Priority={job.priority} Nice={row['nice']} Account={_text(row['account'])} QOS={_text(job.qos)}",
        f"JobState={row['state']} Reason={job.reason} Dependency={_text(job.dependency(around.states))}",
        f"Requeue={int(row['requeue'])} Restarts={job.restarts} BatchFlag={int(row['is_batch'])} Reboot=0 "
        f"ExitCode={job.exit_status}",
    ]
    if is_detailed:
        lines.append(f"DerivedExitCode={around.derived.get(row['id'], 0)}:0")
    lines += [
        f"RunTime={long_duration(job.run_time_s)} TimeLimit={long_duration(job.limit_s)} TimeMin=N/A",
        f"SubmitTime={instant(row['submit_at'])} EligibleTime={_eligible(job)}",
        f"AccrueTime={_eligible(job)}",
        f"StartTime={instant(job.start_at, UNKNOWN)} EndTime={instant(job.end_at, UNKNOWN)} "
        f"Deadline={instant(row['deadline_at'])}",
    ]
    if (began := row["start_at"] or row["end_at"]) is not None:
        lines.append(f"PreemptEligibleTime={instant(began)} PreemptTime={instant(row['preempt_at'], 'None')}")
    before_s = int(job.run_time_s) if row["suspended_at"] else 0
    number = f"{row['nodes']}-{row['nodes_max']}" if row["nodes_max"] else str(row["nodes"])
    # Jobs are submitted where the daemon is.
    host = first_node(row["node"]) or "localhost"
    lines += [
        f"SuspendTime={instant(row['suspended_at'], 'None')} SecsPreSuspend={before_s} "
        f"LastSchedEval={instant(row['start_at'], UNKNOWN)} Scheduler=Main",
        f"Partition={printable(row['queue'])} AllocNode:Sid={host}:0",
        f"ReqNodeList={fold(row['nodelist']) or NULL} ExcNodeList={fold(row['exclude']) or NULL}",
        f"NodeList={job.nodes}",
    ]
    if job.nodes:
        lines.append(f"BatchHost={job.batch_host}")
    lines += [
        f"NumNodes={number} NumCPUs={cpus} NumTasks={row['num_tasks']} CPUs/Task={job.cpus_per_task} "
        "ReqB:S:C:T=0:0:*:*",
        f"TRES={job.tres}",
        f"Socks/Node=* NtasksPerN:B:S:C={row['ntasks_per_node'] or 0}:0:*:* CoreSpec=*",
    ]
    if is_detailed and row["gpus"] and not job.is_pending:
        held = _held(row["gpus"], around.kinds)
        lines.append("JOB_GRES=" + ",".join(f"gpu:{kind}:{len(indices)}" for kind, indices in held.items()))
        lines += [
            f"  Nodes={names} CPU_IDs=N/A Mem={row['mem_mib'] or 0} GRES={there}"
            for there, names in _gres_by_node(row, around.kinds)
        ]
    least = f"Memory{'CPU' if row['mem_per_cpu_mib'] else 'Node'}={memory(job.least_mib) if job.least_mib else 0}"
    lines += [
        f"MinCPUsNode={job.cpus} Min{least} MinTmpDiskNode=0",
        f"Features={_text(row['constraint'])} DelayBoot=00:00:00",
    ]
    if row["reservation"]:
        lines.append(f"Reservation={printable(row['reservation'])}")
    lines += [
        f"OverSubscribe={'NO' if row['exclusive'] else 'OK'} Contiguous=0 Licenses={job.licenses or NULL} "
        f"Network={NULL}",
        f"Command={_text(job.command)}",
        f"WorkDir={_text(row['work_dir'])}",
    ]
    if row["comment"]:
        lines.append(f"Comment={printable(row['comment'])}")
    if job.admin_comment is not None:
        lines.append(f"AdminComment={job.admin_comment}")
    if row["is_batch"]:
        lines += [
            f"StdErr={_text(row['stderr_path'] or row['stdout_path'])}",
            f"StdIn={_text(row['stdin_path'] or '/dev/null')}",
            f"StdOut={_text(row['stdout_path'])}",
        ]
    lines.append("Power=")
    if row["never_satisfied"] == "cancel":
        lines.append("KillOInInvalidDependent=Yes")
    if row["gpus_per_task"]:
        lines.append(f"TresPerTask={job.gres_of(row['gpus_per_task'])}")
    elif job.gres:
        lines.append(f"TresPerNode={job.gres}")
    elif row["total_gpus"]:
        lines.append(f"TresPerJob={job.gres_of(row['total_gpus'])}")
    return lines


def block(lines: list[str], *, is_one_line: bool) -> str:
    """The text of one entry: a line each, indented, or all of them in one."""
    if is_one_line:
        return " ".join(line.strip() for line in lines) + " \n"
    return "\n   ".join([*lines, ""]) + "\n\n"


def _identity(job: SlurmJob) -> str:
    row = job.row
    words = [f"JobId={job.numeric_id}"]
    if row["array_id"] is not None:
        tasks = job.tasks_left if row["task"] is None else row["task"]
        words += [f"ArrayJobId={row['array_id']}", f"ArrayTaskId={tasks}"]
        words += [f"ArrayTaskThrottle={row['throttle']}"] if row["throttle"] else []
    return " ".join([*words, f"JobName={printable(row['name'])}"])


def _user_of(row: Json) -> str:
    """`alice(1001)`."""
    return f"{printable(row['user'])}({row['uid']})"


def _group_of(job: SlurmJob) -> str:
    """The user's first group, `students(100)`."""
    gid, name = job.group
    return _user_of(job.row) if gid is None else f"{printable(name)}({gid})"


def _text(value: str | None) -> str:
    return printable(value) if value else NULL


def _gres_by_node(row: Json, kinds: Mapping[str, str]) -> list[tuple[str, str]]:
    """`gpu:a100:2(IDX:0-1)` and the folded nodes on which the job has just that, in their order."""
    found: dict[str, list[str]] = {}
    for name in expand(row["node"]):
        held = _held([gpu for gpu in row["gpus"] if gpu["node"] == name], kinds)
        there = ",".join(f"gpu:{kind}:{len(indices)}(IDX:{ranges(indices)})" for kind, indices in held.items())
        found.setdefault(there, []).append(name)
    return [(there, fold(names)) for there, names in found.items()]


def _held(gpus: Iterable[Json], kinds: Mapping[str, str]) -> dict[str, list[int]]:
    """Indices of these GPUs by type."""
    found: dict[str, list[int]] = {}
    for gpu in gpus:
        found.setdefault(kinds.get(gpu["uuid"], "gpu"), []).append(gpu["index"])
    return found


def gpu_kinds(cluster: Json) -> dict[str, str]:
    """Types of all GPUs by UUID, from an answer of /v1/cluster."""
    return {gpu["uuid"]: gpu_type(gpu) for gpu in cluster["gpus"]}


_NOT_ELIGIBLE = ("Dependency", "JobHeldUser", "JobHeldAdmin")


def _eligible(job: SlurmJob) -> str:
    row = job.row
    is_waiting = job.is_pending and (row["hold"] or row["reason"] in _NOT_ELIGIBLE)
    is_known = not is_waiting and row["reason"] != "DependencyNeverSatisfied"
    return instant(row["eligible_at"] if is_known else None, UNKNOWN)


def may_start(job: Json, now: float) -> bool:
    """Whether a start is worth a forecast: of a pending job that is not held and whose begin time has passed."""
    is_due = job["eligible_at"] is None or job["eligible_at"] <= now
    return is_due and job["state"] == "PENDING" and not job["hold"]
