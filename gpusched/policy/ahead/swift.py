"""The future played on paper by what stands between cycles, which costs what changes from one plan to the next.

It is the play of `future`, where nothing happens that a line cannot follow: runs that stand still or are being stopped,
windows of the calendar, jobs that come later, limits of queues. There it is left to `future`. What has been used counts
on as time passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import groupby

from gpusched.model.cluster import Allocation
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Placement, Snapshot, Usage
from gpusched.model.value import replace
from gpusched.policy.ahead.again import key_of
from gpusched.policy.ahead.future import TOGETHER, Length
from gpusched.policy.ordering import ranked_at
from gpusched.policy.profile import end_of
from gpusched.policy.sharing.usage import usage_now
from gpusched.policy.standing import Standing


def play(
    snapshot: Snapshot, settings: Settings, length: Length, wanted: Iterable[int], cycles: int
) -> dict[int, float] | None:
    """When each of these jobs starts, as far as at most so many plans tell; None where this cannot be played so."""
    standing = _standing(snapshot, settings)
    if standing is None:
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
        for start in standing.decide(now).starts:
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
            standing.ended(job_id)
    return started


def _standing(snapshot: Snapshot, settings: Settings) -> Standing | None:
    """What stands as in the snapshot; None where a line cannot follow it."""
    is_odd = any(held.is_suspended or held.is_stopping or held.reservation for held in snapshot.allocations)
    if is_odd or snapshot.windows or any(waiting.total > len(waiting.jobs) for waiting in snapshot.pending):
        return None
    standing = Standing(snapshot.nodes, settings)
    if not standing.is_plain:
        return None
    if snapshot.used is not None:
        standing.used(snapshot.used)
    else:
        at = ranked_at(snapshot.now, settings)
        used = usage_now(snapshot, standing.layout, settings, at)
        standing.used(Usage(*mark, amount, at) for mark, amount in used.items())
    ordered = sorted(snapshot.allocations, key=lambda held: held.job_id)
    for job_id, held in groupby(ordered, lambda one: one.job_id):
        pieces = tuple(held)
        first = pieces[0]
        standing.runs(_key_of(pieces), job_id, _placement(pieces), first.start_at, end_of(first, snapshot.now))
    for waiting in snapshot.pending:
        kind = standing.kind_of(waiting.key)
        if not kind.is_plain:
            return None
        for job in waiting.jobs:
            standing.arrived(kind, job)
    return standing


def _firsts(allocations: Iterable[Allocation]) -> Iterable[Allocation]:
    return {held.job_id: held for held in allocations}.values()


def _end_at(held: Allocation, length: Length, now: float) -> float | None:
    """When a run ends that goes on now; None when nobody knows."""
    expected = held.expected_end_at
    if expected is not None and expected <= now:
        return now
    lasts_s = length(held.job_id, None if expected is None else expected - held.start_at, now - held.start_at)
    return None if lasts_s is None else max(now, held.start_at + lasts_s)


def _key_of(pieces: tuple[Allocation, ...]) -> ClassKey:
    first = pieces[0]
    predicted_at = first.predicted_end_at
    plan_s = None if predicted_at is None else round(predicted_at - first.start_at)
    return replace(key_of(pieces), is_front=False, plan_s=plan_s)


def _placement(pieces: tuple[Allocation, ...]) -> Placement:
    places = [
        Placement(one.node, one.gpus, one.cpus, one.mem_mib, one.resources, one.licenses, one.is_exclusive)
        for one in pieces
    ]
    return replace(places[0], others=tuple(places[1:])) if len(places) > 1 else places[0]
