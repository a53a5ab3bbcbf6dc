"""Order of pending jobs: whole-order policies by name, and the components of a rank.

Source of the weighted factors: Slurm's multifactor priority plugin for age, fair share, size, partition, QOS and nice;
the fit factor is the resource-aware term of dominant-resource schedulers. Each is in [0, 1], 1 being the most urgent.

A rank is a tuple that sorts smaller first:

    queue     its queue against the others (only with guarantees, weights or own orders)
    tier      of its QOS, higher first; preempted jobs before the others of their tier
    overdue   in orders without age, jobs that have waited `max_wait_s`, so that no job starves
    measure   value of the order by name
    then      the instant it waits from, and its id

The order `response_ratio` has its own measure, in three parts:

    band      used fraction of its user's share, in steps of `fairshare_step`, so that users who have used less
              go first whatever their jobs; a job that has waited `max_wait_s` is in the first band, if no
              job of its user runs: an endless stream of jobs starves no one, and flooding the queue gains nothing
    patience  jobs that have waited long enough for a reservation, wide ones first, then by wait over the user's
              share
    ratio     the others by wait over expected run time: it has no scale of its own, favours short jobs and ages
              all

Once the reservations are made, all others fill gaps by band and ratio. Sources: Brinch Hansen, An Analysis of Response
Ratio Scheduling (1971), for the ratio; Tang et al., Fault-aware, Utility-based Job Scheduling on Blue Gene/P Systems
(2009), for waits over run times in backfilling.

The global order is the setting `priority.order`; a queue may have its own inside.

The effect of time and past use on ranks is computed as of the last whole `calc_period_s`, as with Slurm's
PriorityCalcPeriod. Between two such instants the rank of a pending job is constant, so that the queue can be
kept sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, inf, log2
from typing import Protocol

from gpusched.model.cluster import JobTerms
from gpusched.model.job import Job, Request
from gpusched.model.leaning import NodeLeaning
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Urgency
from gpusched.model.spec import NICE_MAX, NICE_MIN
from gpusched.model.value import Value, replace
from gpusched.model.variants import each_variant
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.fairshare import Amounts, FairShare, FairShareEntity, amounts_of, orders_of
from gpusched.scheduler.plugins import Extensions
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.usage import capacity_of, demand


def clamped(value: float) -> float:
    """The value limited to [0, 1]."""
    return min(1.0, max(0.0, value))


def age_factor(waited_s: float, max_age_s: float) -> float:
    """Wait divided by the longest that counts; a clock that was set back counts as no wait."""
    if max_age_s <= 0:
        return 0.0
    return clamped(waited_s / max_age_s)


def nice_factor(nice: int) -> float:
    """1 for the most urgent nice value, 0 for the least."""
    return clamped((NICE_MAX - nice) / (NICE_MAX - NICE_MIN))


def size_factor(request: Request, wanted: Resources, capacity: Resources, *, favor_small: bool) -> float:
    """Fraction of the cluster's GPUs that the job asks for, or of its cores if it asks for none."""
    have, want = (capacity.gpus, wanted.gpus) if request.gpus else (capacity.cpus, wanted.cpus)
    size = clamped(want / have) if have > 0 else 0.0
    return 1.0 - size if favor_small else size


_LONG_S = 30 * 86400.0
"""Runs of a month or more get no points for being short."""


def short_factor(length_s: float) -> float:
    """1 for a zero-length job, 0 for a month or more, and for an unknown (infinite) length.

    Logarithmic: run times differ by powers of ten, and so do the errors of their estimates.
    """
    return clamped(1.0 - log2(1.0 + max(0.0, length_s)) / log2(1.0 + _LONG_S))


def whole_factor(request: Request, largest_node: int) -> float:
    """Fraction of the largest node's cards that it needs free at once; 0 without GPUs, 1 for whole nodes.

    That many others must end before one of them can start, so they suffer most from small jobs that pass.
    """
    return clamped(request.gpus / largest_node) if largest_node and not request.shares_cards else 0.0


