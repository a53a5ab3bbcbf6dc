"""A job is what was asked; a run is one attempt at it. Both are frozen values: a change makes a new one."""

from __future__ import annotations

from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.tasks import tasks_of
from gpusched.model.units import format_amount, plural
from gpusched.model.value import Value

NICE_MIN, NICE_MAX = -10_000, 10_000

AUTO, UNLIMITED, DEFAULT, MAXIMUM = "auto", "unlimited", "default", "maximum"
TIME_LIMIT_WORDS = (AUTO, UNLIMITED)
"""What a submission may say in place of a time limit."""
TIME_LIMIT_SOURCES = (*TIME_LIMIT_WORDS, DEFAULT, MAXIMUM)
"""Where a time limit comes from that nobody stated: jobs like it, the wish for none, the settings' default, and the
longest that the queue or QOS allows."""


class Request(Value, cache_hash=True):
    """Resources of one job. Equal requests are one object in the daemon's memory.

    GPUs come as whole cards (`gpus` >= 1 and neither `gpu_fraction` nor `vram_mib`), as a fraction of
    one card (`gpus` == 1 and `gpu_fraction`), or as slices by memory (`vram_mib` on each of `gpus` cards).
    """

    gpus: int = 0
    """Number of cards touched; 0 means a job that must not see a GPU."""
    gpu_fraction: float | None = None
    """Share of one card, above 0 and below 1, booked in both VRAM and time."""
    gpu_type: str | None = None
    """Matches a card whose model name contains this, ignoring case, blanks and dashes."""
    vram_mib: int | None = None
    """VRAM booked on each card; the rest of the card may serve other slices of the same user."""
    min_vram_mib: int | None = None
    """Only cards with at least this much VRAM in total."""
    cpus: float = 1.0
    """Cores booked; 0 books none."""
    mem_mib: int = 0
    """Host memory booked; 0 books none."""
    nodes: int = 1
    """A gang: this many nodes at once, each with all of the above."""
    tail_gpus: int = 0
    """Of a gang: one node more with so many cards, less than the others have; 0 is no such node."""
    is_linked: bool = False
    """The cards of each node must be linked with each other (NVLink, or else one NUMA node)."""
    is_exclusive: bool = False
    """Nothing else runs on the job's nodes."""
    constraint: str | None = None
    """Labels a node must have: `a100&nvlink`, `imagenet|coco`, `!old`; `&` binds tighter than `|`."""
    prefer: str | None = None
    """As `constraint`, but nodes without them will do."""
    nodelist: tuple[str, ...] = ()
    """Only these nodes."""
    exclude: tuple[str, ...] = ()
    """None of these nodes."""
    licenses: tuple[tuple[str, int], ...] = ()
    """Names and numbers, sorted by name, booked once for the whole cluster."""
    resources: tuple[tuple[str, int], ...] = ()
    """Custom resources of a node, names and numbers, sorted by name, on each node."""

    @property
    def shares_cards(self) -> bool:
        """Whether the job takes slices rather than whole cards."""
        return self.gpu_fraction is not None or self.vram_mib is not None

    def contradiction(self) -> str | None:
        """A sentence when the parts do not go together, whatever the machines are."""
        if self.gpu_fraction is not None and self.gpus != 1:
            fraction = format_amount(self.gpu_fraction)
            return f"a fraction of {fraction} is of one card, but {self.gpus} GPUs were asked for"
        if self.gpu_fraction is not None and self.vram_mib is not None:
            return "a fraction of a card and an amount of VRAM were both asked for"
        if not self.gpus:
            for name, value in (
                ("VRAM", self.vram_mib),
                ("a least VRAM", self.min_vram_mib),
                ("the type " + repr(self.gpu_type), self.gpu_type),
            ):
                if value is not None:
                    return f"{name} is asked for, but no GPU"
            if self.is_linked:
                return "linked GPUs are asked for, but no GPU"
        return self._contradiction_of_nodes()

    def _contradiction_of_nodes(self) -> str | None:
        if self.nodelist:
            left = [name for name in self.nodelist if name not in self.exclude]
            if not left:
                return "every node that is asked for is excluded as well"
            if len(left) < self.nodes:
                named = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
                return f"{self.nodes} nodes are asked for, but only {len(left)} may be used: {named}"
        return None


