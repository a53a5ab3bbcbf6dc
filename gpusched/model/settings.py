"""Every setting: type, rule, default, meaning, and whether a reload applies it. The text below a field is its entry in
`docs/reference/settings.md`; the rule in its type is what `gpusched.config` checks. The name in the config file is the
field's path, as in `[alert] backoff_s`. `planner_settings` and `queue_settings` declare the planner's sections and
those of queues, QOSs, users and accounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import field

from gpusched.model.container import RUNTIMES
from gpusched.model.planner_settings import (
    AUTO,
    CeilingSettings,
    OversubscribeSettings,
    PlacementSettings,
    PreemptSettings,
    PrioritySettings,
)
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings, UserSettings
from gpusched.model.rules import (
    AT_START,
    CORES,
    COUNT,
    FRACTION,
    LIMIT,
    MIB,
    NAMES,
    PACE,
    PART,
    SOME_MIB,
    SOME_TIME,
    WAIT,
    WORD,
    Amounts,
    Folder,
    MailServer,
    Modules,
    Numbers,
    OneOf,
    Ports,
    Range,
    SomeOf,
    StaticDevices,
    Text,
    Texts,
)
from gpusched.model.units import MAX_MIB, MAX_SECONDS
from gpusched.model.value import Value


class NodeSettings(Value):
    """What this node offers, where it should differ from what was detected."""

    name: Annotated[str | None, WORD, AT_START] = None
    """Name of the node; default: the host name."""
    cpus: Annotated[float | None, CORES] = None
    """Cores to allocate; default: the cores the daemon may use."""
    mem_mib: Annotated[int | None, SOME_MIB] = None
    """Host memory to allocate, in MiB; default: all of it."""
    labels: Annotated[tuple[str, ...], Texts("labels")] = ()
    """Features of the node, for -C and --prefer."""
    data: Annotated[tuple[str, ...], Texts("data sets")] = ()
    """Data sets on the node's own disks, for --near."""
    resources: Annotated[Mapping[str, int], Amounts(0)] = field(default_factory=dict)
    """Custom resources to allocate with --res, by name."""
    address: Annotated[str | None, WORD, AT_START] = None
    """Name or IP address at which the other nodes of a job reach this one, in MASTER_ADDR; default: its name. For nodes
    whose name is known to ssh alone."""


