"""Fields of a submission, each declared once as the source of everything derived from it:

the attribute of the value class in `model.job`, the field of the request with validation and error messages,
the OpenAPI document, options of gsub and grun with help and completion, `#GSUB` and `#SBATCH` lines, `gctl update`,
Python keywords, the reference pages. "Add an option" in docs/contributing.md walks through an example.

Command-line clients read these classes as plain data; `model.job` turns them into msgspec structs, since importing
msgspec takes longer than gsub needs for a submission.
"""

from __future__ import annotations

from gpusched.model.option import PENDING, RUNNING, Field, Option, counts, field
from gpusched.model.syntax import (
    events,
    exclusive,
    gpus,
    gpus_of_node,
    gpus_of_task,
    gres,
    hosts,
    kill_on_invalid_dep,
    log_max,
    mail_type,
    memory,
    memory_per_core,
    memory_per_gpu,
    near,
    nodes,
    notice,
    percent,
    time_limit,
)
from gpusched.model.units import MAX_MIB, MAX_SECONDS, format_amount, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from gpusched.model.value import Value
else:
    Value = object

NICE_MIN, NICE_MAX = -10_000, 10_000
MAX_GPUS = 1024
MAX_CPUS = 65536
MAX_NODES = 4096
MAX_TASKS = 65536
MAX_NAME = 200
MAX_LIST = 1 << 16
MAX_OWN = 1 << 62
"""Bound for fields that have a limit of their own."""
MAX_INSTANT = 32503680000.0
"""Year 3000: a later begin time is an error in units."""

ALL_MEM = "all"
"""In place of an amount of memory: all that a node has."""
AUTO, UNLIMITED, DEFAULT, MAXIMUM = "auto", "unlimited", "default", "maximum"
TIME_LIMIT_WORDS = (AUTO, UNLIMITED)
"""Words that a submission may give instead of a time limit."""
TIME_LIMIT_SOURCES = (*TIME_LIMIT_WORDS, DEFAULT, MAXIMUM)
"""Sources of a time limit that the user did not state: similar jobs, an explicit wish for none, the default of the
settings, and the maximum of the queue or QOS."""

LOCAL_ENGINE, SLURM_ENGINE = "local", "slurm"
ENGINES = (LOCAL_ENGINE, SLURM_ENGINE)
"""What runs a job: this scheduler on its own nodes, or the site's Slurm."""

WHAT, RES, WHEN, MANY, WHERE = "What to run", "Resources", "When", "Many tasks", "Where"
LAYOUT = "Parallel tasks"
BOX = "Container"
FAIL, FILES, SLURM = "Failure and end", "Files", "Slurm spellings"
"""Help sections."""

_EVENTS = (
    "begin end fail retry preempt time_limit_80 held pending gpu_idle efficiency vram_over gpu_unbooked gpu_intruder "
    "node_unreachable queue_empty"
)
"""Copied from `model.alerts`, which few submissions import."""


