"""sbatch: submit a script, a script on standard input, or a shell line."""

from __future__ import annotations

import os
import sys

from gpusched.addons.slurm.command import Command, CommandError, cluster_suffix, parse, run
from gpusched.addons.slurm.request import BAD_VALUE, JOB_ROWS, JobRequest, check_value, from_variables, only_slurm_rows
from gpusched.addons.slurm.submission import (
    environment,
    hand_in,
    print_forecast,
    say_notes,
    say_options,
    submit_line,
)
from gpusched.cli.environment import absolute, base_name, current_folder, umask
from gpusched.client import connect
from gpusched.errors import Refused
from gpusched.model.option import OptionNote
from gpusched.model.units import printable
from gpusched.paths import MAX_REQUEST, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    from gpusched.addons.slurm.command import Parsed
    from gpusched.client import DaemonConnection

_ROWS = """
-a --array TASKS  one task per index: 0-9, 1,3,5, 0-30:2; 0-99%4 runs at most 4 at once
-D --chdir DIR  working directory
-e --error FILE  file for standard error (default: that of --output)
--export LIST  variables to pass to the job: ALL, NONE, or a list of NAME and NAME=VALUE
--export-file FILE  read variables from a file or file descriptor: NAME=VALUE separated by NUL bytes
-i --input FILE  file to read standard input from
--no-requeue  do not requeue the job after a node failure
--open-mode MODE  append to existing files, or truncate them
-o --output FILE  file for standard output (default: slurm-%j.out; for arrays slurm-%A_%a.out)
--parsable  print only the job id, with -M followed by the cluster
-Q --quiet  print only errors
--requeue  requeue the job after a node failure
--test-only  print when the job would start, without submitting it
-v --verbose  print the options in effect
-W --wait  wait until the job ends, and exit with its exit code
--wrap LINE  run this shell command instead of a script
"""
_OWN = ("clusters", "export", "export-file", "parsable", "quiet", "test-only", "verbose", "wait", "wrap")
_ONLY_TYPED = ("wrap", "help", "usage", "version")
_OF_SRUN = ("cpu-bind", "bcast", "compress", "het-group", "export-file")
COMMAND = Command(
    "sbatch",
    "sbatch [OPTIONS...] [SCRIPT [ARGS...]]",
    f"{_ROWS}{JOB_ROWS}{only_slurm_rows(_OF_SRUN)}",
    bad_option_code=255,
    has_h=True,
)
_VARIABLES = {
    "ARRAY_INX": "array",
    "BATCH": "batch",
    "EXPORT": "export",
    "GET_USER_ENV": "get-user-env",
    "IGNORE_PBS": "ignore-pbs",
    "JOB_NAME": "job-name",
    "NO_REQUEUE": "no-requeue",
    "OPEN_MODE": "open-mode",
    "REQUEUE": "requeue",
    "WAIT": "wait",
}
_MARK = b"#SBATCH"
_NO_INTERPRETER = (
    "This does not look like a batch script.  The first\n"
    "line must start with #! followed by the path to an interpreter.\n"
    "For instance: #!/bin/sh"
)
_DOS = "Batch script contains DOS line breaks (\\r\\n)\ninstead of expected UNIX line breaks (\\n)."
_NUL = "The SLURM controller does not allow scripts that\ncontain a NULL character '\\0'."


def main() -> int:
    return run(COMMAND, body)


def body(typed: Parsed) -> int:
    request = JobRequest(COMMAND, _OWN)
    program = _program(typed, request)
    request.take(from_variables(COMMAND, "SBATCH_", _VARIABLES))
    request.take(typed.options)
    own = request.own
    is_quiet = "quiet" in own
    if "verbose" in own and not is_quiet:
        say_options(COMMAND, typed.options)
    spec = {**program, **request.spec(), "umask": umask(), "submit_line": submit_line(COMMAND), "slurm": True}
    spec["env"], spec["env_named"] = environment(COMMAND, own.get("export"), own.get("export-file"))
    _place_files(spec)
    with connect() as client:
        cluster = cluster_suffix(COMMAND, client, own.get("clusters"))
        if "test-only" in own:
            code = print_forecast(COMMAND, client, spec)
            if not typed.has("test-only"):
                COMMAND.note("nothing was submitted: the script has --test-only")
            return code
        answer = hand_in(COMMAND, client, {"spec": spec})
        job_id = answer["job"]["id"]
        if "parsable" in own:
            sys.stdout.write(f"{job_id};{cluster}\n" if cluster else f"{job_id}\n")
        elif not is_quiet:
            sys.stdout.write(f"Submitted batch job {job_id}{f' on cluster {cluster}' if cluster else ''}\n")
        sys.stdout.flush()
        if not is_quiet:
            _say_ignored(request.ignored, typed)
            for text in request.notes:
                COMMAND.note(text)
            say_notes(COMMAND, answer, spec)
        if "wait" in own:
            return _await_end(client, job_id)
    return 0


