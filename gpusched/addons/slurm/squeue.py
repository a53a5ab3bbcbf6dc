"""squeue: jobs that wait or run, those that have just ended, and their steps."""

from __future__ import annotations

import os
import sys
import time

from gpusched.addons.slurm.command import (
    Command,
    CommandError,
    cluster_suffix,
    comma_list,
    is_number,
    portions,
    run,
    user_named,
)
from gpusched.addons.slurm.format import keys_of, long_pieces, percent_pieces, render
from gpusched.addons.slurm.job import SlurmJob, order_of_id, shared_rows
from gpusched.addons.slurm.job_fields import ALL, NO_ORDER, ORDERS, PERCENT, exact_memory, long_fields
from gpusched.addons.slurm.values import MIN_JOB_AGE_S, NORMAL_QOS, VALID_STATES, is_on, long_state, state_of_row
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import NotFound, UsageError
from gpusched.model.state_names import ACTIVE, COMPACT
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from gpusched.addons.slurm.command import Parsed
    from gpusched.addons.slurm.format import Piece, PrintField
    from gpusched.client import DaemonConnection

    Json = dict[str, Any]

COMMAND = Command(
    "squeue",
    "squeue [options]",
    """
-A --account NAMES  only jobs of these accounts
-U NAMES  same as -A
-a --all  jobs in all partitions (the default)
-r --array  one line per array task
-h --noheader  print no header
--hide  no effect: no partition is hidden
-i --iterate SECONDS  repeat at this interval
-j --jobs [IDS]  only these jobs: 42, 42_7
-l --long  more columns
-L --licenses NAMES  only jobs that request one of these licenses
-M --clusters NAMES  the name of this cluster, or all
--me  only your own jobs
-n --name NAMES  only jobs with these names
--noconvert  always print memory in M
-o --format FORMAT  columns: %i %j; %.18i is right-aligned and cut at 18 characters
-O --Format FIELDS  columns by name and width: jobid:10,name
-p --partition NAMES  only jobs in these partitions
-P --priority  no effect: a job has one partition
-q --qos NAMES  only jobs with one of these QOS
-R --reservation NAMES  only jobs in these reservations
-S --sort LETTERS  sort order, by letters of -o: P,t,-p
-s --steps [IDS]  the steps of running jobs: 42, 42.0
--start  expected start times of pending jobs
-t --states STATES  only jobs in these states, or all: PD,R
-u --user NAMES  only jobs of these users
-v --verbose  accepted
-w --nodelist NODES  only jobs on these nodes
--federation  accepted: there is one cluster
--local  accepted: there is one cluster
--sibling  accepted: there is one cluster
--json  print JSON
--yaml  print YAML
""",
    permutes=True,
)
DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
START = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %20Y %R"
ORDER = "P,t,-p"
"""Slurm's order: by partition, state and priority. Within one state the daemon's own order is the one of the starts."""
OURS = tuple(COMPACT)
"""The states that jobs have here; Slurm knows more."""
INVALID_ID = "slurm_load_jobs error: Invalid job id specified"
_ROW = ("id", "state", "reason", "array_id", "tasks_left", "throttle", "end_at", "queue")
"""Keys that selecting and ordering rows needs."""


