"""The foreground of one run: its streams, its log, its lease, and the one client that is attached to it.

All of it lives in the run's supervisor, so that neither the end of the daemon nor of the client touches the run
unless it should. The client comes straight to a socket of the run's own; `frames` says what they speak.

What a client or the clock wants done to the run is put into `orders`, in the words of the order file.
"""

from __future__ import annotations

import _socket
import os
import select
import struct
import time

from gpusched.engine import spool as files
from gpusched.engine.frames import (
    ACK,
    BYE,
    CHUNK,
    CLOSED,
    EOF,
    EXIT,
    HELLO,
    IN,
    NOTE,
    OUT,
    REFUSED,
    SIGNAL,
    SIZE,
    VERSION,
    WELCOME,
    WINDOW,
    ack,
    frame,
    read_ack,
    take_frames,
)
from gpusched.engine.lease import END, WARN, Lease
from gpusched.engine.streams import Pipes, Terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
    from typing import Any

    from gpusched.engine.logs import Logs
    from gpusched.engine.streams import Streams
else:
    import _signal as signal

ATTACH_S = 30.0
"""How long a run waits for its client before it starts or gives up."""
HANG_UP_S = 2.0
"""Between HUP and the usual way to end a run, when its client is gone."""
REPLAY_BYTES = 1 << 14
"""What somebody who comes back to a terminal is shown of what was on it."""
BACKLOG = 1 << 20
"""Above so many bytes that a client has not taken from the socket, nothing more is read for it."""
DRAIN_PIECES = 64
UCRED = struct.Struct("3i")


class Flow:
    """One stream out of the job."""

    __slots__ = ("backlog", "credit", "fd", "is_open", "kind", "log_fd")

    def __init__(self, kind: int, fd: int) -> None:
        self.kind = kind
        self.fd = fd
        self.log_fd = -1
        self.is_open = True
        self.credit = 0
        self.backlog = b""
        """Read at the end of the run, and still to be sent."""


class Client:
    """Somebody connected. Attached once the first frame was good."""

    __slots__ = ("inbox", "outbox", "pid", "socket")

    def __init__(self, socket: _socket.socket, pid: int) -> None:
        self.socket = socket
        self.pid = pid
        self.inbox = bytearray()
        self.outbox = bytearray()


