"""`scontrol update`, `create` and `delete`: change jobs, nodes and the state of partitions, make reservations."""

from __future__ import annotations

import sys
import time

from gpusched.addons.slurm.command import CommandError
from gpusched.addons.slurm.scontrol import slurm_sentence, state_of
from gpusched.addons.slurm.submission import SENTENCES
from gpusched.addons.slurm.values import DENIED, INVALID_ID, is_job_id, job_words, parse_limit_s
from gpusched.cli.query import quote
from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused, UserError
from gpusched.instants import parse_instant
from gpusched.model.hostlist import expand
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.addons.slurm.scontrol import ControlLine

    Pairs = list[tuple[str, str]]

_NONE = ("", "(null)", "none", "n/a")


def pairs_of(texts: list[str]) -> Pairs:
    """The keys and values of `K=V`, or of a key with its value behind it. Raises: CommandError."""
    found: Pairs = []
    left = list(texts)
    while left:
        text = left.pop(0)
        key, sign, value = text.partition("=")
        if not sign:
            if not left:
                raise CommandError(f"Invalid input: {printable(text)}\nRequest aborted")
            value = left.pop(0)
        found.append((key, value))
    return found


def update(line: ControlLine, texts: list[str]) -> int:
    """`update KEY=NAME K=V ...`; returns the exit code."""
    pairs = pairs_of(texts)
    keys = [key.lower() for key, _ in pairs]
    if any(_is_job_key(key) for key in keys):
        return _update_jobs(line, pairs)
    if any(key in ("nodename", "node") for key in keys):
        return _update_nodes(line, pairs)
    if any(key in _PARTITION_KEYS for key in keys) and "state" in keys:
        return _update_partition(line, pairs)
    known = next((key for key in keys if key in _NOT_UPDATED), None)
    if known is not None:
        raise CommandError(f"scontrol: error: update of {known} is not supported; use: {_NOT_UPDATED[known]}")
    raise CommandError('No valid entity in update command\nInput line must include one of "NodeName" or "JobId"')


_CONFIG = "edit the config file, then run: scontrol reconfigure"
_QUEUES = {
    "update": "gctl queue modify NAME KEY=VALUE",
    "create": "gctl queue add NAME",
    "delete": "gctl queue remove NAME",
}
"""What changes the other settings of a partition, by the verb of scontrol."""
_NOT_UPDATED = {
    "partitionname": _QUEUES["update"],
    "partition": _QUEUES["update"],
    "reservationname": "scontrol delete, then scontrol create",
    "reservation": "scontrol delete, then scontrol create",
    "frontendname": "NodeName",
    "powercap": _CONFIG,
    "slurmctlddebug": _CONFIG,
    "stepid": "scontrol update JobId=N TimeLimit=T",
}


_NAMED_WRONG = {
    about: SENTENCES[about] for about in ("queue", "qos", "account", "license", "node", "constraint", "reservation")
}
"""Slurm's sentences on names that do not exist, by what a refusal is about."""


def _is_job_key(key: str) -> bool:
    return key in ("job", "jobid", "jobids")


# --- jobs -----------------------------------------------------------------------------------------


def _update_jobs(line: ControlLine, pairs: Pairs) -> int:
    words = [word for key, value in pairs if _is_job_key(key.lower()) for word in job_words([value])]
    wanted = [(key, value) for key, value in pairs if not _is_job_key(key.lower())]
    if not wanted:
        raise CommandError("No changes specified")
    for key, value in wanted:
        if key.lower() not in JOB_KEYS and key.lower() != "priority":
            raise _unsupported(key, value)
    code = 0
    for word in words:
        why = _change(line, word, wanted)
        if why is not None:
            line.complain(f"{why} for job {word}")
            code = 1
    return code


def _unsupported(key: str, value: str) -> CommandError:
    return CommandError(
        f"Update of this parameter is not supported: {printable(key)}={printable(value)}\nRequest aborted"
    )


