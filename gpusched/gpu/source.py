"""Sources of GPU readings: the one chosen by the settings, detection of MPS, and the child process that reads.

A driver call can hang, and a thread stuck in one cannot be ended; a process can. So the daemon starts a child whose
`-c` runs `main(json of a SourceChoice)`: it reads request numbers from stdin, each with the power caps that are wanted
if that is known, and writes readings to stdout. It ends when its stdin closes, so it never outlives the daemon.

NVIDIA's MPS has one control daemon per card, with its pipes in `FOLDER/UUID`. gpusched starts none: that is up to the
administrator. Files that another user could have put there prove nothing, and jobs would connect to that user: the
folder must belong to root or to the user of this process, with no other user able to write there, and so must the file
that names the process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusched.errors import UsageError
from gpusched.gpu.mig_layout import Abandoned, make_layouts
from gpusched.model.cluster import GpuReading
from gpusched.model.mig import MigOrder
from gpusched.model.value import Value, decode, encode, replace

if TYPE_CHECKING:
    # The child process has no use for them, and they are most of what it would import.
    from gpusched.gpu.nvml import NvmlSource
    from gpusched.gpu.power import WithPowerCaps
    from gpusched.gpu.simulated import SimulatedSource
    from gpusched.model.settings import GpuSettings
    from gpusched.ports import GpuSource, PowerLimits

SOCKET = "GPUSCHED_SOCKET"
"""Environment variable of the source's process: socket of the daemon for which it reads."""
FAKE_GPUS = "GPUSCHED_FAKE_GPUS"
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
class SourceChoice:
    """`kind` is `nvml`, `simulated` or `none`; `fake` describes the simulated GPUs."""

    kind: str
    fake: str = ""
    note: str | None = None
    mps_dir: str | None = None
    """Folder of the MPS control daemons, if MPS is enabled."""
    power_file: str | None = None
    """File with the power limits that were changed; None: none is ever changed."""


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
    note = f"simulated GPUs are described but not used: gpu.source is {settings.source}" if fake else None
    return SourceChoice("none" if settings.source == "none" else "nvml", note=note, mps_dir=settings.mps_dir)


def build(choice: SourceChoice, environ: Mapping[str, str]) -> GpuSource:
    """Build the chosen source. Raises: UsageError for an invalid description of simulated GPUs."""
    return _with_limits(choice, environ)[0]


def build_capped(choice: SourceChoice, environ: Mapping[str, str], power_file: str) -> WithPowerCaps:
    """Build the chosen source with power caps. Raises: as `build`."""
    from gpusched.gpu.power import WithPowerCaps

    return WithPowerCaps(*_with_limits(choice, environ), power_file)


def _with_limits(choice: SourceChoice, environ: Mapping[str, str]) -> tuple[GpuSource, PowerLimits | None]:
    """The source, and how it sets power limits if it can."""
    found = _build(choice, environ)
    source: GpuSource = found if choice.mps_dir is None else WithMps(found, choice.mps_dir)
    return source, None if isinstance(found, NoGpus) else found


def _build(choice: SourceChoice, environ: Mapping[str, str]) -> NvmlSource | SimulatedSource | NoGpus:
    if choice.kind == "simulated":
        from gpusched.gpu.simulated import SimulatedSource

        return SimulatedSource(choice.fake, socket=environ.get(SOCKET))
    if choice.kind == "nvml":
        from gpusched.gpu.nvml import NvmlSource

        return NvmlSource(environ)
    return NoGpus()


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


MPS_PID_FILE = "nvidia-cuda-mps-control.pid"
MPS_NAME = "nvidia-cuda-mps"
"""The kernel's name of the control daemon and the servers: at most 15 characters."""


def is_mps_running(folder: str, proc: str = "/proc") -> bool:
    """Whether a live control daemon has its pipes in this folder."""
    if not (_is_ours(os.path.realpath(os.path.dirname(folder))) and _is_ours(folder)):
        return False
    try:
        fd = os.open(os.path.join(folder, MPS_PID_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
            return comm.read().strip() == MPS_NAME
    except OSError:
        return False


def _is_ours(folder: str) -> bool:
    """Whether no other user can replace its content; the sticky bit protects each user's files."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid()) and not is_shared


class WithMps:
    """A source that also reports which GPUs have an MPS control daemon."""

    def __init__(self, source: GpuSource, folder: str) -> None:
        self._source = source
        self._folder = folder

    def read(self) -> GpuReading:
        """Read the source once; sets `mps` on all cards except MIG instances."""
        reading = self._source.read()
        gpus = tuple(
            gpu if gpu.mig_parent is not None else replace(gpu, mps=is_mps_running(f"{self._folder}/{gpu.uuid}"))
            for gpu in reading.gpus
        )
        return replace(reading, gpus=gpus)

    def carry_out(self, orders: Sequence[MigOrder], is_wanted: Callable[[], bool]) -> None:
        make_layouts(self._source, orders, is_wanted)

    def close(self) -> None:
        self._source.close()


STDIN, STDOUT = 0, 1


class ReadRequest(Value):
    """A request for a reading, and what is to be done before it; sent to the child as a line of JSON."""

    request: int
    power_caps: dict[str, float] | None = None
    """Power limits that are wanted, in watts by UUID; None: as they are."""
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
        capped = None if choice.power_file is None else build_capped(choice, os.environ, choice.power_file)
        source = build(choice, os.environ) if capped is None else capped
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
            if capped is not None and asked.power_caps is not None:
                capped.want(asked.power_caps)
            reading = source.read()
            is_last = choice.kind == "nvml" and (reading.source == "none" or reading.error is not None)
            _write(answers, encode(Answer(asked.request, reading, is_last)) + b"\n")
            if is_last:
                break
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
