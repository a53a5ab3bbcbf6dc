"""Launchers, which give tickets to supervisors, as the engine sees them; and the fork server: a child and a socket."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gpusched.engine.orphans import CHECKPOINT_VARIABLE, PROGRESS_VARIABLE, RUN_VARIABLE, SPOOL_VARIABLE
from gpusched.engine.spool import checkpoint_path, progress_path, share_lock
from gpusched.engine.wire import LENGTH_BYTES, QUEUE_TIMEOUT_S, IdlePool, pack_ticket
from gpusched.errors import NotReady
from gpusched.model import value
from gpusched.model.execution import Ticket
from gpusched.model.launch import SUPERVISED
from gpusched.model.value import replace

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
FORK_SERVER_PROGRAM = (
    # Appended, not inserted: nothing beside the package may shadow the standard library.
    "import sys; sys.path.append(sys.argv.pop()); from gpusched.engine.forkserver import main; main()"
)
KEPT_VARIABLES = ("PATH", "HOME", "TZ", "LANG", "LD_LIBRARY_PATH")
"""Variables the interpreter itself may need; jobs get their environment from the ticket alone."""
CLOSE_TIMEOUT_S = 2.0
START_TIMEOUT_S = 5.0
"""Replace a fork server that owes an answer and has answered no ticket for this long."""


def ticket_facts(ticket: Ticket, spool: str, pam: bool = False, run_cgroups: str | None = None) -> dict[str, Any]:
    """Convert a ticket to built-in types, by field. Its environment also names the run, which identifies its processes.

    Args: pam: whether to open a PAM session; run_cgroups: parent of the run's control group; None: that of its
    supervisor's unit.
    """
    # The environment is large, and need not be copied twice.
    facts: dict[str, Any] = value.plain(replace(ticket, env={}), builtin_types=(bytes,))
    launch = facts.pop("launch")
    facts |= {name: launch[name] for name in SUPERVISED}
    facts["env"] = {
        **ticket.env,
        RUN_VARIABLE: ticket.run,
        SPOOL_VARIABLE: spool,
        CHECKPOINT_VARIABLE: checkpoint_path(spool, ticket.run),
        PROGRESS_VARIABLE: progress_path(spool, ticket.run),
    }
    facts["pam"] = pam
    if ticket.limits is not None:
        facts["limits"]["folder"] = run_cgroups
    return facts


class Launcher(Protocol):
    """Starts supervisors without ever blocking. The engine replaces a launcher that is gone.

    A ticket that was sent may become a supervisor that claims its run until the launcher is gone or refuses it. The
    engine then revokes unclaimed runs.
    """

    name: str
    """For messages."""

    @property
    def pid(self) -> int | None:
        """Pid of a process to spare when orphans are killed; None when there is none."""

    def fileno(self) -> int:
        """Readable when there are events or the launcher is gone, writable when `flush` may continue."""

    @property
    def has_tickets(self) -> bool:
        """Whether `flush` may have something to do."""

    def send(self, ticket: Ticket, facts: dict[str, Any]) -> None:
        """Queue a ticket; nothing leaves before `flush`. Args: facts: the ticket as supervisors read it."""

    def flush(self) -> bool:
        """Hand on as many tickets as possible; False while some remain because the socket is full."""

    def is_gone(self) -> bool:
        """Read the events; True when this launcher will start nothing any more."""

    def is_stuck(self, waited_s: float) -> bool:
        """Whether a working launcher would have taken a ticket sent this long ago."""

    def refusals(self) -> list[tuple[str, str]]:
        """Return the runs that it will not start, each with a sentence; each is reported once."""

    def heard(self, run: str) -> None:
        """Note that the run's supervisor has reported or was given up: `flush` may have more to hand on."""

    def kill(self) -> str:
        """Kill it now; returns how it ended, for the log."""

    def close(self) -> None:
        """Let it finish pending work and end; supervisors continue."""


