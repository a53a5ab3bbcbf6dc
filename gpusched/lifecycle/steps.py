"""Steps of a run: what a new one gets of the run's resources, and how one ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.job import GpuShare, Job, Run
from gpusched.model.states import JobState
from gpusched.model.step import JobStep
from gpusched.model.value import replace


def free_gpus(gpus: Sequence[GpuShare], others: Iterable[JobStep]) -> list[GpuShare]:
    """Of a job's GPUs on a node those that no other step has for itself, in the run's order."""
    taken = {share.uuid for step in others if step.is_exclusive and step.has_own_gpus for share in step.gpus}
    return [share for share in gpus if share.uuid not in taken]


def least_used_gpus(gpus: Sequence[GpuShare], others: Sequence[JobStep]) -> list[GpuShare]:
    """A job's GPUs on a node for a step that may share them: first those that the fewest steps asked for."""
    uses = {
        share.uuid: sum(step.has_own_gpus and share.uuid in {one.uuid for one in step.gpus} for step in others)
        for share in gpus
    }
    return sorted(gpus, key=lambda share: uses[share.uuid])


def ended(
    step: JobStep,
    job: Job,
    now: float,
    exit_code: int | None,
    signal: int | None,
    *,
    is_timeout: bool = False,
    is_node_lost: bool = False,
) -> JobStep:
    """The step with the end that its own process has reported."""
    if step.cancel_uid is not None or (signal is not None and job.state is JobState.COMPLETING):
        state = JobState.CANCELLED
    elif is_node_lost:
        state = JobState.NODE_FAIL
    elif is_timeout:
        state = JobState.TIMEOUT
    else:
        state = JobState.FAILED if exit_code or signal is not None else JobState.COMPLETED
    return replace(step, state=state, end_at=max(now, step.start_at), exit_code=exit_code, signal=signal)


def lost(step: JobStep, now: float, *, is_seen: bool = True) -> JobStep:
    """The step after its process was killed, or unseen has ended somehow; what it started is killed as well."""
    return replace(step, state=JobState.CANCELLED, end_at=max(now, step.start_at), signal=9 if is_seen else None)


def may_live_on(step: JobStep) -> bool:
    """Whether a node that did not answer may still run tasks of a step that has ended, until it is told to end them."""
    return bool(step.parts) and step.state in (JobState.NODE_FAIL, JobState.CANCELLED)


def closed(step: JobStep, run: Run) -> JobStep:
    """A step that was open at the end of its run, which no process outlives: its end was not observed."""
    state = JobState.NODE_FAIL if run.outcome is JobState.NODE_FAIL else JobState.CANCELLED
    return replace(step, state=state, end_at=max(step.start_at, run.end_at or step.start_at))
