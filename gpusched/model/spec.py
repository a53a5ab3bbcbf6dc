"""Fields of a submission, each declared once as the source of everything derived from it:

the attribute of the value class in `model.job`, the field of the request with validation and error messages,
the OpenAPI document, options of gsub and grun with help and completion, `#GSUB` and `#SBATCH` lines, `gctl update`,
Python keywords, the reference pages. "Add an option" in docs/contributing.md walks through an example.

Command-line clients read these classes as plain data; `model.job` turns them into msgspec structs, since importing
msgspec takes longer than gsub needs for a submission.
"""

from __future__ import annotations

from gpusched.model.launch import Launch
from gpusched.model.option import (
    FAIL,
    MANY,
    MAX_LIST,
    MAX_OWN,
    PENDING,
    RES,
    RUNNING,
    SLURM,
    WHAT,
    WHEN,
    WHERE,
    Field,
    Option,
    events,
    field,
    fields_of,
    kill_on_invalid_dep,
    mail_type,
    mail_user,
    time_limit,
)
from gpusched.model.request import Request, TaskLayout
from gpusched.model.units import MAX_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gpusched.model.value import Value
else:
    Value = object

NICE_MIN, NICE_MAX = -10_000, 10_000
MAX_NAME = 200
MAX_INSTANT = 32503680000.0
"""Year 3000: a later begin time is an error in units."""

AUTO, UNLIMITED, DEFAULT, MAXIMUM = "auto", "unlimited", "default", "maximum"
TIME_LIMIT_WORDS = (AUTO, UNLIMITED)
"""Words that a submission may give instead of a time limit."""

LOCAL_ENGINE, SLURM_ENGINE = "local", "slurm"
ENGINES = (LOCAL_ENGINE, SLURM_ENGINE)
"""What runs a job: this scheduler on its own nodes, or the site's Slurm."""


_EVENTS = (
    "begin end fail retry preempt time_limit_80 held pending gpu_idle efficiency vram_over gpu_unbooked gpu_intruder "
    "node_unreachable queue_empty"
)
"""Copied from `model.alerts`, which few submissions import."""


class RetryRule(Value):
    """When and how often to retry a failed run."""

    _section = FAIL

    retries: int = field(
        "integer",
        "Attempts after the first.",
        (0, 1000),
        "--retries N  retries after a failure; default 0",
        default=0,
        update=RUNNING,
        is_shared=False,
    )
    """Attempts after the first that count against the job."""
    backoff_s: float = field(
        "number",
        "Wait before the first retry, in seconds.",
        (0, MAX_SECONDS),
        "--backoff TIME  wait before the first retry; default 10s",
        default=10.0,
        is_shared=False,
    )
    backoff_factor: float = field(
        "number",
        "Growth of the wait from retry to retry.",
        (1, 1000),
        "--backoff-factor X  factor between successive waits; default 2",
        default=2.0,
        is_shared=False,
    )
    backoff_max_s: float = field(
        "number",
        "Longest wait between retries, in seconds.",
        (0, MAX_SECONDS),
        "--backoff-max TIME  longest wait; default 10m",
        default=600.0,
        is_shared=False,
    )
    retry_on: tuple[str, ...] = field(
        "strings",
        "Classes of failure that are retried.",
        option=(
            "--retry-on LIST  exit, signal, oom, timeout, node_fail, all, codes 3 or 10-20, SIGSEGV; default "
            "exit,signal,oom,node_fail"
        ),
        default=("exit", "signal", "oom", "node_fail"),
        is_shared=False,
    )
    """Error classes: exit, signal, oom, timeout, node_fail; an exit code `3` or range `10-20`; a signal `SIGSEGV`."""
    requeue: bool = field(
        "boolean",
        "Repeat a run lost to a machine failure without using a retry.",
        option="--requeue  repeat runs lost to a machine failure without using a retry (default)",
        also=(Option("--no-requeue  do not", FAIL, sets={"requeue": False}, is_shared=False),),
        default=True,
        is_shared=False,
    )
    """Whether a run lost to the machine is repeated without using up a retry."""
    lost_after_s: float | None = field(
        "number",
        "On another node than the daemon's: a run whose node has not been reached for this long has ended there, and "
        "is requeued. Default: as the cluster's settings say.",
        (5, MAX_SECONDS),
        "--lost-after TIME  on another node: once the daemon has not reached it for TIME, the job is ended there and "
        "requeued; default: [cluster] lost_after_s, or it waits for its node",
        default=None,
        update=PENDING,
        is_shared=False,
    )
    """The lease of its runs on other nodes; None, once submitted, for none."""


