"""The fork server: a small process that gives each ticket to its own supervisor, forking one if none is idle.

It exists because forking the daemon (large, with threads) is slow and unsafe, and starting an interpreter per
run takes 10 ms. It ends with the daemon; its supervisors continue with their runs.

After its run, a supervisor briefly waits for another one, see `wire`; the daemon hands it that ticket directly.

    python -I -S -c "..." TICKETS EVENTS QUEUE_IN QUEUE_OUT TOKENS_OUT TOKENS_IN LOCK SPOOL BOOT_ID    (see `launchers`)

The lock is never used here, only held: it is released with the last process that may still claim a run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time

from gpusched.engine.supervisor.priority import OomScores
from gpusched.engine.supervisor.processes import AWAITED, PR_SET_CHILD_SUBREAPER, end_all
from gpusched.engine.supervisor.supervisor import Home, supervisor_of
from gpusched.engine.wire import QUEUE_BYTES, IdlePool, encode_event, take_frame, unpack_ticket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
else:
    import _signal as signal

PR_SET_NAME = 15
READ_BYTES = 1 << 16
FORK_RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
RUNS_PER_SUPERVISOR = 500
"""After this many runs a supervisor is replaced, and with it any state that long use may leave in a process."""


class TicketServer:
    """State of the server, inherited by each supervisor."""

    def __init__(self, fds: list[int], spool: str, boot_id: str) -> None:
        self.ticket_fd, self.event_fd, queue_in, self.queue_out, tokens_out, tokens_in, _ = fds
        self.idle = IdlePool(tokens_out, tokens_in, queue_in)
        self.spool = spool
        self.boot_id = boot_id
        self.prctl = ctypes.CDLL(None, use_errno=True).prctl

    def serve(self) -> None:
        """Hand out tickets until the daemon closes its end."""
        buffer = bytearray()
        while data := os.read(self.ticket_fd, READ_BYTES):
            buffer += data
            while (ticket := take_frame(buffer)) is not None:
                if not self.idle.hand_over(ticket):
                    self.fork(ticket)

    def fork(self, ticket: bytes) -> None:
        """Fork a supervisor; retry for a few seconds when the machine is out of processes, then refuse the run."""
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
        """Supervise runs in the child, then exit; never returns into the server's loop."""
        code = 70
        home: Home | None = None
        try:
            os.close(self.ticket_fd)
            os.close(self.idle.queue_in)
            os.setsid()
            self.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            home = Home(self.spool, self.boot_id, self.event_fd, OomScores(), serves_more=True)
            runs = 0
            while ticket:
                runs += 1
                facts = unpack_ticket(ticket)
                home.flush_result(facts["recorded"])
                if not supervisor_of(facts, home).supervise() or runs == RUNS_PER_SUPERVISOR:
                    break
                ticket = self.wait_for_another(home.pid)
                while signal.sigtimedwait(AWAITED, 0):
                    # Meant for the run before.
                    continue
            code = 0
        except BaseException:
            # Our bug; the engine sees the process end without a result. Nothing of the run may outlive it:
            # a process that left the session and cleared its environment could not be found.
            import traceback

            traceback.print_exc()
            end_all()
        finally:
            try:
                if home is not None:
                    home.flush_result()
            finally:
                os._exit(code)

    def wait_for_another(self, own: int) -> bytes:
        """Wait for the next ticket in an idle supervisor; empty when none came in time or none can come any more."""
        # Keep no file system busy.
        os.chdir("/")
        self.idle.put(own)
        while True:
            try:
                return os.read(self.queue_out, QUEUE_BYTES)
            except BlockingIOError:
                # The queue's receive timeout.
                if self.idle.withdraw(own):
                    return b""


def main() -> None:
    *words, spool, boot_id = sys.argv[1:]
    fds = [int(word) for word in words]
    for fd in fds:
        os.set_inheritable(fd, False)
    os.set_blocking(fds[1], False)
    os.umask(0o077)
    # Supervisors are reaped by the kernel: their ends are seen elsewhere.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Inherited, so that no signal can meet a supervisor that is not ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    server = TicketServer(fds, spool, boot_id)
    server.prctl(PR_SET_NAME, b"gpusched-run", 0, 0, 0)
    gc.collect()
    gc.freeze()
    gc.disable()
    server.serve()
