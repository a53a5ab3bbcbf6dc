"""Dying on purpose: a test names a step of the tick and the daemon kills itself there, as `kill -9` would.

`GPUSCHED_CRASH_AT=commit:3` dies before the third `commit`. Without the variable there is no hook at all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from gpusched.daemon.tick import STEPS
from gpusched.errors import UsageError

VARIABLE = "GPUSCHED_CRASH_AT"


def crash_step(text: str | None) -> Callable[[str], None]:
    """The step callback for this setting. Raises: UsageError for an unknown step."""
    if not text:
        return lambda name: None
    wanted, _, count = text.partition(":")
    if wanted not in STEPS or not (count or "1").isdigit():
        raise UsageError(f"{VARIABLE}={text!r} is no step", "steps: " + ", ".join(STEPS))
    left = int(count or 1)

    def step(name: str) -> None:
        nonlocal left
        if name == wanted:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return step
