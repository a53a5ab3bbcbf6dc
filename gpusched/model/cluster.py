"""State of the machines at one instant: GPUs, nodes and their measured load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from msgspec import field

from gpusched.model.job import GpuShare, Request
from gpusched.model.mig import MigLayout, MigProfile, MigState
from gpusched.model.static_gpus import CUDA_VARIABLE
from gpusched.model.value import Value

_AMD_UUID = re.compile(r"GPU-[0-9a-f]{16}|AMD-.+")


def is_amd(uuid: str) -> bool:
    """Whether a GPU of this UUID is AMD's: it is as HIP has it, unlike any of NVIDIA, or a PCI address in its place."""
    return _AMD_UUID.fullmatch(uuid) is not None


class GpuProcess(Value):
    """A process that holds a GPU. `vram_mib` is None when the driver does not report it."""

    pid: int
    vram_mib: int | None
    user: str | None = None
    started_at: float | None = None
    name: str | None = None
    run: str | None = None
    """Handle of the process's run if that run did not book the GPU; None in driver readings."""
    sm: float | None = None
    """Fraction of time in which its kernels ran, 0 to 1; read only while a card has several processes."""


class Xid(Value):
    """A fault that the driver reported by number (Xid). `at` is the best estimate of its time."""

    number: int
    at: float
    sequence: int | None = None
    """Sequence number of its kernel log record, stable across readings; None for a fault received as an event."""


class DrainCause(str, Enum):
    """Why a node or GPU accepts no new work, for programs; the message beside it is for people."""

    ADMIN = "admin"
    """An administrator drained it."""
    DOWN = "down"
    """An administrator declared the node down."""
    SITE_PROGRAM = "site_program"
    """The prolog or epilog of the site failed on the node, or the epilog was never executed."""
    GPU_FAULT = "gpu_fault"
    """The driver reported a fault of the GPU."""
    GPU_LOST = "gpu_lost"
    """The driver lost the GPU."""
    EARLY_FAILURES = "early_failures"
    """Jobs of several users in a row failed on the GPU in their first seconds."""
    MIG_LAYOUT = "mig_layout"
    """The GPU gets another MIG layout as soon as it is idle; never stored."""

    __str__ = str.__str__

    @property
    def is_suspicion(self) -> bool:
        """Whether the GPU is held responsible for something, so that it counts as suspect."""
        return self in _SUSPICIONS


_SUSPICIONS = frozenset({DrainCause.GPU_FAULT, DrainCause.GPU_LOST, DrainCause.EARLY_FAILURES})


class DrainEntry(Value):
    """That a node or GPU accepts no new work."""

    message: str
    cause: DrainCause = DrainCause.ADMIN

    @property
    def text(self) -> str:
        """The message, after the word `suspect` for a GPU that is."""
        return f"{GpuState.SUSPECT}: {self.message}" if self.cause.is_suspicion else self.message


class Drainer(Value):
    """The user who drained a node or GPU, and when."""

    user: str
    at: float
    down: str | None = None
    """Why the node was declared down: its older runs are lost. None: it was drained only."""


class Clearance(Value):
    """Confirmation by an admin that a GPU is well (`gctl undrain`): earlier faults no longer count against it."""

    uuid: str
    at: float
    ecc_errors: int | None = None
    """`GpuSample.ecc_errors` at that instant; None when it was unknown."""


