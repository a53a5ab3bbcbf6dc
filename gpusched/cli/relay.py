"""The client of a run in the foreground: relays terminal input and the job's output."""

from __future__ import annotations

import _socket
import os
import select
import signal
import stat
import sys
import termios
import time

from gpusched.engine.attach_protocol import ACK as ACKNOWLEDGED
from gpusched.engine.attach_protocol import (
    BYE,
    CHUNK,
    CLOSED,
    EOF,
    ERR,
    EXIT,
    HELLO,
    IN,
    NOTE,
    OUT,
    REFUSED,
    RUN,
    SIGNAL,
    SIZE,
    VERSION,
    WELCOME,
    WINDOW,
    ack,
    frame,
    pack_wanted,
    read_ack,
    take_frames,
)
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
    from types import FrameType

    from gpusched.engine.attach_protocol import Wanted

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


class RunEnding:
    """How the run ended, as reported by its supervisor; `is_known` is False if the report is missing."""

    def __init__(self) -> None:
        self.is_known = False
        self.code: int | None = None
        self.signal: int | None = None
        self.stopped_by: str | None = None
        self.sentence = ""
        self.left_by: int | None = None
        """Set if the client left on its own: 0 after `~.`, else the signal."""


class AttachClient:
    """The connection to a run.

    Args: keeps: the run goes on without this client. command: whose messages these are. step: a single Ctrl-C only
        asks for a second one, which interrupts this step; empty if each is passed on. wanted: what to run, at the door
        of a job that runs already.
    """

    def __init__(
        self,
        sock: _socket.socket,
        keeps: bool,
        command: str = "grun",
        step: str = "",
        wanted: Wanted | None = None,
    ) -> None:
        self._socket = sock
        self._command = command
        self._keeps = keeps
        self._inbox = bytearray()
        self._outbox = bytearray() if wanted is None else bytearray(frame(RUN, pack_wanted(wanted)))
        self._what = "job" if wanted is None else "command"
        self._pending = {OUT: bytearray(), ERR: bytearray()}
        self._input_credit = WINDOW
        self._has_input = True
        self._is_pty = False
        self._is_open = True
        self._interrupts = 0
        self._step = step
        self._asked_at = -CONFIRM_S
        self._escape = EscapeFilter()
        self._terminal: RawTerminal | None = None
        self._end = RunEnding()

    def run(self) -> RunEnding:
        """Attach, and stay until the run ends or this client has to leave. Raises: Refused."""
        self._outbox += frame(HELLO, b"%d %d %d" % (VERSION, *size()))
        wake_out, wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = {number: signal.signal(number, _note) for number in WATCHED}
        before_wake = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
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
            self._socket.close()
        return self._end

    # --- one turn ---------------------------------------------------------------------------------------

    def _turn(self, wake_fd: int) -> bool:
        """Poll once and relay; False when nothing is left to relay."""
        if not self._is_open and not any(self._pending.values()):
            return False
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        if self._is_open:
            poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
        is_reading = self._is_open and self._has_input and self._input_credit > 0
        if is_reading:
            poll.register(0, select.POLLIN)
        for stream, data in self._pending.items():
            if data:
                poll.register(stream - IN, select.POLLOUT)
        ready = dict(poll.poll())
        if wake_fd in ready:
            for number in os.read(wake_fd, 4096):
                if not self._handle_signal(number):
                    return False
        for stream in self._pending:
            if stream - IN in ready and not self._write(stream):
                return False
        if is_reading and 0 in ready and not self._read_input():
            return False
        if self._is_open and self._socket.fileno() in ready:
            self._talk()
        return True

    def _talk(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
            if data:
                self._inbox += data
                for kind, content in take_frames(self._inbox):
                    self._take(kind, content)
            else:
                self._is_open = False
        except BlockingIOError:
            pass
        except (ConnectionError, ValueError):
            self._is_open = False
        self._flush()

    def _flush(self) -> None:
        try:
            while self._is_open and self._outbox:
                count = self._socket.send(bytes(self._outbox[: 1 << 17]))
                del self._outbox[:count]
        except BlockingIOError:
            pass
        except OSError:
            # Output sent before it disconnected is still to be read.
            self._outbox.clear()

    def _take(self, kind: int, content: bytes) -> None:
        if kind in self._pending:
            self._pending[kind] += content
        elif kind == ACKNOWLEDGED:
            self._input_credit += read_ack(content)[1]
        elif kind == NOTE:
            self.say(content.decode("utf-8", "replace"))
        elif kind == CLOSED:
            self._stop_reading()
        elif kind == WELCOME:
            self._begin(content.split()[1] == b"pty")
        elif kind == REFUSED:
            text = content.decode("utf-8", "replace")
            hint = f"detach that client first: kill {text.split()[-1]}"
            raise Refused(text, hint if self._keeps else "the job was started without --keep and ends with that client")
        elif kind == EXIT:
            self._take_exit(content)

    def _begin(self, is_pty: bool) -> None:
        self._is_pty = is_pty
        if is_pty:
            self._terminal = RawTerminal()
            self._terminal.make_raw()

    def _take_exit(self, content: bytes) -> None:
        first, _, sentence = content.decode("utf-8", "surrogateescape").partition("\n")
        code, number, why, _ = first.split(" ")
        end = self._end
        end.is_known = True
        end.code = None if code == "-" else int(code)
        end.signal = None if number == "-" else int(number)
        end.stopped_by = None if why == "-" else why
        end.sentence = sentence
        self._is_open = False

    def say(self, text: str) -> None:
        """Print a message to the user, even in the middle of a full-screen program."""
        begin, close = ("\r\n", "\r\n") if self._terminal is not None and self._terminal.is_there else ("", "\n")
        sys.stderr.write(f"{begin}{self._command}: {text}{close}")
        sys.stderr.flush()

    # --- in and out -------------------------------------------------------------------------------------

    def _read_input(self) -> bool:
        """Relay terminal or piped input; False if the user leaves."""
        try:
            data = os.read(0, min(CHUNK, self._input_credit))
        except OSError:
            data = b""
        is_at_keys = self._is_pty and self._terminal is not None and self._terminal.is_there
        if not data and is_at_keys:
            return self._leave(signal.SIGHUP)
        if not data:
            self._has_input = False
            self._outbox += frame(EOF)
            self._flush()
            return True
        wants_out = False
        if is_at_keys:
            data, wants_out = self._escape.feed(data)
        if data:
            self._input_credit -= len(data)
            self._outbox += frame(IN, data)
            self._flush()
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
        if written and self._is_open:
            self._outbox += ack(stream, written)
            self._flush()
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
        elif self._is_open:
            if number == signal.SIGINT and self._step and not self._is_confirmed():
                return True
            if number in (signal.SIGINT, signal.SIGTERM):
                self._interrupts += 1
            if self._interrupts >= PATIENCE:
                return self._leave(number)
            if number == signal.SIGINT and self._interrupts == PATIENCE - 1:
                self.say("once more detaches from the job" if self._keeps else f"once more terminates the {self._what}")
            self._outbox += frame(SIGNAL, b"%d" % number)
            self._flush()
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
        self._outbox += frame(SIZE, b"%d %d" % size())
        self._flush()

    def _suspend(self) -> None:
        if self._terminal is not None:
            self._terminal.restore()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _leave(self, number: int) -> bool:
        self._end.left_by = number
        if self._is_open:
            self._outbox += frame(BYE)
            self._flush()
        return False


def _note(number: int, where: FrameType | None) -> None:
    """A handler that does nothing: only the wake-up descriptor counts."""
