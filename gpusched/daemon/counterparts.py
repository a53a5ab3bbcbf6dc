"""Arrays whose tasks wait for the task of the same number in another array (`aftercorr`).

A task that has no counterpart there waits for the whole of the other array. With `?` a dependency is for all tasks at
once, so that it is not followed task by task. A task that has a row of its own before it starts waits for its
counterpart as for any job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpusched.lifecycle import arrays
from gpusched.lifecycle.dependencies import Condition, Expression, Parent
from gpusched.model.job import Job
from gpusched.model.states import JobState
from gpusched.model.tasks import TaskSet

from .arrays import Arrays

CORR = "aftercorr"
_PARENTS = {
    None: Parent(JobState.PENDING),
    True: Parent(JobState.COMPLETED, end_at=0.0),
    False: Parent(JobState.FAILED, end_at=0.0),
}
"""What a counterpart is to those who wait for it, by whether it COMPLETED; None when it has not ended."""


class Counterparts:
    """Which tasks may start, as far as the tasks elsewhere let them. Keeps nothing of other jobs."""

    def __init__(self, groups: Arrays) -> None:
        self._groups = groups
        self._parents: dict[int, tuple[int, ...]] = {}
        """The arrays that each array follows task by task."""
        self._children: dict[int, set[int]] = {}
        self._ended: dict[int, dict[int, bool]] = {}
        """Of arrays that are followed: whether each task that has ended COMPLETED."""
        self._whole: dict[int, bool] = {}
        """Of those that have ended: whether they COMPLETED."""
        self._all: dict[int, TaskSet] = {}
        """The tasks that they have."""
        self._hopeless: dict[int, dict[int, int]] = {}
        """Tasks that never will start, by array and number, with the array that decided it."""
        self._touched: set[int] = set()

    def learn(self, array: Job, tasks: Iterable[Job]) -> None:
        """Remember how the tasks of an array have ended that others are about to follow."""
        ended = self._ended.setdefault(array.id, {})
        self._all[array.id] = arrays.all_tasks(array)
        for task in tasks:
            if task.state.is_final and task.task is not None:
                ended[task.task] = task.state is JobState.COMPLETED
        if array.state.is_final:
            self._whole[array.id] = array.state is JobState.COMPLETED
            ended.update(dict.fromkeys(arrays.tasks_left(array), False))

    def watch(self, array: Job, expression: Expression) -> Expression:
        """Follow the arrays that this one names so; returns what is left of its dependency for all of it at once."""
        followed = tuple(
            condition.job_id
            for condition in expression.conditions
            if condition.kind == CORR and condition.job_id in self._ended
        )
        if not followed or not array.is_array or expression.is_any:
            return expression
        self._parents[array.id] = followed
        for parent in followed:
            self._children.setdefault(parent, set()).add(array.id)
        group = self._groups.group(array.id)
        group.ready = set()
        for number in group.left:
            self._look(array.id, number)
        rest = tuple(one for one in expression.conditions if not (one.kind == CORR and one.job_id in followed))
        return Expression(rest, expression.is_any)

    def forget(self, array_id: int) -> None:
        """The array has ended or waits for something else."""
        for parent in self._parents.pop(array_id, ()):
            self._children[parent].discard(array_id)
            self._let_go(parent)
        self._hopeless.pop(array_id, None)
        if array_id in self._groups:
            self._groups.group(array_id).ready = None

    def _let_go(self, parent: int) -> None:
        """Forget how the tasks of an array end that nobody follows."""
        if not self._children.get(parent):
            self._children.pop(parent, None)
            self._ended.pop(parent, None)
            self._whole.pop(parent, None)
            self._all.pop(parent, None)

    def of_task(self, task: Job, expression: Expression) -> tuple[Expression, dict[int, Parent]]:
        """What a task with a row of its own waits for, by its counterparts' ids, and what is known of those."""
        number = task.task
        if number is None or expression.is_any:
            return expression, {}
        conditions: list[Condition] = []
        known: dict[int, Parent] = {}
        for one in expression.conditions:
            if one.kind == CORR and number in self._all.get(one.job_id, ()):
                place = one.job_id + 1 + self._all[one.job_id].position(number)
                has_completed = self._ended[one.job_id].get(number, self._whole.get(one.job_id))
                known[place] = _PARENTS[has_completed]
                one = Condition("afterok", place, task=f"{one.job_id}_{number}")
            conditions.append(one)
        return Expression(tuple(conditions)), known

    def follow(self, job: Job) -> None:
        """A job has changed: the tasks that wait for this one, or for one that it will never have, are looked at."""
        array_id = job.array_id if job.array_id is not None else job.id
        if array_id not in self._children or not job.state.is_final:
            return
        ended = self._ended[array_id]
        if job.task is not None:
            ended[job.task] = job.state is JobState.COMPLETED
            for child in self._children[array_id]:
                self._look(child, job.task)
            return
        self.learn(job, ())
        for child in self._children[array_id]:
            for number in self._groups.group(child).left:
                self._look(child, number)

    def _look(self, array_id: int, number: int) -> None:
        group = self._groups.group(array_id)
        if number not in group.left or group.ready is None:
            return
        states = [self._ended[parent].get(number, self._whole.get(parent)) for parent in self._parents[array_id]]
        if False in states:
            self._hopeless.setdefault(array_id, {})[number] = self._parents[array_id][states.index(False)]
        elif None not in states and number not in group.ready:
            group.ready.add(number)
            self._touched.add(array_id)

    def take_touched(self) -> list[int]:
        """Arrays with tasks that may start now and might not before, by id."""
        # Learned for somebody who then did not follow it task by task.
        for parent in self._ended.keys() - self._children.keys():
            self._let_go(parent)
        touched, self._touched = sorted(self._touched), set()
        return touched

    def take_hopeless(self) -> Mapping[int, Mapping[int, int]]:
        """Tasks that never will start: array and number to the array that decided it."""
        found, self._hopeless = self._hopeless, {}
        return found
