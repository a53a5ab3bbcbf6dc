"""Calendar reservations: occurrences of their windows, conflicts between them, and admission to them.

Occurrence number k of an entry is [start_at + k * every_s, that + duration_s): the end is exclusive,
so one may end as the next begins. Periods are in seconds, not in days on the wall clock: a weekly window
moves by an hour with daylight saving time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, gcd, inf

from gpusched.model.bundles import part_of
from gpusched.model.cluster import Allocation, GpuView, NodeView
from gpusched.model.job import GpuShare, JobSpec
from gpusched.model.mentions import mention_job, mention_reservation
from gpusched.model.snapshot import CalendarEntry, ClassKey, Placement, Snapshot, Window
from gpusched.model.units import about, format_amount_floor, format_duration, format_size_mib, gpu_label, plural
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.infeasible import Refusal
from gpusched.scheduler.request_units import millicpus_of
from gpusched.scheduler.timeline import FIRST_WINDOW, RunningJob, end_of

MOST_WINDOWS = 16
"""Maximum number of windows of one entry to look ahead."""
MOST_IN_ALL = 200
"""Maximum number of windows of all entries, except for the next one of each: every window costs time in each cycle."""
YEAR_S = 366 * 86400
"""How far ahead to compare entries that do not recur forever."""

_LIST = "list them with: gctl reserve"


# --- windows ------------------------------------------------------------------------------------


def windows(entries: Iterable[CalendarEntry], now: float, horizon_s: float) -> tuple[Window, ...]:
    """Windows that overlap [now, now + horizon_s), by start and name; at most MOST_IN_ALL, earliest first."""
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
    """Window in force now, or else the next one; None if all are over."""
    start_at = next(starts(entry, now), None)
    return None if start_at is None else _window(entry, start_at)


def active(entry: CalendarEntry, now: float) -> Window | None:
    """Window in force now, if any."""
    window = next_window(entry, now)
    return window if window is not None and window.start_at <= now else None


def _window(entry: CalendarEntry, start_at: float) -> Window:
    end_at = start_at + entry.duration_s
    return Window(entry.name, start_at, end_at, entry.held, entry.users, entry.accounts, entry.message)


def starts(entry: CalendarEntry, now: float) -> Iterator[float]:
    """Starts of the occurrences that are not over, in order; infinite if the entry recurs forever."""
    number = _first_after(entry, now)
    while (start_at := _start(entry, number)) is not None:
        yield start_at
        number += 1


def _start(entry: CalendarEntry, number: int) -> float | None:
    """Start of one occurrence; None if it does not exist."""
    if entry.every_s is None and number:
        return None
    start_at = entry.start_at + number * (entry.every_s or 0)
    is_past_last = entry.until_at is not None and start_at >= entry.until_at
    return None if is_past_last else start_at


def _first_after(entry: CalendarEntry, now: float) -> int:
    """Number of the first occurrence that would end after this instant, whether or not it exists."""
    if entry.every_s is None:
        return 0 if entry.start_at + entry.duration_s > now else 1
    number = max(0, floor((now - entry.start_at - entry.duration_s) / entry.every_s))
    while entry.start_at + number * entry.every_s + entry.duration_s <= now:
        number += 1
    return number


# --- which of them meet -------------------------------------------------------------------------


def conflicting_entries(entry: CalendarEntry, entries: Iterable[CalendarEntry]) -> list[CalendarEntry]:
    """Other entries that must not hold the same resources at the same time: none if either is maintenance."""
    if entry.is_maintenance:
        return []
    return [other for other in entries if other.name != entry.name and not other.is_maintenance]


def overlaps(one: CalendarEntry, other: CalendarEntry, now: float = -inf) -> float | None:
    """First instant, within a year from now or from their starts, at which both hold the same card; None if never.

    A whole node overlaps anything on it.
    """
    return meet_at(one, other, now) if shared(one, other) else None


def shared(one: CalendarEntry, other: CalendarEntry) -> tuple[str, ...]:
    """Resources that both hold during their windows: `n1:0`, or `n1` if one holds the node; sorted."""
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
    """First instant, within a year from now or from their starts, at which both are in force; None if never."""
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
    """False if no two occurrences could overlap even if both recurred forever in both directions.

    The differences of their starts are then all the numbers with one remainder modulo the greatest common
    divisor of the two periods.
    """
    if one.every_s is None or other.every_s is None:
        return True
    step = gcd(one.every_s, other.every_s)
    behind = (other.start_at - one.start_at) % step
    return behind < one.duration_s or step - behind < other.duration_s


# --- whom they admit ----------------------------------------------------------------------------


def why_not_admitted(spec: JobSpec, user: str, calendar: Mapping[str, CalendarEntry], now: float) -> Refusal | None:
    """Refuse a job that requests a reservation it can never run in; None for all others.

    Checks access, and the constants: length of a window and its resources.
    """
    name = spec.reservation
    if not name:
        return None
    entry = calendar.get(name)
    if entry is None:
        return Refusal(f"the requested reservation {name!r} is invalid: no reservation has this name", _LIST)
    if next_window(entry, now) is None:
        return Refusal(f"the requested reservation {name!r} is over", _LIST)
    if entry.is_maintenance:
        return Refusal(f"reservation {name!r} is maintenance, when no job runs", "submit without --reservation")
    if user not in entry.users and spec.account not in entry.accounts:
        under = f" under account {spec.account}" if spec.account else ""
        admitted = (*entry.users, *(f"account {account}" for account in entry.accounts))
        return Refusal(
            f"access denied to the requested reservation {name!r}: it is not for {user}{under}",
            f"it is for {', '.join(admitted)}; submit without --reservation" if admitted else _LIST,
            "reservation_access",
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
    if request.bundles is not None:
        # Each node gives at least one bundle, and all of them together what the job asks for.
        all_gpus = sum(len(place.gpus) for place in held)
        if request.total_gpus > all_gpus:
            asked = plural(request.total_gpus, "GPU")
            return Refusal(
                f"the job asks for {asked}, but reservation {entry.name!r} keeps {all_gpus}",
                "ask for less with -g, or submit without --reservation",
            )
        request = part_of(request, 1, request.nodes)
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


@dataclass(frozen=True, slots=True)
class Conflict:
    """One conflict of a new entry: with another entry or a running job."""

    text: str
    name: str | None = None
    job_id: int | None = None


def conflicts(
    entry: CalendarEntry,
    entries: Iterable[CalendarEntry],
    allocations: Iterable[Allocation],
    layout: ClusterLayout,
    now: float,
    name_of: Callable[[int], str] = str,
) -> tuple[Conflict, ...]:
    """Conflicting entries, then overbooked cores and memory, then jobs that run too long.

    Maintenance never conflicts: it overrides reservations, in which nothing runs meanwhile.
    `name_of` returns the display name of a job.
    """
    others = sorted(conflicting_entries(entry, entries), key=lambda other: other.name)
    found = []
    for other in others:
        at = overlaps(entry, other, now)
        if at is not None:
            text = f"{mention_reservation(other.name)} keeps {', '.join(shared(entry, other))} at the same time"
            found.append(Conflict(text, name=other.name))
    if not found:
        found.extend(_overbooked(entry, others, layout, now))
    return (*found, *_jobs_in_the_way(entry, allocations, layout, now, name_of))


def _overbooked(
    entry: CalendarEntry, others: Iterable[CalendarEntry], layout: ClusterLayout, now: float
) -> Iterator[Conflict]:
    """Nodes on which this entry and concurrent ones hold more than the node has."""
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
                names = list(dict.fromkeys(other.name for other, _ in running))
                what = f"node {place.node} does not have that many CPUs and that much memory"
                beside = f" beside {' and '.join(map(mention_reservation, names))}" if names else ""
                yield Conflict(what + beside, name=", ".join(names) or None)
                break


def _busy_instants(entry: CalendarEntry, others: Iterable[CalendarEntry], now: float) -> Iterator[float]:
    """Starts within a year at which the resources held during the entry may peak."""
    until_at = max(now, entry.start_at) + YEAR_S
    for one in (entry, *others):
        for start_at in starts(one, now):
            if start_at >= until_at:
                break
            if active(entry, start_at) is not None:
                yield start_at


def _fits(room: tuple[int, int], places: Iterable[Placement], layout: ClusterLayout) -> bool:
    kept = list(places)
    millicpus, mem_mib = sum(millicpus_of(place.cpus) for place in kept), sum(map(layout.node_mem_mib, kept))
    return millicpus <= room[0] and mem_mib <= room[1]


def _jobs_in_the_way(
    entry: CalendarEntry,
    allocations: Iterable[Allocation],
    layout: ClusterLayout,
    now: float,
    name_of: Callable[[int], str],
) -> Iterator[Conflict]:
    """Running jobs that may still hold the entry's resources when its next window begins."""
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


