"""Brings a run's snapshot of the code to its node, by a program that runs as the user and asks the head.

Few runs have one, and fewer on another node than the head: supervisors import this module for them alone.
"""

from __future__ import annotations

import fcntl
import os
import sys

from gpusched.engine.linux.as_user import DEFAULT_PATH, Owner, as_user
from gpusched.engine.supervisor import launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_WORDS = 4096
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class SnapshotFetch:
    """The snapshot of one run. Raises: LaunchError when its user cannot be taken on."""

    def __init__(self, ticket: dict[str, Any]) -> None:
        self._ticket = ticket
        account, self._owner = launch.owner_of(ticket)
        self._home = account.pw_dir if account is not None else os.environ.get("HOME", "/")
        head, _, _ = ticket["work_dir"].partition(f"/{ticket['snapshot']}/tree")
        self._folder = f"{head}/{ticket['snapshot']}"

    def hold(self) -> int | None:
        """Keep the snapshot from being removed as long as this descriptor is open; None if it is not here."""
        return as_user(self._owner, self._hold)

    def _hold(self) -> int | None:
        try:
            fd = os.open(f"{self._folder}/about.json", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(fd)
        except OSError:
            # A file system without locks, or one where only its owner may do this.
            pass
        return fd

    def fetch(self, wait: Callable[[float], bool]) -> str | None:
        """Fetch it; a sentence on failure. Args: wait: for so many seconds; returns whether to give up."""
        limits = self._ticket["snapshot_limits"]
        numbers = (limits["mib"], limits["files"], limits["keep_days"], limits["total_mib"])
        words = [self._ticket["run"].partition(".")[0], self._folder, self._ticket["env"]["GPUSCHED_SOCKET"]]
        argv = [sys.executable, "-I", "-c", _PROGRAM, *words, *map(str, numbers), _PACKAGE_ROOT]
        told, tell = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            become_program(argv, tell, self._owner, {"PATH": DEFAULT_PATH, "HOME": self._home, "LANG": "C.UTF-8"})
        os.close(tell)
        try:
            status = 0
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if wait(0.1):
                    os.kill(pid, 9)
                    break
            status = os.waitpid(pid, 0)[1]
            if status == 0:
                return None
            said = os.read(told, _MOST_WORDS).decode("utf-8", "replace").strip().rpartition("\n")[2]
        finally:
            os.close(told)
        return f"its snapshot {self._ticket['snapshot']} cannot be fetched: {said or 'the program for it failed'}"


_PROGRAM = "import sys; sys.path.append(sys.argv.pop()); from gpusched.snapshots.ship import main; main()"


def become_program(argv: list[str], output: int, owner: Owner | None, env: dict[str, str]) -> None:
    """In the child: become the program, as the user."""
    try:
        if owner is not None:
            owner.become()
        os.setpgid(0, 0)
        os.chdir("/")
        os.umask(0o077)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(null, 2)
        launch.reset_signals()
        os.execve(argv[0], argv, env)
    finally:
        os._exit(127)
