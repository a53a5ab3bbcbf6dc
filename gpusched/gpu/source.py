"""Sources of GPU readings: the one chosen by the settings, and the child process that reads.

A driver call can hang, and a thread stuck in one cannot be ended; a process can. So the daemon starts a child whose
`-c` runs `main(json of a SourceChoice)`: it reads request numbers from stdin, each with what the cards are to be like
if that is known, and writes readings to stdout. It ends when its stdin closes, so it never outlives the daemon.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpusched.clock import SystemClock
from gpusched.errors import UsageError
from gpusched.gpu.mig_layout import Abandoned, make_layouts
from gpusched.model.cluster import GpuReading, GpuTargets
from gpusched.model.mig import MigOrder
from gpusched.model.static_gpus import CUDA_VARIABLE
from gpusched.model.value import Value, decode, encode, replace

if TYPE_CHECKING:
    # The child process has no use for them, and they are most of what it would import.
    from gpusched.model.settings import GpuSettings
    from gpusched.ports import GpuSource

SOCKET = "GPUSCHED_SOCKET"
"""Environment variable of the source's process: socket of the daemon for which it reads."""
MPS_FOLDER = "mps"
"""Name of the folder of the MPS control daemons of runs."""
Want = Callable[[GpuTargets], None]
FAKE_GPUS = "GPUSCHED_FAKE_GPUS"
SOURCES = ("auto", "nvml", "amdsmi", "simulated", "static", "none")

_NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_SIGNS = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/dev/dxg",  # Windows Subsystem for Linux: no PCI device and no nvidiactl
    "/dev/nvmap",  # Jetson: the GPU is not a PCI device
    "/sys/module/nvidia",
)


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """`kind` is `auto`, `nvml`, `amdsmi`, `simulated`, `static` or `none`; `fake` describes the simulated GPUs."""

    kind: str
    fake: str = ""
    static: tuple[str, str, str | None] | None = None
    """Arguments of a `StaticSource`."""
    note: str | None = None
    mps_dir: str | None = None
    """Folder of the MPS control daemons, if MPS is enabled."""
    folder: str | None = None
    """Where it is recorded what was changed for runs; None: nothing is ever changed."""


class NoGpus:
    def read(self) -> GpuReading:
        return GpuReading(time.time(), "none")

    def close(self) -> None:
        """Holds nothing."""


def choose(settings: GpuSettings, environ: Mapping[str, str]) -> SourceChoice:
    """Choose the source by the settings. GPUSCHED_FAKE_GPUS overrides the file's `fake`.

    Raises: UsageError for an unknown source, or for simulated GPUs without a description.
    """
    fake = (environ.get(FAKE_GPUS) or settings.fake or "").strip()
    if settings.source not in SOURCES:
        raise UsageError(
            f"the GPU source {settings.source!r} is unknown", f"gpu.source is one of: {', '.join(SOURCES)}"
        )
    if settings.source == "simulated" and not fake:
        raise UsageError("simulated GPUs are configured, but not described", f"for example: {FAKE_GPUS}=4x24GiB")
    if settings.source in ("auto", "simulated") and fake:
        from gpusched.gpu.simulated import is_path

        # The child that reads the file has another working directory.
        return SourceChoice("simulated", os.path.abspath(fake) if is_path(fake) else fake, mps_dir=settings.mps_dir)
    if settings.source == "static" and settings.static is None:
        raise UsageError("static GPUs are configured, but not declared", 'for example: [gpu] static = "2xnpu:16GiB"')
    if settings.source in ("auto", "static") and settings.static is not None:
        declared = settings.static, settings.static_variable or CUDA_VARIABLE, settings.static_device
        return SourceChoice("static", static=declared, mps_dir=settings.mps_dir)
    note = f"simulated GPUs are described but not used: gpu.source is {settings.source}" if fake else None
    return SourceChoice(settings.source, note=note, mps_dir=settings.mps_dir)