class Request(Value):
    """Resources of one job. Equal requests are one object in the daemon's memory.

    GPUs come as whole cards (`gpus` >= 1 and neither `gpu_fraction` nor `vram_mib`), as a fraction of
    one card (`gpus` == 1 and `gpu_fraction`), or as slices by memory (`vram_mib` on each of `gpus` cards).
    """

    _section = RES

    gpus: int = field(
        "integer",
        "GPUs on all nodes together, the same number on each; 0 for none.",
        (0, MAX_GPUS),
        "-g -G --gpus N  GPUs: 2, a100:2, a fraction of one GPU, 0.5, or a MIG instance, 1g.10gb; default 0",
        read=gpus,
        default=0,
        update=PENDING,
        python="int | float | str",
    )
    """Number of cards on each node; 0 means a job that must not see a GPU."""
    gpu_fraction: float | None = field(
        "number", "Share of one card.", (0, 1), exclusive_low=True, default=None, update=PENDING, word="gpus"
    )
    """Share of one card, above 0 and below 1, booked in both VRAM and time."""
    gpu_type: str | None = field("string", "Part of the GPU's model name.", default=None, update=PENDING, word="gpus")
    """Matches a card whose model name contains this, ignoring case, blanks and dashes."""
    vram_mib: int | None = field(
        "integer",
        "VRAM on each card, sharing it, in MiB.",
        (1, MAX_MIB),
        "--vram SIZE  book only this much VRAM on each GPU and share it with other jobs of yours",
        default=None,
        update=PENDING,
    )
    """VRAM booked on each card; the rest of the card may serve other slices of the same user."""
    sm_percent: int | None = field(
        "integer",
        "Percentage of one card's SMs, enforced by MPS.",
        (1, 100),
        "--sm PERCENT  at most this percentage of a GPU's SMs, 30%, beside other jobs of yours, through NVIDIA's MPS",
        read=percent,
        default=None,
        update=PENDING,
    )
    """Percentage of the SMs of one card, an upper bound kept by MPS; without `vram_mib`, of its VRAM as well."""
    min_vram_mib: int | None = field(
        "integer",
        "Least VRAM of each card, in MiB.",
        (1, MAX_MIB),
        "--min-vram SIZE  only GPUs with at least this much VRAM",
        default=None,
        update=PENDING,
    )
    cpus: float = field(
        "number",
        "Cores per task, one task per node by default; 0 books none.",
        (0, MAX_CPUS),
        "-c --cpus --cpus-per-task N  cores, with -n for each task; 0 books none, fractions are allowed; default 1",
        default=1.0,
        update=PENDING,
    )
    """Cores on each node, for all of its tasks."""
    mem_mib: int = field(
        "integer",
        "Host memory on each node in MiB; 0 books none, all the whole node's.",
        (0, MAX_MIB),
        "-m --mem SIZE  host memory: 8G, 8GiB or 8192 (MiB); 0: all of a node's; default: none booked",
        words=(ALL_MEM,),
        read=memory,
        default=0,
        update=PENDING,
    )
    nodes: int = field(
        "integer",
        "Number of nodes, allocated together.",
        (1, MAX_NODES),
        (
            "-N --nodes N  number of nodes, or a range such as 1-2 for the fewest that can hold the job; -g "
            "is the total over all nodes, -c and -m are per node; default 1"
        ),
        read=nodes,
        section=WHERE,
        default=1,
        update=PENDING,
        is_shared=False,
    )
    """A gang: this many nodes at once, each with all of the above."""
    gpus_per_node: ClassVar[int | None] = field(
        "integer",
        "GPUs on each node; instead of `gpus`.",
        (0, MAX_GPUS),
        ("--gpus-per-node N  GPUs per node, instead of -g; with -g and without -N it determines the number of nodes"),
        read=gpus_of_node,
        section=WHERE,
        also=(Option("--gres gpu[:TYPE]:N  as --gpus-per-node", SLURM, gres),),
        default=0,
        update=PENDING,
        is_shared=False,
    )
    tail_gpus: int = 0
    """Of a gang: one more node with this many GPUs, fewer than the others have; 0 is no such node."""
    is_linked: bool = field(
        "boolean",
        "The cards of each node must be linked with each other.",
        option="--gpus-linked  only GPUs linked by NVLink, or else attached to the same NUMA node",
        name="gpus_linked",
        default=False,
        update=PENDING,
    )
    """The cards of each node must be linked to each other (NVLink, or else the same NUMA node)."""
    resources: tuple[tuple[str, int], ...] = field(
        "counts",
        "Custom resources on each node: names and numbers.",
        option=("--res NAME=N  amount of a resource from [node] resources in the config; may be repeated"),
        read=counts("scratch=2"),
        default=(),
        update=PENDING,
    )
    """Custom resources on each node, names and numbers, sorted by name."""
    licenses: tuple[tuple[str, int], ...] = field(
        "counts",
        "Licenses of the whole cluster: names and numbers.",
        option="-L --licenses LIST  licenses of [license] in the config: matlab:2,ansys",
        read=counts("matlab:2,ansys"),
        default=(),
        update=PENDING,
    )
    """Licenses, names and numbers, sorted by name, booked once for the whole cluster."""
    nodelist: tuple[str, ...] = field(
        "strings",
        "Only these nodes; a text may name several, as gpu[01-03].",
        option="-w --nodelist NODES  only these nodes: lab1,gpu[01-03]",
        read=hosts,
        section=WHERE,
        most=MAX_LIST,
        default=(),
        update=PENDING,
    )
    exclude: tuple[str, ...] = field(
        "strings",
        "Exclude these nodes; a text may name several.",
        option="-x --exclude NODES  do not use these nodes",
        read=hosts,
        section=WHERE,
        most=MAX_LIST,
        default=(),
        update=PENDING,
    )
    constraint: str | None = field(
        "string",
        "Labels a node must have: a100&nvlink, imagenet|coco, !old.",
        option=(
            "-C --constraint LABELS  only nodes with these labels of [node] labels: 'nvlink&!old|h100', where & "
            "binds tighter than |"
        ),
        section=WHERE,
        default=None,
        update=PENDING,
    )
    """Labels a node must have: `a100&nvlink`, `imagenet|coco`, `!old`; `&` binds tighter than `|`."""
    prefer: str | None = field(
        "string",
        "As constraint, but nodes without them will do.",
        option="--prefer LABELS  prefer nodes with these labels, but accept others",
        section=WHERE,
        default=None,
        update=PENDING,
    )
    near: tuple[str, ...] = field(
        "strings",
        "Data sets; nodes that have them are preferred, others accepted.",
        option=(
            "--near data=NAMES  prefer nodes that have these data sets, by [node] data in the config or since a job of "
            "yours with the same option has lately completed there"
        ),
        read=near,
        section=WHERE,
        most=MAX_LIST,
        default=(),
        update=PENDING,
    )
    """Data sets, sorted."""
    is_exclusive: bool = field(
        "boolean",
        "Nothing else runs on the job's nodes.",
        option="--exclusive  no other job on the same nodes",
        read=exclusive,
        section=WHERE,
        name="exclusive",
        default=False,
        update=PENDING,
    )

    @property
    def card_fraction(self) -> float | None:
        """Share of one card that it books in time, above 0 and at most 1; None for whole cards and slices by memory."""
        return self.gpu_fraction if self.sm_percent is None else self.sm_percent / 100

    @property
    def shares_cards(self) -> bool:
        """Whether the job books slices rather than whole cards."""
        return self.card_fraction is not None or self.vram_mib is not None

    def contradiction(self) -> str | None:
        """A sentence on the contradiction between fields, regardless of the machines; None without one."""
        if self.gpu_fraction is not None and self.gpus != 1:
            fraction = format_amount(self.gpu_fraction)
            return f"a fraction of {fraction} refers to one card, but {self.gpus} GPUs were requested"
        if self.gpu_fraction is not None and self.vram_mib is not None:
            return "a fraction of a card and an amount of VRAM cannot be combined"
        if self.sm_percent is not None and self.gpu_fraction is not None:
            return f"a fraction of a card and {self.sm_percent} % of its SMs cannot be combined"
        if self.sm_percent is not None and self.gpus > 1:
            return f"{self.sm_percent} % of the SMs refers to one card, but {self.gpus} GPUs were requested"
        if not self.gpus:
            for name, value in (
                ("VRAM", self.vram_mib),
                ("a share of SMs", self.sm_percent),
                ("a least VRAM", self.min_vram_mib),
                ("the type " + repr(self.gpu_type), self.gpu_type),
            ):
                if value is not None:
                    return f"{name} is requested, but no GPU"
            if self.is_linked:
                return "linked GPUs are requested, but no GPU"
        return self._contradiction_of_nodes()

    def _contradiction_of_nodes(self) -> str | None:
        if self.nodelist:
            left = [name for name in self.nodelist if name not in self.exclude]
            if not left:
                return "every requested node is also excluded"
            if len(left) < self.nodes:
                named = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
                return f"{self.nodes} nodes are requested, but only {len(left)} may be used: {named}"
        return None


