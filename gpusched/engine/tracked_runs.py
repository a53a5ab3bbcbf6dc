"""The runs an engine answers for, and the pidfds by which it learns that a supervisor is gone."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from gpusched.engine.linux import proctree
from gpusched.engine.linux.proctree import Process
from gpusched.engine.orders import GivenOrders
from gpusched.engine.poller import Poller
from gpusched.model.job import AdoptedProcess

_MOST_MEMBERS = 256
"""Of one adopted run, before those that have ended are forgotten."""
ORDER_SIGNAL = signal.SIGUSR1
"""Tells a supervisor to read its orders."""


class Phase(Enum):
    """Where a run is; see `local`."""

    ASKED = 1
    CLAIMED = 2
    RUNNING = 3
    ORPHANED = 4
    ENDED = 5


ALIVE = (Phase.CLAIMED, Phase.RUNNING)


@dataclass(slots=True)
class TrackedRun:
    """A run this engine answers for."""

    run: str
    phase: Phase
    since: float
    """Monotonic instant at which it was asked for, adopted or orphaned."""
    server: int = 0
    """Which fork server got its ticket, counted from 1; 0: none of this engine."""
    supervisor: int | None = None
    start_ticks: int = 0
    pidfd: int | None = None
    witnessed: bool = False
    """Whether its supervisor's end was seen as it happened."""
    given: GivenOrders = field(default_factory=GivenOrders)
    poke: bool = False
    """An order was written that the supervisor may not have seen."""
    unsent: list[str] = field(default_factory=list)
    """Orders that a full disk kept from being written."""
    has_result: bool = False
    """It has ended with a result: its supervisor is done with its record."""
    other_files: bool = False
    """There may be more than the record."""
    complaint: str = ""
    """What the log says last of a file of it that cannot be read or written: once, not at every look."""
    stray: bool = False
    """Of no job in the table: ended and removed without events."""
    adopted: AdoptedProcess | None = None
    """It was not started by its supervisor and is not below it; this is what the run is."""
    members: dict[int, int] = field(default_factory=dict)
    """Of an adopted run: start ticks by pid of what was seen to be part of it, which may have lost its parent since."""
    left: dict[int, int] = field(default_factory=dict)
    """Of a orphaned run: start ticks by pid of what its supervisor left behind and was still alive at the last look."""


class AdoptedMembers:
    """Known processes of adopted runs. Made for one look."""

    def __init__(self, runs: Iterable[TrackedRun]) -> None:
        self._runs = {
            tracked.run: tracked
            for tracked in runs
            if tracked.adopted is not None and tracked.phase not in (Phase.ORPHANED, Phase.ENDED)
        }
        self._known: dict[int, tuple[int, str]] = {}
        """By pid: start ticks and run."""
        for run, tracked in self._runs.items():
            assert tracked.adopted is not None
            self._known.update({pid: (ticks, run) for pid, ticks in tracked.members.items()})
            self._known[tracked.adopted.pid] = tracked.adopted.start_ticks, run

    def run_of(self, process: Process | None) -> str | None:
        if process is None or process.pid not in self._known:
            return None
        start_ticks, run = self._known[process.pid]
        return run if start_ticks == process.start_ticks else None

    def note(self, pid: int, run: str) -> None:
        """Count it as part of this run, even if its parent ends."""
        tracked = self._runs.get(run)
        process = None if tracked is None else proctree.read_process(pid)
        if tracked is None or process is None or tracked.members.get(pid) == process.start_ticks:
            return
        if len(tracked.members) >= _MOST_MEMBERS:
            tracked.members = {pid: ticks for pid, ticks in tracked.members.items() if proctree.lives(pid, ticks)}
        tracked.members[pid] = process.start_ticks


class SpareRecords:
    """Forgotten runs whose records others may use until they are cleared up, which another thread does."""

    def __init__(self) -> None:
        self._order: deque[str] = deque()
        self._there: set[str] = set()

    def add(self, run: str) -> None:
        self._there.add(run)
        self._order.append(run)

    def take(self) -> str | None:
        """The oldest one, whose supervisor has surely closed it."""
        while self._order:
            run = self._order.popleft()
            if self.withdraw(run):
                return run
        return None

    def withdraw(self, run: str) -> bool:
        """Keep other runs from using it; False when one does, or did."""
        try:
            self._there.remove(run)
        except KeyError:
            return False
        return True


class TrackedRuns:
    """Runs by handle and by pidfd."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._runs: dict[str, TrackedRun] = {}
        self._by_pidfd: dict[int, TrackedRun] = {}

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def __iter__(self) -> Iterator[TrackedRun]:
        """All runs, as of now."""
        return iter(list(self._runs.values()))

    def get(self, run: str) -> TrackedRun | None:
        return self._runs.get(run)

    def add(self, tracked: TrackedRun) -> None:
        self._runs[tracked.run] = tracked

    def remove(self, tracked: TrackedRun) -> None:
        del self._runs[tracked.run]

    def with_news(self, ready: list[int]) -> list[TrackedRun]:
        return [tracked for fd in ready if (tracked := self._by_pidfd.get(fd)) is not None]

    def follow(self, tracked: TrackedRun) -> bool:
        """Have its supervisor's end announced by a pidfd, where there are any; False when it is gone already."""
        assert tracked.supervisor is not None
        if tracked.pidfd is not None:
            return True
        try:
            fd = proctree.open_pidfd(tracked.supervisor)
        except ProcessLookupError:
            return False
        process = proctree.read_process(tracked.supervisor)
        if process is None or process.start_ticks != tracked.start_ticks:
            if fd is not None:
                os.close(fd)
            return False
        if fd is not None:
            tracked.pidfd = fd
            self._by_pidfd[fd] = tracked
            self._poller.watch(fd)
        return True

    def unfollow(self, tracked: TrackedRun) -> None:
        if tracked.pidfd is not None:
            self._poller.unwatch(tracked.pidfd)
            del self._by_pidfd[tracked.pidfd]
            os.close(tracked.pidfd)
            tracked.pidfd = None

    def poke(self, tracked: TrackedRun) -> None:
        """Have the supervisor read its orders; one that is not known yet is told when it is."""
        if tracked.supervisor is None:
            tracked.poke = True
            return
        tracked.poke = False
        try:
            if tracked.pidfd is not None:
                signal.pidfd_send_signal(tracked.pidfd, ORDER_SIGNAL)
            else:
                process = proctree.read_process(tracked.supervisor)
                if process is not None and process.start_ticks == tracked.start_ticks:
                    proctree.send(process, ORDER_SIGNAL)
        except ProcessLookupError:
            # Just ended: its pidfd says so too.
            pass

    def owners(self, pids: Iterable[int]) -> dict[int, str]:
        supervisors = {
            tracked.supervisor: tracked.run
            for tracked in self._runs.values()
            if tracked.supervisor is not None and tracked.phase in ALIVE
        }
        adopted = AdoptedMembers(self._runs.values())
        found: dict[int, str] = {}
        for pid in pids:
            at = pid
            run = None
            while at > 1 and run is None:
                run = supervisors.get(at)
                if run is None:
                    process = proctree.read_process(at)
                    run = adopted.run_of(process)
                    at = process.ppid if process else 0
            if run is not None:
                found[pid] = run
                adopted.note(pid, run)
        return found

    def close(self) -> None:
        """Close all pidfds; to be called after the poller's."""
        for fd in self._by_pidfd:
            os.close(fd)
        self._by_pidfd.clear()
