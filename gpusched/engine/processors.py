"""The processors of this machine, as /sys tells of them."""

from __future__ import annotations

import os

from gpusched.engine import cgroup
from gpusched.model.cluster import Processor


def read_processors(sys: str = "/sys/devices/system", allowed: frozenset[int] | None = None) -> tuple[Processor, ...]:
    """Those that this process may use, with their physical cores and NUMA nodes.

    Args: allowed: ids; this process's own by default.
    """
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0))
    numa: dict[int, int] = {}
    for name in _names(f"{sys}/node"):
        if name.startswith("node") and name[4:].isdigit():
            numa.update(dict.fromkeys(read_list(_text(f"{sys}/node/{name}/cpulist")), int(name[4:])))
    found = []
    for one in sorted(allowed):
        siblings = read_list(_text(f"{sys}/cpu/cpu{one}/topology/thread_siblings_list"))
        found.append(Processor(one, min(siblings, default=one), numa.get(one, 0)))
    return tuple(found)


def pinned_cpus(pid: int) -> tuple[int, ...]:
    """The processors that the control group of a process was given as its own; empty when it was given none."""
    folder = cgroup.path_of(pid)
    return () if folder is None else tuple(read_list(cgroup.read(folder, "cpuset.cpus") or ""))


def read_list(text: str) -> list[int]:
    """`0-3,8` as ids."""
    ids: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit():
            ids += range(int(low), int(high or low) + 1)
    return ids


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
