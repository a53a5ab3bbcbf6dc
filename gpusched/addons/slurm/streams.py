"""Standard streams of a step's tasks: file patterns, labelled lines, and one input for all tasks."""

from __future__ import annotations

import _thread
import os
import select
import time

from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    from gpusched.addons.slurm.step import Step
    from gpusched.addons.slurm.step_tasks import NodeShare

    class Others(Protocol):
        """The parts of the step on other nodes, as `Pump` serves them on its thread."""

        @property
        def is_open(self) -> bool:
            """Whether anything may still come of them."""

        @property
        def wants_input(self) -> bool: ...

        def register(self, poll: select.poll) -> float | None:
            """Register what is waited for; returns how long at most, in milliseconds."""

        def on_ready(self, ready: Mapping[int, int]) -> None: ...

        def give(self, piece: bytes) -> None:
            """Take input for the tasks; an empty piece is its end."""


_CHUNK = 1 << 16
_LONGEST = 1 << 20
"""Bytes of a line without end that are kept back for its label."""
_HOLD_S = 0.2
"""How long the beginning of a line is kept back for its end."""
_MOST_AHEAD = 1 << 22
"""Bytes of input that a task may lag behind the fastest one."""
_MOST_WAITING = 1 << 18
"""Bytes that wait for a slow reader of srun's output, above which no more is taken for it."""
_PIPE_PIECE = 4096
"""Bytes that a pipe or terminal accepts without blocking once it polls as writable."""
MOST_WIDTH = 10


def expand(pattern: str, values: Mapping[str, str | int]) -> str:
    """A file pattern with its letters filled in: `%t`, `%j`, numbers padded by `%3t`, `%%`.

    As in srun an unknown letter stays as it is, and a pattern with a backslash is taken literally, without it.
    """
    if "\\" in pattern:
        return pattern.replace("\\", "")
    pieces = []
    at = 0
    while at < len(pattern):
        percent = pattern.find("%", at)
        if percent < 0:
            pieces.append(pattern[at:])
            break
        pieces.append(pattern[at:percent])
        end = percent + 1
        while end < len(pattern) and pattern[end] in "0123456789":
            end += 1
        letter = pattern[end : end + 1]
        value = "%" if letter == "%" and end == percent + 1 else values.get(letter)
        if value is None:
            pieces.append(pattern[percent : end + 1])
        elif isinstance(value, int):
            pieces.append(str(value).zfill(min(MOST_WIDTH, int(pattern[percent + 1 : end][:3] or 0))))
        else:
            pieces.append(value.replace("/", "_"))
        at = end + 1
    return "".join(pieces)


class Lines:
    """Passes on whole lines, so that others' output does not come in between.

    A line that stays without its end is passed on all the same, as a prompt or a progress bar is to be seen.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.due_at: float | None = None
        """When to call `end` for what was kept back, on the monotonic clock."""

    def feed(self, piece: bytes) -> bytes:
        """What may be passed on now."""
        whole = piece.rfind(b"\n") + 1
        if not whole and len(self._rest) < _LONGEST:
            self._rest += piece
            found = b""
        else:
            found, self._rest = self._rest + piece[:whole], piece[whole:]
        if whole or self.due_at is None:
            self.due_at = time.monotonic() + _HOLD_S if self._rest else None
        return found

    def end(self) -> bytes:
        """What was kept back."""
        found, self._rest, self.due_at = self._rest, b"", None
        return found


class Labeller:
    """Puts a label before each line of what it is fed, whatever pieces it comes in."""

    due_at: float | None = None

    def __init__(self, label: bytes) -> None:
        self._label = label
        self._rest = b""
        self._is_inside = False
        """Part of the current line has been passed on already."""

    def feed(self, piece: bytes) -> bytes:
        """The complete lines so far, labelled; the rest is kept back, unless it is very long."""
        if not piece:
            return b""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        found = b"".join(self._labelled(line) + b"\n" for line in lines)
        if len(self._rest) > _LONGEST:
            found += self._labelled(self._rest)
            self._rest, self._is_inside = b"", True
        return found

    def _labelled(self, line: bytes) -> bytes:
        label = b"" if self._is_inside else self._label
        self._is_inside = False
        return label + line

    def end(self) -> bytes:
        """What was kept back, as a line of its own."""
        rest, self._rest = self._rest, b""
        if not rest and not self._is_inside:
            return b""
        return self._labelled(rest) + b"\n"


def label_of(task: int, count: int) -> bytes:
    """`0: `, aligned when there are more than ten tasks."""
    return f"{task:>{len(str(count - 1))}}: ".encode()


class Outlet:
    """What waits to be written to one descriptor, which must not hold up anything else."""

    __slots__ = ("_data", "_is_file", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._data = bytearray()
        self._is_file = _is_file(fd)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def is_full(self) -> bool:
        return len(self._data) >= _MOST_WAITING

    def put(self, piece: bytes) -> None:
        self._data += piece

    def write(self) -> None:
        """Write what it accepts now; a reader that is gone loses the rest."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        try:
            while self._data and poll.poll(0):
                del self._data[: os.write(self.fd, self._data[: _CHUNK if self._is_file else _PIPE_PIECE])]
        except BlockingIOError:
            return
        except OSError:
            self._data.clear()


