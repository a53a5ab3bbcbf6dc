"""Who waits for whom, and what is known of those that are waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gpusched.lifecycle.dependencies import (
    Condition,
    Expression,
    Parent,
    Satisfied,
    Verdict,
    evaluate,
    parse_dependency,
)
from gpusched.model.job import Job
from gpusched.model.states import JobState, ReasonCode

from .counterparts import Counterparts
from .namesakes import Namesakes

_FREE = Satisfied()


class Dependents:
    """Jobs with a dependency and their parents, ended ones included; nothing of jobs without one."""

    def __init__(self, counterparts: Counterparts) -> None:
        self._counterparts = counterparts
        self._array_of: dict[int, int] = {}
        """Of tasks that wait by themselves: what their array waits for, they wait for too."""
        self._expressions: dict[int, Expression] = {}
        self._children: dict[int, set[int]] = {}
        self._parents: dict[int, Parent] = {}
        self._names: dict[int, frozenset[int]] = {}
        """What the dependency of each job names, arrays of tasks included; beside those that are followed here, also
        the arrays that are followed task by task."""
        self._named: Counter[int] = Counter()
        self._namesakes = Namesakes()
        self._singletons: set[int] = set()
        self._touched: set[int] = set()
        """Jobs whose dependency may have come true, or never will, since somebody asked last."""

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._expressions

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._expressions))

    def learn(self, parents: Mapping[int, Parent]) -> None:
        """Remember the states of jobs that others are about to depend on."""
        self._parents.update(parents)

    def unknown(self, ids: Iterable[int]) -> set[int]:
        """Those of these jobs that nobody follows, so that what was once learned of them may be out of date."""
        return {job_id for job_id in ids if job_id not in self._children}

    def watch(self, job: Job, jobs: Mapping[int, Job]) -> None:
        """Follow the parents of a job, if it names any; `jobs` are the active ones.

        Of one that runs, too: it may wait again, and what it has waited for must be known then.
        """
        if not job.spec.dependency or job.id in self._expressions:
            return
        if job.array_id is not None and job.run:
            # It has started once: what its array waited for has come true.
            return
        written = parse_dependency(job.spec.dependency)
        named = (found for one in written.conditions for found in (one.job_id, one.array_id) if found)
        self._names[job.id] = frozenset(named)
        self._named.update(self._names[job.id])
        expression = self._counterparts.watch(job, written)
        if job.array_id is not None:
            expression, counterparts = self._counterparts.of_task(job, expression)
            self._parents.update(counterparts)
        self._expressions[job.id] = expression
        self._touched.add(job.id)
        if job.array_id is not None:
            self._array_of[job.id] = job.array_id
        if expression.is_singleton:
            self._singletons.add(job.id)
            self._namesakes.begin(jobs.values())
            self._namesakes.follow(job)
        for parent_id in expression.job_ids:
            self._children.setdefault(parent_id, set()).add(job.id)
            parent = jobs.get(parent_id)
            if parent is not None:
                self._parents[parent_id] = parent_of(parent)

    def forget(self, job_id: int) -> None:
        """The job has ended or depends on something else: its parents are followed no more for its sake."""
        expression = self._expressions.pop(job_id, None)
        for named in self._names.pop(job_id, ()):
            self._named[named] -= 1
            if not self._named[named]:
                del self._named[named]
        self._array_of.pop(job_id, None)
        self._counterparts.forget(job_id)
        if job_id in self._singletons:
            self._singletons.discard(job_id)
            if not self._singletons:
                self._namesakes.end()
        for parent_id in expression.job_ids if expression is not None else ():
            children = self._children.get(parent_id)
            if children is None:
                continue
            children.discard(job_id)
            if not children:
                del self._children[parent_id]
                self._parents.pop(parent_id, None)

    def follow(self, job: Job) -> None:
        """A job has changed: those that wait for it have to be looked at."""
        self._counterparts.follow(job)
        children = self._children.get(job.id)
        if children:
            self._parents[job.id] = parent_of(job)
            self._touched.update(children)
        if self._singletons:
            self._touched.update(self._singletons.intersection(self._namesakes.follow(job)))

    def touch_all(self) -> None:
        """Every job with a dependency has to be looked at again."""
        self._touched.update(self._expressions)

    def take_touched(self) -> list[int]:
        """Jobs to look at since the last call, by id."""
        touched, self._touched = self._touched, set()
        touched.update([task for task, array_id in self._array_of.items() if array_id in touched])
        return sorted(touched)

    def state(self, job_id: int) -> Verdict:
        """Satisfied, Waiting or Never, as of what is known of the parents."""
        expression = self._expressions.get(job_id)
        if expression is None:
            return _FREE
        earlier = self._earlier(job_id)
        return evaluate(expression, self._parents.get, earlier)

    def _earlier(self, job_id: int) -> int | None:
        """The first earlier job of the same owner and name that a singleton waits for; a task stands where its array
        does."""
        if job_id not in self._singletons:
            return None
        return self._namesakes.earlier(self._array_of.get(job_id, job_id))

    def free_at(self, job_id: int) -> float:
        """When the last of the named jobs that it waited for let it go; 0 when it names none that is known."""
        expression = self._expressions.get(job_id)
        if expression is None:
            return 0.0
        found = [
            at
            for condition in expression.conditions
            if (parent := self._parents.get(condition.job_id)) is not None
            and (at := parent.start_at if condition.kind == "after" else parent.end_at) is not None
        ]
        return (min if expression.is_any else max)(found, default=0.0)

    def watched(self, job_id: int) -> tuple[Expression, dict[int, Parent]]:
        """The dependency of a job that has one, by jobs alone, and what is known of those.

        `singleton` becomes the end of the next earlier job of the same name, which waits for those before it or
        runs beside them.
        """
        expression = self._expressions[job_id]
        known = {parent: self._parents[parent] for parent in expression.job_ids if parent in self._parents}
        if not expression.is_singleton:
            return expression, known
        earlier = self._earlier(job_id)
        named = tuple(condition for condition in expression.conditions if condition.job_id)
        if earlier is not None:
            named = (*named, Condition("afterany", earlier))
            known.setdefault(earlier, _UNFINISHED)
        return Expression(named, expression.is_any), known

    def children_of(self, job_id: int) -> tuple[int, ...]:
        """Jobs that name this one in their dependency, by id."""
        return tuple(sorted(self._children.get(job_id, ())))

    def is_named(self, job_id: int) -> bool:
        """Whether an unfinished job names this one, or a task of this array, in its dependency."""
        return job_id in self._named

    def is_singleton(self, job_id: int) -> bool:
        """Whether the job waits for all earlier ones of its owner and name."""
        return job_id in self._singletons

    def parents(self) -> list[int]:
        """Jobs that others name, by id."""
        return sorted(self._children)

    def edges(self) -> dict[int, frozenset[int]]:
        """Which jobs each waiting job names, or has to let go first by `singleton`."""
        found = {job_id: frozenset(expression.job_ids) for job_id, expression in self._expressions.items()}
        for line in self._namesakes.lines() if self._singletons else ():
            before: list[int] = []
            for job_id in line:
                if job_id in self._singletons:
                    found[job_id] |= frozenset(before)
                    # Whoever comes later waits for this one, and with it for those before.
                    before = []
                before.append(job_id)
        return found


_UNFINISHED = Parent(JobState.PENDING)


def parent_of(job: Job) -> Parent:
    """What dependencies look at in a job."""
    is_left_out = job.state.is_final and job.reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    return Parent(job.state, job.start_at, job.end_at, is_left_out)
