"""A job's place in the queue, in the order in which the cycle looks at jobs."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingJob, Snapshot
from gpusched.scheduler.extension import NO_EXTENSIONS, Extensions
from gpusched.scheduler.planner import Planner


def in_order(
    snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS
) -> Iterator[tuple[ClassKey, PendingJob]]:
    """The waiting jobs of the snapshot, best first, up to where a class that is cut short leaves it open."""
    return Planner.from_snapshot(snapshot, settings, extensions).in_order(snapshot.now)


def queue_position(
    snapshot: Snapshot, settings: Settings, job_id: int, extensions: Extensions = NO_EXTENSIONS
) -> tuple[int, int] | None:
    """The place of a job, from 1, and of how many; None when it is not in what the snapshot shows."""
    for place, (_, job) in enumerate(in_order(snapshot, settings, extensions), start=1):
        if job.id == job_id:
            return place, sum(waiting.total for waiting in snapshot.pending)
    return None


def first_in_order(
    snapshot: Snapshot, settings: Settings, most: int, extensions: Extensions = NO_EXTENSIONS
) -> list[int]:
    """The ids of the jobs in the first places, at most so many."""
    ids: list[int] = []
    for _, job in in_order(snapshot, settings, extensions):
        if len(ids) == most:
            break
        ids.append(job.id)
    return ids