class ArraySpec(Value):
    """Array of tasks in one submission, from `-a` or `--sweep`."""

    _section = MANY

    tasks: str = field(
        "string",
        "Tasks in Slurm's words, 0-9,20-30:2%4; %4 lets four of them run at once.",
        option=(
            "-a --array TASKS  one task per index: 0-9, 1,3,5 or 0-30:2; 0-99%4 runs at most 4 at once; the "
            "number is in GPUSCHED_ARRAY_TASK_ID and SLURM_ARRAY_TASK_ID"
        ),
        name="array",
        most=1 << 14,
        is_shared=False,
        background_only="tasks of an array",
    )
    """Task numbers in canonical form, `0-9,20-30:2`; see `model.tasks`."""
    throttle: int | None = field(
        "integer",
        "Of an array: at most this many tasks run at once; null for no limit.",
        (1, 4_000_000),
        default=None,
        update=RUNNING,
        keyword=None,
    )
    max_fails: int | None = field(
        "integer",
        "When more tasks than this have failed, the rest is cancelled.",
        (0, 4_000_000),
        "--max-fails N  cancel the rest when more than N tasks have failed; default: continue",
        default=None,
        is_shared=False,
    )
    sweep: tuple[tuple[str, tuple[str, ...]], ...] = field(
        "strings",
        "NAME=VALUES: lr=1e-3,1e-4 or seed=0..4; every combination is a task.",
        option=(
            "--sweep NAME=VALUES  one task for each value, lr=1e-3,1e-4 or seed=0..4, in the variable of that "
            "name and in place of {lr} in the command; may be repeated: every combination is a task"
        ),
        read=lambda text: [text],
        most=1 << 18,
        default=(),
        is_shared=False,
        background_only="tasks of a sweep",
    )
    """Names and values; task K has the K-th combination, the last name changing fastest."""


class Alerting(Value):
    """Alerts about a job (`--notify`): events and targets."""

    _section = FAIL

    on: tuple[str, ...] = field(
        "strings",
        "Events the owner is notified of: begin, end, fail, ..., all.",
        option=(
            f"--notify LIST  notify you of {_EVENTS.replace(' ', ', ')}, or all, through the targets of your "
            "notify.toml; array_tasks: one for each task of an array"
        ),
        read=events,
        completes=f"{_EVENTS} all",
        also=(
            Option(
                "--mail-type LIST  as --notify; ALL is begin, end, fail, retry and preempt",
                SLURM,
                mail_type,
                completes="BEGIN END FAIL REQUEUE TIME_LIMIT_80 ALL NONE",
                is_shared=False,
            ),
        ),
        name="notify",
        default=(),
        update=RUNNING,
        owner_only=True,
    )
    """Words of `model.alerts`, sorted: begin, end, fail, ..."""
    targets: tuple[str, ...] = field(
        "strings",
        "Only these targets of the owner, or mail addresses.",
        option=(
            "--notify-to NAMES  only these of your targets, or mail addresses; default: all targets that want the event"
        ),
        also=(Option("--mail-user ADDRESS  as --notify-to", SLURM, mail_user, is_shared=False),),
        name="notify_to",
        most=MAX_LIST,
        default=(),
        update=RUNNING,
        owner_only=True,
    )
    """Names of targets in the user's own configuration; empty means all of them."""


class ClientProcess(Value):
    """The process that submitted a foreground job."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot; detects pid reuse."""
    boot_id: str