class JobChoice:
    """Which jobs to show, from options and variables. Raises: CommandError."""

    def __init__(self, parsed: Parsed) -> None:
        self.ids = _ids_of(parsed)
        self.users = _users_of(parsed)
        self.states = _states_of(parsed)
        self.names = _list(parsed, ("name",), "SQUEUE_NAMES")
        self.queues = _list(parsed, ("partition",), "SQUEUE_PARTITION")
        self.accounts = _list(parsed, ("account", "U"), "SQUEUE_ACCOUNT")
        self.qos = _list(parsed, ("qos",), "SQUEUE_QOS")
        self.licenses = _list(parsed, ("licenses",), "SQUEUE_LICENSES")
        self.reservations = _list(parsed, ("reservation",), "")
        self.nodes = _nodes_of(parsed)

    @property
    def keys(self) -> list[str]:
        """JSON keys that `admits` reads."""
        by_key = {
            "account": self.accounts,
            "qos": self.qos,
            "licenses": self.licenses,
            "reservation": self.reservations,
            "node": self.nodes,
        }
        return [key for key, wanted in by_key.items() if wanted is not None]

    def queries(self, ids: Sequence[str] = ()) -> list[str]:
        """Queries of the daemon's list of jobs; none if no job can match.

        Jobs that have not ended are asked for apart from the others, since the daemon has them in memory.
        """
        active = [state for state in OURS if state in self.states and state in ACTIVE]
        ended = [state for state in OURS if state in self.states and state not in ACTIVE]
        if not (active or ended) or self.users == []:
            return []
        parts = {
            "ids": ",".join(ids),
            "users": ",".join(self.users or ()),
            "names": ",".join(self.names or ()),
            "queues": ",".join(self.queues or ()),
        }
        if "CANCELLED" in ended and "COMPLETING" not in active:
            # Tasks that were cancelled before their start, of an array whose others have not ended.
            active.append("COMPLETING")
        since = {"since": str(int(time.time()) - MIN_JOB_AGE_S)} if ended else {}
        if ids:
            # Without states the daemon also lists an ended one, which distinguishes it from an unknown one.
            found = [{**parts, "states": ",".join((*active, *ended)), **since} if ended else parts]
        else:
            found = [{**parts, "states": ",".join(active)}] if active else []
            found += [{**parts, "states": ",".join(ended), **since}] if ended else []
        return ["&".join(f"{key}={quote(value)}" for key, value in one.items() if value) for one in found]

    def admits(self, job: Json) -> bool:
        """Whether the filters that the daemon does not have let a job through."""
        return (
            (self.accounts is None or (job["account"] or "") in self.accounts)
            and (self.qos is None or (job["qos"] or NORMAL_QOS) in self.qos)
            and (self.reservations is None or (job["reservation"] or "") in self.reservations)
            and (self.licenses is None or any(name in job["licenses"] for name in self.licenses))
            and (self.nodes is None or (job["state"] != "PENDING" and is_on(job, self.nodes)))
        )


def main() -> int:
    return run(COMMAND, body)


def body(parsed: Parsed) -> int:
    _check_operands(parsed)
    if not parsed.has("steps"):
        _check_formats(parsed)
    selection = JobChoice(parsed)
    every_s = _iterate_s(parsed)
    with connect() as client:
        cluster_suffix(COMMAND, client, parsed.get("clusters") or os.environ.get("SLURM_CLUSTERS") or None)
        if selection.nodes is not None:
            _check_nodes(selection.nodes, client)
        while True:
            if not parsed.has("noheader") and (every_s or parsed.has("long") or parsed.has("verbose")):
                sys.stdout.write(f"{time.ctime()}\n")
            if parsed.has("clusters") and not parsed.has("noheader"):
                sys.stdout.write(f"CLUSTER: {_cluster_name(client)}\n")
            code = _print(parsed, selection, client)
            if not every_s:
                return code
            sys.stdout.write("\n")
            sys.stdout.flush()
            time.sleep(every_s)


def _print(parsed: Parsed, selection: JobChoice, client: DaemonConnection) -> int:
    if parsed.has("steps"):
        from gpusched.addons.slurm.squeue_steps import print_steps  # rarely used

        return print_steps(parsed, selection, client)
    if parsed.has("json") or parsed.has("yaml"):
        from gpusched.addons.slurm.squeue_json import KEYS, print_document  # rarely used

        rows = jobs_of(selection, client, KEYS, each_task=False, order="id")
        rows.sort(key=lambda row: order_of_id(row["id"]))
        print_document(rows, _cluster_name(client), is_yaml=parsed.has("yaml"))
        return 0
    pieces = pieces_of(parsed, client)
    order, is_usual = order_of(parsed)
    keys = [*keys_of(pieces), *(key for _, keys, _ in order for key in keys.split())]
    each_task = parsed.has("array") or "SQUEUE_ARRAY" in os.environ
    now = time.time()
    jobs = [SlurmJob(row, now) for row in jobs_of(selection, client, keys, each_task=each_task)]
    if parsed.has("start"):
        _add_starts(jobs, selection, client)
    if is_usual:
        # By priority they are sorted already, as far as one is eligible.
        jobs.sort(key=lambda job: (job["queue"], job["state"]))
    else:
        for letter, _, is_reversed in reversed(order):
            jobs.sort(key=ORDERS[letter][1], reverse=is_reversed)
    sys.stdout.write(render(pieces, jobs, header=not parsed.has("noheader")))
    return 0


# --- which jobs -------------------------------------------------------------------------------------


