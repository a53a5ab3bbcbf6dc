"""Reservations of the calendar: when their windows are, which of them meet, whom they admit.

Occurrence number k of an entry is [start_at + k * every_s, that + duration_s): its end is not part of it,
so that one may end as the next begins. Distances are of seconds, not of days on the wall: where clocks are
moved for summer, a weekly window moves by an hour with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import floor, gcd, inf

from gpusched.model.calendar import CalendarEntry
from gpusched.model.job import JobSpec
from gpusched.model.snapshot import Window
from gpusched.model.units import format_amount_floor, format_duration, format_size_mib, gpu_label, plural
from gpusched.scheduler.capacity import Refusal

MOST_WINDOWS = 16
"""Windows of one entry that are looked ahead at most."""
MOST_IN_ALL = 200
"""Windows of all entries together, but for the next one of each, since every one costs time in each cycle."""
YEAR_S = 366 * 86400
"""How far ahead entries are compared that do not recur for ever."""

_LIST = "list them with: gctl reserve"


# --- windows ------------------------------------------------------------------------------------


def windows(entries: Iterable[CalendarEntry], now: float, horizon_s: float) -> tuple[Window, ...]:
    """Windows that overlap [now, now + horizon_s), by start and name; at most so many, the soonest."""
    found: list[Window] = []
    later: list[Window] = []
    for entry in entries:
        for count, start_at in enumerate(starts(entry, now)):
            if start_at >= now + horizon_s or count == MOST_WINDOWS:
                break
            (later if count else found).append(_window(entry, start_at))
    later.sort(key=_by_start)
    found += later[: max(0, MOST_IN_ALL - len(found))]
    return tuple(sorted(found, key=_by_start))


def _by_start(window: Window) -> tuple[float, str]:
    return window.start_at, window.name


def next_window(entry: CalendarEntry, now: float) -> Window | None:
    """The window that runs now, or else the next one to come; None when all are over."""
    start_at = next(starts(entry, now), None)
    return None if start_at is None else _window(entry, start_at)


def active(entry: CalendarEntry, now: float) -> Window | None:
    """The window that runs now, if any."""
    window = next_window(entry, now)
    return window if window is not None and window.start_at <= now else None


def _window(entry: CalendarEntry, start_at: float) -> Window:
    end_at = start_at + entry.duration_s
    return Window(entry.name, start_at, end_at, entry.held, entry.users, entry.accounts, entry.message)


def starts(entry: CalendarEntry, now: float) -> Iterator[float]:
    """Starts of the occurrences that are not over, in order; without end when the entry recurs for ever."""
    number = _first_after(entry, now)
    while (start_at := _start(entry, number)) is not None:
        yield start_at
        number += 1


def _start(entry: CalendarEntry, number: int) -> float | None:
    """Start of one occurrence; None when there is no such occurrence."""
    if entry.every_s is None and number:
        return None
    start_at = entry.start_at + number * (entry.every_s or 0)
    is_past_last = entry.until_at is not None and start_at >= entry.until_at
    return None if is_past_last else start_at


def _first_after(entry: CalendarEntry, now: float) -> int:
    """Number of the first occurrence that ends after this instant, whether or not there is one."""
    if entry.every_s is None:
        return 0 if entry.start_at + entry.duration_s > now else 1
    number = max(0, floor((now - entry.start_at - entry.duration_s) / entry.every_s))
    while entry.start_at + number * entry.every_s + entry.duration_s <= now:
        number += 1
    return number


# --- which of them meet -------------------------------------------------------------------------


def rivals(entry: CalendarEntry, entries: Iterable[CalendarEntry]) -> list[CalendarEntry]:
    """The others that must not keep the same at the same time: none where either is maintenance."""
    if entry.is_maintenance:
        return []
    return [other for other in entries if other.name != entry.name and not other.is_maintenance]


def overlaps(one: CalendarEntry, other: CalendarEntry, now: float = -inf) -> float | None:
    """The first instant, within a year from now or from their starts, at which both keep the same card.

    A whole node that is kept is the same as anything on it. None when they never do.
    """
    return meet_at(one, other, now) if shared(one, other) else None


def shared(one: CalendarEntry, other: CalendarEntry) -> tuple[str, ...]:
    """What both keep whenever they run: `n1:0`, or `n1` where one keeps the node; sorted."""
    names = set()
    for mine in one.held:
        for theirs in other.held:
            if mine.node != theirs.node:
                continue
            if mine.is_exclusive or theirs.is_exclusive:
                names.add(mine.node)
                continue
            kept = {share.uuid for share in theirs.gpus}
            names.update(f"{mine.node}:{gpu_label(share.index)}" for share in mine.gpus if share.uuid in kept)
    return tuple(sorted(names))


def meet_at(one: CalendarEntry, other: CalendarEntry, now: float) -> float | None:
    """The first instant, within a year from now or from their starts, at which both run; None when they never do."""
    if not _can_ever_meet(one, other):
        return None
    until_at = max(now, one.start_at, other.start_at) + YEAR_S
    mine, theirs = _first_after(one, now), _first_after(other, now)
    while True:
        begin, other_begin = _start(one, mine), _start(other, theirs)
        if begin is None or other_begin is None or max(begin, other_begin) >= until_at:
            return None
        if begin + one.duration_s <= other_begin:
            mine = _first_after(one, other_begin)
        elif other_begin + other.duration_s <= begin:
            theirs = _first_after(other, begin)
        else:
            return max(begin, other_begin, now)


def _can_ever_meet(one: CalendarEntry, other: CalendarEntry) -> bool:
    """False when no two of their occurrences could meet even if both had always recurred and always did.

    The distances of their starts are then all the numbers that leave one remainder by the greatest
    common divisor of the two periods.
    """
    if one.every_s is None or other.every_s is None:
        return True
    step = gcd(one.every_s, other.every_s)
    behind = (other.start_at - one.start_at) % step
    return behind < one.duration_s or step - behind < other.duration_s


# --- whom they admit ----------------------------------------------------------------------------


def why_not_admitted(spec: JobSpec, user: str, calendar: Mapping[str, CalendarEntry], now: float) -> Refusal | None:
    """Refuse a job that asks for a reservation it can never run in; None for all others.

    Who may use it, and what never changes: how long a window is and how much it keeps.
    """
    name = spec.reservation
    if not name:
        return None
    entry = calendar.get(name)
    if entry is None:
        return Refusal(f"the requested reservation {name!r} is invalid: there is none of this name", _LIST)
    if next_window(entry, now) is None:
        return Refusal(f"the requested reservation {name!r} is over", _LIST)
    if entry.is_maintenance:
        return Refusal(f"reservation {name!r} is maintenance, in which nothing runs", "submit without --reservation")
    if user not in entry.users and spec.account not in entry.accounts:
        under = f" under account {spec.account}" if spec.account else ""
        admitted = (*entry.users, *(f"account {account}" for account in entry.accounts))
        return Refusal(
            f"access denied to the requested reservation {name!r}: it is not for {user}{under}",
            f"it is for {', '.join(admitted)}; submit without --reservation" if admitted else _LIST,
        )
    return _too_much(spec, entry)


def _too_much(spec: JobSpec, entry: CalendarEntry) -> Refusal | None:
    most = format_duration(entry.duration_s)
    if spec.time_limit_s is None:
        return Refusal(
            f"reservation {entry.name!r} is {most} long and the job has no time limit", f"give it one: -t {most}"
        )
    if spec.time_limit_s > entry.duration_s:
        asked = format_duration(spec.time_limit_s)
        return Refusal(f"the job may run {asked}, but reservation {entry.name!r} is {most} long", f"use -t {most}")
    request, held = spec.request, entry.held
    gpus = max((len(place.gpus) for place in held), default=0)
    cpus = max((place.cpus for place in held), default=0.0)
    mem_mib = max((place.mem_mib for place in held), default=0)
    memory = f"{format_size_mib(request.mem_mib)} of memory"
    for option, wanted, kept, asked, shown in (
        ("--nodes", request.nodes, len(held), plural(request.nodes, "node"), str(len(held))),
        ("-g", request.gpus, gpus, plural(request.gpus, "GPU"), str(gpus)),
        ("-c", request.cpus, cpus, plural(request.cpus, "CPU"), format_amount_floor(cpus)),
        ("--mem", request.mem_mib, mem_mib, memory, format_size_mib(mem_mib)),
    ):
        if wanted > kept:
            on_node = "" if option == "--nodes" or len(held) == 1 else " on a node"
            return Refusal(
                f"the job asks for {asked}, but reservation {entry.name!r} keeps {shown}{on_node}",
                f"ask for less with {option}, or submit without --reservation",
            )
    return None
