"""Indexes of active jobs, kept in step by `state`: arrays, counts, timers, class queues.

No operation here looks at all jobs, however many are pending.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge, nsmallest
from itertools import islice
from types import MappingProxyType

from gpusched.lifecycle import arrays
from gpusched.lifecycle.arrays import TasksEnded, job_count
from gpusched.lifecycle.transitions import held_code
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.tasks import TaskSet
from gpusched.ports import Store
from gpusched.scheduler.admission import Tally

_NO_RUNS: Mapping[str, Run] = MappingProxyType({})


@dataclass(slots=True)
class ArrayTasks:
    """State of an array beyond its row."""

    all: TaskSet
    left: TaskSet
    """Tasks without a row."""
    open: set[int] = field(default_factory=set)
    """Ids of tasks that have a row and have not ended."""
    ended: TasksEnded = field(default_factory=TasksEnded)
    ready: set[int] | None = None
    """Tasks left that no counterpart in another array blocks; None: all."""


class RunsByNode:
    """Runs by each of their nodes, so that the reading of one node concerns only what is there."""

    __slots__ = ("_on",)

    def __init__(self) -> None:
        self._on: dict[str, dict[str, Run]] = {}

    def put(self, run: Run) -> None:
        """Take in a new or changed run. Its nodes never change."""
        for node in run.nodes:
            self._on.setdefault(node, {})[run.id] = run

    def drop(self, run: Run) -> None:
        for node in run.nodes:
            runs = self._on.get(node)
            if runs is not None and runs.pop(run.id, None) is not None and not runs:
                del self._on[node]

    def on(self, node: str) -> Mapping[str, Run]:
        """Those with a part on this node, by handle."""
        return self._on.get(node, _NO_RUNS)


class PendingTasks:
    """Pending tasks of an array without a row, as ids in start order."""

    __slots__ = ("_first", "_group")

    def __init__(self, array_id: int, group: ArrayTasks) -> None:
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
        """Number of tasks ahead of this one. Raises: ValueError if it is not left."""
        group = self._group
        if group.ready is None:
            return group.left.position(number)
        return sum(other < number for other in group.ready)

    def first(self, most: int) -> list[int]:
        return list(islice(self, most))


def _moved(part: range, whole: range, first: int) -> range:
    """Map part of a range of task numbers to ids; `first` is the id of the first number in `whole`."""
    low = first + whole.index(part[0])
    return range(low, low + (part[-1] - part[0]) // whole.step + 1, max(1, part.step // whole.step))


class ArrayIndex:
    """All arrays that have not ended, by id."""

    def __init__(self) -> None:
        self._groups: dict[int, ArrayTasks] = {}
        self._ids: list[int] = []
        self._touched: set[int] = set()

    def __contains__(self, array_id: object) -> bool:
        return array_id in self._groups

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all arrays, ascending."""
        return tuple(self._ids)

    def load(self, store: Store, jobs: Iterable[Job]) -> None:
        """Take in the arrays among active jobs, and the results of their tasks that have ended."""
        found = [job for job in jobs if job.is_array]
        for job in found:
            # Take in all tasks that are left: other jobs may depend on one without a row.
            self.follow(job)
        for array_id, state, tasks, exit_code in store.task_tallies([job.id for job in found]):
            self._groups[array_id].ended.add(state, exit_code, tasks)
        self._touched.update(self._groups)

    def _know(self, array: Job) -> ArrayTasks:
        group = self._groups.get(array.id)
        if group is None:
            group = self._groups[array.id] = ArrayTasks(arrays.all_tasks(array), TaskSet())
            insort(self._ids, array.id)
        return group

    def split(self, job: Job) -> None:
        """Note that a task is about to get its row; it may have ended already."""
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
        """Ids of arrays to settle since the last call, ascending."""
        touched, self._touched = sorted(self._touched), set()
        return touched

    def group(self, array_id: int) -> ArrayTasks:
        """State of an array. Raises: KeyError."""
        return self._groups[array_id]

    def line(self, array_id: int) -> PendingTasks:
        """Pending tasks of an array without a row."""
        return PendingTasks(array_id, self._groups[array_id])

    def left(self, job: Job) -> int:
        """Number of jobs of a row that may still start: the tasks left of an array, 1 for any other job."""
        return len(arrays.tasks_left(job)) if job.is_array else 1

    def array_of(self, job_id: int) -> int | None:
        """The active array whose task has this id; None if there is none."""
        place = bisect_right(self._ids, job_id) - 1
        if place < 0:
            return None
        array_id = self._ids[place]
        return array_id if 0 < job_id - array_id <= len(self._groups[array_id].all) else None


