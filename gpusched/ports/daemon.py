"""What the HTTP API may ask of the daemon that it serves.

`gpusched.daemon.facade` is the daemon's side of it, and `gpusched.daemon.main` puts the two together. Everything is
called on the daemon's thread. What takes long is answered with a question: a function without arguments that touches
nothing but frozen values, so that another thread may work it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import field

from gpusched.lifecycle.failures import GpuFault
from gpusched.lifecycle.foreign import OwnerNotes
from gpusched.lifecycle.overuse import Intruder
from gpusched.model.checks import Check
from gpusched.model.cluster import (
    Allocation,
    GpuReading,
    GpuSample,
    GpuStatus,
    GpuView,
    HostSample,
    NodeView,
    ShareFacts,
    ShareUse,
)
from gpusched.model.commands import AdoptableProcess, Caller, Command, Reload
from gpusched.model.job import ClientProcess, GpuShare, Job, JobSpec, Run
from gpusched.model.metrics import Page
from gpusched.model.progress import ShownProgress
from gpusched.model.settings import Settings
from gpusched.model.snapshot import CalendarEntry, ClassKey, Plan, Reason, Snapshot, VramSeen
from gpusched.model.states import ReasonCode
from gpusched.model.value import Value
from gpusched.predict.calibration import Calibration
from gpusched.predict.predictor import ExpectedRunTime, PredictionError
from gpusched.scheduler.forecast import Accuracy, StartRange
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.priority import Ranking
from gpusched.scheduler.whatif import Alternative, Left

from . import Store

# --- answers ------------------------------------------------------------------------------------------


class Forecast(Value):
    """The answer of `gsub --dry-run`."""

    verdict: str
    """starts_now, waits, refused, or exists for a key that has a job."""
    text: str
    reason: str | None = None
    node: str | None = None
    gpus: tuple[GpuShare, ...] = ()
    start_at: float | None = None
    """Now, or the latest start where one is known."""
    start_low_at: float | None = None
    """Its start if runs take as long as usual; None when nobody knows."""
    facts: Mapping[str, object] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    """What would make it start now."""
    hint: str | None = None
    """What to do about a refusal."""
    time_limit_s: int | None = None
    time_limit_source: str | None = None
    limit_text: str = ""
    """What `-t auto` found."""


class LimitHint(Value):
    """What jobs like it took, and when it is expected to start with a limit and without. Instants, and seconds."""

    runs: int
    usual: str
    """`1 to 3 h`."""
    limit_s: int
    typed: str
    """As typed for -t: `4h`."""
    start_at: float
    start_without_at: float | None
    """None where nobody knows."""
    time_limit_s: int | None
    """The default that it has now."""


class JobOutlook(Value):
    """The future of one pending job."""

    place: tuple[int, int] | None
    """Its place in the queue, and how many jobs have one; None when it is too far behind to tell."""
    start: StartRange
    alternatives: tuple[Alternative, ...]
    """What would make it start now."""


class RunFindings(Value):
    """What the last GPU reading says of an open run."""

    shares: Mapping[str, ShareFacts] = field(default_factory=dict)
    """By GPU UUID, of the cards that it shares."""
    vram_over: str | None = None
    """A sentence when it holds more VRAM than it booked."""
    unbooked: Sequence[Intruder] = ()
    """The run itself, on GPUs that it did not book."""
    intruders: Sequence[Intruder] = ()
    """Others without a booking, on the GPUs that it did book."""


class DaemonHealth(Value):
    """How the daemon's own work goes."""

    ticks: int
    last_tick_ms: float | None
    p95_tick_ms: float | None
    warnings: tuple[str, ...]
    failing_steps: tuple[Mapping[str, Any], ...]
    """Steps that raised when they were last run: step, error, count, since_at, last_at."""


# --- what the daemon knows right now ------------------------------------------------------------------


class ActiveJobs(Protocol):
    """The jobs that have not ended, their runs, and what is held, drained and reserved."""

    @property
    def jobs(self) -> Mapping[int, Job]: ...

    @property
    def open_runs(self) -> Mapping[str, Run]: ...

    @property
    def releasing(self) -> Mapping[str, Run]:
        """Ended runs whose GPUs are not proven clean yet."""

    @property
    def holds(self) -> Mapping[str, Allocation]: ...

    @property
    def drains(self) -> Mapping[str, str]:
        """Messages by node name or GPU UUID."""

    @property
    def calendar(self) -> Mapping[str, CalendarEntry]: ...

    @property
    def next_id(self) -> int: ...

    def find(self, job_id: int) -> Job | None:
        """An active job, or a task of an active array that has no row yet."""

    def tasks_of(self, array: Job) -> list[Job]:
        """Its tasks that have a row and have not ended, by id."""

    def name_of(self, job_id: int) -> str:
        """`42`, a task `42_7`."""

    def class_of(self, job_id: int) -> ClassKey | None:
        """The class that an eligible job waits in; None for any other."""

    def counts(self) -> dict[str, int]:
        """How many jobs are in each active state."""


class GpuConditions(Protocol):
    """The GPUs of this node as of the last readings."""

    def status(self, uuid: str, shares: Sequence[GpuShare] | None = None, now: float | None = None) -> GpuStatus: ...

    def views(self, now: float) -> tuple[GpuView, ...]: ...

    def shares(self) -> dict[str, tuple[ShareUse, ...]]:
        """By GPU, what each share of it was seen to use."""


