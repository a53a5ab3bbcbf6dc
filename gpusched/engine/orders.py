"""Which orders a run still lacks: what it is to be, by the table, against what it was told so far."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.execution import LimitOrder, OpenRun, Order, ResumeOrder, StopOrder, SuspendOrder


@dataclass(slots=True)
class GivenOrders:
    """The lasting orders that a run was given last. Signals and notes are over once they are given."""

    stop: StopOrder | None = None
    is_suspended: bool = False
    limit: LimitOrder | None = None
    """None: not known, as after a restart of the daemon."""

    def add(self, order: Order) -> None:
        """The run was given this one too."""
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
        """Orders that bring the run in line, none when it is. A stop is never taken back."""
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
