"""Create and delete reservations in the calendar, for administrators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpusched.access import check_admin
from gpusched.daemon.commit import AuditEvent, TickTransaction
from gpusched.errors import NotFound, Refused
from gpusched.model.cluster import NodeView
from gpusched.model.commands import Reserve, Unreserve
from gpusched.model.hostlist import fold
from gpusched.model.snapshot import CalendarEntry, Placement
from gpusched.model.states import JobState
from gpusched.model.units import format_duration, name_some, plural
from gpusched.model.value import replace
from gpusched.ports.tables import CALENDAR
from gpusched.scheduler.calendar import Conflict, ReservationRequest, choose_placement, conflicts, next_window, overlaps

MOST_ENTRIES = 50
"""Limit on calendar entries: each one costs time in every cycle."""
SHORTEST_PERIOD_S = 3600
LONGEST_MESSAGE = 500
LATE_S = 60.0
"""A start at most this long ago counts as now."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_NAMED = 5
_LIST = "list them with: gctl reserve"


def apply(command: Reserve | Unreserve, tx: TickTransaction) -> dict[str, Any]:
    """Apply one command. Raises: UserError, with nothing of this command applied."""
    check_admin(command.caller, "change the reservations", tx.settings)
    if isinstance(command, Reserve):
        answer = _reserve(command, tx)
        tx.audit_events.append(AuditEvent(command.caller, "reserve", command.name))
    else:
        answer = _unreserve(command, tx)
        tx.audit_events += [AuditEvent(command.caller, "unreserve", name) for name in answer["changed"]]
    return answer


def _reserve(command: Reserve, tx: TickTransaction) -> dict[str, Any]:
    _check_words(command, tx)
    _check_times(command, tx.now)
    bare = CalendarEntry(
        name=command.name,
        start_at=float(int(command.start_at)),
        duration_s=command.duration_s,
        held=(),
        users=tuple(dict.fromkeys(command.users)),
        accounts=tuple(dict.fromkeys(command.accounts)),
        every_s=command.every_s,
        until_at=command.until_at,
        made_by=command.caller.user,
        made_at=tx.now,
        message=command.message,
    )
    entry = _with_place(bare, command, tx)
    state = tx.state
    found = conflicts(
        entry, state.rows[CALENDAR].values(), state.holds.values(), tx.layout(), tx.now, name_of=state.name_of
    )
    _refuse_entries(found)
    jobs = [conflict for conflict in found if conflict.job_id is not None]
    if jobs and not command.ignore_jobs:
        raise Refused(
            f"the reserved resources would not be free at the start: {_named(jobs)}",
            "wait, end the jobs, choose another time or other cards, or reserve anyway with --ignore-jobs",
        )
    for over in [one.name for one in tx.state.rows[CALENDAR].values() if next_window(one, tx.now) is None]:
        tx.put_row(CALENDAR, over, None)
    tx.put_row(CALENDAR, entry.name, entry)
    return {"entry": entry, "notes": _notes(entry, jobs, tx)}


def _check_words(command: Reserve, tx: TickTransaction) -> None:
    name, known = command.name, tx.state.rows[CALENDAR]
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{name!r} is not a valid name for a reservation", "use up to 64 letters, digits, dots, dashes, underscores"
        )
    live = {one.name for one in known.values() if next_window(one, tx.now) is not None}
    if name in live:
        raise Refused(f"reservation {name} exists already", f"remove it first: gctl unreserve {name}")
    if len(live) >= MOST_ENTRIES:
        raise Refused(f"the calendar is full: it has {len(live)} reservations", f"remove some; {_LIST}")
    if len(command.message) > LONGEST_MESSAGE:
        raise Refused(f"the message is longer than {LONGEST_MESSAGE} characters", "use -m 'why'")
    if command.is_maintenance:
        _check_maintenance(command)
        return
    if not (command.users or command.accounts):
        hint = "name its users with --users ann,bob or --accounts course; for maintenance use --maint"
        raise Refused("no one could use the reservation", hint)
    ways = sum((command.gpus is not None, bool(command.cards), command.is_node))
    if ways > 1:
        raise Refused("the resources to reserve are given twice", "use one of --gpus, --gpu and --node")
    if not (command.gpus or command.cards or command.is_node or command.cpus):
        raise Refused("the reservation names no resources", "use --gpus 2, --gpu 0,1, --node or -c 8")
    if command.is_node and (command.cpus is not None or command.mem_mib is not None):
        raise Refused("a whole node includes all of its cores and memory", "leave out -c and --mem, or --node")


def _check_maintenance(command: Reserve) -> None:
    if command.users or command.accounts:
        raise Refused("no jobs run in a maintenance window", "leave out --users and --accounts, or --maint")
    if command.gpus or command.cards or command.cpus is not None or command.mem_mib is not None:
        hint = "leave out --gpus, --gpu, -c and --mem; for single GPUs use: gctl drain"
        raise Refused("maintenance covers the whole node", hint)


