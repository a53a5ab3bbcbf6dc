"""`python -m benchmarks.policy`: what one cycle of the policy costs, and what it does not depend on.

No daemon, no processes: `decide` on made-up snapshots of 8 nodes with 8 GPUs. The floor is a plain loop
over the classes and cards in the same interpreter, the least any such cycle must look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from benchmarks.harness import show
from gpusched.model.cluster import Allocation, GpuView, JobTerms, NodeView
from gpusched.model.job import GpuShare, Request
from gpusched.model.planner_settings import PreemptSettings, PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot
from gpusched.scheduler.events import Event, JobQueued, RunHolds, RunReleased
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.runs import held_by

NODES, GPUS_PER_NODE = 8, 8
NOW = 1_000_000.0
QUEUES = ("vision", "nlp", "free")
FRONT = 128
"""Jobs of a class that a snapshot shows."""


def cluster() -> tuple[NodeView, ...]:
    """8 nodes of 8 GPUs, two of each four of the larger type."""
    return tuple(
        NodeView(
            name=f"node{number}",
            cpus=64,
            mem_mib=512 * 1024,
            gpus=tuple(
                GpuView(f"GPU-{number}-{index}", index, "A100" if number % 2 else "T4", 81920 if number % 2 else 16384)
                for index in range(GPUS_PER_NODE)
            ),
        )
        for number in range(NODES)
    )


def busy(free_cards: int) -> tuple[Allocation, ...]:
    """One job on every card but the last so many, ending at different times; every fifth without a limit."""
    held = []
    for place in range(NODES * GPUS_PER_NODE - free_cards):
        number, index = divmod(place, GPUS_PER_NODE)
        share = GpuShare(f"GPU-{number}-{index}", index)
        end_at = None if place % 5 == 0 else NOW + 60.0 * (place + 1)
        job_id, queue = place + 1, QUEUES[place % 2]
        held.append(
            Allocation(
                job_id,
                JobTerms(1000, "u0", "lab", queue),
                f"node{number}",
                (share,),
                2,
                4096,
                NOW - 3600 + place,
                end_at,
            )
        )
    return tuple(held)


def waiting(jobs: int, classes: int, most: int = FRONT) -> tuple[PendingClass, ...]:
    """This many jobs in classes of different users, sizes and limits, each shown up to so many."""
    each = jobs // classes
    made = []
    for number in range(classes):
        request = Request(
            gpus=1 + number % 8,
            gpu_type="a100" if number % 3 == 0 else None,
            cpus=1 + number // 8 % 4,
            mem_mib=1024 * (1 + number // 32),
        )
        limit_s = None if number % 4 == 0 else 600 * (1 + number % 7)
        uid, queue = number % 20, QUEUES[number % len(QUEUES)]
        qos = "high" if number % 40 == 0 else ""
        terms = JobTerms(1000 + uid, f"u{uid}", "lab", queue, qos, request)
        key = ClassKey(terms, number % 3, limit_s)
        first = 1000 + number * each
        front = tuple(PendingJob(first + place, NOW - 7200 + number) for place in range(min(each, most)))
        made.append(PendingClass(key, front, each))
    return tuple(made)


def lab() -> Settings:
    """Fair shares, queues with guarantees and limits, a QOS that preempts, ten reservations."""
    return Settings(
        priority=PrioritySettings(backfill_depth=10),
        preempt=PreemptSettings(min_run_s=0.0),
        queue={
            "vision": QueueSettings("vision", guaranteed_gpus=24.0, max_gpus_per_user=16.0),
            "nlp": QueueSettings("nlp", guaranteed_gpus=24.0, max_gpus=60.0),
            "free": QueueSettings("free", weight=2.0),
        },
        qos={"high": QosSettings("high", tier=1, preempts=("low",))},
        account={"lab": AccountSettings("lab", users={f"u{uid}": 1.0 + uid % 3 for uid in range(20)})},
    )


def measure(snapshot: Snapshot, settings: Settings, repeats: int = 30) -> list[float]:
    """Milliseconds of one cycle each."""
    return timed(lambda: decide(snapshot, settings), repeats)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call, after one that does not count."""
    samples = []
    for turn in range(repeats + 1):
        began = time.perf_counter()
        work()
        if turn:
            samples.append((time.perf_counter() - began) * 1e3)
    return samples


