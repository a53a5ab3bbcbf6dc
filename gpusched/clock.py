"""Clock of the daemon and of agents: the time of day, advanced by CLOCK_BOOTTIME, which cannot be set.

Begin times, deadlines, backoffs and reservations are instants of the time of day, and a machine's clock can jump:
somebody mistypes a date, a time server is wrong for a moment, a machine boots with a flat battery. What a jump makes
due cannot be taken back, so one counts only once it has lasted. Time while the machine is suspended has passed, and is
no jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gpusched.model.units import format_duration

STEP_S = 1.0
"""Corrections up to this size, as a time server makes them all the time, are followed at once."""
ADOPTED_AFTER_S = 60.0
"""How long a jump has to last until it counts as a correction."""


def since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class _Jump:
    ahead_s: float
    seen_s: float
    """Since boot."""


class SystemClock:
    """UTC epoch seconds.

    Args: wall: the time of day; since_boot: seconds, the time suspended included; tell: what is told of jumps.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        since_boot: Callable[[], float] = since_boot_s,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._wall = wall
        self._since_boot = since_boot
        self._tell = tell
        self._boot_at = wall() - since_boot()
        self._jump: _Jump | None = None

    def now(self) -> float:
        passed_s = self._since_boot()
        ahead_s = self._wall() - passed_s - self._boot_at
        if abs(ahead_s) <= STEP_S:
            self._boot_at += ahead_s
            if self._jump is not None:
                self._tell("the clock of this machine is right again")
                self._jump = None
        elif self._has_lasted(ahead_s, passed_s):
            self._tell(f"the clock of this machine stays {_words(ahead_s)}: following it")
            self._boot_at += ahead_s
            self._jump = None
        return passed_s + self._boot_at

    def _has_lasted(self, ahead_s: float, passed_s: float) -> bool:
        jump = self._jump
        if jump is None or abs(ahead_s - jump.ahead_s) > STEP_S:
            self._jump = _Jump(ahead_s, passed_s)
            unless = f"not followed unless it stays so for {format_duration(ADOPTED_AFTER_S)}"
            self._tell(f"the clock of this machine has jumped and is {_words(ahead_s)}: {unless}")
            return False
        return passed_s - jump.seen_s >= ADOPTED_AFTER_S


def _words(ahead_s: float) -> str:
    # The two clocks are not read at the same instant.
    return f"{format_duration(round(abs(ahead_s)))} {'ahead' if ahead_s > 0 else 'behind'}"
