"""The order in which pending jobs will start, where each start passes the turn on to other users."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from gpusched.scheduler.fairshare import FairShareEntity

if TYPE_CHECKING:
    from gpusched.scheduler.priority import Rank
    from gpusched.scheduler.queue import JobClass, PendingQueue

FORESEEN = 50
"""Number of starts that turns are foreseen for; jobs behind them are in the order of the present turns."""

Line = tuple["JobClass", Sequence[tuple[float, int]]]
"""A class, and arrival and id of jobs of it, in order."""

_LITTLE = 1e-9
"""Parts of the cluster below this are rounding errors."""

_Top = tuple["Rank", int, int]
"""Rank of a job without its turn, its line, its index there."""


def first_starts(queue: PendingQueue, lines: Sequence[Line], most: int = FORESEEN) -> list[int]:
    """The line that each of the next starts takes its next job from, at most so many.

    Each start is charged to its user as a plan does. Once all of the cluster is held, others end for each further one:
    what runs now, of every user alike, then the first of these starts. Only in the order `response_ratio`.
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
    held = _Held(fairshare.held_parts())
    found, turns = list[int](), {one: one.turn for one in users}
    try:
        tops = {one: _rank_of(queue, lines, heads[0]) for one, heads in users.items()}
        while tops and len(found) < most:
            user = min(tops, key=lambda one: tops[one])
            # What ends for the next start may hand the turn to another user.
            ended = held.make_room(lines[users[user][0][1]][0].wanted.dominant_share(capacity))
            if _take_turns(queue, lines, users, tops, held, ended):
                user = min(tops, key=lambda one: tops[one])
            heads = users[user]
            _, number, index = heappop(heads)
            found.append(number)
            job_class, jobs = lines[number]
            if index + 1 < len(jobs):
                heappush(heads, (_without_turn(queue.rank(job_class, *jobs[index + 1])), number, index + 1))
            ended = held.start(user, job_class.wanted.dominant_share(capacity))
            if not heads:
                del tops[user]
            _take_turns(queue, lines, users, tops, held, ended)
            if heads:
                tops[user] = _rank_of(queue, lines, heads[0])
    finally:
        for user, turn in turns.items():
            user.turn = turn
    return found


class _Held:
    """Parts of the cluster that users hold while starts follow each other."""

    def __init__(self, now: dict[FairShareEntity, float]) -> None:
        self._now = now
        self._free = 1.0 - sum(now.values())
        self._later: dict[FairShareEntity, float] = {}
        self._starts: deque[tuple[FairShareEntity, float]] = deque()

    def part_of(self, user: FairShareEntity) -> float:
        return self._now.get(user, 0.0) + self._later.get(user, 0.0)

    def make_room(self, part: float) -> dict[FairShareEntity, None]:
        """End others until this much is free, as far as that is possible; return the users who hold less now."""
        changed: dict[FairShareEntity, None] = {}
        lacks = min(1.0, part) - self._free
        running = sum(self._now.values())
        if lacks > _LITTLE and running > _LITTLE:
            changed.update(dict.fromkeys(self._now))
            left = max(0.0, 1.0 - lacks / running)
            self._now = {one: held * left for one, held in self._now.items()}
            self._free += running * (1.0 - left)
        while min(1.0, part) - self._free > _LITTLE and self._starts:
            first, held = self._starts.popleft()
            changed[first] = None
            self._later[first] -= held
            self._free += held
        return changed

    def start(self, user: FairShareEntity, part: float) -> dict[FairShareEntity, None]:
        """Start a job; return the users who hold another part now."""
        changed = self.make_room(part)
        self._later[user] = self._later.get(user, 0.0) + part
        self._starts.append((user, part))
        self._free -= part
        changed[user] = None
        return changed


def _take_turns(
    queue: PendingQueue,
    lines: Sequence[Line],
    users: Mapping[FairShareEntity, list[_Top]],
    tops: dict[FairShareEntity, Rank],
    held: _Held,
    changed: Iterable[FairShareEntity],
) -> bool:
    """Rank the first jobs of users who hold another part now; return whether any rank differs."""
    is_other = False
    for one in changed:
        if one in tops and (turn := queue.fairshare.turn_of(one, max(0.0, held.part_of(one)))) != one.turn:
            one.turn, is_other = turn, True
            tops[one] = _rank_of(queue, lines, users[one][0])
    return is_other


def _rank_of(queue: PendingQueue, lines: Sequence[Line], top: _Top) -> Rank:
    _, number, index = top
    job_class, jobs = lines[number]
    return queue.rank(job_class, *jobs[index])


def _without_turn(rank: Rank) -> Rank:
    """The order among the jobs of one user, which their turn does not change."""
    return rank[0], *rank[2:]
