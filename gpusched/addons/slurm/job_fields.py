"""What squeue can print of a job: the letters of `-o`, the names of `-O`, and the orders of `-S`."""

from __future__ import annotations

import os
import time

from gpusched.addons.slurm.format import PrintField
from gpusched.addons.slurm.nodes import all_cpus_of, cpus_of, tres
from gpusched.addons.slurm.scontrol_job import (
    command_of,
    cpus_per_task,
    dependency_of,
    gpus_of,
    gres_of,
    priority_of,
    restarts_of,
    run_time_s,
)
from gpusched.addons.slurm.values import (
    NORMAL_QOS,
    NULL,
    admin_comment,
    compact_state,
    exit_status,
    first_node,
    instant,
    limit_s,
    memory,
    short_duration,
    slurm_reason,
    tasks_of_row,
)
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]

_FAILED = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "NODE_FAIL")
_REASON_SHOWN = ("PENDING", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")
_FULL_PRIORITY = 4_294_967_295
_YEAR_S = 365 * 86400


def shown_id(job: Json) -> str:
    """`42`, `42_7`, `42_[1-10%2]`."""
    if job["tasks_left"]:
        return f"{job['id']}_[{tasks_of_row(job)}]"
    found: str = job["id"]
    return found


def _task(job: Json) -> str:
    if job["tasks_left"]:
        return tasks_of_row(job)
    return str(job["id"].partition("_")[2] or "N/A")


def reason_of(job: Json) -> str:
    """Slurm's word, or several with commas; tools expect one for every job that failed."""
    reason = job["reason"]
    found = ",".join(map(slurm_reason, reason.split(","))) if reason and "," in reason else slurm_reason(reason)
    if found == "None" and job["state"] in _FAILED:
        return "NonZeroExitCode"
    return found


def _node(job: Json) -> str:
    return "" if job["state"] == "PENDING" else job["node"] or ""


def reason_or_nodes(job: Json) -> str:
    """`(Priority)` while a job waits and after it failed, otherwise its node."""
    if job["state"] in _REASON_SHOWN:
        return f"({reason_of(job)})"
    return job["node"] or ""


def _time_used(job: Json) -> str:
    if job["state"] == "PENDING":
        return "0:00"
    return short_duration(run_time_s(job, time.time()))


def _time_limit(job: Json) -> str:
    return short_duration(limit_s(job))


def _time_left(job: Json) -> str:
    limit = limit_s(job)
    if limit is None:
        return "UNLIMITED"
    left_s = limit - int(run_time_s(job, time.time()))
    return short_duration(left_s) if 0 <= left_s <= _YEAR_S else "INVALID"


def start_at(job: Json) -> float | None:
    """When a job started or is expected to, as far as is known."""
    if job["state"] != "PENDING":
        found: float | None = job["start_at"] or job["end_at"]
        return found
    expected: float | None = job.get("expected_at")
    if expected is not None:
        return expected
    begin: float | None = job["begin_at"]
    return begin if begin is not None and begin > time.time() else None


def end_at(job: Json) -> float | None:
    """When a job ended, or will at its limit."""
    if job["end_at"] is not None:
        found: float = job["end_at"]
        return found
    started, limit = start_at(job), limit_s(job)
    return None if started is None or limit is None else started + (job["suspended_s"] or 0.0) + limit


def _end(job: Json) -> str:
    if job["end_at"] is None and job["time_limit_s"] is None and job["state"] != "PENDING":
        return "NONE"
    return instant(end_at(job))


def _cpus(job: Json) -> int:
    return all_cpus_of(job)


def _tres(job: Json) -> str:
    cpus, nodes = _cpus(job), int(job["nodes"])
    return tres(cpus, job["total_mem_mib"], gpus_of(job), nodes=nodes, billing=cpus)


def _min_memory(job: Json) -> str:
    mib = job["mem_per_cpu_mib"] or job["mem_mib"]
    return memory(mib) if mib else "0"


def exact_memory(job: Json) -> str:
    """The memory of `--noconvert`, always in MiB."""
    mib = job["mem_per_cpu_mib"] or job["mem_mib"]
    return memory(mib, convert=False) if mib else "0"


def _pending_s(job: Json) -> str:
    until: float = job["start_at"] if job["start_at"] is not None and job["state"] != "PENDING" else time.time()
    return str(max(0, int(until - job["submit_at"])))


def _group(job: Json) -> tuple[str, str]:
    """Name and number of the primary group of the job's user."""
    known = _groups.get(job["uid"])
    if known is None:
        import grp
        import pwd

        try:
            number = pwd.getpwuid(job["uid"]).pw_gid
            try:
                known = grp.getgrgid(number).gr_name, str(number)
            except KeyError:
                known = str(number), str(number)
        except (KeyError, OverflowError):
            known = "nobody", str(job["uid"])
        _groups[job["uid"]] = known
    return known


_groups: dict[int, tuple[str, str]] = {}


def _exit_code(job: Json) -> str:
    return "0:0" if job["state"] == "PENDING" else exit_status(job)


def _requeues(job: Json) -> str:
    return "0" if job["requeue"] is False else "1"


def _text(key: str, none: str = NULL) -> Callable[[Json], str]:
    def cell(job: Json) -> str:
        value = job[key]
        return printable(value) if value else none

    return cell


def _number(key: str, none: str = "N/A") -> Callable[[Json], str]:
    def cell(job: Json) -> str:
        return none if job[key] is None else str(job[key])

    return cell


def _instant(key: str) -> Callable[[Json], str]:
    return lambda job: instant(job[key])


_ID = "id tasks_left throttle"
_RUN = "state start_at end_at suspended_at suspended_s"
_START = "state start_at end_at begin_at"
_SIZE = "cpus nodes total_cpus"
_GRES = "gpus_per_node gpu_request nodes nodes_max total_gpus"


def _hosts(key: str) -> Callable[[Json], str]:
    return lambda job: ",".join(job[key] or ())


def _shared(job: Json) -> str:
    return "NO" if job["exclusive"] else "OK"


def _licenses(job: Json) -> str:
    return ",".join(f"{name}:{number}" for name, number in job["licenses"].items()) or NULL


PERCENT: dict[str, PrintField] = {
    "a": PrintField("ACCOUNT", _text("account"), "account"),
    "A": PrintField("JOBID", lambda job: str(job["job_id"]), "job_id"),
    "b": PrintField("TRES_PER_NODE", lambda job: gres_of(job) or "N/A", _GRES),
    "B": PrintField("EXEC_HOST", lambda job: first_node(_node(job)) or "n/a", "state node"),
    "c": PrintField("MIN_CPUS", lambda job: str(cpus_of(job)), "cpus"),
    "C": PrintField("CPUS", lambda job: str(_cpus(job)), _SIZE),
    "d": PrintField("MIN_TMP_DISK", lambda job: "0"),
    "D": PrintField("NODES", lambda job: str(job["nodes"]), "nodes"),
    "e": PrintField("END_TIME", _end, f"{_START} suspended_s time_limit_s"),
    "E": PrintField("DEPENDENCY", dependency_of, "state reason dependency"),
    "f": PrintField("FEATURES", _text("constraint"), "constraint"),
    "F": PrintField("ARRAY_JOB_ID", lambda job: job["id"].partition("_")[0], "id"),
    "g": PrintField("GROUP", lambda job: _group(job)[0], "uid"),
    "G": PrintField("GROUP", lambda job: _group(job)[1], "uid"),
    "h": PrintField("OVER_SUBSCRIBE", _shared, "exclusive"),
    "H": PrintField("SOCKETS_PER_NODE", lambda job: "*"),
    "i": PrintField("JOBID", shown_id, _ID),
    "I": PrintField("CORES_PER_SOCKET", lambda job: "*"),
    "j": PrintField("NAME", lambda job: printable(job["name"]), "name"),
    "J": PrintField("THREADS_PER_CORE", lambda job: "*"),
    "k": PrintField("COMMENT", _text("comment"), "comment"),
    "K": PrintField("ARRAY_TASK_ID", _task, _ID),
    "l": PrintField("TIME_LIMIT", _time_limit, "time_limit_s", is_whole=True),
    "L": PrintField("TIME_LEFT", _time_left, f"{_RUN} time_limit_s", is_whole=True),
    "m": PrintField("MIN_MEMORY", _min_memory, "mem_mib mem_per_cpu_mib"),
    "M": PrintField("TIME", _time_used, _RUN, is_whole=True),
    "n": PrintField("REQ_NODES", _hosts("nodelist"), "nodelist"),
    "N": PrintField("NODELIST", _node, "state node", is_whole=True),
    "o": PrintField("COMMAND", command_of, "command script_path"),
    "O": PrintField("CONTIGUOUS", lambda job: "0"),
    "p": PrintField("PRIORITY", lambda job: f"{priority_of(job) / _FULL_PRIORITY:.14f}", "priority hold"),
    "P": PrintField("PARTITION", lambda job: printable(job["queue"]), "queue"),
    "q": PrintField("QOS", _text("qos", NORMAL_QOS), "qos"),
    "Q": PrintField("PRIORITY", lambda job: str(priority_of(job)), "priority hold"),
    "r": PrintField("REASON", reason_of, "state reason"),
    "R": PrintField("NODELIST(REASON)", reason_or_nodes, "state node reason", is_whole=True),
    "s": PrintField("SELECT_JOBINFO", lambda job: ""),
    "S": PrintField("START_TIME", lambda job: instant(start_at(job)), _START),
    "t": PrintField("ST", lambda job: compact_state(job["state"]), "state"),
    "T": PrintField("STATE", lambda job: job["state"], "state"),
    "u": PrintField("USER", lambda job: printable(job["user"]), "user"),
    "U": PrintField("UID", lambda job: str(job["uid"]), "uid"),
    "v": PrintField("RESERVATION", _text("reservation"), "reservation"),
    "V": PrintField("SUBMIT_TIME", _instant("submit_at"), "submit_at"),
    "w": PrintField("WCKEY", _text("wckey"), "wckey"),
    "W": PrintField("LICENSES", _licenses, "licenses"),
    "x": PrintField("EXC_NODES", _hosts("exclude"), "exclude"),
    "X": PrintField("CORE_SPEC", lambda job: "N/A"),
    "y": PrintField("NICE", lambda job: str(job["nice"]), "nice"),
    "Y": PrintField("SCHEDNODES", lambda job: ",".join(job.get("expected_nodes") or ()) or NULL, is_whole=True),
    "z": PrintField("S:C:T", lambda job: "*:*:*"),
    "Z": PrintField("WORK_DIR", _text("work_dir"), "work_dir"),
}
"""The letters of `-o`."""

ALL = "|".join(f"%{letter}" for letter in (*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
"""The format that `%all` means."""

_SAME = (
    "account a|arrayjobid F|arraytaskid K|batchhost B|command o|comment k|contiguous O|cores I|corespec X|"
    "dependency E|endtime e|excnodes x|exc-nodes x|feature f|gres b|groupid G|groupname g|jobarrayid i|jobid A|"
    "licenses W|mincpus c|minmemory m|mintmpdisk d|name j|nice y|nodelist N|numcpus C|numnodes D|oversubscribe h|"
    "partition P|priority p|prioritylong Q|qos q|reason r|reasonlist R|reqnodes n|reservation v|schednodes Y|sct z|"
    "shared h|sockets H|starttime S|state T|statecompact t|submittime V|threads J|timeleft L|timelimit l|"
    "timeused M|tres-per-node b|userid U|username u|wckey w|workdir Z"
).split("|")
_UNSET = (
    "allocsid ALLOC_SID 0|associd ASSOC_ID 0|boardspernode BOARDS_PER_NODE N/A|"
    "burstbuffer BURST_BUFFER (null)|burstbufferstate BURST_BUFFER_STATE (null)|"
    "clusterfeature CLUSTER_FEATURES (null)|container CONTAINER (null)|containerid CONTAINERID (null)|"
    "delayboot DELAY_BOOT 0:00|hetjobid HET_JOB_ID N/A|hetjobidset HET_JOB_ID_SET N/A|"
    "hetjoboffset HET_JOB_OFFSET N/A|mcslabel MCSLABEL N/A|mintime TIME_MIN 0:00|network NETWORK (null)|"
    "ntperboard NTASKS_PER_BOARD N/A|ntpercore NTASKS_PER_CORE N/A|ntpersocket NTASKS_PER_SOCKET N/A|"
    "origin ORIGIN NA|originraw ORIGIN_RAW NA|packjobid HET_JOB_ID N/A|packjobidset HET_JOB_ID_SET N/A|"
    "packjoboffset HET_JOB_OFFSET N/A|profile PROFILE NotSet|reboot REBOOT 0|reqswitch REQ_SWITCH 0|"
    "resizetime RESIZE_TIME N/A|siblingsactive ACTIVE_SIBLINGS NA|siblingsactiveraw ACTIVE_SIBLINGS_RAW NA|"
    "siblingsviable VIABLE_SIBLINGS NA|siblingsviableraw VIABLE_SIBLINGS_RAW NA|sperboard SOCKETS_PER_BOARD 0|"
    "system_comment SYSTEM_COMMENT (null)|tres-bind TRES_BIND N/A|tres-freq TRES_FREQ N/A|"
    "tres-per-job TRES_PER_JOB N/A|tres-per-socket TRES_PER_SOCKET N/A|wait4switch WAIT4SWITCH 0:00"
).split("|")
"""Fields of what gpusched does not have, as Slurm prints them when they are not set."""


def _per(unit: str, key: str) -> Callable[[Json], str]:
    return lambda job: "N/A" if not job[key] else f"gres:gpu:{job[key]}{unit}"


_OWN: dict[str, PrintField] = {
    "accruetime": PrintField("ACCRUE_TIME", _instant("eligible_at"), "eligible_at"),
    "admin_comment": PrintField("ADMIN_COMMENT", lambda job: admin_comment(job) or NULL, "native_id"),
    "allocnodes": PrintField("ALLOC_NODES", lambda job: os.uname().nodename.partition(".")[0]),
    "batchflag": PrintField("BATCH_FLAG", lambda job: "1" if job["is_batch"] else "0", "is_batch"),
    "cpus-per-task": PrintField(
        "CPUS_PER_TASK", lambda job: str(cpus_per_task(job)), "cpus_per_task cpus ntasks nodes"
    ),
    "cpus-per-tres": PrintField("CPUS_PER_TRES", _per("", "cpus_per_gpu"), "cpus_per_gpu"),
    "deadline": PrintField("DEADLINE", _instant("deadline_at"), "deadline_at"),
    "derivedec": PrintField("DERIVED_EC", _exit_code, "state exit_code signal"),
    "eligibletime": PrintField("ELIGIBLE_TIME", _instant("eligible_at"), "eligible_at"),
    "exit_code": PrintField("EXIT_CODE", _exit_code, "state exit_code signal"),
    "lastschedeval": PrintField("LAST_SCHED_EVAL", _instant("start_at"), "start_at"),
    "maxcpus": PrintField("MAX_CPUS", lambda job: str(_cpus(job)), _SIZE),
    "maxnodes": PrintField("MAX_NODES", lambda job: str(job["nodes_max"] or job["nodes"]), "nodes nodes_max"),
    "mem-per-tres": PrintField("MEM_PER_TRES", _per("M", "mem_per_gpu_mib"), "mem_per_gpu_mib"),
    "ntpernode": PrintField("NTASKS_PER_NODE", _number("ntasks_per_node"), "ntasks_per_node"),
    "numtasks": PrintField("TASKS", _number("num_tasks", "1"), "num_tasks"),
    "pendingtime": PrintField("PENDING_TIME", _pending_s, "state start_at submit_at"),
    "preempttime": PrintField("PREEMPT_TIME", _instant("preempt_at"), "preempt_at"),
    "prefer": PrintField("PREFER", _text("prefer"), "prefer"),
    "requeue": PrintField("REQUEUE", _requeues, "requeue"),
    "restartcnt": PrintField("RESTART_COUNT", lambda job: str(restarts_of(job)), "run state reason"),
    "stderr": PrintField(
        "STDERR",
        lambda job: printable(job["stderr_path"] or job["stdout_path"] or "") or NULL,
        "stderr_path stdout_path",
    ),
    "stdin": PrintField("STDIN", _text("stdin_path", "/dev/null"), "stdin_path"),
    "stdout": PrintField("STDOUT", _text("stdout_path"), "stdout_path"),
    "tres-alloc": PrintField("TRES_ALLOC", _tres, f"{_SIZE} total_mem_mib gpus total_gpus state"),
    "tres-per-task": PrintField("TRES_PER_TASK", _per("", "gpus_per_task"), "gpus_per_task"),
}


def long_fields(cluster: str) -> dict[str, PrintField]:
    """The names of `-O`. Args: cluster: the name of this cluster."""

    def unset(value: str) -> Callable[[Json], str]:
        return lambda job: value

    found = {name: PERCENT[letter] for name, letter in map(str.split, _SAME)}
    for entry in _UNSET:
        name, title, value = entry.split()
        found[name] = PrintField(title, unset(value))
    found.update(_OWN)
    found["tres"], found["cpuspertask"] = _OWN["tres-alloc"], _OWN["cpus-per-task"]
    found["cluster"] = PrintField("CLUSTER", unset(cluster))
    return found


def _order_of_id(job: Json) -> tuple[int, int]:
    array, _, task = job["id"].partition("_")
    return int(array), int(task or -1)


ORDERS: dict[str, tuple[str, Callable[[Json], Any]]] = {
    "a": ("account", lambda job: job["account"] or ""),
    "B": ("state node", lambda job: first_node(_node(job))),
    "C": (_SIZE, _cpus),
    "D": ("nodes", lambda job: job["nodes"]),
    "e": (f"{_START} suspended_s time_limit_s", lambda job: end_at(job) or 0.0),
    "g": ("uid", lambda job: _group(job)[0]),
    "G": ("uid", lambda job: int(_group(job)[1])),
    "i": ("id", _order_of_id),
    "j": ("name", lambda job: job["name"]),
    "l": ("time_limit_s", lambda job: float("inf") if job["time_limit_s"] is None else job["time_limit_s"]),
    "L": (
        f"{_RUN} time_limit_s",
        lambda job: float("inf") if limit_s(job) is None else (limit_s(job) or 0) - run_time_s(job, time.time()),
    ),
    "m": ("mem_mib", lambda job: job["mem_mib"] or 0),
    "M": (_RUN, lambda job: run_time_s(job, time.time())),
    "N": ("state node", _node),
    "p": ("priority hold", priority_of),
    "P": ("queue", lambda job: job["queue"]),
    "Q": ("priority hold", priority_of),
    "S": (_START, lambda job: float("inf") if start_at(job) is None else start_at(job)),
    "t": ("state", lambda job: job["state"]),
    "T": ("state", lambda job: job["state"]),
    "u": ("user", lambda job: job["user"]),
    "U": ("uid", lambda job: job["uid"]),
    "v": ("reservation", lambda job: job["reservation"] or ""),
    "V": ("submit_at", lambda job: job["submit_at"]),
}
"""Letters of `-S`: the keys that each reads, and what it compares."""
NO_ORDER = frozenset("cdfhHIJnOz")
"""Letters that `-S` accepts and that change nothing here."""
