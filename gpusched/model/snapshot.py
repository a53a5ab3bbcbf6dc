"""Input and output of the policy. Both are frozen; equal inputs give equal plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import field

from gpusched.model.cluster import Allocation, JobTerms, NodeView
from gpusched.model.job import GpuShare
from gpusched.model.leaning import NodeLeaning
from gpusched.model.mentions import Knows, render, render_value
from gpusched.model.resources import Resources
from gpusched.model.states import ReasonCode
from gpusched.model.table_settings import UserLimit
from gpusched.model.value import Value, replace


class Urgency(Value):
    """Urgency that a pending job passes on to the jobs it depends on."""

    nice: int
    qos: str


class ClassKey(Value, cache_hash=True):
    """Pending jobs that differ for the policy only by their place in the queue."""

    terms: JobTerms
    nice: int
    time_limit_s: int | None
    deadline_at: float | None = None
    is_front: bool = False
    """Preempted jobs: they rank before others of the same tier and queue."""
    inherited: Urgency | None = None
    """From the most urgent job that depends on one of these; None without one."""
    throttle: tuple[int, int] | None = None
    """For tasks of an array with a limit: the array's id, and the maximum number of running tasks."""
    leaning: NodeLeaning | None = None
    """What earlier runs say about nodes for these jobs."""
    predicted_s: int | None = None
    """Run time predicted from earlier jobs, used to plan jobs without a time limit."""
    plan_s: int | None = None
    """Run time learned from earlier jobs, used in place of the time limit; the run may last up to that limit."""
    variants: tuple[ClassKey, ...] = ()
    """The other requests with one of which the job may start instead, in the order preferred, each as the class of a
    job that makes this request alone."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """The terms of its jobs under their own names: plug-ins read `key.user` and `key.request`."""
            if name in JobTerms.__struct_fields__:
                return getattr(self.terms, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def with_terms(self, **parts: Any) -> ClassKey:
        """The class with other terms. Args: parts: fields of `JobTerms`."""
        return replace(self, terms=replace(self.terms, **parts))

    @property
    def each_variant(self) -> tuple[ClassKey, ...]:
        """The class with each of its requests alone, the most preferred one first."""
        return (replace(self, variants=()), *self.variants) if self.variants else (self,)

    @property
    def planned_s(self) -> int | None:
        """Planned run time: `plan_s`, else the time limit, else `predicted_s`; None when unknown."""
        if self.plan_s is not None:
            return self.plan_s if self.time_limit_s is None else min(self.plan_s, self.time_limit_s)
        return self.predicted_s if self.time_limit_s is None else self.time_limit_s

    def relied_s(self, backfill_by: str) -> int | None:
        """Run time that backfill trusts, by `[priority] backfill_by`; None when unknown."""
        return self.planned_s if backfill_by == "prediction" else self.time_limit_s

    def planned_on(self, slowness: float) -> float | None:
        """As `planned_s`, on GPUs that take `slowness` times as long as those of speed 1; at most the limit."""
        learned_s = self.predicted_s if self.plan_s is None and self.time_limit_s is None else self.plan_s
        if learned_s is None or slowness == 1.0:
            return self.planned_s
        scaled_s = learned_s * slowness
        return scaled_s if self.time_limit_s is None else min(scaled_s, self.time_limit_s)


class PendingJob(Value):
    """One eligible job: its id and the start of its age."""

    id: int
    queued_at: float
    fence_at: float | None = None
    """From then on no job may pass it, whatever its expected run time; None: it never had a reservation."""


class PendingClass(Value):
    """Eligible jobs of one class, oldest first (`queued_at`, `id`).

    `jobs` may be only the front of the class; `total` counts all jobs.
    """

    key: ClassKey
    jobs: tuple[PendingJob, ...]
    total: int


class Usage(Value):
    """Usage of the ended runs of one user under one account, decayed to the instant `at`.

    Excludes open runs; the policy adds their usage so far.
    """

    account: str
    user: str
    used: Resources
    """Amounts times seconds."""
    at: float


class Window(Value):
    """One occurrence of a calendar reservation: its resources, start and end."""

    name: str
    start_at: float
    end_at: float
    held: tuple[Placement, ...]
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    """Users and accounts that may use it, sub-accounts included; when both are empty, no job may."""
    message: str = ""
    """Reason, visible to all users."""

    @property
    def is_maintenance(self) -> bool:
        """Whether it admits no jobs."""
        return not (self.users or self.accounts)

    def admits(self, user: str, account: str) -> bool:
        """Whether jobs of this user and account may run inside."""
        return user in self.users or account in self.accounts


class Budget(Value):
    """GPU-hours of an account in one period: what is granted, what was used, what running jobs may still use."""

    account: str
    accounts: tuple[str, ...]
    """Accounts whose jobs count: this one and those below it."""
    gpu_s: float | None = None
    """GPU-seconds granted to all of them together; None: no limit."""
    user_gpu_s: float | None = None
    """The same for each user."""
    until_at: float | None = None
    """End of the period; None: it never ends."""
    period: str = ""
    """As the end of a sentence: ` of November 2026`."""
    again: str = ""
    """When the next period begins: `1 Dec`."""
    spent: tuple[tuple[str, float, float], ...] = ()
    """Users with the GPU-seconds that each has used and booked, by name, weighted."""
    weights: tuple[tuple[str, float], ...] = ()
    """What an hour of each model of card counts, by normalised name; empty where all count 1."""
    credit_s: float = 0.0
    """The part of `gpu_s` that was given on top."""
    since: float = 0.0
    """Begin of the period."""
    when_spent: str = "wait"
    """What becomes of jobs that do not fit: `wait`, or `filler`."""


class VramSeen(Value):
    """VRAM use of a family's latest runs."""

    runs: int
    peak_mib: int
    """Maximum per card over these runs."""


