"""The script that Slurm gets of a job that is handed over to it: `#SBATCH` lines, then a wrapper of the job's command.

The wrapper records in a separate folder, on storage that the nodes share with the daemon, which of Slurm's jobs the
run is, when it began and how it ended:

    claim     id of the job of Slurm that may run it; any other one ends at once, so that nothing runs twice
    started   when, by rename
    result    exit code and times, by rename: the truth about the exit code; whether it was told to stop before
    checkpoint  the job's GPUSCHED_CHECKPOINT_FILE

`record` reads these. The environment is written into the script, so that neither sbatch nor the nodes add theirs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from gpusched.addons.slurm.handover.directives import directive_line, directives
from gpusched.lifecycle.arrays import fill
from gpusched.lifecycle.output_paths import input_path, values_of
from gpusched.model import spec as declared
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.launch import Launch as DeclaredLaunch
from gpusched.model.layout import LAYOUT_KEYS, as_asked, count_tasks, starts_ranks, states_tasks
from gpusched.model.option import fields_of
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.request import Request as DeclaredRequest
from gpusched.model.states import RunState
from gpusched.model.value import Value, asdict

RECORD = "@GPUSCHED_RECORD@"
"""Placeholder in a script for the folder of its record, which the engine fills in."""
_IDENTIFIER = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_NAME = re.compile("[A-Za-z_][A-Za-z0-9_-]*")
_OURS = frozenset(
    {
        "hold",
        "begin_at",
        "dependency",
        "never_satisfied",
        "qos",
        "queue",
        "engine",
        "burst",
        "start_when",
        "key",
        "name",
    }
)
"""Fields that stay with this scheduler, or that the mapping of the queue replaces."""
_FIRST_PORT, _PORTS = 20_000, 12_000
_OF_SBATCH = ("SLURM_EXPORT_ENV", "SLURM_TIME_FORMAT", "LC_ALL", "TZ")
"""Variables that sbatch was called with, and that are not the job's."""


def comment_of(mark: str) -> str:
    """The comment of a run's job in Slurm."""
    return f"gpusched:{mark}"


def spec_values(spec: JobSpec) -> dict[str, Any]:
    """The fields of a job that differ from their defaults, in the words of a submission: what `losses` judges."""
    found = {
        name: value
        for name, value in as_asked(spec.request, spec.layout).items()
        if value and not (name == "nodes" and value == 1)
    }
    for kind, part in ((DeclaredRequest, spec.request), (DeclaredLaunch, spec.launch), (declared.JobSpec, spec)):
        for name, field in fields_of(kind).items():
            value = getattr(part, field.attribute, None)
            if name in LAYOUT_KEYS or not value or value == field.default:
                continue
            found[name] = _plain(name, value)
    return found


def _plain(name: str, value: Any) -> Any:
    if name in ("licenses", "resources"):
        return dict(value)
    if isinstance(value, Value):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def job_script(job: Job, run: Run, queue: QueueSettings | None, script: bytes | None, env: Mapping[str, str]) -> bytes:
    """The text for sbatch, with RECORD in place of the folder of its record.

    Args: queue: of the job, with the words of Slurm; script: its text; None for a command; env: all of its variables.
    Raises: Refused for what no `#SBATCH` line can hold.
    """
    words = _directives(job, run, queue)
    lines = [directive_line(name, text) for name, text in words]
    return "\n".join(["#!/bin/sh", *lines, *_wrapper(job, run, script, env), ""]).encode("utf-8", "surrogateescape")


