"""srun: tasks in the allocation of a job; outside of one, a new job in the foreground."""

from __future__ import annotations

import os
import sys

from gpusched.addons.slurm.command import Command, CommandError, run
from gpusched.addons.slurm.request import JOB_ROWS, only_slurm_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.addons.slurm.command import Parsed

_ROWS = """
-D --chdir DIR  working directory of the tasks
--cpu-bind HOW  bind tasks to cores: none, rank, cores, threads, map_cpu:0,1, mask_cpu:0x3; q and v are accepted
-e --error FILE  file for standard error; %t is the task, %s the step, %j the job, %N the node
--epilog PROGRAM  accepted: no program runs around a step
--exact  give the step only the cores it requests, and no other step with --exact the same ones
--export LIST  variables to pass to the tasks: ALL, NONE, or a list of NAME and NAME=VALUE
--gpu-bind HOW  which GPUs a task sees: none, single:N, per_task:N, map_gpu:LIST, closest
-I --immediate [S]  give up unless the job or step starts within S seconds
-i --input FILE  standard input of the tasks: a file, all, none, or a task number
--jobid ID  run the tasks in this running job of yours, from inside or outside of it
-K --kill-on-bad-exit [0|1]  end the step when a task fails
-l --label  prefix each line of output with its task number
-k --no-kill [off]  go on with the other nodes when one fails
-m --distribution HOW  order of the tasks over the nodes: block, cyclic, plane=SIZE, arbitrary
--mpi TYPE  none, or list; there is no PMI for others
--multi-prog  the operand is a file that says which tasks run which program
--open-mode MODE  append to existing files, or truncate them
-o --output FILE  file for standard output instead of srun's own; %t, %s, %j and %N as in --error
-O --overcommit  more tasks than cores
--overlap  share cores and GPUs with other steps of the job
-E --preserve-env  accepted: a step always sets its own variables
--prolog PROGRAM  accepted: no program runs around a step
--pty [FD]  run task 0 at a terminal
-Q --quiet  print only errors
-X --disable-status  pass the first Ctrl-C to the tasks instead of asking for a second
--quit-on-interrupt  end the step at the first Ctrl-C
-r --relative N  first node to use, counted within the allocation
--slurmd-debug LEVEL  accepted: there is no slurmd
--task-epilog PROGRAM  accepted: no program runs around a task
--task-prolog PROGRAM  accepted: no program runs around a task
--test-only  print when the job would start, without submitting it
-T --threads N  accepted: tasks are started one by one
-u --unbuffered  accepted: output is never buffered, except for complete lines with --label
-v --verbose  print the options in effect
-W --wait S  end the step S seconds after its first task ends
--whole  accepted: a step may always use all cores of its job
--x11 [WHICH]  accepted: jobs run on this machine and inherit DISPLAY
"""
_OTHERS = ("cpu-bind", "gpu-bind", "distribution", "no-kill", "overcommit", "export-file", "ignore-pbs", "batch")
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
            "heterogeneous steps (COMMAND : COMMAND) are not supported; start each command with its own srun",
            255,
        )
    if not typed.operands:
        raise CommandError("srun: fatal: No command given to execute.")
    job_id = typed.get("jobid") or os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
    if job_id:
        from gpusched.addons.slurm.step import run_step  # needs nothing of a submission

        return run_step(COMMAND, typed, job_id)
    from gpusched.addons.slurm.srun_job import start_job  # needs the whole of a submission

    return start_job(COMMAND, typed)
