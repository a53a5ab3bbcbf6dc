"""Every setting with its default, unit and meaning. `config.py` fills them in from file and environment.

The text below a field is its entry in `docs/reference/settings.md`, a rule in its type says which values it may have.
The name in the config file is the field's path, as in `[retry] backoff_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Protocol, TypeVar

from msgspec import field

from gpusched.model.rules import (
    AT_START,
    CORES,
    COUNT,
    FRACTION,
    GPUS,
    LIMIT,
    MIB,
    NAMES,
    PACE,
    PART,
    RATE,
    SHARES,
    SOME_MIB,
    SOME_TIME,
    TIMES,
    WAIT,
    WEIGHT,
    WORD,
    Amounts,
    Cells,
    Folder,
    MemberShares,
    Modules,
    Numbers,
    OneOf,
    Range,
    SomeOf,
    Text,
    Texts,
)
from gpusched.model.units import MAX_MIB, MAX_SECONDS
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
"""Those that look at the jobs that are usual here."""
SPARING_STRATEGIES = frozenset({"pack", "outlook"})
"""Those that leave scarce cards to who insists on them."""


class PrioritySettings(Value):
    """How pending jobs are ordered, and for which of them room is reserved. Weights count in `multifactor`: priority =
    sum of weight x factor, each factor in [0, 1]."""

    preset: Annotated[str, OneOf(PRESET_NAMES)] = "fair"
    """Defaults of the settings below that the file does not state: `fair`, `throughput`, `fifo`, `slurm`, or `auto`,
    under which the daemon chooses one of the four, see [presets](../howto/presets.md)."""
    order: Annotated[str, OneOf(ORDERS)] = "response_ratio"
    """Order of the whole queue: `response_ratio`, `multifactor`, `fifo`, `priority`, `utilisation`, `hybrid`, `sjf`,
    `spf`, `saf`, `drf` or `fairshare`. In `response_ratio` users who have used less of their share go first, and among
    users who stand alike the jobs that have waited longest for their length. In the last seven a job that has waited
    max_wait_s goes first, so that none starves."""
    fairshare_step: Annotated[float, Range(1, 1_000_000)] = 1.4
    """In `response_ratio`, users stand alike whose use of their shares differs by less than this factor; of others
    those who have used less go first, whatever their jobs are like. 1: fair share ranks nobody."""
    reserve_after_s: Annotated[float, Range(0, MAX_SECONDS)] = 6 * 3600.0
    """Time a job waits, on top of reserve_after_runs, before room is reserved for it, in seconds. Until then whatever
    fits may start before it."""
    reserve_after_runs: Annotated[float, Range(0, 1000)] = 10.0
    """The same in multiples of how long the job is expected to run: draining GPUs costs most where jobs are long.
    Users who have used less than their share wait less for it, down to a tenth, and not at all while users who have
    used more by a step have jobs."""
    fence_s: Annotated[float, SOME_TIME] = 2 * 86400.0
    """How long jobs that are expected to end in time, but may not, can delay a reserved job: once its first expected
    start, or this time since it was first reserved if that is later, is over, none starts on what is reserved for it;
    after twice this time more the reservation stays where it is."""
    weight_age: Annotated[float, WEIGHT] = 16000.0
    """Weight of the age factor: time waited over max_age_s, at most 1. 1000 points are a week of waiting."""
    max_age_s: Annotated[float, SOME_TIME] = 112 * 86400.0
    """Time after which waiting longer adds nothing, in seconds: so long that age outweighs in the end what others may
    be ahead."""
    max_wait_s: Annotated[float, SOME_TIME] = 3 * 86400.0
    """Time after which a job goes first in orders that do not count age, and in `response_ratio` among those whose
    users have used least if none of its user's jobs runs, and over which the deadline factor rises, in seconds."""
    weight_nice: Annotated[float, WEIGHT] = 20000.0
    """Weight of the nice factor; at 20000 one nice step is one point."""
    weight_fairshare: Annotated[float, WEIGHT] = 500.0
    """Weight of the fair-share factor: 1 for who has used least of their share."""
    weight_size: Annotated[float, WEIGHT] = 0.0
    """Weight of the size factor: the part of the cluster that the job asks for."""
    favor_small: bool = False
    """Turn the size factor round, so that small jobs rank higher."""
    weight_queue: Annotated[float, WEIGHT] = 1000.0
    """Weight of the queue's own factor."""
    weight_qos: Annotated[float, WEIGHT] = 1000.0
    """Weight of the QOS's own factor."""
    weight_deadline: Annotated[float, WEIGHT] = 0.0
    """Weight of the deadline factor: 0 far from it, 1 at the last start that meets it."""
    weight_fit: Annotated[float, WEIGHT] = 0.0
    """Weight of the fit factor: 1 less the dominant share of the cluster asked for."""
    weight_short: Annotated[float, WEIGHT] = 4000.0
    """Weight of the short factor: 1 for a job that is over at once, less by as much for each doubling of its length,
    as predicted or by its limit, 0 for a month and for an unknown length."""
    weight_whole: Annotated[float, WEIGHT] = 2800.0
    """Weight of the whole factor: the part of a node's GPUs that the job needs free at once, 1 for whole nodes.
    Against it that small jobs keep passing wide ones."""
    half_life_s: Annotated[float, SOME_TIME] = 7 * 86400.0
    """Time after which past usage counts half, in seconds."""
    calc_period_s: Annotated[float, Range(0, MAX_SECONDS)] = 60.0
    """Age and past use count as of the last whole multiple of this time, in seconds; between two of them the order
    does not change by itself. 0: as of now, in every cycle. It is never more than a hundredth of half_life_s."""
    backfill: bool = True
    """Let later jobs start in the gaps when they cannot delay those that have a reservation."""
    backfill_depth: Annotated[int, Range(0, 1_000_000)] = 1
    """How many blocked jobs get a reservation: 1 is EASY backfill, more is conservative for the first so many, 0 is
    greedy: whatever fits starts, and a wide job may wait for ever."""
    backfill_elsewhere: bool = True
    """A later job that may not start where it would be put best starts where it leaves what is reserved alone; without
    this it waits."""
    backfill_by: Annotated[str, OneOf(BACKFILL_BY)] = "prediction"
    """What tells that a later job is over before others need what is reserved: `limit`, its time limit, which it is
    held to, or `prediction`, how long it is expected to run, which can be wrong at their cost."""
    backfill_order: Annotated[str, OneOf(BACKFILL_ORDERS)] = "line"
    """Which jobs fill gaps first: `line`, by their order, or `shortest`, by their expected run time. The queue itself,
    and for which job room is reserved, stays as it is."""
    predict: bool = True
    """Plan jobs with the run time learned from earlier ones, those with a time limit as long as that has been the
    better guess. Nothing is ever ended for it, but a reserved start may come later when a job runs on."""


