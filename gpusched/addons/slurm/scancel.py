"""scancel: end jobs or steps, or send them a signal."""

from __future__ import annotations

import os
import sys

from gpusched.addons.slurm.command import (
    Command,
    CommandError,
    cluster_suffix,
    comma_list,
    is_number,
    run,
    user_named,
    user_of,
)
from gpusched.addons.slurm.values import NORMAL_QOS, is_on, long_state
from gpusched.cli.output import LONGEST_ANSWER
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import Forbidden, NotFound, Refused, UsageError
from gpusched.model.units import printable, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.addons.slurm.command import Parsed
    from gpusched.client import DaemonConnection

    Json = dict[str, Any]

COMMAND = Command(
    "scancel",
    "scancel [options] [job_id[_task_id][.step_id] ...]",
    """
-A --account NAME  only jobs of this account
-b --batch  signal the batch shell only
--ctld  accepted: signals always go through the daemon
-c --cron  accepted: there are no cron jobs
-f --full  signal the batch shell and all steps
-H --hurry  accepted: there are no burst buffers
-i --interactive  ask before acting on each job
-M --clusters NAMES  the name of this cluster, or all
--cluster NAMES  same as --clusters
--me  only your own jobs
-n --name NAME  only jobs with this name
--jobname NAME  same as --name
-p --partition NAME  only jobs in this partition
-q --qos NAME  only jobs with this QOS
-Q --quiet  do not report errors about jobs
-R --reservation NAME  only jobs in this reservation
--sibling NAME  accepted: there is one cluster
-s --signal SIGNAL  send this signal, by name or number, instead of ending the job
-t --state STATE  only jobs in this state: PENDING, RUNNING or SUSPENDED
-u --user NAME  only jobs of this user
-v --verbose  report each action
-w --nodelist NODES  only jobs on these nodes
--wckey KEY  only jobs with this workload key
""",
    permutes=True,
)
DENIED, DENIED_CODE = "Access/permission denied", 210
UNKNOWN, UNKNOWN_CODE = "Invalid job id specified", 1
NOT_NOW, NOT_NOW_CODE = "Job can not be altered now, try again later", 228
DONE, DONE_CODE = "Job/step already completing or completed", 229
"""Errors of Slurm as it prints them, and its error numbers as exit codes."""
KILL = 9
_STATES = ("PENDING", "RUNNING", "SUSPENDED")
_KEYS = "id job_id array_id tasks_left state user account queue name qos reservation node wckey is_foreground".split()
_MOST_AT_ONCE = 5000
_FILTERS = (
    ("account", "SCANCEL_ACCOUNT"),
    ("name", "SCANCEL_NAME"),
    ("partition", "SCANCEL_PARTITION"),
    ("qos", "SCANCEL_QOS"),
    ("reservation", ""),
    ("state", "SCANCEL_STATE"),
    ("user", "SCANCEL_USER"),
    ("nodelist", ""),
    ("wckey", "SCANCEL_WCKEY"),
)


class CancelTarget:
    """A job, array, tasks or step as named: `42`, `42_7`, `42_[1-3]`, `42.0`."""

    def __init__(self, text: str) -> None:
        """Raises: CommandError."""
        self.job, dot, self.step = text.partition(".")
        number, underscore, task = self.job.partition("_")
        is_step = not dot or self.step in ("batch", "extern", "interactive") or is_number(self.step)
        if not (is_number(number) and int(number) > 0 and is_step and (not underscore or _is_tasks(task))):
            raise COMMAND.error(f"Invalid job id {printable(text, 60)}")
        if task == "*":
            self.job = number


