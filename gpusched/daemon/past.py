"""What a run is told of what was before it: the job's last run, and the job that it is the fallback of."""

from __future__ import annotations

from gpusched.model.job import Job, Run
from gpusched.model.states import ReasonCode
from gpusched.ports import JobFilter, Store


def past_environment(job: Job, run: Run, store: Store) -> dict[str, str]:
    """Variables by name; empty for the first run of a plain job, for which the table is not asked."""
    found: dict[str, str] = {}
    if job.restarts:
        earlier = [one for one in store.runs([job.id]) if one.number < run.number and one.start_at is not None]
        if earlier:
            found.update(_previous(earlier[-1]))
    if job.spec.fallback_of is not None:
        for failed in store.jobs(JobFilter(ids=frozenset({job.spec.fallback_of}))):
            found.update(_failed(failed))
    return found


def _previous(run: Run) -> dict[str, str]:
    """How the last run that was started has ended."""
    return _end("GPUSCHED_PREVIOUS_", run.exit_code, run.signal, run.reason, str(run.outcome))


def _failed(job: Job) -> dict[str, str]:
    known = _end("GPUSCHED_", job.exit_code, job.signal, job.reason, str(job.state))
    del known["GPUSCHED_STATE"]  # the fallback's own state is another
    return {"GPUSCHED_FAILED_JOB_ID": job.shown_id, **known}


def _end(prefix: str, code: int | None, signal: int | None, reason: ReasonCode | None, state: str) -> dict[str, str]:
    if code is None and signal is not None:
        code = 128 + signal  # as a shell tells it
    values: dict[str, object] = {"EXIT_CODE": code, "SIGNAL": signal, "REASON": reason, "STATE": state}
    return {prefix + name: str(value) for name, value in values.items() if value is not None}
