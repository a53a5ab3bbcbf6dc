"""The daemon's memory: active jobs, their classes and dependencies, and the resources of runs.

The table is authoritative. `DaemonState.load` rebuilds everything from the store, also after a failed commit
or when another process wrote to the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from gpusched.daemon.allocations import HeldResources
from gpusched.daemon.dependencies import CORR, Dependents, Inheritance, TaskDependencies, parent_of
from gpusched.daemon.indexes import ArrayIndex, JobCounts, PendingQueues, PredictionMark, QueueStats, RunsByNode, Timers
from gpusched.daemon.pauses import QueuePauses
from gpusched.daemon.state_settings import StateSettings
from gpusched.daemon.steps import OpenSteps
from gpusched.lifecycle import arrays, transitions
from gpusched.lifecycle.dependencies import (
    Condition,
    Expression,
    Lookup,
    Never,
    Parent,
    Satisfied,
    Unsatisfied,
    Verdict,
    parse_dependency,
)
from gpusched.lifecycle.run_transitions import missing_run
from gpusched.model.batch import Batch
from gpusched.model.cluster import Allocation
from gpusched.model.job import Job, Run, run_id
from gpusched.model.snapshot import ClassKey, Reason, Urgency, Usage
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.model.variants import each_variant
from gpusched.ports import JobFilter, Store
from gpusched.ports.tables import BATCHES, FENCES, STEPS, TABLE_SETTINGS, WHOLE, Rows
from gpusched.predict.family import Family, Invocation
from gpusched.scheduler.events import Event, JobFenced, UsageCharged
from gpusched.scheduler.priority import class_key

_JUST_AFTER_S = 0.001
_FREE = Satisfied()

Read = Callable[[JobFilter], list[Job]]
"""Reads rows: `Store.jobs`, or within a tick `TickTransaction.jobs`, which includes the tick's own changes."""


