"""The eligible jobs of one class in their order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import islice
from types import MappingProxyType

from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob

from .arrays import TaskLine

FRONT = 128
"""Jobs of a class that one snapshot shows; a plan that uses them all up asks for another turn."""


Entry = tuple[float, int]
"""The instant that age counts from, and the id."""


class ClassQueue:
    """Eligible jobs of one class in their order, and the frozen view of its front.

    An array stands in it once, for all of its tasks without a row.
    """

    __slots__ = ("_arrays", "_entries", "_fences", "_key", "_view")

    def __init__(self, key: ClassKey, fences: Mapping[int, float] = MappingProxyType({})) -> None:
        """Args: fences: from when on nothing passes them, by job; `look_again` after a change of it."""
        self._key = key
        self._fences = fences
        self._entries: list[Entry] = []
        self._arrays: dict[Entry, TaskLine] = {}
        self._view: PendingClass | None = None

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._arrays.values()))

    def __bool__(self) -> bool:
        return bool(self._entries or self._arrays)

    def add(self, entry: Entry, tasks: TaskLine | None = None) -> None:
        """Insert a job, nearly always at the end, or an array with its tasks."""
        if tasks is None:
            insort(self._entries, entry)
        else:
            self._arrays[entry] = tasks
        self._view = None

    def remove(self, entry: Entry) -> TaskLine | None:
        """Take an entry out that is known to be in; returns the tasks that it was put in with."""
        tasks = self._arrays.pop(entry, None)
        if tasks is None:
            del self._entries[bisect_left(self._entries, entry)]
        self._view = None
        return tasks

    def position(self, entry: Entry) -> int:
        """How many jobs of the class are before this one."""
        before = sum(len(tasks) for array, tasks in self._arrays.items() if array < entry)
        return before + bisect_left(self._entries, entry)

    def _first(self, most: int) -> tuple[PendingJob, ...]:
        fences = self._fences
        entries: Iterator[Entry] = iter(self._entries)
        if len(self._arrays) == 1 and not self._entries:
            (((at, _), tasks),) = self._arrays.items()
            return tuple([PendingJob(job_id, at, fences.get(job_id)) for job_id in tasks.first(most)])
        if self._arrays:
            entries = merge(self._entries, *(_entries_of(at, tasks) for (at, _), tasks in self._arrays.items()))
        first = islice(entries, most)
        return tuple([PendingJob(job_id, queued_at, fences.get(job_id)) for queued_at, job_id in first])

    def look_again(self) -> None:
        """The fence of one of them has changed."""
        self._view = None

    def front(self, most: int) -> PendingClass:
        """As `view`, but showing at most so many jobs."""
        return PendingClass(self._key, self._first(most), len(self))

    def view(self) -> PendingClass:
        """The front of the class as the policy sees it; the same object until the class changes."""
        if self._view is None:
            self._view = self.front(FRONT)
        return self._view


def _entries_of(queued_at: float, tasks: TaskLine) -> Iterator[Entry]:
    for job_id in tasks:
        yield queued_at, job_id
