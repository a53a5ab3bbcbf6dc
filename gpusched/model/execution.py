"""What the daemon and an engine say to each other about runs: tickets and orders down, events up."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.job import AdoptedProcess, Interactive, Notice
from gpusched.model.value import Value


class RunLimits(Value):
    """What a run is kept to by the kernel. Every part that is unset leaves the run as free as its user."""

    mem_mib: int | None = None
    """Memory of all its processes together, files kept in memory for them included; above it the kernel kills."""
    swap: bool = False
    """Whether it may be swapped out, beyond that limit."""
    oom_kills_job: bool = True
    """Out of memory, all its processes are killed; else the kernel picks one."""
    tasks: int | None = None
    """Most processes and threads at once."""
    cpu_weight: int = 100
    """Its part of the processors when they are short, 1 to 10,000, against that of other runs."""
    cpus: tuple[int, ...] = ()
    """Ids of the processors it may use; empty for all."""
    gpu_minors: tuple[int, ...] | None = None
    """N of the /dev/nvidiaN it may open, and no other; None: whatever its user may."""
    mig: tuple[tuple[int, int, int], ...] = ()
    """MIG instances that it may open: N of their card's /dev/nvidiaN, GPU instance, compute instance."""
    private_tmp: bool = False
    """An empty /tmp and /var/tmp of its own, gone with it."""


class Ticket(Value):
    """All an engine needs to start one run. Nothing in it is interpreted but by the job's own exec.

    Texts may hold lone surrogates (`os.fsencode` gives the bytes back).
    """

    run: str
    """Handle `JOB.RUN`; the engine claims it exclusively, so a second start is refused."""
    uid: int
    user: str
    argv: tuple[str, ...]
    """The command; with `script`, its arguments only."""
    script: bytes | None
    """Text of the script; the engine keeps a copy of its own and executes that."""
    env: Mapping[str, str]
    """The whole environment; the engine only adds what every account has and this lacks (HOME, USER, SHELL, ...)."""
    work_dir: str
    umask: int
    stdout_path: str
    """Absolute, or relative to `work_dir`."""
    stderr_path: str | None
    """None: same as output."""
    append: bool
    """Keep what the output file holds already; else it is emptied."""
    time_limit_s: float | None
    grace_s: float
    leftover_grace_s: float
    stop_signal: int | None = None
    """First signal of a stop. None: that of `notice`, unless it was sent already or the limit is reached; else TERM."""
    notice: Notice | None = None
    limit_grace_s: float | None = None
    """Grace at the time limit, where that is shorter; None: the same."""
    checkpoint_dir: str | None = None
    """Folder to make for the user if it is not there; when that fails the variable that names it is left out."""
    snapshot: str | None = None
    """Name of the copy of the code that `work_dir` is in, for the reason when it is gone."""
    has_gpus: bool = False
    """Look for GPU out-of-memory in the tail of the output when the run fails."""
    interactive: Interactive | None = None
    """It runs in the foreground: it waits for its client before it starts, and has a terminal or pipes."""
    log_mib: float = 16.0
    """Of a run in the foreground: so much of its output is kept in the output file."""
    log_max_mib: int | None = None
    """Put an output file aside when it has grown to this size; None lets it grow."""
    log_keep: int = 3
    """How many of those put aside are kept."""
    limits: RunLimits | None = None
    """None: only what is booked and what its environment says keeps it apart from others."""
    adopt: AdoptedProcess | None = None
    """Nothing is to be started: this process, which runs already, is the run from now on, with what is below it."""


class StopOrder(Value):
    """End a run: signal to the whole tree, grace, KILL. `why` comes back as the end's `stopped_by`."""

    why: str
    """`cancel`, `preempt`, `gpu_lost`, `vram_over`, `unbooked_use` or `shutdown`."""
    signal: int | None = None
    """None: what the ticket says."""
    grace_s: float | None = None
    """None: the ticket's grace."""


class SignalOrder(Value):
    """Deliver one signal and nothing more."""

    signal: int
    main_only: bool = False


class LimitOrder(Value):
    """Replace the time limit of a run, counted from its start; None lifts it."""

    time_limit_s: float | None


