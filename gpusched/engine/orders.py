"""Orders to runs: the lines of their files, and which orders a run still lacks according to the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpusched.engine.spool import SUSPEND_LINE
from gpusched.model.execution import (
    EnterOrder,
    LimitOrder,
    NoteOrder,
    OpenRun,
    Order,
    ResumeOrder,
    SignalOrder,
    StepStopOrder,
    StopOrder,
    SuspendOrder,
)


@dataclass(slots=True)
class GivenOrders:
    """The lasting orders last given to a run. Signals, notes and visits take effect once and are not kept."""

    stop: StopOrder | None = None
    is_suspended: bool = False
    limit: LimitOrder | None = None
    """None: unknown, as after a restart of the daemon."""

    def add(self, order: Order) -> None:
        if isinstance(order, StopOrder):
            # What is to end moves.
            self.stop, self.is_suspended = order, False
        elif isinstance(order, SuspendOrder):
            self.is_suspended = self.stop is None
        elif isinstance(order, ResumeOrder):
            self.is_suspended = False
        elif isinstance(order, LimitOrder):
            self.limit = order

    def missing(self, wanted: OpenRun) -> list[Order]:
        """Orders that bring the run up to date; empty when it is. A stop is never revoked."""
        order = wanted.pending_order
        if isinstance(order, StopOrder):
            return [] if order == self.stop else [order]
        if self.stop is not None:
            return []
        missing: list[Order] = []
        if wanted.limit is not None and wanted.limit != self.limit:
            missing.append(wanted.limit)
        if isinstance(order, SuspendOrder) != self.is_suspended:
            missing.append(ResumeOrder() if order is None else order)
        return missing


def order_line(order: Order) -> str:
    """Format an order as a line of the order file; the final dot marks it as complete."""
    if isinstance(order, StopOrder):
        number = "-" if order.signal is None else str(int(order.signal))
        return f"stop {order.why} {number} {'-' if order.grace_s is None else order.grace_s} ."
    if isinstance(order, SignalOrder):
        return f"signal {int(order.signal)} {order.to} ."
    if isinstance(order, StepStopOrder):
        return f"stop-step {order.step} {'-' if order.grace_s is None else order.grace_s} ."
    if isinstance(order, SuspendOrder):
        return SUSPEND_LINE
    if isinstance(order, ResumeOrder):
        return "resume ."
    if isinstance(order, EnterOrder):
        return f"enter {order.token} ."
    if isinstance(order, NoteOrder):
        return f"note {' '.join(order.text.split())} ."
    assert isinstance(order, LimitOrder)
    return f"limit {'-' if order.time_limit_s is None else order.time_limit_s} ."


def orders_from(lines: Iterable[str]) -> Iterator[StopOrder | LimitOrder | SuspendOrder | ResumeOrder]:
    """Parse the lasting orders of an order file; lines torn by a crash are skipped, as by supervisors."""
    for line in lines:
        words = line.split(" ")
        try:
            if words[-1] != ".":
                continue
            if words[0] == "stop":
                number = None if words[2] == "-" else int(words[2])
                yield StopOrder(words[1], number, None if words[3] == "-" else float(words[3]))
            elif words[0] == "limit":
                yield LimitOrder(None if words[1] == "-" else float(words[1]))
            elif line == SUSPEND_LINE:
                yield SuspendOrder()
            elif words[0] == "resume":
                yield ResumeOrder()
        except (ValueError, IndexError):
            continue
