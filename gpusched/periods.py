"""Periods of accounting: calendar months, quarters and years, in the daemon's time zone."""

from __future__ import annotations

import re
import time

from gpusched.model.units import printable
from gpusched.model.value import Value

_MONTH = re.compile(r"(\d{4})-(\d\d)")
_MONTHS_OF = {"month": 1, "quarter": 3, "year": 12}


class Period(Value):
    """One period of accounting, in local time."""

    since: float
    until_at: float | None
    name: str
    """As the end of a sentence: ` of November 2026`; empty for the whole time."""
    again: str
    """When the next one begins: `1 Dec`."""


def period_at(now: float, kind: str) -> Period:
    """The period that contains this instant: a calendar month, quarter or year, or all time."""
    if kind == "total":
        return Period(0.0, None, "", "")
    year, month, *_ = time.localtime(now)
    length = _MONTHS_OF[kind]
    first = (month - 1) // length * length + 1
    since, until_at = (time.mktime((year, one, 1, 0, 0, 0, 0, 0, -1)) for one in (first, first + length))
    shown = time.localtime(since)
    name = {"month": time.strftime("%B %Y", shown), "quarter": f"quarter {(first + 2) // 3} of {year}"}
    again = time.localtime(until_at)
    return Period(since, until_at, f" of {name.get(kind, str(year))}", f"1 {time.strftime('%b', again)}")


def month_named(text: str, now: float) -> Period:
    """The calendar month of `2026-11`, `this` or `last`. Raises: ValueError."""
    this = period_at(now, "month")
    if text == "this":
        return this
    if text == "last":
        return period_at(this.since - 1, "month")
    found = _MONTH.fullmatch(text)
    if found is None or not 1970 < int(found[1]) < 3000 or not 1 <= int(found[2]) <= 12:
        raise ValueError(f"{printable(text, 40)!r} is not a month; write 2026-11, this or last")
    return period_at(time.mktime((int(found[1]), int(found[2]), 2, 0, 0, 0, 0, 0, -1)), "month")


def zone_at(now: float) -> str:
    """Name of the local time zone at an instant: `CET`."""
    return time.strftime("%Z", time.localtime(now))
