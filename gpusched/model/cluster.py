"""What the machines are and do at one instant: GPUs, nodes and their measured load."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.job import GpuShare, Request
from gpusched.model.value import Value


class GpuProcess(Value):
    """A process that holds a GPU. `vram_mib` is None when the driver does not tell."""

    pid: int
    vram_mib: int | None
    user: str | None = None
    started_at: float | None = None
    name: str | None = None
    run: str | None = None
    """Handle of the run that it belongs to, where that run did not book the GPU; None in what the driver says."""


class Xid(Value):
    """A fault that the driver told of by number. `at` is when it happened, as nearly as that is known."""

    number: int
    at: float
    sequence: int | None = None
    """Of the record in the kernel's log, the same whenever that is read again; None: heard as an event."""


class Clearance(Value):
    """Somebody said that a GPU is well (`gctl undrain`): what was known by then does not speak against it."""

    uuid: str
    at: float
    ecc_errors: int | None = None
    """`GpuSample.ecc_errors` at that instant; None when it was unknown."""


class GpuSample(Value):
    """One GPU as measured at one instant. None is unknown, never zero and never free."""

    uuid: str
    index: int
    name: str
    vram_total_mib: int | None = None
    vram_reserved_mib: int = 0
    """Held by the driver itself; not bookable."""
    vram_used_mib: int | None = None
    """By processes, without the driver's reserve (NVML memory v2)."""
    utilisation: float | None = None
    """Share of time some kernel ran, 0 to 1."""
    temperature_c: float | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """None when the list is unavailable or makes no sense; an empty tuple when it is truly empty."""
    pci_bus_id: str | None = None
    minor: int | None = None
    """N of /dev/nvidiaN, which is not the index."""
    mig_enabled: bool = False
    compute_mode: int = 0
    """0 default, 2 prohibited, 3 one process only."""
    display_active: bool = False
    unified_memory: bool = False
    """The card has no memory of its own: VRAM is host memory."""
    is_lost: bool = False
    """The driver says the device is gone (fell off the bus)."""
    error: str | None = None
    """Why this device could not be read at all."""
    link_group: int | None = None
    """Cards with the same number are linked with each other (NVLink); None has no link, or it is unknown."""
    numa: int | None = None
    """NUMA node next to the card; None when unknown."""
    memory_utilisation: float | None = None
    """Share of time in which its memory was read or written, 0 to 1."""
    xids: tuple[Xid, ...] = ()
    """Faults told of since the last reading; a new reader tells of those in the kernel's log once more."""
    ecc_errors: int | None = None
    """Memory errors that could not be corrected, since the driver was loaded or the card reset."""
    remap_pending: bool | None = None
    """A memory row (or page) waits for a reset to be replaced."""
    remap_failed: bool | None = None
    """A broken memory row could not be replaced."""
    slowdown_c: float | None = None
    """Temperature from which the card slows itself down."""
    mig_pending: bool | None = None
    """MIG as it will be after a reset; None when the driver does not tell."""
    mig_instances: int = 0
    """How many MIG instances the card is divided into; 0 also when MIG is off."""
    mig_parent: str | None = None
    """Of a MIG instance: the UUID of the card that it is a part of. Heat, ECC and modes are that card's."""
    mig_profile: str | None = None
    """Of a MIG instance: `2g.20gb`."""
    mig_gi: int | None = None
    """Of a MIG instance: its GPU instance, by which its device files are found; None when unknown."""
    mig_ci: int | None = None
    """And its compute instance in that."""
    mps: bool | None = None
    """Whether an MPS control daemon runs for the card; None where MPS is not used."""
    openers: tuple[GpuProcess, ...] = ()
    """Processes that have the device open and are not in the driver's list; looked for only when memory is in use that
    the list does not explain."""


class GpuReading(Value):
    """All GPUs of one node at one instant, or why there is none."""

    at: float
    source: str
    """`nvml`, `simulated` or `none`."""
    gpus: tuple[GpuSample, ...] = ()
    error: str | None = None
    """Set when the driver as a whole is broken: GPU jobs wait and this is why."""
    driver_version: str | None = None
    notes: tuple[str, ...] = ()
    """Remarks for `ginfo` and `doctor`, such as a limit by CUDA_VISIBLE_DEVICES."""
    log_trouble: str | None = None
    """Why faults cannot be read from the kernel's log."""
    faults_until: float | None = None
    """Faults from before this instant are in this reading or an earlier one; None where nothing tells of faults."""

    @property
    def remarks(self) -> list[str]:
        """The notes, and why faults cannot be read."""
        return [*self.notes, *([self.log_trouble] if self.log_trouble else [])]


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


class Processor(Value):
    """One logical processor. Those with the same `core` share a physical one."""

    id: int
    core: int
    numa: int = 0


class Isolation(Value):
    """What the kernel keeps runs to on this machine, and what is only booked."""

    launcher: str
    """`systemd`: each run is a unit of its own. `fork`: the daemon's fork server starts them."""
    is_limited: bool = False
    """Memory, tasks and processors, by control groups."""
    folder: str | None = None
    """The control group in which runs have theirs; None: each has its own unit's."""
    can_pin: bool = False
    """Whether a run can be given processors of its own."""
    why_not: str | None = None
    """Why nothing is limited; None when it is."""
    why_not_devices: str | None = None
    """Why the GPUs of others can be opened; None when they cannot."""


class GpuState:
    """Words for a GPU's condition, as `ginfo` prints them."""

    IDLE = "idle"
    ALLOCATED = "allocated"
    MIXED = "mixed"
    DRAINING = "draining"
    DRAINED = "drained"
    SUSPECT = "suspect"
    LOST = "lost"
    UNKNOWN = "unknown"