def gpus_of_each_node(total: int | None, per_node: int | None, nodes: int) -> int | None:
    """GPUs on each node of a gang, from their number in all, on each node, or both; None when neither is given.

    Raises: ValueError when the total does not divide evenly, or the two do not agree.
    """
    if total is None:
        return per_node
    if total % nodes:
        low = total - total % nodes
        near = f"{low} or {low + nodes}" if low else str(nodes)
        raise ValueError(
            f"{plural(total, 'GPU')} cannot be spread evenly over {nodes} nodes; the nearest that can: {near}"
        )
    each = total // nodes
    if per_node not in (None, each):
        where = f"each of {nodes} nodes" if nodes > 1 else "one node"
        raise ValueError(f"{plural(total, 'GPU')} in all and {per_node} on {where} do not agree")
    return each


class RetryRule(Value):
    """When and how often a failed run is tried again."""

    retries: int = 0
    """Attempts after the first that count against the job."""
    backoff_s: float = 10.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 600.0
    retry_on: tuple[str, ...] = ("exit", "signal", "oom", "node_fail")
    """Classes: exit, signal, oom, timeout, node_fail; an exit code `3` or range `10-20`; a name `SIGSEGV`."""
    requeue: bool = True
    """Whether a run lost to the machine is repeated without using up a retry."""


class Notice(Value):
    """A signal sent some time before the time limit, or first at a stop before it (`--signal [B:]SIG[@s]`)."""

    signal: int
    before_s: int
    main_only: bool
    """True for `B:`: only the job's first process is told, not the whole tree."""


class Launch(Value):
    """How a run is started. Texts may hold lone surrogates for bytes that are not UTF-8."""

    argv: tuple[str, ...]
    """Command and arguments; for a script, the arguments only."""
    script_sha: str | None
    """SHA-256 of the script's text in the payload table; None for a plain command."""
    script_name: str | None
    """What the user called the script: file name, `stdin` or `wrap`."""
    env_sha: str
    """SHA-256 of the captured environment in the payload table."""
    work_dir: str
    umask: int = 0o022
    stdout: str | None = None
    """Output pattern (`%j %A %a %x %u %N`); None means `gpusched-%j.out`."""
    stderr: str | None = None
    """Error pattern; None means into the output."""
    open_mode: str | None = None
    """`truncate`, `append`, or None: the first run truncates, later runs get a numbered suffix."""
    notice: Notice | None = None
    stop_signal: int | None = None
    """First signal when the job is stopped; None is TERM, before the time limit that of `notice`."""
    grace_s: float | None = None
    """Between the first signal and KILL; None is the setting `grace_s`."""
    gpu_ids: str | None = None
    """`index` or `uuid` in CUDA_VISIBLE_DEVICES; None is the setting `gpu_ids`."""
    submit_dir: str | None = None
    """Where relative outputs are, and what the job is told as its own folder; None is `work_dir`."""
    log_max_mib: int | None = None
    """An output file that has grown to this size is put aside and a new one begun; None lets it grow."""
    log_keep: int = 3
    """How many files put aside are kept, the newest ones; with 0 the file is emptied instead."""


class ArraySpec(Value):
    """Many tasks of one submission: what `-a` or `--sweep` asks for."""

    tasks: str
    """Task numbers in canonical form, `0-9,20-30:2`; see `model.tasks`."""
    throttle: int | None = None
    """At most so many tasks run at once; None is no limit."""
    max_fails: int | None = None
    """When more tasks than this have failed, the rest is cancelled; None is no limit."""
    sweep: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names and values; task K has the K-th combination, the last name changing fastest."""


class Alerting(Value):
    """Whom to tell what about a job (`--notify`)."""

    on: tuple[str, ...] = ()
    """Words of `model.alerts`, sorted: begin, end, fail, ..."""
    targets: tuple[str, ...] = ()
    """Names of targets in the user's own configuration; none means all of them."""


