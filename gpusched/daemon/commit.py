"""The transaction of one tick: rows to commit together, and signals to send afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from gpusched.access import Act, Audience
from gpusched.daemon.launch.containers import ContainerHost
from gpusched.daemon.nodes import ClusterLayouts
from gpusched.daemon.state import DaemonState
from gpusched.errors import GpuschedError, NotFound
from gpusched.lifecycle import arrays, transitions
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.lifecycle.fallback import make_fallback, wants_fallback
from gpusched.model.alerts import Alert
from gpusched.model.batch import Batch
from gpusched.model.cluster import Clearance, DrainCause, DrainEntry, Drainer, GpuSample, NodeView
from gpusched.model.commands import Caller
from gpusched.model.container import by_hand
from gpusched.model.execution import EnterOrder, NoteOrder, SignalOrder, StepStopOrder, StopOrder
from gpusched.model.job import Job, JobEvent, JobSpec, Run, run_id
from gpusched.model.mentions import START
from gpusched.model.mig import CardLayout
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement, Plan, Preempt, PreemptMode, Usage
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.step import JobStep
from gpusched.model.table_settings import Key, TableSetting
from gpusched.model.tariff import Tariff
from gpusched.model.units import gpu_label, name_some
from gpusched.model.value import replace
from gpusched.ports import Changes, Handover, JobFilter, Store
from gpusched.ports.tables import (
    BATCHES,
    CALENDAR,
    CLEARANCES,
    DRAINERS,
    DRAINS,
    FENCES,
    KEPT_PLACES,
    MIG_LAYOUTS,
    STEPS,
    TABLE_SETTINGS,
    USAGE,
    Table,
)
from gpusched.predict.limits import LimitAdvice
from gpusched.scheduler.cluster_state import ClusterLayout

K = TypeVar("K")
V = TypeVar("V")

Signal = SignalOrder | NoteOrder | StopOrder | StepStopOrder | EnterOrder
"""A one-time message to a run; a StopOrder only repeats a recorded stop."""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """An action on another user's job or process, or a refused attempt, for the audit record."""

    caller: Caller
    what: str
    target: str
    owner: str | None = None
    refused: str | None = None
    """Why it was refused; None when it was carried out."""


@dataclass(frozen=True, slots=True)
class SettingEffect:
    """A change of a machine that an admin set by command, or its failure, for the record of settings."""

    caller: Caller
    what: str
    """The command, or what happened."""
    key: str
    before: str | None
    after: str | None


_NO_PLAN = Plan()


