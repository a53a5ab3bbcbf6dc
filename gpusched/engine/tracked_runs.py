"""The runs an engine is responsible for, and the pidfds that report the end of their supervisors."""

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
"""Of one adopted run, before ended ones are forgotten."""
ORDER_SIGNAL = signal.SIGUSR1
"""Makes a supervisor read its orders."""


class Phase(Enum):
    """Phase of a run; see `local`."""

    ASKED = 1
    CLAIMED = 2
    RUNNING = 3
    ORPHANED = 4
    ENDED = 5


ALIVE = (Phase.CLAIMED, Phase.RUNNING)


@dataclass(slots=True)
class TrackedRun:
    """A run this engine is responsible for."""

    run: str
    phase: Phase
    since: float
    """Monotonic instant at which its start was requested, or it was adopted or orphaned."""
    server: int = 0
    """Fork server that got its ticket, counted from 1; 0: none of this engine."""
    supervisor: int | None = None
    start_ticks: int = 0
    pidfd: int | None = None
    witnessed: bool = False
    """Whether this engine saw its supervisor end."""
    given: GivenOrders = field(default_factory=GivenOrders)
    poke: bool = False
    """An order was written that the supervisor may not have read."""
    unsent: list[str] = field(default_factory=list)
    """Orders that could not be written to a full disk."""
    has_result: bool = False
    """It has ended with a result: its supervisor has finished with its record."""
    other_files: bool = False
    """Files other than the record may exist."""
    complaint: str = ""
    """Last log message about its unreadable or unwritable file: logged once, not at every check."""
    stray: bool = False
    """Not in the table: ended and removed without events."""
    adopted: AdoptedProcess | None = None
    """The adopted process; its supervisor did not start it and is not its ancestor."""
    members: dict[int, int] = field(default_factory=dict)
    """Start ticks by pid of an adopted run's known processes, which may have lost their parents since."""
    left: dict[int, int] = field(default_factory=dict)
    """Start ticks by pid of an orphaned run's leftover processes, alive at the last scan."""


class AdoptedMembers:
    """Known processes of adopted runs. Created for one scan."""

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
        """Count the process as part of this run, even if its parent ends."""
        tracked = self._runs.get(run)
        process = None if tracked is None else proctree.read_process(pid)
        if tracked is None or process is None or tracked.members.get(pid) == process.start_ticks:
            return
        if len(tracked.members) >= _MOST_MEMBERS:
            tracked.members = {pid: ticks for pid, ticks in tracked.members.items() if proctree.lives(pid, ticks)}
        tracked.members[pid] = process.start_ticks


class SpareRecords:
    """Forgotten runs whose records new runs may reuse until another thread cleans them up."""

    def __init__(self) -> None:
        self._order: deque[str] = deque()
        self._there: set[str] = set()

    def add(self, run: str) -> None:
        self._there.add(run)
        self._order.append(run)

    def take(self) -> str | None:
        """Take the oldest one, whose supervisor has surely closed it."""
        while self._order:
            run = self._order.popleft()
            if self.withdraw(run):
                return run
        return None

    def withdraw(self, run: str) -> bool:
        """Prevent other runs from reusing it; False when one does, or did."""
        try:
            self._there.remove(run)
        except KeyError:
            return False
        return True


class TrackedRuns:
    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._runs: dict[str, TrackedRun] = {}
        self._by_pidfd: dict[int, TrackedRun] = {}

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def __iter__(self) -> Iterator[TrackedRun]:
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
        """Watch the end of its supervisor by a pidfd, where available; False when it has ended already."""
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
        """Make the supervisor read its orders; one not known yet is signalled once it is."""
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
        """Close all pidfds; call it after the poller's `close`."""
        for fd in self._by_pidfd:
            os.close(fd)
        self._by_pidfd.clear()
