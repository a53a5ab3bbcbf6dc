"""The other machines of the cluster: their engines, and what their reports change in the scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any, Protocol

from gpusched import paths
from gpusched.daemon.known_nodes import KnownNode, KnownNodes
from gpusched.daemon.launch.limits import RunLimiter
from gpusched.daemon.nodes import ClusterNode
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.remote.channel import Channel
from gpusched.engine.remote.command_channel import CommandChannel
from gpusched.engine.remote.messages import NodeReport
from gpusched.engine.remote.remote_engine import RemoteEngine
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuReading, HostSample
from gpusched.model.job import Run
from gpusched.model.progress import ToldProgress
from gpusched.model.settings import ClusterSettings, Settings
from gpusched.model.value import replace
from gpusched.ports import Clock

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler
    from gpusched.daemon.tick import Ticker

log = getLogger("gpusched.daemon")

_SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 {node}"
SKEW_S = 5.0
"""Clocks that differ by more are a warning."""


class Member(Protocol):
    """A machine of the cluster that is there now."""

    @property
    def name(self) -> str:
        """Of the node."""

    @property
    def address(self) -> str:
        """Where it is reached, for people."""


class Members(Protocol):
    """What knows the machines of the cluster, where the settings do not name them."""

    address: str
    """Where they reach the daemon's own node."""

    @property
    def known(self) -> Mapping[str, str]:
        """Addresses of all that have ever been there: one that is away is `down`, and not forgotten."""

    def poll(self) -> Collection[Member]:
        """Those that are there now."""

    def remember(self, node: Any) -> None:
        """Keep a node of `poll` among the known ones."""

    def open_channel(self, node: str) -> Channel:
        """A channel to the agent of a node."""

    def close(self) -> None:
        """Ask for members no longer; their agents and runs continue."""