class TickTransaction:
    """Collects changes and applies them to the memory, so that later steps see earlier ones.

    One class: all that a verb, a watch or a step of the lifecycle may do to rows, in one commit.

    Args: view_nodes: returns the current nodes. advise_limit: returns the time limit that similar jobs of a
    user keep to. has_read: whether a job of a user near a data set has completed lately. handover: what jobs can be
    handed over to. containers: what jobs run in containers with; None where none can be. tariff: what energy costs and
    emits over time. samples: all GPUs of nodes whose driver responds, as read last, by UUID. plan: the newest one.
    layouts: those of earlier transactions.
    """

    def __init__(
        self,
        state: DaemonState,
        store: Store,
        settings: Settings,
        view_nodes: Callable[[], tuple[NodeView, ...]],
        now: float,
        *,
        advise_limit: Callable[[str, JobSpec], LimitAdvice | None] = lambda user, spec: None,
        has_read: Callable[[str, str], bool] = lambda user, data: False,
        handover: Handover | None = None,
        containers: ContainerHost | None = None,
        tariff: Tariff | None = None,
        samples: Mapping[str, GpuSample] = MappingProxyType({}),
        plan: Plan = _NO_PLAN,
        layouts: ClusterLayouts | None = None,
    ) -> None:
        self.state = state
        self.store = store
        self.settings = settings
        self.now = now
        self.advise_limit = advise_limit
        self.has_read = has_read
        self.handover = handover
        self.containers = containers
        self.tariff = tariff
        self.samples = samples
        self.plan = plan
        self._view_nodes = view_nodes
        self._nodes: tuple[NodeView, ...] | None = None
        """None after a change to a GPU or node."""
        self._layouts = ClusterLayouts() if layouts is None else layouts
        self.changes = Changes()
        self.signals: list[tuple[str, Signal]] = []
        self.forgettable: list[str] = []
        """Runs whose end is part of this commit: afterwards the engine may drop their spool."""
        self.releasing: set[int] = set()
        """Jobs whose runs have ended in this tick and whose GPUs are not proven clean."""
        self.before: dict[int, Job | None] = {}
        """Rows of the changed jobs before this tick; None for a new job."""
        self.waited: list[tuple[str, float]] = []
        """Queue and wait (s) of each start; the wait counts from when only the scheduler kept it from starting."""
        self.keys: dict[tuple[int, str], int] = {}
        """Jobs created in this tick, by owner and key."""
        self.cut_short: dict[int, GpuschedError] = {}
        """Batches that were cancelled before all of their jobs were made, by first id: what their clients are told."""
        self.audit_events: list[AuditEvent] = []
        self.effects: list[SettingEffect] = []
        self.settings_record: list[tuple[Caller, str, dict[str, Any]]] = []
        """Changes of settings of the table, for their record: who made them, with which command, and all after it."""
        self.news: list[AdminEvent] = []
        """Alerts for the administrator, to be added to this commit."""
        self.messages: list[Alert] = []
        """Alerts to users about no particular job, to be added to this commit."""
        self.must_plan = False
        """Whether to plan although no job may have changed."""
        self.awaits_readings = False
        """Whether starts of the plan of this tick await new readings."""
        self._undo: list[Callable[[], object]] = []

    def if_dropped(self, undo: Callable[[], object]) -> None:
        """Have `undo` called if this tick is not recorded.

        For what is noted outside of the rows and the memory, which are reloaded then: that somebody was told, or that
        something was looked at.
        """
        self._undo.append(undo)

    def restore_if_dropped(self, owner: object, *names: str) -> None:
        """Have attributes of `owner`, which are about to be set, set back if this tick is not recorded."""
        for name in names:
            self._undo.append(partial(setattr, owner, name, getattr(owner, name)))

    def take_undo(self) -> list[Callable[[], object]]:
        """What to call, in order, when the tick is dropped."""
        taken, self._undo = self._undo[::-1], []
        return taken

    def audit(self, caller: Caller, act: Act, job: Job) -> None:
        """Record, with the commit, an action on another user's job."""
        if caller.uid != job.uid:
            self.audit_events.append(AuditEvent(caller, str(act), f"job {job.shown_id}", job.user))

    def audit_hidden(self, caller: Caller, job: Job) -> None:
        self.audit_events.append(AuditEvent(caller, "name", f"job {job.shown_id}", job.user, "hidden by private_data"))

    def put_job(self, job: Job, *events: JobEvent) -> None:
        """Record a new or changed job and its story; add a row for an array task that had none."""
        fenced = self.state.find(job.id) if self.state.rows[FENCES] else None
        if job.array_id is not None and job.id not in self.state.jobs:
            array = self.state.array_of_unsplit(job.id)
            if array is not None and job.task is not None:
                self.put_job(arrays.split(array, (job.task,), job.start_at))
                self.state.arrays.split(job)
        if job.id not in self.before:
            before = self.before[job.id] = self.state.jobs.get(job.id)
            # Tasks carry the key of their array, but the key refers to the array.
            if job.spec.key is not None and before is None and job.array_id is None:
                self.keys[job.uid, job.spec.key] = job.id
        self.changes.jobs[job.id] = job
        self.state.put_job(job, self.now)
        if fenced is not None:
            self._settle_fences(fenced, job)
        self.add_events(*events)
        if job.state.is_final and job.spec.image_job is not None and job.spec.launch.image_digest is None:
            self._end_unwanted_pull(job, job.spec.image_job)

    def _end_unwanted_pull(self, job: Job, pull_id: int) -> None:
        """Cancel the first pull of an image that this job, which has ended, was the last one to wait for."""
        pull = self.state.jobs.get(pull_id)
        if pull is not None and pull.cancel_at is None and not self.state.dependents.children_of(pull_id):
            self.cancel(pull, f"{job.user} with job {job.shown_id}")

    def fence(self, job_id: int, fence_at: float | None) -> None:
        """Record the instant from which nothing overtakes a pending job.

        None: the next reservation for it begins a new wait.
        """
        self.put_row(FENCES, job_id, fence_at)
        self.state.note_fence(job_id)
        if fence_at is None and job_id in self.state.rows[KEPT_PLACES]:
            self.put_row(KEPT_PLACES, job_id, None)

    def set_in_table(self, key: Key, value: TableSetting | None) -> None:
        """Record a setting of the table; None deletes it."""
        self.put_row(TABLE_SETTINGS, key, value)
        if key[0] == "pause":
            self.state.look_at_pauses(self.now)
            for job_id in [one for one in self.state.rows[FENCES] if self.state.class_of(one) is None]:
                self.fence(job_id, None)

    def keep_place(self, job_id: int, place: Placement) -> None:
        """Record the placement that stays reserved for a pending job past its fence."""
        self.put_row(KEPT_PLACES, job_id, place)

    def _settle_fences(self, before: Job, job: Job) -> None:
        """Remove the fence of a job, or of an array's tasks, that no longer waits or waits for something else."""
        state = self.state
        waits = job.state is JobState.PENDING and state.class_of(job.id) is not None
        if waits and _asked(before) == _asked(job):
            return
        ids = [job.id] if job.id in state.rows[FENCES] else []
        if job.is_array:
            ids = [one for one in state.rows[FENCES] if job.id < one <= job.last_id and one not in state.jobs]
        for job_id in ids:
            self.fence(job_id, None)

    def put_row(self, table: Table[K, V], key: K, value: V | None) -> None:
        """Record a row of a table that the memory has whole; None deletes it."""
        self.changes.rows[table][key] = value
        self.state.rows.put(table, key, value)

    def put_batch(self, batch: Batch) -> None:
        """Record a batch, and how many of its jobs are made."""
        self.changes.rows[BATCHES][batch.first_id] = batch if batch.left or batch.key is not None else None
        self.state.put_batch(batch)

    def put_run(self, run: Run) -> None:
        self.changes.runs[run.id] = run
        self.state.put_run(run)

    def put_step(self, step: JobStep) -> None:
        self.changes.rows[STEPS][step.id] = step
        self.state.steps.put(step)

    def put(self, job: Job, run: Run, events: Iterable[JobEvent]) -> None:
        """Record a lifecycle step: the job if it has changed, the run, and their events."""
        if job is not self.state.jobs.get(job.id):
            self.put_job(job)
        self.put_run(run)
        self.add_events(*events)

    def add_events(self, *events: JobEvent) -> None:
        self.changes.events.extend(events)

    def text_for(self, owner: Caller, text: str) -> str:
        """A sentence as the owner of a job may read it."""
        if START not in text:
            return text
        calendar = self.state.rows[CALENDAR]
        return Audience(owner, self.settings, self.state.find, self.state.jobs, calendar).text(text)

    def notify(
        self, job: Job, run: Run, kind: str, text: str, sent: str | None = None, about: str | None = None
    ) -> JobEvent:
        """Notify the owner by the job's story and, for foreground jobs, at the terminal (there by `sent` if given)."""
        event = JobEvent(job.id, self.now, kind, text, run.number, about)
        if job.spec.interactive is not None:
            self.signal(
                run.id, NoteOrder(f"job {job.shown_id}: {self.text_for(Caller(job.uid, job.user), sent or text)}")
            )
        self.put_job(job, event)
        return event

    def charge(self, usage: Usage | None) -> None:
        """Record the new usage of an account and user; None for no change."""
        if usage is not None:
            self.put_row(USAGE, (usage.account, usage.user), usage)
            self.state.note_charge(usage)

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """The nodes, including everything that this tick has done to them and their GPUs so far."""
        if self._nodes is None:
            self._nodes = self._view_nodes()
        return self._nodes

    def drain(self, name: str, message: str, cause: DrainCause, by: Drainer | None = None) -> None:
        """Record that a node, or a GPU by UUID, accepts no new work. Args: by: None for the daemon itself."""
        self.put_row(DRAINS, name, DrainEntry(message, cause))
        self.put_row(DRAINERS, name, by)
        self.view_again()

    def undrain(self, name: str) -> bool:
        """Record that a node, or a GPU by UUID, accepts new work; return whether it was drained."""
        is_drained = name in self.state.rows[DRAINS]
        self.put_row(DRAINS, name, None)
        self.put_row(DRAINERS, name, None)
        self.view_again()
        return is_drained

    def put_mig_layout(self, layout: CardLayout) -> None:
        """Record the MIG layout that was set for a card, or what became of it."""
        self.put_row(MIG_LAYOUTS, layout.uuid, layout)
        self.view_again()

    def forget_mig_layout(self, uuid: str) -> None:
        """Record that a card has no MIG layout by command any more."""
        self.put_row(MIG_LAYOUTS, uuid, None)
        self.view_again()

    def clear(self, clearance: Clearance) -> None:
        """Record that a GPU is healthy."""
        self.put_row(CLEARANCES, clearance.uuid, clearance)
        self.view_again()

    def begin_release(self, run: Run) -> None:
        """Keep the GPUs of an ended run booked until they are proven clean."""
        self.state.begin_release(run)
        self.releasing.add(run.job_id)

    def view_again(self) -> None:
        """Drop the cached view of nodes and GPUs after a change to one of them."""
        self._nodes = None

    def layout(self, nodes: tuple[str, ...] | None = None) -> ClusterLayout:
        """The nodes of this tick with the amounts that can be booked on them. Args: nodes: only these; None: all."""
        return self._layouts.of(nodes, self.nodes, self.settings)

    def signal(self, run: str, order: Signal) -> None:
        """Send an order after the commit, at most once: it is lost if the daemon is killed in between.

        Lasting orders (a stop, a suspension, a time limit) are recorded with the job instead, see `reconcile`.
        """
        self.signals.append((run, order))

    def run_of(self, job: Job) -> Run:
        """The open run of a job that is RUNNING or COMPLETING."""
        return self.state.open_runs[run_id(job.id, job.run)]

    def jobs(self, wanted: JobFilter) -> list[Job]:
        """Like `Store.jobs` for ids, arrays or pipelines only, as the table will be after this tick's commit.

        A filter without any of them finds nothing.
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
        self.put(*transitions.resume(job, self.run_of(job), self.now, text))

    def cancel(self, job: Job, by: str, user: str = "root") -> None:
        """End a pending job at once, ask the engine to stop a running one; for an array, all its tasks.

        Args: by: who did so and how, as stories tell it; user: who did so.
        """
        if job.is_array:
            self.stop_array(job, ReasonCode.CANCELLED_BY_USER, f"cancelled by {by}", user)
            for one in self.state.tasks_of(job):
                self.cancel(one, by, user)
            return
        after, events = transitions.cancel(job, self.now, by, user)
        if after is job and run_id(job.id, job.run) in self.state.open_runs:
            # Already cancelled: repeat the stop at once.
            self.signal(run_id(job.id, job.run), StopOrder("cancel"))
        self.put_job(after, *events)

    def stop_array(self, array: Job, code: ReasonCode, text: str, cancelled_by: str | None = None) -> None:
        """End the tasks without a row and leave the others alone; the array ends when they have ended."""
        if array.state is JobState.PENDING:
            for task in self.state.awaited_tasks(array):
                # Another job depends on this one, so its end needs a row.
                after, events = transitions.give_up(task, self.now, code, text)
                self.put_job(replace(after, cancelled_by=cancelled_by), *events)
        after, story = arrays.stop(self.state.jobs[array.id], self.now, code, text, cancelled_by)
        self.put_job(after, *story)

    def settle_arrays(self) -> bool:
        """End arrays whose tasks have all ended, stop those with too many failures; return whether any changed."""
        moved = False
        state = self.state
        for array_id in state.arrays.take_touched():
            array = state.jobs[array_id]
            group = state.arrays.group(array_id)
            after, story = arrays.settle(array, group.ended, bool(group.open), self.now)
            if after is array:
                continue
            moved = True
            if after.state is JobState.COMPLETING:
                # As with any other stop, tasks without a row need one if other jobs wait for them.
                self.stop_array(array, ReasonCode.MAX_FAILS, after.reason_text or "")
                for task in state.tasks_of(state.jobs[array_id]):
                    self.cancel(task, "--max-fails")
                continue
            if after.state is JobState.CANCELLED and after.cancel_at is None:
                after = self._with_cause(after)
            self.put_job(after, *story)
        return moved

    def settle_dependencies(self) -> bool:
        """Queue jobs with satisfied dependencies, end those that can never start; return whether any was queued."""
        state = self.state
        before = state.lined_up
        is_moving = True
        while is_moving:
            # The end of a job may settle others.
            is_moving = self.settle_arrays()
            for job, verdict in state.settle_dependencies(self.now):
                if verdict.is_image:
                    is_moving = True
                    self._give_up(job, ReasonCode.IMAGE_PULL_FAILED, f"{verdict.text}{self._by_hand(job)}")
                elif transitions.ends_unsatisfied(job.spec, self.settings, is_spared=verdict.is_spared):
                    is_moving = True
                    self._give_up(job, ReasonCode.DEPENDENCY_NEVER_SATISFIED, verdict.text)
            # Only now: the whole array of such a task may have been given up above.
            for job, text in state.settle_counterparts(self.now):
                if transitions.ends_unsatisfied(job.spec, self.settings):
                    is_moving = True
                    self._give_up(job, ReasonCode.DEPENDENCY_NEVER_SATISFIED, text)
        return state.lined_up != before

    def _by_hand(self, job: Job) -> str:
        """What to type about an image that could not be pulled, to follow a sentence."""
        runtime = None if self.containers is None else self.containers.runtime(self.settings.containers)
        image = job.spec.launch.image
        return "" if runtime is None or image is None else f"; try: {by_hand(runtime, image)}"

    def end_too_late(self) -> None:
        """End pending jobs that can no longer meet their deadline, and the jobs that depend on them."""
        late = self.state.too_late(self.now)
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
        """Create the fallbacks of all jobs that have failed for good in this tick.

        No job number limit refuses them: the failed job has just made room.
        """
        for job in [job for job in self.changes.jobs.values() if wants_fallback(job)]:
            job_id = self.state.next_id
            self.state.next_id = job_id + 1
            failed, made, story = make_fallback(job, job_id, self.now, self.settings.default.output)
            self.put_job(failed)
            self.put_job(made, *story)

    def carry_out(self, plan: Plan) -> bool:
        """Record the resumes and preemptions of the plan; return whether any resources changed at once."""
        moved = False
        for resume in plan.resumes:
            job = self.state.jobs[resume.job_id]
            if job.state is JobState.SUSPENDED:
                self.resume(job, "resumes: there is room again")
                moved = True
        for preempt in plan.preempts:
            moved |= self._preempt(preempt)
        return moved

    def _preempt(self, preempt: Preempt) -> bool:
        """Return whether the job's resources are free at once."""
        job = self.state.jobs[preempt.job_id]
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
        """Set the reason of an array whose cancelled tasks could never have started, if it was not cancelled itself."""
        tasks = self.jobs(JobFilter(arrays=frozenset({array.id})))
        reasons = {task.reason for task in tasks if task.state is JobState.CANCELLED}
        if reasons == {ReasonCode.DEPENDENCY_NEVER_SATISFIED}:
            return replace(array, reason=ReasonCode.DEPENDENCY_NEVER_SATISFIED)
        return array

    def resolve_device(self, target: str) -> str:
        """Resolve user input (`node`, `3`, `node:3`, a UUID or a prefix of it) to a node name or GPU UUID."""
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
        if target in self.state.rows[DRAINS]:
            # A lost card can still be released by its UUID.
            return target
        if matches:
            named = sorted(
                f"{node.name}:{gpu_label(gpu.index)}" for node in self.nodes for gpu in node.gpus if gpu.uuid in matches
            )
            raise NotFound(f"{target!r} is more than one GPU here", f"name one of them: {name_some('', named)}")
        nodes = ", ".join(node.name for node in self.nodes)
        raise NotFound(f"{target!r} is neither a node nor a GPU here ({nodes})", "list them with: ginfo")


def _asked(job: Job) -> tuple[object, ...]:
    """The wait of a job: its request, and since when it has been queued."""
    spec = job.spec
    return job.queued_at, spec.request, spec.time_limit_s, spec.queue, spec.reservation


def must_record(changes: Changes) -> bool:
    """Whether changes need a commit now; a confirmed start waits for the next one, since the spool has it too."""
    return bool(changes.jobs or changes.events or changes.payloads or any(changes.rows.values())) or any(
        run.state is not RunState.RUNNING for run in changes.runs.values()
    )


def is_recorded(changes: Changes, store: Store) -> bool:
    """Whether a commit that raised succeeded all the same, since the table contains all its changes."""
    jobs = store.jobs(JobFilter(ids=frozenset(changes.jobs))) if changes.jobs else []
    runs = store.runs({run.job_id for run in changes.runs.values()})
    tables: list[tuple[Mapping[Any, object], Mapping[Any, object]]] = [
        (changes.jobs, {job.id: job for job in jobs}),
        (changes.runs, {run.id: run for run in runs}),
        *((changed, store.find(table, changed)) for table, changed in changes.rows.items()),
    ]
    found = [table.get(name) == row for wanted, table in tables for name, row in wanted.items()]
    return bool(found) and all(found)
