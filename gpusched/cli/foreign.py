"""ginfo --foreign: who uses GPUs without a booking, and what that costs the queue."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.client import connect
from gpusched.model.units import format_duration, format_size_mib, gpu_label, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values


def show_foreign(values: Values) -> int:
    """Print them, each process once for each of its GPUs."""
    with connect() as client:
        found = client.call("GET", "/v1/foreign")
    rows = found["foreign"]
    if values.get("json"):
        output.print_json(found)
        return 0
    if values.get("quiet"):
        sys.stdout.write("".join(f"{pid}\n" for pid in sorted({row["pid"] for row in rows})))
        return 0
    if not rows:
        sys.stdout.write("no process is on a GPU without a booking\n")
        return 0
    is_anybody_told = any(row["told_at"] is not None for row in rows)
    is_any_of_job = any(row["job"] is not None for row in rows)
    titles = ["GPU", "PID", "USER", "COMMAND", "VRAM", "AGE", "GPU-IDLE", "JOBS-KEPT"]
    titles += ["OF"] * is_any_of_job + ["TOLD"] * is_anybody_told
    tables.print_table(
        titles,
        [
            (
                gpu_label(row["gpu"]),
                str(row["pid"]),
                printable(row["user"] or "?"),
                printable(row["name"] or "?", 28),
                format_size_mib(row["vram_mib"]),
                _lasting(row["age_s"]),
                _lasting(row["gpu_idle_s"]),
                "-" if row["jobs_kept_waiting"] is None else str(row["jobs_kept_waiting"]),
                *((owner_of(row["job"]),) if is_any_of_job else ()),
                *((_told(row),) if is_anybody_told else ()),
            )
            for row in rows
        ],
        right=frozenset({0, 1, 4, 5, 6, 7}),
    )
    count = found["jobs_kept_waiting"]
    if count:
        jobs = "1 waiting job" if count == 1 else f"{count} waiting jobs"
        sys.stdout.write(f"{jobs} would start now without all of them\n")
    return 0


def owner_of(job: str | None) -> str:
    """Whose a process without a booking is; `-` is a job that the caller must not know of."""
    if job is None:
        return "no job"
    return f"{'another job' if job == '-' else f'job {job}'}, which did not book it"


def _told(row: dict[str, Any]) -> str:
    """When its owner was told last and how, or why not; whether it is being ended."""
    if row["told_at"] is None:
        return "-"
    ways = " by " + "+".join(row["told_by"]) if row["told_by"] else ""
    if not ways and row["untold"] is not None:
        ways = f" (not: {row['untold']})"
    ended = ", being ended" if row["ending_at"] is not None else ""
    return f"{format_duration(max(0.0, time.time() - row['told_at']))} ago{printable(ways, 80)}{ended}"


def _lasting(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
