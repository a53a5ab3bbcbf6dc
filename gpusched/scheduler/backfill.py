"""One cycle: which jobs start, which victims are preempted, which reservations are made, and why the rest waits.

Pending jobs are taken in order. For each, the first possible of these, least disruptive first:

    limit     a limit of its queue or QOS blocks it; it delays only jobs that would use up what it waits for
    start     it fits now and delays no earlier job's reservation
    preempt   other jobs hold resources it is entitled to: they are preempted and the room is reserved for it
    reserve   room is reserved for it at the earliest instant, for the first `backfill_depth`
    wait      behind those

Jobs whose budget is spent come after all others, as fillers: they start where they fit beside all reservations, and do
nothing else.

Jobs suspended by the scheduler resume as soon as they fit, ahead of any job that could not have suspended them.

The work is done per class of equal jobs: a start advances its class, a job that cannot start blocks its class
for the rest of the cycle. Once all reservations are made, whole numbers (free cores, free cards) reject most
shapes before any placement is tried; classes subject to limits, the calendar or a QOS are always examined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from gpusched.scheduler.placement import fits
from gpusched.scheduler.preemption import resume_before
from gpusched.scheduler.priority import Rank
from gpusched.scheduler.queue import BLOCKED, NEXT_IN_CLASS, STARTED, Entry, Head, JobClass, RequestShape
from gpusched.scheduler.reservation import reserve_room
from gpusched.scheduler.rules import CycleRules


class Cycle(CycleRules):
    """One walk along the queue, which later arrivals can extend."""

    # --- the walk along the queue -----------------------------------------------------------------

    def run(self) -> None:
        """Schedule the head of every class in order of rank; backfill candidates shortest first if so configured."""
        if self.is_general or self.queue.ranking.is_dynamic:
            self._walk()
        else:
            self._reserve_and_fill()

    def _walk(self) -> None:
        """Examine each class under all rules."""
        queue, suspended = self.queue, self.suspended
        is_dynamic, is_general = queue.ranking.is_dynamic, self.is_general
        has_gap_order, is_filling = queue.has_gap_order, False
        if is_dynamic:
            heap = [(queue.rank_at(one, 0), 0, one) for one in queue.classes]
            heapify(heap)
        else:
            heap = queue.heads.copy()
        if not is_general:
            self.placements.epoch += 1
        is_filler = False
        while heap or (self.fillers and not is_filler):
            if not heap:
                is_filler, is_filling = True, False
                heap = [(queue.rank_at(one, number), number, one) for one, number in self.fillers]
                heapify(heap)
                if suspended:
                    resume_before(self, None)
            if has_gap_order and not is_filling and len(self.reservations) >= self.depth:
                is_filling = True
                heap = [queue.in_gaps(head) for head in heap]
                heapify(heap)
            rank, number, job_class = heap[0]
            if is_dynamic:
                head = queue.rank_at(job_class, number), number, job_class
                if is_filling:
                    head = queue.in_gaps(head)
                if head[0] != rank:
                    heapreplace(heap, head)
                    continue
            if suspended and not is_filler:
                resume_before(self, job_class)
            if is_filler:
                outcome = self.schedule_filler(job_class, number)
            elif is_general or job_class.must_see:
                outcome = self.schedule_job(job_class, number)
            else:
                outcome = self._backfill(job_class, number)
            if outcome == BLOCKED:
                heappop(heap)
                continue
            if outcome == NEXT_IN_CLASS:
                number += 1
            elif self._is_cut_short(job_class, number):
                heappop(heap)
                self.left = [job_class, *(head[2] for head in sorted(heap))]
                break
            if number >= len(job_class.jobs):
                heappop(heap)
            else:
                head = queue.rank_at(job_class, number), number, job_class
                heapreplace(heap, queue.in_gaps(head) if is_filling else head)
        if suspended:
            resume_before(self, None)

    def _is_cut_short(self, job_class: JobClass, number: int) -> bool:
        """Whether all visible jobs of a class were started: its hidden next job may precede all others."""
        if number < len(job_class.jobs) or not job_class.hidden:
            return False
        self.cut_short = job_class
        return True

    def _reserve_and_fill(self) -> None:
        """Faster walk, if most classes are exempt from the rules and ranks do not change during the cycle.

        Once all reservations are made, only shapes that may fit and classes subject to rules are examined.
        """
        queue, placements, depth = self.queue, self.placements, self.depth
        placements.epoch += 1
        heads, first = queue.heads.copy(), 0
        others: list[Head] = []
        """Jobs other than the heads of their classes, as a heap."""
        fitting = placements.fitting(queue.shapes) if queue.has_patience else None
        while first < len(heads) or others:
            if len(self.reservations) >= depth:
                if self.has_backfill or queue.must_see:
                    self._fill_gaps(heads[first:] + others)
                return
            if others and (first == len(heads) or others[0] < heads[first]):
                _, number, job_class = heappop(others)
            else:
                _, number, job_class = heads[first]
                first += 1
            is_full = fitting is not None and job_class.shape not in fitting and not job_class.must_see
            if is_full and not queue.ranking.has_patience(job_class, job_class.jobs[number][0]):
                self._wait_patiently(job_class.jobs[number])
                continue
            look = self.schedule_job if job_class.must_see else self._backfill
            outcome = look(job_class, number)
            if outcome == BLOCKED:
                continue
            if outcome == NEXT_IN_CLASS:
                number += 1
            elif self._is_cut_short(job_class, number):
                self.left = [job_class, *(head[2] for head in sorted(heads[first:] + others))]
                return
            if number < len(job_class.jobs):
                heappush(others, (queue.rank_at(job_class, number), number, job_class))

    def _fill_gaps(self, heads: list[Head]) -> None:
        """Backfill jobs without a reservation as long as they delay no reservation."""
        queue, placements, now = self.queue, self.placements, self.now
        # Without backfill, only classes subject to limits, windows and QOS matter behind.
        fitting = placements.fitting(queue.shapes) if self.has_backfill else set[RequestShape]()
        must_see = bool(queue.must_see)
        if not fitting and not must_see:
            return
        has_gap_order, moves = queue.has_gap_order, self.has_one_place and not placements.is_flat
        heads = self._candidates(heads, fitting)
        first = 0
        others: list[Head] = []
        only = self.reservations[0] if len(self.reservations) == 1 else None
        while first < len(heads) or others:
            if others and (first == len(heads) or others[0] < heads[first]):
                rank, number, job_class = heappop(others)
            else:
                rank, number, job_class = heads[first]
                first += 1
            shape = job_class.shape
            if job_class.must_see:
                outcome = self.schedule_job(job_class, number)
                if outcome == BLOCKED:
                    continue
                number += outcome == NEXT_IN_CLASS
                if only is not None and len(self.reservations) > 1:
                    only = None
            else:
                if shape not in fitting:
                    continue
                end_at = now + self.relied_on(job_class)
                is_known = only is not None and shape.passes_of == placements.epoch and not shape.passes
                if is_known and only is not None and end_at > only.pass_until:
                    continue
                booking = placements.place(shape, end_at)
                if booking is None:
                    if shape.epoch == placements.epoch and shape.booking is None:
                        fitting.discard(shape)
                    continue
                self._start(job_class, number, booking)
                outcome = STARTED
            if outcome == STARTED:
                if self._is_cut_short(job_class, number):
                    self.left = [job_class, *(head[2] for head in sorted(heads[first:] + others))]
                    return
                if self.has_backfill:
                    fitting = placements.fitting(queue.shapes)
                if not fitting and not must_see:
                    return
                if moves:
                    # Later jobs, its own class included, get other placements from here on, and may pass there.
                    heads, first, others = self._behind(rank, fitting), 0, []
                    continue
            if number < len(job_class.jobs):
                head = queue.rank_at(job_class, number), number, job_class
                heappush(others, queue.in_gaps(head) if has_gap_order else head)

    def _candidates(self, heads: list[Head], fitting: set[RequestShape]) -> list[Head]:
        """Those of these heads that may start, in backfill order."""
        found = [head for head in heads if head[2].shape in fitting or head[2].must_see]
        if self.queue.has_gap_order:
            found = list(map(self.queue.in_gaps, found))
        found.sort()
        return found

    def _behind(self, rank: Rank, fitting: set[RequestShape]) -> list[Head]:
        """Heads of the backfill classes that come after this rank and may start, in backfill order."""
        queue, found = self.queue, list[Head]()
        for job_class in queue.classes:
            if job_class in self.closed or not (job_class.shape in fitting or job_class.must_see):
                continue
            if not queue.has_gap_order:
                number = 0 if job_class.rank > rank else queue.first_behind(job_class, rank)
                if number < len(job_class.jobs):
                    found.append((queue.rank_at(job_class, number) if number else job_class.rank, number, job_class))
                continue
            for number in range(len(job_class.jobs)):
                head = queue.in_gaps((queue.rank_at(job_class, number), number, job_class))
                if head[0] > rank:
                    found.append(head)
                    break
        found.sort()
        return found

    def continue_with(self, arrivals: Sequence[Entry]) -> None:
        """Extend the cycle by jobs that have arrived since, all behind the last job with a reservation."""
        left, is_filling = self._last_first(arrivals), self._is_filling
        while left:
            entry = left.pop()
            job_class = entry[2]
            if job_class in self.closed:
                continue
            if job_class.must_see or self.is_general:
                self.schedule_job(job_class, bisect_left(job_class.jobs, entry))
            elif len(self.reservations) < self.depth or (
                self.has_backfill and self.placements.may_fit(job_class.shape)
            ):
                self._backfill(job_class, bisect_left(job_class.jobs, entry))
            if self._is_filling != is_filling:
                is_filling, left = True, self._last_first(left)

    @property
    def _is_filling(self) -> bool:
        """Whether all reservations are made and the rest is in its own backfill order."""
        return self.queue.has_gap_order and len(self.reservations) >= self.depth

    def _last_first(self, arrivals: Sequence[Entry]) -> list[Entry]:
        """Arrivals in processing order, reversed."""
        if len(arrivals) <= 1:
            return list(arrivals)
        queue, is_filling = self.queue, self._is_filling
        ranked = []
        for entry in arrivals:
            rank = queue.rank(entry[2], entry[0], entry[1])
            if is_filling:
                rank = queue.in_gaps((rank, bisect_left(entry[2].jobs, entry), entry[2]))[0]
            ranked.append((rank, entry))
        ranked.sort(reverse=True)
        return [entry for _, entry in ranked]

    def _backfill(self, job_class: JobClass, number: int) -> int:
        """Schedule a job that no limit, window or QOS affects."""
        shape = job_class.shape
        if self.reservations and not self.has_backfill:
            return BLOCKED
        booking = self.placements.place(shape, self.now + self.relied_on(job_class))
        if booking is not None:
            self._start(job_class, number, booking)
            return STARTED
        if len(self.reservations) >= self.depth:
            can_move = self.has_one_place and bool(self.reservations) and not self.placements.is_flat
            return NEXT_IN_CLASS if can_move and fits(self.draft, shape.need) else BLOCKED
        entry = job_class.jobs[number]
        if not self.queue.ranking.has_patience(job_class, entry[0]):
            self._wait_patiently(entry)
            return BLOCKED
        if not self.has_backfill:
            # No job passes it, so its reservation is computed only on demand.
            if shape.can_fit is None:
                shape.can_fit = fits(self._idle_draft(), shape.need)
            if not shape.can_fit:
                return BLOCKED
        reservation = reserve_room(self, entry, shape.need, job_class.planned_s, None, shape.only)
        if reservation is None:
            return BLOCKED
        if self.placements.is_flat:
            shape.only = reservation.booking
        self._reserved(job_class, number, reservation)
        if len(self.reservations) < self.depth:
            return NEXT_IN_CLASS
        self.closed.add(job_class)
        return BLOCKED