class PlacementSettings(Value):
    """Where jobs go when there is a choice."""

    strategy: Annotated[str, OneOf(STRATEGIES)] = "pack"
    """`pack` fills nodes and cards, `spread` evens them out, `best_fit` leaves the least over, `dot_product` goes
    where least of what is asked for is free, `fgd` leaves the fewest GPUs that the usual jobs cannot use, `outlook`
    leaves what they would take most of, `first` takes the first node and card with room. `pack` and `outlook` keep
    scarce cards for those who insist on them."""


class OversubscribeSettings(Value):
    """How much more than there is may be booked. Above 1 the matching ceiling stops further starts under contention."""

    cpus: Annotated[float, TIMES] = 1.0
    """Cores to hand out for each core there is."""
    mem: Annotated[float, TIMES] = 1.0
    """Host memory to hand out for each MiB there is."""
    vram: Annotated[float, TIMES] = 1.0
    """VRAM that slices may book for each MiB of a shared card."""


class PreemptSettings(Value):
    """How running jobs make room for those that go first."""

    mode: Annotated[str, OneOf(("off", "requeue", "suspend"))] = "requeue"
    """`off`: no run is ended for another; `requeue`; or `suspend`, under which jobs with GPUs are requeued too."""
    min_run_s: Annotated[float, WAIT] = 300.0
    """No run is preempted before it has run this long, in seconds."""
    reclaim: bool = True
    """Queues take back what they have lent by preemption."""


class CeilingSettings(Value):
    """Measured load above which no further job is started on the node; unset means no ceiling."""

    cpu_fraction: Annotated[float | None, FRACTION] = None
    """Highest CPU load of the node, 0 to 1."""
    mem_fraction: Annotated[float | None, FRACTION] = None
    """Highest share of host memory in use, 0 to 1."""
    disk_mib_s: Annotated[float | None, RATE] = None
    """Highest disk traffic, read and written, in MiB/s."""
    net_mib_s: Annotated[float | None, RATE] = None
    """Highest network traffic, in and out, in MiB/s."""
    gpu_fraction: Annotated[float | None, FRACTION] = None
    """Highest utilisation of a shared card that another slice may join, 0 to 1."""


class NodeSettings(Value):
    """What this node offers, where the measured figure is not the wanted one."""

    name: Annotated[str | None, WORD, AT_START] = None
    """Name of the node; default: the host name."""
    cpus: Annotated[float | None, CORES] = None
    """Cores to hand out; default: the cores this process may use."""
    mem_mib: Annotated[int | None, SOME_MIB] = None
    """Host memory to hand out, in MiB; default: all of it."""
    labels: Annotated[tuple[str, ...], Texts("labels")] = ()
    """What the node has to offer: features and data sets, for -C and --prefer."""
    resources: Annotated[Mapping[str, int], Amounts(0)] = field(default_factory=dict)
    """Custom resources to hand out with --res, by name."""