def gpus_of_each_node(total: int | None, per_node: int | None, nodes: int) -> int | None:
    """Compute the GPUs per node of a gang from the total, the number per node, or both; None without either.

    Raises: ValueError when the total does not divide evenly, or the two contradict each other.
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
        raise ValueError(f"{plural(total, 'GPU')} in all and {per_node} on {where} contradict each other")
    return each


class TaskLayout(Value):
    """Tasks of a job and amounts for each of them, as asked for; `model.layout` computes what each node books."""

    _section = LAYOUT

    ntasks: int | None = field(
        "integer",
        "Total number of tasks, each a process of its own, see ranks; cores and GPUs can be given per task.",
        (1, MAX_TASKS),
        "-n --ntasks N  start N tasks, as ranks that find each other by RANK, MASTER_ADDR and the like; -c is for each",
        default=None,
        update=PENDING,
        is_shared=False,
    )
    ntasks_per_node: int | None = field(
        "integer",
        "Tasks on each node; with `ntasks` the most on each.",
        (1, MAX_TASKS),
        "--ntasks-per-node --tasks-per-node N  start N tasks on each node, as -n; with -n at most this many",
        default=None,
        update=PENDING,
        is_shared=False,
    )
    gpus_per_task: int | None = field(
        "integer",
        "GPUs for each task.",
        (1, MAX_GPUS),
        "--gpus-per-task N  GPUs for each task: 1, a100:1",
        read=gpus_of_task,
        default=None,
        update=PENDING,
        is_shared=False,
    )
    ntasks_per_gpu: int | None = field(
        "integer",
        "Tasks on each GPU; determines their number, or the number of GPUs.",
        (1, MAX_TASKS),
        "--ntasks-per-gpu N  tasks per GPU; determines the number of tasks, or with -n that of GPUs",
        default=None,
        update=PENDING,
        is_shared=False,
    )
    cpus_per_gpu: int | None = field(
        "integer",
        "Cores for each GPU; instead of `cpus`.",
        (1, MAX_CPUS),
        "--cpus-per-gpu N  cores for each GPU, instead of -c",
        default=None,
        update=PENDING,
    )
    mem_per_gpu_mib: int | None = field(
        "integer",
        "Host memory for each GPU in MiB; instead of `mem_mib`.",
        (1, MAX_MIB),
        "--mem-per-gpu SIZE  host memory for each GPU, instead of -m",
        read=memory_per_gpu,
        default=None,
        update=PENDING,
    )
    mem_per_cpu_mib: int | None = field(
        "integer",
        "Host memory for each core in MiB; instead of `mem_mib`.",
        (1, MAX_MIB),
        "--mem-per-cpu SIZE  host memory for each core, instead of -m",
        read=memory_per_core,
        default=None,
        update=PENDING,
    )
    nodes_max: int | None = field(
        "integer",
        "Upper end of a range of nodes that begins with `nodes`.",
        (1, MAX_NODES),
        default=None,
        update=PENDING,
    )
    cpus_per_task: float | None = None
    """Cores for each task if stated; None for the default."""
    is_all_mem: bool = False
    """Whether all memory of a node was asked for."""


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


class Notice(Value):
    """A signal sent before the time limit, or as the first signal of an earlier stop (`--signal [B:]SIG[@s]`)."""

    signal: int
    before_s: int
    main_only: bool
    """True for `B:`: only the job's first process gets it, not the whole tree."""


