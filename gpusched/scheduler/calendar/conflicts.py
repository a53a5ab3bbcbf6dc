"""What stands in the way of a new entry of the calendar: other entries, what nodes have, running jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpusched.model.calendar import CalendarEntry
from gpusched.model.cluster import Allocation
from gpusched.model.snapshot import Placement
from gpusched.model.units import format_duration
from gpusched.scheduler.amounts import millicpus_of
from gpusched.scheduler.calendar.entries import YEAR_S, active, meet_at, next_window, overlaps, rivals, shared, starts
from gpusched.scheduler.draft import Layout


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
    name_of: Callable[[int], str] = str,
) -> tuple[Conflict, ...]:
    """Entries that keep the same, then cores and memory that are not there, then jobs that run too long.

    Maintenance is in nobody's way: it stands above reservations, in which nothing runs meanwhile.
    `name_of` tells what people call a job.
    """
    others = sorted(rivals(entry, entries), key=lambda other: other.name)
    found = []
    for other in others:
        at = overlaps(entry, other, now)
        if at is not None:
            text = f"reservation {other.name} keeps {', '.join(shared(entry, other))} at the same time"
            found.append(Conflict(text, name=other.name))
    if not found:
        found.extend(_overbooked(entry, others, layout, now))
    return (*found, *_jobs_in_the_way(entry, allocations, layout, now, name_of))


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
        if _fits(room, [place, *(theirs for _, theirs in there)], layout):
            continue
        for start_at in _busy_instants(entry, [other for other, _ in there], now):
            running = [(other, theirs) for other, theirs in there if active(other, start_at) is not None]
            if not _fits(room, [place, *(theirs for _, theirs in running)], layout):
                names = ", ".join(dict.fromkeys(other.name for other, _ in running))
                what = f"node {place.node} has not that many CPUs and that much memory"
                yield Conflict(f"{what} beside reservation {names}" if names else what, name=names or None)
                break


def _busy_instants(entry: CalendarEntry, others: Iterable[CalendarEntry], now: float) -> Iterator[float]:
    """Starts within a year at which what is kept while the entry runs is at its most."""
    until_at = max(now, entry.start_at) + YEAR_S
    for one in (entry, *others):
        for start_at in starts(one, now):
            if start_at >= until_at:
                break
            if active(entry, start_at) is not None:
                yield start_at


def _fits(room: tuple[int, int], places: Iterable[Placement], layout: Layout) -> bool:
    kept = list(places)
    millicpus, mem_mib = sum(millicpus_of(place.cpus) for place in kept), sum(map(layout.node_mem_mib, kept))
    return millicpus <= room[0] and mem_mib <= room[1]


def _jobs_in_the_way(
    entry: CalendarEntry, allocations: Iterable[Allocation], layout: Layout, now: float, name_of: Callable[[int], str]
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
            takes_room = is_tight and (held.cpus > 0 or layout.node_mem_mib(held) > 0)
            if (is_on_card or takes_room or place.is_exclusive) and held.job_id not in named:
                named.add(held.job_id)
                yield Conflict(_too_long(held, name_of(held.job_id), window.start_at), job_id=held.job_id)


def _leaves_room(there: Iterable[Allocation], place: Placement, layout: Layout, number: int) -> bool:
    held = list(there)
    millicpus = sum(millicpus_of(one.cpus) for one in held) + millicpus_of(place.cpus)
    return millicpus <= layout.millicpus[number] and (
        sum(map(layout.node_mem_mib, held)) + layout.node_mem_mib(place) <= layout.mem_mib[number]
    )


def _too_long(held: Allocation, name: str, start_at: float) -> str:
    job = f"job {name}" + (f" of {held.user}" if held.user else "")
    if held.expected_end_at is None:
        return f"{job} has no time limit"
    return f"{job} may run until {format_duration(held.expected_end_at - start_at)} after the start"
