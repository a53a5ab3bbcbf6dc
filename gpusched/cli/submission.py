"""The parts of a submission other than its program: options, environment, folder."""

from __future__ import annotations

import os
import sys

from gpusched.cli import output
from gpusched.cli.job_options import ONLY_TYPED
from gpusched.cli.output import note
from gpusched.cli.parse import UsageErrors, apply, parse, split_words
from gpusched.cli.slurm_options import (
    NO_MAIL,
    NOTES,
    PER_SOCKET,
    SOCKETS,
    SOCKETS_PER_NODE,
    gpus_of_sockets,
    ignored_lines,
)
from gpusched.errors import Refused, UsageError, WrongValue
from gpusched.model.option import GPU_VARIANTS, OptionNote, without_effect
from gpusched.model.request import GPU_KEYS
from gpusched.model.spec import FIELDS
from gpusched.model.units import printable
from gpusched.paths import MAX_REQUEST, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values
    from gpusched.client import DaemonConnection
    from gpusched.snapshots.submission import Frozen


_INTERPRETERS = {".py": "python", ".R": "Rscript", ".r": "Rscript", ".jl": "julia", ".pl": "perl", ".js": "node"}
"""Interpreters by file name extension; other scripts are taken for shell scripts."""
_MARKS = (b"#GSUB", b"#SBATCH")


TOO_LARGE = "keep data in files of their own"


def read_file(path: str, what: str = "script", hint: str = "", too_large: str = TOO_LARGE) -> bytes:
    """The bytes of a file, called `what` in errors. Raises: Refused."""
    shown = printable(path)
    try:
        with open(path, "rb") as file:
            return read_at_most(file, MAX_REQUEST, f"the {what} {shown}", too_large)
    except IsADirectoryError:
        raise Refused(f"{shown} is a folder, not a {what}", hint or "name a file, for example: gsub train.sh") from None
    except FileNotFoundError:
        raise Refused(f"there is no {what} {shown}", hint or "run a command with: gsub -- COMMAND [ARGS...]") from None
    except OSError as error:
        raise Refused(f"the {what} {shown} cannot be read: {error.strerror}", f"look at: ls -l {shown}") from None


def command_line(typed: Sequence[str], words: Sequence[str]) -> str:
    """The line that submits a command with the options typed; without them it would get no GPU."""
    import shlex  # needed for an error only

    return printable(shlex.join(["gsub", *typed, "--", *words]))


def _without_options(words: Sequence[str]) -> str:
    return command_line((), words)


def check_script(body: bytes, name: str, line: Callable[[Sequence[str]], str] = _without_options) -> None:
    """Check that a file can be run as a script. Raises: Refused.

    Args: line: returns the command line that submits this command in place of the script.
    """
    shown = printable(name)
    if not body.strip():
        raise Refused(f"the script {shown} is empty", f"give it a first line {_first_line(name)} and a command")
    if b"\0" in body:
        path = name if "/" in name else f"./{name}"
        raise Refused(f"{shown} holds a NUL byte: it is a program, not a script", f"run it with: {line([path])}")
    if not body.startswith(b"#!"):
        interpreter = _INTERPRETERS.get(os.path.splitext(name)[1])
        run = f"run it with: {line([interpreter, name])}; or " if interpreter else ""
        raise Refused(f"the script {shown} does not begin with #!", f"{run}make its first line {_first_line(name)}")
    if body.split(b"\n", 1)[0].endswith(b"\r"):
        raise Refused(f"the script {shown} has DOS line ends", f"convert it with: sed -i 's/\\r$//' {shown}")


def _first_line(name: str) -> str:
    interpreter = _INTERPRETERS.get(os.path.splitext(name)[1])
    return f"#!/usr/bin/env {interpreter}" if interpreter else "#!/bin/bash"