class ForkServer:
    """One fork server. Raises: OSError when it cannot be started."""

    name = "the fork server"

    def __init__(self, spool: str, boot_id: str, event_fd: int) -> None:
        ours, theirs = socket.socketpair()
        queue_in, queue_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        queue_out.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", QUEUE_TIMEOUT_S, 0))
        # Taken here: a fork server that is stuck in its first moments already counts.
        lock = share_lock(spool)
        tokens = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        queue_in.setblocking(False)
        self._idle = IdlePool(*tokens, queue_in.detach())
        fds = (theirs.fileno(), event_fd, self._idle.queue_in, queue_out.fileno(), *tokens, lock)
        self._outbox: deque[memoryview] = deque()
        self._rest = memoryview(b"")
        """Of a ticket that the socket took only in part."""
        self._heard_at = time.monotonic()
        self._socket = ours
        try:
            with theirs, queue_out, open(f"{spool}/engine.log", "ab") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", FORK_SERVER_PROGRAM),
                        *(*map(str, fds), spool, boot_id, PACKAGE_ROOT),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env={k: v for k, v in os.environ.items() if k in KEPT_VARIABLES or k.startswith("LC_")},
                    pass_fds=fds,
                    start_new_session=True,
                )
        except BaseException:
            self._release()
            raise
        finally:
            os.close(lock)
        ours.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_tickets(self) -> bool:
        return bool(self._outbox or self._rest)

    def send(self, ticket: Ticket, facts: dict[str, Any]) -> None:
        self._outbox.append(memoryview(pack_ticket(facts)))

    def flush(self) -> bool:
        """Hand tickets to idle supervisors and send the others as the socket accepts them; True when all have gone.

        A broken socket shows up as end of file instead.
        """
        while self._rest or self._outbox:
            if not self._rest:
                frame = self._outbox.popleft()
                if self._idle.hand_over(frame[LENGTH_BYTES:]):
                    continue
                self._rest = frame
            try:
                sent = self._socket.send(self._rest)
            except BlockingIOError:
                return False
            except OSError:
                self._outbox.clear()
                sent = len(self._rest)
            self._rest = self._rest[sent:]
        return True

    def is_gone(self) -> bool:
        """Whether the fork server has closed its end, which it does only by ending."""
        try:
            return self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def is_stuck(self, waited_s: float) -> bool:
        """Whether an answer is long overdue; a server that answers other tickets meanwhile is only busy."""
        return min(waited_s, time.monotonic() - self._heard_at) > START_TIMEOUT_S

    def refusals(self) -> list[tuple[str, str]]:
        """Empty: the fork server reports refusals through the event pipe."""
        return []

    def heard(self, run: str) -> None:
        """Note that it lives. The fork server passes on all it has, whichever run was claimed."""
        self._heard_at = time.monotonic()

    def kill(self) -> str:
        self._process.kill()
        status = self._process.wait()
        self._release()
        return f"fork server {self.pid} ended with status {status}"

    def close(self) -> None:
        self._release()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _release(self) -> None:
        """Close our ends: the server and idle supervisors end once they have read the rest."""
        self._socket.close()
        self._idle.close()


BOOTED = "/run/systemd/system"
"""Exists when PID 1 is systemd. Source: sd_booted(3)."""
OLDEST = 244
"""The first systemd with all properties used here; tested with 252."""


@dataclass(frozen=True, slots=True)
class UnitNames:
    """Unit names of one daemon. Several daemons may run on a machine, each with a job 1."""

    prefix: str = "gpusched"
    slice: str = "gpusched.slice"
    """Slice of all runs, beside `system.slice` and `user.slice`, to limit or inspect them together; made by systemd."""

    def unit(self, run: str) -> str:
        return f"{self.prefix}-{run}.service"


@dataclass(frozen=True, slots=True)
class LauncherChoice:
    """A launcher, and a note on it for the administrator."""

    kind: str
    """`systemd` or `fork`."""
    text: str
    make: Callable[[str, str, int], Launcher]


def choose(wanted: str, *, is_system: bool, root: str = "") -> LauncherChoice:
    """Choose the launcher of a daemon. Raises: NotReady when the wanted one is unavailable.

    Args: wanted: the setting `[daemon] launcher`; root: root folder of a system daemon on trial.
    """
    if wanted == "fork":
        return LauncherChoice("fork", "fork server, as [daemon] launcher says", ForkServer)
    version = 0
    why = None if is_system else "this daemon is not the system's"
    if why is None:
        try:
            version = systemd_version()
        except OSError as error:
            why = str(error)
    if why is None and version < OLDEST:
        why = f"systemd {version} is older than {OLDEST}"
    if why is None:
        from gpusched.engine.systemd import UnitLauncher

        names = names_of(root)
        return LauncherChoice(
            "systemd", f"systemd {version}, units {names.unit('JOB.RUN')}", partial(UnitLauncher, names=names)
        )
    if wanted == "systemd":
        raise NotReady(
            f'[daemon] launcher is "systemd", but {why}', 'set it to "auto" or "fork"; see: gpusched config show'
        )
    return LauncherChoice("fork", f"fork server: {why}", ForkServer)


def names_of(root: str) -> UnitNames:
    """Return the unit names of a daemon; a daemon on trial beside the machine's own has different names."""
    return UnitNames(f"gpusched-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}") if root else UnitNames()


def systemd_version() -> int:
    """Version of PID 1. Raises: OSError with a sentence."""
    if not os.path.isdir(BOOTED):
        raise OSError("PID 1 is not systemd")
    from gpusched.engine.systemd import manager_version

    return leading_number(manager_version())


def leading_number(text: str) -> int:
    """Parse 252 from `252.39-1~deb12u2`; 0 without a leading number."""
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits) if digits else 0
