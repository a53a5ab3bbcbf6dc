"""gsub --dag and --resume: a pipeline as one submission."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpusched.cli import output, submission
from gpusched.cli.parse import Table
from gpusched.cli.pipeline_file import PipelineText, read
from gpusched.cli.query import quote
from gpusched.cli.repeat import take_snapshot
from gpusched.client import Client, connect
from gpusched.errors import UsageError
from gpusched.model.units import parse_pipeline_id, printable

if TYPE_CHECKING:
    from gpusched.cli.parse import Values
    from gpusched.snapshots.submitting import Frozen

_NOT_WITH = ("wrap", "batch", "resubmit", "key", "key_again", "follow")


def submit(table: Table, given: Values, operands: list[str]) -> int:
    """Submit the pipeline of --dag, or go on with that of --resume; returns the exit code."""
    name = "dag" if "dag" in given else "resume"
    for key in _NOT_WITH:
        if key in given:
            raise UsageError(f"--{name} and --{key.replace('_', '-')} were both given", "give one thing to run")
    if operands:
        raise UsageError(f"--{name} and {printable(operands[0], 40)} were both given", "give one thing to run")
    if name == "resume":
        return _resume(given)
    if "resume" in given:
        raise UsageError("--dag and --resume were both given", "give one thing to run")
    request, modes = _request(read(given["dag"], given.get("vars", {}), table), table, given)
    with connect() as client:
        if given.get("dry_run"):
            client.call("POST", "/v1/pipelines", {**request, "dry_run": True})
            return _print_check(request, given)
        _take_snapshots(client, request, modes, bool(given.get("quiet")))
        answer = client.call("POST", "/v1/pipelines", request)
        submission.say_excluded("gsub", answer.get("env_excluded", []), given)
        return _print(client, answer, given, "Submitted")


def _resume(given: Values) -> int:
    others = given.keys() - {"resume", "json", "quiet", "wait", "verbose"}
    if others:
        said = sorted(others)[0].replace("_", "-")
        raise UsageError(f"--resume runs what was recorded, so --{said} has no effect", "change jobs with: gctl update")
    if parse_pipeline_id(given["resume"]) is None:
        shown = printable(given["resume"], 40)
        raise UsageError(f"{shown!r} is no pipeline; pipelines are called p42", "list them with: gq --tree")
    with connect() as client:
        from gpusched.snapshots.submitting import keep_for_resumption  # few pipelines are resumed

        keep_for_resumption(client.call, given["resume"])
        answer = client.call("POST", f"/v1/pipelines/{quote(given['resume'])}/resume", {})
        return _print(client, answer, given, "Resumed")


def _request(pipeline: PipelineText, table: Table, given: Values) -> tuple[dict[str, Any], list[str]]:
    """What goes to the daemon, and which snapshot each step wants. Environments that are alike are sent once."""
    variables = submission.from_environment(table)
    typed = {key: value for key, value in given.items() if key not in ("dag", "vars")}
    environments: dict[tuple[object, ...], int] = {}
    texts: list[dict[str, str]] = []
    named: list[list[str]] = []
    steps, modes = [], []
    folder, umask = submission.current_folder(), submission.umask()
    for step in pipeline.steps:
        values = submission.over(submission.over(variables, step.values), typed)
        mark = (values.get("export"), tuple(sorted(values.get("extra_env", {}).items())))
        if mark not in environments:
            environments[mark] = len(texts)
            texts.append(submission.captured(values))
            named.append(submission.named_variables(values))
        spec = {**submission.spec_of(values), **step.program, "umask": umask}
        spec.setdefault("work_dir", folder)
        steps.append(
            {
                "step": step.name,
                "needs": step.needs,
                "where": step.where,
                "environment": environments[mark],
                "spec": spec,
            }
        )
        modes.append(values.get("snapshot", "no"))
    whole = {"name": pipeline.name, "source": pipeline.source, "environments": texts, "env_named": named}
    return {**whole, "steps": steps}, modes


def _take_snapshots(client: Client, request: dict[str, Any], modes: list[str], is_quiet: bool) -> None:
    """Let steps start in a copy of their folder where that is asked for; one copy for all of a folder."""
    steps, environments, named = request["steps"], request["environments"], request["env_named"]
    taken: dict[tuple[str, str], tuple[Values, Frozen]] = {}
    moved: dict[tuple[int, str], int] = {}
    for step, mode in zip(steps, modes, strict=True):
        spec = step["spec"]
        mark = (spec["work_dir"], mode)
        if mark not in taken:
            before = dict(spec)
            found = take_snapshot(client, spec, {"snapshot": mode, "quiet": is_quiet})
            if found is None:
                continue
            taken[mark] = {key: value for key, value in spec.items() if before.get(key) != value}, found
        elif not is_quiet:
            for text in taken[mark][1].ways_out(spec):
                output.note("gsub", text)
        values, found = taken[mark]
        spec.update(values)
        # Another step may have the same environment, and no snapshot or another one.
        number = (step["environment"], found.tree)
        if number not in moved:
            moved[number] = len(environments)
            environments.append(found.environment(environments[step["environment"]]))
            named.append(named[step["environment"]])
        step["environment"] = moved[number]


def _print_check(request: dict[str, Any], given: Values) -> int:
    names = [step["step"] for step in request["steps"]]
    if given.get("json"):
        output.print_json({"pipeline": {"name": request["name"], "steps": names}})
    elif not given.get("quiet"):
        word = "step" if len(names) == 1 else "steps"
        sys.stdout.write(f"{printable(request['name'])}: {len(names)} {word}, nothing is wrong with them\n")
    return 0


def _print(client: Client, answer: dict[str, Any], given: Values, verb: str) -> int:
    name, jobs = answer["pipeline"], answer["jobs"]
    for text in answer.get("notes", ()):
        output.note("gsub", printable(text))
    for text in () if given.get("quiet") else answer.get("limits", ()):
        output.note("gsub", printable(text))
    if given.get("json"):
        limits = {"limits": answer["limits"]} if answer.get("limits") else {}
        output.print_json({"pipeline": name, "jobs": jobs, **limits})
    elif given.get("quiet"):
        sys.stdout.write(f"{name}\n")
    else:
        ids = sorted(map(int, jobs.values()))
        said = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs, {ids[0]} to {ids[-1]}"
        sys.stdout.write(f"{verb} pipeline {name} ({said})\n")
    sys.stdout.flush()
    if given.get("wait"):
        from gpusched.cli.gwait import await_all  # most do not wait

        return await_all(client, [name], None, "gsub")
    return 0
