"""Jobs, which are requests, and runs, which are attempts at a job. Both are immutable: updates create new values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from gpusched.model import launch, request, spec
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.tasks import tasks_of
from gpusched.model.value import Value, declared, replace

if TYPE_CHECKING:
    from gpusched.model.launch import Launch as Launch
    from gpusched.model.launch import Notice as Notice
    from gpusched.model.request import Bundles as Bundles
    from gpusched.model.request import Request as Request
    from gpusched.model.request import TaskLayout as TaskLayout
    from gpusched.model.spec import AdoptedProcess as AdoptedProcess
    from gpusched.model.spec import Alerting as Alerting
    from gpusched.model.spec import ArraySpec as ArraySpec
    from gpusched.model.spec import ClientProcess as ClientProcess
    from gpusched.model.spec import Interactive as Interactive
    from gpusched.model.spec import JobSpec as JobSpec
    from gpusched.model.spec import RetryRule as RetryRule
    from gpusched.model.spec import Variant as Variant
else:
    # The declarations as values. Requests cache their hash, as they are looked up by the thousand.
    Bundles = declared(request.Bundles)
    Request = declared(request.Request, cache_hash=True)
    RetryRule = declared(spec.RetryRule)
    Notice = declared(launch.Notice)
    Launch = declared(launch.Launch)
    ArraySpec = declared(spec.ArraySpec)
    Alerting = declared(spec.Alerting)
    ClientProcess = declared(spec.ClientProcess)
    AdoptedProcess = declared(spec.AdoptedProcess)
    Interactive = declared(spec.Interactive)
    TaskLayout = declared(request.TaskLayout)
    Variant = declared(spec.Variant)
    JobSpec = declared(spec.JobSpec, retry=RetryRule())


class Job(Value):
    """One row of the job table."""

    id: int
    uid: int
    user: str
    spec: JobSpec
    state: JobState
    submit_at: float
    queued_at: float
    """Start of the job's age: submission, or the requested begin time; unchanged by retries, anew after an idle run."""
    eligible_at: float
    """Earliest start: begin time, or the end of a retry's backoff."""
    start_at: float | None = None
    """Start of the last run."""
    end_at: float | None = None
    """Set if and only if the state is final."""
    hold: str | None = None
    """`user` or `admin` while held."""
    run: int = 0
    """Number of the current or last run; 0 before the first."""
    failures: int = 0
    """Failed runs that used up a retry."""
    requeues: int = 0
    """Runs lost to the machine and repeated without using a retry."""
    exit_code: int | None = None
    signal: int | None = None
    reason: ReasonCode | None = None
    """Reason of the end, or of the last failed run. Reasons of pending jobs are computed, not stored."""
    reason_text: str | None = None
    cancel_at: float | None = None
    """Time of a recorded cancel while its run has not ended yet."""
    cancelled_by: str | None = None
    """The user who cancelled it; `root` also for the scheduler itself."""
    preempt_at: float | None = None
    """Time of the decision to preempt the current run; None once that run has ended."""
    is_front: bool = False
    """Pending before the rest of its class: a run was preempted and the job has not started since."""
    suspended_at: float | None = None
    """Start of the current suspension; None while the run is active."""
    suspended_by: str | None = None
    """`user`, or `policy`, which suspends a run to make room and resumes it by itself."""
    array_id: int | None = None
    """For a task: id of its array."""
    task: int | None = None
    """For a task: its number in the array."""
    tasks_left: str | None = None
    """For an array: numbers of the tasks without their own row."""
    fallback_id: int | None = None
    """For a failed job: id of its fallback."""

    @property
    def is_handed_over(self) -> bool:
        """Whether it is pending in another scheduler, which has its run."""
        return self.state is JobState.PENDING and self.reason is ReasonCode.HANDED_OVER

    @property
    def is_handed_over_or_runs(self) -> bool:
        """Whether it has a run that is not known to have ended."""
        return self.is_handed_over or self.state in (JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING)

    @property
    def is_array(self) -> bool:
        """Whether this row represents pending array tasks and cannot run itself."""
        return self.spec.array is not None and self.array_id is None

    @property
    def last_id(self) -> int:
        """Last id that the job reserves: an array has one for each task, directly after its own."""
        return self.id + (len(tasks_of(self.spec.array.tasks)) if self.spec.array and self.is_array else 0)

    @property
    def shown_id(self) -> str:
        """Id for display: `42`, for a task `42_7`."""
        return str(self.id) if self.array_id is None else f"{self.array_id}_{self.task}"

    def is_named(self, names: Collection[str], jobs: Mapping[int, Job]) -> bool:
        """Whether the job has one of these names; a task of a sweep, which has its own, also whether its array has.

        Args: jobs: by id, with the array of each task.
        """
        if self.array_id is None or self.spec.name in names:
            return self.spec.name in names
        array = jobs.get(self.array_id)
        return array is not None and array.spec.name in names

    @property
    def restarts(self) -> int:
        """Number of restarts: SLURM_RESTART_COUNT."""
        return max(0, self.run - 1)


class GpuShare(Value):
    """Booking of one run on one card; the whole card when neither part is set."""

    uuid: str
    index: int
    """Index at the time of booking, for display only."""
    vram_mib: int | None = None
    fraction: float | None = None
    limit: str | None = None
    """`MPS` when the run was started under it."""

    @property
    def is_whole(self) -> bool:
        return self.vram_mib is None and self.fraction is None


class RunPart(Value):
    """What a gang's run books on one of its nodes."""

    node: str
    boot_id: str
    gpus: tuple[GpuShare, ...] = ()
    cpus: float = 0.0
    mem_mib: int = 0
    holds: bool = False
    """Its part there holds the node for steps, and runs nothing of the job's by itself."""


