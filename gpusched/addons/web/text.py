"""Values as the pages write them. Everything is escaped by the templates; nothing here makes markup."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gpusched.addons.web.drawing import bar
from gpusched.model.units import format_duration, format_hours, format_size_mib, ordinal, printable

LONGEST_NAME = 60
_LONGEST_IDS = 15


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
        span=span,
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
        iso=iso,
        bar=bar,
        job_of_row=job_of_row,
    )
    return found


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
    return printable(str(text), width)


def words(text: Any) -> str:
    """A sentence with users' words in it."""
    return "" if text is None else printable(str(text), 2000)


def printable_lines(text: str) -> str:
    """Output of a job: lines and tabs stay, other control signs are shown; progress bars by their last state."""
    shown = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(printable(line.expandtabs(8), 2000) for line in shown)


def job_of_row(shown_id: str) -> str:
    """The id in the address of a job's page: an array's row `8_[0-19]` leads to the array."""
    return shown_id.partition("_")[0] if "[" in shown_id else shown_id
