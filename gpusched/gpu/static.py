"""Devices that are declared in the settings. Nothing of them can be read: their use is unknown, never 0.

Bookings alone decide what starts on them: processes outside of jobs cannot be seen, and a device counts as free as soon
as its job has ended. Where device nodes are named, one whose node is missing is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.static_gpus import CUDA_VARIABLE, parse_static

NOTE = "the GPUs are declared in [gpu] static: nothing of them is read, and use outside of jobs cannot be seen"


class StaticSource:
    """Args: text: as `parse_static`; variable: that names devices to jobs; device_file: path with `{index}`.

    Raises: ValueError for a text that cannot be read.
    """

    def __init__(
        self,
        text: str,
        variable: str = CUDA_VARIABLE,
        device_file: str | None = None,
        *,
        clock: Callable[[], float] = time.time,
        host: str | None = None,
    ) -> None:
        host = host or os.uname().nodename
        devices = [(group.name, group.vram_mib) for group in parse_static(text) for _ in range(group.count)]
        self._cards = tuple(
            GpuSample(f"STATIC-{host}-{index}", index, name, vram_total_mib=vram_mib, is_declared=True)
            for index, (name, vram_mib) in enumerate(devices)
        )
        self._variable = variable
        self._device_file = device_file
        self._clock = clock

    def read(self) -> GpuReading:
        at = self._clock()
        return GpuReading(at, "static", tuple(map(self._seen, self._cards)), notes=(NOTE,), variable=self._variable)

    def close(self) -> None:
        """Holds nothing."""

    def _seen(self, card: GpuSample) -> GpuSample:
        if self._device_file is None:
            return card
        path = self._device_file.replace("{index}", str(card.index))
        if os.path.exists(path):
            return card
        return GpuSample(card.uuid, card.index, card.name, is_lost=True, error=f"its device file {path} is missing")
