"""`python -m benchmarks.nodes [HISTORY]`: what many nodes and long queues cost the scheduler.

Two levels, no processes, in CPU time; goals in the last column.

    tick     the daemon's whole tick on 8 nodes of 8 GPUs with 10,000 pending jobs, its table in SQLite with durable
             commits: after a submission, after the end of a run, after a reading of all GPUs. With HISTORY, 1,000,000
             by default, the same again with so many ended jobs in the table, which takes some minutes to fill.
    cycle    the planner alone on 1,000 nodes of 8 GPUs with 100,000 pending jobs, after the end of a run

The floor of a tick is a commit of one row; that of a cycle is touching every node once for every kind of request.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from random import Random
from typing import Any

from benchmarks.harness import fsync_floor, machine, percentile
from benchmarks.million import AT_ONCE, ended_jobs
from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon.core import Scheduler
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.parts import SchedulerParts
from gpusched.daemon.tick import Ticker
from gpusched.engine.cluster import ClusterEngine
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import Allocation, GpuReading, GpuSample, GpuView, HostSample, JobTerms, NodeView
from gpusched.model.commands import Caller, Submit
from gpusched.model.execution import LaunchSite, pack_environment
from gpusched.model.job import GpuShare, JobSpec, Launch, Request, RetryRule
from gpusched.model.planner_settings import PlacementSettings
from gpusched.model.settings import GpuSettings, NodeSettings, Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot
from gpusched.scheduler.events import JobQueued, RunHolds, RunReleased
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.runs import held_by
from gpusched.store.sqlite import SqliteStore

GPUS = 8
NOW = 1_000_000_000.0
TICK_MS, CYCLE_MS = 30.0, 200.0
"""Goals."""
USERS, KINDS = 20, 15
"""Users, and kinds of jobs of each."""
WAITED_S = 7 * 86400.0
"""So long that jobs of all sizes get reservations."""
ENV = pack_environment({"PATH": "/bin"})
ENV_SHA = sha256(ENV).hexdigest()


def _show(name: str, samples: Sequence[float], goal_ms: float | None = None) -> None:
    goal = (
        ""
        if goal_ms is None
        else f"   goal {goal_ms:g} ms: {'met' if percentile(samples, 0.5) <= goal_ms else 'MISSED'}"
    )
    print(
        f"{name:<62} median {percentile(samples, 0.5):8.2f} ms   p95 {percentile(samples, 0.95):8.2f} ms   "
        f"max {max(samples):8.2f} ms   n={len(samples)}{goal}",
        flush=True,
    )


def _requests() -> list[Request]:
    """Kinds of requests, as different as those of a lab: sizes, cores, memory, types, gangs."""
    return [
        Request(
            gpus=(1, 1, 1, 2, 4, 8)[number % 6],
            gpu_type="a100" if number % 5 == 0 else None,
            cpus=float(1 + number // 6 % 4),
            mem_mib=1024 * (1 + number // 24),
            nodes=2 if number % 30 == 29 else 1,
            near=("imagenet",) if number % 7 == 0 else (),
        )
        for number in range(60)
    ]


# --- the daemon's tick ------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> float:
        return self.at


class Ticking:
    """A scheduler of some nodes with simulated engines."""

    def __init__(self, path: str, nodes: int, clock: Clock | None = None) -> None:
        self.clock, self.dice = clock or Clock(), Random(1)
        self.store = SqliteStore.open(path)
        names = [f"node{number}" for number in range(nodes)]
        self.engines = {name: SimulatedEngine(self.clock, self._outcome) for name in names}
        settings = Settings(
            node=NodeSettings(name=names[0], cpus=64, data=("imagenet",)), gpu=GpuSettings(free_polls=1)
        )
        host = HostSample(self.clock.now(), names[0], 64, 512 * 1024, 500 * 1024, boot_id="bench")
        made = {name: self._node(name, host, settings) for name in names}
        self.scheduler = Scheduler(
            SchedulerParts(
                store=self.store,
                engine=ClusterEngine(self.engines, names[0]),
                cluster=ClusterNodes(made[names[0]]),
                settings=settings,
                clock=self.clock,
            )
        )
        self.ticker = Ticker(self.scheduler)
        for name in names[1:]:
            self.scheduler.cluster.add(made[name])
            self.ticker.node_joined()
        self.requests = _requests()
        self.read()

    def _outcome(self, ticket: object) -> SimulatedOutcome:
        return SimulatedOutcome(runs_s=self.dice.uniform(600, 1e6))

    def _node(self, name: str, host: HostSample, settings: Settings) -> ClusterNode:
        own = NodeSettings(cpus=64, data=("imagenet",) if name[-1] in "13" else ())
        return ClusterNode(
            site=LaunchSite(name, "/sock"),
            boot_id="bench",
            host=HostSample(self.clock.now(), name, 64, 512 * 1024, 500 * 1024, boot_id="bench"),
            tracker=GpuTracker(settings.gpu),
            settings=own,
        )

    def read(self, nodes: Iterable[ClusterNode] | None = None) -> None:
        """A reading of all GPUs of these nodes, by default all; their load has changed since the last one."""
        for node in self.scheduler.cluster if nodes is None else nodes:
            even = int(node.name.removeprefix("node")) % 2 == 0
            samples = tuple(
                GpuSample(
                    f"GPU-{node.name}-{index}",
                    index,
                    "A100" if even else "T4",
                    81920 if even else 16384,
                    vram_used_mib=0,
                    utilisation=round(self.dice.random(), 2),
                    processes=(),
                )
                for index in range(GPUS)
            )
            self.scheduler.observe_gpus(GpuReading(self.clock.now(), "simulated", samples), node, {})

    def spec(self, caller: Caller) -> JobSpec:
        """One of the kinds of jobs of this user, with a seed of its own."""
        kind = caller.uid * 7 + self.dice.randrange(KINDS)
        argv = ("python", f"train{kind}.py", f"--seed={self.dice.randrange(10**6)}")
        launch = Launch(argv, None, None, ENV_SHA, "/tmp", stdout="/dev/null")
        limit_s = None if kind % 4 == 0 else 600 * (1 + kind % 9)
        request = self.requests[kind % len(self.requests)]
        return JobSpec("train", request, launch, RetryRule(), time_limit_s=limit_s)

    def submission(self, count: int = 1) -> Submit:
        """Jobs of one user."""
        caller = self.caller()
        return Submit(caller, [self.spec(caller) for _ in range(count)], {ENV_SHA: ENV})

    def caller(self) -> Caller:
        uid = self.dice.randrange(USERS)
        return Caller(1000 + uid, f"u{uid}")

    def fill(self, pending: int) -> None:
        """Submit so many jobs more than can run, in batches."""
        left = pending + len(self.engines) * GPUS
        while left > 0:
            count = min(500, left)
            left -= count
            self.ask(self.submission(count))
        for _ in range(3):
            self.tick()

    def ask(self, command: Any) -> float:
        answers: list[Any] = []
        self.ticker.submit(command, answers.append)
        took = self.tick()
        if isinstance(answers[0], Exception):
            raise answers[0]
        return took

    def tick(self) -> float:
        """Milliseconds of CPU time of one tick."""
        began = time.process_time()
        self.ticker.tick()
        return (time.process_time() - began) * 1e3

    def end_one(self) -> tuple[float, float]:
        """Let the next run end; the tick that records it, and the one that finds its GPUs clean."""
        engines = self.engines.values()
        self.clock.at = min(at for engine in engines if (at := engine.next_event_at()) is not None)
        ended = self.tick()
        self.read()
        return ended, self.tick()


def ticks(pending: int, nodes: int, history: int) -> None:
    """Print what a tick costs."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        path = os.path.join(folder, "gpusched.db")
        if history:
            _fill_history(path, history)
        else:
            _show("floor: write and fsync", fsync_floor(folder))
        one = Ticking(path, nodes)
        try:
            one.fill(pending)
            one.scheduler.history.load()
            samples: dict[str, list[float]] = {"a submission": [], "a reading": [], "an end": [], "its release": []}
            intake = []
            for _ in range(40):
                one.clock.at += 1.0
                samples["a submission"].append(one.ask(one.submission()))
                began = time.process_time()
                one.read()
                intake.append((time.process_time() - began) * 1e3 / nodes)
                samples["a reading"].append(one.tick())
                ended, released = one.end_one()
                samples["an end"].append(ended)
                samples["its release"].append(released)
            there = f", {history:,} ended" if history else ""
            _show(f"taking in the reading of one of {nodes:,} nodes{there}", intake)
            for what, found in samples.items():
                goal_ms = TICK_MS if nodes == 8 else None
                _show(f"tick, {nodes:,} nodes, {pending:,} pending{there}: after {what}", found, goal_ms)
        finally:
            one.store.close()