def fit_factor(wanted: Resources, capacity: Resources) -> float:
    """1 minus the dominant share of the cluster that the job asks for."""
    return 1.0 - clamped(wanted.dominant_share(capacity))


def deadline_factor(deadline_at: float | None, time_limit_s: int | None, now: float, horizon_s: float) -> float:
    """0 without a deadline or far from it, 1 at the last start that meets it, rising linearly over `horizon_s`."""
    if deadline_at is None or horizon_s <= 0:
        return 0.0
    slack_s = deadline_at - (time_limit_s or 0) - now
    return clamped(1.0 - slack_s / horizon_s) if slack_s < inf else 0.0


class Priority(Value):
    """A job's weighted priority and its components. Higher is sooner."""

    total: float
    parts: tuple[tuple[str, float], ...]
    """Name of each factor and its weighted value."""


def terms_of(job: Job) -> JobTerms:
    """What scheduling goes by of a job, pending or running."""
    spec = job.spec
    return JobTerms(
        uid=job.uid,
        user=job.user,
        account=spec.account,
        queue=spec.queue,
        qos=spec.qos,
        request=spec.request,
        reservation=spec.reservation,
        can_requeue=spec.retry.requeue,
        can_suspend=not spec.request.gpus and not spec.request.is_exclusive,
    )


def class_key(
    job: Job,
    inherited: Urgency | None = None,
    predicted_s: int | None = None,
    plan_s: int | None = None,
    leaning: NodeLeaning | None = None,
    variants: tuple[ClassKey, ...] | None = None,
) -> ClassKey:
    """Class of a job; `inherited` is the priority passed on by jobs that depend on it.

    Args: variants: the classes of its variants but the first; None: without predictions.
    """
    if variants is None:
        variants = tuple([class_key(replace(job, spec=one), inherited) for one in each_variant(job.spec)[1:]])
    limit = None if job.spec.array is None else job.spec.array.throttle
    return ClassKey(
        terms=terms_of(job),
        nice=job.spec.nice,
        time_limit_s=job.spec.time_limit_s,
        deadline_at=job.spec.deadline_at,
        is_front=job.is_front,
        inherited=inherited,
        throttle=None if limit is None else (job.array_id or job.id, limit),
        predicted_s=predicted_s,
        plan_s=plan_s,
        leaning=leaning,
        variants=variants,
    )


SHORTEST_S = 1800.0
"""Minimum run time in the order `response_ratio`: shorter runs count as this long."""

UNKNOWN_S = 3600.0
"""In the order `response_ratio`, expected run time of a job without any prediction."""

PATIENT_RUNS = 16
"""No job is patient for longer than this many times the longest run, where that is less than `reserve_after_s`."""

DRAIN_PART = 0.05
"""Part of all GPU time since a job was submitted that its reservation may leave idle under overload."""

_PATIENT_STEPS = 8
"""Parts of the greatest patience as of which waits count, where that is short."""

DOUBLING_POINTS = 1000.0
"""In `response_ratio`, this many points of nice, QOS, queue, deadline and plug-ins count like doubling the wait."""

_WIDE_PART = 4
"""A job that needs whole nodes, or this fraction of all GPUs or cores, is wide."""

_WIDE_EXPONENT = 0.6

_MOST_REQUESTS = 10_000
"""Maximum number of requests with cached demands."""

Rank = tuple[object, ...]
Measure = tuple[float, ...]


def ranked_at(now: float, settings: Settings) -> float:
    """Reference instant of ranks: the last whole period up to now."""
    period_s = rank_period_s(settings)
    return now - now % period_s if period_s > 0 and -inf < now < inf else now


def rank_period_s(settings: Settings) -> float:
    """How long ranks stay constant; 0: not at all.

    With a short half-life, a period is at most a hundredth of it.
    """
    return min(settings.priority.calc_period_s, settings.priority.half_life_s / 100)


class Responding(Protocol):
    """Properties of a class of jobs used by the order `response_ratio`."""

    entity: FairShareEntity
    patience_s: float
    ratio_s: float
    urgency: float
    is_wide: bool


