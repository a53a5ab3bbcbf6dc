"""Interface of the daemon for its HTTP API.

`gpusched.daemon.facade` implements it, and `gpusched.daemon.main` connects the two. All calls are on the daemon's
thread. Slow queries return a function without arguments that touches nothing but frozen values, so that another
thread can compute the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import field

from gpusched.lifecycle.failures import GpuFault
from gpusched.lifecycle.foreign import OwnerNotes
from gpusched.lifecycle.output_paths import OutputFile
from gpusched.lifecycle.overuse import Intruder
from gpusched.model.checks import Check
from gpusched.model.cluster import (
    Allocation,
    Drainer,
    GpuReading,
    GpuSample,
    GpuStatus,
    HostSample,
    NodeView,
    ShareFacts,
    ShareUse,
)
from gpusched.model.commands import AdoptableProcess, Caller, Command, Reload
from gpusched.model.job import ClientProcess, GpuShare, Job, JobSpec, Run
from gpusched.model.leaning import LeaningReason
from gpusched.model.metrics import Page
from gpusched.model.mig import CardLayout
from gpusched.model.progress import ShownProgress
from gpusched.model.samples import SampleKind, SeriesPiece
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget, CalendarEntry, ClassKey, LimitInForce, Plan, Reason, Snapshot, VramSeen
from gpusched.model.states import ReasonCode
from gpusched.model.step import JobStep, TaskUsage
from gpusched.model.table_settings import Key, QueuePause, TableSetting
from gpusched.model.value import Value
from gpusched.predict.calibration import Calibration
from gpusched.predict.efficiency import EndReport
from gpusched.predict.predictor import ExpectedRunTime, PredictionError
from gpusched.scheduler.forecast import Accuracy, StartRange
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.priority import Ranking
from gpusched.scheduler.whatif import Alternative, Left

from . import Store

if TYPE_CHECKING:
    import socket

# --- answers ------------------------------------------------------------------------------------------


class Forecast(Value):
    """The answer of `gsub --dry-run`."""

    verdict: str
    """starts_now, waits, refused, or exists for a key that already has a job."""
    text: str
    reason: str | None = None
    node: str | None = None
    gpus: tuple[GpuShare, ...] = ()
    start_at: float | None = None
    """Now, or the latest start if known."""
    start_low_at: float | None = None
    """Start if runs take as long as usual; None when unknown."""
    facts: Mapping[str, object] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    """Changes that would let it start now."""
    hint: str | None = None
    """Remedy for a refusal."""
    about: str | None = None
    """What a refusal is about, as in `errors.ABOUT`."""
    time_limit_s: int | None = None
    time_limit_source: str | None = None
    limit_text: str = ""
    """Result of `-t auto`."""


class LimitHint(Value):
    """Run times of similar jobs, and the expected starts with and without a time limit. Instants, and seconds."""

    runs: int
    usual: str
    """`1 to 3 h`."""
    limit_s: int
    typed: str
    """As typed for -t: `4h`."""
    start_at: float
    start_without_at: float | None
    """None when unknown."""
    time_limit_s: int | None
    """Its current default."""


class JobOutlook(Value):
    """The future of one pending job."""

    place: tuple[int, int] | None
    """Position in the queue and total number of positions; None when too far behind to compute."""
    start: StartRange
    alternatives: tuple[Alternative, ...]
    """Changes that would let it start now."""


class RunFindings(Value):
    """Findings of the last GPU reading about an open run."""

    shares: Mapping[str, ShareFacts] = field(default_factory=dict)
    """By GPU UUID, for the cards that it shares."""
    vram_over: str | None = None
    """A sentence if it holds more VRAM than it booked."""
    unbooked: Sequence[Intruder] = ()
    """Its own unbooked use of GPUs."""
    intruders: Sequence[Intruder] = ()
    """Unbooked use, by others, of the GPUs that it booked."""
    idle: str | None = None
    """A sentence if its GPUs are idle."""


class DaemonHealth(Value):
    """Health of the daemon itself."""

    ticks: int
    last_tick_ms: float | None
    p95_tick_ms: float | None
    warnings: tuple[str, ...]
    failing_steps: tuple[Mapping[str, Any], ...]
    """Steps whose last execution raised: step, error, count, since_at, last_at."""


# --- current state ------------------------------------------------------------------------------------


class RunningSteps(Protocol):
    """Steps that have not ended."""

    def all(self) -> Mapping[tuple[int, int, int], JobStep]:
        """By job, run and number."""


class ActiveJobs(Protocol):
    """Unfinished jobs and their runs, with holds, drains and reservations."""

    @property
    def jobs(self) -> Mapping[int, Job]: ...

    @property
    def open_runs(self) -> Mapping[str, Run]: ...

    @property
    def table_settings(self) -> Mapping[Key, TableSetting]:
        """Dated limits, credits and the like."""

    @property
    def releasing(self) -> Mapping[str, Run]:
        """Ended runs whose GPUs have not been proven clean yet."""

    @property
    def holds(self) -> Mapping[str, Allocation]: ...

    @property
    def drains(self) -> Mapping[str, str]:
        """Messages by node name or GPU UUID."""

    @property
    def drainers(self) -> Mapping[str, Drainer]:
        """Who drained them, of those that a user drained."""

    @property
    def mig_layouts(self) -> Mapping[str, CardLayout]:
        """MIG layouts that were set for GPUs, by UUID."""

    @property
    def calendar(self) -> Mapping[str, CalendarEntry]: ...

    @property
    def next_id(self) -> int: ...

    @property
    def steps(self) -> RunningSteps: ...

    def find(self, job_id: int) -> Job | None:
        """An active job, or a task of an active array without a row of its own."""

    def tasks_of(self, array: Job) -> list[Job]:
        """Its unfinished tasks with a row of their own, by id."""

    def name_of(self, job_id: int) -> str:
        """`42`, a task `42_7`."""

    def class_of(self, job_id: int) -> ClassKey | None:
        """The class of an eligible job; None for any other."""

    def pause_of(self, queue: str) -> QueuePause | None:
        """The pause of a queue, or of the nearest one above it that is paused."""

    def counts(self) -> dict[str, int]:
        """Number of jobs in each active state."""


class NodeReadings(Protocol):
    """The newest readings of a node."""

    @property
    def address(self) -> str:
        """Where other nodes reach it."""

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> HostSample: ...

    @property
    def reading(self) -> GpuReading | None: ...

    @property
    def why_not(self) -> str | None:
        """Why the node cannot be reached; None while it can."""

    @property
    def trouble(self) -> str | None:
        """Why it can start nothing now, although it answers; None if it can."""

    @property
    def clock_note(self) -> str | None:
        """That its clock is off, as a sentence; None while it agrees."""

    @property
    def lease_note(self) -> str | None:
        """When the leases of runs on it will have ended, as a sentence; None while it answers."""


class ClusterReadings(Protocol):
    """All nodes and their GPUs by the newest readings."""

    @property
    def head(self) -> NodeReadings:
        """The daemon's own node."""

    def __getitem__(self, name: str) -> NodeReadings: ...

    def get(self, name: str) -> NodeReadings | None:
        """None of a node that has not joined."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Nodes that have not joined since the daemon's start, and why."""

    def status(self, uuid: str, shares: Sequence[GpuShare] | None = None, now: float | None = None) -> GpuStatus: ...

    def shares(self) -> dict[str, tuple[ShareUse, ...]]:
        """Observed use of each share, by GPU."""


