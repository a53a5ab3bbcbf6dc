"""The foreground of one run: its streams, its log, its lease, and the one attached client.

All of it lives in the run's supervisor, so that neither the end of the daemon nor of the client affects the run
unless it should. The client connects to the run's own socket; see `attach_protocol`.

Whatever a client or the clock demands of the run is put into `orders`, in the format of the order file.

The lease ends a run after too long without activity: typing, or CPU time of its processes above a small fraction of
one core, which a program that uses a GPU always exceeds. CPU time is read only when the lease would otherwise warn
or end.
"""

from __future__ import annotations

import os
import select
import time

from gpusched.engine import spool as files
from gpusched.engine.attach_protocol import (
    ACK,
    BYE,
    CLOSED,
    COUNT,
    EOF,
    EXIT,
    HELLO,
    HOLD,
    IN,
    NOTE,
    PING,
    QUERY,
    REFUSED,
    RESUME,
    SIGNAL,
    SIZE,
    STATUS,
    VERSION,
    WELCOME,
    read_ack,
)
from gpusched.engine.linux import proctree
from gpusched.engine.supervisor.attach import ROOM, AttachConnection, accept, listen
from gpusched.engine.supervisor.pty import Input, Outputs, Pipes, PseudoTerminal

LONGEST_WARNING_S = 300.0
WARNING_FRACTION = 0.25
"""Of the lease, where that is shorter."""
BUSY_FRACTION = 0.05
"""Of one core, on average since the last check: an idle shell with a clock in its prompt never takes as much."""
WARN, END = "warn", "end"


class Lease:
    """Activity of one run. Instants are on the monotonic clock."""

    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s = lease_s
        self.warning_s = min(LONGEST_WARNING_S, WARNING_FRACTION * lease_s)
        self.active_at = now
        self.seen_at = now
        self.seen_cpu_s = 0.0
        self.is_warned = False
        self.look_at: float | None = now + lease_s - self.warning_s
        """When to look; None once it has ended."""

    def touch(self, now: float) -> None:
        """Note that the client typed."""
        self.active_at = now

    def shift(self, passed_s: float) -> None:
        """Exclude time for which the run was suspended."""
        self.active_at += passed_s
        self.seen_at += passed_s
        if self.look_at is not None:
            self.look_at += passed_s

    def look(self, now: float, cpu_s: float) -> str | None:
        """Return WARN, END or None. Args: cpu_s: CPU time of the run so far."""
        if self.look_at is None:
            return None
        if self._has_worked(now, cpu_s):
            self.active_at = now
        self.seen_at, self.seen_cpu_s = now, cpu_s
        ends_at = self.active_at + self.lease_s
        if now >= ends_at:
            self.look_at = None
            return END
        if now < ends_at - self.warning_s:
            self.look_at = ends_at - self.warning_s
            self.is_warned = False
            return None
        self.look_at = ends_at
        is_news, self.is_warned = not self.is_warned, True
        return WARN if is_news else None

    def ends_at(self, now: float, cpu_s: float) -> float:
        """When it ends without further activity; changes nothing."""
        return (now if self._has_worked(now, cpu_s) else self.active_at) + self.lease_s

    def _has_worked(self, now: float, cpu_s: float) -> bool:
        return now > self.seen_at and cpu_s - self.seen_cpu_s >= BUSY_FRACTION * (now - self.seen_at)

    def warning(self, now: float) -> str:
        """Shown at the terminal before the run ends."""
        left_s = max(1.0, self.active_at + self.lease_s - now)
        return (
            f"no activity here for {length(now - self.active_at)}; "
            f"this job ends in {length(left_s)} unless you type something"
        )