class GpuSettings(Value):
    """How GPUs are read, trusted and shared."""

    source: Annotated[str, OneOf(("auto", "nvml", "amdsmi", "simulated", "static", "none")), AT_START] = "auto"
    """`auto`, `nvml`, `amdsmi` (AMD), `simulated` (see GPUSCHED_FAKE_GPUS), `static` (see `static`) or `none`."""
    static: Annotated[str | None, StaticDevices(), AT_START] = None
    """Devices that nothing can read, instead of those that are found: `2xnpu:16GiB+1xfpga:8GiB`. They are booked; their
    use is unknown."""
    static_variable: Annotated[str | None, WORD, AT_START] = None
    """Environment variable that names a job's `static` devices by index, such as `ASCEND_RT_VISIBLE_DEVICES`; default
    CUDA_VISIBLE_DEVICES."""
    static_device: Annotated[str | None, Folder(), AT_START] = None
    """Device file of a `static` device, such as `/dev/davinci{index}`; while it is missing, the device is lost."""
    fake: Annotated[str | None, Text(), AT_START] = None
    """Simulated GPUs, as in GPUSCHED_FAKE_GPUS: `4x24GiB` or a JSON file."""
    ids: Annotated[str, OneOf(("index", "uuid"))] = "index"
    """Form of CUDA_VISIBLE_DEVICES in jobs: `index` or `uuid`."""
    speed: Annotated[Mapping[str, float], Amounts(0.01, high=100)] = field(default_factory=dict)
    """Speed of GPU models relative to each other, `{A100 = 1.0, V100 = 0.5}`: at half the speed, jobs are expected to
    run twice as long. A model is a part of the name, as in -g; the longest that matches counts. Others have speed
    1."""
    deadline_s: Annotated[float, Range(0, 3600, above=True)] = 3.0
    """Timeout of one reading, in seconds; then the last reading is stale."""
    free_polls: Annotated[int, Range(1, 1000)] = 2
    """Consecutive readings that must show a GPU free before its first use."""
    foreign_mib: Annotated[int, MIB] = 1024
    """Memory of foreign processes above which whole-GPU jobs avoid the GPU, in MiB."""
    foreign_fraction: Annotated[float, FRACTION] = 0.1
    """The same as a fraction of the GPU's memory; the smaller of the two applies."""
    foreign_utilisation: Annotated[float, PART] = 0.5
    """Utilisation by foreign processes above which whole-GPU jobs avoid a GPU without jobs, however little memory they
    use; 1: never."""
    display_mib: Annotated[int, MIB] = 1024
    """Extra memory that may be in use on a GPU that drives a display before it counts as busy, in MiB."""
    foreign_peak_s: Annotated[float, WAIT] = 300.0
    """Window over which the peak of foreign memory counts, in seconds."""
    share_headroom_mib: Annotated[int, MIB] = 512
    """Memory of a shared GPU that is never booked, for CUDA contexts, in MiB."""
    mps_dir: Annotated[str | None, Folder(), AT_START] = None
    """Folder with the pipes of one MPS control daemon per GPU, by UUID; where it runs, MPS enforces what slices booked.
    Unset: MPS is not used."""
    vram_over: Annotated[str, OneOf(("ignore", "warn", "kill"))] = "warn"
    """Action on a run that uses more of a shared GPU than it booked: `ignore`; `warn` alerts its owner and its
    neighbours; `kill` also ends it, vram_over_grace_s later."""
    vram_over_mib: Annotated[int, MIB] = 512
    """Tolerance beyond the booking, in MiB: CUDA contexts count towards the run."""
    # A single reading may be a transient and must not trigger anything.
    vram_over_polls: Annotated[int, Range(2, 1000)] = 3
    """Consecutive readings that must show a run over its booking, or on a GPU it did not book, before its owner is
    alerted."""
    vram_over_grace_s: Annotated[float, WAIT] = 60.0
    """Time between the warning and the end of the run, in seconds; the run must exceed its booking, or use a GPU it did
    not book, all that time."""
    astray: Annotated[str, OneOf(("tell", "end"))] = "tell"
    """Action on a run on a GPU it did not book: `tell` alerts its owner; `end` also ends it, vram_over_grace_s
    later."""
    release_wait_s: Annotated[float, WAIT] = 30.0
    """How long to wait for a GPU's memory to be released after a job, in seconds; then the GPU is suspect."""
    baseline_mib: Annotated[int, MIB] = 256
    """Memory in use at which a GPU still counts as empty after a job, in MiB."""
    ecc_errors: Annotated[int, Range(0, 1_000_000)] = 1
    """Uncorrectable memory errors since the GPU's reset or `gctl undrain` that make it suspect; 0: never."""
    remap_failed: bool = True
    """Treat a GPU with a failed row remapping as suspect."""
    remap_pending: bool = False
    """Treat a GPU with a row remapping pending until reset as suspect."""
    hot_s: Annotated[float, WAIT] = 60.0
    """Time at its slowdown temperature after which a GPU is suspect, until it has been cooler for as long, in seconds;
    0: never."""


