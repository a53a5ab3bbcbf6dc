"""Messages between the daemon and an engine about runs: tickets and orders down, events up."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.job import AdoptedProcess, Interactive, Launch
from gpusched.model.value import Value


class RunLimits(Value):
    """Limits on a run that the kernel enforces. An unset field leaves the run as free as its user."""

    mem_mib: int | None = None
    """Total memory of its processes, including files in memory (page cache, tmpfs); the kernel kills above it."""
    swap: bool = False
    """Whether it may also use swap, beyond that limit."""
    oom_kills_job: bool = True
    """On OOM, kill all its processes; otherwise the kernel picks one."""
    tasks: int | None = None
    """Maximum number of processes and threads."""
    cpu_weight: int = 100
    """CPU weight under contention, 1 to 10,000, relative to other runs."""
    cpus: tuple[int, ...] = ()
    """Ids of its permitted processors; empty for all."""
    gpu_minors: tuple[int, ...] | None = None
    """N of each /dev/nvidiaN, or /dev/dri/renderDN of AMD, that it may open; None: as permitted to its user."""
    has_amd: bool = False
    """The GPUs of its node are AMD's: their nodes are closed to it as well."""
    mig: tuple[tuple[int, int, int], ...] = ()
    """MIG instances that it may open: N of their card's /dev/nvidiaN, GPU instance, compute instance."""
    private_tmp: bool = False
    """Mount a private empty /tmp and /var/tmp, removed after the run."""


class LaunchSite(Value):
    """A node and its paths, as the environment of jobs shows them."""

    node: str
    socket: str
    checkpoints: str = ""
    """Parent of the checkpoint folders, unless the settings name one; empty for none."""
    spool: str = ""
    """Folder of the sockets of foreground runs; empty for none."""
    cpus: int = 0
    """Cores of the node, for jobs that have it to themselves; 0 if unknown."""
    commands: str = ""
    """Folder of Slurm's commands for jobs; empty for none."""
    address: str = ""
    """Where other nodes reach it; empty for its name."""
    outputs: str = ""
    """Parent of folders for output that cannot be written where it was wanted; empty: such a run fails."""
    mps: str = ""
    """Folder of the MPS control daemons of runs."""
    fetches_snapshots: bool = False
    """Whether a snapshot that is not there has to be fetched from the head."""


class FetchLimits(Value):
    """Limits of snapshots that a node fetches, see `model.settings.LimitSettings`."""

    mib: float
    files: int
    keep_days: float
    total_mib: float


class SiteProgram(Value):
    """A program of the site, see `[prolog]` and `[epilog]`; a node executes its own file of this path."""

    path: str
    timeout_s: float


class RankLaunch(Value):
    """One of several processes that a ticket starts; anything not given is as in the ticket."""

    env: Mapping[str, str]
    """Its own variables: RANK, LOCAL_RANK and the like."""
    number: int
    """Among all ranks of the run."""
    stdout_path: str
    stderr_path: str | None
    stdin_path: str | None
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it has alone; empty: all of its node's are for every rank."""


class ContainerLaunch(Value):
    """The container that a ticket's command runs in, or the image that it pulls."""

    runtime: str
    """`podman` or `apptainer`."""
    program: str
    """Its path."""
    image: str
    """Pinned; for a pull as the user wrote it."""
    pinned: str = ""
    """For a pull: what another node has found under that name, which this one needs; empty for the first."""
    binds: tuple[str, ...] = ()
    work_dir: str = ""
    """Inside; empty: the ticket's."""
    gpus: tuple[tuple[str, int | None], ...] = ()
    """Its GPUs: UUID and N of /dev/nvidiaN, None for a MIG instance. Simulated GPUs are left out."""
    is_pull: bool = False


