"""Output files that are rotated when they have grown (`gsub --log-max`).

The job writes into a pipe; the supervisor copies from it and begins a new file when one is full. Only jobs that
ask for rotation pay for it. The job must not notice:

- a full disk or a removed folder: its bytes are dropped and counted, its writes succeed;
- a file that cannot be rotated: it grows, and rotation is retried one size later;
- a killed supervisor: the job's end of the pipe is open for reading as well, so it gets no SIGPIPE.
  When the pipe is full its writes block, until the daemon ends what is left of the run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import stat
import time

from gpusched.engine.linux.as_user import LaunchError, as_user, write_as
from gpusched.engine.supervisor.logs import LOG_FLAGS, Logs
from gpusched.model.units import put_aside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpusched.engine.linux.as_user import Owner

PIPE_BYTES = 1 << 20
"""Buffer for the job's output while the supervisor is busy."""
READ_BYTES = 1 << 17
TURN_BYTES = 1 << 22
"""Maximum copied before signals are checked again, and from a pipe that a process outside the run keeps filling."""
SLACK_BYTES = 1 << 16
"""Growth beyond the limit to complete a file's last line."""
SFD_NONBLOCK, SFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
SIGSET_BYTES = 128


def cut(data: bytes, room: int, slack: int) -> int:
    """How many of these bytes still fit into a file with this room, so that lines stay whole.

    A line may take some slack beyond the room. If all fit, the file is not full, or ends within a line.
    """
    room = max(room, -slack)
    if len(data) <= room:
        return len(data)
    place = data.rfind(b"\n", 0, max(room, 0)) + 1
    if place:
        return place
    place = data.find(b"\n", 0, room + slack) + 1
    return place or min(len(data), room + slack)


def capped(ticket: dict[str, Any]) -> dict[str, Any]:
    """A ticket whose output file, with those put aside, takes no more than a node's own folder has for one."""
    most, own = ticket["output_mib"], ticket["log_max_mib"]
    if own is not None and own * (ticket["log_keep"] + 1) <= most:
        return ticket
    return {**ticket, "log_max_mib": most / 2, "log_keep": 1}


class RotatedFile:
    """Copies from one pipe into one file and its successors."""

    def __init__(self, fd: int, path: str, ticket: dict[str, Any], who: Owner | None) -> None:
        """Args: fd: the file, which must be a regular one; who: the file's user, if not our own.

        Raises: OSError.
        """
        self.fd = fd
        self.before = -1
        """The file before this one, for a look at the tail."""
        self._path = path
        self._who = who
        self._uid = None if who is None else who.uid
        self._umask: int = ticket["umask"]
        self._max_bytes: int = int(ticket["log_max_mib"] * (1 << 20))
        self._keep: int = ticket["log_keep"]
        self._limit = self._max_bytes
        self._lost = 0
        self._ends_line = True
        if not ticket["append"]:
            try:
                as_user(self._who, self._remove_stale)
            except LaunchError:
                # What cannot be removed stays.
                pass
        self.reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # Before it is given away: root may not be allowed to open everything.
            self.job_end = os.open(f"/proc/self/fd/{writer}", os.O_RDWR | os.O_CLOEXEC)
            if who is not None:
                # So that its owner can open /dev/stdout.
                os.fchown(writer, who.uid, who.gid)
        except OSError:
            os.close(self.reader)
            raise
        finally:
            os.close(writer)
        try:
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            # The user's quota of pipe memory is exhausted; the default 64 KiB will do.
            pass

    def _remove_stale(self) -> int:
        """Remove rotated files of another job with the same output: this one begins with an empty file."""
        for number in range(1, self._keep + 1):
            try:
                os.unlink(put_aside(self._path, number))
            except OSError:
                continue
        return 0

    def copy(self) -> bool:
        """Copy available data; False when no process can write any more."""
        left = TURN_BYTES
        while left > 0:
            try:
                data = os.read(self.reader, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            left -= len(data)
            self.put(data)
        return True

    def put(self, data: bytes) -> None:
        """Write data into as many files as needed."""
        while data:
            room = self._limit - os.fstat(self.fd).st_size
            size = 0 if room <= 0 and self._ends_line else cut(data, room, SLACK_BYTES)
            self._write(data[:size])
            data = data[size:]
            if data and not self._turn():
                # In another while perhaps.
                self._limit = os.fstat(self.fd).st_size + self._max_bytes

    def _write(self, data: bytes) -> None:
        try:
            if self._lost and data:
                told = f"\ngpusched: {self._lost} bytes of output are missing here\n".encode()
                write_as(self._uid, self.fd, told if not self._ends_line else told[1:])
                self._lost = 0
            while data:
                size = write_as(self._uid, self.fd, data)
                self._ends_line = data[size - 1 : size] == b"\n"
                data = data[size:]
        except OSError:
            # A full disk or quota: a job that writes by itself would get the error, and rarely expects it.
            self._lost += len(data)

    def _turn(self) -> bool:
        """Start a new file and rename the old one; False on failure."""
        try:
            fd = as_user(self._who, self._begin_next)
        except (OSError, LaunchError):
            return False
        self._limit = self._max_bytes
        if fd != self.fd:
            if self.before >= 0:
                os.close(self.before)
            self.before, self.fd = self.fd, fd
        return True

    def _begin_next(self) -> int:
        """Open the next file, or empty this one. Raises: OSError; this one then has its name again."""
        is_ours = self._has_its_name()
        if is_ours and not self._keep:
            os.ftruncate(self.fd, 0)
            return self.fd
        if is_ours:
            for number in range(self._keep, 0, -1):
                try:
                    os.rename(put_aside(self._path, number - 1), put_aside(self._path, number))
                except FileNotFoundError:
                    continue
        mask = os.umask(self._umask)
        try:
            fd = os.open(self._path, LOG_FLAGS, 0o666)
        except OSError:
            if is_ours:
                os.rename(put_aside(self._path, 1), self._path)
            raise
        finally:
            os.umask(mask)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "something that is not a file now has its name")
        os.set_blocking(fd, True)
        return fd

    def _has_its_name(self) -> bool:
        """Whether the path still refers to the open file, which may have been moved or removed."""
        try:
            named = os.lstat(self._path)
        except FileNotFoundError:
            return False
        own = os.fstat(self.fd)
        return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)

    def release(self) -> None:
        if self.job_end >= 0:
            os.close(self.job_end)
            self.job_end = -1

    def close(self) -> None:
        """Close everything but the file being written."""
        self.release()
        os.close(self.reader)
        if self.before >= 0:
            os.close(self.before)


