"""Starts parallel copies of a command and follows them: the tasks of grun and of srun inside a job."""

from __future__ import annotations

import errno
import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
    from typing import Protocol

    class SignalInfo(Protocol):
        """A signal that was taken, and the process that sent it."""

        @property
        def si_signo(self) -> int: ...

        @property
        def si_pid(self) -> int: ...

        @property
        def si_code(self) -> int: ...
else:
    # The other module makes enumerations of its numbers, for which it takes longer than all the rest.
    import _signal as signal

FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2})
AWAITED = FORWARDED | {signal.SIGCHLD}
_RESET = (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by Python, or by the shell that started this command in the background; a task begins with none ignored."""


def task_variables(task: int, count: int, local: int | None = None) -> dict[str, str]:
    """Variables with the place of a task among the others. Args: local: its place on its node, if that is not all."""
    return {
        "GPUSCHED_TASK": str(task),
        "GPUSCHED_NTASKS": str(count),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task if local is None else local),
        "SLURM_NTASKS": str(count),
    }


class Tasks:
    """Children that run one command each; signals to this process are held back until `wait` takes them.

    Args: own_groups: give each task its own process group, which a terminal's signals do not reach, and end what
    a task has left in it when all have ended.
    """

    def __init__(self, *, own_groups: bool) -> None:
        self._own_groups = own_groups
        self._running: dict[int, int] = {}
        self._ended: list[int] = []
        self.user_cpu_s = 0.0
        """CPU time of the tasks that `close` has reaped, and of what they waited for."""
        self.system_cpu_s = 0.0
        self.peaks_kib: list[int] = []
        """Peak resident size of the largest process of each of them."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)

    @property
    def running(self) -> list[int]:
        """Numbers of the tasks that have not ended."""
        return sorted(self._running.values())

    def start(
        self,
        task: int,
        argv: list[str],
        env: dict[str, str],
        streams: tuple[int, int, int],
        cpus: Iterable[int] = (),
    ) -> None:
        """Start one task. Raises: OSError, of the call that failed; ValueError for a word that no program can get.

        Args: streams: descriptors for its input, output and errors; cpus: processors that it is bound to.
        """
        self.settle(task, *self.fork(argv, env, streams, cpus))

    def fork(
        self,
        argv: list[str],
        env: dict[str, str],
        streams: tuple[int, int, int],
        cpus: Iterable[int] = (),
        gate: tuple[int, int] | None = None,
        *,
        has_terminal: bool = False,
    ) -> tuple[int, int]:
        """Fork the process of a task; returns its pid and a descriptor that tells how it got on, for `settle`.

        Args: gate: a pipe from which it takes one byte before it goes on. has_terminal: its input is to be its
        controlling terminal.
        """
        reader, writer = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._become(argv, env, streams, frozenset(cpus), writer, gate, has_terminal)
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return pid, reader

    def settle(self, task: int, pid: int, reader: int) -> None:
        """Wait until a process has become its program. Raises: as `start`."""
        with os.fdopen(reader, "rb", buffering=0) as report:
            number = report.read()
        if not number:
            self._running[pid] = task
            return
        os.waitpid(pid, 0)
        if number == b"-":
            raise ValueError("embedded null byte")
        raise OSError(int(number), os.strerror(int(number)))

    def _become(
        self,
        argv: list[str],
        env: dict[str, str],
        streams: tuple[int, ...],
        cpus: frozenset[int],
        report: int,
        gate: tuple[int, int] | None,
        has_terminal: bool,
    ) -> None:
        """Replace this child by the command; never returns."""
        try:
            if has_terminal:
                os.setsid()
            elif self._own_groups:
                os.setpgid(0, 0)
            if gate is not None:
                # Without our own copy its other end closes with the parent.
                os.close(gate[1])
                if not os.read(gate[0], 1):
                    os._exit(127)
            # Away from 0 to 2 first, where they might overwrite each other.
            moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in streams]
            for place, fd in enumerate(moved):
                os.dup2(fd, place)
            if has_terminal:
                import termios  # only a task at a terminal needs it

                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if cpus:
                os.sched_setaffinity(0, cpus)
            for number in _RESET:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _execute(argv, {**env, "SLURM_TASK_PID": str(os.getpid())})
        except OSError as error:
            os.write(report, str(error.errno or errno.EIO).encode())
        except BaseException:
            os.write(report, b"-")
        finally:
            os._exit(127)

    def signal(self, number: int) -> None:
        """Send a signal to every task that has not ended."""
        for pid in self._running:
            # Not reaped yet, so the pid is its own.
            try:
                if self._own_groups:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def wait(self, timeout_s: float | None) -> SignalInfo | None:
        """Wait for a signal: that a child has ended, or one to be passed on; None after the timeout."""
        if timeout_s is None:
            return signal.sigwaitinfo(AWAITED)
        return signal.sigtimedwait(AWAITED, max(0.0, timeout_s))

    def take_ended(self) -> list[tuple[int, int]]:
        """Tasks that have ended since the last call, with their exit code or, negative, signal.

        They stay zombies, so that their process groups keep their numbers until `close`.
        """
        found = []
        for pid, task in sorted(self._running.items(), key=lambda item: item[1]):
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                del self._running[pid]
                self._ended.append(pid)
                found.append((task, state.si_status if state.si_code == os.CLD_EXITED else -state.si_status))
        return found

    def close(self) -> None:
        """End what tasks have left behind, reap everything, and let signals through again."""
        for pid in self._ended:
            if self._own_groups:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            _, _, used = os.wait4(pid, 0)
            self.user_cpu_s += used.ru_utime
            self.system_cpu_s += used.ru_stime
            self.peaks_kib.append(used.ru_maxrss)
        self._ended.clear()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def _execute(argv: list[str], env: dict[str, str]) -> None:
    """As `os.execvpe`, which imports a module first. Raises: OSError, ValueError."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    refused: OSError | None = None
    missing: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in env.get("PATH", os.defpath).split(":"):
        try:
            os.execve(f"{folder or '.'}/{argv[0]}", argv, env)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = error
        except OSError as error:
            refused = refused or error
    raise refused or missing


class PreparedTasks:
    """Tasks that have been forked and wait at a gate, so that they start together, here and on other nodes.

    A gate that closes unopened ends them; so does the end of this process.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._gate = os.pipe()
        self._waiting: list[tuple[int, int, int]] = []

    def add(
        self,
        task: int,
        argv: list[str],
        env: dict[str, str],
        streams: tuple[int, int, int],
        cpus: Iterable[int] = (),
        *,
        has_terminal: bool = False,
    ) -> None:
        """Fork one. Args: as for `Tasks.fork`. Raises: OSError."""
        started = self._tasks.fork(argv, env, streams, cpus, self._gate, has_terminal=has_terminal)
        self._waiting.append((task, *started))

    def go(self) -> list[tuple[int, OSError | ValueError]]:
        """Let all of them start; returns those that could not, with the error."""
        os.write(self._gate[1], bytes(len(self._waiting)))
        failed: list[tuple[int, OSError | ValueError]] = []
        for task, pid, reader in self._waiting:
            try:
                self._tasks.settle(task, pid, reader)
            except (OSError, ValueError) as error:
                failed.append((task, error))
        self._close()
        return failed

    def drop(self) -> None:
        """End them unstarted."""
        waiting = self._waiting
        self._close()
        for _, pid, reader in waiting:
            os.close(reader)
            os.waitpid(pid, 0)

    def _close(self) -> None:
        self._waiting = []
        for fd in self._gate:
            os.close(fd)
        self._gate = -1, -1


def run_together(count: int, start: Callable[[Tasks, int], None]) -> int:
    """Run tasks side by side, all signals passed on to all of them; returns the highest exit code.

    Args: start: starts the task with this number. Raises: what `start` raises, after the others got a signal to end.
    """
    tasks = Tasks(own_groups=False)
    highest = 0
    try:
        try:
            for task in range(count):
                start(tasks, task)
        except BaseException:
            tasks.signal(signal.SIGTERM)
            raise
        finally:
            while tasks.running:
                info = tasks.wait(None)
                if info is not None and info.si_signo != signal.SIGCHLD:
                    tasks.signal(info.si_signo)
                for _, code in tasks.take_ended():
                    highest = max(highest, code if code >= 0 else 128 - code)
    finally:
        tasks.close()
    return highest
