"""Settings of queues, QOSs, users and accounts: one table each in the config file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Protocol, TypeVar

from msgspec import field

from gpusched.model.planner_settings import ORDERS
from gpusched.model.rules import (
    COUNT,
    GPU_HOURS,
    GPUS,
    LIMIT,
    MIB,
    NAMES,
    PART,
    SHARES,
    WAIT,
    WATTS,
    WORD,
    Cells,
    MemberShares,
    OneOf,
    Range,
    Text,
)
from gpusched.model.spec import ENGINES
from gpusched.model.value import Value


class QueueSettings(Value):
    """One queue. Queues form a tree; jobs are submitted to its leaves. Without any, a queue is just a name."""

    name: str
    parent: Annotated[str | None, WORD] = None
    """Parent queue; a queue without one is at the top."""
    guaranteed_gpus: Annotated[float, GPUS] = 0.0
    """GPUs guaranteed to the queue; lent while it does not use them."""
    guaranteed_cpus: Annotated[float, GPUS] = 0.0
    """Cores guaranteed to the queue."""
    guaranteed_mem_mib: Annotated[int, MIB] = 0
    """Host memory guaranteed to the queue, in MiB."""
    cells: Annotated[tuple[str, ...], Cells()] = ()
    """Groups of linked GPUs guaranteed whole, as `NODE:SIZE`, or `SIZE` on any node: `4` is one group of four linked
    GPUs."""
    max_gpus: Annotated[float | None, GPUS] = None
    """Maximum GPUs of its jobs, borrowed ones included."""
    max_cpus: Annotated[float | None, GPUS] = None
    """Maximum cores of its jobs."""
    max_mem_mib: Annotated[int | None, MIB] = None
    """Maximum host memory of its jobs, in MiB."""
    weight: Annotated[float | None, SHARES] = None
    """Weight in sharing lent resources with its siblings; 1 when unset."""
    factor: Annotated[float, PART] = 0.0
    """Queue factor in the priority of its jobs, 0 to 1."""
    order: Annotated[str | None, OneOf(ORDERS)] = None
    """Order within the queue, as [priority] order, which applies when unset."""
    max_gpus_per_user: Annotated[float | None, GPUS] = None
    """Maximum GPUs of one user's jobs in it."""
    max_gpus_per_job: Annotated[float | None, GPUS] = None
    """Maximum GPUs of one job."""
    max_running_per_user: Annotated[int | None, COUNT] = None
    """Maximum number of one user's running jobs in it."""
    default_time_s: Annotated[int | None, LIMIT] = None
    """Default time limit of its jobs, in seconds; when unset, that of the parent queue, else [default] time_limit_s."""
    max_time_s: Annotated[int | None, LIMIT] = None
    """Maximum time limit, in seconds; also the default where no shorter default is set."""
    max_jobs: Annotated[int | None, COUNT] = None
    """Maximum number of pending and running jobs in it."""
    max_jobs_per_user: Annotated[int | None, COUNT] = None
    """Maximum number of one user's pending and running jobs in it."""
    preemptible: bool = True
    """Whether the lender can preempt its jobs on borrowed GPUs."""
    ignore_idle: bool = False
    """Exempt its jobs, and those of queues below it, from [idle]."""
    users: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may submit to it, besides those of `accounts`. When both are empty, the parent queue decides; at the
    top, all users may."""
    accounts: Annotated[tuple[str, ...], NAMES] = ()
    """Accounts whose jobs may be submitted to it, including accounts below them."""
    operators: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may cancel, hold, move and update any job in it and in the queues below it."""
    power_cap_w: Annotated[float | None, WATTS] = None
    """Power limit of each whole GPU while a run of this queue has it, in watts; when unset, that of the parent queue,
    else none. Setting it needs root; where the card or the driver does not permit it, jobs run without it."""
    engine: Annotated[str | None, OneOf(ENGINES)] = None
    """`slurm` hands its jobs over to the site's Slurm, see [handover], unless they say otherwise with --engine."""
    burst_after_s: Annotated[float | None, WAIT] = None
    """Expected wait beyond which its pending jobs that allow it are handed over to Slurm, in seconds, see [burst]; when
    unset, that of the parent queue, else never."""
    burst: Annotated[str | None, OneOf(("allow", "ask"))] = None
    """`allow`: its jobs may burst unless submitted with --no-burst; `ask`: only those submitted with --burst. When
    unset, as the parent queue, else `ask`."""
    slurm_partition: Annotated[str | None, WORD] = None
    """Partition of Slurm for its handed-over jobs; when unset, Slurm's default."""
    slurm_account: Annotated[str | None, WORD] = None
    """Account of Slurm for its handed-over jobs; when unset, that of the owner by default there."""
    slurm_qos: Annotated[str | None, WORD] = None
    """QOS of Slurm for its handed-over jobs; when unset, Slurm's default."""


