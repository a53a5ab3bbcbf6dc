"""ginfo --foreign: who uses GPUs without a job, and what that costs the queue."""

from __future__ import annotations

import sys

from gpusched.cli import output
from gpusched.client import connect
from gpusched.model.units import format_duration, format_size_mib, gpu_label, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
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
        sys.stdout.write("no process is on a GPU without a job\n")
        return 0
    output.print_table(
        ("GPU", "PID", "USER", "COMMAND", "VRAM", "AGE", "GPU-IDLE", "JOBS-KEPT"),
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


def _lasting(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
