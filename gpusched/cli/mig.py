"""`gctl mig`: which cards can be divided by MIG, how they are, and how they shall be."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpusched.cli import output, tables
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import format_size_mib, plural, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

_SET = "for example: gctl mig set lab1:0 3g.40gb,2x2g.20gb"
_CARDS = (
    Column("GPU", lambda card: printable(card["gpu"])),
    Column("NAME", lambda card: printable(card["name"].removeprefix("NVIDIA "), 28)),
    Column("LAYOUT", lambda card: printable(card["layout"])),
    Column("NEXT", lambda card: printable(card["wanted"] or "-")),
    Column("USED_BY", lambda card: printable(" ".join(one["job"] for one in card["held_by"]) or "-", 24)),
    Column("PROFILES", lambda card: " ".join(printable(one["name"]) for one in card["profiles"]) or "unknown until on"),
)
_PROFILES = (
    Column("PROFILE", lambda row: printable(row["name"])),
    Column("MEMORY", lambda row: format_size_mib(row["memory_mib"]), right=True),
    Column("SLICES", lambda row: str(row["slices"]), right=True),
    Column("MOST", lambda row: str(row["most"]), right=True),
)


def show(_: str, words: Sequence[str], values: Values) -> int:
    """`gctl mig [list [GPU]]`. Raises: UsageError."""
    if words[:1] not in ([], ["list"]):
        raise UsageError(f"gctl mig has no {printable(words[0], 40)}", "it has: list, set, forget; " + _SET)
    return _list(words[1:], values)


def change(action: str, words: Sequence[str], values: Values) -> int:
    """`gctl mig set GPU LAYOUT` and `gctl mig forget GPU`. Raises: UsageError, Refused."""
    if action == "mig forget":
        if len(words) != 1:
            raise UsageError("mig forget needs one GPU", "for example: gctl mig forget lab1:0")
        return _change(words[0], None, values)
    if len(words) < 2:
        raise UsageError("mig set needs a GPU and a layout", _SET)
    # `3g.40gb, 2g.20gb` arrives as several words.
    return _change(words[0], ",".join(part for word in words[1:] for part in word.split(",") if part), values)


def _list(names: Sequence[str], values: Values) -> int:
    with connect() as client:
        answer = client.call("GET", "/v1/mig")
    cards = answer["cards"]
    if names:
        wanted = names[0]
        cards = [one for one in cards if wanted in (one["gpu"], one["uuid"], one["node"], str(one["index"]))]
        if not cards or len(names) > 1:
            word = names[1] if len(names) > 1 else wanted
            raise UsageError(f"{printable(word, 60)!r} is not a card that can do MIG", "list those that can: gctl mig")
    if output.show(values, {**answer, "cards": cards}, (one["gpu"] for one in cards)):
        return 0
    if not cards:
        output.note("gctl", "no GPU here can do MIG: it takes an A100, H100 or similar, and a driver that answers")
    else:
        sys.stdout.write(tables.listing(_CARDS, cards))
        if names and len(cards) == 1 and cards[0]["profiles"]:
            sys.stdout.write("\n" + tables.listing(_PROFILES, cards[0]["profiles"]))
        for one in cards:
            _tell(one)
    return 0


def _tell(card: dict[str, Any]) -> None:
    """What the table does not say of a card."""
    gpu = printable(card["gpu"])
    if card["wanted"] is not None:
        who = f"set by {printable(card['set_by'], 32)}, {tables.minute(card['set_at'])}"
        why = card["waits"] or "it is idle: under way"
        output.note("gctl", f"{gpu} changes to {printable(card['wanted'])} ({who}): {printable(why, 200)}")
    elif card["failure"] is not None:
        output.note("gctl", f"{gpu} was not changed: {printable(card['failure'], 1000)}")
    elif card["made"] not in (None, card["layout"]) and card["layout"] != "unknown":
        output.note(
            "gctl",
            f"{gpu} was changed by other means after {printable(card['made'])} was set; a restart makes that again, "
            f"unless you forget it: gctl mig forget {gpu}",
        )
    if card["why_not"] is not None:
        output.note("gctl", f"{gpu} cannot be changed: {printable(card['why_not'], 200)}")


def _change(target: str, layout: str | None, values: Values) -> int:
    request = {"target": target, "layout": layout}
    with connect() as client:
        is_asked = output.asks(values)
        if values.get("dry_run") or (is_asked and layout is not None):
            plan = client.call("POST", "/v1/mig", {**request, "dry_run": True})["plan"]
            if values.get("dry_run"):
                return _show_plan(plan, values)
            if plan["is_changed"]:
                sys.stderr.write("".join(f"{line}\n" for line in _lines(plan)))
                output.confirm("gctl", f"change GPU {printable(plan['gpu'])}", "nothing was changed")
        plan = client.call("POST", "/v1/mig", request)["plan"]
    if output.show(values, {"plan": plan}, [plan["gpu"]] if plan["is_changed"] else []):
        return 0
    gpu = printable(plan["gpu"])
    if not plan["is_changed"]:
        output.note("gctl", f"GPU {gpu} had no layout by command" if layout is None else _same(plan))
    elif layout is None:
        sys.stdout.write(f"forgot the layout of {gpu}: it is not restored after a reboot\n")
    else:
        sys.stdout.write(f"set {_step(plan)}\n")
        _tell_notes(plan)
        if plan["before"] == plan["after"]:
            return 0
        held = plan["waits_for"]
        when = f"when {_jobs(held)} end{'s' if len(held) == 1 else ''}" if held else "now"
        output.note("gctl", f"{gpu} takes no new jobs; its layout is changed {when}: gctl mig list {gpu}")
    return 0


def _show_plan(plan: dict[str, Any], values: Values) -> int:
    if values.get("json"):
        output.print_json({"plan": plan})
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(plan)))
    return 0


def _lines(plan: dict[str, Any]) -> list[str]:
    if not plan["is_changed"]:
        return [_same(plan)]
    held = plan["waits_for"]
    lines = [f"GPU {_step(plan)}"]
    if plan["before"] != plan["after"]:
        lines.append(f"  waits for {_jobs(held)}; no new job starts on it" if held else "  it is idle: changed at once")
    return [*lines, *(f"  {printable(text)}" for text in plan["notes"])]


def _step(plan: dict[str, Any]) -> str:
    gpu, before, after = (printable(plan[key]) for key in ("gpu", "before", "after"))
    return (
        f"{gpu}: {before} -> {after}"
        if before != after
        else f"{gpu}: stays {after}, and the waiting change is cancelled"
    )


def _same(plan: dict[str, Any]) -> str:
    what = "is about to get" if plan["is_pending"] else "has"
    return f"GPU {printable(plan['gpu'])} {what} the layout {printable(plan['after'])} already: nothing to change"


def _tell_notes(plan: dict[str, Any]) -> None:
    for text in plan["notes"]:
        output.note("gctl", printable(text))


def _jobs(held: Sequence[dict[str, Any]]) -> str:
    """`job 41 (ann)`, `job 41 (ann) and 2 more jobs`."""
    first = f"job {printable(held[0]['job'])} ({printable(held[0]['user'], 32)})"
    return first if len(held) == 1 else f"{first} and {plural(len(held) - 1, 'more job')}"