def directives(table: OptionTable, body: bytes, name: str) -> Values:
    """Values of all #GSUB and #SBATCH lines before the first command.

    Raises: UsageError naming file, line and option of every mistake; unsupported options are never ignored.
    """
    values: Values = {}
    mistakes = UsageErrors()
    for number, mark, text in marked_lines(body):
        may_test = mark == b"#SBATCH"
        _read_line(table, text, f"{printable(name)}, line {number}: ", values, mistakes, may_test=may_test)
    mistakes.check()
    return values


def with_templates(table: OptionTable, values: Values) -> Values:
    """The values over those of the templates that they name. Raises: UsageError, Refused."""
    if "template" not in values:
        return values
    from gpusched.cli.templates import filled  # few submissions name one

    return filled(table, values)


def is_for_slurm(body: bytes) -> bool:
    """Whether a script has #SBATCH lines before the first command."""
    return any(mark == b"#SBATCH" for _, mark, _ in marked_lines(body))


def marked_lines(body: bytes) -> Iterator[tuple[int, bytes, str]]:
    """Number, mark and options of each #GSUB and #SBATCH line before the first command."""
    for number, line in enumerate(body.split(b"\n"), 1):
        stripped = line.strip()
        if not stripped:
            continue
        if not stripped.startswith(b"#"):
            return
        for mark in _MARKS:
            if line.startswith(mark) and line[len(mark) : len(mark) + 1].strip() == b"":
                yield number, mark, line[len(mark) :].decode("utf-8", "surrogateescape")


def _read_line(
    table: OptionTable, text: str, where: str, values: Values, mistakes: UsageErrors, *, may_test: bool
) -> None:
    """Args: may_test: the line may say --test-only, as for sbatch."""
    try:
        found, operands, _ = parse(table, split_words(text), operands_first=True)
    except ValueError as error:
        mistakes.add(UsageError(str(error), "see: gsub --help"), where)
        return
    except UsageError as error:
        mistakes.add(error, where)
        return
    if operands:
        said = f"{printable(operands[0], 40)!r} is not an option"
        mistakes.add(UsageError(said, "quote a value that holds blanks"), where)
    for key in found:
        if key in ONLY_TYPED and not (may_test and key == "dry_run"):
            name = "--" + key.replace("_", "-")
            mistakes.add(UsageError(f"{name} makes no sense in a script", "give it on the command line"), where)
    for key, value in found.items():
        before = values.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            before.update(value)
        elif key == NOTES and before:
            before.extend(value)
        else:
            values[key] = value


def spec_of(values: Values) -> dict[str, Any]:
    """The job's fields for the daemon, except program and environment. Raises: UsageError."""
    # None was reset by a later option. A snapshot is named once it has been taken.
    spec = {key: values[key] for key in FIELDS if values.get(key) is not None and key != "snapshot"}
    if values.get(GPU_VARIANTS):
        from gpusched.model.variant_words import BOTH, BOTH_HINT  # few jobs have variants

        if values.get("variants"):
            raise UsageError(BOTH, BOTH_HINT)
        spec["variants"] = list(values[GPU_VARIANTS])
    for sentence in fold_slurm(spec, values):
        values[NOTES] = [*values.get(NOTES, ()), sentence]
    if "work_dir" in values:
        spec["work_dir"] = os.path.abspath(values["work_dir"])
    if "venv" in spec or "conda" in spec:
        from gpusched.cli.activation import resolve  # few jobs name an environment

        resolve(spec)
    for name in ("prolog", "epilog"):
        if name in spec:
            spec[name] = _program(name, spec[name], spec.get("work_dir"))
    _check_texts(spec)
    return spec


def fold_slurm(spec: dict[str, Any], values: Values) -> Iterator[OptionNote]:
    """Turn what only Slurm has words for into the job's fields; returns what has no effect.

    Raises: UsageError.
    """
    if values.get("slurm_mail_user") and not spec.get("notify"):
        spec.pop("notify_to", None)
        if "notify" not in values:
            yield NO_MAIL
    sockets = values.get(SOCKETS_PER_NODE)
    try:
        each = gpus_of_sockets(values.get(PER_SOCKET), sockets)
    except ValueError as error:
        option = "--gpus-per-socket"
        raise WrongValue(f"{option}: {error}", "see: gsub --help", option=option, why=str(error)) from None
    if each is not None:
        spec["gpus_per_node"] = each
    elif sockets is not None:
        yield without_effect("--sockets-per-node", SOCKETS)


