"""ginfo: nodes and GPUs, their users, and what keeps them from being used."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.options import ginfo_table
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.instants import instant
from gpusched.model.hostlist import fold
from gpusched.model.units import (
    format_amount,
    format_duration,
    format_hours,
    format_size_mib,
    gpu_label,
    plural,
    printable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from gpusched.cli.parse import Values


_FAULTS = 3
"""Most recent hardware faults listed for each GPU."""
_FOREIGN = 8
"""Processes without a booking listed."""


def main() -> int:
    return output.run("ginfo", body)


@output.command(ginfo_table, takes_operands=False)
def body(values: Values, _: list[str]) -> int:
    """Show nodes, then GPUs, then processes without a booking."""
    if values.get("foreign"):
        return show_foreign(values)
    with connect() as client:
        cluster = client.call("GET", "/v1/cluster")
        is_plain = not (values.get("json") or values.get("quiet"))
        if values.get("history") or (is_plain and _is_wide() and cluster["gpus"]):
            from gpusched.cli.sparklines import add_last_hour

            add_last_hour(client, cluster["gpus"])
        budgets = client.call("GET", "/v1/budgets")["budgets"] if is_plain else []
    bare = (f"{gpu['node']}:{gpu_label(gpu['index'])} {gpu['state']}" for gpu in cluster["gpus"])
    if not output.show(values, cluster, bare):
        _print(cluster)
        _print_queues(cluster)
        _print_budgets(budgets)
        if cluster["reservations"]:
            from gpusched.cli.reservations import print_reservations

            sys.stdout.write("\nreservations:\n")
            print_reservations(cluster["reservations"])
    return 0


_WIDE = 120
"""Columns of a terminal from which the table of GPUs has one for the last hour."""


def _is_wide() -> bool:
    return sys.stdout.isatty() and (tables.screen() or (0, 0))[1] >= _WIDE


_NODES = (
    Column("NODE", lambda node: printable(node["name"])),
    Column("STATE", lambda node: str(node["state"])),
    Column("CPUS", lambda node: f"{format_amount(node['cpus_booked'])}/{format_amount(node['cpus'])}"),
    Column("MEMORY", lambda node: f"{format_size_mib(node['mem_booked_mib'])}/{format_size_mib(node['mem_mib'])}"),
    Column("LOAD", lambda node: _percent(node["cpu_fraction"]), order=2),
    Column("AVAILABLE", lambda node: format_size_mib(node["mem_available_mib"]), order=1),
    Column("NOTE", lambda node: printable(node["message"] or _why_down(node) or node["gpu_error"] or "")),
)
_GPUS = (
    Column("GPU", lambda gpu: gpu_label(gpu["index"]), right=True),
    Column("NAME", lambda gpu: _model(gpu), order=3),
    Column("STATE", lambda gpu: str(gpu["state"])),
    Column("USED", lambda gpu: f"{_used(gpu)}/{format_size_mib(gpu['vram_total_mib'])}"),
    Column("BOOKED", lambda gpu: format_size_mib(gpu["vram_booked_mib"]), order=2),
    Column("UTIL", lambda gpu: "n/a" if gpu.get("is_declared") else _percent(gpu["utilisation"]), right=True),
    Column(
        "TEMP",
        lambda gpu: "-" if gpu["temperature_c"] is None else f"{gpu['temperature_c']:.0f}C",
        right=True,
        order=1,
    ),
    Column("JOBS", lambda gpu: ",".join(gpu["jobs"]) or "-"),
)
_UNBOOKED = (
    Column("GPU", lambda row: str(row["label"]), right=True),
    Column("PID", lambda row: str(row["pid"]), right=True),
    Column("USER", lambda row: printable(row["user"] or "?")),
    Column("VRAM", lambda row: format_size_mib(row["vram_mib"])),
    Column("NAME", lambda row: printable(row["name"] or "?")),
    Column("OF", lambda row: owner_of(row["job"])),
)
_FOREIGN_USE = (
    *_UNBOOKED[:3],
    Column("COMMAND", lambda row: printable(row["name"] or "?", 28)),
    Column("VRAM", lambda row: format_size_mib(row["vram_mib"]), right=True),
    Column("AGE", lambda row: _lasting(row["age_s"]), right=True),
    Column("GPU-IDLE", lambda row: _lasting(row["gpu_idle_s"]), right=True),
    Column(
        "JOBS-KEPT",
        lambda row: "-" if row["jobs_kept_waiting"] is None else str(row["jobs_kept_waiting"]),
        right=True,
    ),
)
_BOOKED_BY = (
    Column("GPU", lambda row: str(row[0]["label"]), right=True),
    Column("JOB", lambda row: str(row[1]["job"]), right=True),
    Column("USER", lambda row: printable(row[1]["user"])),
    # A MIG instance belongs to its job as a whole.
    Column("BOOKED", lambda row: format_size_mib(_vram(row, "vram_mib", "vram_total_mib"))),
    Column("HELD", lambda row: format_size_mib(_vram(row, "vram_used_mib", "vram_used_mib"))),
    Column("SM", lambda row: _percent(row[1]["fraction"]) if row[1]["enforcement"] == "MPS" else "-", right=True),
    Column("LIMIT", lambda row: str(row[1]["enforcement"])),
    Column("MEANING", lambda row: str(row[1]["enforcement_why"])),
)
_HARDWARE_FAULTS = (
    Column("GPU", lambda fault: str(fault["label"]), right=True),
    Column("AT", lambda fault: instant(fault["at"])),
    Column("XID", lambda fault: str(fault["xid"]), right=True),
    Column("MEANING", lambda fault: fault["meaning"] or "-"),
)


def _why_down(node: dict[str, Any]) -> str | None:
    return node["why_not"] if node["state"] == "down" else None


def _print(cluster: dict[str, Any]) -> None:
    nodes, gpus = cluster["nodes"], cluster["gpus"]
    sys.stdout.write(tables.listing(_NODES, nodes))
    _set_labels(gpus, is_alone=len(nodes) == 1)
    sys.stdout.write("".join(f"{tables.folded(line)}\n" for line in _remarks(nodes)))
    from gpusched.cli.preset import line_of

    sys.stdout.write(tables.folded(f"preset: {line_of(cluster['preset'])}") + "\n")
    if not gpus:
        sys.stdout.write(without_gpus(nodes))
        return
    broken = {node["name"] for node in nodes if node["gpu_error"] and not node["message"]}
    columns = _GPUS if len(nodes) == 1 else (Column("NODE", lambda gpu: printable(gpu["node"])), *_GPUS)
    if "last_hour" in gpus[0]:
        from gpusched.cli.sparklines import last_hour

        columns = (*columns, Column("LAST HOUR", last_hour))
    if sys.stdout.isatty():
        # Sentences in a column of their own would leave too little width for all of them.
        sys.stdout.write("\n" + tables.listing(columns, gpus))
        whys = (f"GPU {gpu['label']} {gpu['state']}: {why}" for gpu in gpus if (why := _why(gpu, broken)))
        sys.stdout.write("".join(f"{tables.folded(why)}\n" for why in whys))
    else:
        sys.stdout.write("\n" + tables.listing([*columns, Column("WHY", lambda gpu: _why(gpu, broken))], gpus))
    of_host = [gpu["label"] for gpu in gpus if gpu["unified_memory"]]
    if of_host:
        which = f"GPU {of_host[0]} uses" if len(of_host) == 1 else f"GPUs {', '.join(of_host)} use"
        sys.stdout.write(f"{which} the host's memory: GPU memory booked there counts as host memory\n")
    shared = [
        (gpu, held)
        for gpu in gpus
        for held in gpu["booked_by"]
        if held["vram_mib"] is not None or gpu["mig_profile"] is not None
    ]
    if shared:
        sys.stdout.write("\nshared GPUs and how each job's GPU memory is enforced:\n")
        sys.stdout.write(tables.listing(_BOOKED_BY, shared))
    faults = [
        {**fault, "label": gpu["label"]}
        for gpu in gpus
        for fault in [fault for fault in gpu["faults"] if fault["is_hardware"]][-_FAULTS:]
    ]
    if faults:  # faults of programs are in --json only
        sys.stdout.write("\nhardware faults since boot:\n" + tables.listing(_HARDWARE_FAULTS, faults))
    foreign = [{**process, "label": gpu["label"]} for gpu in gpus for process in gpu["foreign"]]
    if foreign:
        sys.stdout.write("\nprocesses on GPUs without a booking:\n" + tables.listing(_UNBOOKED, foreign[:_FOREIGN]))
    if len(foreign) > _FOREIGN:
        sys.stdout.write(f"and {len(foreign) - _FOREIGN} more; all of them, and the jobs they delay: ginfo --foreign\n")


def _set_labels(rows: list[dict[str, Any]], *, is_alone: bool) -> None:
    """Give each row the name of its GPU as typed in commands: index, behind the node's name if there are several."""
    for row in rows:
        label = gpu_label(row["index"] if "index" in row else row["gpu"])
        row["label"] = label if is_alone else printable(f"{row['node']}:{label}")


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _used(gpu: dict[str, Any]) -> str:
    """Memory in use; unknown for a GPU that is only declared."""
    return "n/a" if gpu.get("is_declared") else format_size_mib(gpu["vram_used_mib"])


