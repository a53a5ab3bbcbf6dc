"""Whether a user can run containers without root on this machine. Sources: podman(1) "Rootless mode", subuid(5)."""

from __future__ import annotations

import os
import shutil

from gpusched.engine.linux import cgroup

HELPERS = ("newuidmap", "newgidmap")
SUBORDINATE = ("/etc/subuid", "/etc/subgid")
MAPPED = 65536
"""Ids that images use, and that `useradd` gives."""


def find_program(name: str) -> str | None:
    """Path of an executable in this process's PATH; None if it is not installed."""
    return shutil.which(name)


def why_not_podman(user: str, uid: int) -> tuple[str, str] | None:
    """Why this user cannot run containers with podman, and what to do; None if they can, for all that is known."""
    if _is_hybrid():
        return (
            "podman needs control groups of version 2 alone, and this server mounts both versions",
            "boot with systemd.unified_cgroup_hierarchy=1, or use apptainer",
        )
    if uid == 0:
        return None
    for helper in HELPERS:
        if find_program(helper) is None:
            return f"podman needs {helper}, which is not installed", "install the package uidmap or shadow-utils"
    for path in SUBORDINATE:
        if not has_range(path, user, uid):
            first = 100000 + 65536 * (uid % 10000)
            option = "--add-subuids" if path.endswith("uid") else "--add-subgids"
            hint = f"sudo usermod {option} {first}-{first + MAPPED - 1} {user}"
            return f"{user} has no range of ids in {path}, which podman maps an image's users to", hint
    return None


def has_range(path: str, user: str, uid: int) -> bool:
    """Whether a file of subordinate ids has a range for this user; true where a directory service has them."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    for line in lines:
        name, _, numbers = line.partition(":")
        if name in (user, str(uid)) and numbers.partition(":")[2].isdigit():
            return True
    return _asks_service()


def _asks_service() -> bool:
    """Whether nsswitch.conf(5) has the ids come from elsewhere than the files."""
    try:
        with open("/etc/nsswitch.conf", encoding="utf-8", errors="replace") as file:
            return any(line.replace(" ", "").startswith("subid:") and "files" not in line for line in file)
    except OSError:
        return False


def _is_hybrid() -> bool:
    """Whether crun would refuse: it takes version 2 or version 1, and not both."""
    return not cgroup.is_unified() and os.path.exists(f"{cgroup.MOUNT}/unified/cgroup.controllers")