class GpuSettings(Value):
    """How GPUs are read, trusted and shared."""

    source: Annotated[str, OneOf(("auto", "nvml", "simulated", "none")), AT_START] = "auto"
    """`auto`, `nvml`, `simulated` (see GPUSCHED_FAKE_GPUS) or `none`."""
    fake: Annotated[str | None, Text(), AT_START] = None
    """Simulated GPUs, as in GPUSCHED_FAKE_GPUS: `4x24GiB` or a JSON file."""
    ids: Annotated[str, OneOf(("index", "uuid"))] = "index"
    """Form of CUDA_VISIBLE_DEVICES in jobs: `index` or `uuid`."""
    deadline_s: Annotated[float, Range(0, 3600, above=True)] = 3.0
    """Longest wait for one reading; after it the last one is stale."""
    free_polls: Annotated[int, Range(1, 1000)] = 2
    """Readings in a row that must show a card free before it is used first."""
    foreign_mib: Annotated[int, MIB] = 1024
    """Memory of foreign processes above which a whole-card job avoids the card, in MiB."""
    foreign_fraction: Annotated[float, FRACTION] = 0.1
    """The same as a share of the card's memory; the smaller of the two counts."""
    foreign_utilisation: Annotated[float, PART] = 0.5
    """A whole-card job avoids a card without jobs whose strangers have it work more than this share of the time,
    however little memory they hold; 1: never."""
    display_mib: Annotated[int, MIB] = 1024
    """So much more memory may be in use on a card that drives a display before it counts as taken, in MiB."""
    foreign_peak_s: Annotated[float, WAIT] = 300.0
    """Foreign memory counts at its peak over this many seconds."""
    share_headroom_mib: Annotated[int, MIB] = 512
    """Memory of a shared card that is never booked, for CUDA contexts, in MiB."""
    mps_dir: Annotated[str | None, Folder(), AT_START] = None
    """Folder with the pipes of one MPS control daemon for each GPU, by UUID; slices of one GPU are held to their
    booking by MPS where that runs. Unset: MPS is not used."""
    vram_over: Annotated[str, OneOf(("ignore", "warn", "kill"))] = "warn"
    """What becomes of a run that holds more of a shared card than it booked: `ignore`; `warn` tells its owner and its
    neighbours; `kill` also ends it, vram_over_grace_s later."""
    vram_over_mib: Annotated[int, MIB] = 512
    """So much beyond its booking is no matter, in MiB: CUDA contexts count as the run's own."""
    # One reading alone may be a transient; nothing is done by it.
    vram_over_polls: Annotated[int, Range(2, 1000)] = 3
    """Readings in a row that must show a run over its booking, or on a GPU that it did not book, before its owner is
    told."""
    vram_over_grace_s: Annotated[float, WAIT] = 60.0
    """Time between the warning and the end, in seconds, all of which the run must have been over its booking, or on a
    GPU that it did not book."""
    astray: Annotated[str, OneOf(("tell", "end"))] = "tell"
    """What becomes of a run on a GPU that it did not book: `tell` tells its owner; `end` also ends it,
    vram_over_grace_s later."""
    release_wait_s: Annotated[float, WAIT] = 30.0
    """Longest wait for a card's memory to come back after a job; then the card is suspect."""
    baseline_mib: Annotated[int, MIB] = 256
    """Memory in use that still counts as an empty card when a job has ended, in MiB."""
    ecc_errors: Annotated[int, Range(0, 1_000_000)] = 1
    """Memory errors that could not be corrected, since the card's reset or `gctl undrain`, that make it suspect; 0:
    never."""
    remap_failed: bool = True
    """Whether a card with a broken memory row that could not be replaced is suspect."""
    remap_pending: bool = False
    """Whether one with a row that waits for a reset to be replaced is suspect."""
    hot_s: Annotated[float, WAIT] = 60.0
    """A card is suspect after so long, in seconds, at the temperature from which it slows itself down, until it was
    cooler for as long; 0: never."""


