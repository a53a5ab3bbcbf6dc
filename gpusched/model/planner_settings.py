"""Settings of the planner: order, backfill, placement, preemption, oversubscription and ceilings."""

from __future__ import annotations

from typing import Annotated

from gpusched.model.rules import FRACTION, RATE, SOME_TIME, TIMES, WAIT, WEIGHT, OneOf, Range
from gpusched.model.units import MAX_SECONDS
from gpusched.model.value import Value

AUTO = "auto"
PRESET_NAMES = ("fair", "throughput", "fifo", "slurm", AUTO)
BACKFILL_ORDERS = ("line", "shortest")
BACKFILL_BY = ("limit", "prediction")
ORDERS = (
    *("response_ratio", "multifactor", "fifo", "priority", "utilisation", "hybrid"),
    *("sjf", "spf", "saf", "drf", "fairshare"),
)
STRATEGIES = ("pack", "spread", "best_fit", "dot_product", "fgd", "outlook", "first")
LEARNING_STRATEGIES = frozenset({"fgd", "outlook"})
"""Strategies that learn from the jobs usual at this site."""
SPARING_STRATEGIES = frozenset({"pack", "outlook"})
"""Strategies that keep scarce GPUs for jobs that require them."""


class PrioritySettings(Value):
    """How pending jobs are ordered, and which of them get a reservation. Weights apply to `multifactor`: priority = sum
    of weight x factor, each factor in [0, 1]."""

    preset: Annotated[str, OneOf(PRESET_NAMES)] = "fair"
    """Defaults for the settings below that the file does not set: `fair`, `throughput`, `fifo`, `slurm`, or `auto`,
    which lets the daemon choose one of the four; see [presets](../howto/presets.md)."""
    order: Annotated[str, OneOf(ORDERS)] = "response_ratio"
    """Order of the whole queue: `response_ratio`, `multifactor`, `fifo`, `priority`, `utilisation`, `hybrid`, `sjf`,
    `spf`, `saf`, `drf` or `fairshare`. In `response_ratio`, users who have used less of their share go first; among
    users of equal standing, the jobs that have waited longest relative to their length. In the last seven, a job that
    has waited max_wait_s goes first, so that none starves."""
    fairshare_step: Annotated[float, Range(1, 1_000_000)] = 1.4
    """In `response_ratio`, users whose use of their shares differs by less than this factor have equal standing; beyond
    it, the user who has used less goes first, whatever the jobs. 1: fair share ranks no user."""
    reserve_after_s: Annotated[float, Range(0, MAX_SECONDS)] = 6 * 3600.0
    """Time a job waits, on top of reserve_after_runs, before it gets a reservation, in seconds. Until then any job that
    fits may start before it. Where 16 times the longest of the running jobs is less than this, that replaces both."""
    reserve_after_runs: Annotated[float, Range(0, 1000)] = 10.0
    """The same in multiples of the job's expected run time: draining GPUs costs most where jobs are long. Users below
    their share wait less, down to a tenth, and not at all while users a step above them have jobs."""
    fence_s: Annotated[float, SOME_TIME] = 2 * 86400.0
    """How long backfilled jobs that overrun their prediction can delay a job with a reservation; where the running jobs
    are short, at most as long as it waited for that. After its first expected start, or this time after its first
    reservation if that is later, nothing starts on its reserved resources; after twice this time more, the reservation
    no longer moves."""
    weight_age: Annotated[float, WEIGHT] = 16000.0
    """Weight of the age factor: time waited over max_age_s, at most 1. 1000 points equal a week of waiting."""
    max_age_s: Annotated[float, SOME_TIME] = 112 * 86400.0
    """Time after which waiting longer adds nothing, in seconds; long enough for age to outweigh every other factor in
    the end."""
    max_wait_s: Annotated[float, SOME_TIME] = 3 * 86400.0
    """Time after which a job goes first in orders that ignore age, and in `response_ratio` joins the jobs of the users
    who have used least if its user has no running job; also the time over which the deadline factor rises. In
    seconds."""
    weight_nice: Annotated[float, WEIGHT] = 20000.0
    """Weight of the nice factor; at 20000, one step of nice is one point."""
    weight_fairshare: Annotated[float, WEIGHT] = 500.0
    """Weight of the fair-share factor: 1 for the user who has used least of their share."""
    weight_size: Annotated[float, WEIGHT] = 0.0
    """Weight of the size factor: the fraction of the cluster the job requests."""
    favor_small: bool = False
    """Reverse the size factor, so that small jobs rank higher."""
    weight_queue: Annotated[float, WEIGHT] = 1000.0
    """Weight of the queue factor."""
    weight_qos: Annotated[float, WEIGHT] = 1000.0
    """Weight of the QOS factor."""
    weight_deadline: Annotated[float, WEIGHT] = 0.0
    """Weight of the deadline factor: 0 far from it, 1 at the last start that meets it."""
    weight_fit: Annotated[float, WEIGHT] = 0.0
    """Weight of the fit factor: 1 minus the job's dominant share of the cluster."""
    weight_short: Annotated[float, WEIGHT] = 4000.0
    """Weight of the short factor: 1 for the shortest job, falling by an equal amount for each doubling of its predicted
    or limited run time, 0 for a month or an unknown run time."""
    weight_whole: Annotated[float, WEIGHT] = 2800.0
    """Weight of the whole-node factor: the fraction of a node's GPUs the job needs at once, 1 for whole nodes. It keeps
    small jobs from always overtaking wide ones."""
    half_life_s: Annotated[float, SOME_TIME] = 7 * 86400.0
    """Half-life of past usage in fair share, in seconds."""
    calc_period_s: Annotated[float, Range(0, MAX_SECONDS)] = 60.0
    """Interval at which age and past usage are recalculated, in seconds; in between, the order does not change by
    itself. 0: in every cycle. At most a hundredth of half_life_s is used."""
    backfill: bool = True
    """Let later jobs start in gaps where they cannot delay a job with a reservation."""
    backfill_depth: Annotated[int, Range(0, 1_000_000)] = 1
    """How many blocked jobs get a reservation: 1 is EASY backfill; N is conservative backfill for the first N; 0 is
    greedy: any job that fits starts, and a wide job may wait forever."""
    backfill_elsewhere: bool = True
    """Start a backfilled job on its second choice of GPUs when its best placement would use reserved ones; without this
    it waits."""
    backfill_by: Annotated[str, OneOf(BACKFILL_BY)] = "prediction"
    """Which end time backfill trusts: `limit`, the enforced time limit, or `prediction`, the expected run time, which
    can be wrong at the expense of jobs with a reservation."""
    backfill_order: Annotated[str, OneOf(BACKFILL_ORDERS)] = "line"
    """Which jobs fill gaps first: `line`, in queue order, or `shortest`, by expected run time. The queue order and the
    reservations stay the same."""
    predict: bool = True
    """Plan with run times learned from earlier jobs; jobs with a time limit only while the prediction has been the
    better guess. A prediction never ends a job, but a reserved start may slip when a job overruns."""