class LimitSettings(Value):
    """Limits on submissions, connections and snapshots."""

    # The API holds these in memory while it reads them.
    script_mib: Annotated[float, Range(0, 1024, above=True)] = 4.0
    """Largest script, in MiB."""
    environment_mib: Annotated[float, Range(0, 1024, above=True)] = 1.0
    """Largest captured environment, in MiB."""
    jobs: Annotated[int, COUNT] = 1_000_000
    """Maximum number of pending and running jobs."""
    batch: Annotated[int, COUNT] = 100_000
    """Maximum number of jobs in one submission."""
    jobs_per_user: Annotated[int, COUNT] = 100_000
    """Maximum number of one user's pending and running jobs, an array counting as one; not for the daemon's own
    user."""
    running_per_user: Annotated[int | None, COUNT] = None
    """Maximum number of one user's running jobs in a queue without its own limit: each has a supervisor process,
    even if it requests nothing. Unset: 1000 for the system daemon, no limit for a personal one."""
    submitted_mib_per_user: Annotated[float, Range(1, 1 << 30)] = 1024.0
    """How much one user's submissions may add to the database per day, in MiB: scripts, environments, and 1 KiB per job
    and array task; not for the daemon's own user."""
    stored_mib_per_user: Annotated[float, Range(1, 1 << 30)] = 2048.0
    """Space for the scripts and environments of one user's jobs in the database, in MiB, equal ones counted once; not
    for the daemon's own user."""
    requests_per_s: Annotated[float, Range(1, 1e6)] = 200.0
    """Requests per second of one user, on average; not for the daemon's own user."""
    requests_burst: Annotated[int, Range(10, 10**6)] = 2000
    """Burst of requests that one user may make at once."""
    connections: Annotated[int, Range(10, 10**6)] = 2000
    """Maximum number of open connections."""
    connections_per_user: Annotated[int, Range(4, 10**6)] = 400
    """Maximum number of one user's open connections."""
    array: Annotated[int, Range(1, 4_000_000)] = 1_000_000
    """Maximum number of tasks of one array."""
    snapshot_mib: Annotated[float, Range(0, 1 << 20, above=True)] = 256.0
    """Largest code snapshot that `--snapshot` makes, in MiB."""
    snapshot_files: Annotated[int, COUNT] = 50_000
    """Maximum number of files in a snapshot."""
    snapshot_keep_days: Annotated[float, Range(0, 36_500)] = 30.0
    """Days a snapshot is kept after its last submission; longer while an unfinished job needs it."""
    snapshot_total_mib: Annotated[float, Range(0, 1 << 30)] = 8192.0
    """Total size of a user's snapshots above which those that no unfinished job needs are removed earlier, in MiB."""
    node_output_mib: Annotated[float, Range(1, 1 << 20)] = 1024.0
    """Output file of a run that is kept on its node since it cannot be written where it was wanted, in MiB; beyond
    that the oldest output is dropped."""
    node_output_keep_days: Annotated[float, Range(0, 36_500)] = 30.0
    """Days that a node keeps such output after its last change; a setting of the node's own file."""
    node_output_total_mib: Annotated[float, Range(0, 1 << 30)] = 8192.0
    """Total size of such output on a node above which that of ended runs is removed earlier, in MiB; a setting of the
    node's own file."""


class IsolationSettings(Value):
    """What the kernel enforces on runs of the system daemon; see [isolation](../howto/isolation.md). A personal daemon
    only books and enforces nothing."""

    enforce: bool = True
    """Enforce each run's limits with its own control group where available; `ginfo` shows where not."""
    mem: bool = True
    """Enforce the requested memory: a job above it is killed."""
    default_mem_mib: Annotated[int | None, Range(16, MAX_MIB)] = None
    """Memory limit of jobs that request none, in MiB; no limit when unset."""
    swap: bool = False
    """Let a job at its memory limit swap instead."""
    oom_kills: Annotated[str, OneOf(("job", "process"))] = "job"
    """What the kernel kills when a job runs out of memory: the whole `job`, or one `process` of its choice."""
    tasks: Annotated[int, Range(0, 4_000_000)] = 16384
    """Maximum number of processes and threads of one run; 0 for no limit."""
    pin_cpus: bool = False
    """Pin each job that requests whole cores to dedicated cores, near its GPUs where the topology is known."""
    devices: bool = True
    """Let a run open only the GPUs allocated to it."""
    private_tmp: bool = False
    """Give each run its own empty /tmp and /var/tmp, removed when it ends."""
    guard_units: Annotated[tuple[str, ...], Texts("names of systemd units")] = (
        "user.slice",
        "cron.service",
        "atd.service",
    )
    """systemd units that `gpusched system guard` keeps off the GPUs; missing units are skipped."""


PRIVATE_DATA = ("accounts", "jobs", "names", "reservations", "usage")