class CancelOrder:
    """What to do with each job, from options and variables. Raises: CommandError."""

    def __init__(self, parsed: Parsed) -> None:
        self.signal = _signal_of(parsed.get("signal")) if parsed.has("signal") else None
        self.is_batch = parsed.has("batch") or _is_set("SCANCEL_BATCH")
        self.is_full = parsed.has("full") or _is_set("SCANCEL_FULL")
        self.is_interactive = parsed.has("interactive") or _is_set("SCANCEL_INTERACTIVE")
        self.is_verbose = parsed.has("verbose") or _is_set("SCANCEL_VERBOSE")
        self.is_quiet = parsed.has("quiet")
        self.filters = _filters_of(parsed)
        self.code = 0

    @property
    def ends_jobs(self) -> bool:
        """Whether jobs end, as by KILL, which ends them in their own time; -b sends it to the shell."""
        return self.signal in (None, KILL) and not self.is_batch

    @property
    def is_plain(self) -> bool:
        """Whether ids alone say what to end, which takes one request."""
        return self.ends_jobs and not (self.filters or self.is_interactive)

    def say(self, text: str) -> None:
        if self.is_verbose and not self.is_quiet:
            COMMAND.note(text)

    def say_job(self, shown_id: str) -> None:
        kind = "batch " if self.is_batch else "full " if self.is_full else ""
        if self.signal is None:
            self.say(f"Terminating {kind}job {shown_id}")
        else:
            self.say(f"Signal {self.signal} to {kind}job {shown_id}")

    def fail(self, what: str, text: str, code: int) -> None:
        """Report one error and continue. Of several the highest code counts."""
        if not self.is_quiet:
            COMMAND.note(f"error: Kill job error on {what}: {text}")
        self.code = max(self.code, code)


def main() -> int:
    return run(COMMAND, body)


def body(parsed: Parsed) -> int:
    order = CancelOrder(parsed)
    targets = [CancelTarget(text) for text in _texts_of(parsed.operands)]
    if not (targets or order.filters):
        raise COMMAND.error("No job identification provided")
    with connect() as client:
        clusters = parsed.get("clusters") or parsed.get("cluster") or os.environ.get("SLURM_CLUSTERS")
        cluster_suffix(COMMAND, client, clusters or None)
        jobs = list(dict.fromkeys(target.job for target in targets if not target.step))
        steps = [target for target in targets if target.step]
        if order.is_plain:
            for job in jobs:
                order.say_job(job)
            _end(jobs, order, client)
        elif jobs or not steps:
            _act_on(_selected(jobs, order, client), order, client)
        for target in steps:
            _act_on_step(target, order, client)
    return order.code


# --- jobs -------------------------------------------------------------------------------------------


def _end(ids: list[str], order: CancelOrder, client: DaemonConnection) -> None:
    """End jobs; those that have ended or do not exist matter only with -v."""
    for at in range(0, len(ids), _MOST_AT_ONCE):
        portion = ids[at : at + _MOST_AT_ONCE]
        try:
            answer = client.call("POST", "/v1/jobs/cancel", {"ids": portion})
            unknown = answer["missing"] if order.is_verbose else []
        except Forbidden:
            if len(portion) > 1:
                _end_each(portion, order, client)
            else:
                order.fail(f"job id {portion[0]}", DENIED, DENIED_CODE)
            continue
        except (NotFound, Refused, UsageError) as error:
            if len(portion) > 1:
                _end_each(portion, order, client)
                continue
            if not isinstance(error, NotFound):
                order.fail(f"job id {portion[0]}", printable(error.message), 1)
                continue
            unknown = portion if order.is_verbose else []
        for one in unknown:
            order.fail(f"job id {one}", UNKNOWN, 0)


def _end_each(ids: list[str], order: CancelOrder, client: DaemonConnection) -> None:
    """One by one: the daemon refuses a request as a whole for one job of another user."""
    for one in ids:
        _end([one], order, client)


