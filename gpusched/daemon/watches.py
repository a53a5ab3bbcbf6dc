"""Watches: what is looked at with each reading and acted on in a tick. One that raises stops nothing else.

A watch changes the memory as it goes, so nothing but a reload takes back what it has done. The tick in which one
raises is therefore dropped as a whole, like one that cannot be recorded, and begins again at once without that watch.
It is tried again after a pause that grows with each failure, since every try that fails costs a reload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.failures import StepFailures
from gpusched.daemon.nodes import ClusterNode
from gpusched.daemon.state import DaemonState
from gpusched.model.cluster import GpuReading
from gpusched.model.job import JobEvent, Run
from gpusched.model.settings import Settings

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
T = TypeVar("T")


class Stage(Enum):
    """Where in a tick a watch acts."""

    BEFORE_COMMANDS = 0
    BEFORE_PLAN = 1
    AFTER_PLAN = 2
    """When all that can start has been started; `TickTransaction.must_plan` asks for another plan."""
    BEFORE_COMMIT = 3


@dataclass(frozen=True, slots=True)
class NodeReading:
    """A reading of the GPUs of a node that its tracker has processed, and what is known beside it."""

    node: ClusterNode
    reading: GpuReading
    state: DaemonState
    settings: Settings
    now: float


class Watch:
    """Something to be watched. A watch overrides what it needs; it has a place in the tuple of `Scheduler`."""

    name: str
    """What is watched, for people: `idle GPUs`."""
    stage = Stage.BEFORE_PLAN

    def observe(self, found: NodeReading) -> None:
        """Take in a reading. One that raises is retried, since a fault in a reading is reported once."""

    def carry_out(self, tx: TickTransaction) -> None:
        """Record and order what is due. What it notes outside of the memory needs `TickTransaction.if_dropped`."""

    def reload(self, state: DaemonState, settings: Settings) -> None:
        """Take in a memory that was read again from the table, or other settings."""

    def next_due(self, state: DaemonState, settings: Settings) -> float | None:
        """When the next tick is needed, by time alone; None: not by this watch."""
        return None


class Watches:
    """All watches of a daemon, in the order in which they act within a stage."""

    def __init__(self, guard: WatchGuard, failures: StepFailures, watches: tuple[Watch, ...]) -> None:
        """Args: failures: where readings that raise are counted."""
        self.all = watches
        self._guard = guard
        self._failures = failures
        # What a watch does not override costs a tick nothing.
        acting = [watch for watch in watches if _has_own(watch, "carry_out")]
        self._at = {stage: tuple(watch for watch in acting if watch.stage is stage) for stage in Stage}
        self._observing = [(f"reading for {one.name}", one.observe) for one in watches if _has_own(one, "observe")]
        self._reloading = [(f"reload of {one.name}", one.reload) for one in watches if _has_own(one, "reload")]
        self._timed = [(f"due time of {one.name}", one.next_due) for one in watches if _has_own(one, "next_due")]

    def observe(self, found: NodeReading) -> None:
        """Have each take in a reading; one that raises hides nothing from the others."""
        for step, observe in self._observing:
            self._failures.run(step, observe, found)

    def carry_out(self, stage: Stage, tx: TickTransaction) -> None:
        """Have those of a stage act. Raises: WatchRaised."""
        if self._guard.pauses:
            for watch in self._at[stage]:
                self._guard.run(watch.name, watch.carry_out, tx)
            return
        # The same, nearly for free.
        name = ""
        try:
            for watch in self._at[stage]:
                name = watch.name
                watch.carry_out(tx)
        except WatchRaised:
            raise
        except Exception as error:
            raise self._guard.failure(name, error) from error

    def reload(self, state: DaemonState, settings: Settings) -> None:
        """Have each take in a memory that was read again, or other settings."""
        for step, reload in self._reloading:
            self._failures.run(step, reload, state, settings)

    def next_due(self, state: DaemonState, settings: Settings) -> float | None:
        """When the first of them needs the next tick."""
        dues: list[float | None] = []
        for step, next_due in self._timed:
            try:
                dues.append(next_due(state, settings))
            except Exception as error:
                self._failures.note(step, error)
            else:
                self._failures.recovered(step)
        return min((at for at in dues if at is not None), default=None)


def _has_own(watch: Watch, method: str) -> bool:
    return getattr(type(watch), method) is not getattr(Watch, method)


class Told(set[T]):
    """What has been reported, by mark. The mark of a tick that is not recorded is withdrawn, and reported again."""

    def note(self, mark: T, tx: TickTransaction) -> bool:
        """Note that it has been reported; returns whether this is the first time."""
        if mark in self:
            return False
        self.add(mark)
        tx.if_dropped(partial(self.discard, mark))
        return True


class ToldStory:
    """Events of some kinds in the stories of open runs; read once per run, since a restart forgets them."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._of_run: dict[str, list[JobEvent]] = {}

    def keep(self, runs: Container[str]) -> None:
        """Forget all but these runs."""
        self._of_run = {handle: told for handle, told in self._of_run.items() if handle in runs}

    def told_at(self, run: Run, kind: str, tx: TickTransaction, about: str | None = None) -> float | None:
        """When the owner was last notified; None: not yet. Args: about: of this alone."""
        if run.id not in self._of_run:
            story = tx.store.events(run.job_id)
            self._of_run[run.id] = [one for one in story if one.kind in self._kinds and one.run == run.number]
        return self.known_at(run.id, kind, about)

    def known_at(self, handle: str, kind: str, about: str | None = None) -> float | None:
        """The same, as far as it is known without the table."""
        told = self._of_run.get(handle, ())
        return max((one.at for one in told if one.kind == kind and about in (None, one.about)), default=None)

    def note(self, run: Run, event: JobEvent, tx: TickTransaction) -> None:
        """Take in an event of this tick, after `told_at`; one of a tick that is not recorded is taken back."""
        told = self._of_run[run.id]
        told.append(event)
        tx.if_dropped(partial(told.remove, event))


