"""The fallback of a failed job (`--fallback`): a separate job, queued directly after the failed one.

The failed job keeps its final state; both refer to each other. A fallback has no fallback and is not retried.
"""

from __future__ import annotations

from gpusched.model.job import Job, JobEvent, JobSpec, RetryRule
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.model.variants import pending_again

FAILURES = frozenset({JobState.FAILED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY, JobState.NODE_FAIL})
"""Final states that trigger a fallback. A cancelled or preempted job was ended on purpose, and past its deadline a
fallback comes too late."""

_LONGEST_NAME = 200
_SUFFIX = "-fallback"
_OWN_FILE = ("%j", "%J", "%A")


def wants_fallback(job: Job) -> bool:
    """Whether the job has failed for good and requested a fallback that does not exist yet.

    The row of an array has no runs: its tasks have fallbacks of their own.
    """
    return (
        job.spec.fallback is not None
        and job.state in FAILURES
        and job.cancel_at is None
        and job.fallback_id is None
        and not job.is_array
    )


def make_fallback(job: Job, job_id: int, now: float, default_output: str) -> tuple[Job, Job, tuple[JobEvent, ...]]:
    """Make the fallback: returns the failed job with its fallback's id, the fallback, and events for both histories.

    The fallback has the job's last request and inherits the start of its age, so that it takes the job's place in the
    queue; after a timeout, when the job had its full time, its age starts now. It belongs to the job's pipeline, and is
    held if the job was.

    Args: default_output: output pattern of a job without one.
    """
    text = f"fallback of job {job.shown_id}, which ended as {job.state}: {job.reason_text or job.reason}"
    made = Job(
        id=job_id,
        uid=job.uid,
        user=job.user,
        spec=_spec(job, default_output),
        state=JobState.PENDING,
        submit_at=now,
        queued_at=now if job.state is JobState.TIMEOUT else job.queued_at,
        eligible_at=now,
        hold=job.hold,
    )
    failed = replace(job, fallback_id=job_id)
    return (
        failed,
        made,
        (
            JobEvent(job.id, now, "fallback", f"its fallback is job {job_id}"),
            JobEvent(job_id, now, "submitted", text),
        ),
    )


def _spec(job: Job, default_output: str) -> JobSpec:
    spec = pending_again(job).spec
    assert spec.fallback is not None
    launch = replace(
        spec.launch,
        argv=("/bin/sh", "-c", spec.fallback),
        script_sha=None,
        script_name="fallback",
        script_path=None,
        stdout=_beside(spec.launch.stdout, default_output),
        stderr=None if spec.launch.stderr is None else _beside(spec.launch.stderr, default_output),
        notice=None,
    )
    return replace(
        spec,
        name=spec.name[: _LONGEST_NAME - len(_SUFFIX)] + _SUFFIX,
        launch=launch,
        retry=RetryRule(requeue=spec.retry.requeue),
        begin_at=None,
        dependency=None,
        hold=False,
        # The failed job may have used up the time: a late fallback is better than none.
        deadline_at=None,
        array=None,
        fallback=None,
        interactive=None,
        adopted=None,
        key=None,
        fallback_of=job.id,
    )


def _beside(pattern: str | None, default: str) -> str | None:
    """A separate log, to preserve that of the failed job."""
    shown = default if pattern is None else pattern
    if shown.startswith("/dev/") or any(word in shown for word in _OWN_FILE):
        return pattern
    return shown + ".fallback"
