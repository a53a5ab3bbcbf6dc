"""Jobs in the foreground, of salloc and of srun outside of a job: submit, wait for the start, relay, report the end."""

from __future__ import annotations

import os
import signal
import time

from gpusched.cli.grun import Interrupted, connect_to_run
from gpusched.cli.gwait import call_patiently
from gpusched.cli.output import exit_code_of
from gpusched.errors import GpuschedError
from gpusched.model.state_names import FINAL
from gpusched.model.units import is_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from gpusched.addons.slurm.command import Command
    from gpusched.cli.run_connection import RunConnection, RunEnding
    from gpusched.client import DaemonConnection

SOON_S = 0.3
"""A job that starts within this time is not reported as waiting."""
_LOOK_S = 5.0
_REACH_S = 20.0
_ANSWER_S = 10.0
_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOT_NOW = "Requested partition configuration not available now"
_NEVER_NOW = frozenset({"PartitionConfig", "PartitionTimeLimit", "PartitionNodeLimit"})


class ForegroundJob:
    """A job of a client in the foreground.

    Args: command: whose messages these are. is_quiet: only errors are printed.
    """

    def __init__(self, command: Command, client: DaemonConnection, job_id: str, *, is_quiet: bool = False) -> None:
        self.command = command
        self.job_id = job_id
        self._client = client
        self._is_quiet = is_quiet
        self._was_waiting = False

    def note(self, text: str) -> None:
        """Print a message unless quiet; the terminal may be gone."""
        if not self._is_quiet:
            try:
                self.command.note(text)
            except OSError:
                pass

    def wait_for_start(self, within_s: float | None = None) -> dict[str, Any] | None:
        """Wait until the job runs; returns its `attach` document, None if it ended or will not start in time.

        Args: within_s: how long to wait; None for as long as it takes. Raises: Interrupted.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        before = {number: signal.signal(number, _leave) for number in _LEAVING}
        try:
            while True:
                where = call_patiently(self._client, f"/v1/jobs/{self.job_id}/attach")["attach"]
                if where["state"] in FINAL:
                    self.note(f"Job allocation {self.job_id} has been revoked")
                    return None
                if where["state"] != "PENDING":
                    if self._was_waiting:
                        self.note(f"job {self.job_id} has been allocated resources")
                    return dict(where)
                left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._wait_a_while(min(left_s, _LOOK_S) if self._was_waiting else min(left_s, SOON_S), deadline)
        except Interrupted:
            for number in before:
                # A repeated signal would interrupt the cancel.
                signal.signal(number, signal.SIG_IGN)
            self.cancel()
            self.note(f"Job allocation {self.job_id} has been revoked")
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait_a_while(self, pause_s: float, deadline: float | None) -> None:
        answer = call_patiently(self._client, f"/v1/wait?ids={self.job_id}&state_not=PENDING&timeout_s={pause_s:.3f}")
        if answer["jobs"][0]["state"] != "PENDING" or self._was_waiting or deadline is not None:
            return
        self._was_waiting = True
        ((reason,),) = call_patiently(self._client, f"/v1/jobs?ids={self.job_id}&fields=reason")["rows"]
        if reason in _NEVER_NOW:
            self.note(NOT_NOW)
        if self.command.name == "salloc":
            self.note(f"Pending job allocation {self.job_id}")
        self.note(f"job {self.job_id} queued and waiting for resources")

    def cancel(self) -> None:
        """Cancel the job; if the daemon is away, it does so itself, because this process goes away."""
        try:
            self._client.call("POST", "/v1/jobs/cancel", {"ids": [self.job_id]}, timeout_s=_ANSWER_S)
        except (GpuschedError, OSError):
            pass

    def relay(self, where: dict[str, Any], step: str = "") -> RunEnding | None:
        """Serve as the client of the job's run until it ends; None if the run has no socket any more.

        Args: step: which two Ctrl-C interrupt; empty if each goes to the job.
        """
        connection = self._reach(where)
        if connection is None:
            return None
        from gpusched.cli.relay import AttachClient  # not needed by a job that never starts

        return AttachClient(connection, keeps=False, command=self.command.name, step=step).run()

    def _reach(self, where: dict[str, Any]) -> RunConnection | None:
        from gpusched.cli.relay import size
        from gpusched.cli.run_connection import RunConnection, Way, way_of

        give_up_at = time.monotonic() + _REACH_S
        while where["state"] not in FINAL and time.monotonic() < give_up_at:
            if where["path"] is not None and (sock := connect_to_run(where["path"])) is not None:
                return RunConnection(Way(where["path"]), size=size(), sock=sock)
            if where["path"] is None and where["run"] is not None:
                way = way_of({**where, "job": where["id"], "token": ""}, self._client.socket_path)
                return RunConnection(way, size=size())
            where = call_patiently(self._client, f"/v1/jobs/{self.job_id}/attach")["attach"]
        return None

    def conclude(self, end: RunEnding | None) -> int:
        """Report an end that the command itself did not choose; returns the exit code."""
        if end is None or not end.is_known:
            if end is not None and end.left_by is not None:
                self.note(f"Force Terminated JobId={self.job_id}")
                return 128 + end.left_by if end.left_by else 1
            return self._judged()
        if end.sentence:
            raise self.command.error(end.sentence)
        if end.stopped_by is not None:
            self.note(f"Force Terminated JobId={self.job_id}")
        if end.signal is not None:
            return 128 + end.signal
        return end.code or (1 if end.stopped_by is not None else 0)

    def _judged(self) -> int:
        """The exit code as the daemon knows it."""
        from gpusched.cli.gwait import wait_until_done  # rarely needed

        job = wait_until_done(self._client, [self.job_id], None)["jobs"][0]
        return exit_code_of(job)


def _leave(number: int, where: FrameType | None) -> None:
    raise Interrupted(number)


def immediate_s(text: str | None) -> float:
    """How long --immediate waits: a bare one as long as the scheduler needs for a start. Raises: ValueError."""
    if text is None:
        return 1.0
    if not is_digits(text):
        raise ValueError(text)
    return max(1.0, float(text[:9]))


def has_terminal() -> bool:
    """Whether a command would be at a terminal."""
    return os.isatty(0) and os.isatty(1)
