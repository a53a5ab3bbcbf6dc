"""When a node last had contact with its head: a small file beside the runs, written by the agent, read by supervisors.

A run with a lease (`Ticket.lost_after_s`) must not outlive its contact by more than that, since the head starts it
elsewhere then. The instant is that at which the agent *sent* what the head has answered: the head had that answer at
hand no earlier, so whatever it counts from comes later, and a request that was long under way extends no lease.

Instants are on CLOCK_BOOTTIME, which counts while the machine is suspended and cannot be set; they are
comparable within one boot only. Supervisors import this: no dataclasses, no logging.
"""

from __future__ import annotations

import os
import time
import zlib

NAME = "contact"
_BYTES = 128
_TRIES = 20
_PAUSE_S = 0.01

MARGIN_S = 1.0
MARGIN_FRACTION = 0.1
"""Of the lease: what a head waits longer, for clocks that run at different speeds and supervisors that come late."""


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lost_after_contact_s(lost_after_s: float) -> float:
    """How long after the last contact a head may be sure that nothing of a run with this lease is alive."""
    return lost_after_s * (1.0 + MARGIN_FRACTION) + MARGIN_S


def write_contact(spool: str, boot_id: str, at: float) -> None:
    """Replace the instant of the last contact. Raises: OSError."""
    text = f"{at!r} {boot_id}".encode()
    line = text + b" %08x\n" % zlib.crc32(text)
    fd = os.open(f"{spool}/{NAME}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # In place, since another name would cost the file system's journal a write every second.
        os.pwrite(fd, line.ljust(_BYTES, b"\0"), 0)
    finally:
        os.close(fd)


def read_contact(spool: str, boot_id: str) -> float | None:
    """The instant of the last contact in this boot; None if there was none, or none that can be read."""
    for _ in range(_TRIES):
        try:
            with open(f"{spool}/{NAME}", "rb") as file:
                line = file.read(_BYTES).partition(b"\n")[0]
        except OSError:
            return None
        text, _, check = line.rpartition(b" ")
        if check and check == b"%08x" % zlib.crc32(text):
            instant, _, boot = text.decode("ascii", "replace").partition(" ")
            return float(instant) if boot == boot_id else None
        # Read while it was being written.
        time.sleep(_PAUSE_S)
    return None