class LimitSettings(Value):
    """What one submission may hold."""

    # Sizes that the API holds in memory while it reads them.
    script_mib: Annotated[float, Range(0, 1024, above=True)] = 4.0
    """Largest script, in MiB."""
    environment_mib: Annotated[float, Range(0, 1024, above=True)] = 1.0
    """Largest captured environment, in MiB."""
    jobs: Annotated[int, COUNT] = 1_000_000
    """Most jobs waiting or running at once."""
    batch: Annotated[int, COUNT] = 100_000
    """Most jobs in one submission."""
    jobs_per_user: Annotated[int, COUNT] = 100_000
    """Most jobs of one user waiting or running at once, an array counting as one; not for the daemon's own."""
    running_per_user: Annotated[int | None, COUNT] = None
    """Most jobs of one user that run at once in a queue which does not say: each has a supervisor, also those that ask
    for nothing. Unset: 1000 for the machine's daemon, no limit for one's own."""
    submitted_mib_per_user: Annotated[float, Range(1, 1 << 30)] = 1024.0
    """So much may one user's submissions add to the database within a day, in MiB: scripts, environments, and 1 KiB
    for each job and each task of an array; not for the daemon's own user."""
    stored_mib_per_user: Annotated[float, Range(1, 1 << 30)] = 2048.0
    """So much may the scripts and environments of one user's jobs take in the database, in MiB, equal ones counted
    once; not for the daemon's own user."""
    requests_per_s: Annotated[float, Range(1, 1e6)] = 200.0
    """Requests of one user that are answered in a second, on average; not for the daemon's own user."""
    requests_burst: Annotated[int, Range(10, 10**6)] = 2000
    """Requests that a user who was quiet may make at once before that."""
    connections: Annotated[int, Range(10, 10**6)] = 2000
    """Connections that are open at once."""
    connections_per_user: Annotated[int, Range(4, 10**6)] = 400
    """Connections of one user that are open at once."""
    array: Annotated[int, Range(1, 4_000_000)] = 1_000_000
    """Most tasks of one array."""
    snapshot_mib: Annotated[float, Range(0, 1 << 20, above=True)] = 256.0
    """Largest copy of the code that `--snapshot` makes, in MiB."""
    snapshot_files: Annotated[int, COUNT] = 50_000
    """Most files in such a copy."""
    snapshot_keep_days: Annotated[float, Range(0, 36_500)] = 30.0
    """Days that such a copy stays after it was last submitted with, unless an unfinished job needs it."""
    snapshot_total_mib: Annotated[float, Range(0, 1 << 30)] = 8192.0
    """With more than this of a user's copies, in MiB, those that no unfinished job needs go earlier."""


class IsolationSettings(Value):
    """What the kernel keeps the runs of the system's daemon to; see [isolation](../howto/isolation.md).

    A personal daemon books, and keeps nobody to anything.
    """

    enforce: bool = True
    """Keep each run to its limits by a control group of its own, where there are any; `ginfo` says where not."""
    mem: bool = True
    """The memory that a job asks for is all that it gets: above it, it is killed."""
    default_mem_mib: Annotated[int | None, Range(16, MAX_MIB)] = None
    """Memory limit of jobs that ask for none, in MiB; none when unset."""
    swap: bool = False
    """Whether a job at its memory limit may be swapped out instead."""
    oom_kills: Annotated[str, OneOf(("job", "process"))] = "job"
    """Out of memory, the kernel kills the whole `job`, or the one `process` that it thinks best."""
    tasks: Annotated[int, Range(0, 4_000_000)] = 16384
    """Most processes and threads of one run at once; 0 for no limit."""
    pin_cpus: bool = False
    """Give each job that asks for whole cores some of its own, next to its GPUs when that is known, and let it run on
    no others."""
    devices: bool = True
    """A run can open the GPUs that were allotted to it and no others."""
    private_tmp: bool = False
    """Give each run an empty /tmp and /var/tmp of its own, which go when it ends."""
    guard_units: Annotated[tuple[str, ...], Texts("names of systemd units")] = (
        "user.slice",
        "cron.service",
        "atd.service",
    )
    """What `gpusched system guard` keeps off the GPUs: units of systemd, those that are not there left out."""


PRIVATE_DATA = ("accounts", "jobs", "reservations", "usage")


class AccessSettings(Value):
    """Who may see and do what with a daemon that serves everybody; see [access](../howto/access.md)."""

    admin_group: Annotated[str | None, WORD] = None
    """Group whose members may do to every job, and to the daemon, what root may; root alone when unset."""
    private_data: Annotated[tuple[str, ...], SomeOf(PRIVATE_DATA)] = ()
    """What is hidden from whom it does not belong to: `jobs`, `usage`, `accounts`, `reservations`. Admins see all,
    operators the jobs of their queues."""
    # Without a size and one old file, the record would grow without end.
    audit_mib: Annotated[float, Range(0.01, MAX_MIB)] = 10.0
    """Size at which each of the two audit files is rotated, in MiB."""
    audit_files: Annotated[int, Range(1, 1000)] = 10
    """Rotated audit files that are kept, of each of the two."""


class DefaultSettings(Value):
    """What a job gets when it does not say."""

    cpus: Annotated[float, Range(0, 1 << 20)] = 1.0
    """Cores of a job that does not ask."""
    time_limit_s: Annotated[int | None, LIMIT] = None
    """Time limit of a job that does not ask, in seconds, unless its queue has a default of its own; none when unset.
    See [time limits](../howto/time-limits.md)."""
    queue: Annotated[str, WORD] = "default"
    """Queue of a job that does not name one."""
    qos: Annotated[str, Text(is_word=True, may_be_empty=True)] = ""
    """QOS of a job that does not name one; empty for none."""
    output: Annotated[str, Text()] = "gpusched-%j.out"
    """Output pattern of a job that does not name one."""


