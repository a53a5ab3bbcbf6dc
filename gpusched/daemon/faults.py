"""Dying on purpose: a test names a step of the tick and the daemon kills itself there, as `kill -9` would.

`GPUSCHED_CRASH_AT=commit:3` dies before the third `commit`, `commit:3,reconcile` after it, before the next `reconcile`;
`reply:2:raise` raises an error there instead, as a bug would, and goes on. Without the variable there is no hook.

`GPUSCHED_CHECK_EVERY=1` has the planner and the memory compared with the job table after every tick, `20` after every
20th; what differs is in the log and in `gpusched doctor`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from gpusched.daemon.tick import STEPS
from gpusched.errors import UsageError

VARIABLE = "GPUSCHED_CRASH_AT"
CHECK_VARIABLE = "GPUSCHED_CHECK_EVERY"


@dataclass(slots=True)
class _Moment:
    step: str
    left: int
    raises: bool


def crash_step(text: str | None) -> Callable[[str], None]:
    """The step callback for this setting. Raises: UsageError for an unknown step."""
    if not text:
        return lambda name: None
    moments: list[_Moment] = []
    for part in text.split(","):
        wanted, *how = part.split(":")
        raises = how[-1:] == ["raise"]
        count = ":".join(how[: len(how) - raises]) or "1"
        if wanted not in STEPS or not count.isdigit():
            raise UsageError(f"{VARIABLE}={text!r} is no step", "steps: " + ", ".join(STEPS))
        moments.append(_Moment(wanted, int(count), raises))

    def step(name: str) -> None:
        if not moments or name != moments[0].step:
            return
        moments[0].left -= 1
        if moments[0].left:
            return
        moment = moments.pop(0)
        if moment.raises:
            raise RuntimeError(f"{VARIABLE}: {name}")
        if not moments:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def check_every(text: str | None) -> int:
    """After how many ticks the planner is compared with the table; 0: never. Raises: UsageError."""
    if not text:
        return 0
    if not text.isdigit():
        raise UsageError(f"{CHECK_VARIABLE}={text!r} is no number of ticks", "give a whole number, 1 for every tick")
    return int(text)
