"""Watches the GPUs of running jobs and acts on idle ones.

Actions are recorded with the run, so that a restart repeats no step; idle times are measured from scratch
after a restart.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watch.looks import BackgroundLook
from gpusched.daemon.watch.overuse import gap_s
from gpusched.daemon.watches import NodeReading, ToldStory, Watch
from gpusched.lifecycle import idle, transitions
from gpusched.lifecycle.idle import Activity, GpuLoadReading, IdleStep, IdleStreak
from gpusched.model.cluster import GpuSample
from gpusched.model.job import Job, JobEvent, Request, Run
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Plan
from gpusched.model.spec import NICE_MAX
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_duration
from gpusched.model.value import replace
from gpusched.scheduler.request_units import squeeze

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler


_LEAST_GAP_S = 0.4
"""A reading that follows sooner says nothing new of use over minutes: while runs end there are many a second."""


@dataclass(frozen=True, slots=True)
class _WaitingClass:
    """Pending jobs that ask for GPUs."""

    key: ClassKey
    jobs: int
    missing: int | None
    """GPUs that each lacks; None if they wait for something else."""

    @property
    def gpus(self) -> int:
        """That all of them ask for."""
        return self.jobs * self.key.terms.request.total_gpus

    def still_waits(self, plan: Plan) -> bool:
        """Whether that is so by this plan, too."""
        return idle.missing_gpus(self.key.terms.request, plan.reasons.get(self.key)) is not None


class IdleWatch(Watch):
    """State of the runs with watched GPUs."""

    name = "idle GPUs"

    def __init__(self, cluster: ClusterNodes, outbox: AlertOutbox) -> None:
        self._cluster = cluster
        self._outbox = outbox
        self._watches: dict[str, IdleStreak] = {}
        self._watched_on: dict[str, list[str]] = {}
        """Runs that are watched, by their first node."""
        self._read_at: dict[str, float] = {}
        """When each node was read, as far as that counts."""
        self._told = ToldStory("idle")
        self._waiting: tuple[_WaitingClass, ...] = ()
        """Who waited for GPUs at the last look."""
        self._looked_at = self._freed_at = -inf

    def observe(self, found: NodeReading) -> None:
        """Take in a reading of a node, for the runs whose first node it is.

        Skips suspended runs and runs being stopped until they continue.
        """
        node, at, state, settings = found.node.name, found.reading.at, found.state, found.settings
        if 0 <= at - self._read_at.get(node, -inf) < _LEAST_GAP_S:
            return
        self._read_at[node] = at
        before = {handle: self._watches.pop(handle, None) for handle in self._watched_on.get(node, ())}
        self._told.keep(state.open_runs)
        self._watched_on[node] = watched = []
        for handle, run in state.open_by_node.on(node).items():
            if run.node != node:
                continue
            job = state.jobs.get(run.job_id)
            if not run.gpus or job is None or job.state is not JobState.RUNNING or run.start_at is None:
                continue
            if not settings.idle.after_s or idle.is_exempt(job.spec, settings):
                continue
            look = _look(at, _samples_of(run, at, self._cluster, settings), settings.idle.utilisation)
            self._watches[handle] = idle.add_reading(before.get(handle), look, settings.idle)
            watched.append(handle)

    def suspects(self) -> list[str]:
        """Runs with idle GPUs, for which other activity matters."""
        return [name for name, seen in self._watches.items() if seen.idle_at is not None]

    def note(self, activities: Mapping[str, Activity], settings: Settings) -> None:
        """Take in the activity of processes outside their GPUs."""
        for name, activity in activities.items():
            if name in self._watches:
                self._watches[name] = idle.add_activity(self._watches[name], activity, settings.idle)

    def why(self, run: Run, job: Job, settings: Settings, now: float) -> str | None:
        """A sentence if an open run is known to be idle: for how long, and what comes of it."""
        seen = self._watches.get(run.id)
        return idle.outlook(seen, now, settings.idle, can_requeue=job.spec.retry.requeue)

    def carry_out(self, tx: TickTransaction) -> None:
        settings = tx.settings.idle
        due: list[tuple[Job, Run, float]] = []
        for handle, run in list(tx.state.open_runs.items()):
            seen = self._watches.get(handle)
            job = tx.state.jobs.get(run.job_id)
            if job is None or (seen is None and run.idle_at is None) or job.state is not JobState.RUNNING:
                continue
            since = idle.idle_since(seen, tx.now, settings)
            step = idle.due(seen, run.idle_step, tx.now, settings, can_requeue=job.spec.retry.requeue)
            if step is IdleStep.ENDED and since is not None and settings.then == "requeue":
                due.append((job, run, since))
            elif step is not None and since is not None:
                self._take(step, job, run, since, tx)
            elif (since is None) != (run.idle_at is None):
                _mark(job, replace(run, idle_at=since), tx)
        if due:
            self._requeue(due, tx)

    def _take(self, step: IdleStep, job: Job, run: Run, since: float, tx: TickTransaction) -> None:
        if step is IdleStep.ENDED:
            _end(job, run, since, tx)
            return
        run = replace(run, idle_at=since, idle_step=int(step))
        text = f"its GPUs have been idle for {format_duration(tx.now - since)}"
        if step is IdleStep.TOLD:
            hint = "; end it with gcancel, or submit with --ignore-idle if this is intended"
            tx.notify(job, run, "idle", text + hint, f"{text}; end it if you are done with them")
            tx.put_run(run)
            self._outbox.tell(tx, job, "gpu_idle", text)
        else:
            nice = min(NICE_MAX, job.spec.nice + tx.settings.idle.nice)
            text = f"{text}: nice will be {nice} from its next run on, instead of {job.spec.nice}"
            tx.add_events(JobEvent(job.id, tx.now, "idle", text, run.number))
            _mark(replace(job, spec=replace(job.spec, nice=nice)), run, tx)

    def _requeue(self, due: Sequence[tuple[Job, Run, float]], tx: TickTransaction) -> None:
        """Requeue as many of these idle runs as jobs wait for their GPUs; the others continue."""
        runs = (*tx.state.open_runs.values(), *tx.state.releasing.values())
        freed = sum(len(run.gpus) for run in runs if _is_being_requeued(tx.state.jobs.get(run.job_id)))
        most = freed + sum(len(run.gpus) for _, run, _ in due)
        waiting = [one for one in self._who_waits(tx, freed) if one.missing is not None and one.missing <= most]
        for job, run, since in due:
            models = [squeeze(card.name) for share in run.gpus if (card := tx.samples.get(share.uuid)) is not None]
            mine = [one for one in waiting if _could_use(one.key.terms.request, run.nodes, models)]
            if sum(one.gpus for one in mine if one.still_waits(tx.plan)) > freed:
                freed += len(run.gpus)
                _end(job, run, since, tx)
            else:
                self._spare(job, run, since, tx)

    def _who_waits(self, tx: TickTransaction, freed: int) -> Sequence[_WaitingClass]:
        """Classes of jobs that ask for GPUs, as of at most a window ago: what they wait for may have to be worked out.

        Args: freed: GPUs that idle runs are about to leave; shortly after that, nobody: the next plan hands them out.
        """
        window_s = tx.settings.idle.window_s
        if freed:
            self._freed_at = tx.now
        elif 0 <= tx.now - self._freed_at < window_s:
            return ()
        if not 0 <= tx.now - self._looked_at < window_s:
            self._looked_at = tx.now
            self._waiting = tuple(islice(_waiting_classes(tx.state, tx.plan), _MOST_CLASSES))
        return self._waiting

    def _spare(self, job: Job, run: Run, since: float, tx: TickTransaction) -> None:
        """Tell the owner, once per run, that the run continues as long as nobody needs its GPUs."""
        if run.idle_at is None:
            _mark(job, replace(run, idle_at=since), tx)
        if self._told.told_at(run, "idle", tx, "spared") is None:
            self._told.note(run, tx.notify(job, run, "idle", _SPARED, about="spared"), tx)


_SPARED = "its GPUs are still idle; no job waits that could use them, so it continues, and is requeued once one does"
_MOST_CLASSES = 200
"""Classes of pending jobs that are looked at."""


def _waiting_classes(state: DaemonState, plan: Plan) -> Iterator[_WaitingClass]:
    """Classes that ask for GPUs, without jobs that an idle run has brought back: no idle run ends for the next one."""
    sizes = dict(state.eligible.sizes())
    for key, entries in state.eligible.entries():
        if key.terms.request.gpus:
            jobs = sizes[key] - sum(_was_idle(state.jobs.get(job_id)) for _, job_id in entries)
            if jobs > 0:
                yield _WaitingClass(key, jobs, idle.missing_gpus(key.terms.request, plan.reasons.get(key)))


def _was_idle(job: Job | None) -> bool:
    return job is not None and job.reason is ReasonCode.GPU_IDLE


def _is_being_requeued(job: Job | None) -> bool:
    return job is not None and job.state is JobState.COMPLETING and _was_idle(job)


def _could_use(request: Request, nodes: Sequence[str], models: Sequence[str]) -> bool:
    """Whether a request admits GPUs of these nodes and models, by the nodes and the type that it names."""
    named = request.nodelist or nodes
    if not any(node in named and node not in request.exclude for node in nodes):
        return False
    return request.gpu_type is None or any(squeeze(request.gpu_type) in model for model in models)


def _samples_of(run: Run, at: float, cluster: ClusterNodes, settings: Settings) -> list[GpuSample | None]:
    """What is known of a run's GPUs at an instant; None where a node's last reading is too old to say."""
    if not run.parts:
        return [cluster.sample(run.node, share.uuid) for share in run.gpus]
    found: list[GpuSample | None] = []
    for part in run.parts:
        node = cluster.get(part.node)
        is_known = node is not None and abs(at - node.read_at) <= gap_s(settings)
        found += [cluster.sample(part.node, share.uuid) if is_known else None for share in part.gpus]
    return found


def _look(at: float, cards: list[GpuSample | None], idle_up_to: float) -> GpuLoadReading:
    return GpuLoadReading(
        at,
        _busiest([None if card is None else card.utilisation for card in cards], idle_up_to),
        _busiest([None if card is None else card.memory_utilisation for card in cards], idle_up_to),
    )


def _busiest(values: list[float | None], idle_up_to: float) -> float | None:
    """The largest value; None if one is unknown and no other is busy by itself."""
    known = [value for value in values if value is not None]
    if len(known) == len(values) or (known and max(known) > idle_up_to):
        return max(known, default=None)
    return None


def _end(job: Job, run: Run, since: float, tx: TickTransaction) -> None:
    settings = tx.settings
    why = f"its GPUs have been idle for {format_duration(tx.now - since)}, and its processes did no other work"
    tx.put_run(replace(run, idle_at=since, idle_step=int(IdleStep.ENDED)))
    if settings.idle.then == "requeue":
        after, story = transitions.requeue_idle(job, tx.now, why)
    else:
        after, story = transitions.cancel_idle(job, tx.now, why)
    tx.put_job(after, *story)


def _mark(job: Job, run: Run, tx: TickTransaction) -> None:
    # A changed run alone would be carried over to a later commit.
    tx.put_job(job)
    tx.put_run(run)


_MOST_FILES = 1000
"""Limit on files to look at in a checkpoint folder."""


class ActivityReader:
    """Reads the other activity of runs with idle GPUs, once per [idle] window_s.

    Only if the settings may end such runs. Another thread looks at the files: they are the users', on any file
    system, and may never respond.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._look: BackgroundLook[dict[str, tuple[object, ...] | None]] = BackgroundLook(
            "files of idle runs", scheduler.failures
        )

    def poll(self) -> None:
        """Look if it is time and a run's GPUs are idle."""
        settings = self._scheduler.settings.idle
        if settings.then == "off" or not self._look.is_due():
            return
        names = self._scheduler.idle.suspects()
        if not names:
            return
        self._look.rest(settings.window_s)
        at = self._scheduler.now()
        cpu_s = self._scheduler.engine.cpu_seconds(names)
        saved = {name: self._scheduler.state.checkpoints.get(name) for name in names}
        files = {name: self._scheduler.answers.files_of(name) for name in names}

        def take(found: dict[str, tuple[object, ...] | None]) -> None:
            activities = {
                name: Activity(at, cpu_s.get(name), None if (mark := found[name]) is None else (*mark, saved[name]))
                for name in names
            }
            self._scheduler.idle.note(activities, self._scheduler.settings)

        self._look.begin(take, _look_at_files, files)


def _look_at_files(files: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[object, ...] | None]:
    return {name: marks_of(paths) for name, paths in files.items()}


def marks_of(paths: tuple[str, ...]) -> tuple[object, ...] | None:
    """A value that changes with any of these files, or files in these folders; None if one is hidden.

    A missing path counts too: the value changes when the file is created.
    """
    marks: list[object] = []
    try:
        for path in paths:
            marks.append(_file_mark(path))
            if os.path.isdir(path):
                with os.scandir(path) as entries:
                    inside = sorted(entry.path for _, entry in zip(range(_MOST_FILES), entries, strict=False))
                marks.extend(_file_mark(one) for one in inside)
    except OSError:
        return None
    return tuple(marks)


def _file_mark(path: str) -> object:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    # Output through a pipe or a terminal leaves no timestamp: unknown. A socket is that of a foreground run,
    # whose supervisor updates its timestamp.
    is_dated = any(kind(found.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISSOCK))
    if not is_dated and path != os.devnull:
        raise OSError(f"{path} does not show what is written to it")
    return found.st_mtime_ns, found.st_size
