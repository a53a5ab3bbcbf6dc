"""What Slurm's commands tell of a job: the letters of `squeue -o`, the names of `-O`, the orders of `-S`, and the keys
of `--json`."""

from __future__ import annotations

import os

from gpusched.addons.slurm.format import PrintField, split_spelling
from gpusched.addons.slurm.values import NULL, compact_state, instant, memory, short_duration
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.addons.slurm.job import SlurmJob

    Json = dict[str, Any]

_REASON_SHOWN = ("PENDING", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")
_FULL_PRIORITY = 4_294_967_295
_YEAR_S = 365 * 86400
_LAST = float("inf")


class Kind:
    """How values of one kind are shown.

    Args:
        show: the text of a value.
        none: the text without one.
        document: what JSON has for a value or None.
        rank: what None compares as.
    """

    __slots__ = ("document", "none", "rank", "show")

    def __init__(self, show: Callable[[Any], str], none: str, document: Callable[[Any], Any], rank: Any) -> None:
        self.show = show
        self.none = none
        self.document = document
        self.rank = rank


TEXT = Kind(printable, NULL, lambda value: value or "", "")
STATE = Kind(compact_state, NULL, lambda value: value, "")
NUMBER = Kind(str, "N/A", lambda value: value, 0)
COUNT = Kind(str, "N/A", lambda value: value or 0, 0)
FLAG = Kind(lambda value: str(int(value)), "0", bool, False)
INSTANT = Kind(instant, "N/A", lambda at: int(at or 0), _LAST)
END = Kind(instant, "N/A", lambda at: int(at or 0), 0.0)
LIMIT = Kind(short_duration, "UNLIMITED", lambda seconds: None if seconds is None else int(seconds // 60), _LAST)
LEFT = Kind(lambda left_s: short_duration(left_s) if 0 <= left_s <= _YEAR_S else "INVALID", "UNLIMITED", int, _LAST)
SIZE = Kind(memory, "0", lambda mib: mib, 0)


class JobField:
    """One thing that is told of a job.

    Args:
        spelling: the letter of `-o` if it has one, then the names of `-O`: `-a account`.
        title: its header.
        of: its value, or the key of the row that has it.
        keys: JSON keys that `of` reads, separated by blanks; the key itself if `of` is one.
        json: its key in documents; empty: it is in none.
        none: the text without a value, in place of that of its kind.
        text: the text, if it says more than the value.
        is_whole: see `PrintField`.
    """

    __slots__ = ("documents", "json", "kind", "letter", "names", "of", "printed")

    def __init__(
        self,
        spelling: str,
        title: str,
        of: str | Callable[[SlurmJob], Any],
        keys: str = "",
        json: str = "",
        kind: Kind = TEXT,
        *,
        none: str | None = None,
        text: Callable[[SlurmJob], str] | None = None,
        is_whole: bool = False,
    ) -> None:
        self.letter, self.names = split_spelling(spelling)
        self.json = json
        self.kind = kind
        none = kind.none if none is None else none
        if isinstance(of, str):
            key = keys = of
            self.of: Callable[[SlurmJob], Any] = lambda job: job.row[key]
            self.documents: Callable[[list[SlurmJob]], list[Any]] = _documents_of_key(key, kind.document)
            cell = _cell_of_key(key, kind.show, none)
        else:
            self.of = of
            self.documents = lambda jobs: [kind.document(of(job)) for job in jobs]
            cell = _cell(of, kind.show, none)
        self.printed = PrintField(title, text or cell, keys, is_whole)

    def rank(self, job: SlurmJob) -> Any:
        """What jobs are sorted by."""
        value = self.of(job)
        return self.kind.rank if value is None else value


def _cell(of: Callable[[SlurmJob], Any], show: Callable[[Any], str], none: str) -> Callable[[SlurmJob], str]:
    def cell(job: SlurmJob) -> str:
        value = of(job)
        return none if value is None or value == "" else show(value)

    return cell


def _cell_of_key(key: str, show: Callable[[Any], str], none: str) -> Callable[[SlurmJob], str]:
    """As `_cell`, with one call less: a queue has thousands of rows."""

    def cell(job: SlurmJob) -> str:
        value = job.row[key]
        return none if value is None or value == "" else show(value)

    return cell


def _documents_of_key(key: str, document: Callable[[Any], Any]) -> Callable[[list[SlurmJob]], list[Any]]:
    """What documents have for a key of these jobs, also with one call less."""
    return lambda jobs: [document(job.row[key]) for job in jobs]


def _reason_or_nodes(job: SlurmJob) -> str:
    """`(Priority)` while a job waits and after it failed, otherwise its node."""
    return f"({job.reason})" if job.row["state"] in _REASON_SHOWN else job.row["node"] or ""


def _end(job: SlurmJob) -> str:
    row = job.row
    is_endless = row["end_at"] is None and row["time_limit_s"] is None and not job.is_pending
    return "NONE" if is_endless else instant(job.end_at)


def exact_memory(job: SlurmJob) -> str:
    """The memory of `--noconvert`, always in MiB."""
    return memory(job.least_mib, convert=False) if job.least_mib else "0"


def _group_number(job: SlurmJob) -> int:
    return int(job.row["uid"]) if job.group[0] is None else job.group[0]


def _per(unit: str, key: str) -> Callable[[SlurmJob], str]:
    return lambda job: f"gres:gpu:{job.row[key]}{unit}" if job.row[key] else ""


def _hosts(key: str) -> Callable[[SlurmJob], str]:
    return lambda job: ",".join(job.row[key] or ())


def _exit(job: SlurmJob) -> str:
    return "0:0" if job.is_pending else job.exit_status


def _wait_status(job: SlurmJob) -> int:
    """Exit code and signal as wait(2) combines them."""
    return (job.row["exit_code"] or 0) << 8 | (job.row["signal"] or 0)


_ID = "id tasks_left throttle"
_RUN = "state start_at end_at suspended_at suspended_s"
_START = "state start_at end_at eligible_at"
_END = f"{_START} suspended_s time_limit_s"
_SIZE = "cpus nodes total_cpus"
_GRES = "gpus_per_node gpu_type nodes nodes_max total_gpus"
_TRES = f"{_SIZE} total_mem_mib gpus total_gpus state"
_EXIT = "state exit_code signal"


FIELDS = (
    JobField("-a account", "ACCOUNT", "account", json="account"),
    JobField("-A jobid", "JOBID", "job_id", json="job_id", kind=NUMBER),
    JobField("-b gres tres-per-node", "TRES_PER_NODE", lambda job: job.gres, _GRES, "tres_per_node", none="N/A"),
    JobField("-B batchhost", "EXEC_HOST", lambda job: job.batch_host, "state node", "batch_host", none="n/a"),
    JobField("-c mincpus", "MIN_CPUS", lambda job: job.cpus, "cpus", "minimum_cpus_per_node", NUMBER),
    JobField("-C numcpus", "CPUS", lambda job: job.total_cpus, _SIZE, "cpus", NUMBER),
    JobField("-d mintmpdisk", "MIN_TMP_DISK", lambda job: 0, "", "minimum_tmp_disk_per_node", NUMBER),
    JobField("-D numnodes", "NODES", "nodes", json="node_count", kind=NUMBER),
    JobField("-e endtime", "END_TIME", lambda job: job.end_at, _END, "end_time", END, text=_end),
    JobField("-E dependency", "DEPENDENCY", lambda job: job.dependency({}), "state reason dependency", "dependency"),
    JobField("-f feature", "FEATURES", "constraint", json="features"),
    JobField("-F arrayjobid", "ARRAY_JOB_ID", lambda job: job.row["id"].partition("_")[0], "id"),
    JobField("-g groupname", "GROUP", lambda job: job.group[1], "uid", "group_name", none="nobody"),
    JobField("-G groupid", "GROUP", _group_number, "uid", "group_id", NUMBER),
    JobField(
        "-h oversubscribe shared", "OVER_SUBSCRIBE", lambda job: "NO" if job.row["exclusive"] else "OK", "exclusive"
    ),
    JobField("-H sockets", "SOCKETS_PER_NODE", lambda job: "*"),
    JobField("-i jobarrayid", "JOBID", lambda job: job.shown_id, _ID),
    JobField("-I cores", "CORES_PER_SOCKET", lambda job: "*"),
    JobField("-j name", "NAME", "name", json="name", none=""),
    JobField("-J threads", "THREADS_PER_CORE", lambda job: "*"),
    JobField("-k comment", "COMMENT", "comment", json="comment"),
    JobField(
        "-K arraytaskid",
        "ARRAY_TASK_ID",
        lambda job: job.tasks_left or job.row["id"].partition("_")[2],
        _ID,
        none="N/A",
    ),
    JobField("-l timelimit", "TIME_LIMIT", lambda job: job.limit_s, "time_limit_s", "time_limit", LIMIT, is_whole=True),
    JobField("-L timeleft", "TIME_LEFT", lambda job: job.left_s, f"{_RUN} time_limit_s", kind=LEFT, is_whole=True),
    JobField("-m minmemory", "MIN_MEMORY", lambda job: job.least_mib, "mem_mib mem_per_cpu_mib", kind=SIZE),
    JobField("-M timeused", "TIME", lambda job: job.run_time_s, _RUN, kind=LIMIT, is_whole=True),
    JobField("-n reqnodes", "REQ_NODES", _hosts("nodelist"), "nodelist", "required_nodes", none=""),
    JobField("-N nodelist", "NODELIST", lambda job: job.nodes, "state node", "nodes", none="", is_whole=True),
    JobField("-o command", "COMMAND", lambda job: job.command, "command script_path", "command"),
    JobField("-O contiguous", "CONTIGUOUS", lambda job: False, "", "contiguous", FLAG),
    JobField("-p priority", "PRIORITY", lambda job: f"{job.priority / _FULL_PRIORITY:.14f}", "priority hold"),
    JobField("-P partition", "PARTITION", "queue", json="partition", none=""),
    JobField("-q qos", "QOS", lambda job: job.qos, "qos", "qos"),
    JobField("-Q prioritylong", "PRIORITY", lambda job: job.priority, "priority hold", "priority", NUMBER),
    JobField("-r reason", "REASON", lambda job: job.reason, "state reason", "state_reason"),
    JobField("-R reasonlist", "NODELIST(REASON)", _reason_or_nodes, "state node reason", none="", is_whole=True),
    JobField("-s", "SELECT_JOBINFO", lambda job: "", none=""),
    JobField("-S starttime", "START_TIME", lambda job: job.start_at, _START, "start_time", INSTANT),
    JobField("-t statecompact", "ST", "state", kind=STATE),
    JobField("-T state", "STATE", "state", json="job_state"),
    JobField("-u username", "USER", "user", json="user_name", none=""),
    JobField("-U userid", "UID", "uid", json="user_id", kind=NUMBER),
    JobField("-v reservation", "RESERVATION", "reservation", json="resv_name"),
    JobField("-V submittime", "SUBMIT_TIME", "submit_at", json="submit_time", kind=INSTANT),
    JobField("-w wckey", "WCKEY", "wckey", json="wckey"),
    JobField("-W licenses", "LICENSES", lambda job: job.licenses, "licenses", "licenses"),
    JobField("-x excnodes exc-nodes", "EXC_NODES", _hosts("exclude"), "exclude", "excluded_nodes", none=""),
    JobField("-X corespec", "CORE_SPEC", lambda job: "N/A"),
    JobField("-y nice", "NICE", "nice", kind=NUMBER),
    JobField(
        "-Y schednodes",
        "SCHEDNODES",
        lambda job: ",".join(job.expected.get("nodes") or ()),
        is_whole=True,
    ),
    JobField("-z sct", "S:C:T", lambda job: "*:*:*"),
    JobField("-Z workdir", "WORK_DIR", "work_dir", json="current_working_directory"),
    # without a letter
    JobField("accruetime", "ACCRUE_TIME", "eligible_at", json="accrue_time", kind=INSTANT),
    JobField("admin_comment", "ADMIN_COMMENT", lambda job: job.admin_comment, "native_id", "admin_comment"),
    JobField("allocnodes", "ALLOC_NODES", lambda job: os.uname().nodename.partition(".")[0]),
    JobField("batchflag", "BATCH_FLAG", "is_batch", json="batch_flag", kind=FLAG),
    JobField(
        "cpus-per-task cpuspertask",
        "CPUS_PER_TASK",
        lambda job: job.cpus_per_task,
        "cpus_per_task cpus ntasks nodes",
        kind=NUMBER,
    ),
    JobField("cpus-per-tres", "CPUS_PER_TRES", _per("", "cpus_per_gpu"), "cpus_per_gpu", "cpus_per_tres", none="N/A"),
    JobField("deadline", "DEADLINE", "deadline_at", json="deadline", kind=INSTANT),
    JobField("derivedec", "DERIVED_EC", _wait_status, _EXIT, "derived_exit_code", NUMBER, text=_exit),
    JobField("eligibletime", "ELIGIBLE_TIME", "eligible_at", json="eligible_time", kind=INSTANT),
    JobField("exit_code", "EXIT_CODE", _wait_status, _EXIT, "exit_code", NUMBER, text=_exit),
    JobField("lastschedeval", "LAST_SCHED_EVAL", "start_at", json="last_sched_evaluation", kind=INSTANT),
    JobField("maxcpus", "MAX_CPUS", lambda job: job.total_cpus, _SIZE, kind=NUMBER),
    JobField(
        "maxnodes", "MAX_NODES", lambda job: job.row["nodes_max"] or job.row["nodes"], "nodes nodes_max", kind=NUMBER
    ),
    JobField("mem-per-tres", "MEM_PER_TRES", _per("M", "mem_per_gpu_mib"), "mem_per_gpu_mib", none="N/A"),
    JobField("ntpernode", "NTASKS_PER_NODE", "ntasks_per_node", json="tasks_per_node", kind=COUNT),
    JobField("numtasks", "TASKS", lambda job: job.row["num_tasks"] or 1, "num_tasks", "tasks", NUMBER),
    JobField("pendingtime", "PENDING_TIME", lambda job: int(job.waited_s), "state start_at submit_at", kind=NUMBER),
    JobField("preempttime", "PREEMPT_TIME", "preempt_at", json="preempt_time", kind=INSTANT),
    JobField("prefer", "PREFER", "prefer", json="prefer"),
    JobField("requeue", "REQUEUE", lambda job: job.row["requeue"] is not False, "requeue", "requeue", FLAG),
    JobField("restartcnt", "RESTART_COUNT", lambda job: job.restarts, "run state reason", "restart_cnt", NUMBER),
    JobField(
        "stderr",
        "STDERR",
        lambda job: job.row["stderr_path"] or job.row["stdout_path"],
        "stderr_path stdout_path",
        "standard_error",
    ),
    JobField("stdin", "STDIN", lambda job: job.row["stdin_path"] or "/dev/null", "stdin_path", "standard_input"),
    JobField("stdout", "STDOUT", "stdout_path", json="standard_output"),
    JobField("tres-alloc tres", "TRES_ALLOC", lambda job: job.tres, _TRES, "tres_req_str"),
    JobField("tres-per-task", "TRES_PER_TASK", _per("", "gpus_per_task"), "gpus_per_task", "tres_per_task", none="N/A"),
)
"""Everything that is told of a job."""
PERCENT: dict[str, PrintField] = {field.letter: field.printed for field in FIELDS if field.letter}
"""The letters of `-o`."""
ALL = "|".join(f"%{letter}" for letter in (*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
"""The format that `%all` means."""

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


def long_fields(cluster: str) -> dict[str, PrintField]:
    """The names of `-O`. Args: cluster: the name of this cluster."""

    def unset(title: str, value: str) -> PrintField:
        return PrintField(title, lambda job: value)

    found = {name: field.printed for field in FIELDS for name in field.names}
    found.update((name, unset(title, value)) for name, title, value in map(str.split, _UNSET))
    found["cluster"] = unset("CLUSTER", cluster)
    return found


_ORDERED = frozenset("aBCDegGjlLmMNpPQStTuUvV")
ORDERS: dict[str, tuple[str, Callable[[SlurmJob], Any]]] = {
    field.letter: (field.printed.keys, field.rank) for field in FIELDS if field.letter in _ORDERED
}
"""Letters of `-S`: the keys that each reads, and what it compares."""
ORDERS["i"] = ("id", lambda job: job.order_of_id)
NO_ORDER = frozenset("cdfhHIJnOz")
"""Letters that `-S` accepts and that change nothing here."""
