"""Runs as systemd units, as the daemon sees them: a connection to PID 1 that takes tickets.

Every run is one transient service whose main process is the run's supervisor (`unit`), the same that the fork
server forks. PID 1 is asked over D-Bus, without ever waiting for it:

    queued    no call was made yet; the number of open calls is limited
    called    PID 1 has been asked
    taken     PID 1 has created the unit and starts it
    started   the supervisor's program runs and will claim the run

Anything that fails on this path is a refusal; the engine then reads the spool and revokes the run unless its
supervisor came after all. So a call is never repeated, not even when its answer was lost: a second supervisor
might find the first one's record removed.

`properties` turns a ticket into the properties of the unit. They contain nothing written by a user: everyone can read
a unit's properties, and systemd expands `$` and `%`. Command, environment and paths go to the supervisor through a
descriptor.

`Bus` is one connection to the system's D-Bus that never blocks: calls are queued, answers are read when they
arrive. `jeepney` encodes the messages; the socket is our own, because jeepney's connections wait for every answer and
the daemon must not wait for PID 1. A lost connection stays lost: create another.

Sources: org.freedesktop.systemd1(5), systemd.exec(5), systemd.kill(5), systemd.resource-control(5); the D-Bus
specification, "Authentication Protocol" and "Message Protocol".
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jeepney import DBusAddress, HeaderFields, MatchRule, Message, MessageType, Parser, Properties, new_method_call
from jeepney.auth import BEGIN, AuthenticationError, Authenticator, FDNegotiationError
from jeepney.bus_messages import message_bus

from gpusched.engine import unit
from gpusched.engine.launchers import KEPT_VARIABLES, PACKAGE_ROOT, UnitNames
from gpusched.engine.spool import share_lock
from gpusched.model.execution import Ticket

SYSTEM_BUS = "/run/dbus/system_bus_socket"
READ_BYTES = 1 << 16
HELLO_SERIAL = 1


class Bus:
    """One connection. Raises: OSError when it is refused."""

    def __init__(self, path: str = SYSTEM_BUS) -> None:
        self._auth = Authenticator(enable_fds=True)
        self._parser = Parser()
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._serial = HELLO_SERIAL
        self._is_known = False
        """Whether the bus has answered the first call. It takes no descriptors with what it reads together with the
        end of the greeting, and hangs up."""
        self.lost = ""
        """Why the connection is lost; empty while it is not."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise
        self._greeting = memoryview(self._auth.data_to_send() or b"")

    def fileno(self) -> int:
        """Readable when there are answers or the connection is lost, writable when `flush` may continue."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._greeting or self._unsent)

    def call(self, message: Message, fds: Sequence[int] = ()) -> int:
        """Queue a message; returns its serial. Keeps duplicates of descriptors in its body open until they are sent.

        Args: fds: the descriptors in the body; they stay the caller's.
        """
        self._serial += 1
        found = array.array("i")
        data = message.serialise(serial=self._serial, fds=found)
        assert list(found) == list(fds)
        self._unsent.append((memoryview(data), tuple(os.dup(fd) for fd in fds)))
        return self._serial

    def flush(self) -> bool:
        """Send as much as the socket takes; False when it is full."""
        if self.lost:
            return True
        try:
            while self._greeting:
                self._greeting = self._greeting[self._socket.send(self._greeting) :]
            while self._is_known and self._unsent:
                data, fds = self._unsent[0]
                with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sent = self._socket.sendmsg([data], with_it)
                # The descriptors went with the first byte.
                _close_all(fds)
                self._unsent[0] = (data[sent:], ())
                if sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error.strerror)
        return True

    def receive(self) -> list[Message]:
        """Return all messages that have arrived; check `lost` afterwards."""
        messages: list[Message] = []
        while not self.lost:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(error.strerror)
                break
            if not data:
                self._lose("it was closed by the other side")
                break
            try:
                if self._auth.authenticated:
                    messages += self._parser.feed(data)
                    self._is_known = self._is_known or any(self.answers(m) == HELLO_SERIAL for m in messages)
                else:
                    self._auth.feed(data)
                    self._greeting = memoryview(self._auth.data_to_send() or b"")
                    if self._auth.authenticated:
                        # Its last line is dropped: the handshake is over, and messages begin.
                        hello: bytes = message_bus.Hello().serialise(serial=HELLO_SERIAL)
                        self._greeting = memoryview(BEGIN + hello)
            except (AuthenticationError, FDNegotiationError) as error:
                self._lose(f"it rejected this user: {error}")
            except Exception as error:
                # Not a message: the other side does not speak D-Bus.
                self._lose(f"it sent something unreadable: {error}")
        return messages

    @staticmethod
    def answers(message: Message) -> int:
        """Serial of the call that this message answers; 0 for a signal."""
        serial: int = message.header.fields.get(HeaderFields.reply_serial, 0)
        return serial

    def close(self) -> None:
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._socket.close()

    def _lose(self, why: str | None) -> None:
        self.lost = why or "it failed"


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


Property = tuple[str, tuple[str, Any]]
"""Name, then D-Bus signature and value."""

MAX_UINT64 = (1 << 64) - 1
"""systemd's "infinity"."""
STOP_MARGIN_S = 30.0
"""Time beyond the job's grace that a stopping supervisor may need before systemd kills it too."""


