"""What systemd is told of a run's cage. Pure.

Most of the cage is not systemd's: the supervisor, the unit's main process, keeps the job in a leaf of the unit's
delegated control group and sets the limits there (`cage`, `cgroup`), so that what ends the job for want of memory never
ends the supervisor, and so that limits and device rules are the same under both launchers. Only what counts between
units is said here, and that systemd leaves the rest alone.
"""

from __future__ import annotations

from typing import Any

from gpusched.model.execution import Cage

UNLIMITED = (1 << 64) - 1
"""systemd's `infinity`."""

Property = tuple[str, tuple[str, Any]]
"""Name, and D-Bus signature with value, as StartTransientUnit takes them."""


def unit_properties(cage: Cage | None) -> list[Property]:
    """Properties of the transient unit of a run; those of a run without a cage keep systemd's hands off it as well."""
    properties: list[Property] = [
        # The first process that the kernel kills for want of memory would have systemd end the whole unit, and its
        # supervisor with it, which is to report just that.
        ("OOMPolicy", ("s", "continue")),
        # The default counts the supervisor's tasks and those of the job alike, and is none of the site's choice.
        ("TasksMax", ("t", UNLIMITED)),
    ]
    if cage is not None:
        properties += [("Delegate", ("b", True)), ("CPUWeight", ("t", cage.cpu_weight))]
    return properties
