"""Arrays: one row for many tasks until a task splits off.

The row of the array has an id and no run; its tasks have the ids right behind it, in the order of their numbers,
whether they have a row of their own yet or not. A task gets its row when it starts, or when something is done to it
alone. The row of the array ends when all of its tasks have ended, so that others can wait for it as for a job.

    PENDING      some task has no row yet
    RUNNING      every task has a row, and not all have ended
    COMPLETING   the tasks without a row never will have one; others have not ended
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
"""What an array ends as whose tasks were given up, by the reason; CANCELLED for the others."""


@dataclass(slots=True)
class TasksEnded:
    """How many tasks have ended, by state, and the largest of their exit codes."""

    states: Counter[JobState] = field(default_factory=Counter)
    exit_code: int | None = None

    def add(self, state: JobState, exit_code: int | None, tasks: int = 1) -> None:
        """Count tasks that ended so."""
        self.states[state] += tasks
        if exit_code is not None:
            self.exit_code = max(exit_code, self.exit_code or 0)

    @property
    def failed(self) -> int:
        """Tasks that have neither completed nor been cancelled."""
        return self.states.total() - self.states[JobState.COMPLETED] - self.states[JobState.CANCELLED]


def all_tasks(array: Job) -> TaskSet:
    """The tasks that were submitted."""
    assert array.spec.array is not None
    return tasks_of(array.spec.array.tasks)


def tasks_left(array: Job) -> TaskSet:
    """The tasks without a row of their own."""
    return tasks_of(array.tasks_left or "")


def task_id(array: Job, task: int) -> int:
    """Id of a task. Raises: ValueError when the array has none of this number."""
    return array.id + 1 + all_tasks(array).position(task)


def task_number(array: Job, job_id: int) -> int | None:
    """Number of the task with this id; None when it is none of this array."""
    position = job_id - array.id - 1
    tasks = all_tasks(array)
    return tasks.at(position) if 0 <= position < len(tasks) else None


def task(array: Job, number: int) -> Job:
    """The row of a task, as it is when it splits off: others may have started, this one has not."""
    spec = array.spec
    if spec.array is not None and spec.array.sweep:
        spec = replace(spec, name=swept_name(spec.name, spec.array, number))
    return replace(
        array, id=task_id(array, number), spec=spec, array_id=array.id, task=number, tasks_left=None, start_at=None
    )


def split(array: Job, numbers: Iterable[int], start_at: float | None) -> Job:
    """The array when these tasks have rows of their own; `start_at` is the start of the first task that did."""
    left = tasks_left(array).minus(numbers)
    state = JobState.RUNNING if array.state is JobState.PENDING and not left else array.state
    return replace(
        array,
        tasks_left=str(left),
        state=state,
        start_at=array.start_at if array.start_at is not None else start_at,
    )


def stop(array: Job, now: float, code: ReasonCode, text: str) -> tuple[Job, tuple[JobEvent, ...]]:
    """Give up the tasks that have no row. One that is given up already stays so."""
    if array.state is JobState.COMPLETING or array.state.is_final:
        return array, ()
    array = replace(array, state=JobState.COMPLETING, cancel_at=now, reason=code, reason_text=text)
    return array, (JobEvent(array.id, now, "stopping", text),)


def settle(array: Job, ended: TasksEnded, has_open: bool, now: float) -> tuple[Job, tuple[JobEvent, ...]]:
    """The array as it is now that tasks have ended: stopped for too many failures, ended, or unchanged."""
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
    """COMPLETED only when all of its tasks have; else what its tasks ended as, FAILED where that differs."""
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
    """Names and values of a task of a sweep; the last name changes fastest."""
    left = task
    found: dict[str, str] = {}
    for name, values in reversed(array.sweep):
        left, index = divmod(left, len(values))
        found[name] = values[index]
    return {name: found[name] for name, _ in array.sweep}


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text with `{name}` replaced by the value, for the names of the sweep and nothing else.

    `${name}` is the shell's, which finds the value in the environment.
    """
    return PLACE.sub(lambda found: values.get(found[1], found[0]), text) if "{" in text else text


PLACE = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Where a text has room for a value."""


def swept_name(name: str, array: ArraySpec, task: int) -> str:
    """The name of a task: with its values in the places that it has for them, or else behind it."""
    values = swept(array, task)
    filled = fill(name, values)
    if filled != name:
        return filled
    return f"{name} " + " ".join(f"{key}={value}" for key, value in values.items())


def job_count(job: Job) -> int:
    """How many jobs a row stands for: an array for its tasks without a row as long as these may start."""
    if not job.is_array:
        return 1
    return len(tasks_left(job)) if job.state is JobState.PENDING else 0


def jobs_in(spec: JobSpec) -> int:
    """How many jobs a submission makes: of an array each task is one."""
    return 1 if spec.array is None else len(tasks_of(spec.array.tasks))
