"""The planner: what runs, what is pending and what has been used, kept between cycles.

What changes goes in as events, and each cycle looks only at what that can concern. The state is whatever `snapshot`
shows: a planner after any events plans as one that is made from its own snapshot.

    shapes    jobs that ask for the same share a shape; when the first finds no room, none of them does
    screens   whole numbers (free cores, free cards) turn most shapes away before any place is looked at
    arrivals  while nothing has become free, whoever waited goes on waiting: only those that are new are looked at
    periods   what age and past use do to ranks is worked out once in each `calc_period_s`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import groupby
from math import inf
from typing import Any

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.resources import Resources
from gpusched.model.settings import LEARNING_STRATEGIES, Settings
from gpusched.model.snapshot import (
    ClassKey,
    PendingJob,
    Placement,
    Plan,
    Reservation,
    Snapshot,
    Start,
    Usage,
    Window,
)
from gpusched.model.value import replace
from gpusched.policy.ceilings import Ceilings, ceilings_of
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.extension import NO_EXTENSIONS, Extensions
from gpusched.policy.fragmentation import FRAGMENTATION, typical_of
from gpusched.policy.outlook import OUTLOOK
from gpusched.policy.preemption import Held
from gpusched.policy.sharing.quota import Quotas
from gpusched.policy.sharing.usage import capacity_of, footprint, usage_now
from gpusched.policy.wanted import insistence, micros_asked
from gpusched.scheduler import events
from gpusched.scheduler.backfill import Cycle, Reasons
from gpusched.scheduler.cluster_state import PlacementCache
from gpusched.scheduler.fairshare import NO_AMOUNTS, Amounts, FairShare, FairShareEntity, State, amounts_of
from gpusched.scheduler.priority import Rank, Ranking, ranked_at
from gpusched.scheduler.queue import Entry, JobClass, PendingQueue
from gpusched.scheduler.timeline import FreeSteps, RunningJob, Timeline, end_of

_NOTHING = Plan()


class Run:
    """A running job with all that it holds."""

    __slots__ = (
        *("_allocations", "_amount", "_held", "_planner", "entity", "is_guessed", "is_suspended", "job_class"),
        *("limit_at", "placement", "predicted_at", "rate", "running"),
    )

    def __init__(self, planner: Planner, running: RunningJob, limit_at: float) -> None:
        self._planner = planner
        self.running = running
        self.limit_at = limit_at
        """When it is ended at the latest."""
        self.predicted_at: float | None = None
        """When it is planned to end, where that is not its limit; once that is past, its limit counts."""
        self.job_class: JobClass | None = None
        self.placement: Placement | None = None
        self.entity: FairShareEntity | None = None
        self.rate: Amounts = NO_AMOUNTS
        """What its user is charged for, a second."""
        self.is_suspended = False
        self.is_guessed = False
        """Whether it was not planned by its limit, whatever is predicted by now."""
        self._allocations: tuple[Allocation, ...] | None = None
        self._amount: Resources | None = None
        self._held: Held | None = None

    @property
    def first(self) -> Allocation:
        """What it holds on its first node."""
        return self.allocations[0]

    @property
    def user(self) -> str:
        """Whose it is."""
        return self.job_class.key.user if self.job_class is not None else self.first.user

    @property
    def queue(self) -> str:
        """That it is in."""
        return self.job_class.key.queue if self.job_class is not None else self.first.queue

    @property
    def qos(self) -> str:
        """Of its job."""
        return self.job_class.key.qos if self.job_class is not None else self.first.qos

    @property
    def array_id(self) -> int | None:
        """Of its array, where that counts its tasks."""
        if self.job_class is None:
            return self.first.array_id
        throttle = self.job_class.key.throttle
        return None if throttle is None else throttle[0]

    @property
    def amount(self) -> Resources:
        """What it takes from others."""
        if self._amount is None:
            self._amount = footprint(self._planner.layout, self.running.booking)
        return self._amount

    @property
    def held(self) -> Held:
        """As those see it who may take its place."""
        if self._held is None:
            booking = self.running.booking
            pieces: tuple[Booking, ...] = (booking,)
            if booking.others:
                pieces = (replace(booking, others=()), *booking.others)
            self._held = Held(self.first, pieces, self.amount)
        return self._held

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """What it holds on each of its nodes."""
        if self._allocations is None:
            self._allocations = tuple(self._made())
        return self._allocations

    def tell(self, allocations: tuple[Allocation, ...]) -> None:
        """What it holds, as others know it."""
        self._allocations, self._held, self._amount = allocations, None, None

    def predict(self, end_at: float | None) -> None:
        """It is planned to end then, where that is not its limit."""
        self.predicted_at = end_at
        if self._allocations is not None:
            self.tell(tuple(replace(held, predicted_end_at=end_at) for held in self._allocations))

    def _made(self) -> Iterator[Allocation]:
        assert self.job_class is not None
        assert self.placement is not None
        key, running = self.job_class.key, self.running
        grace_s = self._planner.settings.life.grace_s
        for place in (self.placement, *self.placement.others):
            yield Allocation(
                job_id=running.job_id,
                uid=key.uid,
                node=place.node,
                gpus=place.gpus,
                cpus=place.cpus,
                mem_mib=place.mem_mib,
                start_at=running.start_at,
                expected_end_at=None if self.limit_at == inf else self.limit_at,
                predicted_end_at=self.predicted_at,
                user=key.user,
                account=key.account,
                queue=key.queue,
                qos=key.qos,
                resources=place.resources,
                licenses=place.licenses,
                is_exclusive=place.is_exclusive,
                reservation=key.reservation,
                can_requeue=key.can_requeue,
                can_suspend=key.can_suspend,
                array_id=None if key.throttle is None else key.throttle[0],
                grace_s=grace_s,
                request=key.request,
            )


class Planner:
    """All state that lives between cycles.

    Args:
        nodes: as they are now; `NodesChanged` tells of others.
        settings: in force until `SettingsChanged`.
    """

    def __init__(self, nodes: Iterable[NodeView], settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> None:
        self.settings = settings
        self.extensions = extensions
        self.name_of: Callable[[int], str] = str
        self.windows: tuple[Window, ...] = ()
        self.runs: dict[int, Run] = {}
        self.odd_runs = 0
        """How many are suspended or being stopped."""
        self.tasks: Counter[int] = Counter()
        """How many tasks run of each array with a limit."""
        self.version = 0
        """Counts the changes."""
        self._usage: dict[tuple[str, str], Usage] = {}
        """What ended runs have used, where that is told."""
        self._cycle: Cycle | None = None
        """The last one, while later arrivals may continue it."""
        self._steps: FreeSteps | None = None
        """Where every job has a reservation on the only node: free cores from the last cycle on, all of those taken."""
        self._planned: list[tuple[int, Booking, float]] = []
        """Those reservations: job, place, start."""
        self._last_rank: Rank = ()
        """Where the last one stands of those that were planned so."""
        self._recounted: dict[tuple[str, str], None] = {}
        """Accounts and users whose charges or runs have changed: their use is worked out before the next cycle."""
        self._absent: dict[int, tuple[Allocation, ...]] = {}
        """Runs on nodes that are not there."""
        self._is_stale = True
        """Whether jobs that were passed over in the last cycle have to be looked at again."""
        self._now = -inf
        """Of the last cycle."""
        self._gone: list[tuple[FairShareEntity, Amounts]] = []
        """Runs that have ended since the last cycle, and are yet to be charged."""
        self._tentative: list[tuple[Entry, Run, State | None]] = []
        """Starts of the last plan that are not carried out yet."""
        self._confirmed: set[FairShareEntity] = set()
        """Users of whom others of its starts were carried out."""
        self._undo: list[Callable[[], None]] = []
        """What else the last plan has changed."""
        self._set_nodes(tuple(sorted(nodes, key=lambda node: node.name)))

    def _set_nodes(self, nodes: tuple[NodeView, ...]) -> None:
        """Make all state anew over these nodes and the present settings, without jobs."""
        settings = self.settings
        self.layout = layout = Layout(nodes, settings)
        self.draft = Draft(layout)
        self.timeline = Timeline(self.draft)
        self.quotas = Quotas(settings, layout)
        self.fairshare = FairShare(settings, capacity_of(layout))
        self.ranking = Ranking(settings, layout, self.quotas, self.fairshare, self.extensions)
        self.queue = PendingQueue(layout, settings, self.ranking, self.fairshare)
        self._set_placements()
        self._set_rules()

    def _set_placements(self) -> None:
        layout = self.layout
        is_flat = len(layout.nodes) == 1 and not layout.cards
        self.placements = PlacementCache(
            self.draft, self.timeline, is_flat=is_flat, has_one_place=not self.settings.priority.backfill_elsewhere
        )
        self._is_alike = len({card.view.vram_total_mib for card in layout.cards}) <= 1
        """Whether all cards are of one size."""

    def _set_rules(self) -> None:
        """Work out which rules the settings bring into play."""
        settings, ceiling = self.settings, ceilings_of(self.settings)
        self.has_ceilings = any(
            limit is not None
            for limit in (
                *(ceiling.cpu_fraction, ceiling.mem_fraction, ceiling.gpu_fraction),
                *(ceiling.disk_mib_s, ceiling.net_mib_s),
            )
        )
        self.inert_ceilings = None if self.has_ceilings else Ceilings(self.layout, settings)
        self.has_guards = bool(self.extensions.filters) or any(queue.cells for queue in settings.queue.values())
        self._learns = settings.placement.strategy in LEARNING_STRATEGIES
        self.can_never_preempt = settings.preempt.mode == "off" or not (
            self.quotas.is_capacity or any(qos.preempts for qos in settings.qos.values())
        )
        self.counts_quotas = bool(settings.queue or settings.qos or settings.limit.running_per_user is not None)
        self.is_general = bool(
            self.has_ceilings
            or self.has_guards
            or self.extensions.scores
            or self.extensions.permits
            or (self.quotas.is_capacity and not self.can_never_preempt)
        )
        """Whether each class is looked at by all the rules in each cycle."""
        priority = settings.priority
        self._may_step = (
            self.placements.is_flat
            and priority.backfill
            and priority.backfill_depth > 1
            and priority.backfill_by == "prediction"
            and not self.is_general
            and not self.ranking.is_dynamic
        )
        """Whether a reservation for everybody can be a number over time."""
        self.queue.must_see_class = self._must_see

    def _must_see(self, key: ClassKey) -> bool:
        """Whether jobs of this class are looked at in each cycle even where there is no room for them."""
        if key.throttle is not None or key.reservation is not None or self.quotas.has_limits(key.queue, key.qos):
            return True
        return self.may_preempt(key)

    def may_preempt(self, key: ClassKey) -> bool:
        """Whether the QOS of these jobs, or of one that waits for them, may preempt others."""
        if self.can_never_preempt:
            return False
        names = (key.qos, key.inherited.qos) if key.inherited else (key.qos,)
        return any((qos := self.settings.qos.get(name)) is not None and qos.preempts for name in names)

    # --- made from a snapshot ---------------------------------------------------------------------

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> Planner:
        """A planner that knows what the snapshot shows."""
        made = cls(snapshot.nodes, settings, extensions)
        made.name_of = snapshot.name_of
        made._fill(snapshot)
        return made

    def _fill(self, snapshot: Snapshot) -> None:
        settings = self.settings
        self.windows = snapshot.windows
        self._usage = {(one.account, one.user): one for one in snapshot.usage}
        if self.fairshare.counts_use:
            if snapshot.used is not None:
                self.fairshare.reset(snapshot.used)
            else:
                at = ranked_at(snapshot.now, settings)
                used = usage_now(snapshot, self.layout, settings, at)
                self.fairshare.reset(Usage(*mark, amount, at) for mark, amount in used.items())
        ordered = sorted(snapshot.allocations, key=lambda held: (held.start_at, held.job_id))
        for _, held in groupby(ordered, lambda one: one.job_id):
            self._hold(tuple(held), snapshot.now)
        queue = self.queue
        for pending in snapshot.pending:
            job_class = queue.class_of_key(pending.key)
            queue.fill(job_class, pending.jobs)
            if pending.total > len(pending.jobs):
                queue.hide(job_class, pending.total - len(pending.jobs))

    def snapshot(self, now: float, most: int | None = None) -> Snapshot:
        """The same world as values. Args: most: of each class, show the first so many jobs."""
        self.settle()
        self._move_to(now)
        return Snapshot(
            now=now,
            nodes=self.layout.nodes,
            allocations=self.allocations(),
            pending=self.queue.pending_classes(most),
            usage=tuple(self._usage[mark] for mark in sorted(self._usage)),
            windows=self.windows,
            used=self.fairshare.used() if self.fairshare.counts_use else None,
            name_of=self.name_of,
        )

    def in_order(self, now: float) -> Iterator[tuple[ClassKey, PendingJob]]:
        """Pending jobs as they stand in the queue, up to where a class of which not all are shown leaves it open."""
        self.settle()
        self._move_to(now)
        left = {one: len(one.jobs) for one in self.queue.classes}
        for queued_at, job_id, job_class in self.queue.in_order():
            yield job_class.key, PendingJob(job_id, queued_at)
            left[job_class] -= 1
            if not left[job_class] and job_class.hidden:
                return

    def allocations(self) -> tuple[Allocation, ...]:
        """What all running jobs hold, by job."""
        return tuple(held for _, one in sorted(self.runs.items()) for held in one.allocations)

    def fork(self) -> Planner:
        """An independent planner with the same state, for trying what would be."""
        self.settle()
        twin = copy(self)
        twin.layout = layout = copy(self.layout)
        # What is learned of the usual jobs is kept there, too.
        layout.pools = layout.pools.copy()
        if layout.wanted is not None:
            layout.wanted = layout.wanted.copy()
        twin.draft = self.draft.copy()
        twin.draft.layout = layout
        twin.timeline = self.timeline.copy(twin.draft)
        twin.quotas = self.quotas.copy()
        twin.fairshare, entities = self.fairshare.copy()
        twin.ranking = self.ranking.copy(layout, twin.quotas, twin.fairshare)
        twin.queue, classes = self.queue.copy(layout, twin.ranking, twin.fairshare, entities)
        twin._set_placements()
        twin.runs = {}
        for job_id, one in self.runs.items():
            made = twin.runs[job_id] = copy(one)
            made._planner = twin
            if one.entity is not None:
                made.entity = entities[one.entity]
            if one.job_class is not None:
                made.job_class = classes.get(one.job_class, one.job_class)
        twin.tasks = self.tasks.copy()
        twin._usage = self._usage.copy()
        twin._gone = [(entities[entity], rate) for entity, rate in self._gone]
        twin._tentative, twin._undo, twin._planned, twin._confirmed = [], [], [], set()
        twin._cycle = twin._steps = None
        twin._is_stale = True
        twin._set_rules()
        for shape in twin.queue.shapes:
            shape.epoch = shape.passes_of = shape.refused_of = -1
        return twin

    # --- what changes ---------------------------------------------------------------------------

    def apply(self, event: events.Event) -> None:
        """Take in one event."""
        _APPLY[type(event)](self, event)

    def _changes(self, *, frees: bool = True) -> None:
        """Something is about to change: what a plan has tried and nobody has carried out is taken back."""
        self.settle()
        self.version += 1
        if frees:
            self._is_stale = True

    def class_of_key(self, key: ClassKey) -> JobClass:
        """The class of all jobs with this key, to be handed in with each of them."""
        return self.queue.class_of_key(key)

    def own_class(self, key: ClassKey) -> JobClass:
        """A class for jobs whose `predict` is theirs alone, whatever the key."""
        return self.queue.own_class(key)

    def predict(self, job_class: JobClass, predicted_s: int | None, plan_s: int | None) -> None:
        """Pending jobs of an own class are expected and planned to run for this long; running ones run as planned."""
        self._changes()
        self.queue.predict(job_class, predicted_s, plan_s)

    def job_queued(self, job_class: JobClass, queued_at: float, job_id: int) -> None:
        """A job is pending from now on."""
        if self._tentative or self._undo:
            self.settle()
        self.version += 1
        self.queue.add(job_class, queued_at, job_id)

    def _job_queued(self, event: events.JobQueued) -> None:
        self.job_queued(self.queue.class_of_key(event.key), event.job.queued_at, event.job.id)

    def pending_of(self, key: ClassKey) -> list[tuple[float, int]]:
        """When the pending jobs of a class came, and their ids, first come first."""
        self.settle()
        found = self.queue.class_with(key)
        return [] if found is None else [(queued_at, job_id) for queued_at, job_id, _ in found.jobs]

    def job_left(self, job_id: int) -> None:
        """A job is not pending any more: it was cancelled, held or changed."""
        self._changes()
        self.queue.forget(self.queue.remove(job_id))

    def _job_left(self, event: events.JobLeft) -> None:
        self.job_left(event.job_id)

    def _jobs_hidden(self, event: events.JobsHidden) -> None:
        job_class = self.queue.class_with(event.key)
        if job_class is None or job_class.hidden == event.count:
            return
        self._changes(frees=not job_class.hidden)
        self.queue.hide(job_class, event.count)

    def _run_started(self, event: events.RunStarted) -> None:
        job_id = event.allocations[0].job_id
        if self._confirm(event.allocations):
            return
        self._changes()
        if job_id in self.queue:
            self.queue.forget(self.queue.remove(job_id))
        if job_id in self.runs:
            self._release(job_id, is_charged=True)
        self._hold(event.allocations, self._now)

    def _run_changed(self, event: events.RunChanged) -> None:
        self._changes()
        job_id = event.allocations[0].job_id
        if job_id in self.runs:
            self._release(job_id, is_charged=True)
        self._hold(event.allocations, self._now)

    def _confirm(self, allocations: tuple[Allocation, ...]) -> bool:
        """Whether this start is one of the last plan, and holds just what was planned."""
        first = allocations[0]
        for number, (_, run, _) in enumerate(self._tentative):
            if run.running.job_id != first.job_id:
                continue
            planned = run.allocations
            if len(planned) != len(allocations) or not all(map(_is_as_planned, planned, allocations)):
                return False
            run.tell(allocations)
            del self._tentative[number]
            if run.entity is not None:
                self._confirmed.add(run.entity)
            if not self._tentative:
                self._close()
            return True
        return False

    def run_ended(self, job_id: int, *, is_charged: bool = False) -> None:
        """A running job is over, and what it held is free. It is charged until the next cycle, unless that is told."""
        self._changes()
        self._release(job_id, is_charged=is_charged)

    def _run_ended(self, event: events.RunEnded) -> None:
        self.settle()
        self._absent.pop(event.job_id, None)
        if event.job_id in self.runs:
            self.run_ended(event.job_id, is_charged=event.is_charged)

    def expect(self, job_id: int, end_at: float) -> None:
        """A running job that was planned by a prediction is expected to end then; infinite: nobody knows when."""
        one = self.runs[job_id]
        if one.is_guessed:
            self._expect(one, end_at)

    def _expect(self, one: Run, end_at: float) -> None:
        one.predict(None if end_at == inf else end_at)
        self._plan_end(one, one.limit_at if end_at <= self._now else min(end_at, one.limit_at))

    def _run_expected(self, event: events.RunExpected) -> None:
        self.settle()
        one = self.runs.get(event.job_id)
        if one is not None:
            self._expect(one, event.end_at)

    def _plan_end(self, one: Run, end_at: float) -> None:
        before = one.running
        if before.end_at == end_at:
            return
        self._changes()
        self.timeline.remove(before)
        one.running = RunningJob(before.job_id, before.start_at, end_at, before.booking)
        one._held = None
        self.timeline.add(one.running)

    def _nodes_changed(self, event: events.NodesChanged) -> None:
        nodes = tuple(sorted(event.nodes, key=lambda node: node.name))
        if nodes == self.layout.nodes:
            return
        self._changes()
        self._change_machines(nodes)

    def _settings_changed(self, event: events.SettingsChanged) -> None:
        self._changes()
        self.settings, self.extensions = event.settings, event.extensions
        self._rebuild()

    def _rebuild(self) -> None:
        """Make all state anew from what it shows, by the present settings."""
        snapshot = self.snapshot(max(self._now, 0.0))
        self.runs, self.odd_runs, self.tasks, self._gone = {}, 0, Counter(), []
        self._leave_cycle()
        self._set_nodes(self.layout.nodes)
        self._fill(snapshot)

    def _change_machines(self, nodes: tuple[NodeView, ...]) -> None:
        """Other nodes, or other GPUs of them; what is pending stays in line."""
        before, self.layout = self.layout, Layout(nodes, self.settings)
        layout = self.layout
        layout.wanted = before.wanted
        is_same_size = _sizes_of(before) == _sizes_of(layout)
        self.draft = Draft(layout)
        self.timeline = Timeline(self.draft)
        if not is_same_size:
            self.quotas = Quotas(self.settings, layout)
            self.fairshare.reconfigure(capacity_of(layout))
        self.ranking.reconfigure(layout, self.quotas, is_same_size=is_same_size)
        self._set_placements()
        self._set_rules()
        self.queue.reconfigure(layout, is_same_size=is_same_size)
        self._leave_cycle()
        for job_id, run in list(self.runs.items()):
            self._put_again(job_id, run, is_counted=is_same_size)
        for job_id, allocations in list(self._absent.items()):
            if self._booking(allocations) is not None:
                del self._absent[job_id]
                self._hold(allocations, self._now)

    def _put_again(self, job_id: int, run: Run, *, is_counted: bool) -> None:
        """Have a run hold what it holds on machines that were made anew."""
        booking = self._booking(run.allocations)
        if booking is None:
            if is_counted:
                self._count(run, -1)
            if run.entity is not None:
                self.fairshare.end(run.entity, run.rate, self._now)
                self._recounted[run.entity.mark] = None
            del self.runs[job_id]
            self._absent[job_id] = run.allocations
            return
        before = run.running
        run.running = RunningJob(before.job_id, before.start_at, before.end_at, booking)
        run.tell(run.allocations)
        self.draft.take(booking)
        self.timeline.add(run.running)
        if not is_counted and run.entity is not None:
            run.rate = self._charged_rate(run)
            self._recounted[run.entity.mark] = None
        if not is_counted and self.counts_quotas:
            self.quotas.add(run.queue, run.user, run.qos, run.amount)
            if run.job_class is None and run.first.is_stopping:
                self.quotas.leave(run.queue, run.amount)

    def _usage_charged(self, event: events.UsageCharged) -> None:
        self._changes(frees=False)
        row = event.usage
        self._usage[row.account, row.user] = row
        self._recounted[row.account, row.user] = None

    def _windows_changed(self, event: events.WindowsChanged) -> None:
        if event.windows != self.windows:
            self._changes()
            self.windows = event.windows

    def _hold(self, allocations: tuple[Allocation, ...], now: float) -> None:
        """A job that began before runs here."""
        first = allocations[0]
        booking = self._booking(allocations)
        if booking is None:
            self._absent[first.job_id] = allocations
            return
        limit_at = inf if first.expected_end_at is None else first.expected_end_at
        predicted_at = first.predicted_end_at
        running = RunningJob(first.job_id, first.start_at, end_of(first, now), booking)
        run = Run(self, running, limit_at)
        run.predicted_at = predicted_at
        run.is_guessed = predicted_at is not None or limit_at == inf
        run.is_suspended = first.is_suspended
        run.tell(allocations)
        self.runs[first.job_id] = run
        self.odd_runs += first.is_suspended or first.is_stopping
        self.draft.take(booking)
        self.timeline.add(running)
        self._count(run, 1)
        if self.fairshare.counts_use:
            run.entity = self.fairshare.of(first.account, first.user)
            run.rate = self._charged_rate(run)
            self.fairshare.hold(run.entity, run.rate, first.start_at)
        if self.layout.wanted is not None:
            for held in allocations:
                if held.request is not None and held.gpus:
                    self.layout.wanted.add(insistence(held.request), micros_asked(held.request, len(held.gpus)))
        if not self._is_cores_only(run):
            self.queue.others += 1
        self.placements.epoch += 1

    def _charged_rate(self, run: Run) -> Amounts:
        """What a run is charged for, a second; one that is suspended gives its cores back."""
        qos = self.settings.qos.get(run.qos)
        rate = run.amount if qos is None else run.amount.times(max(0.0, qos.usage_factor))
        if run.is_suspended:
            rate = Resources(rate.gpus, rate.vram_mib, 0.0, rate.mem_mib)
        return amounts_of(rate)

    def _is_cores_only(self, run: Run) -> bool:
        held = run.first
        has_more = bool(held.mem_mib or held.resources or held.licenses or held.is_exclusive)
        return self.placements.is_flat and run.limit_at < inf and not has_more

    def _booking(self, allocations: Sequence[Allocation]) -> Booking | None:
        """What a job holds on all of its nodes that are there."""
        layout = self.layout
        pieces = [booking for held in allocations if (booking := layout.booking(held.uid, held)) is not None]
        if not pieces:
            return None
        return replace(pieces[0], others=tuple(pieces[1:])) if len(pieces) > 1 else pieces[0]

    def _count(self, run: Run, sign: int) -> Resources:
        """Count what a run holds, or with `sign=-1` no longer, in the quotas and wherever else it counts."""
        amount = run.amount
        if self.counts_quotas:
            count = self.quotas.add if sign > 0 else self.quotas.remove
            count(run.queue, run.user, run.qos, amount)
            if run.job_class is None and run.first.is_stopping:
                self.quotas.leave(run.queue, amount.times(sign))
        if self.ranking.tracks_held:
            self.ranking.hold(run.user, amount, sign)
        array_id = run.array_id
        if array_id is not None:
            self.tasks[array_id] += sign
            if not self.tasks[array_id]:
                del self.tasks[array_id]
        return amount

    def _release(self, job_id: int, *, is_charged: bool) -> None:
        one = self.runs.pop(job_id)
        running = one.running
        self.draft.give_back(running.booking)
        self.timeline.remove(running)
        if one.job_class is not None:
            self.queue.forget(one.job_class)
            if self.counts_quotas or self.ranking.tracks_held or one.job_class.key.throttle is not None:
                self._count(one, -1)
        else:
            first = one.first
            self.odd_runs -= first.is_suspended or first.is_stopping
            self._count(one, -1)
            self.queue.others -= not self._is_cores_only(one)
            if self.layout.wanted is not None:
                for held in one.allocations:
                    if held.request is not None and held.gpus:
                        micros = micros_asked(held.request, len(held.gpus))
                        self.layout.wanted.add(insistence(held.request), -micros)
        if one.entity is not None:
            if is_charged:
                self.fairshare.end(one.entity, one.rate, self._now)
                self._recounted[one.entity.mark] = None
            else:
                self._gone.append((one.entity, one.rate))
        self.placements.epoch += 1

    # --- a cycle --------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Plan one cycle. Equal states give equal plans; what it tries is taken back before anything else changes.

        Invariant: the starts of the plan together with what runs book nothing twice.
        """
        self.settle()
        starts, cycle = self._plan(now)
        reservations = tuple(
            Reservation(one.job_id, self.layout.placement(one.booking), one.start_at)
            for one in (cycle.reservations if cycle is not None else ())
        )
        if cycle is None and self._steps is not None:
            placement = self.layout.placement
            reservations = tuple(Reservation(job_id, placement(booking), at) for job_id, booking, at in self._planned)
        preemption = None if cycle is None else cycle.made_preemption
        chosen = {} if preemption is None else preemption.chosen
        return Plan(
            starts=tuple(starts),
            preempts=tuple(chosen[job_id] for job_id in sorted(chosen)),
            resumes=() if cycle is None else tuple(cycle.resumes),
            reservations=reservations,
            reasons=Reasons(self, now, cycle if cycle is not None and not cycle.is_continued else None),
            first_blocked=reservations[0].job_id if reservations else None,
            has_more=cycle is not None and cycle.cut_short is not None,
        )

    def schedule(self, now: float) -> Sequence[Start]:
        """Plan one cycle and take its starts for carried out.

        Raises: BrokenInvariant where the plan preempts or resumes, which the caller has to follow up.
        """
        if self._tentative or self._undo:
            self.settle()
        starts, cycle = self._plan(now)
        self._tentative.clear()
        if cycle is not None and (cycle.resumes or (cycle.made_preemption and cycle.made_preemption.chosen)):
            raise BrokenInvariant("a plan that preempts was made where nobody follows it up")
        if self._undo:
            self._close()
        return starts

    def carry_out(self, plan: Plan) -> None:
        """Take all starts of the last plan for carried out."""
        if len(plan.starts) != len(self._tentative):
            raise BrokenInvariant("a plan was to be carried out that is not the last one")
        if self._tentative:
            self.version += 1
        self._tentative.clear()
        self._close()

    def settle(self) -> None:
        """Take back what a plan has tried and nobody has carried out."""
        if not (self._tentative or self._undo):
            return
        if self._tentative:
            self._is_stale = True
            self.version += 1
        while self._tentative:
            entry, run, state = self._tentative.pop()
            running, job_class = run.running, entry[2]
            del self.runs[running.job_id]
            self.draft.give_back(running.booking)
            self.timeline.remove(running)
            if self.counts_quotas or self.ranking.tracks_held or job_class.key.throttle is not None:
                self._count(run, -1)
            if state is not None and run.entity is not None:
                if run.entity in self._confirmed:
                    # Going back to before this start would forget those that were carried out.
                    self.fairshare.end(run.entity, run.rate, self._now)
                else:
                    self.fairshare.restore(run.entity, state)
            self.queue.put_back(entry)
            self.placements.epoch += 1
        self._close()

    def _close(self) -> None:
        self._confirmed.clear()
        if self._undo:
            self._is_stale = True
            self.version += 1
            while self._undo:
                self._undo.pop()()

    def _plan(self, now: float) -> tuple[Sequence[Start], Cycle | None]:
        """The starts of a cycle, and the cycle, where it was one."""
        self._move_to(now)
        queue = self.queue
        if not len(queue) and not self.odd_runs:
            self._leave_cycle()
            self.timeline.begin(now)
            queue.seen()
            return (), None
        if self._may_step and self._can_plan_in_steps(now):
            starts: list[Start] = []
            self._plan_in_steps(now, starts)
            queue.seen()
            return starts, None
        cycle = self._cycle
        if cycle is not None and self._can_continue(cycle, now):
            before = len(cycle.starts)
            cycle.move_to(now)
            cycle.continue_with(queue.new)
            if cycle.has_claims:
                self._undo.append(cycle.close)
            queue.seen()
            return cycle.starts[before:], cycle
        self._leave_cycle()
        self._is_stale = False
        if self._learns:
            self._learn(now)
        cycle = Cycle(self, now)
        cycle.run()
        if cycle.has_claims:
            self._undo.append(cycle.close)
        self._cycle = cycle
        queue.seen()
        return cycle.starts, cycle

    def _leave_cycle(self) -> None:
        self._cycle = self._steps = None

    def _learn(self, now: float) -> None:
        typical = typical_of(Snapshot(now, (), self.allocations(), self.queue.pending_classes(1)))
        if typical != self.layout.typical:
            self.layout.typical = typical
            self.layout.pools.pop(FRAGMENTATION, None)
            self.layout.pools.pop(OUTLOOK, None)
            self.placements.epoch += 1
            self.timeline.forget_places()

    def cycle_for_reasons(self, now: float) -> Cycle:
        """A whole cycle as of this instant, for what it says of those that wait; its starts are not carried out."""
        self.settle()
        self._leave_cycle()
        self._is_stale = True
        _, cycle = self._plan(max(now, self._now))
        if cycle is None:
            cycle = Cycle(self, now)
            cycle.run()
        return cycle

    def runs_before(self, cycle: Cycle) -> Iterator[tuple[int, Run]]:
        """Those that ran when the cycle began, by job."""
        started = {start.job_id for start in cycle.starts}
        return ((job_id, one) for job_id, one in sorted(self.runs.items()) if job_id not in started)

    def book(self, entry: Entry, booking: Booking, start: Start, now: float) -> RunningJob:
        """A job that a cycle has taken out of the queue starts here."""
        job_class = entry[2]
        self.draft.take(booking)
        running = RunningJob(entry[1], now, now + job_class.planned_s, booking)
        self.timeline.add(running)
        run = self.runs[entry[1]] = Run(self, running, now + job_class.limit_s)
        run.job_class, run.placement = job_class, start.placement
        run.is_guessed = not job_class.is_limited or job_class.key.plan_s is not None
        if running.end_at < run.limit_at:
            run.predicted_at = running.end_at
        if self.counts_quotas or self.ranking.tracks_held or job_class.key.throttle is not None:
            self._count(run, 1)
        state: State | None = None
        if self.fairshare.counts_use:
            entity = run.entity = job_class.entity
            state = self.fairshare.state_of(entity)
            run.rate = self._rate(job_class, booking)
            self.fairshare.begin(entity, run.rate, now)
        self._tentative.append((entry, run, state))
        self.placements.epoch += 1
        return running

    def _rate(self, job_class: JobClass, booking: Booking) -> Amounts:
        """What its user is charged for, a second; where all cards are alike, the same in all places."""
        rate = job_class.rate
        if rate is None:
            qos = self.settings.qos.get(job_class.key.qos)
            held = footprint(self.layout, booking)
            rate = amounts_of(held if qos is None else held.times(max(0.0, qos.usage_factor)))
            if self._is_alike and not booking.is_exclusive:
                job_class.rate = rate
        return rate

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to plan for."""
        return not (len(self.queue) or any(one.is_suspended for one in self.runs.values()))

    def move_to(self, now: float) -> None:
        """Count the time that has passed, for whoever asks for ranks."""
        self.settle()
        self._move_to(now)

    def _move_to(self, now: float) -> None:
        """Count the time that has passed."""
        queue = self.queue
        if self._recounted:
            self._recount(ranked_at(now, self.settings))
        if queue.rank_as_of(now):
            self._is_stale = True
        if queue.forces_places:
            self._is_stale, queue.forces_places = True, False
            self.timeline.forget_places()
        for entity, rate in self._gone:
            self.fairshare.end(entity, rate, now)
        self._gone.clear()
        # What was predicted and has not come true says nothing of what is to come.
        late, ends = 0, self.timeline.ends
        while late < len(ends) and ends[late][0] <= now:
            end_at, _, job_id, _ = ends[late]
            one = self.runs[job_id]
            if end_at >= one.limit_at:
                late += 1
            else:
                self._plan_end(one, one.limit_at)
        self._now = now

    def _recount(self, at: float) -> None:
        """Work out as of this instant what those have used whose charges or runs have changed."""
        if self.fairshare.counts_use:
            open_runs: dict[tuple[str, str], list[tuple[Amounts, float]]] = {mark: [] for mark in self._recounted}
            for one in self.runs.values():
                if one.entity is not None and (runs := open_runs.get(one.entity.mark)) is not None:
                    runs.append((one.rate, one.running.start_at))
            for mark, runs in open_runs.items():
                self.fairshare.recount(mark, self._usage.get(mark), runs, at)
        self._recounted.clear()

    # --- the short cut ----------------------------------------------------------------------------

    def _can_continue(self, cycle: Cycle, now: float) -> bool:
        """Whether nothing but the arrival of jobs behind those with a reservation has happened since this cycle."""
        if self._is_stale or cycle.has_passed or self._learns or cycle.cut_short is not None:
            return False
        if not cycle.may_be_continued or (self.ranking.is_dynamic and cycle.starts):
            return False
        queue, new = self.queue, self.queue.new
        if queue.must_see and cycle.starts:
            # What is held counts against limits that others were promised what is left of.
            return False
        if not cycle.depth:
            return True
        last = cycle.last_reserved
        if last is None:
            return not len(queue) - len(new)
        for entry in new:
            job_class = entry[2]
            is_head = job_class.jobs[0] is entry and not self.ranking.is_dynamic
            if (job_class.rank if is_head else queue.rank(job_class, entry[0], entry[1])) < last:
                return False
        if not cycle.has_backfill:
            return True
        for one in cycle.reservations:
            start_at = one.start[0]
            if start_at <= now or start_at == inf:
                # For a start that nobody can tell, others are let pass the longer, the longer that has been so.
                return False
        if cycle.has_one_place and not self.placements.is_flat:
            # Where those behind it go best changes with where it goes.
            return not any(self.placements.may_fit(entry[2].shape) for entry in new)
        return True

    # --- a reservation for everybody, on one node -----------------------------------------------

    def _can_plan_in_steps(self, now: float) -> bool:
        # There each is relied upon to end as planned.
        queue = self.queue
        can = (
            not queue.others
            and not queue.must_see
            and len(queue) <= self.settings.priority.backfill_depth
            and not self.odd_runs
            and not self.windows
        )
        if not can or (self.timeline.ends and self.timeline.ends[0][0] <= now):
            self._steps = None
            return False
        return True

    def _plan_in_steps(self, now: float, starts: list[Start]) -> None:
        """Conservative backfill by planning anew; for jobs at the end of the queue alone, by going on."""
        steps, queue = self._steps, self.queue
        self._cycle = None
        entries: Sequence[Entry]
        if steps is None or self._is_stale or self._is_amid() or any(at <= now for _, _, at in self._planned):
            free = self.draft.free_millicpus[0]
            ends = ((end[0], end[3].booking.millicpus) for end in self.timeline.ends)
            steps = self._steps = FreeSteps(now, free, ends)
            self._planned.clear()
            self.timeline.begin(now)
            entries = queue.in_order()
        else:
            steps.move_on(now)
            entries = [entry for _, entry in sorted((queue.rank(one[2], one[0], one[1]), one) for one in queue.new)]
        for entry in entries:
            job_class = entry[2]
            shape = job_class.shape
            at = steps.take(shape.millicpus, job_class.planned_s)
            if at is None:
                continue
            self._last_rank = queue.rank(job_class, entry[0], entry[1])
            if at <= now:
                booking = self.placements.find(shape)
                if booking is None:
                    raise BrokenInvariant(f"job {entry[1]} was planned for now on a node that has no room")
                queue.remove(entry[1])
                start = Start(entry[1], self.layout.placement(booking))
                self.book(entry, booking, start, now)
                starts.append(start)
            else:
                only = shape.only or Booking(0, shape.need.uid, shape.millicpus, 0, ())
                self._planned.append((entry[1], only, at))
        self._is_stale = False

    def _is_amid(self) -> bool:
        """Whether a new job stands in the queue before others that were looked at."""
        rank, last = self.queue.rank, self._last_rank
        return any(rank(entry[2], entry[0], entry[1]) < last for entry in self.queue.new)


def _sizes_of(layout: Layout) -> tuple[object, ...]:
    """All of the machines that what a job takes is measured by."""
    cards = tuple((card.view.name, card.view.vram_total_mib, card.view.is_present) for card in layout.cards)
    return tuple((node.name, node.cpus, node.mem_mib, len(node.gpus)) for node in layout.nodes), cards


def _is_as_planned(planned: Allocation, held: Allocation) -> bool:
    """Whether a run holds what a plan thought it would, until then."""
    return (
        planned.node == held.node
        and planned.gpus == held.gpus
        and planned.cpus == held.cpus
        and planned.mem_mib == held.mem_mib
        and planned.resources == held.resources
        and planned.licenses == held.licenses
        and planned.is_exclusive == held.is_exclusive
        and planned.start_at == held.start_at
        and planned.expected_end_at == held.expected_end_at
        and planned.predicted_end_at == held.predicted_end_at
        and (planned.user, planned.account, planned.queue, planned.qos)
        == (held.user, held.account, held.queue, held.qos)
        and planned.array_id == held.array_id
    )


_APPLY: dict[type, Callable[[Planner, Any], None]] = {
    events.JobQueued: Planner._job_queued,
    events.JobLeft: Planner._job_left,
    events.JobsHidden: Planner._jobs_hidden,
    events.RunStarted: Planner._run_started,
    events.RunChanged: Planner._run_changed,
    events.RunEnded: Planner._run_ended,
    events.RunExpected: Planner._run_expected,
    events.NodesChanged: Planner._nodes_changed,
    events.UsageCharged: Planner._usage_charged,
    events.WindowsChanged: Planner._windows_changed,
    events.SettingsChanged: Planner._settings_changed,
}


def decide(snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> Plan:
    """Plan one cycle of what a snapshot shows. Equal inputs give equal plans; the snapshot is not changed."""
    return Planner.from_snapshot(snapshot, settings, extensions).plan(snapshot.now)