class Ticket(Value):
    """Everything that an engine needs to start one run; only the job's own exec interprets the contents.

    Strings may hold lone surrogates (`os.fsencode` recovers the bytes).
    """

    run: str
    """Handle `JOB.RUN`; the engine claims it exclusively, so a second start is refused."""
    uid: int
    user: str
    launch: Launch
    """How the job asked to be started, with the values of its task in `argv`, and programs by their path."""
    script: bytes | None
    """Text of the script; the engine executes its own copy."""
    env: Mapping[str, str]
    """The complete environment; the engine only adds missing account variables (HOME, USER, SHELL, ...)."""
    stdout_path: str
    """Absolute, or relative to `work_dir`."""
    stderr_path: str | None
    """None: same as stdout."""
    append: bool
    """Append to the output file; otherwise truncate it."""
    time_limit_s: float | None
    grace_s: float
    leftover_grace_s: float
    limit_grace_s: float | None = None
    """Grace at the time limit if shorter than the usual grace; None: the same."""
    checkpoint_dir: str | None = None
    """Directory to create for the user if missing; on failure its environment variable is omitted."""
    spare_checkpoint_dir: str | None = None
    """That of a job that has COMPLETED, beside it: rather renamed, if nothing is left in it, than another one made."""
    snapshot_limits: FetchLimits | None = None
    """Fetch the snapshot from the head if it is not there; None where it was made."""
    snapshot: str | None = None
    """Name of the code snapshot that contains `work_dir`, for the reason if it is missing."""
    has_gpus: bool = False
    """Scan the tail of the output for GPU out-of-memory errors if the run fails."""
    interactive: Interactive | None = None
    """Set for a foreground run, which waits for its client before it starts and has a terminal or pipes."""
    log_mib: float = 16.0
    """For a foreground run: size limit of the copy of its output in the output file."""
    limits: RunLimits | None = None
    """None: only bookings and its environment separate it from other runs."""
    slurm: str = ""
    """For a job of Slurm's commands, its node's name: notices go to its steps, and the log speaks like Slurm's."""
    stdin_path: str | None = None
    """Standard input, absolute; None for /dev/null. Ignored for a foreground run."""
    adopt: AdoptedProcess | None = None
    """Adopt this running process and its descendants as the run; start nothing."""
    node: str = ""
    """Where to start it; empty for the daemon's own node."""
    ranks: tuple[RankLaunch, ...] = ()
    """Start these processes instead of one. The first that fails ends the others, and its end is that of the run."""
    master_port: int | None = None
    """On the first node of a run whose ranks meet: start nothing unless this port is free there."""
    gpus: tuple[tuple[str, int], ...] = ()
    """UUIDs of its GPUs and their indices, by which its environment may name them. On another node they are compared
    with what is there before it is started."""
    requeue: bool = True
    """Whether another run follows if it is stopped to make room or with its node, as epilogs are told."""
    lost_after_s: float | None = None
    """The run must have ended this long after the node's last contact with its head; None: it waits for the head."""
    native: NativeRun | None = None
    """For a run that is handed over: `script` is then all that the engine gets of it."""
    container: ContainerLaunch | None = None
    """None: it runs on the node itself."""
    outputs: str = ""
    """As in `LaunchSite`."""
    output_mib: float = 1024.0
    """Most that one output file may take there; the oldest output gives way."""
    prolog_timeout_s: float = 300.0
    epilog_timeout_s: float = 300.0
    site_prolog: SiteProgram | None = None
    """Executed before anything else, with the rights of the engine; if it fails, nothing is started."""
    site_epilog: SiteProgram | None = None
    """Executed when nothing of the run is left, before it counts as ended."""
    holds: bool = False
    """Start nothing: the part holds its node, for commands that enter it, until it is ordered to end."""
    peers: tuple[Ticket, ...] = ()
    """For a gang: its tickets for the other nodes, by rank. All of them start, or none stays."""


class NativeRun(Value):
    """A run that is handed over, as its engine needs it beside the ticket, also after a restart."""

    mark: str
    """Finds its job among all of the user's: unique, also where job ids are used again."""
    uid: int
    user: str
    id: str | None = None
    """Its job id there; None if none is recorded."""
    signal: int | None = None
    """First signal when it is stopped, before the engine's own way of ending jobs."""
    grace_s: float = 0.0
    """Between the two, in seconds."""


class StopOrder(Value, tag_field="order", tag="stop"):
    """End a run: signal to the whole tree, grace, KILL. The end event returns `why` as `stopped_by`."""

    why: str
    """`cancel`, `preempt`, `requeue`, `gpu_lost`, `vram_over`, `unbooked_use`, `shutdown` or, when another rank has
    failed, `gang`; when a part that holds another node has, `node_fail` or its `timeout`. To parts that hold their
    nodes also `job_ended`, when that on the first node has, and what that is stopped for: `lease`, `client_lost`."""
    signal: int | None = None
    """None: as in the ticket."""
    grace_s: float | None = None
    """None: the ticket's grace."""