def jobs_of(
    selection: JobChoice, client: DaemonConnection, keys: Iterable[str], *, each_task: bool, order: str = "queue"
) -> list[Json]:
    """The selected jobs with these keys, in an order that the daemon knows, as rows of Slurm's.

    One row represents all tasks of an array that have not started, or with `each_task` for each one. Raises:
    CommandError for the only job that is named if there is none, or it ended too long ago.
    """
    # The number of a task follows from its place among all tasks of its array.
    fields = dict.fromkeys((*_ROW, *selection.keys, *keys, *(("array_tasks",) if each_task else ())))
    listed = f"/v1/jobs?order={order}&shared=1&fields={','.join(fields)}"
    found: list[Json] = []
    for ids in portions(selection.ids or ()) or [[]]:
        found += _ask(selection, ids, client, listed)
    if selection.ids is not None:
        found = list({job["id"]: job for job in found}.values())
        if len(selection.ids) == 1 and not found:
            _check_known(selection.ids[0], client)
    oldest_at = time.time() - MIN_JOB_AGE_S
    if selection.ids is not None and len(selection.ids) == 1 and _all_old(found, oldest_at):
        raise CommandError(INVALID_ID)
    rows = []
    for job in found:
        if job["array_id"] is not None and job["array_id"] == job["id"]:
            if not job["tasks_left"]:
                continue  # all of its tasks have rows of their own
            job["state"] = state_of_row(job)
        if job["state"] not in selection.states or (job["end_at"] is not None and job["end_at"] < oldest_at):
            continue
        if selection.admits(job):
            rows.append(job)
    arrays = {job["id"] for job in rows if job["tasks_left"] and job["state"] == "PENDING"}
    if each_task:
        return _expanded(rows) if any(job["tasks_left"] for job in rows) else rows
    if arrays and any(_array(job) in arrays and job["id"] not in arrays and job["state"] == "PENDING" for job in rows):
        return _merged(rows, client)
    return rows


def _ask(selection: JobChoice, ids: list[str], client: DaemonConnection, listed: str) -> list[Json]:
    """Args: listed: the question for all jobs."""
    found: list[Json] = []
    for query in selection.queries(ids):
        path = f"{listed}&{query}" if query else listed
        try:
            answer = client.call("GET", path)
        except (NotFound, UsageError):
            if not ids:
                raise
            # One of several may be unknown, which does not matter among them.
            return [job for one in ids for job in _ask(selection, [one], client, listed)] if len(ids) > 1 else []
        found += shared_rows(answer)
    return found


def _check_known(text: str, client: DaemonConnection) -> None:
    """Raises: CommandError if there is no such job, or if it ended so long ago that Slurm would have forgotten it."""
    number = text.partition("_")[0]
    try:
        rows = client.call("GET", f"/v1/jobs?fields=id,end_at&ids={number}")["rows"]
    except (NotFound, UsageError):
        raise CommandError(INVALID_ID) from None
    if _all_old([{"end_at": row[1]} for row in rows], time.time() - MIN_JOB_AGE_S):
        raise CommandError(INVALID_ID)


def _all_old(jobs: list[Json], oldest_at: float) -> bool:
    return bool(jobs) and all(job["end_at"] is not None and job["end_at"] < oldest_at for job in jobs)


def _array(job: Json) -> str:
    found: str = job["id"].partition("_")[0]
    return found


def _expanded(rows: list[Json]) -> list[Json]:
    """A row for each task that has not started; their own numbers follow that of the array."""
    from gpusched.model.tasks import parse_tasks  # rarely used

    found: list[Json] = []
    for job in rows:
        if not job["tasks_left"]:
            found.append(job)
            continue
        tasks = parse_tasks(job["array_tasks"])
        for task in parse_tasks(job["tasks_left"]):
            one = {**job, "id": f"{job['id']}_{task}", "task": task, "tasks_left": None}
            if "job_id" in job:
                one["job_id"] = job["job_id"] + 1 + tasks.position(task)
            found.append(one)
    return found