class Session:
    """The foreground of one run. Raises: OSError when its socket cannot be made."""

    def __init__(self, ticket: dict[str, Any], spool: str) -> None:
        facts = ticket["interactive"]
        self.run: str = ticket["run"]
        self.uid: int = ticket["uid"]
        self.is_terminal: bool = facts["pty"]
        self.keeps: bool = facts["keep"]
        self.lease_s: float | None = facts["lease_s"]
        self.log_left: int = facts["log_bytes"]
        self.path = files.attach_path(spool, self.run)
        self.orders: list[str] = []
        self.streams: Streams | None = None
        self.flows: list[Flow] = []
        self.input = bytearray()
        self.input_ends = False
        self.takes_input = True
        self.size = (0, 0)
        self.replay = b""
        self.client: Client | None = None
        self.guests: list[Client] = []
        """Connected, and not attached yet."""
        self.lease: Lease | None = None
        self.hang_up_at: float | None = None
        self.listener = listen(self.path, self.uid)
        self.wake_fd, self.wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # --- signals --------------------------------------------------------------------------------------

    def take_signals(self, awaited: Iterable[int]) -> None:
        """Have these signals end a `wait` from now on; they were blocked before."""
        for number in awaited:
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

    # --- life -----------------------------------------------------------------------------------------

    def open_streams(self) -> Streams:
        """Make what the job will have as its standard streams."""
        self.streams = Terminal(*self.size) if self.is_terminal else Pipes()
        self.flows = [Flow(kind, fd) for kind, fd in self.streams.outputs]
        for flow in self.flows:
            flow.credit = WINDOW
        return self.streams

    def begin(self, logs: Logs) -> None:
        """The job has started."""
        assert self.streams is not None
        self.streams.release()
        for flow in self.flows:
            flow.log_fd = logs.output if flow.kind == OUT else logs.error
            # A pipe as log that nobody empties must not stop the supervisor.
            os.set_blocking(flow.log_fd, False)
        if self.lease_s is not None:
            self.lease = Lease(self.lease_s, time.monotonic())

    def due_at(self) -> float | None:
        """When the clock wants something next."""
        lease_at = None if self.lease is None else self.lease.look_at
        return min((at for at in (lease_at, self.hang_up_at) if at is not None), default=None)

    def act(self, now: float, cpu_s: Callable[[], float]) -> None:
        """Do what is due."""
        if self.hang_up_at is not None and now >= self.hang_up_at:
            self.hang_up_at = None
            self.orders.append("stop client_lost - - .")
        lease = self.lease
        if lease is None or lease.look_at is None or now < lease.look_at:
            return
        verdict = lease.look(now, cpu_s())
        if verdict == WARN:
            self.warn(
                f"nothing has happened here for {length(now - lease.active_at)}; this job ends in "
                f"{length(max(1.0, lease.active_at + lease.lease_s - now))} unless you type something"
            )
        elif verdict == END:
            self.orders.append("stop lease - - .")

    def warn(self, text: str) -> None:
        """Say something to whoever is there, and leave it in the log."""
        self.say(text)
        if self.flows:
            self._log(self.flows[-1], f"\ngpusched: {text}\n".encode())

    def say(self, text: str) -> None:
        """Say something to the person at the client."""
        if self.client is not None:
            self.client.outbox += frame(NOTE, text.encode("utf-8", "replace"))

    # --- waiting --------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bytes:
        """Pass on what there is, or wait for something. Returns: numbers of the signals that came."""
        poll = select.poll()
        poll.register(self.listener.fileno(), select.POLLIN)
        poll.register(self.wake_fd, select.POLLIN)
        clients = {}
        for client in (self.client, *self.guests):
            if client is not None:
                clients[client.socket.fileno()] = client
                poll.register(client.socket.fileno(), select.POLLIN | (select.POLLOUT if client.outbox else 0))
        wanted: dict[int, int] = {}
        for flow in self.flows:
            if self._may_read(flow):
                wanted[flow.fd] = select.POLLIN
        if self._has_input():
            assert self.streams is not None
            wanted[self.streams.input_fd] = wanted.get(self.streams.input_fd, 0) | select.POLLOUT
        for fd, events in wanted.items():
            poll.register(fd, events)
        ready = dict(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
        signals = b""
        if self.wake_fd in ready:
            signals = os.read(self.wake_fd, 4096)
        if self.listener.fileno() in ready:
            self._accept()
        for fd, client in clients.items():
            if ready.get(fd, 0) & select.POLLOUT:
                self._flush(client)
            if ready.get(fd, 0) & ~select.POLLOUT:
                self._receive(client)
        for flow in self.flows:
            if ready.get(flow.fd, 0) & ~select.POLLOUT and self._may_read(flow):
                self._read(flow)
        if self._has_input() and self.streams is not None and ready.get(self.streams.input_fd, 0) & ~select.POLLIN:
            self._write_input()
        if self.client is not None and self.client.outbox:
            self._flush(self.client)
        return signals

    # --- out of the job -------------------------------------------------------------------------------

    def _may_read(self, flow: Flow) -> bool:
        if not flow.is_open:
            return False
        # Without a client it goes to the log alone.
        return self.client is None or (flow.credit > 0 and len(self.client.outbox) < BACKLOG)

    def _read(self, flow: Flow) -> bool:
        """Pass on one piece; False when there is none now."""
        size = CHUNK if self.client is None else min(CHUNK, flow.credit)
        data = self._piece(flow, size)
        if data and self.client is not None:
            flow.credit -= len(data)
            self.client.outbox += frame(flow.kind, data)
        return bool(data)

    def _piece(self, flow: Flow, size: int) -> bytes:
        """What the job wrote, kept in the log already; empty when there is nothing now."""
        try:
            data = os.read(flow.fd, size)
        except BlockingIOError:
            return b""
        except OSError:
            # EIO: nobody has the terminal open any more.
            data = b""
        if not data:
            flow.is_open = False
            return b""
        self._log(flow, data)
        if self.is_terminal:
            self.replay = (self.replay + data)[-REPLAY_BYTES:]
        return data

    def _log(self, flow: Flow, data: bytes) -> None:
        if self.log_left <= 0 or flow.log_fd < 0:
            return
        if len(data) >= self.log_left:
            data = data[: self.log_left] + b"\ngpusched: the rest is not kept; see [interactive] log_mib\n"
            self.log_left = 0
        else:
            self.log_left -= len(data)
        try:
            while data:
                data = data[os.write(flow.log_fd, data) :]
        except OSError:
            # A full disk: what the person sees goes on.
            pass

    def drain(self) -> None:
        """The run is over: take what is left in its streams, so that nobody has to wait for a slow client."""
        for flow in self.flows:
            pieces: list[bytes] = []
            # Somebody outside the run who has an end of a pipe could write for ever.
            while flow.is_open and len(pieces) < DRAIN_PIECES and (data := self._piece(flow, CHUNK)):
                pieces.append(data)
            flow.backlog = b"".join(pieces)
            flow.is_open = False
        self._send_backlog()

    def _send_backlog(self) -> bool:
        """Send what the windows allow; whether something is left."""
        for flow in self.flows:
            while self.client is not None and flow.backlog and flow.credit > 0:
                piece = flow.backlog[: min(CHUNK, flow.credit)]
                flow.backlog = flow.backlog[len(piece) :]
                flow.credit -= len(piece)
                self.client.outbox += frame(flow.kind, piece)
        return any(flow.backlog for flow in self.flows)

    # --- into the job ---------------------------------------------------------------------------------

    def _has_input(self) -> bool:
        return self.streams is not None and self.takes_input and bool(self.input or self.input_ends)

    def _write_input(self) -> None:
        assert self.streams is not None
        try:
            if self.input:
                count = os.write(self.streams.input_fd, bytes(self.input[:CHUNK]))
                del self.input[:count]
                if self.client is not None:
                    self.client.outbox += ack(IN, count)
            if self.input_ends and not self.input:
                self._end_input()
        except BlockingIOError:
            return
        except OSError:
            # Its reader has gone.
            self._close_input()
            if self.client is not None:
                self.client.outbox += frame(CLOSED)

    def _end_input(self) -> None:
        assert self.streams is not None
        if self.streams.is_terminal:
            # What a person would type.
            os.write(self.streams.input_fd, b"\x04")
            self.input_ends = False
        else:
            self._close_input()

    def _close_input(self) -> None:
        assert self.streams is not None
        self.takes_input = False
        self.input.clear()
        if not self.streams.is_terminal:
            os.close(self.streams.input_fd)

    # --- clients --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            fd, _ = self.listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
        pid, uid, _ = UCRED.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, UCRED.size))
        if uid != self.uid:
            sock.close()
            return
        sock.setblocking(False)
        self.guests.append(Client(sock, pid))

    def _receive(self, client: Client) -> None:
        try:
            data = client.socket.recv(CHUNK + 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.inbox += data
        try:
            for kind, content in take_frames(client.inbox):
                if client is self.client:
                    self._obey(client, kind, content)
                elif client in self.guests:
                    self._welcome(client, kind, content)
        except (ValueError, IndexError):
            # Not one of ours.
            self._drop(client)

    def _welcome(self, guest: Client, kind: int, content: bytes) -> None:
        if kind != HELLO:
            raise ValueError
        version, rows, columns = map(int, content.split())
        if version != VERSION:
            raise ValueError
        self.guests.remove(guest)
        if self.client is not None:
            text = f"somebody is attached to it already: process {self.client.pid}"
            guest.outbox += frame(REFUSED, text.encode())
            self._flush(guest)
            guest.socket.close()
            return
        self.client = guest
        self.size = (rows, columns)
        self.hang_up_at = None
        guest.outbox += frame(WELCOME, f"{self.run} {'pty' if self.is_terminal else 'pipes'}".encode())
        for flow in self.flows:
            flow.credit = WINDOW
        if self.replay:
            guest.outbox += frame(OUT, self.replay)
            self.flows[0].credit -= len(self.replay)
        if self.streams is not None:
            # A change of size has whatever fills the screen draw it anew.
            self.streams.resize(*self.size)
            if not self.takes_input:
                guest.outbox += frame(CLOSED)
        self.touch()

    def _obey(self, client: Client, kind: int, content: bytes) -> None:
        if kind == IN:
            self.touch()
            if self.takes_input and not self.input_ends:
                self.input += content
                if len(self.input) > 2 * WINDOW or len(client.outbox) > 2 * BACKLOG:
                    raise ValueError("it does not keep to the windows")
            else:
                client.outbox += ack(IN, len(content))
        elif kind == ACK:
            stream, count = read_ack(content)
            for flow in self.flows:
                if flow.kind == stream:
                    flow.credit = min(WINDOW, flow.credit + count)
        elif kind == EOF:
            self.input_ends = True
        elif kind == SIZE:
            rows, columns = map(int, content.split())
            self.size = (rows, columns)
            if self.streams is not None:
                self.streams.resize(rows, columns)
        elif kind == SIGNAL:
            self.touch()
            self.orders.append(f"signal {int(content)} tree .")
        elif kind == BYE:
            self._drop(client)
        else:
            raise ValueError

    def touch(self) -> None:
        """Somebody is there."""
        if self.lease is not None:
            self.lease.touch(time.monotonic())

    def _flush(self, client: Client) -> None:
        try:
            while client.outbox:
                with memoryview(client.outbox)[: 1 << 17] as piece:
                    count = client.socket.send(piece)
                del client.outbox[:count]
        except BlockingIOError:
            return
        except OSError:
            # Its end is read where it is received.
            client.outbox.clear()

    def _drop(self, client: Client) -> None:
        """It is gone."""
        client.socket.close()
        if client in self.guests:
            self.guests.remove(client)
        if client is not self.client:
            return
        self.client = None
        if not self.keeps:
            self.hang_up_at = time.monotonic() + HANG_UP_S
            self.orders.append(f"stop client_lost {int(signal.SIGHUP)} - .")

    # --- the end --------------------------------------------------------------------------------------

    def farewell(self, words: str, sentence: str) -> None:
        """Send what is left and how it ended, and wait until the client has it all or is gone."""
        self.lease = self.hang_up_at = None
        self.takes_input = False
        told = False
        while self.client is not None:
            if not self._send_backlog() and not told:
                told = True
                self.client.outbox += frame(EXIT, f"{words} .\n{sentence}".encode("utf-8", "surrogateescape"))
            if signal.SIGTERM in self.wait(None):
                break

    def close(self) -> None:
        """Take the socket away; nobody can come any more."""
        files.remove([self.path])
        for guest in self.guests:
            guest.socket.close()


def listen(path: str, uid: int) -> _socket.socket:
    """A socket in the spool for one user alone. The path may be longer than an address: it goes by its folder."""
    folder, name = os.path.split(path)
    files.remove([path])
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{fd}/{name}")
        os.chmod(path, 0o600)
        if uid != os.geteuid():
            os.chown(path, uid, -1)
        listener.listen(8)
    finally:
        os.close(fd)
    listener.setblocking(False)
    return listener


def length(seconds: float) -> str:
    """A length of time for people; in this process nothing else can write one."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _ignore(number: int, where: object) -> None:
    """Only the wake-up counts."""
