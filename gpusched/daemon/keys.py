"""Submissions with a key: whoever submits the same key again finds the job of the first time.

A key stands for one piece of work of one user: what is run, and where. The same work with other terms (GPUs,
time, queue) is the same piece of work; another program under the same key is a mistake and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpusched.errors import Refused
from gpusched.model.commands import ENDED, FAILED, Caller
from gpusched.model.job import AUTO, Job, JobSpec, Launch, Request, RetryRule
from gpusched.model.states import JobState
from gpusched.model.units import printable

from .admitting import completed
from .turn import Turn

_WORK = ("argv", "script_sha", "work_dir", "submit_dir")
_TERMS = {
    "request": tuple(Request.__struct_fields__),
    "retry": tuple(RetryRule.__struct_fields__),
    # The environment differs from shell to shell, and says little about what is asked for.
    "launch": tuple(name for name in Launch.__struct_fields__ if name not in (*_WORK, "env_sha", "umask")),
}
_SPEC_TERMS = tuple(name for name in JobSpec.__struct_fields__ if name not in (*_TERMS, "key", "snapshot", "array"))


def job_of(uid: int, key: str, turn: Turn) -> Job | None:
    """The newest job of this user with this key, those of this very turn included."""
    job_id = turn.keys.get((uid, key))
    if job_id is not None:
        return turn.changes.jobs[job_id]
    stored = turn.store.job_of_key(uid, key)
    # The table is behind what this turn has done already.
    return stored and turn.changes.jobs.get(stored.id, stored)


def existing(spec: JobSpec, again: str, caller: Caller, turn: Turn) -> dict[str, Any] | None:
    """The answer to a submission whose key has a job; None when it makes a new one.

    Raises: Refused when the key stands for other work.
    """
    job = None if spec.key is None else job_of(caller.uid, spec.key, turn)
    if job is None or (job.state.is_final and _is_over(job.state, again)):
        return None
    shown = f"the key {printable(repr(spec.key), 80)} belongs to job {job.shown_id}"
    for what, ours, theirs in _work(spec, job.spec):
        if ours != theirs:
            raise Refused(
                f"{shown}, which has another {what}",
                f"see it with: gshow {job.shown_id}, and submit this with a --key of its own",
            )
    left_out = {"time_limit_source"}
    if spec.time_limit_source == AUTO:
        # More has been learned since, and that is no other wish.
        left_out.add("time_limit_s")
    differs = sorted({*_differences(completed(spec, caller, turn.settings), job.spec)} - left_out)
    return {"ids": [job.id], "existing": True, "differs": differs}


def _is_over(state: JobState, again: str) -> bool:
    return again == ENDED or (again == FAILED and state is not JobState.COMPLETED)


def _work(ours: JobSpec, theirs: JobSpec) -> Iterator[tuple[str, object, object]]:
    yield "script", ours.launch.script_sha, theirs.launch.script_sha
    yield "command line", ours.launch.argv, theirs.launch.argv
    # A snapshot of changed code is in another folder, and the work is still that of the same place.
    yield "working directory", _folder(ours.launch), _folder(theirs.launch)
    yield "set of tasks", ours.array, theirs.array


def _folder(launch: Launch) -> str:
    return launch.submit_dir or launch.work_dir


def _differences(ours: JobSpec, theirs: JobSpec) -> Iterator[str]:
    """Names of the terms that are not the same."""
    for part, names in _TERMS.items():
        one, other = getattr(ours, part), getattr(theirs, part)
        yield from (name for name in names if getattr(one, name) != getattr(other, name))
    yield from (name for name in _SPEC_TERMS if getattr(ours, name) != getattr(theirs, name))
