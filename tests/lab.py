"""A scheduler run by hand: its table in memory, simulated engine, a clock that moves when told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.config import Loaded
from gpusched.daemon.core import Scheduler
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.parts import SchedulerParts
from gpusched.daemon.tick import Ticker
from gpusched.engine.cluster import ClusterEngine
from gpusched.errors import GpuschedError, StoreFull
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample, GpuTargets, HostSample, Xid
from gpusched.model.commands import Caller, Command, Reload, Submit
from gpusched.model.execution import LaunchSite, pack_environment
from gpusched.model.job import Job, JobSpec
from gpusched.model.settings import GpuSettings, NodeSettings, Settings
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import FakeClock, launch, spec

ANN = Caller(1000, "ann")
BOB = Caller(1001, "bob")
ROOT = Caller(0, "root")
ENV = pack_environment({"PATH": "/bin"})


class Recording(SqliteStore):
    """Counts commits and can refuse them."""

    commits = 0
    is_full = False

    def commit(self, changes: Changes) -> None:
        if self.is_full:
            raise StoreFull("the disk is full", "free some")
        self.commits += 1
        super().commit(changes)


class Lab:
    """A scheduler with its edges at hand. `sections` are sections of the settings beside `node` and `gpu`."""

    def __init__(
        self,
        gpus: int = 2,
        cpus: float = 8,
        outcome: SimulatedOutcome | None = None,
        more_nodes: tuple[str, ...] = (),
        labels: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        node_settings: Mapping[str, NodeSettings] = MappingProxyType({}),
        models: Mapping[str, str] = MappingProxyType({}),
        **sections: Any,
    ) -> None:
        """Args: more_nodes: names of nodes like the first, `n1`, without any trouble; labels: of these, by name;
        node_settings: their own settings instead; models: of GPUs where they are no A100, by node."""
        self.clock = FakeClock()
        self.store = Recording.in_memory()
        self.outcome = outcome or SimulatedOutcome(runs_s=10)
        self.outcomes: dict[str, SimulatedOutcome] = {}
        """Of single runs that end in another way."""
        self.engine = SimulatedEngine(self.clock, lambda ticket: self.outcomes.get(ticket.run, self.outcome))
        self.more_nodes = more_nodes
        self.node_settings = {name: NodeSettings(labels=some) for name, some in labels.items()} | dict(node_settings)
        self.models = models
        self.engines = {"n1": self.engine}
        """By node."""
        for name in more_nodes:
            self.engines[name] = SimulatedEngine(
                self.clock,
                lambda ticket: self.outcomes.get(
                    f"{ticket.run}@{ticket.node}", self.outcomes.get(ticket.run, self.outcome)
                ),
            )
        self.gpus = gpus
        self.used: dict[int, int] = {}
        self.strangers: dict[int, int] = {}
        """Memory (MiB) that a process of no job uses, by GPU."""
        self.held: dict[str, tuple[int, int | None]] = {}
        """GPU and memory (MiB, None: not told) that a process of each of these runs holds."""
        self.held_on: dict[tuple[str, str], tuple[int, int | None]] = {}
        """The same on nodes besides the first, by node and run; an empty run is a process of no job."""
        self.silent: set[str] = set()
        """Nodes besides the first that send no readings."""
        self.unlisted: set[int] = set()
        """GPUs whose processes the driver does not list."""
        self.lost: set[int] = set()
        self.xids: dict[int, tuple[int, ...]] = {}
        """Faults of GPUs, told of in the next reading alone."""
        self.logged: dict[int, tuple[Xid, ...]] = {}
        """Faults of GPUs as the kernel's log has them, told of in the next reading alone."""
        self.health: dict[int, dict[str, Any]] = {}
        """What else GPUs tell of themselves."""
        self.load: dict[int, float | None] = {}
        """Utilisation of GPUs and of their memory; 0 of those that are not named."""
        self.gpu_error: str | None = None
        self.targets = GpuTargets()
        """What readings tell of: the newest unless a test keeps it back."""
        self.steps: list[str] = []
        base = Settings(node=NodeSettings(name="n1", cpus=cpus), gpu=GpuSettings(free_polls=1))
        self.settings = replace(base, **sections)
        self.config: Callable[[], Settings] = lambda: self.settings
        """What a reload reads."""
        self.scheduler = self.restart()

    def restart(self) -> Scheduler:
        host = HostSample(self.clock.now(), "n1", 8, 65536, 60000, boot_id="simulated")
        head = ClusterNode(
            site=LaunchSite("n1", "/sock"),
            boot_id="simulated",
            host=host,
            tracker=GpuTracker(self.settings.gpu),
            set_gpu_targets=self.set_targets,
        )
        self.scheduler = Scheduler(
            SchedulerParts(
                store=self.store,
                engine=ClusterEngine(self.engines, "n1") if self.more_nodes else self.engine,
                cluster=ClusterNodes(head),
                settings=self.settings,
                clock=self.clock,
                step=self.steps.append,
                read_settings=lambda: Loaded(self.config()),
            )
        )
        self.ticker = Ticker(self.scheduler)
        for name in self.more_nodes:
            site, tracker = LaunchSite(name, "/sock"), GpuTracker(self.settings.gpu)
            node = ClusterNode(
                site=site,
                boot_id="simulated",
                host=replace(host, name=name),
                tracker=tracker,
                settings=self.node_settings.get(name),
            )
            self.scheduler.cluster.add(node)
            self.ticker.node_joined()
        self.read()
        return self.scheduler

    def set_targets(self, targets: GpuTargets) -> None:
        self.targets = targets

    def read(self) -> None:
        for name in self.more_nodes:
            if name not in self.silent:
                self.read_node(name)
        self.read_head()

    def read_node(self, name: str) -> None:
        """A reading of a node besides the first arrives."""
        pids = {mark: pid for mark, pid in self.pids_on().items() if mark[0] == name}
        cards = []
        for index in range(self.gpus):
            held = [(pids[mark], self.held_on[mark][1]) for mark in pids if self.held_on[mark][0] == index]
            cards.append(
                GpuSample(
                    f"GPU-{name}-{index}",
                    index,
                    self._model(name),
                    81920,
                    vram_used_mib=sum(mib or 0 for _, mib in held),
                    utilisation=0.0,
                    memory_utilisation=0.0,
                    processes=tuple(GpuProcess(pid, mib) for pid, mib in held),
                )
            )
        owners = {pid: run for (_, run), pid in pids.items() if run}
        reading = GpuReading(self.clock.now(), "simulated", tuple(cards))
        self.scheduler.observe_gpus(reading, self.scheduler.cluster[name], owners)

    def pids_on(self) -> dict[tuple[str, str], int]:
        """Processes of `held_on`."""
        return {mark: 1000 + number for number, mark in enumerate(self.held_on)}

    def read_head(self) -> None:
        """A reading of the first node arrives."""
        samples = tuple(
            GpuSample(
                f"GPU-{index}",
                index,
                self._model("n1"),
                vram_total_mib=81920,
                vram_used_mib=self.used.get(index, 0)
                + sum(process.vram_mib or 0 for process in self._processes(index)),
                utilisation=self.load.get(index, 0.0),
                memory_utilisation=self.load.get(index, 0.0),
                processes=None if index in self.unlisted else self._processes(index),
                is_lost=index in self.lost,
                error="the GPU is lost" if index in self.lost else None,
                xids=(*(Xid(xid, self.clock.now()) for xid in self.xids.pop(index, ())), *self.logged.pop(index, ())),
                **self.health.get(index, {}),
            )
            for index in range(self.gpus)
        )
        reading = GpuReading(self.clock.now(), "simulated", samples, self.gpu_error, targets=self.targets.number)
        self.scheduler.observe_gpus(reading)

    def _model(self, node: str) -> str:
        return self.models.get(node, "A100")

    def _processes(self, index: int) -> tuple[GpuProcess, ...]:
        strangers = (GpuProcess(1, self.strangers[index]),) if index in self.strangers else ()
        runs = self.scheduler.state.open_runs if self.held else {}
        mine = [(runs[name].pid, mib) for name, (card, mib) in self.held.items() if name in runs and card == index]
        return (*strangers, *(GpuProcess(pid, mib) for pid, mib in mine if pid is not None))

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.read()
        self.ticker.tick()

    def ask(self, *commands: Command | Reload) -> list[Any]:
        answers: list[Any] = []
        for command in commands:
            self.ticker.submit(command, answers.append)
        self.tick()
        return answers

    def submit(self, **parts: Any) -> int:
        (answer,) = self.ask(self.submission(**parts))
        if isinstance(answer, GpuschedError):
            raise answer
        return int(answer["ids"][0])

    def submission(self, caller: Caller = ANN, **parts: Any) -> Submit:
        made: JobSpec = spec(**{"launch": launch("true"), **parts})
        return Submit(caller, [made], {"0" * 64: ENV})

    def job(self, job_id: int) -> Job:
        (found,) = self.store.jobs(JobFilter(ids=frozenset({job_id})))
        return found