@dataclass(frozen=True, slots=True)
class Program:
    """The supervisor as a unit's command."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def properties(ticket: Ticket, names: UnitNames, program: Program, fds: Sequence[int]) -> list[Property]:
    job, _, number = ticket.run.partition(".")
    return [
        ("Description", ("s", f"run {number} of gpusched's job {job}")),
        ("Slice", ("s", names.slice)),
        ("Type", ("s", "exec")),
        # Not ExecStartEx, with which `$` would need no second one: systemd 252 writes that down under a name that it
        # does not read, and after a daemon-reload every run is a unit without a command, about which it complains.
        ("ExecStart", ("a(sasb)", [(program.argv[0], [word.replace("$", "$$") for word in program.argv], False)])),
        ("Environment", ("as", [f"{name}={value}" for name, value in program.environment.items()])),
        ("StandardInputFileDescriptor", ("h", fds[0])),
        ("StandardOutputFileDescriptor", ("h", fds[1])),
        ("StandardErrorFileDescriptor", ("h", fds[2])),
        ("UMask", ("u", 0o077)),
        *_ending(ticket),
        # The supervisor divides its cgroup: itself here, the job there.
        ("Delegate", ("b", True)),
        # The kernel chooses the victim of an out-of-memory kill; the supervisor must live to report it.
        ("OOMPolicy", ("s", "continue")),
        # An explicit limit would make systemd's default a limit of jobs.
        ("TasksMax", ("t", MAX_UINT64)),
        # The supervisor sets all other limits, on the job's part alone.
        *([] if ticket.limits is None else [("CPUWeight", ("t", ticket.limits.cpu_weight))]),
    ]


def _ending(ticket: Ticket) -> list[Property]:
    """How the unit ends when its supervisor does not end the run."""
    epilogs_s = (ticket.epilog_timeout_s if ticket.launch.epilog else 0.0) + (
        ticket.site_epilog.timeout_s if ticket.site_epilog else 0.0
    )
    return [
        # The supervisor gets the signal, and ends the job in its own way. When it is gone, the rest is killed.
        ("KillMode", ("s", "mixed")),
        ("SendSIGKILL", ("b", True)),
        ("TimeoutStopUSec", ("t", int((ticket.grace_s + ticket.leftover_grace_s + epilogs_s + STOP_MARGIN_S) * 1e6))),
        # When the machine goes down the daemon ends first, and gives notice while the runs are still there.
        ("Before", ("as", ["gpusched.service"])),
        # systemd keeps nothing: how the run ended is in the spool.
        ("CollectMode", ("s", "inactive-or-failed")),
    ]


UNIT_PROGRAM = "import sys\nsys.path.append(sys.argv.pop())\nfrom gpusched.engine.unit import main\nmain()"
"""Separate lines, not one line with semicolons: systemd 252 writes semicolons as escape sequences that it does not
understand, and complains about every run's unit at each daemon-reload."""
MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", bus_name="org.freedesktop.systemd1", interface="org.freedesktop.systemd1.Manager"
)
AT_ONCE = 16
"""Runs between their call and their supervisor's first message. The bus allows one connection about 128 unanswered
calls, and interpreters that start all at once only wait for each other."""
SILENCE_S = 60.0
"""PID 1 is given up after this long with an answer overdue; reloading many units takes seconds."""
CLAIM_S = 60.0
"""How long a supervisor whose program runs may take to claim its run."""
ANSWER_S = 10.0
"""How long the daemon waits at its start for PID 1 to report its version."""


