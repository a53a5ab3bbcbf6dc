"""ginfo: nodes and GPUs, who holds them, and what keeps them from being used."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.options import ginfo_table
from gpusched.cli.parse import parse
from gpusched.client import connect
from gpusched.model.units import format_amount, format_duration, format_size_mib, gpu_label, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from gpusched.cli.parse import Values


_FAULTS = 3
"""Of each GPU."""
_FOREIGN = 8
"""Processes without a booking that are listed."""


def main() -> int:
    """Entry point."""
    return output.run("ginfo", body)


def body(words: list[str]) -> int:
    """Show nodes, then GPUs, then who else is on them."""
    table = ginfo_table()
    values, operands, _ = parse(table, words)
    if output.common(table, values):
        return 0
    output.no_operands(table, operands)
    if values.get("foreign"):
        return show_foreign(values)
    with connect() as client:
        cluster = client.call("GET", "/v1/cluster")
    if values.get("json"):
        output.print_json(cluster)
    elif values.get("quiet"):
        sys.stdout.write(
            "".join(f"{gpu['node']}:{gpu_label(gpu['index'])} {gpu['state']}\n" for gpu in cluster["gpus"])
        )
    else:
        _print(cluster)
        _print_queues(cluster)
        if cluster["reservations"]:
            from gpusched.cli.gctl import print_reservations

            sys.stdout.write("\nreservations:\n")
            print_reservations(cluster["reservations"])
    return 0


def _print(cluster: dict[str, Any]) -> None:
    rows = [
        (
            printable(node["name"]),
            node["state"],
            f"{format_amount(node['cpus_booked'])}/{format_amount(node['cpus'])}",
            f"{format_size_mib(node['mem_booked_mib'])}/{format_size_mib(node['mem_mib'])}",
            "-" if node["cpu_fraction"] is None else f"{node['cpu_fraction']:.0%}",
            format_size_mib(node["mem_available_mib"]),
            printable(node["message"] or node["gpu_error"] or ""),
        )
        for node in cluster["nodes"]
    ]
    tables.print_table(("NODE", "STATE", "CPUS", "MEMORY", "LOAD", "AVAILABLE", "NOTE"), rows)
    for node in cluster["nodes"]:
        sys.stdout.write(f"limits of runs: {_limits(node['isolation'])}\n")
        for remark in node["notes"]:
            sys.stdout.write(f"note: {printable(remark)}\n")
    from gpusched.cli.presets import line_of

    sys.stdout.write(f"preset: {line_of(cluster['preset'])}\n")
    broken = {node["gpu_error"] for node in cluster["nodes"] if node["gpu_error"] and not node["message"]}
    gpus = [
        (
            gpu_label(gpu["index"]),
            _model(gpu),
            gpu["state"],
            _of(gpu["vram_used_mib"], gpu["vram_total_mib"]),
            format_size_mib(gpu["vram_booked_mib"]),
            "-" if gpu["utilisation"] is None else f"{gpu['utilisation']:.0%}",
            "-" if gpu["temperature_c"] is None else f"{gpu['temperature_c']:.0f}C",
            ",".join(gpu["jobs"]) or "-",
            _why(gpu, broken),
        )
        for gpu in cluster["gpus"]
    ]
    if not gpus:
        sys.stdout.write(without_gpus(cluster["nodes"]))
        return
    sys.stdout.write("\n")
    titles = ("GPU", "NAME", "STATE", "USED", "BOOKED", "UTIL", "TEMP", "JOBS", "WHY")
    right = frozenset({0, 5, 6})
    if sys.stdout.isatty():
        # Sentences in a column of their own would leave too little of it, and of the others.
        tables.print_table(titles[:-1], [row[:-1] for row in gpus], right=right)
        sys.stdout.write("".join(f"GPU {row[0]} {row[2]}: {row[-1]}\n" for row in gpus if row[-1]))
    else:
        tables.print_table(titles, gpus, right=right)
    of_host = [gpu_label(gpu["index"]) for gpu in cluster["gpus"] if gpu["unified_memory"]]
    if of_host:
        which = f"GPU {of_host[0]} uses" if len(of_host) == 1 else f"GPUs {', '.join(of_host)} use"
        sys.stdout.write(f"{which} the host's memory: what jobs book of it counts as memory of the node\n")
    _print_shared(cluster["gpus"])
    _print_faults(cluster["gpus"])
    if not any(gpu["foreign"] for gpu in cluster["gpus"]):
        return

    foreign = [
        (
            gpu_label(gpu["index"]),
            str(process["pid"]),
            printable(process["user"] or "?"),
            format_size_mib(process["vram_mib"]),
            printable(process["name"] or "?"),
            owner_of(process["job"]),
        )
        for gpu in cluster["gpus"]
        for process in gpu["foreign"]
    ]
    sys.stdout.write("\nprocesses on GPUs without a booking:\n")
    tables.print_table(("GPU", "PID", "USER", "VRAM", "NAME", "OF"), foreign[:_FOREIGN], right=frozenset({0, 1}))
    if len(foreign) > _FOREIGN:
        sys.stdout.write(f"and {len(foreign) - _FOREIGN} more; all, and what they cost: ginfo --foreign\n")


def without_gpus(nodes: list[dict[str, Any]]) -> str:
    """Why there is none to show; a driver that answers badly is not the same as no GPU."""
    errors = [printable(node["gpu_error"]) for node in nodes if node["gpu_error"]]
    if errors:
        return f"no GPU can be read: {'; '.join(errors)}; see also: gpusched doctor\n"
    if any(node["gpu_source"] == "nvml" for node in nodes):
        return "the driver lists no GPU; see what is wrong with: gpusched doctor\n"
    if any(node["notes"] for node in nodes):
        return "no GPUs here; see also: gpusched doctor\n"
    return "no GPUs here; try simulated ones: GPUSCHED_FAKE_GPUS=4x24GiB gpuschedd\n"


def _limits(isolation: dict[str, Any]) -> str:
    """What the kernel keeps runs to, why not to more, and whom it keeps off the GPUs."""
    parts = [key for key in ("memory", "tasks") if isolation[key] == "cgroup"]
    if isolation["cpus"] != "none":
        parts.append("own processors" if isolation["cpus"] == "own" else "weight of processors")
    if isolation["gpus"] == "device rule":
        parts.append("GPUs")
    if isolation["tmp"] == "own":
        parts.append("/tmp")
    why = "" if isolation["why_not"] is None else f" ({printable(isolation['why_not'])})"
    if not parts:
        return f"none; requests are only booked{why}"
    guard = ", ".join(map(printable, isolation["guard"]))
    return f"{', '.join(parts)}{why}; kept off the GPUs: {guard or 'nobody else, see gpusched system guard'}"


def _model(gpu: dict[str, Any]) -> str:
    """Its name, without the maker's; of a MIG instance what it is a part of, and which."""
    if gpu["mig_profile"] is None:
        return printable(gpu["name"].removeprefix("NVIDIA "), 28)
    return printable(f"MIG {gpu['mig_profile']} of GPU {gpu_label(gpu['index']).partition(':')[0]}", 28)