def _directives(job: Job, run: Run, queue: QueueSettings | None) -> Iterator[tuple[str, str | None]]:
    spec = job.spec
    yield "job-name", spec.name
    yield "comment", comment_of(run.mark)
    given = {name: value for name, value in spec_values(spec).items() if name not in _OURS}
    for key in ("comment", "account", "time_limit_s", "stdout", "stderr", "stdin", "submit_dir", "array", "work_dir"):
        given.pop(key, None)
    if queue is not None:
        mapped = {"queue": queue.slurm_partition, "account": queue.slurm_account, "qos": queue.slurm_qos}
        given.update({name: word for name, word in mapped.items() if word is not None})
    if given.get("nice", 0) < 0:
        del given["nice"]
    if starts_steps(job) and not _are_tasks_in_bundles(spec):
        given.setdefault("ntasks_per_node", _tasks_per_node(job))
    if spec.time_limit_s is not None:
        given["time_limit_s"] = spec.time_limit_s
    elif spec.time_limit_source == declared.UNLIMITED:
        given["time_limit_s"] = declared.UNLIMITED
    if spec.launch.notice is not None:
        # Without steps only the wrapper is there to get it, and it passes it on.
        given["notice"] = {**asdict(spec.launch.notice), "main_only": not starts_steps(job)}
    given["work_dir"] = spec.launch.work_dir
    for key, path in (
        ("stdout", run.stdout_path),
        ("stderr", run.stderr_path),
        ("stdin", input_path(job, run.node)),
    ):
        if path is not None:
            # The patterns are filled in: glogs has to find the file.
            given[key] = path.replace("%", "%%")
    given.setdefault("open_mode", "truncate")
    yield from directives(given, spec.request.nodes)
    yield "no-requeue", None
    # Of sbatch's few variables. Anything else has slurmd start a login shell of the user first, for two minutes if it
    # hangs, to get an environment that nothing uses; NIL is not known before Slurm 23.02.
    yield "export", "ALL"


def starts_steps(job: Job) -> bool:
    """Whether srun starts its command, on each node or in each task. A script that starts its tasks runs once."""
    request, layout = job.spec.request, job.spec.layout
    is_one_node = request.nodes == 1 and request.bundles is None
    return starts_ranks(job.spec) or not (is_one_node or states_tasks(layout, request))


def _are_tasks_in_bundles(spec: JobSpec) -> bool:
    """Whether Slurm decides how many tasks each node has."""
    return spec.request.bundles is not None and bool(spec.request.bundles.tasks)