def _vram(row: tuple[dict[str, Any], dict[str, Any]], of_share: str, of_gpu: str) -> float | None:
    gpu, held = row
    found: float | None = gpu[of_gpu] if held["vram_mib"] is None else held[of_share]
    return found


def without_gpus(nodes: list[dict[str, Any]]) -> str:
    """Why there is no GPU to show; a failing driver is not the same as a machine without GPUs."""
    errors = [printable(node["gpu_error"]) for node in nodes if node["gpu_error"]]
    if errors:
        return f"no GPU can be read: {'; '.join(errors)}; see also: gpusched doctor\n"
    if any(node["gpu_source"] in ("nvml", "amdsmi") for node in nodes):
        return "the driver lists no GPU; see what is wrong with: gpusched doctor\n"
    if any(node["notes"] for node in nodes):
        return "no GPUs here; see also: gpusched doctor\n"
    return "no GPUs here; try simulated ones: GPUSCHED_FAKE_GPUS=4x24GiB gpuschedd\n"


def _remarks(nodes: list[dict[str, Any]]) -> list[str]:
    """Labels, enforced limits and notes: each once, with the nodes that it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    for node in nodes:
        texts = [f"labels: {printable(', '.join(node['labels']))}"] if node["labels"] else []
        if node["isolation"]:
            texts.append(f"enforced limits: {_limits(node['isolation'])}")
        texts += [f"note: {printable(remark)}" for remark in node["notes"]]
        for text in dict.fromkeys(texts):
            about.setdefault(text, []).append(node["name"])
    return [text if len(names) == len(nodes) else f"{printable(fold(names))}: {text}" for text, names in about.items()]


def _limits(isolation: dict[str, Any]) -> str:
    """The limits that the kernel enforces on runs, why there are no more, and the processes it keeps off the GPUs."""
    parts = [key for key in ("memory", "tasks") if isolation[key] == "cgroup"]
    if isolation["cpus"] != "none":
        parts.append("own CPUs" if isolation["cpus"] == "own" else "CPU weight")
    if isolation["gpus"] == "device rule":
        parts.append("GPUs")
    if isolation["tmp"] == "own":
        parts.append("/tmp")
    why = "" if isolation["why_not"] is None else f" ({printable(isolation['why_not'])})"
    if not parts:
        return f"none, requests are only booked{why}"
    guard = ", ".join(map(printable, isolation["guard"]))
    return f"{', '.join(parts)}{why}; kept off the GPUs: {guard or 'no other processes, see gpusched system guard'}"


def _model(gpu: dict[str, Any]) -> str:
    """The model without the vendor's name; of a MIG instance its profile and parent GPU."""
    if gpu["mig_profile"] is None:
        return printable(gpu["name"].removeprefix("NVIDIA "), 28)
    return printable(f"MIG {gpu['mig_profile']} of GPU {gpu_label(gpu['index']).partition(':')[0]}", 28)


