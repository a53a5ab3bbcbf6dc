"""A job is what was asked; a run is one attempt at it. Both are frozen values: a change makes a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusched.model import spec
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.tasks import tasks_of
from gpusched.model.value import Value, declared

if TYPE_CHECKING:
    from gpusched.model.spec import AdoptedProcess as AdoptedProcess
    from gpusched.model.spec import Alerting as Alerting
    from gpusched.model.spec import ArraySpec as ArraySpec
    from gpusched.model.spec import ClientProcess as ClientProcess
    from gpusched.model.spec import Interactive as Interactive
    from gpusched.model.spec import JobSpec as JobSpec
    from gpusched.model.spec import Launch as Launch
    from gpusched.model.spec import Notice as Notice
    from gpusched.model.spec import Request as Request
    from gpusched.model.spec import RetryRule as RetryRule
else:
    # The declarations as values. Requests are looked up by the thousand.
    Request = declared(spec.Request, cache_hash=True)
    RetryRule = declared(spec.RetryRule)
    Notice = declared(spec.Notice)
    Launch = declared(spec.Launch)
    ArraySpec = declared(spec.ArraySpec)
    Alerting = declared(spec.Alerting)
    ClientProcess = declared(spec.ClientProcess)
    AdoptedProcess = declared(spec.AdoptedProcess)
    Interactive = declared(spec.Interactive)
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
    """Age counts from here: submission, or the asked begin time; retries do not move it."""
    eligible_at: float
    """Not before this instant: begin time, or the end of a retry's backoff."""
    start_at: float | None = None
    """Start of the last run."""
    end_at: float | None = None
    """Set exactly when the state is final."""
    hold: str | None = None
    """`user` or `admin` while held."""
    run: int = 0
    """Number of the current or last run; 0 before the first."""
    failures: int = 0
    """Failed runs that counted against the retries."""
    requeues: int = 0
    """Runs lost to the machine and repeated for free."""
    exit_code: int | None = None
    signal: int | None = None
    reason: ReasonCode | None = None
    """Of the end, or of the last failed run; while pending the reason is worked out, not stored."""
    reason_text: str | None = None
    cancel_at: float | None = None
    """When a cancel was recorded for a run that has not ended yet."""
    preempt_at: float | None = None
    """When it was decided to end the current run for a job that goes first; None once that run has ended."""
    is_front: bool = False
    """Waits at the front of its kind: a run of it was preempted, and none has started since."""
    suspended_at: float | None = None
    """Since when the current run stands still; None while it moves."""
    suspended_by: str | None = None
    """Who stopped it: `user`, or `policy` when it makes room and goes on by itself."""
    array_id: int | None = None
    """Of a task: the id of its array."""
    task: int | None = None
    """Of a task: its number in the array."""
    tasks_left: str | None = None
    """Of an array: the numbers of the tasks that have no row of their own yet."""
    fallback_id: int | None = None
    """Of a job that has failed: the id of its fallback."""

    @property
    def is_array(self) -> bool:
        """Whether this row stands for tasks rather than for something that runs."""
        return self.spec.array is not None and self.array_id is None

    @property
    def last_id(self) -> int:
        """The last id that it uses up: an array has one for each of its tasks, right behind its own."""
        return self.id + (len(tasks_of(self.spec.array.tasks)) if self.spec.array and self.is_array else 0)

    @property
    def shown_id(self) -> str:
        """The id as people know it: `42`, of a task `42_7`."""
        return str(self.id) if self.array_id is None else f"{self.array_id}_{self.task}"

    @property
    def restarts(self) -> int:
        """How often the job was started again: SLURM_RESTART_COUNT."""
        return max(0, self.run - 1)


class GpuShare(Value):
    """What one run books on one card; whole when neither part is set."""

    uuid: str
    index: int
    """Index at the time of booking, for display only."""
    vram_mib: int | None = None
    fraction: float | None = None
    limit: str | None = None
    """`MPS` when the run was started under it."""

    @property
    def is_whole(self) -> bool:
        """Whether the card is booked alone."""
        return self.vram_mib is None and self.fraction is None


class Run(Value):
    """One attempt at a job: one row of the run table."""

    job_id: int
    number: int
    state: RunState
    node: str
    boot_id: str
    """Of the machine when the run was recorded; another one now means the run cannot be alive."""
    intent_at: float
    gpus: tuple[GpuShare, ...] = ()
    cpus: float = 0.0
    mem_mib: int = 0
    start_at: float | None = None
    end_at: float | None = None
    supervisor_pid: int | None = None
    supervisor_start_ticks: int | None = None
    """Start time of the supervisor in clock ticks since boot, against pid reuse."""
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    outcome: JobState | None = None
    """How this attempt ended, in job-state words; None while it is open."""
    reason: ReasonCode | None = None
    reason_text: str | None = None
    cpu_s: float | None = None
    peak_mem_mib: float | None = None
    """Largest resident size of any one process of the run."""
    peak_vram_mib: int | None = None
    mean_utilisation: float | None = None
    energy_j: float | None = None
    suspended_s: float = 0.0
    """How long the run stood still; the time limit does not count it, nor does usage unless it kept GPUs."""
    stdout_path: str | None = None
    stderr_path: str | None = None
    idle_at: float | None = None
    """Since when its GPUs do nothing, once its owner has been told; None while they work."""
    idle_step: int = 0
    """What was done about its idle GPUs so far, see `lifecycle.idle`; never lowered."""

    @property
    def id(self) -> str:
        """The engine's handle, `JOB.RUN`; used once and never again."""
        return run_id(self.job_id, self.number)


def run_id(job_id: int, number: int) -> str:
    """Handle of a run, `JOB.RUN`."""
    return f"{job_id}.{number}"


def split_run_id(handle: str) -> tuple[int, int]:
    """Job id and run number of a handle made by `run_id`."""
    job, _, number = handle.partition(".")
    return int(job), int(number)


class JobEvent(Value):
    """One line of a job's story, append-only."""

    job_id: int
    at: float
    kind: str
    """One word: submitted, started, stopping, ended, retry, requeued, suspended, resumed, held, released, updated,
    note."""
    text: str
    run: int | None = None
