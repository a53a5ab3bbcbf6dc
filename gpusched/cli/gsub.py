"""gsub: submit a script, a command, a shell line, or many jobs at once."""

from __future__ import annotations

import os
import sys

from gpusched.cli import output, submission
from gpusched.cli.environment import absolute, base_name, captured, current_folder, named_variables, umask
from gpusched.cli.job_options import gsub_table
from gpusched.cli.parse import UsageErrors, parse
from gpusched.cli.submission import (
    check_key,
    check_resubmission,
    from_environment,
    keep_snapshots,
    missing_folder,
    over,
    say_excluded,
    say_found,
    say_without_effect,
    spec_of,
    take_snapshot,
)
from gpusched.client import connect
from gpusched.errors import NotReady, Refused, UsageError
from gpusched.model.request import TASK_KEYS
from gpusched.model.units import format_duration, printable
from gpusched.paths import MAX_REQUEST, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values
    from gpusched.client import DaemonConnection

_JOB_FILES = (".yaml", ".yml", ".json")
"""Endings of manifests for Kubernetes."""
_BATCH_HINT = "give --batch a file with one shell line a job"
_MOST_LINES = 2_000_000
"""More values than a request may have."""
_TOO_LARGE_BATCH = "submit it in parts: split -l 100000 FILE PART"


def main() -> int:
    return output.run("gsub", body)


def body(words: list[str]) -> int:
    table = gsub_table()
    given, operands, is_command = parse(table, words)
    if output.common(table, given, operands):
        return 0
    if "explain" in given:
        from gpusched import entry_points  # few command lines ask for it

        explain = entry_points.need("gsub.explain", "slurm", "gsub --explain")
        code: int = explain(table, given, words[: len(words) - len(operands)], operands)
        return code
    if "template" in given:
        from gpusched.cli import templates  # few submissions name one
        from gpusched.cli.saved_options import LIST

        if given["template"] == [LIST]:
            return templates.print_list(given)
        given = templates.filled(table, given)
    if "print" in given:
        from gpusched import entry_points  # few submissions are printed

        printer = entry_points.need("gsub.print", "kubernetes", "gsub --print")
        printer.check_alone(given)
    if "dag" in given or "resume" in given:
        from gpusched.cli.dag import submit  # few submissions are pipelines

        return submit(table, given, operands)
    if "vars" in given:
        raise UsageError("--var is for pipelines", "for example: gsub --dag pipeline.toml --var lr=3e-4")
    if "resubmit" in given:
        check_resubmission(given, operands)
        # Only typed options count: defaults of new submissions would alter the repeated job.
        program, values = {}, given
    else:
        program = _what(table, given, words[: len(words) - len(operands)], operands, is_command)
        values = program.pop("values")
    check_key(given, values)
    spec = {**spec_of(values), **program}
    if "print" in given:
        return int(printer.print_job(table, spec, values))
    if "resubmit" not in given:
        if "work_dir" not in spec:
            spec["work_dir"] = current_folder()
        spec["env"], spec["env_named"] = captured(values), named_variables(values)
        spec["umask"] = umask()
    elif "extra_env" in given:
        spec["env"] = given["extra_env"]
    request: dict[str, Any] = {"spec": spec}
    if "batch" in given:
        request["batch"] = _batch_lines(given["batch"])
    for key in ("dry_run", "key_again", "resubmit"):
        if values.get(key):
            request[key] = values[key]
    if sys.stderr.isatty() and not values.get("quiet"):
        request["advise"] = True
    with connect() as client:
        take_snapshot(client, spec, values)
        keep_snapshots(client, given)
        answer = _hand_in(client, request)
        if not (answer.get("existing") or values.get("dry_run")) and (said := missing_folder(values)):
            answer["notes"] = [*answer.get("notes", ()), *said]
        say_excluded("gsub", answer.get("env_excluded", []), values)
        if values.get("dry_run"):
            code = _print_forecast(answer, values)
            if "dry_run" not in given and not values.get("quiet"):
                output.note("gsub", "nothing was submitted: the script has --test-only")
            return code
        if values.get("notify"):
            from gpusched.cli.notify_targets import warn_about_targets  # few jobs ask for alerts

            warn_about_targets("gsub", values.get("notify_to", ()))
        if "ids" in answer:
            return _print_batch(answer, values)
        job = answer["job"]
        of_key: dict[str, Any] = {
            key: answer[key] for key in ("existing", "differs", "notes", "limits") if key in answer
        }
        # With --wait the document follows the end.
        is_later = values.get("json") and values.get("wait")
        if not is_later and not output.show(values, {"job": job, **of_key}, [job["id"]]):
            sys.stdout.write(f"Submitted job {job['id']}\n")
        say_found(answer, values)
        output.notes("gsub", answer)
        is_script = "script_path" in program or program.get("script_name") == "stdin"
        path = operands[0] if "script_path" in program else ""
        say_without_effect("gsub", values, given if is_script else None, path)
        _say_limits(answer, values)
        if (seen := answer.get("vram")) and seen["proposal"]:
            sys.stderr.write(f"gsub: note: {printable(seen['text'])}; {printable(seen['proposal'])}\n")
        if _may_lack_a_limit(answer, values):
            from gpusched.cli.forecast import is_typed_by_hand, say  # not needed by scripts

            if is_typed_by_hand():
                say(client, job["id"])
        if values.get("follow"):
            from gpusched.cli.follow import follow_job  # not needed by a plain gsub

            return follow_job(client, job["id"], "gsub")
        if values.get("wait"):
            from gpusched.cli.gwait import await_one

            return await_one(client, job["id"], "gsub", as_json=bool(values.get("json")), also=of_key)
    return 0


