"""The supervisor of a process that ran before it was a job: it watches, and starts nothing.

Such a process is no child of its supervisor: a pidfd announces its end, but its exit status is unavailable, so the
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
from gpusched.engine.linux.proctree import own_cpu_s
from gpusched.engine.supervisor.run_control import Home, wake_on_signals
from gpusched.engine.supervisor.supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from typing import Any

LOOK_S = 1.0
"""Interval between scans for new descendants."""
BLIND_LOOK_S = 0.2
"""Interval between scans where the kernel has no pidfds to announce the end."""


class AdoptedSupervisor(Supervisor):
    def __init__(self, ticket: dict[str, Any], home: Home) -> None:
        super().__init__(ticket, home)
        self.pidfd: int | None = None
        self.births: dict[int, int] = {}
        """Start ticks by pid of the run's processes alive at the last look."""
        self.spent_s: dict[tuple[int, int], tuple[float, float]] = {}
        """By pid and start ticks: processor time before it was part of the run, and at the last look."""
        self.wake_out, self.wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def supervise(self) -> bool:
        """Supervise as for any run. This process serves no further run: it receives signals in another way."""
        super().supervise()
        return False

    def read_early_orders(self) -> None:
        """Do nothing yet: the process runs already, and an early stop must reach it as well."""

    def start(self) -> str | None:
        """Take over the process, report it, and carry out orders given meanwhile; a sentence on failure."""
        error = self.take_over()
        self.read_orders()
        # A cancel has succeeded if the process is gone.
        return None if self.start_at is None and self.stopped_by is not None else error

    def take_over(self) -> str | None:
        """Return a sentence if the process has ended or is not the user's."""
        adopted = self.ticket["adopt"]
        pid, start_ticks = adopted["pid"], adopted["start_ticks"]
        try:
            self.pidfd = proctree.open_pidfd(pid)
        except ProcessLookupError:
            return f"process {pid} had ended before it was adopted"
        # Checked after the pidfd was opened, which therefore refers to this very process.
        if not proctree.lives(pid, start_ticks):
            return f"process {pid} had ended before it was adopted"
        if proctree.real_uid(pid) != self.ticket["uid"]:
            return f"process {pid} no longer belongs to {self.ticket['user']}"
        self.job_pid = pid
        self.births = {pid: start_ticks}
        self.look()
        self.spent_s = {mark: (last_s, last_s) for mark, (_, last_s) in self.spent_s.items()}
        self.start_at, self.started = time.time(), time.monotonic()
        files.note_start(self.record_fd, pid, self.start_at)
        wake_on_signals(self.wake_in)
        home = self.home
        self.notify(
            "started",
            at=self.start_at,
            supervisor_pid=home.pid,
            supervisor_start_ticks=home.start_ticks,
            pid=pid,
        )
        self.ticket["env"] = None
        self.set_limit(self.ticket["time_limit_s"])
        return None

    def members(self, settled: Container[int] = ()) -> Iterable[proctree.Process]:
        """Live processes of the run, all of them in each scan."""
        return self.look().values()

    def look(self) -> dict[int, proctree.Process]:
        """Live processes of the run by pid: those seen before and their descendants."""
        uid = self.ticket["uid"]
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
        found = {pid: process for pid, process in found.items() if proctree.real_uid(pid) == uid}
        self.births = {pid: process.start_ticks for pid, process in found.items()}
        for mark in self.births.items():
            # In every scan, and so also right before a signal that ends it.
            self.spent_s[mark] = self.spent_s.get(mark, (0.0, 0.0))[0], own_cpu_s(mark[0])
        return found

    def reap(self) -> bool:
        """Search for remaining processes; False when there are none."""
        found = self.look()
        for pid in found:
            self.peak_kib = max(self.peak_kib, proctree.peak_kib(pid))
        first = found.get(self.job_pid)
        if self.status is None and (first is None or first.start_ticks != self.ticket["adopt"]["start_ticks"]):
            # Nothing but its end is known.
            self.status = 0
            self.notice_at = self.still.look_at = None
            self.main_ended()
        if not found:
            self.cpu_s = sum(last - before for before, last in self.spent_s.values())
            self.system_cpu_s = None
        return bool(found)

    def wait(self) -> None:
        """Sleep until the first process ends, an order comes, something is due or a scan is."""
        moving = (self.limit_at, self.notice_at) if self.still.since is None else ()
        due = [at for at in (*moving, self.still.look_at, self.linger_until, self.kills_at) if at is not None]
        longest_s = LOOK_S if self.pidfd is not None else BLIND_LOOK_S
        left_s = min([longest_s, *(at - time.monotonic() for at in due)])
        poll = select.poll()
        poll.register(self.wake_out, select.POLLIN)
        if self.pidfd is not None and self.status is None:
            poll.register(self.pidfd, select.POLLIN)
        ready = dict(poll.poll(max(0.0, left_s) * 1000))
        if self.wake_out in ready:
            self.handle_signals(os.read(self.wake_out, 4096))

    def deliver(self, number: int, to: str = "tree") -> bool:
        """Signal the first process or all. Unlike a child's pid, its pid may have been reused since the last scan."""
        if to != "main":
            return super().deliver(number, to)
        if (first := self.look().get(self.job_pid)) is not None:
            proctree.send(first, number)
        return False

    def how_it_ended(self) -> tuple[int | None, int | None]:
        """Unknown: only the parent can read the exit status."""
        return None, None