class DaemonState:
    """Indexes of everything that is not final. `put_job` and `put_run` keep all of them in step.

    One class: a change of a job moves it between nearly all of the indexes, in one order.
    """

    def __init__(self, rules: StateSettings | None = None) -> None:
        self.rules = rules or StateSettings()
        self.jobs: dict[int, Job] = {}
        self.open_pulls: set[int] = set()
        """Those of the jobs that pull images."""
        self.open_runs: dict[str, Run] = {}
        self.strays: dict[str, Run] = {}
        """Open runs that no active job has, in a damaged table: they are stopped, hold what they booked until then, and
        are not among the open runs."""
        self.held = HeldResources()
        self.holds: Mapping[str, Allocation] = self.held.by_key
        """Resources of each run, until its end is recorded and its GPUs are proven clean; by handle, on a gang's other
        nodes by handle and rank."""
        self._charged: dict[tuple[str, str], Usage] = {}
        self._ended: list[tuple[Job, Run]] = []
        self.releasing: dict[str, Run] = {}
        """Ended runs whose GPUs are not proven clean yet; their jobs are COMPLETING. In a damaged table also those of
        jobs that seem to run: they end as their run did."""
        self.open_by_node, self.releasing_by_node = RunsByNode(), RunsByNode()
        """Both by node."""
        self.batches: dict[int, Batch] = {}
        """Batches with jobs to be made, by first id; limits on the number of jobs count these already."""
        self.batch_lines: dict[int, Sequence[str]] = {}
        """Lines of some of them, as read from the table."""
        self.steps = OpenSteps()
        self.checkpoints: dict[str, float] = {}
        self.reported_ends: dict[str, float] = {}
        """When runs end by the progress that they report, by run; of those only whose reports are trusted."""
        """When open runs last reported a checkpoint."""
        self.rows = Rows()
        """Of the tables that are here whole."""
        self.last_credit = 0
        """Largest number of a credit since the daemon began; one that was undone is not given again."""
        self.active = JobCounts()
        """Numbers of active jobs, for the limits on them."""
        self.jobs_of: Counter[int] = Counter()
        """Number of active jobs by user; an array counts as one."""
        self.stored: dict[int, int] = {}
        """Stored payload bytes, of users who have submitted jobs since this memory was loaded."""
        self.census = QueueStats()
        self.next_id = 1
        self.next_pipeline = 1
        self.lined_up = 0
        """Number of times a job was put into the queue of its class."""
        self._changed_fences: dict[int, None] = {}
        self.eligible = PendingQueues(self.rows[FENCES])
        """Jobs that may start as soon as the plan lets them, by class."""
        self._for_slurm: dict[int, None] = {}
        """Eligible jobs that are to be handed over, in the order in which they became so."""
        self._timed = Timers()
        self.arrays = ArrayIndex()
        self._counterparts = TaskDependencies(self.arrays)
        self.dependents = Dependents(self._counterparts)
        self.inheritance = Inheritance(self._urgency_of, self.rules.tiers)
        self._deadlines = Timers()
        self._infeasible: dict[int, Reason] = {}
        """Pending jobs that cannot start as things are, or whose queue is paused, although nothing else keeps them."""
        self.pauses = QueuePauses()

    @classmethod
    def load(cls, store: Store, now: float, rules: StateSettings | None = None) -> DaemonState:
        state = cls(rules)
        jobs, runs = store.load_active()
        state.next_id = store.next_job_id()
        state.next_pipeline = store.next_pipeline()
        for table in WHOLE:
            state.rows[table].update(store.load(table))
        for step in store.load(STEPS).values():
            state.steps.put(step)
        for batch in store.load(BATCHES).values():
            state.put_batch(batch)
        state.look_at_pauses(now)
        known = {job.id: job for job in jobs}
        state.jobs.update(known)
        for job in jobs:
            state.active.add(job.spec, job.user, state.arrays.left(job))
            state.jobs_of[job.uid] += job.array_id is None
            state.census.replace(None, job)
        state.arrays.load(store, jobs)
        state.learn_parents(store.jobs, [job.spec.dependency for job in jobs if job.spec.dependency])
        for job in jobs:
            state.put_job(job, now)
        for run in runs:
            job_of_run = state.jobs.get(run.job_id)
            if job_of_run is not None and job_of_run.run == run.number and job_of_run.is_handed_over_or_runs:
                state.put_run(run)
            else:
                state.strays[run.id] = run
                state._hold(run)
        state._load_ended(store, now)
        return state

    def _load_ended(self, store: Store, now: float) -> None:
        """Take in the last runs of jobs that should have an open one and have none."""
        without = {
            job.id: job
            for job in self.jobs.values()
            if job.is_handed_over_or_runs and not job.is_array and run_id(job.id, job.run) not in self.open_runs
        }
        runs = {run.job_id: run for run in store.runs(without) if run.number == without[run.job_id].run}
        for job in without.values():
            self.begin_release(runs.get(job.id) or missing_run(job, now))

    def settle(self, now: float) -> None:
        """Do the first part of a tick: queue the jobs that time and the ends of others release."""
        self.promote(now)
        self.settle_dependencies(now)
        self.settle_counterparts(now)

    def reconfigure(self, rules: StateSettings) -> None:
        before, self.rules = self.rules, rules
        if rules == before:
            return
        self.inheritance = Inheritance(self._urgency_of, rules.tiers)
        for job_id in self.dependents:
            self._pass_on(self.jobs[job_id], self.dependents.state(job_id))
        is_same = (before.guess, before.lean) == (rules.guess, rules.lean)
        self._reorder(self.dependents.parents() if is_same else list(self.jobs))
        for run in self.open_runs.values():
            self._hold(run)

    # --- jobs -----------------------------------------------------------------------------------

    def put_job(self, job: Job, now: float) -> None:
        """Take in a new or changed job; a final one leaves the memory.

        The order matters: the line is left under the key that the job had; counts compare with the row before; its
        array knows which tasks are left before anything counts or queues them; whether it waits for others decides
        whether it is queued; what others inherit from it follows from that; its holdings follow the row; last, those
        that wait for it are marked.
        """
        self._leave_line(job.id)
        self._infeasible.pop(job.id, None)
        self._count(job)
        self.census.replace(self.jobs.get(job.id), job)
        if job.spec.is_pull:
            (self.open_pulls.discard if job.state.is_final else self.open_pulls.add)(job.id)
        self.census.wake(job.id)
        self.arrays.follow(job)
        if job.state.is_final:
            self.jobs.pop(job.id, None)
            self.held.forget_stop(job.id)
            self.forget_dependency(job.id)
        else:
            self.jobs[job.id] = job
            verdict: Verdict = _FREE
            if self.dependents.is_outgrown(job):
                self.forget_dependency(job.id)
            self.dependents.watch(job, self.jobs)
            if job.state is JobState.PENDING:
                self._await_deadline(job)
                verdict = self.dependency_state(job)
                self._enqueue(job, verdict, now)
            self._pass_on(job, verdict)
            self._follow_run(job, now)
        self.dependents.follow(job)

    def note_fence(self, job_id: int) -> None:
        """Take in that the fence of a pending job has changed or gone."""
        self._changed_fences[job_id] = None

    def put_batch(self, batch: Batch) -> None:
        """Take in a batch of which more jobs have been made."""
        before = self.batches.get(batch.first_id)
        more = batch.left - (0 if before is None else before.left)
        self.active.add(batch.spec, batch.user, more)
        self.jobs_of[batch.uid] += more
        if batch.left:
            self.batches[batch.first_id] = batch
        else:
            self.batches.pop(batch.first_id, None)
            self.batch_lines.pop(batch.first_id, None)

    @property
    def unmade(self) -> int:
        """Number of jobs of accepted batches that are still to be made."""
        return sum(batch.left for batch in self.batches.values())

    def _count(self, job: Job) -> None:
        before = self.jobs.get(job.id)
        after = None if job.state.is_final else job
        if (before is None) != (after is None) and job.array_id is None:
            self.jobs_of[job.uid] += 1 if before is None else -1
        if before is not None and after is not None and before.spec is after.spec:
            if before.tasks_left != after.tasks_left:
                self.active.add(after.spec, after.user, self.arrays.left(after) - self.arrays.left(before))
            return
        if before is not None:
            self.active.add(before.spec, before.user, -self.arrays.left(before))
        if after is not None:
            self.active.add(after.spec, after.user, self.arrays.left(after))

    def _follow_run(self, job: Job, now: float) -> None:
        """Update the allocation of a job's run after a stop, a suspension or a new time limit."""
        self.held.note_stop(job, now)
        run = self.open_runs.get(run_id(job.id, job.run)) if job.run else None
        if run is not None:
            self._hold(run)

    def _enqueue(self, job: Job, verdict: Verdict, now: float) -> None:
        self.census.wake(job.id)
        self._infeasible.pop(job.id, None)
        if job.is_handed_over:
            if job.hold is None:
                self.census.sleep(job, ReasonCode.HANDED_OVER)
            return
        if job.hold:
            return
        if not isinstance(verdict, Satisfied):
            if verdict.is_image:
                is_failed = isinstance(verdict, Never)
                self.census.sleep(job, ReasonCode.IMAGE_PULL_FAILED if is_failed else ReasonCode.IMAGE_PULL)
            elif isinstance(verdict, Never):
                self.census.sleep(job, ReasonCode.DEPENDENCY_NEVER_SATISFIED)
            return
        eligible_at = max(job.eligible_at, verdict.at)
        waits_for_counterparts = job.is_array and self.waits_for_counterparts(job)
        if eligible_at > now:
            waits_for_time = verdict.at <= max(now, job.eligible_at)
            if waits_for_time and not waits_for_counterparts:
                waits_for_price = job.spec.start_when is not None and job.eligible_at > (job.spec.begin_at or 0.0)
                asleep = ReasonCode.CHEAP_ENERGY if waits_for_price else ReasonCode.BEGIN_TIME
                self.census.sleep(job, ReasonCode.RETRY_DELAY if job.run else asleep)
            self._timed.set(eligible_at, job.id)
            self._timed.prune(len(self.jobs), self._still_waits)
            return
        if waits_for_counterparts:
            # Like any other dependency, that comes before what else keeps it from starting.
            return
        why = self.pauses.why(job.spec.queue) or self.rules.why_infeasible(job)
        if why is not None:
            self._infeasible[job.id] = why
            self.census.sleep(job, why.code)
            return
        self._line_up(job)

    def _leave_line(self, job_id: int) -> None:
        self.eligible.remove(job_id)
        self._for_slurm.pop(job_id, None)

    def to_hand_over(self, most: int) -> list[Job]:
        """Up to `most` eligible jobs and tasks to be handed over, as many tasks of an array as may run at once."""
        found: list[Job] = []
        for job_id in self._for_slurm:
            if len(found) >= most:
                break
            job = self.jobs[job_id]
            if not job.is_array:
                found.append(job)
                continue
            assert job.spec.array is not None
            throttle, room = job.spec.array.throttle, most - len(found)
            if throttle is not None:
                handed = sum(1 for one in self.arrays.group(job_id).open if self.jobs[one].is_handed_over_or_runs)
                room = min(room, max(0, throttle - handed))
            tasks = (self.find(one) for one in self.arrays.line(job_id).first(room))
            found += [task for task in tasks if task is not None]
        return found

    def _line_up(self, job: Job) -> None:
        self.lined_up += 1
        if job.spec.is_for_slurm:
            self._for_slurm[job.id] = None
            self.census.sleep(job, ReasonCode.HANDED_OVER)
            return
        if job.is_array and not self.arrays.line(job.id):
            return
        key = self._class_key(job, self.inheritance.inherited(job.id))
        tasks = self.arrays.line(job.id) if job.is_array else None
        family, invocation = self.rules.alike(job), self.rules.invocation(job)
        self.eligible.add(
            (job.queued_at, job.id), key, tasks, PredictionMark(family, invocation, self.rules.knows(invocation))
        )

    def rethink(
        self, families: Iterable[Family], users: Collection[str] = (), invocations: Iterable[Invocation] = ()
    ) -> bool:
        """Update predictions of queued jobs of these families, users and command lines; return whether a class changed.

        Includes jobs without a prediction, since runs of other users say something about them too. Costs one
        guess per class and command line with runs, and moves only jobs whose prediction has changed.
        """
        found = self._rethink_invocations(invocations)
        changed: dict[Hashable, None] = dict.fromkeys(families)
        if changed:
            changed |= dict.fromkeys(self.eligible.unforeseen())
        if users:
            changed |= dict.fromkeys(
                one for one in self.eligible.families() if isinstance(one, Family) and one.user in users
            )
        for one in changed:
            for key, invocation, ids in self.eligible.groups(one):
                if invocation is not None and self.rules.lean is None and not key.variants:
                    continue
                after = self._renewed(key, self.jobs[ids[0]])
                if after != key:
                    self.eligible.move(ids, after, is_by_invocation=invocation is not None)
                    found = True
        return found

    def _rethink_invocations(self, invocations: Iterable[Invocation]) -> bool:
        """Predict jobs by what has ended with the same command line, from its first end on."""
        found = False
        for invocation in invocations:
            is_by_invocation = self.rules.knows(invocation)
            renewed: dict[ClassKey, ClassKey] = {}
            for place in self.eligible.of_invocation(invocation):
                job_id, key = place.entry[1], place.key
                after = renewed.get(key)
                if after is None:
                    after = renewed[key] = self._renewed(key, self.jobs[job_id])
                if after != key or place.mark.is_by_invocation is not is_by_invocation:
                    self.eligible.move([job_id], after, is_by_invocation=is_by_invocation)
                    found |= after != key
        return found

    def _renewed(self, key: ClassKey, job: Job) -> ClassKey:
        """The class of this job, which was in this one, by what is predicted now."""
        if key.variants:
            return self._class_key(job, key.inherited)
        predicted_s, plan_s = self.rules.learned(job)
        leaning = self.rules.leaning(job)
        if (predicted_s, plan_s, leaning) == (key.predicted_s, key.plan_s, key.leaning):
            return key
        return replace(key, predicted_s=predicted_s, plan_s=plan_s, leaning=leaning)

    def why_infeasible(self, job: Job) -> Reason | None:
        """Why a job, or a task like its array, cannot start as things are; None if only its turn has not come."""
        return self._infeasible.get(job.id) or self._infeasible.get(job.array_id or 0)

    def look_at_infeasible(self, now: float) -> None:
        """Queue jobs that were infeasible under earlier settings, or in a paused queue, and no longer are."""
        for job_id in list(self._infeasible):
            job = self.jobs[job_id]
            self._enqueue(job, self.dependency_state(job), now)

    def look_at_pauses(self, now: float) -> None:
        """Take in which queues are paused: their jobs leave the line, those of resumed queues come back."""
        limits, before = self.rules.limits, self.pauses
        self.pauses = pauses = QueuePauses(self.rows[TABLE_SETTINGS], None if limits is None else limits.queue)
        if not (before or pauses):
            return
        self.look_at_infeasible(now)
        leaving = self.eligible.in_queues(lambda queue: pauses.why(queue) is not None)
        for job_id in [*leaving, *(one for one in self._for_slurm if not self.may_start(self.jobs[one]))]:
            self._leave_line(job_id)
            self._enqueue(self.jobs[job_id], self.dependency_state(self.jobs[job_id]), now)
        for job_id in self.dependents:
            self._pass_on(self.jobs[job_id], self.dependents.state(job_id))

    def may_start(self, job: Job) -> bool:
        """Whether its queue is not paused."""
        return self.pauses.why(job.spec.queue) is None

    def promote(self, now: float) -> bool:
        """Queue the jobs whose begin time or backoff is over; return whether there were any."""
        found = False
        for job_id in self._timed.until(now):
            job = self.jobs.get(job_id)
            if job and job.state is JobState.PENDING and job_id not in self.eligible:
                self._enqueue(job, self.dependency_state(job), now)
                found = True
        return found

    def next_due(self) -> float | None:
        """Instant at which the next job becomes eligible, or can no longer meet its deadline."""
        return min((at for at in (self._timed.first(), self._deadlines.first()) if at is not None), default=None)

    def _still_waits(self, at: float, job_id: int) -> bool:
        job = self.jobs.get(job_id)
        if job is None or job.state is not JobState.PENDING:
            return False
        # A dependency that it was given meanwhile sets a timer of its own once it is satisfied.
        verdict = self.dependency_state(job)
        return isinstance(verdict, Satisfied) and max(job.eligible_at, verdict.at) == at

    def ready_at(self, job: Job) -> float:
        """Instant at which a pending job is released by time: begin time, backoff, delay after another's start."""
        verdict = self.dependency_state(job)
        return max(job.eligible_at, verdict.at) if isinstance(verdict, Satisfied) else job.eligible_at

    def free_at(self, job: Job) -> float:
        """Instant since which only the scheduler keeps a job, or a task without a row, from starting."""
        array = self.array_of_unsplit(job.id)
        return max(self.ready_at(array or job), self.dependents.free_at(job.id if array is None else array.id))

    def _await_deadline(self, job: Job) -> None:
        last_start_at = transitions.last_start_at(job)
        if last_start_at is not None:
            # Just after: at that instant the job could still start in time.
            self._deadlines.set(last_start_at + _JUST_AFTER_S, job.id)
            self._deadlines.prune(len(self.jobs), self._still_hurries)

    def _still_hurries(self, at: float, job_id: int) -> bool:
        job = self.jobs.get(job_id)
        last_start_at = None if job is None else transitions.last_start_at(job)
        return last_start_at is not None and last_start_at + _JUST_AFTER_S == at

    def too_late(self, now: float) -> list[Job]:
        """Pending jobs that can no longer end by their deadline, by id."""
        due = {job_id: self.jobs[job_id] for job_id in self._deadlines.until(now) if job_id in self.jobs}
        return [due[job_id] for job_id in sorted(due) if transitions.misses_deadline(due[job_id], now)]

    def timed_jobs(self, most: int) -> list[tuple[float, Job]]:
        """The next `most` jobs to be released by time (begin time or backoff), with the instant, soonest first."""
        found: dict[int, tuple[float, Job]] = {}
        for at, job_id in self._timed.soonest(most):
            job = self.jobs.get(job_id)
            if job is None or job.hold is not None or job_id in self.eligible or not self.may_start(job):
                continue
            if self._still_waits(at, job_id):
                found[job_id] = at, job
        return list(found.values())

    def waiting_reasons(self, reasons: Mapping[ClassKey, Reason]) -> Counter[ReasonCode]:
        """Number of pending jobs by reason, given the reasons of a plan; consistent with `waiting_reason`."""
        found = self.census.held + self.census.asleep
        for key, jobs in self.eligible.sizes():
            code = reasons[key].code if key in reasons else ReasonCode.NONE
            found[code] += 1
            found[code.of_followers] += jobs - 1
        # A job that is not held, does not wait for an instant and is not queued waits for other jobs.
        found[ReasonCode.DEPENDENCY] += self.census.pending - found.total()
        return +found

    # --- urgency --------------------------------------------------------------------------------

    def _urgency_of(self, job_id: int) -> Urgency | None:
        job = self.jobs.get(job_id)
        return None if job is None else Urgency(job.spec.nice, job.spec.qos)

    def _pass_on(self, job: Job, verdict: Verdict) -> None:
        """Pass the urgency of this job on to the jobs it waits for, while it waits for them."""
        if job.id not in self.dependents:
            return
        # A job that is held or in a paused queue would not start even if its parents had ended: it passes nothing on.
        targets: tuple[int, ...] = ()
        if (
            isinstance(verdict, Unsatisfied)
            and job.state is JobState.PENDING
            and job.hold is None
            and self.may_start(job)
        ):
            targets = verdict.ids
        self._reorder(self.inheritance.settle(job.id, targets))

    def _reorder(self, changed: Iterable[int]) -> None:
        for job_id in sorted(changed):
            if job_id in self.eligible:
                self.eligible.remove(job_id)
                self._line_up(self.jobs[job_id])

    def class_of(self, job_id: int) -> ClassKey | None:
        """Class of an eligible job, for a task without a row that of its array; None when not eligible."""
        if job_id in self.jobs:
            return self.eligible.class_of(job_id)
        return self.eligible.class_of(self.arrays.array_of(job_id) or 0)

    def key_of(self, job: Job) -> ClassKey:
        """The class that a job would be in, given its predicted run time."""
        return self._class_key(job, None)

    def _class_key(self, job: Job, inherited: Urgency | None) -> ClassKey:
        rules = self.rules
        variants: tuple[ClassKey, ...] = ()
        if job.spec.variants:
            others = [replace(job, spec=one) for one in each_variant(job.spec)[1:]]
            variants = tuple([class_key(one, inherited, *rules.learned(one), rules.leaning(one)) for one in others])
        return class_key(job, inherited, *rules.learned(job), rules.leaning(job), variants)

    def position_in_class(self, job: Job) -> int:
        """Number of jobs of its class ahead of an eligible job."""
        key = self.class_of(job.id)
        assert key is not None
        position = self.eligible.position(key, (job.queued_at, job.id))
        if job.id not in self.eligible and job.array_id is not None and job.task is not None:
            # Its array is ahead of it with all of its tasks.
            line = self.arrays.line(job.array_id)
            position += line.position(job.task) - len(line)
        return max(0, position)

    # --- tasks of arrays ------------------------------------------------------------------------

    def find(self, job_id: int) -> Job | None:
        """An active job, or a task without a row of an active array."""
        job = self.jobs.get(job_id)
        if job is None:
            array = self.array_of_unsplit(job_id)
            if array is not None:
                number = arrays.task_number(array, job_id)
                assert number is not None
                return arrays.task(array, number)
        return job

    def name_of(self, job_id: int) -> str:
        """User-visible id of a job: `42`, a task `42_7`; the plain id for jobs that are not active."""
        job = self.find(job_id)
        return str(job_id) if job is None else job.shown_id

    def array_of_unsplit(self, job_id: int) -> Job | None:
        """The array of a task without a row; None if the id is anything else."""
        array_id = self.arrays.array_of(job_id)
        if array_id is None:
            return None
        array = self.jobs[array_id]
        return array if arrays.task_number(array, job_id) in self.arrays.group(array_id).left else None

    def tasks_of(self, array: Job) -> list[Job]:
        """Tasks of an array that have a row and have not ended, by id."""
        if array.id not in self.arrays:
            return []
        return [self.jobs[job_id] for job_id in sorted(self.arrays.group(array.id).open)]

    # --- dependencies ---------------------------------------------------------------------------

    def learn_parents(self, read: Read, dependencies: Iterable[str]) -> None:
        """Remember the states of future parents, including ended ones."""
        conditions = [one for text in set(dependencies) for one in parse_dependency(text).conditions]
        unknown = self.dependents.unknown({one.job_id for one in conditions} - {0})
        self.dependents.learn(self._look_up(read, [one for one in conditions if one.job_id in unknown]))
        for job_id in {one.job_id for one in conditions if one.kind == CORR}:
            named = frozenset({job_id})
            rows = {job.id: job for job in read(JobFilter(ids=named, arrays=named))}
            array = self.jobs.get(job_id) or rows.get(job_id)
            if array is not None and array.is_array:
                self._counterparts.learn(array, rows.values())

    def lookup_parents(self, read: Read, expression: Expression) -> Lookup:
        """A lookup for `evaluate` that knows the jobs of a dependency."""
        return self._look_up(read, expression.conditions).get

    def _look_up(self, read: Read, conditions: Iterable[Condition]) -> dict[int, Parent]:
        """The existing ones of these jobs. A task that has no row and never will have one counts as cancelled."""
        array_of = {one.job_id: one.array_id for one in conditions if one.job_id}
        rows = {job_id: job for job_id in array_of if (job := self.find(job_id)) is not None}
        missing = array_of.keys() - rows.keys()
        if missing:
            named = {array_id for job_id in missing if (array_id := array_of[job_id]) is not None}
            rows.update({job.id: job for job in read(JobFilter(ids=frozenset(missing | named)))})
        found = {job_id: parent_of(rows[job_id]) for job_id in array_of if job_id in rows}
        for job_id in array_of:
            task = self.find(job_id) if job_id not in self.jobs else None
            array = task or rows.get(array_of[job_id] or 0)
            is_given_up = task is not None and task.state.is_final
            if array is not None and (is_given_up or job_id not in rows):
                found[job_id] = Parent(JobState.CANCELLED, None, array.end_at or array.cancel_at)
        return found

    def forget_dependency(self, job_id: int) -> None:
        """Drop a dependency that has changed or ended; `put_job` follows a new one."""
        if job_id in self.dependents:
            self._reorder(self.inheritance.settle(job_id, ()))
            self.dependents.forget(job_id)

    def dependency_state(self, job: Job) -> Verdict:
        """Satisfied, Waiting or Never, judging by the known parents; a task without a row waits like its array."""
        is_unsplit = job.array_id is not None and job.id not in self.jobs
        return self.dependents.state(job.array_id or job.id if is_unsplit else job.id)

    def is_needed(self, job: Job) -> bool:
        """Whether an unfinished job needs the record of an ended one: a dependent, its fallback, its array."""
        return self.dependents.is_named(job.id) or any(
            one in self.jobs for one in (job.id, job.array_id, job.fallback_id)
        )

    def awaited_tasks(self, array: Job) -> list[Job]:
        """Tasks of an array without a row that other jobs depend on, by id."""
        named = [job_id for job_id in self.dependents.parents() if array.id < job_id <= array.last_id]
        return [task for job_id in named if job_id not in self.jobs and (task := self.find(job_id)) is not None]

    def dependent_jobs(self, most: int) -> list[tuple[Job, Expression, dict[int, Parent]]]:
        """The oldest `most` jobs that wait only for others, with their dependency and the known states of parents."""
        found: list[tuple[Job, Expression, dict[int, Parent]]] = []
        for job_id in self.dependents:
            job = self.jobs.get(job_id)
            if job is None or job.state is not JobState.PENDING or job.hold is not None or len(found) >= most:
                continue
            if self.may_start(job) and isinstance(self.dependency_state(job), Unsatisfied):
                found.append((job, *self.dependents.watched(job_id)))
        return found

    def edges_with(self, changed: Job) -> dict[int, frozenset[int]]:
        """The jobs that each pending job would wait for, given this changed row. Scans all jobs."""
        edges = self.dependents.edges()
        wanted = parse_dependency(changed.spec.dependency) if changed.spec.dependency else None
        edges[changed.id] = frozenset() if wanted is None else frozenset(wanted.job_ids)
        for job in self.jobs.values():
            if job.id == changed.id or job.uid != changed.uid or job.spec.name != changed.spec.name:
                continue
            if job.id < changed.id and wanted is not None and wanted.is_singleton:
                edges[changed.id] |= {job.id}
            elif job.id > changed.id and self.dependents.is_singleton(job.id):
                edges[job.id] |= {changed.id}
        return self._with_arrays(edges, changed)

    def _with_arrays(self, edges: dict[int, frozenset[int]], changed: Job) -> dict[int, frozenset[int]]:
        """Add edges of arrays: a task without a row waits like its array, and an array ends with its last task."""
        found = dict(edges)
        for named in frozenset().union(*edges.values()) - edges.keys():
            array = self.array_of_unsplit(named)
            if array is not None:
                found[named] = edges.get(array.id, frozenset())
        for job_id in edges:
            job = changed if job_id == changed.id else self.jobs.get(job_id)
            if job is not None and job.array_id is not None:
                found[job.array_id] = found.get(job.array_id, frozenset()) | {job_id}
        return found

    def settle_dependencies(self, now: float) -> list[tuple[Job, Never]]:
        """Queue jobs whose dependency is now satisfied; return those for which it never can be."""
        hopeless = []
        for job_id in self.dependents.take_touched():
            job = self.jobs.get(job_id)
            if job is None or job.state is not JobState.PENDING or job.is_handed_over:
                continue
            state = self.dependency_state(job)
            if not isinstance(state, Satisfied) or max(job.eligible_at, state.at) > now:
                self._leave_line(job_id)
            if isinstance(state, Never):
                hopeless.append((job, state))
            if job_id not in self.eligible:
                self._enqueue(job, state, now)
            self._pass_on(job, state)
        return hopeless

    def waits_for_counterparts(self, job: Job) -> bool:
        """Whether counterparts block all tasks left of an array, or this task."""
        array_id = job.array_id or job.id
        if array_id not in self.arrays or (job.array_id is not None and job.id in self.jobs):
            return False
        ready = self.arrays.group(array_id).ready
        return ready is not None and (job.task not in ready if job.task is not None else not ready)

    def settle_counterparts(self, now: float) -> list[tuple[Job, str]]:
        """Queue tasks whose counterparts have completed; return those that can never start, and why."""
        for array_id in self._counterparts.take_touched():
            array = self.jobs.get(array_id)
            if array is not None and array.state is JobState.PENDING:
                self._leave_line(array_id)
                self._enqueue(array, self.dependency_state(array), now)
        hopeless = []
        for array_id, numbers in self._counterparts.take_hopeless().items():
            array = self.jobs[array_id]
            if array.state is not JobState.PENDING:
                # Its tasks without a row were given up before.
                continue
            for number, parent in numbers.items():
                text = f"depends on the success of task {parent}_{number}, which did not complete"
                hopeless.append((arrays.task(array, number), text))
        return hopeless

    # --- runs -----------------------------------------------------------------------------------

    def put_run(self, run: Run) -> None:
        """Take in a new or changed run; an ended one holds nothing any more."""
        if run.outcome is not None:
            self.close_run(run)
            self.strays.pop(run.id, None)
            self.end_release(run)
            return
        self.open_runs[run.id] = run
        self.open_by_node.put(run)
        self._hold(run)

    def close_run(self, run: Run) -> None:
        """Take an ended run from the open ones; what it holds stays until its end, or its release, is taken in."""
        self.open_runs.pop(run.id, None)
        self.open_by_node.drop(run)

    def _hold(self, run: Run) -> None:
        ends = self.reported_ends
        reported_at = ends.get(run.id) if ends else None
        self.held.put(self.jobs.get(run.job_id), run, self.rules, self.checkpoints.get(run.id), reported_at)

    def begin_release(self, run: Run) -> None:
        """Free all resources of an ended run but its GPUs, which stay booked until they are proven clean."""
        self.close_run(run)
        self.releasing[run.id] = run
        self.releasing_by_node.put(run)
        if run.gpus:
            self.held.keep_gpus(self.jobs.get(run.job_id), run, self.rules)

    def note_ended(self, job: Job, run: Run) -> None:
        self._ended.append((job, run))

    def take_ended(self) -> list[tuple[Job, Run]]:
        taken, self._ended = self._ended, []
        return taken

    def note_charge(self, usage: Usage) -> None:
        """Take in the usage of an account and user."""
        self._charged[usage.account, usage.user] = usage

    # --- events for the planner -------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Events for the planner since the last call; of several changes of one fact only the last.

        Runs come first: a start that the planner has planned is confirmed before its job is found to have left.
        """
        charged, self._charged = self._charged, {}
        fenced, self._changed_fences = self._changed_fences, {}
        return [
            *self.held.take_events(),
            *map(UsageCharged, charged.values()),
            *self.eligible.take_events(),
            *(JobFenced(job_id, self.rows[FENCES].get(job_id)) for job_id in fenced),
        ]

    def tell_of_all_jobs(self) -> list[Event]:
        """Events for a planner that knows all but the pending jobs."""
        self.take_events()
        self.eligible.tell_all()
        return self.take_events()

    def note_checkpoints(self, found: Mapping[str, float]) -> None:
        """Take in when the open runs last saved their work, by run."""
        before, self.checkpoints = self.checkpoints, dict(found)
        for name in found:
            if found[name] != before.get(name) and name in self.open_runs:
                self._hold(self.open_runs[name])

    def note_reported_ends(self, found: Mapping[str, float]) -> None:
        """Take in when open runs end by their own reports, by run."""
        before, self.reported_ends = self.reported_ends, dict(found)
        for name in before.keys() | found.keys():
            if found.get(name) != before.get(name) and name in self.open_runs:
                self._hold(self.open_runs[name])

    def end_release(self, run: Run) -> None:
        """Free the GPUs of an ended run, which are clean or given up on."""
        self.releasing.pop(run.id, None)
        self.releasing_by_node.drop(run)
        self.held.drop(run)

    def counts(self) -> dict[str, int]:
        """Number of jobs in each active state."""
        tally = {"pending": 0, "running": 0, "suspended": 0, "completing": 0}
        for (state, _), jobs in self.census.by_queue.items():
            tally[state.value.lower()] += jobs
        return tally
