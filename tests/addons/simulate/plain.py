"""The rules of the literature, written down plainly: no cards, classes, profiles or anything else of the policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Gang:
    """A job of whole GPUs that may be of several nodes."""

    submit: int
    run: int
    gpus: int


def place(free: list[int], gpus: int, how: str, size: int) -> list[tuple[int, int]] | None:
    """Wholly free nodes by index, and one more for the remainder; None when there is no place."""
    whole, rest = divmod(gpus, size)
    chosen = [(node, size) for node, left in enumerate(free) if left == size][:whole]
    if len(chosen) < whole:
        return None
    if rest:
        taken = {node for node, _ in chosen}
        able = [(left, node) for node, left in enumerate(free) if left >= rest and node not in taken]
        if not able:
            return None
        best = {
            "best": lambda one: one,
            "first": lambda one: one[1],
            "spread": lambda one: (-one[0], one[1]),
        }[how]
        chosen.append((min(able, key=best)[1], rest))
    return chosen


def gang_schedule(jobs: list[Gang], nodes: int, size: int, order: str, backfill: str, how: str) -> list[int]:
    """Start of each job: at every instant completions, then arrivals, then one pass along the queue."""
    free = [size] * nodes
    starts: dict[int, int] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    instants = sorted({one.submit for one in jobs})
    rank = {"fcfs": lambda i: (jobs[i].submit, i), "sjf": lambda i: (jobs[i].run, jobs[i].submit, i)}[order]
    queue: list[int] = []
    coming = sorted(range(len(jobs)), key=lambda i: (jobs[i].submit, i))
    while instants:
        now = instants.pop(0)
        for index in [i for i in held if starts[i] + jobs[i].run <= now]:
            _give(free, held.pop(index), 1)
        while coming and jobs[coming[0]].submit <= now:
            queue.append(coming.pop(0))
        queue.sort(key=rank)
        shadow, then, head = None, [], None
        for index in list(queue):
            job = jobs[index]
            where = place(free, job.gpus, how, size)
            may = where is not None
            if may and shadow is not None:
                outlives = now + job.run > shadow
                if outlives:
                    tried = then.copy()
                    _give(tried, where, -1)
                    may = min(tried) >= 0 and place(tried, head.gpus, how, size) is not None
                    if may:
                        then = tried
            if may:
                _give(free, where, -1)
                starts[index], held[index] = now, where
                queue.remove(index)
                instants = sorted({*instants, now + job.run})
            elif backfill == "none":
                break
            elif backfill == "easy" and shadow is None:
                head = job
                shadow, then = _shadow(free, held, starts, jobs, head, how, size)
    return [starts[index] for index in range(len(jobs))]


def _give(free: list[int], where: list[tuple[int, int]], sign: int) -> None:
    for node, gpus in where:
        free[node] += sign * gpus


def _shadow(free, held, starts, jobs, head, how, size):
    then = free.copy()
    ends = sorted((starts[i] + jobs[i].run, i) for i in held)
    for number, (at, index) in enumerate(ends):
        _give(then, held[index], 1)
        is_last = number + 1 == len(ends) or ends[number + 1][0] > at
        if is_last and place(then, head.gpus, how, size) is not None:
            return at, then
    raise AssertionError("larger than the cluster")


def usable(free: Sequence[int], wanted: Iterable[int], size: int) -> int:
    """Cards that are idle on nodes that one of the waiting could be on, by trying every choice of nodes."""
    nodes: set[int] = set()
    for gpus in wanted:
        whole, rest = (gpus // size, gpus % size) if gpus > size else (0, gpus)
        for chosen in combinations(range(len(free)), whole):
            if any(free[node] < size for node in chosen):
                continue
            if not rest:
                nodes |= set(chosen)
            for last in set(range(len(free))) - set(chosen):
                if rest and free[last] >= rest:
                    nodes |= {*chosen, last}
    return sum(free[node] for node in nodes)
