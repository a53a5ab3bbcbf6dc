"""Standard streams of a step's tasks: file patterns, labelled lines, and one input for all tasks."""

from __future__ import annotations

import _thread
import os
import select

from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpusched.cli.slurm.step import Step

_CHUNK = 1 << 16
_LONGEST = 1 << 20
"""Bytes of a line without end that are kept back for its label."""
_MOST_AHEAD = 1 << 22
"""Bytes of input that a task may lag behind the fastest one."""
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


class Labeller:
    """Puts a label before each line of what it is fed, whatever pieces it comes in."""

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


class Pump:
    """Copies the output of tasks, labelled, and this process's input to tasks, on a separate thread."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[int, Labeller]] = {}
        """By descriptor read from: the one to write to, and the labels."""
        self._sinks: dict[int, bytearray] = {}
        """By descriptor of a task's input: what it has not taken yet."""
        self._is_reading = False
        self._wake_in, self._wake_out = os.pipe()
        self._done = _thread.allocate_lock()
        self._has_begun = False

    def add_output(self, target: int, label: bytes) -> int:
        """A descriptor for a task to write to; what it writes goes to the target with this label."""
        reader, writer = os.pipe()
        self._sources[reader] = target, Labeller(label)
        return writer

    def add_input(self) -> int:
        """A descriptor for a task to read from: it gets all of this process's input."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._sinks[writer] = bytearray()
        self._is_reading = True
        return reader

    def start(self) -> None:
        """Begin to copy; the tasks have been started, and the descriptors given to them are closed here."""
        if self._sources or self._sinks:
            self._has_begun = True
            self._done.acquire()
            _thread.start_new_thread(self._run, ())

    def finish(self, timeout_s: float) -> None:
        """Wait until all output has been copied, at most for this long: a process may hold it open for ever."""
        if self._has_begun:
            os.close(self._wake_out)
            self._done.acquire(timeout=timeout_s)

    def _run(self) -> None:
        try:
            self._copy()
        finally:
            self._done.release()

    def _copy(self) -> None:
        is_over = False
        while self._sources or (self._sinks and not is_over):
            poll = select.poll()
            for source in self._sources:
                poll.register(source, select.POLLIN)
            for sink, waiting in self._sinks.items():
                poll.register(sink, select.POLLOUT if waiting else 0)
            most = max(map(len, self._sinks.values()), default=0)
            if self._is_reading and self._sinks and most < _MOST_AHEAD:
                poll.register(0, select.POLLIN)
            if not is_over:
                poll.register(self._wake_in, select.POLLIN)
            for fd, events in poll.poll():
                if fd in self._sources:
                    self._take_output(fd)
                elif fd in self._sinks:
                    self._give_input(fd, events)
                elif fd == 0 and self._is_reading:
                    self._take_input()
                elif fd == self._wake_in:
                    is_over = True

    def _take_output(self, source: int) -> None:
        target, labeller = self._sources[source]
        try:
            piece = os.read(source, _CHUNK)
        except OSError:
            piece = b""
        write_all(target, labeller.feed(piece) if piece else labeller.end())
        if not piece:
            del self._sources[source]
            os.close(source)

    def _take_input(self) -> None:
        try:
            piece = os.read(0, _CHUNK)
        except OSError:
            piece = b""
        for waiting in self._sinks.values():
            waiting += piece
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


def write_all(target: int, content: bytes) -> None:
    """Write to a descriptor; a reader that is gone loses the rest."""
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(target, view) :]
    except OSError:
        return


class Streams:
    """Descriptors of the tasks' standard streams, as the options say."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._open: dict[str, int] = {}
        self._given: list[int] = []
        options, job = step.options, step.job
        self._input, self._output, self._error = (options.text(name) for name in ("input", "output", "error"))
        mode = options.text("open-mode") or job.get("open_mode") or "truncate"
        self._truncates = not mode.startswith("a")
        self._values: dict[str, str | int] = {
            "A": int(job.get("array_id") or job["job_id"]),
            "a": int(job.get("task") or 0),
            "j": int(job["job_id"]),
            "J": f"{job['job_id']}.{step.number}",
            "N": step.node.partition(".")[0],
            "n": 0,
            "s": step.number,
            "u": str(job["user"]),
            "x": str(job["name"]),
        }
        self._own = [_identity(fd) for fd in (1, 2)]

    def of(self, task: int) -> tuple[int, int, int]:
        """Input, output and errors of a task. Raises: CommandError."""
        output = self._sink(task, self._output, 1)
        # As in Slurm the errors follow the output into its file.
        error = (
            self._sink(task, self._output, 1)
            if self._error is None and self._output
            else self._sink(task, self._error, 2)
        )
        return self._source(task), self._labelled(task, output), self._labelled(task, error)

    def _labelled(self, task: int, target: int) -> int:
        options = self._step.options
        if not options.has_label:
            return target
        return self._given_to_task(self._step.pump.add_output(target, label_of(task, options.tasks)))

    def _given_to_task(self, fd: int) -> int:
        self._given.append(fd)
        return fd

    def _source(self, task: int) -> int:
        text = self._input
        count = self._step.options.tasks
        if text is None or text == "all":
            if count == 1 or _identity(0) == _identity_of(os.devnull) or self._step.typed.has("pty"):
                return (
                    0
                    if task == 0 or count == 1 or not self._step.typed.has("pty")
                    else self._file(os.devnull, os.O_RDONLY)
                )
            return self._given_to_task(self._step.pump.add_input())
        if text.isascii() and text.isdigit():
            return 0 if int(text) == task else self._file(os.devnull, os.O_RDONLY)
        if text == "none":
            return self._file(os.devnull, os.O_RDONLY)
        path = expand(text, {**self._values, "t": task})
        # Each task reads from the beginning.
        return self._given_to_task(self._opened(path, os.O_RDONLY))

    def _sink(self, task: int, text: str | None, standard: int) -> int:
        if text is None or text == "all":
            return standard
        if text == "none" or (text.isascii() and text.isdigit() and int(text) != task):
            return self._file(os.devnull, os.O_WRONLY)
        if text.isascii() and text.isdigit():
            return standard
        path = expand(text, {**self._values, "t": task})
        return self._file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)

    def _file(self, path: str, flags: int) -> int:
        """A file for any number of tasks and streams, opened once."""
        key = f"{flags}:{path}"
        if key not in self._open:
            fd = self._opened(path, flags)
            if flags & os.O_CREAT:
                identity = _identity(fd)
                if identity in self._own:
                    # The job writes to it as well: both append, and nothing is lost.
                    pass
                elif self._truncates:
                    try:
                        os.ftruncate(fd, 0)
                    except OSError:
                        # Not a file.
                        pass
            self._open[key] = fd
        return self._open[key]

    def _opened(self, path: str, flags: int) -> int:
        try:
            return os.open(path, flags | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            what = "stdin" if not flags & (os.O_WRONLY | os.O_CREAT) else "stdout"
            raise self._step.command.error(f"Could not open {what} file {printable(path)}: {why}") from None

    def close(self) -> None:
        """Close what only tasks use."""
        for fd in self._given:
            os.close(fd)
        if not self._step.options.has_label:
            for fd in self._open.values():
                os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _identity_of(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
