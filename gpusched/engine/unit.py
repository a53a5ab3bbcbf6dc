"""The main process of a run's unit: takes its ticket from a descriptor and supervises that one run.

    python -I -S -c "..." PACKAGE_ROOT        (see `systemd`)

Its standard input is a memory file with the ticket, its output the event pipe, and its error output a share of the
spool's lock. The lock is only held: it is released with the last process that may still claim a run.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import sys

from gpusched import __version__
from gpusched.engine.supervisor.priority import OomScores
from gpusched.engine.supervisor.processes import AWAITED
from gpusched.engine.supervisor.supervisor import Home, supervisor_of
from gpusched.engine.wire import encode_event

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def pack(ticket: dict[str, Any], spool: str, boot_id: str) -> bytes:
    """Content of the memory file. A newer release may be installed by the time it is read."""
    return marshal.dumps((__version__, ticket["run"], spool, boot_id, ticket))


def main() -> None:
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(0, "rb", closefd=False) as file:
        file.seek(0)
        version, run, spool, boot_id, ticket = marshal.load(file)
    # systemd holds the file as long as the unit exists: free its memory.
    os.ftruncate(0, 0)
    event_fd, lock = os.dup(1), os.dup(2)
    os.set_inheritable(lock, False)
    _take_standard_streams(spool)
    if version != __version__:
        words = (
            f"gpusched was upgraded from {version} to {__version__}: restart the daemon (systemctl restart gpusched)"
        )
        os.write(event_fd, encode_event(run=run, event="refused", detail=words))
        return
    if os.getsid(0) != os.getpid():
        os.setsid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_NAME, b"gpusched-run", 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor_of(ticket, Home(spool, boot_id, event_fd, OomScores())).supervise()
    sys.stdout.flush()
    os._exit(0)


def _take_standard_streams(spool: str) -> None:
    """Set standard streams as under the fork server: empty input, and complaints in the spool's log."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    log = os.open(f"{spool}/engine.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(log)
