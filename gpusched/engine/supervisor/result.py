"""How a run ended, from its record and its last event."""

from __future__ import annotations

import os
import time

from gpusched.engine import spool as files
from gpusched.engine.linux.as_user import LaunchError, as_user
from gpusched.engine.supervisor.processes import exit_of
from gpusched.engine.supervisor.run_control import COMES_BACK
from gpusched.engine.wire import encode_event, joined, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from typing import Any

    from gpusched.engine.supervisor.container import RunContainer
    from gpusched.engine.supervisor.supervisor import Supervisor
else:
    import _signal as signal

RETRY_S = (0.2, 10.0)
RETRIES = 400
"""With the intervals above: more than an hour to free space on a full disk."""
FAULT_CHARACTERS = 150
"""Of each sentence on a prolog or epilog, which are ASCII, and of the cause beside one: the event has room for all."""


class RunResult:
    """The result of a run whose command has ended, before any epilog; that of epilogs is in `Supervisor.faults`."""

    def __init__(self, run: Supervisor) -> None:
        self._run = run
        self.exit = (None, None) if run.launch_error is not None else run.processes.exit()
        """Exit code of the job's first process, or the signal that ended it."""
        self.counted = run.processes.counted()
        self._pulled = {} if run.processes.container is None else _pulled(run, run.processes.container)
        self.failure = {} if self.exit == (0, None) and run.cause is None else _failure(run)
        """What the end of the output shows of a failure of the job itself, as fields."""
        is_to_continue = run.control.stopped_by in COMES_BACK and self.exit == (0, None)
        self.is_done = is_to_continue and files.says_done(run.home.spool, run.run)
        """Whether a run that is to be followed by another one has left word that nothing is left to do."""

    def line(self, **cut: str) -> bytes:
        """The event, as of now. Args: cut: as `Supervisor.faults`, if this process does not live to see more."""
        run, control = self._run, self._run.control
        code, number = self.exit
        faults = {**run.faults, **cut}
        told = {name: text[:FAULT_CHARACTERS] for name, text in faults.items() if text is not None}
        failure, cause = self.failure, self.failure.get("cause")
        if told and cause is not None:
            failure = {**failure, "cause": cause[:FAULT_CHARACTERS]}
        beside = "".join((cause or "", *told.values(), *self._pulled.values()))
        ranks = run.processes.ranks
        rare = {
            "signal": number,
            "stopped_by": control.stopped_by,
            "launch_error": None if run.launch_error is None else shortened(run.launch_error),
            "leftovers": joined(list(run.processes.leftovers.values()), beside),
            "suspended_s": control.suspension.so_far_s(time.monotonic()),
            "moved": run.moved,
        }
        return encode_event(
            run=run.run,
            event="ended",
            start_at=control.start_at,
            end_at=time.time(),
            exit_code=code,
            # What is as usual is left out: each field costs its writer and its reader.
            **{name: value for name, value in rare.items() if value},
            **failure,
            **({"is_done": True} if self.is_done else {}),
            **self._pulled,
            **({} if ranks is None else {"rank": ranks.failed, "failed_at": ranks.failed_at}),
            **told,
            **self.counted,
        )

    def record(self) -> None:
        """Write the result, then report it."""
        run = self._run
        if run.processes.box is not None:
            run.processes.box.close()
        content = self.line()
        lines = run.events.take_start_line() + content
        run.record_fd = files.restore_record(run.home.spool, run.run, run.record_fd)
        pause_s = RETRY_S[0]
        for _ in range(RETRIES):
            try:
                files.write_result(run.record_fd, lines)
            except OSError:
                # A full disk. The daemon may record the end from the pipe, and then removes the record.
                run.events.send(content)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])
                if os.fstat(run.record_fd).st_nlink == 0:
                    break
            else:
                run.events.send(content)
                return
        run.events.is_heard = False


def _pulled(run: Supervisor, container: RunContainer) -> dict[str, str]:
    """The image that a pull has found, by digest."""
    logs = run.control.logs
    if not container.is_pull or run.processes.status != 0 or logs is None:
        return {}
    return {"detail": container.take_digest(logs)}


def _failure(run: Supervisor) -> Mapping[str, Any]:
    if run.cause is not None:
        return {"cause": run.cause}
    logs, status, ranks = run.control.logs, run.processes.status, run.processes.ranks
    if not status or run.control.stopped_by is not None or logs is None:
        return {}
    from gpusched.engine.supervisor import output_tail  # most runs succeed

    def look() -> list[bytes]:
        tails = [*(() if ranks is None else ranks.tails()), *logs.tails()]
        return [output_tail.read_tail(fd, begin) for fd, begin in tails]

    try:
        # The file may be where root has no rights: on a disk of another machine.
        tails = as_user(logs.owner, look)
    except LaunchError:
        return {}
    container = run.processes.container
    if container is not None and container.is_pull:
        return {"cause": output_tail.last_line(tails)}
    # A kill from outside shows nothing about it.
    is_killed = exit_of(status)[1] in (signal.SIGKILL, signal.SIGTERM)
    return {
        "gpu_oom": bool(run.ticket["has_gpus"]) and any(map(output_tail.shows_oom, tails)),
        "cause": None if is_killed else output_tail.find_cause(tails),
    }
