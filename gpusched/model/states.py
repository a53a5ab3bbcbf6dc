"""Job states, run states and reason codes, with one line on each.

Names are Slurm's where Slurm has them. `docs/reference/states.md` explains every name; a test compares the two.
"""

from __future__ import annotations

from enum import Enum

from gpusched.model.state_names import ACTIVE, COMPACT, FINAL


class JobState(str, Enum):
    """State of a job. Final states never change."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    DEADLINE = "DEADLINE"

    __str__ = str.__str__

    @property
    def is_final(self) -> bool:
        """Whether the job has ended for good."""
        return self in FINAL_STATES

    @property
    def compact(self) -> str:
        """Slurm's two-letter form, for the ST column of `gq`."""
        return COMPACT[self]


ACTIVE_STATES = frozenset(map(JobState, ACTIVE))
FINAL_STATES = frozenset(map(JobState, FINAL))


class RunState(str, Enum):
    """State of one run. STARTING is recorded before the process is requested."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"

    __str__ = str.__str__


class ReasonCode(str, Enum):
    """Why a job is pending, or why it ended as it did. One word each, without blanks."""

    NONE = "None"
    # reasons of pending jobs
    PRIORITY = "Priority"
    RESOURCES = "Resources"
    REQ_NODE_NOT_AVAIL = "ReqNodeNotAvail"
    LOAD_CEILING = "LoadCeiling"
    BEGIN_TIME = "BeginTime"
    CHEAP_ENERGY = "CheapEnergy"
    RETRY_DELAY = "RetryDelay"
    DEPENDENCY = "Dependency"
    JOB_HELD_USER = "JobHeldUser"
    JOB_HELD_ADMIN = "JobHeldAdmin"
    JOB_HELD_GPU_FAULT = "JobHeldGpuFault"
    LICENSES = "Licenses"
    RESERVATION = "Reservation"
    PREEMPTING = "Preempting"
    JOB_ARRAY_TASK_LIMIT = "JobArrayTaskLimit"
    PARTITION_CONFIG = "PartitionConfig"
    PARTITION_DOWN = "PartitionDown"
    QUEUE_MAX = "QueueMaxLimit"
    QUEUE_MAX_PER_USER = "QueueMaxPerUserLimit"
    QUEUE_MAX_PER_JOB = "QueueMaxPerJobLimit"
    QUEUE_GUARANTEE = "QueueGuarantee"
    QOS_GRP_GRES = "QOSGrpGRES"
    QOS_MAX_GRES_PER_USER = "QOSMaxGRESPerUser"
    QOS_MAX_GRES_PER_JOB = "QOSMaxGRESPerJob"
    QOS_MAX_TIME = "QOSMaxWallDurationPerJobLimit"
    QOS_MAX_JOBS_PER_USER = "QOSMaxJobsPerUserLimit"
    BUDGET_SPENT = "BudgetSpent"
    USER_LIMIT = "UserLimit"
    PLUGIN = "Plugin"
    HANDED_OVER = "HandedOver"
    IMAGE_PULL = "ImagePull"
    # reason of running jobs
    NODE_UNREACHABLE = "NodeUnreachable"
    # reasons of ended jobs
    EXIT_UNKNOWN = "ExitUnknown"
    NON_ZERO_EXIT_CODE = "NonZeroExitCode"
    RAISED_SIGNAL = "RaisedSignal"
    TIME_LIMIT = "TimeLimit"
    LEASE_EXPIRED = "LeaseExpired"
    OUT_OF_MEMORY = "OutOfMemory"
    MEM_LIMIT = "MemoryLimit"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    JOB_LAUNCH_FAILURE = "JobLaunchFailure"
    CANCELLED_BY_USER = "CancelledByUser"
    CLIENT_LOST = "ClientLost"
    DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    NODE_DOWN = "NodeDown"
    SUPERVISOR_LOST = "SupervisorLost"
    GPU_FAILED = "GpuFailed"
    GPU_FOREIGN_USE = "GpuForeignUse"
    GPU_CROWDED = "GpuCrowded"
    GPU_MEMORY_OVER = "GpuMemoryOver"
    GPU_UNBOOKED_USE = "GpuUnbookedUse"
    PREEMPTED = "Preempted"
    REQUEUED = "Requeued"
    GPU_IDLE = "GpuIdle"
    DEADLINE = "DeadLine"
    TASK_FAILED = "TaskFailed"
    MAX_FAILS = "MaxFails"

    __str__ = str.__str__

    @property
    def of_followers(self) -> ReasonCode:
        """Reason of equal jobs behind this one: their turn, unless the same reason holds for each."""
        return _PRIORITY if self is _RESOURCES or self is _PREEMPTING else self


# Lists access these for each job, and Python 3.11 looks up members in a dictionary.
_PRIORITY, _RESOURCES, _PREEMPTING = ReasonCode.PRIORITY, ReasonCode.RESOURCES, ReasonCode.PREEMPTING
