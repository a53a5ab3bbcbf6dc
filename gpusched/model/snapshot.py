"""What the policy is given and what it gives back. Both are frozen; equal inputs give equal plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import field

from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import GpuShare, Request
from gpusched.model.resources import Resources
from gpusched.model.states import ReasonCode
from gpusched.model.value import Value


class Urgency(Value):
    """What a job passes on, through its dependency, to the jobs that it waits for."""

    nice: int
    qos: str


class ClassKey(Value, cache_hash=True):
    """Pending jobs that the policy cannot tell apart but by their place in the queue."""

    uid: int
    account: str
    queue: str
    nice: int
    time_limit_s: int | None
    request: Request
    user: str = ""
    qos: str = ""
    deadline_at: float | None = None
    reservation: str | None = None
    is_front: bool = False
    """Preempted jobs: they go before others of the same tier and queue."""
    inherited: Urgency | None = None
    """Of the most urgent job that waits for one of these to end; None when there is none."""
    can_requeue: bool = True
    can_suspend: bool = False
    throttle: tuple[int, int] | None = None
    """Of tasks of an array with a limit: the array's id, and how many of its tasks may run at once."""
    predicted_s: int | None = None
    """How long it is expected to run, learned from earlier ones: a job without a time limit is planned with it."""
    plan_s: int | None = None
    """How long it is planned to run in place of its time limit, learned too; it may run on up to that."""

    @property
    def planned_s(self) -> int | None:
        """How long it is planned to run: as learned, or its time limit, or as predicted; None when unknown."""
        if self.plan_s is not None:
            return self.plan_s if self.time_limit_s is None else min(self.plan_s, self.time_limit_s)
        return self.predicted_s if self.time_limit_s is None else self.time_limit_s

    def relied_s(self, backfill_by: str) -> int | None:
        """How long it is relied upon to hold what it takes, by `[priority] backfill_by`; None when unknown."""
        return self.planned_s if backfill_by == "prediction" else self.time_limit_s


class PendingJob(Value):
    """One eligible job: its id and the instant its age counts from."""

    id: int
    queued_at: float
    fence_at: float | None = None
    """From when on nothing passes it, whatever it is expected to run; None: nothing was ever reserved for it."""


class PendingClass(Value):
    """Eligible jobs of one class, oldest first (`queued_at`, `id`).

    `jobs` may be only the front of the class; `total` counts all of it.
    """

    key: ClassKey
    jobs: tuple[PendingJob, ...]
    total: int


class Usage(Value):
    """What the ended runs of one user under one account have used, decayed to the instant `at`.

    Open runs are not in it: the policy adds what they have used so far.
    """

    account: str
    user: str
    used: Resources
    """Amounts times seconds."""
    at: float


class Window(Value):
    """One occurrence of a reservation of the calendar: what is kept for its members, from when until when."""

    name: str
    start_at: float
    end_at: float
    held: tuple[Placement, ...]
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    """Who may use it: these users and everybody under these accounts; empty both means nobody."""
    message: str = ""
    """Why, for all to see."""

    @property
    def is_maintenance(self) -> bool:
        """Whether it is kept for nobody."""
        return not (self.users or self.accounts)

    def admits(self, user: str, account: str) -> bool:
        """Whether a job of this user and account may run inside."""
        return user in self.users or account in self.accounts


class VramSeen(Value):
    """What the newest runs of a family used."""

    runs: int
    peak_mib: int
    """Of one card, in the run that used most."""


class Prediction(Value):
    """How long jobs like this one run, learned from those that ended, in seconds."""

    low_s: float
    """Nine in ten ran at least this long."""
    median_s: float
    high_s: float
    """Nine in ten ran at most this long."""
    samples: int


class Snapshot(Value, gc=True):
    """The world at one instant. Classes are sorted by their first job, the rest by name or id."""

    now: float
    nodes: tuple[NodeView, ...]
    allocations: tuple[Allocation, ...] = ()
    pending: tuple[PendingClass, ...] = ()
    usage: tuple[Usage, ...] = ()
    windows: tuple[Window, ...] = ()
    """What the calendar holds from now on, as far as it is looked ahead, by start and name."""
    used: tuple[Usage, ...] | None = None
    """What everybody had used when ranks were last worked out, open runs included, where the caller keeps that; None:
    it is worked out from `usage` and `allocations`."""
    kept: tuple[tuple[int, Placement], ...] = ()
    """Jobs that nothing passes any more, and where room was last reserved for them."""
    name_of: Callable[[int], str] = str
    """What people call the job with this id: a task of an array `42_7`."""


class Reason(Value):
    """Why a job waits: a code for scripts, a sentence for people, the facts behind it for both."""

    code: ReasonCode
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)


class Placement(Value):
    """Where one job goes and what it books there."""

    node: str
    gpus: tuple[GpuShare, ...]
    cpus: float
    mem_mib: int
    resources: tuple[tuple[str, int], ...] = ()
    licenses: tuple[tuple[str, int], ...] = ()
    is_exclusive: bool = False
    others: tuple[Placement, ...] = ()
    """Of a gang: what it books on its other nodes."""


class Start(Value):
    """A decision to start one job now."""

    job_id: int
    placement: Placement


class Reservation(Value):
    """What is kept for one of the first blocked jobs, so that nothing overtakes it for ever."""

    job_id: int
    placement: Placement
    start_at: float | None
    """Latest expected start; None when a job without a time limit must end first."""
    fence_at: float | None = None
    """From when on nothing passes the job, whatever it is expected to run; None: that may always delay it."""


class PreemptMode:
    """Words for how a running job makes room."""

    REQUEUE = "requeue"
    SUSPEND = "suspend"
    CANCEL = "cancel"


class Preempt(Value):
    """A decision to take from a running job what it holds."""

    job_id: int
    mode: str
    """A word of PreemptMode; `cancel` for a job that does not accept to be run again."""
    for_job: int
    text: str
    """Why, in words that follow the job's name: "made room for job 12 (queue vision takes back 2 GPUs it had lent)"."""


class ResumeRun(Value):
    """A decision to let a job go on that the policy had suspended."""

    job_id: int


class Plan(Value):
    """What to do now, and why everything else waits."""

    starts: tuple[Start, ...] = ()
    preempts: tuple[Preempt, ...] = ()
    resumes: tuple[ResumeRun, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    reasons: Mapping[ClassKey, Reason] = field(default_factory=dict)
    """One for every class that still has a job waiting: the reason of its first waiting job."""
    first_blocked: int | None = None
    """The job that all lower ones wait behind, if any."""
    has_more: bool = False
    """A class was cut short in the snapshot and its front was used up: decide again."""


class CalendarEntry(Value):
    """One reservation of the calendar, which may recur: what is kept, when, for whom."""

    name: str
    start_at: float
    """Of the first occurrence."""
    duration_s: int
    held: tuple[Placement, ...]
    """What is kept, on each node."""
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    every_s: int | None = None
    """Distance from one occurrence to the next; None for a single one."""
    until_at: float | None = None
    """No occurrence begins at or after this instant; None for no end."""
    made_by: str = ""
    made_at: float = 0.0
    message: str = ""
    """Why, for all to see."""

    @property
    def is_maintenance(self) -> bool:
        """Whether it is kept for nobody."""
        return not (self.users or self.accounts)


class Estimate(Value):
    """The first estimate of a job's start, and what became of it."""

    job_id: int
    made_at: float
    low_at: float
    high_at: float | None
    """None when unknown."""
    start_at: float | None = None
    """When the job did start; None while it waits."""