def length(seconds: float) -> str:
    """Format a duration for people; nothing else in this process can."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from gpusched.engine.supervisor.logs import Logs
    from gpusched.engine.supervisor.pty import Streams
else:
    import _signal as signal

ATTACH_S = 30.0
"""Time a run waits for its client before it starts or gives up."""
LOOK_S = 1.0
"""Interval of checks, meanwhile, whether its future client still lives."""
MOST_GUESTS = 32
"""Above this, the oldest silent connection makes room for the next: each is a descriptor of this process."""
SIGNALS = range(1, 65)
HANG_UP_S = 2.0
"""Between HUP and the usual way to end a run when its client is gone."""
RETURN_S = 120.0
"""How long the place of a client is kept whose connection broke; it tries to come back for half of that."""


class Session:
    """The foreground of one run. Raises: OSError when its socket cannot be created.

    One class with many attributes: a frame of the client may concern streams, place, lease and orders at once.

    Args: facts: as `interactive` of a ticket. cpu_s: returns the CPU time of the run so far. path: its socket, by
    default that of the run.
    """

    has_log = True
    """Whether a client that is lost when the run ends finds the rest of the output in a log."""

    def __init__(
        self,
        ticket: dict[str, Any],
        facts: dict[str, Any],
        spool: str,
        boot_id: str,
        cpu_s: Callable[[], float],
        path: str | None = None,
    ) -> None:
        self.run: str = ticket["run"]
        self.uid: int = ticket["uid"]
        self.is_terminal: bool = facts["pty"]
        self.keeps: bool = facts["keep"]
        self.lease_s: float | None = facts["lease_s"]
        self.path = path or files.attach_path(spool, self.run)
        self.orders: list[str] = []
        self.streams: Streams | None = None
        self.outputs = Outputs(int(ticket["log_mib"] * (1 << 20)), None if self.uid == os.geteuid() else self.uid)
        self.input = Input()
        self.size = (0, 0)
        self.signals_to = "tree"
        """Who gets the client's signals, see `SignalOrder.to`; `srun`: the srun that is the first process."""
        self.client: AttachConnection | None = None
        self.guests: list[AttachConnection] = []
        """Connected, and not attached yet."""
        self.lease: Lease | None = None
        self.hang_up_at: float | None = None
        self.return_until: float | None = None
        """When the place of a lost client is given up."""
        self.is_over = False
        self._submitter: dict[str, Any] | None = facts["client"]
        self._boot_id = boot_id
        self._cpu_s = cpu_s
        # Under the name of a door, so that what a killed supervisor leaves of it is swept with the run.
        self.listener = listen(self.path, files.door_path(spool, self.run, f"new-{os.getpid()}"), self.uid)
        self.wake_fd, self.wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # --- life -----------------------------------------------------------------------------------------

    def is_deserted(self) -> bool:
        """Whether no client will come: the process that submitted the run, without --keep, has ended."""
        if self.keeps or self._submitter is None or self.client is not None:
            return False
        submitter = self._submitter
        pid, start_ticks, boot_id = submitter["pid"], submitter["start_ticks"], submitter["boot_id"]
        return boot_id != self._boot_id or not proctree.lives(pid, start_ticks)

    def open_streams(self) -> Streams:
        self.streams = PseudoTerminal(*self.size) if self.is_terminal else Pipes()
        self.outputs.open(self.streams)
        self.input.open(self.streams)
        return self.streams

    def begin(self, logs: Logs) -> None:
        assert self.streams is not None
        self.streams.release()
        self.outputs.begin(logs)
        if self.lease_s is not None:
            self.lease = Lease(self.lease_s, time.monotonic())

    @property
    def due_at(self) -> float | None:
        """Instant of the next timed action."""
        lease_at = None if self.lease is None else self.lease.look_at
        return min((at for at in (lease_at, self.hang_up_at, self.return_until) if at is not None), default=None)

    def act(self, now: float) -> None:
        if self.hang_up_at is not None and now >= self.hang_up_at:
            self.hang_up_at = None
            self.orders.append("stop client_lost - - .")
        if self.return_until is not None and now >= self.return_until:
            self._let_go()
        lease = self.lease
        if lease is None or lease.look_at is None or now < lease.look_at:
            return
        verdict = lease.look(now, self._cpu_s())
        if verdict == WARN:
            self.warn(lease.warning(now))
        elif verdict == END:
            self.orders.append("stop lease - - .")

    def shift(self, passed_s: float) -> None:
        """Exclude time for which the run was suspended."""
        if self.lease is not None:
            self.lease.shift(passed_s)

    def warn(self, text: str) -> None:
        """Show a message to the client, and add it to the log."""
        self.say(text)
        self.outputs.note(text)

    def say(self, text: str) -> None:
        """Show a message to the person at the client."""
        if self.client is not None:
            self.client.say(NOTE, text.encode("utf-8", "replace"))

    # --- waiting --------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bytes:
        """Pass on data, or wait for events. Returns: numbers of the signals received."""
        poll = select.poll()
        poll.register(self.listener.fileno(), select.POLLIN)
        poll.register(self.wake_fd, select.POLLIN)
        visitors = {one.fd: one for one in (self.client, *self.guests) if one is not None and not one.is_lost}
        for fd, visitor in visitors.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if visitor.outbox else 0))
        # A terminal is one descriptor for both.
        wanted = {flow.fd: select.POLLIN for flow in self.outputs.flows if self.outputs.may_read(flow, self.client)}
        if self.input.is_waiting:
            wanted[self.input.fd] = wanted.get(self.input.fd, 0) | select.POLLOUT
        for fd, events in wanted.items():
            poll.register(fd, events)
        ready = dict(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
        signals = os.read(self.wake_fd, 4096) if self.wake_fd in ready else b""
        if self.listener.fileno() in ready and (guest := accept(self.listener, self.uid)) is not None:
            self.guests.append(guest)
            if len(self.guests) > MOST_GUESTS:
                self._drop(self.guests[0])
        for fd, visitor in visitors.items():
            if ready.get(fd, 0) & select.POLLOUT:
                visitor.flush()
            if ready.get(fd, 0) & ~select.POLLOUT:
                self._receive(visitor)
        for flow in self.outputs.flows:
            if ready.get(flow.fd, 0) & ~select.POLLOUT and self.outputs.may_read(flow, self.client):
                self.outputs.read(flow, self.client)
        if self.input.is_waiting and ready.get(self.input.fd, 0) & ~select.POLLIN:
            self.input.write(self.client)
        if self.client is not None and self.client.outbox:
            self.client.flush()
        return signals

    # --- clients --------------------------------------------------------------------------------------

    def _receive(self, visitor: AttachConnection) -> None:
        came = visitor.receive()
        if came is None:
            if visitor is self.client and not (self.is_over and self.has_log) and visitor.is_broken():
                visitor.lose()
                self.return_until = time.monotonic() + RETURN_S
            else:
                self._drop(visitor)
            return
        try:
            for kind, content in came:
                if visitor is self.client:
                    self._handle_frame(visitor, kind, content)
                elif visitor in self.guests:
                    self._admit(visitor, kind, content)
        except (ValueError, IndexError):
            # Not one of ours.
            self._drop(visitor)

    def _admit(self, guest: AttachConnection, kind: int, content: bytes) -> None:
        """Handle the first frame of a guest."""
        if kind == QUERY:
            self.guests.remove(guest)
            guest.say(STATUS, self._status())
            guest.leave()
            return
        if kind == RESUME and guest.uid == self.uid:
            self._resume(guest, content)
            return
        if kind != HELLO or guest.uid != self.uid:
            raise ValueError
        version, rows, columns = map(int, content.split())
        if version != VERSION:
            raise ValueError
        self.guests.remove(guest)
        if self.client is not None and not self.client.is_lost:
            guest.say(REFUSED, f"another client is attached: process {self.client.pid}".encode())
            guest.leave()
            return
        self.client = guest
        guest.since_at = time.time()
        self.size = (rows, columns)
        self.hang_up_at = self.return_until = None
        guest.say(WELCOME, f"{self.run} {'pty' if self.is_terminal else 'pipes'} {guest.token}".encode())
        self.outputs.welcome(guest)
        if self.streams is not None:
            # A change of size makes a full-screen program redraw.
            self.streams.resize(*self.size)
            if not self.input.is_taken:
                guest.say(CLOSED)
        self.touch()

    def _resume(self, guest: AttachConnection, content: bytes) -> None:
        """Let the client continue over another connection. Raises: ValueError."""
        token, received = content.decode("ascii").split(" ")
        self.guests.remove(guest)
        client = self.client
        if client is None or not client.is_holding or client.token != token:
            guest.say(REFUSED, b"its place was given up" if client is None else b"another client is attached")
            guest.leave()
            return
        try:
            client.resume(guest, int(received))
        except OSError:
            client.lose()
            return
        except ValueError:
            guest.socket.close()
            raise
        self.return_until = None
        self.touch()

    def _status(self) -> bytes:
        client, lease = self.client, self.lease
        who = "- -" if client is None or client.is_lost else f"{client.pid} {client.since_at:.3f}"
        ends = "-"
        if lease is not None and lease.look_at is not None:
            now = time.monotonic()
            ends = f"{time.time() + lease.ends_at(now, self._cpu_s()) - now:.3f}"
        return f"{who} {ends} .".encode()

    def _handle_frame(self, client: AttachConnection, kind: int, content: bytes) -> None:
        if kind == IN:
            self.touch()
            self.input.put(content, client)
            if len(client.outbox) > ROOM:
                raise ValueError("it does not take what it is sent")
        elif kind == ACK:
            self.outputs.acknowledge(*read_ack(content))
        elif kind == EOF:
            self.input.end()
        elif kind == SIZE:
            rows, columns = map(int, content.split())
            self.size = (rows, columns)
            if self.streams is not None:
                self.streams.resize(rows, columns)
        elif kind == SIGNAL:
            number = int(content)
            if number not in SIGNALS:
                raise ValueError(f"there is no signal {number}")
            self.touch()
            self.orders.append(f"signal {number} {self.signals_to} .")
        elif kind == BYE:
            self._drop(client)
        elif kind == HOLD:
            client.hold()
        elif kind == PING:
            client.tell_count()
        elif kind == COUNT:
            client.take_count(int(content))
        else:
            raise ValueError

    def touch(self) -> None:
        """Note activity of the client."""
        if self.lease is not None:
            self.lease.touch(time.monotonic())
        try:
            # The daemon reads this too: a run with idle GPUs is not a forgotten one.
            os.utime(self.path)
        except OSError:
            # The socket was removed; an attached client stays attached.
            pass

    def _drop(self, visitor: AttachConnection) -> None:
        visitor.socket.close()
        if visitor in self.guests:
            self.guests.remove(visitor)
        if visitor is self.client:
            self._let_go()

    def _let_go(self) -> None:
        """Go on without a client, or end the run."""
        self.client = self.return_until = None
        if not self.keeps:
            self.hang_up_at = time.monotonic() + HANG_UP_S
            self.orders.append(f"stop client_lost {int(signal.SIGHUP)} - .")

    # --- the end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Read what is left in the streams of the ended run."""
        self.outputs.drain()
        self.is_over = True
        if self.client is not None and self.client.is_lost and self.has_log:
            # It will read the rest from the log: it cannot know that the run is still here.
            self.client = self.return_until = None
        if self.client is not None:
            self.outputs.send_backlog(self.client)

    def farewell(
        self,
        ended: tuple[int | None, int | None],
        stopped_by: str | None,
        sentence: str | None,
        until: float | None = None,
    ) -> None:
        """Send the remaining output and how the run ended; wait until the client has it all or is gone.

        Args: ended: as `RunProcesses.exit`. sentence: why it was not started. until: when to give up, on the monotonic
        clock.
        """
        words = " ".join("-" if word is None else str(word) for word in (*ended, stopped_by))
        self.lease = self.hang_up_at = None
        self.input.refuse()
        told = False
        while self.client is not None:
            if not self.outputs.send_backlog(self.client) and not told:
                told = True
                self.client.say(EXIT, f"{words} .\n{sentence or ''}".encode("utf-8", "surrogateescape"))
            ends_at = min((at for at in (until, self.return_until) if at is not None), default=None)
            left_s = None if ends_at is None else ends_at - time.monotonic()
            if signal.SIGTERM in self.wait(left_s) or (left_s is not None and left_s <= 0):
                break

    def close(self) -> None:
        files.remove([self.path])
        for guest in self.guests:
            guest.socket.close()
        self.guests = []