class SubmitSettings(Value):
    """What is taken from those who submit."""

    env_exclude: Annotated[tuple[str, ...], Texts("name patterns")] = (
        *("*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*SECRET*", "*PRIVATE_KEY*", "AWS_SESSION_TOKEN"),
        *("GH_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN", "CI_JOB_TOKEN", "NPM_TOKEN", "PYPI_TOKEN", "VAULT_TOKEN"),
        *("!CLEARML_*", "!MLFLOW_*"),
    )
    """Name patterns of variables that are left out of the environment that a job is given and the job table stores,
    unless the submitter names them; capitals count as small letters. A pattern that begins with `!` keeps what others
    leave out."""
    limit_hint: bool = True
    """Tell who submits at a terminal without a time limit, once a day, what one would change."""


class LifeSettings(Value):
    """How runs are stopped and repeated."""

    grace_s: Annotated[float, WAIT] = 30.0
    """Between the first signal and KILL when a job is stopped, in seconds."""
    limit_grace_s: Annotated[float, WAIT] = 300.0
    """Longest grace of a run that has reached its time limit, in seconds, however long its own is."""
    leftover_grace_s: Annotated[float, WAIT] = 2.0
    """Between TERM and KILL for processes that a finished job left behind, in seconds."""
    max_requeues: Annotated[int, Range(0, 10**6)] = 5
    """How often a run lost to the machine is repeated for free before the job ends as NODE_FAIL."""
    never_satisfied: Annotated[str, OneOf(("cancel", "wait"))] = "cancel"
    """What becomes of a job whose dependency can never come true: `cancel` ends it, `wait` keeps it pending until it
    is changed or cancelled; --kill-on-invalid-dep overrules it."""
    checkpoint_dir: Annotated[str | None, Folder()] = None
    """Folder in which each job has one of its own, GPUSCHED_CHECKPOINT_DIR; default: `checkpoints` in the state
    folder. With several users root owns it, and all that leads to it, and makes the folders in it; nobody else needs
    to write there."""
    checkpoint_keep_s: Annotated[float, WAIT] = 7 * 86400.0
    """How long it is kept after a job that did not COMPLETE, in seconds."""
    oom_growth: Annotated[float, Range(1, 100)] = 1.5
    """A slice whose GPU memory ran out is retried so many times larger, or on a larger card; so is a job that reached
    its limit of host memory. 1 for the same."""


class FaultSettings(Value):
    """What faults of a GPU, by their XID number, and failures on it mean for runs and for the card."""

    xid_victim: Annotated[tuple[int, ...], Numbers(1, 100_000)] = (48, 74, 79, 94, 95, 109, 119)
    """Faults of the hardware: a run that fails on the card is repeated for free."""
    xid_drain: Annotated[tuple[int, ...], Numbers(1, 100_000)] = (48, 64, 74, 79, 95, 109, 119)
    """Faults after which nothing is placed on the card until `gctl undrain`."""
    return_to_service: Annotated[str, OneOf(("undrain", "auto"))] = "undrain"
    """How a lost GPU that answers again comes back: `undrain` by `gctl undrain` alone, `auto` by itself after
    `gpu.free_polls` good readings, unless a fault of `xid_drain` has taken it out."""
    hold_after: Annotated[int, Range(0, 1000)] = 2
    """Runs of one job, of its array or of the same program of one user, with the same fault of the hardware, after
    which the job is held instead of repeated, and with it the pending jobs like it; 0 for never."""
    early_s: Annotated[float, WAIT] = 10.0
    """A run that fails within so many seconds speaks against its card."""
    early_users: Annotated[int, Range(0, 1000)] = 2
    """Users whose runs fail so one after the other, with none that survives between them, before the card is suspect;
    0 for never. With one user alone it never is."""
    early_window_s: Annotated[float, SOME_TIME] = 3600.0
    """Time in which that must happen, in seconds."""


class IdleSettings(Value):
    """GPUs of running jobs that do nothing: when their owner is told, and what comes after."""

    after_s: Annotated[float, WAIT] = 1800.0
    """GPUs of a run that do nothing for so long are marked and told of, in seconds; 0 for never."""
    utilisation: Annotated[float, PART] = 0.02
    """Highest mean utilisation of the busiest GPU of a run that still counts as nothing, 0 to 1."""
    window_s: Annotated[float, SOME_TIME] = 60.0
    """Time over which utilisation is averaged, in seconds."""
    lower_after_s: Annotated[float, WAIT] = 3600.0
    """Time of doing nothing after which `nice` is added, in seconds."""
    nice: Annotated[int, Range(0, 10_000)] = 500
    """Added to the nice value of the job, once for each run, for its next one; 0 for nothing."""
    then: Annotated[str, OneOf(("off", "requeue", "cancel"))] = "off"
    """What becomes of a run whose processes do nothing either: `off`, `requeue` (not those of --no-requeue), or
    `cancel`."""
    then_after_s: Annotated[float, WAIT] = 7200.0
    """Time of doing nothing after which that is done, in seconds."""
    cpu_cores: Annotated[float, PART] = 0.1
    """CPU time of a run, in cores, up to which its processes count as doing nothing."""
    notice_s: Annotated[float, WAIT] = 120.0
    """Least time between the first signal and KILL when a run is ended for it."""


