"""One cycle: which jobs start, which victims are preempted, which reservations are made, and why the rest waits.

Pending jobs are taken in order. For each, the first possible of these, least disruptive first:

    limit     a limit of its queue or QOS blocks it; it delays only jobs that would use up what it waits for
    start     it fits now and delays no earlier job's reservation
    preempt   other jobs hold resources it is entitled to: they are preempted and the room is reserved for it
    reserve   room is reserved for it at the earliest instant, for the first `backfill_depth`
    wait      behind those

Jobs whose budget is spent come after all others, as fillers: they start where they fit beside all reservations, and do
nothing else.

Jobs suspended by the scheduler resume as soon as they fit and those that could suspend them again have had their turn,
ahead of any other job.

The work is done per class of equal jobs: a start advances its class, a job that cannot start blocks its class
for the rest of the cycle. Once all reservations are made, whole numbers (free cores, free cards) reject most
shapes before any placement is tried; classes subject to limits, the calendar or a QOS are always examined.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from gpusched.scheduler.preemption import resume_before
from gpusched.scheduler.priority import Rank
from gpusched.scheduler.queue import BLOCKED, NEXT_IN_CLASS, STARTED, Entry, Head, JobClass, PendingQueue, RequestShape
from gpusched.scheduler.rules import Cycle


class CandidateHeads:
    """The jobs to examine, one at a time in order of rank: of each class the first that was not examined yet.

    Ranks may be dynamic: then they are as of when a job is next.
    """

    __slots__ = ("_first", "_heads", "_is_dynamic", "_is_in_gaps", "_others", "_queue")

    def __init__(self, queue: PendingQueue, fillers: Sequence[tuple[JobClass, int]] = ()) -> None:
        """Args: fillers: only these classes, each from this index on; empty for all from the first job on."""
        self._queue = queue
        self._is_dynamic = queue.ranking.is_dynamic
        self._is_in_gaps = False
        self._heads: list[Head] = []
        """The heads of their classes, sorted, of which those before `_first` were examined."""
        self._first = 0
        self._others: list[Head] = []
        """All others, as a heap."""
        if fillers or self._is_dynamic:
            jobs = fillers or [(job_class, 0) for job_class in queue.classes]
            self._others = [(queue.rank_at(job_class, number), number, job_class) for job_class, number in jobs]
            heapify(self._others)
        else:
            self._heads = queue.heads.copy()

    def __iter__(self) -> Iterator[Head]:
        while True:
            others, first, heads = self._others, self._first, self._heads
            if first < len(heads) and not (others and others[0] < heads[first]):
                self._first = first + 1
                yield heads[first]
            elif not others:
                return
            else:
                yield self._pop_by_present_rank() if self._is_dynamic else heappop(others)

    def _pop_by_present_rank(self) -> Head:
        queue, others = self._queue, self._others
        while True:
            rank, number, job_class = others[0]
            head = queue.rank_at(job_class, number), number, job_class
            if self._is_in_gaps:
                head = queue.in_gaps(head)
            if head[0] == rank:
                return heappop(others)
            heapreplace(others, head)

    def push(self, job_class: JobClass, number: int) -> None:
        """Go on in this class with the job at this index, if there is one."""
        if number < len(job_class.jobs):
            head = self._queue.rank_at(job_class, number), number, job_class
            heappush(self._others, self._queue.in_gaps(head) if self._is_in_gaps else head)

    def fill_gaps(self, fitting: Set[RequestShape] | None, *more: Head) -> None:
        """Go on in backfill order, with more heads. Args: fitting: shapes to keep, besides classes under limits."""
        heads = [*more, *self._heads[self._first :], *self._others]
        if fitting is not None:
            heads = [head for head in heads if head[2].shape in fitting or head[2].must_see]
        if self._queue.has_gap_order:
            self._is_in_gaps = True
            heads = list(map(self._queue.in_gaps, heads))
        self._go_on_with(heads)

    def begin_behind(self, rank: Rank, fitting: Set[RequestShape], closed: Set[JobClass]) -> None:
        """Examine all that come after this rank and may start, those of classes that were passed over included."""
        queue, found = self._queue, list[Head]()
        for job_class in queue.classes:
            if job_class in closed or not (job_class.shape in fitting or job_class.must_see):
                continue
            if not self._is_in_gaps:
                number = 0 if job_class.rank > rank else queue.first_behind(job_class, rank)
                if number < len(job_class.jobs):
                    found.append((queue.rank_at(job_class, number) if number else job_class.rank, number, job_class))
                continue
            gap_rank = partial(queue.rank_in_gaps, job_class)
            number = bisect_right(range(len(job_class.jobs)), rank, key=gap_rank)
            if number < len(job_class.jobs):
                found.append((gap_rank(number), number, job_class))
        self._go_on_with(found)

    def _go_on_with(self, heads: list[Head]) -> None:
        heads.sort()
        # A sorted list is a heap.
        self._heads, self._others = ([], heads) if self._is_dynamic else (heads, [])
        self._first = 0


def walk_queue(cycle: Cycle) -> None:
    """Schedule the head of every class in order of rank, and backfill candidates in their own order, if any."""
    _walk(cycle)
    if cycle.fillers:
        _start_fillers(cycle)
    if cycle.suspended:
        resume_before(cycle, None)


def _walk(cycle: Cycle) -> None:
    """Once all reservations are made, examine only shapes that may fit and classes that limits hold."""
    queue, placements, is_general = cycle.queue, cycle.placements, cycle.is_general
    fitting: set[RequestShape] | None = None
    if not is_general:
        placements.epoch += 1
        if queue.has_patience:
            fitting = placements.fitting(queue.shapes)
    begins_again = not (is_general or queue.ranking.is_dynamic or placements.is_flat) and cycle.has_one_place
    """Whether a start has all jobs behind it examined again: they get other placements, and may pass there."""
    is_filling, only_until = False, inf
    heads = CandidateHeads(queue)
    for head in heads:
        if not is_filling and len(cycle.reservations) >= cycle.depth:
            is_filling = True
            if not is_general:
                fitting = placements.fitting(queue.shapes) if cycle.has_backfill else set()
                if not (fitting or queue.must_see):
                    return
            only_until = cycle.reservations[0].pass_until if len(cycle.reservations) == 1 else inf
            heads.fill_gaps(fitting, head)
            continue
        rank, number, job_class = head
        if cycle.suspended:
            resume_before(cycle, job_class)
        if is_general or job_class.must_see:
            outcome = cycle.schedule_job(job_class, number)
        elif fitting is None:
            outcome = cycle.schedule_unlimited(job_class, number)
        elif (shape := job_class.shape) not in fitting and (
            is_filling or not queue.ranking.has_patience(job_class, job_class.jobs[number][0])
        ):
            if not is_filling:
                cycle.wait_patiently(job_class.jobs[number])
            continue
        elif shape.barred_of == placements.epoch and is_filling and cycle.now + job_class.relied_s > only_until:
            # Most candidates have a shape that was refused just before.
            continue
        else:
            outcome = cycle.schedule_unlimited(job_class, number)
            if outcome == BLOCKED and shape.booking is None and shape.epoch == placements.epoch:
                fitting.discard(shape)
        if outcome == BLOCKED:
            continue
        if outcome == NEXT_IN_CLASS:
            heads.push(job_class, number + 1)
            continue
        if is_filling and fitting is not None:
            if cycle.has_backfill:
                fitting = placements.fitting(queue.shapes)
            if not (fitting or queue.must_see):
                return
            if begins_again:
                heads.begin_behind(rank, fitting, cycle.closed)
                continue
        heads.push(job_class, number)


def _start_fillers(cycle: Cycle) -> None:
    """Start jobs whose budgets are spent where they fit beside all others."""
    resume_before(cycle, None)
    heads = CandidateHeads(cycle.queue, cycle.fillers)
    if _is_filling(cycle):
        heads.fill_gaps(None)
    for _, number, job_class in heads:
        if cycle.schedule_filler(job_class, number) == STARTED:
            heads.push(job_class, number)


def walk_arrivals(cycle: Cycle, arrivals: Sequence[Entry]) -> None:
    """Extend the cycle by jobs that have arrived since, all behind the last job with a reservation."""
    left, is_filling = _last_first(cycle, arrivals), _is_filling(cycle)
    while left:
        entry = left.pop()
        job_class = entry[2]
        if job_class in cycle.closed:
            continue
        if job_class.must_see or cycle.is_general:
            cycle.schedule_job(job_class, bisect_left(job_class.jobs, entry))
        elif len(cycle.reservations) < cycle.depth or (
            cycle.has_backfill and cycle.placements.may_fit(job_class.shape)
        ):
            cycle.schedule_unlimited(job_class, bisect_left(job_class.jobs, entry))
        if left and _is_filling(cycle) != is_filling:
            is_filling, left = True, _last_first(cycle, left)


def _is_filling(cycle: Cycle) -> bool:
    """Whether all reservations are made and the rest is in its own backfill order."""
    return cycle.queue.has_gap_order and len(cycle.reservations) >= cycle.depth


def _last_first(cycle: Cycle, arrivals: Sequence[Entry]) -> list[Entry]:
    """Arrivals in processing order, reversed."""
    if len(arrivals) <= 1:
        return [*arrivals]
    queue, is_filling = cycle.queue, _is_filling(cycle)
    ranked = []
    for entry in arrivals:
        rank = queue.rank(entry[2], entry[0], entry[1])
        if is_filling:
            rank = queue.in_gaps((rank, bisect_left(entry[2].jobs, entry), entry[2]))[0]
        ranked.append((rank, entry))
    ranked.sort(reverse=True)
    return [entry for _, entry in ranked]