class ResponseStanding(Value):
    """Components of a job's position in the order `response_ratio`."""

    share: float
    """Use of its user relative to their share: 1 as much as others who are active, 2 twice that."""
    turn: int
    """1: users who have used least, and jobs that have waited `max_wait_s`; each step of `fairshare_step` one later."""
    waited_s: float
    expected_s: float | None
    """None: no prediction."""
    urgency: float
    """Multiplier of its wait from nice, QOS, queue, deadline and plug-ins; 1 without any."""
    ratio: float
    """Wait over expected run time, both adjusted as the order does."""
    reserves_at: float
    """When it has waited long enough for a reservation, if its user's share stays constant."""


class Ranking:
    """Ranks classes of pending jobs by the settings, current holdings and past use."""

    def __init__(
        self, settings: Settings, layout: ClusterLayout, quotas: Quotas, fairshare: FairShare, extensions: Extensions
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.capacity = capacity_of(layout)
        self._quotas = quotas
        self._fairshare = fairshare
        self._extensions = extensions
        self._largest_node = max((len(cards) for cards in layout.cards_of), default=0)
        self._wanted: dict[Request, Resources] = {}
        self.orders = orders_of(settings)
        self.tracks_held = "drf" in self.orders
        self._held: dict[str, list[int]] = {}
        """Per user in millionths, for the order `drf` only."""
        self.is_dynamic = quotas.is_capacity or not self.orders.isdisjoint(DYNAMIC)
        """Whether ranks are valid only at one instant: starts, or time, change the ranks of others."""
        self.as_of = -inf
        """Age and use count as of then."""
        self.slope = self.floor_at = 0.0
        self.now = -inf
        self.long_run_s = settings.priority.reserve_after_s / PATIENT_RUNS
        """Beside a run as long as this every job has the patience of the settings."""
        self.most_patience_s = inf
        """No job is patient for longer, from the run times of the jobs that run."""
        self.patient_as_of = -inf
        """Waits count as of then where a job is patient."""
        self.move_to(-inf)

    def reconfigure(self, layout: ClusterLayout, quotas: Quotas, *, is_same_size: bool) -> None:
        """The machines have changed; `is_same_size`: but not their totals."""
        self.layout, self._quotas = layout, quotas
        if not is_same_size:
            self.capacity = capacity_of(layout)
            self._largest_node = max((len(cards) for cards in layout.cards_of), default=0)
            self._wanted.clear()

    def copy(self, layout: ClusterLayout, quotas: Quotas, fairshare: FairShare) -> Ranking:
        """An independent copy over equal state."""
        twin = take_over(Ranking(self.settings, layout, quotas, fairshare, self._extensions), self)
        twin.layout, twin._quotas, twin._fairshare = layout, quotas, fairshare
        twin._held = {user: held.copy() for user, held in self._held.items()}
        return twin

    def move_to(self, as_of: float) -> None:
        """Set the instant as of which age counts; past use is left to `FairShare`."""
        priority = self.settings.priority
        self.as_of = as_of
        if 0 < priority.max_age_s < inf:
            # Two ageing jobs keep their relative order at any time: they rank by arrival, and only jobs whose age has
            # reached the cap move.
            self.slope, self.floor_at = priority.weight_age / priority.max_age_s, as_of - priority.max_age_s
        else:
            self.slope, self.floor_at = 0.0, -inf

    def patience_beside(self, longest_s: float) -> float:
        """How long any job is patient where the longest of the running jobs takes this long; in powers of two.

        Room that is reserved stands empty for no longer than the longest run lasts: where runs take seconds, a wide job
        must not wait for hours to spare them that.
        """
        if not 0 < longest_s < self.long_run_s:
            return inf
        return float(2.0 ** ceil(log2(PATIENT_RUNS * longest_s)))

    def drains_from(self, job_class: Responding, queued_at: float, idle_s: float) -> float:
        """From when on room may be reserved for a job. Args: idle_s: GPU seconds that this leaves idle."""
        dear_s = idle_s / (DRAIN_PART * self.capacity.gpus) if idle_s else 0.0
        return queued_at + max(job_class.patience_s * job_class.entity.patience, dear_s)

    def wait_to(self, now: float, at: float, period_s: float) -> bool:
        """Set the instant as of which waits count for patience; return whether it differs.

        Args: at: the last whole period, which is fine enough unless the greatest patience is short.
        """
        step_s = self.most_patience_s / _PATIENT_STEPS
        if step_s < period_s:
            at = now - now % step_s
        is_other = at != self.patient_as_of
        self.patient_as_of = at
        return is_other

    # --- what a rank is made of -----------------------------------------------------------------

    def order_of(self, queue: str) -> str:
        """Name of the order inside this queue."""
        known = self.settings.queue.get(queue)
        return (known.order if known else None) or self.settings.priority.order

    def tier(self, key: ClassKey) -> int:
        """Tier of its QOS, or of the QOS of a job that depends on it."""
        inherited = key.inherited.qos if key.inherited else ""
        return max(tier_of(key.terms.qos, self.settings), tier_of(inherited, self.settings))

    def wanted(self, key: ClassKey) -> Resources:
        """Demand of a job of this class."""
        found = self._wanted.get(key.terms.request)
        if found is None:
            if len(self._wanted) >= _MOST_REQUESTS:
                self._wanted.clear()
            found = self._wanted[key.terms.request] = demand(self.layout, key.terms.request)
        return found

    def queue_rank(self, key: ClassKey) -> tuple[object, ...]:
        return self._quotas.rank(key.terms.queue, self.wanted(key)) if self._quotas.is_capacity else ()

    def measure(self, order: str, key: ClassKey, queued_at: float) -> Measure:
        """Value of the named order, except for the weighted sum, which `PendingQueue` maintains by parts."""
        return _MEASURES[order](self, key, queued_at)

    def is_overdue(self, order: str, queued_at: float) -> bool:
        """Whether it has waited so long that an order without age takes it first."""
        return order in AGELESS and self.as_of - queued_at > self.settings.priority.max_wait_s

    def fairshare(self, key: ClassKey) -> float:
        """Fair-Tree factor of its user under its account; 1 if there is no other user."""
        return self._fairshare.factor(key.terms.account, key.terms.user) if self._fairshare.counts_use else 1.0

    def patience_s(self, key: ClassKey) -> float:
        """Wait of a job of this class before it gets a reservation, if its user is exactly at their share."""
        if self.order_of(key.terms.queue) != "response_ratio":
            return 0.0
        priority = self.settings.priority
        return min(self.most_patience_s, priority.reserve_after_s + priority.reserve_after_runs * ratio_length_s(key))

    def urgency(self, key: ClassKey) -> float:
        """Multiplier of a wait from nice, QOS, queue, deadline and plug-ins; 1 without any."""
        points = -self.settings.priority.weight_nice / 2
        points += sum(value for name, value in self._own_parts(key) if name not in ("short", "whole", "fit"))
        return float(2.0 ** min(64.0, max(-64.0, points / DOUBLING_POINTS)))

    def ratio_s(self, key: ClassKey) -> float:
        """Divisor of a wait: the run time, slightly reduced for whole nodes.

        Those can only start after several jobs have ended, and each start that passes them delays that further.
        """
        request, length_s = key.terms.request, ratio_length_s(key)
        if request.gpus and request.gpus >= self._largest_node and not request.shares_cards:
            return length_s / float((2 * request.nodes) ** _WIDE_EXPONENT)
        return length_s

    def is_wide(self, key: ClassKey) -> bool:
        """Whether it needs so much free at once that small jobs can keep passing it."""
        request, wanted, capacity = key.terms.request, self.wanted(key), self.capacity
        if not request.shares_cards and request.gpus and request.gpus >= self._largest_node:
            return True
        if request.gpus:
            return wanted.gpus * _WIDE_PART >= capacity.gpus > 1
        return wanted.cpus * _WIDE_PART >= capacity.cpus

    def response_rank(self, job_class: Responding, queued_at: float, *, ages: bool = True) -> tuple[object, ...]:
        """Rank of a job in the order `response_ratio`. Args: ages: whether it may rank among those that have
        waited long enough for a reservation."""
        entity, waited_s = job_class.entity, max(0.0, self.as_of - queued_at)
        band = entity.band
        if entity.is_idle and waited_s >= self.settings.priority.max_wait_s:
            band = min(band, self._fairshare.first_band)
        if ages and waited_s >= job_class.patience_s * entity.patience:
            return band, False, not job_class.is_wide, -waited_s * job_class.urgency / entity.share
        return band, True, True, -(1.0 + waited_s) * job_class.urgency / job_class.ratio_s

    def response_standing(self, job_class: Responding, key: ClassKey, queued_at: float) -> ResponseStanding:
        """Components of a job's position in the order `response_ratio`."""
        entity, waited_s = job_class.entity, max(0.0, self.as_of - queued_at)
        is_overdue = waited_s >= self.settings.priority.max_wait_s
        length_s = expected_s(key)
        return ResponseStanding(
            share=entity.share,
            turn=1 if is_overdue else max(1, entity.band - self._fairshare.first_band + 1),
            waited_s=waited_s,
            expected_s=None if length_s == inf else length_s,
            urgency=job_class.urgency,
            ratio=(1.0 + waited_s) * job_class.urgency / job_class.ratio_s,
            reserves_at=queued_at + job_class.patience_s * entity.patience,
        )

    def has_patience(self, job_class: Responding, queued_at: float) -> bool:
        """Whether a job has waited long enough for a reservation."""
        patience_s = job_class.patience_s
        return not patience_s or max(0.0, self.patient_as_of - queued_at) >= patience_s * job_class.entity.patience

    def priority(self, key: ClassKey, queued_at: float) -> Priority:
        """The weighted sum, whether or not the order uses it."""
        return self.priorities(key)(queued_at)

    def priorities(self, key: ClassKey) -> Callable[[float], Priority]:
        """`priority` of jobs of one class by arrival: all other parts are worked out once."""
        weights = self.settings.priority
        others = ("fairshare", weights.weight_fairshare * self.fairshare(key)), *self._own_parts(key)

        def priority(queued_at: float) -> Priority:
            age = weights.weight_age * age_factor(self.now - queued_at, weights.max_age_s)
            parts = (("age", age), *others)
            return Priority(sum([value for _, value in parts]), parts)

        return priority

    def own_points(self, key: ClassKey) -> float:
        """Points without age and fair share; constant except for jobs with a deadline."""
        return sum([value for _, value in self._own_parts(key)])

    def _own_parts(self, key: ClassKey) -> tuple[tuple[str, float], ...]:
        weights, wanted = self.settings.priority, self.wanted(key)
        queue, qos = self.settings.queue.get(key.terms.queue), self.settings.qos.get(key.terms.qos)
        nice = min(key.nice, key.inherited.nice) if key.inherited else key.nice
        size = size_factor(key.terms.request, wanted, self.capacity, favor_small=weights.favor_small)
        deadline = deadline_factor(key.deadline_at, key.time_limit_s, self.as_of, weights.max_wait_s)
        return (
            ("size", weights.weight_size * size),
            ("queue", weights.weight_queue * (queue.factor if queue else 0.0)),
            ("qos", weights.weight_qos * (qos.factor if qos else 0.0)),
            ("nice", weights.weight_nice * nice_factor(nice)),
            ("deadline", weights.weight_deadline * deadline),
            ("fit", weights.weight_fit * fit_factor(wanted, self.capacity)),
            ("short", weights.weight_short * short_factor(expected_s(key))),
            ("whole", weights.weight_whole * whole_factor(key.terms.request, self._largest_node)),
            *self._extensions.queue_sort(key),
        )

    # --- what users hold now --------------------------------------------------------------------

    def hold(self, user: str, amount: Resources, sign: int = 1) -> None:
        """Add to a user's holdings, or with `sign=-1` subtract."""
        held = self._held.setdefault(user, [0, 0, 0, 0])
        for number, part in enumerate(amounts_of(amount)):
            held[number] += sign * round(part * 1_000_000)

    # --- the orders by name ---------------------------------------------------------------------

    def by_arrival(self, key: ClassKey, queued_at: float) -> Measure:
        """First come, first served: the arrival instant that follows in the rank decides."""
        return ()

    def by_static_priority(self, key: ClassKey, queued_at: float) -> Measure:
        """Queue, QOS and nice alone: neither age nor usage counts."""
        return (-sum(value for name, value in self._own_parts(key) if name in ("queue", "qos", "nice")),)

    def by_headroom(self, key: ClassKey, queued_at: float) -> Measure:
        """Jobs that fit the measured load first, each group by arrival."""
        return (0.0 if self._has_headroom(key) else 1.0,)

    def by_priority_and_demand(self, key: ClassKey, queued_at: float) -> Measure:
        """Weighted priority x (100 - percent of the cluster requested)."""
        percent = 100.0 * clamped(self.wanted(key).dominant_share(self.capacity))
        return (-self.priority(key, queued_at).total * (100.0 - percent),)

    def by_length(self, key: ClassKey, queued_at: float) -> Measure:
        """Shortest job first by time limit, or as predicted; unknown lengths come last."""
        return (inf if key.planned_s is None else float(key.planned_s),)

    def by_prediction(self, key: ClassKey, queued_at: float) -> Measure:
        """Shortest predicted job first, whatever its time limit; by the limit without a prediction."""
        return (expected_s(key),)

    def by_area(self, key: ClassKey, queued_at: float) -> Measure:
        """Smallest area first: planned time times GPUs, then times cores. No GPUs sorts first, no length last."""
        wanted = self.wanted(key)
        if key.planned_s is None:
            return (inf, wanted.gpus)
        return key.planned_s * wanted.gpus, key.planned_s * wanted.cpus

    def by_dominant_share(self, key: ClassKey, queued_at: float) -> Measure:
        """DRF's progressive filling: the user with the smallest dominant share of what is held now."""
        held: Amounts | list[int] = self._held.get(key.terms.user, (0, 0, 0, 0))
        return (Resources(*(part / 1_000_000 for part in held)).dominant_share(self.capacity),)

    def by_fairshare(self, key: ClassKey, queued_at: float) -> Measure:
        """Least use relative to the share, over time."""
        return (-self.fairshare(key),)

    def _has_headroom(self, key: ClassKey) -> bool:
        """Whether some node's measured idle cores and memory suffice for it; unknown load counts as none."""
        request = key.terms.request
        for node in self.layout.nodes:
            load = node.load
            if load is None or load.cpu_fraction is None:
                continue
            idle_cpus = node.cpus * (1.0 - load.cpu_fraction)
            if request.cpus <= idle_cpus and request.mem_mib <= load.mem_available_mib:
                return True
        return False


_MEASURES: Mapping[str, Callable[[Ranking, ClassKey, float], Measure]] = {
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

AGELESS = frozenset(_MEASURES) - {"fifo"}
"""Orders in which endless arrivals could keep a job waiting forever."""

DYNAMIC = frozenset({"drf", "hybrid", "utilisation"})
"""Orders that depend on current holdings, load or the time of day, so that no queue stays sorted."""

BY_LENGTH = frozenset({"response_ratio", "sjf", "spf", "saf"})
"""Orders by expected run time."""


def tier_of(qos: str, settings: Settings) -> int:
    """Tier of a QOS by name; 0 for none."""
    known = settings.qos.get(qos)
    return known.tier if known else 0


def ratio_length_s(key: ClassKey) -> float:
    """Run time that the order `response_ratio` assumes for a job of this class."""
    length_s = expected_s(key)
    return max(SHORTEST_S, UNKNOWN_S if length_s == inf else length_s)


def expected_s(key: ClassKey) -> float:
    """Expected run time: predicted, or planned; infinite if unknown."""
    length_s = key.planned_s if key.predicted_s is None else key.predicted_s
    return inf if length_s is None else float(length_s)
