"""Every legal move of a job from one state to another.

                          SUSPENDED
                           ^     |
                      suspend   resume
                           |     v
    PENDING ----start----> RUNNING ----stop, preempt, leftovers, GPUs not clean----> COMPLETING
       ^                      |                                                          |
       |                      +------------------> finish <------------------------------+
       |                                             |
       +--- retry, requeue, never started -----------+----> a final state

A run that is SUSPENDED may come to its end in every way in which one that is RUNNING may.

`TRANSITIONS` lists them; anything else raises BrokenInvariant. A final state never moves.
"""

from __future__ import annotations

from gpusched.errors import BrokenInvariant
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace

Step = tuple[Job, Run, tuple[JobEvent, ...]]
"""A job and its run after something has happened, and what its story says of it."""

_ENDS = (
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
    JobState.TIMEOUT,
    JobState.OUT_OF_MEMORY,
    JobState.NODE_FAIL,
    JobState.PREEMPTED,
)

LIVE = (JobState.RUNNING, JobState.SUSPENDED)
"""With a run that nobody has begun to end."""

TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    {
        (JobState.PENDING, JobState.RUNNING),
        (JobState.PENDING, JobState.CANCELLED),
        (JobState.PENDING, JobState.DEADLINE),
        (JobState.RUNNING, JobState.SUSPENDED),
        (JobState.SUSPENDED, JobState.RUNNING),
        *((live, JobState.COMPLETING) for live in LIVE),
        *((live, JobState.PENDING) for live in (*LIVE, JobState.COMPLETING)),
        *((live, end) for live in (*LIVE, JobState.COMPLETING) for end in _ENDS),
    }
)


def check_transition(job: Job, to: JobState) -> None:
    """Raises: BrokenInvariant, with the job's story, when the job may not move there."""
    if (job.state, to) not in TRANSITIONS:
        raise BrokenInvariant(f"job {job.id} cannot go from {job.state} to {to} ({story_of(job)})")


def story_of(job: Job) -> str:
    """What a broken invariant says of the job."""
    parts = [f"submitted at {job.submit_at:.3f}", f"run {job.run}"]
    for name in ("start_at", "end_at", "cancel_at", "hold", "exit_code", "signal", "reason"):
        value = getattr(job, name)
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join([*parts, f"failures {job.failures}", f"requeues {job.requeues}"])


def check_open(job: Job, run: Run) -> None:
    """Raises: BrokenInvariant when this is not the open run of the job."""
    is_current = run.job_id == job.id and run.number == job.run
    has_run = job.state in (*LIVE, JobState.COMPLETING)
    if not is_current or not has_run or run.state is RunState.ENDED:
        raise BrokenInvariant(f"run {run.id} ({run.state}) has news, but job {job.id} is {job.state} ({story_of(job)})")


def move(job: Job, to: JobState) -> Job:
    """The job in another state. Raises: BrokenInvariant."""
    check_transition(job, to)
    return replace(job, state=to)


def completing(job: Job) -> Job:
    """A job whose run is being ended; what stands still is let go on to its end.

    `suspended_by` still says of one that made room that it has no cores of its own any more.
    """
    by = "policy" if job.suspended_by == "policy" else None
    return replace(move(job, JobState.COMPLETING), suspended_at=None, suspended_by=by)


def still_s(job: Job, now: float) -> float:
    """How long the job's run has stood still this time, in seconds."""
    return 0.0 if job.suspended_at is None else max(0.0, now - job.suspended_at)