@dataclass(slots=True)
class _Call:
    """A ticket handed to PID 1."""

    run: str
    serial: int
    claim_until: float | None = None
    """Monotonic instant; None until its program runs."""


class UnitLauncher:
    """A connection to PID 1. Raises: OSError when the bus refuses it."""

    name = "systemd"
    pid = None

    def __init__(self, spool: str, boot_id: str, event_fd: int, names: UnitNames, bus: str = SYSTEM_BUS) -> None:
        self._spool = spool
        self._boot_id = boot_id
        self._event_fd = event_fd
        self._names = names
        # Supervisors must not wait for a daemon that is busy.
        os.set_blocking(event_fd, False)
        argv = (sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", UNIT_PROGRAM, PACKAGE_ROOT)
        kept = {k: v for k, v in os.environ.items() if k in KEPT_VARIABLES or k.startswith("LC_")}
        self._program = Program(argv, kept)
        self._queue: deque[tuple[Ticket, bytes]] = deque()
        self._calls: dict[str, _Call] = {}
        """By unit: from the call until its supervisor has come, or must have."""
        self._by_serial: dict[int, str] = {}
        self._refused: list[tuple[str, str]] = []
        self._heard_at = time.monotonic()
        self._bus = Bus(bus)
        # Inherited by all units: while one of them may still claim a run, revocations stay.
        self._lock = share_lock(spool)
        rule = MatchRule(
            type="signal",
            sender=MANAGER.bus_name,
            interface=MANAGER.interface,
            path=MANAGER.object_path,
            member="JobRemoved",
        )
        self._bus.call(message_bus.AddMatch(rule.serialise()))

    def fileno(self) -> int:
        """Readable when PID 1 has sent something or is gone, writable when `flush` may continue."""
        return self._bus.fileno()

    @property
    def has_tickets(self) -> bool:
        return bool(self._queue) or self._bus.has_unsent

    def send(self, ticket: Ticket, facts: dict[str, Any]) -> None:
        if not self._owes_answers():
            self._heard_at = time.monotonic()
        self._queue.append((ticket, unit.pack(facts, self._spool, self._boot_id)))

    def flush(self) -> bool:
        """Make the calls that may be made now; False when the socket is full."""
        while self._queue and len(self._calls) < AT_ONCE:
            ticket, content = self._queue.popleft()
            try:
                self._call(ticket, content)
            except OSError as error:
                self._refused.append((ticket.run, f"its ticket cannot be handed over: {error.strerror}"))
        return self._bus.flush()

    def is_gone(self) -> bool:
        """Read messages of PID 1. True when the connection is lost or an answer overdue."""
        for message in self._bus.receive():
            self._heard_at = time.monotonic()
            if message.header.message_type is MessageType.signal:
                self._take_signal(message)
            else:
                self._take_answer(message)
        now = time.monotonic()
        for name, call in list(self._calls.items()):
            if call.claim_until is not None and call.claim_until < now:
                del self._calls[name]
                self._refused.append(
                    (call.run, f"the supervisor of {name} did not claim its run; see: journalctl -u {name}")
                )
        return bool(self._bus.lost) or (self._owes_answers() and now - self._heard_at > SILENCE_S)

    def is_stuck(self, waited_s: float) -> bool:
        """Never because of one ticket: PID 1 may be slow, and `is_gone` detects when it does not answer at all."""
        return False

    def refusals(self) -> list[tuple[str, str]]:
        refused, self._refused = self._refused, []
        return refused

    def heard(self, run: str) -> None:
        """Note that its supervisor has claimed it, or was given up: another one may start."""
        call = self._calls.pop(self._names.unit(run), None)
        if call is not None:
            self._by_serial.pop(call.serial, None)

    def kill(self) -> str:
        """Give up the connection; returns why, for the log. PID 1 may still act on earlier calls."""
        why = self._bus.lost or f"it has not answered for {SILENCE_S:g} s"
        self.close()
        return f"the connection to systemd is lost: {why}"

    def close(self) -> None:
        self._bus.close()
        os.close(self._lock)

    def _owes_answers(self) -> bool:
        return bool(self._by_serial) or any(call.claim_until is None for call in self._calls.values())

    def _call(self, ticket: Ticket, content: bytes) -> None:
        memory = os.memfd_create("gpusched-ticket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(content)
            # It may only be emptied, by its reader.
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            fds = (memory, self._event_fd, self._lock)
            name = self._names.unit(ticket.run)
            told = properties(ticket, self._names, self._program, fds)
            # "fail": an existing unit of this name is an error, and remains untouched.
            body: tuple[str, str, list[Property], list[Any]] = (name, "fail", told, [])
            serial = self._bus.call(new_method_call(MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", body), fds)
        finally:
            os.close(memory)
        self._calls[name] = _Call(ticket.run, serial)
        self._by_serial[serial] = name

    def _take_answer(self, message: Message) -> None:
        name = self._by_serial.pop(self._bus.answers(message), None)
        call = None if name is None else self._calls.get(name)
        if name is None or call is None or message.header.message_type is not MessageType.error:
            return
        del self._calls[name]
        words = message.body[0] if message.body and isinstance(message.body[0], str) else "no reason given"
        self._refused.append((call.run, f"systemd refused {name}: {' '.join(words.split())}"))

    def _take_signal(self, message: Message) -> None:
        """Handle JobRemoved of any unit of the machine: number, object, unit, result."""
        if len(message.body) != 4:
            return
        name, result = message.body[2:]
        call = self._calls.get(name)
        if call is None:
            return
        self._by_serial.pop(call.serial, None)
        if result == "done":
            call.claim_until = time.monotonic() + CLAIM_S
        else:
            del self._calls[name]
            self._refused.append((call.run, f"systemd could not start {name} ({result}); see: journalctl -u {name}"))


def manager_version() -> str:
    """Return systemd's version, as PID 1 reports it on the system bus. Raises: OSError with a sentence."""
    try:
        bus = Bus(SYSTEM_BUS)
    except OSError as error:
        raise OSError(f"no answer at {SYSTEM_BUS}: {error.strerror}") from None
    try:
        serial = bus.call(Properties(MANAGER).get("Version"))
        until = time.monotonic() + ANSWER_S
        while not bus.lost and (left_s := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(bus.fileno(), select.POLLIN if bus.flush() else select.POLLIN | select.POLLOUT)
            poll.poll(left_s * 1000)
            for message in bus.receive():
                if bus.answers(message) == serial:
                    if message.header.message_type is MessageType.error:
                        raise OSError(f"systemd does not report its version: {message.body}")
                    return str(message.body[0][1])
        raise OSError(f"systemd does not answer on the bus: {bus.lost or f'nothing came within {ANSWER_S:g} s'}")
    finally:
        bus.close()
