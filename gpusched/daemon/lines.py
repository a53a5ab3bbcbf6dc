"""All lines of eligible jobs: which class each waits in, and where."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType

from gpusched.model.job import Job
from gpusched.model.snapshot import ClassKey, PendingClass

from .arrays import TaskLine
from .classes import FRONT, ClassQueue, Entry


class Lines:
    """The queues of all classes, and the place of each job in them."""

    def __init__(self, fences: Mapping[int, float] = MappingProxyType({})) -> None:
        """Args: fences: from when on nothing passes them, by job; `look_again` after a change of it."""
        self._fences = fences
        self._queues: dict[ClassKey, ClassQueue] = {}
        self._places: dict[int, tuple[ClassKey, Entry, Hashable]] = {}
        self._keys: dict[ClassKey, ClassKey] = {}
        self._changed: dict[ClassKey, None] = {}
        self._alike: dict[Hashable, dict[ClassKey, dict[int, None]]] = {}
        """Of those of whom it was said, who is like whom, by class."""

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._places

    def add(self, job: Job, key: ClassKey, tasks: TaskLine | None = None, alike: Hashable = None) -> None:
        """Put a job that is in no line into that of its class; an array with the line of its tasks.

        Args: alike: a mark that it shares with jobs which are predicted as it is.
        """
        self._put((job.queued_at, job.id), key, tasks, alike)

    def _put(self, entry: Entry, key: ClassKey, tasks: TaskLine | None, alike: Hashable) -> None:
        # One object for equal keys, which are then compared by identity.
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
        """The fence of one of this class has changed, which moves none of them."""
        self._queues[key].look_again()

    def remove(self, job_id: int) -> None:
        """Take a job out, if it is in a line."""
        if job_id in self._places:
            self._take(job_id)

    def _take(self, job_id: int) -> tuple[Entry, TaskLine | None, Hashable]:
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
        """The classes in which those with this mark wait, each with one of them."""
        return [(key, next(iter(ids))) for key, ids in self._alike.get(alike, {}).items()]

    def marks(self) -> list[Hashable]:
        """The marks that jobs in line share with those predicted as they are."""
        return list(self._alike)

    def unforeseen(self) -> list[Hashable]:
        """The marks of those of whom nothing was known, and who gave no limit either."""
        return [
            alike
            for alike, classes in self._alike.items()
            if any(key.predicted_s is None and key.time_limit_s is None for key in classes)
        ]

    def move(self, alike: Hashable, before: ClassKey, after: ClassKey) -> None:
        """Put those with this mark from one class into another."""
        for job_id in list(self._alike[alike][before]):
            entry, tasks, _ = self._take(job_id)
            self._put(entry, after, tasks, alike)

    def take_changed(self) -> dict[ClassKey, PendingClass | None]:
        """The classes that have changed since this was last asked, as they are now; None: nobody is in it any more."""
        changed, self._changed = self._changed, {}
        queues = self._queues
        return {key: queues[key].view() if key in queues else None for key in changed}

    def class_of(self, job_id: int) -> ClassKey | None:
        """The class that a job is in line in; None when it is in no line."""
        place = self._places.get(job_id)
        return None if place is None else place[0]

    def position(self, key: ClassKey, job: Job) -> int:
        """How many jobs of the class are before this one, which need not be in line itself."""
        return self._queues[key].position((job.queued_at, job.id))

    def sizes(self) -> Iterator[tuple[ClassKey, int]]:
        """Each class with how many jobs are in line in it."""
        return ((key, len(queue)) for key, queue in self._queues.items())

    def views(self, most: int | None = None) -> tuple[PendingClass, ...]:
        """All classes, by their first job; each up to its front, or about so many jobs in all."""
        if most is None:
            views = [queue.view() for queue in self._queues.values()]
        else:
            share = max(FRONT, most // max(1, len(self._queues)))
            views = [queue.front(share) if len(queue) > FRONT else queue.view() for queue in self._queues.values()]
        views.sort(key=lambda view: (view.jobs[0].queued_at, view.jobs[0].id))
        return tuple(views)
