"""Which source of GPUs to use, from settings and environment.

A choice is plain data, so that it can be handed to the child process that builds the source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusched.errors import UsageError
from gpusched.model.cluster import GpuReading

if TYPE_CHECKING:
    # The child process has no use for them, and they are most of what it would import.
    from gpusched.model.settings import GpuSettings
    from gpusched.ports import GpuSource

SOCKET = "GPUSCHED_SOCKET"
"""Environment variable of the source's process: the socket of the daemon that it reads for."""
VARIABLE = "GPUSCHED_FAKE_GPUS"
SOURCES = ("auto", "nvml", "simulated", "none")

_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_SIGNS = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/dxg",  # Windows Subsystem for Linux: no PCI device and no nvidiactl
    "/dev/nvmap",  # Jetson: the GPU is no PCI device
    "/sys/module/nvidia",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """`kind` is `nvml`, `simulated` or `none`; `fake` describes the simulated GPUs."""

    kind: str
    fake: str = ""
    note: str | None = None
    mps_dir: str | None = None
    """Where the MPS control daemons have their folders, if there is to be MPS."""


class NoGpus:
    """The source of a machine without GPUs."""

    def read(self) -> GpuReading:
        """An empty reading."""
        return GpuReading(time.time(), "none")

    def close(self) -> None:
        """Nothing is held."""


def choose(settings: GpuSettings, environ: Mapping[str, str]) -> Choice:
    """What the settings ask for. The environment's GPUSCHED_FAKE_GPUS comes before the file's `fake`.

    Raises: UsageError for an unknown source, or for simulated GPUs without a description.
    """
    fake = (environ.get(VARIABLE) or settings.fake or "").strip()
    if settings.source not in SOURCES:
        raise UsageError(
            f"the GPU source {settings.source!r} is unknown", f"gpu.source is one of: {', '.join(SOURCES)}"
        )
    if settings.source == "simulated" and not fake:
        raise UsageError("simulated GPUs are asked for, but not described", f"for example: {VARIABLE}=4x24GiB")
    if settings.source in ("auto", "simulated") and fake:
        from gpusched.gpu.simulated import is_path

        # The child that reads the file has another working directory.
        return Choice("simulated", os.path.abspath(fake) if is_path(fake) else fake, mps_dir=settings.mps_dir)
    note = f"simulated GPUs are described but not used: gpu.source is {settings.source}" if fake else None
    return Choice("none" if settings.source == "none" else "nvml", note=note, mps_dir=settings.mps_dir)


def build(choice: Choice, environ: Mapping[str, str]) -> GpuSource:
    """The chosen source. Raises: UsageError when the simulated GPUs cannot be understood."""
    source = _build(choice, environ)
    if choice.mps_dir is None:
        return source
    from gpusched.gpu.mps import WithMps

    return WithMps(source, choice.mps_dir)


def _build(choice: Choice, environ: Mapping[str, str]) -> GpuSource:
    if choice.kind == "simulated":
        from gpusched.gpu.simulated import SimulatedSource

        return SimulatedSource(choice.fake, socket=environ.get(SOCKET))
    if choice.kind == "nvml":
        from gpusched.gpu.nvml import NvmlSource

        return NvmlSource(environ)
    return NoGpus()


def nvidia_signs(root: str = "/") -> tuple[str, ...]:
    """Traces of NVIDIA hardware or its driver on this machine; empty when asking the driver is no use.

    Looks at files only. The PCI devices count also without a driver: NVML may load it.
    """
    found = [path for path in _SIGNS if os.path.exists(os.path.join(root, path[1:]))]
    devices = os.path.join(root, "sys/bus/pci/devices")
    try:
        names = sorted(os.listdir(devices))
    except OSError:
        names = []
    found.extend(name for name in names if _is_nvidia_gpu(os.path.join(devices, name)))
    return tuple(found)


def _is_nvidia_gpu(device: str) -> bool:
    return _head(device, "vendor").startswith(_NVIDIA_VENDOR) and _head(device, "class").startswith(_DISPLAY_CLASS)


def _head(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="ascii", errors="replace") as file:
            return file.read(16)
    except OSError:
        return ""
