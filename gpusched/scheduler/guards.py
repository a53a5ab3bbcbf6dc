"""What may turn a place down that has room: promised groups of cards, and plug-ins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey
from gpusched.model.states import ReasonCode
from gpusched.scheduler.cells import CellGuard
from gpusched.scheduler.draft import Booking, Layout
from gpusched.scheduler.extension import Extensions
from gpusched.scheduler.placement import Guard
from gpusched.scheduler.preemption import Held
from gpusched.scheduler.sharing.quota import Quotas

_NO_CARDS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _NodeFilter:
    """Plug-ins that look at the nodes of a place, before `then` does."""

    extensions: Extensions
    key: ClassKey
    layout: Layout
    then: Guard | None

    def why_not(self, booking: Booking) -> str | None:
        for piece in booking.pieces():
            text = self.extensions.why_not_node(self.key, self.layout.nodes[piece.node])
            if text is not None:
                return text
        return None if self.then is None else self.then.why_not(booking)


class Guards:
    """Makes the guard of each class; None nearly always."""

    def __init__(
        self,
        layout: Layout,
        settings: Settings,
        held: Iterable[Held],
        quotas: Quotas,
        extensions: Extensions,
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._quotas = quotas
        self._extensions = extensions
        self._can_take_back = settings.preempt.mode != "off" and settings.preempt.reclaim
        self._cells: CellGuard | None = None
        if any(queue.cells for queue in settings.queue.values()):
            self._cells = CellGuard(layout, settings, self._running(held))

    def _running(self, held: Iterable[Held]) -> Iterator[tuple[str, Booking, bool]]:
        """What runs, and whether it gives way: the oldest of a queue are on its guarantee, the rest has borrowed."""
        quotas = Quotas(self._settings, self._layout)
        for one in sorted(held, key=lambda one: (one.first.start_at, one.first.job_id)):
            first = one.first
            gives_way = self._gives_way(first.queue, one.amount, quotas)
            quotas.add(first.queue, first.user, first.qos, one.amount)
            for booking in one.bookings:
                yield first.queue, booking, gives_way

    def _gives_way(self, queue: str, amount: Resources, quotas: Quotas) -> bool:
        """Whether a job that holds so much more is on borrowed cards, and can be made to give way."""
        known = self._settings.queue.get(queue)
        is_preemptible = self._can_take_back and (known is None or known.preemptible)
        return is_preemptible and not quotas.is_within_guarantee(queue, amount)

    def of(self, key: ClassKey, amount: Resources) -> Guard | None:
        """The guard of this class, as of now."""
        guard: Guard | None = None
        if self._cells is not None and key.request.gpus:
            guard = self._cells.guard_for(key.queue, self._gives_way(key.queue, amount, self._quotas), True)
        if self._extensions.filters:
            guard = _NodeFilter(self._extensions, key, self._layout, guard)
        return guard

    def reason(self) -> ReasonCode:
        """The code for what a guard turns down."""
        return ReasonCode.PLUGIN if self._cells is None else ReasonCode.QUEUE_GUARANTEE

    def avoid(self, key: ClassKey, amount: Resources) -> frozenset[int]:
        """Cards that this class had better leave alone."""
        if self._cells is None or self._gives_way(key.queue, amount, self._quotas):
            return _NO_CARDS
        return self._cells.avoid(key.queue)

    def started(self, key: ClassKey, booking: Booking, amount: Resources) -> None:
        """Count a job that starts in this cycle; it is not counted in the quotas yet."""
        if self._cells is not None:
            self._cells.add(key.queue, booking, self._gives_way(key.queue, amount, self._quotas))
