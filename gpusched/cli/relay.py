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
    COUNT,
    COUNT_BYTES,
    EOF,
    ERR,
    EXIT,
    HEAD,
    HELLO,
    HOLD,
    IN,
    NOTE,
    OUT,
    PING,
    REFUSED,
    RESUME,
    RESUMED,
    RUN,
    SIGNAL,
    SIZE,
    VERSION,
    WELCOME,
    WINDOW,
    SentBytes,
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
    from collections.abc import Callable
    from types import FrameType

    from gpusched.engine.attach_protocol import Wanted

PIPE_PIECE = 4096
"""Bytes that a pipe, terminal or socket accepts without blocking once it polls as writable."""
PATIENCE = 3
"""After this many Ctrl-C the job is terminated, whether or not it handles them."""
SILENCE_S, ANSWER_S = 5.0, 10.0
"""After so long without a word from another node it is asked for one, and then has so long to answer."""
RETURN_S = 60.0
"""How long to look for another connection."""
TRY_S = 1.0
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
        self.gave_up = False
        """Whether the connection broke, and there was no other."""
        self.was_lost = False
        """Whether the run ended while there was none."""


class RunOver(Exception):
    """There is no run any more to come back to."""


class WayBack:
    """How to reach a run on another node again.

    Args: reach: a new connection; None if there is none now. Raises RunOver.
    """

    def __init__(self, job_id: str, node: str, reach: Callable[[], _socket.socket | None]) -> None:
        self.job_id, self.node, self.reach = job_id, node, reach


class Line:
    """The state of a connection that may break. Args: way_back: None for one that ends when it breaks."""

    def __init__(self, way_back: WayBack | None) -> None:
        self.way_back = way_back
        self.token: bytes | None = None
        """Proves to the run who is back; None if it keeps no place for us."""
        self.sent = SentBytes()
        self.received = 0
        self._told = 0
        self.is_broken = False
        self.lost_at: float | None = None
        self.try_at = 0.0
        self.pinged_at: float | None = None
        self._heard_at = time.monotonic()

    def hear(self, count: int, now: float) -> bool:
        """Note received bytes; returns whether the connection seemed to be lost."""
        self.received += count
        was_lost = self.lost_at is not None
        self.heal(now)
        return was_lost

    def heal(self, now: float) -> None:
        self._heard_at, self.pinged_at, self.lost_at, self.is_broken = now, None, None, False

    def owes_count(self) -> bool:
        return self.token is not None and self.received - self._told >= COUNT_BYTES

    def tell(self) -> int:
        self._told = self.received
        return self.received

    def pause_ms(self) -> float | None:
        """How long to wait for events; None for as long as it takes."""
        if self.token is None:
            return None
        now = time.monotonic()
        if self.lost_at is not None:
            at = self.try_at
        elif self.is_broken:
            at = now
        else:
            at = self._heard_at + SILENCE_S if self.pinged_at is None else self.pinged_at + ANSWER_S
        return max(0.0, at - now) * 1000

    def is_ping_due(self, now: float) -> bool:
        return self._is_listening() and self.pinged_at is None and now >= self._heard_at + SILENCE_S

    def is_silent(self, now: float) -> bool:
        """Whether the connection has just turned out to be lost."""
        if self.token is None or self.lost_at is not None:
            return False
        return self.is_broken or (self.pinged_at is not None and now >= self.pinged_at + ANSWER_S)

    def _is_listening(self) -> bool:
        return self.token is not None and self.lost_at is None and not self.is_broken


def resumed(sock: _socket.socket, line: Line, way_back: WayBack) -> bytearray | None:
    """What the run does not have of what was sent, if it continues over this connection. Raises: Refused."""
    assert line.token is not None
    sock.settimeout(ANSWER_S)
    try:
        sock.sendall(frame(RESUME, b"%s %d" % (line.token, line.received)))
        head = sock.recv(HEAD, _socket.MSG_WAITALL)
        content = sock.recv(int.from_bytes(head[1:], "little"), _socket.MSG_WAITALL) if len(head) == HEAD else b""
        if head[:1] == bytes((RESUMED,)):
            sock.setblocking(False)
            return line.sent.take_rest(int(content))
    except (OSError, ValueError):
        head = content = b""
    sock.close()
    if head[:1] == bytes((REFUSED,)):
        raise Refused(
            f"cannot come back: {content.decode('utf-8', 'replace')}",
            f"read the rest of its output with: glogs {way_back.job_id}",
        )
    return None


