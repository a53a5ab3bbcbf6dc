"""What the head knows of the runs on a node: the sum of its acknowledged operations and of the node's reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpusched.engine.orders import GivenOrders
from gpusched.engine.remote.messages import AdoptRuns, ForgetRuns, Operation, OrderRun, ReconcileRuns, StartRuns
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    SuspendOrder,
)
from gpusched.model.value import replace

ENDS = (RunEnded, RunLost, RunNeverStarted)


@dataclass(slots=True)
class _AppliedRun:
    """A run as acknowledged operations left it."""

    known: OpenRun
    given: GivenOrders = field(default_factory=GivenOrders)


@dataclass(slots=True)
class _ToldRun:
    """A run of which events were received in this session."""

    started: RunStarted | None = None
    is_handed_out: bool = False
    """Whether the daemon got `started`."""
    has_ended: bool = False


class NodeReplica:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._applied: dict[str, _AppliedRun] = {}
        self._told: dict[str, _ToldRun] = {}

    # --- operations the node has applied ---------------------------------------------------------------

    def apply(self, operation: Operation, boot_id: str) -> None:
        """Add an operation. Args: boot_id: of the node when it was sent."""
        if isinstance(operation, AdoptRuns):
            self._applied = {known.run: _applied(known) for known in operation.runs}
        elif isinstance(operation, ReconcileRuns):
            for known in operation.runs:
                self._reconcile(known, boot_id)
        elif isinstance(operation, StartRuns):
            for ticket in operation.tickets:
                if ticket.run not in self._applied:
                    known = OpenRun(ticket.run, boot_id, None, None, adopted=ticket.adopt)
                    self._applied[ticket.run] = _applied(replace(known, limit=LimitOrder(ticket.time_limit_s)))
        elif isinstance(operation, OrderRun):
            applied = self._applied.get(operation.run)
            if applied is not None:
                applied.given.add(operation.order)
        else:
            assert isinstance(operation, ForgetRuns)
            self._forget(operation.runs)

    def _reconcile(self, known: OpenRun, boot_id: str) -> None:
        applied = self._applied.get(known.run)
        if applied is None:
            if known.ticket is not None:
                # It starts there, whatever machine the table has in mind.
                known = replace(known, boot_id=boot_id, limit=known.limit or LimitOrder(known.ticket.time_limit_s))
            self._applied[known.run] = _applied(known)
            return
        for order in applied.given.missing(known):
            applied.given.add(order)

    def _forget(self, runs: tuple[str, ...]) -> None:
        for run in runs:
            told = self._told.get(run)
            # The engine ignores it for a run that has not ended.
            if told is not None and told.has_ended:
                del self._told[run]
                self._applied.pop(run, None)

    def open_runs(self) -> tuple[OpenRun, ...]:
        """Every run that the node has to know, with the state in which it should be."""
        return tuple(self._as_open(run, applied) for run, applied in self._applied.items())

    def _as_open(self, run: str, applied: _AppliedRun) -> OpenRun:
        known, given = applied.known, applied.given
        told = self._told.get(run)
        if told is not None and told.started is not None:
            started = told.started
            known = replace(
                known,
                supervisor_pid=started.supervisor_pid,
                supervisor_start_ticks=started.supervisor_start_ticks,
            )
        return replace(
            known,
            pending_order=given.stop or (SuspendOrder() if given.is_suspended else None),
            limit=given.limit,
            ticket=None,
        )

    # --- events ------------------------------------------------------------------------------------------

    def is_news(self, event: EngineEvent) -> bool:
        """Note an event; whether the daemon is to get it. After a takeover, starts and ends are reported again."""
        told = self._told.setdefault(event.run, _ToldRun())
        if told.has_ended or (isinstance(event, RunStarted) and told.started is not None):
            return False
        if isinstance(event, RunStarted):
            told.started = event
        told.has_ended = isinstance(event, ENDS)
        return True

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

    def has_ended(self, run: str) -> bool:
        told = self._told.get(run)
        return told is not None and told.has_ended

    def is_live(self, run: str) -> bool:
        """Whether a start of the run was reported, and no end."""
        told = self._told.get(run)
        return told is not None and told.started is not None and not told.has_ended

    def live(self) -> Iterator[RunStarted]:
        """The starts of all live runs."""
        for told in self._told.values():
            if told.started is not None and not told.has_ended:
                yield told.started


def _applied(known: OpenRun) -> _AppliedRun:
    applied = _AppliedRun(replace(known, ticket=None))
    if known.pending_order is not None:
        applied.given.add(known.pending_order)
    applied.given.limit = known.limit
    return applied