def _hand_in(client: DaemonConnection, request: dict[str, Any]) -> dict[str, Any]:
    """Submit, and return the daemon's answer.

    A daemon that dies before it answers may have taken the job: only with a key is a retry safe.
    Raises: NotReady without a key; otherwise as `DaemonConnection.call`.
    """
    try:
        return client.call("POST", "/v1/jobs", request)
    except ConnectionError:
        client.close()
        if "key" not in request["spec"] and "dry_run" not in request:
            raise NotReady(
                "the scheduler went away before it answered and may have accepted the job",
                "check with: gq   With gsub --key NAME a submission is repeated automatically and accepted once",
            ) from None
    with connect() as again:
        return again.call("POST", "/v1/jobs", request)


def _what(table: OptionTable, given: Values, typed: list[str], operands: list[str], is_command: bool) -> dict[str, Any]:
    """The program of the submission and the values that apply to it, in order of precedence.

    Args: typed: the words before the operands, for hints that repeat the line.
    """
    if "ignore_image" in given and (is_command or not "".join(operands[:1]).endswith(_JOB_FILES)):
        raise UsageError("--ignore-image is for a Kubernetes Job", "for example: gsub --ignore-image job.yaml")
    if "batch" in given:
        _only("--batch", operands, "wrap" in given)
        if given.get("follow"):
            raise UsageError("--follow goes with one job, not with --batch", "wait for all of them with: --wait")
        return {"values": over(from_environment(table), given)}
    if "wrap" in given:
        _only("--wrap", operands, False)
        if not given["wrap"].strip():
            raise UsageError("--wrap is empty: there is nothing to run", "for example: gsub --wrap 'python train.py'")
        text = "#!/bin/sh\n" + given["wrap"] + "\n"
        return {"values": over(from_environment(table), given), "script": text, "script_name": "wrap"}
    if is_command:
        if not operands:
            raise UsageError("no command after --", "for example: gsub -g 1 -- python train.py")
        return {"values": over(from_environment(table), given), "argv": operands}
    if operands and operands[0] != "-":
        path, arguments = operands[0], operands[1:]
        content = submission.read_file(path, hint="" if os.path.lexists(path) else _hint_for_command(typed, operands))
        if path.endswith(_JOB_FILES) and not content.startswith(b"#!"):
            from gpusched import entry_points  # few submissions are manifests

            read_job = entry_points.need("gsub.manifest", "kubernetes", "a Kubernetes Job")
            program = read_job(content, path, arguments, ignore_image="ignore_image" in given)
            return {**program, "values": over(over(program["values"], from_environment(table)), given)}
        named = {"script_name": base_name(path), "script_path": absolute(path)}
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                "there is nothing to run", "for example: gsub -g 1 train.sh   or: gsub -g 1 -- python train.py"
            )
        path, arguments = "standard input", operands[1:]
        content = read_at_most(sys.stdin.buffer, MAX_REQUEST, path, submission.TOO_LARGE)
        if not content.strip():
            raise UsageError("there is nothing to run: standard input is empty", "for example: gsub -g 1 train.sh")
        named = {"script_name": "stdin"}
    submission.check_script(content, path, lambda words: submission.command_line(typed, [*words, *arguments]))
    mistakes = UsageErrors()
    directives = mistakes.gather(lambda: submission.with_templates(table, submission.directives(table, content, path)))
    environment = mistakes.gather(lambda: from_environment(table))
    mistakes.check()
    values = over(over(directives, environment), given)
    if submission.is_for_slurm(content) and not TASK_KEYS.isdisjoint(values):
        # It starts its tasks itself, with srun.
        values.setdefault("ranks", False)
    text = content.decode("utf-8", "surrogateescape")
    return {"values": values, "script": text, **named, "argv": arguments}