class JobCounts:
    """Counters of active jobs. `tally` is a live view of them."""

    def __init__(self) -> None:
        self._queues: Counter[str] = Counter()
        self._queue_users: Counter[tuple[str, str]] = Counter()
        self._qos_users: Counter[tuple[str, str]] = Counter()
        self.tally = Tally(self._queues, self._queue_users, self._qos_users)

    def add(self, spec: JobSpec, user: str, jobs: int = 1) -> None:
        """Add jobs with this queue, QOS and user; a negative number removes them."""
        for counter, mark in (
            (self._queues, spec.queue),
            (self._queue_users, (spec.queue, user)),
            (self._qos_users, (spec.qos, user)),
        ):
            _add(counter, mark, jobs)

    @contextmanager
    def with_more(self, spec: JobSpec, user: str, jobs: int) -> Iterator[Tally]:
        """Context manager: the tally with this many more (or fewer) of these jobs."""
        self.add(spec, user, jobs)
        try:
            yield self.tally
        finally:
            self.add(spec, user, -jobs)


def _add(counter: Counter, mark: object, jobs: int) -> None:  # type: ignore[type-arg]
    counter[mark] += jobs
    if not counter[mark]:
        # Names come and go for months: zero counts must not use memory.
        del counter[mark]


class QueueStats:
    """Counters of active jobs, kept in step with the state."""

    def __init__(self) -> None:
        self.by_queue: Counter[tuple[JobState, str]] = Counter()
        self.by_user: Counter[tuple[JobState, str]] = Counter()
        self.held: Counter[ReasonCode] = Counter()
        """Held pending jobs."""
        self.held_by_queue: Counter[str] = Counter()
        self.asleep: Counter[ReasonCode] = Counter()
        """Pending jobs that wait for an instant, or for an unsatisfiable dependency."""
        self._asleep: dict[int, tuple[ReasonCode, int]] = {}

    @property
    def pending(self) -> int:
        return sum(jobs for (state, _), jobs in self.by_queue.items() if state is JobState.PENDING)

    def replace(self, before: Job | None, after: Job | None) -> None:
        """Take in a changed, new or removed row."""
        if before is not None:
            self._add(before, -job_count(before))
        if after is not None:
            self._add(after, job_count(after))

    def _add(self, job: Job, jobs: int) -> None:
        if job.state.is_final or not jobs:
            return
        _count(self.by_queue, (job.state, job.spec.queue), jobs)
        _count(self.by_user, (job.state, job.user), jobs)
        if job.state is JobState.PENDING and job.hold is not None:
            _count(self.held, held_code(job), jobs)
            _count(self.held_by_queue, job.spec.queue, jobs)

    def sleep(self, job: Job, why: ReasonCode) -> None:
        """Count a pending job that is not held as not queued, for this reason."""
        self.wake(job.id)
        self._asleep[job.id] = why, job_count(job)
        _count(self.asleep, why, job_count(job))

    def wake(self, job_id: int) -> None:
        """Stop counting a job as not queued."""
        known = self._asleep.pop(job_id, None)
        if known is not None:
            _count(self.asleep, known[0], -known[1])


def _count(counter: Counter, mark: object, jobs: int) -> None:  # type: ignore[type-arg]
    counter[mark] += jobs
    if not counter[mark]:
        del counter[mark]


_SPARE = 1000


