"""The nodes as the daemon knows them: their newest readings, the histories of their GPUs, and the paths on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from operator import attrgetter, is_
from typing import TypeVar

from gpusched.daemon.launch.limits import RunLimiter
from gpusched.gpu.tracker import GpuStatus, GpuTracker, RunMeter
from gpusched.model.cluster import (
    GPUS_NOT_READ,
    Clearance,
    DrainEntry,
    GpuReading,
    GpuSample,
    GpuTargets,
    HostSample,
    NodeView,
    ShareUse,
)
from gpusched.model.execution import LaunchSite
from gpusched.model.job import GpuShare, Run, RunMeasures
from gpusched.model.mig import MigLayout
from gpusched.model.settings import NodeSettings, Settings
from gpusched.model.tariff import Tariff
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout, GpuSpeeds
from gpusched.scheduler.request_units import squeeze

T = TypeVar("T")
_NAME = attrgetter("name")


class ClusterNode:
    """One node.

    Args: boot_id: of its running kernel; site: its name and paths; settings: what of it jobs may book, None for the
    section [node] of the settings in force.
    """

    def __init__(
        self,
        *,
        site: LaunchSite,
        boot_id: str,
        host: HostSample,
        tracker: GpuTracker,
        limiter: RunLimiter | None = None,
        settings: NodeSettings | None = None,
        set_gpu_targets: Callable[[GpuTargets], None] = lambda targets: None,
    ) -> None:
        self.site = site
        self.boot_id = boot_id
        self.host = host
        self.tracker = tracker
        self.limiter = RunLimiter() if limiter is None else limiter
        self.reading: GpuReading | None = None
        self.read_at = float("-inf")
        """When the newest reading began, by the daemon's clock; at the latest its arrival."""
        self.why_not: str | None = None
        """Why nothing can be started on it now; None while it can be reached."""
        self.trouble: str | None = None
        """Why it can start nothing now, although it answers: a sentence that names it."""
        self.clock_note: str | None = None
        """That its clock is off, as a sentence."""
        self.lease_note: str | None = None
        """When the leases of runs on it will have ended, as a sentence; None while it answers."""
        self.set_gpu_targets = set_gpu_targets
        """Has its cards brought in line with what runs want."""
        self._gpu_targets: GpuTargets | None = None
        self._settings = settings
        self._boot_ending: str | None = None
        self._samples: tuple[GpuReading | None, Mapping[str, GpuSample]] = (None, {})
        self._viewed: tuple[tuple[object, ...], NodeView] | None = None
        """The last view, and what it was made from."""

    def want_gpus(self, power_caps: dict[str, float], mps: dict[str, int], now: float) -> None:
        """Pass on what its cards are to be like, unless that is the same as before."""
        before = self._gpu_targets
        if before is not None and (before.power_caps, before.mps) == (power_caps, mps):
            return
        # Different from those of an earlier daemon, too, which a node may have followed last.
        number = max(int(now * 1000), before.number + 1 if before else 0) if power_caps or mps or before else 0
        self._gpu_targets = GpuTargets(power_caps, mps, number)
        self.set_gpu_targets(self._gpu_targets)

    @property
    def has_read_targets(self) -> bool:
        """Whether its newest reading shows what became of the newest targets."""
        reading, targets = self.reading, self._gpu_targets
        return reading is not None and targets is not None and reading.targets == targets.number and not reading.error

    def expect_release(self, run: Run, now: float) -> bool:
        """Watch the GPUs of a run that has ended, before that is recorded; return whether they are all of this node."""
        is_here = bool(run.gpus) and run.nodes == (self.name,)
        if is_here:
            self.tracker.expect_release(run, now)
        return is_here

    def go_down(self) -> None:
        """Note that the machine is being shut down: nothing is started here until it has booted again."""
        self._boot_ending = self.boot_id

    @property
    def why_ending(self) -> str | None:
        """That it is being shut down, as a sentence."""
        return f"node {self.name} is being shut down" if self._boot_ending == self.boot_id else None

    def be_in_trouble(self, why: str | None) -> None:
        """Note why nothing can be started here now; None if all is well."""
        self.trouble = None if why is None else f"node {self.name} starts nothing: {why}"

    @property
    def name(self) -> str:
        return self.site.node

    @property
    def address(self) -> str:
        """Where other nodes reach it."""
        return self.site.address or self.name

    @property
    def samples(self) -> Mapping[str, GpuSample]:
        """Samples of the newest reading by UUID, whether or not the driver reported an error."""
        reading, found = self._samples
        if reading is not self.reading:
            reading = self.reading
            found = {gpu.uuid: gpu for gpu in (reading.gpus if reading else ())}
            self._samples = reading, found
        return found

    def cpus(self, settings: Settings) -> float:
        """Cores that may be booked."""
        own = self._settings or settings.node
        return float(self.host.cpus) if own.cpus is None else own.cpus

    def view(self, settings: Settings, now: float, why_not: str | None) -> NodeView:
        """The node as the scheduler sees it; the same object until something of it changes.

        Args: why_not: why nothing can be placed on it.
        """
        own, host, gpus = self._settings or settings.node, self.host, self.tracker.views(now)
        gpu_error = self.reading.error if self.reading else GPUS_NOT_READ
        made_from = own, host, gpus, gpu_error, why_not, self.why_not is not None
        before = self._viewed
        if before is not None and all(map(is_, before[0][:3], made_from)) and before[0][3:] == made_from[3:]:
            return before[1]
        view = NodeView(
            name=self.name,
            cpus=self.cpus(settings),
            mem_mib=own.mem_mib if own.mem_mib is not None else host.mem_total_mib,
            gpus=gpus,
            why_not=why_not,
            gpu_error=gpu_error,
            load=host,
            is_unreachable=self.why_not is not None,
            labels=tuple(sorted(set(own.labels))),
            data=tuple(sorted(set(own.data))),
            resources=tuple(sorted(own.resources.items())),
            runtimes=tuple(path.rpartition("/")[2] for path in host.runtimes),
        )
        self._viewed = made_from, view
        return view