def _program(name: str, path: str, work_dir: str | None) -> str:
    """A prolog or epilog, absolute, or relative if it is below the working directory, of which a snapshot may be taken.

    Raises: Refused.
    """
    full = os.path.abspath(path)
    shown = printable(path)
    if not os.path.isfile(full):
        raise Refused(f"there is no {name} {shown}", f"name an executable file, for example: --{name} ./{name}.sh")
    if not os.access(full, os.X_OK):
        raise Refused(f"the {name} {shown} is not executable", f"chmod +x {shown}")
    with open(full, "rb") as file:
        begin = file.read(4)
    if begin[:2] != b"#!" and begin != b"\x7fELF":
        raise Refused(f"the {name} {shown} does not begin with #!", "make its first line #!/bin/bash")
    base = os.path.join(os.path.abspath(work_dir or os.getcwd()), "")
    return f"./{full[len(base) :]}" if full.startswith(base) else full


def over(lower: Values, upper: Values) -> Values:
    """Merge values; upper ones take precedence, and variables for the job are combined."""
    wishes = GPU_KEYS | {PER_SOCKET, GPU_VARIANTS, "variants"}
    is_new_wish = not (wishes - {"variants"}).isdisjoint(upper)
    values = {key: value for key, value in lower.items() if not (is_new_wish and key in wishes)}
    values.update(upper)
    if "extra_env" in lower and "extra_env" in upper:
        values["extra_env"] = {**lower["extra_env"], **upper["extra_env"]}
    if NOTES in lower and NOTES in upper:
        values[NOTES] = [*lower[NOTES], *upper[NOTES]]
    return values


def missing_folder(values: Values) -> list[str]:
    """A note on a working directory that is not here: it may be on another node, or be made before the job starts."""
    if "work_dir" not in values or os.path.isdir(values["work_dir"]):
        return []
    shown = printable(os.path.abspath(values["work_dir"]))
    return [f"there is no folder {shown} here; the job fails unless there is one where and when it starts"]


def say_without_effect(command: str, values: Values, typed: Values | None = None, path: str = "") -> None:
    """Report options of Slurm that were accepted and have no effect: those of a script in one line.

    Args: typed: those of the command line; path: the script's file.
    """
    if values.get("quiet") or not values.get(NOTES):
        return
    sentences = list(dict.fromkeys(values[NOTES]))
    own = {*sentences} if typed is None else {*typed.get(NOTES, ()), *fold_slurm({}, typed)}
    others = [text for text in sentences if text in own]
    for text in ignored_lines([text for text in sentences if text not in others], path, others):
        note(command, text)


def from_environment(table: OptionTable) -> Values:
    """Defaults of the options valid in scripts, from variables such as GSUB_TIME=4h.

    Raises: UsageError naming all mistakes.
    """
    values: Values = {}
    mistakes = UsageErrors()
    for name, text in os.environ.items():
        if not name.startswith("GSUB_"):
            continue
        shown = f"the variable {printable(name, 40)}"
        found: Values = {}
        try:
            option = table.find("--" + name[5:].lower().replace("_", "-"))
            # A flag with an optional value, as --snapshot=copy, accepts it here, too.
            if option.metavar or (option.read is not None and text not in ("", "0", "1")):
                apply(table, option, text, found)
            elif text not in ("", "0"):
                found.update(option.sets or {})
        except UsageError as error:
            mistakes.add(error, f"{shown}: ", f"remove it with: unset {printable(name)}")
            continue
        if ONLY_TYPED & found.keys():
            said = f"{shown} makes no sense: {option.long} is for the command line only"
            mistakes.add(UsageError(said, f"remove it with: unset {printable(name)}"))
        values.update(found)
    mistakes.check()
    return with_templates(table, values)