def _tasks_per_node(job: Job) -> int:
    return -(-count_tasks(job.spec.request, job.spec.layout) // job.spec.request.nodes)


def _wrapper(job: Job, run: Run, script: bytes | None, env: Mapping[str, str]) -> Iterator[str]:
    yield from _CLAIM.format(record=RECORD, run=run.id).splitlines()
    launch = job.spec.launch
    values = values_of(job)
    argv = [fill(word, values) for word in launch.argv]
    if script is not None:
        text = script.decode("utf-8", "surrogateescape")
        if values and launch.script_name == "wrap":
            text = fill(text, values)
        yield from _here_document(text)
        command = f'"$record/script" {shlex.join(argv)}'.rstrip()
    else:
        command = shlex.join(argv)
    yield "run_job() {"
    yield f"unset {' '.join(_OF_SBATCH)}"
    yield from _account_variables(job.user)
    for name, value in env.items():
        if _IDENTIFIER.fullmatch(name):
            yield f"export {name}={shlex.quote(value)}"
    yield 'export GPUSCHED_CHECKPOINT_FILE="$record/checkpoint"'
    yield f"umask {launch.umask:04o}"
    if starts_steps(job):
        yield from _STEPS.format(first=_FIRST_PORT, ports=_PORTS).splitlines()
        ranks = (_RANKS if starts_ranks(job.spec) else _NODES) + _FIRST_BAD.format(
            notice="" if launch.notice is None else f" {launch.notice.signal}"
        )
        command = f'srun --kill-on-bad-exit=1 sh -c {shlex.quote(ranks)} sh "$record" {command}'
    yield f"exec {command}"
    yield "}"
    notice = launch.notice
    if notice is not None and not starts_steps(job):
        yield from _WITH_NOTICE.format(signal=notice.signal).splitlines()
    else:
        yield "( run_job ); code=$?"
    if starts_steps(job):
        yield from _CODE_OF_FIRST.splitlines()
    yield from _RESULT.splitlines()


def _account_variables(user: str) -> Iterator[str]:
    """What a job has even if nothing of its submitter's environment was passed on."""
    yield ': "${PATH:=/usr/local/bin:/usr/bin:/bin}"'
    yield f"USER={shlex.quote(user)} LOGNAME={shlex.quote(user)}"
    if _PLAIN_NAME.fullmatch(user):
        yield f'[ -n "$HOME" ] || HOME=~{user}'
    yield "export PATH USER LOGNAME HOME"


def _here_document(text: str) -> Iterator[str]:
    word = "GPUSCHED_SCRIPT"
    while f"\n{word}\n" in f"\n{text}\n":
        word += "_"
    yield f"cat > \"$record/script\" <<'{word}'"
    yield text.removesuffix("\n")
    yield word
    yield 'chmod 700 "$record/script"'


_CLAIM = """record={record}
say() {{ printf 'gpusched: run {run}: %s\\n' "$1" >&2; }}
umask 077
mkdir -p "$record" || {{ say "cannot write $record"; exit 1; }}
if ! (set -C; printf '%s\\n' "$SLURM_JOB_ID" > "$record/claim") 2>/dev/null; then
  owner=
  read -r owner < "$record/claim"
  if [ "$owner" != "$SLURM_JOB_ID" ]; then
    say "job $owner of Slurm runs it, not job $SLURM_JOB_ID"
    exit 0
  fi
fi
begun=$(date +%s)
told=
printf 'job=%s\\nstart=%s\\nnode=%s\\n' "$SLURM_JOB_ID" "$begun" "$SLURM_JOB_NODELIST" > "$record/started.new"
mv -f "$record/started.new" "$record/started"
trap 'told=1' TERM"""

_RESULT = """word=
[ -f "$record/checkpoint" ] && read -r word _ < "$record/checkpoint"
[ "$word" = done ] || word=
printf 'job=%s\\nstart=%s\\nend=%s\\nexit=%s\\ntold=%s\\nword=%s\\n' \\
  "$SLURM_JOB_ID" "$begun" "$(date +%s)" "$code" "$told" "$word" \\
  > "$record/result.new" && mv -f "$record/result.new" "$record/result"
exit "$code\""""

_WITH_NOTICE = """exec 3<&0
( run_job ) <&3 3<&- &
child=$!
trap 'told=1; kill -{signal} "$child" 2>/dev/null' {signal}
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done"""

_STEPS = """MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(({first} + SLURM_JOB_ID % {ports}))
export MASTER_ADDR MASTER_PORT"""

_NODES = (
    "export NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID GROUP_RANK=$SLURM_NODEID GPUSCHED_NODE_RANK=$SLURM_NODEID; "
)
_RANKS = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS NODE_RANK=$SLURM_NODEID "
    "GROUP_RANK=$SLURM_NODEID NNODES=$SLURM_NNODES GPUSCHED_NODE_RANK=$SLURM_NODEID; "
)
_FIRST_BAD = (
    'record=$1; shift; trap : HUP INT QUIT USR1 USR2 TERM{notice}; "$@"; code=$?; '
    '[ "$code" = 0 ] || (set -C; echo "$code $SLURM_PROCID $SLURMD_NODENAME" > "$record/first") 2>/dev/null; '
    'exit "$code"'
)
"""srun ends the others and returns the highest code, which is that of one that it ended."""
_CODE_OF_FIRST = """if [ "$code" != 0 ] && [ -f "$record/first" ]; then
  read -r code rank node < "$record/first"
  say "rank $rank on $node was the first to fail, with code $code"
fi"""


def check_script(job: Job, queue: QueueSettings | None) -> None:
    """Raises: Refused for a job that no script for sbatch can say, as `job_script` would when it is handed over."""
    run = Run(job_id=job.id, number=1, state=RunState.STARTING, node="", boot_id="", intent_at=0.0)
    for name, text in _directives(job, run, queue):
        directive_line(name, text)