class AccessSettings(Value):
    """Who may see and do what with the system daemon; see [access](../howto/access.md)."""

    admin_group: Annotated[str | None, WORD] = None
    """Group whose members are admins of all jobs and of the daemon; only root when unset."""
    private_data: Annotated[tuple[str, ...], SomeOf(PRIVATE_DATA)] = ()
    """What users see only of their own: `jobs`, `names` of jobs, `usage`, `accounts`, `reservations`. Admins see
    everything, operators the jobs of their queues."""
    # Without a size and one old file, the record would grow without bound.
    audit_mib: Annotated[float, Range(0.01, MAX_MIB)] = 10.0
    """Size at which each of the two audit files is rotated, in MiB."""
    audit_files: Annotated[int, Range(1, 1000)] = 10
    """Rotated files to keep of each of the two audit files."""


class DefaultSettings(Value):
    """Defaults of a job."""

    cpus: Annotated[float, Range(0, 1 << 20)] = 1.0
    """Cores of a job that requests none."""
    time_limit_s: Annotated[int | None, LIMIT] = None
    """Default time limit in seconds, unless the queue has its own; no limit when unset. See [time
    limits](../howto/time-limits.md)."""
    queue: Annotated[str, WORD] = "default"
    """Default queue."""
    qos: Annotated[str, Text(is_word=True, may_be_empty=True)] = ""
    """Default QOS; empty for none."""
    output: Annotated[str, Text()] = "gpusched-%j.out"
    """Default output pattern."""


class SubmitSettings(Value):
    """What is captured at submission."""

    env_exclude: Annotated[tuple[str, ...], Texts("name patterns")] = (
        *("*PASSWORD*", "*PASSWD*", "*PASSPHRASE*", "*SECRET*", "*PRIVATE_KEY*", "AWS_SESSION_TOKEN"),
        *("GH_TOKEN", "GITHUB_TOKEN", "GITLAB_TOKEN", "CI_JOB_TOKEN", "NPM_TOKEN", "PYPI_TOKEN", "VAULT_TOKEN"),
        *("!CLEARML_*", "!MLFLOW_*"),
    )
    """Name patterns of variables left out of the captured environment unless the user names them with --export; case-
    insensitive. A pattern that begins with `!` keeps what other patterns leave out."""
    limit_hint: bool = True
    """Once a day, tell users who submit at a terminal without a time limit what one would change."""


class SlurmSettings(Value):
    """What jobs see of Slurm; see [Slurm's commands](../howto/slurm-commands.md)."""

    commands_in_jobs: bool = True
    """Put `srun`, `scontrol`, `sbatch` and Slurm's other commands at the end of every job's PATH, behind a real
    Slurm's."""
    cluster_name: Annotated[str, WORD] = "gpusched"
    """Name of the cluster as Slurm's commands show it, and in SLURM_CLUSTER_NAME."""
    shards_per_gpu: Annotated[int, Range(1, 1024)] = 4
    """Shards that a GPU counts as: `--gres=shard:1` books this part of one, `-g 0.25`."""


class ClusterSettings(Value):
    """Other machines whose jobs this daemon runs; see [several machines](../howto/several-machines.md)."""

    engine: Annotated[str, OneOf(("command", "ray")), AT_START] = "command"
    """How other nodes are reached: `command` runs `connect` for each of `nodes`; `ray` takes the nodes that have joined
    the cluster made by `gpusched cluster init`, see [several machines](../howto/several-machines.md#with-ray)."""
    nodes: Annotated[tuple[str, ...], Texts("node names"), AT_START] = ()
    """Names of the other nodes, with `engine = "command"`."""
    connect: Annotated[str | None, Text(), AT_START] = None
    """Command that starts an agent on a node, `{node}`, and talks to it by its input and output; default:
    `ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 {node} gpusched agent {node}`, with
    `agent --system` for the daemon of all users."""
    master_ports: Annotated[str, Ports(1024, 16)] = "20000-31999"
    """Ports that MASTER_PORT is chosen from: of the runs that begin on a node each gets another."""
    lost_after_s: Annotated[float | None, Range(5, MAX_SECONDS)] = None
    """Default of `--lost-after` for jobs submitted from now on that may be requeued, in seconds: once the daemon has
    not reached a node for this long, its runs have ended there by themselves, and are requeued. Unset: they wait for
    their node, or for `gctl down`; see [leases](../explanation/nodes.md#leases)."""

    @property
    def ports(self) -> range:
        """The numbers of `master_ports`."""
        low, _, high = self.master_ports.partition("-")
        return range(int(low), int(high) + 1)


