"""srun: tasks in the allocation of a job; outside of one, a job of its own in the foreground."""

from __future__ import annotations

import os
import sys

from gpusched.cli.slurm.command import Command, CommandError, run
from gpusched.cli.slurm.request import JOB_ROWS, only_slurm_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.slurm.command import Parsed

_ROWS = """
-D --chdir DIR  working directory of the tasks
--cpu-bind HOW  bind tasks to cores: none, rank, cores, threads, map_cpu:0,1, mask_cpu:0x3; q and v are accepted
-e --error FILE  file of the error output; %t task, %s step, %j job, %N node
--epilog PROGRAM  accepted: no program runs around a step
--exact  the step gets only the cores that it asks for, and no other such step has them meanwhile
--export LIST  environment of the tasks: ALL, NONE, or names and NAME=VALUE
--gpu-bind HOW  which GPUs a task sees: none, single:N, per_task:N, map_gpu:LIST, closest
-I --immediate [S]  give up unless the job or step starts within S seconds
-i --input FILE  standard input of the tasks: a file, all, none, or the number of a task
--jobid ID  run the tasks in this running job of yours, from inside or outside of it
-K --kill-on-bad-exit [0|1]  end the step when a task fails
-l --label  begin each line of output with the number of its task
--mpi TYPE  none, or list; other values have no effect
--multi-prog  refused: start each program with an srun of its own
--open-mode MODE  append to files that exist, or truncate them
-o --output FILE  file of the output, in place of srun's own; %t task, %s step, %j job, %N node
-O --overcommit  more tasks than cores
--overlap  share cores and GPUs with other steps of the job
-E --preserve-env  accepted: the step's variables are always its own
--prolog PROGRAM  accepted: no program runs around a step
--pty [FD]  run task 0 at a terminal
-Q --quiet  print nothing but errors
-X --disable-status  the first Ctrl-C goes to the tasks, not the second
--quit-on-interrupt  end the step at the first Ctrl-C
-r --relative N  begin at this node of the allocation
--slurmd-debug LEVEL  accepted: there is no slurmd
--task-epilog PROGRAM  accepted: no program runs around a task
--task-prolog PROGRAM  accepted: no program runs around a task
--test-only  do not submit; print when the job would start
-T --threads N  accepted: tasks are started one after the other
-u --unbuffered  accepted: output is never held back, but for the lines of --label
-v --verbose  print the options that were given
-W --wait S  end the step S seconds after its first task has ended
--whole  accepted: a step may use all cores of its job anyway
--x11 [WHICH]  accepted: a job is on this machine, and DISPLAY is passed on
"""
_OTHERS = ("cpu-bind", "gpu-bind", "overcommit", "export-file", "ignore-pbs", "batch")
COMMAND = Command(
    "srun",
    "srun [OPTIONS...] COMMAND [ARGS...]",
    f"{_ROWS}{JOB_ROWS}{only_slurm_rows(_OTHERS)}",
    bad_option_code=255,
    has_h=True,
)


def main() -> int:
    return run(COMMAND, body)


def body(typed: Parsed) -> int:
    if typed.get("mpi") == "list":
        sys.stdout.write("MPI plugin types are...\n\tnone\n")
        return 0
    if ":" in typed.operands:
        raise COMMAND.error(
            "jobs of several unlike parts (COMMAND : COMMAND) are not supported; start each with an srun of its own",
            255,
        )
    if typed.has("multi-prog"):
        raise COMMAND.error("--multi-prog is not supported; start each program with an srun of its own", 255)
    if not typed.operands:
        raise CommandError("srun: fatal: No command given to execute.")
    job_id = typed.get("jobid") or os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
    if job_id:
        from gpusched.cli.slurm.step import run_step  # needs nothing of a submission

        return run_step(COMMAND, typed, job_id)
    from gpusched.cli.slurm.srun_job import start_job  # needs the whole of a submission

    return start_job(COMMAND, typed)