class ClientProcess(Value):
    """The process that a job in the foreground was submitted by."""

    pid: int
    start_ticks: int
    """Clock ticks from the boot to its start, by which it is told from a later process of the same pid."""
    boot_id: str


class AdoptedProcess(Value):
    """The process that became a job while it ran (`gpusched adopt`); it and what is below it are the run."""

    pid: int
    start_ticks: int
    """Clock ticks from the boot to its start, by which it is told from a later process of the same pid."""
    boot_id: str


class Interactive(Value):
    """A job in the foreground of a client (`grun`)."""

    pty: bool = False
    keep: bool = False
    """Whether it goes on when its client is gone."""
    lease_s: int | None = None
    """Ended after so long without activity; None is for ever."""
    client: ClientProcess | None = None
    """Unless it is kept, it is not started when this process is gone; None when that is not known."""


class JobSpec(Value):
    """All that a submission says, after validation."""

    name: str
    request: Request
    launch: Launch
    retry: RetryRule = RetryRule()
    account: str = ""
    queue: str = "default"
    nice: int = 0
    time_limit_s: int | None = None
    time_limit_source: str = ""
    """Of a submission that gives no length: one of `TIME_LIMIT_SOURCES`; empty where it gives one, or nobody does."""
    begin_at: float | None = None
    dependency: str | None = None
    """Slurm's syntax, `afterok:1:2,afterany:3`, tasks with their ids, `afterok:42_7=50`; checked at submission."""
    hold: bool = False
    qos: str = ""
    """Quality of service; empty is the setting `default.qos`, or none."""
    deadline_at: float | None = None
    """To have ended by this instant: a job that no longer can, by its time limit, ends as DEADLINE."""
    reservation: str | None = None
    """Runs inside this reservation only."""
    array: ArraySpec | None = None
    fallback: str | None = None
    """Shell line that runs once after the job's last failure (`--fallback`)."""
    alerting: Alerting | None = None
    interactive: Interactive | None = None
    key: str | None = None
    """The same user's next submission with this key finds this job instead of making another."""
    snapshot: str | None = None
    """Name of the frozen copy of the code that every run starts in (`--snapshot`)."""
    pipeline: str | None = None
    """Id of the pipeline that it is a step of."""
    step: str | None = None
    """Its name in the pipeline."""
    ignore_idle: bool = False
    """Its GPUs may be idle as long as it likes."""
    never_satisfied: str | None = None
    """`cancel` or `wait` when its dependency can never come true; None is the setting `life.never_satisfied`."""
    fallback_of: int | None = None
    """Id of the failed job that it runs as the fallback of."""
    adopted: AdoptedProcess | None = None
    """It ran before it was a job, so it has one run, cannot be started again, and nobody hears how it exits."""

    @property
    def limit_source(self) -> str | None:
        """Where the time limit comes from, `user` where it was stated; None where there is none and nobody cared."""
        return self.time_limit_source or (None if self.time_limit_s is None else "user")