class SchedulerState(Protocol):
    """State of the scheduler and its planner."""

    @property
    def store(self) -> Store: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def state(self) -> ActiveJobs: ...

    @property
    def cluster(self) -> ClusterReadings: ...

    @property
    def plan(self) -> Plan:
        """The last plan."""

    @property
    def node_name(self) -> str: ...

    def now(self) -> float: ...

    def nodes(self, now: float) -> tuple[NodeView, ...]: ...

    def snapshot(self, now: float) -> Snapshot: ...

    def budgets(self, now: float) -> tuple[Budget, ...]: ...

    def user_limits(self) -> tuple[LimitInForce, ...]: ...

    def planner(self) -> Planner: ...

    def ranking(self) -> Ranking: ...

    def end_report(self, job: Job, runs: Sequence[Run]) -> EndReport | None:
        """What an ended job used of what it asked for."""

    def reason_for(self, job: Job) -> Reason | None:
        """Why a job is pending."""

    def reason_codes(self) -> Callable[[Job], ReasonCode]: ...

    def in_queue_order(self, jobs: Iterable[Job]) -> list[Job]: ...
    def active_in_order(self) -> list[Job]: ...

    def position(self, job: Job) -> int:
        """Number of jobs of its class before an eligible job."""

    def name_of_run(self, handle: str) -> str:
        """Display id of a run's job."""


