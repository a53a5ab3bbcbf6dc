"""Values as the pages write them. Everything is escaped by the templates; nothing here makes markup."""

from __future__ import annotations

import re
import time
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gpusched.addons.web.drawing import anchor, bar
from gpusched.cli.forecast import overtaken, unknown, up_to_minute
from gpusched.model.units import format_duration, format_hours, format_size_mib, ordinal, printable

LONGEST_NAME = 60
_LONGEST_IDS = 15
_CODE = re.compile(r"([^\x1b]*)\x1b(?:\[([0-9;:?]*[@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_=>()][0AB]?)?")
"""A text and the sequence that ends it: CSI, whose parameters and final letter are captured, OSC, or another."""


@cache
def environment() -> Environment:
    """Templates with escaping on."""
    found = Environment(
        loader=PackageLoader("gpusched.addons.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters.update(
        clock=clock,
        clock_after=clock_after,
        up=lambda at: up_to_minute(at, time.time()),
        overtaken=overtaken_in,
        span=span,
        step=step,
        size=size,
        name=name,
        words=words,
        percent=percent,
        percent_done=percent_done,
        ordinal=ordinal,
        first_ids=first_ids,
        number=number,
        decimal=decimal,
        hours=format_hours,
        plain=plain,
        lines=printable_lines,
        pieces=pieces,
        iso=iso,
        bar=bar,
        anchor=anchor,
        job_of_row=job_of_row,
    )
    found.globals.update(zone=zone, unknown=unknown)
    return found


def overtaken_in(rows: list[dict[str, Any]]) -> str:
    """`overtaken`, of rows of the board."""
    told = [(one["expected"]["high_at"], one) for one in rows if one.get("expected") and one["expected"]["high_at"]]
    told.sort(key=lambda entry: entry[0])
    return overtaken((one["id"], one["reason"]) for _, one in told)


def zone() -> str:
    """The server's time zone: `CET (UTC+01:00)`."""
    now = datetime.now().astimezone()
    offset = now.strftime("%z")
    shown = f"UTC{offset[:3]}:{offset[3:5]}"
    return "UTC" if now.tzname() == "UTC" else f"{now.tzname()} ({shown})"


def clock(at: float | None) -> str:
    """`14:05` of today, `Mon 14:05` within six days, else `1 Dec` or `1 Dec 2025`."""
    if at is None:
        return "-"
    moment, now = datetime.fromtimestamp(at), datetime.now()  # noqa: DTZ005, DTZ006
    days = abs((moment.date() - now.date()).days)
    if days == 0:
        return f"{moment:%H:%M}"
    if days < 7:
        return f"{moment:%a %H:%M}"
    return f"{moment.day} {moment:%b}" if moment.year == now.year else f"{moment.day} {moment:%b %Y}"


def clock_after(at: float, before_at: float) -> str:
    """As `clock`, for the end of a range: the day is left out if it is that of its begin."""
    begin, end = datetime.fromtimestamp(before_at), datetime.fromtimestamp(at)  # noqa: DTZ006
    is_by_clock = clock(before_at).endswith(f"{begin:%H:%M}")
    return f"{end:%H:%M}" if is_by_clock and begin.date() == end.date() else clock(at)


def iso(at: float) -> str:
    """For `datetime` of a time element."""
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


def span(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(max(0.0, seconds))


def step(seconds: float) -> str:
    """What a value is the mean of: `1 s`, `5 min`, `2 h`."""
    fitting = [(unit, word) for unit, word in ((3600, "h"), (60, "min")) if seconds >= unit and seconds % unit == 0]
    unit, word = fitting[0] if fitting else (1, "s")
    return f"{seconds / unit:g} {word}"


def size(mib: float | None) -> str:
    """`71G`; a missing reading is not zero."""
    return "n/a" if mib is None else format_size_mib(round(mib))


def percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{100 * fraction:.0f}%"


def percent_done(fraction: float) -> str:
    """Rounded down: 100% only at the end, as in `gq`."""
    return f"{int(100 * fraction)}%"


def first_ids(ids: str) -> str:
    """The first ranges of `3-5,7,11`; there is no room for more in a column."""
    if len(ids) <= _LONGEST_IDS or "," not in ids:
        return ids
    return (ids[:_LONGEST_IDS].rpartition(",")[0] or ids.partition(",")[0]) + ",..."


def number(value: float | None, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:,.0f}{unit}"


def decimal(value: float | None) -> str:
    """With one decimal place; what is hidden or unknown is not zero."""
    return "n/a" if value is None else f"{value:,.1f}"


def plain(value: float | None) -> str:
    """As short as it is exact: `2`, `0.5`."""
    return "n/a" if value is None else f"{value:g}"


def name(text: Any, width: int = LONGEST_NAME) -> str:
    """A user's word: one line, without signs that control or reorder text."""
    found = printable(str(text))
    return found if len(found) <= width else f"{found[: width - 1]}…"


def words(text: Any) -> str:
    """A sentence with users' words in it."""
    return "" if text is None else printable(str(text), 2000)


def printable_lines(text: str) -> str:
    """Lines and tabs of a text stay, other control signs are shown; progress bars by their last state."""
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(printable(line.expandtabs(8), 2000) for line in shown)


def pieces(text: str) -> list[tuple[str, str]]:
    """Output of a job as pieces with the classes of their colors; a terminal's other codes are left out."""
    found: list[tuple[str, str]] = []
    color, is_bold = "", False
    # Carriage returns first: a piece must not begin behind what its line overwrites.
    rest = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    for plain_text, codes in _CODE.findall(rest + "\x1b[m"):
        if plain_text:
            kind = " ".join(filter(None, (color, "bold" if is_bold else "")))
            found.append((kind, printable_lines(plain_text)))
        color, is_bold = _after(codes, color, is_bold)
    return found


def _after(codes: str, color: str, is_bold: bool) -> tuple[str, bool]:
    """Color and weight after a sequence; empty for one that says nothing about them."""
    if not codes.endswith("m"):
        return color, is_bold
    numbers = iter(int(word) if word.isdigit() else 0 for word in codes[:-1].split(";"))
    for number in numbers:
        if number == 0:
            color, is_bold = "", False
        elif number == 1:
            is_bold = True
        elif number == 22:
            is_bold = False
        elif number == 39:
            color = ""
        elif number in (38, 48):
            # One of 256 colors, or of 16 million: five or fewer numbers that are no codes.
            next(numbers, None)
            color = "c4" if number == 38 else color
            break
        elif 30 <= number < 38 or 90 <= number < 98:
            color = "" if number % 10 == 7 else f"c{number % 10}"
    return color, is_bold


def job_of_row(shown_id: str) -> str:
    """The id in the address of a job's page: an array's row `8_[0-19]` leads to the array."""
    return shown_id.partition("_")[0] if "[" in shown_id else shown_id
