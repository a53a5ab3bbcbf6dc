"""What a node must know of its runs, by version, and what it has reported of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gpusched.engine.orders import GivenOrders
from gpusched.engine.remote.messages import MAX_CHANGE_BYTES, MOST_CHANGES, USUAL_BYTES, ForgetRun, OrderRun, WantedRun
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    Order,
    RunEnd,
    RunStarted,
    StopOrder,
    SuspendOrder,
)
from gpusched.model.value import encode, replace


@dataclass(slots=True)
class _WantedRun:
    """A run in the state in which it is to be."""

    known: OpenRun
    """Its ticket is dropped as soon as an agent may have it; its orders are in `given`."""
    given: GivenOrders = field(default_factory=GivenOrders)
    asked: int = 0
    """Version that first had its ticket; 0: none had."""
    version: int = 0
    """Of its last change."""
    ordered: int = 0
    """Version of the last order that was given to it by itself."""
    body: bytes | None = None
    """The change as it is sent, once it is."""

    def drop_ticket(self) -> None:
        if self.known.ticket is not None:
            self.known, self.body = replace(self.known, ticket=None), None


@dataclass(slots=True)
class _ToldRun:
    """A run of which events were received in this session."""

    started: RunStarted | None = None
    is_handed_out: bool = False
    """Whether the daemon got `started`."""
    has_ended: bool = False
    is_forsaken: bool = False
    """For the daemon it has: what becomes of it here is news all the same."""


class NodeReplica:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._runs: dict[str, _WantedRun] = {}
        self._told: dict[str, _ToldRun] = {}
        self._changes: dict[int, _WantedRun | OrderRun | ForgetRun] = {}
        """Not acknowledged, by version, in order. Of a run whose state changes again, the last one is enough."""
        self.version = 0
        self.acked = 0

    # --- what the daemon wants ---------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether the node has not acknowledged all of it."""
        return bool(self._changes)

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        """These are all runs of the node, which has their tickets."""
        self.version += 1
        self._changes.clear()
        self._runs = {known.run: _wanted(replace(known, ticket=None)) for known in runs}

    def want(self, known: OpenRun) -> int:
        """Note the state in which a run is to be. Returns: 0, or the size of what is too large to be sent."""
        run = self._runs.get(known.run)
        if run is None:
            run = _wanted(known)
            if known.ticket is not None:
                size = len(encode(WantedRun(known)))
                if size > MAX_CHANGE_BYTES:
                    return size
                run.asked = self.version + 1
            self._runs[known.run] = run
        else:
            if known.ticket is None and isinstance(known.pending_order, StopOrder):
                # It need not start at all: hours of silence may lie between the start and the stop.
                run.drop_ticket()
            missing = run.given.missing(known)
            if not missing:
                return 0
            for order in missing:
                run.given.add(order)
            if run.ordered <= run.version:
                self._changes.pop(run.version, None)
        run.body, run.version = None, self._note(run)
        return 0

    def order(self, run: str, order: Order) -> None:
        """Note an order that is given to a run by itself."""
        version = self._note(OrderRun(run, order))
        if (wanted := self._runs.get(run)) is not None:
            wanted.given.add(order)
            wanted.ordered = version

    def forget(self, run: str) -> None:
        """Note that a run is to be forgotten."""
        self._note(ForgetRun(run))

    def _note(self, change: _WantedRun | OrderRun | ForgetRun) -> int:
        self.version += 1
        self._changes[self.version] = change
        return self.version

    # --- what the node is sent ----------------------------------------------------------------------------

    def changes(self, boot_id: str) -> list[tuple[int, bytes]]:
        """The first changes that the node has not acknowledged, as many as one frame takes.

        Args: boot_id: of the node: what starts, starts in that boot, whatever machine the table has in mind.
        """
        found: list[tuple[int, bytes]] = []
        size = 0
        for version, change in islice(self._changes.items(), MOST_CHANGES):
            if not isinstance(change, _WantedRun):
                body = encode(change)
            else:
                if change.body is None:
                    if change.known.ticket is not None:
                        change.known = replace(change.known, boot_id=boot_id)
                    change.body = encode(WantedRun(self._state(change)))
                body = change.body
            size += len(body)
            if found and size > USUAL_BYTES:
                break
            found.append((version, body))
        return found

    def all_runs(self, as_of: int) -> tuple[OpenRun, ...]:
        """Every run that an agent may know which has applied the changes up to this version, without tickets.

        Runs that were asked for later remain changes.
        """
        found = []
        for run in self._runs.values():
            if run.asked <= as_of:
                run.drop_ticket()
                found.append(self._state(run))
        return tuple(found)

    def _state(self, run: _WantedRun) -> OpenRun:
        """The run with the orders that it is to have, and the supervisor that was reported."""
        known, given, told = run.known, run.given, self._told.get(run.known.run)
        if told is not None and told.started is not None:
            pid, start_ticks = told.started.supervisor_pid, told.started.supervisor_start_ticks
            known = replace(known, supervisor_pid=pid, supervisor_start_ticks=start_ticks)
        return replace(
            known, pending_order=given.stop or (SuspendOrder() if given.is_suspended else None), limit=given.limit
        )

    def acknowledge(self, version: int) -> bool:
        """Take the changes up to this version as applied; whether any was news."""
        if version <= self.acked:
            return False
        self.acked = version
        while self._changes and (first := next(iter(self._changes))) <= version:
            change = self._changes.pop(first)
            if isinstance(change, _WantedRun):
                change.drop_ticket()
                change.body = None
            elif isinstance(change, ForgetRun):
                self._drop(change.run)
        return True

    def _drop(self, run: str) -> None:
        told = self._told.get(run)
        # The engine ignores it for a run that has not ended.
        if told is not None and told.has_ended:
            del self._told[run]
            self._runs.pop(run, None)

    # --- events ------------------------------------------------------------------------------------------

    def is_news(self, event: EngineEvent) -> bool:
        """Note an event; whether the daemon is to get it. A new agent reports starts and ends again."""
        told = self._told.setdefault(event.run, _ToldRun())
        if told.is_forsaken and isinstance(event, RunEnd):
            told.is_forsaken = False
            return True
        if told.has_ended or (isinstance(event, RunStarted) and told.started is not None):
            return False
        if isinstance(event, RunStarted):
            told.started = event
        told.has_ended = isinstance(event, RunEnd)
        return True

    def forsake(self, run: str) -> None:
        """Note that the run has ended for the daemon."""
        told = self._told.setdefault(run, _ToldRun())
        told.is_forsaken = not told.has_ended
        told.has_ended = True

    def note_handed_out(self, event: EngineEvent) -> None:
        told = self._told.get(event.run)
        if told is not None and isinstance(event, RunStarted):
            told.is_handed_out = True

    def lost_start(self, known: OpenRun) -> RunStarted | None:
        """The start of a live run that the daemon got, but the table lacks."""
        told = self._told.get(known.run)
        if known.supervisor_pid is not None or told is None or told.has_ended or not told.is_handed_out:
            return None
        return told.started

    def is_live(self, run: str) -> bool:
        """Whether a start of the run was reported, and no end."""
        told = self._told.get(run)
        return told is not None and told.started is not None and not told.has_ended

    def live(self) -> Iterator[RunStarted]:
        for told in self._told.values():
            if told.started is not None and not told.has_ended:
                yield told.started


def _wanted(known: OpenRun) -> _WantedRun:
    run = _WantedRun(known)
    if known.pending_order is not None:
        run.given.add(known.pending_order)
    run.given.limit = known.limit
    if known.limit is None and known.ticket is not None:
        run.given.limit = LimitOrder(known.ticket.time_limit_s)
    return run