class InteractiveSettings(Value):
    """Jobs in the foreground (`grun`)."""

    lease_s: Annotated[int, Range(0, MAX_SECONDS)] = 43200
    """A job in the foreground with GPUs that does not say ends when nothing has happened in it for so long, in
    seconds: nothing typed and no work done. 0 for never."""
    log_mib: Annotated[float, Range(0, MAX_MIB)] = 16.0
    """So much of the output of a job in the foreground is kept in its file, in MiB."""


class DaemonSettings(Value):
    """The daemon itself."""

    poll_s: Annotated[float, PACE] = 1.0
    """Time between polls; requests and ends of runs wake the daemon at once."""
    idle_poll_s: Annotated[float, PACE] = 5.0
    """Time between GPU readings while no job waits or runs."""
    shutdown_grace_s: Annotated[float, Range(0, 3600)] = 60.0
    """Longest time that runs get to end when the machine is being shut down, in seconds."""
    log_level: Annotated[str, OneOf(("debug", "info", "warning", "error")), AT_START] = "info"
    """`debug`, `info`, `warning` or `error`."""
    # Without a size and one old file, the log would never be rotated and grow without end.
    log_mib: Annotated[float, Range(0.01, MAX_MIB), AT_START] = 10.0
    """Size at which the log is rotated, in MiB."""
    log_files: Annotated[int, Range(1, 1000), AT_START] = 3
    """Rotated logs that are kept."""
    launcher: Annotated[str, OneOf(("auto", "systemd", "fork")), AT_START] = "auto"
    """What starts runs: `systemd` (each is a unit of its own; the system's daemon only), `fork` (a helper of the
    daemon), or `auto`: systemd where it can."""


class HistorySettings(Value):
    """How long the job table remembers."""

    keep_days: Annotated[float, Range(0, 36_500)] = 365.0
    """Days after its end for which a job is remembered, unless an unfinished one needs it; 0 for ever. At least as
    long as [life] checkpoint_keep_s."""


FOREIGN_MESSAGES = ("write", "mail", "notify", "wall")


class ForeignSettings(Value):
    """What the system's daemon does about processes on GPUs that belong to no job. By default it shows them and no
    more. Root's and the system's own processes (uid below 1000, display servers, NVIDIA's daemons) are left alone."""

    adopt: Annotated[str, OneOf(("owner", "admin"))] = "owner"
    """Who may make a job of one (`gpusched adopt`): its `owner` and admins, or an `admin` alone. Such a job has not
    waited in line."""
    message: Annotated[tuple[str, ...], SomeOf(FOREIGN_MESSAGES)] = ()
    """How their owners are told: `write` (their terminals), `mail` (sendmail, to their name), `notify` (what their own
    `notify.toml` says), `wall` (all others' terminals too). Owners of jobs are told by the first three of unbooked use
    and of intruders on their GPUs."""
    message_after_s: Annotated[float, WAIT] = 900.0
    """After so long on a card that they close to jobs, in seconds."""
    # Not so often that a terminal is of no more use.
    message_every_s: Annotated[float, Range(60, MAX_SECONDS)] = 14400.0
    """And again at most so often about the same process, in seconds."""
    only_when_wanted: bool = True
    """Only while a job waits that would start on that card now."""
    kill_after_s: Annotated[float | None, SOME_TIME] = None
    """End such a process, so long after its owner was first told, in seconds, while a job waits for its card; unset
    never does."""
    kill_grace_s: Annotated[float, WAIT] = 60.0
    """Between TERM and KILL, in seconds."""
    exempt_users: Annotated[tuple[str, ...], NAMES] = ()
    """Their processes are left alone."""
    exempt_queues: Annotated[tuple[str, ...], NAMES] = ()
    """Jobs that wait in these queues do not count as waiting for a card."""
    exempt_commands: Annotated[tuple[str, ...], NAMES] = ()
    """Processes of these programs are left alone: names of files that belong to root, as `jupyter-lab`."""


