"""What a job asks for: resources of each node, and tasks with amounts for each of them."""

from __future__ import annotations

from gpusched.model.option import (
    LAYOUT,
    MAX_LIST,
    MAX_UNITS,
    PENDING,
    RES,
    SLURM,
    WHERE,
    Option,
    counts,
    exclusive,
    field,
    gpus,
    gpus_of_node,
    gpus_of_task,
    gres,
    hosts,
    memory,
    memory_per_core,
    memory_per_gpu,
    near,
    nodes,
    percent,
    tres_per_task,
)
from gpusched.model.units import MAX_MIB, format_amount, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from gpusched.model.value import Value
else:
    Value = object

MAX_GPUS = 1024
MAX_CPUS = 65536
MAX_NODES = 4096
MAX_TASKS = 65536
ALL_MEM = "all"
"""In place of an amount of memory: all that a node has."""


class Bundles(Value):
    """Equal parts of a job, none of which two nodes can share; how many go to each node is decided when it starts.

    A node with some of them books the sum of their amounts, or the least amounts of a node if those are more.
    """

    count: int
    """In all, at least as many as nodes: each has one or more."""
    nodes_max: int
    """The most nodes; the fewest are the `nodes` of the request."""
    most: int
    """The most on one node."""
    gpus: int
    """Of each bundle; 0 for a job without GPUs."""
    tasks: int
    """Of each bundle; 0 if each node has the same number of tasks, however many GPUs."""
    cpus: float
    """Of each bundle; 0 if each node has the same number of cores."""
    mem_mib: float
    """Of each bundle."""
    node_cpus: float
    """The least of a node."""
    node_mem_mib: int
    """The least of a node."""


class Request(Value):
    """Resources of one job. Equal requests are one object in the daemon's memory.

    GPUs come as whole cards (`gpus` >= 1 and neither `gpu_fraction` nor `vram_mib`), as a fraction of
    one card (`gpus` == 1 and `gpu_fraction`), or as slices by memory (`vram_mib` on each of `gpus` cards).
    """

    _section = RES

    gpus: int = field(
        "integer",
        "GPUs on all nodes together; 0 for none.",
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
            "-N --nodes N  number of nodes, or a range such as 1-2 for the fewest that have room when it starts; -g "
            "is the total over all nodes, -c and -m are per node; default 1"
        ),
        read=nodes,
        section=WHERE,
        default=1,
        update=PENDING,
    )
    """A gang: this many nodes at once, each with all of the above; the fewest of a range."""
    gpus_per_node: ClassVar[int | None] = field(
        "integer",
        "GPUs on each node; instead of `gpus`.",
        (0, MAX_GPUS),
        ("--gpus-per-node N  GPUs per node, instead of -g; with -g and without -N it determines the number of nodes"),
        read=gpus_of_node,
        section=WHERE,
        also=(Option("--gres gpu[:TYPE]:N  as --gpus-per-node; mps:50 is half a GPU", SLURM, gres),),
        default=0,
        update=PENDING,
    )
    gpu_shards: ClassVar[int | None] = field(
        "integer",
        "Shards of one card on each node, as Slurm counts them: of the setting `slurm.shards_per_gpu`.",
        (1, MAX_UNITS),
        default=None,
    )
    tail_gpus: int = 0
    """Of a gang: one more node with this many GPUs, fewer than the others have; 0 is no such node."""
    bundles: Bundles | None = None
    """How the job may be laid out over nodes, if its parts need not be equal or the number of nodes is a range. Then
    `gpus`, `cpus` and `mem_mib` are the largest part of the fewest nodes, evenly laid out."""
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

    runtime: str | None = None
    """Container runtime that its nodes must have; None without an image."""
    image_nodes: tuple[str, ...] = ()
    """Nodes to which its image has been pulled: no others will do. Empty without an image, and until then."""

    @property
    def card_fraction(self) -> float | None:
        """Share of one card that it books in time, above 0 and at most 1; None for whole cards and slices by memory."""
        return self.gpu_fraction if self.sm_percent is None else self.sm_percent / 100

    @property
    def total_gpus(self) -> int:
        """Cards on all nodes together."""
        if self.bundles is not None:
            return self.bundles.count * self.bundles.gpus
        return self.gpus * self.nodes + self.tail_gpus

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
        "Total number of tasks, each a separate process, see ranks; cores and GPUs can be given per task.",
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
        also=(Option("--tres-per-task LIST  cpu:2,gres/gpu:1, as -c and --gpus-per-task", SLURM, tres_per_task),),
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
    min_cpus: int | None = field(
        "integer",
        "Least cores on each node, also for fewer tasks.",
        (1, MAX_CPUS),
        "--mincpus N  at least N cores on each node, however many its tasks need",
        default=None,
        update=PENDING,
    )


GPU_KEYS = frozenset({"gpus", "gpus_per_node", "gpus_per_task", "gpu_fraction", "gpu_type", "gpu_shards"})
"""Keys that together form one request for GPUs: setting any of them again resets the others."""
TASK_KEYS = frozenset({"ntasks", "ntasks_per_node", "ntasks_per_gpu", "gpus_per_task"})
"""Keys that ask for a number of tasks, by themselves or together with others."""
