"""Arrays: one row for many tasks until a task splits off.

The row of the array has an id and no run; its tasks have the ids directly after it, in the order of their numbers,
with or without rows of their own. A task gets its row when it starts, or when a command applies to it alone. The row
of the array ends after all of its tasks, so that other jobs can depend on it as on a job.

    PENDING      some task has no row yet
    RUNNING      every task has a row, and not all have ended
    COMPLETING   the tasks without a row will never get one; others have not ended
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpusched.model.job import ArraySpec, Job, JobEvent, JobSpec
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.tasks import TaskSet, tasks_of
from gpusched.model.value import replace

_STOPPED_AS = {ReasonCode.DEADLINE: JobState.DEADLINE, ReasonCode.MAX_FAILS: JobState.FAILED}
"""Final state of an array whose tasks were given up, by reason; CANCELLED for other reasons."""


@dataclass(slots=True)
class TasksEnded:
    """Number of ended tasks by state, and their highest exit code."""

    states: Counter[JobState] = field(default_factory=Counter)
    exit_code: int | None = None

    def add(self, state: JobState, exit_code: int | None, tasks: int = 1) -> None:
        self.states[state] += tasks
        if exit_code is not None:
            self.exit_code = max(exit_code, self.exit_code or 0)

    @property
    def failed(self) -> int:
        """Number of tasks that neither completed nor were cancelled."""
        return self.states.total() - self.states[JobState.COMPLETED] - self.states[JobState.CANCELLED]


def all_tasks(array: Job) -> TaskSet:
    """All tasks as submitted."""
    assert array.spec.array is not None
    return tasks_of(array.spec.array.tasks)


def tasks_left(array: Job) -> TaskSet:
    """The tasks without a row of their own."""
    return tasks_of(array.tasks_left or "")


def task_id(array: Job, task: int) -> int:
    """Id of a task. Raises: ValueError if the array has no such task."""
    return array.id + 1 + all_tasks(array).position(task)


def task_number(array: Job, job_id: int) -> int | None:
    """Number of the task with this id; None if it is not in this array."""
    position = job_id - array.id - 1
    tasks = all_tasks(array)
    return tasks.at(position) if 0 <= position < len(tasks) else None


def task(array: Job, number: int) -> Job:
    """Make the row of a task at its split: not started, even if other tasks have; ended if it never will."""
    spec = array.spec
    if spec.array is not None and spec.array.sweep:
        spec = replace(spec, name=swept_name(spec.name, spec.array, number))
    return replace(
        array,
        id=task_id(array, number),
        spec=spec,
        array_id=array.id,
        task=number,
        tasks_left=None,
        start_at=None,
        state=state_left(array),
        end_at=array.cancel_at if array.state is JobState.COMPLETING else array.end_at,
    )


def state_left(array: Job) -> JobState:
    """State of the tasks without a row: once they were given up, they have ended, while others may still run."""
    if array.state is not JobState.COMPLETING:
        return array.state
    return JobState.CANCELLED if array.reason is None else _STOPPED_AS.get(array.reason, JobState.CANCELLED)


def split(array: Job, numbers: Iterable[int], start_at: float | None) -> Job:
    """The array after these tasks received rows of their own; `start_at` is the start of the first task."""
    left = tasks_left(array).minus(numbers)
    state = JobState.RUNNING if array.state is JobState.PENDING and not left else array.state
    return replace(
        array,
        tasks_left=str(left),
        state=state,
        start_at=array.start_at if array.start_at is not None else start_at,
    )


def stop(
    array: Job, now: float, code: ReasonCode, text: str, cancelled_by: str | None = None
) -> tuple[Job, tuple[JobEvent, ...]]:
    """Give up the tasks without a row; no effect if already given up."""
    if array.state is JobState.COMPLETING or array.state.is_final:
        return array, ()
    array = replace(
        array,
        state=JobState.COMPLETING,
        cancel_at=now,
        cancelled_by=cancelled_by,
        reason=code,
        reason_text=text,
    )
    return array, (JobEvent(array.id, now, "stopping", text),)


def settle(array: Job, ended: TasksEnded, has_open: bool, now: float) -> tuple[Job, tuple[JobEvent, ...]]:
    """Update the array after tasks ended: stop it after too many failures, end it, or leave it unchanged."""
    assert array.spec.array is not None
    most = array.spec.array.max_fails
    if most is not None and ended.failed > most and array.state in (JobState.PENDING, JobState.RUNNING):
        text = f"{ended.failed} of its tasks failed, and --max-fails is {most}"
        return stop(array, now, ReasonCode.MAX_FAILS, text)
    if has_open or (array.state is JobState.PENDING and array.tasks_left):
        return array, ()
    state, code = _outcome(array, ended.states)
    text = summary(ended.states, len(tasks_left(array)))
    if array.cancel_at is not None and array.reason_text:
        text = f"{array.reason_text} ({text})"
    array = replace(array, state=state, end_at=now, exit_code=ended.exit_code, reason=code, reason_text=text)
    return array, (JobEvent(array.id, now, "ended", f"{state}: {text}"),)


def _outcome(array: Job, states: Mapping[JobState, int]) -> tuple[JobState, ReasonCode]:
    """COMPLETED if all tasks are, else CANCELLED; with other end states, that one, or FAILED for several."""
    if array.cancel_at is not None:
        code = array.reason or ReasonCode.CANCELLED_BY_USER
        return _STOPPED_AS.get(code, JobState.CANCELLED), code
    others = {state for state, count in states.items() if count and state is not JobState.COMPLETED}
    if not others:
        return JobState.COMPLETED, ReasonCode.NONE
    bad = others - {JobState.CANCELLED}
    if not bad:
        return JobState.CANCELLED, ReasonCode.CANCELLED_BY_USER
    return (bad.pop() if len(bad) == 1 else JobState.FAILED), ReasonCode.TASK_FAILED


def summary(states: Mapping[JobState, int], left: int = 0) -> str:
    """`8 COMPLETED, 2 FAILED, 90 never started`."""
    parts = [f"{states[state]} {state}" for state in JobState if states.get(state)]
    if left:
        parts.append(f"{left} never started")
    return ", ".join(parts) or "no tasks"


# --- sweeps -----------------------------------------------------------------------------------------


def swept(array: ArraySpec, task: int) -> dict[str, str]:
    """Names and values of one task of a sweep; the last name changes fastest."""
    left = task
    found: dict[str, str] = {}
    for name, values in reversed(array.sweep):
        left, index = divmod(left, len(values))
        found[name] = values[index]
    return {name: found[name] for name, _ in array.sweep}


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace `{name}` by its value, only for names of the sweep.

    Leaves `${name}` to the shell, which reads the value from the environment.
    """
    return PLACE.sub(lambda found: values.get(found[1], found[0]), text) if "{" in text else text


PLACE = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Placeholder for a value in a text."""


def swept_name(name: str, array: ArraySpec, task: int) -> str:
    """Name of a task: its values fill the placeholders, or are appended without any."""
    values = swept(array, task)
    filled = fill(name, values)
    if filled != name:
        return filled
    return f"{name} " + " ".join(f"{key}={value}" for key, value in values.items())


def job_count(job: Job) -> int:
    """Number of jobs in a row: an array counts its tasks without a row as long as these can start."""
    if not job.is_array:
        return 1
    return len(tasks_left(job)) if job.state is JobState.PENDING else 0


def jobs_in(spec: JobSpec) -> int:
    """Number of jobs in a submission: an array counts each task."""
    return 1 if spec.array is None else len(tasks_of(spec.array.tasks))