def _is_file(fd: int) -> bool:
    import stat  # of any command's start

    return stat.S_ISREG(os.fstat(fd).st_mode)


class Pump:
    """Copies output of tasks, labelled, and this process's input to tasks, on a separate thread."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Outlet, Labeller | Lines]] = {}
        """By descriptor read from."""
        self._outlets: dict[int, Outlet] = {}
        self._sinks: dict[int, bytearray] = {}
        """By descriptor of a task's input: what it has not taken yet."""
        self._is_reading = False
        self.input_fd = 0
        self.others: Others | None = None
        self._wake_in, self._wake_out = os.pipe()
        self._done = _thread.allocate_lock()
        self._has_begun = False
        self._linger_s = 0.0

    @property
    def has_sinks(self) -> bool:
        """Whether a task on this node may still read."""
        return bool(self._sinks)

    def outlet(self, target: int) -> Outlet:
        """What waits to be written to this descriptor."""
        if target not in self._outlets:
            self._outlets[target] = Outlet(target)
        return self._outlets[target]

    def add_output(self, target: int, label: bytes | None) -> int:
        """A descriptor for a task to write to; what it writes goes to the target, line by line, with this label."""
        reader, writer = os.pipe()
        self._sources[reader] = self.outlet(target), Lines() if label is None else Labeller(label)
        return writer

    def add_input(self) -> int:
        """A descriptor for a task to read from: it gets all of this process's input."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._sinks[writer] = bytearray()
        self._is_reading = True
        return reader

    def add_others(self, others: Others, *, read_input: bool) -> None:
        """Serve the parts on other nodes as well. Args: read_input: they get this process's input."""
        self.others = others
        self._is_reading = self._is_reading or read_input

    def start(self) -> None:
        """Begin to copy; what is added later would not be seen."""
        if self._sources or self._sinks or self.others is not None:
            self._has_begun = True
            self._done.acquire()
            _thread.start_new_thread(self._run, ())

    def finish(self, linger_s: float) -> None:
        """Wait until all output has been copied. Args: linger_s: a process may hold it open for ever; wait so long."""
        if self._has_begun:
            self._linger_s = linger_s
            os.close(self._wake_out)
            self._done.acquire()

    def _run(self) -> None:
        try:
            self._copy()
        finally:
            self._done.release()

    def _copy(self) -> None:
        leave_at: float | None = None
        while True:
            is_over = leave_at is not None
            poll = select.poll()
            for source, (outlet, _) in self._sources.items():
                poll.register(source, 0 if outlet.is_full else select.POLLIN)
            for outlet in self._outlets.values():
                if outlet:
                    poll.register(outlet.fd, select.POLLOUT)
            for sink, waiting in self._sinks.items():
                poll.register(sink, select.POLLOUT if waiting else 0)
            if self._wants_input():
                poll.register(self.input_fd, select.POLLIN)
            pause_ms = None if self.others is None else self.others.register(poll)
            if leave_at is None:
                poll.register(self._wake_in, select.POLLIN)
            due = [lines.due_at for _, lines in self._sources.values() if lines.due_at is not None]
            if leave_at is not None and self._sources:
                due.append(leave_at)
            if due:
                left_ms = max(0.0, min(due) - time.monotonic()) * 1000
                pause_ms = left_ms if pause_ms is None else min(left_ms, pause_ms)
            ready = dict(poll.poll(pause_ms))
            if due:
                self._pass_on_rests(time.monotonic())
            if self.others is not None:
                self.others.on_ready(ready)
            for fd, events in ready.items():
                if fd in self._outlets:
                    self._outlets[fd].write()
                elif fd in self._sources:
                    self._take_output(fd)
                elif fd in self._sinks:
                    self._give_input(fd, events)
                elif fd == self.input_fd and self._is_reading:
                    self._take_input()
                elif fd == self._wake_in and not is_over:
                    leave_at = time.monotonic() + self._linger_s
            if self._is_done(leave_at):
                return

    def _pass_on_rests(self, now: float) -> None:
        for outlet, lines in self._sources.values():
            if lines.due_at is not None and now >= lines.due_at:
                outlet.put(lines.end())

    def _is_done(self, leave_at: float | None) -> bool:
        if any(self._outlets.values()) or (self.others is not None and self.others.is_open):
            return False
        if leave_at is None:
            return not self._sources and not self._sinks and self.others is None
        return not self._sources or time.monotonic() >= leave_at

    def _wants_input(self) -> bool:
        if not self._is_reading:
            return False
        most = max(map(len, self._sinks.values()), default=0)
        if self.others is None:
            return bool(self._sinks) and most < _MOST_AHEAD
        return most < _MOST_AHEAD and self.others.wants_input

    def _take_output(self, source: int) -> None:
        outlet, labeller = self._sources[source]
        try:
            piece = os.read(source, _CHUNK)
        except OSError:
            piece = b""
        outlet.put(labeller.feed(piece) if piece else labeller.end())
        outlet.write()
        if not piece:
            del self._sources[source]
            os.close(source)

    def _take_input(self) -> None:
        try:
            piece = os.read(self.input_fd, _CHUNK)
        except OSError:
            piece = b""
        for waiting in self._sinks.values():
            waiting += piece
        if self.others is not None:
            self.others.give(piece)
        if not piece:
            self._is_reading = False
            self._close_served()

    def _give_input(self, sink: int, events: int) -> None:
        waiting = self._sinks[sink]
        if events & select.POLLOUT and waiting:
            try:
                del waiting[: os.write(sink, waiting[:_CHUNK])]
            except BlockingIOError:
                pass
            except OSError:
                events |= select.POLLERR
        if events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            # The task has closed its input or ended.
            del self._sinks[sink]
            os.close(sink)
        elif not self._is_reading:
            self._close_served()

    def _close_served(self) -> None:
        """Tell tasks that have everything that their input has ended."""
        for sink in [sink for sink, waiting in self._sinks.items() if not waiting]:
            del self._sinks[sink]
            os.close(sink)


