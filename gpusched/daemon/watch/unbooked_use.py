"""Watches jobs on GPUs that they did not book, and intruders on GPUs that jobs did; carries out what is due.

Notifications are in the job's story, so a restart repeats none; since when an intruder is there is
measured again after one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from logging import getLogger

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watch.overuse import KEPT_S, gap_s
from gpusched.gpu.tracker import GpuTracker
from gpusched.lifecycle.overuse import (
    Intruder,
    Sighting,
    UnbookedReading,
    UnbookedStep,
    due_unbooked_step,
    end_unbooked_use,
    intruder_mark,
    intruder_text,
    intruders_of,
    is_worth_telling,
    sighted,
    unbooked_mark,
    unbooked_text,
    unbooked_victim,
)
from gpusched.model.cluster import GpuReading
from gpusched.model.job import Job, JobEvent, Run, split_run_id
from gpusched.model.settings import Settings
from gpusched.model.states import JobState

log = getLogger("gpusched.daemon")
Notify = Callable[[TickTransaction, Job, str, str, str], None]
"""Raises an alert about a job: the event, what it is about among others of that event, the text."""
UNBOOKED, INTRUDER = "unbooked", "intruder"
"""Kinds of events in a job's story: it uses a GPU that it did not book; an intruder is on one that it booked."""
_MOST_LOOKS = 200


