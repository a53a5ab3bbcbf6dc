"""Watches GPU use beyond what jobs booked, and acts on it.

`OveruseWatch` watches runs on shared GPUs, `IntruderWatch` jobs on GPUs they did not book and intruders on
booked GPUs. Notifications are in the job's story, so that a restart repeats none; how long a run has been over
its booking, or an intruder present, is measured from scratch after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from logging import getLogger

from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import NodeReading, ToldStory, Watch
from gpusched.gpu.usage import enforcement
from gpusched.lifecycle import overuse
from gpusched.lifecycle.overuse import (
    Intruder,
    OveruseStep,
    OveruseStreak,
    SharedGpuReading,
    Sighting,
    UnbookedReading,
    due_unbooked_step,
    end_unbooked_use,
    intruder_text,
    intruders_of,
    is_worth_telling,
    sighted,
    unbooked_text,
    unbooked_victim,
)
from gpusched.model.cluster import GpuSample, ShareFacts, ShareUse
from gpusched.model.job import Job, JobEvent, Run, split_run_id
from gpusched.model.mentions import mention_job
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.units import format_duration, format_size_mib

log = getLogger("gpusched.daemon")
OVER, CROWDED = "vram", "crowded"
"""Kinds of story events: the job holds too much; another job does."""
_LEAST_GAP_S = 30.0
KEPT_S = 60.0
"""How long readings of a GPU are kept to explain the death of a run."""
_MOST_LOOKS = 200


class OveruseWatch(Watch):
    """State of the runs that share GPUs."""

    name = "VRAM overuse"

    def __init__(self, outbox: AlertOutbox) -> None:
        self._outbox = outbox
        self._watches: dict[tuple[str, str], OveruseStreak] = {}
        """By run and node: a reading of one node says nothing about the others."""
        self._looks: dict[str, deque[SharedGpuReading]] = {}
        self._shares: dict[str, tuple[ShareUse, ...]] = {}
        self._read_on: dict[str, frozenset[str]] = {}
        """By node, the GPUs that `_shares` has of its last reading."""
        self._watched_on: dict[str, list[str]] = {}
        """By node, the runs that `_watches` has there."""
        self._told = ToldStory(OVER, CROWDED)

    def observe(self, found: NodeReading) -> None:
        node, tracker, state, settings = found.node.name, found.node.tracker, found.state, found.settings
        at = found.reading.at
        fresh = {} if found.reading.error is not None else tracker.shares()
        for uuid in self._read_on.get(node, ()):
            self._shares.pop(uuid, None)
        self._shares.update(fresh)
        self._read_on[node] = frozenset(fresh)
        uses: dict[str, list[ShareUse]] = {}
        for uuid, shares in fresh.items():
            for use in shares:
                uses.setdefault(use.run, []).append(use)
            if shares:
                self._looks.setdefault(uuid, deque(maxlen=_MOST_LOOKS)).append(SharedGpuReading(at, shares))
            elif (looks := self._looks.get(uuid)) is not None and at - looks[-1].at > KEPT_S:
                del self._looks[uuid]
        before = {run: self._watches.pop((run, node), None) for run in self._watched_on.get(node, ())}
        pause_s = gap_s(settings)
        self._watched_on[node] = watched = []
        for run in state.open_by_node.on(node).values():
            if any(not share.is_whole and tracker.knows(share.uuid) for share in run.gpus):
                watched.append(run.id)
                streak = overuse.add_reading(before.get(run.id), at, uses.get(run.id, []), settings.gpu, pause_s)
                self._watches[run.id, node] = streak
        self._told.keep(state.open_runs)

    def facts(self, run: Run, samples: Mapping[str, GpuSample], settings: Settings) -> dict[str, ShareFacts]:
        """Facts about an open run's shares, by GPU UUID; without whole GPUs.

        Args: samples: newest ones of all nodes by UUID.
        """
        found = {}
        for share in run.gpus:
            sample = samples.get(share.uuid)
            if not share.is_whole or (sample is not None and sample.mig_profile is not None):
                used = [use.used_mib for use in self._shares.get(share.uuid, ()) if use.run == run.id]
                word, why = enforcement(sample, settings.gpu, share.limit)
                found[share.uuid] = ShareFacts(used[0] if used else None, word, why)
        return found

    def why(self, run: Run, settings: Settings, now: float) -> str | None:
        """A sentence if the run is known to hold more than it booked."""
        found = self._over(run, settings, now)
        if found is None:
            return None
        seen, _, held = found
        text = f"it holds {held}"
        if settings.gpu.vram_over != "kill":
            return f"{text}; no action is configured"
        told_at = self._told.known_at(run.id, OVER)
        left_s = max(seen.since or now, now if told_at is None else told_at) + settings.gpu.vram_over_grace_s - now
        return f"{text}; its run will be ended in {format_duration(max(0.0, left_s))} unless it frees some"

    def carry_out(self, tx: TickTransaction) -> None:
        settings = tx.settings
        if settings.gpu.vram_over == "ignore":
            return
        for run_id in dict.fromkeys(run_id for (run_id, _), seen in self._watches.items() if seen.worst is not None):
            run = tx.state.open_runs.get(run_id)
            job = None if run is None else tx.state.jobs.get(run.job_id)
            if run is None or job is None or job.state is not JobState.RUNNING:
                continue
            found = self._over(run, settings, tx.now)
            if found is None:
                continue
            seen, use, text = found
            step = overuse.due_step(seen, self._told.told_at(run, OVER, tx), tx.now, settings.gpu, gap_s(settings))
            if step is OveruseStep.TELL:
                self._warn(job, run, f"it holds {text}", use, tx)
            elif step is OveruseStep.END:
                log.warning("ending run %s: it held %s", run.id, text)
                after, story = overuse.end_overuse(job, f"held {text}", tx.now)
                tx.put_job(after, *story)
            self._warn_neighbours(run_id, tx)

    def _over(self, run: Run, settings: Settings, now: float) -> tuple[OveruseStreak, ShareUse, str] | None:
        """Where a run is known to be over its bookings: the streak of the node where it has been for longest, its
        worst card there, and the words for it; None while it is within them.
        """
        found: list[tuple[float, str, OveruseStreak, ShareUse]] = []
        for node in run.nodes:
            seen = self._watches.get((run.id, node))
            if seen is None or seen.since is None or seen.worst is None:
                continue
            if overuse.due_step(seen, None, now, settings.gpu, gap_s(settings)) is not None:
                found.append((seen.since, node, seen, seen.worst))
        if not found:
            return None
        _, node, seen, use = min(found, key=lambda one: one[0])
        return seen, use, overuse.overuse_text(use, node if run.parts else None)

    def _warn(self, job: Job, run: Run, text: str, use: ShareUse, tx: TickTransaction) -> None:
        hint = f"; ask for what it needs: --vram {format_size_mib(_asking_mib(use))}"
        if tx.settings.gpu.vram_over == "kill":
            hint += (
                f"; its run will be ended if this continues for {format_duration(tx.settings.gpu.vram_over_grace_s)}"
            )
        self._told.note(run, tx.notify(job, run, OVER, text + hint), tx)
        self._outbox.tell(tx, job, "vram_over", text + hint)

    def _warn_neighbours(self, over: str, tx: TickTransaction) -> None:
        """Warn the runs that may fail because of it, once each."""
        for shares in self._shares.values():
            if all(use.run != over for use in shares):
                continue
            for use, worst in overuse.endangered(SharedGpuReading(tx.now, shares), tx.settings.gpu):
                run = tx.state.open_runs.get(use.run)
                if worst.run != over or run is None or self._told.told_at(run, CROWDED, tx) is not None:
                    continue
                left = format_size_mib(use.left_mib)
                text = (
                    f"{mention_job(_name_of(worst.run, tx))} holds {overuse.overuse_text(worst)}; {left} of the "
                    f"{format_size_mib(use.booked_mib)} that this job booked there can be had"
                )
                event = JobEvent(run.job_id, tx.now, CROWDED, text, run.number)
                tx.put_job(tx.state.jobs[run.job_id], event)
                self._told.note(run, event, tx)

    def judge(self, job: Job, run: Run, tx: TickTransaction) -> Run:
        """The ended run, marked as a victim of its neighbour if it is one."""
        if run.outcome is not JobState.OUT_OF_MEMORY:
            return run
        looks = sorted((look for share in run.gpus for look in self._looks.get(share.uuid, ())), key=lambda one: one.at)
        return overuse.crowded_victim(run, looks, tx.settings.gpu, lambda handle: _name_of(handle, tx))


def _name_of(handle: str, tx: TickTransaction) -> str:
    return tx.state.name_of(split_run_id(handle)[0])


def _asking_mib(use: ShareUse) -> int:
    """Memory in use, rounded up to whole GiB."""
    return -(-(use.used_mib or 0) // 1024) * 1024


def gap_s(settings: Settings) -> float:
    """Gap between readings (s) beyond which nothing is assumed about the time in between."""
    return max(_LEAST_GAP_S, 3 * settings.daemon.poll_s)


UNBOOKED, INTRUDER = "unbooked", "intruder"
"""Kinds of story events: the job uses a GPU it did not book; an intruder is on a GPU it booked."""


class IntruderWatch(Watch):
    """State of intruders, by GPU."""

    name = "intruders"

    def __init__(self, outbox: AlertOutbox) -> None:
        self._outbox = outbox
        self._sightings: dict[tuple[str, str | int], Sighting] = {}
        self._looks: dict[str, deque[UnbookedReading]] = {}
        self._told = ToldStory(UNBOOKED, INTRUDER)
        self._is_fresh = False
        """A reading has arrived since the last `carry_out`."""

    def observe(self, news: NodeReading) -> None:
        reading, tracker, state = news.reading, news.node.tracker, news.state
        at, gap, self._is_fresh = reading.at, gap_s(news.settings), True
        found: dict[str, list[Intruder]] = {}
        if reading.error is None:
            on = tracker.intruders()
            found = {gpu.uuid: intruders_of(gpu.uuid, gpu.index, on.get(gpu.uuid, ())) for gpu in reading.gpus}
        before = self._sightings
        self._sightings = {key: seen for key, seen in before.items() if not tracker.knows(seen.intruder.uuid)}
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
        self._told.keep(state.open_runs)

    def unbooked(self, run: str | None = None) -> list[Intruder]:
        """Runs on GPUs that they did not book, as of the last reading, by GPU. Args: run: only this one."""
        found = [seen.intruder for seen in self._sightings.values()]
        mine = [one for one in found if one.run is not None and run in (None, one.run)]
        return sorted(mine, key=lambda one: (one.index, one.run or ""))

    def on(self, run: Run) -> list[Intruder]:
        """Intruders on the GPUs that a run booked, as of the last reading."""
        own = {share.uuid for share in run.gpus}
        found = [seen.intruder for seen in self._sightings.values() if seen.intruder.uuid in own]
        return sorted(found, key=lambda one: (one.index, one.process.pid))

    # --- in a tick --------------------------------------------------------------------------------

    def carry_out(self, tx: TickTransaction) -> None:
        """Record and order the steps that are due, once per reading."""
        if not self._is_fresh:
            return
        tx.restore_if_dropped(self, "_is_fresh")
        self._is_fresh = False
        for seen in self._sightings.values():
            one = seen.intruder
            if one.run is not None:
                self._of_unbooked(one.run, seen, tx)
            if is_worth_telling(seen, tx.settings.gpu):
                for run in _booked_by(one.uuid, tx.state):
                    self._notify_booker(run, one, tx)

    def _of_unbooked(self, handle: str, seen: Sighting, tx: TickTransaction) -> None:
        run, job = _running(handle, tx.state)
        gpu, gap = tx.settings.gpu, gap_s(tx.settings)
        if run is None or job is None or due_unbooked_step(seen, None, tx.now, gpu, gap) is None:
            return
        one = seen.intruder
        step = due_unbooked_step(seen, self._told.told_at(run, UNBOOKED, tx, one.uuid), tx.now, gpu, gap)
        if step is OveruseStep.TELL:
            text = unbooked_text(one, job, run.gpus, tx.settings.gpu)
            log.warning("job %s: %s", job.shown_id, text)
            self._told.note(run, tx.notify(job, run, UNBOOKED, text, about=one.uuid), tx)
            self._outbox.intrusion(tx, job, "gpu_unbooked", one.uuid, text)
        elif step is OveruseStep.END:
            log.warning("ending run %s: it used GPU %d, which it did not book", run.id, one.index)
            after, story = end_unbooked_use(job, one, tx.now)
            tx.put_job(after, *story)

    def _notify_booker(self, run: Run, one: Intruder, tx: TickTransaction) -> None:
        """Notify the owner of a job about an intruder on its GPU, once per intruder."""
        _, job = _running(run.id, tx.state)
        if job is None or self._told.told_at(run, INTRUDER, tx, one.mark) is not None:
            return
        text = intruder_text(one, _names(tx.state))
        self._told.note(run, tx.notify(job, run, INTRUDER, text, about=one.mark), tx)
        self._outbox.intrusion(tx, job, "gpu_intruder", one.mark, text)

    def judge(self, job: Job, run: Run, tx: TickTransaction) -> Run:
        """The ended run, marked as a victim of a job that did not book its GPU if it is one."""
        if run.outcome is not JobState.OUT_OF_MEMORY:
            return run
        looks = sorted((look for share in run.gpus for look in self._looks.get(share.uuid, ())), key=lambda one: one.at)
        return unbooked_victim(run, looks, tx.settings.gpu, _names(tx.state))


def _running(handle: str, state: DaemonState) -> tuple[Run | None, Job | None]:
    """An open run and its job, unless it is being stopped."""
    run = state.open_runs.get(handle)
    job = None if run is None else state.jobs.get(run.job_id)
    return (run, job) if job is not None and job.state is JobState.RUNNING else (None, None)


def _booked_by(uuid: str, state: DaemonState) -> list[Run]:
    return [run for run in state.open_runs.values() if any(share.uuid == uuid for share in run.gpus)]


def _names(state: DaemonState) -> Callable[[str], str]:
    return lambda handle: state.name_of(split_run_id(handle)[0])
