"""ghist: what has ended, how well it used what it booked, and who used how much."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output
from gpusched.cli.gshow import instant
from gpusched.cli.options import ghist_table
from gpusched.cli.parse import parse
from gpusched.cli.query import COMPACT, query
from gpusched.client import connect
from gpusched.model.units import format_duration, format_size_mib, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

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
    values.setdefault("states", _ENDED.split(","))
    if "ids" not in values:
        values.setdefault("since", time.time() - _WEEK_S)
    with connect() as client:
        answer = client.call("GET", f"/v1/history?{query(values)}")
    jobs = answer["jobs"]
    if values.get("usage") or "by" in values:
        titles, rows, documents = _usage(jobs, values.get("by", "user"))
        if values.get("json"):
            output.print_json({"usage": documents})
            return 0
    elif values.get("json"):
        output.print_json(answer)
        return 0
    elif values.get("quiet"):
        sys.stdout.write("".join(f"{job['id']}\n" for job in jobs))
        return 0
    else:
        titles, rows = _efficiency(jobs) if values.get("efficiency") else _listing(jobs)
    if values.get("csv"):
        _print_csv(titles, rows)
    else:
        output.print_table(titles, rows, right=frozenset({0}) if "usage" not in values else frozenset())
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
            printable(job["name"], 24),
            printable(job["user"], 16),
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


def _gpu_share(run: dict[str, Any]) -> float:
    """Cards of a run, a fraction counting as its part; a slice by memory counts as a card of its own."""
    return float(sum(1.0 if gpu["fraction"] is None else gpu["fraction"] for gpu in run["gpus"]))


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
                printable(job["name"], 24),
                format_duration(elapsed_s),
                f"{job['cpus']:g}",
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


def _usage(jobs: list[dict[str, Any]], by: str) -> tuple[Sequence[str], list[Sequence[str]], list[dict[str, Any]]]:
    sums: dict[str, dict[str, float]] = {}
    for job in jobs:
        entry = sums.setdefault(job[by] or "-", {"jobs": 0, "runs": 0, "gpu_hours": 0.0, "core_hours": 0.0})
        entry["jobs"] += 1
        for run in _measured(job):
            hours = (run["end_at"] - run["start_at"]) / 3600
            entry["runs"] += 1
            entry["gpu_hours"] += hours * _gpu_share(run)
            entry["core_hours"] += hours * run["cpus"]
    ordered = sorted(sums.items(), key=lambda item: (-item[1]["gpu_hours"], -item[1]["core_hours"], item[0]))
    rows = [
        (printable(name), f"{s['jobs']:.0f}", f"{s['runs']:.0f}", f"{s['gpu_hours']:.2f}", f"{s['core_hours']:.2f}")
        for name, s in ordered
    ]
    documents = [{by: name, **entry} for name, entry in ordered]
    return (by.upper(), "JOBS", "RUNS", "GPU_HOURS", "CORE_HOURS"), list(rows), documents
