"""`ghist --statement`: a month's account of GPU-hours, energy and budgets, as table, CSV, JSON or page to print."""

from __future__ import annotations

import os
import sys

from gpusched.cli import output, tables
from gpusched.cli.query import quote
from gpusched.cli.tables import Column, decimals
from gpusched.client import connect
from gpusched.errors import Refused, UsageError
from gpusched.model.units import format_hours, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from gpusched.cli.parse import Values

_OTHERS = "ids users names queues states since limit efficiency usage by".split()
_FORMULA = ("=", "+", "-", "@")
"""What spreadsheets take for a formula at the start of a field."""


def show_statement(values: Values) -> int:
    """Print or write the statement of one month. Raises: UsageError, Refused where the file cannot be written."""
    odd = [name for name in _OTHERS if values.get(name)]
    if odd:
        raise UsageError("--statement covers a whole month and takes no filters", "for example: ghist --statement last")
    if values.get("html") and (values.get("csv") or values.get("json")):
        raise UsageError("--html, --csv and --json exclude each other", "for example: ghist --statement last --csv")
    with connect() as client:
        found = client.call("GET", f"/v1/statement?month={quote(values['statement'])}")
    rows = found["rows"]
    if values.get("html"):
        _write(values["html"], page(found))
    elif values.get("csv") and not values.get("json"):
        _print_csv(found)
    elif not output.show(values, found, (row["account"] for row in rows if row["account"] and not row["user"])):
        sys.stdout.write(f"{title(found)}\n")
        tables.page(tables.listing(_columns(found), rows), not values.get("no_pager"))
    for text in notes(found):
        output.note("ghist", text)
    return 0


def title(found: dict[str, Any]) -> str:
    """`GPU use of November 2026 on lab1 (CET), until 23 Nov 14:00`."""
    text = f"GPU use of {found['month']} on {printable(found['cluster_name'])} ({found['time_zone']})"
    if found["now"] < found["until"]:
        text += f", until {tables.minute(found['now'])}"
    return text


def notes(found: dict[str, Any]) -> list[str]:
    """What the figures do not contain."""
    told = []
    open_runs = found["rows"][0]["open_runs"]
    if open_runs:
        are = "run goes" if open_runs == 1 else "runs go"
        told.append(f"{open_runs} {are} on: energy and use of such runs are known when they end")
    if not found.get("is_as_set_then", True) and any(row["budget"] for row in found["rows"]):
        told.append("the record of settings begins after this month: budgets and weights are today's")
    if not found["is_complete"]:
        told.append("jobs of this month have been pruned already ([history] keep_days); the figures are too low")
    return told


def _columns(found: dict[str, Any]) -> list[Column]:
    rows = found["rows"]
    columns = [
        Column("ACCOUNT", _account),
        Column("USER", lambda row: printable(row["user"] or "")),
        Column("JOBS", lambda row: str(row["jobs"]), right=True),
        Column("GPU_HOURS", lambda row: decimals(row["gpu_hours"]), right=True),
        Column("BUSY", lambda row: decimals(row["gpu_hours_used"]), right=True),
        Column("CPU_HOURS", lambda row: decimals(row["cpu_hours"]), right=True),
    ]
    if any(row.get("gpu_hours_filler") for row in rows):
        columns.insert(5, Column("FILLER", lambda row: decimals(row["gpu_hours_filler"]), right=True))
    if any(row["energy_kwh"] is not None for row in rows):
        columns.append(Column("KWH", lambda row: decimals(row["energy_kwh"]), right=True))
    if any(row["grams"] is not None for row in rows):
        columns.append(Column("CO2_KG", lambda row: decimals(row["grams"], 1000), right=True))
    if any(row["cost"] is not None for row in rows):
        columns.append(Column(printable(found["currency"] or "COST"), lambda row: decimals(row["cost"]), right=True))
    columns += [
        Column("SHARE", lambda row: _percent(row["share_used"]), right=True),
        Column("FAIR", lambda row: _percent(row["fair_share"]), right=True),
    ]
    if any(row["budget"] for row in rows):
        columns.append(Column("BUDGET", lambda row: _budget(row, "granted_gpu_hours"), right=True))
        columns.append(Column("CHARGED", lambda row: _budget(row, "used_gpu_hours"), right=True))
        if _has_booked(rows):
            columns.append(Column("BOOKED", lambda row: _budget(row, "booked_gpu_hours"), right=True))
        columns.append(Column("LEFT", lambda row: _budget(row, "left_gpu_hours", down=True), right=True))
    return columns


def _account(row: dict[str, Any]) -> str:
    if row["account"] is None:
        return "(all)"
    name = "" if row["user"] else printable(row["account"])
    return "  " * int(row["depth"] - 1) + name


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _has_booked(rows: Iterable[dict[str, Any]]) -> bool:
    return any(row["budget"] and row["budget"].get("booked_gpu_hours") for row in rows)


def _budget(row: dict[str, Any], key: str, *, down: bool = False) -> str:
    return "" if row["budget"] is None else format_hours(row["budget"][key], down=down)


# --- comma-separated values ---------------------------------------------------------------------