def _why(gpu: dict[str, Any], broken: Collection[str]) -> str:
    """The reason of the state without its name. Args: broken: nodes whose notes say why none of their GPUs is read."""
    if gpu["state"] == "unknown" and gpu["node"] in broken:
        return ""
    return printable(gpu["detail"] or "")


def _print_budgets(budgets: list[dict[str, Any]]) -> None:
    """A line for each budget of a whole account."""
    whole = [row for row in budgets if row["user"] is None]
    if whole:
        sys.stdout.write("\nbudgets:\n")
    for row in whole:
        left, granted = format_hours(row["left_gpu_hours"], down=True), format_amount(row["granted_gpu_hours"])
        text = f"{left} of {granted} GPU-hours of {printable(row['period'])} left"
        sys.stdout.write(tables.folded(f"{printable(row['account'])}: {text}") + "\n")


def _print_queues(cluster: dict[str, Any]) -> None:
    """Print queues, unless there is only one with no guarantee and no limit, which is not paused."""
    queues = cluster["queues"]
    is_paused = any(row.get("state") == "paused" for row in queues)
    has_limits = any(row["guaranteed_gpus"] or row["max_gpus"] is not None for row in queues)
    if len(queues) > 1 or has_limits or is_paused:
        from gpusched.cli.accounts import print_queues

        sys.stdout.write("\nqueues, in GPUs:\n")
        print_queues(queues, cluster["loans"])