class QosSettings(Value):
    """One quality of service. Without any, no job may name one."""

    name: str
    tier: Annotated[int, Range(-1000, 1000)] = 0
    """Jobs of a higher tier go before all jobs of a lower one, and may preempt as `preempts` says."""
    factor: Annotated[float, PART] = 0.0
    """QOS factor in the priority of its jobs, 0 to 1."""
    preempts: Annotated[tuple[str, ...], NAMES] = ()
    """QOSs of lower tier whose running jobs it may preempt."""
    preemptible: bool = True
    """`false` protects its runs from every QOS, even those that list it in `preempts`."""
    min_run_s: Annotated[float | None, WAIT] = None
    """Minimum run time before its runs may be preempted, in seconds; [preempt] min_run_s when unset."""
    ignore_idle: bool = False
    """Exempt its jobs from [idle]."""
    usage_factor: Annotated[float, Range(0, 1e6)] = 1.0
    """Factor on its usage in fair share: 0 for nothing, 2 for double."""
    max_gpus: Annotated[float | None, GPUS] = None
    """Maximum GPUs of all its jobs together."""
    max_gpus_per_user: Annotated[float | None, GPUS] = None
    """Maximum GPUs of one user's jobs."""
    max_gpus_per_job: Annotated[float | None, GPUS] = None
    """Maximum GPUs of one job."""
    max_running_per_user: Annotated[int | None, COUNT] = None
    """Maximum number of one user's running jobs."""
    max_jobs_per_user: Annotated[int | None, COUNT] = None
    """Maximum number of one user's pending and running jobs."""
    max_time_s: Annotated[int | None, LIMIT] = None
    """Maximum time limit, in seconds; also the default where no shorter default is set."""
    users: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may use it, besides those of `accounts`; all users when both are empty."""
    accounts: Annotated[tuple[str, ...], NAMES] = ()
    """Accounts whose jobs may use it, including accounts below them."""


class UserSettings(Value):
    """Limits of one user."""

    name: str
    max_gpus: Annotated[float | None, GPUS] = None
    """Maximum GPUs of all running jobs of this user together."""
    max_jobs: Annotated[int | None, Range(0, 10**9)] = None
    """Maximum running jobs of this user; with 0, none starts."""
    message: Annotated[str | None, Text()] = None
    """Why, for the user: part of the reason of waiting jobs."""


EVERYBODY = "*"
"""All users of an account."""


class AccountSettings(Value):
    """One account. Accounts form a tree with users as its leaves. Without any, each name used is one."""

    name: str
    parent: Annotated[str | None, WORD] = None
    """Parent account; an account without one is at the top."""
    shares: Annotated[float, SHARES] = 1.0
    """Its share of its parent's shares, relative to its siblings."""
    users: Annotated[Mapping[str, float], MemberShares()] = field(default_factory=dict)
    """Users who may submit to it, with their shares in it: `["ann", "bob"]` gives each 1, `{ann = 2, bob = 1}` sets
    them, `"*"` is all users. Members of accounts above and below are not members of this one."""
    coordinators: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may add and remove its members, limit them in it, and hold, release, cancel and re-prioritise its jobs;
    also in the accounts below it. Only for the system's daemon."""
    gpu_hours: Annotated[float | None, GPU_HOURS] = None
    """Budget: GPU-hours that jobs of this account and those below it may use in a period. Jobs that do not fit into
    what is left wait."""
    gpu_hours_per_user: Annotated[float | None, GPU_HOURS] = None
    """The same for each user."""
    budget_period: Annotated[str, OneOf(("month", "quarter", "year", "total"))] = "month"
    """Period of these budgets, in local time: a calendar `month`, `quarter` or `year`, or `total`, all time. Longer
    periods need [history] keep_days to last as long."""
    when_spent: Annotated[str, OneOf(("wait", "filler"))] = "wait"
    """What becomes of jobs that do not fit into what is left of these budgets: they `wait`, or run as `filler` on GPUs
    that no other job needs, preempted at once for any job within its budget, and free."""
    groups: Annotated[tuple[str, ...], NAMES] = ()
    """Unix groups whose members may submit to it, looked up at submission; each member has 1 share. An account without
    `users` and `groups` has no members; while no account has any, all accounts are open."""


class _Child(Protocol):
    @property
    def parent(self) -> str | None: ...


Node = TypeVar("Node", bound=_Child)


def chain_of(name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """A node and its ancestors, bottom-up, each once; empty for an unknown node."""
    passed: set[str] = set()
    above: str | None = name
    while above is not None and above in nodes and above not in passed:
        passed.add(above)
        yield nodes[above]
        above = nodes[above].parent


def parent_in(name: str, nodes: Mapping[str, Node]) -> str | None:
    """Parent of a node; None without a parent, for an unknown node, or within a cycle.

    Configuration checks reject the last two; this only keeps traversals finite.
    """
    above = nodes[name].parent if name in nodes else None
    if above is None or above not in nodes:
        return None
    last = list(chain_of(name, nodes))[-1]
    leads_out = last.parent is None or last.parent not in nodes
    return above if leads_out else None
