"""Paused queues: nothing new starts from them, or from queues below them, until they are resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gpusched.model.queue_settings import QueueSettings, chain_of
from gpusched.model.snapshot import Reason
from gpusched.model.states import ReasonCode
from gpusched.model.table_settings import Key, QueuePause, TableSetting


class QueuePauses:
    """Which queue is paused and by whom, from the rows of the job table and the tree of queues.

    Each queue has one `Reason`, shared by all of its jobs.
    """

    __slots__ = ("_queues", "_reasons", "_rows")

    def __init__(
        self, table: Mapping[Key, TableSetting] | None = None, queues: Mapping[str, QueueSettings] | None = None
    ) -> None:
        self._rows = {one.queue: one for one in (table or {}).values() if isinstance(one, QueuePause)}
        self._queues = queues or {}
        self._reasons: dict[str, Reason | None] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def of(self, queue: str) -> QueuePause | None:
        """The pause of a queue, or of the nearest one above it that is paused."""
        above = (one.name for one in chain_of(queue, self._queues))
        return next((self._rows[name] for name in (queue, *above) if name in self._rows), None)

    def why(self, queue: str) -> Reason | None:
        """Why nothing starts from a queue; None if it is not paused."""
        if not self._rows:
            return None
        if queue not in self._reasons:
            pause = self.of(queue)
            self._reasons[queue] = None if pause is None else _reason(pause, queue)
        return self._reasons[queue]


def _reason(pause: QueuePause, queue: str) -> Reason:
    facts = {"queue": pause.queue, "paused_by": pause.by, "paused_at": pause.at, "message": pause.message}
    which = pause.queue if pause.queue == queue else f"{pause.queue}, above {queue},"
    return Reason(ReasonCode.PARTITION_DOWN, f"queue {which} {paused(pause)}", facts)


def paused(pause: QueuePause) -> str:
    """`has been paused by root since 2026-11-28 03:10: new disks`."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(pause.at))
    return f"has been paused by {pause.by} since {since}" + (f": {pause.message}" if pause.message else "")