class PlacementSettings(Value):
    """Where a job is placed when several placements fit."""

    strategy: Annotated[str, OneOf(STRATEGIES)] = "pack"
    """`pack` fills nodes and GPUs, `spread` balances them, `best_fit` leaves the least over, `dot_product` aligns the
    request with what is free, `fgd` leaves the fewest GPUs that typical jobs cannot use, `outlook` keeps the most
    capacity for typical jobs, `first` takes the first node and GPU that fit. `pack` and `outlook` keep scarce GPUs for
    jobs that require them."""
    by_history: bool = True
    """Prefer nodes where the user's jobs have read the data sets of --near, and on which similar jobs of the user have
    neither failed nor taken longer than elsewhere. Never keeps a job waiting."""


class OversubscribeSettings(Value):
    """Oversubscription factors. Above 1, the matching ceiling stops further starts under contention."""

    cpus: Annotated[float, TIMES] = 1.0
    """Cores to allocate per core."""
    mem: Annotated[float, TIMES] = 1.0
    """Host memory to allocate per MiB."""
    vram: Annotated[float, TIMES] = 1.0
    """VRAM that slices may book per MiB of a shared GPU."""


class PreemptSettings(Value):
    """How running jobs make room for jobs that go first."""

    mode: Annotated[str, OneOf(("off", "requeue", "suspend"))] = "requeue"
    """`off`: no run is preempted; `requeue`; or `suspend`, which still requeues jobs with GPUs."""
    min_run_s: Annotated[float, WAIT] = 300.0
    """Minimum run time before a run may be preempted, in seconds."""
    reclaim: bool = True
    """Let queues reclaim lent resources by preemption."""


class CeilingSettings(Value):
    """Measured load above which no further job starts on the node; unset means no ceiling."""

    cpu_fraction: Annotated[float | None, FRACTION] = None
    """Maximum CPU load of the node, 0 to 1."""
    mem_fraction: Annotated[float | None, FRACTION] = None
    """Maximum fraction of host memory in use, 0 to 1."""
    disk_mib_s: Annotated[float | None, RATE] = None
    """Maximum disk traffic, reads and writes, in MiB/s."""
    net_mib_s: Annotated[float | None, RATE] = None
    """Maximum network traffic, in and out, in MiB/s."""
    gpu_fraction: Annotated[float | None, FRACTION] = None
    """Maximum utilisation of a shared GPU that another slice may join, 0 to 1."""