class SchedulerState(Protocol):
    """The scheduler's memory, and what its planner makes of it."""

    @property
    def store(self) -> Store: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def world(self) -> ActiveJobs: ...

    @property
    def tracker(self) -> GpuConditions: ...

    @property
    def host(self) -> HostSample: ...

    @property
    def reading(self) -> GpuReading | None: ...

    @property
    def plan(self) -> Plan:
        """The last plan."""

    @property
    def node_name(self) -> str: ...

    def now(self) -> float: ...

    def nodes(self, now: float) -> tuple[NodeView, ...]: ...

    def snapshot(self, now: float) -> Snapshot: ...

    def planner(self) -> Planner: ...

    def ranking(self) -> Ranking: ...

    def reason_for(self, job: Job) -> Reason | None:
        """Why a pending job waits."""

    def reason_codes(self) -> Callable[[Job], ReasonCode]: ...

    def in_queue_order(self, jobs: Iterable[Job]) -> list[Job]: ...

    def position(self, job: Job) -> int:
        """How many jobs of its class are before an eligible job."""

    def name_of_run(self, handle: str) -> str:
        """The id of a run's job as users know it."""


# --- the port -----------------------------------------------------------------------------------------


class Daemon(Protocol):
    """One running daemon."""

    @property
    def scheduler(self) -> SchedulerState: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Fixed facts for /v1/status: version, pid, paths."""

    @property
    def serves_all(self) -> bool:
        """Whether this is the system's daemon, for everybody on the machine."""

    # --- commands and events ---

    async def ask(self, command: Command | Reload) -> dict[str, Any]:
        """Have the next tick apply a command; returns after its commit. Raises: what the command raised."""

    def stop(self) -> None: ...

    def subscribe(self, listener: Callable[[Mapping[int, Job]], None]) -> None:
        """Have this called after each commit with the jobs whose row, or whose run's row, changed."""

    def audit(self, caller: Caller, what: str, target: str) -> None:
        """Record what somebody did that no command records."""

    def audit_refusal(self, caller: Caller, what: str, why: str) -> None:
        """Record what somebody was not allowed to do."""

    # --- about jobs ---

    async def refresh_progress(self, jobs: Iterable[Job]) -> None:
        """Look how far these running jobs are."""

    def progress_of(self, job: Job) -> ShownProgress | None:
        """As of the last look."""

    def findings(self, run: Run) -> RunFindings: ...

    def attach_path(self, job: Job) -> str:
        """The socket of the current run of a job in the foreground."""

    async def foreground_status(self, job: Job) -> tuple[float | None, float | None, float | None] | None:
        """Its client's pid, since when, and when its lease ends, as its run says; None when it does not answer."""

    def is_alive(self, client: ClientProcess) -> bool: ...

    def client_process(self, pid: int) -> ClientProcess:
        """The process that submits a job in the foreground."""

    def run_of_process(self, pid: int) -> str | None:
        """The handle of the run that a process belongs to."""

    # --- about what is to come ---

    def forecast(self, spec: JobSpec, caller: Caller, key_again: str) -> Callable[[], Forecast]:
        """What submitting this now would do."""

    def outlook(self, job: Job) -> Callable[[], JobOutlook]: ...

    def starts(self, jobs: Collection[Job]) -> tuple[Mapping[int, int], Callable[[], Mapping[int, StartRange]]]:
        """The id that each of these pending jobs is planned under (of an array its next task), and when these start."""

    def limit_hint(self, job: Job) -> Callable[[], LimitHint | None] | None: ...

    def starts_without(self, cases: Sequence[Left]) -> Callable[[], Sequence[int]]:
        """For each case, how many more jobs would start now without the foreign memory that it takes away."""

    def vram_seen(self, job: Job) -> VramSeen | None: ...

    def expectation(self, job: Job) -> ExpectedRunTime: ...

    def prediction_error(self, user: str | None = None) -> PredictionError: ...

    def calibration(self) -> Calibration: ...

    def accuracy(self) -> Accuracy | None: ...

    # --- about processes without a job ---

    def adoptable(self, pid: int, caller: Caller) -> Callable[[], AdoptableProcess]: ...

    def adoption_fields(self, found: AdoptableProcess, asked: dict[str, Any]) -> dict[str, Any]: ...

    def owner_notes(self, pid: int) -> OwnerNotes | None: ...

    # --- about the machine and the daemon itself ---

    def config_problem(self) -> tuple[str, str] | None: ...

    def health(self) -> DaemonHealth: ...

    def checks(self) -> Sequence[Check]: ...

    def isolation(self) -> dict[str, Any]: ...

    def enforcement(self, sample: GpuSample | None, limit: str | None) -> tuple[str, str]: ...

    def gpu_faults(self, uuid: str) -> Sequence[GpuFault]: ...

    def metrics(self) -> Page: ...

    def plugin_names(self) -> tuple[str, ...]: ...

    def preset(self) -> dict[str, Any]: ...

    def preset_table(self) -> dict[str, Any]: ...

    def judge_presets(self) -> None: ...


class ApiServer(Protocol):
    """What serves the API while the daemon's loop turns."""

    async def start(self, socket_path: str) -> None: ...

    async def close(self) -> None: ...
