"""What tests of every tier share."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(predicate: Callable[[], object], timeout_s: float = 20.0, what: str = "a condition") -> None:
    """Ask every 5 ms until it holds. Raises: AssertionError naming `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(0.005)
