"""How new jobs get into the table, whoever makes them."""

from __future__ import annotations

from gpusched.errors import Refused
from gpusched.model.job import Job, JobEvent, JobSpec
from gpusched.model.states import JobState

from .selection import Caller
from .turn import Turn


def check_room(jobs: int, turn: Turn) -> None:
    """Refuse so many new jobs when they would pass the limit. Raises: Refused."""
    known, limit = len(turn.world.jobs), turn.settings.limit.jobs
    if jobs > limit - known:
        raise Refused(
            f"{known} jobs wait or run already and {jobs} more would pass the limit of {limit}",
            "wait for jobs to end, or raise [limit] jobs in the config file",
        )


def new_job(job_id: int, caller: Caller, spec: JobSpec, now: float) -> Job:
    """The row of a job that has just been submitted."""
    queued_at = max(now, spec.begin_at or now)
    return Job(
        id=job_id,
        uid=caller.uid,
        user=caller.user,
        spec=spec,
        state=JobState.PENDING,
        submit_at=now,
        queued_at=queued_at,
        eligible_at=queued_at,
        hold="user" if spec.hold else None,
        tasks_left=None if spec.array is None else spec.array.tasks,
    )


def record(job: Job, text: str, turn: Turn) -> None:
    """Take a new job in, with the first line of its story."""
    if job.spec.dependency:
        turn.world.learn_parents(turn.jobs, [job.spec.dependency])
    turn.put_job(job)
    turn.tell(JobEvent(job.id, turn.now, "submitted", text))
