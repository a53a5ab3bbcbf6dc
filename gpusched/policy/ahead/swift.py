"""The future played on paper by what stands between cycles, which costs what changes from one plan to the next.

It is the play of `future`, where nothing happens that a line cannot follow: runs that stand still or are being stopped,
windows of the calendar, jobs that come later, limits of queues. There it is left to `future`. What has been used counts
on as time passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from gpusched.model.cluster import Allocation
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Snapshot
from gpusched.policy.ahead.future import TOGETHER, Length
from gpusched.scheduler.planner import Planner


def play(
    snapshot: Snapshot, settings: Settings, length: Length, wanted: Iterable[int], cycles: int
) -> dict[int, float] | None:
    """When each of these jobs starts, as far as at most so many plans tell; None where this cannot be played so."""
    planner = _planner(snapshot, settings)
    if planner is None:
        return None
    began, now = snapshot.now, snapshot.now
    limits_s = {job.id: waiting.key.time_limit_s for waiting in snapshot.pending for job in waiting.jobs}
    ends = [
        (end_at, held.job_id)
        for held in _firsts(snapshot.allocations)
        if (end_at := _end_at(held, length, now)) is not None
    ]
    heapify(ends)
    left, started = set(wanted), dict[int, float]()
    for _ in range(cycles):
        for start in planner.schedule(now):
            lasts_s = length(start.job_id, limits_s[start.job_id], 0.0)
            if lasts_s is not None:
                heappush(ends, (now + lasts_s, start.job_id))
            if start.job_id in left:
                left.discard(start.job_id)
                started[start.job_id] = now
        if not left or not ends:
            break
        first = max(now, ends[0][0])
        together = first + TOGETHER * (first - began)
        while ends and ends[0][0] <= together:
            end_at, job_id = heappop(ends)
            now = max(now, end_at)
            planner.run_ended(job_id)
    return started


def _planner(snapshot: Snapshot, settings: Settings) -> Planner | None:
    """A planner that knows the snapshot; None where more than starts and ends may come of it."""
    is_odd = any(held.is_suspended or held.is_stopping or held.reservation for held in snapshot.allocations)
    if is_odd or snapshot.windows or any(waiting.total > len(waiting.jobs) for waiting in snapshot.pending):
        return None
    if any(waiting.key.deadline_at is not None for waiting in snapshot.pending):
        # Those that miss it are ended in place of being started.
        return None
    planner = Planner.from_snapshot(snapshot, settings)
    return planner if planner.can_never_preempt and not planner.has_ceilings else None


def _firsts(allocations: Iterable[Allocation]) -> Iterable[Allocation]:
    return {held.job_id: held for held in allocations}.values()


def _end_at(held: Allocation, length: Length, now: float) -> float | None:
    """When a run ends that goes on now; None when nobody knows."""
    expected = held.expected_end_at
    if expected is not None and expected <= now:
        return now
    lasts_s = length(held.job_id, None if expected is None else expected - held.start_at, now - held.start_at)
    return None if lasts_s is None else max(now, held.start_at + lasts_s)
