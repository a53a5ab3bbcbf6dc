"""What the daemon knows between two ticks: the memory, the nodes and the settings, and the answers from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusched.daemon.answers import JobAnswers
from gpusched.daemon.budgets import BudgetAlerts
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.decide_step import DecideStep
from gpusched.daemon.leases import Leases
from gpusched.daemon.nodes import ClusterLayouts, ClusterNode
from gpusched.daemon.parts import SchedulerParts
from gpusched.daemon.state import DaemonState
from gpusched.daemon.state_settings import StateSettings
from gpusched.daemon.verbs import table_setting
from gpusched.daemon.verbs.images import PullWatch
from gpusched.daemon.verbs.table_setting import LimitsWithAnEnd
from gpusched.daemon.watch.alert_times import AlertTimes
from gpusched.daemon.watch.burst import Handovers
from gpusched.daemon.watch.estimates import Estimates
from gpusched.daemon.watch.gpus import GpuAlerts, GpuFaults
from gpusched.daemon.watch.history import History, RunTimeChanges
from gpusched.daemon.watch.idle import IdleWatch
from gpusched.daemon.watch.mig import MigWatch
from gpusched.daemon.watch.mps import MpsRuns
from gpusched.daemon.watch.outages import FullNodes, Outages, SilentNodes
from gpusched.daemon.watch.overuse import IntruderWatch, OveruseWatch
from gpusched.daemon.watch.power_caps import PowerCaps
from gpusched.daemon.watch.releases import LostGpus, Releases
from gpusched.daemon.watch.tariff import CheapStarts
from gpusched.daemon.watches import NodeReading, Watches, WatchGuard
from gpusched.errors import GpuschedError
from gpusched.model.cluster import GpuReading, HostSample, NodeView
from gpusched.model.job import GpuShare, Job, JobSpec, Run
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, LimitInForce, Plan, Snapshot
from gpusched.model.table_settings import with_members
from gpusched.model.tariff import Tariff
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.ports.tables import CLEARANCES, DRAINS, MIG_LAYOUTS, TABLE_SETTINGS
from gpusched.predict.efficiency import EndReport, end_report
from gpusched.predict.limits import LimitAdvice
from gpusched.scheduler.cluster_state import GpuSpeeds
from gpusched.scheduler.planner import Planner

from .alerts import AlertOutbox
from .failures import StepFailures
from .meters import Meters
from .planner_sync import PlannerSync

_SEEN_JOBS = 5000
"""Approximate number of pending jobs in a snapshot; a forecast does not distinguish those far behind."""


class Scheduler:
    """The memory, the settings, and those who decide by them. What changes rows goes through a tick: `daemon.tick`.

    One class: a reload replaces memory and settings under all of them, and the edges ask it for each by name.
    """

    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts
        self.signals = parts.signals
        self.store, self.engine = store, engine = parts.store, parts.engine
        self.cluster = parts.cluster
        self.settings = settings = parts.settings
        self.filed_settings = settings
        """Those of the file that are in force: `settings` without what coordinators said about members."""
        self.plugins = parts.plugins
        self.extensions = self.plugins.extensions()
        self._clock = parts.clock
        self.failures = StepFailures(self.now)
        self.meters = Meters()
        self.trouble: str | None = None
        """Why the last commit failed; None when the table is writable."""
        self.history = History(store, self._slowness)
        self.estimates = Estimates(store)
        self.outages = Outages()
        self.leases = Leases(self.cluster, self.outages, engine)
        self.mps = MpsRuns(self.cluster)
        self.tariff: Tariff | None = None
        """What energy costs and emits over time."""
        self.tariff_problem: GpuschedError | None = None
        """Why the tariff file cannot be used."""
        self.handover, self.containers = parts.handover, parts.containers
        self.is_going_down = False
        """The machine is shutting down: nothing is started any more."""
        self.planner_sync = PlannerSync(self.cluster, store)
        self._layouts = ClusterLayouts()
        self.state = self._load_state()
        self._take_in_members()
        self.guard = guard = WatchGuard(self.failures)
        self.alerts = outbox = AlertOutbox(store, guard, self.end_report)
        self.alert_times = AlertTimes(outbox)
        self.idle = IdleWatch(self.cluster, outbox)
        self.overuse = OveruseWatch(outbox)
        self.intruders = IntruderWatch(outbox)
        self.gpu_faults = GpuFaults()
        self.power_caps = PowerCaps(self.cluster)
        self.mig = MigWatch(self.cluster)
        self.handovers = Handovers(lambda: self.is_going_down)
        judges = (self.overuse.judge, self.intruders.judge, self.gpu_faults.judge, self.mps.judge)
        self.watches = Watches(
            guard,
            self.failures,
            (
                self.gpu_faults,
                self.power_caps,
                self.mig,
                Releases(self.cluster, self.gpu_faults, judges, self.failures, guard),
                LostGpus(self.cluster),
                LimitsWithAnEnd(),
                RunTimeChanges(self.history),
                self.idle,
                self.overuse,
                self.intruders,
                GpuAlerts(outbox),
                SilentNodes(self.outages, self.leases, outbox),
                FullNodes(self.cluster, outbox),
                self.alert_times,
                BudgetAlerts(self.budgets),
                CheapStarts(),
                self.handovers,
                PullWatch(),
                outbox,
            ),
        )
        self.watches.reload(self.state, settings)
        self.decide_step = DecideStep(
            self.cluster, self.planner_sync, self.history, self.estimates, self.failures, self.watches
        )
        self.answers = JobAnswers(self)
        self.update_tracker()

    def now(self) -> float:
        return self._clock.now()

    @property
    def head(self) -> ClusterNode:
        """The node that the daemon runs on."""
        return self.cluster.head

    @property
    def plan(self) -> Plan:
        return self.decide_step.plan

    @property
    def has_work(self) -> bool:
        """Whether a job is active or a MIG layout is to be made, so that polling must be prompt."""
        return bool(self.state.jobs) or any(one.wanted is not None for one in self.state.rows[MIG_LAYOUTS].values())

    @property
    def awaits_release(self) -> bool:
        """Whether ended runs await a reading that shows their GPUs clean."""
        return bool(self.state.releasing)

    @property
    def runs_here(self) -> int:
        """Open runs that have a part on the daemon's own machine."""
        return sum(self.head.name in run.nodes for run in self.state.open_runs.values())

    # --- what is observed -----------------------------------------------------------------------

    def observe_gpus(
        self, reading: GpuReading, node: ClusterNode | None = None, owners: Mapping[int, str] | None = None
    ) -> None:
        """Take in a reading of the GPUs of a node, by default of the daemon's own.

        Args: owners: runs of the processes in the reading, by pid; None: ask the engine.
        """
        node = self.head if node is None else node
        reading = node.tracker.identified(reading)
        pids = {process.pid for gpu in reading.gpus for process in gpu.processes or () if process.pid is not None}
        state, name = self.state, node.name
        # Only what runs here: with many nodes, looking at everything for each of them would take most of the time.
        here = {**state.open_by_node.on(name)}
        jobs = {handle: state.name_of(run.job_id) for handle, run in here.items()}
        here |= state.releasing_by_node.on(name)
        booked: dict[str, list[tuple[str, GpuShare]]] = {}
        for handle, run in here.items():
            for share in run.gpus:
                booked.setdefault(share.uuid, []).append((handle, share))
        if owners is None:
            owners = self.engine.owners(pids) if pids else {}
        node.tracker.observe(reading, owners, booked, jobs)
        # Only now: a reading that could not be processed must not show any GPU as free.
        node.reading, node.read_at = reading, min(reading.at, self.now())
        self.look_again()
        self.watches.observe(NodeReading(node, reading, state, self.settings, self.now()))
        self.signals.gpus_read.send(self.failures, node, reading)

    def observe_host(self, sample: HostSample, trouble: str | None = None) -> None:
        """Take in the state of the daemon's own node. Args: trouble: why nothing can be started there."""
        self.head.host = sample
        self.head.be_in_trouble(trouble)
        self.look_again()

    def observe_checkpoints(self) -> None:
        """Note which runs have saved their work since the last look."""
        now = self._clock.now()
        # Users may set any file time; clip those in the future.
        self.state.note_checkpoints({run: min(at, now) for run, at in self.engine.checkpoints().items()})

    def use_tariff(self, tariff: Tariff, problem: GpuschedError | None) -> None:
        """Charge energy by these prices from now on. Args: problem: why they are not those of the file."""
        self.tariff, self.tariff_problem = tariff, problem
        self.cluster.set_tariff(tariff)
        self.look_again()

    def look_again(self) -> None:
        """Plan in the next tick even if no job changes."""
        self.decide_step.must_look = True

    def load_again(self) -> None:
        """Replace the memory by what the table has now."""
        self.estimates.forget()
        self.state = self._load_state()
        self._take_in_members()
        self.update_tracker()
        self.alerts.read_again(self.store)
        self.watches.reload(self.state, self.settings)

    def take_in_alerts(self, committed: Changes) -> None:
        """Update the outbox in memory after a commit."""
        if not self.failures.run("alerts", self.alerts.committed, committed):
            self.failures.run("outbox", self.alerts.read_again, self.store)

    def _load_state(self) -> DaemonState:
        """The memory as the table has it; the next commit goes on from there."""
        state = DaemonState.load(self.store, self.now(), self.state_settings())
        self.store.begin(state.jobs.values())
        return state

    # --- settings -------------------------------------------------------------------------------

    def _take_in_members(self) -> None:
        """Put the settings in force together: those of the file, and what coordinators said about members."""
        self.settings = with_members(self.filed_settings, self.state.rows[TABLE_SETTINGS])

    def state_settings(self) -> StateSettings:
        """What the memory depends on: parts of the settings, what was learned, and the cores of the nodes."""
        history = self.history
        return StateSettings.of(
            self.settings,
            history.guess,
            self._cpus(self.settings),
            history.leaning,
            self._slowness,
            history.is_known_invocation,
        )

    def _slowness(self, run: Run) -> float:
        """How many times as long as at speed 1 a run takes on its GPUs; those not seen yet count as of speed 1."""
        if not self.settings.gpu.speed or not run.gpus:
            return 1.0
        return 1.0 / self.cluster.slowest(run.gpus, GpuSpeeds(self.settings.gpu.speed))

    def _cpus(self, settings: Settings) -> tuple[float, ...]:
        """Cores of each node that may be booked."""
        return tuple(node.cpus(settings) for node in self.cluster)

    def follow_settings(self) -> bool:
        """Put the settings in force anew; return whether all that depends on them has followed."""
        self._take_in_members()
        self.look_again()
        return self.failures.run("settings", self._adopt_settings)

    def _adopt_settings(self) -> None:
        settings = self.settings
        self.state.reconfigure(self.state_settings())
        self.state.look_at_pauses(self._clock.now())
        self.state.look_at_infeasible(self._clock.now())
        self.cluster.adopt(settings)
        self.state.dependents.touch_all()
        self.watches.reload(self.state, settings)

    # --- what the policy sees ---------------------------------------------------------------------

    def nodes_under(self, settings: Settings) -> tuple[NodeView, ...]:
        """The nodes with other settings; none while GPUs cannot be read."""
        if any(node.reading is None or node.reading.error is not None for node in self.cluster):
            return ()
        return self.nodes(self.now(), settings)

    def nodes(self, now: float, settings: Settings | None = None) -> tuple[NodeView, ...]:
        """The nodes as the policy sees them now; with other `settings`, as it would see them."""
        why_none = f"node {self.head.name} is being shut down" if self.is_going_down else None
        return self.cluster.views(settings or self.settings, now, self.state.rows[DRAINS], why_none)

    def _nodes_of_tick(self, now: float) -> tuple[NodeView, ...]:
        """The nodes with the drains and clearances of this tick so far; a reload discards uncommitted ones."""
        self.update_tracker()
        return self.nodes(now)

    def update_tracker(self) -> None:
        """Pass drains and clearances on. Called where they change, not in getters that clients may call."""
        self.cluster.set_drains(dict(self.state.rows[DRAINS]))
        wanted = {uuid: one.wanted for uuid, one in self.state.rows[MIG_LAYOUTS].items() if one.wanted is not None}
        self.cluster.set_layouts(wanted)
        self.cluster.set_clearances(dict(self.state.rows[CLEARANCES]))

    def user_limits(self) -> tuple[LimitInForce, ...]:
        """Limits of single users, of the config file and of the job table."""
        return table_setting.limits_in_force(self.settings, self.state.rows[TABLE_SETTINGS])

    def budgets(self, now: float) -> tuple[Budget, ...]:
        """GPU-hour budgets by account, with what was used and is booked."""
        return self.planner_sync.budgets.at(now, self.settings, self.state, self.store)

    def snapshot(self, now: float, nodes: tuple[NodeView, ...] | None = None) -> Snapshot:
        """The policy's current input without the pending jobs; `nodes` if already known for this instant."""
        return self.planner_sync.snapshot(self.state, self.settings, self.nodes(now) if nodes is None else nodes, now)

    def snapshot_with_queue(self, now: float) -> Snapshot:
        """The policy's current input with the pending jobs, of which those far behind are only counted."""
        return replace(self.snapshot(now), pending=self.state.eligible.views(_SEEN_JOBS))

    def planner(self) -> Planner:
        """The planner, updated to the current memory and advanced to this instant."""
        now = self.now()
        planner = self.planner_sync.update(self.state, self.settings, self.extensions, self.nodes(now), now)
        planner.state.move_to(now)
        return planner

    def transaction(self, now: float, *, is_query: bool = False) -> TickTransaction:
        """A transaction on what is known now. Args: is_query: for a question; it is never committed."""
        view_nodes = self.nodes if is_query else self._nodes_of_tick
        return TickTransaction(
            *(self.state, self.store, self.settings, lambda: view_nodes(now), now),
            advise_limit=self.advise_limit,
            has_read=self.has_read,
            handover=self.handover,
            containers=self.containers,
            tariff=self.tariff,
            samples=self.cluster.samples(),
            plan=self.plan,
            layouts=self._layouts,
        )

    # --- what earlier runs show --------------------------------------------------------------------

    def end_report(self, job: Job, runs: Sequence[Run]) -> EndReport | None:
        """What an ended job used of what it asked for; None if it never ran here. Args: runs: all of them."""
        is_learned = self.history.is_loaded
        limit = self.history.limit_advice(job.user, job.spec) if is_learned else None
        return end_report(job, runs, limit, self.history.vram_seen(job) if is_learned else None)

    def advise_limit(self, user: str, spec: JobSpec) -> LimitAdvice | None:
        """The time limit that similar jobs of a user keep to; None when too few have ended."""
        self.history.load()
        return self.history.limit_advice(user, spec)

    def has_read(self, user: str, data: str) -> bool:
        """Whether a job of this user near this data set has completed lately."""
        self.history.load()
        return self.history.has_read(user, data)
