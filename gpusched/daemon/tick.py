"""One tick of the daemon, in a fixed order of named steps.

    collect    engine events and client commands
    apply      events through the lifecycle, then commands, then time and dependencies
    decide     the policy's plan; every start becomes a recorded intent
    commit     all of it in one durable transaction
    reply      clients get their answers
    reconcile  the engine is brought in line with the committed rows: what to start, stop, suspend and forget,
               see `reconcile`; likewise the watch on GPUs of ended runs
    signal     signals and notes go to their runs, at most once

A crash between any two steps loses nothing: before `commit` nothing was promised, and after it the table and
the engine's spool together say what is left to do. An exception before the commit drops the tick, and the
memory is reloaded. An exception after it affects only the step that raised; the next tick brings the engine in
line. `step` is called with each name before the step, so that a test can kill the process exactly there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import getLogger
from math import inf
from time import perf_counter
from typing import Any

from gpusched.config import Loaded
from gpusched.daemon.budgets import BudgetAlerts, BudgetLedger
from gpusched.daemon.commit import AuditEvent, SettingEffect, TickTransaction
from gpusched.daemon.indexes import FRONT
from gpusched.daemon.launch.containers import ContainerHost
from gpusched.daemon.launch.environment import checkpoint_folder, past_environment
from gpusched.daemon.launch.handed_over import handover_ticket
from gpusched.daemon.launch.limits import with_limit
from gpusched.daemon.launch.ticket import PayloadCache, make_ticket
from gpusched.daemon.leanings import with_leanings
from gpusched.daemon.leases import Leases, lease_of
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.planner_sync import CalendarWindows
from gpusched.daemon.reasons import waiting_codes, waiting_reason
from gpusched.daemon.reload import reread
from gpusched.daemon.state import DaemonState, StateSettings
from gpusched.daemon.verbs import table_setting
from gpusched.daemon.verbs.images import PullWatch
from gpusched.daemon.watch.burst import carry_out as carry_out_bursts
from gpusched.daemon.watch.estimates import Estimates
from gpusched.daemon.watch.gpus import GpuFaults
from gpusched.daemon.watch.history import History
from gpusched.daemon.watch.idle import IdleWatch
from gpusched.daemon.watch.mig import MigWatch
from gpusched.daemon.watch.mps import MpsRuns
from gpusched.daemon.watch.outages import OutageWatch
from gpusched.daemon.watch.overuse import IntruderWatch, OveruseWatch
from gpusched.daemon.watch.power_caps import PowerCaps, power_cap
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.spool import attach_path
from gpusched.errors import BrokenInvariant, Forbidden, GpuschedError, NotReady, Refused
from gpusched.lifecycle import transitions
from gpusched.lifecycle.master_ports import choose_port, needs_port, taken_ports
from gpusched.lifecycle.output_paths import output_paths
from gpusched.model.cluster import DECLARED_DOWN, GpuReading, HostSample, NodeView
from gpusched.model.commands import Caller, Command, Reload
from gpusched.model.execution import EngineEvent, Ticket
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Run, run_id, split_run_id
from gpusched.model.mig import MigOrder
from gpusched.model.presets import under_preset
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, LimitInForce, Plan, Reason, Snapshot
from gpusched.model.spec import SLURM_ENGINE
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.static_gpus import CUDA_VARIABLE
from gpusched.model.table_settings import document_of_table, with_members
from gpusched.model.tariff import Tariff
from gpusched.model.units import format_duration
from gpusched.model.value import replace
from gpusched.plugins import Plugins
from gpusched.ports import Changes, Clock, Engine, Handover, JobFilter, Store
from gpusched.predict.efficiency import EndReport, end_report
from gpusched.predict.limits import LimitAdvice
from gpusched.scheduler.burst import Burst
from gpusched.scheduler.cheap import postponed
from gpusched.scheduler.cluster_state import GpuSpeeds
from gpusched.scheduler.forecast import StartRange
from gpusched.scheduler.isolation import describe
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.priority import Ranking, ranked_at

from . import verbs
from .alerts import AlertOutbox
from .failures import StepFailures
from .meters import Meters
from .planner_sync import PlannerSync, differences, table_differences
from .reconcile import CannotStart, Reconciler
from .run_events import RunEvents

log = getLogger("gpusched.daemon")


Reply = Callable[[dict[str, Any] | GpuschedError], None]
Asked = tuple[Command, Reply]
Answer = tuple[Reply, dict[str, Any] | GpuschedError]

_PLANS_PER_TICK = 64
_HANDED_OVER_PER_TICK = 200
_READ_WITHIN_S = 0.05
"""Longest time that freed CPUs and memory of an ended run wait to be planned together with its GPUs."""
_PRICES_S = 60.0
"""Time between looks whether jobs that wait for cheap energy should go on waiting."""
_PRICED_AT_ONCE = 500
_NO_PLAN = Plan()


def _no_record(settings: Settings, caller: Caller, what: str, table: Mapping[str, Any]) -> None:
    """Where changes of settings are not recorded."""


class Scheduler:
    """The daemon's core: the state, the ports, and the tick that advances them."""

    def __init__(
        self,
        *,
        store: Store,
        engine: Engine,
        head: ClusterNode,
        settings: Settings,
        clock: Clock,
        step: Callable[[str], None] = lambda name: None,
        read_settings: Callable[[], Loaded] | None = None,
        plugins: Plugins | None = None,
        check_every: int = 0,
    ) -> None:
        self.store = store
        self.engine = engine
        self.cluster = ClusterNodes(head)
        self.settings = settings
        self.plugins = Plugins() if plugins is None else plugins
        self.extensions = self.plugins.extensions()
        self.plan = _NO_PLAN
        self.ticks = 0
        self.recent_tick_s: deque[float] = deque(maxlen=512)
        self.meters = Meters()
        self.failures = StepFailures(clock.now)
        self.trouble: str | None = None
        """Why the last commit failed; None when the table is writable."""
        self._is_table_lost = False
        self.listeners: list[Callable[[Mapping[int, Job]], None]] = []
        """Called after a commit with all jobs whose row, or a row of whose runs, changed, by id."""
        self.history = History(store, self._slowness)
        self.estimates = Estimates(store)
        self.idle = IdleWatch()
        self.overuse = OveruseWatch()
        self.intruders = IntruderWatch()
        self.gpu_faults = GpuFaults()
        self.mig = MigWatch()
        self.outages = OutageWatch()
        self.leases = Leases(self.cluster, self.outages)
        self.record_audit: Callable[[AuditEvent], None] = lambda event: None
        """Called after a commit with each of its audit events."""
        self.record_effect: Callable[[SettingEffect], None] = lambda effect: None
        """Called after a commit with each of its changes of the machine that an admin set."""
        self.record_settings: Callable[[Settings, Caller, str, Mapping[str, Any]], None] = _no_record
        """Called after a change with the settings of the file, who made it, with which command, and those of the table.
        """
        self.filed_settings = settings
        """Those of the file that are in force: `settings` without what coordinators said about members."""
        self._written = settings
        """Settings of the file, those included that apply after a restart."""
        self.on_release: Callable[[], None] | None = None
        """Requests a GPU reading; called when runs have ended whose GPUs a new reading can show clean."""
        self.settings_listeners: list[Callable[[Settings], None]] = []
        """Called with the new settings after a reload."""
        self.reading_listeners: list[Callable[[ClusterNode, GpuReading], None]] = []
        """Called with each reading that has been taken in, and its node."""
        self.tariff: Tariff | None = None
        """What energy costs and emits over time."""
        self.tariff_problem: GpuschedError | None = None
        """Why the tariff file cannot be used."""
        self.settings_problem: Callable[[], tuple[str, str] | None] = lambda: None
        """Why the settings in force differ from the config file, and what to do; None when they do not."""
        self.handover: Handover | None = None
        self.containers: ContainerHost | None = None
        self.to_burst: tuple[Burst, ...] = ()
        """Jobs that the last look at expected starts found, until the next tick."""
        """What jobs are handed over to; None where no other scheduler is named."""
        self.commands_problem: str | None = None
        """Why jobs cannot use Slurm's commands; None when they can."""
        self._clock = clock
        self._step = step
        self._read_settings = read_settings
        self._queue: deque[tuple[Command | Reload, Reply]] = deque()
        self._backlog: list[EngineEvent] = []
        self._culprit: object = None
        """The event, or the reply of the command, that broke off the tick."""
        self._is_behind = False
        """The memory may differ from the table, and could not yet be reloaded."""
        self._planner = PlannerSync()
        self._pulls = PullWatch()
        self.power_caps = PowerCaps(self.cluster)
        self.mps = MpsRuns(self.cluster)
        self._targets_due = True
        """What GPUs are to be like may have changed."""
        self._reconciler = Reconciler(self._ticket, self.failures, self._must_wait)
        self._carried = Changes()
        self._payloads = PayloadCache(store)
        self.awaits_reading = False
        """A job will start on GPUs once a new reading confirms that they are free."""
        self._windows = CalendarWindows()
        self._budgets = BudgetLedger(self._cards)
        self._budget_alerts = BudgetAlerts()
        self._priced_by: Tariff | None = None
        self._priced_at = float("-inf")
        self.is_going_down = False
        """The machine is shutting down: nothing is started any more."""
        self._plan_by: float | None = None
        """Latest instant to plan ends of runs that await a reading of clean GPUs."""
        self._check_every = check_every
        """Ticks between comparisons of the planner with the table; 0: never."""
        self._recorded_at: float | None = None
        """Instant of the last tick; None unless all of it was recorded."""
        self._look_again = True
        """Set when something other than a job has changed since the last plan: readings, time, the table."""
        self.world = DaemonState.load(store, clock.now(), self.state_settings())
        self._take_in_members()
        self.alerts = AlertOutbox(store, self.world, settings)
        self.alerts.end_report = self.end_report
        self._update_tracker()
        judges = (self.overuse.judge, self.intruders.judge, self.gpu_faults.judge, self.mps.judge)
        self._run_events = RunEvents(self.cluster, self.history, self.gpu_faults, judges, self.failures)
        self._reconcile_releases(clock.now())
        self.meters.gpus.hold(clock.now(), self.world.holds.values())

    # --- what the edges call --------------------------------------------------------------------

    def submit(self, command: Command | Reload, reply: Reply) -> None:
        """Queue a client's command for the next tick; `reply` is called after its commit."""
        self._queue.append((command, reply))

    @property
    def head(self) -> ClusterNode:
        """The node that the daemon runs on."""
        return self.cluster.head

    @property
    def has_work(self) -> bool:
        """Whether a job is active or a MIG layout is to be made, so that polling must be prompt."""
        return bool(self.world.jobs) or any(one.wanted is not None for one in self.world.mig_layouts.values())

    def mig_orders(self, node: str) -> tuple[MigOrder, ...]:
        """MIG layouts that a node is to make before its next reading."""
        if not self.is_quiet or node not in (one.node for one in self.world.mig_layouts.values()):
            return ()
        known = self.cluster.get(node)
        return () if known is None else self.mig.orders(known, self.world)

    @property
    def awaits_release(self) -> bool:
        """Whether ended runs await a reading that shows their GPUs clean."""
        return bool(self.world.releasing)

    @property
    def has_backlog(self) -> bool:
        """Whether anything needs a retry: events or commands of a failed tick, or the engine."""
        return bool(self._backlog or self._queue or self._is_behind or self._reconciler.is_behind)

    @property
    def is_quiet(self) -> bool:
        """Whether the memory matches the table, and nothing awaits a tick."""
        return not (self.has_backlog or self._carried or self.trouble)

    def observe_gpus(
        self, reading: GpuReading, node: ClusterNode | None = None, owners: Mapping[int, str] | None = None
    ) -> None:
        """Take in a reading of the GPUs of a node, by default of the daemon's own.

        Args: owners: runs of the processes in the reading, by pid; None: ask the engine.
        """
        node = self.head if node is None else node
        reading = node.tracker.identified(reading)
        pids = {process.pid for gpu in reading.gpus for process in gpu.processes or () if process.pid is not None}
        world, name = self.world, node.name
        # Only what runs here: with many nodes, looking at everything for each of them would take most of the time.
        here = {handle: run for handle, run in world.open_runs.items() if run.node == name or name in run.nodes}
        jobs = {handle: world.name_of(run.job_id) for handle, run in here.items()}
        here |= {handle: run for handle, run in world.releasing.items() if run.node == name or name in run.nodes}
        booked: dict[str, list[tuple[str, GpuShare]]] = {}
        for handle, run in here.items():
            for share in run.gpus:
                booked.setdefault(share.uuid, []).append((handle, share))
        if owners is None:
            owners = self.engine.owners(pids) if pids else {}
        node.tracker.observe(reading, owners, booked, jobs)
        # Only now: a reading that could not be processed must not show any GPU as free.
        node.reading, node.read_at = reading, self.now()
        self.awaits_reading = False
        self._look_again = True
        samples = self.cluster.samples()
        self.idle.observe(node.name, reading.at, samples, self.world, self.settings)
        self.overuse.observe(reading, node.tracker, self.world, self.settings)
        self.intruders.observe(reading, node.tracker, self.world, self.settings)
        self.gpu_faults.observe(node.name, reading, self.cluster.lost())
        for news in node.gpu_watch.new_faults(node.tracker, reading, node.name):
            self.alerts.alert_admin(news, self.now(), self.settings)
        for listener in self.reading_listeners:
            self.failures.run("time series", listener, node, reading)

    def end_report(self, job: Job, runs: Sequence[Run]) -> EndReport | None:
        """What an ended job used of what it asked for; None if it never ran here. Args: runs: all of them."""
        is_learned = self.history.is_loaded
        limit = self.history.limit_advice(job.user, job.spec) if is_learned else None
        return end_report(job, runs, limit, self.history.vram_seen(job) if is_learned else None)

    def use_tariff(self, tariff: Tariff, problem: GpuschedError | None) -> None:
        """Charge energy by these prices from now on. Args: problem: why they are not those of the file."""
        self.tariff, self.tariff_problem = tariff, problem
        self.cluster.set_tariff(tariff)
        self._look_again = True

    def look_again(self) -> None:
        """Plan in the next tick even if no job changes."""
        self._look_again = True

    def request_gpu_targets(self) -> None:
        """Have the cards of all nodes made as the recorded runs want them, and all others set back."""
        caps = self.power_caps.wanted(self.world, self.settings)
        mps = self.mps.wanted(self.world, self.settings)
        for node in self.cluster:
            node.want_gpus(caps.get(node.name, {}), mps.get(node.name, {}), self.now())

    def _must_wait(self, run: Run) -> bool:
        """Whether a recorded run must not start before its cards are as it wants them."""
        return self.power_caps.is_awaited(run) or self.mps.is_awaited(run, self.settings)

    def node_joined(self) -> None:
        """Take a new node of `cluster` into everything that depends on the nodes."""
        self._targets_due = True
        self._update_tracker()
        if self.settings.gpu.speed:
            # The models of its GPUs say how fast the runs there have been.
            self.history.forget()
        self._is_behind |= not self.failures.run("settings", self._adopt_settings)
        self._look_again = True

    def observe_host(self, sample: HostSample, trouble: str | None = None) -> None:
        """Take in the state of the daemon's own node. Args: trouble: why nothing can be started there."""
        self.head.host = sample
        self.head.be_in_trouble(trouble)
        self._look_again = True

    def observe_checkpoints(self) -> None:
        """Note which runs have saved their work since the last look."""
        now = self._clock.now()
        # Users may set any file time; clip those in the future.
        self.world.note_checkpoints({run: min(at, now) for run, at in self.engine.checkpoints().items()})

    def go_down(self, grace_s: float) -> None:
        """Start nothing any more, and stop all runs of this machine as in a shutdown of it.

        Args: grace_s: upper limit on the grace of any run.
        """
        self.is_going_down = self._look_again = True
        self._reconciler.shutdown = self.head.name, grace_s
        self._reconciler.look_at_all(self.world)
        self.failures.run("reconcile", self._reconcile)

    @property
    def runs_here(self) -> int:
        """Open runs that have a part on the daemon's own machine."""
        return sum(self.head.name in run.nodes for run in self.world.open_runs.values())

    def stay_up(self) -> None:
        """Resume normal operation after a shutdown was called off."""
        self.is_going_down, self._look_again = False, True
        self._reconciler.shutdown = None

    def files_of(self, run: str) -> tuple[str, ...]:
        """Files that show activity of an open run: its logs, its checkpoint folder, and the attach socket, whose
        timestamp follows typed input.
        """
        found = self.world.open_runs.get(run)
        if found is None:
            return ()
        job = self.world.jobs[found.job_id]
        folder = checkpoint_folder(job, self.head.site, self.settings)
        has_socket = job.spec.interactive is not None and self.head.site.spool
        typed = attach_path(self.head.site.spool, run) if has_socket else None
        paths = (found.stdout_path, found.stderr_path, folder, typed)
        return tuple(path for path in paths if path is not None)

    def _nodes_under(self, settings: Settings) -> tuple[NodeView, ...]:
        """The nodes with other settings; none while GPUs cannot be read."""
        if any(node.reading is None or node.reading.error is not None for node in self.cluster):
            return ()
        return self.nodes(self.now(), settings)

    def nodes(self, now: float, settings: Settings | None = None) -> tuple[NodeView, ...]:
        """The nodes as the policy sees them now; with other `settings`, as it would see them."""
        why_none = f"node {self.head.name} is being shut down" if self.is_going_down else None
        return self.cluster.views(settings or self.settings, now, self.world.drains, why_none)

    def _nodes_of_turn(self, now: float) -> tuple[NodeView, ...]:
        """The nodes with the drains and clearances of this tick so far; a reload discards uncommitted ones."""
        self._update_tracker()
        return self.nodes(now)

    def _update_tracker(self) -> None:
        """Pass drains and clearances on. Called where they change, not in getters that clients may call."""
        self.cluster.set_drains(dict(self.world.drains))
        wanted = {uuid: one.wanted for uuid, one in self.world.mig_layouts.items() if one.wanted is not None}
        self.cluster.set_layouts(wanted)
        self.cluster.set_clearances(dict(self.world.clearances))

    def _outline(self, now: float, nodes: tuple[NodeView, ...] | None = None) -> Snapshot:
        """The parts of the policy's input that the memory does not keep: nodes and calendar windows."""
        nodes = self.nodes(now) if nodes is None else nodes
        windows = self._windows.at(self.world.calendar, now)
        return Snapshot(
            now,
            nodes,
            windows=windows,
            budgets=self.budgets(now),
            limits=self.user_limits(),
            name_of=self.world.name_of,
        )

    def user_limits(self) -> tuple[LimitInForce, ...]:
        """Limits of single users, of the config file and of the job table."""
        return table_setting.limits_in_force(self.settings, self.world.table_settings)

    def budgets(self, now: float) -> tuple[Budget, ...]:
        """GPU-hour budgets by account, with what was used and is booked."""
        return self._budgets.at(now, self.settings, self.world, self.store)

    def snapshot(self, now: float, nodes: tuple[NodeView, ...] | None = None) -> Snapshot:
        """The policy's current input; `nodes` if already known for this instant."""
        return Snapshot(
            now=now,
            nodes=self.nodes(now) if nodes is None else nodes,
            allocations=tuple(sorted(self.world.holds.values(), key=lambda held: held.job_id)),
            pending=self.world.pending_views(),
            usage=tuple(self.world.usage[mark] for mark in sorted(self.world.usage)),
            kept=tuple(sorted(self.world.kept.items())),
            windows=self._windows.at(self.world.calendar, now),
            budgets=self.budgets(now),
            limits=self.user_limits(),
            name_of=self.world.name_of,
        )

    def _cards(self) -> dict[str, tuple[str, int | None]]:
        """Model and VRAM in MiB of each card, by UUID."""
        readings = (node.reading for node in self.cluster if node.reading is not None)
        return {gpu.uuid: (gpu.name, gpu.vram_total_mib) for one in readings for gpu in one.gpus}

    def next_due(self) -> float | None:
        """Next change by time alone: begin time, backoff, deadline, reservation, timer of an alert."""
        dues = (
            self.world.next_due(),
            self._windows.edge_at,
            self._budgets.edge_at,
            self._budget_alerts.next_due(self.settings, self.world),
            table_setting.next_end(self.world.table_settings),
            self.alerts.next_due(),
            self._plan_by,
        )
        return min((at for at in dues if at is not None), default=None)

    def query_turn(self) -> TickTransaction:
        """A transaction for questions, which is never committed."""
        now = self.now()
        turn = TickTransaction(self.world, self.store, self.settings, lambda: self.nodes(now), now, self.advise_limit)
        turn.handover = self.handover
        turn.containers = self.containers
        turn.tariff = self.tariff
        return turn

    def record_estimates(self, ranges: Mapping[int, StartRange], made_at: float) -> None:
        """Keep the first estimates of jobs that are still pending, to be recorded with the next commit."""
        jobs = self.world.jobs
        waiting = {
            job_id: found
            for job_id, found in ranges.items()
            if job_id in jobs and jobs[job_id].state is JobState.PENDING and not jobs[job_id].run
        }
        self._carried.estimates.update(self.estimates.add(waiting, made_at))

    @property
    def node_name(self) -> str:
        return self.head.name

    def name_of_run(self, handle: str) -> str:
        """User-visible id of the job of a run, by the run's handle."""
        return self.world.name_of(split_run_id(handle)[0])

    def planner(self) -> Planner:
        """The planner, updated to the current memory and advanced to this instant."""
        now = self.now()
        planner = self._planner.update(self.world, self._outline(now), self.settings, self.extensions, self.snapshot)
        planner.move_to(now)
        return planner

    def check_planner(self, most_jobs: float = inf) -> list[str]:
        """Compare planner, memory and job table, and repair differences. Returns a sentence for each.

        Args: most_jobs: with more active jobs the table is not read, and only planner and memory are compared.

        Raises: NotReady while the table can be neither read nor written.
        """
        if self.trouble or self._is_behind:
            raise NotReady(self.trouble or "the job table could not be read again yet", "see: gpusched daemon status")
        now = self.now()
        found = differences(self.planner().snapshot(now, FRONT), self.snapshot(now))
        if found:
            self._planner.forget()
        self.flush()
        recorded_at = self._recorded_at
        if recorded_at is not None and len(self.world.jobs) <= most_jobs:
            table = DaemonState.load(self.store, recorded_at, self.state_settings())
            table.settle(recorded_at)
            if lost := table_differences(self.world, table):
                found += lost
                self.failures.run("table", self.reload)
        if found:
            self._look_again = True
            error = BrokenInvariant(f"its state differed from the job table and was rebuilt: {'; '.join(found)}")
            self.failures.note("planner", error)
        else:
            self.failures.recovered("planner")
        return found

    def ranking(self) -> Ranking:
        """The current ranking of pending jobs."""
        return self.planner().ranking

    def in_queue_order(self, jobs: Iterable[Job]) -> list[Job]:
        """Running jobs by id, then eligible ones in the order of the next tick, then those that cannot start yet."""
        queue = self.planner().queue

        def place(job: Job) -> tuple[Any, ...]:
            if job.state is not JobState.PENDING:
                return 3 if job.state.is_final else 0, job.id
            key = self.world.class_of(job.id)
            if key is None:
                return 2, job.id
            return 1, queue.rank(queue.class_of_key(key), job.queued_at, job.id)

        return sorted(jobs, key=place)

    def now(self) -> float:
        return self._clock.now()

    # --- the tick -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run one tick. A full or broken disk raises nothing: clients get an error, and the tick is retried."""
        began, now = perf_counter(), self._clock.now()
        failure: Exception | None = None
        tx: TickTransaction | None = None
        try:
            tx, answers = self._record(now)
        except NotReady as error:
            if self.trouble != error.message:
                # Log it once, not with every retry.
                log.error("cannot record: %s; %s", error.message, error.hint)
            self.trouble = error.message
        except Exception as error:
            failure = error
        else:
            # Everything is recorded now: an exception affects only the step that raised.
            self._enter("reply")
            self._answer(tx, answers)
            self._notify_listeners(tx)
        self._enter("reconcile")
        if tx is not None and (tx.changes.runs or tx.changes.jobs):
            self._targets_due = True
        if self._targets_due and not self._is_behind:
            # Before runs start: what they wait for is judged by it.
            self._targets_due = not self.failures.run("GPU targets", self.request_gpu_targets)
        self.failures.run("reconcile", self._reconcile)
        if not self._is_behind:
            self._reconcile_releases(now)
        self.failures.run("lost nodes", self._give_up_runs)
        self._enter("signal")
        for handle, order in tx.signals if tx is not None else ():
            self.failures.run("signal", self.engine.order, handle, order)
        if failure is not None:
            raise failure
        self.ticks += 1
        self._recorded_at = None if tx is None else now
        if self._check_every and self.ticks % self._check_every == 0 and not (self.trouble or self._is_behind):
            self.failures.run("planner check", self.check_planner)
        self.recent_tick_s.append(perf_counter() - began)
        self.meters.ticked(self.recent_tick_s[-1], now)

    def _enter(self, step: str) -> None:
        """Call the hook before a step that follows the commit; an exception there does not stop later steps."""
        self.failures.run(step, self._step, step)

    def _record(self, now: float) -> tuple[TickTransaction, list[Answer]]:
        """Run everything up to the commit. If it raises, nothing was recorded and the memory matches the table."""
        events: list[EngineEvent] = []
        queue: list[Asked] = []
        self._culprit = None
        self._need_table()
        try:
            if self._is_behind:
                self.reload()
            self._step("collect")
            self.failures.run("engine events", self._receive_events)
            events, self._backlog = self._backlog, []
            queue = self._take_commands()
            tx = TickTransaction(
                self.world,
                self.store,
                self.settings,
                lambda: self._nodes_of_turn(now),
                now,
                self.advise_limit,
                self.has_read,
            )
            tx.handover = self.handover
            tx.containers = self.containers
            tx.tariff = self.tariff
            tx.samples = self.cluster.samples()
            tx.changes, self._carried = self._carried, Changes()
            answers = self._prepare(tx, events, queue)
            self._commit(tx, answers)
            self._run_events.recorded()
            self.power_caps.recorded()
        except NotReady as error:
            self._give_up(events, queue, error)
            raise
        except Exception:
            hint = "see its log, and with gq what is recorded"
            self._give_up(events, queue, BrokenInvariant("the daemon hit an internal error", hint))
            raise
        return tx, answers

    def advise_limit(self, user: str, spec: JobSpec) -> LimitAdvice | None:
        """The time limit that similar jobs of a user keep to; None when too few have ended."""
        self.history.load()
        return self.history.limit_advice(user, spec)

    def has_read(self, user: str, data: str) -> bool:
        """Whether a job of this user near this data set has completed lately."""
        self.history.load()
        return self.history.has_read(user, data)

    def _need_table(self) -> None:
        """Accept and start nothing while the table is lost. Raises: NotReady.

        The memory stays as it is, since there is nothing to reload it from, and events are kept until the table
        is back. Runs continue; their ends are in the spool too.
        """
        lost = self.store.lost()
        if lost is None:
            if self._is_table_lost:
                log.warning("the job table is back; recording resumes")
                self._is_table_lost, self.trouble, self._look_again = False, None, True
            return
        self._is_table_lost = True
        self.meters.tick_failures += 1
        self.failures.run("engine events", self._receive_events)
        for _, reply in self._take_commands():
            self.failures.run("reply", reply, lost)
        raise lost

    def _receive_events(self) -> None:
        news = self.engine.events()
        self._backlog += [self._reconciler.judge(event) for event in news]
        self.meters.received(news)

    def _reconcile(self) -> None:
        # Only committed rows count, and a memory that could not be reloaded may be ahead of them.
        if not self._is_behind:
            self._reconciler.carry_out(self.engine, self.world, self.settings, self._clock.now())

    def _give_up_runs(self) -> None:
        """Have the engine give up the runs on nodes that were declared down, and those whose leases have ended on nodes
        that do not answer. Derived from the table, at every tick.
        """
        engine = self.engine
        if self._is_behind or not isinstance(engine, ClusterEngine):
            return
        self.leases.give_up(self.world, engine, self.now())
        for node, message in self.world.drains.items():
            drainer = self.world.drainers.get(node)
            if drainer is None or not message.startswith(DECLARED_DOWN):
                continue
            detail = f"{drainer.user} declared node {node} down: {message.removeprefix(DECLARED_DOWN)}"
            for handle, run in self.world.open_runs.items():
                if node in run.nodes and run.intent_at <= drainer.at:
                    engine.give_up(node, handle, detail, self.now())

    def _reconcile_releases(self, now: float) -> None:
        """Have the tracker watch the GPUs of ended runs, according to the committed rows."""
        self.failures.run("releases", self.cluster.reconcile_releases, self.world.releasing, now)

    def _node_shut_down(self, event: EngineEvent) -> str | None:
        """The node on which a run of its present boot was stopped because the machine is shutting down."""
        why = getattr(event, "why", None) or getattr(event, "stopped_by", None)
        run = self.world.open_runs.get(event.run)
        if why != "shutdown" or run is None:
            return None
        # Of a gang, only the end says where it was.
        where = getattr(event, "failed_on", "") or (run.node if len(run.nodes) == 1 else "")
        part = next((part for part in run.on_each_node if part.node == where), None)
        node = None if part is None else self.cluster.get(where)
        return where if part is not None and node is not None and node.boot_id == part.boot_id else None

    def _take_commands(self) -> list[Asked]:
        """Take the commands of this tick; new settings come into force before it begins."""
        taken, self._queue = self._queue, deque()
        queue: list[Asked] = []
        for command, reply in taken:
            if isinstance(command, Reload):
                self.failures.run("reply", reply, self._reload_settings(command))
            else:
                queue.append((command, reply))
        return queue

    def _reload_settings(self, command: Reload) -> dict[str, Any] | GpuschedError:
        try:
            reloaded = reread(command, self.filed_settings, self._read_settings, self._nodes_under)
        except GpuschedError as error:
            if not isinstance(error, Forbidden):
                # Refusals go to the audit record, so that they cannot flood the log.
                log.error("the settings were not reloaded: %s", error.message)
            return error
        except Exception as error:
            self.failures.note("settings", error)
            return BrokenInvariant("the daemon hit an internal error; the settings are unchanged", "see its log")
        for key in table_setting.settled_members(self.filed_settings, reloaded.settings, self.world.table_settings):
            # The admin's word goes before a coordinator's.
            del self.world.table_settings[key]
            self._carried.table_settings[key] = None
        self.filed_settings = reloaded.settings
        self._take_in_members()
        self._look_again = True
        self.failures.run("audit", self.record_audit, AuditEvent(command.caller, "reload", "the settings"))
        self._written = reloaded.written or reloaded.settings
        table = document_of_table(self.world.table_settings)
        self.failures.run("settings log", self.record_settings, self._written, command.caller, command.what, table)
        if not self.failures.run("settings", self._adopt_settings):
            # Rebuild the state that depends on the old settings.
            self._is_behind = True
        for listener in self.settings_listeners:
            self.failures.run(_name_of(listener), listener, self.settings)
        log.info("the settings were reloaded; changed: %s", ", ".join(reloaded.changed) or "nothing")
        if reloaded.fixed:
            log.warning("these settings apply only after a restart: %s", ", ".join(reloaded.fixed))
        for note in reloaded.notes:
            log.warning("%s", note)
        return reloaded.answer()

    def use_preset(self, name: str) -> None:
        """Switch to another preset between two ticks; explicit settings of the administrator stay."""
        self.filed_settings = under_preset(self.filed_settings, name)
        self._take_in_members()
        self._look_again = True
        if not self.failures.run("settings", self._adopt_settings):
            self._is_behind = True

    def _take_in_members(self) -> None:
        """Put the settings in force together: those of the file, and what coordinators said about members."""
        self.settings = with_members(self.filed_settings, self.world.table_settings)

    def state_settings(self) -> StateSettings:
        """What the memory depends on: parts of the settings, what was learned, and the cores of the nodes."""
        history = self.history
        return StateSettings.of(
            self.settings, history.predict, history.guess, self._cpus(self.settings), history.leaning, self._slowness
        )

    def _slowness(self, run: Run) -> float:
        """How many times as long as at speed 1 a run takes on its GPUs; those not seen yet count as of speed 1."""
        if not self.settings.gpu.speed or not run.gpus:
            return 1.0
        return 1.0 / self.cluster.slowest(run.gpus, GpuSpeeds(self.settings.gpu.speed))

    def _cpus(self, settings: Settings) -> tuple[float, ...]:
        """Cores of each node that may be booked."""
        return tuple(node.cpus(settings) for node in self.cluster)

    def _adopt_settings(self) -> None:
        settings = self.settings
        self.world.reconfigure(self.state_settings())
        self.world.look_at_infeasible(self._clock.now())
        self.cluster.adopt(settings)
        self.world.touch_dependencies()
        self.alerts.reconfigure(self.world, settings)

    def _prepare(self, tx: TickTransaction, events: list[EngineEvent], queue: Iterable[Asked]) -> list[Answer]:
        """Process events, commands and time, then plan: collect everything to record, and the answers to clients."""
        self._step("apply")
        for name in filter(None, map(self._node_shut_down, events)):
            # init stops runs by itself before it stops this daemon, or a node's agent.
            self._look_again = True
            if name == self.head.name:
                self.is_going_down = True
            else:
                self.cluster[name].go_down()
        for event in events:
            self._culprit = event
            try:
                self._run_events.apply(tx, event)
            except BrokenInvariant as error:
                # One impossible event must not stop the others; a restart delivers it again.
                log.error("skipping event %s: %s", event, error.message)
        self._culprit = None
        if tx.releasing and self.on_release is not None:
            # Before the plan and the commit, so that the reading proceeds in parallel.
            self.failures.run("GPU request", self.on_release)
        self.gpu_faults.carry_out(tx)
        self.power_caps.carry_out(tx)
        self.mig.carry_out(tx, self.cluster)
        self._run_events.finish_releases(tx)
        self._run_events.stop_runs_of_lost_gpus(tx)
        # Before the commands, so that cancelling a pipeline includes the fallback of a step that has just failed.
        tx.make_fallbacks()
        answers: list[Answer] = []
        for command, reply in queue:
            self._culprit = reply
            answers.append((reply, self._apply_command(tx, command)))
        self._culprit = None
        is_new_period = self._budgets.edge_at is not None and self._budgets.edge_at <= tx.now
        if table_setting.end_limits(tx):
            self._look_again = True
        if self.world.promote(tx.now) or self._windows.have_moved(tx.now) or is_new_period:
            self._look_again = True
        if self.world.rethink(*self.history.take_changes(ranked_at(tx.now, self.settings))):
            self._look_again = True
        tx.settle_dependencies()
        tx.end_too_late()
        tx.make_fallbacks()
        self.idle.carry_out(tx, self.alerts.gpu_idle)
        self.overuse.carry_out(tx, self.alerts.vram_over)
        self.intruders.carry_out(tx, self.alerts.intrusion)
        self.outages.carry_out(
            tx, self.alerts.node_unreachable, lambda job, run: self.leases.decided_at(job, run, self.engine, tx.now)
        )
        self.outages.tell_troubles(tx, {node.name: node.trouble for node in self.cluster if node.trouble})
        self.alerts.fire(tx, self.plan)
        self.alerts.alert_users(self._budget_alerts.carry_out(tx, lambda: self.budgets(tx.now)))

        self._step("decide")
        self._wait_for_prices(tx)
        self._hand_over(tx)
        if self._must_plan(tx):
            has_starts = self._plan(tx)
            # A start releases jobs that waited only for it.
            while has_starts and tx.settle_dependencies():
                has_starts = self._plan(tx)
            self._look_again, self._plan_by = False, None
        self.alerts.collect(tx)
        return answers

    def _wait_for_prices(self, tx: TickTransaction) -> None:
        """Put off jobs whose cheapest window has passed or changed. Those that wait for theirs keep it."""
        is_new = self.tariff is not self._priced_by
        if not is_new and 0 <= tx.now - self._priced_at < _PRICES_S:
            return
        self._priced_by, self._priced_at = self.tariff, tx.now
        waiting = (job for job in self.world.jobs.values() if job.spec.start_when is not None)
        due = [job for job in waiting if is_new or job.eligible_at <= tx.now]
        for job in due[:_PRICED_AT_ONCE]:
            after = postponed(job, self.tariff, tx.now)
            if after is not None:
                text = f"put off by {format_duration(after.eligible_at - tx.now)}, when its energy is best"
                tx.put_job(after, JobEvent(job.id, tx.now, "note", text))

    def _hand_over(self, tx: TickTransaction) -> None:
        """Record the intent to hand eligible jobs over to the scheduler that they are for."""
        if self.handover is None or self.is_going_down or self.handover.why_not() is not None:
            return
        bursts, self.to_burst = self.to_burst, ()
        carry_out_bursts(bursts, tx)
        for job in self.world.to_hand_over(_HANDED_OVER_PER_TICK):
            paths = output_paths(job, job.run + 1, self.handover.node, self.settings.default.output)
            tx.put(*transitions.hand_over(job, SLURM_ENGINE, self.handover.node, tx.now, *paths))

    def _commit(self, tx: TickTransaction, answers: list[Answer]) -> None:
        if not (answers or tx.signals or tx.forgettable or self._must_record(tx.changes)):
            # A confirmed start needs no commit of its own: the spool records it too.
            self._carried = tx.changes
            return
        self._step("commit")
        if tx.changes:
            try:
                with self.meters.commit():
                    self.store.commit(tx.changes)
            except NotReady:
                raise
            except Exception as error:
                if not self._is_recorded(tx):
                    raise
                self.failures.note("commit", error)
            else:
                self.failures.recovered("commit")
            self.trouble = None
        self._reconciler.committed(tx.changes, tx.forgettable, self.world)
        if not tx.changes:
            return
        if tx.changes.drains or tx.changes.clearances or tx.changes.mig_layouts:
            self._update_tracker()
        if any(kind == "member" for kind, _ in tx.changes.table_settings):
            self._take_in_members()
            self._look_again = True
            if not self.failures.run("settings", self._adopt_settings):
                self._is_behind = True
        self.failures.run("meters", self._count, tx)
        self.take_in_alerts(tx.changes)

    def take_in_alerts(self, committed: Changes) -> None:
        """Update the outbox in memory after a commit."""
        if not self.failures.run("alerts", self.alerts.committed, committed, self.world, self.settings):
            self.failures.run("outbox", self.alerts.reload, self.store, self.world, self.settings)

    def _is_recorded(self, tx: TickTransaction) -> bool:
        """Whether a commit that raised succeeded all the same, since the table contains all its changes."""
        changes, store = tx.changes, self.store
        jobs = store.jobs(JobFilter(ids=frozenset(changes.jobs))) if changes.jobs else []
        runs = store.runs({run.job_id for run in changes.runs.values()})
        tables: tuple[tuple[Mapping[Any, object], Mapping[Any, object]], ...] = (
            (changes.jobs, {job.id: job for job in jobs}),
            (changes.runs, {run.id: run for run in runs}),
            (changes.drains, store.load_drains()),
            (changes.drainers, store.load_drainers()),
            (changes.mig_layouts, {one.uuid: one for one in store.load_mig_layouts()}),
            (changes.fences, store.load_fences()),
            (changes.kept_places, store.load_kept_places()),
            (changes.clearances, {clearance.uuid: clearance for clearance in store.load_clearances()}),
            (changes.usage, {(usage.account, usage.user): usage for usage in store.load_usage()}),
            (changes.reservations, {entry.name: entry for entry in store.load_reservations()}),
            (changes.table_settings, store.load_table_settings()),
            (changes.steps, {step.id: step for step in store.steps({step.job_id for step in changes.steps.values()})}),
            (changes.alerts, {alert.key: alert for alert in store.load_alerts()}),
        )
        found = [table.get(name) == row for wanted, table in tables for name, row in wanted.items()]
        return bool(found) and all(found)

    # --- behind the commit ----------------------------------------------------------------------

    def _answer(self, tx: TickTransaction, answers: Iterable[Answer]) -> None:
        for event in tx.audit_events:
            self.failures.run("audit", self.record_audit, event)
        for effect in tx.effects:
            self.failures.run("settings log", self.record_effect, effect)
        for caller, what, table in tx.settings_record:
            self.failures.run("settings log", self.record_settings, self._written, caller, what, table)
        for reply, answer in answers:
            self.failures.run("reply", reply, answer)

    def _notify_listeners(self, tx: TickTransaction) -> None:
        # Include runs: a confirmed start changes only the run, and clients that follow the job wait for it.
        of_runs = {run.job_id for run in tx.changes.runs.values()} & self.world.jobs.keys()
        told = {job_id: self.world.jobs[job_id] for job_id in of_runs} | tx.changes.jobs
        if not told:
            return
        for listener in self.listeners:
            self.failures.run(_name_of(listener), listener, told)
        if self.plugins.names:
            for job_id, job in tx.changes.jobs.items():
                self.failures.run("plug-ins", self.plugins.job_changed, tx.before.get(job_id), job)

    def _count(self, tx: TickTransaction) -> None:
        self.meters.recorded(tx.before, tx.changes.jobs, tx.waited)
        if tx.changes.jobs or tx.changes.runs:
            self.meters.gpus.hold(tx.now, self.world.holds.values(), tx.nodes)

    def _give_up(self, events: list[EngineEvent], queue: list[Asked], error: GpuschedError) -> None:
        """Drop a tick that was not recorded, and reload the memory, which is ahead of the table.

        Its events are applied again, their results stay in the spool, and no client receives a confirmation. If
        a single event or command raised, the others are retried without it.
        """
        self.meters.tick_failures += 1
        culprit = self._culprit
        self._backlog = [event for event in events if event is not culprit] + self._backlog
        if len(self._backlog) < len(events):
            log.error("skipping event %s: it cannot be applied; a restart delivers it again", culprit)
        refused = [asked for asked in queue if asked[1] is culprit] if culprit is not None else [*queue, *self._queue]
        if culprit is None:
            self._queue.clear()
        else:
            self._queue.extendleft(asked for asked in reversed(queue) if asked[1] is not culprit)
        for _, reply in refused:
            self.failures.run("reply", reply, error)
        self._is_behind = True
        self.failures.run("table", self.reload)

    def flush(self) -> None:
        """Record changes carried over from earlier ticks; called at each poll and at exit."""
        if self._carried and self.trouble is None:
            with self.meters.commit():
                self.store.commit(self._carried)
            self._carried = Changes()

    def reload(self) -> None:
        """Reload the memory, for example after another process wrote to the table."""
        self._is_behind = self._look_again = self._targets_due = True
        self._plan_by = self._recorded_at = None
        if (lost := self.store.lost()) is not None:
            # A lost table may still be readable, but is not up to date.
            raise lost
        self._carried = Changes()
        self.estimates.forget()
        self.world = DaemonState.load(self.store, self._clock.now(), self.state_settings())
        self._take_in_members()
        self._update_tracker()
        self.alerts.reload(self.store, self.world, self.settings)
        self.overuse.reload()
        self.intruders.reload()
        self.meters.gpus.hold(self._clock.now(), self.world.holds.values())
        self._reconcile_releases(self._clock.now())
        self._reconciler.look_at_all(self.world)
        self._is_behind = False

    @staticmethod
    def _must_record(changes: Changes) -> bool:
        return bool(
            changes.jobs
            or changes.events
            or changes.drains
            or changes.fences
            or changes.kept_places
            or changes.clearances
            or changes.mig_layouts
            or changes.payloads
            or changes.usage
            or changes.reservations
            or changes.table_settings
            or changes.estimates
            or changes.pipelines
            or changes.alerts
            or changes.steps
        ) or any(run.state is not RunState.RUNNING for run in changes.runs.values())

    # --- apply ----------------------------------------------------------------------------------

    def _apply_command(self, tx: TickTransaction, command: Command) -> dict[str, Any] | GpuschedError:
        before = len(tx.audit_events)
        try:
            return verbs.apply(command, tx)
        except GpuschedError as error:
            # Drop the audit events of actions that were refused.
            tx.audit_events[before:] = [event for event in tx.audit_events[before:] if event.refused is not None]
            return error

    # --- decide ---------------------------------------------------------------------------------

    def _must_plan(self, tx: TickTransaction) -> bool:
        """Whether the input of the last plan has changed; a confirmed start alone does not change it.

        The end of a run on GPUs and the reading that shows them clean, shortly after, share one plan.
        """
        changes = tx.changes
        has_more = self._look_again or changes.drains or changes.reservations or changes.jobs.keys() - tx.releasing
        is_overdue = self._plan_by is not None and tx.now >= self._plan_by
        if has_more or is_overdue or (tx.releasing and self.on_release is None):
            return True
        if tx.releasing and self._plan_by is None:
            self._plan_by = tx.now + _READ_WITHIN_S
        return False

    def _plan(self, tx: TickTransaction) -> bool:
        """Plan until nothing more changes; return whether anything is to start."""
        has_starts = self._plan_jobs(tx)
        if self._pulls.settle(tx, is_early=self.awaits_reading):
            has_starts |= self._plan_jobs(tx)
        return has_starts

    def _plan_jobs(self, tx: TickTransaction) -> bool:
        has_starts = False
        for _ in range(_PLANS_PER_TICK):
            self._windows.look(self.world.calendar, tx.now)
            planner = self._planner.update(
                self.world, self._outline(tx.now, tx.nodes), self.settings, self.extensions, self.snapshot
            )
            if planner.is_idle:
                self.plan = _NO_PLAN
                break
            self.plan = planner.plan(tx.now)
            for reservation in self.plan.reservations:
                if reservation.fence_at is not None and reservation.job_id not in self.world.fences:
                    tx.fence(reservation.job_id, reservation.fence_at)
            for job_id, place in planner.kept.items():
                if job_id in self.world.fences and self.world.kept.get(job_id) != place:
                    tx.keep_place(job_id, place)
            for start in self.plan.starts:
                node = self.cluster[start.placement.node]
                if start.placement.gpus and self._is_reading_old(node, tx.now):
                    # Until the next reading, only this plan keeps its place free.
                    self.awaits_reading = True
                    continue
                job = self.world.find(start.job_id)
                assert job is not None
                port = None
                if needs_port(job, start.placement):
                    port = self._master_port(job, start.placement.node)
                    if port is None:
                        continue
                tx.waited.append((job.spec.queue, tx.now - self.world.free_at(job)))
                stdout_path, stderr_path = output_paths(
                    job, job.run + 1, start.placement.node, self.settings.default.output
                )
                placement = with_limit(job.spec.request, start.placement, node.reading, self.settings)
                key = self.world.class_of(job.id)
                priority = None if key is None else planner.ranking.priority(key, job.queued_at).total
                boot_ids = {one.name: one.boot_id for one in self.cluster}
                cap_w = power_cap(job, placement, self.cluster.samples(), self.settings)
                job, run, story = transitions.start_run(
                    *(job, placement, boot_ids, tx.now, stdout_path, stderr_path),
                    priority=priority,
                    master_port=port,
                    power_cap_w=cap_w,
                    is_filler=start.is_filler,
                )
                told = with_leanings(story, job, start.placement, planner.layout, self.history)
                tx.put(job, run, (*told, *self._kept_to(job, run)))
                has_starts = True
                self.history.began(job)
                if (estimate := self.estimates.started(job.id, tx.now)) is not None:
                    tx.changes.estimates[job.id] = estimate
            # Suspensions and resumptions change the resources to plan with.
            if not tx.carry_out(self.plan) and not self.plan.has_more:
                break
            if self.awaits_reading:
                # The next reading triggers another plan for this start and the rest.
                break
        return has_starts

    def _master_port(self, job: Job, node: str) -> int | None:
        """A port for the ranks of the job's next run, which begins on this node; None while all are taken."""
        ports = self.settings.cluster.ports
        port = choose_port(ports, taken_ports(node, self.world.open_runs.values()), job)
        if port is None:
            text = f"job {job.shown_id} has to wait: all {len(ports)} ports of [cluster] master_ports are reserved"
            self.failures.note("ports", NotReady(f"{text} on {node}", "widen [cluster] master_ports"))
        else:
            self.failures.recovered("ports")
        return port

    def _is_reading_old(self, node: ClusterNode, now: float) -> bool:
        """Whether the last GPU reading, from idle time, is old enough for other processes to have started since."""
        return now - node.read_at > self.settings.daemon.poll_s

    def _kept_to(self, job: Job, run: Run) -> tuple[JobEvent, ...]:
        """Set the limits of a run; return the event that records them."""
        found = []
        for rank, part in enumerate(run.on_each_node):
            node = self.cluster[part.node]
            here = run.on(rank)
            limits = node.limiter.limits_for(here, self.settings.isolation, node.samples, self.world.open_runs)
            if limits is not None:
                where = f"on {part.node}: " if run.parts else ""
                found.append(JobEvent(job.id, self._clock.now(), "note", where + describe(limits), run.number))
        return tuple(found)

    def _ticket(self, job: Job, run: Run) -> Ticket:
        """Everything the engine needs to start a run; for a gang with the tickets of its other nodes."""
        launch = job.spec.launch
        try:
            script = None if launch.script_sha is None else self._payloads.get(launch.script_sha)
            environment = self._payloads.get(launch.env_sha)
        except KeyError:
            raise CannotStart("its script or environment is missing from the database") from None
        if (why_not := self.mps.refusal(run, self.settings, self._clock.now())) is not None:
            raise CannotStart(why_not)
        past = past_environment(job, run, self.store)
        if run.native is not None:
            try:
                return handover_ticket(job, run, script, environment, self.settings, past)
            except Refused as error:
                raise CannotStart(error.message) from None
        tickets = []
        # As in Slurm, the first node runs a batch script, which reaches the others by srun.
        for rank in range(1 if launch.slurm else len(run.nodes)):
            here = run.on(rank)
            node = self.cluster[here.node]
            index_of = {uuid: sample.index for uuid, sample in node.samples.items()}
            limits = node.limiter.known(run.id)
            container = None
            if launch.image is not None and self.containers is not None:
                container = self.containers.launch_of(job, here, self.settings, node.reading)
            if isinstance(container, str):
                raise CannotStart(container)
            tickets.append(
                make_ticket(
                    *(job, here, script, environment, node.site, self.settings, index_of, past),
                    limits=limits,
                    rank=rank,
                    master=self.cluster[run.node].address,
                    lost_after_s=lease_of(job, here.node, self.head.name),
                    container=container,
                    variable=CUDA_VARIABLE if node.reading is None else node.reading.variable,
                )
            )
        first, *peers = tickets
        return replace(first, peers=tuple(peers)) if peers else first

    # --- answers about waiting jobs ---------------------------------------------------------------

    def reason_for(self, job: Job) -> Reason | None:
        """Why a pending job is waiting, or why nothing is known of a running one; None for any other job."""
        if job.state is not JobState.PENDING:
            run = self.world.open_runs.get(run_id(job.id, job.run))
            if run is None:
                return None
            now = self.now()
            return self.outages.reason(run, self.leases.decided_at(job, run, self.engine, now))
        if job.spec.is_for_slurm and (said := self._of_handover(job)) is not None:
            return said
        return waiting_reason(job, self.world, self.plan, self._clock.now())

    def _of_handover(self, job: Job) -> Reason | None:
        """Why a job is not running that is handed over, as the other scheduler says now; None if nothing is known."""
        if job.is_handed_over:
            text = None if self.handover is None else self.handover.status(run_id(job.id, job.run))
            run = self.world.open_runs.get(run_id(job.id, job.run))
            facts = {} if run is None or run.native is None else {"native_id": run.native.id}
            return None if text is None else Reason(ReasonCode.HANDED_OVER, text, facts)
        found = waiting_reason(job, self.world, self.plan, self._clock.now())
        if found.code is not ReasonCode.HANDED_OVER or self.handover is None:
            return found
        why = self.handover.why_not()
        return found if why is None else Reason(found.code, f"cannot be handed over: {why}")

    def reason_codes(self) -> Callable[[Job], ReasonCode]:
        """A function that gives the current reason codes of pending jobs."""
        return waiting_codes(self.world, self.plan, self._clock.now())

    def position(self, job: Job) -> int:
        """Number of jobs ahead of this one with the same request and owner."""
        key = self.world.class_of(job.id)
        if key is None:
            return 0
        return self.world.position_in_class(job)


def _name_of(listener: Callable[..., object]) -> str:
    """Name of a listener for failure reports."""
    return f"listener {getattr(listener, '__qualname__', type(listener).__qualname__)}"