class AttachClient:
    """The connection to a run.

    Args: keeps: the run continues without this client. command: whose messages these are. step: a single Ctrl-C only
        asks for a second one, which interrupts this step; empty if each is passed on. wanted: what to run, at the door
        of a job that runs already. way_back: to another connection when this one breaks.
        watch: gets the run's output until it returns something to say.
    """

    def __init__(
        self,
        sock: _socket.socket,
        keeps: bool,
        command: str = "grun",
        step: str = "",
        wanted: Wanted | None = None,
        way_back: WayBack | None = None,
        watch: Callable[[bytes], list[str] | None] | None = None,
    ) -> None:
        self._socket = sock
        self._line = Line(way_back)
        self._watch = watch
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
        """Whether there is, or may be again, a connection."""
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
        is_connected = self._is_open and not self._line.is_broken
        if is_connected:
            poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
        is_reading = self._is_open and self._has_input and self._input_credit > 0
        if is_reading:
            poll.register(0, select.POLLIN)
        for stream, data in self._pending.items():
            if data:
                poll.register(stream - IN, select.POLLOUT)
        ready = dict(poll.poll(self._line.pause_ms()))
        if wake_fd in ready:
            for number in os.read(wake_fd, 4096):
                if not self._handle_signal(number):
                    return False
        for stream in self._pending:
            if stream - IN in ready and not self._write(stream):
                return False
        if is_reading and 0 in ready and not self._read_input():
            return False
        if is_connected and self._is_open and self._socket.fileno() in ready:
            self._talk()
        if self._is_open and self._line.way_back is not None:
            self._watch_line(self._line.way_back)
        return True

    # --- breaks -----------------------------------------------------------------------------------------

    def _watch_line(self, way_back: WayBack) -> None:
        """Find out whether the connection broke, and try to get another."""
        line, now = self._line, time.monotonic()
        if line.is_ping_due(now):
            line.pinged_at = now
            self._outbox += frame(PING)
            self._flush()
        if line.is_silent(now):
            line.lost_at = now
            self.say(f"lost the connection to {way_back.node}; trying again for {RETURN_S:.0f} s")
        if line.lost_at is None or now < line.try_at:
            return
        line.try_at = now + TRY_S
        try:
            sock = way_back.reach()
        except RunOver:
            self._is_open = False
            self._end.was_lost = True
            return
        rest = None if sock is None else resumed(sock, line, way_back)
        if rest is None:
            if time.monotonic() > line.lost_at + RETURN_S:
                self._is_open, self._end.gave_up = False, True
            return
        assert sock is not None
        self._socket.close()
        self._socket = sock
        self._outbox[:0] = rest
        line.heal(time.monotonic())
        self.say(f"connected to {way_back.node} again")
        self._flush()

    def _break_off(self) -> None:
        """The connection has ended."""
        if self._line.token is None or self._end.is_known:
            self._is_open = False
        else:
            self._line.is_broken = True

    def _talk(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
            if data:
                self._inbox += data
                if self._line.hear(len(data), time.monotonic()) and self._line.way_back is not None:
                    self.say(f"connected to {self._line.way_back.node} again")
                for kind, content in take_frames(self._inbox):
                    self._take(kind, content)
                if self._line.owes_count():
                    self._outbox += frame(COUNT, b"%d" % self._line.tell())
            else:
                self._break_off()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._break_off()
        except ValueError:
            self._is_open = False
        self._flush()

    def _flush(self) -> None:
        try:
            while self._is_open and self._outbox and not self._line.is_broken:
                piece = bytes(self._outbox[: 1 << 17])
                count = self._socket.send(piece)
                if self._line.way_back is not None:
                    self._line.sent.add(piece[:count])
                del self._outbox[:count]
        except BlockingIOError:
            pass
        except OSError:
            # Output sent before it disconnected is still to be read.
            if self._line.token is None:
                self._outbox.clear()

    def _take(self, kind: int, content: bytes) -> None:
        if kind in self._pending:
            self._pending[kind] += content
            if self._watch is not None and (lines := self._watch(content)) is not None:
                self._watch = None
                for line in lines:
                    self.say(line)
        elif kind == ACKNOWLEDGED:
            self._input_credit += read_ack(content)[1]
        elif kind == NOTE:
            self.say(content.decode("utf-8", "replace"))
        elif kind == CLOSED:
            self._stop_reading()
        elif kind == WELCOME:
            words = content.split()
            self._begin(words[1] == b"pty")
            if self._line.way_back is not None and len(words) > 2:
                self._line.token = words[2]
                self._outbox += frame(HOLD)
        elif kind == COUNT:
            self._line.sent.confirm(int(content))
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