class Files:
    """Files that tasks read and write on this node; those that they write are opened once.

    Args: truncates: existing ones, apart from `own`: files by device and number that are written to already.
    """

    def __init__(self, *, truncates: bool, own: Sequence[tuple[int, int]] = ()) -> None:
        self._truncates = truncates
        self._own = own
        self._open: dict[str, int] = {}
        self._sources: list[int] = []

    def input(self, path: str | None) -> int:
        """A descriptor that reads a file from its beginning, or nothing. Raises: ValueError with a sentence."""
        self._sources.append(_opened(os.devnull if path is None else path, os.O_RDONLY, "stdin"))
        return self._sources[-1]

    def output(self, path: str | None) -> int:
        """A descriptor that appends to a file, or drops all. Raises: ValueError with a sentence."""
        if path is None:
            path = os.devnull
        if path not in self._open:
            fd = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, "stdout")
            # Where the job writes to it as well, both append, and nothing is lost.
            if self._truncates and _identity(fd) not in self._own:
                try:
                    os.ftruncate(fd, 0)
                except OSError:
                    # Not a file.
                    pass
            self._open[path] = fd
        return self._open[path]

    def close(self) -> None:
        """Close them: the tasks have their own copies."""
        for fd in (*self._sources, *self._open.values()):
            os.close(fd)
        self._sources, self._open = [], {}

    def close_sources(self) -> None:
        """Close those that are only read."""
        for fd in self._sources:
            os.close(fd)
        self._sources = []


def _opened(path: str, flags: int, what: str) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"Could not open {what} file {printable(path)}: {why}") from None


