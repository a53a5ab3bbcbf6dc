"""The client's side of a visit: a command started in a running job from outside of it."""

from __future__ import annotations

import os
import signal
import time

from gpusched.cli import output
from gpusched.cli.environment import umask
from gpusched.cli.grun import connect_to_run
from gpusched.client import chosen_socket, connect
from gpusched.engine.attach_protocol import LARGEST, Wanted, pack_wanted
from gpusched.errors import GpuschedError, NotReady, Refused, UsageError
from gpusched.model.state_names import FINAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.cli.run_connection import RunEnding

    Ask = Callable[[str, str, object], dict[str, Any]]

DOOR_S = 10.0
"""How long a job may take to open its door."""
_ALLOWED = frozenset({"job", "pty", "quiet", "work_dir", "extra_env", "nodelist"})
_OF_TERMINALS = ("TERM", "COLORTERM")


class NotRunning(Refused):
    """The job cannot be entered now. `state`: why."""

    def __init__(self, job_id: str, state: str) -> None:
        hint = f"see what became of it with: gshow {job_id}"
        if state == "PENDING":
            hint = f"see what it waits for with: gshow {job_id}"
        elif state == "SUSPENDED":
            hint = f"resume it with: gctl resume {job_id}"
        super().__init__(f"job {job_id} is {state}; a command can be started only in a running job", hint)
        self.state = state
        self.job_id = job_id


def start_in(
    ask: Ask, job_id: str, wanted: Wanted, command: str, *, step: str = "", node: str | None = None
) -> RunEnding:
    """Run a command in a job, with this process's standard streams, until it or the job ends.

    Args: ask: asks the daemon: method, path, body. command, step: as for `AttachClient`. node: of the job; by default
        its first, or that of this process.
    Raises: NotRunning, NotReady, Refused; UserError of the daemon.
    """
    if len(pack_wanted(wanted)) > LARGEST:
        raise Refused(
            f"the command and its environment exceed {LARGEST >> 20} MiB", "put the command into a script, for example"
        )
    found = ask("POST", f"/v1/jobs/{job_id}/enter", {} if node is None else {"node": node})["enter"]
    if not found["doors"]:
        raise NotRunning(found["id"], found["state"])
    from gpusched.cli.relay import AttachClient, size  # not needed by a job that is not running
    from gpusched.cli.run_connection import RunConnection, way_of

    way = way_of(found["doors"][0], chosen_socket()[0])
    sock = None if way.target else _open_door(ask, job_id, way.path)
    if sock is None and not way.target:
        raise _lets_nobody_in(ask, job_id, found)
    connection = RunConnection(way, wanted, size(), sock)
    end = AttachClient(connection, keeps=False, command=command, step=step).run()
    if end.is_known or end.left_by is not None:
        return end
    where = f"job {found['id']} on {found['doors'][0]['node']}"
    if connection.was_there:
        if end.gave_up:
            raise NotReady(f"the connection to {where} did not come back; the command there ends soon", "see: ginfo")
        raise connection.error or NotReady(f"the connection to {where} broke off", f"see: gshow {found['id']}")
    raise connection.error or _lets_nobody_in(ask, job_id, found)


def _open_door(ask: Ask, job_id: str, path: str) -> socket | None:
    """A connection to a door of a job on this node; None if it does not open."""
    give_up_at = time.monotonic() + DOOR_S
    while time.monotonic() < give_up_at:
        if (sock := connect_to_run(path)) is not None:
            return sock
        if ask("GET", f"/v1/jobs/{job_id}/attach", None)["attach"]["state"] != "RUNNING":
            break
    return None


def _lets_nobody_in(ask: Ask, job_id: str, found: dict[str, Any]) -> GpuschedError:
    """Why a door did not open."""
    state = ask("GET", f"/v1/jobs/{job_id}/attach", None)["attach"]["state"]
    if state != "RUNNING":
        return NotRunning(found["id"], state)
    return NotReady(
        f"job {found['id']} does not let a command in on {found['doors'][0]['node']}: it was started by an older "
        "gpusched, or has too many of them",
        f"end some, or see what it does with: glogs -f {found['id']}",
    )


def grun_in(values: Values, operands: list[str]) -> int:
    """`grun --job`: returns the exit code of the command. Raises: UsageError, Refused, NotReady."""
    if not values.keys() <= _ALLOWED:
        raise UsageError(
            "a command in a running job shares its resources and cannot request any",
            "leave out all options but --job, -w, --pty, -D, -E and --quiet",
        )
    is_terminal = bool(values.get("pty")) or (not operands and os.isatty(0) and os.isatty(1))
    env = {name: os.environ[name] for name in _OF_TERMINALS if is_terminal and name in os.environ}
    wanted = Wanted(
        operands or [os.environ.get("SHELL") or "/bin/sh"],
        {**env, **values.get("extra_env", {})},
        is_terminal=is_terminal,
        umask=umask(),
        work_dir=os.path.abspath(values["work_dir"]) if "work_dir" in values else "",
    )
    job_id = values["job"]
    nodes = values.get("nodelist") or [None]
    if len(nodes) > 1:
        raise UsageError(f"-w names {len(nodes)} nodes; a command in a running job starts on one of them", "name one")
    with connect() as client:
        end = start_in(lambda *question: client.call(*question), job_id, wanted, "grun", node=nodes[0])
    return _conclude(job_id, end, is_quiet=bool(values.get("quiet")))


def _conclude(job_id: str, end: RunEnding, *, is_quiet: bool) -> int:
    if end.left_by is not None:
        if end.left_by != signal.SIGPIPE and not is_quiet:
            output.tell("grun", f"left job {job_id}, which continues; the command in it is being ended")
        return 128 + end.left_by if end.left_by else 0
    if end.sentence:
        raise Refused(end.sentence, f"give its path, or start a shell with: grun --job {job_id}")
    if end.signal is not None:
        return 128 + end.signal
    return end.code or (1 if end.stopped_by is not None else 0)


def is_over(state: str) -> bool:
    """Whether a job in this state will never run again."""
    return state in FINAL