def _merged(rows: list[Json], client: DaemonConnection) -> list[Json]:
    """Tasks that wait again, after a requeue, in the row of their array; its reason names theirs as well."""
    from gpusched.model.tasks import TaskSet, parse_tasks  # rarely used

    reasons = {job["id"]: job.get("reason") for job in rows}
    if rows and "reason" not in rows[0]:
        asked = client.call("GET", f"/v1/jobs?fields=id,reason&states=PENDING&ids={','.join(map(_array, rows))}")
        reasons.update(dict(asked["rows"]))
    arrays = {job["id"]: job for job in rows if job["tasks_left"] and job["state"] == "PENDING"}
    taken: dict[str, list[int]] = {}
    found: list[Json] = []
    for job in rows:
        array = arrays.get(_array(job))
        if array is None or array is job or job["state"] != "PENDING" or job["queue"] != array["queue"]:
            found.append(job)
            continue
        taken.setdefault(array["id"], []).append(int(job["id"].partition("_")[2]))
        known, more = reasons.get(array["id"]), reasons.get(job["id"])
        if known and more and more not in known.split(","):
            reasons[array["id"]] = array["reason"] = f"{known},{more}"
    for array_id, numbers in taken.items():
        array = arrays[array_id]
        array["tasks_left"] = str(TaskSet.of((*parse_tasks(array["tasks_left"]), *numbers)))
    return found


def _add_starts(jobs: list[SlurmJob], selection: JobChoice, client: DaemonConnection) -> None:
    """Add when and where each waiting job is expected to start if those ahead of it run to their limits."""
    waiting = [job["id"] for job in jobs if job.is_pending]
    if not waiting:
        return
    found: dict[str, Json] = {}
    whole = f"users={quote(','.join(selection.users))}" if selection.users else ""
    paths = [f"ids={','.join(ids)}" for ids in portions(waiting)] if selection.ids is not None else [whole]
    for path in paths:
        found.update({row["id"]: row for row in client.call("GET", f"/v1/starts?{path}")["starts"]})
    for job in jobs:
        job.expected = found.get(job["id"]) or found.get(_array(job.row)) or {}


# --- what to print ----------------------------------------------------------------------------------


def pieces_of(parsed: Parsed, client: DaemonConnection | None = None) -> list[Piece]:
    """The parts of a line. Names fields that do not exist on stderr."""
    form, long_form = _formats(parsed)
    fields: dict[str, PrintField] = PERCENT
    if parsed.has("noconvert"):
        from gpusched.addons.slurm.format import PrintField as Field

        fields = {**PERCENT, "m": Field("MIN_MEMORY", exact_memory, PERCENT["m"].keys)}
    unknown: list[str] = []
    if long_form is not None:
        names = long_fields(_cluster_name(client) if client and "cluster" in long_form.lower() else "")
        names["minmemory"] = fields["m"]
        pieces, unknown = long_pieces(long_form, names)
    else:
        pieces = percent_pieces(ALL if form.lower() == "%all" else form, fields, unknown)
    for name in unknown:
        COMMAND.note(f"error: Invalid job format specification: {printable(name, 60)}")
    return pieces


def _formats(parsed: Parsed) -> tuple[str, str | None]:
    """The text of -o and that of -O, from options, variables or the defaults; the second counts if it is there."""
    if parsed.has("format"):
        return parsed.get("format"), None
    if parsed.has("Format"):
        return "", parsed.get("Format")
    if parsed.has("start"):
        return START, None
    if parsed.has("long"):
        return LONG, None
    if "SQUEUE_FORMAT" in os.environ:
        return os.environ["SQUEUE_FORMAT"], None
    return DEFAULT, os.environ.get("SQUEUE_FORMAT2")


def _check_formats(parsed: Parsed) -> None:
    if parsed.has("format") and parsed.has("Format"):
        raise COMMAND.error("-O (--Format) is incompatible with -o (--format)")
    if parsed.has("format") and parsed.has("long"):
        raise CommandError("squeue: fatal: -o (--format) and -l (--long) exclude each other")


def order_of(parsed: Parsed) -> tuple[list[tuple[str, str, bool]], bool]:
    """The letters of -S with the keys that each reads, and which are reversed; and whether it is Slurm's usual order.

    Raises: CommandError.
    """
    text = parsed.get("sort") or os.environ.get("SQUEUE_SORT") or ("S" if parsed.has("start") else ORDER)
    found: list[tuple[str, str, bool]] = []
    is_reversed = False
    for char in text.replace("cluster", ""):
        if char in ",+-":
            is_reversed = char == "-"
            continue
        if char in ORDERS:
            found.append((char, ORDERS[char][0], is_reversed))
        elif char not in NO_ORDER:
            raise COMMAND.error(f"Invalid sort specification: {printable(char)}")
        is_reversed = False
    is_usual = text == ORDER
    return ([("P", "queue", False), ("t", "state", False)] if is_usual else found), is_usual


