"""sdiag: what the scheduler has done since it started, as far as it counts."""

from __future__ import annotations

import sys
import time

from gpusched.addons.slurm.command import Command, cluster_suffix, run
from gpusched.client import connect
from gpusched.errors import Forbidden
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.addons.slurm.command import Parsed

    Json = dict[str, Any]

COMMAND = Command(
    "sdiag",
    "sdiag [options]",
    """
-a --all  accepted: there is nothing more to print
-h --help  show this help
-i --sort-by-id  accepted: requests are not counted by type
--json  print JSON
-M --cluster --clusters NAMES  this cluster's name, or all
-r --reset  refused: counters are reset when the daemon starts
-t --sort-by-time  accepted: requests are not counted by type
-T --sort-by-time2  accepted: requests are not counted by type
""",
)
_LINE = "*" * 55
_FAILED = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "DEADLINE")


def main() -> int:
    return run(COMMAND, body)


def body(options: Parsed) -> int:
    if options.operands:
        raise COMMAND.refuse(f"unexpected argument '{printable(options.operands[0])}'")
    if options.has("reset"):
        raise COMMAND.error("--reset is not supported: counters are reset when the daemon starts")
    with connect() as client:
        if options.has("cluster"):
            cluster_suffix(COMMAND, client, options.get("cluster"))
        daemon = client.call("GET", "/v1/status")["daemon"]
        try:
            counted = read_metrics(client.text("/v1/metrics"))
        except Forbidden:
            # Where jobs are private, so are the numbers of all users' jobs.
            counted = {}
    if options.has("json"):
        from gpusched.addons.slurm.documents import document

        sys.stdout.write(document(statistics=_statistics(daemon, counted)))
    else:
        sys.stdout.write(_text(daemon, counted))
    return 0


def read_metrics(text: str) -> dict[str, dict[str, float]]:
    """Prometheus's text as values by metric and by the text of the labels."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        try:
            found.setdefault(name, {})[labels.rstrip("}")] = float(value)
        except ValueError:
            continue
    return found


def _count(counted: dict[str, dict[str, float]], name: str) -> int:
    return int(sum(counted.get(name, {}).values()))


def _ended(counted: dict[str, dict[str, float]], *states: str) -> int:
    values = counted.get("gpusched_jobs_finished_total", {})
    return int(sum(values.get(f'state="{state}"', 0.0) for state in states))


def _statistics(daemon: Json, counted: dict[str, dict[str, float]]) -> Json:
    """The numbers by the names that Slurm's document has; those of jobs are left out where they are private."""
    jobs, tick = daemon["jobs"], daemon["tick"]
    found: Json = {
        "req_time": int(daemon["now"]),
        "req_time_start": int(daemon["started_at"]),
        "jobs_pending": jobs.get("pending", 0),
        "jobs_running": jobs.get("running", 0),
        "schedule_cycle_total": tick["count"],
        "schedule_queue_length": jobs.get("pending", 0),
    }
    if tick["last_ms"] is not None:
        found["schedule_cycle_last"] = round(tick["last_ms"] * 1000)
    if not counted:
        return found
    cycles, seconds = (_sum(counted, f"gpusched_tick_seconds_{what}") for what in ("count", "sum"))
    if cycles:
        found["schedule_cycle_mean"] = round(seconds / cycles * 1e6)
    return {
        **found,
        "jobs_submitted": _count(counted, "gpusched_jobs_submitted_total"),
        "jobs_started": _count(counted, "gpusched_wait_seconds_count"),
        "jobs_completed": _ended(counted, "COMPLETED"),
        "jobs_canceled": _ended(counted, "CANCELLED", "PREEMPTED"),
        "jobs_failed": _ended(counted, *_FAILED),
    }


def _sum(counted: dict[str, dict[str, float]], name: str) -> float:
    return sum(counted.get(name, {}).values())


_GROUPS = (
    (
        "",
        (
            ("Jobs submitted:", "jobs_submitted"),
            ("Jobs started:  ", "jobs_started"),
            ("Jobs completed:", "jobs_completed"),
            ("Jobs canceled: ", "jobs_canceled"),
            ("Jobs failed:   ", "jobs_failed"),
        ),
    ),
    ("Job states ts:  {}", (("Jobs pending:  ", "jobs_pending"), ("Jobs running:  ", "jobs_running"))),
    (
        "Main schedule statistics (microseconds):",
        (
            ("\tLast cycle:  ", "schedule_cycle_last"),
            ("\tTotal cycles:", "schedule_cycle_total"),
            ("\tMean cycle:  ", "schedule_cycle_mean"),
            ("\tLast queue length:", "schedule_queue_length"),
        ),
    ),
)
"""Lines of the text, by title: label, and key of `_statistics`."""


def _text(daemon: Json, counted: dict[str, dict[str, float]]) -> str:
    found = _statistics(daemon, counted)
    lines = [
        _LINE,
        f"sdiag output at {_date(found['req_time'])}",
        f"Data since      {_date(found['req_time_start'])}",
        _LINE,
    ]
    for place, (title, rows) in enumerate(_GROUPS):
        shown = [f"{label} {found[key]}" for label, key in rows if key in found]
        if shown:
            head = [title.format(_date(found["req_time"]))] if title else []
            lines += [*([""] if place else []), *head, *shown]
    return "".join(f"{line}\n" for line in lines)


def _date(at: int) -> str:
    return f"{time.strftime('%a %b %d %H:%M:%S %Y', time.localtime(at))} ({at})"