COMES_BACK = ("preempt", "requeue", "shutdown", "head_lost")
"""Causes of stops of runs that another run is to follow."""
SIGNAL_SCOPES = ("tree", "main", "steps", "full")
"""Who gets a signal: see `SignalOrder.to`."""


class SignalOrder(Value, tag_field="order", tag="signal"):
    """Deliver one signal, without ending the run."""

    signal: int
    to: str = "tree"
    """`tree`: all of them, but sparing a shell that would die of a notice. `main`: the first process. `steps`: those of
    all steps. `step:N`: those of one step. `full`: all of them, whatever they are."""


class StepStopOrder(Value, tag_field="order", tag="stop_step"):
    """End one step of a run: TERM, grace, KILL to its processes. The run continues."""

    step: int
    grace_s: float | None = None
    """None: the ticket's grace."""


class LimitOrder(Value, tag_field="order", tag="limit"):
    """Replace the time limit of a run, counted from its start; None removes it."""

    time_limit_s: float | None


class SuspendOrder(Value, tag_field="order", tag="suspend"):
    """Suspend the whole tree of a run: TSTP as a notice, then STOP. Its time limit and notice pause, too."""


class ResumeOrder(Value, tag_field="order", tag="resume"):
    """Resume a suspended run."""


class NoteOrder(Value, tag_field="order", tag="note"):
    """Show a note to the user of a foreground run; no effect on other runs."""

    text: str


class EnterOrder(Value, tag_field="order", tag="enter"):
    """Let one client of the run's user start something in it, see `engine.supervisor.visits`."""

    token: str
    """Names the socket for it; hexadecimal digits."""
    nodes: tuple[str, ...] = ()
    """Whose parts of the run open a door, each for one client; empty for all of them."""


Order = StopOrder | SignalOrder | StepStopOrder | LimitOrder | SuspendOrder | ResumeOrder | NoteOrder | EnterOrder


class RunStarted(Value, tag_field="event", tag="started"):
    """The run's supervisor holds the claim and the job's first process was started."""

    run: str
    at: float
    supervisor_pid: int
    supervisor_start_ticks: int
    pid: int
    moved: str | None = None
    """Where output goes, and why, if it cannot be written where it was wanted: a sentence."""


class RunStopping(Value, tag_field="event", tag="stopping"):
    """The run is being ended, or its first process exited and left others behind."""

    run: str
    at: float
    why: str
    """`cancel`, `preempt`, `requeue`, `gpu_lost`, `vram_over`, `unbooked_use`, `shutdown`, `timeout`, `lease`,
    `client_lost`, `head_lost`, `gang`, `node_fail`, `leftovers`, `epilog` for one whose epilog runs, or `other_nodes`
    for one that has ended on its first node, and is being ended on those that it holds."""


class RunSuspended(Value, tag_field="event", tag="suspended"):
    """Every process of the run received STOP, which it cannot ignore."""

    run: str
    at: float


class RunResumed(Value, tag_field="event", tag="resumed"):
    """The run continues, or is being ended."""

    run: str
    at: float
    suspended_s: float
    """Total time suspended so far."""


