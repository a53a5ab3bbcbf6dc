"""What the machine says of itself: architecture, system, load, start."""

from __future__ import annotations

import functools
import os
from typing import Any


def machine_json() -> dict[str, Any]:
    """The keys of a node that come from the kernel; `load_average` is of the last minute, `boot_at` may be null."""
    return {**_fixed(), "load_average": os.getloadavg()[0]}


@functools.cache
def _fixed() -> dict[str, Any]:
    kernel = os.uname()
    return {
        "architecture": kernel.machine,
        "system": f"{kernel.sysname} {kernel.release} {kernel.version}",
        "boot_at": _boot_at(),
    }


def _boot_at() -> int | None:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("btime ")), None)
    except (OSError, ValueError):
        return None