_PLAIN = (
    *("jobs", "runs", "gpu_hours", "gpu_hours_used", "gpu_hours_charged", "gpu_hours_filler"),
    *("cpu_hours", "cpu_hours_used", "energy_kwh", "grams", "cost"),
)
_OF_BUDGET = ("period", "granted_gpu_hours", "used_gpu_hours", "left_gpu_hours", "booked_gpu_hours")


def _print_csv(found: dict[str, Any]) -> None:
    import csv

    models = list(found["rows"][0]["gpu_hours_by_type"])
    writer = csv.writer(sys.stdout, lineterminator="\n")
    by_type = [_field(f"gpu_hours of {model or 'unknown'}") for model in models]
    writer.writerow(
        ["month", "account", "user", *_PLAIN, "currency", "fair_share", "share_used"]
        + [f"budget_{name}" for name in _OF_BUDGET]
        + by_type
    )
    for row in found["rows"]:
        budget = row["budget"] or {}
        writer.writerow(
            [found["month"], _field(row["account"] or ""), _field(row["user"] or "")]
            + [_number(row[name]) for name in _PLAIN]
            + [_field(found["currency"]), _number(row["fair_share"]), _number(row["share_used"])]
            + [budget.get("period", ""), *(_number(budget.get(name)) for name in _OF_BUDGET[1:])]
            + [_number(row["gpu_hours_by_type"].get(model, 0.0)) for model in models]
        )


def _field(text: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    shown = printable(text)
    return "'" + shown if shown.startswith(_FORMULA) else shown


def _number(amount: float | None) -> str:
    """Six decimals at most, empty where it is unknown."""
    return "" if amount is None else f"{amount:.6f}".rstrip("0").rstrip(".")


# --- page ---------------------------------------------------------------------------------------

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.4rem; margin: 0 0 .2rem } p { color: #555; margin: .2rem 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { border-bottom: 2px solid #888; font-weight: 600 } .t { text-align: left }
tr.account td { font-weight: 600 } tr.all td { font-weight: 600; border-bottom: 2px solid #888 }
tr { break-inside: avoid } thead { display: table-header-group }
@media print { body { margin: 0; max-width: none; font-size: 10px } th, td { padding: .15rem .3rem } }
@page { size: A4 landscape; margin: 14mm }
"""


def page(found: dict[str, Any]) -> str:
    """The statement as one HTML file that loads nothing and runs nothing."""
    from html import escape

    rows = found["rows"]
    models = list(rows[0]["gpu_hours_by_type"])
    head = escape(title(found))
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
        f"<title>{head}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{head}</h1>",
        f"<p>{escape(_explained(found))}</p>",
        _table([column.title for column in _columns(found)], _cells(_columns(found), rows), rows, escape),
    ]
    if any(models):
        parts.append("<h1>GPU-hours by type</h1>")
        by_type = [Column("ACCOUNT", _account), Column("USER", lambda row: printable(row["user"] or ""))]
        by_type += [Column(printable(model or "unknown"), _of_model(model), right=True) for model in models]
        parts.append(_table([column.title for column in by_type], _cells(by_type, rows), rows, escape))
    parts += [f"<p>{escape(text)}</p>" for text in notes(found)]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _explained(found: dict[str, Any]) -> str:
    text = "GPU_HOURS: held by running jobs. BUSY: the part in which kernels ran. "
    if any(row.get("gpu_hours_filler") for row in found["rows"]):
        text += "FILLER: the part that was held on spent budgets, which is not charged. "
    text += "FAIR: share of the machine by the "
    text += "accounts' shares; SHARE: of what was used. "
    budgets = {row["budget"]["period"] for row in found["rows"] if row["budget"]}
    if budgets - {found["month"]}:
        text += f"Budgets are of {', '.join(sorted(budgets))}. "
    if _has_booked(found["rows"]):
        text += "BOOKED: what running jobs may still use until their time limits. "
    return (
        text
        + "Runs over the end of a month are split. CHARGED leaves out runs whose node failed or that were preempted."
    )


def _of_model(model: str) -> Any:
    return lambda row: decimals(row["gpu_hours_by_type"].get(model, 0.0))


def _cells(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [list(line) for line in tables.rows_of(columns, rows)]


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[dict[str, Any]], escape: Any) -> str:
    head = "".join(f'<th scope="col"{_class(place)}>{escape(text)}</th>' for place, text in enumerate(titles))
    body = []
    for line, row in zip(lines, rows, strict=True):
        kind = "all" if row["account"] is None else "user" if row["user"] else "account"
        indent = f' style="padding-left: {row["depth"]}rem"'
        cells = "".join(
            f"<td{_class(place)}{indent if place == 0 else ''}>{escape(text.strip())}</td>"
            for place, text in enumerate(line)
        )
        body.append(f'<tr class="{kind}">{cells}</tr>')
    rest = "\n".join(body)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rest}\n</tbody>\n</table>"


def _class(place: int) -> str:
    return ' class="t"' if place < 2 else ""


def _write(path: str, text: str) -> None:
    """Write the page, whole or not at all; `-` is standard output. Raises: Refused."""
    if path == "-":
        sys.stdout.write(text)
        return
    draft = f"{path}.{os.getpid()}.new"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        if os.path.exists(draft):
            os.unlink(draft)
        raise Refused(f"{printable(path)} cannot be written: {error.strerror}", "name another file") from None