def _hint_for_command(typed: list[str], words: list[str]) -> str:
    """The line to type if the first word names no file: most often a command whose `--` was forgotten."""
    import shlex  # both are needed for an error only
    import shutil

    program = words[0]
    if len(words) == 1 and " " in program.strip():
        return f"run a shell line with: {printable(shlex.join(['gsub', *typed, '--wrap', program]))}"
    if shutil.which(program):
        return f"run a command with: {submission.command_line(typed, words)}"
    return ""


def _only(option: str, operands: list[str], has_wrap: bool) -> None:
    if operands or has_wrap:
        extra = "--wrap" if has_wrap else printable(operands[0], 40)
        raise UsageError(f"{option} and {extra} were both given", "use one of them")


def _batch_lines(path: str) -> list[str]:
    if path == "-":
        content = read_at_most(sys.stdin.buffer, MAX_REQUEST, "standard input", _TOO_LARGE_BATCH)
    else:
        content = submission.read_file(path, "file", _BATCH_HINT, _TOO_LARGE_BATCH)
    if content.count(b"\n") > _MOST_LINES:
        raise Refused(f"a batch of more than {_MOST_LINES} lines", _TOO_LARGE_BATCH)
    where = "standard input" if path == "-" else printable(path)
    if b"\0" in content:
        number = content[: content.index(b"\0")].count(b"\n") + 1
        raise Refused(f"{where}, line {number}: a command cannot hold a NUL byte", _BATCH_HINT)
    text = content.decode("utf-8", "surrogateescape")
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise Refused(f"there is no command in {where}", _BATCH_HINT)
    return lines


def _say_limits(answer: dict[str, Any], values: Values) -> None:
    """Print the limit chosen by `-t auto`; at a terminal also a time limit that was not stated."""
    if values.get("quiet"):
        return
    output.notes("gsub", answer, "limits")
    job = answer.get("job")
    if job is None or "limits" in answer or not sys.stderr.isatty():
        return
    if (source := job["time_limit_source"]) in ("default", "maximum"):
        words = "the default" if source == "default" else "the maximum"
        output.note("gsub", f"time limit {format_duration(job['time_limit_s'])}, {words}; change it with -t")


def _may_lack_a_limit(answer: dict[str, Any], values: Values) -> bool:
    """Whether the job is pending without a stated time limit; False if the command waits for more output."""
    is_awaited = any(values.get(name) for name in ("quiet", "json", "wait", "follow"))
    if is_awaited or answer.get("existing") or not sys.stdout.isatty():
        return False
    job = answer["job"]
    is_limited = job["time_limit_source"] not in (None, "default", "maximum")
    return job["state"] == "PENDING" and not (job["hold"] or is_limited)


def _print_batch(answer: dict[str, Any], values: Values) -> int:
    ids = answer["ids"]
    keys = ("existing", "differs", "notes", "limits")
    if not output.show(values, {"ids": ids, **{key: answer[key] for key in keys if key in answer}}, ids):
        which = f"job {ids[0]}"
        if int(ids[-1]) - int(ids[0]) + 1 == len(ids) > 1:
            which = f"jobs {ids[0]} to {ids[-1]} ({len(ids)} jobs)"
        elif len(ids) > 1:
            # Repeated arrays: the ids in between belong to their tasks.
            which = f"jobs {', '.join(map(str, ids))}"
        sys.stdout.write(f"Submitted {which}\n")
    say_found(answer, values)
    output.notes("gsub", answer)
    say_without_effect("gsub", values)
    _say_limits(answer, values)
    if values.get("wait"):
        from gpusched.cli.gwait import await_all

        with connect() as client:
            return await_all(client, [str(job_id) for job_id in ids], None, "gsub")
    return 0


def _print_forecast(answer: dict[str, Any], values: Values) -> int:
    found = answer["dry_run"]
    if not output.show(values, {"dry_run": found}, [found["verdict"]]):
        from gpusched.cli.forecast import forecast_lines, limit_lines  # only for a dry run

        lines = [found["text"], *limit_lines(found), *forecast_lines(found)]
        if found["vram"] is not None:
            lines.append("; ".join(filter(None, (found["vram"]["text"], found["vram"]["proposal"]))))
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
        if found["hint"]:
            output.note("gsub", f"hint: {printable(found['hint'])}")
    return 1 if found["verdict"] == "refused" else 0
