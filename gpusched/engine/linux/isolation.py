"""Isolation that a root daemon can apply to its runs on this machine, found by trying it."""

from __future__ import annotations

import os

from gpusched.engine.linux import cgroup, device_rule, proctree
from gpusched.model.cluster import Isolation, Processor

DAEMON_LEAF = "gpusched-daemon"
"""Leaf of the daemon, its fork server and supervisors, so that runs may have sibling leaves."""
_NEEDED = ("memory", "pids")
_MARKS = ("trusted.delegate", "user.delegate")
"""Attributes by which systemd marks a control group as delegated."""


def look(launcher: str) -> Isolation:
    """Probe as a root daemon. Moves all processes of its control group into a leaf when runs are to have leaves.

    Args: launcher: `systemd`, under which each run has its own unit, or `fork`.
    """
    folder: str | None = None
    there = tuple((cgroup.read(cgroup.MOUNT, "cgroup.controllers") or "").split())
    if not cgroup.is_unified():
        trouble: str | None = "this machine does not use control groups version 2 alone"
    elif launcher == "systemd":
        trouble = _missing(there)
    else:
        folder, there, trouble = _own_folder()
    if trouble is not None:
        return Isolation(launcher, why_not=trouble, why_not_devices=trouble)
    # Under systemd the daemon itself is sandboxed and cannot try. Machines with systemd and control groups of version
    # 2 have device rules too, since systemd's own are the same; a run that cannot have one is not started.
    why_not_devices = None if launcher == "systemd" else _why_no_device_rules()
    can_pin = "cpuset" in there
    return Isolation(launcher, is_limited=True, folder=folder, can_pin=can_pin, why_not_devices=why_not_devices)


def _missing(there: tuple[str, ...]) -> str | None:
    missing = [name for name in _NEEDED if name not in there]
    return f"its control groups lack {' and '.join(missing)}" if missing else None


def _own_folder() -> tuple[str | None, tuple[str, ...], str | None]:
    """Return folder and controllers for leaves of runs, or why there can be none."""
    own = cgroup.path_of()
    if own is None:
        return None, (), "the daemon's control group is unknown"
    if os.path.basename(own) == DAEMON_LEAF:
        # It was created by an earlier daemon, beside which this one was started.
        own = os.path.dirname(own)
    is_root = not os.path.exists(f"{own}/cgroup.type")
    if own != cgroup.MOUNT and not _is_delegated(own):
        return (
            None,
            (),
            f"the daemon's control group {own} is not delegated to it; under systemd, let systemd start runs as units",
        )
    if is_root and os.path.exists("/run/systemd/system"):
        return None, (), "the daemon is in the root control group, which systemd manages"
    others = [] if is_root else [pid for pid in cgroup.pids(own) if not _is_ours(pid)]
    if others:
        process = proctree.read_process(others[0])
        who = f"{process.name if process else 'a process'} (pid {others[0]})"
        return None, (), f"the daemon shares its control group with {who}, which it does not move"
    try:
        if not is_root:
            cgroup.move_all(own, f"{own}/{DAEMON_LEAF}")
        on = cgroup.enable(own)
    except OSError as error:
        return None, (), f"the daemon's control group {own} cannot be used: {error.strerror}"
    return own, on, _missing(on)


def _is_delegated(path: str) -> bool:
    for name in _MARKS:
        try:
            if os.getxattr(path, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _is_ours(pid: int) -> bool:
    """Whether it is this process, a descendant, or has ended meanwhile."""
    while pid > 1:
        if pid == os.getpid():
            return True
        process = proctree.read_process(pid)
        if process is None:
            return True
        pid = process.ppid
    return pid == os.getpid()


def _why_no_device_rules() -> str | None:
    """Try to load one."""
    try:
        os.close(device_rule.load(device_rule.program(device_rule.guard_rule({}))))
    except OSError as error:
        return f"the kernel accepts no device rules: {error.strerror or error}"
    return None


def read_processors(sys: str = "/sys/devices/system", allowed: frozenset[int] | None = None) -> tuple[Processor, ...]:
    """Processors that this process may use, with their physical cores and NUMA nodes.

    Args: allowed: ids; this process's own by default.
    """
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0))
    numa: dict[int, int] = {}
    for name in device_rule.names_in(f"{sys}/node"):
        if name.startswith("node") and name[4:].isdigit():
            numa.update(dict.fromkeys(read_list(device_rule.text_in(f"{sys}/node/{name}/cpulist")), int(name[4:])))
    found = []
    for one in sorted(allowed):
        siblings = read_list(device_rule.text_in(f"{sys}/cpu/cpu{one}/topology/thread_siblings_list"))
        found.append(Processor(one, min(siblings, default=one), numa.get(one, 0)))
    return tuple(found)


def pinned_cpus(pid: int) -> tuple[int, ...]:
    """CPUs in the cpuset of a process's control group; empty when none is set."""
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
