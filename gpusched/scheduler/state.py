"""State of the planner: machines, running jobs, pending jobs, use, and the events that change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby
from math import inf
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any, TypeVar

from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.planner_settings import LEARNING_STRATEGIES
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, ClassKey, LimitInForce, Placement, Snapshot, Start, Usage, Window
from gpusched.model.value import replace
from gpusched.scheduler import events
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState, differs_in_load_alone
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.fairshare import NO_AMOUNTS, Amounts, FairShare, FairShareEntity, State
from gpusched.scheduler.load_limits import LoadLimits, ceilings_of
from gpusched.scheduler.placement_cache import PlacementCache
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.priority import Ranking, ranked_at
from gpusched.scheduler.queue import Entry, JobClass, PendingQueue
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.rules import GATES
from gpusched.scheduler.runs import ActiveRun, holds_the_same, instants_of
from gpusched.scheduler.strategies.expected_capacity import OUTLOOK
from gpusched.scheduler.strategies.fragmentation import FRAGMENTATION, typical_of
from gpusched.scheduler.timeline import RunningJob, Timeline, end_of, foreseen_end, outlived_at
from gpusched.scheduler.usage import capacity_of, usage_now

if TYPE_CHECKING:
    from gpusched.scheduler.reservation import TimelineReservation
    from gpusched.scheduler.rules import Cycle

_State = TypeVar("_State", bound="PlannerState")
_NAME = attrgetter("name")

Begun = tuple[Entry, ActiveRun, State | None]
"""A start that a plan has booked: the job as it was pending, its run, and what its user had used before."""

_OWNED = ("tasks", "fillers", "fences", "kept", "_usage", "_absent", "_recounted", "_outlived")
"""Parts of a state that a fork copies as they are. The linked ones know each other; all others are immutable."""


class PlannerState:
    """All state that lives between cycles.

    It is one class, large as it is, since nearly every event changes several parts together: the end of a run frees
    its room, its place in the timeline, quotas and fair share, and a fork has to copy all of them in step.

    Args:
    nodes: present nodes; `NodesChanged` replaces them.
    settings: in force until `SettingsChanged`.
    """

    def __init__(
        self,
        nodes: Iterable[NodeView],
        settings: Settings,
        extensions: Extensions = NO_EXTENSIONS,
        source: PlannerState | None = None,
    ) -> None:
        """Args: source: whose fields it takes over, whatever the others say."""
        if source is not None:
            take_over(self, source)
            return
        self.settings = settings
        self.extensions = extensions
        self.name_of: Callable[[int], str] = str
        self.windows: tuple[Window, ...] = ()
        self.budgets: tuple[Budget, ...] = ()
        self.limits: tuple[LimitInForce, ...] = ()
        self.runs: dict[int, ActiveRun] = {}
        self.odd_runs = 0
        """Number of runs suspended or being stopped."""
        self.fillers: set[int] = set()
        """Running jobs that were started on a spent budget."""
        self.tasks: Counter[int] = Counter()
        """Number of running tasks of each array with a limit."""
        self.version = 0
        """Counts the changes."""
        self._usage: dict[tuple[str, str], Usage] = {}
        """Reported use of ended runs."""
        self._recounted: dict[tuple[str, str], None] = {}
        """Accounts and users whose charges or runs have changed: their use is recomputed before the next cycle."""
        self._absent: dict[int, tuple[Allocation, ...]] = {}
        """Runs on missing nodes."""
        self.is_stale = True
        """Whether jobs skipped by the last cycle must be examined again."""
        self.now = -inf
        """Of the last cycle."""
        self._gone: list[tuple[FairShareEntity, Amounts]] = []
        """Runs ended since the last cycle, not charged yet."""
        self._tentative: list[Begun] = []
        """Starts of the last plan that are not carried out yet."""
        self._confirmed: set[FairShareEntity] = set()
        """Users with other starts of that plan already carried out."""
        self._undo: list[Callable[[], None]] = []
        """Other changes by the last plan, to undo."""
        self.fences: dict[int, float] = {}
        """Fences of pending jobs that had a reservation, by job."""
        self.kept: dict[int, Placement] = {}
        """Last reserved place of fenced pending jobs, by job."""
        self._outlived: list[tuple[float, int]] = []
        """When runs without a limit outlive their predictions, and stale entries, as a heap."""
        self._set_nodes(tuple(sorted(nodes, key=lambda node: node.name)))

    def _set_nodes(self, nodes: tuple[NodeView, ...]) -> None:
        """Rebuild all state for these nodes and the present settings, without jobs."""
        settings = self.settings
        self.layout = layout = ClusterLayout(nodes, settings)
        self.draft = ClusterState(layout)
        self.timeline = Timeline(self.draft)
        self.quotas = Quotas(settings, layout)
        self.fairshare = FairShare(settings, capacity_of(layout))
        self.ranking = Ranking(settings, layout, self.quotas, self.fairshare, self.extensions)
        self.queue = PendingQueue(layout, settings, self.ranking, self.fairshare)
        self._set_placements()
        self._set_rules()

    def _set_placements(self) -> None:
        has_one_place = not self.settings.priority.backfill_elsewhere
        self.placements = PlacementCache(self.draft, self.timeline, has_one_place=has_one_place)
        self._is_alike = len({card.view.vram_total_mib for card in self.layout.cards}) <= 1
        """Whether all cards are of one size."""

    def _set_rules(self) -> None:
        """Determine which rules the settings require."""
        settings, ceiling = self.settings, ceilings_of(self.settings)
        self.has_ceilings = any(
            limit is not None
            for limit in (
                *(ceiling.cpu_fraction, ceiling.mem_fraction, ceiling.gpu_fraction),
                *(ceiling.disk_mib_s, ceiling.net_mib_s),
            )
        )
        self.inert_load_limits = None if self.has_ceilings else LoadLimits(self.layout, settings)
        self.has_vetoes = bool(self.extensions.filters) or any(queue.cells for queue in settings.queue.values())
        self.learns = settings.placement.strategy in LEARNING_STRATEGIES
        self._has_preemption = settings.preempt.mode != "off"
        self._has_victims = (
            self.quotas.is_capacity
            or any(qos.preempts for qos in settings.qos.values())
            or any(account.when_spent == "filler" for account in settings.account.values())
        )
        self.counts_quotas = bool(settings.queue or settings.qos or settings.limit.running_per_user is not None)
        self.is_general = bool(
            self.has_ceilings
            or self.has_vetoes
            or self.extensions.scores
            or self.extensions.permits
            or (self.quotas.is_capacity and self._has_preemption)
        )
        """Whether every class is subject to all rules in each cycle."""
        orders = (settings.priority.order, *(queue.order for queue in settings.queue.values()))
        self._reads_load = (
            self.has_ceilings or bool(self.extensions.filters or self.extensions.scores) or "utilisation" in orders
        )
        """Whether the measured load of nodes and GPUs counts, and not only what they have."""
        self._set_gates()
        self.queue.must_see_class = self._must_see

    def _set_gates(self) -> None:
        """Determine which limits are in force."""
        self.gates = tuple(gate for gate in GATES if gate.is_in_force(self))
        self.examines_all = self.is_general or any(gate.examines_all for gate in self.gates)

    @property
    def can_never_preempt(self) -> bool:
        """Whether no job may preempt another, whatever is pending and running."""
        return not (self._has_preemption and (self._has_victims or self.fillers))

    def _must_see(self, key: ClassKey) -> bool:
        """Whether to examine this class in each cycle even without room for it."""
        if key.terms.reservation is not None or key.variants:
            return True
        if self.gates and any(gate.may_hold(self, key) for gate in self.gates):
            return True
        return self.may_preempt(key)

    def may_preempt(self, key: ClassKey) -> bool:
        """Whether the QOS of this class, or of a job that depends on it, may preempt others."""
        if self.can_never_preempt:
            return False
        names = (key.terms.qos, key.inherited.qos) if key.inherited else (key.terms.qos,)
        return any((qos := self.settings.qos.get(name)) is not None and qos.preempts for name in names)

    # --- made from a snapshot ---------------------------------------------------------------------

    @classmethod
    def from_snapshot(
        cls: type[_State], snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS
    ) -> _State:
        made = cls(snapshot.nodes, settings, extensions)
        made.name_of = snapshot.name_of
        made._fill(snapshot)
        return made

    def _fill(self, snapshot: Snapshot) -> None:
        settings = self.settings
        self.windows = snapshot.windows
        self.budgets = snapshot.budgets
        self.limits = snapshot.limits
        self._set_gates()
        self._usage = {(one.account, one.user): one for one in snapshot.usage}
        if self.fairshare.counts_use:
            if snapshot.used is not None:
                self.fairshare.reset(snapshot.used)
            else:
                at = ranked_at(snapshot.now, settings)
                used = usage_now(snapshot, self.layout, settings, at)
                self.fairshare.reset(Usage(*mark, amount, at) for mark, amount in used.items())
        self.kept = dict(snapshot.kept)
        ordered = sorted(snapshot.allocations, key=lambda held: (held.start_at, held.job_id))
        for _, held in groupby(ordered, lambda one: one.job_id):
            self._hold(tuple(held), snapshot.now)
        queue = self.queue
        for pending in snapshot.pending:
            job_class = queue.class_of_key(pending.key)
            queue.fill(job_class, pending.jobs, pending.total - len(pending.jobs))
            self.fences.update((job.id, job.fence_at) for job in pending.jobs if job.fence_at is not None)

    def snapshot(self, now: float, most: int | None = None) -> Snapshot:
        """The state as values. Args: most: maximum number of jobs to show of each class."""
        self.move_to(now)
        return Snapshot(
            now=now,
            nodes=self.layout.nodes,
            allocations=self.allocations(),
            pending=self.queue.pending_classes(most, self.fences),
            usage=tuple(self._usage[mark] for mark in sorted(self._usage)),
            windows=self.windows,
            budgets=self.budgets,
            limits=self.limits,
            used=self.fairshare.used() if self.fairshare.counts_use else None,
            kept=tuple(sorted(self.kept.items())),
            name_of=self.name_of,
        )

    def allocations(self) -> tuple[Allocation, ...]:
        """Holdings of all running jobs, by job."""
        return tuple(held for _, one in sorted(self.runs.items()) for held in one.allocations)

    # --- copies and lessons ---------------------------------------------------------------------

    def fork(self) -> PlannerState:
        """An independent copy."""
        self.settle()
        twin = PlannerState((), self.settings, source=self)
        twin.layout = layout = ClusterLayout((), self.settings, self.layout)
        # The pools also hold the state learned about typical jobs.
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
            made = twin.runs[job_id] = ActiveRun(twin, one.running, one.limit_at, one)
            made._planner = twin
            if one.entity is not None:
                made.entity = entities[one.entity]
            if one.job_class is not None:
                made.job_class = classes.get(one.job_class, one.job_class)
        for name in _OWNED:
            setattr(twin, name, getattr(self, name).copy())
        twin._gone = [(entities[entity], rate) for entity, rate in self._gone]
        twin._tentative, twin._undo, twin._confirmed = [], [], set()
        twin.is_stale = True
        twin._set_rules()
        for shape in twin.queue.shapes:
            shape.epoch = shape.barred_of = shape.refused_of = -1
        return twin

    def learn(self, now: float) -> None:
        """Go by the jobs that are pending and running now as those to come."""
        typical = typical_of(Snapshot(now, (), self.allocations(), self.queue.pending_classes(1)))
        if typical != self.layout.typical:
            self.layout.typical = typical
            self.layout.pools.pop(FRAGMENTATION, None)
            self.layout.pools.pop(OUTLOOK, None)
            self.placements.epoch += 1
            self.timeline.forget_places()

    # --- what changes ---------------------------------------------------------------------------

    def apply(self, event: events.Event) -> None:
        _APPLY[type(event)](self, event)

    def _changes(self, *, frees: bool = True) -> None:
        """Prepare for a change: undo the uncommitted part of the last plan."""
        self.settle()
        self.version += 1
        if frees:
            self.is_stale = True

    def class_of_key(self, key: ClassKey) -> JobClass:
        """The class shared by all jobs with this key, to pass with each of them."""
        # A class of which the last plan starts all jobs is no longer found by its key: another would be made.
        self.settle()
        return self.queue.class_of_key(key)

    def predict(self, job_class: JobClass, predicted_s: int | None, plan_s: int | None) -> None:
        """Set the expected and planned run time of pending jobs of a private class; running jobs keep theirs."""
        self._changes()
        self.queue.predict(job_class, predicted_s, plan_s)

    def job_queued(self, job_class: JobClass, queued_at: float, job_id: int) -> None:
        if self._tentative or self._undo:
            self.settle()
        self.version += 1
        self.queue.add(job_class, queued_at, job_id)

    def _job_queued(self, event: events.JobQueued) -> None:
        self.job_queued(self.class_of_key(event.key), event.job.queued_at, event.job.id)
        if event.job.fence_at is not None:
            self.fences[event.job.id] = event.job.fence_at

    def _tasks_queued(self, event: events.TasksQueued) -> None:
        self.settle()
        job_class = self.queue.class_of_key(event.key) if event.ids else None
        left, came = self.queue.put_tasks(event.array_id, job_class, event.queued_at, event.ids)
        if left or came:
            self._changes()
            for job_id in [one for one in self.fences if one not in self.queue]:
                self._forget_fence(job_id)

    def _forget_fence(self, job_id: int) -> None:
        if self.fences.pop(job_id, None) is not None:
            self.kept.pop(job_id, None)

    def _job_fenced(self, event: events.JobFenced) -> None:
        self.settle()
        if event.job_id in self.queue and self.fences.get(event.job_id) != event.fence_at:
            self._changes()
            if event.fence_at is None:
                self._forget_fence(event.job_id)
            else:
                self.fences[event.job_id] = event.fence_at

    def job_left(self, job_id: int) -> None:
        """Remove a pending job that was cancelled, held or changed."""
        self._changes()
        self._forget_fence(job_id)
        self.queue.forget(self.queue.remove(job_id))

    def _job_left(self, event: events.JobLeft) -> None:
        # One that runs by now is no longer in the queue.
        self.settle()
        if event.job_id in self.queue:
            self.job_left(event.job_id)

    def _run_started(self, event: events.RunHolds) -> None:
        job_id, run = event.allocations[0].job_id, self.runs.get(event.allocations[0].job_id)
        if run is not None and holds_the_same(run.allocations, event.allocations):
            is_confirmed = self._confirm(run, event.allocations[0])
            self._tell(run, event.allocations, is_confirmed=is_confirmed)
            return
        self._changes()
        self._forget_fence(job_id)
        if job_id in self.queue:
            self.queue.forget(self.queue.remove(job_id))
        self._run_changed(event)

    def _run_changed(self, event: events.RunHolds | events.RunChanged) -> None:
        self._changes()
        job_id = event.allocations[0].job_id
        if job_id in self.runs:
            self._release(job_id, is_charged=True)
        self._hold(event.allocations, self.now)

    def _confirm(self, run: ActiveRun, first: Allocation) -> bool:
        """Keep a start of the last plan, which is carried out with the planned holdings; return whether it is one."""
        number = next((number for number, (_, one, _) in enumerate(self._tentative) if one is run), None)
        if number is None:
            return False
        if run.array_id is None:
            self._count_task(first.array_id, 1)
        self._forget_fence(first.job_id)
        del self._tentative[number]
        if run.entity is not None:
            self._confirmed.add(run.entity)
        if not self._tentative:
            self._close()
        return True

    def _tell(self, run: ActiveRun, allocations: tuple[Allocation, ...], *, is_confirmed: bool) -> None:
        """Take in other instants of a run that holds the same: bookings and counts stay, and so do other starts of the
        last plan. Args: is_confirmed: whether it was only planned before."""
        before, first = run.first, allocations[0]
        run.tell(allocations)
        if is_confirmed and instants_of(before) == instants_of(first):
            return
        self.version += 1
        self.is_stale = True
        self.timeline.remove(run.running)
        run.limit_at = inf if first.expected_end_at is None else first.expected_end_at
        run.predicted_at, run.reported_at = first.predicted_end_at, first.reported_end_at
        run.running = RunningJob(first.job_id, first.start_at, end_of(first, self.now), run.running.booking)
        self.timeline.add(run.running)
        self._watch(run, self.now)
        if run.entity is not None:
            self._recounted[run.entity.mark] = None

    def run_ended(self, job_id: int, *, is_charged: bool = False) -> None:
        """Free the holdings of an ended job. It is charged up to the next cycle, unless `is_charged`."""
        self._changes()
        self._release(job_id, is_charged=is_charged)

    def _run_ended(self, event: events.RunReleased) -> None:
        self.settle()
        self._absent.pop(event.job_id, None)
        if event.job_id in self.runs:
            self.run_ended(event.job_id, is_charged=event.is_charged)

    def _foresee(self, one: ActiveRun, now: float) -> None:
        """Update the planned end of a run to the prediction as of now."""
        running = one.running
        self._plan_end(one, foreseen_end(running.start_at, one.predicted_at, one.limit_at, now, one.reported_at))
        self._watch(one, now)

    def _watch(self, one: ActiveRun, now: float) -> None:
        """Schedule another look at a run for when it outlives its prediction."""
        if one.predicted_at is not None and one.limit_at == inf:
            running, end_at = one.running, one.running.end_at
            if one.reported_at is not None:
                end_at = foreseen_end(running.start_at, one.predicted_at, inf, now)
            one.watched_at = outlived_at(running.start_at, end_at)
            heappush(self._outlived, (one.watched_at, running.job_id))

    def _plan_end(self, one: ActiveRun, end_at: float) -> None:
        before = one.running
        if before.end_at == end_at:
            return
        self._changes()
        self.timeline.remove(before)
        one.running = RunningJob(before.job_id, before.start_at, end_at, before.booking)
        one._held = None
        self.timeline.add(one.running)

    def _nodes_changed(self, event: events.NodesChanged) -> None:
        nodes, before = tuple(sorted(event.nodes, key=_NAME)), self.layout.nodes
        if nodes == before:
            return
        is_same = len(nodes) == len(before) and all(map(eq, map(_NAME, nodes), map(_NAME, before)))
        if not is_same or self._reads_load:
            self._changes()
            self._change_machines(nodes)
            return
        # Mostly one node has told of another load, and all others are the very same objects.
        nodes = tuple([old if old is new or old == new else new for old, new in zip(before, nodes, strict=True)])
        if all(old is new or differs_in_load_alone(old, new) for old, new in zip(before, nodes, strict=True)):
            self.layout.nodes = nodes
            return
        self._changes()
        if self.layout.renew(nodes, self.settings):
            self._look_again()
        else:
            self._change_machines(nodes)

    def _look_again(self) -> None:
        """What stands against nodes or cards has changed, and nothing else about them."""
        self.timeline.look_again()
        self.queue.reconfigure(self.layout, is_same_size=True)
        self.placements.epoch += 1

    def _settings_changed(self, event: events.SettingsChanged) -> None:
        self._changes()
        self.settings, self.extensions = event.settings, event.extensions
        self._rebuild()

    def _rebuild(self) -> None:
        """Rebuild all state from its own snapshot, under the present settings."""
        snapshot, queue = self.snapshot(max(self.now, 0.0), 1), self.queue
        self.runs, self.odd_runs, self.tasks, self._gone, self.fillers = {}, 0, Counter(), [], set()
        self._set_nodes(self.layout.nodes)
        self._fill(replace(snapshot, pending=()))
        self.queue.fill_from(queue)

    def _change_machines(self, nodes: tuple[NodeView, ...]) -> None:
        """Replace the nodes or their GPUs; pending jobs keep their place in the queue."""
        before, self.layout = self.layout, ClusterLayout(nodes, self.settings)
        layout = self.layout
        layout.wanted = before.wanted
        is_same_size = before.sizes == layout.sizes
        self.draft = ClusterState(layout)
        self.timeline = Timeline(self.draft)
        if not is_same_size:
            self.quotas = Quotas(self.settings, layout)
            self.fairshare.reconfigure(capacity_of(layout))
        self.ranking.reconfigure(layout, self.quotas, is_same_size=is_same_size)
        self._set_placements()
        self._set_rules()
        self.queue.reconfigure(layout, is_same_size=is_same_size)
        for job_id, run in list(self.runs.items()):
            self._put_again(job_id, run, is_counted=is_same_size)
        for job_id, allocations in list(self._absent.items()):
            if self.layout.booking_of(allocations) is not None:
                del self._absent[job_id]
                self._hold(allocations, self.now)

    def _put_again(self, job_id: int, run: ActiveRun, *, is_counted: bool) -> None:
        """Book a run again on the rebuilt machines."""
        booking = self.layout.booking_of(run.allocations)
        if booking is None:
            if is_counted:
                self._count(run, -1)
            if run.entity is not None:
                self.fairshare.end(run.entity, run.rate, self.now)
                self._recounted[run.entity.mark] = None
            del self.runs[job_id]
            self.fillers.discard(job_id)
            self._absent[job_id] = run.allocations
            return
        before = run.running
        run.running = RunningJob(before.job_id, before.start_at, before.end_at, booking)
        run.tell(run.allocations)
        self.draft.take(booking)
        self.timeline.add(run.running)
        if not is_counted and run.entity is not None:
            run.rate = run.charged_rate()
            self._recounted[run.entity.mark] = None
        if not is_counted and self.counts_quotas:
            self.quotas.add(run.terms, run.amount, is_filler=run.is_filler)
            if run.job_class is None and run.first.is_stopping and not run.is_filler:
                self.quotas.leave(run.terms.queue, run.amount)

    def _usage_charged(self, event: events.UsageCharged) -> None:
        self._changes(frees=False)
        row = event.usage
        self._usage[row.account, row.user] = row
        self._recounted[row.account, row.user] = None

    def usage_of(self, mark: tuple[str, str]) -> Usage | None:
        """Reported use of the ended runs of this account and user."""
        return self._usage.get(mark)

    def _windows_changed(self, event: events.WindowsChanged) -> None:
        if event.windows != self.windows:
            self._changes()
            self.windows = event.windows

    def _budgets_changed(self, event: events.BudgetsChanged) -> None:
        if event.budgets != self.budgets:
            self._changes()
            self.budgets = event.budgets
            self._set_gates()

    def _limits_changed(self, event: events.LimitsChanged) -> None:
        if event.limits != self.limits:
            self._changes()
            self.limits = event.limits
            self._set_gates()

    def _hold(self, allocations: tuple[Allocation, ...], now: float) -> None:
        """Add a job that was already running."""
        first = allocations[0]
        booking = self.layout.booking_of(allocations)
        if booking is None:
            self._absent[first.job_id] = allocations
            return
        limit_at = inf if first.expected_end_at is None else first.expected_end_at
        predicted_at = first.predicted_end_at
        running = RunningJob(first.job_id, first.start_at, end_of(first, now), booking)
        run = ActiveRun(self, running, limit_at)
        run.predicted_at, run.reported_at = predicted_at, first.reported_end_at
        run.is_suspended, run.is_filler = first.is_suspended, first.is_filler
        run.tell(allocations)
        self.runs[first.job_id] = run
        if run.is_filler:
            self.fillers.add(first.job_id)
        self.odd_runs += first.is_suspended or first.is_stopping
        self.draft.take(booking)
        self.timeline.add(running)
        self._watch(run, now)
        self._count(run, 1)
        if self.fairshare.counts_use:
            run.entity = self.fairshare.of(first.terms.account, first.terms.user)
            run.rate = run.charged_rate()
            self.fairshare.hold(run.entity, run.rate, first.start_at)
        run.count_wanted(1)
        self.placements.epoch += 1

    def _count(self, run: ActiveRun, sign: int) -> Resources:
        """Add a run's holdings to the quotas and other counts, or with `sign=-1` subtract them."""
        amount = run.amount
        if self.counts_quotas:
            count = self.quotas.add if sign > 0 else self.quotas.remove
            count(run.terms, amount, is_filler=run.is_filler)
            if run.job_class is None and run.first.is_stopping and not run.is_filler:
                self.quotas.leave(run.terms.queue, amount.times(sign))
        if self.ranking.tracks_held and not run.is_filler:
            self.ranking.hold(run.terms.user, amount, sign)
        self._count_task(run.array_id, sign)
        return amount

    def _count_task(self, array_id: int | None, sign: int) -> None:
        """Add a running task to those of its array, or with `sign=-1` subtract it."""
        if array_id is not None:
            self.tasks[array_id] += sign
            if not self.tasks[array_id]:
                del self.tasks[array_id]

    def _release(self, job_id: int, *, is_charged: bool) -> None:
        one = self.runs.pop(job_id)
        self.fillers.discard(job_id)
        running = one.running
        self.draft.give_back(running.booking)
        self.timeline.remove(running)
        if one.job_class is not None:
            self.queue.forget(one.job_class)
            if self.counts_quotas or self.ranking.tracks_held:
                self._count(one, -1)
            else:
                self._count_task(one.array_id, -1)
        else:
            first = one.first
            self.odd_runs -= first.is_suspended or first.is_stopping
            self._count(one, -1)
            one.count_wanted(-1)
        if one.entity is not None:
            if is_charged:
                self.fairshare.end(one.entity, one.rate, self.now)
                self._recounted[one.entity.mark] = None
            else:
                # Other users are compared without this run at once; its use is charged until the next plan.
                self.fairshare.leave(one.entity)
                self._gone.append((one.entity, one.rate))
        self.placements.epoch += 1

    # --- what a plan tries ------------------------------------------------------------------------

    def settle(self) -> None:
        """Undo the uncommitted part of the last plan."""
        if not (self._tentative or self._undo):
            return
        if self._tentative:
            self.is_stale = True
            self.version += 1
        while self._tentative:
            entry, run, state = self._tentative.pop()
            running, job_class = run.running, entry[2]
            del self.runs[running.job_id]
            self.fillers.discard(running.job_id)
            self.draft.give_back(running.booking)
            self.timeline.remove(running)
            if self.counts_quotas or self.ranking.tracks_held or job_class.key.throttle is not None:
                self._count(run, -1)
            if state is not None and run.entity is not None:
                if run.entity in self._confirmed:
                    # Restoring the state before this start would lose the confirmed ones.
                    self.fairshare.end(run.entity, run.rate, self.now)
                else:
                    self.fairshare.restore(run.entity, state)
            if run.job_class is not None and run.job_class is not job_class:
                self.queue.exchange(run.job_class, job_class)
            self.queue.put_back(entry)
            self.placements.epoch += 1
        self._close()

    def undo_by(self, step: Callable[[], None]) -> None:
        """Have a step undo a further change of the last plan."""
        self._undo.append(step)

    def carry_out(self, starts: Iterable[Start], reservations: Iterable[TimelineReservation]) -> Sequence[Begun]:
        """Keep the starts of the last plan, which are returned, and the fences of its reservations."""
        begun, self._tentative = self._tentative, []
        for start in starts if self.fences else ():
            self._forget_fence(start.job_id)
        for one in reservations:
            if one.fence_at is not None:
                self.fences.setdefault(one.job_id, one.fence_at)
        if self._undo:
            self._close()
        return begun

    def _close(self) -> None:
        self._confirmed.clear()
        if self._undo:
            self.is_stale = True
            self.version += 1
            while self._undo:
                self._undo.pop()()

    def runs_before(self, cycle: Cycle) -> Iterator[tuple[int, ActiveRun]]:
        """Jobs that ran when the cycle began, by id."""
        started = {start.job_id for start in cycle.starts}
        return ((job_id, one) for job_id, one in sorted(self.runs.items()) if job_id not in started)

    # --- time and starts --------------------------------------------------------------------------

    def book(
        self, entry: Entry, booking: AllocationUnits, start: Start, now: float, variant: JobClass | None = None
    ) -> RunningJob:
        """Start a job that a cycle has taken out of the queue. Args: variant: of its class; None: the class itself."""
        job_class = entry[2]
        if variant is not None and variant is not job_class:
            self.queue.exchange(job_class, variant)
            job_class = variant
        self.draft.take(booking)
        planned_s = job_class.planned_s
        if job_class.slowness != 1.0 or self.layout.has_speeds:
            found_s = job_class.key.planned_on(self.layout.slowness(booking))
            planned_s = inf if found_s is None else found_s
        running = RunningJob(entry[1], now, now + planned_s, booking)
        self.timeline.add(running)
        run = self.runs[entry[1]] = ActiveRun(self, running, now + job_class.limit_s)
        run.job_class, run.placement, run.is_filler = job_class, start.placement, start.is_filler
        if run.is_filler:
            self.fillers.add(entry[1])
        if running.end_at < run.limit_at:
            run.predicted_at = running.end_at
        if self.counts_quotas or self.ranking.tracks_held or job_class.key.throttle is not None:
            self._count(run, 1)
        state: State | None = None
        if self.fairshare.counts_use:
            entity = run.entity = job_class.entity
            state = self.fairshare.state_of(entity)
            run.rate = self._rate(job_class, run)
            self.fairshare.begin(entity, run.rate, now)
        self._watch(run, now)
        self._tentative.append((entry, run, state))
        self.placements.epoch += 1
        return running

    def _rate(self, job_class: JobClass, run: ActiveRun) -> Amounts:
        """Rate at which its user is charged, per second; with identical cards, the same for all placements."""
        rate = NO_AMOUNTS if run.is_filler else job_class.rate
        if rate is None:
            rate = run.charged_rate()
            if self._is_alike and not run.running.booking.is_exclusive:
                job_class.rate = rate
        return rate

    @property
    def is_idle(self) -> bool:
        return not (len(self.queue) or self._tentative or any(one.is_suspended for one in self.runs.values()))

    def move_to(self, now: float) -> None:
        """Account for the time that has passed before ranks are read."""
        if self._tentative or self._undo:
            self.settle()
        # Replace predictions that have passed: they say nothing about the remaining time.
        late, ends = 0, self.timeline.ends
        while late < len(ends) and ends[late][0] <= now:
            end_at, _, job_id, _ = ends[late]
            one = self.runs[job_id]
            if end_at >= one.limit_at:
                late += 1
            else:
                self._foresee(one, now)
        if self._outlived:
            self._take_outlived(now)
        queue = self.queue
        if self._recounted:
            self._recount(ranked_at(now, self.settings))
        if queue.rank_as_of(now, self._longest_run_s(now) if queue.has_patience else inf):
            self.is_stale = True
        if queue.forces_places:
            self.is_stale, queue.forces_places = True, False
            self.timeline.forget_places()
        if self._gone:
            for entity, rate in self._gone:
                # Only now, since use counts as of the last whole period.
                self.fairshare.charge(entity, rate, now)
            self._gone.clear()
        self.now = now

    def _longest_run_s(self, now: float) -> float:
        """The length of the longest run; once it has taken twice as long as predicted, that expected now."""
        longest_s = 0.0
        for end_at, start_at, job_id, _ in reversed(self.timeline.ends):
            one = self.runs.get(job_id)
            if one is not None and one.predicted_at is not None and now - start_at < 2 * (one.predicted_at - start_at):
                end_at = one.predicted_at
            elif one is not None and one.reported_at is not None:
                # Whoever reports an early end must not shorten the patience of others, nor of their own jobs.
                end_at = foreseen_end(start_at, one.predicted_at, one.limit_at, now)
            if end_at - start_at > longest_s:
                longest_s = end_at - start_at
                if longest_s >= self.ranking.long_run_s:
                    break
        return longest_s

    def _take_outlived(self, now: float) -> None:
        """Extend the planned ends of runs without a limit that have outlived their predictions."""
        heap = self._outlived
        while heap and heap[0][0] <= now:
            at, job_id = heappop(heap)
            one = self.runs.get(job_id)
            if one is not None and one.watched_at == at and one.limit_at == inf and one.predicted_at is not None:
                self._foresee(one, now)

    def _recount(self, at: float) -> None:
        """Recompute, as of this instant, the use of users whose charges or runs have changed."""
        if self.fairshare.counts_use:
            open_runs: dict[tuple[str, str], list[tuple[Amounts, float]]] = {mark: [] for mark in self._recounted}
            for one in self.runs.values():
                if one.entity is not None and (runs := open_runs.get(one.entity.mark)) is not None:
                    runs.append((one.rate, one.running.start_at))
            for mark, runs in open_runs.items():
                self.fairshare.recount(mark, self._usage.get(mark), runs, at)
        self._recounted.clear()


_APPLY: dict[type, Callable[[PlannerState, Any], None]] = {
    events.JobQueued: PlannerState._job_queued,
    events.TasksQueued: PlannerState._tasks_queued,
    events.JobFenced: PlannerState._job_fenced,
    events.JobLeft: PlannerState._job_left,
    events.RunHolds: PlannerState._run_started,
    events.RunChanged: PlannerState._run_changed,
    events.RunReleased: PlannerState._run_ended,
    events.NodesChanged: PlannerState._nodes_changed,
    events.UsageCharged: PlannerState._usage_charged,
    events.WindowsChanged: PlannerState._windows_changed,
    events.BudgetsChanged: PlannerState._budgets_changed,
    events.LimitsChanged: PlannerState._limits_changed,
    events.SettingsChanged: PlannerState._settings_changed,
}