def build(choice: SourceChoice, environ: Mapping[str, str]) -> tuple[GpuSource, Want]:
    """Build the chosen source, and how to say what its cards are to be like.

    Raises: UsageError for an invalid description of simulated GPUs.
    """
    from gpusched.gpu.mps import WithMps
    from gpusched.gpu.power import WithPowerCaps

    found, folder = _build(choice, environ), choice.folder
    mps = WithMps(found, choice.mps_dir, None if folder is None else os.path.join(folder, MPS_FOLDER))
    if folder is None:
        return mps, lambda targets: mps.want(targets.mps)
    # AMD's limits are read, and not set; declared devices have none.
    limits: Any = found if hasattr(found, "set_power_limit") else None
    capped = WithPowerCaps(mps, limits, os.path.join(folder, "power-limits.json"))

    def want(targets: GpuTargets) -> None:
        mps.want(targets.mps)
        capped.want(targets.power_caps)

    return capped, want


def _build(choice: SourceChoice, environ: Mapping[str, str]) -> GpuSource:
    # As the daemon's, which ages readings: a jump makes none of them old.
    clock = SystemClock().now
    if choice.kind == "simulated":
        from gpusched.gpu.simulated import SimulatedSource

        return SimulatedSource(choice.fake, clock, socket=environ.get(SOCKET))
    if choice.kind == "none":
        return NoGpus()
    if choice.kind == "amdsmi" or (choice.kind == "auto" and vendor_here() == "amdsmi"):
        from gpusched.gpu.amd import AmdSource

        return AmdSource(environ, is_wanted=choice.kind == "amdsmi", clock=clock)
    if choice.static is not None:
        from gpusched.gpu.static import StaticSource

        return StaticSource(*choice.static, clock=clock)
    from gpusched.gpu.nvml import NvmlSource

    return NvmlSource(environ, clock=clock)


def vendor_here(root: str = "/") -> str:
    """The source for the hardware that shows traces here: NVIDIA's first, since a processor may have AMD graphics."""
    return "nvml" if nvidia_signs(root) or not amd_signs(root) else "amdsmi"


def signs(root: str = "/") -> tuple[str, ...]:
    """Traces of GPUs that a source could read, or of their drivers."""
    return (*nvidia_signs(root), *amd_signs(root))


def amd_signs(root: str = "/") -> tuple[str, ...]:
    """Traces of AMD hardware that can compute: its driver's node for that. Looks at files only."""
    path = "/dev/kfd"
    return (path,) if os.path.exists(os.path.join(root, path[1:])) else ()


def nvidia_signs(root: str = "/") -> tuple[str, ...]:
    """Traces of NVIDIA hardware or its driver on this machine; empty when querying the driver is pointless.

    Looks at files only. PCI devices count even without a driver: NVML may load it.
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


STDIN, STDOUT = 0, 1
_DRIVERS = ("auto", "nvml", "amdsmi")
"""Kinds that ask a driver, which is not kept open in vain."""


class ReadRequest(Value):
    """A request for a reading, and what is to be done before it; sent to the child as a line of JSON."""

    request: int
    targets: GpuTargets | None = None
    """What the cards are to be like; None: as they are."""
    mig_orders: tuple[MigOrder, ...] = ()


class Answer(Value):
    """One reading and the request it answers; sent to the daemon as a line of JSON."""

    request: int
    reading: GpuReading
    is_last: bool = False
    """The child ends after this one: there is no driver to keep open."""


def main(argument: str) -> None:
    """Serve the source described by `argument` until stdin closes."""
    # Ctrl-C in the terminal of a foreground daemon reaches its children too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    choice = SourceChoice(**json.loads(argument))
    # The C library may print to stdout; answers keep the pipe for themselves.
    answers = os.dup(STDOUT)
    os.dup2(2, STDOUT)
    _write(answers, b"\n")
    try:
        source, want = build(choice, os.environ)
        wanted = GpuTargets()
    except UsageError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(error.exit_code)
    try:
        for line in sys.stdin.buffer:
            asked = decode(line, ReadRequest)
            try:
                make_layouts(source, asked.mig_orders, _has_daemon)
            except Abandoned:
                break
            if asked.targets is not None:
                wanted = asked.targets
                want(wanted)
            reading = replace(source.read(), targets=wanted.number)
            is_last = choice.kind in _DRIVERS and (reading.source == "none" or reading.error is not None)
            _write(answers, encode(Answer(asked.request, reading, is_last)) + b"\n")
            if is_last:
                break
    except BrokenPipeError:
        # Whoever asked is gone, and its standard error may be read for why.
        pass
    finally:
        source.close()


def _has_daemon() -> bool:
    """Whether the other end of stdin is open: two processes must not change one card."""
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    return not any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
