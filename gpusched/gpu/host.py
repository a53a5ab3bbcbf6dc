"""Measured load of this node: CPU, memory, disk and network, by psutil."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from math import inf

import psutil

from gpusched.model.cluster import HostSample
from gpusched.model.container import RUNTIMES
from gpusched.model.settings import NodeSettings

_MIB = 1 << 20
_SEARCH_S = 10.0
"""Interval between searches for container runtimes, which are seldom installed."""


class PsutilHost:
    """Samples the node. Nothing here scans processes, so a sample takes a fraction of a millisecond.

    Only physical disks and network cards count, so that traffic through a RAID, a bridge or a
    container's virtual card counts once. `cpus` and memory are the physical amounts; the settings may make
    other amounts available.

    Args: folder: of this gpusched's files, for the machine's identity; None leaves that unknown.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        folder: str | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = settings.name or socket.gethostname().split(".")[0] or "localhost"
        self._clock = clock
        self._monotonic = monotonic
        self._boot_id, self._boot_at = _boot_id(), _boot_at()
        self._kernel = os.uname()
        self._identity = "" if folder is None else machine_identity(folder)
        self._cards: tuple[frozenset[str], frozenset[str]] | None = None
        self._before: tuple[float, tuple[float, float], int | None, int | None] | None = None
        self._found: tuple[str, ...] = ()
        self._next_search = -inf

    def read(self) -> HostSample:
        """Return one sample; rates cover the time since the previous call and are None in the first."""
        now = self._monotonic()
        memory = psutil.virtual_memory()
        times, disk, net = _cpu_times(), _disk_bytes(), self._net_bytes()
        cpu_fraction = disk_mib_s = net_mib_s = None
        if self._before is not None and now > self._before[0]:
            then, times_before, disk_before, net_before = self._before
            busy_s, total_s = times[0] - times_before[0], times[1] - times_before[1]
            if total_s > 0:
                cpu_fraction = min(1.0, max(0.0, busy_s / total_s))
            disk_mib_s = _rate(disk, disk_before, now - then)
            net_mib_s = _rate(net, net_before, now - then)
        self._before = now, times, disk, net
        return HostSample(
            at=self._clock(),
            name=self._name,
            cpus=len(os.sched_getaffinity(0)),
            mem_total_mib=memory.total // _MIB,
            mem_available_mib=memory.available // _MIB,
            cpu_fraction=cpu_fraction,
            disk_mib_s=disk_mib_s,
            net_mib_s=net_mib_s,
            boot_id=self._boot_id,
            boot_at=self._boot_at,
            load_average=os.getloadavg()[0],
            architecture=self._kernel.machine,
            system=f"{self._kernel.sysname} {self._kernel.release} {self._kernel.version}",
            runtimes=self._runtimes(now),
            identity=self._identity,
        )

    def _runtimes(self, now: float) -> tuple[str, ...]:
        """Paths of the container runtimes; each look tries all folders of PATH."""
        if now >= self._next_search:
            self._next_search = now + _SEARCH_S
            self._found = tuple(path for name in RUNTIMES if (path := shutil.which(name)) is not None)
        return self._found

    def _net_bytes(self) -> int | None:
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        names = frozenset(counters) - {"lo"}
        if self._cards is None or self._cards[0] != names:
            physical = frozenset(name for name in names if os.path.exists(f"/sys/class/net/{name}/device"))
            # A container has virtual cards only, and those are then all there is.
            self._cards = names, physical or names
        return sum(counters[name].bytes_sent + counters[name].bytes_recv for name in self._cards[1])


def _cpu_times() -> tuple[float, float]:
    """(busy, all) CPU seconds of all cores since boot. `user` already includes guests' time."""
    times = psutil.cpu_times()
    everything = sum(times) - times.guest - times.guest_nice
    return everything - times.idle - times.iowait, everything


def _disk_bytes() -> int | None:
    counters = psutil.disk_io_counters(nowrap=False)
    return None if counters is None else int(counters.read_bytes + counters.write_bytes)


def _rate(amount: int | None, before: int | None, elapsed_s: float) -> float | None:
    if amount is None or before is None:
        return None
    # A disk or card that was removed takes its count away.
    return max(0, amount - before) / _MIB / elapsed_s


def machine_identity(folder: str) -> str:
    """A digest of what two names of one machine have in common; empty where the kernel does not tell.

    No part says enough alone: clones of a disk have one machine id, containers of a machine one boot id, and machines
    may share a home. The network and host name tell containers apart, and the folder those who try several nodes on
    one machine, each with files of its own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        network = os.stat("/proc/self/ns/net")
        home = os.stat(folder)
    except OSError:
        return ""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            machine_id = file.read().strip()
    except (OSError, ValueError):
        machine_id = ""
    parts = machine_id, boot_id, socket.gethostname(), network.st_ino, home.st_dev, home.st_ino
    # The manual of machine-id asks not to hand it out as it is.
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:32]


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def _boot_at() -> int | None:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("btime ")), None)
    except (OSError, ValueError):
        return None