def _check_times(command: Reserve, now: float) -> None:
    start_at, duration_s, every_s = command.start_at, command.duration_s, command.every_s
    if start_at < now - LATE_S:
        raise Refused(
            f"the reservation would begin {format_duration(now - start_at)} ago", "use a future time, or --start now"
        )
    if duration_s < 1:
        raise Refused(f"a reservation of {duration_s} s is too short", "give a length: --duration 4h")
    if every_s is not None and every_s < max(duration_s, SHORTEST_PERIOD_S):
        least = format_duration(max(duration_s, SHORTEST_PERIOD_S))
        raise Refused(
            f"it cannot recur every {format_duration(every_s)}: its windows are {format_duration(duration_s)} long, "
            "and may recur once an hour at most",
            f"use --every {least} or more",
        )
    if command.until_at is not None and every_s is None:
        raise Refused("--until was given for a reservation that does not recur", "add a period: --every week")
    if command.until_at is not None and command.until_at <= start_at:
        raise Refused("the reservation would end before it begins", "choose a later --until")


def _with_place(bare: CalendarEntry, command: Reserve, tx: TickTransaction) -> CalendarEntry:
    cards = tuple(dict.fromkeys(_card(tx, word) for word in command.cards))
    wish = ReservationRequest(
        command.gpus, cards, command.is_node or command.is_maintenance, command.cpus, command.mem_mib
    )
    if command.nodelist:
        return replace(bare, held=tuple(_place(wish, bare, [node], tx) for node in _named_nodes(command, tx)))
    if wish.is_node and len(tx.nodes) > 1:
        names = sorted(node.name for node in tx.nodes)
        raise Refused(f"there are {len(names)} nodes, and none is named", f"name those to reserve: -w {fold(names)}")
    return replace(bare, held=(_place(wish, bare, tx.nodes, tx),))


def _named_nodes(command: Reserve, tx: TickTransaction) -> list[NodeView]:
    """Nodes of the node list, by name. Raises: Refused."""
    if command.cards:
        raise Refused("--gpu names the node of each card already", "leave out -w, or use --gpus")
    known = {node.name: node for node in tx.nodes}
    unknown = [name for name in command.nodelist if name not in known]
    if unknown:
        here = name_some("", sorted(known))
        raise Refused(f"asked to reserve node {unknown[0]}; the nodes here are {here}", "see the nodes with: ginfo")
    return [known[name] for name in sorted(set(command.nodelist))]


def _place(wish: ReservationRequest, bare: CalendarEntry, nodes: Sequence[NodeView], tx: TickTransaction) -> Placement:
    """The best place on one of these nodes. Raises: Refused."""
    state = tx.state
    place = choose_placement(wish, bare, nodes, state.rows[CALENDAR].values(), state.holds.values(), tx.now)
    if place is not None:
        return place
    most = max((sum(view.is_present and view.mig_profile is None for view in node.gpus) for node in nodes), default=0)
    on = f" on node {nodes[0].name}" if len(nodes) < len(tx.nodes) else ""
    if wish.cards:
        raise Refused("the cards are on different nodes", "make one reservation for each node")
    if wish.gpus is not None and wish.gpus > most:
        raise Refused(f"asked to reserve {plural(wish.gpus, 'GPU')}; there are {most}{on}", "see them with: ginfo")
    raise Refused(
        f"other reservations leave fewer than {wish.gpus} of the {plural(most, 'GPU')}{on} at that time",
        f"choose another time; {_LIST}",
    )


def _card(tx: TickTransaction, word: str) -> str:
    uuid = tx.resolve_device(word)
    if not any(view.uuid == uuid for node in tx.nodes for view in node.gpus):
        raise NotFound(f"{word!r} is not a GPU", "for a whole node use --node; list GPUs with: ginfo")
    return uuid


def _refuse_entries(found: tuple[Conflict, ...]) -> None:
    for conflict in found:
        if conflict.job_id is None:
            hint = "choose another time or other cards" if conflict.name else "ask for less with -c and --mem"
            raise Refused(conflict.text, f"{hint}; {_LIST}")


def _named(jobs: list[Conflict]) -> str:
    shown = "; ".join(conflict.text for conflict in jobs[:_MOST_NAMED])
    rest = len(jobs) - _MOST_NAMED
    return f"{shown}; and {rest} more" if rest > 0 else shown


def _notes(entry: CalendarEntry, jobs: list[Conflict], tx: TickTransaction) -> list[str]:
    notes = [f"{conflict.text}, and is not affected" for conflict in jobs]
    for other in sorted(tx.state.rows[CALENDAR].values(), key=lambda one: one.name):
        if other.name != entry.name and overlaps(entry, other, tx.now) is not None:
            # Other overlaps have been refused already.
            upkeep, kept = (entry, other) if entry.is_maintenance else (other, entry)
            what = "maintenance" if kept.is_maintenance else "reservation"
            notes.append(f"{what} {kept.name} overlaps; nothing runs in it during maintenance {upkeep.name}")
    known = tx.settings.account
    notes += [f"account {name} does not exist yet" for name in entry.accounts if known and name not in known]
    return notes


def _unreserve(command: Unreserve, tx: TickTransaction) -> dict[str, Any]:
    names = list(dict.fromkeys(command.names))
    for name in names:
        if name not in tx.state.rows[CALENDAR]:
            raise NotFound(f"there is no reservation {name!r}", _LIST)
    for name in names:
        tx.put_row(CALENDAR, name, None)
    waiting = [
        job.id for job in tx.state.jobs.values() if job.spec.reservation in names and job.state is JobState.PENDING
    ]
    return {"changed": names, "waiting": sorted(waiting)}
