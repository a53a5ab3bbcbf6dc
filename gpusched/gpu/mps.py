"""Whether NVIDIA's MPS control daemon runs for a card: what it has left behind, and whether that process lives.

Each card has a control daemon of its own, with its pipes in `FOLDER/UUID`. gpusched starts none: it is for the
administrator to say where there is one. A folder that anybody may write to proves nothing, so the file that names the
process must be of root or of whoever runs this.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from gpusched.model.cluster import GpuReading

if TYPE_CHECKING:
    # As in `choose`: the child process has no use for it.
    from gpusched.ports import GpuSource

PID_FILE = "nvidia-cuda-mps-control.pid"
NAME = "nvidia-cuda-mps"
"""How the kernel calls the control daemon and the servers: a name has 15 characters."""


def is_running(folder: str, proc: str = "/proc") -> bool:
    """Whether a control daemon lives whose pipes are in this folder."""
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
