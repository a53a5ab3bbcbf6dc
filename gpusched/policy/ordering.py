"""Which waiting job comes first: whole-order policies by name, and the line in which the jobs stand.

A rank is a tuple that sorts smaller first:

    queue     where its queue stands against the others (only with guarantees, weights or own orders)
    tier      of its QOS, higher first
    front     preempted jobs before the others of their tier
    overdue   in orders that do not count age, those that have waited `max_age_s`, so that nobody starves
    measure   what the order by name says
    then      the instant it waits from, and its id

The order of the whole is the setting `priority.order`; a queue may have its own inside.

What time and past use do to ranks is worked out as of the last whole `calc_period_s`, as with Slurm's
PriorityCalcPeriod. Between two such instants the rank of a waiting job stays what it is, so that a line can be kept
in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import inf

from gpusched.model.job import Job, Request
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot, Urgency
from gpusched.policy import factors
from gpusched.policy.draft import Booking, Layout
from gpusched.policy.extension import NO_EXTENSIONS, Extensions
from gpusched.policy.sharing.accounts import AccountTree
from gpusched.policy.sharing.quota import Quotas
from gpusched.policy.sharing.usage import capacity_of, demand, footprint, usage_now


@dataclass(frozen=True, slots=True)
class Priority:
    """A job's weighted priority with the parts it is made of. Higher is sooner."""

    total: float
    parts: tuple[tuple[str, float], ...]
    """Name of each factor and its weighted value."""


def class_key(
    job: Job, inherited: Urgency | None = None, predicted_s: int | None = None, plan_s: int | None = None
) -> ClassKey:
    """The class a job waits in; `inherited` is what the jobs that wait for it pass on."""
    spec = job.spec
    limit = None if spec.array is None else spec.array.throttle
    return ClassKey(
        uid=job.uid,
        account=spec.account,
        queue=spec.queue,
        nice=spec.nice,
        time_limit_s=spec.time_limit_s,
        request=spec.request,
        user=job.user,
        qos=spec.qos,
        deadline_at=spec.deadline_at,
        reservation=spec.reservation,
        is_front=job.is_front,
        inherited=inherited,
        can_requeue=spec.retry.requeue,
        can_suspend=not spec.request.gpus and not spec.request.is_exclusive,
        throttle=None if limit is None else (job.array_id or job.id, limit),
        predicted_s=predicted_s,
        plan_s=plan_s,
    )


Rank = tuple[object, ...]
Measure = tuple[float, ...]


def ranked_at(now: float, settings: Settings) -> float:
    """As of when ranks are worked out: the last whole period up to this instant."""
    period_s = rank_period_s(settings)
    return now - now % period_s if period_s > 0 and -inf < now < inf else now


def rank_period_s(settings: Settings) -> float:
    """How long ranks do not change by themselves; 0: they always may.

    Where past use is to be forgotten soon, a period is no longer than a hundredth of the half-life.
    """
    return min(settings.priority.calc_period_s, settings.priority.half_life_s / 100)


def weighs_use(settings: Settings) -> bool:
    """Whether any order goes by what users have used."""
    orders = _orders(settings)
    by_weight = settings.priority.weight_fairshare > 0 and not orders.isdisjoint({"multifactor", "hybrid"})
    return by_weight or "fairshare" in orders


def _orders(settings: Settings) -> set[str | None]:
    return {settings.priority.order, *(queue.order for queue in settings.queue.values())}


@dataclass(frozen=True, slots=True)
class Ageing:
    """How the age factor grows, as a measure that only those change whose age counts no more.

    What ranks is `slope` times the instant a job waits from: two jobs that both grow older keep their places, whatever
    the time.
    """

    slope: float
    """Points a second."""
    floor_at: float
    """Waiting since before this instant adds nothing."""

    @classmethod
    def of(cls, settings: Settings, at: float) -> Ageing:
        """As of this instant."""
        priority = settings.priority
        if not 0 < priority.max_age_s < inf:
            return cls(0.0, -inf)
        return cls(priority.weight_age / priority.max_age_s, at - priority.max_age_s)

    def measure(self, queued_at: float, points: float) -> Measure:
        """What ranks a job that waits since then and has so many points beside its age; less is sooner."""
        return (self.slope * (queued_at if queued_at > self.floor_at else self.floor_at) - points,)


