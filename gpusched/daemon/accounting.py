"""What an ended run adds to the usage of its account and user."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.lifecycle.yielding import counts_for_usage
from gpusched.model.job import Job, Run
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.value import replace
from gpusched.scheduler.draft import Layout
from gpusched.scheduler.sharing.usage import charged, footprint

from .holdings import holding


def charge(
    usage: Mapping[tuple[str, str], Usage], job: Job, run: Run, layout: Layout, settings: Settings, now: float
) -> Usage | None:
    """The usage of the job's account and user with this run that has just ended; None when it adds nothing.

    A run that stood still is charged for the time that it moved, or for all of it if it kept GPUs meanwhile. One
    whose work was taken from it by a preemption is not charged.
    """
    if not counts_for_usage(run):
        return None
    qos = settings.qos.get(job.spec.qos)
    factor = 1.0 if qos is None else qos.usage_factor
    if run.start_at is None or run.end_at is None or factor <= 0:
        return None
    if job.suspended_at is not None or job.suspended_by is not None:
        job = replace(job, suspended_at=None, suspended_by=None)
    held = holding(job, run, settings.life.grace_s)
    booking = layout.booking(job.uid, held)
    if booking is None:
        return None
    mark = (job.spec.account, job.user)
    return charged(
        usage.get(mark),
        *mark,
        footprint(layout, booking),
        held.start_at,
        run.end_at,
        now,
        settings.priority.half_life_s,
        factor,
    )
