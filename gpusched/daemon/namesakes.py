"""Unfinished jobs by owner and name, for those that wait until all earlier ones have ended (`singleton`).

Kept only while there is such a job: the others cost nothing then.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from gpusched.model.job import Job

_Mark = tuple[int, str]
"""Owner and name."""


class Namesakes:
    """Who is first of each name. What has left stays in its heap until it comes up."""

    def __init__(self) -> None:
        self._is_kept = False
        self._mark_of: dict[int, _Mark] = {}
        self._heaps: dict[_Mark, list[int]] = {}

    def begin(self, jobs: Iterable[Job]) -> None:
        """Keep the books from now on; does nothing when they are kept already."""
        if self._is_kept:
            return
        self._is_kept = True
        for job in jobs:
            if not job.state.is_final and job.array_id is None:
                mark = (job.uid, job.spec.name)
                self._mark_of[job.id] = mark
                self._heaps.setdefault(mark, []).append(job.id)
        for heap in self._heaps.values():
            heapify(heap)

    def end(self) -> None:
        """Nobody asks any more."""
        self._is_kept = False
        self._mark_of.clear()
        self._heaps.clear()

    def follow(self, job: Job) -> tuple[int, ...]:
        """Take in a new or changed job; returns the jobs whose turn may have come or gone by that."""
        if not self._is_kept or job.array_id is not None:
            # An array is there until its last task has ended.
            return ()
        before = self._mark_of.get(job.id)
        after = None if job.state.is_final else (job.uid, job.spec.name)
        if before == after:
            return ()
        touched = []
        if after is not None:
            touched.append(self._first(after))
            self._mark_of[job.id] = after
            heappush(self._heaps.setdefault(after, []), job.id)
        else:
            del self._mark_of[job.id]
        if before is not None:
            touched.append(self._first(before))
        return tuple(job_id for job_id in touched if job_id is not None)

    def earlier(self, job_id: int) -> int | None:
        """The first unfinished job of the same owner and name, when it is before this one."""
        mark = self._mark_of.get(job_id)
        first = None if mark is None else self._first(mark)
        return first if first is not None and first < job_id else None

    def _first(self, mark: _Mark) -> int | None:
        heap = self._heaps.get(mark, [])
        while heap and self._mark_of.get(heap[0]) != mark:
            heappop(heap)
        if not heap:
            self._heaps.pop(mark, None)
        return heap[0] if heap else None

    def lines(self) -> list[list[int]]:
        """The ids of each owner and name, ascending."""
        found: dict[_Mark, list[int]] = {}
        for job_id in sorted(self._mark_of):
            found.setdefault(self._mark_of[job_id], []).append(job_id)
        return list(found.values())