class Timers:
    """Heap of (instant, job). Obsolete timers stay until they expire or are pruned."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def set(self, at: float, job_id: int) -> None:
        """Add a timer for this job; a job may have several."""
        heappush(self._heap, (at, job_id))

    def first(self) -> float | None:
        """Instant of the next timer."""
        return self._heap[0][0] if self._heap else None

    def soonest(self, most: int) -> list[tuple[float, int]]:
        """The next `most` timers, soonest first; some may be obsolete."""
        return nsmallest(most, self._heap)

    def until(self, now: float) -> Iterator[int]:
        """Remove expired timers and yield their jobs."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]

    def prune(self, jobs: int, is_live: Callable[[float, int], bool]) -> None:
        """Drop obsolete timers once there are more than that many jobs need."""
        if len(self._heap) > 2 * jobs + _SPARE:
            self._heap = [alarm for alarm in self._heap if is_live(*alarm)]
            heapify(self._heap)


FRONT = 128
"""Jobs of a class that a snapshot shows; a plan that uses up all of them asks for another tick."""
Entry = tuple[float, int]
"""Instant from which age counts, and job id."""


class ClassQueue:
    """Eligible jobs of one class in order, and the frozen view of its front.

    An array has one entry for all its tasks without a row.
    """

    __slots__ = ("_arrays", "_entries", "_fences", "_key", "_view")

    def __init__(self, key: ClassKey, fences: Mapping[int, float] = MappingProxyType({})) -> None:
        """Args: fences: by job, when nothing overtakes it any more; call `look_again` after a change."""
        self._key = key
        self._fences = fences
        self._entries: list[Entry] = []
        self._arrays: dict[Entry, PendingTasks] = {}
        self._view: PendingClass | None = None

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._arrays.values()))

    def __bool__(self) -> bool:
        return bool(self._entries or self._arrays)

    def add(self, entry: Entry, tasks: PendingTasks | None = None) -> None:
        """Insert a job, nearly always at the end, or an array with its tasks."""
        if tasks is None:
            insort(self._entries, entry)
        else:
            self._arrays[entry] = tasks
        self._view = None

    def remove(self, entry: Entry) -> PendingTasks | None:
        """Remove an existing entry; return the tasks it was added with."""
        tasks = self._arrays.pop(entry, None)
        if tasks is None:
            del self._entries[bisect_left(self._entries, entry)]
        self._view = None
        return tasks

    def entries(self) -> Sequence[Entry]:
        """The entries in order, to be read at once."""
        return sorted([*self._entries, *self._arrays]) if self._arrays else self._entries

    def position(self, entry: Entry) -> int:
        """Number of jobs of the class ahead of this one."""
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
        """Drop the cached view after a fence has changed."""
        self._view = None

    def front(self, most: int) -> PendingClass:
        """Like `view`, with at most `most` jobs."""
        return PendingClass(self._key, self._first(most), len(self))

    def view(self) -> PendingClass:
        """The front of the class as the policy sees it; the same object until the class changes."""
        if self._view is None:
            self._view = self.front(FRONT)
        return self._view


def _entries_of(queued_at: float, tasks: PendingTasks) -> Iterator[Entry]:
    for job_id in tasks:
        yield queued_at, job_id


