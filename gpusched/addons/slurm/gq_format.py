"""`gq -o`: Slurm's language, `%i`, `%.8j` (right-aligned, cut at 8), `%8j`; other text is printed unchanged.

The fields are squeue's, except where gq shows more than Slurm has a word for: reasons, fractions, exact durations.
"""

from __future__ import annotations

import time

from gpusched.addons.slurm.format import PrintField
from gpusched.addons.slurm.job_fields import PERCENT
from gpusched.cli import tables
from gpusched.cli.query import elapsed
from gpusched.model.units import format_amount, format_duration, format_size_mib, is_digits, printable

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
    asked = job["gpu_request"].partition("|")[0]  # of several variants the most preferred
    if asked == "0":
        return "N/A"
    if job["nodes"] > 1:
        # The request covers all nodes together; this field is per node.
        kind, colon, count = asked.rpartition(":")
        count = count.partition("x")[2] or f"{job['gpus_per_node']}{count[count.index('(') :] if '(' in count else ''}"
        asked = kind + colon + count
    return f"gres:gpu:{asked}"


def _reason_or_nodes(job: Job) -> str:
    if job["state"] in ("RUNNING", "COMPLETING"):
        return job["node"] or ""
    return f"({job['reason'] or 'None'})"


_FIELDS: dict[str, PrintField] = {
    **PERCENT,
    "i": PrintField("JOBID", lambda job: job["id"], "id"),
    "A": PrintField("JOBID", lambda job: job["id"], "id"),
    "r": PrintField("REASON", lambda job: job["reason"] or "None", "reason"),
    "R": PrintField("NODELIST(REASON)", _reason_or_nodes, "state node reason"),
    "M": PrintField("TIME", lambda job: elapsed(job, time.time()), "state start_at end_at suspended_at suspended_s"),
    "l": PrintField("TIME_LIMIT", lambda job: format_duration(job["time_limit_s"]), "time_limit_s"),
    "L": PrintField("TIME_LEFT", _left, "state start_at time_limit_s suspended_at suspended_s"),
    "C": PrintField("CPUS", lambda job: format_amount(job["cpus"]), "cpus"),
    "m": PrintField("MIN_MEMORY", lambda job: format_size_mib(job["mem_mib"]) if job["mem_mib"] else "0", "mem_mib"),
    "b": PrintField("TRES_PER_NODE", _gpus, "gpu_request nodes gpus_per_node"),
    "S": PrintField("START_TIME", lambda job: _instant(job["start_at"]), "start_at"),
    "e": PrintField("END_TIME", lambda job: _instant(job["end_at"]), "end_at"),
    "E": PrintField("DEPENDENCY", lambda job: job["dependency"] or "(null)", "dependency"),
    "Q": PrintField("PRIORITY", lambda job: f"{job['priority'] or 0:.0f}", "priority"),
    "p": PrintField("PRIORITY", lambda job: f"{job['priority'] or 0:.6f}", "priority"),
    "o": PrintField("COMMAND", lambda job: job["command"], "command"),
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
            while is_digits(form[end : end + 1]):
                end += 1
            letter = form[end : end + 1]
            if letter in _FIELDS and letter:
                width = int(form[digits:end][:5] or 0)
                pieces.append((width, is_right, letter, ""))
                at = end + 1
                continue
        pieces.append((0, False, "", form[at]))
        at += 1
    return pieces


def _shape(piece: _Piece, text: str) -> str:
    width, is_right, _, _ = piece
    if not width:
        return text
    return tables.pad(tables.head(text, width), width, is_right)
