"""The arrays in the daemon's memory: which tasks have no row yet, which are open, how the others ended."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from gpusched.lifecycle import arrays
from gpusched.lifecycle.arrays import Ended
from gpusched.model.job import Job
from gpusched.model.tasks import TaskSet
from gpusched.ports import Store


@dataclass(slots=True)
class Group:
    """What is known of one array beside its row."""

    all: TaskSet
    left: TaskSet
    """Tasks without a row."""
    open: set[int] = field(default_factory=set)
    """Ids of tasks that have a row and have not ended."""
    ended: Ended = field(default_factory=Ended)
    ready: set[int] | None = None
    """Tasks of those left that nothing keeps waiting for the task of the same number elsewhere; None: all."""


class TaskLine:
    """The tasks of an array that wait without a row, as ids in the order in which they start."""

    __slots__ = ("_first", "_group")

    def __init__(self, array_id: int, group: Group) -> None:
        self._first = array_id + 1
        self._group = group

    def __len__(self) -> int:
        group = self._group
        return len(group.left) if group.ready is None else len(group.ready)

    def __iter__(self) -> Iterator[int]:
        group = self._group
        if group.ready is None and len(group.all.ranges) == 1:
            for part in group.left.ranges:
                yield from _moved(part, group.all.ranges[0], self._first)
            return
        numbers: Iterable[int] = group.left if group.ready is None else sorted(group.ready)
        for number in numbers:
            yield self._first + group.all.position(number)

    def position(self, number: int) -> int:
        """How many tasks are in line before this one. Raises: ValueError when it is not left."""
        group = self._group
        if group.ready is None:
            return group.left.position(number)
        return sum(other < number for other in group.ready)

    def first(self, most: int) -> list[int]:
        """The first so many."""
        return list(islice(self, most))


def _moved(part: range, whole: range, first: int) -> range:
    """Ids of some of the numbers of one range, of which the first has this id."""
    low = first + whole.index(part[0])
    return range(low, low + (part[-1] - part[0]) // whole.step + 1, max(1, part.step // whole.step))


class Arrays:
    """All arrays that have not ended, by id."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._ids: list[int] = []
        self._touched: set[int] = set()

    def __contains__(self, array_id: object) -> bool:
        return array_id in self._groups

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(self._ids)

    def load(self, store: Store, jobs: Iterable[Job]) -> None:
        """Learn the arrays among active jobs, and how their tasks have ended that are no longer active."""
        found = [job for job in jobs if job.is_array]
        for job in found:
            # With the tasks that are left: others may depend on one that has no row.
            self.follow(job)
        for array_id, state, tasks, exit_code in store.task_tallies([job.id for job in found]):
            self._groups[array_id].ended.add(state, exit_code, tasks)
        self._touched.update(self._groups)

    def _know(self, array: Job) -> Group:
        group = self._groups.get(array.id)
        if group is None:
            group = self._groups[array.id] = Group(arrays.all_tasks(array), TaskSet())
            insort(self._ids, array.id)
        return group

    def split(self, job: Job) -> None:
        """A task is about to get its row; it may have ended already."""
        if job.array_id in self._groups:
            self._groups[job.array_id].open.add(job.id)

    def follow(self, job: Job) -> None:
        """Take in a new or changed row."""
        if job.is_array:
            if job.state.is_final:
                self._forget(job.id)
                return
            group = self._know(job)
            group.left = arrays.tasks_left(job)
            if group.ready is not None:
                group.ready = {number for number in group.ready if number in group.left}
            self._touched.add(job.id)
        elif job.array_id in self._groups:
            group = self._groups[job.array_id]
            if not job.state.is_final:
                group.open.add(job.id)
            elif job.id in group.open:
                group.open.remove(job.id)
                group.ended.add(job.state, job.exit_code)
                self._touched.add(job.array_id)

    def _forget(self, array_id: int) -> None:
        if self._groups.pop(array_id, None) is not None:
            del self._ids[bisect_right(self._ids, array_id) - 1]
        self._touched.discard(array_id)

    def take_touched(self) -> list[int]:
        """Arrays to settle since the last call, by id."""
        touched, self._touched = sorted(self._touched), set()
        return touched

    def group(self, array_id: int) -> Group:
        """What is known of an array. Raises: KeyError."""
        return self._groups[array_id]

    def line(self, array_id: int) -> TaskLine:
        """Its tasks that wait without a row."""
        return TaskLine(array_id, self._groups[array_id])

    def left(self, job: Job) -> int:
        """How many jobs a row stands for that may still start: the tasks left of an array, 1 of any other."""
        return len(arrays.tasks_left(job)) if job.is_array else 1

    def array_of(self, job_id: int) -> int | None:
        """The array that an id belongs to as that of a task; None when it is none of an active array."""
        place = bisect_right(self._ids, job_id) - 1
        if place < 0:
            return None
        array_id = self._ids[place]
        return array_id if 0 < job_id - array_id <= len(self._groups[array_id].all) else None
