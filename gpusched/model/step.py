"""Steps: the parallel tasks that `srun` starts inside the run of a job, one record for each call."""

from __future__ import annotations

import re

from gpusched.model.job import GpuShare
from gpusched.model.states import JobState
from gpusched.model.value import Value

MOST_STEPS = 40_000
"""In one run, as Slurm's MaxStepCount."""
MOST_TASKS = 65_533
NAME_LENGTH = 256
COMMAND_LENGTH = 1024
"""Characters of a step's name and command that are kept."""


BLOCK, CYCLIC, PLANE, ARBITRARY = "block", "cyclic", "plane", "arbitrary"
DISTRIBUTION = re.compile(r"block|cyclic|arbitrary|plane=[1-9][0-9]{0,4}")
"""How tasks are numbered over nodes; see srun(1), `--distribution`."""


class StepPart(Value):
    """What a step has on one node."""

    node: str
    tasks: tuple[int, ...]
    """Their numbers in the step, in local order."""
    cpus: float = 1.0
    gpus: tuple[GpuShare, ...] = ()


class TaskUsage(Value):
    """What one task of a step, or the script of its job, uses on one node now."""

    step: int | None
    """None for the script."""
    task: int | None
    """Its number in the step, if that is known."""
    pids: tuple[int, ...]
    cpu_s: float
    """Of its processes and those that they have waited for."""
    peak_mem_mib: float
    """Peak resident size of its largest process."""
    mem_mib: float
    """Resident size of all its processes together."""
    peak_virtual_mib: float
    """Of the process whose address space was largest."""


class StepRequest(Value):
    """What `srun` asks for; None where nothing was said."""

    tasks: int | None = None
    ntasks_per_node: int | None = None
    """Tasks of each node without `tasks`, most of each node with it."""
    nodes_min: int | None = None
    nodes_max: int | None = None
    """By default `nodes_min`."""
    nodelist: tuple[str, ...] = ()
    """Nodes that the step is to have."""
    exclude: tuple[str, ...] = ()
    relative: int = 0
    """Number in the job of the first node that it may have."""
    cpus_per_task: float = 1.0
    gpus: int | None = None
    """Of its own on all nodes together; None, as for the next two: those of the job, as other steps."""
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gpu_type: str | None = None
    """Part of the model's name of each of these GPUs; None for any that the job has."""
    distribution: str = BLOCK
    """As `DISTRIBUTION`."""
    hosts: tuple[str, ...] = ()
    """The node of each task, for an arbitrary distribution."""
    is_exact: bool = False
    """Its CPUs are its own as well."""
    overlaps: bool = False
    """Share CPUs and GPUs with other steps."""
    overcommits: bool = False
    """It may have more tasks than there are CPUs."""

    @property
    def has_own_gpus(self) -> bool:
        return (self.gpus, self.gpus_per_node, self.gpus_per_task) != (None, None, None)

    @property
    def is_exclusive(self) -> bool:
        """Whether other exclusive steps do not get its GPUs, and its CPUs if it is exact."""
        return not self.overlaps and (self.is_exact or self.has_own_gpus)


class JobStep(Value):
    """One step: a row of the table of steps. CPUs and GPUs are those of all its nodes together."""

    job_id: int
    run: int
    number: int
    """From 0 in each run: `42.0`."""
    name: str
    command: str
    node: str
    """Of the process that started it; its tasks run there too unless `parts` says otherwise."""
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
    parts: tuple[StepPart, ...] = ()
    """What it has on each of its nodes, in their order in the job; empty for a step on `node` alone."""

    @property
    def on_each_node(self) -> tuple[StepPart, ...]:
        return self.parts or (StepPart(self.node, tuple(range(self.tasks)), self.cpus, self.gpus),)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where its tasks run."""
        return tuple(part.node for part in self.parts) or (self.node,)

    @property
    def id(self) -> tuple[int, int, int]:
        return self.job_id, self.run, self.number

    @property
    def is_open(self) -> bool:
        return self.end_at is None