def _leaves_room(there: Iterable[Allocation], place: Placement, layout: ClusterLayout, number: int) -> bool:
    held = list(there)
    millicpus = sum(millicpus_of(one.cpus) for one in held) + millicpus_of(place.cpus)
    return millicpus <= layout.millicpus[number] and (
        sum(map(layout.node_mem_mib, held)) + layout.node_mem_mib(place) <= layout.mem_mib[number]
    )


def _too_long(held: Allocation, name: str, start_at: float) -> str:
    job = mention_job(name, held.terms.user)
    if held.expected_end_at is None:
        return f"{job} has no time limit"
    return f"{job} may run until {format_duration(held.expected_end_at - start_at)} after the start"


@dataclass(frozen=True, slots=True)
class ReservationRequest:
    """Requested resources of a reservation. Exactly one of `gpus`, `cards` and `is_node`, or `cpus` alone."""

    gpus: int | None = None
    """Number of cards of one node."""
    cards: tuple[str, ...] = ()
    """UUIDs of specific cards of one node."""
    is_node: bool = False
    """A whole node and everything on it."""
    cpus: float | None = None
    """Cores; None for the same fraction of the node's cores as of its cards."""
    mem_mib: int | None = None
    """Host memory; None as for `cpus`."""


def choose_placement(
    wish: ReservationRequest,
    entry: CalendarEntry,
    nodes: Iterable[NodeView],
    entries: Iterable[CalendarEntry],
    allocations: Iterable[Allocation],
    now: float,
) -> Placement | None:
    """Choose the resources of a new entry; None if no node has enough cards left.

    Skips cards that another entry holds at the same time. Prefers cards with the fewest jobs that may still run
    when the next window begins, then linked cards, then the lowest index.
    """
    window = next_window(entry, now)
    begins_at = entry.start_at if window is None else window.start_at
    meeting = [other for other in conflicting_entries(entry, entries) if meet_at(entry, other, now) is not None]
    taken = {share.uuid for other in meeting for place in other.held for share in place.gpus}
    taken_nodes = {place.node for other in meeting for place in other.held if place.is_exclusive}
    late = [held for held in allocations if held.expected_end_at is None or held.expected_end_at > begins_at]
    found = []
    for node in nodes:
        if node.name in taken_nodes and not (wish.cards or wish.is_node):
            continue
        cards = _cards(wish, node, taken, late)
        if cards is None:
            continue
        jobs = sum(1 for held in late if held.node == node.name)
        found.append((_disturbance(cards, late), jobs, node.name, _placement(wish, node, cards)))
    return min(found, key=lambda one: one[:3])[3] if found else None