class AdoptedProcess(Value):
    """A running process that became a job (`gpusched adopt`); it and its descendants are the run."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot; detects pid reuse."""
    boot_id: str


class Interactive(Value):
    """A foreground job of a client (`grun`)."""

    pty: bool = field(
        "string",
        "The job waits for a client before it starts, and has a terminal or three pipes for it.",
        name="interactive",
        choices=("pty", "pipes"),
        default=False,
        keyword=None,
    )
    keep: bool = field(
        "boolean",
        "Keep running when its client is gone; else it ends with the client, or while pending with its submitter.",
        default=False,
        keyword=None,
    )
    lease_s: int | None = field(
        "integer",
        "It ends after this many seconds without activity; 0 for never.",
        (0, MAX_SECONDS),
        default=None,
        keyword=None,
    )
    client: ClientProcess | None = None
    """If this process is gone, the job is not started unless it is to be kept; None when unknown."""


MAX_VARIANTS = 8
"""Most requests of one job, the first one included."""


class Variant(Value):
    """A request of which a job may start with one, whichever can start first."""

    request: Request
    layout: TaskLayout | None = None
    time_limit_s: int | None = None
    time_limit_source: str = ""
    """As that of the job."""
    stated: tuple[str, ...] = ()
    """JSON names of the fields that it states; in the others it is as the first variant."""


def _variants(text: str) -> list[Mapping[str, Any]]:
    """The options of a further request, `-g rtx3090:4 -c 16`."""
    from gpusched.model.variant_words import read_variant  # few jobs have variants

    return [read_variant(text)]


