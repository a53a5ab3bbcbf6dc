"""gctl preset: the preset in force and its reason, and the outcome of each preset over the last weeks."""

from __future__ import annotations

import sys

from gpusched.cli import output, tables
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.instants import instant
from gpusched.model.units import format_duration, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_TITLES = ("PRESET", "IN FORCE", "COMPLETION", "WAIT", "WIDE", "LONGEST", "LIGHT USERS", "GAIN", "P", "NOTE")


def show(_: str, operands: list[str], values: Values) -> int:
    """Print the table, or have the daemon judge the presets again."""
    if operands:
        hint = f"to choose one, set [priority] preset to {operands[0]}, then: gctl reload"
        raise UsageError(f"preset takes no operand, not {printable(operands[0], 40)!r}", printable(hint, 120))
    with connect() as client:
        if values.get("judge"):
            answer = client.call("POST", "/v1/preset/judge", {})
        else:
            answer = client.call("GET", "/v1/preset")
    found = answer["preset"]
    if output.show(values, answer, [found["in_force"]]):
        return 0
    sys.stdout.write(f"preset: {line_of(found)}\n")
    if found["next_at"] is not None and not found["is_judging"]:
        sys.stdout.write(f"next trial: {instant(found['next_at'])}\n")
    if found["problem"] and found["setting"] != "auto":
        output.note("gctl", f"the last trial failed: {printable(found['problem'])}")
    if found["jobs"] is not None:
        jobs, since = plural(found["jobs"], "job"), instant(found["jobs_since_at"])
        sys.stdout.write(f"\n{jobs} that ended since {since}, replayed under every preset:\n")
        rows = [_row(one, found) for one in found["presets"]]
        tables.print_table(_TITLES, rows, frozenset(range(2, len(_TITLES) - 1)))
    elif found["setting"] != "auto" and not found["is_judging"]:
        output.note("gctl", "the presets have not been tried on this machine yet; to try them now: gctl preset --judge")
    if found["is_judging"]:
        output.note("gctl", "the last weeks are being replayed; see the result with: gctl preset")
    return 0


def line_of(found: dict[str, Any]) -> str:
    """The preset in force and its reason: `auto: fair; no other preset would be better, judged 2026-11-22 03:10`."""
    if found["setting"] != "auto":
        return printable(found["in_force"])
    judged = f", judged {instant(found['judged_at'])}" if found["judged_at"] is not None else ""
    failed = f"; the last trial failed: {found['problem']}" if found["problem"] else ""
    return printable(f"auto: {found['in_force']}; {found['why']}{judged}{failed}")


def _row(one: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    worth, gain = one["worth"], one["gain"]
    base = next(other["worth"] for other in found["presets"] if other["preset"] == found["compared_with"])
    return (
        one["preset"],
        "yes" if one["in_force"] else "",
        _time(worth["completion_s"]),
        _time(worth["wait_s"]),
        _time(worth["wide_wait_s"]),
        _time(worth["longest_wait_s"]),
        _time(worth["light_wait_s"]),
        "-" if gain is None else f"{1 - worth['completion_s'] / base['completion_s']:+.0%}",
        "-" if gain is None or not gain["parts"] else f"{gain['p']:.2g}",
        printable(one["excluded"] or ""),
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(round(seconds))
