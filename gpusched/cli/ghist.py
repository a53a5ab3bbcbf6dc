"""ghist: what has ended, how well it used what it booked, and who used how much."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.options import ghist_table
from gpusched.cli.parse import parse
from gpusched.cli.query import COMPACT, check_names, query
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.instants import instant
from gpusched.model.units import format_amount, format_duration, format_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpusched.cli.parse import Values

_ENDED = "COMPLETED,FAILED,CANCELLED,TIMEOUT,OUT_OF_MEMORY,NODE_FAIL,PREEMPTED,DEADLINE"
_WEEK_S = 7 * 86400


def main() -> int:
    """Entry point."""
    return output.run("ghist", body)


def body(words: list[str]) -> int:
    """List or sum up; returns the exit code."""
    table = ghist_table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table, values):
        return 0
    if operands:
        values["ids"] = [*values.get("ids", []), *operands]
    if "ids" not in values:
        values.setdefault("since", time.time() - _WEEK_S)
    if values.get("usage") or "by" in values:
        _show_usage(values)
        return 0
    values.setdefault("states", _ENDED.split(","))
    with connect() as client:
        check_names(client, values.get("users", []), values.get("queues", []))
        path = f"/v1/history?{query(values)}"
        if values.get("json") and not sys.stdout.isatty():
            output.print_raw(client.raw(path))
            return 0
        answer = client.call("GET", path)
    jobs = answer["jobs"]
    if values.get("json"):
        output.print_json(answer)
        return 0
    if values.get("quiet"):
        sys.stdout.write("".join(f"{job['id']}\n" for job in jobs))
        return 0
    output.note_missing("ghist", answer)
    titles, rows = _efficiency(jobs) if values.get("efficiency") else _listing(jobs)
    if values.get("csv"):
        _print_csv(titles, rows)
    else:
        cut = {titles.index(title): 6 for title in ("NAME", "USER") if title in titles}
        lines = tables.table(titles, rows, cut=cut)
        tables.page("".join(f"{line}\n" for line in lines), not values.get("no_pager"))
    return 0


def _print_csv(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([title.lower() for title in titles])
    writer.writerows(rows)


def _listing(jobs: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    titles = ("ID", "NAME", "USER", "ST", "EXIT", "RUNS", "ELAPSED", "GPUS", "ENDED", "REASON")
    rows = [
        (
            job["id"],
            printable(job["name"]),
            printable(job["user"]),
            COMPACT[job["state"]],
            f"sig {job['signal']}" if job["signal"] else "-" if job["exit_code"] is None else str(job["exit_code"]),
            str(job["run"]),
            format_duration(_elapsed_s(job)),
            job["gpu_request"],
            instant(job["end_at"]),
            "" if job["reason"] in (None, "None") else str(job["reason"]),
        )
        for job in jobs
    ]
    return titles, list(rows)


def _elapsed_s(job: dict[str, Any]) -> float:
    """Time of all its runs together."""
    return float(sum(run["end_at"] - run["start_at"] for run in job["runs"] if run["start_at"] and run["end_at"]))


def _efficiency(jobs: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    titles = ("ID", "NAME", "ELAPSED", "CPUS", "CPU_USE", "MEMORY", "PEAK", "GPUS", "GPU_USE", "PEAK_VRAM", "ENERGY_WH")
    rows = []
    for job in jobs:
        elapsed_s = _elapsed_s(job)
        core_s = sum((run["end_at"] - run["start_at"]) * run["cpus"] for run in _measured(job))
        cpu_s = sum(run["cpu_s"] or 0.0 for run in _measured(job))
        used = [run["mean_utilisation"] for run in job["runs"] if run["mean_utilisation"] is not None]
        energy = [run["energy_j"] for run in job["runs"] if run["energy_j"] is not None]
        rows.append(
            (
                job["id"],
                printable(job["name"]),
                format_duration(elapsed_s),
                format_amount(job["cpus"]),
                f"{cpu_s / core_s:.0%}" if core_s else "-",
                format_size_mib(job["mem_mib"]) if job["mem_mib"] else "-",
                format_size_mib(_peak(job, "peak_mem_mib")),
                job["gpu_request"],
                f"{sum(used) / len(used):.0%}" if used else "-",
                format_size_mib(_peak(job, "peak_vram_mib")),
                f"{sum(energy) / 3600:.1f}" if energy else "-",
            )
        )
    return titles, list(rows)


def _measured(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in job["runs"] if run["start_at"] and run["end_at"]]


def _peak(job: dict[str, Any], key: str) -> float | None:
    return max((run[key] for run in job["runs"] if run[key] is not None), default=None)


def _show_usage(values: Values) -> None:
    """Sums of everything that ran in the span, also of what still runs."""
    if values.get("efficiency") or "limit" in values:
        other = "--efficiency" if values.get("efficiency") else "--limit"
        raise UsageError(f"--usage and {other} do not go together", "for example: ghist --usage --since 30d")
    by = values.get("by", "user")
    values.setdefault("since", 0.0)  # of jobs that are named, all of their time
    with connect() as client:
        check_names(client, values.get("users", []), values.get("queues", []))
        answer = client.call("GET", f"/v1/usage?by={by}&{query(values)}")
    sums = answer["usage"]
    if values.get("json"):
        output.print_json(answer)
        return
    if values.get("quiet"):
        sys.stdout.write("".join(f"{printable(one[by] or '-')}\n" for one in sums))
        return
    if values.get("csv"):
        keys = ("jobs", "runs", "gpu_hours", "core_hours", "mem_gib_hours", "mean_wait_s")
        _print_csv((by, *keys), [(one[by], *("" if one[key] is None else one[key] for key in keys)) for one in sums])
        return
    rows = [
        (
            printable(one[by] or "-"),
            str(one["jobs"]),
            str(one["runs"]),
            *(f"{one[key]:.2f}" for key in ("gpu_hours", "core_hours", "mem_gib_hours")),
            "-" if one["mean_wait_s"] is None else format_duration(one["mean_wait_s"]),
        )
        for one in sums
    ]
    titles = (by.upper(), "JOBS", "RUNS", "GPU_HOURS", "CORE_HOURS", "MEM_GIB_HOURS", "MEAN_WAIT")
    tables.print_table(titles, rows, right=frozenset(range(1, len(titles))))
