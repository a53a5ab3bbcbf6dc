"""Reservations of the calendar: when their windows are, which of them meet, whom they admit.

Occurrence number k of an entry is [start_at + k * every_s, that + duration_s): its end is not part of it,
so that one may end as the next begins. Distances are of seconds, not of days on the wall: where clocks are
moved for summer, a weekly window moves by an hour with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, gcd, inf

from gpusched.model.calendar import CalendarEntry
from gpusched.model.cluster import Allocation
from gpusched.model.job import JobSpec
from gpusched.model.snapshot import Placement, Window
from gpusched.model.units import format_duration
from gpusched.policy.capacity import Refusal
from gpusched.policy.draft import Layout, millicpus_of

MOST_WINDOWS = 16
"""Windows of one entry that are looked ahead at most."""
YEAR_S = 366 * 86400
"""How far ahead entries are compared that do not recur for ever."""

_LIST = "list them with: gctl reserve"


# --- windows ------------------------------------------------------------------------------------


def windows(entries: Iterable[CalendarEntry], now: float, horizon_s: float) -> tuple[Window, ...]:
    """Windows that overlap [now, now + horizon_s), by start and name; of each entry the first MOST_WINDOWS."""
    found = []
    for entry in entries:
        for count, start_at in enumerate(_starts(entry, now)):
            if start_at >= now + horizon_s or count == MOST_WINDOWS:
                break
            found.append(_window(entry, start_at))
    found.sort(key=lambda window: (window.start_at, window.name))
    return tuple(found)


def next_window(entry: CalendarEntry, now: float) -> Window | None:
    """The window that runs now, or else the next one to come; None when all are over."""
    start_at = next(_starts(entry, now), None)
    return None if start_at is None else _window(entry, start_at)


def active(entry: CalendarEntry, now: float) -> Window | None:
    """The window that runs now, if any."""
    window = next_window(entry, now)
    return window if window is not None and window.start_at <= now else None


def next_edge(entries: Iterable[CalendarEntry], now: float) -> float | None:
    """When the next window begins or ends, of any entry; None when nothing is to come."""
    edges = []
    for entry in entries:
        window = next_window(entry, now)
        if window is not None:
            edges.append(window.start_at if window.start_at > now else window.end_at)
    return min(edges, default=None)


def _window(entry: CalendarEntry, start_at: float) -> Window:
    return Window(entry.name, start_at, start_at + entry.duration_s, entry.held, entry.users, entry.accounts)


def _starts(entry: CalendarEntry, now: float) -> Iterator[float]:
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
            names.update(f"{mine.node}:{share.index}" for share in mine.gpus if share.uuid in kept)
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


# --- what stands in the way of a new one ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conflict:
    """One thing in the way of a new entry: another entry, or a running job."""

    text: str
    name: str | None = None
    """The other entry."""
    job_id: int | None = None


def conflicts(
    entry: CalendarEntry,
    entries: Iterable[CalendarEntry],
    allocations: Iterable[Allocation],
    layout: Layout,
    now: float,
) -> tuple[Conflict, ...]:
    """Entries that keep the same, then cores and memory that are not there, then jobs that run too long."""
    others = sorted((other for other in entries if other.name != entry.name), key=lambda other: other.name)
    found = []
    for other in others:
        at = overlaps(entry, other, now)
        if at is not None:
            text = f"reservation {other.name} keeps {', '.join(shared(entry, other))} at the same time"
            found.append(Conflict(text, name=other.name))
    if not found:
        found.extend(_overbooked(entry, others, layout, now))
    return (*found, *_jobs_in_the_way(entry, allocations, layout, now))


def _overbooked(
    entry: CalendarEntry, others: Iterable[CalendarEntry], layout: Layout, now: float
) -> Iterator[Conflict]:
    """Nodes on which this entry and others that run at the same time keep more than there is."""
    meeting = [other for other in others if meet_at(entry, other, now) is not None]
    for place in entry.held:
        number = layout.node_number(place.node)
        if number is None:
            continue
        there = [(other, theirs) for other in meeting for theirs in other.held if theirs.node == place.node]
        room = (layout.millicpus[number], layout.mem_mib[number])
        if _fits(room, [place, *(theirs for _, theirs in there)]):
            continue
        for start_at in _busy_instants(entry, [other for other, _ in there], now):
            running = [(other, theirs) for other, theirs in there if active(other, start_at) is not None]
            if not _fits(room, [place, *(theirs for _, theirs in running)]):
                names = ", ".join(dict.fromkeys(other.name for other, _ in running))
                what = f"node {place.node} has not that many cores and that much memory"
                yield Conflict(f"{what} beside reservation {names}" if names else what, name=names or None)
                break


def _busy_instants(entry: CalendarEntry, others: Iterable[CalendarEntry], now: float) -> Iterator[float]:
    """Starts within a year at which what is kept while the entry runs is at its most."""
    until_at = max(now, entry.start_at) + YEAR_S
    for one in (entry, *others):
        for start_at in _starts(one, now):
            if start_at >= until_at:
                break
            if active(entry, start_at) is not None:
                yield start_at


def _fits(room: tuple[int, int], places: Iterable[Placement]) -> bool:
    kept = list(places)
    return sum(millicpus_of(place.cpus) for place in kept) <= room[0] and sum(p.mem_mib for p in kept) <= room[1]


def _jobs_in_the_way(
    entry: CalendarEntry, allocations: Iterable[Allocation], layout: Layout, now: float
) -> Iterator[Conflict]:
    """Running jobs that may still hold what the entry keeps when its next window begins."""
    window = next_window(entry, now)
    if window is None:
        return
    late = [held for held in allocations if held.expected_end_at is None or held.expected_end_at > window.start_at]
    named = set()
    for place in entry.held:
        cards = {share.uuid for share in place.gpus}
        number = layout.node_number(place.node)
        there = [held for held in late if held.node == place.node]
        is_tight = number is not None and not _leaves_room(there, place, layout, number)
        for held in there:
            is_on_card = any(share.uuid in cards for share in held.gpus)
            takes_room = is_tight and (held.cpus > 0 or held.mem_mib > 0)
            if (is_on_card or takes_room or place.is_exclusive) and held.job_id not in named:
                named.add(held.job_id)
                yield Conflict(_too_long(held, window.start_at), job_id=held.job_id)


def _leaves_room(there: Iterable[Allocation], place: Placement, layout: Layout, number: int) -> bool:
    held = list(there)
    millicpus = sum(millicpus_of(one.cpus) for one in held) + millicpus_of(place.cpus)
    return millicpus <= layout.millicpus[number] and (
        sum(one.mem_mib for one in held) + place.mem_mib <= layout.mem_mib[number]
    )


def _too_long(held: Allocation, start_at: float) -> str:
    job = f"job {held.job_id}" + (f" of {held.user}" if held.user else "")
    if held.expected_end_at is None:
        return f"{job} has no time limit"
    return f"{job} may run until {format_duration(held.expected_end_at - start_at)} after the start"


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
    request = spec.request
    for what, option, wanted, kept in (
        ("node(s)", "--nodes", float(request.nodes), float(len(entry.held))),
        ("GPU(s)", "-g", float(request.gpus), float(max((len(place.gpus) for place in entry.held), default=0))),
        ("core(s)", "-c", request.cpus, max((place.cpus for place in entry.held), default=0.0)),
        ("MiB of memory", "--mem", float(request.mem_mib), float(max((p.mem_mib for p in entry.held), default=0))),
    ):
        if wanted > kept:
            on_node = "" if option == "--nodes" or len(entry.held) == 1 else " on a node"
            return Refusal(
                f"the job asks for {wanted:g} {what}, but reservation {entry.name!r} keeps {kept:g}{on_node}",
                f"ask for less with {option}, or submit without --reservation",
            )
    return None