class Launch(Value):
    """How a run is started. Texts may hold lone surrogates for bytes that are not UTF-8."""

    _section = FILES

    argv: tuple[str, ...] = field(
        "strings", "Command and arguments; with a script its arguments only.", most=MAX_OWN, keyword=None
    )
    script_sha: str | None = field(
        "string", "Text of the script, beginning with #!.", name="script", most=MAX_OWN, keyword=None
    )
    """SHA-256 of the script's text in the payload table; None for a plain command."""
    script_name: str | None = field("string", "Name of the script.", keyword=None)
    """Name of the script as submitted: file name, `stdin` or `wrap`."""
    env_sha: str = field("map", "Captured environment.", name="env", most=MAX_OWN, keyword=None)
    """SHA-256 of the captured environment in the payload table."""
    env_named: ClassVar[tuple[str, ...]] = field(
        "strings", "Variables of env that [submit] env_exclude does not leave out.", most=MAX_OWN, keyword=None
    )
    work_dir: str = field(
        "string",
        "Working directory, absolute.",
        option="-D --chdir DIR  working directory; default: the current one",
        section=WHAT,
        completes="dir",
        keyword="chdir",
        python="str | os.PathLike[str]",
    )
    venv: str | None = field(
        "string",
        "Folder of a virtual environment to activate, absolute.",
        option=("--venv DIR  activate this virtual environment for the job, in place of one that is active here"),
        section=WHAT,
        completes="dir",
        default=None,
        python="str | os.PathLike[str]",
    )
    conda: str | None = field(
        "string",
        "Folder of a conda environment to activate, absolute.",
        option="--conda ENV  as --venv, a conda environment by name or folder",
        section=WHAT,
        default=None,
        python="str | os.PathLike[str]",
    )
    umask: int = field("integer", "File mode mask of the submitter.", (0, 0o777), default=0o022, keyword=None)
    stdout: str | None = field(
        "string",
        "Output pattern.",
        option=(
            "-o --output FILE  output file, whose folder is created if missing; %j id, %A_%a array and task, %x "
            "name, %u user, %N node, %5j padded; default gpusched-%j.out, for tasks gpusched-%A_%a.out"
        ),
        completes="file",
        default=None,
        keyword="output",
        python="str | os.PathLike[str]",
    )
    """Output pattern (`%j %A %a %x %u %N`); None means `gpusched-%j.out`."""
    stderr: str | None = field(
        "string",
        "Error pattern; absent: into the output.",
        option="-e --error FILE  error output; default: same file as the output",
        completes="file",
        default=None,
        keyword="error",
        python="str | os.PathLike[str]",
    )
    stdin: str | None = field(
        "string",
        "Input pattern; absent: no input.",
        option="-i --input FILE  standard input, with the patterns of the output; default: /dev/null",
        completes="file",
        default=None,
        keyword="input",
        python="str | os.PathLike[str]",
        is_shared=False,
    )
    """Input pattern; None for /dev/null."""
    open_mode: str | None = field(
        "string",
        "What to do with a file that exists.",
        option="--open-mode MODE  append or truncate, for all runs; default: each retry gets its own file",
        choices=("append", "truncate"),
        default=None,
    )
    """`truncate`, `append`, or None: the first run truncates, later runs get a numbered suffix."""
    prolog: str | None = field(
        "string",
        "Program to execute before the command, in the run; absolute or relative to work_dir.",
        option=(
            "--prolog FILE  program to execute in the run before the command, within the time limit; if it fails, so "
            "does the run"
        ),
        completes="file",
        default=None,
        python="str | os.PathLike[str]",
        is_shared=False,
    )
    epilog: str | None = field(
        "string",
        "Program to execute after the command, however that ended; absolute or relative to work_dir.",
        option=(
            "--epilog FILE  program to execute in the run after the command, also after failure, cancel and time "
            "limit; GPUSCHED_STATE and GPUSCHED_EXIT_CODE say how it ended"
        ),
        completes="file",
        default=None,
        python="str | os.PathLike[str]",
        is_shared=False,
    )
    notice: Notice | None = field(
        "notice",
        "Signal some time before the time limit, or first when the job is stopped before.",
        option=(
            "--signal [B:]SIG[@S]  send this signal S seconds (default 60) before the time limit, and in place of "
            "TERM when the job is preempted, requeued or cancelled earlier; B: to the first process only"
        ),
        read=notice,
        section=FAIL,
        default=None,
        python="Mapping[str, Any]",
    )
    stop_signal: int | None = field(
        "integer",
        "First signal when the job is stopped; unless set TERM, before the time limit that of `notice`.",
        (1, 64),
        default=None,
    )
    grace_s: float | None = field(
        "number",
        "Between the first signal and KILL, in seconds.",
        (0, 86400),
        "--grace TIME  between the first signal and KILL when the job is stopped; default 30s",
        section=FAIL,
        default=None,
    )
    """Time between the first signal and KILL; None for the setting `grace_s`."""
    gpu_ids: str | None = field(
        "string",
        "Form of CUDA_VISIBLE_DEVICES.",
        option="--gpu-ids FORM  form of CUDA_VISIBLE_DEVICES: index (default) or uuid",
        section=RES,
        choices=("index", "uuid"),
        default=None,
    )
    """`index` or `uuid` in CUDA_VISIBLE_DEVICES; None for the setting `gpu_ids`."""
    slurm: bool = field(
        "boolean",
        "Submitted with a command of Slurm: notices go to its steps alone, and its log speaks like Slurm's.",
        default=False,
        keyword=None,
    )
    ranks: bool = field(
        "boolean",
        "Start each task that is asked for as a rank, a process of its own; otherwise srun in the job starts them.",
        option="--ranks  start each task as a process of its own (default, unless a script has #SBATCH lines)",
        section=LAYOUT,
        also=(
            Option(
                "--no-ranks  start the program once on each node; srun in it starts the tasks",
                LAYOUT,
                sets={"ranks": False},
                is_shared=False,
            ),
        ),
        default=False,
        is_shared=False,
    )
    """Whether the engine starts the tasks; see `model.layout.starts_ranks`."""
    submit_dir: str | None = field(
        "string", "Folder of relative outputs, absolute; the working directory unless it is given.", default=None
    )
    """Base of relative outputs, and the submit directory in the environment; None for `work_dir`."""
    log_max_mib: int | None = field(
        "integer",
        "Rotate an output file when it has grown to this size, in MiB.",
        (1, MAX_MIB),
        (
            "--log-max SIZE[:KEEP]  rotate the output file to FILE.old1 at SIZE, keeping KEEP files; default: no "
            "limit; 3 files"
        ),
        read=log_max,
        default=None,
        is_shared=False,
    )
    """Rotate an output file at this size; None lets it grow."""
    log_keep: int = field(
        "integer", "How many rotated files are kept; 0 empties the file instead.", (0, 100), default=3
    )
    submit_line: str | None = field(
        "string", "Command line of the submission, for accounting.", default=None, keyword=None
    )
    """Command line of the submission, in a form that can be typed."""
    script_path: str | None = field(
        "string", "Where the script was read, absolute; null for text without a file.", default=None, keyword=None
    )
    """Where the submitter's script is, for people and tools that look at it; what runs is the stored text."""
    image: str | None = field(
        "string",
        "Container image to run in: a reference, or a .sif file.",
        option=(
            "--image IMAGE  run in this container image, docker.io/pytorch/pytorch:2.4.0 or a .sif file; it is pulled "
            "before the job takes a GPU, and pinned by its digest"
        ),
        section=BOX,
        also=(Option("--container-image IMAGE  as --image", SLURM),),
        default=None,
    )
    binds: tuple[str, ...] = field(
        "strings",
        "Folders and files of the host in the container, HOST:CONTAINER or HOST:CONTAINER:ro.",
        option=(
            "--bind HOST:CONTAINER[:ro]  with --image: mount a folder or file of the host, besides the working "
            "directory; may be repeated"
        ),
        section=BOX,
        also=(Option("--container-mounts LIST  as --bind", SLURM),),
        most=MAX_LIST,
        default=(),
    )
    container_workdir: str | None = field(
        "string",
        "Working directory inside the container, absolute.",
        option="--container-workdir DIR  with --image: start in this folder of the container; default: that of -D",
        section=BOX,
        default=None,
    )
    image_digest: str | None = None
    """The image that all runs use, by digest; None until it has been pulled."""


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
        also=(Option("--mail-user ADDRESS  as --notify-to", SLURM, is_shared=False),),
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
    """For a submission without a time limit: one of `TIME_LIMIT_SOURCES`; empty if it states one or none applies."""
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
    array: ArraySpec | None = None
    fallback: str | None = field(
        "string",
        "Shell line that runs once after the last failure, as a job of its own.",
        option=(
            "--fallback LINE  shell line to run once after the final failure, as a separate job with the same request"
        ),
        section=FAIL,
        most=MAX_OWN,
        default=None,
        update=RUNNING,
        owner_only=True,
        is_shared=False,
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
    def limit_source(self) -> str | None:
        """Source of the time limit, `user` if stated; None without a limit."""
        return self.time_limit_source or (None if self.time_limit_s is None else "user")


def fields_of(kind: type) -> dict[str, Field]:
    """Request fields declared by a class, by JSON name."""
    return {one.name: one for one in vars(kind).values() if isinstance(one, Field)}


PARTS = (Request, TaskLayout, RetryRule, JobSpec, ArraySpec, Launch, Interactive, Alerting)
FIELDS: dict[str, Field] = {name: one for kind in PARTS for name, one in fields_of(kind).items()}
"""Every field of submissions and updates, by its JSON name."""
UPDATABLE: dict[str, Field] = {name: one for name, one in FIELDS.items() if one.update}
GPU_KEYS = frozenset({"gpus", "gpus_per_node", "gpus_per_task", "gpu_fraction", "gpu_type"})
"""Keys that together form one request for GPUs: setting any of them again resets the others."""
TASK_KEYS = frozenset({"ntasks", "ntasks_per_node", "ntasks_per_gpu", "gpus_per_task"})
"""Keys that ask for a number of tasks, by themselves or together with others."""
