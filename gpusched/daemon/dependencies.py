"""Dependencies in memory: which jobs wait for which, the state of parents, and inherited urgency.

`Dependents` follows named jobs, `Singletons` earlier jobs of the same name (`singleton`), `TaskDependencies`
arrays whose tasks wait for the task of the same number in another array (`aftercorr`), and `Inheritance` the
urgency that jobs pass on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from gpusched.daemon.indexes import ArrayIndex
from gpusched.lifecycle import arrays
from gpusched.lifecycle.dependencies import (
    IMAGE,
    Condition,
    Expression,
    Parent,
    Satisfied,
    Verdict,
    awaiting_image,
    evaluate,
    parse_dependency,
)
from gpusched.model.job import Job
from gpusched.model.snapshot import Urgency
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.tasks import TaskSet

_FREE = Satisfied()


class Dependents:
    """Jobs with a dependency and their parents, including ended ones; keeps nothing about other jobs."""

    def __init__(self, counterparts: TaskDependencies) -> None:
        self._counterparts = counterparts
        self._array_of: dict[int, int] = {}
        """Array of each task with its own row that has not started: the task waits for the array's parents too."""
        self._expressions: dict[int, Expression] = {}
        self._children: dict[int, set[int]] = {}
        self._parents: dict[int, Parent] = {}
        self._names: dict[int, frozenset[int]] = {}
        """Jobs that each dependency names, including arrays of named tasks: the jobs followed here and
        the arrays that are followed task by task."""
        self._named: Counter[int] = Counter()
        self.highest_named = 0
        """Highest id that was ever named, of a job or not."""
        self._namesakes = Singletons()
        self._singletons: set[int] = set()
        self._touched: set[int] = set()
        """Jobs whose dependency may have become satisfied, or unsatisfiable, since the last call."""

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._expressions

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._expressions))

    def learn(self, parents: Mapping[int, Parent]) -> None:
        """Remember the states of future parents."""
        self._parents.update(parents)

    def unknown(self, ids: Iterable[int]) -> set[int]:
        """The given ids that no job follows, so that their known state may be out of date."""
        return {job_id for job_id in ids if job_id not in self._children}

    def watch(self, job: Job, jobs: Mapping[int, Job]) -> None:
        """Follow the parents of a job, if it names any; `jobs` are the active ones.

        Running jobs are followed too: they may return to the queue and need the state of their parents then.
        """
        pull = job.spec.image_job
        if (not job.spec.dependency and pull is None) or job.id in self._expressions:
            return
        # The dependency of its array was satisfied.
        is_free = has_started(job)
        if is_free and pull is None:
            return
        written = parse_dependency(job.spec.dependency) if job.spec.dependency and not is_free else Expression(())
        named = (found for one in written.conditions for found in (one.job_id, one.array_id) if found)
        self._names[job.id] = frozenset(named if pull is None else (*named, pull))
        self._named.update(self._names[job.id])
        self.highest_named = max(self.highest_named, *self._names[job.id], 0)
        expression = self._counterparts.watch(job, written)
        if job.array_id is not None and not is_free:
            expression, counterparts = self._counterparts.of_task(job, expression)
            self._parents.update(counterparts)
        if pull is not None:
            expression = awaiting_image(expression, pull)
        self._expressions[job.id] = expression
        self._touched.add(job.id)
        if job.array_id is not None and not is_free:
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

    def is_outgrown(self, job: Job) -> bool:
        """Whether a task has started since its parents were followed, and no longer depends on them."""
        return job.id in self._array_of and has_started(job)

    def forget(self, job_id: int) -> None:
        """Stop following the parents of a job that has ended, started as a task, or has a new dependency."""
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
        """Take in a changed job and mark its dependents for evaluation."""
        self._counterparts.follow(job)
        children = self._children.get(job.id)
        if children:
            self._parents[job.id] = parent_of(job)
            self._touched.update(children)
        if self._singletons:
            self._touched.update(self._singletons.intersection(self._namesakes.follow(job)))

    def touch_all(self) -> None:
        """Mark every job with a dependency for evaluation."""
        self._touched.update(self._expressions)

    def take_touched(self) -> list[int]:
        """Ids of the jobs marked for evaluation since the last call, ascending."""
        touched, self._touched = self._touched, set()
        touched.update([task for task, array_id in self._array_of.items() if array_id in touched])
        return sorted(touched)

    def state(self, job_id: int) -> Verdict:
        """Satisfied, Waiting or Never, judging by the known states of the parents."""
        expression = self._expressions.get(job_id)
        if expression is None:
            return _FREE
        earlier = self._earlier(job_id)
        return evaluate(expression, self._parents.get, earlier)

    def _earlier(self, job_id: int) -> int | None:
        """First earlier job of the same owner and name that a singleton waits for.

        A task takes the position of its array.
        """
        if job_id not in self._singletons:
            return None
        return self._namesakes.earlier(self._array_of.get(job_id, job_id))

    def free_at(self, job_id: int) -> float:
        """Instant at which the last of its named jobs released it; 0 when it names none that is known."""
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
        """The dependency of a job reduced to named jobs, and the known states of those.

        `singleton` becomes the end of the next earlier job of the same name, which itself waits for the ones
        before it or runs beside them.
        """
        expression = self._expressions[job_id]
        if expression.conditions[:1] and expression.conditions[0].kind == IMAGE:
            pull, *others = expression.conditions
            # For a forecast the end of the pull is that of any other job.
            awaited = Condition("afterok", pull.job_id)
            expression = Expression((awaited,) if expression.is_any else (awaited, *others))
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
        """Ids of the jobs whose dependency names this one, ascending."""
        return tuple(sorted(self._children.get(job_id, ())))

    def is_named(self, job_id: int) -> bool:
        """Whether the dependency of an unfinished job names this job, or a task of this array."""
        return job_id in self._named

    def is_singleton(self, job_id: int) -> bool:
        return job_id in self._singletons

    def parents(self) -> list[int]:
        """Ids of the jobs that others name, ascending."""
        return sorted(self._children)

    def edges(self) -> dict[int, frozenset[int]]:
        """The jobs that each waiting job names or, by `singleton`, has to wait for."""
        found = {job_id: frozenset(expression.job_ids) for job_id, expression in self._expressions.items()}
        for line in self._namesakes.lines() if self._singletons else ():
            before: list[int] = []
            for job_id in line:
                if job_id in self._singletons:
                    found[job_id] |= frozenset(before)
                    # Later ones wait for this one, and so for the ones before it.
                    before = []
                before.append(job_id)
        return found