_MOST_LAYOUTS = 64


class ClusterLayouts:
    """What can be booked on nodes, made again only when a machine or its cards are others than before."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._known: dict[tuple[str, ...] | None, ClusterLayout] = {}

    def of(self, names: tuple[str, ...] | None, nodes: Iterable[NodeView], settings: Settings) -> ClusterLayout:
        """The layout of the nodes with these names, None for all of them."""
        if settings is not self._settings or len(self._known) > _MOST_LAYOUTS:
            self._settings, self._known = settings, {}
        views = tuple(sorted((node for node in nodes if names is None or node.name in names), key=_NAME))
        known = self._known.get(names)
        if known is not None and [*map(_NAME, known.nodes)] == [*map(_NAME, views)] and known.renew(views, settings):
            return known
        made = self._known[names] = ClusterLayout(views, settings)
        return made


class ClusterNodes:
    """All nodes by name, the daemon's own one first. Answers about a GPU come from the node that has it."""

    def __init__(self, head: ClusterNode) -> None:
        self.head = head
        self._nodes = {head.name: head}
        self._homes: dict[str, str] = {}
        """Node of each GPU that was asked for."""
        self._samples: dict[str, GpuSample] = {}
        self._sampled: dict[str, GpuReading] = {}
        """Readings that `_samples` comes from, by node."""
        self._drains: Mapping[str, DrainEntry] | None = None
        self._layouts: Mapping[str, MigLayout] | None = None
        self._clearances: Mapping[str, Clearance] | None = None
        """What all trackers were told last; None: a node has joined since."""
        self._released: Mapping[str, Run] | None = None
        """Ended runs whose GPUs are watched; None: a node has joined since."""
        self.absent: dict[str, str] = {}
        """Nodes of the cluster that have not joined since the daemon's start, and why."""
        self._tariff: Tariff | None = None
        self.on_add: Callable[[ClusterNode], None] = lambda node: None
        """Called with each node that joins, before its first reading."""

    def __iter__(self) -> Iterator[ClusterNode]:
        return iter(self._nodes.values())

    def __getitem__(self, name: str) -> ClusterNode:
        return self._nodes[name]

    def get(self, name: str) -> ClusterNode | None:
        return self._nodes.get(name)

    def add(self, node: ClusterNode) -> None:
        others = sorted([*list(self)[1:], node], key=lambda one: one.name)
        self._nodes = {one.name: one for one in (self.head, *others)}
        self._drains = self._layouts = self._clearances = self._released = None
        self.absent.pop(node.name, None)
        node.tracker.tariff = self._tariff
        self.on_add(node)

    def having(self, uuid: str) -> ClusterNode:
        """The node of a GPU; the head for one that was never read."""
        known = self._nodes.get(self._homes.get(uuid, ""))
        if known is not None and known.tracker.knows(uuid):
            return known
        found = next((node for node in self if node.tracker.knows(uuid)), None)
        if found is None:
            return self.head
        self._homes[uuid] = found.name
        return found

    def has_all_of(self, run: Run) -> bool:
        """Whether every node of a run is here."""
        return self._nodes.keys() >= set(run.nodes)

    def views(
        self, settings: Settings, now: float, drains: Mapping[str, DrainEntry], why_none: str | None = None
    ) -> tuple[NodeView, ...]:
        """All nodes as the scheduler sees them. Args: drains: by node; why_none: why none accepts jobs."""
        found = []
        for node in self:
            drained = drains.get(node.name)
            why_drained = None if drained is None else f"node {node.name} is drained: {drained.message}"
            why_not = why_none or node.why_not or node.why_ending or node.trouble or why_drained
            found.append(node.view(settings, now, why_not))
        for name, why_absent in sorted(self.absent.items()):
            found.append(
                NodeView(
                    name, 0.0, 0, why_not=why_absent, gpu_error=GPUS_NOT_READ, is_unknown=True, is_unreachable=True
                )
            )
        return tuple(found)

    def samples(self) -> Mapping[str, GpuSample]:
        """Samples of the newest readings by UUID, of nodes whose driver responds."""
        for node in self:
            reading, before = node.reading, self._sampled.get(node.name)
            if reading is before:
                continue
            if before is not None:
                for gpu in before.gpus:
                    self._samples.pop(gpu.uuid, None)
                del self._sampled[node.name]
            if reading is not None and reading.error is None:
                self._sampled[node.name] = reading
                self._samples.update((gpu.uuid, gpu) for gpu in reading.gpus)
        return self._samples

    def samples_on(self, nodes: Iterable[str]) -> Mapping[str, GpuSample]:
        """Those of `samples` that are of these nodes."""
        known = [node for name in nodes if (node := self._nodes.get(name)) is not None]
        sound = [node for node in known if node.reading is not None and node.reading.error is None]
        return {uuid: sample for node in sound for uuid, sample in node.samples.items()}

    def sample(self, node: str, uuid: str) -> GpuSample | None:
        """The sample of one GPU in the newest reading of its node; None without one, or if its driver does not
        respond."""
        known = self._nodes.get(node)
        reading = None if known is None else known.reading
        return None if known is None or reading is None or reading.error is not None else known.samples.get(uuid)

    def cards(self) -> dict[str, tuple[str, int | None]]:
        """Model and VRAM in MiB of each card, by UUID."""
        readings = (node.reading for node in self if node.reading is not None)
        return {gpu.uuid: (gpu.name, gpu.vram_total_mib) for one in readings for gpu in one.gpus}

    # --- GPUs -----------------------------------------------------------------------------------

    def adopt(self, settings: Settings) -> None:
        """Take over new settings."""
        poll_s = max(settings.daemon.poll_s, settings.daemon.idle_poll_s)
        self._each(lambda tracker: tracker.adopt(settings.gpu, poll_s))

    def set_tariff(self, tariff: Tariff) -> None:
        """Charge the energy of runs by these prices from now on."""
        self._tariff = tariff
        for node in self:
            node.tracker.tariff = tariff

    def set_drains(self, drains: Mapping[str, DrainEntry]) -> None:
        """Pass drains on. Here and below: to all nodes, unless they know."""
        if drains != self._drains:
            self._drains = told = dict(drains)
            self._each(lambda tracker: tracker.set_drains(told))

    def set_layouts(self, wanted: Mapping[str, MigLayout]) -> None:
        if wanted != self._layouts:
            self._layouts = told = dict(wanted)
            self._each(lambda tracker: tracker.set_layouts(told))

    def set_clearances(self, clearances: Mapping[str, Clearance]) -> None:
        if clearances != self._clearances:
            self._clearances = told = dict(clearances)
            self._each(lambda tracker: tracker.set_clearances(told))

    def reconcile_releases(self, ended: Mapping[str, Run], now: float) -> None:
        """Have each node watch its GPUs of exactly these ended runs; see `GpuTracker.reconcile_releases`."""
        before = self._released
        if before is not None and before.keys() == ended.keys():
            return
        changed: Set[str] = self._nodes.keys()
        if before is not None:
            runs = (before[handle] if handle in before else ended[handle] for handle in before.keys() ^ ended.keys())
            changed = {name for run in runs for name in run.nodes if name in self._nodes}
        there: dict[str, dict[str, Run]] = {name: {} for name in changed}
        for handle, run in ended.items():
            for part in run.on_each_node:
                if part.node in there:
                    there[part.node][handle] = replace(run, gpus=part.gpus)
        for name, mine in there.items():
            self._nodes[name].tracker.reconcile_releases(mine, now)
        self._released = dict(ended)

    def is_released(self, run: Run) -> bool:
        """Whether the GPUs of an ended run are being watched; for other runs nothing is proven."""
        nodes = [node for name in run.nodes if (node := self._nodes.get(name)) is not None]
        return all(node.tracker.is_released(run.id) for node in nodes)

    def status(self, uuid: str, shares: Sequence[GpuShare] | None = None, now: float | None = None) -> GpuStatus:
        """State of one GPU, for display; see `GpuTracker.status`."""
        return self.having(uuid).tracker.status(uuid, shares, now)

    def slowest(self, shares: Iterable[GpuShare], speeds: GpuSpeeds) -> float:
        """Speed of the slowest of these GPUs; unknown ones have speed 1."""
        found = []
        for share in shares:
            sample = self.having(share.uuid).samples.get(share.uuid)
            found.append(1.0 if sample is None else speeds.of(squeeze(sample.name)))
        return min(found, default=1.0)

    def is_measured(self, uuid: str, now: float) -> bool:
        """Whether the last good sample is recent enough to be valid now."""
        return self.having(uuid).tracker.is_measured(uuid, now)

    def release_state(self, uuid: str, now: float, run: str) -> str:
        """`clean`, `waiting` or `dirty`, of one GPU after this run."""
        return self.having(uuid).tracker.release_state(uuid, now, run)

    def is_gone(self, uuid: str) -> bool:
        """Whether a MIG instance was missing in more than one reading."""
        return self.having(uuid).tracker.is_gone(uuid)

    @property
    def has_losses(self) -> bool:
        """Whether any node misses a GPU or a MIG instance."""
        return any(node.tracker.has_losses for node in self)

    def lost(self) -> tuple[tuple[GpuSample, float], ...]:
        """Last sample of every lost GPU, and when its loss was first seen."""
        return tuple(found for node in self for found in node.tracker.lost())

    def shares(self) -> dict[str, tuple[ShareUse, ...]]:
        """By GPU UUID, what the runs that share it use."""
        return {uuid: shares for node in self for uuid, shares in node.tracker.shares().items()}

    def meter(self, run: Run) -> RunMeter | None:
        """Measured use of a run so far, on all its nodes; None when no reading fell into it."""
        nodes = [node for name in run.nodes if (node := self._nodes.get(name)) is not None]
        found = [meter for node in nodes if (meter := node.tracker.meter(run.id)) is not None]
        if len(found) < 2:
            return found[0] if found else None
        return RunMeter(
            peak_vram_mib=_combined(max, [meter.peak_vram_mib for meter in found]),
            mean_utilisation=_combined(lambda means: sum(means) / len(means), [one.mean_utilisation for one in found]),
            energy_j=_combined(sum, [meter.energy_j for meter in found]),
            measured=_measured([meter.measured for meter in found if meter.measured is not None]),
        )

    def _each(self, act: Callable[[GpuTracker], None]) -> None:
        for node in self:
            act(node.tracker)


def _measured(found: Sequence[RunMeasures]) -> RunMeasures | None:
    """What a run used on all its nodes. A sum that lacks a part is unknown."""
    if not found:
        return None
    costs, grams = [one.cost for one in found], [one.grams for one in found]
    idles = [one.idle_s for one in found if one.idle_s is not None]
    sources = {word for one in found for word in (one.energy_source or "").split("+") if word}
    return replace(
        found[0],
        cards=tuple(card for one in found for card in one.cards),
        idle_s=min(idles) if len(idles) == len(found) else None,
        energy_source="+".join(sorted(sources)) or None,
        cost=None if None in costs else sum(filter(None, costs)),
        grams=None if None in grams else sum(filter(None, grams)),
    )


def _combined(how: Callable[[list[T]], T], values: list[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return how(known) if known else None
