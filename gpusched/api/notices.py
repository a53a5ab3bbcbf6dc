"""Notices for all users who look at the queue: drained nodes and GPUs, paused queues, maintenance on or coming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpusched.model.cluster import NodeView
from gpusched.model.table_settings import QueuePause
from gpusched.model.units import gpu_label
from gpusched.ports.tables import CALENDAR, DRAINS, TABLE_SETTINGS
from gpusched.scheduler.calendar import next_window

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

AHEAD_S = 7 * 86400.0
"""How long in advance maintenance is announced."""


def notices(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Drains and pauses, then maintenance by start time, each with its subject and message."""
    now, state = scheduler.now(), scheduler.state
    nodes = scheduler.nodes(now)
    found: list[dict[str, Any]] = [
        {"kind": "drain", "what": _what(target, nodes), "message": entry.text, "cause": entry.cause}
        for target, entry in sorted(state.rows[DRAINS].items())
    ]
    found += [
        {"kind": "pause", "what": f"queue {one.queue}", "message": one.message}
        for _, one in sorted(state.rows[TABLE_SETTINGS].items())
        if isinstance(one, QueuePause)
    ]
    coming = []
    for entry in state.rows[CALENDAR].values():
        window = next_window(entry, now) if entry.is_maintenance else None
        if window is None or window.start_at > now + AHEAD_S:
            continue
        what = ", ".join(f"node {place.node}" for place in entry.held)
        coming.append(
            {
                "kind": "maintenance",
                "what": what,
                "message": entry.message,
                "name": entry.name,
                "start_at": window.start_at,
                "end_at": window.end_at,
            }
        )
    return found + sorted(coming, key=lambda one: (one["start_at"], one["name"]))


def _what(target: str, nodes: Sequence[NodeView]) -> str:
    for node in nodes:
        if target == node.name:
            return f"node {target}"
        for gpu in node.gpus:
            if target == gpu.uuid:
                return f"GPU {gpu_label(gpu.index)}" + (f" of {node.name}" if len(nodes) > 1 else "")
    return f"GPU {target}"
