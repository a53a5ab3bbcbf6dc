"""The daemon's memory: active jobs, their classes, what is held, who waits for whom.

Nothing here is truth. `World.load` rebuilds all of it from the store, which is also what happens when
a commit fails or somebody else wrote to the table.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import chain

from gpusched.model.cluster import Allocation
from gpusched.model.job import Job, Run
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob
from gpusched.model.states import JobState
from gpusched.policy.dependencies import (
    Expression,
    Lookup,
    Never,
    Parent,
    Satisfied,
    Verdict,
    evaluate,
    parse_dependency,
)
from gpusched.policy.ordering import class_key
from gpusched.ports import JobFilter, Store

FRONT = 128
"""Jobs of a class that one snapshot shows; a plan that uses them all up asks for another turn."""


class ClassQueue:
    """Eligible jobs of one class in their order, and the frozen view of its front."""

    __slots__ = ("_entries", "_key", "_view")

    def __init__(self, key: ClassKey) -> None:
        self._key = key
        self._entries: list[tuple[float, int]] = []
        self._view: PendingClass | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: tuple[float, int]) -> None:
        """Insert (queued_at, id); nearly always at the end."""
        insort(self._entries, entry)
        self._view = None

    def remove(self, entry: tuple[float, int]) -> None:
        """Take an entry out that is known to be in."""
        del self._entries[bisect_left(self._entries, entry)]
        self._view = None

    def position(self, entry: tuple[float, int]) -> int:
        """How many jobs of the class are before this one."""
        return bisect_left(self._entries, entry)

    def view(self) -> PendingClass:
        """The front of the class as the policy sees it; the same object until the class changes."""
        if self._view is None:
            front = tuple(PendingJob(job_id, queued_at) for queued_at, job_id in self._entries[:FRONT])
            self._view = PendingClass(self._key, front, len(self._entries))
        return self._view


class World:
    """Index over everything that is not final. `put_job` and `put_run` keep all views in step."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.open_runs: dict[str, Run] = {}
        self.holds: dict[str, Allocation] = {}
        """What each run holds, until its end is recorded and its GPUs are proven clean."""
        self.releasing: dict[str, Run] = {}
        """Ended runs whose GPUs are not proven clean yet; their jobs are COMPLETING."""
        self.drains: dict[str, str] = {}
        self.next_id = 1
        self._classes: dict[ClassKey, ClassQueue] = {}
        self._class_of: dict[int, ClassKey] = {}
        self._keys: dict[ClassKey, ClassKey] = {}
        self._timed: list[tuple[float, int]] = []
        self._expressions: dict[int, Expression] = {}
        self._children: dict[int, set[int]] = {}
        self._parents: dict[int, Parent] = {}
        self._touched: set[int] = set()

    @classmethod
    def load(cls, store: Store, now: float) -> World:
        """Rebuild the whole memory from the table."""
        world = cls()
        jobs, runs = store.load_active()
        world.next_id = store.next_job_id()
        world.drains = store.load_drains()
        completing = [job.id for job in jobs if job.state is JobState.COMPLETING]
        open_ids = {run.id for run in runs}
        ended = [run for run in store.runs(completing) if run.id not in open_ids]
        known = {job.id: job for job in jobs}
        world.jobs.update(known)
        named = (parse_dependency(job.spec.dependency).job_ids for job in jobs if job.spec.dependency)
        world.learn_parents(store, chain.from_iterable(named))
        for job in jobs:
            world.put_job(job, now)
        for run in runs:
            world.put_run(run)
        for run in ended:
            # Only the last run of a COMPLETING job can still hold GPUs.
            if known[run.job_id].run == run.number:
                world.begin_release(run)
        return world

    # --- jobs -----------------------------------------------------------------------------------

    def put_job(self, job: Job, now: float) -> None:
        """Take in a new or changed job; a final one leaves the memory."""
        self._unqueue(job.id)
        if job.state.is_final:
            self.jobs.pop(job.id, None)
            self._forget_dependency(job.id)
        else:
            self.jobs[job.id] = job
            if job.state is JobState.PENDING:
                self._enqueue(job, now)
        children = self._children.get(job.id)
        if children:
            self._parents[job.id] = (job.state, job.start_at)
            self._touched.update(children)

    def _enqueue(self, job: Job, now: float) -> None:
        if job.spec.dependency and job.id not in self._expressions:
            self._watch_dependency(job.id, parse_dependency(job.spec.dependency))
        if job.hold or not isinstance(self.dependency_state(job), Satisfied):
            return
        if job.eligible_at > now:
            heappush(self._timed, (job.eligible_at, job.id))
            if len(self._timed) > 2 * len(self.jobs) + 1000:
                self._compact()
            return
        key = self._key(job)
        self._class_of[job.id] = key
        queue = self._classes.get(key)
        if queue is None:
            queue = self._classes[key] = ClassQueue(key)
        queue.add((job.queued_at, job.id))

    def _unqueue(self, job_id: int) -> None:
        key = self._class_of.pop(job_id, None)
        if key is None:
            return
        queue = self._classes[key]
        queue.remove((self.jobs[job_id].queued_at, job_id))
        if not queue:
            del self._classes[key]
            del self._keys[key]

    def _key(self, job: Job) -> ClassKey:
        key = class_key(job)
        return self._keys.setdefault(key, key)

    def promote(self, now: float) -> bool:
        """Queue the jobs whose begin time or backoff is over; whether there were any."""
        found = False
        while self._timed and self._timed[0][0] <= now:
            _, job_id = heappop(self._timed)
            job = self.jobs.get(job_id)
            if job and job.state is JobState.PENDING and job_id not in self._class_of:
                self._enqueue(job, now)
                found = True
        return found

    def next_promotion(self) -> float | None:
        """When the next waiting job becomes eligible by time alone."""
        return self._timed[0][0] if self._timed else None

    def pending_views(self) -> tuple[PendingClass, ...]:
        """All classes with eligible jobs, by their first job."""
        views = [queue.view() for queue in self._classes.values()]
        views.sort(key=lambda view: (view.jobs[0].queued_at, view.jobs[0].id))
        return tuple(views)

    def class_of(self, job_id: int) -> ClassKey | None:
        """The class an eligible job waits in; None when it is not eligible."""
        return self._class_of.get(job_id)

    def position_in_class(self, job: Job) -> int:
        """How many jobs of its class are before an eligible job."""
        return self._classes[self._class_of[job.id]].position((job.queued_at, job.id))

    # --- dependencies ---------------------------------------------------------------------------

    def learn_parents(self, store: Store, ids: Iterable[int]) -> None:
        """Remember the states of jobs that others are about to depend on, ended ones included."""
        self._parents.update(self._look_up(store, set(ids) - self._parents.keys()))

    def lookup_parents(self, store: Store, ids: Iterable[int]) -> Lookup:
        """A lookup for `evaluate` that knows these jobs."""
        return self._look_up(store, set(ids)).get

    def _look_up(self, store: Store, ids: set[int]) -> dict[int, Parent]:
        found = {job_id: self.jobs[job_id] for job_id in ids if job_id in self.jobs}
        ended = frozenset(ids - found.keys())
        if ended:
            found.update({job.id: job for job in store.jobs(JobFilter(ids=ended))})
        return {job_id: (job.state, job.start_at) for job_id, job in found.items()}

    def _watch_dependency(self, job_id: int, expression: Expression) -> None:
        self._expressions[job_id] = expression
        self._touched.add(job_id)
        for parent_id in expression.job_ids:
            self._children.setdefault(parent_id, set()).add(job_id)
            parent = self.jobs.get(parent_id)
            if parent is not None:
                self._parents[parent_id] = (parent.state, parent.start_at)

    def _forget_dependency(self, job_id: int) -> None:
        expression = self._expressions.pop(job_id, None)
        if expression is None:
            return
        for parent_id in expression.job_ids:
            children = self._children.get(parent_id)
            if children is None:
                continue
            children.discard(job_id)
            if not children:
                del self._children[parent_id]
                self._parents.pop(parent_id, None)

    def replace_dependency(self, job: Job) -> None:
        """The job's dependency was changed: watch the new one from the next `put_job` on."""
        self._forget_dependency(job.id)

    def dependency_state(self, job: Job) -> Verdict:
        """Satisfied, Waiting or Never, as of what is known of the parents."""
        expression = self._expressions.get(job.id)
        return Satisfied() if expression is None else evaluate(expression, self._parents.get)

    def children_of(self, job_id: int) -> tuple[int, ...]:
        """Jobs that name this one in their dependency, by id."""
        return tuple(sorted(self._children.get(job_id, ())))

    def dependency_edges(self) -> dict[int, frozenset[int]]:
        """Which jobs each waiting job names."""
        return {job_id: frozenset(expr.job_ids) for job_id, expr in self._expressions.items()}

    def settle_dependencies(self, now: float) -> list[tuple[Job, Never]]:
        """Queue the jobs whose dependency became satisfied; return those for which it never can be."""
        hopeless = []
        touched, self._touched = sorted(self._touched), set()
        for job_id in touched:
            job = self.jobs.get(job_id)
            if job is None or job.state is not JobState.PENDING:
                continue
            state = self.dependency_state(job)
            if isinstance(state, Never):
                hopeless.append((job, state))
            elif isinstance(state, Satisfied) and job_id not in self._class_of:
                self._enqueue(job, now)
        return hopeless

    # --- runs -----------------------------------------------------------------------------------

    def put_run(self, run: Run) -> None:
        """Take in a new or changed run; an ended one stops holding anything."""
        if run.outcome is not None:
            self.open_runs.pop(run.id, None)
            self.holds.pop(run.id, None)
            self.releasing.pop(run.id, None)
            return
        self.open_runs[run.id] = run
        self._hold(run, run.cpus, run.mem_mib)

    def begin_release(self, run: Run) -> None:
        """The run has ended; its GPUs stay booked until they are proven clean, the rest is free."""
        self.open_runs.pop(run.id, None)
        self.releasing[run.id] = run
        self._hold(run, 0.0, 0)

    def _hold(self, run: Run, cpus: float, mem_mib: int) -> None:
        job = self.jobs.get(run.job_id)
        limit = job.spec.time_limit_s if job else None
        start_at = run.start_at if run.start_at is not None else run.intent_at
        self.holds[run.id] = Allocation(
            job_id=run.job_id,
            uid=job.uid if job else -1,
            node=run.node,
            gpus=run.gpus,
            cpus=cpus,
            mem_mib=mem_mib,
            start_at=start_at,
            # A card that is being cleaned is as good as back.
            expected_end_at=run.end_at or (None if limit is None else start_at + limit),
        )

    def end_release(self, run: Run) -> None:
        """The GPUs of an ended run are clean, or given up on."""
        self.releasing.pop(run.id, None)
        self.holds.pop(run.id, None)

    def counts(self) -> dict[str, int]:
        """How many jobs are in each active state."""
        tally = {"pending": 0, "running": 0, "completing": 0}
        for job in self.jobs.values():
            word = job.state.value.lower()
            if word in tally:
                tally[word] += 1
        return tally

    def _compact(self) -> None:
        """Drop heap entries of jobs that no longer wait for a time."""
        live = [
            entry
            for entry in self._timed
            if (job := self.jobs.get(entry[1])) is not None
            and job.state is JobState.PENDING
            and job.eligible_at == entry[0]
        ]
        heapify(live)
        self._timed = live
