"""`scontrol show job`: everything about a job, as Slurm's lines of `Key=Value`."""

from __future__ import annotations

import grp
import pwd

from gpusched.addons.slurm.nodes import all_cpus_of, cpus_of, gpu_type, tres, whole
from gpusched.addons.slurm.values import (
    NORMAL_QOS,
    NULL,
    admin_comment,
    exit_status,
    first_node,
    instant,
    limit_s,
    long_duration,
    memory,
    slurm_reason,
    tasks_of_row,
)
from gpusched.model.hostlist import expand, fold
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import printable, ranges, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    Json = dict[str, Any]

_MOST_PRIORITY = 4_294_967_294
UNKNOWN = "Unknown"


JOB_KEYS = (
    "start_at end_at state mem_mib nice account qos reason requeue id submit_at deadline_at preempt_at suspended_at "
    "nodes queue nodelist exclude node num_tasks ntasks_per_node gpus mem_per_cpu_mib constraint reservation licenses "
    "exclusive work_dir comment stderr_path stdout_path stdin_path never_satisfied gpus_per_task run array_id name "
    "throttle task tasks_left job_id user uid hold priority cpus cpus_per_task ntasks gpus_per_node gpu_request "
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
        starts: when pending jobs are expected to start, by id.
    """

    def __init__(
        self,
        states: Mapping[str, str] | None = None,
        kinds: Mapping[str, str] | None = None,
        derived: Mapping[str, int] | None = None,
        starts: Mapping[str, float] | None = None,
    ) -> None:
        self.states = states or {}
        self.kinds = kinds or {}
        self.derived = derived or {}
        self.starts = starts or {}


def job_lines(job: Json, around: JobSurroundings, *, is_detailed: bool, now: float) -> list[str]:
    """The lines of one job. Args: now: UTC epoch seconds."""
    has_started, has_ended = job["start_at"] is not None, job["end_at"] is not None
    is_pending = job["state"] == "PENDING"
    cpus, gpus = cpus_of(job), gpus_of(job)
    mem_mib = job["mem_mib"] or 0
    lines = [
        _identity(job),
        f"UserId={user_of(job)} GroupId={_group_of(job)} MCS_label=N/A",
        f"Priority={priority_of(job)} Nice={job['nice']} Account={_text(job['account'])} "
        f"QOS={_text(job['qos'] or NORMAL_QOS)}",
        f"JobState={job['state']} Reason={slurm_reason(job['reason'])} Dependency={dependency_of(job, around.states)}",
        f"Requeue={int(job['requeue'])} Restarts={restarts_of(job)} BatchFlag={int(_is_batch(job))} Reboot=0 "
        f"ExitCode={exit_status(job)}",
    ]
    if is_detailed:
        lines.append(f"DerivedExitCode={around.derived.get(job['id'], 0)}:0")
    lines += [
        f"RunTime={long_duration(run_time_s(job, now))} TimeLimit={long_duration(limit_s(job))} TimeMin=N/A",
        f"SubmitTime={instant(job['submit_at'])} EligibleTime={_eligible(job)}",
        f"AccrueTime={_eligible(job)}",
        f"StartTime={instant(_start(job, around, now), UNKNOWN)} EndTime={instant(_end(job, around, now), UNKNOWN)} "
        f"Deadline={instant(job['deadline_at'])}",
    ]
    if has_started or has_ended:
        lines.append(
            f"PreemptEligibleTime={instant(job['start_at'] or job['end_at'])} "
            f"PreemptTime={instant(job['preempt_at'], 'None')}"
        )
    before_s = int(run_time_s(job, now)) if job["suspended_at"] else 0
    nodes, all_cpus = job["nodes"], all_cpus_of(job)
    number = f"{nodes}-{job['nodes_max']}" if job["nodes_max"] else str(nodes)
    lines += [
        f"SuspendTime={instant(job['suspended_at'], 'None')} SecsPreSuspend={before_s} "
        f"LastSchedEval={instant(job['start_at'], UNKNOWN)} Scheduler=Main",
        f"Partition={printable(job['queue'])} AllocNode:Sid={_submit_host(job)}:0",
        f"ReqNodeList={fold(job['nodelist']) or NULL} ExcNodeList={fold(job['exclude']) or NULL}",
        f"NodeList={'' if is_pending else nodes_of(job)}",
    ]
    if job["node"] and not is_pending:
        lines.append(f"BatchHost={first_node(job['node'])}")
    lines += [
        f"NumNodes={number} NumCPUs={all_cpus} NumTasks={job['num_tasks']} CPUs/Task={cpus_per_task(job)} "
        "ReqB:S:C:T=0:0:*:*",
        f"TRES={tres(all_cpus, job['total_mem_mib'], gpus, nodes=nodes, billing=all_cpus)}",
        f"Socks/Node=* NtasksPerN:B:S:C={job['ntasks_per_node'] or 0}:0:*:* CoreSpec=*",
    ]
    if is_detailed and job["gpus"] and not is_pending:
        held = _held(job["gpus"], around.kinds)
        lines.append("JOB_GRES=" + ",".join(f"gpu:{kind}:{len(indices)}" for kind, indices in held.items()))
        lines += [
            f"  Nodes={names} CPU_IDs=N/A Mem={mem_mib} GRES={there}"
            for there, names in _gres_by_node(job, around.kinds)
        ]
    per_cpu = job["mem_per_cpu_mib"]
    least = f"MinMemoryCPU={memory(per_cpu)}" if per_cpu else f"MinMemoryNode={memory(mem_mib) if mem_mib else 0}"
    lines += [
        f"MinCPUsNode={cpus} {least} MinTmpDiskNode=0",
        f"Features={_text(job['constraint'])} DelayBoot=00:00:00",
    ]
    if job["reservation"]:
        lines.append(f"Reservation={printable(job['reservation'])}")
    licenses = ",".join(f"{name}:{number}" for name, number in job["licenses"].items())
    lines += [
        f"OverSubscribe={'NO' if job['exclusive'] else 'OK'} Contiguous=0 Licenses={licenses or NULL} Network={NULL}",
        f"Command={command_of(job)}",
        f"WorkDir={_text(job['work_dir'])}",
    ]
    if job["comment"]:
        lines.append(f"Comment={printable(job['comment'])}")
    if (comment := admin_comment(job)) is not None:
        lines.append(f"AdminComment={comment}")
    if _is_batch(job):
        lines += [
            f"StdErr={_text(job['stderr_path'] or job['stdout_path'])}",
            f"StdIn={_text(job['stdin_path'] or '/dev/null')}",
            f"StdOut={_text(job['stdout_path'])}",
        ]
    lines.append("Power=")
    if job["never_satisfied"] == "cancel":
        lines.append("KillOInInvalidDependent=Yes")
    if job["gpus_per_task"]:
        lines.append(f"TresPerTask={_gres(job, job['gpus_per_task'])}")
    elif asked := gres_of(job):
        lines.append(f"TresPerNode={asked}")
    elif job["total_gpus"]:
        lines.append(f"TresPerJob={_gres(job, job['total_gpus'])}")
    return lines


def block(lines: list[str], *, is_one_line: bool) -> str:
    """The text of one entry: a line each, indented, or all of them in one."""
    if is_one_line:
        return " ".join(line.strip() for line in lines) + " \n"
    return "\n   ".join([*lines, ""]) + "\n\n"


def restarts_of(job: Json) -> int:
    """How often it was started again, or will be."""
    # One that is handed over is pending with its run.
    waits = job["state"] == "PENDING" and job["reason"] != "HandedOver"
    return int(job["run"]) if waits else max(0, int(job["run"]) - 1)


def _identity(job: Json) -> str:
    number = numeric_id(job)
    if job["array_id"] is None:
        return f"JobId={number} JobName={printable(job['name'])}"
    throttle = job["throttle"]
    tasks = tasks_of_row(job) if job["task"] is None else str(job["task"])
    words = [f"JobId={number}", f"ArrayJobId={job['array_id']}", f"ArrayTaskId={tasks}"]
    words += [f"ArrayTaskThrottle={throttle}"] if throttle else []
    return " ".join([*words, f"JobName={printable(job['name'])}"])


def numeric_id(job: Json) -> str:
    """Its own id, which a task has, too; a task that has not started yet shares its array's, as in Slurm."""
    is_part = job["task"] is not None and job["state"] == "PENDING" and not job["run"]
    return str(job["array_id"] if is_part else job["job_id"])


def user_of(job: Json) -> str:
    """`alice(1001)`."""
    return f"{printable(job['user'])}({job['uid']})"


_groups: dict[int, str] = {}


def _group_of(job: Json) -> str:
    """The user's first group, `students(100)`."""
    uid = job["uid"]
    if uid not in _groups:
        try:
            gid = pwd.getpwuid(uid).pw_gid
        except KeyError:
            _groups[uid] = user_of(job)
            return _groups[uid]
        try:
            name = grp.getgrgid(gid).gr_name
        except KeyError:
            name = str(gid)
        _groups[uid] = f"{printable(name)}({gid})"
    return _groups[uid]


def _text(value: str | None) -> str:
    return printable(value) if value else NULL


def priority_of(job: Json) -> int:
    """A whole number as Slurm's; 0 of a job that is held or never started."""
    if job["hold"] or job["priority"] is None:
        return 0
    return max(1, min(_MOST_PRIORITY, round(float(job["priority"]))))


def cpus_per_task(job: Json) -> int:
    """Whole cores of each task."""
    stated = job["cpus_per_task"]
    tasks = max(1, -(-(job.get("num_tasks") or job.get("ntasks") or job["nodes"]) // job["nodes"]))
    return max(1, whole(stated) if stated else cpus_of(job) // int(tasks))


def gpus_of(job: Json) -> int:
    """GPUs on all nodes together; a part of a card counts as one."""
    if job["gpus"] and job["state"] != "PENDING":
        return len(job["gpus"])
    return int(job["total_gpus"])


def gres_of(job: Json) -> str:
    """`gres:gpu:a100:2`, what each node is asked for; empty without GPUs, and where only their total was asked for."""
    return _gres(job, job["gpus_per_node"]) if job["gpus_per_node"] and _is_even(job) else ""


def _is_even(job: Json) -> bool:
    return not job["nodes_max"] and job["total_gpus"] == job["gpus_per_node"] * job["nodes"]


def _gres(job: Json, count: int) -> str:
    kind, colon, _ = job["gpu_request"].partition("|")[0].partition(":")
    return f"gres:gpu:{printable(kind) + ':' if colon else ''}{count}"


def _gres_by_node(job: Json, kinds: Mapping[str, str]) -> list[tuple[str, str]]:
    """`gpu:a100:2(IDX:0-1)` and the folded nodes on which the job has just that, in their order."""
    found: dict[str, list[str]] = {}
    for name in expand(job["node"]):
        held = _held([gpu for gpu in job["gpus"] if gpu["node"] == name], kinds)
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


def nodes_of(job: Json) -> str:
    """The nodes that a job has or had, folded."""
    return str(job["node"] or "")


def _submit_host(job: Json) -> str:
    # Jobs are submitted where the daemon is.
    return first_node(job["node"]) or "localhost"


def _is_batch(job: Json) -> bool:
    return bool(job["is_batch"])


def run_time_s(job: Json, now: float) -> float:
    """Seconds that the last run has taken, without those suspended."""
    if job["start_at"] is None or job["state"] == "PENDING":
        return 0.0
    until: float = job["end_at"] or job["suspended_at"] or now
    return max(0.0, until - float(job["start_at"]) - float(job["suspended_s"] or 0))


_NOT_ELIGIBLE = ("Dependency", "DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin")


def _eligible(job: Json) -> str:
    is_waiting = job["state"] == "PENDING" and (job["hold"] or job["reason"] in _NOT_ELIGIBLE)
    return (
        UNKNOWN if is_waiting or job["reason"] == "DependencyNeverSatisfied" else instant(job["eligible_at"], UNKNOWN)
    )


def may_start(job: Json, now: float) -> bool:
    """Whether a start is worth a forecast: of a pending job that is not held and whose begin time has passed."""
    is_due = job["eligible_at"] is None or job["eligible_at"] <= now
    return is_due and job["state"] == "PENDING" and not job["hold"]


def expected_at(start: Json) -> float | None:
    """When a job starts at the latest, of an entry of /v1/starts; the earliest instant if there is no latest."""
    found: float | None = start["start_high_at"]
    return start["start_low_at"] if found is None else found


def _start(job: Json, around: JobSurroundings, now: float) -> float | None:
    """When it started, or is expected to."""
    found: float | None = job["start_at"]
    if job["state"] != "PENDING":
        return found or job["end_at"]
    eligible_at: float | None = job["eligible_at"]
    if eligible_at is not None and eligible_at > now:
        return eligible_at
    return around.starts.get(job["id"]) or around.starts.get(job["id"].partition("_")[0])


def _end(job: Json, around: JobSurroundings, now: float) -> float | None:
    """When it ended, or will at its limit."""
    if job["end_at"] is not None:
        found: float = job["end_at"]
        return found
    start_at = _start(job, around, now)
    if start_at is None or job["time_limit_s"] is None:
        return None
    return start_at + float(job["suspended_s"] or 0) + float(job["time_limit_s"])


def dependency_of(job: Json, states: Mapping[str, str] | None = None) -> str:
    """The conditions that are not satisfied, each with its standing: `afterok:25(unfulfilled)`.

    Args: states: of the jobs that it depends on, by id; the condition on an unknown one is kept.
    """
    states = states or {}
    is_hopeless = job["reason"] == "DependencyNeverSatisfied"
    if not job["dependency"] or not (job["state"] == "PENDING" or is_hopeless):
        return NULL
    words = []
    for group in job["dependency"].replace("?", ",?").split(","):
        mark, term = ("?", group[1:]) if group[:1] == "?" else (",", group)
        kind, colon, ids = term.partition(":")
        if not colon:
            words.append(f"{mark}{term}{'(failed)' if is_hopeless else '(unfulfilled)'}")
            continue
        for one in split_ids(ids.replace(":", ",")):
            standing = _standing(kind, states.get(one.partition("+")[0]))
            if standing == _OPEN and is_hopeless and states.get(one) is None:
                standing = _HOPELESS
            if standing is not None:
                words.append(f"{mark}{kind}:{one}{standing}")
    return printable("".join(words)[1:]) or NULL


_OPEN, _HOPELESS = "(unfulfilled)", "(failed)"


def _standing(kind: str, state: str | None) -> str | None:
    """Standing of a condition on a job; None if it is fulfilled."""
    if state is None or state == "PENDING":
        return _OPEN
    if kind == "after":
        return None
    if state in ACTIVE:
        return _OPEN
    if kind in ("afterok", "aftercorr"):
        return None if state == "COMPLETED" else _HOPELESS
    if kind == "afternotok":
        return _HOPELESS if state == "COMPLETED" else None
    return None


def command_of(job: Json) -> str:
    """The command of a job, a script by its whole path; none for text that has no file."""
    command, path = job["command"], job["script_path"]
    if path:
        name = path.rpartition("/")[2]
        for written in (name, "'" + name.replace("'", "'\"'\"'") + "'"):
            if f"{command} ".startswith(f"{written} "):
                return printable(path + command[len(written) :])
        return printable(path)
    return NULL if command.partition(" ")[0] in ("wrap", "stdin") else _text(command)