class AlertSettings(Value):
    """Whom to tell what, and how hard to try. Whom a user's own jobs tell is in the user's `notify.toml`."""

    admin: Annotated[tuple[str, ...], Texts("names of targets")] = ()
    """Targets of the daemon's own `notify.toml` that are told of lost, suspect and drained GPUs, of restarts, of
    trouble with the database and of processes that `[foreign]` had ended."""
    pending_s: Annotated[float, SOME_TIME] = 86400.0
    """Time a job waits before `--notify pending` tells of it, in seconds."""
    timeout_s: Annotated[float, Range(0, 3600, above=True)] = 20.0
    """Longest time that one try to reach a target may take, in seconds."""
    backoff_s: Annotated[float, Range(0.01, MAX_SECONDS)] = 5.0
    """Wait before the second try; it doubles from try to try, in seconds."""
    backoff_max_s: Annotated[float, Range(0.01, MAX_SECONDS)] = 600.0
    """Longest wait between two tries, in seconds."""
    give_up_s: Annotated[float, WAIT] = 86400.0
    """Age of an alert at which no further try is made, in seconds."""
    outbox: Annotated[int, Range(1, 10**6)] = 1000
    """Most alerts of one user that may wait to be told; further ones are dropped."""


class QueueSettings(Value):
    """One queue. Queues form a tree; jobs are submitted to its leaves. Without any, a queue is a mere name."""

    name: str
    parent: Annotated[str | None, WORD] = None
    """Queue above this one; a queue without one is at the top."""
    guaranteed_gpus: Annotated[float, GPUS] = 0.0
    """GPUs that are its own whenever it wants them; lent while it does not."""
    guaranteed_cpus: Annotated[float, GPUS] = 0.0
    """Cores that are its own whenever it wants them."""
    guaranteed_mem_mib: Annotated[int, MIB] = 0
    """Host memory that is its own whenever it wants it, in MiB."""
    cells: Annotated[tuple[str, ...], Cells()] = ()
    """Groups of linked GPUs that are promised whole, as `NODE:SIZE` or `SIZE` on any node: `4` is one group of four
    linked cards."""
    max_gpus: Annotated[float | None, GPUS] = None
    """Most GPUs that its jobs may hold, borrowed ones included."""
    max_cpus: Annotated[float | None, GPUS] = None
    """Most cores that its jobs may hold."""
    max_mem_mib: Annotated[int | None, MIB] = None
    """Most host memory that its jobs may hold, in MiB."""
    weight: Annotated[float | None, SHARES] = None
    """Its part of what is lent, against that of its siblings; 1 when unset."""
    factor: Annotated[float, PART] = 0.0
    """The queue factor of the priority of its jobs, 0 to 1."""
    order: Annotated[str | None, OneOf(ORDERS)] = None
    """Order inside the queue, as [priority] order; that of the whole when unset."""
    max_gpus_per_user: Annotated[float | None, GPUS] = None
    """Most GPUs that the jobs of one user may hold in it."""
    max_gpus_per_job: Annotated[float | None, GPUS] = None
    """Most GPUs that one job may ask for."""
    max_running_per_user: Annotated[int | None, COUNT] = None
    """Most jobs of one user that may run in it at once."""
    default_time_s: Annotated[int | None, LIMIT] = None
    """Time limit of a job in it that does not ask, in seconds; that of the queue above, or else [default] time_limit_s,
    when unset."""
    max_time_s: Annotated[int | None, LIMIT] = None
    """Longest time limit; a job that does not ask gets it where there is no default, or a longer one."""
    max_jobs: Annotated[int | None, COUNT] = None
    """Most jobs that may wait or run in it."""
    max_jobs_per_user: Annotated[int | None, COUNT] = None
    """Most jobs of one user that may wait or run in it."""
    preemptible: bool = True
    """Whether its jobs on borrowed GPUs can be preempted by the lender."""
    ignore_idle: bool = False
    """GPUs of its jobs, and of queues below it, may do nothing, see [idle]."""
    users: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may submit to it, beside those of `accounts`. When both are empty the queue above decides; at the top
    everybody may."""
    accounts: Annotated[tuple[str, ...], NAMES] = ()
    """Accounts whose jobs may be submitted to it, those below them included."""
    operators: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may cancel, hold, move and change the jobs of others in it and in the queues below it."""