class MeasuredCard(Value):
    """What a run used of one card. None is unknown."""

    uuid: str
    index: int
    utilisation: float | None = None
    """Mean, 0 to 1; on a shared card that of the whole card."""
    peak_vram_mib: int | None = None
    vram_mib: int | None = None
    """Booked; for a whole card all of it."""
    mean_power_w: float | None = None
    """Of the run's part of the card."""
    power_limit_w: float | None = None


class RunMeasures(Value):
    """What a run used of its cards, beyond the sums in the run itself. None is unknown."""

    cards: tuple[MeasuredCard, ...] = ()
    idle_s: float | None = None
    """Time in which all its cards were idle."""
    energy_source: str | None = None
    """Where its energy comes from, with `+` between: `counter`, `power`, and `split` if cards were shared."""
    cost: float | None = None
    """Of its energy, the building's part included."""
    currency: str = ""
    grams: float | None = None
    """CO2 equivalents of its energy, the building's part included."""
    pue: float = 1.0
    """Energy of the building per energy of the machines, as it was set."""


class NativeJob(Value):
    """What the engine that a run was handed over to knows it by."""

    engine: str
    id: str | None = None
    """Its job id there; None until the engine has accepted it."""
    nodes: str | None = None
    """Nodes that the engine chose, as it writes them."""


class Run(Value):
    """One attempt at a job: one row of the run table. GPUs, cores and memory are those of all its nodes together."""

    job_id: int
    number: int
    state: RunState
    node: str
    """For a gang, its first node."""
    boot_id: str
    """Boot id of that node at the run's start; if it has changed since, the run cannot be alive."""
    intent_at: float
    gpus: tuple[GpuShare, ...] = ()
    cpus: float = 0.0
    mem_mib: int = 0
    start_at: float | None = None
    end_at: float | None = None
    priority: float | None = None
    """Of the job when it was started; None for an adopted one."""
    supervisor_pid: int | None = None
    supervisor_start_ticks: int | None = None
    """Start time of the supervisor in clock ticks since boot; detects pid reuse."""
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    outcome: JobState | None = None
    """How this attempt ended, as a job state; None while it is open."""
    reason: ReasonCode | None = None
    reason_text: str | None = None
    cpu_s: float | None = None
    system_cpu_s: float | None = None
    """The part of `cpu_s` that the kernel spent; None where only the sum is known."""
    peak_mem_mib: float | None = None
    """Peak resident size of the run's largest process."""
    peak_vram_mib: int | None = None
    mean_utilisation: float | None = None
    energy_j: float | None = None
    """Of its cards alone."""
    measured: RunMeasures | None = None
    power_cap_w: float | None = None
    """Power limit that its cards have for it by its queue's cap; while it is STARTING, the one to be set."""
    suspended_s: float = 0.0
    """Time suspended; excluded from the time limit, and from usage unless the run kept GPUs."""
    stdout_path: str | None = None
    stderr_path: str | None = None
    idle_at: float | None = None
    """Start of its GPUs' idle time, set after its owner was alerted; None while they are busy."""
    idle_step: int = 0
    """Last step taken about its idle GPUs, see `lifecycle.idle`; never decreases."""
    parts: tuple[RunPart, ...] = ()
    """For a gang: what it books on each of its nodes, the first one included; empty for a run on one node."""
    master_port: int | None = None
    """Reserved on its first node as long as it is open, for its ranks to meet at; None if they need not."""
    native: NativeJob | None = None
    """For a run that was handed over: as the other scheduler knows it. Nothing is booked for it here."""
    is_filler: bool = False
    """Started on a spent budget: it costs nothing, and every job within its budget may preempt it."""

    @property
    def id(self) -> str:
        """The engine's handle, `JOB.RUN`; never reused."""
        return run_id(self.job_id, self.number)

    @property
    def mark(self) -> str:
        """What finds the run among a user's jobs in another scheduler, also in a database that uses job ids again."""
        return f"{self.id}.{int(self.intent_at)}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its nodes, by rank."""
        return tuple([part.node for part in self.parts]) if self.parts else (self.node,)

    @property
    def is_free(self) -> bool:
        """Whether it costs no budget: its node failed, it made room for others, another scheduler had it, or it was
        a filler."""
        is_lost = self.outcome is JobState.NODE_FAIL or self.reason is ReasonCode.PREEMPTED
        return is_lost or self.native is not None or self.is_filler

    def on(self, rank: int) -> Run:
        """The run as it is on one of its nodes: bookings of that node only."""
        if not self.parts:
            return self
        part = self.parts[rank]
        return replace(self, node=part.node, boot_id=part.boot_id, gpus=part.gpus, cpus=part.cpus, mem_mib=part.mem_mib)

    @property
    def on_each_node(self) -> tuple[RunPart, ...]:
        """What it books on each of its nodes, by rank."""
        return self.parts or (RunPart(self.node, self.boot_id, self.gpus, self.cpus, self.mem_mib),)


@lru_cache(maxsize=4096)
def run_id(job_id: int, number: int) -> str:
    """Handle of a run, `JOB.RUN`. Asked for dozens of times per run."""
    return f"{job_id}.{number}"


def split_run_id(handle: str) -> tuple[int, int]:
    """Split a handle made by `run_id` into job id and run number."""
    job, _, number = handle.partition(".")
    return int(job), int(number)


class JobEvent(Value):
    """One line of a job's history, append-only."""

    job_id: int
    at: float
    kind: str
    """One word: submitted, started, stopping, ended, retry, requeued, suspended, resumed, held, released, updated,
    note."""
    text: str
    run: int | None = None
    about: str | None = None
    """Which of several things of one kind it tells of, for the watch that tells each only once."""