def _cards(
    wish: ReservationRequest, node: NodeView, taken: set[str], late: Sequence[Allocation]
) -> tuple[GpuView, ...] | None:
    """Cards of this node that satisfy the request, by index; None if it cannot."""
    there = sorted((view for view in node.gpus if view.is_present), key=lambda view: view.index)
    if wish.is_node:
        return tuple(there)
    if wish.cards:
        # Keep cards named explicitly, so that the refusal can name their conflicts.
        named = tuple(view for view in there if view.uuid in wish.cards)
        return named if len(named) == len(set(wish.cards)) else None
    if not wish.gpus:
        return ()
    # MIG instances are reserved only by UUID: a number of GPUs means whole cards.
    whole = [view for view in there if view.uuid not in taken and view.mig_profile is None]
    return _pick(whole, wish.gpus, late)


def _pick(free: Sequence[GpuView], count: int, late: Sequence[Allocation]) -> tuple[GpuView, ...] | None:
    if len(free) < count:
        return None
    ranked = sorted(free, key=lambda view: (view.why_not is not None, _jobs_on(view, late), view.index))
    options = [(ranked[:count], len(ranked))]
    groups = {view.link_group for view in free if view.link_group is not None} if count > 1 else set()
    for group in sorted(groups):
        linked = [view for view in ranked if view.link_group == group]
        if len(linked) >= count:
            options.append((linked[:count], len(linked)))

    def cost(option: tuple[list[GpuView], int]) -> tuple[object, ...]:
        views, out_of = option
        groups = {view.link_group for view in views}
        is_linked = len(groups) == 1 and None not in groups
        indices = sorted(view.index for view in views)
        unwell = sum(view.why_not is not None for view in views)
        return unwell, _disturbance(views, late), not is_linked, out_of, indices

    chosen, _ = min(options, key=cost)
    return tuple(sorted(chosen, key=lambda view: view.index))