_UNFINISHED = Parent(JobState.PENDING)


def has_started(job: Job) -> bool:
    """Whether this is a task that has started once, and so no longer depends on other jobs."""
    return job.array_id is not None and job.run > 0


def parent_of(job: Job) -> Parent:
    """The parts of a job that dependencies evaluate."""
    is_left_out = job.state.is_final and job.reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    text = ""
    if job.spec.is_pull and job.state.is_final:
        text = job.reason_text or ""
    elif job.spec.is_pull and job.spec.launch.image_digest is not None:
        text = f" to {job.spec.request.nodelist[0]}"
    return Parent(job.state, job.start_at, job.end_at, is_left_out, text)


_Mark = tuple[int, str]
"""Owner and name."""


class Singletons:
    """Unfinished jobs by owner and name, and the first of each; kept only while a job depends on `singleton`.

    Ended jobs stay in their heap until they reach the top.
    """

    def __init__(self) -> None:
        self._is_kept = False
        self._mark_of: dict[int, _Mark] = {}
        self._heaps: dict[_Mark, list[int]] = {}

    def begin(self, jobs: Iterable[Job]) -> None:
        """Start tracking these jobs; no effect if started before."""
        if self._is_kept:
            return
        self._is_kept = True
        for job in jobs:
            if not job.state.is_final and job.array_id is None:
                mark = (job.uid, job.spec.name)
                self._mark_of[job.id] = mark
                self._heaps.setdefault(mark, []).append(job.id)
        for heap in self._heaps.values():
            heapify(heap)

    def end(self) -> None:
        """Stop tracking: no job depends on `singleton` any more."""
        self._is_kept = False
        self._mark_of.clear()
        self._heaps.clear()

    def follow(self, job: Job) -> tuple[int, ...]:
        """Take in a new or changed job; return the jobs that it may release or block, itself included if renamed."""
        if not self._is_kept or job.array_id is not None:
            # An array stays until its last task has ended.
            return ()
        before = self._mark_of.get(job.id)
        after = None if job.state.is_final else (job.uid, job.spec.name)
        if before == after:
            return ()
        touched = []
        if after is not None:
            touched.append(self._first(after))
            self._mark_of[job.id] = after
            heappush(self._heaps.setdefault(after, []), job.id)
        else:
            del self._mark_of[job.id]
        if before is not None:
            touched.append(self._first(before))
        if before is not None and after is not None:
            touched.append(job.id)
        return tuple(job_id for job_id in touched if job_id is not None)

    def earlier(self, job_id: int) -> int | None:
        """The first unfinished job of the same owner and name, if it precedes this one."""
        mark = self._mark_of.get(job_id)
        first = None if mark is None else self._first(mark)
        return first if first is not None and first < job_id else None

    def _first(self, mark: _Mark) -> int | None:
        heap = self._heaps.get(mark, [])
        while heap and self._mark_of.get(heap[0]) != mark:
            heappop(heap)
        if not heap:
            self._heaps.pop(mark, None)
        return heap[0] if heap else None

    def lines(self) -> list[list[int]]:
        """Job ids of each owner and name, ascending."""
        found: dict[_Mark, list[int]] = {}
        for job_id in sorted(self._mark_of):
            found.setdefault(self._mark_of[job_id], []).append(job_id)
        return list(found.values())


