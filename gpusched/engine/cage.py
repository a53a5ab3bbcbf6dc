"""The cage of one run: a leaf of a control group with limits and a device rule. Runs in the supervisor, as root.

Under systemd the leaf is `job` in the run's own unit, and the supervisor beside it in `supervisor`; under the fork
launcher it is `gpusched-JOB.RUN` in the folder that the ticket names. Either way the supervisor is outside, so that
what ends the job for want of memory or tasks leaves somebody to tell of it.
"""

from __future__ import annotations

import os
import time

from gpusched.engine import cgroup
from gpusched.engine.users import LaunchError, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOOK_S = 1.0
"""Between looks at the memory in use, on kernels that do not keep its peak (before 5.19)."""
SUPERVISOR_LEAF = "supervisor"
JOB_LEAF = "job"


def leaf_of(folder: str, run: str) -> str:
    """Of a run under the fork launcher."""
    return f"{folder}/gpusched-{run}"


def settle() -> str:
    """Make this process's own control group one that has leaves; its folder. For a unit's main process.

    Raises: OSError; LaunchError without version 2.
    """
    own = cgroup.path_of()
    if own is None or not cgroup.is_unified():
        raise LaunchError("cannot limit it: this machine has no control groups of version 2 alone")
    if own.endswith(f"/{SUPERVISOR_LEAF}"):
        return os.path.dirname(own)
    cgroup.move_all(own, f"{own}/{SUPERVISOR_LEAF}")
    cgroup.enable(own)
    return own


class Box:
    """A leaf with its limits set and nobody in it yet. Raises: LaunchError."""

    __slots__ = ("cage", "look_at", "path", "peak_bytes", "tmp")

    def __init__(self, cage: dict[str, Any], run: str) -> None:
        self.cage = cage
        self.tmp: list[str] = []
        self.peak_bytes = 0
        self.look_at: float | None = None
        what = "make its control group"
        try:
            folder = cage["folder"]
            self.path = leaf_of(folder, run) if folder is not None else f"{settle()}/{JOB_LEAF}"
            os.mkdir(self.path)
            # Programs that size themselves by their limits, as Java does, read them here.
            os.chmod(self.path, 0o755)
        except OSError as error:
            raise LaunchError(f"cannot {what}: {text_of(error)}") from None
        try:
            for limit in _limits(cage, is_alone=folder is None):
                what, name, value, is_needed = limit
                if is_needed or os.path.exists(f"{self.path}/{name}"):
                    cgroup.write(self.path, name, value)
            if cage["gpu_minors"] is not None:
                what = "keep it off the GPUs of others"
                self._shut_off_devices()
            if cage["private_tmp"]:
                what = "make a /tmp of its own"
                from gpusched.engine import mounts

                self.tmp = mounts.make(run)
        except OSError as error:
            cgroup.remove(self.path)
            raise LaunchError(f"cannot {what}: {text_of(error)}; see: gpusched doctor") from None
        if cgroup.number(self.path, "memory.peak") is None:
            self.look_at = time.monotonic()

    def _shut_off_devices(self) -> None:
        from gpusched.engine import device_rule as rules

        minors: tuple[int, ...] = self.cage["gpu_minors"]
        caps = rules.mig_caps(self.cage["mig"])
        rule = rules.job_rule(minors, caps, rules.driver_majors(), rules.drm_nodes(minors))
        program = rules.load(rules.program(rule))
        try:
            rules.attach(self.path, program)
        finally:
            # The control group keeps it.
            os.close(program)

    def enter(self) -> None:
        """In the job's first process, while it is still root. Raises: OSError, LaunchError."""
        try:
            cgroup.write(self.path, "cgroup.procs", 0)
        except OSError as error:
            raise LaunchError(f"cannot enter its control group: {text_of(error)}") from None
        if self.tmp:
            from gpusched.engine.mounts import put_in_place

            put_in_place(self.tmp)

    def look(self, now: float) -> None:
        """Keep the peak where the kernel does not."""
        self.peak_bytes = max(self.peak_bytes, cgroup.number(self.path, "memory.current") or 0)
        self.look_at = now + LOOK_S

    def kill(self) -> None:
        """End everything in it at once."""
        cgroup.kill(self.path)

    def facts(self) -> dict[str, float | int | bool | None]:
        """What the kernel has counted, as of the result; to be asked before `close`."""
        kills = cgroup.number(self.path, "memory.events", "oom_kill") or 0
        usage_us = cgroup.number(self.path, "cpu.stat", "usage_usec")
        peak = cgroup.number(self.path, "memory.peak") or self.peak_bytes
        facts: dict[str, float | int | bool | None] = {}
        if kills:
            facts["oom_kills"] = kills
            facts["at_mem_limit"] = bool(cgroup.number(self.path, "memory.events", "oom"))
            facts["mem_limit_mib"] = self.cage["mem_mib"]
        if usage_us is not None:
            facts["cpu_s"] = usage_us / 1e6
        if peak:
            facts["peak_mem_mib"] = peak / (1 << 20)
        return facts

    def close(self) -> None:
        """Nothing of the run is left: remove what it had."""
        cgroup.remove(self.path)
        if self.tmp:
            from gpusched.engine.mounts import remove

            remove(self.tmp)


def _limits(cage: dict[str, Any], is_alone: bool) -> list[tuple[str, str, object, bool]]:
    """What to set: how that is called when it fails, the file, its value, and whether the file must be there.

    Args: is_alone: no other run's leaf is beside it, so that weights mean nothing here.
    """
    limits: list[tuple[str, str, object, bool]] = []
    if cage["mem_mib"] is not None:
        limits.append(("limit its memory", "memory.max", cage["mem_mib"] << 20, True))
        if not cage["swap"]:
            # A kernel that does not count swap has no such file.
            limits.append(("keep it out of swap", "memory.swap.max", 0, False))
    if cage["oom_kills_job"]:
        limits.append(("have it killed as a whole", "memory.oom.group", 1, False))
    if cage["tasks"] is not None:
        limits.append(("limit its tasks", "pids.max", cage["tasks"], True))
    if cage["cpus"]:
        limits.append(("give it processors of its own", "cpuset.cpus", ",".join(map(str, cage["cpus"])), True))
    if not is_alone:
        limits.append(("weigh its part of the processors", "cpu.weight", cage["cpu_weight"], False))
    return limits
