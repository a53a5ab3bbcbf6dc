"""The part of a step on another node than srun's: starts the tasks there and relays their streams, as slurmstepd does.

A visit runs it as the job's user, in the job's part on that node. It imports little, since the start of a step waits
for it. The job's supervisor there signals the tasks itself, by the SLURM_STEP_ID of theirs, which this process has not;
what srun is told comes as frames. Its end of the connection is the step's: without it the tasks are ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time

from gpusched.addons.slurm.part_protocol import (
    CHUNK,
    CLOSED,
    ENDED,
    EOF,
    FAILED,
    GO,
    INPUT,
    LARGEST_LAUNCH,
    LAUNCH,
    NOTE,
    READY,
    SIGNAL,
    SIZE,
    TAKEN,
    USAGE,
    output_frame,
)
from gpusched.addons.slurm.step_tasks import bind_cores, on_another_node
from gpusched.addons.slurm.streams import Files, Lines
from gpusched.cli.tasks import AWAITED, PreparedTasks, Tasks, task_variables
from gpusched.engine.attach_protocol import frame, take_frames
from gpusched.model.units import printable
from gpusched.quickjson import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from types import FrameType
    from typing import Any
else:
    # The other module makes enumerations of its numbers, for which it takes longer than all the rest.
    import _signal as signal

GRACE_S = 2.0
"""Between TERM and KILL once the connection is lost."""
LINGER_S = 2.0
"""How long output may stay open after the last task."""
_MOST_WAITING = 1 << 18
"""Bytes for srun above which the tasks' output is left in their pipes."""
_END_OF_TRANSMISSION = b"\x04"


