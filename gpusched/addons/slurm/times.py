"""Times as Slurm's commands read them: limits such as `1-12:00`, instants such as `now+1hour` or `12/24-18:00`."""

from __future__ import annotations

import time

from gpusched.model.units import MAX_SECONDS, is_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_LIMIT = ("0", "-1", "unlimited", "infinite")
_UNITS_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}
_HOURS = {"midnight": 0, "elevenses": 11, "noon": 12, "fika": 15, "teatime": 16}
_MOST_DIGITS = 9


def parse_limit_s(text: str) -> int | None:
    """A time limit in seconds, rounded up to whole minutes; None for no limit.

    Accepts `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`, `0` and `UNLIMITED`. Raises: ValueError.
    """
    if text.lower() in _NO_LIMIT:
        return None
    days, dash, clock = text.rpartition("-")
    parts = [_digits(part) for part in clock.split(":")]
    if len(parts) > 3:
        raise ValueError(text)
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        seconds += _digits(days) * 86400
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    found = -(-(hours * 3600 + minutes * 60 + seconds) // 60) * 60
    return min(found, MAX_SECONDS) or None


def _digits(text: str) -> int:
    if not is_digits(text):
        raise ValueError(text)
    return int(text[:_MOST_DIGITS]) if len(text) > _MOST_DIGITS else int(text)


def parse_instant(text: str, now: float, *, is_past: bool = False) -> float:
    """An instant in UTC epoch seconds, from local time.

    Accepts `HH:MM[:SS] [AM|PM]`, `MMDD[YY]`, `MM/DD[/YY]`, `MM.DD[.YY]`, `YYYY-MM-DD`, a date and a time with `T`,
    `-` or a blank between them, `today`, `tomorrow`, `midnight`, `noon`, `teatime`, `now[+N[minutes|...]]`, and
    `uts+N`. Args: is_past: a time of day lies in the past, today or yesterday, and so does a date without a year, as
    for sacct; else a passed time of day is tomorrow's. Raises: ValueError.
    """
    word = text.strip().lower()
    if word.startswith("now"):
        return now + _offset(word[3:])
    if word.startswith("uts+") and is_digits(word[4:]) and len(word) < 16:
        return float(word[4:])
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
                raise ValueError(text)
            clock = _half(clock, token)
        elif token in _HOURS or ":" in token or token[-2:] in ("am", "pm"):
            if clock is not None:
                raise ValueError(text)
            clock = _clock(token)
        elif date is None:
            date = _date(token, today, is_past)
        else:
            raise ValueError(text)
    if date is None and clock is None:
        raise ValueError(text)
    year, month, day = date or today
    found = _local(year, month, day, clock or (0, 0, 0))
    if date is None and (found > now) is is_past:
        found = _local(year, month, day + (-1 if is_past else 1), clock or (0, 0, 0))
    return found


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
    digits = rest[1:].rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = rest[1 + len(digits) :]
    if rest[0] not in "+-" or not digits:
        raise ValueError(rest)
    known = [factor for name, factor in _UNITS_S.items() if unit and name.startswith(unit.removesuffix("s") or "s")]
    if unit and not known:
        raise ValueError(rest)
    # A bare number is seconds.
    return float(_digits(digits) * (known[0] if unit else 1) * (1 if rest[0] == "+" else -1))


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
    return year, month, day


def _three(parts: list[int], missing: int) -> tuple[int, int, int]:
    if not 0 < len(parts) <= 3:
        raise ValueError(parts)
    first, second, third = [*parts, missing, missing][:3]
    return first, second, third


def _local(year: int, month: int, day: int, clock: tuple[int, int, int]) -> float:
    # mktime carries over day 32 and finds out about daylight saving.
    return time.mktime((year, month, day, *clock, 0, 0, -1))
