"""Runs of another user, each with limits, under the real engine."""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from engine_bench import BOOT, Does, LocalBench, WallClock

from gpusched.engine.linux import cgroup
from gpusched.engine.local import LocalEngine
from gpusched.model.execution import RunLimits

PATIENCE_S = 600.0
"""An emulated machine is 15 to 70 times slower."""
USER = "daemon"
PYTHON = "/usr/bin/python3"
_NOTHING = Does()
E = TypeVar("E")

REPORTS_OPENING = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        word = "open"
    except OSError as error:
        word = os.strerror(error.errno)
    print(os.path.basename(path), word, sep=": ")
"""
LET_THROUGH, REFUSED = "No such device or address", "Operation not permitted"


@contextmanager
def made_cgroup() -> Iterator[str]:
    """A control group of its own below the root, marked as delegated like systemd does."""
    path = f"{cgroup.MOUNT}/gpusched-test-{secrets.token_hex(4)}"
    # systemd takes back what no unit of its own needs.
    cgroup.enable(cgroup.MOUNT)
    os.mkdir(path)
    os.setxattr(path, "trusted.delegate", b"1")
    yield path
    for folder, _, _ in os.walk(path, topdown=False):
        assert cgroup.remove(folder), folder


class LimitedBench(LocalBench):
    """Runs of another user, each with limits."""

    def __init__(self, folder: Path, run_cgroups: str) -> None:
        self.run_cgroups = run_cgroups
        folder.chmod(0o777)
        super().__init__(folder)

    def make(self) -> LocalEngine:
        return LocalEngine(self.spool, boot_id=BOOT, clock=WallClock(), run_cgroups=self.run_cgroups)

    def run(self, run: str, *argv: str, user: str = USER, **kept: Any) -> None:
        """Start a command as another user with limits."""
        uid = pwd.getpwnam(user).pw_uid
        self.start(run, _NOTHING, argv=argv, uid=uid, user=user, limits=RunLimits(**kept), grace_s=PATIENCE_S)

    def leaf(self, run: str) -> Path:
        """The control group of a run."""
        return Path(cgroup.leaf_of(self.run_cgroups, run))

    def until(self, run: str, *kinds: type[E], timeout_s: float = PATIENCE_S) -> E:
        return super().until(run, *kinds, timeout_s=timeout_s)

    def says(self, run: str, word: str) -> None:
        """Wait for a word of its output."""
        self.wait(lambda: word in self.output(run), PATIENCE_S, f"{word!r} of run {run}")