class SuspendOrder(Value):
    """Let the whole tree of a run stand still: TSTP as a notice, then STOP. Its limit and notice wait with it."""


class ResumeOrder(Value):
    """Let a run that stands still go on."""


class NoteOrder(Value):
    """Say something to the person at a run in the foreground; nothing to any other run."""

    text: str


Order = StopOrder | SignalOrder | LimitOrder | SuspendOrder | ResumeOrder | NoteOrder


class RunStarted(Value, tag_field="event", tag="started"):
    """The run's supervisor holds the claim and the job's first process was started."""

    run: str
    at: float
    supervisor_pid: int
    supervisor_start_ticks: int
    pid: int


class RunStopping(Value, tag_field="event", tag="stopping"):
    """The run is being ended, or its first process is gone and others linger."""

    run: str
    at: float
    why: str
    """`cancel`, `preempt`, `gpu_lost`, `vram_over`, `unbooked_use`, `shutdown`, `timeout`, `lease`, `client_lost` or
    `leftovers`."""


class RunSuspended(Value, tag_field="event", tag="suspended"):
    """Every process of the run was told to stand still and cannot refuse."""

    run: str
    at: float


class RunResumed(Value, tag_field="event", tag="resumed"):
    """The run moves again, or is being ended."""

    run: str
    at: float
    suspended_s: float
    """How long it has stood still so far, all times together."""


class RunEnded(Value, tag_field="event", tag="ended"):
    """No process of the run is left, and this is how it ended. Comes from the result file."""

    run: str
    start_at: float | None
    """None when nothing was started."""
    end_at: float
    exit_code: int | None = None
    signal: int | None = None
    stopped_by: str | None = None
    """As `RunStopping.why`, but for leftovers; None when the job ended by itself."""
    launch_error: str | None = None
    """A sentence: why the command could not be started (work dir, output file, exec)."""
    gpu_oom: bool = False
    """The tail of the output shows that GPU memory ran out."""
    cpu_s: float | None = None
    peak_mem_mib: float | None = None
    leftovers: tuple[str, ...] = ()
    """`name(pid)` of processes that had to be ended after the job's first process was gone."""
    suspended_s: float = 0.0
    """How long it stood still, all times together."""
    oom_kills: int = 0
    """Processes of it that the kernel killed for want of host memory; known of a run with limits only."""
    at_mem_limit: bool = False
    """They were killed at the run's own limit, and not because the machine's memory ran out."""
    mem_limit_mib: int | None = None


class RunLost(Value):
    """The run's supervisor is gone without a result; what it left behind has been killed."""

    run: str
    at: float
    detail: str


class RunNeverStarted(Value):
    """The claim was revoked before any supervisor took it: the run can be given back safely."""

    run: str
    at: float
    detail: str


SupervisorEvent = RunStarted | RunStopping | RunSuspended | RunResumed | RunEnded
"""Those that supervisors send; the field `event` names each."""
EngineEvent = SupervisorEvent | RunLost | RunNeverStarted


class OpenRun(Value):
    """A run that has no end in the table yet, and what it is to be; the engine is brought in line with it."""

    run: str
    boot_id: str
    supervisor_pid: int | None
    supervisor_start_ticks: int | None
    pending_order: StopOrder | SuspendOrder | None = None
    """Whether it is to end, or to stand still. None: it is to move, also if it stands still."""
    adopted: AdoptedProcess | None = None
    """As in its ticket."""
    limit: LimitOrder | None = None
    """The time limit that it is to have; None leaves it alone."""
    ticket: Ticket | None = None
    """Starts it, if the engine has not heard of it. Without one, a run that no process has claimed is given back."""


def pack_environment(env: Mapping[str, str]) -> bytes:
    """An environment as stored: `KEY=VALUE` entries with NUL after each, bytes as the submitter had them."""
    return b"".join(f"{key}={value}".encode("utf-8", "surrogateescape") + b"\0" for key, value in env.items())


def unpack_environment(body: bytes) -> dict[str, str]:
    """The reverse of `pack_environment`; bytes that are not UTF-8 become lone surrogates."""
    env = {}
    for entry in body.split(b"\0"):
        key, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if equals:
            env[key] = value
    return env
