"""Reads the file of `[energy] tariff`: prices and emissions of electricity over time.

    start,price_per_kwh,g_per_kwh
    2026-11-23T00:00:00+01:00,0.21,310
    2026-11-23T01:00:00+01:00,0.19,

RFC 3339 instants with an offset, rising; decimals with a point. A row holds until the next one, the last one as long as
the row before it. An empty field means the fixed value of the settings. Either column of figures may be left out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import datetime

from gpusched.errors import Refused, UsageError
from gpusched.model.settings import EnergySettings
from gpusched.model.tariff import Tariff, TariffRow
from gpusched.model.units import printable
from gpusched.paths import MAX_TEXT, read_at_most

_START = "start"
_FIGURES = {"price_per_kwh": (-100.0, 1000.0), "g_per_kwh": (0.0, 5000.0)}
"""Columns and what they may hold: prices below zero do occur."""
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?(?P<offset>[Zz]|[+-]\d\d:\d\d)?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?")
_HINT = "see docs/howto/energy.md; check it with: gpusched config check"


class TariffError(UsageError):
    """A file of prices that cannot be used, with its line."""


def parse_tariff(content: bytes, path: str) -> tuple[tuple[TariffRow, ...], float | None]:
    """Rows, and the end of the last one, None without an end. Raises: TariffError with file and line."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise TariffError(f"{path}:{line}: it is not UTF-8 text", _HINT) from None
    lines = _lines(text, path)
    _, titles = next(lines, (0, []))
    places = _places(titles, path)
    rows: list[TariffRow] = []
    for number, fields in lines:
        where = f"{path}:{number}"
        if len(fields) != len(titles):
            what = ": write decimals with a point, 0.28" if len(fields) > len(titles) else ""
            raise TariffError(f"{where}: {len(fields)} fields where the first line has {len(titles)}{what}", _HINT)
        row = TariffRow(
            _instant(fields[places[_START]], where),
            **{name: _number(fields[places[name]], name, where) for name in _FIGURES if name in places},
        )
        if rows and row.start_at <= rows[-1].start_at:
            order = "repeats" if row.start_at == rows[-1].start_at else "lies before"
            raise TariffError(f"{where}: {fields[places[_START]]} {order} the instant of the row above", _HINT)
        rows.append(row)
    if not rows:
        raise TariffError(f"{path}: it has no rows", _HINT)
    last = rows[-1].start_at
    return tuple(rows), None if len(rows) < 2 else last + (last - rows[-2].start_at)


def read_tariff(settings: EnergySettings) -> Tariff:
    """The prices that these settings name. Raises: TariffError."""
    plain = Tariff(settings.price_per_kwh, settings.g_per_kwh, settings.currency, settings.pue)
    if settings.tariff is None:
        return plain
    try:
        with open(settings.tariff, "rb") as file:
            content = read_at_most(file, MAX_TEXT, settings.tariff, "name another file in [energy] tariff")
    except Refused as error:
        raise TariffError(error.message, error.hint) from None
    except OSError as error:
        raise TariffError(f"{settings.tariff}: {error.strerror}", "name another file in [energy] tariff") from None
    rows, end_at = parse_tariff(content, settings.tariff)
    return Tariff(settings.price_per_kwh, settings.g_per_kwh, settings.currency, settings.pue, rows, end_at)


def _lines(text: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of each line that is not blank."""
    reader = csv.reader(text.splitlines(), strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise TariffError(f"{path}:{reader.line_num}: {error}", _HINT) from None
        if fields is None:
            return
        if any(field.strip() for field in fields):
            yield reader.line_num, [field.strip() for field in fields]


def _places(titles: list[str], path: str) -> dict[str, int]:
    wanted = ",".join((_START, *_FIGURES))
    if not titles:
        raise TariffError(f"{path}: it is empty", f"its first line: {wanted}")
    if len(titles) == 1 and ";" in titles[0]:
        raise TariffError(f"{path}:1: fields are separated by commas, not semicolons", f"its first line: {wanted}")
    places: dict[str, int] = {}
    for place, title in enumerate(titles):
        if title not in (_START, *_FIGURES):
            raise TariffError(f"{path}:1: unknown column {printable(title, 40)!r}", f"its first line: {wanted}")
        if title in places:
            raise TariffError(f"{path}:1: the column {title} is there twice", f"its first line: {wanted}")
        places[title] = place
    if _START not in places or len(places) < 2:
        raise TariffError(f"{path}:1: it needs a column start and one of figures", f"its first line: {wanted}")
    return places


def _instant(word: str, where: str) -> float:
    found = _INSTANT.fullmatch(word)
    if found is not None and found["offset"] is None:
        raise TariffError(
            f"{where}: {word} has no offset; when it is depends on the time zone", f"write {word}+01:00 or {word}Z"
        )
    try:
        if found is None:
            raise ValueError
        plain = word[: found.start("offset")].upper()
        offset = found["offset"].upper().replace("Z", "+00:00")
        # Python 3.10 reads three or six decimals only; a price does not begin at a part of a second.
        return datetime.fromisoformat(plain.partition(".")[0] + offset).timestamp()
    except (ValueError, OverflowError):
        shown = printable(word, 40)
        raise TariffError(f"{where}: {shown!r} is not an instant such as 2026-11-23T14:00:00+01:00", _HINT) from None


def _number(word: str, name: str, where: str) -> float | None:
    if not word:
        return None
    if _NUMBER.fullmatch(word) is None:
        what = "; write decimals with a point, 0.28" if "," in word else ""
        raise TariffError(f"{where}: {name} is {printable(word, 40)!r}, not a number{what}", _HINT)
    value, (low, high) = float(word), _FIGURES[name]
    if not low <= value <= high:
        raise TariffError(f"{where}: {name} is {word}; it must be from {low:g} to {high:g}", _HINT)
    return value
