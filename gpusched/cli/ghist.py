"""ghist: finished jobs, how well they used what they booked, and usage by user or account."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.options import ghist_table
from gpusched.cli.query import check_names, query
from gpusched.cli.tables import Column, decimals
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.instants import instant
from gpusched.model.state_names import COMPACT, FINAL
from gpusched.model.units import format_amount, format_duration, format_hours, format_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpusched.cli.parse import Values

_WEEK_S = 7 * 86400
_HALF_DAY_S = 43_200


def main() -> int:
    return output.run("ghist", body)


@output.command(ghist_table)
def body(values: Values, operands: list[str]) -> int:
    """List or sum up; returns the exit code."""
    if "statement" in values:
        from gpusched import entry_points  # not needed by other lists

        show_statement = entry_points.need("ghist.statement", "statement", "ghist --statement")
        code: int = show_statement({**values, "ids": operands} if operands else values)
        return code
    if "html" in values:
        raise UsageError("--html applies to --statement", "for example: ghist --statement last --html november.html")
    if operands:
        values["ids"] = [*values.get("ids", []), *operands]
    if "ids" not in values:
        values.setdefault("since", time.time() - _WEEK_S)
    if values.get("usage") or "by" in values:
        _show_usage(values)
        return 0
    values.setdefault("states", list(FINAL))
    with connect() as client:
        check_names(client, values.get("users", []), values.get("queues", []))
        path = f"/v1/history?{query(values)}"
        if values.get("json") and not sys.stdout.isatty():
            output.print_raw(client.raw(path))
            return 0
        answer = client.call("GET", path)
    jobs = answer["jobs"]
    if output.show(values, answer, (job["id"] for job in jobs)):
        return 0
    output.note_missing("ghist", answer)
    columns = _EFFICIENCY if values.get("efficiency") else _JOBS
    if values.get("csv"):
        _print_csv([column.title for column in columns], tables.rows_of(columns, jobs))
        return 0
    if columns is _JOBS:
        columns = (*_JOBS[:-1], Column("CAUSE", lambda job: printable(cause(job))))
    jobs.sort(key=lambda job: job["end_at"] or 0.0, reverse=True)
    tables.page(tables.listing(columns, jobs), not values.get("no_pager"))
    return 0


def cause(job: dict[str, Any]) -> str:
    """Why a job ended as it did, in words if there are any; without the exit code, which has its own column."""
    text = job["reason_text"] or ""
    code = f"exit code {job['exit_code']}"
    if text.startswith(f"{code}: "):
        return str(text[len(code) + 2 :])
    if text and text != code:
        return str(text)
    return "" if job["reason"] in (None, "None") else str(job["reason"])


def _print_csv(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([title.lower() for title in titles])
    writer.writerows(rows)


def _elapsed_s(job: dict[str, Any]) -> float:
    """Total time of all runs."""
    return float(sum(run["end_at"] - run["start_at"] for run in job["runs"] if run["start_at"] and run["end_at"]))


def _ended(job: dict[str, Any]) -> str:
    """The time of day of an end within twelve hours, or else its date."""
    at = instant(job["end_at"])
    return at[11:16] if job["end_at"] and time.time() - job["end_at"] < _HALF_DAY_S else at[5:10]


def _core_use(job: dict[str, Any]) -> str:
    core_s = sum((run["end_at"] - run["start_at"]) * run["cpus"] for run in _measured(job))
    return f"{sum(run['cpu_s'] or 0.0 for run in _measured(job)) / core_s:.0%}" if core_s else "-"


def _gpu_use(job: dict[str, Any]) -> str:
    used = [run["mean_utilisation"] for run in job["runs"] if run["mean_utilisation"] is not None]
    return f"{sum(used) / len(used):.0%}" if used else "-"


def _energy(job: dict[str, Any]) -> str:
    energy = [run["energy_j"] for run in job["runs"] if run["energy_j"] is not None]
    return f"{sum(energy) / 3600:.1f}" if energy else "-"


def _exit(job: dict[str, Any]) -> str:
    return f"sig {job['signal']}" if job["signal"] else "-" if job["exit_code"] is None else str(job["exit_code"])


def _measured(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in job["runs"] if run["start_at"] and run["end_at"]]


def _peak(job: dict[str, Any], key: str) -> float | None:
    return max((run[key] for run in job["runs"] if run[key] is not None), default=None)


def _show_usage(values: Values) -> None:
    """Print sums over everything that ran in the span, including jobs still running."""
    if values.get("efficiency") or "limit" in values:
        other = "--efficiency" if values.get("efficiency") else "--limit"
        raise UsageError(f"--usage and {other} exclude each other", "for example: ghist --usage --since 30d")
    by = values.get("by", "user")
    values.setdefault("since", 0.0)  # named jobs: their whole time
    with connect() as client:
        check_names(client, values.get("users", []), values.get("queues", []))
        answer = client.call("GET", f"/v1/usage?by={by}&{query(values)}")
        is_table = not any(values.get(name) for name in ("json", "quiet", "csv"))
        budgets = client.call("GET", "/v1/budgets")["budgets"] if by == "account" and is_table else []
    sums = answer["usage"]
    if output.show(values, answer, (one[by] or "-" for one in sums)):
        return
    if values.get("csv"):
        keys = (
            "jobs",
            "runs",
            "gpu_hours",
            "core_hours",
            "mem_gib_hours",
            "mean_wait_s",
            "energy_kwh",
            "cost",
            "grams",
        )
        _print_csv((by, *keys), [(one[by], *("" if one[key] is None else one[key] for key in keys)) for one in sums])
        return
    columns = [Column(by.upper(), lambda one: printable(one[by] or "-")), *_USAGE]
    if any(one["energy_kwh"] is not None for one in sums):
        columns.append(Column("KWH", lambda one: decimals(one["energy_kwh"]), right=True))
    if any(one["cost"] is not None for one in sums):
        columns.append(Column(answer["currency"] or "COST", lambda one: decimals(one["cost"]), right=True))
    if any(one["grams"] is not None for one in sums):
        columns.append(Column("CO2_KG", lambda one: decimals(one["grams"], 1000), right=True))
    left = {row["account"]: format_hours(row["left_gpu_hours"], down=True) for row in budgets if row["user"] is None}
    if left:
        columns.append(Column("BUDGET_LEFT", lambda one: left.get(one[by], "-"), right=True))
    sys.stdout.write(tables.listing(columns, sums))


_ID = Column("ID", lambda job: str(job["id"]))
_NAME = Column("NAME", lambda job: printable(job["name"]), least=6)
_JOBS = (
    _ID,
    _NAME,
    Column("USER", lambda job: printable(job["user"]), least=6, order=5),
    Column("ST", lambda job: COMPACT[job["state"]]),
    Column("EXIT", _exit, order=4),
    Column("RUNS", lambda job: str(job["run"]), order=2),
    Column("ELAPSED", lambda job: format_duration(_elapsed_s(job)), order=6),
    Column("GPUS", lambda job: str(job["gpu_request"]), order=3),
    Column("ENDED", lambda job: instant(job["end_at"]), short=_ended, order=1),
    Column("REASON", lambda job: "" if job["reason"] in (None, "None") else str(job["reason"])),
)
_EFFICIENCY = (
    _ID,
    _NAME,
    Column("ELAPSED", lambda job: format_duration(_elapsed_s(job))),
    Column("CPUS", lambda job: format_amount(job["cpus"])),
    Column("CPU_USE", _core_use),
    Column("MEMORY", lambda job: format_size_mib(job["mem_mib"]) if job["mem_mib"] else "-"),
    Column("PEAK", lambda job: format_size_mib(_peak(job, "peak_mem_mib"))),
    Column("GPUS", lambda job: str(job["gpu_request"])),
    Column("GPU_USE", _gpu_use),
    Column("PEAK_VRAM", lambda job: format_size_mib(_peak(job, "peak_vram_mib"))),
    Column("ENERGY_WH", _energy),
)
_USAGE = (
    Column("JOBS", lambda one: str(one["jobs"]), right=True),
    Column("RUNS", lambda one: str(one["runs"]), right=True),
    Column("GPU_HOURS", lambda one: f"{one['gpu_hours']:.2f}", right=True),
    Column("CORE_HOURS", lambda one: f"{one['core_hours']:.2f}", right=True),
    Column("MEM_GIB_HOURS", lambda one: f"{one['mem_gib_hours']:.2f}", right=True),
    Column(
        "MEAN_WAIT",
        lambda one: "-" if one["mean_wait_s"] is None else format_duration(one["mean_wait_s"]),
        right=True,
    ),
)
