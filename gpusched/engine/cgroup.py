"""Control groups of version 2: finding one's own, making leaves, limits, and what the kernel has counted.

Source: Documentation/admin-guide/cgroup-v2.rst of the kernel.
"""

from __future__ import annotations

import os
import time

MOUNT = "/sys/fs/cgroup"
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_PAUSE_S = (0.001, 0.05)


def is_unified() -> bool:
    """Whether version 2 is mounted where it belongs, and not version 1 or both."""
    return os.path.exists(f"{MOUNT}/cgroup.controllers")


def path_of(pid: int | None = None) -> str | None:
    """The folder of the control group that a process is in, oneself by default; None when that cannot be told."""
    try:
        with open(f"/proc/{'self' if pid is None else pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if line.startswith("0::/"):
                    return (MOUNT + line[3:].rstrip("\n")).rstrip("/")
    except OSError:
        pass
    return None


def read(path: str, name: str) -> str | None:
    """A file of a control group; None when it is not there, as with an older kernel."""
    try:
        with open(f"{path}/{name}", encoding="ascii") as file:
            return file.read()
    except OSError:
        return None


def write(path: str, name: str, value: object) -> None:
    """Set a file of a control group. Raises: OSError."""
    # In one write, without which the kernel would take the parts for values of their own.
    fd = os.open(f"{path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def number(path: str, name: str, key: str | None = None) -> int | None:
    """The number in a file, or that behind a key in a file of many; None when there is none."""
    for line in (read(path, name) or "").splitlines():
        words = line.split()
        if key is None and len(words) == 1 and words[0].isdigit():
            return int(words[0])
        if len(words) == 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def pids(path: str) -> list[int]:
    """Who is in it, but not in what is below it."""
    return [int(word) for word in (read(path, "cgroup.procs") or "").split()]


def enable(path: str) -> tuple[str, ...]:
    """Hand every controller that there is on to the leaves below; which those are. Raises: OSError."""
    there = (read(path, "cgroup.controllers") or "").split()
    wanted = tuple(name for name in CONTROLLERS if name in there)
    on = (read(path, "cgroup.subtree_control") or "").split()
    missing = [name for name in wanted if name not in on]
    if missing:
        write(path, "cgroup.subtree_control", " ".join(f"+{name}" for name in missing))
    return wanted


def move_all(path: str, leaf: str) -> None:
    """Move everybody into a leaf, which is made: who hands on controllers may hold no process. Raises: OSError."""
    os.makedirs(leaf, mode=0o755, exist_ok=True)
    for _ in range(100):
        there = pids(path)
        if not there:
            return
        for pid in there:
            try:
                write(leaf, "cgroup.procs", pid)
            except ProcessLookupError:
                # It has ended meanwhile.
                continue


def is_populated(path: str) -> bool:
    """Whether any process lives in it or below it."""
    return number(path, "cgroup.events", "populated") == 1


def kill(path: str) -> None:
    """KILL everything in it at once, also what forks at this moment; a kernel before 5.14 has no such order."""
    try:
        write(path, "cgroup.kill", 1)
    except FileNotFoundError:
        for pid in pids(path):
            try:
                os.kill(pid, 9)
            except (ProcessLookupError, PermissionError):
                pass
    except OSError:
        pass


def remove(path: str, patience_s: float = 5.0) -> bool:
    """End whoever is left in it and remove it; False when that did not work within this time."""
    until, pause_s = time.monotonic() + patience_s, _PAUSE_S[0]
    while True:
        if is_populated(path):
            kill(path)
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > until:
                return False
        else:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])