class RemoteNodes:
    """Links to the nodes that the settings name, or to those that something else knows.

    Args: members: what knows them. seen: file with what nodes were like when they last reported. open_channel: to a
    node of this name; None: over the command of the settings.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        clock: Clock,
        session: int,
        members: Members | None = None,
        seen: str | None = None,
        open_channel: Callable[[str], Channel] | None = None,
    ) -> None:
        self._settings = settings
        self._open_channel = open_channel or (self._command_channel if members is None else members.open_channel)
        self._clock = clock
        self._session = session
        self._members = members
        self._cluster: ClusterEngine | None = None
        self._reports: deque[tuple[str, NodeReport]] = deque()
        self._ticker: Ticker | None = None
        self._warned: dict[str, str | None] = {}
        self._reasons: dict[str, str] = {}
        """Why nodes could not be reached, until they answer."""
        self._twins: dict[str, str] = {}
        """Nodes that turned out to be another node of the cluster: a sentence for each."""
        self._unlike_others: dict[str, tuple[str, tuple[str, ...]]] = {}
        """Nodes that were compared with all others since they joined: their identity and the ids of their GPUs then."""
        self._readings_due: dict[str, int] = {}
        """Readings of its GPUs that a node which has just joined needs before they can be used."""
        self.wake: Callable[[], None] | None = None
        """Called when a report has arrived."""
        self.on_engine: Callable[[str, RemoteEngine], None] | None = None
        """Called with each engine that is added."""
        self.engines = {
            node: self._engine(node) for node in (*settings.nodes, *(() if members is None else members.known))
        }
        self._seen = KnownNodes(seen, self.engines)
        self._remembered: set[str] = set()
        """Nodes that have not reported to this daemon, and are as they were for an earlier one."""

    def _engine(self, node: str) -> RemoteEngine:
        channel = self._open_channel(node)
        engine = RemoteEngine(
            channel, session=self._session, clock=self._clock, node=node, on_report=partial(self._keep, node)
        )
        if self.on_engine is not None:
            self.on_engine(node, engine)
        return engine

    def _command_channel(self, node: str) -> Channel:
        agent = f"gpusched agent {'--system ' if paths.is_system() else ''}{{node}}"
        command = self._settings.connect or f"{_SSH} {agent}"
        return CommandChannel(command.replace("{node}", node), node)

    def attach(self, ticker: Ticker, cluster: ClusterEngine) -> None:
        """Pass reports on to its scheduler, and nodes that join to this engine, before runs are adopted."""
        scheduler = ticker.scheduler
        self._ticker, self._cluster = ticker, cluster
        if self._members is not None:
            # A lost file of known nodes costs none that has runs.
            parts = (part.node for run in scheduler.state.open_runs.values() for part in run.on_each_node)
            for name in sorted(set(parts) - self.engines.keys() - {scheduler.head.name}):
                self.engines[name] = self._engine(name)
                cluster.add(name, self.engines[name])
        scheduler.outages.be_members({scheduler.head.name, *self.engines})
        for name, known in self._seen.nodes.items():
            self._remember(scheduler, name, known)

    def _remember(self, scheduler: Scheduler, name: str, known: KnownNode) -> None:
        """Take a node for what it was until it reports: runs there keep what they booked, and nothing is started."""
        node = _node_of(name, known.boot_id, known.report, scheduler.settings)
        if node is None or name == scheduler.head.name:
            return
        self._remembered.add(name)
        node.why_not = _unreached(name)
        self._join(node)
        if known.report.gpus is not None:
            scheduler.observe_gpus(known.report.gpus, node, {})

    @property
    def _scheduler(self) -> Scheduler:
        assert self._ticker is not None
        return self._ticker.scheduler

    def _join(self, node: ClusterNode) -> None:
        assert self._ticker is not None
        self._ticker.scheduler.cluster.add(node)
        self._ticker.node_joined()

    def close(self) -> None:
        """Ask for members no longer; the engines are closed by the cluster's."""
        if self._members is not None:
            self._members.close()

    def _follow(self, scheduler: Scheduler, members: Members) -> None:
        """Include nodes that have joined."""
        cluster = self._cluster
        assert cluster is not None
        for node in members.poll():
            if node.name == scheduler.head.name:
                if node.name not in self._warned:
                    self._warned[node.name] = "name"
                    log.warning("the node at %s has the daemon's own name, %s: left out", node.address, node.name)
                continue
            if node.name not in self.engines:
                self.engines[node.name] = engine = self._engine(node.name)
                cluster.add(node.name, engine)
                # As at a start: what runs there and is in no row is cleared away.
                engine.adopt(())
                scheduler.outages.be_members({scheduler.head.name, *self.engines})
            members.remember(node)
        for engine in self.engines.values():
            if engine.link.unreachable_since is not None:
                engine.look()

    def _keep(self, node: str, report: NodeReport) -> None:
        # Taken in between ticks: an engine may hear of it in the middle of one.
        self._reports.append((node, report))
        if self.wake is not None:
            self.wake()

    def progress_of(self, run: Run) -> ToldProgress | None:
        """What the first of its nodes reports of a run's progress; None on the daemon's own node."""
        engine = self.engines.get(run.node)
        return None if engine is None else engine.progress_of(run.id)

    def request_readings(self, nodes: Container[str] | None = None) -> None:
        """Ask these nodes, by default all, for a reading of their GPUs."""
        ticker = self._ticker
        for name, engine in self.engines.items():
            if nodes is not None and name not in nodes:
                continue
            engine.request_reading(() if ticker is None else ticker.mig_orders(name))

    def await_reports(self, timeout_s: float) -> None:
        """Give the nodes this long to join and to read their GPUs, before the first job is considered."""
        scheduler = self._scheduler
        until = time.monotonic() + timeout_s
        while (missing := [name for name in self.engines if self._is_awaited(scheduler, name)]) and (
            time.monotonic() < until
        ):
            for name in missing:
                self.engines[name].wait(0.02)
                self.engines[name].look()
            self.poll()

    def _is_awaited(self, scheduler: Scheduler, name: str) -> bool:
        is_there = scheduler.cluster.get(name) is not None and name not in self._remembered
        return not is_there or name in self._readings_due

    def poll(self) -> None:
        """Take in what has arrived, and note which nodes do not answer."""
        scheduler = self._scheduler
        if self._members is not None:
            self._follow(scheduler, self._members)
        self._take_reports(scheduler)
        self._see(scheduler, self.engines)

    def take_reports(self) -> None:
        """Take in what has arrived, and what it says of the nodes that it is from; all others are left to `poll`."""
        scheduler = self._scheduler
        if self._members is not None:
            self.poll()
        else:
            self._see(scheduler, self._take_reports(scheduler))

    def _take_reports(self, scheduler: Scheduler) -> Iterable[str]:
        """Take in the reports that have arrived; return the nodes that they are from."""
        found: dict[str, None] = {}
        while self._reports:
            name, report = self._reports.popleft()
            found[name] = None
            self._take(scheduler, name, report)
        return found

    def _see(self, scheduler: Scheduler, names: Iterable[str]) -> None:
        """Note which of these nodes do not answer, and why."""
        for name in names:
            engine = self.engines[name]
            why = self._twins.get(name) or self._why_not(name, engine)
            node = scheduler.cluster.get(name)
            is_unreached = node is None or name in self._remembered
            outage = why or _unreached(name) if is_unreached else why
            if node is None:
                scheduler.cluster.absent[name] = outage or ""
            elif node.why_not != outage:
                if outage is None:
                    self._read_anew(name, scheduler.settings)
                node.why_not = outage
                scheduler.look_again()
            scheduler.outages.see(name, outage, scheduler.now(), engine.link.unreachable_since)
            note = self._clock_note(name)
            if node is not None:
                node.clock_note = note
            self._warn(name, why, note)
        self._seen.save()

    def _take(self, scheduler: Scheduler, name: str, report: NodeReport) -> None:
        if report.host is None or report.site is None:
            return
        if self._is_twin(scheduler, name, report.host, report.gpus):
            return
        boot_id = self.engines[name].link.boot_id
        self._seen.note(name, boot_id, report)
        node = scheduler.cluster.get(name)
        if node is None or name in self._remembered:
            # Its GPUs are reread, as the head's own are after a restart: a replaced one is not lost.
            self._remembered.discard(name)
            node = _node_of(name, boot_id, report, scheduler.settings)
            assert node is not None
            node.set_gpu_targets = self.engines[name].want_gpus
            self._join(node)
            self._read_anew(name, scheduler.settings)
            log.info("node %s has joined: %g CPUs", name, node.cpus(scheduler.settings))
        node.host, node.site, node.boot_id = replace(report.host, name=name), report.site, boot_id
        node.be_in_trouble(report.trouble)
        if report.gpus is not None:
            # Its instants are by the node's clock, and age by the daemon's. How they differ is an estimate, but no
            # reading comes from the future.
            skew_s = self.engines[name].link.clock_skew_s or 0.0
            reading = replace(report.gpus, at=min(report.gpus.at - skew_s, scheduler.now()))
            scheduler.observe_gpus(reading, node, report.owners)
            self._note_reading(name, reading)
        scheduler.look_again()

    def _is_twin(self, scheduler: Scheduler, name: str, host: HostSample, reading: GpuReading | None) -> bool:
        """Whether this is another node of the cluster: the same machine under two names would be booked twice."""
        node = scheduler.cluster.get(name)
        gpus = None if reading is None else tuple([gpu.uuid for gpu in reading.gpus])
        if node is None or name in self._remembered or node.why_not is not None:
            self._unlike_others.pop(name, None)
        elif (before := self._unlike_others.get(name)) is not None and before[0] == host.identity:  # noqa: SIM102
            # Nothing of it has changed since it was compared with all others, and they are compared as they return.
            if gpus is None or gpus == before[1]:
                return False
        others = [node for node in scheduler.cluster if node.name != name]
        same = next((node.name for node in others if _is_same(scheduler, node, host)), None)
        if same is not None:
            text = f"node {name} is the machine of node {same} under another name"
        elif reading is None:
            return name in self._twins
        elif (owner := _owner_of(reading, [node for node in others if node.why_not is None])) is not None:
            text = f"node {name} has the GPUs of node {owner}, so it is the same machine under another name"
        else:
            self._twins.pop(name, None)
            self._unlike_others[name] = host.identity, gpus or ()
            return False
        self._twins[name] = f"{text}; name it once in [cluster] nodes"
        return True

    def _read_anew(self, name: str, settings: Settings) -> None:
        """Have the GPUs read as often as it takes to use them: the daemon's polls may be far apart."""
        self._readings_due[name] = settings.gpu.free_polls
        self.engines[name].request_reading()

    def _note_reading(self, name: str, reading: GpuReading) -> None:
        left = self._readings_due.pop(name, 0) - 1
        # As at the start of the daemon, an error is not asked for again at once.
        if left > 0 and reading.gpus and reading.error is None:
            self._readings_due[name] = left
            self.engines[name].request_reading()

    def _why_not(self, name: str, engine: RemoteEngine) -> str | None:
        link = engine.link
        if link.unreachable_since is None and not link.is_refused:
            self._reasons.pop(name, None)
            return None
        # While another attempt is under way, the last one is still why.
        if link.why:
            self._reasons[name] = link.why
        if link.is_refused:
            return f"node {name} takes no jobs from this daemon: {link.why}"
        since = time.strftime("%H:%M:%S", time.localtime(link.unreachable_since))
        return f"node {name} has not answered since {since}" + (
            f": {self._reasons[name]}" if name in self._reasons else ""
        )

    def _clock_note(self, name: str) -> str | None:
        link = self.engines[name].link
        skew_s = link.clock_skew_s or 0.0
        if abs(skew_s) - link.clock_error_s <= SKEW_S:
            return None
        return f"the clock of node {name} differs from the daemon's by {abs(skew_s):.0f} s; run NTP on both"

    def _warn(self, name: str, why: str | None, clock_note: str | None) -> None:
        """Log what keeps a node away, or a clock that is off, once each; the engine logs that a node answers again."""
        subject = why
        if why is None and clock_note is not None:
            why, subject = clock_note, "clock"
        if why is not None and subject != self._warned.get(name):
            log.warning("%s", why)
        self._warned[name] = subject


