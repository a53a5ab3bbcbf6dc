"""The order in which pending jobs will start, where each start passes the turn on to other users."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from gpusched.scheduler.fairshare import FairShareEntity

if TYPE_CHECKING:
    from gpusched.scheduler.priority import Rank
    from gpusched.scheduler.queue import JobClass, PendingQueue

FORESEEN = 50
"""Number of starts that turns are foreseen for; jobs behind them are in the order of the present turns."""

_Top = tuple["Rank", int, int]
"""Rank of a job without its turn, its line, its index there."""


def first_starts(
    queue: PendingQueue, lines: Sequence[tuple[JobClass, Sequence[tuple[float, int]]]], most: int = FORESEEN
) -> list[int]:
    """The line that each of the next starts takes its next job from, at most so many.

    Each start is charged to its user as a plan does. Once all of the cluster is held, each further start ends others:
    of every user by what they hold.

    Args: lines: a class and arrival and id of jobs of it, in order. Only in the order `response_ratio`.
    """
    fairshare, capacity = queue.fairshare, queue.ranking.capacity
    users: dict[FairShareEntity, list[_Top]] = {}
    for number, (job_class, jobs) in enumerate(lines):
        if jobs:
            users.setdefault(job_class.entity, []).append((_without_turn(queue.rank(job_class, *jobs[0])), number, 0))
    if len(users) < 2:
        return []
    for heads in users.values():
        heapify(heads)
    held = fairshare.held_parts()
    found, turns = list[int](), {one: one.turn for one in users}
    try:
        tops = {one: _rank_of(queue, lines, heads[0]) for one, heads in users.items()}
        while tops and len(found) < most:
            user = min(tops, key=lambda one: tops[one])
            heads = users[user]
            _, number, index = heappop(heads)
            found.append(number)
            job_class, jobs = lines[number]
            if index + 1 < len(jobs):
                heappush(heads, (_without_turn(queue.rank(job_class, *jobs[index + 1])), number, index + 1))
            held[user] = held.get(user, 0.0) + job_class.wanted.dominant_share(capacity)
            total = sum(held.values())
            if total > 1.0:
                held = {one: part / total for one, part in held.items()}
            for one in held if total > 1.0 else (user,):
                if one in tops and (turn := fairshare.turn_of(one, held[one])) != one.turn:
                    one.turn = turn
                    if one is not user:
                        tops[one] = _rank_of(queue, lines, users[one][0])
            if heads:
                tops[user] = _rank_of(queue, lines, heads[0])
            else:
                del tops[user]
    finally:
        for user, turn in turns.items():
            user.turn = turn
    return found


def _rank_of(queue: PendingQueue, lines: Sequence[tuple[JobClass, Sequence[tuple[float, int]]]], top: _Top) -> Rank:
    _, number, index = top
    job_class, jobs = lines[number]
    return queue.rank(job_class, *jobs[index])


def _without_turn(rank: Rank) -> Rank:
    """The order among the jobs of one user, which their turn does not change."""
    return rank[0], *rank[2:]
