"""`python -m benchmarks.scale [NODES ...]`: what nodes cost the head, in the daemon itself. By default 100 and 1,000.

First the ticks alone, on a clock of their own: `PENDING` jobs, every GPU booked, some over two nodes, and each tenth of
a second a tenth of the nodes report, after which the daemon ticks; `ARRIVALS` jobs arrive and end a second.

Then, for up to `MOST_LIVE` nodes, the whole daemon in real time.
The daemon's own loop, table (SQLite, durable), links, planner and watches run in this process. All nodes run in
another, each with a real agent in front of a simulated engine and 8 simulated GPUs, and report at the usual pace.
For each number of nodes, in CPU time of this process, since wall time says more about the machine's other users:

    idle        no jobs: one node's share of the head, bytes per second both ways, memory
    busy        as above
    reconnect   all connections are cut at once: until every node has answered again

The first group of lines is without other nodes. The floor of a tick is 20,000 updates of a dictionary (`floor_ms`),
1.4 ms on the machine of the figures in docs/explanation/scale.md: others' load may make a core several times slower.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from random import Random
from select import EPOLLIN, epoll

from benchmarks.harness import machine, memory_kib, percentile
from benchmarks.nodes import GPUS, Clock, Ticking
from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.api.server import HttpServer
from gpusched.api.service import ApiService
from gpusched.daemon.dispatch import Dispatcher
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.loop import Loop
from gpusched.daemon.remote_nodes import RemoteNodes
from gpusched.daemon.service_manager import ServiceManager
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.remote.channel import StreamChannel
from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.node_agent import NodeAgent, NodeSources
from gpusched.model.cluster import GpuReading, GpuSample, GpuTargets, HostSample
from gpusched.model.execution import LaunchSite
from gpusched.model.mig import MigOrder
from gpusched.model.settings import ClusterSettings, NodeSettings
from gpusched.model.value import replace

PENDING = 3000
ARRIVALS = 2.0
"""Jobs that arrive, and about as many that end, per second."""
MEASURED_S = 15.0
MOST_LIVE = 200
"""Beyond, the agents alone need more than a core."""
STEPS, STEP_S = 300, 0.1
HOST = HostSample(0.0, "", 64, 512 * 1024, 500 * 1024, cpu_fraction=0.5, boot_id="bench", load_average=8.0)


def floor_ms() -> float:
    """CPU time of 20,000 updates of a dictionary: what the machine can do just then."""
    found = []
    for _ in range(9):
        began, counts = time.process_time(), dict[int, int]()
        for number in range(20_000):
            counts[number & 255] = counts.get(number & 255, 0) + number
        found.append((time.process_time() - began) * 1e3)
    return percentile(found, 0.5)


class WallClock(Clock):
    def now(self) -> float:
        return time.time()


# --- ticks, on a clock of their own ------------------------------------------------------------------------


class Stepping(Ticking):
    """A head whose nodes report in turn."""

    def __init__(self, path: str, nodes: int) -> None:
        self.mean_s = nodes * GPUS / 2.5 / ARRIVALS
        super().__init__(path, nodes)

    def _outcome(self, ticket: object) -> SimulatedOutcome:
        return SimulatedOutcome(runs_s=self.dice.expovariate(1 / self.mean_s))

    def step(self, number: int) -> tuple[float, float]:
        """Milliseconds for the reports of a tenth of the nodes, and for the tick behind them."""
        self.clock.at += STEP_S
        nodes = [*self.scheduler.cluster][number % 10 :: 10]
        began = time.process_time()
        for node in nodes:
            node.host = replace(node.host, at=self.clock.at, cpu_fraction=round(self.dice.random(), 3))
        self.read(nodes)
        took_ms = (time.process_time() - began) * 1e3
        if self.dice.random() < ARRIVALS * STEP_S:
            self.ticker.submit(self.submission(), lambda answer: None)
        return took_ms, self.tick()


def steps(nodes: int) -> None:
    """Print what reports and ticks cost."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        one = Stepping(os.path.join(folder, "gpusched.db"), nodes)
        try:
            cpu = time.process_time()
            one.fill(PENDING)
            print(
                f"{nodes} nodes, {len(one.scheduler.state.open_runs)} runs, {len(one.scheduler.state.jobs)} jobs, "
                f"filled in {time.process_time() - cpu:.1f} s of CPU time",
                flush=True,
            )
            floor, found = floor_ms(), [one.step(number) for number in range(STEPS)][20:]
            per_report = [reports / max(1, nodes / 10) for reports, _ in found]
            ticks = [tick for _, tick in found]
            print(
                f"{nodes} nodes, step by step: taking in a report {percentile(per_report, 0.5):.3f} ms; tick "
                f"median {percentile(ticks, 0.5):.2f} ms, p95 {percentile(ticks, 0.95):.2f} ms, "
                f"max {max(ticks):.2f} ms; floor {floor:.2f} ms",
                flush=True,
            )
        finally:
            one.store.close()


