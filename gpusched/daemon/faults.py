"""Dying on purpose: a test names a step of the tick and the daemon kills itself there, as `kill -9` would.

`GPUSCHED_CRASH_AT=commit:3` dies before the third `commit`, `commit:3,start` after it, before the next `start`. Without
the variable there is no hook at all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from gpusched.daemon.tick import STEPS
from gpusched.errors import UsageError

VARIABLE = "GPUSCHED_CRASH_AT"


@dataclass(slots=True)
class _Moment:
    step: str
    left: int


def crash_step(text: str | None) -> Callable[[str], None]:
    """The step callback for this setting. Raises: UsageError for an unknown step."""
    if not text:
        return lambda name: None
    moments: list[_Moment] = []
    for part in text.split(","):
        wanted, _, count = part.partition(":")
        if wanted not in STEPS or not (count or "1").isdigit():
            raise UsageError(f"{VARIABLE}={text!r} is no step", "steps: " + ", ".join(STEPS))
        moments.append(_Moment(wanted, int(count or 1)))

    def step(name: str) -> None:
        moment = moments[0]
        if name != moment.step:
            return
        moment.left -= 1
        if moment.left == 0:
            del moments[0]
            if not moments:
                os.kill(os.getpid(), signal.SIGKILL)

    return step
