"""The guard: a device rule on systemd's control groups that keeps processes outside jobs off the GPUs.

A job's limits do not apply to processes its user starts elsewhere: at a login, in the user's own service manager, by
cron. Runs have units or control groups elsewhere and are unaffected.
"""

from __future__ import annotations

import os

from gpusched.engine.linux import cgroup, device_rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MARKS = "/run/gpusched-guard"
"""One file per guarded unit, with the inode of its control group. The sandboxed daemon, which cannot query the kernel,
reads them. A restarted service has a new inode, and is unguarded until it is guarded again."""
NAME = "gpusched_guard"
"""Name of the program, at most 15 letters; identifies the guard."""


def folder_of(unit: str) -> str:
    """Control group of a unit at systemd's default location."""
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
    """Whether the guard is attached; None without such a control group, for example of a stopped service.

    Raises: OSError without root.
    """
    if not os.path.isdir(folder_of(unit)):
        return None
    found = _ours(folder_of(unit))
    for fd in found:
        os.close(fd)
    return bool(found)


def is_there(unit: str) -> bool:
    return os.path.isdir(folder_of(unit))


def marked() -> list[str]:
    """Units guarded since boot."""
    try:
        return sorted(os.listdir(MARKS))
    except OSError:
        return []


def guarded(units: Iterable[str], marks: str = MARKS) -> tuple[str, ...]:
    """Units that were guarded and have the same control group since; needs no privileges."""
    return tuple(unit for unit in units if (number := _number_of(unit)) and _read(f"{marks}/{unit}") == number)


def put_on(unit: str) -> bool | None:
    """Guard a unit, once; False when it was guarded already, None when it does not exist. Raises: OSError."""
    folder = folder_of(unit)
    if not os.path.isdir(folder):
        return None
    before = _ours(folder)
    rule = device_rule.guard_rule(device_rule.driver_majors())
    program = device_rule.load(device_rule.program(rule, spares_root=True), NAME)
    # The new one first, so that there is no gap: the driver's numbers may have changed.
    try:
        device_rule.attach(folder, program)
        for old in before:
            device_rule.detach(folder, old)
    finally:
        for fd in (*before, program):
            os.close(fd)
    _note(unit)
    return not before


def take_off(unit: str) -> bool | None:
    """Lift the guard; False when there was none, None when the unit does not exist. Raises: OSError."""
    folder = folder_of(unit)
    if not os.path.isdir(folder):
        return None
    before = _ours(folder)
    for fd in before:
        device_rule.detach(folder, fd)
        os.close(fd)
    try:
        os.unlink(f"{MARKS}/{unit}")
    except FileNotFoundError:
        pass
    return bool(before)


def _ours(folder: str) -> list[int]:
    """Descriptors of our programs on it: at most one, unless two were attached at the same moment."""
    found = []
    for fd, name in device_rule.attached(folder).items():
        if name == NAME:
            found.append(fd)
        else:
            os.close(fd)
    return found


def _note(unit: str) -> None:
    os.makedirs(MARKS, mode=0o755, exist_ok=True)
    with open(f"{MARKS}/{unit}", "w", encoding="ascii") as file:
        file.write(_number_of(unit))


def _number_of(unit: str) -> str:
    """Inode of the unit's control group; empty when there is none."""
    try:
        return str(os.stat(folder_of(unit)).st_ino)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
