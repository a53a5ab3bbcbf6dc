"""The options of gsub, which a script's #GSUB and #SBATCH lines may say too."""

from __future__ import annotations

from gpusched.cli.arrays import array_options
from gpusched.cli.common import common_options
from gpusched.cli.failing import failing_options
from gpusched.cli.log_options import log_options
from gpusched.cli.notify_options import notify_options
from gpusched.cli.parse import Option, Table, decimal, text, whole
from gpusched.cli.readers import (
    begin,
    choice,
    environment,
    gpus,
    memory,
    memory_per_core,
    notice,
    one,
    retry_on,
    seconds_from_zero,
    size,
    time_limit,
)
from gpusched.cli.repeat_options import repeat_options
from gpusched.cli.where import gres, where_options
from gpusched.cli.workflow import dependency_options, pipeline_options


def gsub_table() -> Table:
    """gsub, and what a script's #GSUB and #SBATCH lines may say."""
    what, res, when, fail, out, slurm = (
        "What to run",
        "Resources",
        "When",
        "Failure and end",
        "Files",
        "Slurm spellings",
    )
    return Table(
        "gsub",
        [
            Option("--wrap", metavar="LINE", read=text("wrap"), section=what, help="run this shell line"),
            Option(
                "--batch",
                metavar="FILE",
                read=text("batch"),
                section=what,
                completes="file",
                help="one shell line a job; - reads standard input; one transaction, ids printed in order",
            ),
            Option(
                "-J",
                "--name",
                "--job-name",
                metavar="NAME",
                read=text("name"),
                section=what,
                help="name of the job; default: the script's or the command's",
            ),
            Option(
                "-D",
                "--chdir",
                metavar="DIR",
                read=text("work_dir"),
                section=what,
                completes="dir",
                help="working directory; default: the current one",
            ),
            Option(
                "--export",
                metavar="LIST",
                read=text("export"),
                section=what,
                help="environment to hand over: ALL (default), NONE, or names and KEY=VALUE with commas",
            ),
            Option(
                "-E",
                "--env",
                metavar="KEY=VALUE",
                read=environment,
                section=what,
                help="one more variable; may be repeated",
            ),
            *pipeline_options(what),
            *repeat_options(what),
            Option(
                "-g",
                "-G",
                "--gpus",
                metavar="N",
                read=gpus,
                section=res,
                help="GPUs: 2, a100:2, a share of one card, 0.5, or a MIG instance, 1g.10gb; default 0",
            ),
            Option(
                "--vram",
                metavar="SIZE",
                read=size("vram_mib"),
                section=res,
                help="book only this much VRAM on each card and share it with other jobs of yours",
            ),
            Option(
                "--min-vram",
                metavar="SIZE",
                read=size("min_vram_mib"),
                section=res,
                help="only cards with at least this much VRAM",
            ),
            Option(
                "--gpu-ids",
                metavar="FORM",
                read=choice("gpu_ids", "index", "uuid"),
                section=res,
                completes="index uuid",
                help="form of CUDA_VISIBLE_DEVICES: index (default) or uuid",
            ),
            Option(
                "-c",
                "--cpus",
                "--cpus-per-task",
                metavar="N",
                read=decimal("cpus", 0, 65536),
                section=res,
                help="cores; 0 books none, a fraction a part of one; default 1",
            ),
            Option(
                "-m",
                "--mem",
                metavar="SIZE",
                read=memory,
                section=res,
                help="host memory, as 8G, 8GiB or 8192 (MiB); default: none booked",
            ),
            Option(
                "-t",
                "--time",
                metavar="TIME",
                read=time_limit,
                section=when,
                help="time limit: 90s, 30m, 4h, 2d, HH:MM:SS, D-HH:MM; a bare number is minutes; default: none",
            ),
            Option("-q", "--queue", metavar="NAME", read=text("queue"), section=when, help="queue; default: default"),
            Option(
                "-A",
                "--account",
                metavar="NAME",
                read=text("account"),
                section=when,
                help="account of the config the usage goes to; default: the one that names you, else your user name",
            ),
            Option(
                "--nice",
                metavar="N",
                read=whole("nice", -10000, 10000),
                section=when,
                help="go behind others by N points, or before them with N below 0; default 0",
            ),
            *dependency_options(when),
            Option(
                "--begin",
                metavar="WHEN",
                read=begin,
                section=when,
                help="not before: 2h from now as now+2h, 18:00, 2026-12-24T18:00",
            ),
            Option("-H", "--hold", sets={"hold": True}, section=when, help="wait for gctl release"),
            *array_options(),
            *where_options(res, when),
            Option(
                "--retries",
                metavar="N",
                read=whole("retries", 0, 1000),
                section=fail,
                help="attempts after the first that fails; default 0",
            ),
            Option(
                "--backoff",
                metavar="TIME",
                read=seconds_from_zero("backoff_s"),
                section=fail,
                help="wait before the first retry; default 10s",
            ),
            Option(
                "--backoff-factor",
                metavar="X",
                read=decimal("backoff_factor", 1, 1000),
                section=fail,
                help="each wait is this many times the one before; default 2",
            ),
            Option(
                "--backoff-max",
                metavar="TIME",
                read=seconds_from_zero("backoff_max_s"),
                section=fail,
                help="longest wait; default 10m",
            ),
            Option(
                "--retry-on",
                metavar="LIST",
                read=retry_on,
                section=fail,
                help="exit, signal, oom, timeout, node_fail, all, codes 3 or 10-20, SIGSEGV; "
                "default exit,signal,oom,node_fail",
            ),
            Option(
                "--requeue",
                sets={"requeue": True},
                section=fail,
                help="repeat for free a run lost to the machine (default)",
            ),
            Option("--no-requeue", sets={"requeue": False}, section=fail, help="do not"),
            *failing_options(fail),
            Option(
                "--signal",
                metavar="[B:]SIG[@S]",
                read=notice,
                section=fail,
                help="send a signal S seconds (default 60) before the time limit, or first, instead of TERM, when the "
                "job is preempted, requeued or cancelled before; B: to the first process only",
            ),
            Option(
                "--grace",
                metavar="TIME",
                read=seconds_from_zero("grace_s"),
                section=fail,
                help="between the first signal and KILL when the job is stopped; default 30s",
            ),
            *notify_options(fail, slurm),
            Option(
                "-o",
                "--output",
                metavar="FILE",
                read=text("stdout"),
                section=out,
                completes="file",
                help="output, in a folder that is made if it is missing; %j id, %A_%a array and task, %x name, "
                "%u user, %N node, %5j padded; default gpusched-%j.out, of a task gpusched-%A_%a.out",
            ),
            Option(
                "-e",
                "--error",
                metavar="FILE",
                read=text("stderr"),
                section=out,
                completes="file",
                help="errors; default: into the output",
            ),
            Option(
                "--open-mode",
                metavar="MODE",
                read=choice("open_mode", "append", "truncate"),
                section=out,
                completes="append truncate",
                help="append or truncate for all runs; default: each retry gets a file of its own",
            ),
            *log_options(out),
            Option("-W", "--wait", sets={"wait": True}, section="Output", help="wait and exit with the job's code"),
            Option(
                "-f",
                "--follow",
                sets={"follow": True},
                section="Output",
                help="print the job's output as it comes, then exit with the job's code",
            ),
            Option(
                "-v",
                "--verbose",
                sets={"verbose": True},
                section="Output",
                help="list the variables that [submit] env_exclude leaves out of the job's environment",
            ),
            Option("--parsable", sets={"quiet": True}, section="Output", help="print the id alone"),
            Option(
                "--dry-run",
                sets={"dry_run": True},
                section="Output",
                help="submit nothing; say whether it would start now, where, or why not",
            ),
            Option("-p", "--partition", metavar="NAME", read=text("queue"), section=slurm, help="as --queue"),
            Option("--gres", metavar="gpu[:TYPE]:N", read=gres, section=slurm, help="as --gpus-per-node"),
            Option(
                "--mem-per-cpu",
                metavar="SIZE",
                read=memory_per_core,
                section=slurm,
                help="host memory for each core",
            ),
            Option("-n", "--ntasks", metavar="1", read=one("tasks"), section=slurm, help="1 is accepted"),
            Option(
                "--ntasks-per-node",
                "--tasks-per-node",
                metavar="1",
                read=one("tasks"),
                section=slurm,
                help="1 is accepted",
            ),
            *common_options(),
        ],
    )


ONLY_TYPED = frozenset(
    {
        "wrap",
        "batch",
        "dry_run",
        "follow",
        "verbose",
        "json",
        "help",
        "version",
        "completion",
        "key_again",
        "resubmit",
        "dag",
        "resume",
        "vars",
    }
)
"""What gsub's options set that makes no sense in a #GSUB line or a GSUB_* variable."""
