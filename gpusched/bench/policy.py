"""`python -m gpusched.bench.policy`: what one cycle of the policy costs, and what it does not depend on.

No daemon, no processes: `decide` on made-up snapshots of 8 nodes with 8 GPUs. The floor is a plain loop
over the classes and cards in the same interpreter, the least any such cycle must look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpusched.bench.harness import show
from gpusched.model.cluster import Allocation, GpuView, NodeView
from gpusched.model.job import GpuShare, Request
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot
from gpusched.policy.cycle import decide

NODES, GPUS_PER_NODE = 8, 8
NOW = 1_000_000.0
FRONT = 128
"""Jobs of a class that the daemon's snapshot shows, as in `gpusched.daemon.world`."""


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
        held.append(Allocation(place + 1, 1000, f"node{number}", (share,), 2, 4096, NOW - 3600 + place, end_at))
    return tuple(held)


def waiting(jobs: int, classes: int) -> tuple[PendingClass, ...]:
    """This many jobs in classes of different users, sizes and limits."""
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
        key = ClassKey(1000 + number % 20, "", "default", number % 3, limit_s, request)
        first = 1000 + number * each
        front = tuple(PendingJob(first + place, NOW - 7200 + number) for place in range(min(each, FRONT)))
        made.append(PendingClass(key, front, each))
    return tuple(made)


def measure(snapshot: Snapshot, repeats: int = 30) -> list[float]:
    """Milliseconds of one cycle each."""
    return timed(lambda: decide(snapshot, Settings()), repeats)


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
        show(f"{jobs:,} jobs, {classes} classes, {free_cards} of 64 cards free", measure(snapshot))


if __name__ == "__main__":
    main()
