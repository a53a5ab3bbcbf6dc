"""Whether NVIDIA's MPS control daemon runs for a card: what it has left behind, and whether that process lives.

Each card has a control daemon of its own, with its pipes in `FOLDER/UUID`. gpusched starts none: it is for the
administrator to say where there is one. What another user could have put there proves nothing, and jobs would speak to
it: the folder must be of root or of whoever runs this, with nobody else to write there, and so must the file be that
names the process.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gpusched.model.cluster import GpuReading
from gpusched.model.value import replace

if TYPE_CHECKING:
    # As in `choose`: the child process has no use for it.
    from gpusched.ports import GpuSource

PID_FILE = "nvidia-cuda-mps-control.pid"
NAME = "nvidia-cuda-mps"
"""How the kernel calls the control daemon and the servers: a name has 15 characters."""


def is_running(folder: str, proc: str = "/proc") -> bool:
    """Whether a control daemon lives whose pipes are in this folder."""
    if not (_is_ours(os.path.realpath(os.path.dirname(folder))) and _is_ours(folder)):
        return False
    try:
        fd = os.open(os.path.join(folder, PID_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_uid not in (0, os.geteuid()):
            return False
        word = file.read(32).strip()
    if not word.isdigit():
        return False
    try:
        with open(f"{proc}/{int(word)}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip() == NAME
    except OSError:
        return False


def _is_ours(folder: str) -> bool:
    """Whether nobody else can replace what is in it; the sticky bit keeps each to their own."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid()) and not is_shared


class WithMps:
    """A source that also tells of which cards an MPS control daemon runs for."""

    def __init__(self, source: GpuSource, folder: str) -> None:
        self._source = source
        self._folder = folder

    def read(self) -> GpuReading:
        """One reading of the source, with `mps` of each card that is not a part of one."""
        reading = self._source.read()
        gpus = tuple(
            gpu if gpu.mig_parent is not None else replace(gpu, mps=is_running(f"{self._folder}/{gpu.uuid}"))
            for gpu in reading.gpus
        )
        return replace(reading, gpus=gpus)

    def close(self) -> None:
        """Let go of the source."""
        self._source.close()