def _jobs_on(view: GpuView, late: Iterable[Allocation]) -> int:
    return sum(1 for held in late if any(share.uuid == view.uuid for share in held.gpus))


def _disturbance(views: Iterable[GpuView], late: Sequence[Allocation]) -> int:
    return sum(_jobs_on(view, late) for view in views)


def _placement(wish: ReservationRequest, node: NodeView, cards: Sequence[GpuView]) -> Placement:
    shares = tuple(GpuShare(view.uuid, view.index) for view in cards)
    place = Placement(node.name, shares, node.cpus, node.mem_mib, is_exclusive=wish.is_node)
    if wish.is_node:
        return replace(place, resources=node.resources)
    count = sum(view.is_present for view in node.gpus)
    part = len(cards) / count if cards else min(1.0, (wish.cpus or 0.0) / node.cpus) if node.cpus else 0.0
    cpus = float(floor(node.cpus * part)) if wish.cpus is None else wish.cpus
    mem_mib = floor(node.mem_mib * part) if wish.mem_mib is None else wish.mem_mib
    return replace(place, cpus=cpus, mem_mib=mem_mib)


_NOBODY = -1


class ReservedNodes:
    """The windows of one cycle, and the jobs inside the windows in force."""

    def __init__(self, snapshot: Snapshot, layout: ClusterLayout) -> None:
        self._layout = layout
        self._names = {window.name for window in snapshot.windows}
        self._open: dict[str, Window] = {}
        self._drafts: dict[str, ClusterState] = {}
        self._next: dict[str, float] = {}
        self._maintenance = [window for window in snapshot.windows if window.is_maintenance]
        self._everywhere = ClusterState(layout)
        """All running jobs, inside and outside: one that predates a window may still hold its cards."""
        self.now: list[RunningJob] = []
        """Windows in force, as if they were jobs that run until the window closes, and the licenses used inside."""
        self.later: list[tuple[int, AllocationUnits, float, float]] = []
        """Windows that open later, by number, with their instants."""
        for number, window in enumerate(snapshot.windows):
            booking = _booking_of(window, layout)
            if window.start_at > snapshot.now:
                self._next.setdefault(window.name, window.start_at)
                if booking is not None:
                    self.later.append((FIRST_WINDOW - number, booking, window.start_at, window.end_at))
            elif snapshot.now < window.end_at:
                self._open[window.name] = window
                self._drafts[window.name] = _draft_inside(window, layout)
                if booking is not None:
                    self.now.append(RunningJob(FIRST_WINDOW - number, window.start_at, window.end_at, booking))
        for held in snapshot.allocations if self._open else ():
            booking = layout.booking(held.terms.uid, held)
            if booking is None:
                continue
            self._everywhere.book(booking)
            if held.terms.reservation is not None and self.holds(held):
                self._drafts[held.terms.reservation].book(booking)
                if held.licenses:
                    end_at = end_of(held, snapshot.now)
                    self.now.append(RunningJob(held.job_id, held.start_at, end_at, licenses_of(booking)))

    def holds(self, held: Allocation) -> bool:
        """Whether a running job is inside a window in force, and so holds nothing outside."""
        return held.terms.reservation in self._open

    def draft(self, name: str, now: float, end_at: float) -> ClusterState:
        """Free resources inside a window in force for a job that may run until `end_at`; read-only."""
        free = self._drafts[name].copy()
        free.limit_to(self._everywhere)
        closed = self._closed(self._open[name], now, end_at)
        for node in closed:
            number = self._layout.node_number(node)
            if number is not None:
                _close(free, number)
        free.count_cards()
        return free

    def _closed(self, window: Window, now: float, end_at: float) -> dict[str, Window]:
        """Maintenance that a job in the window would run into, by node."""
        found: dict[str, Window] = {}
        nodes = {place.node for place in window.held}
        for other in self._maintenance:
            if now < other.end_at and other.start_at < end_at:
                for place in other.held:
                    if place.node in nodes:
                        found.setdefault(place.node, other)
        return found

    def start(self, name: str | None, booking: AllocationUnits) -> None:
        """Record the start of a job, inside if it is a member, outside otherwise."""
        if name is not None:
            self._drafts[name].book(booking)
        if self._open:
            self._everywhere.book(booking)

    def why_not(self, name: str, key: ClassKey, end_at: float, now: float) -> str | None:
        """Sentence if a job may not run inside this reservation now."""
        window = self._open.get(name)
        if window is None:
            opens_at = self._next.get(name)
            if opens_at is not None:
                return f"{mention_reservation(name)} begins in {about(opens_at - now)}"
            over = f"{mention_reservation(name)} does not begin again"
            return f"{over}; run the job outside with: gctl update JOB reservation="
        if not window.admits(key.terms.user, key.terms.account):
            return f"{mention_reservation(name)} is not for {key.terms.user} under account {key.terms.account}"
        if end_at > window.end_at:
            left = about(window.end_at - now)
            limit = "the job has no time limit" if end_at == inf else "the job's time limit is longer"
            return f"{mention_reservation(name)} ends in {left}, and {limit}"
        closed = self._closed(window, now, end_at)
        if closed and len(closed) == len({place.node for place in window.held}):
            other = min(closed.values(), key=lambda one: one.start_at)
            if other.start_at <= now:
                return f"maintenance {other.name} ends in {about(other.end_at - now)}"
            begins = f"begins in {about(other.start_at - now)}"
            return f"maintenance {other.name} {begins}, and the job's time limit is longer"
        return None


