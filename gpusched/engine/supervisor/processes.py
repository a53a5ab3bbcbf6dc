"""The processes of one run: which they are, signals to them, and their ends."""

from __future__ import annotations

import os
import time

from gpusched.engine.linux import proctree

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Container, Iterable, Mapping
    from typing import Any

    from gpusched.engine.linux.cgroup import RunCgroup
    from gpusched.engine.supervisor.container import RunContainer
    from gpusched.engine.supervisor.ranks import Ranks
    from gpusched.engine.supervisor.visits import Visits
else:
    import _signal as signal

LEFTOVERS_NAMED = 256
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
ORDER_SIGNAL = signal.SIGUSR1
"""Read the order file. Not TERM, which others send: it means a cancel, or that the machine is shutting down."""
PR_SET_CHILD_SUBREAPER = 36
AWAITED = frozenset({signal.SIGCHLD, signal.SIGTERM, ORDER_SIGNAL})
WALL = 0x40000000
"""__WALL of waitpid(2): includes children that announce their end with another signal."""
END_ALL_S, END_AGAIN_S = 60.0, 0.01
REAP_S = 0.05
"""Longest time spent reaping before anything else is done: the ends of a fork bomb's processes never cease."""


def exit_of(status: int) -> tuple[int | None, int | None]:
    """Exit code of a process, or the signal that ended it, of its wait status."""
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


