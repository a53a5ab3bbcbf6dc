"""Instants at which waiting jobs have to be looked at again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, nsmallest

_SPARE = 1000


class Alarms:
    """(instant, job) in order of time. One that no longer means anything stays until it comes up or is pruned."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def set(self, at: float, job_id: int) -> None:
        """Ring for this job at that instant; a job may have several alarms."""
        heappush(self._heap, (at, job_id))

    def first(self) -> float | None:
        """When the next one rings."""
        return self._heap[0][0] if self._heap else None

    def soonest(self, most: int) -> list[tuple[float, int]]:
        """The next so many, soonest first; some may mean nothing any more."""
        return nsmallest(most, self._heap)

    def until(self, now: float) -> Iterator[int]:
        """Take out the jobs whose instant has come."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]

    def prune(self, jobs: int, is_live: Callable[[float, int], bool]) -> None:
        """Drop what means nothing any more, once that is more than is needed for so many jobs."""
        if len(self._heap) > 2 * jobs + _SPARE:
            self._heap = [alarm for alarm in self._heap if is_live(*alarm)]
            heapify(self._heap)
