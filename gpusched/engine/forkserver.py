"""The fork server: a small process that gives each ticket to a supervisor of its own, forked if need be.

It exists because forking the daemon (large, with threads) is slow and unsafe, and starting an interpreter per
run takes 10 ms. It ends when the daemon does; its supervisors go on with their runs.

A supervisor whose run is over waits a moment for another one: a fork of Python, the copying of the pages that
it then touches and its end cost more processor time than all else that is done for a short job. Idle
supervisors put a token each into a pipe. The server takes one and then puts a ticket into the queue from
which they all read; one that is tired of waiting takes a token itself, and so is not counted on any more.

    python -I -S -c "..." TICKET_FD EVENT_FD QUEUE_IN_FD QUEUE_OUT_FD LOCK_FD SPOOL BOOT_ID      (see `launcher`)

The lock is only held: it ends with the last process that may still claim a run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time

from gpusched.engine import proctree
from gpusched.engine.precedence import take_precedence
from gpusched.engine.supervising import supervisor_of
from gpusched.engine.supervisor import AWAITED, KILL_AGAIN_S, WALL, Home
from gpusched.engine.wire import QUEUE_BYTES, encode_event, take_frame, unpack_ticket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:
    import _signal as signal

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 1 << 18
FORK_RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
END_ALL_S = 60.0
RUNS_PER_SUPERVISOR = 500
"""Then a fresh one: whatever long use might leave in a process goes with it."""


class Server:
    """What the server holds and each supervisor inherits."""

    def __init__(self, fds: list[int], spool: str, boot_id: str) -> None:
        self.ticket_fd, self.event_fd, self.queue_in, self.queue_out, _ = fds
        self.spool = spool
        self.boot_id = boot_id
        self.idle_out, self.idle_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.prctl = ctypes.CDLL(None, use_errno=True).prctl

    def serve(self) -> None:
        """Hand out tickets until the daemon closes its end."""
        buffer = bytearray()
        while data := os.read(self.ticket_fd, READ_BYTES):
            buffer += data
            while (ticket := take_frame(buffer)) is not None:
                if not self.hand_over(ticket):
                    self.fork(ticket)

    def hand_over(self, ticket: bytes) -> bool:
        """Give the ticket to an idle supervisor, if there is one."""
        if len(ticket) > QUEUE_BYTES:
            return False
        while pid := self.take_idle():
            try:
                os.kill(pid, 0)
                os.write(self.queue_in, ticket)
            except ProcessLookupError:
                # Killed by somebody while it waited.
                continue
            except BlockingIOError:
                self.put_idle(pid)
                return False
            return True
        return False

    def put_idle(self, pid: int) -> None:
        """Count on this supervisor."""
        os.write(self.idle_in, pid.to_bytes(4, "little"))

    def take_idle(self) -> int:
        """The pid that is first in the pipe, 0 when it is empty."""
        try:
            return int.from_bytes(os.read(self.idle_out, 4), "little")
        except BlockingIOError:
            return 0

    def withdraw(self, own: int) -> bool:
        """Take one's own pid out; False when the server has done so: a ticket is on its way."""
        first = 0
        while pid := self.take_idle():
            if pid == own:
                return True
            self.put_idle(pid)
            if pid == first:
                break
            first = first or pid
        return False

    def fork(self, ticket: bytes) -> None:
        """A new supervisor. A machine out of processes is given a few seconds before the run is refused."""
        for pause_s in FORK_RETRY_S:
            try:
                pid = os.fork()
            except OSError:
                time.sleep(pause_s)
                continue
            if pid == 0:
                self.become_supervisor(ticket)
            return
        run = unpack_ticket(ticket)["run"]
        detail = "no process could be forked for it: the limit on processes or memory is reached"
        try:
            os.write(self.event_fd, encode_event(run=run, event="refused", detail=detail))
        except OSError:
            # The engine asks for a run that does not start by itself.
            pass

    def become_supervisor(self, ticket: bytes) -> NoReturn:
        """In the child: supervise, and never come back into the server's loop."""
        code = 70
        try:
            os.close(self.ticket_fd)
            os.close(self.queue_in)
            os.setsid()
            self.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            own = proctree.read_process(os.getpid())
            home = Home(self.spool, self.boot_id, self.event_fd, own.start_ticks if own else 0, take_precedence())
            runs = 0
            while ticket:
                runs += 1
                if not supervisor_of(unpack_ticket(ticket), home).supervise() or runs == RUNS_PER_SUPERVISOR:
                    break
                ticket = self.wait_for_another(home.pid)
                while signal.sigtimedwait(AWAITED, 0):
                    # Meant for the run before.
                    continue
            code = 0
        except BaseException:
            # Our bug; the engine sees the process end without a result. Nothing of the run may outlive it:
            # who has left the session and cleared its environment could not be found any more.
            import traceback

            traceback.print_exc()
            end_all()
        finally:
            os._exit(code)

    def wait_for_another(self, own: int) -> bytes:
        """In an idle supervisor: the next ticket, empty when none came in time or the server is gone."""
        # Keep no file system busy.
        os.chdir("/")
        self.put_idle(own)
        while True:
            try:
                return os.read(self.queue_out, QUEUE_BYTES)
            except BlockingIOError:
                # The queue's receive timeout.
                if self.withdraw(own):
                    return b""


def end_all() -> None:
    """KILL all that is below this process, until the kernel says that no child is left or for a minute."""
    until = time.monotonic() + END_ALL_S
    while time.monotonic() < until:
        proctree.kill_tree(os.getpid())
        try:
            while os.waitpid(-1, os.WNOHANG | WALL)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(KILL_AGAIN_S[0])


def main() -> None:
    """Entry point in the new interpreter."""
    fds = [int(word) for word in sys.argv[1:6]]
    for fd in fds:
        os.set_inheritable(fd, False)
    os.set_blocking(fds[1], False)
    os.set_blocking(fds[2], False)
    os.umask(0o077)
    # Supervisors are reaped by the kernel: their ends are seen elsewhere.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Inherited, so that no signal can meet a supervisor that is not ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    server = Server(fds, sys.argv[6], sys.argv[7])
    server.prctl(PR_SET_NAME, b"gpusched-run", 0, 0, 0)
    gc.collect()
    gc.freeze()
    gc.disable()
    server.serve()
