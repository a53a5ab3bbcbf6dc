"""Processes and host memory from /proc, without psutil, to keep the child process small."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from contextlib import suppress

from gpusched.model.cluster import GpuProcess

_MIB_PER_KIB = 1 / 1024
_users: dict[int, str] = {}
_boot: list[float] = []


def is_alive(pid: int) -> bool:
    """Whether the pid exists here, even if hidden: /proc may hide other users' processes, signals do not."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def describe(pid: int, vram_mib: int | None) -> GpuProcess:
    """Describe the process by user, start and name, as far as visible."""
    folder = f"/proc/{pid}"
    try:
        user = user_name(os.stat(folder).st_uid)
        with open(f"{folder}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return GpuProcess(pid, vram_mib)
    # The name is in brackets and may have any byte, brackets and blanks too.
    name = stat[stat.index(b"(") + 1 : stat.rindex(b")")].decode("utf-8", "replace")
    start_ticks = int(stat[stat.rindex(b")") + 2 :].split()[19])
    started_at = _boot_at() + start_ticks / os.sysconf("SC_CLK_TCK")
    return GpuProcess(pid, vram_mib, user, started_at, name)


def openers(paths: Collection[str], root: str = "/proc") -> dict[str, tuple[int, ...]]:
    """Pids of the processes that have each of these device files open, except this one.

    Only root sees those of other users.
    """
    found: dict[str, set[int]] = {path: set() for path in paths}
    me = os.getpid()
    for entry in os.listdir(root):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            names = os.listdir(f"{root}/{entry}/fd")
        except OSError:
            continue  # ended, or not ours to see
        for name in names:
            with suppress(OSError):
                target = os.readlink(f"{root}/{entry}/fd/{name}")
                if target in found:
                    found[target].add(int(entry))
    return {path: tuple(sorted(pids)) for path, pids in found.items()}


def processes_of_jobs(socket: str | None, root: str = "/proc") -> dict[int, int]:
    """The oldest process of each job, according to the processes' environment.

    Args: socket: only jobs of the daemon that listens there. Only root sees processes of other users.
    """
    found: dict[int, int] = {}
    for pid in sorted(int(entry) for entry in os.listdir(root) if entry.isdigit()):
        try:
            with open(f"{root}/{pid}/environ", "rb") as file:
                words = dict(word.partition(b"=")[::2] for word in file.read().split(b"\0"))
        except OSError:
            continue  # ended, or not ours to see
        job = words.get(b"GPUSCHED_JOB_ID", b"")
        if job.isdigit() and (socket is None or os.fsdecode(words.get(b"GPUSCHED_SOCKET", b"")) == socket):
            found.setdefault(int(job), pid)
    return found


def user_name(uid: int) -> str:
    """Name of a user, or its number; cached, since the directory may be a slow network service."""
    if uid not in _users:
        try:
            _users[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            _users[uid] = str(uid)
    return _users[uid]


def host_memory_mib() -> tuple[int, int] | None:
    """(MemTotal, MemAvailable) in MiB."""
    found = {}
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                key, _, rest = line.partition(b":")
                if key in (b"MemTotal", b"MemAvailable"):
                    found[key] = int(int(rest.split()[0]) * _MIB_PER_KIB)
        return found[b"MemTotal"], found[b"MemAvailable"]
    except (OSError, KeyError, ValueError):
        return None


def _boot_at() -> float:
    # Read once: the kernel works it out from the wall clock, so it wavers by a second, and start
    # times must stay equal from one reading to the next.
    if not _boot:
        with open("/proc/stat", "rb") as file:
            _boot.extend(float(line.split()[1]) for line in file if line.startswith(b"btime "))
    return _boot[0]