class SeriesSource(Protocol):
    """What cards, queues and runs did over time."""

    def piece(
        self, kind: SampleKind, subject: str, start_at: float, end_at: float, most: int, names: Sequence[str]
    ) -> SeriesPiece:
        """Part of a series in at most `most` steps. Args: names: of fields."""

    def subjects(self, kind: SampleKind, start_at: float, end_at: float) -> Sequence[str]:
        """Cards, by UUID, or queues with samples in that time; the empty name is the whole cluster."""

    def curves(self, run: str, most: int, names: Sequence[str]) -> Sequence[tuple[str, SeriesPiece]]:
        """The curve of a run on each of its cards, by UUID."""

    def holders(
        self, uuid: str, start_at: float, end_at: float, most: int
    ) -> Sequence[tuple[str, float, float | None]]:
        """Runs that used a card, newest first: handle, first instant and last one, None while it runs."""


# --- the port -----------------------------------------------------------------------------------------


class RunCall(Protocol):
    """A connection to a part of a run, for one client."""

    async def splice(self, sock: socket.socket, *, is_relayed: bool) -> None:
        """Copy both ways between the client's socket and the run until both have ended, or one breaks. Closes both.

        Args: is_relayed: the client is on another node, and the connection to it may break.
        """

    def close(self) -> None:
        """Break off what has not ended."""


