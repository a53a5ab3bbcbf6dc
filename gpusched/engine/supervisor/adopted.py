"""The supervisor of a process that ran before it was a job: it watches, and starts nothing.

Such a process is not a child of its supervisor: a pidfd announces its end, but its exit status is unavailable, so the
result has neither an exit code nor a signal. Descendants are searched for repeatedly, and a process once seen among
them stays part of the run, even when its parent ends. One that is born and loses its parent between two scans is
missed. Orders, limits and results work as for any other run.

Only processes of the run's user belong to it: a user cannot signal descendants that run set-user-ID programs, and
so no job can either.
"""

from __future__ import annotations

import os
import select
import time

from gpusched.engine import spool as files
from gpusched.engine.linux import proctree
from gpusched.engine.supervisor.processes import RunProcesses, wake_on_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable
    from typing import Any

    from gpusched.engine.supervisor.supervisor import Supervisor

LOOK_S = 1.0
"""Interval between scans for new descendants."""
BLIND_LOOK_S = 0.2
"""Interval between scans where the kernel has no pidfds to announce the end."""


class AdoptedProcesses(RunProcesses):
    """A process that is not a child of this one, and what descends from it."""

    tells_ends = False

    def __init__(self, ticket: dict[str, Any]) -> None:
        super().__init__(os.getpid(), is_script=False)
        self._uid: int = ticket["uid"]
        self._user: str = ticket["user"]
        self._start_ticks: int = ticket["adopt"]["start_ticks"]
        self.first_pid = ticket["adopt"]["pid"]
        self.births: dict[int, int] = {}
        """Start ticks by pid of the run's processes alive at the last look."""
        self._spent_s: dict[tuple[int, int], tuple[float, float]] = {}
        """By pid and start ticks: processor time before it was part of the run, and at the last look."""
        self._pidfd: int | None = None
        self._wake_fd = -1
        """Readable after a signal, once it was taken over."""

    def take_over(self) -> str | None:
        """Return a sentence if the process has ended or is not the user's."""
        pid = self.first_pid
        try:
            self._pidfd = proctree.open_pidfd(pid)
        except ProcessLookupError:
            return f"process {pid} had ended before it was adopted"
        # Checked after the pidfd was opened, which therefore refers to this very process.
        if not proctree.lives(pid, self._start_ticks):
            return f"process {pid} had ended before it was adopted"
        if proctree.real_uid(pid) != self._uid:
            return f"process {pid} no longer belongs to {self._user}"
        self.births = {pid: self._start_ticks}
        self.look()
        self._spent_s = {mark: (last_s, last_s) for mark, (_, last_s) in self._spent_s.items()}
        self._wake_fd, wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        wake_on_signals(wake_in)
        return None

    def members(self, settled: Container[int] = ()) -> Iterable[proctree.Process]:
        """Live processes of the run, all of them in each scan."""
        return self.look().values()

    def look(self) -> dict[int, proctree.Process]:
        """Live processes of the run by pid: those seen before and their descendants."""
        found: dict[int, proctree.Process] = {}
        for pid, start_ticks in self.births.items():
            process = proctree.read_process(pid)
            if pid in found or process is None or process.start_ticks != start_ticks or not process.is_alive:
                continue
            found[pid] = process
            try:
                found.update(proctree.descendants(pid))
            except OSError:
                # It ended just now.
                continue
        found = {pid: process for pid, process in found.items() if proctree.real_uid(pid) == self._uid}
        self.births = {pid: process.start_ticks for pid, process in found.items()}
        for mark in self.births.items():
            # In every scan, and so also right before a signal that ends it.
            self._spent_s[mark] = self._spent_s.get(mark, (0.0, 0.0))[0], proctree.own_cpu_s(mark[0])
        return found

    def reap(self, ended: Callable[[int, int], None]) -> bool:
        """Search for remaining processes; False when there are none."""
        found = self.look()
        for pid in found:
            self.peak_kib = max(self.peak_kib, proctree.peak_kib(pid))
        first = found.get(self.first_pid)
        if self.status is None and (first is None or first.start_ticks != self._start_ticks):
            # Nothing but its end is known.
            ended(self.first_pid, 0)
        if not found:
            self.cpu_s = sum(last - before for before, last in self._spent_s.values())
            self.system_cpu_s = None
        return bool(found)

    def wait(self, left_s: float | None) -> Iterable[int]:
        """As for any run, or until the first process ends or a scan is due."""
        if self._wake_fd < 0:
            return super().wait(left_s)
        longest_s = LOOK_S if self._pidfd is not None else BLIND_LOOK_S
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._pidfd is not None and self.status is None:
            poll.register(self._pidfd, select.POLLIN)
        ready = dict(poll.poll((longest_s if left_s is None else min(longest_s, left_s)) * 1000))
        return os.read(self._wake_fd, 4096) if self._wake_fd in ready else ()

    def signal_first(self, number: int) -> None:
        """Signal the first process. Unlike a child's pid, its pid may have been reused since the last scan."""
        if (first := self.look().get(self.first_pid)) is not None:
            proctree.send(first, number)

    def exit(self) -> tuple[int | None, int | None]:
        """Unknown: only the parent can read the exit status."""
        return None, None


def adopt(run: Supervisor) -> str | None:
    """Take over the process, report it, and carry out orders given meanwhile; a sentence on failure."""
    processes, control, home = run.processes, run.control, run.home
    assert isinstance(processes, AdoptedProcesses)
    error = processes.take_over()
    if error is None:
        start_at = time.time()
        control.begin(start_at, time.monotonic())
        files.note_start(run.record_fd, files.start_line(processes.first_pid, start_at))
        run.events.notify(
            "started",
            at=start_at,
            supervisor_pid=home.pid,
            supervisor_start_ticks=home.start_ticks,
            pid=processes.first_pid,
        )
        run.ticket["env"] = None
        control.set_limit(run.ticket["time_limit_s"])
    run.read_orders()
    # A cancel has succeeded if the process is gone.
    return None if control.start_at is None and control.stopped_by is not None else error
