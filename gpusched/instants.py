"""Parsing and formatting of instants, in local time."""

from __future__ import annotations

import time

from gpusched.model.units import parse_duration_s, printable

_UNITS = {"second": "s", "minute": "m", "hour": "h", "day": "d", "week": "w"}


def instant(at: float | None) -> str:
    """Local time to the second, `-` for none."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def parse_instant(text: str, now: float | None = None) -> float:
    """UTC epoch seconds of `now+2h`, `2h`, `now+1hour`, `18:00`, `tomorrow`, `2026-12-24[T18:00[:00]]`, `@1766600000`.

    A time of day in the past means tomorrow's, as in Slurm. Raises: ValueError.
    """
    now = time.time() if now is None else now
    word = text.strip()
    if word.startswith("now"):
        rest = word[3:]
        if not rest:
            return now
        if rest.startswith("+"):
            return now + _offset(rest[1:], text)
    if word[:1].isdigit() and word[-1:] in "smhdw":
        return now + parse_duration_s(word)
    if word.startswith("@") and word[1:].isdigit() and len(word) < 13:
        return float(word[1:])
    if word in ("today", "tomorrow", "midnight", "noon"):
        return _word(word, now)
    found = _date(word)
    if found is not None:
        return found
    found = _clock(word, now)
    if found is not None:
        return found
    raise ValueError(
        f"{printable(text, 40)!r} is not an instant; write now+2h, 18:00, tomorrow, 2026-12-24 or 2026-12-24T18:00"
    )


def _offset(rest: str, text: str) -> float:
    digits = rest.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = rest[len(digits) :]
    if not digits.isdigit():
        return float(parse_duration_s(rest))
    if not unit:
        # Slurm's bare number here is seconds, not minutes.
        return float(digits[:12])
    short = _UNITS.get(unit.removesuffix("s"))
    try:
        return float(parse_duration_s(digits + (short or unit)))
    except ValueError:
        raise ValueError(f"{printable(text, 40)!r} is not an instant; write now+2h or now+30minutes") from None


def _word(word: str, now: float) -> float:
    year, month, day, *_ = time.localtime(now)
    if word == "today":
        return now
    if word == "noon":
        noon = _local(year, month, day, 12)
        return noon if noon > now else _local(year, month, day + 1, 12)
    return _local(year, month, day + 1)


def _local(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> float:
    # mktime normalises day 32 and knows about daylight saving (-1).
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


def _date(word: str) -> float | None:
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            parts = time.strptime(word, form)
        except ValueError:
            continue
        try:
            return time.mktime((*parts[:6], 0, 0, -1))
        except OverflowError:
            return None
    return None


def _clock(word: str, now: float) -> float | None:
    for form in ("%H:%M:%S", "%H:%M"):
        try:
            parts = time.strptime(word, form)
        except ValueError:
            continue
        year, month, day, *_ = time.localtime(now)
        at = _local(year, month, day, parts.tm_hour, parts.tm_min, parts.tm_sec)
        return at if at > now else _local(year, month, day + 1, parts.tm_hour, parts.tm_min, parts.tm_sec)
    return None


def parse_since(text: str, now: float | None = None) -> float:
    """An instant in the past: an age (`7d`, `12h`) or any instant. Raises: ValueError."""
    now = time.time() if now is None else now
    if text[-1:] in "smhdw" and text[:1].isdigit():
        return now - parse_duration_s(text)
    return parse_instant(text, now)
