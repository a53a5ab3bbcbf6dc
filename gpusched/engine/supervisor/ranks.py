"""Several processes of one run: the tasks that a job asks for, each a rank with its own environment.

The first that fails ends the others as a stop does, with the job's notice and grace, and its end is that of the run.
Few runs have ranks: supervisors import this module for them alone.
"""

from __future__ import annotations

import errno
import os
import time

from gpusched.engine.linux.as_user import LaunchError, Owner, as_user
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.logs import Logs
from gpusched.engine.supervisor.processes import end_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from gpusched.engine.linux.cgroup import RunCgroup
    from gpusched.engine.supervisor.container import RunContainer
    from gpusched.engine.supervisor.rotation import RotatedLogs

    Open = Callable[[dict[str, Any], Callable[[], Any]], Any]


class Ranks:
    """The processes of a run that are its ranks."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        """Number of each rank that has not ended, by pid."""
        self.logs: list[Logs] = []
        """Files of single ranks, beside those of the node."""
        self.rotated: list[RotatedLogs] = []
        """Those of them that the supervisor has to copy."""
        self.failed: int | None = None
        self.failed_at: float | None = None
        self.status: int | None = None
        """Wait status: of the first rank that failed, else of the last one that has ended."""

    def take(self, pid: int, status: int) -> bool:
        """Note the end of a process; whether it is a rank, and the first that failed."""
        number = self.alive.pop(pid)
        if self.failed is None:
            self.status = status
            if status != 0:
                self.failed, self.failed_at = number, time.time()
                return True
        return False

    def tails(self) -> Iterable[tuple[int, int]]:
        """As `Logs.tails`, of the files of single ranks."""
        for logs in self.logs:
            yield from logs.tails()

    def close(self) -> None:
        for logs in self.logs:
            logs.close()
        self.logs = []


def start_ranks(
    ticket: dict[str, Any],
    argv: list[str],
    logs: Logs,
    owner: Owner | None,
    box: RunCgroup | None,
    opened_by: Open,
    container: RunContainer | None = None,
) -> Ranks:
    """Start every rank of a ticket, in the work dir and with the job's complete environment.

    Args: logs: the files of the ticket, for ranks that name no others. opened_by: opens files of a ticket with the
    user's rights. container: starts each rank in its own. Raises: LaunchError; nothing is left then.
    """
    found = Ranks()
    files = {(ticket["stdout_path"], ticket["stderr_path"]): logs}
    try:
        for rank in ticket["ranks"]:
            words, env = argv, {**ticket["env"], **rank["env"]}
            if container is not None:
                words, env = container.rank_command(rank)
            own = {**ticket, **rank, "env": env}
            paths = (own["stdout_path"], own["stderr_path"])
            if paths not in files:
                opened = {path for pair in files for path in pair}
                files[paths] = _opened(own, opened, owner, opened_by, found)
                found.logs.append(files[paths])
            given = None if own["stdin_path"] is None else _given(own["stdin_path"], owner)
            try:
                found.alive[launch.start_process(own, words, files[paths], given, owner, box)] = own["number"]
            finally:
                if given is not None:
                    os.close(given)
    except LaunchError:
        # With all that those that were started have started.
        end_all(float("inf"))
        found.close()
        raise
    return found


def _opened(own: dict[str, Any], opened: set[str | None], owner: Owner | None, opened_by: Open, found: Ranks) -> Logs:
    logs: Logs = opened_by(own, lambda: launch.open_logs(own, opened))
    if logs.moved:
        from gpusched.engine.supervisor.rotation import RotatedLogs

        logs = RotatedLogs(logs, own, owner)
        found.rotated.append(logs)
    logs.owner = owner
    return logs


def _given(path: str, owner: Owner | None) -> int:
    return as_user(owner, lambda: launch.open_input(path))


def why_taken(port: int) -> str | None:
    """Why ranks cannot meet at a port of this machine, as a sentence; None if no process listens there."""
    import _socket as socket

    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            # A machine without one of them.
            continue
        try:
            # As who will listen: connections of a program that has ended are not an obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port}, where its ranks were to meet, is in use by another program"
        finally:
            probe.close()
    return None
