"""srun outside of a job: a new job, in which the same srun starts the tasks, in the foreground."""

from __future__ import annotations

import os
import sys

from gpusched.addons.slurm.command import cluster_suffix
from gpusched.addons.slurm.foreground import NOT_NOW, ForegroundJob, has_terminal, immediate_s
from gpusched.addons.slurm.request import JobRequest, from_variables
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

    from gpusched.addons.slurm.command import Command, Parsed

_OF_STEP = frozenset(
    "chdir cpu-bind disable-status distribution epilog error exact export gpu-bind input jobid kill-on-bad-exit label "
    "mpi multi-prog no-kill open-mode output overcommit overlap preserve-env prolog pty quit-on-interrupt relative "
    "slurmd-debug task-epilog task-prolog threads unbuffered wait whole x11".split()
)
"""Options of the step, which the srun in the job reads."""
_OWN = frozenset({"clusters", "immediate", "quiet", "test-only", "verbose", *_OF_STEP})
_OF_JOB_ALONE = frozenset(
    "account begin clusters comment constraint deadline dependency exclude extra-node-info gpus-per-socket hold "
    "immediate kill-on-invalid-dep licenses mail-type mail-user mincpus nice nodefile nodelist nodes partition prefer "
    "priority qos reservation signal time wckey".split()
)
"""Options with which the job has been made when its srun starts, so that this one need not see them."""
_VARIABLES = {
    "CPUS_PER_TASK": "cpus-per-task",
    "DEPENDENCY": "dependency",
    "EXPORT_ENV": "export",
    "IMMEDIATE": "immediate",
    "JOB_NAME": "job-name",
    "KILL_BAD_EXIT": "kill-on-bad-exit",
    "LABELIO": "label",
    "MPI_TYPE": "mpi",
    "NPROCS": "ntasks",
    "NTASKS": "ntasks",
    "NTASKS_PER_GPU": "ntasks-per-gpu",
    "NTASKS_PER_NODE": "ntasks-per-node",
    "OPEN_MODE": "open-mode",
    "UNBUFFEREDIO": "unbuffered",
    "WAIT": "wait",
    "WORKING_DIR": "chdir",
}
_MAIN = "import sys; sys.argv[0] = 'srun'; from gpusched.addons.slurm.srun import main; sys.exit(main())"


def start_job(command: Command, typed: Parsed) -> int:
    """Submit, stay until the tasks have ended, and return the exit code of the srun in the job."""
    variables = from_variables(command, "SLURM_", _VARIABLES)
    request = JobRequest(command, _OWN)
    request.take(variables)
    request.take(typed.options)
    own = request.own
    is_quiet = "quiet" in own
    if "verbose" in own and not is_quiet:
        say_options(command, typed.options)
    if not typed.operands:
        raise _fatal("No command given to execute.")
    within_s = None
    if "immediate" in own:
        try:
            within_s = immediate_s(own["immediate"])
        except ValueError:
            raise request.invalid("immediate") from None
    spec = _spec(command, request, [*variables, *typed.options], typed.operands)
    if within_s is not None:
        spec["if_infeasible"] = "refuse"
    if not is_quiet:
        for text in (*request.ignored, *request.notes):
            command.note(text)
    with connect() as client:
        cluster_suffix(command, client, own.get("clusters"))
        if "test-only" in own:
            return print_forecast(command, client, spec)
        answer = hand_in(command, client, {"spec": spec}, never_now=NOT_NOW if within_s is not None else "")
        if not is_quiet:
            say_notes(command, answer, spec)
        job = ForegroundJob(command, client, answer["job"]["id"], is_quiet=is_quiet)
        try:
            where = job.wait_for_start(within_s)
        except Interrupted as left:
            job.note(f"Force Terminated JobId={job.job_id}")
            return 128 + left.number
        if where is not None:
            asks = os.isatty(0) and own.keys().isdisjoint({"quit-on-interrupt", "disable-status"})
            return job.conclude(job.relay(where, f"StepId={job.job_id}.0" if asks else ""))
        if within_s is not None:
            job.cancel()
            raise command.error("Unable to allocate resources: Requested nodes are busy")
        return 1


def _fatal(text: str) -> Exception:
    from gpusched.addons.slurm.command import CommandError  # an error only

    return CommandError(f"srun: fatal: {text}", 1)


def _spec(
    command: Command, request: JobRequest, options: list[tuple[str, str | None]], operands: list[str]
) -> dict[str, Any]:
    step = [typed_again(name, text) for name, text in options if name not in _OF_JOB_ALONE]
    if operands[0].startswith("-"):
        step.append("--")
    spec: dict[str, Any] = {
        "name": base_name(operands[0]) or "srun",
        **request.spec(),
        "argv": [*ourselves(), *step, *operands],
        "work_dir": current_folder(),
        # What it prints goes to this terminal and not into a file, as with Slurm.
        "stdout": os.devnull,
        "interactive": "pty" if "pty" in request.own and has_terminal() else "pipes",
        "umask": umask(),
        "submit_line": submit_line(command),
        "slurm": True,
    }
    # Whatever --export says is for the tasks.
    spec["env"], spec["env_named"] = environment(command, None)
    return spec


def typed_again(name: str, text: str | None) -> str:
    return f"--{name}" if text is None else f"--{name}={text}"


def ourselves() -> list[str]:
    """How to start this program: by the path that it was started by, so that the job runs the same one."""
    path = os.path.abspath(sys.argv[0])
    if os.path.basename(path) == "srun" and os.access(path, os.X_OK):
        return [path]
    return [sys.executable, "-c", _MAIN]