class RotatedLogs(Logs):
    """Log files behind pipes. Files that are not regular, such as /dev/null, are left to the job itself."""

    is_copied = True

    def __init__(self, logs: Logs, ticket: dict[str, Any], who: Owner | None) -> None:
        """Raises: LaunchError; the files then stay open."""
        super().__init__(logs.output, logs.error)
        self.moved = logs.moved
        self._output_flow: RotatedFile | None = None
        self._error_flow: RotatedFile | None = None
        self._others: list[RotatedLogs] = []
        self._signals = -1
        self._poll = select.poll()
        try:
            self._output_flow = self._flow(logs.output, ticket["stdout_path"], ticket, who)
            if logs.error != logs.output:
                self._error_flow = self._flow(logs.error, ticket["stderr_path"], ticket, who)
        except OSError as error:
            for flow in self.flows():
                flow.close()
            raise LaunchError(f"cannot make a pipe for its output: {error.strerror}") from None
        for flow in self.flows():
            self._poll.register(flow.reader, select.POLLIN)

    def _flow(self, fd: int, path: str, ticket: dict[str, Any], who: Owner | None) -> RotatedFile | None:
        moved = self.moved.get(path)
        if moved is not None:
            path, ticket = moved.path, capped(ticket)
        return RotatedFile(fd, path, ticket, who) if _is_file(fd) and ticket["log_max_mib"] is not None else None

    def copy_also(self, others: Iterable[RotatedLogs]) -> None:
        """Copy what is written into these as well, from now on."""
        for other in others:
            other._poll = self._poll
            for flow in other.flows():
                self._poll.register(flow.reader, select.POLLIN)
            self._others.append(other)

    def flows(self) -> list[RotatedFile]:
        return [flow for flow in (self._output_flow, self._error_flow) if flow is not None]

    def job_ends(self) -> tuple[int, int]:
        flow = self._output_flow
        output = self.output if flow is None else flow.job_end
        if self.error == self.output:
            return output, output
        return output, self.error if self._error_flow is None else self._error_flow.job_end

    def begin(self) -> None:
        for flow in self.flows():
            flow.release()
        for other in self._others:
            other.begin()

    def wait(self, awaited: Iterable[int], timeout_s: float | None) -> None:
        """Copy until one of these blocked signals is pending or the time is over."""
        if self._signals < 0:
            self._signals = signal_fd(awaited)
            self._poll.register(self._signals, select.POLLIN)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if until is None else max(0.0, until - time.monotonic()) * 1000
            ready = [fd for fd, _ in self._poll.poll(left_ms)]
            self._copy(ready)
            if self._signals in ready or (until is not None and time.monotonic() >= until):
                return

    def drain(self) -> None:
        self._copy([flow.reader for logs in (self, *self._others) for flow in logs.flows()])

    def _copy(self, ready: list[int]) -> None:
        for flow in self.flows():
            if flow.reader not in ready:
                continue
            if not flow.copy():
                try:
                    self._poll.unregister(flow.reader)
                except KeyError:
                    pass  # its end was seen before
            self._adopt(flow)
        for other in self._others:
            other._copy(ready)

    def _adopt(self, flow: RotatedFile) -> None:
        """Use the files of this flow for the supervisor's last line and for the tail."""
        if flow is self._output_flow and self.output != flow.fd:
            if self.error == self.output:
                self.error, self.error_from = flow.fd, 0
            self.output, self.output_from = flow.fd, 0
        elif flow is self._error_flow and self.error != flow.fd:
            self.error, self.error_from = flow.fd, 0

    def tails(self) -> list[tuple[int, int]]:
        """See `Logs`; includes previous files, as one just begun may not hold the last output."""
        return [*super().tails(), *[(flow.before, 0) for flow in self.flows() if flow.before >= 0]]

    def close(self) -> None:
        for flow in self.flows():
            flow.close()
        if self._signals >= 0:
            os.close(self._signals)
        super().close()


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def signal_fd(awaited: Iterable[int]) -> int:
    """A descriptor that is readable while one of these blocked signals is pending. Raises: OSError."""
    mask = bytearray(SIGSET_BYTES)
    bits = sum(1 << (number - 1) for number in awaited)
    mask[:8] = bits.to_bytes(8, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.signalfd(-1, ctypes.c_char_p(bytes(mask)), SFD_NONBLOCK | SFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return fd
