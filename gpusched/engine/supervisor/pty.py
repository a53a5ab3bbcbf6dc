"""Standard streams of a foreground run: its own terminal, or three pipes."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from gpusched.engine.attach_protocol import CHUNK, CLOSED, ERR, IN, OUT, WINDOW, ack
from gpusched.engine.linux.as_user import write_as

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.engine.supervisor.attach import AttachConnection
    from gpusched.engine.supervisor.logs import Logs


DEFAULT_SIZE = (24, 80)


class Pipes:
    """Three pipes. `input_fd` and `outputs` are the supervisor's ends, all non-blocking."""

    is_terminal = False

    def __init__(self) -> None:
        self._theirs: list[int] = []
        theirs_in, self.input_fd = os.pipe()
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._theirs = [theirs_in, theirs_out, theirs_err]
        self.outputs = ((OUT, out), (ERR, err))
        for fd in (self.input_fd, out, err):
            os.set_blocking(fd, False)

    def give_to(self, uid: int) -> None:
        """Do nothing: the owner of a pipe does not matter."""

    def file_actions(self) -> list[Any]:
        """For posix_spawn."""
        return [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(self._theirs)]

    def enter(self) -> None:
        """In a forked child: install them as standard streams."""
        for number, fd in enumerate(self._theirs):
            os.dup2(fd, number)

    def release(self) -> None:
        """Close the job's ends."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def resize(self, rows: int, columns: int) -> None:
        """Do nothing: a pipe has no size."""


class PseudoTerminal:
    """A pseudo-terminal, the controlling one of the job's own session."""

    is_terminal = True

    def __init__(self, rows: int, columns: int) -> None:
        self.input_fd, self._slave = os.openpty()
        self.outputs = ((OUT, self.input_fd),)
        os.set_blocking(self.input_fd, False)
        self.resize(*((rows, columns) if rows and columns else DEFAULT_SIZE))

    def give_to(self, uid: int) -> None:
        """Allow another user to open it by name."""
        os.fchown(self._slave, uid, -1)
        os.fchmod(self._slave, 0o600)

    def file_actions(self) -> list[Any]:
        """For posix_spawn with a new session: the first terminal that it opens becomes its controlling one."""
        name = os.ttyname(self._slave)
        return [
            (os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]

    def enter(self) -> None:
        """In a forked child that leads a session: install it as controlling terminal and standard streams."""
        fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(self._slave, number)

    def release(self) -> None:
        """Close the job's end."""
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size, which notifies its foreground processes. Errors are ignored."""
        if 0 < rows < 65536 and 0 < columns < 65536:
            fcntl.ioctl(self.input_fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


Streams = Pipes | PseudoTerminal


END_OF_TRANSMISSION = b"\x04"
"""Typed to end the input."""


class Input:
    """Input from the client, buffered until the job reads it; bounded by the window."""

    def __init__(self) -> None:
        self._streams: Streams | None = None
        self._data = bytearray()
        self._ends = False
        self.is_taken = True
        """Whether the job may still read."""

    def open(self, streams: Streams) -> None:
        self._streams = streams

    @property
    def fd(self) -> int:
        """Writable end while `is_waiting`; -1 without one."""
        return -1 if self._streams is None else self._streams.input_fd

    @property
    def is_waiting(self) -> bool:
        return self._streams is not None and self.is_taken and bool(self._data or self._ends)

    def put(self, content: bytes, client: AttachConnection) -> None:
        """Take input from the client. Raises: ValueError when it exceeds the window."""
        if not self.is_taken or self._ends:
            client.outbox += ack(IN, len(content))
            return
        self._data += content
        if len(self._data) > 2 * WINDOW:
            raise ValueError("it does not keep to the windows")

    def end(self) -> None:
        self._ends = True

    def refuse(self) -> None:
        """Discard input from now on: the job reads no more."""
        self.is_taken = False

    def write(self, client: AttachConnection | None) -> None:
        """Write as much as the job accepts now."""
        streams = self._streams
        assert streams is not None
        try:
            if self._data:
                count = os.write(streams.input_fd, bytes(self._data[:CHUNK]))
                del self._data[:count]
                if client is not None:
                    client.outbox += ack(IN, count)
            if self._ends and not self._data:
                self._finish(streams)
        except BlockingIOError:
            return
        except OSError:
            # Its reader has gone.
            self._close(streams)
            if client is not None:
                client.say(CLOSED)

    def _finish(self, streams: Streams) -> None:
        if streams.is_terminal:
            os.write(streams.input_fd, END_OF_TRANSMISSION)
            self._ends = False
        else:
            self._close(streams)

    def _close(self, streams: Streams) -> None:
        self.is_taken = False
        self._data.clear()
        if not streams.is_terminal:
            os.close(streams.input_fd)


REPLAY_BYTES = 1 << 14
"""Recent output shown to a client that reattaches to a terminal."""
DRAIN_PIECES = 64


class OutputStream:
    def __init__(self, kind: int, fd: int) -> None:
        self.kind = kind
        self.fd = fd
        self.log_fd = -1
        self.is_open = True
        self.credit = WINDOW
        self.backlog = b""
        """Read at the end of the run, and still to be sent."""


class Outputs:
    """All output streams of one job, each logged and passed on as fast as the client takes it."""

    def __init__(self, log_bytes: int, writer: int | None) -> None:
        """Args: writer: uid that writes the log; None for our own."""
        self._writer = writer
        self.flows: list[OutputStream] = []
        self.log_left = log_bytes
        self.shows_again = False
        self.replay = b""

    def open(self, streams: Streams) -> None:
        self.flows = [OutputStream(kind, fd) for kind, fd in streams.outputs]
        self.shows_again = streams.is_terminal

    def begin(self, logs: Logs) -> None:
        for flow in self.flows:
            flow.log_fd = logs.output if flow.kind == OUT else logs.error
            # A log that is a full pipe must not stop the supervisor.
            os.set_blocking(flow.log_fd, False)

    def welcome(self, client: AttachConnection) -> None:
        """Welcome a client: reset its windows and replay recent output."""
        for flow in self.flows:
            flow.credit = WINDOW
        if self.replay:
            client.say(OUT, self.replay)
            self.flows[0].credit -= len(self.replay)

    def acknowledge(self, stream: int, count: int) -> None:
        """Open the window by this many bytes, which the client has passed on."""
        for flow in self.flows:
            if flow.kind == stream:
                flow.credit = min(WINDOW, flow.credit + count)

    def may_read(self, flow: OutputStream, client: AttachConnection | None) -> bool:
        if not flow.is_open:
            return False
        # Without a client it goes to the log alone.
        return client is None or (flow.credit > 0 and not client.is_slow)

    def read(self, flow: OutputStream, client: AttachConnection | None) -> None:
        data = self._piece(flow, CHUNK if client is None else min(CHUNK, flow.credit))
        if data and client is not None:
            flow.credit -= len(data)
            client.say(flow.kind, data)

    def _piece(self, flow: OutputStream, size: int) -> bytes:
        """Read output of the job and log it; empty when there is none now."""
        try:
            data = os.read(flow.fd, size)
        except BlockingIOError:
            return b""
        except OSError:
            # EIO: no process has the terminal open any more.
            data = b""
        if not data:
            flow.is_open = False
            return b""
        self._log(flow, data)
        if self.shows_again:
            self.replay = (self.replay + data)[-REPLAY_BYTES:]
        return data

    def note(self, text: str) -> None:
        """Add a line to the error log."""
        if self.flows:
            self._log(self.flows[-1], f"\ngpusched: {text}\n".encode())

    def _log(self, flow: OutputStream, data: bytes) -> None:
        if self.log_left <= 0 or flow.log_fd < 0:
            return
        if len(data) >= self.log_left:
            data = data[: self.log_left] + b"\ngpusched: the rest is not kept; see [interactive] log_mib\n"
            self.log_left = 0
        else:
            self.log_left -= len(data)
        try:
            while data:
                data = data[write_as(self._writer, flow.log_fd, data) :]
        except OSError:
            # A full disk: output to the person continues.
            pass

    def drain(self) -> None:
        """Read what is left in the streams of the ended run, so that nothing waits for a slow client."""
        for flow in self.flows:
            pieces: list[bytes] = []
            # A process outside the run that holds the pipe could write forever.
            while flow.is_open and len(pieces) < DRAIN_PIECES and (data := self._piece(flow, CHUNK)):
                pieces.append(data)
            flow.backlog = b"".join(pieces)
            flow.is_open = False

    def send_backlog(self, client: AttachConnection) -> bool:
        """Send as much drained output as the windows allow; returns whether some is left."""
        for flow in self.flows:
            while flow.backlog and flow.credit > 0:
                piece = flow.backlog[: min(CHUNK, flow.credit)]
                flow.backlog = flow.backlog[len(piece) :]
                flow.credit -= len(piece)
                client.say(flow.kind, piece)
        return any(flow.backlog for flow in self.flows)