class GpuSample(Value):
    """One GPU as measured at one instant. None means unknown, never zero and never free."""

    uuid: str
    index: int
    name: str
    vram_total_mib: int | None = None
    vram_reserved_mib: int = 0
    """Reserved by the driver itself; not bookable."""
    vram_used_mib: int | None = None
    """Used by processes, without the driver's reserve (NVML memory v2)."""
    utilisation: float | None = None
    """Fraction of time with at least one kernel running, 0 to 1."""
    temperature_c: float | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """None when the list is unavailable or inconsistent; an empty tuple when it is truly empty."""
    pci_bus_id: str | None = None
    minor: int | None = None
    """N of /dev/nvidiaN, or of /dev/dri/renderDN for AMD's; it differs from the index."""
    mig_enabled: bool = False
    compute_mode: int = 0
    """0 default, 2 prohibited, 3 one process only."""
    display_active: bool = False
    unified_memory: bool = False
    """The card has no dedicated memory: its VRAM is host memory."""
    is_lost: bool = False
    """The driver reports the device as gone (fell off the bus)."""
    error: str | None = None
    """Why this device could not be read."""
    link_group: int | None = None
    """NVLink group: cards with the same number are linked to each other; None without links, or if unknown."""
    numa: int | None = None
    """NUMA node next to the card; None when unknown."""
    memory_utilisation: float | None = None
    """Fraction of time with its memory being read or written, 0 to 1."""
    xids: tuple[Xid, ...] = ()
    """Faults reported since the last reading; a new reader repeats those in the kernel log."""
    ecc_errors: int | None = None
    """Uncorrectable memory errors since the driver was loaded or the card reset."""
    remap_pending: bool | None = None
    """A memory row (or page) awaits replacement at the next reset."""
    remap_failed: bool | None = None
    """A broken memory row could not be replaced."""
    slowdown_c: float | None = None
    """Temperature at which the card starts to throttle."""
    mig_pending: bool | None = None
    """MIG mode after the next reset; None when the driver does not report it."""
    mig_instances: int = 0
    """Number of MIG instances on the card; 0 also when MIG is off."""
    mig_parent: str | None = None
    """For a MIG instance: UUID of its card, which also supplies temperature, ECC and modes."""
    mig_profile: str | None = None
    """For a MIG instance: profile, such as `2g.20gb`."""
    mig_gi: int | None = None
    """For a MIG instance: its GPU instance id, which locates its device files; None when unknown."""
    mig_ci: int | None = None
    """For a MIG instance: its compute instance id within the GPU instance."""
    mig: MigState | None = None
    """How the card could be divided; None for one that cannot do MIG, and for a MIG instance."""
    mps: bool | None = None
    """Whether an MPS control daemon serves the card; None where none is expected."""
    energy_mj: int | None = None
    """Energy used since the driver was loaded, in millijoules; None for a MIG instance and before Volta."""
    power_limit_w: float | None = None
    """Power limit that the driver enforces now."""
    cuda_capability: float | None = None
    """CUDA compute capability, such as 8.0; None for cards without CUDA."""
    why_not_mps: str | None = None
    """Why jobs cannot have a share of it through MPS, as a clause; None if they can."""
    mps_trouble: str | None = None
    """Why the MPS control daemon that a run needs does not run, as a clause."""
    power_cap_w: float | None = None
    """While a power cap is wanted for it: the limit in force, at most the cap; None if it is not in force."""
    power_cap_refused: str | None = None
    """Why the power cap that is wanted is not in force, as a clause."""
    is_declared: bool = False
    """Declared in the settings: nothing of it can be read, and bookings alone say whether it is free."""
    openers: tuple[GpuProcess, ...] = ()
    """Processes that have the device open but are missing from the driver's list; searched for only when the list
    does not account for the memory in use."""


class PowerLimit(Value):
    """Power limit that was set for a card, and the lowest that the card accepts."""

    limit_w: float
    low_w: float


class GpuTargets(Value):
    """What cards of a node are to be like for its runs; all others are as they were."""

    power_caps: dict[str, float] = field(default_factory=dict)
    """Power limit in watts, by UUID."""
    mps: dict[str, int] = field(default_factory=dict)
    """Uid of the user for whom an MPS control daemon serves the card, by UUID."""
    number: int = 0
    """Different for each change; 0 while nothing was ever wanted."""


class GpuReading(Value):
    """All GPUs of one node at one instant, or why they could not be read."""

    at: float
    source: str
    """`nvml`, `amdsmi`, `simulated`, `static` or `none`."""
    gpus: tuple[GpuSample, ...] = ()
    error: str | None = None
    """Set when the driver as a whole is broken; the reason that GPU jobs wait."""
    driver_version: str | None = None
    notes: tuple[str, ...] = ()
    """Remarks for `ginfo` and `doctor`, such as a restriction by CUDA_VISIBLE_DEVICES."""
    log_trouble: str | None = None
    """Why faults cannot be read from the kernel log."""
    faults_until: float | None = None
    """Faults before this instant are in this reading or an earlier one; None without a source of faults."""

    variable: str = CUDA_VARIABLE
    """Environment variable that names GPUs to programs, by index."""
    targets: int = 0
    """Number of the `GpuTargets` that the cards were brought in line with before."""
    power_troubles: tuple[str, ...] = ()
    """Why GPUs do not have the power limits that they should have: a sentence for each reason."""

    @property
    def remarks(self) -> list[str]:
        """Notes, why faults cannot be read, and why power limits are not as they should be."""
        return [*self.notes, *([self.log_trouble] if self.log_trouble else []), *self.power_troubles]