def show_foreign(values: Values) -> int:
    """Print processes without a booking, one row for each GPU that a process uses."""
    with connect() as client:
        found = client.call("GET", "/v1/foreign")
    rows = found["foreign"]
    if output.show(values, found, sorted({row["pid"] for row in rows})):
        return 0
    if not rows:
        sys.stdout.write("no processes on GPUs without a booking\n")
        return 0
    _set_labels(rows, is_alone=len(found["nodes"]) == 1)
    columns = [*_FOREIGN_USE]
    if any(row["job"] is not None for row in rows):
        columns.append(Column("OF", lambda row: owner_of(row["job"])))
    if any(row["told_at"] is not None for row in rows):
        columns.append(Column("NOTIFIED", _told))
    sys.stdout.write(tables.listing(columns, rows))
    count = found["jobs_kept_waiting"]
    if count:
        jobs = plural(count, "pending job")
        sys.stdout.write(f"{jobs} would start now without them\n")
    return 0


def owner_of(job: str | None) -> str:
    """The job that a process without a booking belongs to; `-` for a job the caller must not see."""
    if job is None:
        return "no job"
    return f"{'another job' if job == '-' else f'job {job}'}, which did not book it"


def _told(row: dict[str, Any]) -> str:
    """When and how its owner was last notified, or why not; whether it is being ended."""
    if row["told_at"] is None:
        return "-"
    ways = " by " + "+".join(row["told_by"]) if row["told_by"] else ""
    if not ways and row["untold"] is not None:
        ways = f" (not: {row['untold']})"
    ended = ", being terminated" if row["ending_at"] is not None else ""
    return f"{format_duration(max(0.0, time.time() - row['told_at']))} ago{printable(ways, 80)}{ended}"


def _lasting(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
