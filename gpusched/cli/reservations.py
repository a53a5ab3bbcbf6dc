"""`gctl reserve` and `unreserve`, and the table of reservations."""

from __future__ import annotations

import sys

from gpusched.cli import output, tables
from gpusched.cli.actions import ACTIONS, RESERVE
from gpusched.cli.query import ids_in, is_user
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import format_duration, format_size_mib, gpu_list, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_FIELDS = [option.key or option.long.lstrip("-").replace("-", "_") for option in RESERVE]
_EXAMPLE = f"for example: {ACTIONS['reserve'].example}"
_RESERVATIONS = (
    Column("NAME", lambda one: printable(one["name"])),
    Column("STATE", lambda one: "active" if one["is_active"] else "coming"),
    Column("BEGINS", lambda one: tables.minute(one["next"]["start_at"])),
    Column("ENDS", lambda one: tables.minute(one["next"]["end_at"])),
    Column("EVERY", lambda one: period(one["every_s"]) if one["every_s"] else "-"),
    Column("KEEPS", lambda one: keeps(one)),
    Column("FOR", lambda one: printable(whom(one))),
)


def reserve(_: str, names: list[str], values: Values) -> int:
    """Create a reservation, or list all if none is named."""
    asked = {name: values[name] for name in _FIELDS if name in values}
    if not names:
        if asked:
            raise UsageError("the reservation has no name", _EXAMPLE)
        return _list(values)
    output.no_operands(names[1:], _EXAMPLE)
    for key, option in (("start_at", "--start"), ("duration_s", "--duration")):
        if key not in asked:
            raise UsageError(f"{option} is missing", _EXAMPLE)
    with connect() as client:
        answer = client.call("POST", "/v1/reservations", {"name": names[0], **asked})
    made = answer["reservation"]
    if not output.show(values, answer, [made["name"]]):
        window = made["next"]
        span = f"{tables.minute(window['start_at'])} to {tables.minute(window['end_at'])}"
        again = f", every {period(made['every_s'])}" if made["every_s"] else ""
        sys.stdout.write(f"reserved {printable(made['name'])}: {keeps(made)}, {span}{again}\n")
    if values.get("json"):
        return 0
    output.notes("gctl", answer)
    for name in made["users"]:
        if not is_user(name):
            output.note("gctl", f"user {printable(name)} does not exist on this machine yet")
    return 0


def unreserve(_: str, words: list[str], values: Values) -> int:
    """Delete reservations, and name the jobs that asked for them."""
    names = ids_in(words)
    if not names:
        raise UsageError("unreserve needs a name", "for example: gctl unreserve course")
    with connect() as client:
        answer = client.call("POST", "/v1/unreserve", {"names": names})
    if not output.show(values, answer, answer["changed"]):
        sys.stdout.write("".join(f"unreserved {printable(name)}\n" for name in answer["changed"]))
    if answer["waiting"] and not values.get("json"):
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
    """The time between two repetitions: `week`, `2 days`, `1:30:00`."""
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
