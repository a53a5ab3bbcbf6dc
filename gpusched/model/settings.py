"""Every setting with its default, unit and meaning. `config.py` fills them in from file and environment.

A field's `doc` is the reference text: `docs/reference/settings.md` lists exactly these, and a test
compares. The name in the config file is the field's path, as in `[retry] backoff_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, doc: str) -> Any:
    """A dataclass field that carries its documentation."""
    return field(default=default, metadata={"doc": doc})


BACKFILL_ORDERS = ("line", "shortest")

BACKFILL_BY = ("limit", "prediction")
ORDERS = ("multifactor", "fifo", "priority", "utilisation", "hybrid", "sjf", "spf", "saf", "drf", "fairshare")
STRATEGIES = ("pack", "spread", "best_fit", "dot_product", "fgd", "outlook", "first")
LEARNING_STRATEGIES = frozenset({"fgd", "outlook"})
"""Those that look at the jobs that are usual here."""
SPARING_STRATEGIES = frozenset({"pack", "outlook"})
"""Those that leave scarce cards to who insists on them."""


@dataclass(frozen=True, slots=True)
class PrioritySettings:
    """How waiting jobs are ordered: priority = sum of weight x factor, each factor in [0, 1]."""

    order: str = setting(
        "multifactor",
        "Order of the whole queue: `multifactor`, `fifo`, `priority`, `utilisation`, `hybrid`, `sjf`, `spf`, `saf`, "
        "`drf` or `fairshare`. In all but the first two a job that has waited max_wait_s goes first, so that "
        "none starves.",
    )
    weight_age: float = setting(
        16000.0, "Weight of the age factor: time waited over max_age_s, at most 1. 1000 points are a week of waiting."
    )
    max_age_s: float = setting(
        112 * 86400.0,
        "Time after which waiting longer adds nothing, in seconds: so long that age outweighs in the end what others "
        "may be ahead.",
    )
    max_wait_s: float = setting(
        7 * 86400.0,
        "Time after which a job goes first in orders that do not count age, and over which the deadline factor rises, "
        "in seconds.",
    )
    weight_nice: float = setting(20000.0, "Weight of the nice factor; at 20000 one nice step is one point.")
    weight_fairshare: float = setting(
        500.0, "Weight of the fair-share factor: 1 for who has used least of their share."
    )
    weight_size: float = setting(0.0, "Weight of the size factor: the part of the cluster that the job asks for.")
    favor_small: bool = setting(False, "Turn the size factor round, so that small jobs rank higher.")
    weight_queue: float = setting(1000.0, "Weight of the queue's own factor.")
    weight_qos: float = setting(1000.0, "Weight of the QOS's own factor.")
    weight_deadline: float = setting(
        0.0, "Weight of the deadline factor: 0 far from it, 1 at the last start that meets it."
    )
    weight_fit: float = setting(0.0, "Weight of the fit factor: 1 less the dominant share of the cluster asked for.")
    weight_short: float = setting(
        4000.0,
        "Weight of the short factor: 1 for a job that is over at once, less by as much for each doubling of its "
        "length, as predicted or by its limit, 0 for a month and for an unknown length.",
    )
    weight_whole: float = setting(
        2800.0,
        "Weight of the whole factor: the part of a node's GPUs that the job needs free at once, 1 for whole nodes. "
        "Against it that small jobs keep passing wide ones.",
    )
    half_life_s: float = setting(7 * 86400.0, "Time after which past usage counts half, in seconds.")
    calc_period_s: float = setting(
        60.0,
        "Age and past use count as of the last whole multiple of this time, in seconds; between two of them the order "
        "does not change by itself. 0: as of now, in every cycle. It is never more than a hundredth of half_life_s.",
    )
    backfill: bool = setting(
        True, "Let later jobs start in the gaps when they cannot delay those that have a reservation."
    )
    backfill_depth: int = setting(
        1,
        "How many blocked jobs get a reservation: 1 is EASY backfill, more is conservative for the first so many, 0 is "
        "greedy: whatever fits starts, and a wide job may wait for ever.",
    )
    backfill_elsewhere: bool = setting(
        True,
        "A later job that may not start where it would be put best starts where it leaves what is reserved alone; "
        "without this it waits.",
    )
    backfill_by: str = setting(
        "limit",
        "What tells that a later job is over before others need what is reserved: `limit`, its time limit, which it "
        "is held to, or `prediction`, how long it is expected to run, which can be wrong at their cost.",
    )
    backfill_order: str = setting(
        "line",
        "Who fills gaps first: `line`, as they stand in it, or `shortest`, who is expected "
        "to run shortest. The line itself, and for whom room is kept, stays as it is.",
    )
    predict: bool = setting(
        True,
        "Plan jobs with the run time learned from earlier ones, those with a time limit as long as that has been the "
        "better guess. Nothing is ever ended for it, but a reserved start may come later when a job runs on.",
    )


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """Where jobs go when there is a choice."""

    strategy: str = setting(
        "pack",
        "`pack` fills nodes and cards, `spread` evens them out, `best_fit` leaves the least over, `dot_product` goes "
        "where least of what is asked for is free, `fgd` leaves the fewest GPUs that the usual jobs cannot use, "
        "`outlook` leaves what they would take most of, `first` takes the first node and card with room. `pack` and "
        "`outlook` keep scarce cards for those who insist on them.",
    )


@dataclass(frozen=True, slots=True)
class OversubscribeSettings:
    """How much more than there is may be booked. Above 1 the matching ceiling stops further starts under contention."""

    cpus: float = setting(1.0, "Cores to hand out for each core there is.")
    mem: float = setting(1.0, "Host memory to hand out for each MiB there is.")
    vram: float = setting(1.0, "VRAM that slices may book for each MiB of a shared card.")


@dataclass(frozen=True, slots=True)
class PreemptSettings:
    """How running jobs make room for those that go first."""

    mode: str = setting(
        "requeue",
        "`off`: no run is ended for another; `requeue`; or `suspend`, under which jobs with GPUs are requeued too.",
    )
    min_run_s: float = setting(300.0, "No run is preempted before it has run this long, in seconds.")
    reclaim: bool = setting(True, "Queues take back what they have lent by preemption.")


@dataclass(frozen=True, slots=True)
class CeilingSettings:
    """Measured load above which no further job is started on the node; unset means no ceiling."""

    cpu_fraction: float | None = setting(None, "Highest CPU load of the node, 0 to 1.")
    mem_fraction: float | None = setting(None, "Highest share of host memory in use, 0 to 1.")
    disk_mib_s: float | None = setting(None, "Highest disk traffic, read and written, in MiB/s.")
    net_mib_s: float | None = setting(None, "Highest network traffic, in and out, in MiB/s.")
    gpu_fraction: float | None = setting(
        None, "Highest utilisation of a shared card that another slice may join, 0 to 1."
    )


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What this node offers, where the measured figure is not the wanted one."""

    name: str | None = setting(None, "Name of the node; default: the host name.")
    cpus: float | None = setting(None, "Cores to hand out; default: the cores this process may use.")
    mem_mib: int | None = setting(None, "Host memory to hand out, in MiB; default: all of it.")
    labels: tuple[str, ...] = setting((), "What the node has to offer: features and data sets, for -C and --prefer.")
    resources: Mapping[str, int] = field(
        default_factory=dict, metadata={"doc": "Custom resources to hand out with --res, by name."}
    )


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """How GPUs are read, trusted and shared."""

    source: str = setting("auto", "`auto`, `nvml`, `simulated` (see GPUSCHED_FAKE_GPUS) or `none`.")
    fake: str | None = setting(None, "Simulated GPUs, as in GPUSCHED_FAKE_GPUS: `4x24GiB` or a JSON file.")
    ids: str = setting("index", "Form of CUDA_VISIBLE_DEVICES in jobs: `index` or `uuid`.")
    deadline_s: float = setting(3.0, "Longest wait for one reading; after it the last one is stale.")
    free_polls: int = setting(2, "Readings in a row that must show a card free before it is used first.")
    foreign_mib: int = setting(
        1024, "Memory of foreign processes above which a whole-card job avoids the card, in MiB."
    )
    foreign_fraction: float = setting(0.1, "The same as a share of the card's memory; the smaller of the two counts.")
    foreign_utilisation: float = setting(
        0.5,
        "A whole-card job avoids a card without jobs whose strangers have it work more than this share of the time, "
        "however little memory they hold; 1: never.",
    )
    display_mib: int = setting(
        1024, "So much more memory may be in use on a card that drives a display before it counts as taken, in MiB."
    )
    foreign_peak_s: float = setting(300.0, "Foreign memory counts at its peak over this many seconds.")
    share_headroom_mib: int = setting(512, "Memory of a shared card that is never booked, for CUDA contexts, in MiB.")
    mps_dir: str | None = setting(
        None,
        "Folder with the pipes of one MPS control daemon for each GPU, by UUID; slices of one GPU are held to their "
        "booking by MPS where that runs. Unset: MPS is not used.",
    )
    vram_over: str = setting(
        "warn",
        "What becomes of a run that holds more of a shared card than it booked: `ignore`; `warn` tells its owner and "
        "its neighbours; `kill` also ends it, vram_over_grace_s later.",
    )
    vram_over_mib: int = setting(
        512, "So much beyond its booking is no matter, in MiB: CUDA contexts count as the run's own."
    )
    vram_over_polls: int = setting(
        3,
        "Readings in a row that must show a run over its booking, or on a GPU that it did not book, before its owner "
        "is told.",
    )
    vram_over_grace_s: float = setting(
        60.0,
        "Time between the warning and the end, in seconds, all of which the run must have been over its booking, or on "
        "a GPU that it did not book.",
    )
    astray: str = setting(
        "tell",
        "What becomes of a run on a GPU that it did not book: `tell` tells its owner; `end` also ends it, "
        "vram_over_grace_s later.",
    )
    release_wait_s: float = setting(
        30.0, "Longest wait for a card's memory to come back after a job; then the card is suspect."
    )
    baseline_mib: int = setting(256, "Memory in use that still counts as an empty card when a job has ended, in MiB.")
    ecc_errors: int = setting(
        1,
        "Memory errors that could not be corrected, since the card's reset or `gctl undrain`, that make it suspect; "
        "0: never.",
    )
    remap_failed: bool = setting(True, "Whether a card with a broken memory row that could not be replaced is suspect.")
    remap_pending: bool = setting(False, "Whether one with a row that waits for a reset to be replaced is suspect.")
    hot_s: float = setting(
        60.0,
        "A card is suspect after so long, in seconds, at the temperature from which it slows itself down, until it was "
        "cooler for as long; 0: never.",
    )


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What one submission may hold."""

    script_mib: float = setting(4.0, "Largest script, in MiB.")
    environment_mib: float = setting(1.0, "Largest captured environment, in MiB.")
    jobs: int = setting(1_000_000, "Most jobs waiting or running at once.")
    batch: int = setting(100_000, "Most jobs in one submission.")
    jobs_per_user: int = setting(
        100_000, "Most jobs of one user waiting or running at once, an array counting as one; not for the daemon's own."
    )
    running_per_user: int | None = setting(
        None,
        "Most jobs of one user that run at once in a queue which does not say: each has a supervisor, also those that "
        "ask for nothing. Unset: 1000 for the machine's daemon, no limit for one's own.",
    )
    submitted_mib_per_user: float = setting(
        1024.0,
        "So much may one user's submissions add to the database within a day, in MiB: scripts, environments, and "
        "1 KiB for each job and each task of an array; not for the daemon's own user.",
    )
    stored_mib_per_user: float = setting(
        2048.0,
        "So much may the scripts and environments of one user's jobs take in the database, in MiB, equal ones counted "
        "once; not for the daemon's own user.",
    )
    requests_per_s: float = setting(
        200.0, "Requests of one user that are answered in a second, on average; not for the daemon's own user."
    )
    requests_burst: int = setting(2000, "Requests that a user who was quiet may make at once before that.")
    connections: int = setting(2000, "Connections that are open at once.")
    connections_per_user: int = setting(400, "Connections of one user that are open at once.")
    array: int = setting(1_000_000, "Most tasks of one array.")
    snapshot_mib: float = setting(256.0, "Largest copy of the code that `--snapshot` makes, in MiB.")
    snapshot_files: int = setting(50_000, "Most files in such a copy.")
    snapshot_keep_days: float = setting(
        30.0, "Days that such a copy stays after it was last submitted with, unless an unfinished job needs it."
    )
    snapshot_total_mib: float = setting(
        8192.0, "With more than this of a user's copies, in MiB, those that no unfinished job needs go earlier."
    )


@dataclass(frozen=True, slots=True)
class IsolationSettings:
    """What the kernel keeps the runs of the system's daemon to; see [isolation](../howto/isolation.md).

    A personal daemon books, and keeps nobody to anything.
    """

    enforce: bool = setting(
        True, "Keep each run to its limits by a control group of its own, where there are any; `ginfo` says where not."
    )
    mem: bool = setting(True, "The memory that a job asks for is all that it gets: above it, it is killed.")
    default_mem_mib: int | None = setting(None, "Memory limit of jobs that ask for none, in MiB; none when unset.")
    swap: bool = setting(False, "Whether a job at its memory limit may be swapped out instead.")
    oom_kills: str = setting(
        "job", "Out of memory, the kernel kills the whole `job`, or the one `process` that it thinks best."
    )
    tasks: int = setting(16384, "Most processes and threads of one run at once; 0 for no limit.")
    pin_cpus: bool = setting(
        False,
        "Give each job that asks for whole cores some of its own, next to its GPUs when that is known, and let it run "
        "on no others.",
    )
    devices: bool = setting(True, "A run can open the GPUs that were allotted to it and no others.")
    private_tmp: bool = setting(False, "Give each run an empty /tmp and /var/tmp of its own, which go when it ends.")
    guard_units: tuple[str, ...] = setting(
        ("user.slice", "cron.service", "atd.service"),
        "What `gpusched system guard` keeps off the GPUs: units of systemd, those that are not there left out.",
    )


PRIVATE_DATA = ("accounts", "jobs", "reservations", "usage")


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may see and do what with a daemon that serves everybody; see [access](../howto/access.md)."""

    admin_group: str | None = setting(
        None, "Group whose members may do to every job, and to the daemon, what root may; root alone when unset."
    )
    private_data: tuple[str, ...] = setting(
        (),
        "What is hidden from whom it does not belong to: `jobs`, `usage`, `accounts`, `reservations`. Admins see "
        "all, operators the jobs of their queues.",
    )
    audit_mib: float = setting(10.0, "Size at which each of the two audit files is rotated, in MiB.")
    audit_files: int = setting(10, "Rotated audit files that are kept, of each of the two.")


