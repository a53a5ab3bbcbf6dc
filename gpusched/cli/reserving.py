"""gctl reserve and gctl unreserve, and how reservations are shown: here and by ginfo."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import format_duration, format_size_mib, gpu_list, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

FIELDS = (
    "start_at duration_s every_s until_at gpus cards is_node cpus mem_mib is_maintenance users accounts ignore_jobs"
).split()
"""What options of `gctl reserve` set, by the names of the request."""

_EXAMPLE = "for example: gctl reserve course --start 14:00 --duration 4h --gpus 2 --users ann,bob"
_TITLES = ("NAME", "STATE", "BEGINS", "ENDS", "EVERY", "KEEPS", "FOR")


def reserve(names: list[str], values: Values) -> int:
    """Make a reservation, or list them all when none is named."""
    asked = {name: values[name] for name in (*FIELDS, "message") if name in values}
    if not names:
        if asked:
            raise UsageError("the reservation has no name", _EXAMPLE)
        return _list(values)
    if len(names) > 1:
        raise UsageError(f"unexpected word {printable(names[1], 40)!r}", _EXAMPLE)
    for key, option in (("start_at", "--start"), ("duration_s", "--duration")):
        if key not in asked:
            raise UsageError(f"{option} is missing", _EXAMPLE)
    with connect() as client:
        answer = client.call("POST", "/v1/reservations", {"name": names[0], **asked})
    made = answer["reservation"]
    if values.get("json"):
        output.print_json(answer)
        return 0
    if values.get("quiet"):
        sys.stdout.write(f"{printable(made['name'])}\n")
    else:
        window = made["next"]
        span = f"{_instant(window['start_at'])} to {_instant(window['end_at'])}"
        again = f", every {period(made['every_s'])}" if made["every_s"] else ""
        sys.stdout.write(f"reserved {printable(made['name'])}: {keeps(made)}, {span}{again}\n")
    for text in (*answer["notes"], *_unknown_users(made["users"])):
        output.note("gctl", printable(text))
    return 0


def unreserve(names: list[str], values: Values) -> int:
    """Take reservations out of the calendar."""
    if not names:
        raise UsageError("unreserve needs to know what", "for example: gctl unreserve course")
    with connect() as client:
        answer = client.call("POST", "/v1/unreserve", {"names": names})
    if values.get("json"):
        output.print_json(answer)
        return 0
    for name in answer["changed"]:
        sys.stdout.write(f"{printable(name)}\n" if values.get("quiet") else f"unreserved {printable(name)}\n")
    if answer["waiting"]:
        ids = ",".join(answer["waiting"])
        output.note("gctl", f"these jobs asked for it and wait until they are moved or cancelled: {ids}")
    return 0


def print_reservations(found: list[dict[str, Any]]) -> None:
    """A table of reservations, the next one first."""
    rows = [
        (
            printable(one["name"]),
            "active" if one["is_active"] else "coming",
            _instant(one["next"]["start_at"]),
            _instant(one["next"]["end_at"]),
            period(one["every_s"]) if one["every_s"] else "-",
            keeps(one),
            printable(_whom(one)),
        )
        for one in found
    ]
    tables.print_table(_TITLES, rows)


def _whom(one: dict[str, Any]) -> str:
    """For whom, or for what."""
    if one["is_maintenance"]:
        return "maintenance" + (f": {one['message']}" if one["message"] else "")
    return ", ".join([*one["users"], *(f"account {name}" for name in one["accounts"])])


def keeps(one: dict[str, Any]) -> str:
    """`node lab1`, or `lab1: GPUs 0,1, 8 CPUs, 32G`."""
    return "; ".join(_place(place) for place in one["held"])


def _place(place: dict[str, Any]) -> str:
    node = printable(place["node"])
    if place["is_node"]:
        return f"node {node}"
    indices = gpu_list(gpu["index"] for gpu in place["gpus"])
    parts = [f"GPU{'s' if len(place['gpus']) > 1 else ''} {indices}"] if indices else []
    parts.append(plural(place["cpus"], "CPU"))
    parts.append(format_size_mib(place["mem_mib"]))
    return f"{node}: {', '.join(parts)}"


def period(every_s: int) -> str:
    """`week`, `2 days`, `36:00:00`."""
    for name, length_s in (("week", 604800), ("day", 86400), ("hour", 3600)):
        if every_s % length_s == 0:
            count = every_s // length_s
            return name if count == 1 else f"{count} {name}s"
    return format_duration(every_s)


def _instant(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _list(values: Values) -> int:
    with connect() as client:
        answer = client.call("GET", "/v1/reservations")
    found = answer["reservations"]
    if values.get("json"):
        output.print_json(answer)
    elif values.get("quiet"):
        sys.stdout.write("".join(f"{printable(one['name'])}\n" for one in found))
    elif found:
        print_reservations(found)
    else:
        output.note("gctl", f"there are no reservations; {_EXAMPLE}")
    return 0


def _unknown_users(names: list[str]) -> list[str]:
    import pwd  # only when a reservation was made

    unknown = []
    for name in names:
        try:
            pwd.getpwnam(name)
        except KeyError:
            unknown.append(f"there is no user {name} on this machine yet")
    return unknown
