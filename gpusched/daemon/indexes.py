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
from typing import NamedTuple, TypeVar

from gpusched.lifecycle import arrays
from gpusched.lifecycle.arrays import TasksEnded, job_count
from gpusched.lifecycle.transitions import held_code
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.tasks import TaskSet
from gpusched.ports import Store
from gpusched.scheduler.admission import Tally
from gpusched.scheduler.events import Event, JobFenced, JobLeft, JobQueued, TasksQueued
from gpusched.scheduler.job_sequence import Ids, merged

K = TypeVar("K")

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
        for part in self._parts():
            yield from part

    def ranges(self) -> tuple[range, ...]:
        """The ids as consecutive ranges, in order and apart."""
        found: list[range] = []
        for part in self._parts():
            for one in (part,) if part.step == 1 else (range(job_id, job_id + 1) for job_id in part):
                first = found.pop().start if found and found[-1].stop == one.start else one.start
                found.append(range(first, one.stop))
        return tuple(found)

    def _parts(self) -> Iterator[range]:
        group = self._group
        for part in group.left.ranges if group.ready is None else ():
            first = self._first
            for whole in group.all.ranges:
                if part[0] in whole and part[-1] in whole and part.step % whole.step == 0:
                    yield _moved(part, whole, first)
                    break
                first += len(whole)
            else:
                yield from self._ids(part)
        if group.ready is not None:
            yield from self._ids(sorted(group.ready))

    def _ids(self, numbers: Iterable[int]) -> Iterator[range]:
        for number in numbers:
            job_id = self._first + self._group.all.position(number)
            yield range(job_id, job_id + 1)

    def position(self, number: int) -> int:
        """Number of tasks ahead of this one. Raises: ValueError if it is not left."""
        group = self._group
        if group.ready is None:
            return group.left.position(number)
        return sum(other < number for other in group.ready)

    def first(self, most: int | None) -> list[int]:
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
    left = counter.get(mark, 0) + jobs
    if left:
        counter[mark] = left
    else:
        # Names come and go for months: zero counts must not use memory.
        counter.pop(mark, None)


class QueueStats:
    """Counters of active jobs, kept in step with the state."""

    def __init__(self) -> None:
        self.by_queue: Counter[tuple[JobState, str]] = Counter()
        self.by_user: Counter[tuple[JobState, tuple[str, str]]] = Counter()
        """By state, and account and user."""
        self.held: Counter[ReasonCode] = Counter()
        """Held pending jobs."""
        self.held_by_queue: Counter[str] = Counter()
        self.asleep: Counter[ReasonCode] = Counter()
        """Pending jobs that wait for an instant, or for an unsatisfiable dependency."""
        self._asleep: dict[int, tuple[ReasonCode, int]] = {}

    @property
    def pending(self) -> int:
        return sum(jobs for (state, _), jobs in self.by_queue.items() if state is JobState.PENDING)

    @property
    def members(self) -> set[tuple[str, str]]:
        """Account and user of all active jobs."""
        return {member for _, member in self.by_user}

    def replace(self, before: Job | None, after: Job | None) -> None:
        """Take in a changed, new or removed row."""
        if before is not None:
            self._add(before, -job_count(before))
        if after is not None:
            self._add(after, job_count(after))

    def _add(self, job: Job, jobs: int) -> None:
        if job.state.is_final or not jobs:
            return
        _add(self.by_queue, (job.state, job.spec.queue), jobs)
        _add(self.by_user, (job.state, (job.spec.account, job.user)), jobs)
        if job.state is JobState.PENDING and job.hold is not None:
            _add(self.held, held_code(job), jobs)
            _add(self.held_by_queue, job.spec.queue, jobs)

    def sleep(self, job: Job, why: ReasonCode) -> None:
        """Count a pending job that is not held as not queued, for this reason."""
        self.wake(job.id)
        self._asleep[job.id] = why, job_count(job)
        _add(self.asleep, why, job_count(job))

    def wake(self, job_id: int) -> None:
        """Stop counting a job as not queued."""
        known = self._asleep.pop(job_id, None)
        if known is not None:
            _add(self.asleep, known[0], -known[1])


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


