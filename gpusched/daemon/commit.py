"""The transaction of one tick: rows to commit together, and signals to send afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpusched.access import Act
from gpusched.daemon.state import DaemonState
from gpusched.errors import NotFound
from gpusched.lifecycle import arrays, transitions
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.lifecycle.fallback import make_fallback, wants_fallback
from gpusched.model.cluster import Clearance, NodeView
from gpusched.model.commands import Caller
from gpusched.model.execution import NoteOrder, SignalOrder, StopOrder
from gpusched.model.job import Job, JobEvent, JobSpec, Run, run_id
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement, Plan, Preempt, PreemptMode, Usage
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import gpu_label
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter, Store
from gpusched.predict.limits import LimitAdvice
from gpusched.scheduler.cluster_state import ClusterLayout

Signal = SignalOrder | NoteOrder | StopOrder
"""What is sent to a run and over then; of stops, one that repeats what is recorded."""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """An action on another user's job or process, or a refused attempt, for the audit record."""

    caller: Caller
    what: str
    target: str
    owner: str | None = None
    refused: str | None = None
    """Why it was refused; None when it was done."""


class TickTransaction:
    """Collects changes and keeps the memory in step with them, so that later steps see earlier ones.

    Args: view_nodes: the nodes as they are when it is called. advise_limit: the time limit that jobs like this one of
    a user keep.
    """

    def __init__(
        self,
        world: DaemonState,
        store: Store,
        settings: Settings,
        view_nodes: Callable[[], tuple[NodeView, ...]],
        now: float,
        advise_limit: Callable[[str, JobSpec], LimitAdvice | None] = lambda user, spec: None,
    ) -> None:
        self.advise_limit = advise_limit
        self.world = world
        self.store = store
        self.settings = settings
        self.now = now
        self._view_nodes = view_nodes
        self._nodes: tuple[NodeView, ...] | None = None
        """None once something has happened to a GPU or a node since they were viewed."""
        self._layout: ClusterLayout | None = None
        self.changes = Changes()
        self.signals: list[tuple[str, Signal]] = []
        self.forgettable: list[str] = []
        """Runs whose end is part of this commit: the engine may drop its spool after it."""
        self.releasing: set[int] = set()
        """Jobs whose runs have ended in this tick and whose GPUs are not proven clean."""
        self.before: dict[int, Job | None] = {}
        """Rows of the changed jobs as they were before this tick; None for a new job."""
        self.waited: list[tuple[str, float]] = []
        """Queue and wait (s) of each start, from when nothing but the scheduler was in its way."""
        self.keys: dict[tuple[int, str], int] = {}
        """Jobs that this tick has made, by owner and key."""
        self.audit_events: list[AuditEvent] = []
        self.news: list[AdminEvent] = []
        """For the administrator, with this commit."""

    def audit(self, caller: Caller, act: Act, job: Job) -> None:
        """Record, with the commit, an action on another user's job."""
        if caller.uid != job.uid:
            self.audit_events.append(AuditEvent(caller, str(act), f"job {job.shown_id}", job.user))

    def audit_hidden(self, caller: Caller, job: Job) -> None:
        """Record that the caller named a job that is hidden from them."""
        self.audit_events.append(AuditEvent(caller, "name", f"job {job.shown_id}", job.user, "hidden by private_data"))

    def put_job(self, job: Job, *events: JobEvent) -> None:
        """Record a new or changed job and its story; a task of an array that had no row gets its own."""
        fenced = self.world.find(job.id) if self.world.fences else None
        if job.array_id is not None and job.id not in self.world.jobs:
            array = self.world.array_of_unsplit(job.id)
            if array is not None and job.task is not None:
                self.put_job(arrays.split(array, (job.task,), job.start_at))
                self.world.arrays.split(job)
        if job.id not in self.before:
            before = self.before[job.id] = self.world.jobs.get(job.id)
            # The tasks of an array have its key, and are not what it stands for.
            if job.spec.key is not None and before is None and job.array_id is None:
                self.keys[job.uid, job.spec.key] = job.id
        self.changes.jobs[job.id] = job
        self.world.put_job(job, self.now)
        if fenced is not None:
            self._settle_fences(fenced, job)
        self.add_events(*events)

    def fence(self, job_id: int, fence_at: float | None) -> None:
        """Record from when on nothing passes a pending job; None: the next reservation for it begins a new wait."""
        self.changes.fences[job_id] = fence_at
        self.world.set_fence(job_id, fence_at)
        if fence_at is None and self.world.kept.pop(job_id, None) is not None:
            self.changes.kept_places[job_id] = None

    def keep_place(self, job_id: int, place: Placement) -> None:
        """Record where room stays reserved for a pending job past its fence."""
        self.changes.kept_places[job_id] = self.world.kept[job_id] = place

    def _settle_fences(self, before: Job, job: Job) -> None:
        """Take the fence of a job that does not wait any more, or waits for something else; of an array, its tasks'."""
        world = self.world
        waits = job.state is JobState.PENDING and world.class_of(job.id) is not None
        if waits and _asked(before) == _asked(job):
            return
        ids = [job.id] if job.id in world.fences else []
        if job.is_array:
            ids = [one for one in world.fences if job.id < one <= job.last_id and one not in world.jobs]
        for job_id in ids:
            self.fence(job_id, None)

    def put_run(self, run: Run) -> None:
        """Record a new or changed run."""
        self.changes.runs[run.id] = run
        self.world.put_run(run)

    def put(self, job: Job, run: Run, events: Iterable[JobEvent]) -> None:
        """Record a step of the lifecycle: the job if it has changed, the run, and their events."""
        if job is not self.world.jobs.get(job.id):
            self.put_job(job)
        self.put_run(run)
        self.add_events(*events)

    def add_events(self, *events: JobEvent) -> None:
        """Add to the jobs' stories."""
        self.changes.events.extend(events)

    def notify(self, job: Job, run: Run, kind: str, text: str, sent: str | None = None) -> JobEvent:
        """Notify the owner of a job by its story and, in the foreground, at its terminal: there by `sent`, if given."""
        event = JobEvent(job.id, self.now, kind, text, run.number)
        if job.spec.interactive is not None:
            self.signal(run.id, NoteOrder(f"job {job.shown_id}: {sent or text}"))
        self.put_job(job, event)
        return event

    def charge(self, usage: Usage | None) -> None:
        """Record what an account and user have used; None is nothing new."""
        if usage is not None:
            self.changes.usage[usage.account, usage.user] = usage
            self.world.charge(usage)

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """The nodes with all that this tick has done to them and their GPUs so far."""
        if self._nodes is None:
            self._nodes = self._view_nodes()
        return self._nodes

    def drain(self, name: str, message: str) -> None:
        """Record that a node or a GPU, by UUID, is kept free of new work."""
        self.changes.drains[name] = message
        self.world.drains[name] = message
        self.view_again()

    def undrain(self, name: str) -> bool:
        """Record that a node or a GPU, by UUID, takes new work; whether it was drained."""
        self.changes.drains[name] = None
        self.view_again()
        return self.world.drains.pop(name, None) is not None

    def clear(self, clearance: Clearance) -> None:
        """Record that a GPU is well."""
        self.changes.clearances[clearance.uuid] = clearance
        self.world.clearances[clearance.uuid] = clearance
        self.view_again()

    def begin_release(self, run: Run) -> None:
        """The run has ended; its GPUs stay booked until they are proven clean."""
        self.world.begin_release(run)
        self.releasing.add(run.job_id)

    def end_release(self, run: Run) -> None:
        """The GPUs of an ended run are clean, or given up on."""
        self.world.end_release(run)

    def view_again(self) -> None:
        """Something has happened to a GPU or a node since they were viewed."""
        self._nodes = self._layout = None

    def layout(self) -> ClusterLayout:
        """The machines of this tick, as amounts are counted on them."""
        if self._layout is None:
            self._layout = ClusterLayout(self.nodes, self.settings)
        return self._layout

    def signal(self, run: str, order: Signal) -> None:
        """Send this after the commit, at most once: a daemon that is killed in between has not sent it.

        What lasts (a stop, a suspension, a time limit) is recorded with the job instead, see `reconcile`.
        """
        self.signals.append((run, order))

    def run_of(self, job: Job) -> Run:
        """The open run of a job that is RUNNING or COMPLETING."""
        return self.world.open_runs[run_id(job.id, job.run)]

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """As `Store.jobs`, of ids, arrays or pipelines and no more: the table as it is after this tick's commit.

        A filter that names none of them finds nothing.
        """
        if not (wanted.ids or wanted.arrays or wanted.pipelines):
            return []
        changed = self.changes.jobs
        found = {job.id: job for job in self.store.jobs(wanted)}
        found.update({job_id: changed[job_id] for job_id in wanted.ids if job_id in changed})
        if wanted.arrays or wanted.pipelines:
            found.update(
                {
                    job.id: job
                    for job in changed.values()
                    if job.array_id in wanted.arrays or job.spec.pipeline in wanted.pipelines
                }
            )
        return [found[job_id] for job_id in sorted(found)]

    def suspend(self, job: Job, by: str, text: str) -> None:
        """Suspend a running job, by its owner (`user`) or to make room (`policy`)."""
        after, story = transitions.suspend(job, self.now, by, text)
        self.put_job(after, *story)

    def resume(self, job: Job, text: str) -> None:
        """Resume a suspended job."""
        self.put(*transitions.resume(job, self.run_of(job), self.now, text))

    def cancel(self, job: Job, by: str) -> None:
        """End a pending job at once; ask the engine to end a running one; of an array, all tasks."""
        if job.is_array:
            self.stop_array(job, ReasonCode.CANCELLED_BY_USER, f"cancelled by {by}")
            for one in self.world.tasks_of(job):
                self.cancel(one, by)
            return
        after, events = transitions.cancel(job, self.now, by)
        if after is job and run_id(job.id, job.run) in self.world.open_runs:
            # Cancelled before: repeat the stop at once.
            self.signal(run_id(job.id, job.run), StopOrder("cancel"))
        self.put_job(after, *events)

    def stop_array(self, array: Job, code: ReasonCode, text: str) -> None:
        """Give up the tasks that have no row; the others are left alone. It ends when those have."""
        if array.state is JobState.PENDING:
            for task in self.world.awaited_tasks(array):
                # Another job depends on this one, so its end needs a row.
                after, events = transitions.give_up(task, self.now, code, text)
                self.put_job(after, *events)
        after, story = arrays.stop(self.world.jobs[array.id], self.now, code, text)
        self.put_job(after, *story)

    def settle_arrays(self) -> bool:
        """End the arrays whose tasks have all ended, stop those with too many failures; whether there were any."""
        moved = False
        world = self.world
        for array_id in world.arrays.take_touched():
            array = world.jobs[array_id]
            group = world.arrays.group(array_id)
            after, story = arrays.settle(array, group.ended, bool(group.open), self.now)
            if after is array:
                continue
            moved = True
            if after.state is JobState.COMPLETING:
                # As with any other stop, tasks that will never have a row need one where others wait for them.
                self.stop_array(array, ReasonCode.MAX_FAILS, after.reason_text or "")
                for task in world.tasks_of(world.jobs[array_id]):
                    self.cancel(task, "--max-fails")
                continue
            if after.state is JobState.CANCELLED and after.cancel_at is None:
                after = self._with_cause(after)
            self.put_job(after, *story)
        return moved

    def settle_dependencies(self) -> bool:
        """Let go what may start now and end what never can; whether anything was lined up."""
        world = self.world
        before = world.lined_up
        is_moving = True
        while is_moving:
            # The end of one may be what others wait for.
            is_moving = self.settle_arrays()
            for job, verdict in world.settle_dependencies(self.now):
                if transitions.ends_unsatisfied(job.spec, self.settings, is_spared=verdict.is_spared):
                    is_moving = True
                    self._give_up(job, ReasonCode.DEPENDENCY_NEVER_SATISFIED, verdict.text)
            # Only now: the array of such a task may have been given up whole.
            for job, text in world.settle_counterparts(self.now):
                if transitions.ends_unsatisfied(job.spec, self.settings):
                    is_moving = True
                    self._give_up(job, ReasonCode.DEPENDENCY_NEVER_SATISFIED, text)
        return world.lined_up != before

    def end_too_late(self) -> None:
        """End the pending jobs that can no longer meet their deadline, and what depends on them."""
        late = self.world.too_late(self.now)
        for job in late:
            if job.is_array:
                self.stop_array(job, ReasonCode.DEADLINE, "its deadline has passed")
                continue
            after, story = transitions.past_deadline(job, self.now)
            self.put_job(after, *story)
        if late:
            self.settle_dependencies()

    def _give_up(self, job: Job, code: ReasonCode, text: str) -> None:
        if job.is_array:
            self.stop_array(job, code, text)
            return
        after, story = transitions.give_up(job, self.now, code, text)
        self.put_job(after, *story)

    def make_fallbacks(self) -> None:
        """Make the fallbacks of all jobs that have failed for good in this tick.

        No limit on the number of jobs refuses them: the failed job has just made room.
        """
        for job in [job for job in self.changes.jobs.values() if wants_fallback(job)]:
            job_id = self.world.next_id
            self.world.next_id = job_id + 1
            failed, made, story = make_fallback(job, job_id, self.now, self.settings.default.output)
            self.put_job(failed)
            self.put_job(made, *story)

    def carry_out(self, plan: Plan) -> bool:
        """Record what the plan resumes and preempts; whether that freed or took anything at once."""
        moved = False
        for resume in plan.resumes:
            job = self.world.jobs[resume.job_id]
            if job.state is JobState.SUSPENDED:
                self.resume(job, "resumes: there is room again")
                moved = True
        for preempt in plan.preempts:
            moved |= self._preempt(preempt)
        return moved

    def _preempt(self, preempt: Preempt) -> bool:
        """Whether what the job held is free at once."""
        job = self.world.jobs[preempt.job_id]
        if job.state not in (JobState.RUNNING, JobState.SUSPENDED):
            return False
        if preempt.mode == PreemptMode.SUSPEND:
            if job.state is JobState.SUSPENDED:
                return False
            self.suspend(job, "policy", f"{preempt.text}; it resumes by itself")
            return True
        after, story = transitions.preempt(job, self.now, preempt.text)
        self.put_job(after, *story)
        return False

    def _with_cause(self, array: Job) -> Job:
        """An array that was never cancelled as one, and whose cancelled tasks could never have started."""
        tasks = self.jobs(JobFilter(arrays=frozenset({array.id})))
        reasons = {task.reason for task in tasks if task.state is JobState.CANCELLED}
        if reasons == {ReasonCode.DEPENDENCY_NEVER_SATISFIED}:
            return replace(array, reason=ReasonCode.DEPENDENCY_NEVER_SATISFIED)
        return array

    def resolve_device(self, target: str) -> str:
        """Node name or GPU UUID of what a person typed: `node`, `3`, `node:3`, a UUID or its beginning."""
        matches: set[str] = set()
        for node in self.nodes:
            if target == node.name:
                return node.name
            for gpu in node.gpus:
                label = gpu_label(gpu.index)
                names = (gpu.uuid, label, str(gpu.index), f"{node.name}:{label}", f"{node.name}:{gpu.index}")
                if target in names or (len(target) >= 8 and gpu.uuid.startswith(target)):
                    matches.add(gpu.uuid)
        if len(matches) == 1:
            return matches.pop()
        if target in self.world.drains:
            # A lost card can still be released by its UUID.
            return target
        nodes = ", ".join(node.name for node in self.nodes)
        problem = "is more than one GPU" if matches else "is neither a node nor a GPU"
        raise NotFound(f"{target!r} {problem} here ({nodes})", "list them with: ginfo")


def _asked(job: Job) -> tuple[object, ...]:
    """What a job waits for, and since when."""
    spec = job.spec
    return job.queued_at, spec.request, spec.time_limit_s, spec.queue, spec.reservation