class HostSample(Value):
    """Measured load of one node. Fractions are 0 to 1; None is unknown."""

    at: float
    name: str
    cpus: int
    mem_total_mib: int
    mem_available_mib: int
    cpu_fraction: float | None = None
    disk_mib_s: float | None = None
    net_mib_s: float | None = None
    boot_id: str = ""
    boot_at: int | None = None
    load_average: float | None = None
    """Of the last minute."""
    architecture: str = ""
    """`x86_64`."""
    system: str = ""
    """Name, release and version of the kernel."""
    runtimes: tuple[str, ...] = ()
    """Paths of the container runtimes that are installed."""
    identity: str = ""
    """The same for two names of one machine, and for no two machines; empty if unknown."""


class Processor(Value):
    """One logical processor. Processors with the same `core` share a physical core."""

    id: int
    core: int
    numa: int = 0


class Isolation(Value):
    """Limits on runs that the kernel enforces on this machine, as opposed to mere bookings."""

    launcher: str
    """`systemd`: each run is a separate unit. `fork`: the daemon's fork server starts runs."""
    is_limited: bool = False
    """Whether control groups enforce memory, tasks and processors."""
    folder: str | None = None
    """Control group that holds the groups of all runs; None: each run has its own unit's."""
    can_pin: bool = False
    """Whether a run can be pinned to processors."""
    why_not: str | None = None
    """Why no limits are enforced; None when they are."""
    why_not_devices: str | None = None
    """Why runs can open GPUs booked by others; None when they cannot."""


class GpuState:
    """GPU conditions as printed by `ginfo`."""

    IDLE = "idle"
    ALLOCATED = "allocated"
    MIXED = "mixed"
    DRAINING = "draining"
    DRAINED = "drained"
    SUSPECT = "suspect"
    LOST = "lost"
    UNKNOWN = "unknown"


class GpuView(Value):
    """A GPU as the policy sees it: its capacity, and whether jobs can be placed on it."""

    uuid: str
    index: int
    name: str
    vram_total_mib: int | None
    """Bookable memory: total less the driver's reserve. None when it cannot be read."""
    foreign_mib: int = 0
    """Used by foreign processes and by runs that did not book it, at its recent peak."""
    over_mib: int = 0
    """Used by runs beyond their bookings, at its recent peak."""
    why_not: str | None = None
    """Set when no job can be placed here: drained, lost, stale, dirty, or too much foreign use even for slices."""
    is_suspect: bool = False
    """That is because the GPU is held responsible for faults or failures, or an ended run has not released it."""
    why_not_whole: str | None = None
    """Set when slices can be placed but no whole-card job can: foreign use above the threshold."""
    foreign_limit_mib: int = 1024
    """Threshold of foreign use for `why_not_whole`."""
    is_foreign_busy: bool = False
    """Foreign processes, or runs that did not book it, keep it busy, regardless of their memory."""
    has_host_memory: bool = False
    """The card has no dedicated memory: VRAM bookings count against the node's memory."""
    can_share: bool = True
    """False when the compute mode admits one process only, or MIG is on."""
    why_not_mps: str | None = None
    """Set when no job can have a share of its SMs through MPS."""
    is_present: bool = True
    """False for a lost card and for one divided by MIG: neither counts as capacity."""
    utilisation: float | None = None
    """Fraction of time with at least one kernel running, 0 to 1, as last measured."""
    link_group: int | None = None
    """NVLink group: cards of one node with the same number are linked to each other; None without links."""
    numa: int | None = None
    """NUMA node of the card; None when unknown."""
    ecc_errors: int | None = None
    """See `GpuSample.ecc_errors`."""
    is_divided: bool = False
    """MIG is on: jobs can book its instances but not the card."""
    mig_profile: str | None = None
    """For a MIG instance: profile, such as `2g.20gb`. A job can have one instance and no other card beside it."""
    mig_parent: str | None = None
    """For a MIG instance: UUID of its card."""
    mig_profiles: tuple[MigProfile, ...] = ()
    """Kinds of MIG instances that the card could be divided into; empty for one that cannot, or if unknown."""
    mig_wanted: MigLayout | None = None
    """Layout that the card gets as soon as it is idle."""


class Enforcement:
    """How a run is held to its VRAM booking, as printed by `ginfo` and `gshow`."""

    NONE = "none"
    """Not at all: monitoring is off or impossible."""
    WATCHED = "watched"
    """Periodic readings detect excess use, some seconds late."""
    MPS = "MPS"
    """CUDA refuses to allocate beyond the booking."""
    MIG = "MIG"
    """Hardware: the run has a partition of a card, with memory of its own."""


