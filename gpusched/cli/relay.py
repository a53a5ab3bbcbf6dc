"""The client of a run in the foreground: relays terminal input and the job's output."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import termios
import time

from gpusched.cli.run_connection import BACK, LOST, RunConnection, RunEnding
from gpusched.engine.attach_protocol import CHUNK, CLOSED, ERR, IN, NOTE, OUT, REFUSED, WELCOME
from gpusched.errors import Refused

RETURN = (b"\r"[0], b"\n"[0])
TILDE, DOT = b"~."


class RawTerminal:
    """Standard input, if it is a terminal. A context manager that restores the mode on exit, even after errors."""

    def __init__(self, fd: int = 0) -> None:
        self.fd = fd
        self._before = termios.tcgetattr(fd) if os.isatty(fd) else None

    @property
    def is_there(self) -> bool:
        return self._before is not None

    def __enter__(self) -> RawTerminal:
        self.make_raw()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def make_raw(self) -> None:
        """Pass every key to the job, including those that would signal this process."""
        if self._before is None:
            return
        mode = termios.tcgetattr(self.fd)
        mode[0] &= ~(
            termios.IGNBRK
            | termios.BRKINT
            | termios.PARMRK
            | termios.ISTRIP
            | termios.INLCR
            | termios.IGNCR
            | termios.ICRNL
            | termios.IXON
        )
        mode[1] &= ~termios.OPOST
        mode[2] = mode[2] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        self._set(mode)

    def restore(self) -> None:
        if self._before is not None:
            self._set(self._before)

    def _set(self, mode: list[object]) -> None:
        # Changing the mode from the background would stop this process.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            termios.tcsetattr(self.fd, termios.TCSADRAIN, mode)  # type: ignore[arg-type]
        except termios.error:
            # The terminal is closed, and its mode no longer matters.
            pass
        finally:
            signal.signal(signal.SIGTTOU, before)


def size() -> tuple[int, int]:
    """Rows and columns of the first standard stream that is a terminal; zeros if none is."""
    for fd in (0, 1, 2):
        try:
            found = os.get_terminal_size(fd)
        except OSError:
            continue
        return found.lines, found.columns
    return 0, 0


class EscapeFilter:
    """Finds `~.` at the beginning of a line of input, as ssh does; `~~` there is one tilde."""

    def __init__(self) -> None:
        self._is_new_line = True
        self._holds_tilde = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """The input for the job, and whether the user asked to detach."""
        if not self._holds_tilde and TILDE not in data:
            self._is_new_line = data[-1] in RETURN if data else self._is_new_line
            return data, False
        out = bytearray()
        for byte in data:
            if self._holds_tilde:
                self._holds_tilde = False
                if byte == DOT:
                    return bytes(out), True
                out.append(TILDE)
                if byte == TILDE:
                    self._is_new_line = False
                    continue
            elif byte == TILDE and self._is_new_line:
                self._holds_tilde = True
                continue
            out.append(byte)
            self._is_new_line = byte in RETURN
        return bytes(out), False


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PIPE_PIECE = 4096
"""Bytes that a pipe, terminal or socket accepts without blocking once it polls as writable."""
PATIENCE = 3
"""After this many Ctrl-C the job is terminated, whether or not it handles them."""
CONFIRM_S = 1.0
"""A second Ctrl-C within this time confirms the first."""
WATCHED = (
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP),
)


class AttachClient:
    """A person, or a pipe, at a connection to a run: relays the standard streams of this process, and its signals.

    Args: keeps: the run continues without this client. command: whose messages these are. step: a single Ctrl-C only
        asks for a second one, which interrupts this step; empty if each is passed on.
        watch: gets the run's output until it returns something to say.
    """

    def __init__(
        self,
        connection: RunConnection,
        keeps: bool,
        command: str = "grun",
        step: str = "",
        watch: Callable[[bytes], list[str] | None] | None = None,
    ) -> None:
        self._connection = connection
        self._watch = watch
        self._command = command
        self._keeps = keeps
        self._what = "command" if connection.is_visit else "job"
        self._pending = {OUT: bytearray(), ERR: bytearray()}
        self._has_input = True
        self._is_pty = False
        self._interrupts = 0
        self._step = step
        self._asked_at = -CONFIRM_S
        self._escape = EscapeFilter()
        self._terminal: RawTerminal | None = None

    def run(self) -> RunEnding:
        """Attach, and stay until the run ends or this client has to leave. Raises: Refused."""
        wake_out, wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # In this order: a signal between the two would be noted nowhere.
        before_wake = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        before = {number: signal.signal(number, _note) for number in WATCHED}
        try:
            while self._turn(wake_out):
                pass
        finally:
            if self._terminal is not None:
                self._terminal.restore()
            signal.set_wakeup_fd(before_wake)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake_out)
            os.close(wake_in)
            self._connection.close()
        return self._connection.end

    # --- one turn ---------------------------------------------------------------------------------------

    def _turn(self, wake_fd: int) -> bool:
        """Poll once and relay; False when nothing is left to relay."""
        connection = self._connection
        if not connection.is_open and not any(self._pending.values()):
            return False
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        fd = connection.fileno() if connection.is_open else -1
        if fd >= 0:
            poll.register(fd, connection.events)
        is_reading = connection.is_open and self._has_input and connection.credit > 0
        if is_reading:
            poll.register(0, select.POLLIN)
        for stream, data in self._pending.items():
            if data:
                poll.register(stream - IN, select.POLLOUT)
        ready = dict(poll.poll(connection.pause_ms()))
        if wake_fd in ready:
            for number in os.read(wake_fd, 4096):
                if not self._handle_signal(number):
                    return False
        for stream in self._pending:
            if stream - IN in ready and not self._write(stream):
                return False
        if is_reading and 0 in ready and not self._read_input():
            return False
        if connection.is_open:
            for kind, content in connection.on_ready(ready.get(fd, 0)):
                self._take(kind, content)
        return True

    def _take(self, kind: int, content: bytes) -> None:
        if kind in self._pending:
            self._pending[kind] += content
            if self._watch is not None and (lines := self._watch(content)) is not None:
                self._watch = None
                for line in lines:
                    self.say(line)
        elif kind in (NOTE, LOST, BACK):
            self.say(content.decode("utf-8", "replace"))
        elif kind == CLOSED:
            self._stop_reading()
        elif kind == WELCOME:
            self._begin(content == b"pty")
        elif kind == REFUSED:
            text = content.decode("utf-8", "replace")
            hint = f"detach that client first: kill {text.split()[-1]}"
            raise Refused(text, hint if self._keeps else "the job was started without --keep and ends with that client")

    def _begin(self, is_pty: bool) -> None:
        self._is_pty = is_pty
        if is_pty:
            self._terminal = RawTerminal()
            self._terminal.make_raw()

    def say(self, text: str) -> None:
        """Print a message to the user, even in the middle of a full-screen program."""
        begin, close = ("\r\n", "\r\n") if self._terminal is not None and self._terminal.is_there else ("", "\n")
        sys.stderr.write(f"{begin}{self._command}: {text}{close}")
        sys.stderr.flush()

    # --- in and out -------------------------------------------------------------------------------------

    def _read_input(self) -> bool:
        """Relay terminal or piped input; False if the user leaves."""
        try:
            data = os.read(0, min(CHUNK, self._connection.credit))
        except OSError:
            data = b""
        is_at_keys = self._is_pty and self._terminal is not None and self._terminal.is_there
        if not data and is_at_keys:
            return self._leave(signal.SIGHUP)
        if not data:
            self._has_input = False
            self._connection.end_input()
            return True
        wants_out = False
        if is_at_keys:
            data, wants_out = self._escape.feed(data)
        if data:
            self._connection.send_input(data)
        return self._leave(0) if wants_out else True

    def _stop_reading(self) -> None:
        """The job accepts no more input: close ours, so that its writer notices."""
        if self._has_input and not os.isatty(0):
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
        self._has_input = False

    def _write(self, stream: int) -> bool:
        """Write some of the pending data; False if the reader has closed."""
        fd, data = stream - IN, self._pending[stream]
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        written = 0
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        try:
            while data and (written == 0 or poll.poll(0)):
                count = os.write(fd, bytes(data[: CHUNK if is_file else PIPE_PIECE]))
                del data[:count]
                written += count
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return self._leave(signal.SIGPIPE)
        except OSError:
            self._leave(0)
            raise
        if written:
            self._connection.acknowledge(stream, written)
        return True

    # --- signals ----------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> bool:
        """Handle a signal to this process; False if the client has to leave."""
        if number == signal.SIGWINCH:
            self._resize()
        elif number == signal.SIGCONT:
            if self._terminal is not None:
                self._terminal.make_raw()
                self._resize()
        elif number == signal.SIGTSTP:
            self._suspend()
        elif self._is_pty or number == signal.SIGHUP or (number == signal.SIGTERM and self._wants_to_leave()):
            return self._leave(number)
        elif self._connection.is_open:
            if number == signal.SIGINT and self._step and not self._is_confirmed():
                return True
            if number in (signal.SIGINT, signal.SIGTERM):
                self._interrupts += 1
            if self._interrupts >= PATIENCE:
                return self._leave(number)
            if number == signal.SIGINT and self._interrupts == PATIENCE - 1:
                self.say("once more detaches from the job" if self._keeps else f"once more terminates the {self._what}")
            self._connection.signal(number)
        return True

    def _is_confirmed(self) -> bool:
        """Whether this Ctrl-C follows another."""
        now = time.monotonic()
        is_second = now - self._asked_at <= CONFIRM_S
        self._asked_at = now
        self.say(f"sending Ctrl-C to {self._step}" if is_second else "interrupt (one more within 1 sec to abort)")
        return is_second

    def _wants_to_leave(self) -> bool:
        """TERM is forwarded to the job first, if the job is to end with this process."""
        return self._keeps or self._interrupts > 0

    def _resize(self) -> None:
        self._connection.resize(*size())

    def _suspend(self) -> None:
        if self._terminal is not None:
            self._terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _leave(self, number: int) -> bool:
        self._connection.end.left_by = number
        self._connection.leave()
        return False


def _note(number: int, where: FrameType | None) -> None:
    """A handler that does nothing: only the wake-up descriptor counts."""
