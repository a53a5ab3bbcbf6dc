"""Nodes on which maintenance goes on or is to come, and what that means for a job that waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from gpusched.model.snapshot import Window
from gpusched.policy.draft import Layout
from gpusched.policy.words import about


class Upkeep:
    """The maintenance windows of one cycle, by number of the node."""

    def __init__(self, windows: Iterable[Window], layout: Layout, now: float) -> None:
        self._now = now
        self._layout = layout
        self._there: dict[int, Window] = {}
        self._coming: dict[int, Window] = {}
        for window in sorted(windows, key=lambda one: one.start_at):
            if not window.is_maintenance or window.end_at <= now:
                continue
            for place in window.held:
                number = layout.node_number(place.node)
                if number is not None:
                    (self._there if window.start_at <= now else self._coming).setdefault(number, window)

    def __bool__(self) -> bool:
        return bool(self._there or self._coming)

    def why_not(self, nodes: Collection[int], free: Collection[int], end_at: float) -> str | None:
        """A sentence when it is maintenance that keeps a job from starting now.

        Args: nodes: on which it could ever run. free: on which it has room now. end_at: when it would end, infinite
        without a time limit.
        """
        if nodes and all(node in self._there for node in nodes):
            node = min(nodes, key=lambda number: (self._there[number].end_at, number))
            window = self._there[node]
            return (
                f"maintenance {window.name} of {self._names(nodes)} ends in {about(window.end_at - self._now)}"
                + _why(window)
            )
        late = [node for node in free if node in self._coming and end_at > self._coming[node].start_at]
        if late and len(late) == len(set(free)):
            window = self._coming[min(late, key=lambda number: (-self._coming[number].start_at, number))]
            limit = "the job has no time limit" if end_at == inf else "the job's time limit is longer"
            begins = f"maintenance {window.name} of {self._names(late)} begins in {about(window.start_at - self._now)}"
            return f"{begins}, and {limit}{_why(window)}"
        return None

    def _names(self, nodes: Collection[int]) -> str:
        names = [self._layout.nodes[number].name for number in sorted(set(nodes))]
        return f"node {names[0]}" if len(names) == 1 else f"nodes {', '.join(names)}"


def _why(window: Window) -> str:
    return f" ({window.message})" if window.message else ""