class Daemon(Protocol):
    @property
    def scheduler(self) -> SchedulerState: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Fixed facts for /v1/status: version, pid, paths."""

    @property
    def series(self) -> SeriesSource: ...

    @property
    def serves_all(self) -> bool:
        """Whether this is the system daemon, which serves all users of the machine."""

    # --- commands and events ---

    async def ask(self, command: Command | Reload) -> dict[str, Any]:
        """Queue a command for the next tick; returns after its commit. Raises: errors of the command."""

    def stop(self) -> None: ...

    def subscribe(self, listener: Callable[[Mapping[int, Job]], None]) -> None:
        """Call a listener after each commit with the jobs whose row, or whose run's row, changed."""

    def audit(self, caller: Caller, what: str, target: str) -> None:
        """Record an action that no command records."""

    def audit_refusal(self, caller: Caller, what: str, why: str) -> None:
        """Record a denied action."""

    # --- jobs ---------

    async def refresh_progress(self, jobs: Iterable[Job]) -> None:
        """Update the progress of these running jobs."""

    def progress_of(self, job: Job) -> ShownProgress | None:
        """Progress at the last update."""

    def findings(self, run: Run) -> RunFindings: ...

    async def read_output(
        self, job: Job, run: Run, file: OutputFile, *, is_error: bool, cursor: str, lines: int | None, wait_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """A piece of a file that a run wrote on another node: `cursor` behind it, `is_found`, `is_skipped`, `path`;
        and its bytes. Raises: NotReady, Refused, TooMany.
        """

    async def task_usage(self, run: Run, node: str) -> tuple[TaskUsage, ...]:
        """What the tasks of a run's steps use on one of its nodes now. Raises: NotReady, TooMany."""

    async def read_own_output(self, job: Job, path: str, at: int, most: int) -> tuple[int, bytes] | None:
        """Size of a file that a run wrote on the daemon's own node, and its bytes from a place on, if negative from its
        end; read as its user. None if there is none. Raises: Refused, TooMany.
        """

    async def read_snapshot(self, job: Job, at: int) -> bytes:
        """A piece of the archive of a job's snapshot, read as its user. Raises: NotFound, Refused, TooMany."""

    def attach_path(self, job: Job) -> str:
        """Socket of the current run of a foreground job."""

    def client_path(self, run: Run, node: str, token: str = "") -> str:
        """Socket, on a node, of a run's part there: with a token the door that an `EnterOrder` opens, else that of its
        foreground.
        """

    def call_run(self, job: Job, run: Run, node: str, token: str, *, is_return: bool) -> RunCall:
        """Call the part of a run on a node, as its user: its door of this name, or its foreground. Raises: NotReady,
        TooMany.

        Args: is_return: the client was connected before.
        """

    async def foreground_status(self, job: Job) -> tuple[float | None, float | None, float | None] | None:
        """Client pid, its connection time, and end of the lease, as reported by the run; None without an answer."""

    def is_alive(self, client: ClientProcess) -> bool: ...

    def client_process(self, pid: int) -> ClientProcess:
        """The process that submits a foreground job."""

    def run_of_process(self, pid: int) -> str | None:
        """Handle of the run that a process belongs to."""

    # --- predictions -------------

    def forecast(self, spec: JobSpec, caller: Caller, key_again: str) -> Callable[[], Forecast]:
        """Predict the effect of submitting this now."""

    def outlook(self, job: Job) -> Callable[[], JobOutlook]: ...

    def starts(self, jobs: Collection[Job]) -> tuple[Mapping[int, int], Callable[[], Mapping[int, StartRange]]]:
        """Planning ids of these pending jobs (for an array, its next task), and a query for their starts."""

    def first_starts(self, most: int) -> Callable[[], tuple[dict[int, int], dict[int, StartRange]]]:
        """Places in the queue, from 1, and start ranges of the first jobs, both by planning id."""

    def limit_hint(self, job: Job) -> Callable[[], LimitHint | None] | None: ...

    def starts_without(self, cases: Sequence[Left]) -> Callable[[], Sequence[int]]:
        """For each case, the number of additional jobs that would start now without the case's foreign memory."""

    def vram_seen(self, job: Job) -> VramSeen | None: ...

    def expectation(self, job: Job) -> ExpectedRunTime: ...

    def leanings(self, job: Job) -> list[LeaningReason]: ...

    def burst(self, job: Job) -> str | None: ...

    def why_it_preempts_nothing(self, job: Job) -> str | None: ...

    def prediction_error(self, user: str | None = None) -> PredictionError: ...

    def calibration(self) -> Calibration: ...

    def accuracy(self) -> Accuracy | None: ...

    # --- processes without a job ---------

    def adoptable(self, pid: int, caller: Caller) -> Callable[[], AdoptableProcess]: ...

    def adoption_fields(self, found: AdoptableProcess, asked: dict[str, Any]) -> dict[str, Any]: ...

    def owner_notes(self, pid: int) -> OwnerNotes | None: ...

    # --- machine and daemon ------------------------

    def settings_log(self, since: float, limit: int) -> list[dict[str, Any]]: ...

    def settings_before(self, at: float) -> dict[str, Any] | None: ...

    def config_problem(self) -> tuple[str, str] | None: ...

    def health(self) -> DaemonHealth: ...

    def checks(self) -> Sequence[Check]: ...

    def isolation(self, node: str) -> dict[str, Any]: ...

    def enforcement(self, sample: GpuSample | None, limit: str | None) -> tuple[str, str]: ...

    def gpu_faults(self, uuid: str) -> Sequence[GpuFault]: ...

    def metrics(self) -> Page: ...

    def plugin_names(self) -> tuple[str, ...]: ...

    def preset(self) -> dict[str, Any]: ...

    def preset_table(self) -> dict[str, Any]: ...

    def judge_presets(self) -> None: ...


class ApiServer(Protocol):
    """Serves the API while the daemon's loop runs."""

    async def start(self, socket_path: str) -> None: ...

    async def close(self) -> None: ...