@dataclass(frozen=True, slots=True)
class DefaultSettings:
    """What a job gets when it does not say."""

    cpus: float = setting(1.0, "Cores of a job that does not ask.")
    time_limit_s: int | None = setting(None, "Time limit of a job that does not ask, in seconds.")
    queue: str = setting("default", "Queue of a job that does not name one.")
    qos: str = setting("", "QOS of a job that does not name one; empty for none.")
    output: str = setting("gpusched-%j.out", "Output pattern of a job that does not name one.")


@dataclass(frozen=True, slots=True)
class SubmitSettings:
    """What is taken from those who submit."""

    env_exclude: tuple[str, ...] = setting(
        (
            *("*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*SECRET*", "*PRIVATE_KEY*", "AWS_SESSION_TOKEN"),
            *("GH_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN", "CI_JOB_TOKEN", "NPM_TOKEN", "PYPI_TOKEN", "VAULT_TOKEN"),
            *("!CLEARML_*", "!MLFLOW_*"),
        ),
        "Name patterns of variables that are left out of the environment that a job is given and the job table stores, "
        "unless the submitter names them; capitals count as small letters. A pattern that begins with `!` keeps what "
        "others leave out.",
    )


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """How runs are stopped and repeated."""

    grace_s: float = setting(30.0, "Between the first signal and KILL when a job is stopped, in seconds.")
    leftover_grace_s: float = setting(
        2.0, "Between TERM and KILL for processes that a finished job left behind, in seconds."
    )
    max_requeues: int = setting(
        5, "How often a run lost to the machine is repeated for free before the job ends as NODE_FAIL."
    )
    never_satisfied: str = setting(
        "cancel",
        "What becomes of a job whose dependency can never come true: `cancel` ends it, `wait` keeps it pending "
        "until it is changed or cancelled; --kill-on-invalid-dep overrules it.",
    )
    checkpoint_dir: str | None = setting(
        None,
        "Folder in which each job has one of its own, GPUSCHED_CHECKPOINT_DIR; default: `checkpoints` in the state "
        "folder. With several users root owns it, and all that leads to it, and makes the folders in it; nobody else "
        "needs to write there.",
    )
    checkpoint_keep_s: float = setting(
        7 * 86400.0, "How long it is kept after a job that did not COMPLETE, in seconds."
    )
    oom_growth: float = setting(
        1.5,
        "A slice whose GPU memory ran out is retried so many times larger, or on a larger card; so is a job that "
        "reached its limit of host memory. 1 for the same.",
    )


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """What faults of a GPU, by their XID number, and failures on it mean for runs and for the card."""

    xid_victim: tuple[int, ...] = setting(
        (48, 74, 79, 94, 95, 109, 119), "Faults of the hardware: a run that fails on the card is repeated for free."
    )
    xid_drain: tuple[int, ...] = setting(
        (48, 64, 74, 79, 95, 109, 119), "Faults after which nothing is placed on the card until `gctl undrain`."
    )
    return_to_service: str = setting(
        "undrain",
        "How a lost GPU that answers again comes back: `undrain` by `gctl undrain` alone, `auto` by itself after "
        "`gpu.free_polls` good readings, unless a fault of `xid_drain` has taken it out.",
    )
    hold_after: int = setting(
        2,
        "Runs of one job, of its array or of the same program of one user, with the same fault of the hardware, after "
        "which the job is held instead of repeated, and with it the pending jobs like it; 0 for never.",
    )
    early_s: float = setting(10.0, "A run that fails within so many seconds speaks against its card.")
    early_users: int = setting(
        2,
        "Users whose runs fail so one after the other, with none that survives between them, before the card is "
        "suspect; 0 for never. With one user alone it never is.",
    )
    early_window_s: float = setting(3600.0, "Time in which that must happen, in seconds.")


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """GPUs of running jobs that do nothing: when their owner is told, and what comes after."""

    after_s: float = setting(
        1800.0, "GPUs of a run that do nothing for so long are marked and told of, in seconds; 0 for never."
    )
    utilisation: float = setting(
        0.02, "Highest mean utilisation of the busiest GPU of a run that still counts as nothing, 0 to 1."
    )
    window_s: float = setting(60.0, "Time over which utilisation is averaged, in seconds.")
    lower_after_s: float = setting(3600.0, "Time of doing nothing after which `nice` is added, in seconds.")
    nice: int = setting(500, "Added to the nice value of the job, once for each run, for its next one; 0 for nothing.")
    then: str = setting(
        "off",
        "What becomes of a run whose processes do nothing either: `off`, `requeue` (not those of --no-requeue), or "
        "`cancel`.",
    )
    then_after_s: float = setting(7200.0, "Time of doing nothing after which that is done, in seconds.")
    cpu_cores: float = setting(0.1, "CPU time of a run, in cores, up to which its processes count as doing nothing.")
    notice_s: float = setting(120.0, "Least time between the first signal and KILL when a run is ended for it.")