# --- the nodes, in a process of their own ---------------------------------------------------------------


class SimulatedNode:
    """What the agent of a node reports: load and use that change with every look."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.dice = name, Random(seed)
        self._is_wanted = False

    def read(self) -> HostSample:
        load = round(self.dice.random(), 3)
        return HostSample(
            time.time(), self.name, 64, 512 * 1024, 500 * 1024, cpu_fraction=load, boot_id="bench", identity=self.name
        )

    def request(self, orders: Sequence[MigOrder] = ()) -> None:
        self._is_wanted = True

    def want(self, targets: GpuTargets) -> None:
        """Simulated cards are always as they are wanted."""

    def poll(self) -> GpuReading | None:
        if not self._is_wanted:
            return None
        self._is_wanted = False
        gpus = tuple(
            GpuSample(
                f"GPU-{self.name}-{index}",
                index,
                "A100",
                81920,
                vram_used_mib=0,
                utilisation=round(self.dice.random(), 2),
                processes=(),
            )
            for index in range(GPUS)
        )
        return GpuReading(time.time(), "simulated", gpus)


def make_agent(folder: str, name: str, seed: int, mean_s: float) -> NodeAgent:
    """Its runs take `mean_s` on average."""
    clock, dice, node = WallClock(), Random(seed), SimulatedNode(name, seed)

    def outcome(ticket: object) -> SimulatedOutcome:
        return SimulatedOutcome(runs_s=dice.expovariate(1 / mean_s))

    return NodeAgent(
        lambda: SimulatedEngine(clock, outcome),
        AgentJournal(os.path.join(folder, f"{name}.agent"), int(time.time() * 1000)),
        boot_id="bench",
        clock=clock,
        order_mark=lambda run: 0,
        sources=NodeSources(node, node, site=LaunchSite(name, "/sock"), settings=NodeSettings(cpus=64)),
    )


def serve(path: str, folder: str, names: Sequence[str], mean_s: float) -> None:
    """Accept a connection for each node, which names it on the first line, and answer as its agent. Never returns."""
    agents = {name: make_agent(folder, name, seed, mean_s) for seed, name in enumerate(names)}
    listener, looks = socket.socket(socket.AF_UNIX), epoll()
    listener.bind(path)
    listener.listen(len(names))
    looks.register(listener, EPOLLIN)
    channels: dict[int, tuple[StreamChannel, NodeAgent]] = {}
    later, dice = list[tuple[float, int]](), Random(1)
    """Channels that are looked at from this instant on: in a cluster no two nodes report in step."""
    while True:
        while later and later[0][0] <= time.monotonic():
            looks.register(heappop(later)[1], EPOLLIN)
        for fd, _ in looks.poll(0.01 if later else None):
            if fd == listener.fileno():
                stream, _ = listener.accept()
                agent = agents[stream.recv(64, socket.MSG_WAITALL).decode().strip()]
                channel = StreamChannel(stream)
                channels[channel.fileno()] = channel, agent
                heappush(later, (time.monotonic() + dice.random(), channel.fileno()))
                continue
            channel, agent = channels[fd]
            for frame in channel.receive():
                channel.send(agent.sync(frame))
            if channel.trouble() is not None:
                looks.unregister(fd)
                del channels[fd]
                channel.close()


@contextmanager
def nodes_process(folder: str, names: Sequence[str], mean_s: float) -> Iterator[str]:
    """The path at which the nodes can be reached."""
    path = os.path.join(folder, "nodes.sock")
    pid = os.fork()
    if pid == 0:
        try:
            serve(path, folder, names, mean_s)
        finally:
            os._exit(1)
    try:
        while not os.path.exists(path):
            time.sleep(0.01)
        yield path
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- the head ---------------------------------------------------------------------------------------------


class CountingChannel(StreamChannel):
    """A channel to one node that counts frames and bytes, and connects again when it was cut."""

    def __init__(self, path: str, name: str, counts: dict[str, int]) -> None:
        super().__init__(None, name)
        self._path, self._name, self.counts = path, name, counts
        self.connect()

    def connect(self) -> None:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(self._path)
        stream.sendall(self._name.ljust(64).encode())
        self.attach(stream)

    def send(self, frame: bytes) -> None:
        self.counts["bytes out"] += len(frame) + 4
        super().send(frame)

    def receive(self) -> list[bytes]:
        frames = super().receive()
        self.counts["replies"] += len(frames)
        self.counts["bytes in"] += sum(map(len, frames)) + 4 * len(frames)
        return frames


class Worker:
    """Of a head without GPUs."""

    def __init__(self) -> None:
        self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ends[0]

    def poll(self) -> GpuReading | None:
        return None

    def request(self, orders: object = ()) -> None:
        """There is nothing to read."""


class Host:
    def __init__(self, name: str) -> None:
        self._name = name

    def read(self) -> HostSample:
        return HostSample(time.time(), self._name, 64, 512 * 1024, 500 * 1024, boot_id="bench")


class Head(Ticking):
    """A daemon with so many other nodes."""

    def __init__(self, folder: str, path: str, names: Sequence[str]) -> None:
        super().__init__(os.path.join(folder, "gpusched.db"), 1, WallClock())
        self.counts = {"bytes in": 0, "bytes out": 0, "replies": 0}
        self.channels = {name: CountingChannel(path, name, self.counts) for name in names}
        self.remote = RemoteNodes(
            ClusterSettings(nodes=tuple(names)), self.clock, 1, open_channel=self.channels.__getitem__
        )
        engine = ClusterEngine({**self.engines, **self.remote.engines}, self.scheduler.head.name)
        self.scheduler.engine = engine
        self.remote.attach(self.ticker, engine)
        engine.adopt(())
        self.ticks_ms: list[float] = []
        self._tick = self.ticker.tick
        self.ticker.tick = self.timed_tick  # type: ignore[method-assign]
        self.dispatcher = Dispatcher(self.scheduler)
        self.loop = Loop(
            self.ticker,
            Worker(),  # type: ignore[arg-type]
            Host(self.scheduler.head.name),
            self.dispatcher,
            ServiceManager({}),
            lambda: False,
            remote=self.remote,
        )

    def timed_tick(self) -> None:
        began = time.thread_time()
        self._tick()
        self.ticks_ms.append((time.thread_time() - began) * 1e3)

    @property
    def joined(self) -> int:
        """Nodes that answer and whose GPUs can be used."""
        nodes = (self.scheduler.cluster.get(name) for name in self.channels)
        return sum(node is not None and node.reading is not None and node.why_not is None for node in nodes)

    @property
    def booked(self) -> int:
        """GPUs that runs hold."""
        return sum(len(held.gpus) for held in self.scheduler.state.holds.values())

    async def until(self, is_so: Callable[[], bool], most_s: float) -> bool:
        until = time.monotonic() + most_s
        while not is_so():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.01)
        return True

    async def measure(self, what: str, seconds: float) -> None:
        """Print what these seconds cost."""
        self.ticks_ms.clear()
        floor = floor_ms()
        counts, cpu, began = dict(self.counts), time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        nodes, ticks = max(1, len(self.channels)), self.ticks_ms
        rates = {name: (count - counts[name]) / took_s / nodes for name, count in self.counts.items()}
        print(
            f"{what:<34} CPU {100 * cpu_s / took_s:6.1f} % of a core, {1e3 * cpu_s / took_s / nodes:6.3f} ms a node; "
            f"{rates['replies']:.2f} replies, {rates['bytes in']:,.0f} bytes in, {rates['bytes out']:,.0f} out "
            f"a node, all by the second",
            flush=True,
        )
        if ticks:
            figures = (percentile(ticks, 0.5), percentile(ticks, 0.95), max(ticks))
            print(
                f"{what + ': ticks':<34} median {figures[0]:.2f} ms, p95 {figures[1]:.2f} ms, max {figures[2]:.2f} ms, "
                f"{len(ticks) / took_s:.1f} a second; floor {floor:.2f} ms",
                flush=True,
            )

    async def submit(self, per_s: float) -> None:
        """Submit single jobs for ever."""
        while True:
            self.ticker.submit(self.submission(), lambda answer: None)
            self.loop.wake()
            await asyncio.sleep(self.dice.expovariate(per_s))

    async def story(self, before_kib: int) -> None:
        nodes = len(self.channels)
        if not await self.until(lambda: self.joined == nodes, 120.0):
            raise SystemExit(f"{self.joined} of {nodes} nodes have joined within 120 s")
        await asyncio.sleep(3.0)
        gc.collect()
        if nodes:
            print(f"memory: {(memory_kib(os.getpid()) - before_kib) / nodes:.0f} KiB a node", flush=True)
        await self.measure(f"{nodes} nodes, idle", MEASURED_S)
        if not nodes:
            return
        cpu = time.process_time()
        for _ in range(0, PENDING + GPUS * nodes // 2, 500):
            self.ticker.submit(self.submission(500), lambda answer: None)
            self.loop.wake()
            await asyncio.sleep(0.5)
        most = GPUS * nodes
        await self.until(lambda: self.booked >= 0.95 * most, 120.0)
        state = self.scheduler.state
        print(
            f"filled: {len(state.open_runs)} runs on {self.booked} of {most} GPUs, "
            f"{len(state.jobs) - len(state.open_runs)} pending, "
            f"{time.process_time() - cpu:.1f} s of CPU time",
            flush=True,
        )
        arriving = asyncio.ensure_future(self.submit(ARRIVALS))
        await self.measure(f"{nodes} nodes, busy", 2 * MEASURED_S)
        arriving.cancel()
        cpu, counts = time.process_time(), self.counts["replies"]
        for channel in self.channels.values():
            channel.hang_up("cut")
            channel.connect()
        began, heard_at = time.perf_counter(), time.time()
        links = [engine.link for engine in self.remote.engines.values()]
        await self.until(lambda: all((link.last_reply_at or 0.0) > heard_at for link in links), 60.0)
        print(
            f"{nodes} nodes, reconnected: {1e3 * (time.process_time() - cpu):.0f} ms of CPU time, "
            f"{self.counts['replies'] - counts} replies, {time.perf_counter() - began:.2f} s",
            flush=True,
        )

    def run(self, folder: str, before_kib: int) -> None:
        server = HttpServer(ApiService(DaemonFacade(self.ticker, wake=self.loop.wake, stop=self.loop.stop)))

        async def whole() -> None:
            def ready() -> None:
                self.loop.wake()

            serving = asyncio.ensure_future(self.loop.run(server, os.path.join(folder, "sock"), ready))
            try:
                await self.story(before_kib)
            finally:
                self.loop.stop()
                with suppress(asyncio.CancelledError):
                    await serving

        asyncio.run(whole())


def measure(nodes: int) -> None:
    """Print one group of lines."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        names = [f"n{number:04}" for number in range(nodes)]
        # As long as it takes for about as many to end as arrive.
        mean_s = max(1.0, nodes * GPUS / 2.5 / ARRIVALS)
        with nodes_process(folder, names, mean_s) as path:
            before_kib = memory_kib(os.getpid())
            head = Head(folder, path, names)
            try:
                head.run(folder, before_kib)
            finally:
                head.dispatcher.close()
                head.scheduler.engine.close()
                head.store.close()


def main(*nodes: int) -> None:
    """Print the figures for each of these numbers of nodes."""
    for count in nodes:
        steps(count)
    for count in (0, *nodes):
        if count <= MOST_LIVE:
            measure(count)
    print(machine(), flush=True)


if __name__ == "__main__":
    print(machine())
    main(*(map(int, sys.argv[1:]) if sys.argv[1:] else (100, 1000)))
