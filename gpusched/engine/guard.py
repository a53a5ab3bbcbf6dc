"""The guard: a device rule on control groups of systemd that keeps who is in no job off the GPUs.

Limits of a job do not reach what the job's user starts elsewhere: at a login, by the user's own service manager, by
cron. Runs are in units or control groups elsewhere and are not touched by it.
"""

from __future__ import annotations

import os

from gpusched.engine import cgroup, device_rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NAME = "gpusched_guard"
"""Of the program, at most 15 letters; by it the guard is known again."""


def folder_of(unit: str) -> str:
    """The control group of a unit that lies where systemd puts it by itself."""
    stem, _, kind = unit.rpartition(".")
    if kind == "slice":
        words = stem.split("-")
        parts = [f"{'-'.join(words[: end + 1])}.slice" for end in range(len(words))]
        return "/".join([cgroup.MOUNT, *parts])
    parts = ["system.slice"]
    if "@" in stem:
        parts.append(f"system-{stem.partition('@')[0]}.slice")
    return "/".join([cgroup.MOUNT, *parts, unit])


def is_on(unit: str) -> bool | None:
    """Whether it is guarded; None when there is no such control group, as of a service that is not running.

    Raises: OSError without root.
    """
    if not os.path.isdir(folder_of(unit)):
        return None
    return bool(_ours(folder_of(unit), close=True))


def guarded(units: Iterable[str]) -> tuple[str, ...]:
    """Those that are guarded; none when that cannot be told."""
    try:
        return tuple(unit for unit in units if is_on(unit))
    except OSError:
        return ()


def put_on(unit: str) -> bool | None:
    """Guard a unit, once; False when it was guarded already, None when it is not there. Raises: OSError."""
    folder = folder_of(unit)
    if not os.path.isdir(folder):
        return None
    before = _ours(folder)
    rule = device_rule.guard_rule(device_rule.driver_majors())
    program = device_rule.load(device_rule.program(rule, spares_root=True), NAME)
    # The new one first, so that there is no moment without: the driver's numbers may be others than last time.
    try:
        device_rule.attach(folder, program)
        for old in before:
            device_rule.detach(folder, old)
    finally:
        for fd in (*before, program):
            os.close(fd)
    return not before


def take_off(unit: str) -> bool | None:
    """Lift the guard; False when there was none, None when the unit is not there. Raises: OSError."""
    folder = folder_of(unit)
    if not os.path.isdir(folder):
        return None
    before = _ours(folder)
    for fd in before:
        device_rule.detach(folder, fd)
        os.close(fd)
    return bool(before)


def _ours(folder: str, close: bool = False) -> list[int]:
    found = []
    for fd, name in device_rule.attached(folder).items():
        if name == NAME and not close:
            found.append(fd)
            continue
        os.close(fd)
        if name == NAME:
            found.append(-1)
    return found