class RunProcesses:
    """All processes below one, which reaps them; hosts of visits are not the run's.

    Args: pid: of this process, below which they are. is_script: the first one interprets a script of the job.
    """

    tells_ends = True
    """Whether a signal tells of every end, so that none needs to be looked for before one has come."""

    def __init__(self, pid: int, is_script: bool) -> None:
        self.pid = pid
        self.is_script = is_script
        self.first_pid = 0
        self.is_prolog = False
        """Whether the first one is the job's own prolog."""
        self.ranks: Ranks | None = None
        self.status: int | None = None
        """Wait status of the first one, once it has ended."""
        self.box: RunCgroup | None = None
        self.container: RunContainer | None = None
        self.visits: Visits | None = None
        """What was started in the run from outside; None if nothing ever was."""
        self.cpu_s = 0.0
        """CPU time of those that have ended."""
        self.system_cpu_s: float | None = 0.0
        self.peak_kib = 0
        self.leftovers: dict[int, str] = {}
        """Names, by pid, of those that outlived the first one."""

    def members(self, settled: Container[int] = ()) -> Iterable[proctree.Process]:
        """Yield processes of the run as they are found; see `proctree.walk`."""
        found = proctree.walk(self.pid, settled)
        return found if self.visits is None else self.visits.without_hosts(found)

    def first_pids(self) -> tuple[int, ...]:
        """The process that was started, or every rank that has not ended."""
        return (self.first_pid,) if self.ranks is None else tuple(self.ranks.alive)

    def takes_stop(self, why: str, grace_s: float | None) -> bool:
        """Whether a stop is for them; always, except where no command runs, see `holding`."""
        return True

    # --- signals ----------------------------------------------------------------------------------

    def deliver(self, number: int, to: str = "tree") -> bool:
        """Signal processes of the run, see `SignalOrder.to`; returns whether only others than the first process got it.

        A notice to the tree spares a script that would die of it, and its shell, while it has a child running. A script
        that is the program itself, by its #! line or by `exec`, and handles the notice gets it.
        """
        if to == "steps" or to.startswith("step:"):
            from gpusched.engine.supervisor.steps import signal_each, tasks_in  # most jobs have none

            return signal_each(tasks_in(self.members, int(to[5:]) if to != "steps" else None), number)
        if to == "full":
            return proctree.signal_all(self.members, number)
        if to in ("main", "srun"):
            if self.status is None:
                (self.signal_first if to == "main" else self.queue_for_srun)(number)
            return False
        box = self.container
        if box is not None and (box.is_pull or number == signal.SIGCONT):
            # What pulls an image is to end, too; and STOP is for everything.
            box = None
        spared = None
        if number in NOTICES and self.is_script:
            first = self.first_pids() if box is None else box.first_of_job(self.members)
            spared = [pid for pid in first if is_spared(pid, number)] or None
        find = self.members if box is None else box.of_job(self.members)
        return proctree.signal_all(find, number, spared)

    def signal_first(self, number: int) -> None:
        """Signal the first process alone, which was not reaped yet, so that the pid is still its own."""
        for pid in self.first_pids():
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def queue_for_srun(self, number: int) -> None:
        """Queue a client's signal for the srun that is the first process: it passes queued signals on to its tasks on
        all nodes. Others of this process reach all processes of the job.
        """
        import ctypes  # Python has no sigqueue(3), and hardly any run needs it

        for pid in self.first_pids():
            ctypes.CDLL(None).sigqueue(pid, number, None)

    def kill(self) -> None:
        """KILL all of them, once: until none is left, some are found only then."""
        killed = proctree.kill_all(self.members)
        if self.box is not None:
            # Including processes that fork faster than they are found.
            self.box.kill()
        if self.visits is not None:
            self.visits.end()
        if self.status is not None:
            self.name_leftovers(killed.values())

    def name_leftovers(self, processes: Iterable[proctree.Process]) -> None:
        """Keep names for the result, up to LEFTOVERS_NAMED. A visit ends with its run, and is not the job's."""
        if self.container is not None:
            processes = self.container.without_runtime(processes)
        for process in processes if self.visits is None else self.visits.without(processes):
            if len(self.leftovers) >= LEFTOVERS_NAMED:
                return
            if process.is_alive:
                # A newline separates the names in the result.
                self.leftovers.setdefault(process.pid, process.name.replace("\n", "?") + f"({process.pid})")

    # --- ends -------------------------------------------------------------------------------------

    def wait(self, left_s: float | None) -> Iterable[int]:
        """Sleep until a child ends, a signal comes or the time is over; returns the numbers of what came."""
        info = signal.sigwaitinfo(AWAITED) if left_s is None else signal.sigtimedwait(AWAITED, left_s)
        return () if info is None else (info.si_signo,)

    def has_just_ended(self) -> bool:
        """Whether the command has ended by itself and only remains to be reaped, so that no stop can have caused it."""
        if self.is_prolog:
            return False
        try:
            return all(
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in self.first_pids()
            )
        except OSError:
            # An adopted process is not a child of this one.
            return False

    def reap(self, ended: Callable[[int, int], None]) -> bool:
        """Reap ended processes; False when none is left below this one.

        Args: ended: gets the pid and wait status of each but hosts.
        """
        until = time.monotonic() + REAP_S
        while True:
            if time.monotonic() > until:
                # There may be more: come back at once.
                os.kill(self.pid, signal.SIGCHLD)
                return True
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | WALL)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.system_cpu_s = (self.system_cpu_s or 0.0) + usage.ru_stime
            if self.visits is None or not self.visits.forget(pid):
                self.peak_kib = max(self.peak_kib, usage.ru_maxrss)
                ended(pid, status)

    def exit(self) -> tuple[int | None, int | None]:
        """Exit code of the job's first process, or the signal that ended it."""
        # A prolog that obeys a stop with exit code 0 says nothing about the command.
        is_unknown = self.status is None or (self.is_prolog and self.status == 0)
        return (None, None) if is_unknown else exit_of(self.status or 0)

    def cpu_so_far_s(self) -> float:
        """CPU time of all processes of the run, ended and alive."""
        return self.cpu_s + proctree.descendants_cpu_s(self.pid)

    def counted(self) -> Mapping[str, Any]:
        """What the run used, as fields of its result; empty if nothing was started."""
        if self.status is None:
            return {}
        return {
            "cpu_s": self.cpu_s,
            "system_cpu_s": self.system_cpu_s,
            "peak_mem_mib": self.peak_kib / 1024,
            **({} if self.box is None else self.box.facts()),
        }


def is_spared(pid: int, number: int) -> bool:
    """Whether a notice to all leaves out this first process, a script."""
    return proctree.is_shell(pid) or not proctree.catches(pid, number)


def end_all(patience_s: float = END_ALL_S) -> None:
    """KILL all descendants of this process until the kernel reports no child left, for this long at most."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        proctree.kill_tree(os.getpid())
        try:
            while os.waitpid(-1, os.WNOHANG | WALL)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(END_AGAIN_S)


def wake_on_signals(fd: int) -> None:
    """Write the numbers of AWAITED signals, blocked until now, to this descriptor."""
    for number in AWAITED:
        signal.signal(number, lambda *_: None)  # only the wake-up counts
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