class ShareUse(Value):
    """Use of one shared card by one run, in one reading. None is unknown."""

    run: str
    uuid: str
    index: int
    booked_mib: int
    used_mib: int | None
    left_mib: int | None
    """VRAM of the card that the visible use of all others leaves to this run."""

    @property
    def over_mib(self) -> int:
        """Use beyond the booking; 0 when unknown."""
        return max(0, (self.used_mib or 0) - self.booked_mib)

    @property
    def is_crowded(self) -> bool:
        """Whether the others leave less than this run's booking, so that it may fail without being at fault."""
        return self.left_mib is not None and self.left_mib < self.booked_mib


GPUS_NOT_READ = "its GPUs have not been read yet"
"""`NodeView.gpu_error` of a node without a first reading."""


class NodeView(Value):
    """A node as the policy sees it."""

    name: str
    cpus: float
    mem_mib: int
    gpus: tuple[GpuView, ...] = ()
    why_not: str | None = None
    """Set when no job can be placed on the node: drained or down."""
    gpu_error: str | None = None
    """Set while its GPUs are unknown, as when the driver is broken: GPU jobs wait, other jobs still start."""
    load: HostSample | None = None
    labels: tuple[str, ...] = ()
    """Features that the node offers; sorted."""
    data: tuple[str, ...] = ()
    """Data sets that the node declares; sorted."""
    resources: tuple[tuple[str, int], ...] = ()
    """Custom resources for allocation, as names and numbers, sorted by name."""
    is_unknown: bool = False
    """Nothing but its name is known: it belongs to the cluster and has not been reached yet."""
    is_unreachable: bool = False
    """It does not answer: what becomes of its runs is not known."""
    runtimes: tuple[str, ...] = ()
    """Names of the container runtimes that it has."""


class JobTerms(Value, cache_hash=True):
    """What scheduling goes by of a job, whether it is pending or running."""

    uid: int
    user: str = ""
    account: str = ""
    queue: str = "default"
    qos: str = ""
    request: Request = Request()
    """Empty for a run that says nothing about jobs to come: an ended one, or one without a known job."""
    reservation: str | None = None
    can_requeue: bool = True
    """Consents to preemption by requeue."""
    can_suspend: bool = False
    """Consents to preemption by suspension; it holds no GPU."""


class Allocation(Value):
    """Resources that one open run holds on one node. A gang has one allocation on each of its nodes."""

    job_id: int
    terms: JobTerms
    node: str
    gpus: tuple[GpuShare, ...]
    cpus: float
    mem_mib: int
    start_at: float
    expected_end_at: float | None = None
    """Start plus time limit; None without a limit."""
    predicted_end_at: float | None = None
    """Predicted end, from earlier runs. The run may take longer, up to its time limit if it has one."""
    resources: tuple[tuple[str, int], ...] = ()
    licenses: tuple[tuple[str, int], ...] = ()
    """On the first node of a gang only."""
    is_exclusive: bool = False
    is_stopping: bool = False
    """Its stop was already ordered; `expected_end_at` is then the latest end of its grace and its epilogs."""
    is_suspended: bool = False
    """Suspended by the policy: it holds the resources listed here, but no cores."""
    suspended_cpus: float = 0.0
    """Cores that it takes back on resume."""
    array_id: int | None = None
    """For a task: id of its array."""
    grace_s: float = 30.0
    """Maximum time to end it, in seconds."""
    epilog_s: float = 0.0
    """How long its epilogs may take after that, in seconds: as those of earlier runs did, or their time limits."""
    checkpoint_at: float | None = None
    """Work up to this instant survives if it ends now; None: all work since `start_at` is lost."""
    is_filler: bool = False
    """Started on a spent budget: every job within its budget may preempt it, at any time."""
    reported_end_at: float | None = None
    """End by the progress that it reports; counts until it is past."""


@dataclass(frozen=True, slots=True)
class ShareFacts:
    """One share of a card, for display."""

    used_mib: int | None
    enforcement: str
    """A word of `Enforcement`."""
    enforcement_why: str


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """A GPU's condition for display: a word of `GpuState`, why, other processes, the last sample."""

    state: str
    why: str | None = None
    intruders: tuple[GpuProcess, ...] = ()
    """Foreign processes, plus, with `run` set, processes of runs that did not book the GPU."""
    sample: GpuSample | None = None
    idle_since: float | None = None
    """Start of the card's observed idle time; None while it is busy or does not report use."""
    detail: str | None = None
    """For a lost or suspect one: `why` without that word; None if nothing else is known, and for others."""
    drain: DrainCause | None = None
    """Why it, or the card it is part of, is drained; None if it is not."""