def _change(line: ControlLine, word: str, wanted: Pairs) -> str | None:
    """Change one job; returns why it could not be done."""
    if not is_job_id(word):
        return INVALID_ID
    try:
        changes, acts = _changes(line, word, wanted)
        for act in acts:
            line.client.call("POST", f"/v1/jobs/{act}", {"ids": [word]})
        if changes:
            line.client.call("POST", "/v1/jobs/update", {"ids": [word], "changes": changes})
    except UserError as error:
        line.explain(error)
        return _why_not(line, word, error, wanted)
    return None


def _why_not(line: ControlLine, word: str, error: GpuschedError, wanted: Pairs) -> str:
    if isinstance(error, _Denied):
        return DENIED
    if isinstance(error, Refused) and state_of(line, word) in ("RUNNING", "SUSPENDED"):
        # Of what may change while a job runs, only a longer limit takes more rights than the owner has.
        keys = {key.lower() for key, _ in wanted}
        if keys == {"timelimit"}:
            return DENIED
        return "Job is no longer pending execution" if not keys & {"timelimit"} else error.message
    if isinstance(error, (NotFound, Forbidden, Refused)):
        return slurm_sentence(line, word, error, "update") or _NAMED_WRONG.get(error.about) or error.message
    return error.message


class _Denied(Refused):
    """Slurm says no more of it; why is said with --verbose."""


def _changes(line: ControlLine, word: str, wanted: Pairs) -> tuple[dict[str, Any], list[str]]:
    """The changes in the words of the API, and the acts that others amount to. Raises: CommandError, GpuschedError."""
    from gpusched.cli.job_options import UPDATES, read_change

    changes: dict[str, Any] = {}
    acts: list[str] = []
    for key, value in wanted:
        name = key.lower()
        if name == "priority":
            if value != "0":
                raise _Denied("priorities are computed", "change Nice instead")
            acts.append("hold")
            continue
        ours, reader = JOB_KEYS[name]
        if ours not in UPDATES:
            raise _unsupported(key, value)
        try:
            text = value if reader is None else reader(value, line, word)
            changes.update(read_change(ours, text))
        except ValueError as error:
            if line.is_verbose:
                line.complain(f"scontrol: {error}")
            raise CommandError(f"Invalid {key} value: {printable(value)}\nRequest aborted") from None
    return changes, acts


def _limit(text: str, line: ControlLine, word: str) -> str:
    """A time limit, also as `+10` or `-10`, in minutes or as a time, on top of the present one."""
    if text[:1] not in ("+", "-") or text == "-1":
        seconds = parse_limit_s(text)
        return "unlimited" if seconds is None else f"{seconds}s"
    more_s = parse_limit_s(text[1:])
    if more_s is None:
        raise ValueError(text)
    found = line.client.call("GET", f"/v1/jobs?fields=time_limit_s&ids={quote(word)}")["rows"]
    if not found or found[0][0] is None:
        raise ValueError("the job has no time limit to extend or reduce")
    return f"{max(60, int(found[0][0] + (more_s if text[0] == '+' else -more_s)))}s"


def _or_none(text: str, *_: object) -> str:
    return "" if text.lower() in _NONE else text


def _gpus(text: str, *_: object) -> str:
    """GPUs as `gres:gpu:a100:2` or `gpu=2`."""
    word = text.lower().removeprefix("gres:").removeprefix("gres/")
    kind, sign, rest = word.replace("=", ":").partition(":")
    if kind != "gpu":
        raise ValueError(f"{text!r} is not a number of GPUs")
    return rest if sign else "1"


def _yes(text: str, *_: object) -> str:
    return {"1": "yes", "0": "no"}.get(text, text.lower())


def _exclusive(text: str, *_: object) -> str:
    """OverSubscribe is the opposite of exclusive."""
    opposite = {"yes": "no", "ok": "no", "1": "no", "no": "yes", "exclusive": "yes", "0": "yes"}
    return opposite.get(text.lower(), text)


