"""What tests of every tier share."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import gpusched
from gpusched.scheduler.compiled import is_compiled

patches_the_planner = pytest.mark.skipif(is_compiled(), reason="patches the planner, which is compiled here")


def is_alive(pid: int) -> bool:
    """Whether anything of a process is left but a zombie.

    The first thread of one that is killed may be a zombie while another still holds its sockets and locks.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            is_zombie = file.read().rpartition(")")[2].split()[0] in "ZX"
        return not is_zombie or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_until(predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "a condition") -> None:
    """Ask until it holds, every 5 ms at first and less often the longer it takes, as most ask a daemon.

    Raises: AssertionError naming `what` when the time is over.
    """
    began = time.monotonic()
    while not predicate():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(min(max(0.005, waited_s / 10), 0.05))


def copy_package(folder: Path, *left_out: str) -> Path:
    """Copy the package into a folder, with what is compiled of it: that takes an interpreter seconds.

    Returns: the copy. Args: left_out: folders.
    """
    copy = folder / "gpusched"
    shutil.copytree(Path(gpusched.__file__).parent, copy, ignore=shutil.ignore_patterns(*left_out))
    return copy


PORTS_AT_ONCE = 250
_claims: list[socket.socket] = []


def claim_ports(offsets: Iterable[int]) -> int:
    """First of 250 ports that no other process of the tests uses until this one ends.

    They are below those that the kernel gives, and beside those at which ranks of jobs meet.

    Args: offsets: of the ports that must be free now.
    """
    looked_at = list(offsets)
    for first in (*range(10_250, 20_000, PORTS_AT_ONCE), *range(32_000, 32_750, PORTS_AT_ONCE)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            # A name that all processes of the machine share, and that goes with its owner.
            claim.bind(f"\0gpusched-test-ports-{first}")
            for offset in looked_at:
                socket.create_server(("", first + offset)).close()
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return first
    raise AssertionError("no free ports")
