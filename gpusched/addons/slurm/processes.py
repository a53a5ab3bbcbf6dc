"""Processes of this machine, read from the kernel by users who may see them. Source: proc(5)."""

from __future__ import annotations

import os


def tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: dict[int, None] = {}
    left = [pid]
    while left:
        one = left.pop(0)
        if one not in found:
            found[one] = None
            left += sorted(children.get(one, ()))
    return list(found)


def stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def variables(pid: int) -> dict[str, str]:
    """The environment with which a process began; empty if it is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (word.decode("utf-8", "replace").partition("=") for word in reversed(words))
    return {name: value for name, equals, value in pairs if equals}
