"""The daemon as srun asks it: with patience, since it may be restarted while a step runs."""

from __future__ import annotations

import os
import sys
import time

from gpusched.client import DaemonConnection, chosen_socket
from gpusched.errors import DaemonUnreachable, NotFound, NotReady, UserError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpusched.addons.slurm.command import Command, CommandError, Parsed
    from gpusched.addons.slurm.step_options import Options

BEGIN_PATIENCE_S = 3600.0
"""How long a step waits for a daemon that does not answer; asked again, the daemon knows the process."""
END_PATIENCE_S = 300.0
SIGNAL_WAIT_S = 5.0
"""How long a step waits for the signal that ends its job; a daemon that was restarted does not know that it came."""
NOTE_AFTER_S = 15.0
"""A daemon that has been away for this long is waited for with a note."""
_RETRY_S = 0.2
_BUSY_S = (0.1, 2.0)
"""First and longest interval between attempts to get resources that are in use."""
NAME_LENGTH, COMMAND_LENGTH = 256, 1024
_REFUSALS = {
    "cpus": "More processors requested than permitted",
    "gpus": "Invalid generic resource (gres) specification",
    "nodes": "Requested node configuration is not available",
    "not_running": "Job/step already completing or completed",
}
"""Slurm's sentence by what a refusal is about, see `errors.ABOUT`."""
STARTING, ENDING = "starting", "ending"
_WAITS = {
    "busy": "Requested nodes are busy",
    STARTING: "Job is not running on all of its nodes yet",
    "suspended": "Job is suspended",
    ENDING: "Job is being ended",
}
"""Why a step waits, by the daemon's word."""
_OWN_GPUS = ("gpus", "gpus-per-task", "gpus-per-node", "gres")


class PatientClient:
    """The daemon, asked with patience: it may be restarted while a step runs."""

    def __init__(self) -> None:
        self._client = DaemonConnection(chosen_socket()[0])

    @property
    def socket_path(self) -> str:
        return self._client.socket_path

    def ask(self, method: str, path: str, body: object, patience_s: float) -> dict[str, Any]:
        """One request, repeated while nothing answers: every one of a step may be. Raises: UserError, NotReady."""
        began = time.monotonic()
        until, is_told = began + patience_s, False
        while True:
            try:
                return self._client.call(method, path, body)
            except (DaemonUnreachable, OSError) as error:
                self._client.close()
                if time.monotonic() > until:
                    raise (
                        error
                        if isinstance(error, DaemonUnreachable)
                        else NotReady("the daemon closed the connection", "see: gpusched daemon status")
                    ) from None
            except NotReady:
                # A full disk, for example.
                if time.monotonic() > until:
                    raise
            if not is_told and time.monotonic() > began + NOTE_AFTER_S:
                is_told = True
                sys.stderr.write("srun: the scheduler is not responding; waiting for it\n")
            time.sleep(_RETRY_S)


def begin_step(
    command: Command, typed: Parsed, options: Options, job: Mapping[str, Any], scheduler: PatientClient
) -> dict[str, Any]:
    """Record a step, waiting for what it asks for; returns the daemon's `step`. Raises: CommandError."""
    argv = typed.operands
    is_nested = "SLURM_STEP_ID" in os.environ and not any(map(typed.has, _OWN_GPUS))
    name = (typed.get("job-name") or argv[0].rpartition("/")[2] or "srun")[:NAME_LENGTH]
    request = {
        "name": printable(name, NAME_LENGTH)[:NAME_LENGTH],
        "command": printable(" ".join(argv), COMMAND_LENGTH)[:COMMAND_LENGTH],
        "is_exact": options.is_exact,
        "overlaps": options.has("overlap") or is_nested,
        "overcommits": options.has("overcommit"),
        "time_limit_s": options.time_limit_s,
        **options.placement(),
    }
    pause_s, is_told, was_told = _BUSY_S[0], typed.has("quiet"), False
    began, signal_by = time.monotonic(), float("inf")
    while True:
        try:
            answer = scheduler.ask("POST", "/v1/steps", request, BEGIN_PATIENCE_S)
        except UserError as error:
            raise _refused(command, job, request, error) from None
        if answer["step"] is not None:
            break
        why = _WAITS[answer["why"]]
        now = time.monotonic()
        if answer["why"] == ENDING:
            signal_by = min(signal_by, now + SIGNAL_WAIT_S)
        if now >= signal_by or (typed.has("immediate") and answer["why"] != ENDING):
            raise command.error(f"Unable to create step for job {job['id']}: {why}")
        # The first step of a job often comes before the last word from its nodes.
        if not is_told and (answer["why"] != STARTING or now > began + NOTE_AFTER_S):
            is_told = was_told = True
            command.note(f"Job {job['id']} step creation temporarily disabled, retrying ({why})")
        time.sleep(_BUSY_S[0] if answer["why"] in (STARTING, ENDING) else pause_s)
        pause_s = min(2 * pause_s, _BUSY_S[1])
    found: dict[str, Any] = answer["step"]
    if was_told:
        command.note(f"Step created for StepId={job['job_id']}.{found['step']}")
    return found


def _refused(command: Command, job: Mapping[str, Any], request: Mapping[str, Any], error: UserError) -> CommandError:
    job_id, has, wants = str(job["id"]), len(job["nodes"]), request.get("nodes_min", 0)
    if isinstance(error, NotFound):
        return command.error(f"Unable to confirm allocation for job {job_id}: Invalid job id specified")
    why = _REFUSALS.get(error.about) or printable(error.message, 2000)
    found = command.error(f"Unable to create step for job {job_id}: {why}")
    if error.about == "nodes" and wants > has:
        found = command.error(f"Only allocated {has} nodes asked for {wants}")
    found.text += f"\nsrun: {printable(error.message, 2000)}"
    if error.hint:
        found.text += f"\nsrun: hint: {command.naming_its_help(error.hint)}"
    return found


class StepUsage:
    """What the tasks of a step have used, as far as it was measured."""

    def __init__(self) -> None:
        self.user_cpu_s = 0.0
        self.system_cpu_s = 0.0
        self.peaks_kib: list[int] = []

    def add(self, user_cpu_s: float, system_cpu_s: float, peaks_kib: Sequence[int]) -> None:
        self.user_cpu_s += user_cpu_s
        self.system_cpu_s += system_cpu_s
        self.peaks_kib += peaks_kib


def end_step(
    scheduler: PatientClient,
    number: int,
    codes: Sequence[int],
    usage: StepUsage,
    *,
    is_timeout: bool,
    is_node_lost: bool,
) -> str | None:
    """Record how a step has ended and what it has used; a sentence if that fails, as in a job that is being ended.

    Args: codes: of its tasks, signals negative.
    """
    worst = max(codes, key=lambda code: code if code >= 0 else 128 - code, default=1)
    how = {"exit_code": worst} if worst >= 0 else {"signal": -worst}
    body: dict[str, Any] = {"step": number, **how, "is_timeout": is_timeout}
    if is_node_lost:
        # Not worded differently: the daemon may be older than this command.
        body["is_node_lost"] = True
    if peaks := usage.peaks_kib:
        body.update(
            user_cpu_s=usage.user_cpu_s,
            system_cpu_s=usage.system_cpu_s,
            peak_mem_mib=max(peaks) / 1024,
            mean_mem_mib=sum(peaks) / len(peaks) / 1024,
        )
    try:
        scheduler.ask("POST", "/v1/steps/end", body, END_PATIENCE_S)
    except (UserError, NotReady, DaemonUnreachable) as error:
        return printable(error.message)
    return None
