"""The fork server: a small process that reads tickets and forks one supervisor for each.

It exists because forking the daemon (large, with threads) is slow and unsafe, and starting an interpreter per
run takes 10 ms. It ends when the daemon does; its supervisors go on.

    python -I -S -c "..." TICKET_FD EVENT_FD SPOOL BOOT_ID      (see `local`)
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time

from gpusched.engine import spool as files
from gpusched.engine.supervisor import AWAITED, Supervisor
from gpusched.engine.wire import encode_event, unpack_ticket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 1 << 18
FORK_RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


class Server:
    """What the server holds and each supervisor inherits."""

    def __init__(self, ticket_fd: int, event_fd: int, spool: str, boot_id: str) -> None:
        self.ticket_fd = ticket_fd
        self.event_fd = event_fd
        self.spool = spool
        self.boot_id = boot_id
        self.prctl = ctypes.CDLL(None, use_errno=True).prctl
        self.may_claim_fd = files.share_lock(spool)

    def serve(self) -> None:
        """Fork a supervisor per ticket until the daemon closes its end."""
        buffer = bytearray()
        while data := os.read(self.ticket_fd, READ_BYTES):
            buffer += data
            while (ticket := unpack_ticket(buffer)) is not None:
                self.fork(ticket)

    def fork(self, ticket: dict[str, Any]) -> None:
        """One supervisor. A machine out of processes is given a few seconds before the run is refused."""
        for pause_s in FORK_RETRY_S:
            try:
                pid = os.fork()
            except OSError:
                time.sleep(pause_s)
                continue
            if pid == 0:
                self.become_supervisor(ticket)
            return
        detail = "no process could be forked for it: the limit on processes or memory is reached"
        try:
            os.write(self.event_fd, encode_event(run=ticket["run"], event="refused", detail=detail))
        except OSError:
            # The engine asks for a run that does not start by itself.
            pass

    def become_supervisor(self, ticket: dict[str, Any]) -> NoReturn:
        """In the child: supervise, and never come back into the server's loop."""
        code = 70
        try:
            os.close(self.ticket_fd)
            os.setsid()
            self.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            Supervisor(ticket, self.spool, self.event_fd).supervise(self.boot_id, self.may_claim_fd)
            code = 0
        except BaseException:
            # Our bug; the engine sees the process end without a result.
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)


def main() -> None:
    """Entry point in the new interpreter."""
    ticket_fd, event_fd, spool, boot_id = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    for fd in (ticket_fd, event_fd):
        os.set_inheritable(fd, False)
    os.set_blocking(event_fd, False)
    os.umask(0o077)
    # Supervisors are reaped by the kernel: their ends are seen elsewhere.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Inherited, so that no signal can meet a supervisor that is not ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    server = Server(ticket_fd, event_fd, spool, boot_id)
    server.prctl(PR_SET_NAME, b"gpusched-run", 0, 0, 0)
    gc.collect()
    gc.freeze()
    gc.disable()
    server.serve()