def floor(classes: int, repeats: int = 30) -> list[float]:
    """Milliseconds to touch every card once for every class."""
    cards = list(range(NODES * GPUS_PER_NODE))
    return timed(lambda: [sum(card & 1 for card in cards) for _ in range(classes)], repeats)


class Lab:
    """A cluster in its steady state: whatever fits runs, and all that changes is told to the planner."""

    def __init__(self, jobs: int, classes: int, settings: Settings) -> None:
        self.now = NOW
        snapshot = Snapshot(NOW, cluster(), busy(0), waiting(jobs, classes, jobs))
        self.planner = Planner.from_snapshot(snapshot, settings)
        self.running = {held.job_id for held in snapshot.allocations}
        self.keys = [pending.key for pending in snapshot.pending]
        self.key_of = {job.id: pending.key for pending in snapshot.pending for job in pending.jobs}
        self.last = 2_000_000
        self.dice = Random(1)

    def arrival(self) -> Event:
        """A job of some class is pending."""
        self.last += 1
        key = self.key_of[self.last] = self.dice.choice(self.keys)
        return JobQueued(key, PendingJob(self.last, self.now))

    def end(self) -> Event:
        """A run ends."""
        job_id = self.dice.choice(sorted(self.running))
        self.running.remove(job_id)
        return RunReleased(job_id)

    def cycle(self, event: Event | None = None) -> float:
        """Take in an event, plan, and tell of what was carried out. Returns milliseconds of CPU time."""
        self.now += 0.1
        began = time.process_time()
        if event is not None:
            self.planner.state.apply(event)
        plan = self.planner.plan(self.now)
        for start in plan.starts:
            key, places = self.key_of[start.job_id], (start.placement, *start.placement.others)
            end_at = None if key.time_limit_s is None else self.now + key.time_limit_s
            grace_s = self.planner.state.settings.life.grace_s
            held = (held_by(key, start.job_id, place, self.now, end_at, grace_s) for place in places)
            self.planner.state.apply(RunHolds(tuple(held)))
        took_ms = (time.process_time() - began) * 1e3
        self.running.update(start.job_id for start in plan.starts)
        for preempted in plan.preempts:
            self.planner.state.apply(RunReleased(preempted.job_id))
            self.running.remove(preempted.job_id)
        return took_ms


def steady(jobs: int, classes: int, settings: Settings, what: str, repeats: int = 60) -> None:
    """Print what a cycle costs after an arrival, and after an end, where nothing else has happened since the last."""
    one = Lab(jobs, classes, settings)
    for _ in range(5):
        one.cycle()
    samples: dict[str, list[float]] = {"an arrival": [], "an end": []}
    for _ in range(repeats):
        samples["an arrival"].append(one.cycle(one.arrival()))
        samples["an end"].append(one.cycle(one.end()))
        # What the plan itself has changed, such as a job that was preempted for another.
        one.cycle()
    for event, found in samples.items():
        show(f"{jobs:,} jobs, {classes} classes, {what}: after {event}", found)


def main() -> None:
    """Print one line for each size of queue."""
    nodes = cluster()
    for classes in (200, 2000):
        show(f"floor: {classes} classes x 64 cards", floor(classes))
    for jobs, classes, free_cards in (
        (100_000, 200, 0),
        (100_000, 200, 3),
        (1_000_000, 200, 0),
        (1_000_000, 200, 3),
        (100_000, 2000, 3),
        (100_000, 200, 64),
    ):
        snapshot = Snapshot(NOW, nodes, busy(free_cards), waiting(jobs, classes))
        show(f"{jobs:,} jobs, {classes} classes, {free_cards} of 64 cards free", measure(snapshot, Settings()))
    for jobs, classes, free_cards in ((100_000, 200, 3), (1_000_000, 200, 3), (100_000, 2000, 3)):
        snapshot = Snapshot(NOW, nodes, busy(free_cards), waiting(jobs, classes))
        text = f"{jobs:,} jobs, {classes} classes, {free_cards} free, queues, shares and 10 reservations"
        show(text, measure(snapshot, lab()))
    for jobs, classes in ((100_000, 200), (1_000_000, 200), (100_000, 2000)):
        steady(jobs, classes, Settings(), "defaults")
        steady(jobs, classes, lab(), "queues, shares, QOS and 10 reservations")
    snapshot = Snapshot(NOW, nodes, busy(3), waiting(100_000, 2000))
    show("the same, and every reason asked for", timed(lambda: dict(decide(snapshot, lab()).reasons), 10))


if __name__ == "__main__":
    main()