class QosSettings(Value):
    """One quality of service. Without any, no job may name one."""

    name: str
    tier: Annotated[int, Range(-1000, 1000)] = 0
    """Jobs of a higher tier go before all of a lower one, and may preempt as `preempts` says."""
    factor: Annotated[float, PART] = 0.0
    """The QOS factor of the priority of its jobs, 0 to 1."""
    preempts: Annotated[tuple[str, ...], NAMES] = ()
    """QOS names of lower tier whose running jobs may be preempted for it."""
    preemptible: bool = True
    """`false` keeps its runs safe from every QOS, also from those that list it in `preempts`."""
    min_run_s: Annotated[float | None, WAIT] = None
    """Time that its runs are safe from preemption; [preempt] min_run_s when unset."""
    ignore_idle: bool = False
    """GPUs of its jobs may do nothing, see [idle]."""
    usage_factor: Annotated[float, Range(0, 1e6)] = 1.0
    """What its usage counts for fair share: 0 nothing, 2 double."""
    max_gpus: Annotated[float | None, GPUS] = None
    """Most GPUs that all its jobs together may hold."""
    max_gpus_per_user: Annotated[float | None, GPUS] = None
    """Most GPUs that the jobs of one user may hold."""
    max_gpus_per_job: Annotated[float | None, GPUS] = None
    """Most GPUs that one job may ask for."""
    max_running_per_user: Annotated[int | None, COUNT] = None
    """Most jobs of one user that may run at once."""
    max_jobs_per_user: Annotated[int | None, COUNT] = None
    """Most jobs of one user that may wait or run."""
    max_time_s: Annotated[int | None, LIMIT] = None
    """Longest time limit; a job that does not ask gets it where there is no default, or a longer one."""
    users: Annotated[tuple[str, ...], NAMES] = ()
    """Users who may use it, beside those of `accounts`; everybody when both are empty."""
    accounts: Annotated[tuple[str, ...], NAMES] = ()
    """Accounts whose jobs may use it, those below them included."""


EVERYBODY = "*"
"""In place of a user of an account."""


class AccountSettings(Value):
    """One account. Accounts form a tree with users as its leaves. Without any, each name used is one."""

    name: str
    parent: Annotated[str | None, WORD] = None
    """Account above this one; an account without one is at the top."""
    shares: Annotated[float, SHARES] = 1.0
    """Its part of what its parent has, against that of its siblings."""
    users: Annotated[Mapping[str, float], MemberShares()] = field(default_factory=dict)
    """Users who may submit to it, with their shares in it: `["ann", "bob"]` gives each 1, `{ann = 2, bob = 1}` says
    how many, `"*"` is everybody. Members of the accounts above and below are not members of this one."""
    groups: Annotated[tuple[str, ...], NAMES] = ()
    """Unix groups whose members may submit to it, as the system's user database says at the submission; each member has
    1 share. An account without `users` and `groups` has no members; while no account has any, all are open."""


class Settings(Value):
    """All settings of one daemon."""

    priority: PrioritySettings = PrioritySettings()
    ceiling: CeilingSettings = CeilingSettings()
    node: NodeSettings = NodeSettings()
    gpu: GpuSettings = GpuSettings()
    limit: LimitSettings = LimitSettings()
    access: AccessSettings = AccessSettings()
    isolation: IsolationSettings = IsolationSettings()
    default: DefaultSettings = DefaultSettings()
    submit: SubmitSettings = SubmitSettings()
    life: LifeSettings = LifeSettings()
    fault: FaultSettings = FaultSettings()
    idle: IdleSettings = IdleSettings()
    daemon: DaemonSettings = DaemonSettings()
    history: HistorySettings = HistorySettings()
    interactive: InteractiveSettings = InteractiveSettings()
    alert: AlertSettings = AlertSettings()
    foreign: ForeignSettings = ForeignSettings()
    placement: PlacementSettings = PlacementSettings()
    oversubscribe: OversubscribeSettings = OversubscribeSettings()
    preempt: PreemptSettings = PreemptSettings()
    license: Mapping[str, int] = field(default_factory=dict)
    """`[license]`: names and numbers of what the whole cluster shares, for --licenses."""
    queue: Mapping[str, QueueSettings] = field(default_factory=dict)
    """`[queue.NAME]`; none configured means one queue of each name that is used, without limits."""
    qos: Mapping[str, QosSettings] = field(default_factory=dict)
    """`[qos.NAME]`; none configured means that no job may name one."""
    account: Mapping[str, AccountSettings] = field(default_factory=dict)
    """`[account.NAME]`; none configured means one account of each name that is used, with equal shares."""
    plugins: Annotated[tuple[str, ...], Modules(), AT_START] = ()
    """`[plugins] load`: Python modules to load as plug-ins, beside those of installed distributions."""
    stated: tuple[str, ...] = ()
    """Settings of [priority] that the administrator has stated, by name: no preset changes them."""


class _Child(Protocol):
    @property
    def parent(self) -> str | None: ...


Node = TypeVar("Node", bound=_Child)


def chain_of(name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """The node and all above it, from the bottom up, each once; none when it is not there."""
    passed: set[str] = set()
    above: str | None = name
    while above is not None and above in nodes and above not in passed:
        passed.add(above)
        yield nodes[above]
        above = nodes[above].parent


def parent_in(name: str, nodes: Mapping[str, Node]) -> str | None:
    """The parent; None where there is none, it is not there, or the way up leads round in a circle.

    The config file is refused for the last two; this only keeps a walk down from going on for ever.
    """
    above = nodes[name].parent if name in nodes else None
    if above is None or above not in nodes:
        return None
    last = list(chain_of(name, nodes))[-1]
    leads_out = last.parent is None or last.parent not in nodes
    return above if leads_out else None