class BurstSettings(Value):
    """Bursting: jobs of queues with `burst_after_s` go to the site's Slurm when they would start too late here."""

    interval_s: Annotated[float, Range(0.1, 86400)] = 60.0
    """Time between two looks at expected starts, and the least time that a job waits here before it bursts, in
    seconds."""
    max_per_interval: Annotated[int, Range(1, 1000)] = 5
    """Maximum number of jobs that burst at one look."""
    max_jobs: Annotated[int, Range(1, 10**6)] = 20
    """Maximum number of unfinished burst jobs."""


class LifeSettings(Value):
    """How runs are stopped and requeued."""

    grace_s: Annotated[float, WAIT] = 30.0
    """Time between the first signal and KILL when a job is stopped, in seconds."""
    limit_grace_s: Annotated[float, WAIT] = 300.0
    """Maximum grace of a run at its time limit, in seconds, even if its own is longer."""
    leftover_grace_s: Annotated[float, WAIT] = 2.0
    """Time between TERM and KILL for processes a finished job left behind, in seconds."""
    max_requeues: Annotated[int, Range(0, 10**6)] = 5
    """How often a run lost to a machine failure is requeued without using a retry before the job ends as NODE_FAIL."""
    never_satisfied: Annotated[str, OneOf(("cancel", "wait"))] = "cancel"
    """Action on a job whose dependency can never be satisfied: `cancel` ends it, `wait` keeps it pending until it is
    changed or cancelled; --kill-on-invalid-dep overrides it."""
    checkpoint_dir: Annotated[str | None, Folder()] = None
    """Parent of each job's checkpoint folder, GPUSCHED_CHECKPOINT_DIR; default: `checkpoints` in the state folder. On a
    shared machine root owns it and every folder above it, and creates the folders in it; users need no write access."""
    checkpoint_keep_s: Annotated[float, WAIT] = 7 * 86400.0
    """How long the checkpoint folder is kept after a job that did not COMPLETE, in seconds."""
    oom_growth: Annotated[float, Range(1, 100)] = 1.5
    """Growth factor for the retry of a slice that ran out of GPU memory, or of a job that hit its host memory limit. 1
    keeps the size."""


class PrologSettings(Value):
    """Programs before the command of a run: the site's own, and those of `gsub --prolog`; see [prolog and
    epilog](../howto/prolog-and-epilog.md)."""

    path: Annotated[str | None, Folder()] = None
    """Program of the site to execute on the node before each run: as root under the system's daemon, and then only if
    it and every folder above it are root's alone, without a symbolic link. If it fails, the node is drained and the job
    waits for another one. Unset: none."""
    timeout_s: Annotated[float, Range(1, 86400)] = 300.0
    """Longest time it may take, in seconds; then it is killed and counts as failed."""
    job_timeout_s: Annotated[float, Range(1, 86400)] = 300.0
    """The same for the prolog of a job, within the job's time limit."""


class EpilogSettings(Value):
    """Programs after the command of a run: the site's own, and those of `gsub --epilog`. GPUs stay booked until both
    are over."""

    path: Annotated[str | None, Folder()] = None
    """Program of the site to execute on the node after each run, under the conditions of [prolog] path. If it fails,
    the node is drained; the job's result stays. Unset: none."""
    timeout_s: Annotated[float, Range(1, 86400)] = 300.0
    """Longest time it may take, in seconds; then it is killed and counts as failed."""
    job_timeout_s: Annotated[float, Range(1, 86400)] = 300.0
    """The same for the epilog of a job, on top of the job's time limit."""


