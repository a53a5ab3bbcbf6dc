"""What tests of every tier share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def is_alive(pid: int) -> bool:
    """Whether anything of a process is left but a zombie.

    The first thread of one that is killed may be a zombie while another still holds its sockets and locks.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            is_zombie = file.read().rpartition(")")[2].split()[0] in "ZX"
        return not is_zombie or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_until(predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "a condition") -> None:
    """Ask every 5 ms until it holds. Raises: AssertionError naming `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(0.005)
