"""The options of gsub, which a script's #GSUB and #SBATCH lines may say too."""

from __future__ import annotations

from gpusched.cli.common import common_options
from gpusched.cli.parse import Option, Table, decimal, text, whole, words_of
from gpusched.cli.readers import (
    begin,
    choice,
    environment,
    events,
    gpus,
    kill_on_invalid_dep,
    log_max,
    mail_type,
    memory,
    memory_per_core,
    notice,
    one,
    retry_on,
    seconds_from_zero,
    size,
    sweep,
    time_limit,
    variable,
)
from gpusched.cli.where import gres, where_options


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
            *_pipeline_options(what),
            *_repeat_options(what),
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
                help="time limit: 90s, 30m, 4h, 2d, HH:MM:SS, D-HH:MM; a bare number is minutes; auto: one that 95 % "
                "of jobs like it keep; 0: none; default: the queue's, or none",
            ),
            Option("-q", "--queue", metavar="NAME", read=text("queue"), section=when, help="queue; default: default"),
            Option(
                "-A",
                "--account",
                metavar="NAME",
                read=text("account"),
                section=when,
                help="account the usage goes to; default: the only one that lists you; see gctl account --me",
            ),
            Option(
                "--nice",
                metavar="N",
                read=whole("nice", -10000, 10000),
                section=when,
                help="go behind others by N points, or before them with N below 0; default 0",
            ),
            *_dependency_options(when),
            Option(
                "--begin",
                metavar="WHEN",
                read=begin,
                section=when,
                help="not before: 2h from now as now+2h, 18:00, 2026-12-24T18:00",
            ),
            Option("-H", "--hold", sets={"hold": True}, section=when, help="wait for gctl release"),
            *_array_options(),
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
            *_failing_options(fail),
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
            *_notify_options(fail, slurm),
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
            *_log_options(out),
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


def _array_options() -> list[Option]:
    """Many tasks of one submission."""
    many = "Many tasks"
    return [
        Option(
            "-a",
            "--array",
            metavar="TASKS",
            read=text("array"),
            section=many,
            help="one task for each number: 0-9, 1,3,5 or 0-30:2; 0-99%4 runs at most 4 at once; the number is in "
            "GPUSCHED_ARRAY_TASK_ID and SLURM_ARRAY_TASK_ID",
        ),
        Option(
            "--sweep",
            metavar="NAME=VALUES",
            read=sweep,
            section=many,
            help="one task for each value, lr=1e-3,1e-4 or seed=0..4, in the variable of that name and in place of "
            "{lr} in the command; may be repeated: every combination is a task",
        ),
        Option(
            "--max-fails",
            metavar="N",
            read=whole("max_fails", 0, 4_000_000),
            section=many,
            help="when more than N tasks have failed, cancel the rest; default: go on",
        ),
    ]


def _repeat_options(what: str) -> list[Option]:
    """Work that can be repeated: --key, --resubmit, --snapshot."""
    return [
        Option(
            "--key",
            metavar="TEXT",
            read=text("key"),
            section=what,
            help="submitting the same key again, by the same user, returns the job of the first time, ended or not",
        ),
        Option(
            "--key-again",
            metavar="WHEN",
            read=choice("key_again", "never", "failed", "ended"),
            section=what,
            completes="never failed ended",
            help="make another job for the key once the last one has failed (ended, and not COMPLETED) or has "
            "ended in any way; default never",
        ),
        Option(
            "--resubmit",
            metavar="IDS",
            read=words_of("resubmit"),
            section=what,
            help="once more what these jobs ran, ended or not: same script, arguments, environment, folder, requests; "
            "options given here win; -E adds to the environment",
        ),
        Option(
            "--snapshot",
            sets={"snapshot": "auto"},
            read=choice("snapshot", "auto", "git", "copy", "no"),
            section=what,
            help="keep the code as it is now, and start every run in that copy: what git tracks or does not ignore, "
            "elsewhere (or with --snapshot=copy) the whole folder; --snapshot=no takes it back",
        ),
    ]


def _failing_options(section: str) -> list[Option]:
    """What happens when a job fails, or does nothing."""
    return [
        Option(
            "--fallback",
            metavar="LINE",
            read=text("fallback"),
            section=section,
            help="shell line that runs once after the last failure, as a job of its own with the same request",
        ),
        Option(
            "--ignore-idle",
            sets={"ignore_idle": True},
            section=section,
            help="GPUs that do nothing are no reason to warn or to act, see [idle] in the config",
        ),
    ]


_EVENTS = (
    "begin end fail retry preempt time_limit_80 held pending gpu_idle vram_over gpu_unbooked gpu_intruder queue_empty"
)
"""Those of `model.alerts`, which few submissions import."""


def _notify_options(fail: str, slurm: str) -> list[Option]:
    """Whom to tell what."""
    return [
        Option(
            "--notify",
            metavar="LIST",
            read=events,
            section=fail,
            completes=f"{_EVENTS} all",
            help=f"tell you of {_EVENTS.replace(' ', ', ')}, or all, through the targets of your notify.toml; of an "
            "array's tasks each with array_tasks",
        ),
        Option(
            "--notify-to",
            metavar="NAMES",
            read=words_of("notify_to"),
            section=fail,
            help="only these of your targets, or mail addresses; default: all targets that want the event",
        ),
        Option(
            "--mail-type",
            metavar="LIST",
            read=mail_type,
            section=slurm,
            completes="BEGIN END FAIL REQUEUE TIME_LIMIT_80 ALL NONE",
            help="as --notify; ALL is begin, end, fail, retry and preempt",
        ),
        Option("--mail-user", metavar="ADDRESS", read=words_of("notify_to"), section=slurm, help="as --notify-to"),
    ]


def _log_options(section: str) -> list[Option]:
    """The size of output files."""
    return [
        Option(
            "--log-max",
            metavar="SIZE[:KEEP]",
            read=log_max,
            section=section,
            help="put an output file aside as FILE.old1 when it has grown to SIZE, and keep KEEP of them; default: let "
            "it grow; 3 kept",
        )
    ]


def _dependency_options(when: str) -> list[Option]:
    """What a job waits for."""
    return [
        Option(
            "-d",
            "--dependency",
            metavar="LIST",
            read=text("dependency"),
            section=when,
            help="afterok:41, afterany:41:42, afternotok:41, after:41 (started), after:41+10 (10 minutes later), "
            "singleton (no earlier job of this name is left); join with , (all) or ? (any)",
        ),
        Option(
            "--kill-on-invalid-dep",
            metavar="yes|no",
            read=kill_on_invalid_dep,
            section=when,
            completes="yes no",
            help="end the job when its dependency can never come true, or keep it; default: "
            "[life] never_satisfied of the config",
        ),
    ]


def _pipeline_options(what: str) -> list[Option]:
    """Whole pipelines."""
    return [
        Option(
            "--dag",
            metavar="FILE",
            read=text("dag"),
            section=what,
            completes="file",
            help="a pipeline: jobs that wait for each other by name, in TOML; checked whole before any is recorded",
        ),
        Option(
            "--var",
            metavar="NAME=VALUE",
            read=variable,
            section=what,
            help="with --dag: a variable of its [vars]; may be repeated",
        ),
        Option(
            "--resume",
            metavar="PIPELINE",
            read=text("resume"),
            section=what,
            help="run again what of a pipeline, p42, did not finish COMPLETED",
        ),
    ]