class FaultSettings(Value):
    """How GPU faults (XIDs) and failures on a GPU affect runs and the GPU."""

    xid_victim: Annotated[tuple[int, ...], Numbers(1, 100_000)] = (48, 74, 79, 94, 95, 109, 119)
    """Hardware faults: a run that fails on the GPU is requeued without using a retry."""
    xid_drain: Annotated[tuple[int, ...], Numbers(1, 100_000)] = (48, 64, 74, 79, 95, 109, 119)
    """Faults that drain the GPU until `gctl undrain`."""
    return_to_service: Annotated[str, OneOf(("undrain", "auto"))] = "undrain"
    """How a lost GPU returns to service once it answers again: `undrain`, only by `gctl undrain`; `auto`, after
    `gpu.free_polls` good readings, unless a fault of `xid_drain` drained it."""
    hold_after: Annotated[int, Range(0, 1000)] = 2
    """Runs of one job, its array or the same program of one user with the same hardware fault, after which the job and
    pending jobs like it are held instead of requeued; 0 for never."""
    early_s: Annotated[float, WAIT] = 10.0
    """A run that fails within this time counts against its GPU, in seconds."""
    early_users: Annotated[int, Range(0, 1000)] = 2
    """Number of different users whose runs fail early in a row before the GPU is suspect; 0 for never. One user alone
    never makes it suspect."""
    early_window_s: Annotated[float, SOME_TIME] = 3600.0
    """Window for those early failures, in seconds."""


class IdleSettings(Value):
    """Idle GPUs of running jobs: when to alert the owner, and what follows."""

    after_s: Annotated[float, WAIT] = 1800.0
    """Idle time after which a run's GPUs are marked idle and its owner is alerted, in seconds; 0 for never."""
    utilisation: Annotated[float, PART] = 0.02
    """Maximum mean utilisation of a run's busiest GPU that still counts as idle, 0 to 1."""
    window_s: Annotated[float, SOME_TIME] = 60.0
    """Averaging window of the utilisation, in seconds."""
    lower_after_s: Annotated[float, WAIT] = 3600.0
    """Idle time after which `nice` is added, in seconds."""
    nice: Annotated[int, Range(0, 10_000)] = 500
    """Added to the job's nice value, once per run, for its next run; 0 for nothing."""
    then: Annotated[str, OneOf(("off", "requeue", "cancel"))] = "off"
    """Action on an idle run whose processes use no CPU either: `off`, `requeue` (as soon as a job waits for such GPUs;
    except with --no-requeue), or `cancel`."""
    then_after_s: Annotated[float, WAIT] = 7200.0
    """Idle time before that action, in seconds."""
    cpu_cores: Annotated[float, PART] = 0.1
    """CPU use of a run up to which its processes count as idle, in cores."""
    notice_s: Annotated[float, WAIT] = 120.0
    """Minimum time between the first signal and KILL when an idle run is ended, in seconds."""


class EnergySettings(Value):
    """What the energy of GPUs costs and emits; see [energy](../howto/energy.md)."""

    price_per_kwh: Annotated[float | None, Range(-100, 1000)] = None
    """Price of a kilowatt-hour where the tariff has none; unset: unknown."""
    g_per_kwh: Annotated[float | None, Range(0, 5000)] = None
    """Emissions of a kilowatt-hour in grams of CO2 equivalents where the tariff has none; unset: unknown."""
    currency: Annotated[str, Text(is_word=True, may_be_empty=True)] = "EUR"
    """Printed after prices."""
    pue: Annotated[float, Range(1, 10)] = 1.0
    """Energy of the building per energy of its machines (power usage effectiveness): costs and emissions are multiplied
    by it, the energy of runs is not."""
    tariff: Annotated[str | None, Folder()] = None
    """CSV file with prices and emissions over time, `start,price_per_kwh,g_per_kwh`; read again when it changes."""


class ContainerSettings(Value):
    """Containers of jobs, `--image`."""

    runtime: Annotated[str, OneOf((AUTO, *RUNTIMES, "none"))] = AUTO
    """What runs them: `podman`, `apptainer`, `auto`, the first of the two that is installed, or `none`: jobs with an
    image are refused."""
    allowed: Annotated[tuple[str, ...], Texts("registries and folders")] = ()
    """Registries, repositories and folders that images may come from, as in `["nvcr.io/nvidia", "/data/images"]`; empty
    for any. A rule for tidiness and not a barrier: a job's own script can start containers, too."""
    pull_limit_s: Annotated[int, LIMIT] = 3600
    """Time limit of the job that pulls an image, in seconds."""


