"""The eligible jobs of one class in their order."""

from __future__ import annotations

from bisect import bisect_left, insort

from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob

FRONT = 128
"""Jobs of a class that one snapshot shows; a plan that uses them all up asks for another turn."""


class ClassQueue:
    """Eligible jobs of one class in their order, and the frozen view of its front."""

    __slots__ = ("_entries", "_key", "_view")

    def __init__(self, key: ClassKey) -> None:
        self._key = key
        self._entries: list[tuple[float, int]] = []
        self._view: PendingClass | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: tuple[float, int]) -> None:
        """Insert (queued_at, id); nearly always at the end."""
        insort(self._entries, entry)
        self._view = None

    def remove(self, entry: tuple[float, int]) -> None:
        """Take an entry out that is known to be in."""
        del self._entries[bisect_left(self._entries, entry)]
        self._view = None

    def position(self, entry: tuple[float, int]) -> int:
        """How many jobs of the class are before this one."""
        return bisect_left(self._entries, entry)

    def front(self, most: int) -> PendingClass:
        """As `view`, but showing at most so many jobs."""
        shown = tuple(PendingJob(job_id, queued_at) for queued_at, job_id in self._entries[:most])
        return PendingClass(self._key, shown, len(self._entries))

    def view(self) -> PendingClass:
        """The front of the class as the policy sees it; the same object until the class changes."""
        if self._view is None:
            front = tuple(PendingJob(job_id, queued_at) for queued_at, job_id in self._entries[:FRONT])
            self._view = PendingClass(self._key, front, len(self._entries))
        return self._view
