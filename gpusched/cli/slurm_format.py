"""Slurm's `-o` language: `%i`, `%.8j` (right-aligned, cut at 8), `%8j`; other text is printed unchanged."""

from __future__ import annotations

import time

from gpusched.cli import tables
from gpusched.cli.query import COMPACT, elapsed
from gpusched.cli.tables import Column
from gpusched.errors import UsageError
from gpusched.model.units import format_amount, format_duration, format_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Job = dict[str, Any]


def _instant(at: float | None) -> str:
    return "N/A" if at is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def _left(job: Job) -> str:
    if job["time_limit_s"] is None:
        return "UNLIMITED"
    if job["state"] not in ("RUNNING", "SUSPENDED"):
        return format_duration(job["time_limit_s"])
    used_s = (job["suspended_at"] or time.time()) - job["start_at"] - job["suspended_s"]
    return format_duration(max(0.0, job["time_limit_s"] - used_s))


def _gpus(job: Job) -> str:
    asked = job["gpu_request"]
    if asked == "0":
        return "N/A"
    if job["nodes"] > 1:
        # The request covers all nodes together; this field is per node.
        kind, colon, count = asked.rpartition(":")
        count = count.partition("x")[2] or f"{job['gpus_per_node']}{count[count.index('(') :] if '(' in count else ''}"
        asked = kind + colon + count
    return f"gres:gpu:{asked}"


def _licenses(job: Job) -> str:
    return ",".join(f"{name}:{number}" for name, number in job["licenses"].items()) or "(null)"


def _reason_or_nodes(job: Job) -> str:
    if job["state"] in ("RUNNING", "COMPLETING"):
        return job["node"] or ""
    return f"({job['reason'] or 'None'})"


_FIELDS: dict[str, Column] = {
    "i": Column("JOBID", lambda job: job["id"], keys="id"),
    "A": Column("JOBID", lambda job: job["id"], keys="id"),
    "F": Column("ARRAY_JOB_ID", lambda job: job["id"], keys="id"),
    "K": Column("ARRAY_TASK_ID", lambda job: "N/A", keys="id"),
    "j": Column("NAME", lambda job: job["name"], keys="name"),
    "u": Column("USER", lambda job: job["user"], keys="user"),
    "a": Column("ACCOUNT", lambda job: job["account"] or "(null)", keys="account"),
    "P": Column("PARTITION", lambda job: job["queue"], keys="queue"),
    "t": Column("ST", lambda job: COMPACT.get(job["state"], job["state"]), keys="state"),
    "T": Column("STATE", lambda job: job["state"], keys="state"),
    "r": Column("REASON", lambda job: job["reason"] or "None", keys="reason"),
    "R": Column("NODELIST(REASON)", _reason_or_nodes, keys="state node reason"),
    "M": Column("TIME", lambda job: elapsed(job, time.time()), keys="state start_at end_at suspended_at suspended_s"),
    "l": Column("TIME_LIMIT", lambda job: format_duration(job["time_limit_s"]), keys="time_limit_s"),
    "L": Column("TIME_LEFT", _left, keys="state start_at time_limit_s suspended_at suspended_s"),
    "q": Column("QOS", lambda job: job["qos"] or "(null)", keys="qos"),
    "f": Column("FEATURES", lambda job: job["constraint"] or "(null)", keys="constraint"),
    "v": Column("RESERVATION", lambda job: job["reservation"] or "(null)", keys="reservation"),
    "W": Column("LICENSES", _licenses, keys="licenses"),
    "n": Column("REQ_NODES", lambda job: ",".join(job["nodelist"]), keys="nodelist"),
    "x": Column("EXC_NODES", lambda job: ",".join(job["exclude"]), keys="exclude"),
    "h": Column("OVER_SUBSCRIBE", lambda job: "NO" if job["exclusive"] else "OK", keys="exclusive"),
    "D": Column("NODES", lambda job: job["nodes"], keys="nodes"),
    "C": Column("CPUS", lambda job: format_amount(job["cpus"]), keys="cpus"),
    "m": Column("MIN_MEMORY", lambda job: format_size_mib(job["mem_mib"]) if job["mem_mib"] else "0", keys="mem_mib"),
    "b": Column("TRES_PER_NODE", _gpus, keys="gpu_request nodes gpus_per_node"),
    "N": Column("NODELIST", lambda job: job["node"] or "", keys="node"),
    "B": Column("EXEC_HOST", lambda job: job["node"] or "n/a", keys="node"),
    "S": Column("START_TIME", lambda job: _instant(job["start_at"]), keys="start_at"),
    "V": Column("SUBMIT_TIME", lambda job: _instant(job["submit_at"]), keys="submit_at"),
    "e": Column("END_TIME", lambda job: _instant(job["end_at"]), keys="end_at"),
    "Z": Column("WORK_DIR", lambda job: job["work_dir"], keys="work_dir"),
    "E": Column("DEPENDENCY", lambda job: job["dependency"] or "(null)", keys="dependency"),
    "Q": Column("PRIORITY", lambda job: f"{job['priority'] or 0:.0f}", keys="priority"),
    "p": Column("PRIORITY", lambda job: f"{job['priority'] or 0:.6f}", keys="priority"),
    "y": Column("NICE", lambda job: job["nice"], keys="nice"),
    "o": Column("COMMAND", lambda job: job["command"], keys="command"),
}


def keys(form: str) -> list[str]:
    """Keys of the JSON that the fields of a format read, without duplicates."""
    letters = [piece[2] for piece in _split(form) if piece[2]]
    return list(dict.fromkeys(key for letter in letters for key in _FIELDS[letter].keys.split()))


def render(form: str, jobs: list[Job], header: bool = True) -> str:
    """One line per job, after a line of titles."""
    pieces = _split(form)
    lines = []
    if header:
        lines.append("".join(_shape(piece, _FIELDS[piece[2]].title if piece[2] else piece[3]) for piece in pieces))
    lines.extend("".join(_shape(piece, _value(piece, job)) for piece in pieces) for job in jobs)
    return "".join(f"{line}\n" for line in lines)


def _value(piece: _Piece, job: Job) -> str:
    _, _, letter, literal = piece
    return printable(str(_FIELDS[letter].cell(job))) if letter else literal


_Piece = tuple[int, bool, str, str]
"""Width (0: none), right-aligned or not, letter (empty for text), text."""


def _split(form: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    at = 0
    while at < len(form):
        if form[at] == "%":
            end = at + 1
            is_right = form[end : end + 1] == "."
            end += is_right
            digits = end
            while form[end : end + 1].isascii() and form[end : end + 1].isdigit():
                end += 1
            letter = form[end : end + 1]
            if letter in _FIELDS and letter:
                width = int(form[digits:end][:5] or 0)
                pieces.append((width, is_right, letter, ""))
                at = end + 1
                continue
            if letter.isascii() and letter.isalpha():
                known = " ".join(f"%{one}" for one in sorted(_FIELDS, key=str.lower))
                raise UsageError(f"--format: unknown field {form[at : end + 1]!r}", f"fields: {known}")
        pieces.append((0, False, "", form[at]))
        at += 1
    return pieces


def _shape(piece: _Piece, text: str) -> str:
    width, is_right, _, _ = piece
    if not width:
        return text
    return tables.pad(tables.head(text, width), width, is_right)