@dataclass(frozen=True, slots=True)
class InteractiveSettings:
    """Jobs in the foreground (`grun`)."""

    lease_s: int = setting(
        43200,
        "A job in the foreground with GPUs that does not say ends when nothing has happened in it for so long, in "
        "seconds: nothing typed and no work done. 0 for never.",
    )
    log_mib: float = setting(16.0, "So much of the output of a job in the foreground is kept in its file, in MiB.")


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """The daemon itself."""

    poll_s: float = setting(1.0, "Time between polls; requests and ends of runs wake the daemon at once.")
    idle_poll_s: float = setting(5.0, "Time between GPU readings while no job waits or runs.")
    shutdown_grace_s: float = setting(
        60.0, "Longest time that runs get to end when the machine is being shut down, in seconds."
    )
    log_level: str = setting("info", "`debug`, `info`, `warning` or `error`.")
    log_mib: float = setting(10.0, "Size at which the log is rotated, in MiB.")
    log_files: int = setting(3, "Rotated logs that are kept.")
    launcher: str = setting(
        "auto",
        "What starts runs: `systemd` (each is a unit of its own; the system's daemon only), `fork` (a helper of the "
        "daemon), or `auto`: systemd where it can.",
    )


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """How long the job table remembers."""

    keep_days: float = setting(
        365.0,
        "Days after its end for which a job is remembered, unless an unfinished one needs it; 0 for ever. At least as "
        "long as [life] checkpoint_keep_s.",
    )