SUSPECT = "suspect: "
"""How the message of a drained GPU begins when it was drained for what it did."""


class GpuView(Value):
    """A GPU as the policy sees it: what is there, and whether anything may be placed on it."""

    uuid: str
    index: int
    name: str
    vram_total_mib: int | None
    """Bookable memory: total less the driver's reserve. None when it cannot be read."""
    foreign_mib: int = 0
    """Held by foreign processes, and by runs that did not book it, at its recent peak."""
    over_mib: int = 0
    """Held by runs beyond what they booked of it, at its recent peak."""
    why_not: str | None = None
    """Set when nothing may be placed here: drained, lost, stale, dirty, in foreign use for slices too."""
    why_not_whole: str | None = None
    """Set when slices may be placed but a whole-card job may not: foreign use above the threshold."""
    foreign_limit_mib: int = 1024
    """The threshold."""
    is_foreign_busy: bool = False
    """Foreign processes, or runs that did not book it, have it work, whatever memory they hold."""
    has_host_memory: bool = False
    """It has no memory of its own: what is booked of it is booked of the node's memory."""
    can_share: bool = True
    """False when the compute mode admits one process only, or MIG is on."""
    is_present: bool = True
    """False for a lost card, and for one that is divided by MIG: neither counts as capacity."""
    utilisation: float | None = None
    """Share of time some kernel ran, 0 to 1, as last measured."""
    link_group: int | None = None
    """Cards of one node with the same number are linked with each other (NVLink); None has no link."""
    numa: int | None = None
    """NUMA node of the card; None when unknown."""
    ecc_errors: int | None = None
    """As `GpuSample.ecc_errors`."""
    is_divided: bool = False
    """MIG is on: no job can have the card, only its instances."""
    mig_profile: str | None = None
    """Of a MIG instance: `2g.20gb`. A job can have one instance and no other card beside it."""
    mig_parent: str | None = None
    """Of a MIG instance: UUID of its card."""


class Enforcement:
    """Words for what holds a run to the VRAM that it booked of a card, as `ginfo` and `gshow` print them."""

    NONE = "none"
    """Nothing: nobody looks, or nobody can."""
    WATCHED = "watched"
    """Readings tell who holds more, some seconds late."""
    MPS = "MPS"
    """CUDA refuses to allocate more."""
    MIG = "MIG"
    """The hardware: the card is a part of one, with memory of its own."""


class ShareUse(Value):
    """What one run holds of one card that it shares, in one reading. None is unknown."""

    run: str
    uuid: str
    index: int
    booked_mib: int
    used_mib: int | None
    left_mib: int | None
    """Of the card, what all others that are seen leave to this run."""

    @property
    def over_mib(self) -> int:
        """Beyond the booking; 0 when unknown."""
        return max(0, (self.used_mib or 0) - self.booked_mib)

    @property
    def is_crowded(self) -> bool:
        """Whether the others leave less than this run has booked, so that it may fail through no fault of its own."""
        return self.left_mib is not None and self.left_mib < self.booked_mib


class NodeView(Value):
    """A node as the policy sees it."""

    name: str
    cpus: float
    mem_mib: int
    gpus: tuple[GpuView, ...] = ()
    why_not: str | None = None
    """Set when nothing may be placed on the node: drained, or down."""
    gpu_error: str | None = None
    """Set when the driver is broken: GPU jobs wait, others go on."""
    load: HostSample | None = None
    labels: tuple[str, ...] = ()
    """What the node has to offer beside numbers: features, data sets; sorted."""
    resources: tuple[tuple[str, int], ...] = ()
    """Custom resources to hand out, names and numbers, sorted by name."""


class Allocation(Value):
    """What one open run holds on one node. A gang has one on each of its nodes."""

    job_id: int
    uid: int
    node: str
    gpus: tuple[GpuShare, ...]
    cpus: float
    mem_mib: int
    start_at: float
    expected_end_at: float | None = None
    """Start plus time limit; None without a limit."""
    predicted_end_at: float | None = None
    """When it is planned to end, judged by earlier ones. It may run on, up to its limit if it has one."""
    user: str = ""
    account: str = ""
    queue: str = "default"
    qos: str = ""
    resources: tuple[tuple[str, int], ...] = ()
    licenses: tuple[tuple[str, int], ...] = ()
    """On the first node of a gang only."""
    is_exclusive: bool = False
    reservation: str | None = None
    is_stopping: bool = False
    """Told to end already; `expected_end_at` is when its grace is over at the latest."""
    is_suspended: bool = False
    """Stands still by the policy's will: it holds what is listed here, and no cores."""
    suspended_cpus: float = 0.0
    """Cores that it takes up again when it goes on."""
    can_requeue: bool = True
    """Accepts to be preempted: it is run again later."""
    can_suspend: bool = False
    """Accepts to stand still and go on: it holds no GPU."""
    array_id: int | None = None
    """Of a task: the id of its array."""
    grace_s: float = 30.0
    """How long it takes to end it, at most."""
    checkpoint_at: float | None = None
    """What it did until then is not lost when it ends now; None: everything since `start_at` is."""
    request: Request | None = None
    """What its job asked for, where that says something of the jobs to come; None: it says nothing."""


@dataclass(frozen=True, slots=True)
class ShareFacts:
    """One share of a card, for people."""

    used_mib: int | None
    enforcement: str
    """A word of `Enforcement`."""
    enforcement_why: str


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """A GPU's condition for people: a word of `GpuState`, why, who else is there, the last sample."""

    state: str
    why: str | None = None
    intruders: tuple[GpuProcess, ...] = ()
    """Foreign processes, and with their `run` those of runs that did not book the GPU."""
    sample: GpuSample | None = None
    idle_since: float | None = None
    """Since when the card has been seen to do nothing; None while it works or does not tell."""