_WORDS: dict[str, tuple[str, Callable[..., str] | None]] = {
    "account": ("account", None),
    "begin": ("eligibletime,starttime", _or_none),
    "comment": ("comment", None),
    "constraint": ("features", _or_none),
    "cpus": ("cpuspertask,cpus/task,mincpusnode,numcpus,reqcores,reqcpus", None),
    "deadline": ("deadline", _or_none),
    "dependency": ("dependency", _or_none),
    "exclude": ("excnodelist", _or_none),
    "exclusive": ("oversubscribe,shared", _exclusive),
    "gpus": ("gres,tresspernode,trespernode", _gpus),
    "licenses": ("licenses", _or_none),
    "mem": ("minmemorynode", None),
    "name": ("jobname,name", None),
    "nice": ("nice", None),
    "nodelist": ("reqnodelist", _or_none),
    "nodes": ("numnodes,nodes,reqnodes", None),
    "ntasks": ("numtasks", None),
    "qos": ("qos,quality of service", _or_none),
    "queue": ("partition", None),
    "requeue": ("requeue", _yes),
    "reservation": ("reservationname", _or_none),
    "throttle": ("arraytaskthrottle", None),
    "time": ("timelimit", _limit),
    "wckey": ("wckey", None),
}
"""Words of `gctl update`, Slurm's keys for each in lower case, and what makes of a value one for `gctl update`."""
JOB_KEYS = {key: (word, reader) for word, (keys, reader) in _WORDS.items() for key in keys.split(",")}
"""Slurm's keys of a job; Priority is none of these."""


# --- nodes ----------------------------------------------------------------------------------------

_DRAINS = ("drain", "draining", "drained", "down", "fail", "failing", "future")
_UNDRAINS = ("resume", "undrain", "idle")
_NODE_KEYS = ("nodename", "node", "state", "reason", "comment")


def _update_nodes(line: ControlLine, pairs: Pairs) -> int:
    """`NodeName=LIST State=drain Reason=WHY`, `State=resume`."""
    for key, value in pairs:
        if key.lower() not in _NODE_KEYS:
            raise _unsupported(key, value)
    given = {key.lower(): value for key, value in pairs}
    state = given.get("state", "").lower()
    if not state:
        raise CommandError("scontrol: error: update of a node needs State=drain or State=resume")
    if state not in (*_DRAINS[:3], *_UNDRAINS):
        if state in _DRAINS or state in ("reboot", "power_up", "power_down", "noresp"):
            raise CommandError(f"scontrol: error: State={printable(given['state'])} is not supported; use State=drain")
        raise CommandError(
            f"Invalid node state specified: {printable(given['state'])}\nRequest aborted\n"
            "Valid states are: DRAIN RESUME UNDRAIN"
        )
    is_drain = state in _DRAINS
    reason = given.get("reason", "")
    if is_drain and not reason:
        raise CommandError("You must specify a reason when DOWNING or DRAINING a node. ControlLine denied")
    try:
        names = expand(given.get("nodename") or given.get("node") or "")
    except ValueError:
        raise CommandError("slurm_update error: Invalid node name specified") from None
    if "all" in (name.lower() for name in names):
        names = [node["name"] for node in line.client.call("GET", "/v1/cluster")["nodes"]]
    known = {node["name"] for node in line.client.call("GET", "/v1/cluster")["nodes"]}
    try:
        if not known.issuperset(names):
            raise NotFound("no such node")
        if is_drain:
            line.client.call("POST", "/v1/drain", {"targets": names, "message": reason})
        else:
            line.client.call("POST", "/v1/undrain", {"targets": names})
    except (Forbidden, NotFound) as error:
        why = "Invalid user id" if isinstance(error, Forbidden) else "Invalid node name specified"
        line.complain(f"slurm_update error: {why}")
        line.explain(error)
        return 1
    return 0


# --- partitions -----------------------------------------------------------------------------------

_PARTITION_KEYS = ("partitionname", "partition")


