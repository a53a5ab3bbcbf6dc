"""Pending jobs: classes of equal jobs by request, user and priority, and their heads in order.

A class holds its jobs by arrival; their relative order never changes. So only the heads of the classes are ranked,
and ranked again only after a change of time, use or prediction. Classes with equal requests share a
shape: when the first of them finds no room, none of them does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from types import MappingProxyType

from gpusched.model.planner_settings import SPARING_STRATEGIES
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Placement
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.fairshare import Amounts, FairShare, FairShareEntity
from gpusched.scheduler.filters import pool
from gpusched.scheduler.job_sequence import Ids, JobSequence, merged, minus
from gpusched.scheduler.priority import AGELESS, BY_LENGTH, Rank, Ranking, expected_s, rank_period_s
from gpusched.scheduler.request_units import GpuDemand, RequestUnits, constraint_strength, micros_asked


class RequestShape:
    """All jobs that fit in exactly the same placements."""

    __slots__ = (
        *("booking", "can_fit", "cards", "epoch", "millicpus", "need"),
        *("barred_of", "only", "pending", "placement", "refused", "refused_of"),
    )

    def __init__(self, need: RequestUnits, source: RequestShape | None = None) -> None:
        """Args: source: whose fields it takes over, whatever the others say."""
        if source is not None:
            take_over(self, source)
            return
        request = need.request
        self.need = need
        self.pending = 0
        """Number of its pending classes."""
        # The least that a node gives.
        least = need if request.bundles is None else need.of_bundles(1)
        self.millicpus = least.millicpus
        self.cards = 0 if need.is_slice else least.request.gpus
        self.booking: AllocationUnits | None = None
        """The best place now."""
        self.epoch = -1
        """Epoch of `booking`, which is valid until a job starts or ends."""
        self.only: AllocationUnits | None = None
        """The only possible placement, if there is just one and it has been found."""
        self.placement: Placement | None = None
        """As the rest of the program knows it."""
        self.can_fit: bool | None = None
        """Whether it fits on idle machines; None if not checked yet."""
        self.barred_of = -1
        """The epoch in which none of these may run past the only reservation."""
        self.refused: set[tuple[int, int]] = set()
        """(number of reservations, number it would pass): combinations that no job of this shape may pass."""
        self.refused_of = -1
        """The epoch of which that is."""

    def twin(self) -> RequestShape:
        """A copy with the same values in its fields."""
        return RequestShape(self.need, self)


class JobClass:
    """Pending jobs that differ only in arrival, in order of arrival."""

    __slots__ = (
        *("entity", "has_key", "hidden", "insists", "jobs", "key", "limit_s"),
        *("is_wide", "micros", "must_see", "order", "patience_s", "planned_s", "points", "rank", "rate", "ratio_s"),
        *("relied_s", "shape", "slowness", "tier_rank", "urgency", "variant", "variants", "wanted"),
    )

    def __init__(
        self,
        key: ClassKey,
        shape: RequestShape,
        entity: FairShareEntity,
        backfill_by: str,
        source: JobClass | None = None,
    ) -> None:
        """Args: source: whose fields it takes over, whatever the others say."""
        if source is not None:
            take_over(self, source)
            return
        request = key.terms.request
        self.key = key
        self.shape = shape
        self.entity = entity
        self.jobs: list[Entry] | JobSequence = []
        """A `JobSequence` once there was an array among them."""
        self.has_key = False
        """Whether it is found by its key."""
        self.hidden = 0
        """Number of further jobs, which the snapshot that it was made from only counts."""
        self.rank: Rank = ()
        self.insists, self.micros = constraint_strength(request), micros_asked(request)
        """Its contribution to the demand."""
        self.rate: Amounts | None = None
        """Charged rate per second, if independent of the placement."""
        self.limit_s: float = inf if key.time_limit_s is None else key.time_limit_s
        self.wanted: Resources
        """Demand of one job."""
        self.order = ""
        self.tier_rank = 0
        """Smaller is sooner."""
        self.points = 0.0
        """Points of the weighted sum without age and fair share."""
        self.patience_s = 0.0
        """Wait before a reservation."""
        self.ratio_s = self.urgency = 1.0
        """Divisor and multiplier of its wait in the order `response_ratio`."""
        self.is_wide = False
        self.must_see = False
        """Whether each cycle examines it even without room for it."""
        self.slowness = 1.0
        """How many times as long as at speed 1 a job may take, on the slowest GPUs that suit it."""
        self.variants: tuple[JobClass, ...] = ()
        """With each request that its jobs may start with, the most preferred first, which is this class itself. The
        others are in no line; they share the list of jobs. Empty for one request."""
        self.variant = 0
        """Index among those."""
        self.set_lengths(backfill_by)

    def set_lengths(self, backfill_by: str) -> None:
        """Compute the planned run time of a job, and how long it is relied upon to hold its resources."""
        planned_s: float | None = self.key.planned_on(self.slowness)
        relied_s = planned_s if backfill_by == "prediction" else self.key.time_limit_s
        self.planned_s: float = inf if planned_s is None else planned_s
        self.relied_s: float = inf if relied_s is None else relied_s

    def twin(self) -> JobClass:
        """A copy with the same values in its fields."""
        return JobClass(self.key, self.shape, self.entity, "", self)

    def __len__(self) -> int:
        return len(self.jobs) + self.hidden


_MOST_SHAPES = 4096
"""Maximum number of cached shapes, pending or not."""

Entry = tuple[float, int, JobClass]
"""Arrival instant of a job, its id, its class."""

Head = tuple[Rank, int, JobClass]
"""Rank of a job, its index in its class, the class. Ranks end in the id, so comparisons never reach the index."""


class PendingArray:
    """An array with tasks that are pending without a row."""

    __slots__ = ("ids", "job_class", "queued_at")

    def __init__(self, job_class: JobClass, queued_at: float) -> None:
        self.job_class = job_class
        self.queued_at = queued_at
        self.ids: Sequence[range] = ()
        """Ids of its tasks as last received; those started since are no longer in the class."""


STARTED, NEXT_IN_CLASS, BLOCKED = 0, 1, 2
"""Outcome for a job in a cycle: started, or blocked though its class continues, or blocked with its whole class."""


def _never(key: ClassKey) -> bool:
    return False


class PendingQueue:
    """The pending jobs.

    Invariant: `heads` has the head of each pending class, sorted by ranks as of the last `rank_as_of` and points as of
    the last comparison. With dynamic ranks it is empty, and each cycle ranks the heads itself.
    """

    def __init__(self, layout: ClusterLayout, settings: Settings, ranking: Ranking, fairshare: FairShare) -> None:
        self._settings = settings
        self.ranking = ranking
        self.fairshare = fairshare
        self.heads: list[Head] = []
        self.classes: dict[JobClass, None] = {}
        """Classes with a visible job."""
        self.shapes: dict[RequestShape, None] = {}
        """Shapes with a pending job."""
        self._by_key: dict[ClassKey, JobClass] = {}
        self._shapes: dict[object, RequestShape] = {}
        self._entries: dict[int, Entry] = {}
        """Pending jobs with a row."""
        self._tasks = 0
        """Number of pending tasks without a row."""
        self._arrays: dict[int, PendingArray] = {}
        self._array_ids: list[int] = []
        """Those, ascending."""
        priority = settings.priority
        self._is_weighted = "multifactor" in ranking.orders
        self._is_by_ratio = self.has_patience = "response_ratio" in ranking.orders
        """Whether jobs must be patient before they get a reservation."""
        self._ages = self._is_weighted or self._is_by_ratio or not ranking.orders.isdisjoint(AGELESS)
        """Whether ranks depend on the wait."""
        self._is_by_length = priority.backfill and priority.backfill_depth > 0 and priority.backfill_order == "shortest"
        """Whether backfill prefers the shortest jobs."""
        self.has_gap_order = self._is_by_length or self._is_by_ratio
        """Whether backfill has its own order."""
        self._is_by_prediction = (
            self._is_by_length
            or not ranking.orders.isdisjoint(BY_LENGTH)
            or (self._is_weighted and priority.weight_short != 0)
        )
        """Whether ranks depend on the expected run time."""
        self._predicted: dict[JobClass, tuple[int | None, int | None]] = {}
        """New predictions of classes still ranked by the previous ones."""
        self._period_s = rank_period_s(settings)
        self._by_age: list[tuple[float, int]] = []
        """Pending jobs, and stale entries, as a heap."""
        self._ranks_deadlines = priority.weight_deadline != 0
        self._deadlines: dict[JobClass, None] = {}
        """Pending classes whose points change with the time."""
        self.forces_places = False
        """Whether the constraints of pending and running jobs have changed, and with them the best placements."""
        self.new: list[Entry] = []
        """Arrivals since the last cycle, unordered."""
        self.must_see: dict[JobClass, None] = {}
        """Pending classes that each cycle examines."""
        self.must_see_class: Callable[[ClassKey], bool] = _never
        """Whether classes with this key are."""
        self._set_layout(layout)

    def __len__(self) -> int:
        return len(self._entries) + self._tasks

    def __contains__(self, job_id: int) -> bool:
        return self._find(job_id) is not None

    def _find(self, job_id: int) -> Entry | None:
        """A pending job, or a task of a pending array."""
        entry = self._entries.get(job_id)
        if entry is None and (array := self._array_of(job_id)) is not None:
            task = array.queued_at, job_id, array.job_class
            entry = task if task in array.job_class.jobs else None
        return entry

    def _array_of(self, job_id: int) -> PendingArray | None:
        """The pending array that has a task with this id, if there is such a task."""
        place = bisect_left(self._array_ids, job_id) - 1
        return None if place < 0 else self._arrays[self._array_ids[place]]

    def _set_layout(self, layout: ClusterLayout) -> None:
        self._layout = layout
        if self._settings.placement.strategy in SPARING_STRATEGIES:
            layout.wanted = layout.wanted or GpuDemand()
        self._wanted = layout.wanted

    # --- classes --------------------------------------------------------------------------------

    def class_of_key(self, key: ClassKey) -> JobClass:
        """The class shared by all jobs with this key."""
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = self.own_class(key)
            found.has_key = True
        return found

    def own_class(self, key: ClassKey) -> JobClass:
        """A private class, whatever the key: its predicted run time can change."""
        terms = key.terms
        need = RequestUnits.of(terms.request, terms.uid, key.leaning)
        shape = self._shapes.get(need.signature)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes = {one.need.signature: one for one in self.shapes}
            shape = self._shapes[need.signature] = RequestShape(need)
        entity = self.fairshare.of(terms.account, terms.user)
        made = JobClass(key, shape, entity, self._settings.priority.backfill_by)
        self._weigh(made)
        if key.variants:
            made.variants = (made, *map(self.own_class, key.variants))
            for number, variant in enumerate(made.variants):
                variant.variant, variant.jobs = number, made.jobs
        return made

    def _weigh(self, job_class: JobClass) -> None:
        """Compute the properties that depend on the settings and machines."""
        key, ranking = job_class.key, self.ranking
        request = key.terms.request
        slowness = 1.0
        if request.gpus and self._layout.has_speeds:
            places = pool(self._layout, job_class.shape.need).places
            slowness = 1.0 / min((card.speed for place in places for card in place.cards), default=1.0)
        if slowness != job_class.slowness:
            job_class.slowness = slowness
            job_class.set_lengths(self._settings.priority.backfill_by)
        job_class.wanted = ranking.wanted(key)
        job_class.order = ranking.order_of(key.terms.queue)
        job_class.tier_rank = -2 * ranking.tier(key) - key.is_front
        job_class.must_see = self.must_see_class(key)
        job_class.points = ranking.own_points(key) if self._is_weighted else 0.0
        if job_class.order == "response_ratio":
            job_class.patience_s, job_class.ratio_s = ranking.patience_s(key), ranking.ratio_s(key)
            job_class.urgency, job_class.is_wide = ranking.urgency(key), ranking.is_wide(key)

    def predict(self, job_class: JobClass, predicted_s: int | None, plan_s: int | None) -> None:
        """Set the expected and planned run time of all jobs of a private class.

        The weighted order uses predictions as of the last whole period, like age and use.
        """
        if not job_class.jobs or not self._is_by_prediction:
            self._predicted.pop(job_class, None)
            self._set_prediction(job_class, predicted_s, plan_s)
        elif self._is_weighted and job_class.key.predicted_s is not None:
            self._set_lengths(job_class, job_class.key.predicted_s, plan_s)
            self._predicted[job_class] = predicted_s, plan_s
        else:
            self._predicted[job_class] = predicted_s, plan_s

    def _set_lengths(self, job_class: JobClass, predicted_s: int | None, plan_s: int | None) -> None:
        job_class.key = replace(job_class.key, predicted_s=predicted_s, plan_s=plan_s)
        job_class.set_lengths(self._settings.priority.backfill_by)

    def _set_prediction(self, job_class: JobClass, predicted_s: int | None, plan_s: int | None) -> None:
        self._set_lengths(job_class, predicted_s, plan_s)
        if self._is_weighted and self._settings.priority.weight_short:
            job_class.points = self.ranking.own_points(job_class.key)
        if job_class.order == "response_ratio":
            self._set_patience(job_class)
            job_class.ratio_s = self.ranking.ratio_s(job_class.key)

    # --- ranks ----------------------------------------------------------------------------------

    def rank(self, job_class: JobClass, queued_at: float, job_id: int) -> Rank:
        """Rank of this job; smaller is sooner, and no two jobs are equal."""
        ranking, order = self.ranking, job_class.order
        if order == "multifactor":
            at = queued_at if queued_at > ranking.floor_at else ranking.floor_at
            measure = ranking.slope * at - (job_class.entity.points + job_class.points)
            rank: Rank = (job_class.tier_rank, measure, queued_at, job_id)
        elif order == "response_ratio":
            rank = (job_class.tier_rank, *ranking.response_rank(job_class, queued_at), queued_at, job_id)
        elif order == "fifo":
            rank = (job_class.tier_rank, queued_at, job_id)
        elif ranking.is_overdue(order, queued_at):
            rank = (job_class.tier_rank, False, (), queued_at, job_id)
        else:
            measures = ranking.measure(order, job_class.key, queued_at)
            rank = (job_class.tier_rank, True, measures, queued_at, job_id)
        return (ranking.queue_rank(job_class.key), *rank) if ranking.is_dynamic else rank

    def rank_at(self, job_class: JobClass, number: int) -> Rank:
        queued_at, job_id, _ = job_class.jobs[number]
        return self.rank(job_class, queued_at, job_id)

    def first_behind(self, job_class: JobClass, rank: Rank) -> int:
        """Index in its class of the first job that ranks behind this."""
        if len(job_class.jobs) == 1:
            return int(job_class.rank <= rank)
        if not isinstance(job_class.jobs, list):
            return job_class.jobs.first_behind(rank, lambda queued_at, job_id: self.rank(job_class, queued_at, job_id))
        return bisect_left(job_class.jobs, rank, key=lambda entry: self.rank(job_class, entry[0], entry[1]))

    def in_gaps(self, head: Head) -> Head:
        """The head with its rank for backfilling, if that has its own order."""
        rank, number, job_class = head
        if self._is_by_length:
            return (expected_s(job_class.key), rank), number, job_class
        if job_class.order != "response_ratio":
            return head
        queued_at, job_id, _ = job_class.jobs[number]
        ratio = self.ranking.response_rank(job_class, queued_at, ages=False)
        rank = (job_class.tier_rank, *ratio, queued_at, job_id)
        if self.ranking.is_dynamic:
            rank = (self.ranking.queue_rank(job_class.key), *rank)
        return rank, number, job_class

    def rank_in_gaps(self, job_class: JobClass, number: int) -> Rank:
        """Rank for backfilling of the job at this index of its class."""
        return self.in_gaps((self.rank_at(job_class, number), number, job_class))[0]

    # --- who comes and goes ---------------------------------------------------------------------

    def fill(self, job_class: JobClass, jobs: Iterable[PendingJob], hidden: int) -> None:
        """Fill an empty class with jobs, in order of arrival. Args: hidden: number of further ones."""
        entries = [(job.queued_at, job.id, job_class) for job in jobs]
        if not entries:
            return
        job_class.jobs = entries
        for variant in job_class.variants:
            variant.jobs = entries
        self._entries.update((entry[1], entry) for entry in entries)
        for _ in entries:
            self.fairshare.add_pending(job_class.entity)
        self._line_up(job_class)
        self.new += entries
        if self._ages:
            for queued_at, job_id, _ in entries:
                heappush(self._by_age, (queued_at, job_id))
        job_class.hidden = hidden
        if job_class.micros:
            self.want(job_class, len(job_class) * job_class.micros)

    def add(self, job_class: JobClass, queued_at: float, job_id: int) -> None:
        entry = queued_at, job_id, job_class
        self._insert(job_class, entry)
        self.new.append(entry)
        if self._ages:
            self._watch_age(queued_at, job_id)
        if job_class.micros:
            self.want(job_class, job_class.micros)

    def _watch_age(self, queued_at: float, job_id: int) -> None:
        heap = self._by_age
        if len(heap) > 64 + 2 * (len(self._entries) + len(self._arrays)):
            # Nearly all of them started long before their age reached the cap.
            heap[:] = [(at, number) for at, number, _ in self._entries.values()]
            heap += [(array.queued_at, array_id) for array_id, array in self._arrays.items()]
            heapify(heap)
        heappush(heap, (queued_at, job_id))

    def _insert(self, job_class: JobClass, entry: Entry) -> None:
        jobs = job_class.jobs
        if not jobs:
            jobs.append(entry)
            self._line_up(job_class)
        elif entry > jobs[-1]:
            jobs.append(entry)
        else:
            number = bisect_left(jobs, entry)
            jobs.insert(number, entry)
            if not number and not self.ranking.is_dynamic:
                del self.heads[bisect_left(self.heads, (job_class.rank,))]
                self._rank_head(job_class)
        self._entries[entry[1]] = entry
        self.fairshare.add_pending(job_class.entity)

    # --- tasks of arrays ------------------------------------------------------------------------

    def put_tasks(
        self, array_id: int, job_class: JobClass | None, queued_at: float, ids: Sequence[range]
    ) -> tuple[int, int]:
        """Set which tasks of an array are pending without a row; replaces those sent before.

        Args: job_class: None if there are none. ids: consecutive ones, in order and apart.
        Returns: how many of the earlier ones left without starting, and how many came.
        """
        array = self._arrays.get(array_id)
        left = came = 0
        if array is not None and (array.job_class is not job_class or array.queued_at != queued_at):
            left = self._remove_tasks(array, array.ids)
            del self._arrays[array_id], self._array_ids[bisect_left(self._array_ids, array_id)]
            array = None
        if job_class is None or not ids:
            return left, 0
        if array is None:
            array = self._arrays[array_id] = PendingArray(job_class, queued_at)
            insort(self._array_ids, array_id)
            if self._ages:
                self._watch_age(queued_at, array_id)
        if ids != array.ids:
            left += self._remove_tasks(array, minus(array.ids, ids))
            came = self._add_tasks(array, minus(ids, array.ids))
            array.ids = ids
        return left, came

    def _add_tasks(self, array: PendingArray, ids: Sequence[range]) -> int:
        came = sum(map(len, ids))
        if not came:
            return 0
        job_class, first = array.job_class, array.job_class.jobs[0] if array.job_class.jobs else None
        jobs = job_class.jobs
        if isinstance(jobs, list):
            jobs = JobSequence(job_class, [(at, job_id, job_id) for at, job_id, _ in jobs])
            for variant in job_class.variants or (job_class,):
                variant.jobs = jobs
        for part in ids:
            jobs.add(array.queued_at, part)
        self._tasks += came
        self._count_tasks(job_class, came)
        self._follow_head(job_class, first)
        return came

    def _remove_tasks(self, array: PendingArray, ids: Sequence[range]) -> int:
        """Remove those of these tasks that are still there; return how many."""
        job_class, jobs = array.job_class, array.job_class.jobs
        if not jobs or isinstance(jobs, list):
            return 0
        first = jobs[0]
        left = sum(jobs.discard(array.queued_at, part) for part in ids)
        if left:
            self._tasks -= left
            self._count_tasks(job_class, -left)
            self._follow_head(job_class, first)
        return left

    def _count_tasks(self, job_class: JobClass, tasks: int) -> None:
        self.fairshare.add_pending(job_class.entity, tasks)
        if job_class.micros:
            self.want(job_class, tasks * job_class.micros)

    def fill_from(self, other: PendingQueue) -> None:
        """Fill an empty queue with the jobs of another."""
        for job_class in other.classes:
            for queued_at, job_id, _ in job_class.jobs:
                if job_id in other._entries:
                    self.add(self.class_of_key(job_class.key), queued_at, job_id)
        for array_id, array in other._arrays.items():
            self.put_tasks(array_id, self.class_of_key(array.job_class.key), array.queued_at, self._tasks_of(array))

    def _tasks_of(self, array: PendingArray) -> list[range]:
        """Ids of its tasks that have not been started."""
        jobs = array.job_class.jobs
        return [] if isinstance(jobs, list) else jobs.common(array.queued_at, array.ids)

    def _follow_head(self, job_class: JobClass, before: Entry | None) -> None:
        """Line up a class again whose first job may have changed. Args: before: None if it was empty."""
        first = job_class.jobs[0] if job_class.jobs else None
        if first == before:
            return
        if before is None:
            self._line_up(job_class)
            return
        if not self.ranking.is_dynamic:
            del self.heads[bisect_left(self.heads, (job_class.rank,))]
            if first is not None:
                self._rank_head(job_class)
        if first is None:
            self._leave_line(job_class)

    # --- who is in line -------------------------------------------------------------------------

    def _line_up(self, job_class: JobClass) -> None:
        """Insert the head of a class that has its first job."""
        shape = job_class.shape
        if not shape.pending:
            self.shapes[shape] = None
        shape.pending += 1
        self.classes[job_class] = None
        if self.has_patience:
            self._set_patience(job_class)
        if job_class.must_see:
            self.must_see[job_class] = None
        if job_class.has_key:
            self._by_key.setdefault(job_class.key, job_class)
        if job_class.key.deadline_at is not None and self._ranks_deadlines:
            self._deadlines[job_class] = None
            if self._is_weighted:
                job_class.points = self.ranking.own_points(job_class.key)
        if not self.ranking.is_dynamic:
            self._rank_head(job_class)

    def _rank_head(self, job_class: JobClass) -> None:
        queued_at, job_id, _ = job_class.jobs[0]
        job_class.rank = rank = self.rank(job_class, queued_at, job_id)
        insort(self.heads, (rank, 0, job_class))

    def take(self, job_class: JobClass, number: int) -> Entry:
        """Remove the job at this index of its class, or of a variant; its demand stays counted until `forget`."""
        jobs = job_class.jobs
        entry = jobs.pop(number)
        job_class = entry[2]
        if self._entries.pop(entry[1], None) is None:
            self._tasks -= 1
        if not number:
            if not self.ranking.is_dynamic:
                del self.heads[bisect_left(self.heads, (job_class.rank,))]
                if jobs:
                    self._rank_head(job_class)
            if not jobs:
                self._leave_line(job_class)
        self.fairshare.remove_pending(job_class.entity)
        return entry

    def _leave_line(self, job_class: JobClass) -> None:
        """Remove a class without visible jobs from the heads."""
        del self.classes[job_class]
        shape = job_class.shape
        shape.pending -= 1
        if not shape.pending:
            del self.shapes[shape]
        if job_class.must_see:
            self.must_see.pop(job_class, None)
        if job_class.key.deadline_at is not None:
            self._deadlines.pop(job_class, None)
        if job_class.has_key and not job_class.hidden and self._by_key.get(job_class.key) is job_class:
            del self._by_key[job_class.key]

    def put_back(self, entry: Entry) -> None:
        """Undo `take`."""
        self._insert(entry[2], entry)
        array = self._array_of(entry[1])
        if array is not None and array.job_class is entry[2] and any(entry[1] in part for part in array.ids):
            del self._entries[entry[1]]
            self._tasks += 1

    def remove(self, job_id: int) -> JobClass:
        """Remove a job that is no longer pending: cancelled, held, changed or started."""
        entry = self._find(job_id)
        if entry is None:
            raise KeyError(job_id)
        job_class = entry[2]
        self.take(job_class, _number_of(entry))
        return job_class

    def forget(self, job_class: JobClass) -> None:
        """Subtract the demand of a job that is neither pending nor running any more."""
        if job_class.micros:
            self.want(job_class, -job_class.micros)

    def exchange(self, before: JobClass, after: JobClass) -> None:
        """Count the demand of one variant in place of another's: a job starts with it, or did not after all."""
        self.forget(before)
        if after.micros:
            self.want(after, after.micros)

    def want(self, job_class: JobClass, micros: int) -> None:
        """Add to the demand of this class in millionths of cards; negative values subtract."""
        if self._wanted is not None:
            if self._wanted.insisted or job_class.insists is not None:
                self.forces_places = True
            self._wanted.add(job_class.insists, micros)

    # --- what others ask ------------------------------------------------------------------------

    def asks_for_all(self, job_class: JobClass) -> bool:
        """Whether pending jobs of users who have used no more, but for the first of this class, ask for all GPUs."""
        left, band = self.ranking.capacity.gpus, job_class.entity.band
        for one in self.classes:
            if one.entity.band <= band and one.wanted.gpus:
                left -= one.wanted.gpus * (len(one) - (one is job_class))
                if left <= 0:
                    return True
        return False

    def class_of(self, job_id: int) -> JobClass | None:
        """Class of a pending job; None if it is not pending."""
        entry = self._find(job_id)
        return None if entry is None else entry[2]

    def class_with(self, key: ClassKey) -> JobClass | None:
        """Pending class with this key whose first job came first; None if there is none."""
        found = self._by_key.get(key)
        if found is not None:
            return found
        alike = [one for one in self.classes if one.key == key]
        return min(alike, key=lambda one: one.jobs[0][:2], default=None)

    def place(self, job_id: int) -> tuple[JobClass, int] | None:
        """Class of a pending job and its index there."""
        entry = self._find(job_id)
        return None if entry is None else (entry[2], _number_of(entry))

    def in_order(self) -> list[Entry]:
        """All pending jobs in order, as of the last `rank_as_of`."""
        ranked = sorted((self.rank(one[2], one[0], one[1]), one) for found in self.classes for one in found.jobs)
        return [entry for _, entry in ranked]

    def ranges(self) -> dict[ClassKey, list[Ids]]:
        found: dict[ClassKey, list[Ids]] = {}
        for one in self.classes:
            jobs = one.jobs
            parts = [(at, job_id, job_id) for at, job_id, _ in jobs] if isinstance(jobs, list) else jobs.parts
            found.setdefault(one.key, []).extend(parts)
        return {key: merged(parts) for key, parts in found.items()}

    def merged(self, lines: Iterable[tuple[ClassKey, Sequence[tuple[float, int]]]]) -> list[int]:
        """Ids of jobs in order, as of the last `rank_as_of`. Args: lines: arrival and id of jobs, by class in order."""
        rank = self.rank
        left = [(self.class_of_key(key), jobs) for key, jobs in lines if jobs]
        heap = [(rank(job_class, *jobs[0]), number, 0) for number, (job_class, jobs) in enumerate(left)]
        heapify(heap)
        found: list[int] = []
        while heap:
            _, number, first = heappop(heap)
            job_class, jobs = left[number]
            if not heap:
                found += [job_id for _, job_id in jobs[first:]]
                break
            found.append(jobs[first][1])
            first += 1
            limit = heap[0][0]
            if first < len(jobs) and (following := rank(job_class, *jobs[first])) < limit:
                # Jobs of one class often follow each other.
                last = bisect_left(jobs, limit, first, key=lambda job: rank(job_class, *job))
                found += [job_id for _, job_id in jobs[first:last]]
                first = last
                if first < len(jobs):
                    following = rank(job_class, *jobs[first])
            if first < len(jobs):
                heappush(heap, (following, number, first))
        return found

    def pending_classes(
        self, most: int | None = None, fences: Mapping[int, float] = MappingProxyType({})
    ) -> tuple[PendingClass, ...]:
        """All classes by their first job, each with its jobs, or at most `most` of them."""
        found: dict[ClassKey, tuple[list[Entry], int]] = {}
        for job_class in self.classes:
            jobs, hidden = list(job_class.jobs) if most is None else job_class.jobs[:most], len(job_class)
            other = found.get(job_class.key)
            if other is not None:
                jobs, hidden = sorted([*other[0], *jobs]), hidden + other[1]
            found[job_class.key] = jobs, hidden
        views = [
            PendingClass(
                key, tuple([PendingJob(job_id, queued_at, fences.get(job_id)) for queued_at, job_id, _ in jobs]), total
            )
            for key, (jobs, total) in found.items()
        ]
        views.sort(key=lambda view: (view.jobs[0].queued_at, view.jobs[0].id))
        return tuple(views)

    # --- what time does -------------------------------------------------------------------------

    def seen(self) -> None:
        """Mark all new jobs as examined by a cycle."""
        self.new.clear()

    def rank_as_of(self, now: float, longest_run_s: float = inf) -> bool:
        """Update ranks for time and use since the last call; return whether anything may have changed.

        Args: longest_run_s: of the running jobs, which bounds the patience of all others.
        """
        ranking, fairshare = self.ranking, self.fairshare
        ranking.now = now
        at = ranking.as_of
        if self._ages or fairshare.counts_use or self._deadlines:
            at = now - now % self._period_s if self._period_s > 0 and -inf < now < inf else now
        is_later = at != ranking.as_of
        has_waited, impatient = False, None
        if self.has_patience:
            impatient = self._bound_patience(ranking.patience_beside(longest_run_s))
            has_waited = ranking.wait_to(now, at, self._period_s)
        if not (is_later or self._predicted or fairshare.is_due or impatient):
            return has_waited
        if is_later:
            ranking.move_to(at)
        users = fairshare.compare(at) if fairshare.counts_use else ()
        has_aged = self._ages and is_later and self._has_aged(at)
        classes = impatient or set[JobClass]()
        if self._predicted:
            classes |= self._take_predicted(is_later=is_later)
        if is_later and (self._is_weighted or self._is_by_ratio):
            for job_class in self._deadlines:
                self._weigh(job_class)
                classes.add(job_class)
        if is_later and self._is_by_ratio:
            # The ratio of a short job grows faster than that of a long one.
            classes.update(one for one in self.classes if one.order == "response_ratio")
        if not (users or has_aged or classes):
            return has_waited
        if not ranking.is_dynamic:
            self._rank_heads(users, classes, has_aged=has_aged)
        return True

    def rank_all(self) -> None:
        """Recompute the ranks of all heads after their inputs changed."""
        self.heads.clear()
        if not self.ranking.is_dynamic:
            for job_class in self.classes:
                job_class.rank = self.rank_at(job_class, 0)
            self.heads = sorted((job_class.rank, 0, job_class) for job_class in self.classes)

    def _take_predicted(self, *, is_later: bool) -> set[JobClass]:
        """Apply the latest predictions; return the pending classes to be ranked again."""
        found: set[JobClass] = set()
        left: dict[JobClass, tuple[int | None, int | None]] = {}
        for job_class, (predicted_s, plan_s) in self._predicted.items():
            if self._is_weighted and not is_later and job_class.jobs and job_class.key.predicted_s is not None:
                left[job_class] = predicted_s, plan_s
                continue
            self._set_prediction(job_class, predicted_s, plan_s)
            if job_class.jobs:
                found.add(job_class)
        self._predicted = left
        return found

    def _bound_patience(self, most_s: float) -> set[JobClass]:
        """Let no job be patient for longer; return the pending classes for which that is another patience."""
        ranking, found = self.ranking, set[JobClass]()
        if most_s != ranking.most_patience_s:
            ranking.most_patience_s = most_s
            for job_class in self.classes:
                before_s = job_class.patience_s
                self._set_patience(job_class)
                if job_class.patience_s != before_s:
                    found.add(job_class)
        return found

    def _set_patience(self, job_class: JobClass) -> None:
        if job_class.order == "response_ratio":
            for one in job_class.variants or (job_class,):
                one.patience_s = self.ranking.patience_s(one.key)

    def _has_aged(self, at: float) -> bool:
        """Whether any job's age exceeds the longest that counts: from then on all others catch up with it.

        In orders without age it goes first from then on, which is detected once.
        """
        heap = self._by_age
        priority, found = self._settings.priority, False
        longest_s = priority.max_age_s if self._is_weighted else priority.max_wait_s
        while heap:
            queued_at, job_id = heap[0]
            if job_id in self._entries or ((array := self._arrays.get(job_id)) and self._tasks_of(array)):
                if at - queued_at <= longest_s:
                    break
                found = True
                if self._is_weighted:
                    break
            heappop(heap)
        return found

    def _rank_heads(self, users: Collection[FairShareEntity], classes: Collection[JobClass], *, has_aged: bool) -> None:
        """Recompute the ranks of heads of these users, of these classes, or with an age at the cap."""
        ranking, aged_at = self.ranking, -inf
        if has_aged:
            aged_at = ranking.floor_at if self._is_weighted else ranking.as_of - self._settings.priority.max_wait_s
        heads = self.heads
        for number, (_, _, job_class) in enumerate(heads):
            if job_class.entity in users or job_class.jobs[0][0] <= aged_at or job_class in classes:
                queued_at, job_id, _ = job_class.jobs[0]
                job_class.rank = rank = self.rank(job_class, queued_at, job_id)
                heads[number] = rank, 0, job_class
        heads.sort()

    # --- other machines, another future -----------------------------------------------------------

    def reconfigure(self, layout: ClusterLayout, *, is_same_size: bool) -> None:
        """The machines have changed; `is_same_size`: but not their totals."""
        self._set_layout(layout)
        for shape in self._shapes.values():
            shape.epoch = shape.barred_of = shape.refused_of = -1
            shape.only = shape.placement = shape.can_fit = None
        if not is_same_size:
            for one in {*self._by_key.values(), *self.classes}:
                for job_class in one.variants or (one,):
                    job_class.rate = None
                    self._weigh(job_class)
            self.rank_all()

    def copy(
        self,
        layout: ClusterLayout,
        ranking: Ranking,
        fairshare: FairShare,
        entities: dict[FairShareEntity, FairShareEntity],
    ) -> tuple[PendingQueue, dict[JobClass, JobClass]]:
        """An independent copy, and a mapping from old to new classes."""
        twin = take_over(PendingQueue(layout, self._settings, ranking, fairshare), self)
        twin.ranking, twin.fairshare = ranking, fairshare
        shapes = {one: one.twin() for one in self._shapes.values()}
        twins: dict[JobClass, JobClass] = {}
        entries: dict[int, Entry] = {}
        for one in {**self.classes, **dict.fromkeys(self._by_key.values())}:
            made = twins[one] = one.twin()
            if isinstance(one.jobs, list):
                made.jobs = [(queued_at, job_id, made) for queued_at, job_id, _ in one.jobs]
                entries.update((entry[1], entry) for entry in made.jobs)
            else:
                made.jobs = one.jobs.copy(made)
            made.shape = shapes.get(one.shape) or shapes.setdefault(one.shape, one.shape.twin())
            made.entity = entities[one.entity]
            if one.variants:
                made.variants = (made, *(variant.twin() for variant in one.variants[1:]))
                for variant in made.variants[1:]:
                    variant.jobs, variant.entity = made.jobs, made.entity
                    variant.shape = shapes.get(variant.shape) or shapes.setdefault(variant.shape, variant.shape.twin())
        if len(entries) < len(self._entries):
            # Single jobs in line with tasks of arrays.
            entries = {
                job_id: entries.get(job_id) or (at, job_id, twins[of]) for job_id, (at, _, of) in self._entries.items()
            }
        twin._entries = entries
        twin._arrays = {}
        for array_id, array in self._arrays.items():
            mine = twin._arrays[array_id] = take_over(PendingArray(array.job_class, array.queued_at), array)
            mine.job_class = twins.get(array.job_class, array.job_class)
        twin._array_ids = self._array_ids.copy()
        twin._shapes = {mark: shapes[one] for mark, one in self._shapes.items()}
        twin._by_key = {key: twins[one] for key, one in self._by_key.items()}
        twin.classes = {twins[one]: None for one in self.classes}
        twin.shapes = {shapes[one]: None for one in self.shapes}
        twin.must_see = {twins[one]: None for one in self.must_see}
        twin.heads = [(rank, number, twins[one]) for rank, number, one in self.heads]
        twin._predicted = {twins[one]: said for one, said in self._predicted.items() if one in twins}
        twin._deadlines = {twins[one]: None for one in self._deadlines}
        twin._by_age = self._by_age.copy()
        twin.new = [entries[job_id] for _, job_id, _ in self.new if job_id in entries]
        twin._set_layout(layout)
        return twin, twins


def _number_of(entry: Entry) -> int:
    """Index of a pending job in its class."""
    jobs = entry[2].jobs
    return bisect_left(jobs, entry) if isinstance(jobs, list) else jobs.number_of(entry)