def _is_same(scheduler: Scheduler, node: ClusterNode, host: HostSample) -> bool:
    """Whether this machine is that node. One that is away without runs may have got another name."""
    if not host.identity or node.host.identity != host.identity:
        return False
    runs = scheduler.state.open_runs.values()
    return node.why_not is None or any(part.node == node.name for run in runs for part in run.on_each_node)


def _owner_of(reading: GpuReading, others: Iterable[ClusterNode]) -> str | None:
    """The node that has one of these GPUs; None of simulated ones, which may have the same ids everywhere."""
    if reading.source == "simulated":
        return None
    mine = {gpu.uuid for gpu in reading.gpus}
    sources = (node for node in others if node.reading is not None and node.reading.source == reading.source)
    return next((node.name for node in sources if mine & node.samples.keys()), None)


def _unreached(name: str) -> str:
    return f"node {name} has not been reached yet"


def _node_of(name: str, boot_id: str, report: NodeReport, settings: Settings) -> ClusterNode | None:
    """The node that a report describes; None if it does not say enough."""
    if report.host is None or report.site is None:
        return None
    return ClusterNode(
        site=report.site,
        boot_id=boot_id,
        host=replace(report.host, name=name),
        tracker=_tracker(settings),
        limiter=RunLimiter(report.isolation, report.processors) if report.isolation else None,
        settings=report.settings,
    )


def _tracker(settings: Settings) -> GpuTracker:
    return GpuTracker(settings.gpu, max(settings.daemon.poll_s, settings.daemon.idle_poll_s))


def next_session(path: str, clock: Clock) -> int:
    """A number above that of every earlier head with this file; durable before it is used. Raises: OSError."""
    try:
        with open(path, encoding="ascii") as file:
            before = int(file.read())
    except (FileNotFoundError, ValueError):
        before = 0
    # A restored folder may hold an old number: the clock is ahead of that.
    session = max(before + 1, int(clock.now()))
    paths.replace_file(path, b"%d\n" % session)
    return session