def _update_partition(line: ControlLine, pairs: Pairs) -> int:
    """`PartitionName=NAME State=DOWN` pauses a queue, `State=UP` resumes it; gctl changes the rest."""
    for key, value in pairs:
        if key.lower() not in (*_PARTITION_KEYS, "state"):
            raise _unsupported(key, value)
    given = {key.lower(): value for key, value in pairs}
    verb = {"down": "pause", "up": "resume"}.get(given["state"].lower())
    if verb is None:
        raise CommandError(
            f"scontrol: error: State={printable(given['state'])} is not supported; use State=DOWN or State=UP"
        )
    name = given.get("partitionname") or given.get("partition") or ""
    try:
        line.client.call("POST", f"/v1/queues/{verb}", {"queue": name, "what": f"scontrol update {name}"})
    except UserError as error:
        why = error.message
        if isinstance(error, (Forbidden, NotFound)):
            why = "Invalid user id" if isinstance(error, Forbidden) else "Invalid partition name specified"
        line.complain(f"slurm_update error: {why}")
        line.explain(error)
        return 1
    return 0


# --- reservations ---------------------------------------------------------------------------------

_RESERVATION_KEYS = (
    *("reservation", "reservationname", "starttime", "endtime", "duration", "users", "user", "accounts", "account"),
    *("nodes", "nodecnt", "corecnt", "tres", "flags", "comment", "partitionname", "partition"),
)


def create(line: ControlLine, texts: list[str]) -> int:
    """`create reservation K=V ...`; returns the exit code."""
    kind = texts[0].lower().partition("=")[0]
    if kind in ("reservation", "reservationname", "res") or "reservation".startswith(kind):
        pairs = pairs_of(texts[1:] if "=" not in texts[0] else texts)
        return _reserve(line, pairs)
    if kind in ("partition", "partitionname", "node", "nodename"):
        raise CommandError(f"scontrol: error: create of {printable(texts[0])} is not supported; {_way('create', kind)}")
    raise CommandError(
        'No valid entity in create command\nInput line must include "Reservation", "Partition" or "NodeName"'
    )


def _way(verb: str, kind: str) -> str:
    return f"use: {_QUEUES[verb]}" if kind.startswith("partition") else _CONFIG


def _reserve(line: ControlLine, pairs: Pairs) -> int:
    given: dict[str, str] = {}
    for key, value in pairs:
        if key.lower() not in _RESERVATION_KEYS:
            raise _unsupported(key, value)
        given[key.lower()] = value
    name = given.get("reservationname") or given.get("reservation")
    start_at = _when(given.get("starttime", ""))
    end_at = _when(given["endtime"]) if "endtime" in given else None
    duration_s = _duration(given.get("duration", "")) if end_at is None else int(end_at - start_at)
    asked: dict[str, Any] = {"start_at": start_at, "duration_s": duration_s}
    users = [word for word in (given.get("users") or given.get("user") or "").split(",") if word]
    accounts = [word for word in (given.get("accounts") or given.get("account") or "").split(",") if word]
    flags = [word for word in given.get("flags", "").lower().split(",") if word]
    for flag in flags:
        if flag not in _FLAGS:
            raise CommandError(f"Invalid flag {printable(flag)}\nError creating the reservation: Invalid flags")
    if "maint" in flags:
        asked["is_maintenance"] = True
    elif not (users or accounts):
        raise CommandError("Either Users/Groups and/or Accounts must be specified. No reservation created.")
    else:
        asked.update(users=users, accounts=accounts)
    nodes = _reserved_nodes(line, given)
    asked.update(_held(given, len(nodes or ()), is_maintenance="maint" in flags))
    if nodes is not None:
        asked["nodelist"] = nodes
    if "ignore_jobs" in flags:
        asked["ignore_jobs"] = True
    for flag, every_s in (("hourly", 3600), ("daily", 86400), ("weekly", 604800)):
        if flag in flags:
            asked["every_s"] = every_s
    if given.get("comment"):
        asked["message"] = given["comment"]
    if not name:
        name = _free_name(line, (users or accounts or ["maint"])[0])
    try:
        made = line.client.call("POST", "/v1/reservations", {"name": name, **asked})["reservation"]
    except UserError as error:
        why = "Invalid user id" if isinstance(error, Forbidden) else error.message
        line.complain(f"Error creating the reservation: {why}")
        line.explain(error)
        return 1
    sys.stdout.write(f"Reservation created: {printable(made['name'])}\n")
    return 0