class IntruderWatch:
    """What is known of intruders, by GPU."""

    def __init__(self) -> None:
        self._sightings: dict[tuple[str, str | int], Sighting] = {}
        self._looks: dict[str, deque[UnbookedReading]] = {}
        self._stories: dict[str, list[JobEvent]] = {}
        """By run, the notifications of its owner."""
        self._is_fresh = False
        """A reading has come since the last look at what is due."""

    def observe(self, reading: GpuReading, tracker: GpuTracker, world: DaemonState, settings: Settings) -> None:
        """Take in a reading that the tracker has folded."""
        at, gap, self._is_fresh = reading.at, gap_s(settings), True
        found: dict[str, list[Intruder]] = {}
        if reading.error is None:
            on = tracker.intruders()
            found = {gpu.uuid: intruders_of(gpu.uuid, gpu.index, on.get(gpu.uuid, ())) for gpu in reading.gpus}
        before, self._sightings = self._sightings, {}
        shares = tracker.shares()
        for uuid, ones in found.items():
            for one in ones:
                self._sightings[one.key] = sighted(before.get(one.key), one, at, gap)
            unbooked = tuple(one for one in ones if one.run is not None)
            if unbooked:
                look = UnbookedReading(at, uuid, unbooked, tuple(shares.get(uuid, ())))
                self._looks.setdefault(uuid, deque(maxlen=_MOST_LOOKS)).append(look)
        for uuid in [uuid for uuid, looks in self._looks.items() if at - looks[-1].at > KEPT_S]:
            del self._looks[uuid]
        self._stories = {run: story for run, story in self._stories.items() if run in world.open_runs}

    def unbooked(self, run: str | None = None) -> list[Intruder]:
        """Runs on GPUs that they did not book, as of the last reading; by GPU. Args: run: of this one alone."""
        found = [seen.intruder for seen in self._sightings.values()]
        mine = [one for one in found if one.run is not None and run in (None, one.run)]
        return sorted(mine, key=lambda one: (one.index, one.run or ""))

    def on(self, run: Run) -> list[Intruder]:
        """Intruders on the GPUs that a run booked, as of the last reading."""
        own = {share.uuid for share in run.gpus}
        found = [seen.intruder for seen in self._sightings.values() if seen.intruder.uuid in own]
        return sorted(found, key=lambda one: (one.index, one.process.pid))

    def reload(self) -> None:
        """The memory was rebuilt from the table: only notifications that are recorded there count."""
        self._stories = {}

    # --- in a tick --------------------------------------------------------------------------------

    def carry_out(self, tx: TickTransaction, notify: Notify) -> None:
        """Record and order what is due, once for each reading; `notify` raises the owner's alert."""
        if not self._is_fresh:
            return
        self._is_fresh = False
        for seen in self._sightings.values():
            one = seen.intruder
            if one.run is not None:
                self._of_unbooked(one.run, seen, tx, notify)
            if is_worth_telling(seen, tx.settings.gpu):
                for run in _booked_by(one.uuid, tx.world):
                    self._notify_booker(run, one, tx, notify)

    def _of_unbooked(self, handle: str, seen: Sighting, tx: TickTransaction, notify: Notify) -> None:
        run, job = _running(handle, tx.world)
        if run is None or job is None or due_unbooked_step(seen, None, tx.now, tx.settings.gpu) is None:
            return
        one = seen.intruder
        step = due_unbooked_step(seen, self._told_at(run, UNBOOKED, unbooked_mark(one), tx), tx.now, tx.settings.gpu)
        if step is UnbookedStep.TELL:
            text = unbooked_text(one, job, run.gpus, tx.settings.gpu)
            log.warning("job %s: %s", job.shown_id, text)
            self._stories[run.id].append(tx.notify(job, run, UNBOOKED, text))
            notify(tx, job, "gpu_unbooked", one.uuid, text)
        elif step is UnbookedStep.END:
            log.warning("ending run %s: it used GPU %d, which it did not book", run.id, one.index)
            after, story = end_unbooked_use(job, one, tx.now)
            tx.put_job(after, *story)

    def _notify_booker(self, run: Run, one: Intruder, tx: TickTransaction, notify: Notify) -> None:
        """Tell the owner of a job of an intruder on its GPU, once each."""
        _, job = _running(run.id, tx.world)
        mark = intruder_mark(one, _names(tx.world))
        if job is None or self._told_at(run, INTRUDER, mark, tx) is not None:
            return
        text = intruder_text(one, _names(tx.world))
        # The story is filtered for its reader; a message must leave private names out from the start.
        sent = text if one.run is None else _veiled(text, one.run, job, tx)
        self._stories[run.id].append(tx.notify(job, run, INTRUDER, text, sent))
        notify(tx, job, "gpu_intruder", f"{one.uuid} {one.key[1]}", sent)

    def _told_at(self, run: Run, kind: str, mark: str, tx: TickTransaction) -> float | None:
        """When the owner was notified; the story is read once per run, since that may have been before a restart."""
        if run.id not in self._stories:
            story = tx.store.events(run.job_id)
            kinds = (UNBOOKED, INTRUDER)
            self._stories[run.id] = [one for one in story if one.kind in kinds and one.run == run.number]
        told = [one.at for one in self._stories[run.id] if one.kind == kind and one.text.startswith(mark)]
        return max(told, default=None)

    def judge(self, job: Job, run: Run, tx: TickTransaction) -> Run:
        """The ended run, as a victim of a job that did not book its GPU if it is one."""
        looks = sorted((look for share in run.gpus for look in self._looks.get(share.uuid, ())), key=lambda one: one.at)
        return unbooked_victim(run, looks, tx.settings.gpu, _names(tx.world))


def _running(handle: str, world: DaemonState) -> tuple[Run | None, Job | None]:
    """An open run and its job, unless it is being ended."""
    run = world.open_runs.get(handle)
    job = None if run is None else world.jobs.get(run.job_id)
    return (run, job) if job is not None and job.state is JobState.RUNNING else (None, None)


def _veiled(text: str, handle: str, to: Job, tx: TickTransaction) -> str:
    """The text without the name of another user's job where these are private."""
    other = tx.world.find(split_run_id(handle)[0])
    if "jobs" not in tx.settings.access.private_data or other is None or other.uid == to.uid:
        return text
    return text.replace(f"job {other.shown_id}", "another job", 1)


def _booked_by(uuid: str, world: DaemonState) -> list[Run]:
    return [run for run in world.open_runs.values() if any(share.uuid == uuid for share in run.gpus)]


def _names(world: DaemonState) -> Callable[[str], str]:
    return lambda handle: world.name_of(split_run_id(handle)[0])
