"""`gq -o`: Slurm's language, `%i`, `%.8j` (right-aligned, cut at 8), `%8j`; other text is printed unchanged.

The fields are squeue's, except where gq shows more than Slurm has a word for: reasons, fractions, exact durations.
"""

from __future__ import annotations

import time

from gpusched.addons.slurm.format import PrintField, keys_of, percent_pieces
from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.job_fields import PERCENT
from gpusched.addons.slurm.values import NULL, instant
from gpusched.cli import tables
from gpusched.cli.query import run_time_s
from gpusched.model.units import format_amount, format_duration, format_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpusched.addons.slurm.format import Piece


def _left(job: SlurmJob) -> str:
    limit_s, is_running = job["time_limit_s"], job["state"] in ("RUNNING", "SUSPENDED")
    return format_duration(max(0.0, limit_s - job.run_time_s) if limit_s is not None and is_running else limit_s)


def _gpus(job: SlurmJob) -> str:
    # What is asked for may be a total; this field is per node.
    number = job["total_gpus"] if job["nodes"] == 1 else job["gpus_per_node"]
    if not number:
        return "N/A"
    fraction, kind, vram_mib = job["gpu_fraction"], job["gpu_type"], job["vram_mib"]
    count = number if fraction is None else f"{fraction:g}"
    return f"gres:gpu:{kind + ':' if kind else ''}{count}" + ("" if vram_mib is None else f"({vram_mib}M)")


def _reason_or_nodes(job: SlurmJob) -> str:
    if job["state"] in ("RUNNING", "COMPLETING"):
        return job["node"] or ""
    return f"({job['reason'] or 'None'})"


_FIELDS: dict[str, PrintField] = {
    **PERCENT,
    "i": PrintField("JOBID", lambda job: job["id"], "id"),
    "A": PrintField("JOBID", lambda job: job["id"], "id"),
    "r": PrintField("REASON", lambda job: job["reason"] or "None", "reason"),
    "R": PrintField("NODELIST(REASON)", _reason_or_nodes, "state node reason"),
    "M": PrintField(
        "TIME",
        lambda job: format_duration(run_time_s(job.row, job.now)),
        "state start_at end_at suspended_at suspended_s",
    ),
    "l": PrintField("TIME_LIMIT", lambda job: format_duration(job["time_limit_s"]), "time_limit_s"),
    "L": PrintField("TIME_LEFT", _left, "state start_at end_at time_limit_s suspended_at suspended_s"),
    "C": PrintField("CPUS", lambda job: format_amount(job["cpus"]), "cpus"),
    "m": PrintField("MIN_MEMORY", lambda job: format_size_mib(job["mem_mib"]) if job["mem_mib"] else "0", "mem_mib"),
    "b": PrintField("TRES_PER_NODE", _gpus, "nodes total_gpus gpus_per_node gpu_fraction gpu_type vram_mib"),
    "S": PrintField("START_TIME", lambda job: instant(job["start_at"]), "start_at"),
    "e": PrintField("END_TIME", lambda job: instant(job["end_at"]), "end_at"),
    "E": PrintField("DEPENDENCY", lambda job: job["dependency"] or NULL, "dependency"),
    "Q": PrintField("PRIORITY", lambda job: f"{job['priority'] or 0:.0f}", "priority"),
    "p": PrintField("PRIORITY", lambda job: f"{job['priority'] or 0:.6f}", "priority"),
    "o": PrintField("COMMAND", lambda job: job["command"], "command"),
}


def keys(form: str) -> list[str]:
    """Keys of the JSON that the fields of a format read, without duplicates."""
    return keys_of(_pieces(form))


def render(form: str, jobs: Iterable[dict[str, Any]], header: bool = True) -> str:
    """One line per job, after a line of titles."""
    pieces, now = _pieces(form), time.time()
    lines = ["".join(_fitted(piece, piece.field.title if piece.field else "") for piece in pieces)] if header else []
    lines += [
        "".join(_fitted(piece, piece.field.cell(job) if piece.field else "") for piece in pieces)
        for job in (SlurmJob(row, now) for row in jobs)
    ]
    return "".join(f"{line}\n" for line in lines)


def _pieces(form: str) -> list[Piece]:
    return percent_pieces(form, _FIELDS, [])


def _fitted(piece: Piece, value: str) -> str:
    """Literal text, or a value in as many cells of the terminal as its piece is wide."""
    if piece.field is None:
        return piece.text
    text = printable(value)
    return tables.pad(tables.head(text, piece.width), piece.width, piece.is_right) if piece.width else text
