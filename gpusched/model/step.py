"""Steps: the parallel tasks that `srun` starts inside the run of a job, one record for each call."""

from __future__ import annotations

from gpusched.model.job import GpuShare
from gpusched.model.states import JobState
from gpusched.model.value import Value

MOST_STEPS = 40_000
"""In one run, as Slurm's MaxStepCount."""
MOST_TASKS = 65_533
NAME_LENGTH = 256
COMMAND_LENGTH = 1024
"""Characters of a step's name and command that are kept."""


class JobStep(Value):
    """One step: a row of the table of steps."""

    job_id: int
    run: int
    number: int
    """From 0 in each run: `42.0`."""
    name: str
    command: str
    node: str
    start_at: float
    state: JobState = JobState.RUNNING
    """RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT or NODE_FAIL."""
    tasks: int = 1
    cpus: float = 1.0
    """Of all tasks together."""
    gpus: tuple[GpuShare, ...] = ()
    is_exclusive: bool = False
    """Other exclusive steps do not get its CPUs and GPUs meanwhile."""
    has_own_gpus: bool = False
    """It asked for GPUs, and has these; otherwise it shares those of its job."""
    time_limit_s: int | None = None
    end_at: float | None = None
    exit_code: int | None = None
    """Highest of its tasks; None while it runs, after a signal, and if its end was never observed."""
    signal: int | None = None
    cancel_uid: int | None = None
    """Who cancelled it."""
    user_cpu_s: float | None = None
    """Of all its tasks and what they waited for, as `system_cpu_s`; None while it runs and if unknown."""
    system_cpu_s: float | None = None
    peak_mem_mib: float | None = None
    """Peak resident size of the largest process of any task."""
    mean_mem_mib: float | None = None
    """The same of each task, on average."""
    pid: int | None = None
    """The process that started it: `srun`."""
    start_ticks: int | None = None
    """Start of that process in clock ticks since boot; detects pid reuse."""

    @property
    def id(self) -> tuple[int, int, int]:
        return self.job_id, self.run, self.number

    @property
    def is_open(self) -> bool:
        return self.end_at is None
