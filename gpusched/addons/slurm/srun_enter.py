"""srun --jobid from outside of that job: the same srun is started in it, at the terminal or pipes of this one."""

from __future__ import annotations

import os

from gpusched.addons.slurm.foreground import has_terminal
from gpusched.addons.slurm.srun_job import ourselves, typed_again
from gpusched.addons.slurm.step_tasks import OWN_PREFIXES
from gpusched.cli.environment import current_folder, umask
from gpusched.cli.visit import NotRunning, is_over, start_in
from gpusched.engine.attach_protocol import Wanted
from gpusched.errors import Forbidden, NotFound, UserError
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.addons.slurm.command import Command, CommandError, Parsed
    from gpusched.addons.slurm.step_client import PatientClient

PATIENCE_S = 60.0


def run_in(command: Command, typed: Parsed, job_id: str, scheduler: PatientClient, *, is_in_another: bool) -> int:
    """Run a step of this job; returns its exit code. Raises: CommandError.

    Args: is_in_another: this process belongs to another job, whose variables are not for this one.
    """
    whole, underscore, task = job_id.partition("_")
    if not all(is_digits(number) for number in (whole, *((task,) if underscore else ()))):
        raise command.error(f'Invalid numeric value "{job_id}" for --jobid.')
    options = [typed_again(name, text) for name, text in typed.options if name != "jobid"]
    end_of_options = ("--",) if typed.operands[0].startswith("-") else ()
    wanted = Wanted(
        [*ourselves(), f"--jobid={job_id}", *options, *end_of_options, *typed.operands],
        {k: v for k, v in os.environ.items() if not (is_in_another and k.startswith(OWN_PREFIXES))},
        is_terminal=typed.has("pty") and has_terminal(),
        umask=umask(),
        work_dir=current_folder(),
        # It passes them on to its tasks, who must not get them twice.
        signals_to="main",
    )
    asks = os.isatty(0) and not typed.has("quit-on-interrupt") and not typed.has("disable-status")
    try:
        end = start_in(
            lambda method, path, body: scheduler.ask(method, path, body, PATIENCE_S),
            job_id,
            wanted,
            "srun",
            step=f"JobId={job_id}" if asks else "",
        )
    except UserError as error:
        raise _refused(command, job_id, error) from None
    if end.left_by is not None:
        return 128 + end.left_by if end.left_by else 0
    if end.sentence:
        raise command.error(end.sentence)
    if end.stopped_by is not None:
        command.note(f"Force Terminated JobId={job_id}")
    if end.signal is not None:
        return 128 + end.signal
    return end.code or (1 if end.stopped_by is not None else 0)


def _refused(command: Command, job_id: str, error: UserError) -> CommandError:
    """Slurm's words, then ours."""
    about = f"Unable to confirm allocation for job {job_id}"
    is_expired = isinstance(error, NotFound)
    text = printable(error.message, 2000)
    if is_expired:
        text = f"{about}: Invalid job id specified"
    elif isinstance(error, Forbidden):
        text = f"{about}: Access/permission denied"
    elif isinstance(error, NotRunning) and error.state == "PENDING":
        text = f"{about}: Job is pending execution"
    elif isinstance(error, NotRunning) and is_over(error.state):
        text, is_expired = f"SLURM job {job_id} has expired.", True
    elif isinstance(error, NotRunning):
        why = "Requested operation is presently disabled"
        if error.state == "COMPLETING":
            why = "Job/step already completing or completed"
        text = f"Unable to create step for job {job_id}: {why}"
    found = command.error(text)
    if is_expired:
        found.text += f"\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job {job_id}"
    found.text += f"\nsrun: {printable(error.message, 2000)}" + (f"\nsrun: hint: {error.hint}" if error.hint else "")
    return found