class JobSpec(Value):
    """A validated submission."""

    _section = WHEN

    name: str = field(
        "string",
        "Name of the job.",
        option="-J --name --job-name NAME  name of the job; default: the script's or the command's",
        section=WHAT,
        update=RUNNING,
        owner_only=True,
    )
    request: Request
    launch: Launch
    retry: RetryRule = RetryRule()
    layout: TaskLayout | None = None
    """Tasks as asked for; None if the submission says nothing about them or their sizes."""
    comment: str | None = field(
        "string",
        "Text of the user about the job.",
        option="--comment TEXT  a comment to store with the job, shown by gshow",
        section=WHAT,
        default=None,
        update=RUNNING,
        owner_only=True,
    )
    wckey: str | None = field(
        "string",
        "Slurm's workload characterisation key: kept with the job and shown, without any effect.",
        option="--wckey NAME  workload key to store with the job, without any effect",
        section=SLURM,
        most=MAX_NAME,
        default=None,
        update=RUNNING,
        owner_only=True,
    )
    time_limit_s: int | None = field(
        "integer",
        "Time limit in seconds; auto for one that jobs like it keep, unlimited for none, null for the default.",
        (1, MAX_SECONDS),
        (
            "-t --time TIME  time limit: 90s, 30m, 4h, 2d, HH:MM:SS, D-HH:MM; a bare number is minutes; auto: one "
            "that 95 % of similar jobs meet; 0: none; default: the queue's, or none"
        ),
        read=time_limit,
        words=TIME_LIMIT_WORDS,
        default=None,
        update=RUNNING,
        keyword="time",
    )
    time_limit_source: str = ""
    """Of a time limit that the user did not state: AUTO (similar jobs), UNLIMITED, DEFAULT (of the settings) or MAXIMUM
    (of the queue or QOS); empty if it is stated or there is none.
    """
    queue: str = field(
        "word",
        "Queue the job waits in.",
        option="-q --queue NAME  queue; default: default",
        also=(Option("-p --partition NAME  as --queue", SLURM),),
        default="default",
        update=PENDING,
    )
    account: str = field(
        "word",
        "Account the usage goes to.",
        option=("-A --account NAME  account to charge; default: the only one that lists you; see gctl account --me"),
        default="",
        update=PENDING,
    )
    account_label: str = ""
    """The account it was submitted with while none was configured: shown, while `account` is its user's name."""
    nice: int = field(
        "integer",
        "Lowers the priority; below 0 raises it.",
        (NICE_MIN, NICE_MAX),
        "--nice N  lower the priority by N points, or raise it if N is negative; default 0",
        default=0,
        update=RUNNING,
    )
    dependency: str | None = field(
        "string",
        "Slurm's syntax, afterok:41,afterany:42.",
        option=(
            "-d --dependency LIST  afterok:41, afterany:41:42, afternotok:41, after:41 (started), after:41+10 (10 "
            "minutes later), singleton (no earlier unfinished job of this name); join with , (all) or ? (any)"
        ),
        most=8192,
        default=None,
        update=PENDING,
    )
    """Slurm's syntax, `afterok:1:2,afterany:3`, or with tasks, `afterok:42_7=50`; checked at submission."""
    never_satisfied: str | None = field(
        "string",
        "What happens when its dependency can never be satisfied.",
        option=(
            "--kill-on-invalid-dep yes|no  cancel the job when its dependency can never be satisfied, or keep it; "
            "default: [life] never_satisfied of the config"
        ),
        read=kill_on_invalid_dep,
        completes="yes no",
        choices=("cancel", "wait"),
        default=None,
        update=PENDING,
    )
    """`cancel` or `wait`, for a dependency that can never be satisfied; None for the setting `life.never_satisfied`."""
    if_infeasible: str | None = field(
        "string",
        "What to do with a job that requests more cores, nodes or time than exist, or depends on an unknown job: "
        "refuse (default), or wait, as in Slurm.",
        choices=("refuse", "wait"),
        default=None,
    )
    """`wait`: accept a job that cannot start as things are, as Slurm does; None or `refuse`: refuse it."""
    engine: str | None = field(
        "string",
        "What runs the job: local, this scheduler, or slurm, the site's Slurm, to which it is handed over.",
        option=(
            "--engine NAME  slurm hands the job over to the site's Slurm, local does not; default: as its queue says"
        ),
        section=WHERE,
        choices=ENGINES,
        default=None,
        is_shared=False,
    )
    """What runs it; None for what its queue says."""
    burst: bool | None = field(
        "boolean",
        "Whether the job may be handed over to the site's Slurm if its expected start is too far away.",
        option="--burst  let Slurm have the job if its expected start here is further away than its queue says",
        also=(Option("--no-burst  never; default: as its queue says", WHERE, sets={"burst": False}, is_shared=False),),
        section=WHERE,
        default=None,
        is_shared=False,
    )
    """Whether it may burst; None for what its queue says. With the engine `slurm`: it has."""
    begin_at: float | None = field(
        "number",
        "Not before this instant, UTC epoch seconds.",
        (0, MAX_INSTANT),
        "--begin WHEN  earliest start: now+2h, 18:00, 2026-12-24T18:00",
        default=None,
        update=PENDING,
    )
    hold: bool = field(
        "boolean",
        "Keep the job from starting until it is released.",
        option="-H --hold  hold the job until gctl release",
        default=False,
        is_shared=False,
    )
    qos: str = field(
        "word",
        "Quality of service.",
        option="--qos NAME  quality of service; default: [default] qos of the config, else none",
        default="",
        update=PENDING,
    )
    """Quality of service; empty for the setting `default.qos`, or none."""
    qos_label: str = ""
    """The QOS it was submitted with while none was configured: shown, while `qos` is empty."""
    reservation: str | None = field(
        "word",
        "Runs inside this reservation only.",
        option="--reservation NAME  run only inside this reservation; list them with: gctl reserve",
        default=None,
        update=PENDING,
    )
    deadline_at: float | None = field(
        "number",
        "Must have ended by this instant, UTC epoch seconds.",
        (0, MAX_INSTANT),
        "--deadline WHEN  must end by then, same formats as --begin; a job that can no longer make it ends as DEADLINE",
        default=None,
        update=PENDING,
    )
    """Required end: a job that can no longer meet it, by its time limit, ends as DEADLINE."""
    start_when: str | None = field(
        "string",
        "Start when energy is cheapest or cleanest before the deadline.",
        option="--start-when WHEN  cheap or green: start when energy costs or emits least; needs --deadline and -t",
        default=None,
        choices=("cheap", "green"),
    )
    """`cheap` or `green`: start in the window before the deadline in which its energy costs or emits least."""
    variants: tuple[Variant, ...] = field(
        "variants",
        "Further requests: objects with some of the fields of resources, tasks and nodes, and time_limit_s. The job "
        "starts with the first that can start, of equal ones with the most preferred, which is the submission itself.",
        option=(
            "--or OPTIONS  a further request, of which the job starts with the first that can start: '-g rtx3090:4 "
            "-c 16 -t 8h', in all else as the other options say; may be repeated; for -g alone: -g 'a100:2|rtx3090:4'"
        ),
        section=RES,
        read=_variants,
        default=(),
        update=PENDING,
        word="or",
        python="Sequence[str | Mapping[str, Any]]",
    )
    """All requests of the job, the most preferred first; the job has that one while it is pending, and the one that
    it was started with afterwards. Empty for one request."""
    array: ArraySpec | None = None
    fallback: str | None = field(
        "string",
        "Shell line that runs once after the last failure, as a separate job.",
        option=(
            "--fallback LINE  shell line to run once after the final failure, as a separate job with the same request"
        ),
        section=FAIL,
        most=MAX_OWN,
        default=None,
        update=RUNNING,
        owner_only=True,
        is_shared=False,
        background_only="fallback",
    )
    ignore_idle: bool = field(
        "boolean",
        "Its GPUs may stay idle for any length of time.",
        option="--ignore-idle  do not alert about or act on idle GPUs, see [idle] in the config",
        section=FAIL,
        default=False,
        update=RUNNING,
    )
    alerting: Alerting | None = None
    interactive: Interactive | None = None
    key: str | None = field(
        "string",
        "A second submission with this key by the same user returns the first job.",
        option=(
            "--key TEXT  a second submission with the same key by the same user returns the first job, ended or not"
        ),
        section=WHAT,
        default=None,
        is_shared=False,
    )
    snapshot: str | None = field(
        "string", "Name of the copy of the code that the working directory is in.", default=None, python="bool | str"
    )
    """Name of the code snapshot that every run starts in (`--snapshot`)."""
    image_job: int | None = None
    """Id of the job that pulls its image; None without an image, and once that is pinned."""
    is_pull: bool = False
    """Whether it pulls the image of its launch for other jobs, instead of running in it."""
    pipeline: str | None = None
    """Id of its pipeline, if it is a step."""
    step: str | None = None
    """Step name in the pipeline."""
    fallback_of: int | None = None
    """Id of the failed job for which it is the fallback."""
    adopted: AdoptedProcess | None = None
    """The adopted process: such a job has one run, cannot be restarted, and its exit code is unknown."""

    @property
    def is_for_slurm(self) -> bool:
        """Whether it is handed over to the site's Slurm."""
        return self.engine == SLURM_ENGINE

    @property
    def is_burst(self) -> bool:
        """Whether it was handed over because its expected start here was too far away."""
        return self.burst is True and self.engine == SLURM_ENGINE

    @property
    def waits_if_infeasible(self) -> bool:
        """Whether it is kept although it asks for more than there is."""
        return self.if_infeasible == "wait"

    @property
    def shown_account(self) -> str:
        """Account to show: the one that its use goes to, or its label."""
        return self.account_label or self.account

    @property
    def shown_qos(self) -> str:
        """QOS to show, or its label; empty for none."""
        return self.qos_label or self.qos

    @property
    def limit_source(self) -> str | None:
        """Source of the time limit, `user` if stated; None without a limit."""
        return self.time_limit_source or (None if self.time_limit_s is None else "user")


PARTS = (Request, TaskLayout, RetryRule, JobSpec, ArraySpec, Launch, Interactive, Alerting)
FIELDS: dict[str, Field] = {name: one for kind in PARTS for name, one in fields_of(kind).items()}
"""Every field of submissions and updates, by its JSON name."""
UPDATABLE: dict[str, Field] = {name: one for name, one in FIELDS.items() if one.update}
