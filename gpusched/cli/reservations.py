"""`gctl reserve` and `unreserve`, and the table of reservations."""

from __future__ import annotations

import sys

from gpusched.cli import output, tables
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import format_duration, format_size_mib, gpu_list, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

FIELDS = (
    "start_at duration_s every_s until_at gpus cards is_node nodelist cpus mem_mib is_maintenance users accounts "
    "ignore_jobs"
).split()
"""Fields of the request that the options of `gctl reserve` set."""

_EXAMPLE = "for example: gctl reserve course --start 14:00 --duration 4h --gpus 2 --users ann,bob"
_RESERVATIONS = (
    Column("NAME", lambda one: printable(one["name"])),
    Column("STATE", lambda one: "active" if one["is_active"] else "coming"),
    Column("BEGINS", lambda one: tables.minute(one["next"]["start_at"])),
    Column("ENDS", lambda one: tables.minute(one["next"]["end_at"])),
    Column("EVERY", lambda one: period(one["every_s"]) if one["every_s"] else "-"),
    Column("KEEPS", lambda one: keeps(one)),
    Column("FOR", lambda one: printable(whom(one))),
)


def reserve(names: list[str], values: Values) -> int:
    """Create a reservation, or list all if none is named."""
    asked = {name: values[name] for name in (*FIELDS, "message") if name in values}
    if not names:
        if asked:
            raise UsageError("the reservation has no name", _EXAMPLE)
        return _list(values)
    if len(names) > 1:
        raise UsageError(f"unexpected argument {printable(names[1], 40)!r}", _EXAMPLE)
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
        span = f"{tables.minute(window['start_at'])} to {tables.minute(window['end_at'])}"
        again = f", every {period(made['every_s'])}" if made["every_s"] else ""
        sys.stdout.write(f"reserved {printable(made['name'])}: {keeps(made)}, {span}{again}\n")
    for text in (*answer["notes"], *_unknown_users(made["users"])):
        output.note("gctl", printable(text))
    return 0


def unreserve(names: list[str], values: Values) -> int:
    if not names:
        raise UsageError("unreserve needs a name", "for example: gctl unreserve course")
    with connect() as client:
        answer = client.call("POST", "/v1/unreserve", {"names": names})
    if values.get("json"):
        output.print_json(answer)
        return 0
    for name in answer["changed"]:
        sys.stdout.write(f"{printable(name)}\n" if values.get("quiet") else f"unreserved {printable(name)}\n")
    if answer["waiting"]:
        ids = ",".join(answer["waiting"])
        output.note("gctl", f"jobs that requested it stay pending until they are moved or cancelled: {ids}")
    return 0


def print_reservations(found: list[dict[str, Any]]) -> None:
    """Print reservations, the next one first."""
    sys.stdout.write(tables.listing(_RESERVATIONS, found))


def whom(one: dict[str, Any]) -> str:
    """The users and accounts of a reservation, or its reason."""
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
    """The users and accounts of a reservation, or `maintenance` with its message."""
    for name, length_s in (("week", 604800), ("day", 86400), ("hour", 3600)):
        if every_s % length_s == 0:
            count = every_s // length_s
            return name if count == 1 else f"{count} {name}s"
    return format_duration(every_s)


def _list(values: Values) -> int:
    with connect() as client:
        answer = client.call("GET", "/v1/reservations")
    found = answer["reservations"]
    if output.show(values, answer, (one["name"] for one in found)):
        return 0
    if found:
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
            unknown.append(f"user {name} does not exist on this machine yet")
    return unknown