def _say_ignored(notes: list[OptionNote], typed: Parsed) -> None:
    """Report the options without effect: those of a script together, those of the command line one by one."""
    if not notes:
        return
    from gpusched.cli.slurm_options import ignored_lines

    own = {f"--{name}" for name, _ in typed.options}
    others = [note for note in notes if typed.has("wrap") or note.option in own]
    of_script = [note for note in notes if note not in others]
    for text in ignored_lines(of_script, typed.operands[0] if typed.operands else "", others):
        COMMAND.note(text)


def _place_files(spec: dict[str, Any]) -> None:
    """Slurm's defaults for files: relative to the working directory, truncated at each run."""
    folder = current_folder()
    spec.setdefault("open_mode", "truncate")
    spec.setdefault("stdout", "slurm-%A_%a.out" if "array" in spec else "slurm-%j.out")
    if spec.setdefault("work_dir", folder) == folder:
        return
    spec["submit_dir"] = folder
    before = spec["work_dir"].replace("%", "%%")
    for key in ("stdout", "stderr", "stdin"):
        if key in spec:
            spec[key] = os.path.join(before, spec[key])


def _await_end(client: DaemonConnection, job_id: str) -> int:
    """The exit code of --wait: the job's, or 1 if a signal ended it."""
    from gpusched.cli.gwait import wait_until_done  # not needed by a plain sbatch

    job = wait_until_done(client, [job_id], None)["jobs"][0]
    if job["state"] == "COMPLETED":
        return 0
    return int(job.get("exit_code") or 1)


# --- the program ----------------------------------------------------------------------------------------


def _program(typed: Parsed, request: JobRequest) -> dict[str, Any]:
    """The fields of the script; its directives become a layer of the request. Raises: CommandError."""
    if typed.has("wrap"):
        if typed.operands:
            raise COMMAND.error("Script arguments not permitted with --wrap option")
        text = f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{typed.get('wrap')}\n"
        return {"script": text, "script_name": "wrap", "name": "wrap"}
    path = typed.operands[0] if typed.operands else ""
    if path == ":":
        raise COMMAND.error("heterogeneous jobs are not supported; submit one job for each component", BAD_VALUE)
    named = {"script_name": "stdin", "name": "sbatch"}
    if path:
        found, content = _read(path)
        named = {"script_name": base_name(path), "script_path": absolute(found), "name": base_name(path)}
    else:
        content = _all_of(sys.stdin.buffer, "standard input")
    _check(content)
    _take_directives(content, path or "standard input", request)
    return {"script": content.decode("utf-8", "surrogateescape"), **named, "argv": typed.operands[1:]}


def _read(path: str) -> tuple[str, bytes]:
    """Path and text of a script, which may be in the current folder or on PATH."""
    folders = [""] if "/" in path else ["", *os.environ.get("PATH", "").split(":")]
    for folder in folders:
        found = os.path.join(folder, path)
        try:
            with open(found, "rb") as file:
                return found, _all_of(file, printable(path))
        except (OSError, ValueError):
            continue
    raise COMMAND.error(f"Unable to open file {printable(path)}")


def _all_of(file: BinaryIO, shown: str) -> bytes:
    try:
        return read_at_most(file, MAX_REQUEST, f"the script {shown}", "")
    except Refused as error:
        raise COMMAND.error(error.message) from None


def _check(content: bytes) -> None:
    if not content:
        raise COMMAND.error("Batch script is empty!")
    if not content.startswith(b"#!"):
        raise COMMAND.error(_NO_INTERPRETER)
    if b"\0" in content:
        raise COMMAND.error(_NUL)
    if b"\r\n" in content:
        raise COMMAND.error(_DOS)


def _take_directives(content: bytes, path: str, request: JobRequest) -> None:
    options: list[tuple[str, str | None]] = []
    for number, text in _directive_lines(content, path, request):
        where = f"{printable(path)}, line {number}: #SBATCH{printable(text)}"
        try:
            found = _read_directive(text)
        except CommandError as error:
            raise CommandError(f"{error.text}\nsbatch: {where}", error.code) from None
        for one in found:
            if one[0] not in _OWN:
                check_value(COMMAND, one, where)
        options += found
    request.take(options)


def _directive_lines(content: bytes, path: str, request: JobRequest) -> Iterator[tuple[int, str]]:
    """Numbers and rests of the #SBATCH lines before the first command."""
    others: list[int] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith(b"#"):
            break
        rest = line[len(_MARK) :]
        if line.startswith(_MARK) and (not rest or rest[:1].isspace()):
            yield number, rest.decode("utf-8", "surrogateescape")
        elif line.startswith(b"#GSUB"):
            others.append(number)
    if others:
        request.say(f"{printable(path)}, line {others[0]}: #GSUB lines are not read by sbatch; submit with gsub")


def _read_directive(text: str) -> list[tuple[str, str | None]]:
    from gpusched.cli.parse import split_words  # a shell line has no directives

    try:
        parsed = parse(COMMAND, split_words(text))
    except ValueError as error:
        raise COMMAND.error(f"Invalid directive found in batch script: {error}", BAD_VALUE) from None
    for word in (*parsed.operands, *(f"--{name}" for name, _ in parsed.options if name in _ONLY_TYPED)):
        raise COMMAND.error(f"Invalid directive found in batch script: {printable(word)}", BAD_VALUE)
    return parsed.options