class Job(Value):
    """One row of the job table."""

    id: int
    uid: int
    user: str
    spec: JobSpec
    state: JobState
    submit_at: float
    queued_at: float
    """Age counts from here: submission, or the asked begin time; retries do not move it."""
    eligible_at: float
    """Not before this instant: begin time, or the end of a retry's backoff."""
    start_at: float | None = None
    """Start of the last run."""
    end_at: float | None = None
    """Set exactly when the state is final."""
    hold: str | None = None
    """`user` or `admin` while held."""
    run: int = 0
    """Number of the current or last run; 0 before the first."""
    failures: int = 0
    """Failed runs that counted against the retries."""
    requeues: int = 0
    """Runs lost to the machine and repeated for free."""
    exit_code: int | None = None
    signal: int | None = None
    reason: ReasonCode | None = None
    """Of the end, or of the last failed run; while pending the reason is worked out, not stored."""
    reason_text: str | None = None
    cancel_at: float | None = None
    """When a cancel was recorded for a run that has not ended yet."""
    preempt_at: float | None = None
    """When it was decided to end the current run for a job that goes first; None once that run has ended."""
    is_front: bool = False
    """Waits at the front of its kind: a run of it was preempted, and none has started since."""
    suspended_at: float | None = None
    """Since when the current run stands still; None while it moves."""
    suspended_by: str | None = None
    """Who stopped it: `user`, or `policy` when it makes room and goes on by itself."""
    array_id: int | None = None
    """Of a task: the id of its array."""
    task: int | None = None
    """Of a task: its number in the array."""
    tasks_left: str | None = None
    """Of an array: the numbers of the tasks that have no row of their own yet."""
    fallback_id: int | None = None
    """Of a job that has failed: the id of its fallback."""

    @property
    def is_array(self) -> bool:
        """Whether this row stands for tasks rather than for something that runs."""
        return self.spec.array is not None and self.array_id is None

    @property
    def last_id(self) -> int:
        """The last id that it uses up: an array has one for each of its tasks, right behind its own."""
        return self.id + (len(tasks_of(self.spec.array.tasks)) if self.spec.array and self.is_array else 0)

    @property
    def shown_id(self) -> str:
        """The id as people know it: `42`, of a task `42_7`."""
        return str(self.id) if self.array_id is None else f"{self.array_id}_{self.task}"

    @property
    def restarts(self) -> int:
        """How often the job was started again: SLURM_RESTART_COUNT."""
        return max(0, self.run - 1)


class GpuShare(Value):
    """What one run books on one card; whole when neither part is set."""

    uuid: str
    index: int
    """Index at the time of booking, for display only."""
    vram_mib: int | None = None
    fraction: float | None = None
    limit: str | None = None
    """`MPS` when the run was started under it."""

    @property
    def is_whole(self) -> bool:
        """Whether the card is booked alone."""
        return self.vram_mib is None and self.fraction is None


class Run(Value):
    """One attempt at a job: one row of the run table."""

    job_id: int
    number: int
    state: RunState
    node: str
    boot_id: str
    """Of the machine when the run was recorded; another one now means the run cannot be alive."""
    intent_at: float
    gpus: tuple[GpuShare, ...] = ()
    cpus: float = 0.0
    mem_mib: int = 0
    start_at: float | None = None
    end_at: float | None = None
    supervisor_pid: int | None = None
    supervisor_start_ticks: int | None = None
    """Start time of the supervisor in clock ticks since boot, against pid reuse."""
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    outcome: JobState | None = None
    """How this attempt ended, in job-state words; None while it is open."""
    reason: ReasonCode | None = None
    reason_text: str | None = None
    cpu_s: float | None = None
    peak_mem_mib: float | None = None
    """Largest resident size of any one process of the run."""
    peak_vram_mib: int | None = None
    mean_utilisation: float | None = None
    energy_j: float | None = None
    suspended_s: float = 0.0
    """How long the run stood still; the time limit does not count it, nor does usage unless it kept GPUs."""
    stdout_path: str | None = None
    stderr_path: str | None = None
    idle_at: float | None = None
    """Since when its GPUs do nothing, once its owner has been told; None while they work."""
    idle_step: int = 0
    """What was done about its idle GPUs so far, see `lifecycle.idle`; never lowered."""

    @property
    def id(self) -> str:
        """The engine's handle, `JOB.RUN`; used once and never again."""
        return run_id(self.job_id, self.number)


def run_id(job_id: int, number: int) -> str:
    """Handle of a run, `JOB.RUN`."""
    return f"{job_id}.{number}"


def split_run_id(handle: str) -> tuple[int, int]:
    """Job id and run number of a handle made by `run_id`."""
    job, _, number = handle.partition(".")
    return int(job), int(number)


class JobEvent(Value):
    """One line of a job's story, append-only."""

    job_id: int
    at: float
    kind: str
    """One word: submitted, started, stopping, ended, retry, requeued, suspended, resumed, held, released, updated,
    note."""
    text: str
    run: int | None = None