class Prediction(Value):
    """Run times of similar jobs, learned from ended ones, in seconds."""

    low_s: float
    """10th percentile: nine in ten ran at least this long."""
    median_s: float
    high_s: float
    """90th percentile: nine in ten ran at most this long."""
    samples: int


class Snapshot(Value, gc=True):
    """State of the cluster at one instant. Classes are sorted by their first job, the rest by name or id."""

    now: float
    nodes: tuple[NodeView, ...]
    allocations: tuple[Allocation, ...] = ()
    pending: tuple[PendingClass, ...] = ()
    usage: tuple[Usage, ...] = ()
    windows: tuple[Window, ...] = ()
    """Reservations of the calendar from now to its horizon, by start and name."""
    used: tuple[Usage, ...] | None = None
    """All usage at the last computation of ranks, open runs included, if the caller keeps it; None: computed from
    `usage` and `allocations`."""
    budgets: tuple[Budget, ...] = ()
    """GPU-hour budgets, by account."""
    limits: tuple[LimitInForce, ...] = ()
    """Limits of single users."""
    kept: tuple[tuple[int, Placement], ...] = ()
    """Jobs that no job may pass any more, each with the place of its last reservation."""
    name_of: Callable[[int], str] = str
    """Display name of a job by id: `42_7` for an array task."""


class LimitInForce(Value):
    """A limit of one user, with the words for its end."""

    limit: UserLimit
    until: str = ""
    """In local time: `30 Nov 18:00`; empty without an end."""


class Reason(Value):
    """Why a job is pending: a code for scripts, a sentence for people, and facts for both."""

    code: ReasonCode
    text: str
    """May mention jobs and reservations, as `facts` may: see `mentions`."""
    facts: Mapping[str, object] = field(default_factory=dict)

    def render(self, knows: Knows | None = None) -> Reason:
        """The reason for one viewer; for one who may know everything if `knows` is None."""
        facts = {name: render_value(value, knows) for name, value in self.facts.items()}
        return Reason(self.code, render(self.text, knows), facts)


class Placement(Value):
    """Node and bookings of one job."""

    node: str
    gpus: tuple[GpuShare, ...]
    cpus: float
    mem_mib: int
    resources: tuple[tuple[str, int], ...] = ()
    licenses: tuple[tuple[str, int], ...] = ()
    is_exclusive: bool = False
    others: tuple[Placement, ...] = ()
    """For a gang: bookings on its other nodes."""


class Start(Value):
    """A decision to start one job now."""

    job_id: int
    placement: Placement
    is_filler: bool = False
    """Whether its budget is spent, so that every job within its budget may preempt it."""
    variant: int = 0
    """The request that it starts with, counted from 0 in the order preferred."""


class Reservation(Value):
    """Resources reserved for one of the first blocked jobs, so that it cannot starve."""

    job_id: int
    placement: Placement
    start_at: float | None
    """Latest expected start; None when a job without a time limit must end first."""
    fence_at: float | None = None
    """From then on no job may pass it, whatever its expected run time; None: backfill may always delay it."""


class PreemptMode:
    """How a running job makes room."""

    REQUEUE = "requeue"
    SUSPEND = "suspend"
    CANCEL = "cancel"


class Preempt(Value):
    """A decision to preempt a running job."""

    job_id: int
    mode: str
    """A word of PreemptMode; `cancel` for a job that does not consent to being requeued."""
    for_job: int
    text: str
    """Reason, phrased to follow the job's name: "made room for job 12 (queue vision takes back 2 GPUs it had lent)"."""


class ResumeRun(Value):
    """A decision to resume a job that the policy suspended."""

    job_id: int


class Plan(Value):
    """Decisions for now, and the reasons of jobs that stay pending."""

    starts: tuple[Start, ...] = ()
    preempts: tuple[Preempt, ...] = ()
    resumes: tuple[ResumeRun, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    reasons: Mapping[ClassKey, Reason] = field(default_factory=dict)
    """One per class with pending jobs: the reason of its first pending job."""
    first_blocked: int | None = None
    """First blocked job, ahead of all lower ones; None without one."""


class CalendarEntry(Value):
    """One calendar reservation, possibly recurring: its resources, times and users."""

    name: str
    start_at: float
    """Start of the first occurrence."""
    duration_s: int
    held: tuple[Placement, ...]
    """Reserved resources, by node."""
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    every_s: int | None = None
    """Interval between occurrences; None for a single one."""
    until_at: float | None = None
    """End of the recurrence: no occurrence starts at or after it; None for no end."""
    made_by: str = ""
    made_at: float = 0.0
    message: str = ""
    """Reason, visible to all users."""

    @property
    def is_maintenance(self) -> bool:
        """Whether it admits no jobs."""
        return not (self.users or self.accounts)


class Estimate(Value):
    """First estimate of a job's start, and the actual outcome."""

    job_id: int
    made_at: float
    low_at: float
    high_at: float | None
    """None when unknown."""
    start_at: float | None = None
    """Actual start; None while pending."""
