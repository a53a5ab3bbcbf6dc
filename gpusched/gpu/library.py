"""Whether the files of the NVIDIA driver are still those that are loaded.

An update replaces the library and leaves the kernel module: what is loaded goes on, and every new process is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

LOOK_S = 30.0
"""Between two looks at the file."""

_NAME = "libnvidia-ml.so"
_VERSION = re.compile(r"Kernel Module\s.*?\s(\d+(?:\.\d+)+)\s")

Stamp = tuple[int, int, int]


@dataclass(slots=True)
class LibraryFile:
    """The file of NVML that this process has loaded, as it was then."""

    path: str
    stamp: Stamp
    looked_at: float = float("-inf")

    @classmethod
    def of_this_process(cls, maps: str = "/proc/self/maps") -> LibraryFile | None:
        """None when it is not known."""
        try:
            with open(maps, encoding="utf-8", errors="surrogateescape") as file:
                paths = [line.split(None, 5)[5].rstrip("\n") for line in file if _NAME in line]
        except (OSError, IndexError):
            return None
        stamp = _stamp(paths[0]) if paths else None
        return None if stamp is None else cls(paths[0], stamp)

    def was_replaced(self, now: float) -> bool:
        """Whether the file is gone or another one. Args: now: monotonic seconds."""
        if now - self.looked_at < LOOK_S:
            return False
        self.looked_at = now
        return _stamp(self.path) != self.stamp


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def loaded_version(path: str = "/proc/driver/nvidia/version") -> str | None:
    """Version of the kernel module; None when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _VERSION.search(file.read())
    except OSError:
        return None
    return found[1] if found else None