_FLAGS = ("maint", "ignore_jobs", "hourly", "daily", "weekly", "spec_nodes")


def _reserved_nodes(line: ControlLine, given: dict[str, str]) -> list[str] | None:
    """The nodes of Nodes, or all if NodeCnt is their number; None for what suits. Raises: CommandError."""
    text, number = given.get("nodes", ""), given.get("nodecnt", "")
    if not (text or number):
        return None
    known = [node["name"] for node in line.client.call("GET", "/v1/cluster")["nodes"]]
    if text.lower() == "all" or (not text and number == str(len(known))):
        return known
    if not text:
        return None
    try:
        names = list(dict.fromkeys(expand(text)))
    except ValueError:
        names = [text]
    if not set(known).issuperset(names):
        raise CommandError("Error creating the reservation: Invalid node name specified")
    return names


def _held(given: dict[str, str], nodes: int, *, is_maintenance: bool) -> dict[str, Any]:
    """What is kept free on each node: GPUs of TRES, cores of CoreCnt, else all of it.

    Args: nodes: how many are named; TRES and CoreCnt are of all of them. Raises: CommandError.
    """
    kept: dict[str, Any] = {}
    for word in given.get("tres", "").split(","):
        kind, _, count = word.partition("=")
        if not word:
            continue
        if not count.isdigit() or kind.lower() not in ("gres/gpu", "cpu"):
            raise CommandError(f"Invalid TRES specification: {printable(word)}")
        kept["gpus" if kind.lower() == "gres/gpu" else "cpus"] = int(count)
    if given.get("corecnt", "").isdigit():
        kept["cpus"] = int(given["corecnt"])
    for word, number in kept.items():
        if number % max(1, nodes):
            text = f"{word}={number} cannot be spread evenly over {nodes} nodes"
            raise CommandError(f"Error creating the reservation: {text}; make one for each node")
    kept = {word: number // max(1, nodes) for word, number in kept.items()}
    return kept or ({} if is_maintenance else {"is_node": True})


def _when(text: str) -> float:
    try:
        return parse_instant(text or "now", time.time())
    except ValueError:
        raise CommandError(f"Invalid start time {printable(text)}. No reservation created.") from None


def _duration(text: str) -> int:
    try:
        found = parse_limit_s(text) if text else None
    except ValueError:
        found = None
    if found is None:
        # Our reservations end.
        raise CommandError("An end time or duration must be specified. No reservation created.")
    return found


def _free_name(line: ControlLine, owner: str) -> str:
    """The first of `alice_1`, `alice_2`, ... that no reservation has."""
    taken = {one["name"] for one in line.client.call("GET", "/v1/reservations")["reservations"]}
    number = 1
    while f"{owner}_{number}" in taken:
        number += 1
    return f"{owner}_{number}"


def delete(line: ControlLine, texts: list[str]) -> int:
    """`delete ReservationName=NAME`; returns the exit code."""
    (key, name), *others = pairs_of(texts)
    kind = key.lower()
    if others or not name:
        raise CommandError("Invalid delete command: only one entity")
    if kind in ("partition", "partitionname", "node", "nodename"):
        raise CommandError(f"scontrol: error: delete of {printable(key)} is not supported; {_way('delete', kind)}")
    if kind not in ("reservation", "reservationname"):
        raise CommandError(f"Invalid reservation entity: {printable(key)}={printable(name)}")
    try:
        line.client.call("POST", "/v1/unreserve", {"names": name.split(",")})
    except UserError as error:
        is_known = not isinstance(error, NotFound)
        why = (
            "Invalid user id"
            if isinstance(error, Forbidden)
            else error.message
            if is_known
            else "Requested reservation is invalid"
        )
        line.complain(f"slurm_delete_reservation error: {why}")
        line.explain(error)
        return 1
    return 0
