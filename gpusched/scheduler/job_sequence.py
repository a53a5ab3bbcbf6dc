"""Jobs of one class in order of arrival, in which the tasks of an array are ranges of ids."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from math import inf
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from gpusched.scheduler.priority import Rank
    from gpusched.scheduler.queue import Entry, JobClass


Ids = tuple[float, int, int]
"""Arrival, first id and last id of consecutive jobs."""


class JobSequence(Sequence["Entry"]):
    """Like a sorted list of entries; entries of tasks are made when they are asked for.

    Costs depend on the number of ranges, not of tasks. Only the jobs behind the first need their number known.
    """

    __slots__ = ("_job_class", "_parts", "_size", "_starts")

    def __init__(self, job_class: JobClass, parts: Iterable[Ids] = ()) -> None:
        """Args: parts: in order."""
        self._job_class = job_class
        self._parts = list(parts)
        self._size = sum(last - first + 1 for _, first, last in self._parts)
        self._starts: list[int] | None = None
        """Number of jobs before each range, once asked for."""

    @property
    def parts(self) -> Sequence[Ids]:
        """The ranges, in order."""
        return self._parts

    def copy(self, job_class: JobClass) -> JobSequence:
        """The same jobs, of another class."""
        return JobSequence(job_class, self._parts)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        job_class = self._job_class
        for queued_at, first, last in self._parts:
            for job_id in range(first, last + 1):
                yield queued_at, job_id, job_class

    def __contains__(self, entry: object) -> bool:
        assert isinstance(entry, tuple)
        number = self._before(entry[0], entry[1])
        return number >= 0 and self._parts[number][0] == entry[0] and entry[1] <= self._parts[number][2]

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        if isinstance(number, slice):
            return list(islice(self, *number.indices(self._size)))
        if number in (0, -1):
            queued_at, first, last = self._parts[number]
            return queued_at, last if number else first, self._job_class
        place, number = self._place(number)
        queued_at, first, _ = self._parts[place]
        return queued_at, first + number, self._job_class

    def append(self, entry: Entry) -> None:
        """Add a job behind all others."""
        self.add(entry[0], range(entry[1], entry[1] + 1))

    def insert(self, number: int, entry: Entry) -> None:
        """Add a job in its order."""
        self.add(entry[0], range(entry[1], entry[1] + 1))

    def pop(self, number: int) -> Entry:
        """Remove and return the job with this number."""
        if number:
            entry = self[number]
            self.discard(entry[0], range(entry[1], entry[1] + 1))
            return entry
        queued_at, first, last = self._parts[0]
        self._parts[:1] = [(queued_at, first + 1, last)] if first < last else ()
        self._size -= 1
        self._starts = None
        return queued_at, first, self._job_class

    def add(self, queued_at: float, ids: range) -> None:
        """Add consecutive tasks, none of which is in the sequence."""
        parts, first, last = self._parts, ids[0], ids[-1]
        place = self._before(queued_at, first) + 1
        if place < len(parts) and parts[place][:2] == (queued_at, last + 1):
            last = parts.pop(place)[2]
        if place and parts[place - 1][0] == queued_at and parts[place - 1][2] == first - 1:
            place -= 1
            first = parts.pop(place)[1]
        parts.insert(place, (queued_at, first, last))
        self._size += len(ids)
        self._starts = None

    def common(self, queued_at: float, ids: Sequence[range]) -> list[range]:
        """Those of these ranges of tasks that are there."""
        first, last = self._before(queued_at, ids[0][0]), self._before(queued_at, ids[-1][-1])
        parts = self._parts[max(0, first) : last + 1]
        return minus(ids, minus(ids, [range(one, other + 1) for at, one, other in parts if at == queued_at]))

    def discard(self, queued_at: float, ids: range) -> int:
        """Remove those of these consecutive tasks that are there; return how many."""
        parts = self._parts
        first_id, last_id = ids[0], ids[-1]
        place = max(0, self._before(queued_at, first_id))
        if place < len(parts) and (parts[place][0] < queued_at or parts[place][2] < first_id):
            place += 1
        end, kept, gone = place, [], 0
        while end < len(parts) and parts[end][:2] <= (queued_at, last_id):
            _, first, last = parts[end]
            if first < first_id:
                kept.append((queued_at, first, first_id - 1))
            if last > last_id:
                kept.append((queued_at, last_id + 1, last))
            gone += min(last, last_id) - max(first, first_id) + 1
            end += 1
        if gone:
            parts[place:end] = kept
            self._size -= gone
            self._starts = None
        return gone

    def number_of(self, entry: Entry) -> int:
        """Number of a job that is there."""
        place = self._before(entry[0], entry[1])
        return self._size_before(place) + entry[1] - self._parts[place][1]

    def first_behind(self, rank: Rank, rank_of: Callable[[float, int], Rank]) -> int:
        """Number of the first job that ranks behind this. Args: rank_of: ends in the id, and follows the order."""
        place = bisect_left(self._parts, rank, key=lambda part: rank_of(part[0], part[1]))
        if not place:
            return 0
        queued_at, first, last = self._parts[place - 1]
        before = self._size_before(place - 1)
        # The tasks of a range differ in their ids alone.
        end = last + 1
        if rank_of(queued_at, first)[:-1] == rank[:-1]:
            assert isinstance(rank[-1], int)
            end = min(end, rank[-1])
        return before + end - first

    def _size_before(self, place: int) -> int:
        return sum(last - first + 1 for _, first, last in self._parts[:place])

    def _before(self, queued_at: float, job_id: int) -> int:
        """Index of the last range that begins with this job or before it; -1 for none."""
        return bisect_right(self._parts, (queued_at, job_id, inf)) - 1

    def _place(self, number: int) -> tuple[int, int]:
        """Range of a job, and its number in it. Raises: IndexError."""
        if not 0 <= number < self._size:
            raise IndexError(number)
        if self._starts is None:
            self._starts = [0, *accumulate(last - first + 1 for _, first, last in self._parts)]
        place = bisect_right(self._starts, number) - 1
        return place, number - self._starts[place]


def merged(parts: Iterable[Ids]) -> list[Ids]:
    """The same jobs in order, in as few ranges as possible."""
    found: list[Ids] = []
    for queued_at, first, last in sorted(parts):
        if found and found[-1][0] == queued_at and found[-1][2] == first - 1:
            first = found.pop()[1]
        found.append((queued_at, first, last))
    return found


def minus(ids: Sequence[range], others: Sequence[range]) -> list[range]:
    """The ids that are not among the others; all ranges consecutive, in order and apart."""
    found, place = list[range](), 0
    for one in ids:
        first = one.start
        while place < len(others) and others[place].stop <= first:
            place += 1
        number = place
        while number < len(others) and others[number].start < one.stop:
            if others[number].start > first:
                found.append(range(first, others[number].start))
            first = others[number].stop
            number += 1
        if first < one.stop:
            found.append(range(first, one.stop))
    return found