def _fill_history(path: str, jobs: int) -> None:
    store = SqliteStore.open(path)
    began = time.perf_counter()
    for first in range(1, jobs + 1, AT_ONCE):
        store.commit(ended_jobs(first, min(AT_ONCE, jobs + 1 - first)))
    store.close()
    print(f"{jobs:,} ended jobs written in {time.perf_counter() - began:.0f} s", flush=True)


# --- the planner alone --------------------------------------------------------------------------------


def large_cluster(nodes: int) -> tuple[NodeView, ...]:
    """Nodes of 8 GPUs in four racks of models and sizes."""
    kinds = (("A100", 81920), ("A100", 40960), ("V100", 32768), ("T4", 16384))
    found = []
    for number in range(nodes):
        model, mib = kinds[number * len(kinds) // nodes]
        gpus = tuple(GpuView(f"GPU-{number}-{index}", index, model, mib) for index in range(GPUS))
        data = ("imagenet",) if number % 16 == 0 else ()
        found.append(NodeView(f"node{number:04}", 64, 512 * 1024, gpus, data=data))
    return tuple(found)


class Planning:
    """A planner in its steady state: whatever fits runs."""

    def __init__(self, nodes: int, pending: int, settings: Settings) -> None:
        self.now, self.dice = NOW, Random(1)
        keys = []
        for number, request in enumerate(_requests() * 5):
            limit_s = None if number % 4 == 0 else 600 * (1 + number % 9)
            terms = JobTerms(1000 + number % USERS, f"u{number % USERS}", request=request)
            keys.append(ClassKey(terms, number // 60, limit_s))
        self.key_of: dict[int, ClassKey] = {}
        classes = []
        each = pending // len(keys)
        for number, key in enumerate(keys):
            jobs = tuple(PendingJob(1 + number * each + place, NOW - WAITED_S + number) for place in range(each))
            self.key_of.update((job.id, key) for job in jobs)
            classes.append(PendingClass(key, jobs, each))
        self.keys = keys
        self.last = 10_000_000
        views = large_cluster(nodes)
        held = tuple(self._busy(views))
        self.planner = Planner.from_snapshot(Snapshot(NOW, views, held, tuple(classes)), settings)
        self.running = [one.job_id for one in held]
        self.first_ms = self.cycle()

    def _busy(self, views: Sequence[NodeView]) -> Iterator[Allocation]:
        """Jobs of 1 to 8 GPUs on every card, that end at different times."""
        job_id = 20_000_000
        for view in views:
            first = 0
            while first < GPUS:
                count = min(self.dice.choice((1, 1, 1, 2, 4, 8)), GPUS - first)
                shares = tuple(GpuShare(gpu.uuid, gpu.index) for gpu in view.gpus[first : first + count])
                first, terms, job_id = first + count, JobTerms(1000, f"u{job_id % USERS}"), job_id + 1
                start_at = NOW - self.dice.uniform(0, 86400)
                end_at = None if job_id % 4 == 0 else NOW + self.dice.uniform(60, 86400)
                yield Allocation(job_id, terms, view.name, shares, float(count), 1024 * count, start_at, end_at)

    def cycle(self, *changed: Any) -> float:
        """Take in events, plan, and carry the plan out. Returns milliseconds of CPU time."""
        self.now += 1.0
        began = time.process_time()
        for event in changed:
            self.planner.state.apply(event)
        plan = self.planner.plan(self.now)
        for start in plan.starts:
            key = self.key_of[start.job_id]
            end_at = None if key.time_limit_s is None else self.now + key.time_limit_s
            places = (start.placement, *start.placement.others)
            grace_s = self.planner.state.settings.life.grace_s
            self.planner.state.apply(
                RunHolds(tuple(held_by(key, start.job_id, place, self.now, end_at, grace_s) for place in places))
            )
        took_ms = (time.process_time() - began) * 1e3
        self.running += [start.job_id for start in plan.starts]
        return took_ms

    def end_one(self) -> float:
        number = self.dice.randrange(len(self.running))
        self.running[number], self.running[-1] = self.running[-1], self.running[number]
        return self.cycle(RunReleased(self.running.pop()))

    def arrive(self) -> float:
        self.last += 1
        key = self.key_of[self.last] = self.dice.choice(self.keys)
        return self.cycle(JobQueued(key, PendingJob(self.last, self.now)))


def cycles(nodes: int, pending: int, settings: Settings, what: str) -> None:
    """Print what a cycle costs."""
    one = Planning(nodes, pending, settings)
    text = f"cycle, {nodes:,} nodes, {pending:,} pending, {what}"
    print(f"{text}: the first one, beside {len(one.running):,} running: {one.first_ms / 1e3:.2f} s", flush=True)
    for _ in range(3):
        one.end_one()
    _show(f"{text}: after an end", [one.end_one() for _ in range(40)], CYCLE_MS)
    _show(f"{text}: after an arrival", [one.arrive() for _ in range(40)], CYCLE_MS)


def _floor(nodes: int) -> None:
    free, kinds = list(range(nodes)), len(_requests())
    samples = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(kinds):
            sum(count & 1 for count in free)
        samples.append((time.process_time() - began) * 1e3)
    _show(f"floor: {kinds} kinds of request x {nodes:,} nodes", samples)


def main(history: int = 0) -> None:
    """Print one line for each case."""
    ticks(10_000, 8, 0)
    for nodes, pending in ((8, 100_000), (100, 100_000), (1000, 100_000)):
        _floor(nodes)
        cycles(nodes, pending, Settings(), "defaults")
    speeds = Settings(gpu=GpuSettings(speed={"A100": 1.0, "V100": 0.5, "T4": 0.2}))
    cycles(1000, 100_000, speeds, "GPU speeds")
    cycles(1000, 100_000, Settings(placement=PlacementSettings(strategy="spread")), "spread")
    if history:
        ticks(10_000, 8, history)


if __name__ == "__main__":
    print(machine())
    main(*map(int, sys.argv[1:2] or ["1000000"]))