CORR = "aftercorr"


class TaskDependencies:
    """Array tasks that wait for tasks of other arrays (`aftercorr`); keeps nothing about other jobs.

    A task without a counterpart waits for the whole of the other array. A dependency with `?` concerns all
    tasks at once, so it is not followed task by task. A task that has a row before it starts waits for its
    counterpart as for any job.
    """

    def __init__(self, groups: ArrayIndex) -> None:
        self._groups = groups
        self._parents: dict[int, tuple[int, ...]] = {}
        """The arrays that each array follows task by task."""
        self._children: dict[int, set[int]] = {}
        self._ended: dict[int, dict[int, Parent]] = {}
        """By followed array: its ended tasks."""
        self._whole: dict[int, Parent] = {}
        """The ended ones among them, which stand for tasks without a row."""
        self._all: dict[int, TaskSet] = {}
        """All tasks of each followed array."""
        self._hopeless: dict[int, dict[int, int]] = {}
        """Tasks that can never start, by array and number, with the array that caused it."""
        self._touched: set[int] = set()

    def learn(self, array: Job, tasks: Iterable[Job]) -> None:
        """Remember how the tasks of an array have ended, before other arrays follow it."""
        ended = self._ended.setdefault(array.id, {})
        self._all[array.id] = arrays.all_tasks(array)
        for task in tasks:
            if task.state.is_final and task.task is not None:
                ended[task.task] = parent_of(task)
        if array.state.is_final:
            self._whole[array.id] = parent_of(array)
            never_started = Parent(JobState.CANCELLED, None, array.end_at)
            ended.update(dict.fromkeys(arrays.tasks_left(array), never_started))

    def watch(self, array: Job, expression: Expression) -> Expression:
        """Follow the arrays that this one names by `aftercorr`; return the rest of its dependency."""
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
        """Stop following the arrays of one that has ended or has a new dependency."""
        for parent in self._parents.pop(array_id, ()):
            self._children[parent].discard(array_id)
            self._let_go(parent)
        self._hopeless.pop(array_id, None)
        if array_id in self._groups:
            self._groups.group(array_id).ready = None

    def _let_go(self, parent: int) -> None:
        """Forget how the tasks of an array ended once nothing follows it."""
        if not self._children.get(parent):
            self._children.pop(parent, None)
            self._ended.pop(parent, None)
            self._whole.pop(parent, None)
            self._all.pop(parent, None)

    def of_task(self, task: Job, expression: Expression) -> tuple[Expression, dict[int, Parent]]:
        """Dependency of a task with its own row, by its counterparts' ids, and the known states of those."""
        number = task.task
        if number is None or expression.is_any:
            return expression, {}
        conditions: list[Condition] = []
        known: dict[int, Parent] = {}
        for one in expression.conditions:
            if one.kind == CORR and number in self._all.get(one.job_id, ()):
                place = one.job_id + 1 + self._all[one.job_id].position(number)
                known[place] = self._counterpart(one.job_id, number) or _UNFINISHED
                one = Condition("afterok", place, task=f"{one.job_id}_{number}")
            conditions.append(one)
        return Expression(tuple(conditions)), known

    def follow(self, job: Job) -> None:
        """Take in a changed job and evaluate the tasks that wait for it, or for a task that it will never have."""
        array_id = job.array_id if job.array_id is not None else job.id
        if array_id not in self._children or not job.state.is_final:
            return
        ended = self._ended[array_id]
        if job.task is not None:
            ended[job.task] = parent_of(job)
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
        is_ready = number not in group.ready
        for parent in self._parents[array_id]:
            counterpart = self._counterpart(parent, number)
            if counterpart is None:
                is_ready = False
            elif counterpart.state is not JobState.COMPLETED:
                self._hopeless.setdefault(array_id, {})[number] = parent
                return
        if is_ready:
            group.ready.add(number)
            self._touched.add(array_id)

    def _counterpart(self, array_id: int, number: int) -> Parent | None:
        """The task of this number in a followed array; None if it has not ended."""
        return self._ended[array_id].get(number, self._whole.get(array_id))

    def take_touched(self) -> list[int]:
        """Ids of arrays with newly released tasks since the last call, ascending."""
        # Forget arrays learned for a job that then did not follow them task by task.
        for parent in self._ended.keys() - self._children.keys():
            self._let_go(parent)
        touched, self._touched = sorted(self._touched), set()
        return touched

    def take_hopeless(self) -> Mapping[int, Mapping[int, int]]:
        """Tasks that can never start: array and task number to the array that caused it."""
        found, self._hopeless = self._hopeless, {}
        return found


