"""Bursting: which pending jobs go to the site's Slurm because their expected start here is too far away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpusched.model.job import Job, JobSpec
from gpusched.model.queue_settings import chain_of
from gpusched.model.settings import Settings
from gpusched.model.units import format_duration, plural
from gpusched.model.value import Value
from gpusched.scheduler.forecast import StartRange


class BurstCandidate(Value):
    """A pending job or task that may go to Slurm, and the wait from which on it does."""

    job_id: int
    queued_at: float
    limit_s: float


class Burst(Value):
    """A job that is to go to Slurm, and the sentence for its story."""

    job_id: int
    text: str


def burst_limit_s(queue: str, settings: Settings) -> float | None:
    """Expected wait beyond which jobs of this queue go to Slurm; None if they never do."""
    limits = (one.burst_after_s for one in chain_of(queue, settings.queue))
    return next((limit for limit in limits if limit is not None), None)


def allows_burst(spec: JobSpec, settings: Settings) -> bool:
    """Whether the job may go to Slurm by its own word, else by its queue's."""
    if spec.engine is not None:
        return False
    if spec.burst is not None:
        return spec.burst
    words = (one.burst for one in chain_of(spec.queue, settings.queue))
    return next((word for word in words if word is not None), None) == "allow"


def why_kept(job: Job) -> str | None:
    """What ties a job to this cluster that Slurm would take as something else, in words; None if nothing does."""
    request = job.spec.request
    if job.spec.array is not None and job.spec.array.throttle is not None:
        # The tasks in Slurm would come on top.
        return f"its array runs at most {plural(job.spec.array.throttle, 'task')} at once"
    if job.run:
        return "it has already run here"
    if request.card_fraction is not None:
        return "it asks for a fraction of a GPU"
    if job.spec.variants:
        return "it has variants"
    names = {
        "reservation": job.spec.reservation,
        "node": request.nodelist or request.exclude,
        "feature": request.constraint or request.prefer,
        "GPU type": request.gpu_type,
        "license": request.licenses,
        "resource": request.resources,
    }
    found = next((what for what, named in names.items() if named), None)
    return None if found is None else f"it names a {found} of this cluster"


def choose_bursts(
    candidates: Iterable[BurstCandidate],
    starts: Mapping[int, StartRange],
    now: float,
    in_slurm: int,
    settings: Settings,
) -> tuple[Burst, ...]:
    """The jobs whose earliest expected start is beyond their limit, those that have waited longest first.

    Args: in_slurm: how many burst jobs Slurm has. No estimate, no burst.
    """
    rule = settings.burst
    room = min(rule.max_per_interval, rule.max_jobs - in_slurm)
    found: list[Burst] = []
    for one in sorted(candidates, key=lambda one: (one.queued_at, one.job_id)):
        if len(found) >= room:
            break
        expected = starts.get(one.job_id)
        if expected is None or expected.low_at is None or now - one.queued_at < rule.interval_s:
            continue
        wait_s = expected.low_at - now
        if wait_s > one.limit_s:
            wait, limit = format_duration(wait_s), format_duration(one.limit_s)
            found.append(Burst(one.job_id, f"burst to Slurm: expected start in {wait}, limit {limit}"))
    return tuple(found)
