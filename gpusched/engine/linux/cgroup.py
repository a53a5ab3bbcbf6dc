"""Control groups v2: locating one's own, leaves, limits and kernel counters; and the control group of a run.

A run's control group is a leaf with limits and a device rule, created by the supervisor as root. Under systemd it is
`job` in the run's own unit, beside the supervisor's `supervisor`; under the fork launcher it is `gpusched-JOB.RUN`
in the folder named by the ticket. The supervisor always stays outside, so that it survives to report a job that was
killed for lack of memory or tasks.

Source: Documentation/admin-guide/cgroup-v2.rst of the kernel.
"""

from __future__ import annotations

import os
import time

from gpusched.engine.linux.as_user import LaunchError, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


MOUNT = "/sys/fs/cgroup"
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
_PAUSE_S = (0.001, 0.05)


def is_unified() -> bool:
    """Whether only version 2 is mounted, neither version 1 nor both."""
    return os.path.exists(f"{MOUNT}/cgroup.controllers")


def path_of(pid: int | None = None) -> str | None:
    """Folder of a process's control group, by default of this process; None when unknown."""
    try:
        with open(f"/proc/{'self' if pid is None else pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if line.startswith("0::/"):
                    return (MOUNT + line[3:].rstrip("\n")).rstrip("/")
    except OSError:
        pass
    return None


def read(path: str, name: str) -> str | None:
    """Read a file of a control group; None when it does not exist, as on an older kernel."""
    try:
        with open(f"{path}/{name}", encoding="ascii") as file:
            return file.read()
    except OSError:
        return None


def write(path: str, name: str, value: object) -> None:
    """Set a file of a control group. Raises: OSError."""
    # In one write, without which the kernel would take the parts for separate values.
    fd = os.open(f"{path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def number(path: str, name: str, key: str | None = None) -> int | None:
    """Return the number in a file, or after a key in a keyed file; None without one."""
    for line in (read(path, name) or "").splitlines():
        words = line.split()
        if key is None and len(words) == 1 and words[0].isdigit():
            return int(words[0])
        if len(words) == 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def pids(path: str) -> list[int]:
    """Pids of its processes, excluding those of groups below it."""
    return [int(word) for word in (read(path, "cgroup.procs") or "").split()]


def enable(path: str) -> tuple[str, ...]:
    """Enable all available controllers for the leaves below; returns their names. Raises: OSError."""
    there = (read(path, "cgroup.controllers") or "").split()
    wanted = tuple(name for name in CONTROLLERS if name in there)
    on = (read(path, "cgroup.subtree_control") or "").split()
    missing = [name for name in wanted if name not in on]
    if missing:
        write(path, "cgroup.subtree_control", " ".join(f"+{name}" for name in missing))
    return wanted


def move_all(path: str, leaf: str) -> None:
    """Move every process into a new leaf: a group that delegates controllers may hold none. Raises: OSError."""
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
    """Whether it or any group below it contains a process."""
    return number(path, "cgroup.events", "populated") == 1


def kill(path: str) -> None:
    """KILL everything in it at once, including processes being forked; kernels before 5.14 lack this."""
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
    """Kill the remaining processes and remove it; False when that did not succeed within this time."""
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


PEAK_LOOK_S = 1.0
"""Interval between samples of memory in use, on kernels that do not record its peak (before 5.19)."""
SUPERVISOR_LEAF = "supervisor"
JOB_LEAF = "job"


def leaf_of(folder: str, run: str) -> str:
    """Control group of a run under the fork launcher."""
    return f"{folder}/gpusched-{run}"


def split_own_cgroup() -> str:
    """Split this process's control group into leaves; returns its folder. For a unit's main process.

    Raises: OSError; LaunchError without version 2.
    """
    own = path_of()
    if own is None or not is_unified():
        raise LaunchError("cannot limit it: this machine does not use control groups version 2 alone")
    if own.endswith(f"/{SUPERVISOR_LEAF}"):
        return os.path.dirname(own)
    move_all(own, f"{own}/{SUPERVISOR_LEAF}")
    enable(own)
    return own


class RunCgroup:
    """A run's control group with its limits set, still empty. Raises: LaunchError."""

    def __init__(self, limits: dict[str, Any], run: str) -> None:
        self.limits = limits
        self.tmp: list[str] = []
        self.peak_bytes = 0
        self.due_at: float | None = None
        what = "make its control group"
        try:
            folder = limits["folder"]
            self.path = leaf_of(folder, run) if folder is not None else f"{split_own_cgroup()}/{JOB_LEAF}"
            os.mkdir(self.path)
            # Programs that size themselves by their limits, as Java does, read them here.
            os.chmod(self.path, 0o755)
        except OSError as error:
            raise LaunchError(f"cannot {what}: {text_of(error)}") from None
        try:
            for file in _files(limits, is_alone=folder is None):
                what, name, value, is_needed = file
                if is_needed or os.path.exists(f"{self.path}/{name}"):
                    write(self.path, name, value)
            if limits["gpu_minors"] is not None:
                what = "keep it off other jobs' GPUs"
                self._shut_off_devices()
            if limits["private_tmp"]:
                what = "make its private /tmp"
                from gpusched.engine.linux import mounts

                self.tmp = mounts.make(run)
        except OSError as error:
            remove(self.path)
            raise LaunchError(f"cannot {what}: {text_of(error)}; see: gpusched doctor") from None
        if number(self.path, "memory.peak") is None:
            self.due_at = time.monotonic()

    def _shut_off_devices(self) -> None:
        from gpusched.engine.linux import device_rule as rules

        minors: tuple[int, ...] = self.limits["gpu_minors"]
        caps = rules.mig_caps(self.limits["mig"])
        has_amd = bool(self.limits.get("has_amd"))
        majors = {name: major for name, major in rules.driver_majors().items() if has_amd or name != "kfd"}
        rule = rules.job_rule(minors, caps, majors, rules.drm_nodes(minors, has_amd=has_amd))
        program = rules.load(rules.program(rule))
        try:
            rules.attach(self.path, program)
        finally:
            # The control group keeps it.
            os.close(program)

    def enter(self) -> None:
        """Move the job's first process into it, while that is still root. Raises: OSError, LaunchError."""
        try:
            write(self.path, "cgroup.procs", 0)
        except OSError as error:
            raise LaunchError(f"cannot enter its control group: {text_of(error)}") from None
        if self.tmp:
            from gpusched.engine.linux import mounts

            mounts.put_in_place(self.tmp)

    def act(self, now: float) -> None:
        """Sample the memory in use, where the kernel keeps no peak."""
        self.peak_bytes = max(self.peak_bytes, number(self.path, "memory.current") or 0)
        self.due_at = now + PEAK_LOOK_S

    def kill(self) -> None:
        kill(self.path)

    def facts(self) -> dict[str, float | int | bool | None]:
        """Read the kernel's counters for the result; call before `close`."""
        kills = number(self.path, "memory.events", "oom_kill") or 0
        usage_us = number(self.path, "cpu.stat", "usage_usec")
        peak = number(self.path, "memory.peak") or self.peak_bytes
        facts: dict[str, float | int | bool | None] = {}
        if kills:
            facts["oom_kills"] = kills
            facts["at_mem_limit"] = bool(number(self.path, "memory.events", "oom"))
            facts["mem_limit_mib"] = self.limits["mem_mib"]
        if usage_us is not None:
            facts["cpu_s"] = usage_us / 1e6
            facts["system_cpu_s"] = (number(self.path, "cpu.stat", "system_usec") or 0) / 1e6
        if peak:
            facts["peak_mem_mib"] = peak / (1 << 20)
        return facts

    def close(self) -> None:
        """Remove the group once the run has no processes left."""
        remove(self.path)
        if self.tmp:
            from gpusched.engine.linux import mounts

            mounts.remove(self.tmp)


def _files(limits: dict[str, Any], is_alone: bool) -> Iterator[tuple[str, str, object, bool]]:
    """Files to set: purpose (for the error), name, value, and whether the file is required.

    Args: is_alone: no other run's group is a sibling, so that weights have no effect here.
    """
    if limits["mem_mib"] is not None:
        yield "limit its memory", "memory.max", limits["mem_mib"] << 20, True
        if not limits["swap"]:
            # A kernel that does not count swap has no such file.
            yield "keep it out of swap", "memory.swap.max", 0, False
    if limits["oom_kills_job"]:
        yield "have it killed as one group", "memory.oom.group", 1, False
    if limits["tasks"] is not None:
        yield "limit its tasks", "pids.max", limits["tasks"], True
    if limits["cpus"]:
        yield "pin it to its CPUs", "cpuset.cpus", ",".join(map(str, limits["cpus"])), True
    if not is_alone:
        yield "set its CPU weight", "cpu.weight", limits["cpu_weight"], False