def _why(gpu: dict[str, Any], broken: Collection[str]) -> str:
    """Why it is as it is, without the state once more, and without the errors of drivers, which notes of nodes say."""
    if gpu["why"] in broken:
        return ""
    return printable((gpu["why"] or "").removeprefix(f"{gpu['state']}: "))


def _print_shared(gpus: list[dict[str, Any]]) -> None:
    """Who shares a card, and what holds them to the VRAM that they booked."""
    rows = [
        (
            gpu_label(gpu["index"]),
            held["job"],
            printable(held["user"]),
            format_size_mib(gpu["vram_total_mib"] if held["vram_mib"] is None else held["vram_mib"]),
            format_size_mib(gpu["vram_used_mib"] if held["vram_mib"] is None else held["vram_used_mib"]),
            held["enforcement"],
            held["enforcement_why"],
        )
        for gpu in gpus
        for held in gpu["booked_by"]
        if held["vram_mib"] is not None or gpu["mig_profile"] is not None
    ]
    if rows:
        sys.stdout.write("\nshared GPUs, and what holds jobs to the VRAM they booked:\n")
        titles = ("GPU", "JOB", "USER", "BOOKED", "HELD", "LIMIT", "MEANING")
        tables.print_table(titles, rows, right=frozenset({0, 1}))


def _print_faults(gpus: list[dict[str, Any]]) -> None:
    """The newest faults of the hardware; a program's own are in --json only."""
    if not any(gpu["faults"] for gpu in gpus):
        return
    from gpusched.instants import instant

    rows = [
        (gpu_label(gpu["index"]), instant(fault["at"]), str(fault["xid"]), fault["meaning"] or "-")
        for gpu in gpus
        for fault in [fault for fault in gpu["faults"] if fault["is_hardware"]][-_FAULTS:]
    ]
    if rows:
        sys.stdout.write("\nfaults of the hardware since the machine was started:\n")
        tables.print_table(("GPU", "AT", "XID", "MEANING"), rows, right=frozenset({0, 2}))


def _print_queues(cluster: dict[str, Any]) -> None:
    """Queues, unless there is only one and nothing to say of it."""
    queues = cluster["queues"]
    if len(queues) > 1 or any(row["guaranteed_gpus"] or row["max_gpus"] is not None for row in queues):
        from gpusched.cli.gctl import print_queues

        sys.stdout.write("\nqueues, in GPUs:\n")
        print_queues(queues, cluster["loans"])


def _of(used: float | None, total: float | None) -> str:
    return f"{format_size_mib(used)}/{format_size_mib(total)}"


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