class BudgetSettings(Value):
    """How GPU-hours are counted for the budgets of accounts; see [budgets](../howto/budgets.md)."""

    weights: Annotated[Mapping[str, float], Amounts(0, high=1000)] = field(default_factory=dict)
    """What an hour of a GPU model counts, `{A100 = 2, T4 = 0.5}`. A model is a part of the name, as in -g; the longest
    that matches counts. Others count 1."""
    alert_at: Annotated[tuple[int, ...], Numbers(1, 100)] = (80, 95, 100)
    """Percent of a budget used at which its coordinators or members are alerted, once each per period; empty: never."""


class InteractiveSettings(Value):
    """Foreground jobs (`grun`)."""

    lease_s: Annotated[int, Range(0, MAX_SECONDS)] = 43200
    """Default idle timeout of a foreground job with GPUs, in seconds: no input and no work. 0 for never."""
    log_mib: Annotated[float, Range(0, MAX_MIB)] = 16.0
    """How much output of a foreground job is kept in its file, in MiB."""


class DaemonSettings(Value):
    """The daemon process."""

    poll_s: Annotated[float, PACE] = 1.0
    """Poll interval in seconds; requests and ended runs wake the daemon at once."""
    idle_poll_s: Annotated[float, PACE] = 5.0
    """Interval of GPU readings while no job is pending or running, in seconds."""
    shutdown_grace_s: Annotated[float, Range(0, 3600)] = 60.0
    """Maximum time for runs to end when the machine shuts down, in seconds."""
    log_level: Annotated[str, OneOf(("debug", "info", "warning", "error")), AT_START] = "info"
    """`debug`, `info`, `warning` or `error`."""
    # Without a size and one old file, the log would never be rotated and grow without bound.
    log_mib: Annotated[float, Range(0.01, MAX_MIB), AT_START] = 10.0
    """Size at which the log is rotated, in MiB; not under systemd, whose journal has it."""
    log_files: Annotated[int, Range(1, 1000), AT_START] = 3
    """Rotated logs to keep."""
    launcher: Annotated[str, OneOf(("auto", "systemd", "fork")), AT_START] = "auto"
    """How runs are started: `systemd` (one unit per run; system daemon only), `fork` (a helper process of the daemon),
    or `auto`: systemd where possible."""


class HistorySettings(Value):
    """How long the job table keeps ended jobs."""

    keep_days: Annotated[float, Range(0, 36_500)] = 365.0
    """Days an ended job is kept; longer while an unfinished job needs it; 0 for ever. At least as long as [life]
    checkpoint_keep_s."""


FOREIGN_MESSAGES = ("write", "mail", "notify", "wall")


class ForeignSettings(Value):
    """How the system daemon handles foreign processes: those on GPUs that belong to no job. By default it only shows
    them. Processes of root and the system (uid below 1000, display servers, NVIDIA's daemons) are left alone."""

    adopt: Annotated[str, OneOf(("owner", "admin"))] = "owner"
    """Who may turn one into a job (`gpusched adopt`): its `owner` and admins, or only an `admin`. Such a job skips the
    queue."""
    message: Annotated[tuple[str, ...], SomeOf(FOREIGN_MESSAGES)] = ()
    """How their owners are alerted: `write` (their terminals), `mail` (sendmail to their user name), `notify` (their
    own `notify.toml`), `wall` (also the terminals of all other users). The first three also alert job owners to
    unbooked use and to intruders on their GPUs."""
    message_after_s: Annotated[float, WAIT] = 900.0
    """Time on a GPU that they block before their owners are alerted, in seconds."""
    # More frequent messages would make a terminal unusable.
    message_every_s: Annotated[float, Range(60, MAX_SECONDS)] = 14400.0
    """Minimum time between two alerts about the same process, in seconds."""
    only_when_wanted: bool = True
    """Alert only while a pending job would start on that GPU now."""
    kill_after_s: Annotated[float | None, SOME_TIME] = None
    """Time after the first alert at which the process is killed while a job waits for its GPU, in seconds; never when
    unset."""
    kill_grace_s: Annotated[float, WAIT] = 60.0
    """Time between TERM and KILL, in seconds."""
    exempt_users: Annotated[tuple[str, ...], NAMES] = ()
    """Users whose processes are left alone."""
    exempt_queues: Annotated[tuple[str, ...], NAMES] = ()
    """Queues whose pending jobs do not count as waiting for a GPU."""
    exempt_commands: Annotated[tuple[str, ...], NAMES] = ()
    """Programs whose processes are left alone: file names owned by root, such as `jupyter-lab`."""