def say_excluded(command: str, names: list[str], values: Values) -> None:
    """Report variables excluded from the job's environment."""
    if not names or values.get("quiet"):
        return
    if values.get("verbose"):
        shown = ", ".join(printable(name, 60) for name in names)
        note(command, f"not in the job's environment: {shown}; pass one on with: --export ALL,{names[0]}")
    elif sys.stderr.isatty():
        count = f"{len(names)} variables are" if len(names) > 1 else "1 variable is"
        note(command, f"{count} not in the job's environment; list them with: {command} -v")


def _check_texts(spec: dict[str, Any]) -> None:
    for key in ("name", "stdout", "stderr", "stdin", "work_dir", "comment", "prolog", "epilog"):
        if "\0" in spec.get(key, ""):
            raise UsageError(f"{key} holds a NUL byte", "remove it")


def check_resubmission(given: Values, operands: list[str]) -> None:
    """Refuse options that name another program. Raises: UsageError."""
    for name in ("wrap", "batch", "export"):
        if name in given:
            raise UsageError(f"--resubmit and --{name} were both given", "use one of them; -E adds a variable")
    if "conda" in given:
        raise UsageError(
            "--resubmit and --conda were both given: a copy has the variables that conda has set for its job",
            "submit a new job with --conda",
        )
    if operands:
        raise UsageError(f"--resubmit and {printable(operands[0], 40)} were both given", "use one of them")
    if not given["resubmit"]:
        raise UsageError("--resubmit names no job", "for example: gsub --resubmit 42   or: gsub --resubmit @")
    if given.get("snapshot", "no") != "no":
        raise UsageError("a resubmitted job starts in its own snapshot", "leave --snapshot out, or submit a new job")


def check_key(given: Values, values: Values) -> None:
    """Refuse --key-again without --key. Raises: UsageError."""
    if "key_again" in given and values.get("key") is None:
        raise UsageError(
            "--key-again says when a key makes another job, and there is no --key",
            "for example: gsub --key nightly --key-again failed -- ./nightly",
        )


def take_snapshot(client: DaemonConnection, spec: Values, values: Values) -> Frozen | None:
    """Start the job in a copy of its folder, if requested."""
    mode = values.get("snapshot", "no")
    if mode == "no" or values.get("dry_run"):
        return None
    from gpusched.snapshots.submission import start_in_copy  # hashes and copies; not needed by a plain gsub

    found = start_in_copy(client.call, client.socket_path, spec, mode)
    if not values.get("quiet"):
        for text in found.notes:
            output.note("gsub", text)
    return found


def keep_snapshots(client: DaemonConnection, values: Values) -> None:
    """Keep the snapshots of resubmitted jobs, unless they are to run in another folder."""
    if not values.get("resubmit") or "work_dir" in values or values.get("dry_run"):
        return
    from gpusched.snapshots.submission import keep_for_repetition  # as above

    keep_for_repetition(client.call, values["resubmit"])


def say_found(answer: dict[str, Any], values: Values) -> None:
    """Report that an existing job was found and nothing new was submitted."""
    if not answer.get("existing") or values.get("json") or values.get("quiet"):
        return
    # The result comes first even if both go to one terminal.
    sys.stdout.flush()
    if "ids" in answer:
        of_key, ids = printable(repr(values["key"])), answer["ids"]
        named = f"jobs {ids[0]} to {ids[-1]} have" if len(ids) > 1 else f"job {ids[0]} has"
        output.note("gsub", f"{named} the key {of_key}; nothing new was submitted")
    else:
        job = answer["job"]
        of_key = printable(repr(job["key"]))
        output.note("gsub", f"job {job['id']} ({job['state']}) has the key {of_key}; nothing new was submitted")
    if answer["differs"]:
        was, keeps = ("they were", "keep") if len(answer.get("ids", ())) > 1 else ("it was", "keeps")
        output.note("gsub", f"{was} submitted with another {', '.join(answer['differs'])}, and {keeps} that")
