"""salloc: a job for a command or shell in the foreground; `--no-shell` only holds the resources."""

from __future__ import annotations

import os

from gpusched.addons.slurm.command import Command, cluster_suffix, run
from gpusched.addons.slurm.foreground import NOT_NOW, ForegroundJob, has_terminal, immediate_s
from gpusched.addons.slurm.request import JOB_ROWS, JobRequest, from_variables, only_slurm_rows
from gpusched.addons.slurm.submission import (
    environment,
    hand_in,
    print_forecast,
    say_notes,
    say_options,
    submit_line,
)
from gpusched.cli.environment import base_name, current_folder, umask
from gpusched.cli.grun import Interrupted
from gpusched.client import connect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.addons.slurm.command import Parsed
    from gpusched.client import DaemonConnection

_ROWS = """
--bell  ring the terminal's bell when the job starts
-D --chdir DIR  working directory
-I --immediate [S]  give up unless the job starts within S seconds
-K --kill-command [SIGNAL]  accepted: the command always ends with its job
--no-bell  do not ring the bell
--no-shell  start no command; the job holds its resources until scancel or its time limit
-Q --quiet  print only errors
--test-only  print when the job would start, without submitting it
-v --verbose  print the options in effect
--x11 [WHICH]  accepted: jobs run on this machine and inherit DISPLAY
"""
_OWN = (
    *("bell", "clusters", "immediate", "kill-command", "no-bell", "no-shell", "quiet", "test-only", "verbose"),
    "x11",
)
_OTHERS = ("cpu-bind", "bcast", "compress", "het-group", "export-file", "ignore-pbs", "batch", "propagate")
COMMAND = Command(
    "salloc",
    "salloc [OPTIONS...] [COMMAND [ARGS...]]",
    f"{_ROWS}{JOB_ROWS}{only_slurm_rows(_OTHERS)}",
    bad_option_code=255,
    has_h=True,
)
_VARIABLES = {
    "BELL": "bell",
    "IMMEDIATE": "immediate",
    "KILL_CMD": "kill-command",
    "NO_BELL": "no-bell",
}
_HOLDER = ("sleep", "infinity")
"""What the job of --no-shell runs: it ends only by a signal."""


def main() -> int:
    return run(COMMAND, body)


def body(typed: Parsed) -> int:
    request = JobRequest(COMMAND, _OWN)
    request.take(from_variables(COMMAND, "SALLOC_", _VARIABLES))
    request.take(typed.options)
    own = request.own
    is_quiet = "quiet" in own
    if "verbose" in own and not is_quiet:
        say_options(COMMAND, typed.options)
    within_s = None
    if "immediate" in own:
        try:
            within_s = immediate_s(own["immediate"])
        except ValueError:
            raise request.invalid("immediate") from None
    spec = _spec(typed, request, is_immediate=within_s is not None)
    if not is_quiet:
        for text in (*request.ignored, *request.notes):
            COMMAND.note(text)
    with connect() as client:
        cluster_suffix(COMMAND, client, own.get("clusters"))
        if "test-only" in own:
            return print_forecast(COMMAND, client, spec)
        answer = hand_in(COMMAND, client, {"spec": spec}, never_now=NOT_NOW if within_s is not None else "")
        if not is_quiet:
            say_notes(COMMAND, answer, spec)
        return _serve(client, answer["job"]["id"], own, within_s)


def _spec(typed: Parsed, request: JobRequest, *, is_immediate: bool) -> dict[str, Any]:
    has_shell = "no-shell" not in request.own
    argv = list(typed.operands or [os.environ.get("SHELL") or "/bin/sh"]) if has_shell else list(_HOLDER)
    name = base_name(argv[0]) if has_shell and typed.operands else "interactive"
    spec = {"name": name, **request.spec(), "argv": argv, "umask": umask(), "slurm": True, "stdout": os.devnull}
    spec["submit_line"] = submit_line(COMMAND)
    spec["env"], spec["env_named"] = environment(COMMAND, None)
    folder = current_folder()
    if spec.setdefault("work_dir", folder) != folder:
        spec["submit_dir"] = folder
    if has_shell:
        spec["interactive"] = "pty" if has_terminal() else "pipes"
    else:
        spec.update(requeue=False, only_holds=True)
    if is_immediate:
        spec["if_infeasible"] = "refuse"
    return spec


def _serve(client: DaemonConnection, job_id: str, own: dict[str, str | None], within_s: float | None) -> int:
    """Stay until the command ends, and return its exit code."""
    job = ForegroundJob(COMMAND, client, job_id, is_quiet="quiet" in own)
    try:
        where = job.wait_for_start(within_s)
    except Interrupted as left:
        return 128 + left.number
    if where is None:
        if within_s is not None:
            job.cancel()
            raise COMMAND.error("Job submit/allocate failed: Requested nodes are busy")
        return 1
    job.note(f"Granted job allocation {job_id}")
    if "no-shell" in own:
        return 0
    if "bell" in own and "no-bell" not in own and has_terminal():
        os.write(2, b"\a")
    try:
        return job.conclude(job.relay(where))
    finally:
        job.note(f"Relinquishing job allocation {job_id}")