class AlertSettings(Value):
    """Admin targets, and how often alerts are retried. Users' targets are in their own `notify.toml`."""

    admin: Annotated[tuple[str, ...], Texts("names of targets")] = ()
    """Targets of the daemon's own `notify.toml` for lost, suspect and drained GPUs, nodes that do not answer, restarts,
    database problems and foreign processes killed by `[foreign]`."""
    mail: Annotated[str | None, MailServer()] = None
    """Mail server for users whose `notify.toml` names none, such as `smtp://smtp.lab.org?from=gpu@lab.org`; without it,
    mail goes through the machine's `/usr/sbin/sendmail`, if there is one."""
    pending_s: Annotated[float, SOME_TIME] = 86400.0
    """Time a job is pending before `--notify pending` sends an alert, in seconds."""
    unreachable_s: Annotated[float, SOME_TIME] = 300.0
    """Time a node does not answer before `--notify node_unreachable` and the admin targets are alerted, in seconds."""
    timeout_s: Annotated[float, Range(0, 3600, above=True)] = 20.0
    """Timeout of one attempt to reach a target, in seconds."""
    backoff_s: Annotated[float, Range(0.01, MAX_SECONDS)] = 5.0
    """Wait before the second attempt, doubled after each further one, in seconds."""
    backoff_max_s: Annotated[float, Range(0.01, MAX_SECONDS)] = 600.0
    """Maximum wait between two attempts, in seconds."""
    give_up_s: Annotated[float, WAIT] = 86400.0
    """Age of an alert after which it is not retried, in seconds."""
    outbox: Annotated[int, Range(1, 10**6)] = 1000
    """Maximum number of unsent alerts of one user; further ones are dropped."""


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
    prolog: PrologSettings = PrologSettings()
    epilog: EpilogSettings = EpilogSettings()
    fault: FaultSettings = FaultSettings()
    idle: IdleSettings = IdleSettings()
    energy: EnergySettings = EnergySettings()
    daemon: DaemonSettings = DaemonSettings()
    history: HistorySettings = HistorySettings()
    budget: BudgetSettings = BudgetSettings()
    interactive: InteractiveSettings = InteractiveSettings()
    containers: ContainerSettings = ContainerSettings()
    slurm: SlurmSettings = SlurmSettings()
    cluster: ClusterSettings = ClusterSettings()
    burst: BurstSettings = BurstSettings()
    alert: AlertSettings = AlertSettings()
    foreign: ForeignSettings = ForeignSettings()
    placement: PlacementSettings = PlacementSettings()
    oversubscribe: OversubscribeSettings = OversubscribeSettings()
    preempt: PreemptSettings = PreemptSettings()
    license: Mapping[str, int] = field(default_factory=dict)
    """`[license]`: cluster-wide resources by name with their number, for --licenses."""
    queue: Mapping[str, QueueSettings] = field(default_factory=dict)
    """`[queue.NAME]`; none configured means a queue without limits for each name in use."""
    qos: Mapping[str, QosSettings] = field(default_factory=dict)
    """`[qos.NAME]`; none configured means no job may name one."""
    user: Mapping[str, UserSettings] = field(default_factory=dict)
    """`[user.NAME]`: limits of single users."""
    account: Mapping[str, AccountSettings] = field(default_factory=dict)
    """`[account.NAME]`; none configured means an account with equal shares for each name in use."""
    plugins: Annotated[tuple[str, ...], Modules(), AT_START] = ()
    """`[plugins] load`: Python modules to load as plug-ins, besides those of installed distributions."""
    of_add_ons: Mapping[str, Any] = field(default_factory=dict)
    """Sections that add-ons declare, by name, where they differ from their defaults."""
    stated: tuple[str, ...] = ()
    """Settings of [priority] that the file sets, by name: no preset changes them."""