class Ranking:
    """Ranks waiting jobs by the settings, the usage so far, and what has started in this cycle."""

    def __init__(
        self,
        snapshot: Snapshot,
        settings: Settings,
        layout: Layout | None = None,
        quotas: Quotas | None = None,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        self.now = snapshot.now
        self.as_of = ranked_at(snapshot.now, settings)
        """Age and use count as of then."""
        self.ageing = Ageing.of(settings, self.as_of)
        self.settings = settings
        self.layout = Layout(snapshot.nodes, settings) if layout is None else layout
        self.capacity = capacity_of(self.layout)
        self._largest_node = max((len(cards) for cards in self.layout.cards_of), default=0)
        self._quotas = quotas
        self._extensions = extensions
        self._held: dict[str, Resources] = {}
        """Of each user, kept for the order `drf` alone."""
        self._fixed: dict[ClassKey, tuple[tuple[str, float], ...]] = {}
        self._points: dict[ClassKey, float] = {}
        self._wanted: dict[Request, Resources] = {}
        self._tracks_held = "drf" in _orders(settings)
        self.is_dynamic = self._tracks_held or (quotas is not None and quotas.is_capacity)
        """Whether a start changes the ranks of others; it never makes one better."""
        if self._tracks_held:
            for held in snapshot.allocations:
                booking = self.layout.booking(held.uid, held)
                if booking is not None:
                    self._hold(held.user, booking)
        self._accounts = self._account_tree(snapshot)

    def _account_tree(self, snapshot: Snapshot) -> AccountTree | None:
        if not weighs_use(self.settings):
            return None
        seen = {(waiting.key.account, waiting.key.user) for waiting in snapshot.pending}
        if len(seen) <= 1:
            # Nobody to be compared with: a tree would give all of them the same.
            return None
        if snapshot.used is not None:
            usage = {(one.account, one.user): one.used for one in snapshot.used}
        else:
            usage = usage_now(snapshot, self.layout, self.settings, self.as_of)
        return AccountTree(self.settings.account, usage, self.capacity, seen)

    def move_to(self, as_of: float) -> None:
        """Have age count as of another instant; what has been used is for the caller to look after."""
        self.as_of = as_of
        self.ageing = Ageing.of(self.settings, as_of)

    # --- what a rank is made of -----------------------------------------------------------------

    def rank(self, key: ClassKey, job: PendingJob) -> Rank:
        """Where this job stands; smaller is sooner, and no two jobs are equal."""
        order = self.order_of(key.queue)
        is_overdue = order in AGELESS and self.as_of - job.queued_at > self.settings.priority.max_age_s
        measure = () if is_overdue else _MEASURES[order](self, key, job)
        queue = self._quotas.rank(key.queue, self.wanted(key)) if self._quotas and self._quotas.is_capacity else ()
        return queue, -self.tier(key), not key.is_front, not is_overdue, measure, job.queued_at, job.id

    def order_of(self, queue: str) -> str:
        """Name of the order inside this queue."""
        known = self.settings.queue.get(queue)
        return (known.order if known else None) or self.settings.priority.order

    def tier(self, key: ClassKey) -> int:
        """Of its QOS, or of the QOS of a job that waits for it."""
        inherited = key.inherited.qos if key.inherited else ""
        return max(tier_of(key.qos, self.settings), tier_of(inherited, self.settings))

    def wanted(self, key: ClassKey) -> Resources:
        """What a job of this class will hold."""
        found = self._wanted.get(key.request)
        if found is None:
            found = self._wanted[key.request] = demand(self.layout, key.request)
        return found

    def fairshare(self, key: ClassKey) -> float:
        """Fair-Tree factor of its user under its account; 1 with nobody to be compared with."""
        return 1.0 if self._accounts is None else self._accounts.factor(key.account, key.user)

    def priority(self, key: ClassKey, queued_at: float) -> Priority:
        """The weighted sum, whether or not the order goes by it."""
        weights = self.settings.priority
        age = weights.weight_age * factors.age_factor(self.now - queued_at, weights.max_age_s)
        parts = (("age", age), *self._parts_of_class(key))
        return Priority(sum(value for _, value in parts), parts)

    def points(self, key: ClassKey) -> float:
        """All but age, of the order by weighted sum."""
        found = self._points.get(key)
        if found is None:
            share = self.settings.priority.weight_fairshare * self.fairshare(key)
            found = self._points[key] = share + self.own_points(key)
        return found

    def own_points(self, key: ClassKey) -> float:
        """What age and fair share add nothing to; it stays the same but for jobs with a deadline."""
        return sum(value for _, value in self._own_parts(key))

    def _parts_of_class(self, key: ClassKey) -> tuple[tuple[str, float], ...]:
        known = self._fixed.get(key)
        if known is None:
            share = self.settings.priority.weight_fairshare * self.fairshare(key)
            known = self._fixed[key] = (("fairshare", share), *self._own_parts(key))
        return known

    def _own_parts(self, key: ClassKey) -> tuple[tuple[str, float], ...]:
        weights, wanted = self.settings.priority, self.wanted(key)
        queue, qos = self.settings.queue.get(key.queue), self.settings.qos.get(key.qos)
        nice = min(key.nice, key.inherited.nice) if key.inherited else key.nice
        size = factors.size_factor(key.request, wanted, self.capacity, favor_small=weights.favor_small)
        deadline = factors.deadline_factor(key.deadline_at, key.time_limit_s, self.as_of, weights.max_age_s)
        return (
            ("size", weights.weight_size * size),
            ("queue", weights.weight_queue * (queue.factor if queue else 0.0)),
            ("qos", weights.weight_qos * (qos.factor if qos else 0.0)),
            ("nice", weights.weight_nice * factors.nice_factor(nice)),
            ("deadline", weights.weight_deadline * deadline),
            ("fit", weights.weight_fit * factors.fit_factor(wanted, self.capacity)),
            ("short", weights.weight_short * factors.short_factor(_expected_s(key))),
            ("whole", weights.weight_whole * factors.whole_factor(key.request, self._largest_node)),
            *self._extensions.queue_sort(key),
        )

    # --- what starts change ---------------------------------------------------------------------

    def started(self, key: ClassKey, booking: Booking) -> None:
        """Count a job that starts in this cycle."""
        if self._tracks_held:
            self._hold(key.user, booking)

    def _hold(self, user: str, booking: Booking) -> None:
        self._held[user] = self._held.get(user, NOTHING) + footprint(self.layout, booking)

    # --- the orders by name ---------------------------------------------------------------------

    def by_multifactor(self, key: ClassKey, job: PendingJob) -> Measure:
        """Weighted sum of all factors."""
        return self.ageing.measure(job.queued_at, self.points(key))

    def by_arrival(self, key: ClassKey, job: PendingJob) -> Measure:
        """First come, first served: the instant that follows in the rank decides."""
        return ()

    def by_static_priority(self, key: ClassKey, job: PendingJob) -> Measure:
        """Queue, QOS and nice alone: neither age nor usage counts."""
        return (-sum(value for name, value in self._parts_of_class(key) if name in ("queue", "qos", "nice")),)

    def by_headroom(self, key: ClassKey, job: PendingJob) -> Measure:
        """Jobs that the measured load leaves room for first, each group by arrival."""
        return (0.0 if self._has_headroom(key) else 1.0,)

    def by_priority_and_demand(self, key: ClassKey, job: PendingJob) -> Measure:
        """Weighted priority x (100 - percent of the cluster that is asked for)."""
        percent = 100.0 * factors.clamped(self.wanted(key).dominant_share(self.capacity))
        return (-self.priority(key, job.queued_at).total * (100.0 - percent),)

    def by_length(self, key: ClassKey, job: PendingJob) -> Measure:
        """Shortest job first by time limit, or as predicted; one of unknown length comes last."""
        return (inf if key.planned_s is None else float(key.planned_s),)

    def by_prediction(self, key: ClassKey, job: PendingJob) -> Measure:
        """Shortest predicted job first, whatever its time limit; by that where nothing was predicted."""
        return (_expected_s(key),)

    def by_area(self, key: ClassKey, job: PendingJob) -> Measure:
        """Smallest area first: planned time times GPUs, then times cores. Without GPUs or length: first and last."""
        wanted = self.wanted(key)
        if key.planned_s is None:
            return (inf, wanted.gpus)
        return key.planned_s * wanted.gpus, key.planned_s * wanted.cpus

    def by_dominant_share(self, key: ClassKey, job: PendingJob) -> Measure:
        """DRF's progressive filling: the user with the smallest dominant share of what is held now."""
        return (self._held.get(key.user, NOTHING).dominant_share(self.capacity),)

    def by_fairshare(self, key: ClassKey, job: PendingJob) -> Measure:
        """Who has used least of their share, over time."""
        return (-self.fairshare(key),)

    def _has_headroom(self, key: ClassKey) -> bool:
        """Whether some node's measured idle cores and memory are enough for it; unknown load is none."""
        request = key.request
        for node in self.layout.nodes:
            load = node.load
            if load is None or load.cpu_fraction is None:
                continue
            idle_cpus = node.cpus * (1.0 - load.cpu_fraction)
            if request.cpus <= idle_cpus and request.mem_mib <= load.mem_available_mib:
                return True
        return False


_MEASURES: Mapping[str, Callable[[Ranking, ClassKey, PendingJob], Measure]] = {
    "multifactor": Ranking.by_multifactor,
    "fifo": Ranking.by_arrival,
    "priority": Ranking.by_static_priority,
    "utilisation": Ranking.by_headroom,
    "hybrid": Ranking.by_priority_and_demand,
    "sjf": Ranking.by_length,
    "spf": Ranking.by_prediction,
    "saf": Ranking.by_area,
    "drf": Ranking.by_dominant_share,
    "fairshare": Ranking.by_fairshare,
}

AGELESS = frozenset(_MEASURES) - {"multifactor", "fifo"}
"""Orders in which endless arrivals could keep a job waiting for ever."""


def tier_of(qos: str, settings: Settings) -> int:
    """Tier of a QOS by name; 0 for none."""
    known = settings.qos.get(qos)
    return known.tier if known else 0


def by_length(key: ClassKey, rank: Rank) -> Rank:
    """The rank of a job among those that may start in the gaps, where the shortest go first."""
    return _expected_s(key), rank


def _expected_s(key: ClassKey) -> float:
    length_s = key.planned_s if key.predicted_s is None else key.predicted_s
    return inf if length_s is None else float(length_s)


@dataclass(frozen=True, slots=True)
class Head:
    """The job of a class that is next in line."""

    key: ClassKey
    job: PendingJob
    wanted: Resources
    """What it will hold."""


class Line:
    """The heads of all classes, best first. Only heads are kept, so the cost does not grow with the jobs."""

    __slots__ = ("_heap", "_is_by_length", "_ranking", "cut_short")

    def __init__(self, pending: Iterable[PendingClass], ranking: Ranking) -> None:
        self._ranking = ranking
        self.cut_short: ClassKey | None = None
        """A class with more jobs than the snapshot shows, and all that it shows were started."""
        self._is_by_length = False
        self._heap = [self._entry(waiting, 0) for waiting in pending if waiting.jobs]
        heapify(self._heap)

    def _entry(self, waiting: PendingClass, position: int) -> tuple[Rank, int, PendingClass]:
        # Ranks end in the job's id, so the comparison never reaches the position or the class.
        rank = self._ranking.rank(waiting.key, waiting.jobs[position])
        return by_length(waiting.key, rank) if self._is_by_length else rank, position, waiting

    def shortest_first(self) -> None:
        """From here on those that are expected to run shortest come first, whatever their rank."""
        if not self._is_by_length:
            self._is_by_length = True
            self._heap = [self._entry(waiting, position) for _, position, waiting in self._heap]
            heapify(self._heap)

    def first(self) -> Head | None:
        """The best job in line; None when there is none, or when the next one is not in the snapshot."""
        if not self._heap or self.cut_short is not None:
            return None
        if self._ranking.is_dynamic:
            self._settle()
        _, position, waiting = self._heap[0]
        return Head(waiting.key, waiting.jobs[position], self._ranking.wanted(waiting.key))

    def _settle(self) -> None:
        """Rank the first one anew until it stays the first: starts made ranks worse, never better."""
        while True:
            before, position, waiting = self._heap[0]
            entry = self._entry(waiting, position)
            if entry[0] == before:
                return
            heapreplace(self._heap, entry)

    def advance(self) -> None:
        """The first job is dealt with: the next one of its class takes its place."""
        _, position, waiting = self._heap[0]
        if position + 1 < len(waiting.jobs):
            heapreplace(self._heap, self._entry(waiting, position + 1))
            return
        heappop(self._heap)
        # The next job of this class may go before all others in line, and nobody can tell from here.
        if waiting.total > len(waiting.jobs):
            self.cut_short = waiting.key

    def skip(self) -> None:
        """The first job waits, and its class goes on with the next one that the snapshot shows."""
        _, position, waiting = self._heap[0]
        if position + 1 < len(waiting.jobs):
            heapreplace(self._heap, self._entry(waiting, position + 1))
        else:
            heappop(self._heap)

    def rest(self) -> list[ClassKey]:
        """Classes that were not looked at because the line was cut short, that one first."""
        if self.cut_short is None:
            return []
        return [self.cut_short, *(entry[2].key for entry in sorted(self._heap, key=lambda entry: entry[0]))]

    def drop(self) -> None:
        """The first job cannot start: its class leaves the line for this cycle."""
        heappop(self._heap)