def licenses_of(booking: AllocationUnits) -> AllocationUnits:
    """Share of a member's booking outside of any window: its licenses."""
    return AllocationUnits(booking.node, booking.uid, 0, 0, (), licenses=booking.licenses)


def _booking_of(window: Window, layout: ClusterLayout) -> AllocationUnits | None:
    """All resources of a window as one booking over its nodes; None if all of them are gone."""
    found = [booking for place in window.held if (booking := layout.booking(_NOBODY, place)) is not None]
    if not found:
        return None
    first, *others = found
    return AllocationUnits(
        first.node,
        first.uid,
        first.millicpus,
        first.mem_mib,
        first.parts,
        first.resources,
        first.licenses,
        first.is_exclusive,
        tuple(others),
        first.gpu_mem_mib,
    )


def _close(draft: ClusterState, node: int) -> None:
    """Leave nothing free on a node. The caller must recount the cards afterwards."""
    draft.free_millicpus[node] = draft.free_mem_mib[node] = 0
    draft.exclusive[node] = draft.jobs[node] = 1
    for card in draft.layout.cards_of[node]:
        draft.wholes[card.number] = 1


def _draft_inside(window: Window, layout: ClusterLayout) -> ClusterState:
    """Draft in which only the window's resources are free."""
    draft = ClusterState(layout)
    kept = {layout.node_number(place.node): place for place in window.held}
    cards = {
        part.card
        for place in window.held
        if (booking := layout.booking(_NOBODY, place)) is not None
        for part in booking.parts
    }
    for number in range(len(layout.nodes)):
        place = kept.get(number)
        if place is None:
            _close(draft, number)
            continue
        draft.free_millicpus[number] = round(place.cpus * 1000)
        draft.free_mem_mib[number] = layout.node_mem_mib(place)
        # If only part of a node is reserved, others use the rest: no job inside can have the node alone.
        draft.jobs[number] = int(not place.is_exclusive)
        if not place.is_exclusive:
            draft.free_resources[number] = dict(place.resources)
    for card in layout.cards:
        if card.number not in cards:
            draft.wholes[card.number] = 1
    draft.count_cards()
    return draft