# --- options and variables --------------------------------------------------------------------------


def _check_operands(parsed: Parsed) -> None:
    """An operand is the optional value of -j or -s. Raises: CommandError."""
    most = 1 if parsed.has("jobs") or parsed.has("steps") else 0
    if len(parsed.operands) > most:
        raise CommandError(
            f"squeue: error: Unrecognized option: {printable(parsed.operands[most], 60)}\nUsage: {COMMAND.usage}"
        )


def _list(parsed: Parsed, options: tuple[str, ...], variable: str) -> list[str] | None:
    """The words of the last option or of a variable; None without both."""
    given = [value or "" for name, value in parsed.options if name in options]
    if given:
        return comma_list([given[-1]])
    text = os.environ.get(variable) if variable else None
    return None if text is None else comma_list([text])


def _ids_of(parsed: Parsed) -> list[str] | None:
    """The texts of -j, also with -s; None for all jobs. Raises: CommandError."""
    if not parsed.has("jobs"):
        return None
    is_step = parsed.has("steps")
    text = parsed.operands[0] if parsed.operands and not is_step else parsed.get("jobs")
    if not text:
        return None
    words = comma_list([text])
    for word in words:
        if not is_id(word):
            raise COMMAND.error(f"Invalid job id: {printable(word, 60)}")
    return words


def is_id(word: str) -> bool:
    """Whether a word is `N` or `N_k`."""
    number, underscore, task = word.partition("_")
    return is_number(number) and int(number) > 0 and (not underscore or is_number(task))


def _users_of(parsed: Parsed) -> list[str] | None:
    """Names of users, unknown ones named on stderr; None for all."""
    words = _list(parsed, ("user",), "SQUEUE_USERS")
    given = [name for name, _ in parsed.options if name in ("user", "me")]
    if given and given[-1] == "me":
        words = [str(os.geteuid())]
    if words is None:
        return None
    found = []
    for word in words:
        try:
            found.append(user_named(word))
        except KeyError:
            sys.stderr.write(f"squeue: error: Invalid user: {printable(word, 60)}\n\n")
    return found


def _states_of(parsed: Parsed) -> frozenset[str]:
    """States to show; without an option those of jobs that have not ended. Raises: CommandError."""
    words = _list(parsed, ("states",), "SQUEUE_STATES")
    if words is None:
        return frozenset(("PENDING",)) if parsed.has("start") and not parsed.has("steps") else frozenset(ACTIVE)
    found: set[str] = set()
    for word in words:
        if word.lower() == "all":
            return frozenset(VALID_STATES)
        state = long_state(word)
        if state is None:
            raise CommandError(
                f"squeue: error: Invalid job state specified: {printable(word, 60)}\n"
                f"squeue: error: Valid job states include: {','.join(VALID_STATES)}\n"
            )
        found.add(state)
    return frozenset(found)


def _nodes_of(parsed: Parsed) -> list[str] | None:
    if not parsed.has("nodelist"):
        return None
    from gpusched.model.hostlist import expand

    try:
        return expand(parsed.get("nodelist"))
    except ValueError:
        text = printable(parsed.get("nodelist"), 60)
        raise COMMAND.error(f"'{text}' invalid entry for --nodelist") from None


def _check_nodes(nodes: list[str], client: DaemonConnection) -> None:
    """Replace `localhost` by the node's name. Raises: CommandError for a node that does not exist."""
    known = [node["name"] for node in client.call("GET", "/v1/cluster")["nodes"]]
    for at, name in enumerate(nodes):
        if name == "localhost":
            nodes[at] = known[0]
        elif name not in known:
            raise COMMAND.error(f"Invalid node name {printable(name, 60)}")


def _iterate_s(parsed: Parsed) -> int:
    if not parsed.has("iterate"):
        return 0
    text = parsed.get("iterate")
    if not (is_number(text) and int(text) > 0):
        raise COMMAND.error(f"--iterate={printable(text, 60)}")
    return min(int(text), 86400)


def _cluster_name(client: DaemonConnection) -> str:
    return str(client.call("GET", "/v1/cluster")["cluster_name"])
