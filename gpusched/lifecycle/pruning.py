"""Which jobs that ended long ago may be forgotten: none that an unfinished one needs, arrays and pipelines as wholes.

An array goes before its tasks and a pipeline before its jobs, so that what is left of one that is on its way is told
by what it belonged to being gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gpusched.model.job import Job


def may_go(
    job: Job, before: float, arrays: Collection[int], pipelines: Collection[str], is_needed: Callable[[Job], bool]
) -> bool:
    """Whether a job may be forgotten now.

    Args: before: instant before which it must have ended. arrays, pipelines: those that are there. is_needed: whether
    something unfinished needs it.
    """
    if job.end_at is None or job.end_at >= before:
        return False
    if job.array_id in arrays or job.spec.pipeline in pipelines:
        return False
    return not is_needed(job)


def pipeline_may_go(ends: Iterable[tuple[int, float | None]], before: float, is_named: Callable[[int], bool]) -> bool:
    """Whether a pipeline may be forgotten: each of its jobs ended before an instant, and nothing waits for one."""
    return all(end_at is not None and end_at < before and not is_named(job_id) for job_id, end_at in ends)
