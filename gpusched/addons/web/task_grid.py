"""The tasks of an array on its page: a square for each, colored by its state, and a table. Pure: values to shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpusched.model.states import JobState
from gpusched.model.tasks import TaskSet, tasks_of

MOST_SQUARES = 1000
"""Tasks of one array that its page asks for."""
MOST_ROWS = 100
TASK_FIELDS = "id,state,start_at,end_at,exit_code,signal,reason,reason_text,node"
_STATES = [state.value for state in JobState]
EVERY_STATE = ",".join(_STATES)
_PER_LINE = 50
_SIDE, _STEP = 10, 12
"""Of a square, and from one to the next."""
_GOOD = frozenset({JobState.COMPLETED.value, JobState.CANCELLED.value})
_FIRST = (JobState.RUNNING.value, JobState.SUSPENDED.value, JobState.COMPLETING.value)


@dataclass(frozen=True, slots=True)
class TaskGrid:
    """What the page of an array shows of its tasks."""

    squares: tuple[tuple[str, str], ...]
    """Path in an SVG of the squares of each state."""
    width: int
    height: int
    first: str
    last: str
    rows: tuple[Mapping[str, Any], ...]
    """Those that failed, then those that run, then the ones that ended last; none that is pending."""
    more: int
    """Further ones that have started."""
    left_out: int
    """Tasks without a square."""


def asked_ids(array_id: str, tasks: str) -> tuple[str, int]:
    """Ids of the first tasks of an array for GET /v1/history, and the number of those beyond them."""
    every = tasks_of(tasks.partition("%")[0])
    shown = TaskSet.of(islice(every, MOST_SQUARES))
    return f"{array_id}_[{shown}]", len(every) - len(shown)


def task_grid(fields: Sequence[str], rows: Iterable[Sequence[Any]], left_out: int) -> TaskGrid | None:
    """Squares in the order of task numbers, and the table; None without any task."""
    tasks = [dict(zip(fields, row, strict=True)) for row in rows]
    tasks.sort(key=_number)
    if not tasks:
        return None
    paths: dict[str, list[str]] = {}
    for place, task in enumerate(tasks):
        line, column = divmod(place, _PER_LINE)
        paths.setdefault(task["state"], []).append(f"M{column * _STEP} {line * _STEP}h{_SIDE}v{_SIDE}h-{_SIDE}z")
    started = sorted((task for task in tasks if task["start_at"] is not None), key=_urgency)
    return TaskGrid(
        tuple((state, "".join(paths[state])) for state in sorted(paths, key=_STATES.index)),
        _STEP * min(len(tasks), _PER_LINE),
        _STEP * -(-len(tasks) // _PER_LINE),
        tasks[0]["id"],
        tasks[-1]["id"],
        tuple(started[:MOST_ROWS]),
        max(0, len(started) - MOST_ROWS),
        left_out,
    )


def _number(task: Mapping[str, Any]) -> int:
    return int(task["id"].rpartition("_")[2])


def _urgency(task: Mapping[str, Any]) -> tuple[int, float, int]:
    state = task["state"]
    if state in _FIRST:
        return 1, 0.0, _number(task)
    return (2 if state in _GOOD else 0), -(task["end_at"] or 0.0), _number(task)