def _selected(ids: list[str], order: CancelOrder, client: DaemonConnection) -> list[Json]:
    """The jobs that have not ended, are named and pass all filters; reports named ones that do not exist."""
    fields = ",".join(_KEYS)
    rows: list[list[Any]] = []
    if not ids:
        rows = client.call("GET", f"/v1/jobs?fields={fields}")["rows"]
    for one in ids:
        try:
            found = client.call("GET", f"/v1/jobs?fields={fields}&ids={quote(one)}")["rows"]
        except (NotFound, UsageError):
            found = []
        active = [row for row in found if row[_KEYS.index("state")] in (*_STATES, "COMPLETING")]
        if not active and not (found and order.signal == KILL):
            order.fail(f"job id {one}", UNKNOWN, UNKNOWN_CODE)
        rows += active
    jobs = {row[0]: dict(zip(_KEYS, row)) for row in rows}  # noqa: B905  3.10 can, but the keyword costs
    chosen = [job for job in jobs.values() if _passes(job, order, is_named=bool(ids))]
    spared = jobs.keys() - {job["id"] for job in chosen}
    divided = {one.partition("_")[0] for one in spared if "_" in one}
    for job in chosen:
        # An array ends as a whole unless some of its tasks are spared.
        is_divided = job["id"] in divided
        job["target"] = f"{job['id']}_[{job['tasks_left']}]" if job["tasks_left"] and is_divided else job["id"]
    return chosen


def _passes(job: Json, order: CancelOrder, *, is_named: bool) -> bool:
    filters = order.filters
    if job["array_id"] == job["id"] and not job["tasks_left"]:
        return False  # its tasks have rows of their own
    if filters and job["state"] not in _STATES:
        return False
    if not is_named and "user" not in filters and os.geteuid() != 0 and job["user"] != user_of(os.geteuid()):
        return False
    wanted = {
        "account": (job["account"] or "").lower(),
        "name": job["name"],
        "partition": job["queue"],
        "qos": (job["qos"] or NORMAL_QOS).lower(),
        "reservation": job["reservation"] or "",
        "state": job["state"],
        "user": job["user"],
        "wckey": job["wckey"] or "",
    }
    if any(filters[key] != value for key, value in wanted.items() if key in filters):
        return False
    return "nodelist" not in filters or (job["state"] != "PENDING" and is_on(job, comma_list([filters["nodelist"]])))


def _act_on(jobs: list[Json], order: CancelOrder, client: DaemonConnection) -> None:
    ending: list[str] = []
    for job in jobs:
        shown = f"{job['id']}_[{job['tasks_left']}]" if job["tasks_left"] else job["id"]
        if order.is_interactive and not _is_confirmed(shown, job):
            continue
        order.say_job(shown)
        if order.ends_jobs:
            ending.append(job["target"])
        else:
            _signal(job, order, client)
    named = set(ending)
    _end([one for one in ending if "_" not in one or one.partition("_")[0] not in named], order, client)


def _signal(job: Json, order: CancelOrder, client: DaemonConnection) -> None:
    """Signal the steps of a job, with -b its shell, with -f both."""
    to = "main" if order.is_batch else "full" if order.is_full else "steps"
    if job["is_foreground"] and to == "steps":
        to = "tree"  # srun's own job is one step
    if job["state"] == "PENDING":
        order.fail(f"job id {job['id']}", NOT_NOW, NOT_NOW_CODE)
        return
    _ask(
        client,
        "/v1/jobs/cancel",
        {"ids": [job["id"]], "signal": order.signal or KILL, "to": to},
        order,
        f"job id {job['id']}",
    )


def _ask(client: DaemonConnection, path: str, request: Json, order: CancelOrder, what: str) -> None:
    try:
        answer = client.call("POST", path, request)
    except Forbidden:
        order.fail(what, DENIED, DENIED_CODE)
    except NotFound:
        order.fail(what, UNKNOWN, UNKNOWN_CODE)
    except (Refused, UsageError):
        order.fail(what, NOT_NOW, NOT_NOW_CODE)
    else:
        if answer.get("ended") and order.signal not in (None, KILL):
            order.fail(what, DONE, DONE_CODE)


def _is_confirmed(shown_id: str, job: Json) -> bool:
    while True:
        name, queue = printable(job["name"]), printable(job["queue"])
        sys.stdout.write(f"Cancel job_id={shown_id} name={name} partition={queue} [y/n]? ")
        sys.stdout.flush()
        answer = sys.stdin.readline(LONGEST_ANSWER)
        if answer[:1] in ("y", "Y"):
            return True
        if answer[:1] in ("n", "N", ""):
            return False