class SharedInput:
    """Input that several tasks read, each at its own pace, kept once."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._base = 0
        self._at: dict[int, int] = {}
        """By descriptor: how much of all input it has taken."""
        self._terminals: set[int] = set()
        self._is_over = False

    def __bool__(self) -> bool:
        return bool(self._at)

    def add(self, fd: int, *, is_terminal: bool = False) -> None:
        self._at[fd] = 0
        if is_terminal:
            self._terminals.add(fd)

    def put(self, piece: bytes) -> None:
        self._data += piece

    def end(self) -> None:
        self._is_over = True

    def waiting(self) -> list[int]:
        """Descriptors for which there is something to write, or an end to be told."""
        end = self._base + len(self._data)
        return [fd for fd, at in self._at.items() if at < end or self._is_over]

    def readers(self) -> list[int]:
        return list(self._at)

    def write(self, fd: int) -> None:
        """Write as much as its task accepts now."""
        at = self._at[fd] - self._base
        try:
            if at < len(self._data):
                self._at[fd] += os.write(fd, self._data[at : at + CHUNK])
            elif self._is_over:
                self._finish(fd)
        except BlockingIOError:
            return
        except OSError:
            self.drop(fd)

    def _finish(self, fd: int) -> None:
        if fd in self._terminals:
            os.write(fd, _END_OF_TRANSMISSION)
        self.drop(fd)

    def drop(self, fd: int) -> None:
        """Its task reads no more."""
        if self._at.pop(fd, None) is not None and fd not in self._terminals:
            os.close(fd)

    def trim(self) -> int:
        """Forget what everybody has taken; returns how many bytes."""
        count = min(self._at.values(), default=self._base + len(self._data)) - self._base
        if count:
            del self._data[:count]
            self._base += count
        return count


class PartServer:
    """One part, from LAUNCH to USAGE. Signals are held back by the caller.

    LAUNCH is an object: `argv`, or `programs`, one argv for each task; `folder`, `umask`, `env` and `variables` of all
    tasks here; `tasks`, their numbers in the step, and `count` of those on all nodes; for each of them in `gpus` what
    it sees, or null, and in `input`, `output` and `error` true for srun's stream, null for none, or a path;
    `truncates` existing files; `cpu_bind` and `cpus_per_task`; `terminal`, rows and columns for the first task, or
    null; `is_unbuffered`.

    Args: reader, writer: the connection to srun.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._inbox, self._outbox = bytearray(), bytearray()
        self._text = bytearray()
        self._launch: Mapping[str, Any] = {}
        self._tasks = Tasks(own_groups=True)
        self._prepared: PreparedTasks | None = None
        self._files = Files(truncates=True)
        self._given: list[int] = []
        self._outputs: dict[int, tuple[int, int]] = {}
        """By descriptor read from: task and stream."""
        self._lines: dict[int, Lines] = {}
        """Of those whose lines are kept whole."""
        self._input = SharedInput()
        self._terminal = -1
        self._is_connected = True
        self._has_started = self._is_over = self._told_closed = False
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(writer, False)

    def serve(self) -> None:
        """Do all of it."""
        signal.signal(signal.SIGCHLD, _note)
        before = signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        try:
            while not self._is_over:
                self._turn()
            self._flush_all()
        finally:
            signal.set_wakeup_fd(before)

    # --- one turn ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        if self._is_connected:
            poll.register(self._reader, select.POLLIN)
            if self._outbox:
                poll.register(self._writer, select.POLLOUT)
        wants = dict.fromkeys(self._input.readers(), 0)
        wants.update(dict.fromkeys(self._input.waiting(), select.POLLOUT))
        if len(self._outbox) < _MOST_WAITING:
            for fd in self._outputs:
                wants[fd] = wants.get(fd, 0) | select.POLLIN
        for fd, events in wants.items():
            poll.register(fd, events)
        for fd, events in poll.poll(self._pause_ms()):
            if fd == self._wake_out:
                os.read(fd, 4096)
            elif fd == self._reader:
                self._hear()
            elif fd == self._writer:
                self._flush()
            else:
                self._serve_stream(fd, events)
        self._after(time.monotonic())

    def _pause_ms(self) -> float | None:
        rests = [lines.due_at for lines in self._lines.values()]
        due = [at for at in (self._kill_at, self._leave_at, *rests) if at is not None]
        return max(0.0, min(due) - time.monotonic()) * 1000 if due else None

    def _serve_stream(self, fd: int, events: int) -> None:
        if fd in self._outputs and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            self._read_output(fd)
        if fd in self._input.readers():
            if events & select.POLLOUT:
                self._input.write(fd)
            elif events & (select.POLLERR | select.POLLHUP):
                self._input.drop(fd)

    def _after(self, now: float) -> None:
        """What follows from what has happened."""
        for fd, lines in self._lines.items():
            if lines.due_at is not None and now >= lines.due_at:
                self._send_output(*self._outputs[fd], lines.end())
        if taken := self._input.trim():
            self._outbox += frame(TAKEN, b"%d" % taken)
        if self._has_started and not self._input and not self._told_closed:
            self._told_closed = True
            self._outbox += frame(CLOSED)
        if ended := self._tasks.take_ended():
            self._outbox += frame(ENDED, dumps(ended).encode())
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            self._tasks.signal(signal.SIGKILL)
        if self._has_started and not self._tasks.running:
            self._conclude(now)
        self._flush()

    def _conclude(self, now: float) -> None:
        """End what the tasks have left, read what they wrote, and report."""
        if self._leave_at is None:
            self._kill_at = None
            self._tasks.close()
            self._leave_at = now + LINGER_S
        if not self._outputs or now >= self._leave_at:
            tasks = self._tasks
            usage = [tasks.user_cpu_s, tasks.system_cpu_s, tasks.peaks_kib]
            self._outbox += frame(USAGE, dumps(usage).encode())
            self._is_over = True

    # --- srun -------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            data = os.read(self._reader, 1 << 18)
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._inbox += data
        for kind, content in take_frames(self._inbox):
            self._take(kind, content)

    def _take(self, kind: int, content: bytes) -> None:
        if kind == INPUT:
            self._input.put(content)
        elif kind == EOF:
            self._input.end()
        elif kind == SIGNAL:
            self._tasks.signal(int(content))
        elif kind == SIZE:
            self._resize(*map(int, content.split()))
        elif kind == GO and self._prepared is not None:
            self._go(self._prepared)
        elif kind == LAUNCH and content:
            self._text += content
            if len(self._text) > LARGEST_LAUNCH:
                raise ValueError(f"a LAUNCH of {len(self._text)} bytes")
        elif kind == LAUNCH:
            self._prepare(loads(self._text.decode()))
            self._text.clear()

    def _lose(self) -> None:
        """srun is gone: end the tasks."""
        self._is_connected = False
        self._outbox.clear()
        self._input.end()
        if self._prepared is not None:
            self._prepared.drop()
        if not self._has_started:
            self._is_over = True
            return
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._tasks.signal(number)
        self._kill_at = time.monotonic() + GRACE_S

    def _flush(self) -> None:
        try:
            while self._is_connected and self._outbox:
                del self._outbox[: os.write(self._writer, self._outbox[: 1 << 17])]
        except BlockingIOError:
            return
        except OSError:
            self._lose()
        if not self._is_connected:
            self._outbox.clear()

    def _flush_all(self) -> None:
        """Send the last words."""
        if self._is_connected:
            os.set_blocking(self._writer, True)
            self._flush()

    # --- tasks ------------------------------------------------------------------------------------------

    def _prepare(self, launch: Mapping[str, Any]) -> None:
        """Fork the tasks; they wait for GO."""
        self._launch = launch
        os.umask(launch["umask"])
        self._enter(launch["folder"])
        self._files = Files(truncates=launch["truncates"])
        prepared = PreparedTasks(self._tasks)
        try:
            self._fork_all(launch, prepared)
        except (OSError, ValueError) as error:
            prepared.drop()
            self._outbox += frame(FAILED, str(error).encode("utf-8", "surrogateescape"))
            self._is_over = True
            return
        for fd in self._given:
            os.close(fd)
        self._files.close()
        self._prepared = prepared
        self._outbox += frame(READY)

    def _enter(self, folder: str) -> None:
        try:
            os.chdir(folder)
        except OSError as error:
            # As in Slurm, which then uses another one.
            why = f"error: couldn't chdir to `{printable(folder)}': {error.strerror}: going to /tmp instead"
            self._say(why)
            os.chdir("/tmp")

    def _say(self, text: str) -> None:
        self._outbox += frame(NOTE, f"slurmstepd: {text}".encode("utf-8", "surrogateescape"))

    def _fork_all(self, launch: Mapping[str, Any], prepared: PreparedTasks) -> None:
        """Raises: OSError, ValueError with a sentence."""
        numbers: list[int] = launch["tasks"]
        env = {**on_another_node(launch["env"], os.environ), **launch["variables"]}
        free = os.sched_getaffinity(0)
        cores = bind_cores(launch["cpu_bind"] or "", launch["cpus_per_task"], len(numbers), free)
        for local, task in enumerate(numbers):
            own = {**env, **task_variables(task, launch["count"], local)}
            if launch["gpus"] is not None:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(launch["gpus"][local])
            has_terminal = launch["terminal"] is not None and local == 0
            streams = self._open_terminal(task, launch["terminal"]) if has_terminal else self._streams(local, task)
            prepared.add(
                task, self._argv(local), own, streams, cores[local] if cores else (), has_terminal=has_terminal
            )

    def _argv(self, local: int) -> list[str]:
        programs = self._launch["programs"]
        argv: list[str] = self._launch["argv"] if programs is None else programs[local]
        return argv

    def _go(self, prepared: PreparedTasks) -> None:
        """Start them; one that cannot be ends with the number of the error, as in Slurm."""
        self._prepared = None
        failed = prepared.go()
        self._has_started = True
        ended = []
        for task, error in failed:
            number = 22
            if isinstance(error, OSError):
                program = self._argv(self._launch["tasks"].index(task))[0]
                self._say(f"error: execve(): {printable(program)}: {error.strerror}")
                number = error.errno or 1
            ended.append((task, number))
        if ended:
            self._outbox += frame(ENDED, dumps(ended).encode())

    # --- streams ----------------------------------------------------------------------------------------

    def _streams(self, local: int, task: int) -> tuple[int, int, int]:
        """Input, output and errors of a task. Raises: ValueError with a sentence."""
        source, *sinks = (self._launch[name][local] for name in ("input", "output", "error"))
        if source is True:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            self._input.add(writer)
            self._given.append(reader)
        else:
            reader = self._files.input(source)
        targets = [
            self._pipe(task, stream) if sink is True else self._files.output(sink)
            for stream, sink in enumerate(sinks, start=1)
        ]
        return reader, targets[0], targets[1]

    def _pipe(self, task: int, stream: int) -> int:
        reader, writer = os.pipe()
        self._outputs[reader] = task, stream
        if not self._launch["is_unbuffered"]:
            self._lines[reader] = Lines()
        self._given.append(writer)
        return writer

    def _open_terminal(self, task: int, size: list[int]) -> tuple[int, int, int]:
        master, slave = os.openpty()
        os.set_blocking(master, False)
        self._terminal = master
        self._resize(*size)
        self._outputs[master] = task, 1
        self._input.add(master, is_terminal=True)
        self._given.append(slave)
        return slave, slave, slave

    def _resize(self, rows: int, columns: int) -> None:
        if self._terminal >= 0 and 0 < rows < 65536 and 0 < columns < 65536:
            import struct  # only a task at a terminal needs them
            import termios

            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def _read_output(self, fd: int) -> None:
        task, stream = self._outputs[fd]
        try:
            piece = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            # EIO: no process has the terminal open any more.
            piece = b""
        lines = self._lines.get(fd)
        self._send_output(task, stream, piece if lines is None else lines.feed(piece))
        if piece:
            return
        if lines is not None:
            self._send_output(task, stream, lines.end())
            del self._lines[fd]
        del self._outputs[fd]
        if fd == self._terminal:
            self._terminal = -1
            self._input.drop(fd)
        os.close(fd)

    def _send_output(self, task: int, stream: int, data: bytes) -> None:
        if self._is_connected:
            for at in range(0, len(data), CHUNK):
                self._outbox += output_frame(task, stream, data[at : at + CHUNK])


def _note(number: int, where: FrameType | None) -> None:
    """A handler that does nothing: only the wake-up descriptor counts."""


def main() -> None:
    """Serve srun over standard input and output."""
    # None of them is for this process, and its tasks begin with none held back.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    code = 0
    try:
        PartServer(0, 1).serve()
    except BaseException:
        # Our bug, which the person at srun sees.
        import traceback

        traceback.print_exc()
        code = 70
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