class RunEnded(Value, tag_field="event", tag="ended"):
    """The end of a run with no process left. Comes from the result file."""

    run: str
    start_at: float | None
    """None if no process was started."""
    end_at: float
    exit_code: int | None = None
    signal: int | None = None
    stopped_by: str | None = None
    """As `RunStopping.why`, except `leftovers`; None when the job ended by itself, before any stop reached it."""
    is_done: bool = False
    """It was stopped to run again, ended with exit code 0 and had said that nothing is left to do."""
    launch_error: str | None = None
    """A sentence on why the command could not be started (work dir, output file, exec)."""
    gpu_oom: bool = False
    """The tail of the output shows a GPU out-of-memory error."""
    cause: str | None = None
    """The error that the tail of the output shows, as one line: the last exception and its place, for example."""
    cpu_s: float | None = None
    system_cpu_s: float | None = None
    peak_mem_mib: float | None = None
    leftovers: tuple[str, ...] = ()
    """`name(pid)` of processes that outlived the job's first process and had to be killed."""
    suspended_s: float = 0.0
    """Total time suspended."""
    oom_kills: int = 0
    """Number of its processes that the kernel OOM killer ended; known only for a run with limits."""
    at_mem_limit: bool = False
    """The kills were due to the run's own limit, not to a machine out of memory."""
    mem_limit_mib: int | None = None
    rank: int | None = None
    """The first rank that failed, whose exit code or signal this is; None if there are no ranks or none failed."""
    failed_at: float | None = None
    """When it did; the others ended later."""
    failed_on: str = ""
    """For a gang: the node whose end this is, if it failed."""
    detail: str | None = None
    """What the engine says about the end, as a sentence."""
    moved: str | None = None
    """As in `RunStarted`."""
    prolog_fault: str | None = None
    """How the site's prolog failed, as a sentence: the job was not started, and does not belong on this node now."""
    epilog_fault: str | None = None
    """How the site's epilog failed, as a sentence: the node may not be fit for jobs."""
    fault_on: str = ""
    """For a gang: the node that these two are about."""
    epilog_failure: str | None = None
    """How the job's own epilog failed, as a sentence; concerns nothing else."""


class RunLost(Value, tag_field="event", tag="lost"):
    """The run's supervisor disappeared without a result; its remaining processes have been killed."""

    run: str
    at: float
    detail: str
    refused_on: str = ""
    """As in `RunNeverStarted`, of a gang that had started elsewhere."""
    is_given_up: bool = False
    """Nothing was heard of it: its node does not answer, and it counts as ended there."""


class RunNeverStarted(Value, tag_field="event", tag="never_started"):
    """The claim was revoked before any supervisor took it: the run can safely return to the queue."""

    run: str
    at: float
    detail: str
    refused_on: str = ""
    """Node that takes no runs of this user, as `detail` says; empty for none."""


class RunAccepted(Value, tag_field="event", tag="accepted"):
    """The engine that the run is handed over to has it in its queue."""

    run: str
    at: float
    native_id: str


class NativeRunStarted(Value, tag_field="event", tag="native_started"):
    """The engine that the run was handed over to has started it."""

    run: str
    at: float
    nodes: str | None = None


RunEnd = RunEnded | RunLost | RunNeverStarted
SupervisorEvent = RunStarted | RunStopping | RunSuspended | RunResumed | RunEnded
"""Events that supervisors send, identified by the field `event`."""
EngineEvent = SupervisorEvent | RunLost | RunNeverStarted | RunAccepted | NativeRunStarted


class OpenRun(Value):
    """A run without an end in the table, with its desired state; the engine reconciles the run with it."""

    run: str
    boot_id: str
    supervisor_pid: int | None
    supervisor_start_ticks: int | None
    pending_order: StopOrder | SuspendOrder | None = None
    """Desired end or suspension. None: the run should be running, and is resumed if suspended."""
    adopted: AdoptedProcess | None = None
    """As in its ticket."""
    limit: LimitOrder | None = None
    """Desired time limit; None leaves it unchanged."""
    ticket: Ticket | None = None
    """Starts the run if the engine does not know it. Without a ticket, an unclaimed run returns to the queue."""
    node: str = ""
    """Where it is; empty for the daemon's own node."""
    peers: tuple[tuple[str, str], ...] = ()
    """For a gang: its other nodes with their boot ids, by rank."""
    holds: bool = False
    """Its parts on these hold them, see `Ticket.holds`."""
    native: NativeRun | None = None
    """For a run that is handed over."""


def pack_environment(env: Mapping[str, str]) -> bytes:
    """Pack an environment for storage: `KEY=VALUE` entries, each followed by NUL, bytes as submitted."""
    return b"".join(f"{key}={value}".encode("utf-8", "surrogateescape") + b"\0" for key, value in env.items())


def unpack_environment(body: bytes) -> dict[str, str]:
    """Reverse `pack_environment`; bytes that are not UTF-8 become lone surrogates."""
    env = {}
    for entry in body.split(b"\0"):
        key, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if equals:
            env[key] = value
    return env