class PendingQueues:
    """The queues of all classes, and each job's place in them."""

    def __init__(self, fences: Mapping[int, float] = MappingProxyType({})) -> None:
        """Args: fences: by job, when nothing overtakes it any more; call `look_again` after a change."""
        self._fences = fences
        self._queues: dict[ClassKey, ClassQueue] = {}
        self._places: dict[int, tuple[ClassKey, Entry, Hashable]] = {}
        self._keys: dict[ClassKey, ClassKey] = {}
        self._changed: dict[ClassKey, None] = {}
        self._alike: dict[Hashable, dict[ClassKey, dict[int, None]]] = {}
        """Ids of queued jobs by mark and class, for jobs with a mark."""

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._places

    def add(self, job: Job, key: ClassKey, tasks: PendingTasks | None = None, alike: Hashable = None) -> None:
        """Put an unqueued job into the queue of its class; an array with its pending tasks.

        Args: alike: mark shared by jobs that are predicted together.
        """
        self._put((job.queued_at, job.id), key, tasks, alike)

    def _put(self, entry: Entry, key: ClassKey, tasks: PendingTasks | None, alike: Hashable) -> None:
        # Share one object per key, so that comparisons work by identity.
        key = self._keys.setdefault(key, key)
        self._places[entry[1]] = key, entry, alike
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ClassQueue(key, self._fences)
        queue.add(entry, tasks)
        self._changed[key] = None
        if alike is not None:
            self._alike.setdefault(alike, {}).setdefault(key, {})[entry[1]] = None

    def look_again(self, key: ClassKey) -> None:
        """Drop the cached view of a class after a fence has changed; the order stays."""
        self._queues[key].look_again()

    def remove(self, job_id: int) -> None:
        if job_id in self._places:
            self._take(job_id)

    def _take(self, job_id: int) -> tuple[Entry, PendingTasks | None, Hashable]:
        key, entry, alike = self._places.pop(job_id)
        queue = self._queues[key]
        tasks = queue.remove(entry)
        self._changed[key] = None
        if not queue:
            del self._queues[key]
            del self._keys[key]
        if alike is not None:
            classes = self._alike[alike]
            del classes[key][job_id]
            if not classes[key]:
                del classes[key]
            if not classes:
                del self._alike[alike]
        return entry, tasks, alike

    def classes_alike(self, alike: Hashable) -> list[tuple[ClassKey, int]]:
        """Classes that contain pending jobs with this mark, each with one of those jobs."""
        return [(key, next(iter(ids))) for key, ids in self._alike.get(alike, {}).items()]

    def marks(self) -> list[Hashable]:
        """All marks of queued jobs."""
        return list(self._alike)

    def unforeseen(self) -> list[Hashable]:
        """Marks of jobs with neither a prediction nor a time limit, and of those whose variants have other families."""
        return [
            alike
            for alike, classes in self._alike.items()
            if any((key.predicted_s is None and key.time_limit_s is None) or key.variants for key in classes)
        ]

    def move(self, alike: Hashable, before: ClassKey, after: ClassKey) -> None:
        """Move the jobs with this mark from one class to another."""
        for job_id in list(self._alike[alike][before]):
            entry, tasks, _ = self._take(job_id)
            self._put(entry, after, tasks, alike)

    def take_changed(self) -> dict[ClassKey, PendingClass | None]:
        """Current views of the classes that have changed since the last call; None: empty."""
        changed, self._changed = self._changed, {}
        queues = self._queues
        return {key: queues[key].view() if key in queues else None for key in changed}

    def class_of(self, job_id: int) -> ClassKey | None:
        """Class in whose queue a job is; None if it is not queued."""
        place = self._places.get(job_id)
        return None if place is None else place[0]

    def position(self, key: ClassKey, job: Job) -> int:
        """Number of jobs of the class ahead of this one, which need not be queued itself."""
        return self._queues[key].position((job.queued_at, job.id))

    def sizes(self) -> Iterator[tuple[ClassKey, int]]:
        """Each class with its number of queued jobs."""
        return ((key, len(queue)) for key, queue in self._queues.items())

    def in_queues(self, is_wanted: Callable[[str], bool]) -> list[int]:
        """Jobs of these queues, the last of each class first: taking them out in this order moves no others."""
        return [
            job_id
            for key, queue in self._queues.items()
            if is_wanted(key.terms.queue)
            for _, job_id in reversed(queue.entries())
        ]

    def entries(self) -> Iterator[tuple[ClassKey, Sequence[Entry]]]:
        """Each class with its entries in order, to be read at once; an array is one entry."""
        return ((key, queue.entries()) for key, queue in self._queues.items())

    def views(self, most: int | None = None) -> tuple[PendingClass, ...]:
        """All classes, by their first job; each up to its front, or about `most` jobs in total."""
        if most is None:
            views = [queue.view() for queue in self._queues.values()]
        else:
            share = max(FRONT, most // max(1, len(self._queues)))
            views = [queue.front(share) if len(queue) > FRONT else queue.view() for queue in self._queues.values()]
        views.sort(key=lambda view: (view.jobs[0].queued_at, view.jobs[0].id))
        return tuple(views)
