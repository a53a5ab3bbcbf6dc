"""Parsing and formatting of instants, in local time."""

from __future__ import annotations

import time

from gpusched.model.units import is_digits, parse_duration_s, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}
_HOURS = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}
_MOST_DIGITS = 12


def instant(at: float | None) -> str:
    """Local time to the second, `-` for none."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def parse_instant(text: str, now: float | None = None, *, is_past: bool = False) -> float:
    """UTC epoch seconds of `2h` from now, `@1766600000`, and all that Slurm reads.

    That is `HH:MM[:SS] [AM|PM]`, `MMDD[YY]`, `MM/DD[/YY]`, `MM.DD[.YY]`, `YYYY-MM-DD`, a date and a time with `T`,
    `-` or a blank between them, `today`, `tomorrow`, `midnight`, `noon`, `teatime`, `now[+N[minutes|...]]`, and
    `uts+N`. A time of day in the past means tomorrow's. Args: is_past: it lies in the past, today or yesterday, and
    so does a date without a year. Raises: ValueError.
    """
    try:
        return _read(text.strip().lower(), time.time() if now is None else now, is_past)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{printable(text, 40)!r} is not an instant; write now+2h, 18:00, tomorrow, 2026-12-24 or 2026-12-24T18:00"
        ) from None


def _read(word: str, now: float, is_past: bool) -> float:
    if word.startswith("now"):
        return now + _offset(word[3:])
    if word[:1].isdigit() and word[-1:] in "smhdw" and not word.endswith(("am", "pm")):
        return now + parse_duration_s(word)
    for sign in ("@", "uts+"):
        if word.startswith(sign) and len(word) < 16:
            return float(_digits(word.removeprefix(sign)))
    for name in ("today", "tomorrow"):
        # Days by the calendar, not by the clock: some have 23 or 25 hours.
        if word.startswith((f"{name}+", f"{name}-")) and ":" not in word:
            moved = time.localtime(_local(*_date(name, time.localtime(now)), (12, 0, 0)) + _offset(word[len(name) :]))
            return _local(moved[0], moved[1], moved[2], (0, 0, 0))
    date: tuple[int, int, int] | None = None
    clock: tuple[int, int, int] | None = None
    today = time.localtime(now)[:3]
    for token in _tokens(word):
        if token in ("am", "pm"):
            if clock is None:
                raise ValueError(word)
            clock = _half(clock, token)
        elif token in _HOURS or ":" in token or token[-2:] in ("am", "pm"):
            if clock is not None:
                raise ValueError(word)
            clock = _clock(token)
        elif date is None:
            date = _date(token, today, is_past)
        else:
            raise ValueError(word)
    if date is None and clock is None:
        raise ValueError(word)
    year, month, day = date or today
    found = _local(year, month, day, clock or (0, 0, 0))
    if date is None and (found > now) is is_past:
        found = _local(year, month, day + (-1 if is_past else 1), clock or (0, 0, 0))
    return found


def parse_since(text: str, now: float | None = None) -> float:
    """An instant in the past: an age (`7d`, `12h`) or any instant. Raises: ValueError."""
    now = time.time() if now is None else now
    if text[-1:] in "smhdw" and text[:1].isdigit():
        return now - parse_duration_s(text)
    return parse_instant(text, now)


def _tokens(word: str) -> list[str]:
    """Dates, times and words of a text."""
    found = []
    for token in word.split():
        for mark in ("t", "-"):
            date, between, clock = token.partition(mark) if mark == "t" else token.rpartition(mark)
            if between and ":" in clock and date[:1].isdigit():
                found += [date, clock]
                break
        else:
            found.append(token)
    return found


def _offset(rest: str) -> float:
    if not rest:
        return 0.0
    amount = rest[1:]
    digits = amount.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = amount[len(digits) :]
    if rest[0] not in "+-":
        raise ValueError(rest)
    # A bare number is seconds.
    known = [factor for name, factor in _UNITS_S.items() if name.startswith(unit.removesuffix("s") or "s")]
    seconds = _digits(digits) * known[0] if known and is_digits(digits) else parse_duration_s(amount)
    return float(seconds if rest[0] == "+" else -seconds)


def _digits(text: str) -> int:
    if not is_digits(text):
        raise ValueError(text)
    return int(text[:_MOST_DIGITS])


def _clock(token: str) -> tuple[int, int, int]:
    if token in _HOURS:
        return _HOURS[token], 0, 0
    half = token[-2:] if token[-2:] in ("am", "pm") else ""
    parts = [_digits(part) for part in token.removesuffix(half).split(":")]
    hour, minute, second = _three(parts, 0)
    if hour > 23 or minute > 59 or second > 60 or (len(parts) < 2 and not half):
        raise ValueError(token)
    return _half((hour, minute, second), half) if half else (hour, minute, second)


def _half(clock: tuple[int, int, int], half: str) -> tuple[int, int, int]:
    """A time on a clock of twelve hours."""
    if not 1 <= clock[0] <= 12:
        raise ValueError(half)
    return clock[0] % 12 + (12 if half == "pm" else 0), *clock[1:]


def _date(token: str, today: Sequence[int], is_past: bool = False) -> tuple[int, int, int]:
    if token in ("today", "tomorrow"):
        return today[0], today[1], today[2] + (token == "tomorrow")
    if token[4:5] == "-":
        year, month, day = _three([_digits(part) for part in token.split("-")], 0)
    else:
        mark = "/" if "/" in token else "."
        parts = token.split(mark) if mark in token else [token[at : at + 2] for at in range(0, len(token), 2)]
        month, day, year = _three([_digits(part) for part in parts], -1)
        if year < 0:
            year = today[0] - (is_past and (month, day) > (today[1], today[2]))
        elif year < 100:
            year += 2000
    if not (1970 <= year < 3000 and 1 <= month <= 12 and 1 <= day <= 31):
        raise ValueError(token)
    if time.localtime(_local(year, month, day, (12, 0, 0)))[2] != day:
        raise ValueError(token)  # such as 30 February
    return year, month, day


def _three(parts: list[int], missing: int) -> tuple[int, int, int]:
    if not 0 < len(parts) <= 3:
        raise ValueError(parts)
    first, second, third = [*parts, missing, missing][:3]
    return first, second, third


def _local(year: int, month: int, day: int, clock: tuple[int, int, int]) -> float:
    # mktime carries over day 32 and finds out about daylight saving.
    return time.mktime((year, month, day, *clock, 0, 0, -1))
