"""What the policy is given and what it gives back. Both are frozen; equal inputs give equal plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import GpuShare, Request
from gpusched.model.states import ReasonCode


@dataclass(frozen=True, slots=True)
class ClassKey:
    """Pending jobs that the policy cannot tell apart but by their place in the queue."""

    uid: int
    account: str
    queue: str
    nice: int
    time_limit_s: int | None
    request: Request


@dataclass(frozen=True, slots=True)
class PendingJob:
    """One eligible job: its id and the instant its age counts from."""

    id: int
    queued_at: float


@dataclass(frozen=True, slots=True)
class PendingClass:
    """Eligible jobs of one class, oldest first (`queued_at`, `id`).

    `jobs` may be only the front of the class; `total` counts all of it.
    """

    key: ClassKey
    jobs: tuple[PendingJob, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The world at one instant. Classes are sorted by their first job, the rest by name or id."""

    now: float
    nodes: tuple[NodeView, ...]
    allocations: tuple[Allocation, ...] = ()
    pending: tuple[PendingClass, ...] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits: a code for scripts, a sentence for people, the facts behind it for both."""

    code: ReasonCode
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one job goes and what it books there."""

    node: str
    gpus: tuple[GpuShare, ...]
    cpus: float
    mem_mib: int


@dataclass(frozen=True, slots=True)
class Start:
    """A decision to start one job now."""

    job_id: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for the first blocked job, so that nothing overtakes it for ever."""

    job_id: int
    placement: Placement
    start_at: float | None
    """Latest expected start; None when a job without a time limit must end first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and why everything else waits."""

    starts: tuple[Start, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    reasons: Mapping[ClassKey, Reason] = field(default_factory=dict)
    """One for every class that still has a job waiting: the reason of its first waiting job."""
    first_blocked: int | None = None
    """The job that all lower ones wait behind, if any."""
    has_more: bool = False
    """A class was cut short in the snapshot and its front was used up: decide again."""