class WatchRaised(Exception):
    """A watch has raised: this tick is to begin again, without it."""


@dataclass(slots=True)
class _Pause:
    length_s: float
    until: float
    """On the monotonic clock."""
    is_failing: bool = True
    """It has not worked since."""


class WatchGuard:
    """Leaves out the watches that raised lately. Args: failures: where they are counted, logged and shown."""

    def __init__(self, failures: StepFailures, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._failures = failures
        self._monotonic = monotonic
        self.pauses: dict[tuple[str, str], _Pause] = {}
        """Those that are left out or were lately, by watch and the run or job that it raised for."""

    def run(self, name: str, action: Callable[..., T], *arguments: Any, part: str = "") -> T | None:
        """Call `action` and return its result; None while it is left out.

        Args: name: what is watched, for people; part: the run or job of this call, if it is left out alone.

        Raises: WatchRaised when it raises anything, or when a part of it did.
        """
        if self.pauses and self._is_paused(name, part):
            return None
        try:
            found = action(*arguments)
        except WatchRaised:
            raise
        except Exception as error:
            raise self.failure(name, error, part) from error
        if self.pauses:
            self._note_success(name, part)
        return found

    def is_left_out(self, name: str) -> bool:
        """Whether a watch raised lately, so that nothing may wait for it."""
        return self._is_paused(name, "")

    def failure(self, name: str, error: Exception, part: str = "") -> WatchRaised:
        """Leave out a watch, or a part of one, that has raised; returns what to raise."""
        before = self.pauses.get((name, part))
        length_s = FIRST_PAUSE_S if before is None else min(2 * before.length_s, LONGEST_PAUSE_S)
        self.pauses[name, part] = _Pause(length_s, self._monotonic() + length_s)
        self._failures.note(_step(name), error)
        return WatchRaised(name)

    def _is_paused(self, name: str, part: str) -> bool:
        pause = self.pauses.get((name, part))
        return pause is not None and self._monotonic() < pause.until

    def _note_success(self, name: str, part: str) -> None:
        """Note that it works again; the length of its pause counts until it has worked for as long."""
        now, pause = self._monotonic(), self.pauses.get((name, part))
        if pause is not None:
            pause.is_failing = False
        over = [one for one, pause in self.pauses.items() if now >= pause.until + _kept_s(pause)]
        for one in over:
            del self.pauses[one]
        failing = {one for (one, _), pause in self.pauses.items() if pause.is_failing}
        for watch in {name, *(one for one, _ in over)} - failing:
            self._failures.recovered(_step(watch))


def _kept_s(pause: _Pause) -> float:
    # What still counts as failing is a run or job that has left for good.
    return LONGEST_PAUSE_S if pause.is_failing else pause.length_s


def _step(name: str) -> str:
    return f"watch on {name}"
