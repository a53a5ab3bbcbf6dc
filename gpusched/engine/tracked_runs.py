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
    HAUNTED = 4
    ENDED = 5


ALIVE = (Phase.CLAIMED, Phase.RUNNING)


@dataclass(slots=True)
class TrackedRun:
    """A run this engine answers for."""

    run: str
    phase: Phase
    since: float
    """Monotonic instant at which it was asked for, adopted or haunted."""
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
    """Of a haunted run: start ticks by pid of what its supervisor left behind and was still alive at the last look."""


class AdoptedMembers:
    """Processes of adopted runs, as far as they are known. Made for one look."""

    def __init__(self, runs: Iterable[TrackedRun]) -> None:
        self._runs = {
            watched.run: watched
            for watched in runs
            if watched.adopted is not None and watched.phase not in (Phase.HAUNTED, Phase.ENDED)
        }
        self._known: dict[int, tuple[int, str]] = {}
        """By pid: start ticks and run."""
        for run, watched in self._runs.items():
            assert watched.adopted is not None
            self._known.update({pid: (ticks, run) for pid, ticks in watched.members.items()})
            self._known[watched.adopted.pid] = watched.adopted.start_ticks, run

    def run_of(self, process: Process | None) -> str | None:
        """The run that this very process is known to be part of."""
        if process is None or process.pid not in self._known:
            return None
        start_ticks, run = self._known[process.pid]
        return run if start_ticks == process.start_ticks else None

    def note(self, pid: int, run: str) -> None:
        """It is part of this run, also should its parent end."""
        watched = self._runs.get(run)
        process = None if watched is None else proctree.read_process(pid)
        if watched is None or process is None or watched.members.get(pid) == process.start_ticks:
            return
        if len(watched.members) >= _MOST_MEMBERS:
            watched.members = {pid: ticks for pid, ticks in watched.members.items() if proctree.lives(pid, ticks)}
        watched.members[pid] = process.start_ticks


class SpareRecords:
    """Forgotten runs whose records others may use until they are cleared up, which another thread does."""

    def __init__(self) -> None:
        self._order: deque[str] = deque()
        self._there: set[str] = set()

    def add(self, run: str) -> None:
        """Nobody needs its record any more."""
        self._there.add(run)
        self._order.append(run)

    def take(self) -> str | None:
        """The one that has been there longest; its supervisor has surely closed it."""
        while self._order:
            run = self._order.popleft()
            if self.withdraw(run):
                return run
        return None

    def withdraw(self, run: str) -> bool:
        """Keep others from using it; False when somebody does, or did."""
        try:
            self._there.remove(run)
        except KeyError:
            return False
        return True


class TrackedRuns:
    """Runs by handle and by pidfd."""

    def __init__(self, waker: Poller) -> None:
        self._waker = waker
        self._runs: dict[str, TrackedRun] = {}
        self._by_pidfd: dict[int, TrackedRun] = {}

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def __iter__(self) -> Iterator[TrackedRun]:
        """All of them; they may change meanwhile."""
        return iter(list(self._runs.values()))

    def get(self, run: str) -> TrackedRun | None:
        """The run with this handle."""
        return self._runs.get(run)

    def add(self, watched: TrackedRun) -> None:
        """Answer for one more."""
        self._runs[watched.run] = watched

    def remove(self, watched: TrackedRun) -> None:
        """Answer for it no more."""
        del self._runs[watched.run]

    def with_news(self, ready: list[int]) -> list[TrackedRun]:
        """The runs whose pidfds are among the ready descriptors."""
        return [watched for fd in ready if (watched := self._by_pidfd.get(fd)) is not None]

    def follow(self, watched: TrackedRun) -> bool:
        """Have its supervisor's end announced by a pidfd, where there are any; False when it is gone already."""
        assert watched.supervisor is not None
        if watched.pidfd is not None:
            return True
        try:
            fd = proctree.open_pidfd(watched.supervisor)
        except ProcessLookupError:
            return False
        process = proctree.read_process(watched.supervisor)
        if process is None or process.start_ticks != watched.start_ticks:
            if fd is not None:
                os.close(fd)
            return False
        if fd is not None:
            watched.pidfd = fd
            self._by_pidfd[fd] = watched
            self._waker.watch(fd)
        return True

    def unfollow(self, watched: TrackedRun) -> None:
        """Close its pidfd."""
        if watched.pidfd is not None:
            self._waker.unwatch(watched.pidfd)
            del self._by_pidfd[watched.pidfd]
            os.close(watched.pidfd)
            watched.pidfd = None

    def poke(self, watched: TrackedRun) -> None:
        """Have the supervisor read its orders; one that is not known yet is told when it is."""
        if watched.supervisor is None:
            watched.poke = True
            return
        watched.poke = False
        try:
            if watched.pidfd is not None:
                signal.pidfd_send_signal(watched.pidfd, ORDER_SIGNAL)
            else:
                process = proctree.read_process(watched.supervisor)
                if process is not None and process.start_ticks == watched.start_ticks:
                    proctree.send(process, ORDER_SIGNAL)
        except ProcessLookupError:
            # Just ended: its pidfd says so too.
            pass

    def owners(self, pids: Iterable[int]) -> dict[int, str]:
        """Which of these processes belong to which run, as `ports.Engine` says."""
        supervisors = {
            watched.supervisor: watched.run
            for watched in self._runs.values()
            if watched.supervisor is not None and watched.phase in ALIVE
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
        """Close all pidfds; to be called after the waker's."""
        for fd in self._by_pidfd:
            os.close(fd)
        self._by_pidfd.clear()