class Streams:
    """The standard streams of the tasks, as the options say."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._given: list[int] = []
        options, job = step.options, step.job
        self._input, self._output, self._error = (options.text(name) for name in ("input", "output", "error"))
        if self._error is None and self._output:
            # As in Slurm the errors follow the output into its file.
            self._error = self._output
        mode = options.text("open-mode") or job.get("open_mode") or "truncate"
        self.truncates = not mode.startswith("a")
        self._files = Files(truncates=self.truncates, own=[_identity(fd) for fd in (1, 2)])
        self._values: dict[str, str | int] = {
            "A": int(job.get("array_id") or job["job_id"]),
            "a": int(job.get("task") or 0),
            "j": int(job["job_id"]),
            "J": f"{job['job_id']}.{step.number}",
            "s": step.number,
            "u": str(job["user"]),
            "x": str(job["name"]),
        }

    def of(self, task: int, share: NodeShare) -> tuple[int, int, int]:
        """Input, output and errors of a task on this node. Raises: CommandError."""
        try:
            output, error = self._sink(task, share, self._output, 1), self._sink(task, share, self._error, 2)
            source = self._source(task, share)
        except ValueError as problem:
            raise self._step.command.error(str(problem)) from None
        return source, self._relayed(task, output, self._output), self._relayed(task, error, self._error)

    def elsewhere(self, task: int, share: NodeShare) -> tuple[Any, Any, Any, int, int]:
        """Input, output and errors of a task on another node, as LAUNCH has them, and where srun writes the latter two.

        A pattern that names the task or its node is a file there; any other is one that all nodes share, and srun's.
        Raises: CommandError.
        """
        try:
            output, target = self._sink_elsewhere(task, share, self._output, 1)
            error, error_target = self._sink_elsewhere(task, share, self._error, 2)
            return self._source_elsewhere(task, share), output, error, target, error_target
        except ValueError as problem:
            raise self._step.command.error(str(problem)) from None

    def _relayed(self, task: int, target: int, text: str | None) -> int:
        """What a task gets to write to: the target itself, unless lines are labelled or must not be torn.

        Tasks of one node write to it side by side, as processes do; srun adds what comes of other nodes.
        """
        options = self._step.options
        if options.has_label:
            return self._given_to_task(self._step.pump.add_output(target, label_of(task, self._step.count)))
        is_shared = len(self._step.shares) > 1 and (text is None or not names_task(text))
        if is_shared and not options.has("unbuffered") and not self._step.has_pty:
            return self._given_to_task(self._step.pump.add_output(target, None))
        return target

    def _given_to_task(self, fd: int) -> int:
        self._given.append(fd)
        return fd

    def _path(self, text: str, task: int, share: NodeShare) -> str:
        return expand(text, {**self._values, "t": task, "n": share.nodeid, "N": share.node.partition(".")[0]})

    def _source(self, task: int, share: NodeShare) -> int:
        text, is_pty = self._input, self._step.has_pty
        if text is None or text == "all":
            if self._step.count == 1 or _identity(0) == _identity_of(os.devnull) or is_pty:
                return 0 if task == 0 or not is_pty else self._files.input(None)
            return self._given_to_task(self._step.pump.add_input())
        if is_digits(text):
            return 0 if int(text) == task else self._files.input(None)
        # Each task reads from the beginning.
        return self._files.input(None if text == "none" else self._path(text, task, share))

    def _source_elsewhere(self, task: int, share: NodeShare) -> bool | str | None:
        text = self._input
        if text is None or text == "all":
            has_input = (task == 0 or not self._step.has_pty) and _identity(0) != _identity_of(os.devnull)
            return True if has_input else None
        if is_digits(text):
            return True if int(text) == task else None
        if text == "none":
            return None
        path = self._path(text, task, share)
        if not names_task(text):
            if self._step.pump.input_fd == 0:
                self._step.pump.input_fd = _opened(path, os.O_RDONLY, "stdin")
            return True
        return path

    def _sink(self, task: int, share: NodeShare, text: str | None, standard: int) -> int:
        if text is None or text == "all":
            return standard
        if is_digits(text) and int(text) == task:
            return standard
        if text == "none" or is_digits(text):
            return self._files.output(None)
        return self._files.output(self._path(text, task, share))

    def _sink_elsewhere(
        self, task: int, share: NodeShare, text: str | None, standard: int
    ) -> tuple[bool | str | None, int]:
        if text is not None and text not in ("all", "none") and not is_digits(text):
            path = self._path(text, task, share)
            return (path, standard) if names_task(text) else (True, self._files.output(path))
        if text is None or text == "all" or (text.isdigit() and int(text) == task):
            return True, standard
        return None, standard

    def close(self) -> None:
        """Close what only tasks on this node use."""
        for fd in self._given:
            os.close(fd)
        self._given = []
        if self._step.options.has_label or self._step.pump.others is not None:
            self._files.close_sources()
        else:
            self._files.close()


def names_task(pattern: str) -> bool:
    """Whether a file pattern stands for different files of different tasks or nodes."""
    values = [{"t": letter, "n": letter, "N": letter} for letter in ("1", "2")]
    return expand(pattern, values[0]) != expand(pattern, values[1])


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _identity_of(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
