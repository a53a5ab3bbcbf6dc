"""CPU time of a whole run, from outside: its living processes and those that they have outlived.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

import os

from gpusched.engine import proctree

_TICKS_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14
"""Fields after the name of the process."""


def tree_cpu_s(root: int, *, with_root: bool = False) -> float | None:
    """CPU time in seconds of everything that is or was below `root`; None when it is gone. Its own only when asked for.

    What ends during the walk may be missed or counted twice, by as much as it used since it was born.
    """
    times = _times(root)
    if times is None:
        return None
    total = sum(times if with_root else times[2:])
    try:
        pids = list(proctree.descendants(root))
    except OSError:
        return None
    for pid in pids:
        found = _times(pid)
        if found is not None:
            total += sum(found)
    return total / _TICKS_S


def own_cpu_s(pid: int) -> float:
    """CPU time in seconds of one process, without its children's; 0 when it is gone."""
    times = _times(pid)
    return 0.0 if times is None else (times[0] + times[1]) / _TICKS_S


def _times(pid: int) -> tuple[int, int, int, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None
    rest = data[data.rfind(b")") + 2 :].split()
    return int(rest[_UTIME]), int(rest[_STIME]), int(rest[_CUTIME]), int(rest[_CSTIME])