_LEAST_SHOWN = 128
"""Jobs of each class in a snapshot, however many classes there are."""
Entry = tuple[float, int]
"""Instant from which age counts, and job id."""


class ClassQueue:
    """Eligible jobs of one class in order; an array has one entry for all its tasks without a row."""

    __slots__ = ("_arrays", "_entries", "key")

    def __init__(self, key: ClassKey) -> None:
        self.key = key
        """The same object for all of its jobs, so that comparisons work by identity."""
        self._entries: list[Entry] = []
        self._arrays: dict[Entry, PendingTasks] = {}

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

    def remove(self, entry: Entry) -> None:
        if self._arrays.pop(entry, None) is None:
            del self._entries[bisect_left(self._entries, entry)]

    def entries(self) -> Sequence[Entry]:
        """The entries in order, to be read at once."""
        return sorted([*self._entries, *self._arrays]) if self._arrays else self._entries

    def position(self, entry: Entry) -> int:
        """Number of jobs of the class ahead of this one."""
        before = sum(len(tasks) for array, tasks in self._arrays.items() if array < entry)
        return before + bisect_left(self._entries, entry)

    def first(self, most: int | None) -> list[Entry]:
        """The first jobs and tasks; None: all."""
        arrays = ([(at, job_id) for job_id in tasks.first(most)] for (at, _), tasks in self._arrays.items())
        return list(islice(merge(self._entries, *arrays), most))


class PredictionMark(NamedTuple):
    """Whose ends change what is predicted of a job."""

    family: Hashable = None
    """None: nothing is predicted."""
    invocation: Hashable = None
    """Its command line; None: predicted by its limit or its family alone."""
    is_by_invocation: bool = False
    """Predicted by runs of the same command line, which the family's other runs do not change."""


class EligiblePlace(NamedTuple):
    """Where an eligible job, or an array, is in line."""

    key: ClassKey
    entry: Entry
    tasks: PendingTasks | None
    """Those of an array."""
    mark: PredictionMark