Targets = tuple[int, ...]
"""Ids of the jobs that a job waits for."""


class Inheritance:
    """Urgency that pending jobs pass on to their parents, so that no less urgent job delays an urgent one.

    A job inherits, part by part, the lowest nice value and the QOS of the highest tier among itself and the
    jobs that wait for its end, and passes the result on in turn. Updated edge by edge: a change walks up the
    ancestors only as far as it has an effect. Only waiting jobs and their parents cost anything.

    Source: priority inheritance, Sha, Rajkumar, Lehoczky, IEEE Trans. Computers 39 (1990).

    `own` gives a job's own urgency, None for inactive jobs; `tiers` the tier of each QOS, 0 for unnamed ones.
    """

    def __init__(self, own: Callable[[int], Urgency | None], tiers: Mapping[str, int]) -> None:
        self._own = own
        self._tiers = tiers
        self._passed: dict[int, tuple[Urgency, Targets]] = {}
        """Urgency that each pending job passes on, and its recipients."""
        self._received: dict[int, dict[Urgency, int]] = {}
        """Urgencies that each job receives, with counts; ten thousand equal ones cost as much as one."""

    def inherited(self, job_id: int) -> Urgency | None:
        """The urgency of a job with inheritance; None when it is just its own."""
        own = self._own(job_id) if job_id in self._received else None
        if own is None:
            return None
        joined = self._joined(job_id, own)
        return None if joined == own else joined

    def settle(self, job_id: int, targets: Targets) -> set[int]:
        """Set the jobs that a job waits for, or update its urgency; return the jobs whose inherited urgency changed."""
        changed: set[int] = set()
        work = [(job_id, targets)]
        while work:
            giver, wanted = work.pop()
            own = self._own(giver) if wanted else None
            before = self._passed.get(giver)
            after = None if own is None else (self._joined(giver, own), wanted)
            if before == after:
                continue
            touched = dict.fromkeys((*(before[1] if before else ()), *(after[1] if after else ())))
            inherited = {taker: self.inherited(taker) for taker in touched}
            self._replace(giver, before, after)
            for taker, was in inherited.items():
                if self.inherited(taker) != was:
                    changed.add(taker)
                    if taker in self._passed:
                        work.append((taker, self._passed[taker][1]))
        return changed

    def _replace(
        self, giver: int, before: tuple[Urgency, Targets] | None, after: tuple[Urgency, Targets] | None
    ) -> None:
        if before is not None:
            urgency, targets = before
            del self._passed[giver]
            for taker in targets:
                received = self._received[taker]
                received[urgency] -= 1
                if not received[urgency]:
                    del received[urgency]
                if not received:
                    del self._received[taker]
        if after is not None:
            urgency, targets = after
            self._passed[giver] = after
            for taker in targets:
                received = self._received.setdefault(taker, {})
                received[urgency] = received.get(urgency, 0) + 1

    def _joined(self, job_id: int, own: Urgency) -> Urgency:
        """The most urgent parts of a job's own and received urgencies; its own QOS among equal tiers."""
        received = self._received.get(job_id)
        if not received:
            return own
        nice = min(own.nice, *(urgency.nice for urgency in received))
        # By tier, then by name, so that the order of arrival has no effect.
        tier, qos = min((-self._tiers.get(urgency.qos, 0), urgency.qos) for urgency in received)
        return Urgency(nice, qos if -tier > self._tiers.get(own.qos, 0) else own.qos)