# --- steps ------------------------------------------------------------------------------------------


def _act_on_step(target: CancelTarget, order: CancelOrder, client: DaemonConnection) -> None:
    what = f"job step id {target.job}.{target.step}"
    try:
        job = client.call("GET", f"/v1/jobs/{quote(target.job)}")["job"]
    except (NotFound, UsageError):
        order.fail(what, UNKNOWN, UNKNOWN_CODE)
        return
    if order.signal is None:
        order.say(f"Terminating step {target.job}.{target.step}")
    else:
        order.say(f"Signal {order.signal} to step {target.job}.{target.step}")
    if job["state"] == "PENDING":
        order.fail(what, NOT_NOW, NOT_NOW_CODE)
    elif job["state"] not in (*_STATES, "COMPLETING"):
        if order.signal not in (None, KILL):
            order.fail(what, DONE, DONE_CODE)
    elif target.step == "batch":
        request = {"ids": [job["id"]], "signal": order.signal or KILL, "to": "main"}
        _ask(client, "/v1/jobs/cancel", request, order, what)
    elif is_number(target.step):
        request = {"id": job["id"], "step": int(target.step), "signal": order.signal}
        if order.signal is None:
            del request["signal"]
        _ask(client, "/v1/steps/cancel", request, order, what)


# --- options and variables --------------------------------------------------------------------------


def _texts_of(operands: list[str]) -> list[str]:
    """The ids of all operands; an empty one is refused like any other text that is not an id."""
    return [word for operand in operands for word in split_ids(operand) or [operand]]


def _is_tasks(text: str) -> bool:
    """Whether a text is `7`, `*` or `[1-3,5,8-20:2]`."""
    if text == "*":
        return True
    if text[:1] != "[":
        return is_number(text) and len(text) <= 9
    if text[-1] != "]":
        return False
    words = text[1:-1].partition("%")[0].split(",")
    return all(
        parts and len(parts) <= 3 and all(is_number(part) and len(part) <= 9 for part in parts)
        for parts in (word.replace(":", "-").split("-") for word in words)
    )


def _signal_of(text: str) -> int:
    """Number of a signal by name, with or without SIG, or number. Raises: CommandError."""
    import signal  # rarely needed

    if is_number(text) and 1 <= int(text) <= 64:
        return int(text)
    name = text.upper().removeprefix("SIG")
    found = getattr(signal, f"SIG{name}", None) if name.isalnum() else None
    if not isinstance(found, signal.Signals):
        raise CommandError(f"Unknown job signal: {printable(text, 60)}")
    return int(found)


def _filters_of(parsed: Parsed) -> dict[str, str]:
    """The filters that are set. Raises: CommandError."""
    found: dict[str, str] = {}
    for key, variable in _FILTERS:
        also = "jobname" if key == "name" else key
        given = [value for name, value in parsed.options if name in (key, also) and value is not None]
        text = given[-1] if given else os.environ.get(variable) if variable else None
        if text is None:
            continue
        if key in ("account", "qos"):
            text = text.lower()
        elif key == "state":
            state = long_state(text)
            if state is None:
                said = "Invalid job state specified" if given else "Unrecognized SCANCEL_STATE value"
                raise CommandError(
                    f"{said}: {printable(text, 60)}\nValid job states are PENDING, RUNNING, and SUSPENDED"
                )
            text = state
        elif key == "user":
            text = _user_of(text)
        elif key == "nodelist":
            text = _nodes_of(text)
        found[key] = text
    if parsed.has("me"):
        found["user"] = user_of(os.geteuid())
    return found


def _user_of(text: str) -> str:
    try:
        return user_named(text)
    except KeyError:
        raise COMMAND.error(f"Invalid user name: {printable(text, 60)}") from None


def _nodes_of(text: str) -> str:
    from gpusched.model.hostlist import expand

    try:
        return ",".join(expand(text))
    except ValueError as error:
        raise COMMAND.error(f"--nodelist: {printable(str(error))}") from None


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "t")