class PendingQueues:
    """The queues of all classes, and each job's place in them."""

    def __init__(self, fences: Mapping[int, float] = MappingProxyType({})) -> None:
        """Args: fences: by job, when nothing overtakes it any more."""
        self._fences = fences
        self._queues: dict[ClassKey, ClassQueue] = {}
        self._places: dict[int, EligiblePlace] = {}
        self._before: dict[int, EligiblePlace | None] = {}
        """Places of changed jobs as last sent to the planner; None: no place."""
        self._families: dict[Hashable, dict[tuple[ClassKey, Hashable], dict[int, None]]] = {}
        """Ids of predicted jobs by family, and in it by class and the command line that predicts them, if one does."""
        self._invocations: dict[Hashable, dict[int, None]] = {}
        """Ids of queued jobs by command line, whether it predicts them yet or not."""

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._places

    def add(self, entry: Entry, key: ClassKey, tasks: PendingTasks | None, mark: PredictionMark) -> None:
        """Put an unqueued job into the queue of its class; an array with its pending tasks."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ClassQueue(key)
        queue.add(entry, tasks)
        self._places[entry[1]] = EligiblePlace(queue.key, entry, tasks, mark)
        self._before.setdefault(entry[1], None)
        if mark.family is not None:
            group = queue.key, mark.invocation if mark.is_by_invocation else None
            self._families.setdefault(mark.family, {}).setdefault(group, {})[entry[1]] = None
            if mark.invocation is not None:
                self._invocations.setdefault(mark.invocation, {})[entry[1]] = None

    def remove(self, job_id: int) -> None:
        if job_id in self._places:
            self._take(job_id)

    def _take(self, job_id: int) -> EligiblePlace:
        place = self._places.pop(job_id)
        key, mark = place.key, place.mark
        queue = self._queues[key]
        queue.remove(place.entry)
        self._before.setdefault(job_id, place)
        if not queue:
            del self._queues[key]
        if mark.family is not None:
            groups, group = self._families[mark.family], (key, mark.invocation if mark.is_by_invocation else None)
            _drop(groups, group, job_id)
            if not groups:
                del self._families[mark.family]
            if mark.invocation is not None:
                _drop(self._invocations, mark.invocation, job_id)
        return place

    def groups(self, family: Hashable) -> list[tuple[ClassKey, Hashable, list[int]]]:
        """Pending jobs of a family that are predicted together: class, the command line they go by, and ids."""
        return [(key, invocation, list(ids)) for (key, invocation), ids in self._families.get(family, {}).items()]

    def of_invocation(self, invocation: Hashable) -> list[EligiblePlace]:
        """Places of the pending jobs with this command line."""
        return [self._places[job_id] for job_id in self._invocations.get(invocation, ())]

    def families(self) -> list[Hashable]:
        return list(self._families)

    def unforeseen(self) -> list[Hashable]:
        """Families with jobs without a prediction and a time limit, or with variants that are of other families."""
        return [
            family
            for family, groups in self._families.items()
            if any((key.predicted_s is None and key.time_limit_s is None) or key.variants for key, _ in groups)
        ]

    def move(self, job_ids: Iterable[int], after: ClassKey, *, is_by_invocation: bool) -> None:
        """Move predicted jobs to another class, and note whether their command line says so."""
        for job_id in job_ids:
            place = self._take(job_id)
            self.add(place.entry, after, place.tasks, place.mark._replace(is_by_invocation=is_by_invocation))

    def take_events(self) -> list[Event]:
        """Events for the planner since the last call: jobs that left come first, since a job may change classes."""
        before, self._before = self._before, {}
        left, arrays, queued = list[Event](), list[Event](), list[Event]()
        for job_id, old in before.items():
            new = self._places.get(job_id)
            place = new or old
            if place is not None and place.tasks is not None:
                ids = () if new is None else place.tasks.ranges()
                arrays.append(TasksQueued(job_id, place.key, place.entry[0], ids))
                for task_id, fence_at in self._fences.items():
                    if any(task_id in part for part in ids):
                        arrays.append(JobFenced(task_id, fence_at))
            elif old is None or new is None or old[:2] != new[:2]:
                if old is not None:
                    left.append(JobLeft(job_id))
                if new is not None:
                    queued.append(JobQueued(new.key, PendingJob(job_id, new.entry[0], self._fences.get(job_id))))
        return [*left, *arrays, *queued]

    def tell_all(self) -> None:
        """Have the next events include each eligible job, for a planner that knows none."""
        self._before = dict.fromkeys(self._places)

    def class_of(self, job_id: int) -> ClassKey | None:
        """Class in whose queue a job is; None if it is not queued."""
        place = self._places.get(job_id)
        return None if place is None else place.key

    def position(self, key: ClassKey, entry: Entry) -> int:
        """Number of jobs of the class ahead of this one, which need not be queued itself."""
        return self._queues[key].position(entry)

    def sizes(self) -> Iterator[tuple[ClassKey, int]]:
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

    def firsts(self) -> Iterator[tuple[ClassKey, int]]:
        """Each class with the id of its first job or task."""
        return ((key, queue.first(1)[0][1]) for key, queue in self._queues.items())

    def ranges(self) -> dict[ClassKey, list[Ids]]:
        return {
            key: merged(
                (at, part[0], part[-1]) for at, job_id in queue.entries() for part in _ranges_of(self._places[job_id])
            )
            for key, queue in self._queues.items()
        }

    def views(self, most: int | None = None) -> tuple[PendingClass, ...]:
        """All classes, by their first job; each whole, or about `most` jobs in total."""
        share = None if most is None else max(_LEAST_SHOWN, most // max(1, len(self._queues)))
        fences, views = self._fences, list[PendingClass]()
        for key, queue in self._queues.items():
            jobs = [PendingJob(job_id, queued_at, fences.get(job_id)) for queued_at, job_id in queue.first(share)]
            views.append(PendingClass(key, tuple(jobs), len(queue)))
        views.sort(key=lambda view: (view.jobs[0].queued_at, view.jobs[0].id))
        return tuple(views)


def _ranges_of(place: EligiblePlace) -> tuple[range, ...]:
    job_id = place.entry[1]
    return (range(job_id, job_id + 1),) if place.tasks is None else place.tasks.ranges()


def _drop(groups: dict[K, dict[int, None]], key: K, job_id: int) -> None:
    """Remove an id from its group, and a group that is empty then."""
    ids = groups[key]
    del ids[job_id]
    if not ids:
        del groups[key]