FOREIGN_MESSAGES = ("write", "mail", "notify", "wall")


@dataclass(frozen=True, slots=True)
class ForeignSettings:
    """What the system's daemon does about processes on GPUs that belong to no job. By default it shows them and no
    more. Root's and the system's own processes (uid below 1000, display servers, NVIDIA's daemons) are left alone."""

    adopt: str = setting(
        "owner",
        "Who may make a job of one (`gpusched adopt`): its `owner` and admins, or an `admin` alone. Such a job has not "
        "waited in line.",
    )
    message: tuple[str, ...] = setting(
        (),
        "How their owners are told: `write` (their terminals), `mail` (sendmail, to their name), `notify` (what their "
        "own `notify.toml` says), `wall` (all others' terminals too). Owners of jobs are told by the first three of "
        "unbooked use and of intruders on their GPUs.",
    )
    message_after_s: float = setting(900.0, "After so long on a card that they close to jobs, in seconds.")
    message_every_s: float = setting(14400.0, "And again at most so often about the same process, in seconds.")
    only_when_wanted: bool = setting(True, "Only while a job waits that would start on that card now.")
    kill_after_s: float | None = setting(
        None,
        "End such a process, so long after its owner was first told, in seconds, while a job waits for its card; unset "
        "never does.",
    )
    kill_grace_s: float = setting(60.0, "Between TERM and KILL, in seconds.")
    exempt_users: tuple[str, ...] = setting((), "Their processes are left alone.")
    exempt_queues: tuple[str, ...] = setting((), "Jobs that wait in these queues do not count as waiting for a card.")
    exempt_commands: tuple[str, ...] = setting(
        (), "Processes of these programs are left alone: names of files that belong to root, as `jupyter-lab`."
    )


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Whom to tell what, and how hard to try. Whom a user's own jobs tell is in the user's `notify.toml`."""

    admin: tuple[str, ...] = setting(
        (),
        "Targets of the daemon's own `notify.toml` that are told of lost, suspect and drained GPUs, of restarts, of "
        "trouble with the database and of processes that `[foreign]` had ended.",
    )
    pending_s: float = setting(86400.0, "Time a job waits before `--notify pending` tells of it, in seconds.")
    timeout_s: float = setting(20.0, "Longest time that one try to reach a target may take, in seconds.")
    backoff_s: float = setting(5.0, "Wait before the second try; it doubles from try to try, in seconds.")
    backoff_max_s: float = setting(600.0, "Longest wait between two tries, in seconds.")
    give_up_s: float = setting(86400.0, "Age of an alert at which no further try is made, in seconds.")
    outbox: int = setting(1000, "Most alerts of one user that may wait to be told; further ones are dropped.")


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """One queue, `[queue.NAME]`. Queues form a tree; jobs are submitted to any of its leaves."""

    name: str
    parent: str | None = setting(None, "Queue above this one; a queue without one is at the top.")
    guaranteed_gpus: float = setting(0.0, "GPUs that are its own whenever it wants them; lent while it does not.")
    guaranteed_cpus: float = setting(0.0, "Cores that are its own whenever it wants them.")
    guaranteed_mem_mib: int = setting(0, "Host memory that is its own whenever it wants it, in MiB.")
    cells: tuple[str, ...] = setting(
        (),
        "Groups of linked GPUs that are promised whole, as `NODE:SIZE` or `SIZE` on any node: `4` is one group of "
        "four linked cards.",
    )
    max_gpus: float | None = setting(None, "Most GPUs that its jobs may hold, borrowed ones included.")
    max_cpus: float | None = setting(None, "Most cores that its jobs may hold.")
    max_mem_mib: int | None = setting(None, "Most host memory that its jobs may hold, in MiB.")
    weight: float | None = setting(None, "Its part of what is lent, against that of its siblings; 1 when unset.")
    factor: float = setting(0.0, "The queue factor of the priority of its jobs, 0 to 1.")
    order: str | None = setting(None, "Order inside the queue, as [priority] order; that of the whole when unset.")
    max_gpus_per_user: float | None = setting(None, "Most GPUs that the jobs of one user may hold in it.")
    max_gpus_per_job: float | None = setting(None, "Most GPUs that one job may ask for.")
    max_running_per_user: int | None = setting(None, "Most jobs of one user that may run in it at once.")
    max_time_s: int | None = setting(None, "Longest time limit; a job without one gets it.")
    max_jobs: int | None = setting(None, "Most jobs that may wait or run in it.")
    max_jobs_per_user: int | None = setting(None, "Most jobs of one user that may wait or run in it.")
    preemptible: bool = setting(True, "Whether its jobs on borrowed GPUs can be preempted by the lender.")
    ignore_idle: bool = setting(False, "GPUs of its jobs, and of queues below it, may do nothing, see [idle].")
    users: tuple[str, ...] = setting(
        (),
        "Users who may submit to it, beside those of `accounts`. When both are empty the queue above decides; "
        "at the top everybody may.",
    )
    accounts: tuple[str, ...] = setting((), "Accounts whose jobs may be submitted to it, those below them included.")
    operators: tuple[str, ...] = setting(
        (), "Users who may cancel, hold, move and change the jobs of others in it and in the queues below it."
    )


@dataclass(frozen=True, slots=True)
class QosSettings:
    """One quality of service, `[qos.NAME]`."""

    name: str
    tier: int = setting(0, "Jobs of a higher tier go before all of a lower one, and may preempt as `preempts` says.")
    factor: float = setting(0.0, "The QOS factor of the priority of its jobs, 0 to 1.")
    preempts: tuple[str, ...] = setting((), "QOS names of lower tier whose running jobs may be preempted for it.")
    preemptible: bool = setting(
        True, "`false` keeps its runs safe from every QOS, also from those that list it in `preempts`."
    )
    min_run_s: float | None = setting(
        None, "Time that its runs are safe from preemption; [preempt] min_run_s when unset."
    )
    ignore_idle: bool = setting(False, "GPUs of its jobs may do nothing, see [idle].")
    usage_factor: float = setting(1.0, "What its usage counts for fair share: 0 nothing, 2 double.")
    max_gpus: float | None = setting(None, "Most GPUs that all its jobs together may hold.")
    max_gpus_per_user: float | None = setting(None, "Most GPUs that the jobs of one user may hold.")
    max_gpus_per_job: float | None = setting(None, "Most GPUs that one job may ask for.")
    max_running_per_user: int | None = setting(None, "Most jobs of one user that may run at once.")
    max_jobs_per_user: int | None = setting(None, "Most jobs of one user that may wait or run.")
    max_time_s: int | None = setting(None, "Longest time limit; a job without one gets it.")
    users: tuple[str, ...] = setting(
        (), "Users who may use it, beside those of `accounts`; everybody when both are empty."
    )
    accounts: tuple[str, ...] = setting((), "Accounts whose jobs may use it, those below them included.")


@dataclass(frozen=True, slots=True)
class AccountSettings:
    """One account, `[account.NAME]`. Accounts form a tree with users as its leaves."""

    name: str
    parent: str | None = setting(None, "Account above this one; an account without one is at the top.")
    shares: float = setting(1.0, "Its part of what its parent has, against that of its siblings.")
    users: Mapping[str, float] = field(
        default_factory=dict, metadata={"doc": "Shares of users in it; one that is not named has 1."}
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one daemon."""

    priority: PrioritySettings = field(default_factory=PrioritySettings)
    ceiling: CeilingSettings = field(default_factory=CeilingSettings)
    node: NodeSettings = field(default_factory=NodeSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    limit: LimitSettings = field(default_factory=LimitSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    isolation: IsolationSettings = field(default_factory=IsolationSettings)
    default: DefaultSettings = field(default_factory=DefaultSettings)
    submit: SubmitSettings = field(default_factory=SubmitSettings)
    life: LifeSettings = field(default_factory=LifeSettings)
    fault: FaultSettings = field(default_factory=FaultSettings)
    idle: IdleSettings = field(default_factory=IdleSettings)
    daemon: DaemonSettings = field(default_factory=DaemonSettings)
    history: HistorySettings = field(default_factory=HistorySettings)
    interactive: InteractiveSettings = field(default_factory=InteractiveSettings)
    alert: AlertSettings = field(default_factory=AlertSettings)
    foreign: ForeignSettings = field(default_factory=ForeignSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    oversubscribe: OversubscribeSettings = field(default_factory=OversubscribeSettings)
    preempt: PreemptSettings = field(default_factory=PreemptSettings)
    license: Mapping[str, int] = field(default_factory=dict)
    """`[license]`: names and numbers of what the whole cluster shares, for --licenses."""
    queue: Mapping[str, QueueSettings] = field(default_factory=dict)
    """`[queue.NAME]`; none configured means one queue of each name that is used, without limits."""
    qos: Mapping[str, QosSettings] = field(default_factory=dict)
    """`[qos.NAME]`; none configured means that no job may name one."""
    account: Mapping[str, AccountSettings] = field(default_factory=dict)
    """`[account.NAME]`; none configured means one account of each name that is used, with equal shares."""
    plugins: tuple[str, ...] = ()
    """`[plugins] load`: modules to load beside those of entry points."""
