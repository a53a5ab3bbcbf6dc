"""Watches the GPUs of running jobs and carries out what is due when they do nothing.

What was done is recorded with the run, so that a restart repeats no step; since when the GPUs are idle is measured
anew after one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpusched.lifecycle import idling, yielding
from gpusched.lifecycle.idling import Activity, Look, Step, Watch
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.execution import NoteOrder
from gpusched.model.job import NICE_MAX, Job, JobEvent, Run
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.units import format_duration
from gpusched.model.value import replace

from .turn import Turn
from .world import World

Tell = Callable[[Turn, Job, str], None]
"""Raises an alert about a job, with this text."""


class IdleWatch:
    """What is known of the runs whose GPUs are watched."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}

    def observe(self, reading: GpuReading, world: World, settings: Settings) -> None:
        """Take in a reading; runs that stand still or are being ended are left out until they go on."""
        samples = {} if reading.error is not None else {gpu.uuid: gpu for gpu in reading.gpus}
        seen: dict[str, Watch] = {}
        for handle, run in world.open_runs.items():
            job = world.jobs.get(run.job_id)
            if not run.gpus or job is None or job.state is not JobState.RUNNING or run.start_at is None:
                continue
            if not settings.idle.after_s or idling.is_exempt(job.spec, settings):
                continue
            look = _look(reading.at, [samples.get(share.uuid) for share in run.gpus], settings.idle.utilisation)
            seen[handle] = idling.watch(self._watches.get(handle), look, settings.idle)
        self._watches = seen

    def suspects(self) -> list[str]:
        """Runs with idle GPUs, of which one may want to know what else they do."""
        return [name for name, seen in self._watches.items() if seen.idle_at is not None]

    def note(self, activities: Mapping[str, Activity], settings: Settings) -> None:
        """Take in what processes did beside their GPUs."""
        for name, activity in activities.items():
            if name in self._watches:
                self._watches[name] = idling.note(self._watches[name], activity, settings.idle)

    def carry_out(self, turn: Turn, tell: Tell) -> None:
        """Record and order what is due; `tell` makes an alert of what the owner is told."""
        settings = turn.settings.idle
        for handle, run in list(turn.world.open_runs.items()):
            seen = self._watches.get(handle)
            job = turn.world.jobs.get(run.job_id)
            if job is None or (seen is None and run.idle_at is None) or job.state is not JobState.RUNNING:
                continue
            since = idling.idle_since(seen, turn.now, settings)
            step = idling.due(seen, run.idle_step, turn.now, settings, can_requeue=job.spec.retry.requeue)
            if step is not None and since is not None:
                _take(step, job, run, since, turn, tell)
            elif (since is None) != (run.idle_at is None):
                _mark(job, replace(run, idle_at=since), turn)


def _look(at: float, cards: list[GpuSample | None], idle_up_to: float) -> Look:
    return Look(
        at,
        _busiest([None if card is None else card.utilisation for card in cards], idle_up_to),
        _busiest([None if card is None else card.memory_utilisation for card in cards], idle_up_to),
    )


def _busiest(values: list[float | None], idle_up_to: float) -> float | None:
    """The largest; None when one is unknown and none of the others is busy by itself."""
    known = [value for value in values if value is not None]
    if len(known) == len(values) or (known and max(known) > idle_up_to):
        return max(known, default=None)
    return None


def _take(step: Step, job: Job, run: Run, since: float, turn: Turn, tell: Tell) -> None:
    run = replace(run, idle_at=since, idle_step=int(step))
    long = format_duration(turn.now - since)
    if step is Step.TOLD:
        record_idle(job, run, f"its GPUs have done nothing for {long}", turn, tell)
    elif step is Step.LOWERED:
        nice = min(NICE_MAX, job.spec.nice + turn.settings.idle.nice)
        text = f"its GPUs have done nothing for {long}: nice is {nice} from its next run on, instead of {job.spec.nice}"
        turn.tell(JobEvent(job.id, turn.now, "idle", text, run.number))
        _mark(replace(job, spec=replace(job.spec, nice=nice)), run, turn)
    else:
        _end(job, run, long, turn)


def record_idle(job: Job, run: Run, text: str, turn: Turn, tell: Tell) -> None:
    """The event `gpu_idle`: the owner is told, once for each run, by the job's story and by an alert if wanted."""
    hint = "; end it with gcancel, or submit with --ignore-idle if that is meant"
    turn.tell(JobEvent(job.id, turn.now, "idle", text + hint, run.number))
    if job.spec.interactive is not None:
        turn.signal(run.id, NoteOrder(f"job {job.shown_id}: {text}; end it if you are done with them"))
    _mark(job, run, turn)
    tell(turn, job, text)


def _end(job: Job, run: Run, long: str, turn: Turn) -> None:
    settings = turn.settings
    why = f"its GPUs have done nothing for {long}, nor have its processes"
    turn.put_run(run)
    if settings.idle.then == "requeue":
        after, story = yielding.requeue_idle(job, turn.now, why)
    else:
        after, story = yielding.cancel_idle(job, turn.now, why)
    turn.put_job(after, *story)


def _mark(job: Job, run: Run, turn: Turn) -> None:
    # A run alone would wait for the next commit.
    turn.put_job(job)
    turn.put_run(run)
