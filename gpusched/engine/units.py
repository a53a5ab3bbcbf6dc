"""Runs as systemd's units, as the daemon sees it: a connection to PID 1 that takes tickets.

Every run is one transient service whose main process is the run's supervisor (`unit`), the same that the fork
server forks. PID 1 is asked over D-Bus and is never waited for:

    queued    no call was made yet; only so many are on their way at once
    called    PID 1 has been asked
    taken     PID 1 has made the unit and starts it
    started   the supervisor's program runs and will claim the run

Whatever does not go on is a refusal, upon which the engine looks into the spool and revokes the run unless its
supervisor came after all. So a call is never made twice, not even when its answer was lost: a second supervisor
might find the first one's record removed.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from jeepney import DBusAddress, MatchRule, Message, MessageType, new_method_call
from jeepney.bus_messages import message_bus

from gpusched.engine import unit
from gpusched.engine.bus import SYSTEM_BUS, Bus
from gpusched.engine.launcher import KEPT_VARIABLES, PACKAGE_ROOT
from gpusched.engine.properties import Names, Program, Property, properties
from gpusched.engine.spool import share_lock
from gpusched.model.execution import Ticket

PROGRAM = "import sys\nsys.path.append(sys.argv.pop())\nfrom gpusched.engine.unit import main\nmain()"
"""Lines, not one line with semicolons: systemd 252 writes these down as escape sequences that it does not know, and
complains of every run's unit at each daemon-reload."""
MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", bus_name="org.freedesktop.systemd1", interface="org.freedesktop.systemd1.Manager"
)
AT_ONCE = 16
"""Runs between their call and their supervisor's first word. The bus allows one connection some 128 unanswered calls,
and interpreters that start all at once only wait for each other."""
SILENCE_S = 60.0
"""PID 1 is given up when it owes an answer and says nothing for so long; a reload of many units takes seconds."""
CLAIM_S = 60.0
"""How long a supervisor whose program runs may take to claim its run."""


@dataclass(slots=True)
class _Call:
    """A ticket on its way."""

    run: str
    serial: int
    claim_until: float | None = None
    """Monotonic instant; None until its program runs."""


class UnitLauncher:
    """A connection to PID 1. Raises: OSError when the bus does not take it."""

    name = "systemd"
    pid = None

    def __init__(self, spool: str, boot_id: str, event_fd: int, names: Names, bus: str = SYSTEM_BUS) -> None:
        self._spool = spool
        self._boot_id = boot_id
        self._event_fd = event_fd
        self._names = names
        # Supervisors must not wait for a daemon that is busy.
        os.set_blocking(event_fd, False)
        argv = (sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", PROGRAM, PACKAGE_ROOT)
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
        """Readable when PID 1 has said something or is gone, writable when `flush` may go on."""
        return self._bus.fileno()

    @property
    def has_tickets(self) -> bool:
        """Whether `flush` may have something to do."""
        return bool(self._queue) or self._bus.has_unsent

    def send(self, ticket: Ticket, facts: dict[str, Any]) -> None:
        """Queue a ticket; nothing leaves before `flush`."""
        if not self._owes_answers():
            self._heard_at = time.monotonic()
        self._queue.append((ticket, unit.pack(facts, self._spool, self._boot_id)))

    def flush(self) -> bool:
        """Make the calls that may be made now; False while the socket takes no more."""
        while self._queue and len(self._calls) < AT_ONCE:
            ticket, content = self._queue.popleft()
            try:
                self._call(ticket, content)
            except OSError as error:
                self._refused.append((ticket.run, f"its ticket cannot be handed over: {error.strerror}"))
        return self._bus.flush()

    def is_gone(self) -> bool:
        """Read what PID 1 says. True when there is no connection any more, or nobody who answers."""
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
                self._refused.append((call.run, f"the supervisor of {name} did not come; see: journalctl -u {name}"))
        return bool(self._bus.lost) or (self._owes_answers() and now - self._heard_at > SILENCE_S)

    def is_stuck(self, waited_s: float) -> bool:
        """Never because of one ticket: PID 1 takes its time, and `is_gone` knows when it does not answer at all."""
        return False

    def refusals(self) -> list[tuple[str, str]]:
        """Runs that will not come to life, each with a sentence; each is told once."""
        refused, self._refused = self._refused, []
        return refused

    def heard(self, run: str) -> None:
        """Its supervisor has come, or was given up: another one may start."""
        call = self._calls.pop(self._names.unit(run), None)
        if call is not None:
            self._by_serial.pop(call.serial, None)

    def kill(self) -> str:
        """Give the connection up; why, for the log. What PID 1 was asked for it may still do."""
        why = self._bus.lost or f"it has not answered for {SILENCE_S:g} s"
        self.close()
        return f"the connection to systemd is lost: {why}"

    def close(self) -> None:
        """Release it; units go on."""
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
            # "fail": a unit of this name that is there already is an error, and nothing happens to it.
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
        """JobRemoved of any unit of the machine: number, object, unit, result."""
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
