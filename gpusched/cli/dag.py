"""gsub --dag and --resume: a pipeline as one submission."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpusched.cli import environment, output, submission
from gpusched.cli.parse import OptionTable, apply
from gpusched.cli.query import quote
from gpusched.cli.submission import over, take_snapshot
from gpusched.client import DaemonConnection, connect
from gpusched.config.toml_lines import lines_of
from gpusched.errors import GpuschedError, UsageError, WrongValue
from gpusched.lifecycle.pipelines import STEP_NAME, STEP_NAMES, find_circle, parse_needs
from gpusched.model.option import Option
from gpusched.model.pipeline import StepNeeds
from gpusched.model.units import closest, parse_pipeline_id, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HINT = "see docs/howto/pipelines.md, and check a file with: gsub --dry-run --dag FILE"
TOP = ("name", "vars", "defaults", "step")
PROGRAM = ("run", "script", "command")
OWN = ("needs", "args", *PROGRAM)
"""Keys of a step that are not options of gsub."""
_NOT_OF_A_STEP = frozenset({"wrap", "batch", "dag", "resume", "var", "resubmit", "key", "key-again"})
_NOT_SECTIONS = ("Output", "Other")
_REPEATED = frozenset({"env", "res", "sweep"})
"""Options whose uses accumulate; each item of a list becomes a use of its own."""
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\{?)([A-Za-z_][A-Za-z0-9_-]*)\}(\}?)")
_FEW = 12
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass
class PipelineStepText:
    """One step as written in the file."""

    name: str
    where: str
    """File and line, for messages."""
    needs: str
    values: dict[str, Any]
    """Values of gsub's options; the script's directives and the file's defaults rank below the step's own."""
    program: dict[str, Any]
    """`argv`, or `script`, `script_name` and `argv`, as in a submission."""


@dataclass
class PipelineText:
    """A pipeline file that was read without errors."""

    name: str
    source: str
    steps: list[PipelineStepText] = field(default_factory=list)


def read(path: str, given: Mapping[str, str], table: OptionTable) -> PipelineText:
    """Read a file with these variables.

    Raises: UsageError with all mistakes; Refused if the file cannot be read at all.
    """
    content = submission.read_file(path, "pipeline file", "docs/howto/pipelines.md shows how to write one")
    source = content.decode("utf-8", "surrogateescape")
    shown = printable(path)
    try:
        source.encode()
        document = tomllib.loads(source)
    except UnicodeEncodeError:
        raise UsageError(f"{shown} is not UTF-8 text", "convert it with: iconv -t utf-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{shown} is not valid TOML: {error}", HINT) from None
    return _Reader(shown, source, document, given, table).read()


class _Reader:
    """Walks over a document once and collects every mistake."""

    def __init__(
        self, shown: str, source: str, document: dict[str, Any], given: Mapping[str, str], table: OptionTable
    ) -> None:
        self._shown = shown
        self._source = source
        self._document = document
        self._given = given
        self._table = table
        self._options = {
            name[2:]: option
            for option in table.options
            if option.section not in _NOT_SECTIONS
            for name in option.names
            if name.startswith("--") and name[2:] not in _NOT_OF_A_STEP
        }
        self._lines = _with_sections(lines_of(source))
        self._mistakes: list[tuple[int, GpuschedError]] = []
        self._vars: dict[str, str] = {}
        self._scripts: dict[str, tuple[str, dict[str, Any]]] = {}

    def read(self) -> PipelineText:
        for key in self._document:
            if key not in TOP:
                self._unknown((key,), "a pipeline has no", key, TOP)
        self._read_vars()
        name = self._document.get("name", os.path.basename(self._shown).rpartition(".")[0] or "pipeline")
        if not isinstance(name, str) or not name.strip() or len(name) > 200:
            self._refuse(("name",), "name must be a string of up to 200 characters")
        base: dict[str, Any] = {}
        defaults = self._table_at(("defaults",), self._document.get("defaults", {}))
        for key, value in defaults.items():
            if key in OWN:
                self._refuse(("defaults", key), f"{key} belongs in a step, not in [defaults]")
            else:
                self._put(base, ("defaults", key), key, value)
        steps = self._table_at(("step",), self._document.get("step", {}))
        if not steps and self._document.keys() <= set(TOP):
            self._refuse(("step",), "there is no step; write one as [step.NAME]")
        found = PipelineText(str(name), self._source)
        needs: dict[str, StepNeeds] = {}
        for step, parts in steps.items():
            made = self._read_step(step, parts, base)
            if made is not None:
                found.steps.append(made)
                needs[step] = self._read_needs(step, made)
        self._check_needs(needs, steps)
        if self._mistakes:
            self._mistakes.sort(key=lambda one: one[0])
            raise UsageError.of([error for _, error in self._mistakes])
        return found

    # --- variables --------------------------------------------------------------------------------

    def _read_vars(self) -> None:
        values = self._table_at(("vars",), self._document.get("vars", {}))
        for name in self._given:
            if name not in values:
                near = closest(name, values)
                hint = f"did you mean {near}?" if near else f"variables: {', '.join(values) or 'none'}"
                self._mistakes.append((0, UsageError(f"{self._shown} has no variable {printable(name, 60)}", hint)))
        for name, value in values.items():
            key = ("vars", name)
            if not _VARIABLE.fullmatch(name):
                self._refuse(key, f"{printable(name, 60)!r} is not a valid variable name; use letters, digits, _ and -")
            elif not isinstance(value, (str, int, float)):
                self._refuse(key, f"the variable {name} must be a string or a number")
            else:
                # A variable may refer to those above it.
                self._vars[name] = self._given[name] if name in self._given else self._filled(key, _as_text(value))

    def _filled(self, key: tuple[str, ...], text: str) -> str:
        """Substitute variables; `{{name}}` is a literal brace, and `${name}` is left to the shell."""

        def put(match: re.Match[str]) -> str:
            opened, name, closed = match.groups()
            if opened and closed:
                return f"{{{name}}}"
            if name in self._vars:
                return f"{opened}{self._vars[name]}{closed}"
            near = closest(name, self._vars)
            if near:
                self._refuse(key, f"there is no variable {name}", f"did you mean {{{near}}}?")
            return match.group()

        return _PLACEHOLDER.sub(put, text) if "{" in text else text

    def _fill(self, key: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, str):
            return self._filled(key, value)
        if isinstance(value, list):
            return [self._fill(key, one) for one in value]
        if isinstance(value, dict):
            return {name: self._fill(key, one) for name, one in value.items()}
        return value

    # --- steps ------------------------------------------------------------------------------------

    def _read_step(self, name: str, parts: Any, base: dict[str, Any]) -> PipelineStepText | None:
        at = ("step", name)
        if not STEP_NAME.fullmatch(name):
            self._refuse(at, f"{printable(name, 60)!r} is not a valid step name; use {STEP_NAMES}")
            return None
        if not isinstance(parts, dict):
            self._refuse(at, f"step.{name} is a table; write [step.{name}] before its keys")
            return None
        parts = {key: self._fill((*at, key), value) for key, value in parts.items()}
        if "wrap" in parts and "run" not in parts:
            parts["run"] = parts.pop("wrap")  # gsub's name for it
        program, below = self._read_program(at, parts)
        values = over(below, base)
        typed: dict[str, Any] = {}
        for key, value in parts.items():
            if key not in OWN:
                self._put(typed, (*at, key), key, value)
        values = over(values, typed)
        values.setdefault("name", name)
        where = f"{self._where(at)}: step {name}"
        return PipelineStepText(name, where, self._needs_text(at, parts.get("needs", "")), values, program)

    def _read_program(self, at: tuple[str, ...], parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The program of a step, and the values set by its script's directives."""
        named = [key for key in PROGRAM if key in parts]
        if len(named) != 1:
            said = " and ".join(named) + " are both given" if named else "it has nothing to run"
            hint = "give one of: run = 'shell line', command = ['python', 'train.py'], script = 'train.sh'"
            self._refuse((*at, named[-1]) if named else at, f"step {at[1]}: {said}", hint)
            return {}, {}
        kind, value = named[0], parts[named[0]]
        args = parts.get("args", [])
        if "args" in parts and (kind != "script" or not _is_words(args)):
            self._refuse((*at, "args"), f"step {at[1]}: args must be a list of strings, and goes with script")
        if kind == "command":
            if not _is_words(value) or not value:
                self._refuse((*at, kind), f"step {at[1]}: command must be a list of strings: ['python', 'train.py']")
                return {}, {}
            return {"argv": [_as_text(word) for word in value]}, {}
        if not isinstance(value, str) or not value.strip():
            self._refuse((*at, kind), f"step {at[1]}: {kind} must be a string that is not empty")
            return {}, {}
        if kind == "run":
            return {"script": f"#!/bin/sh\n{value}\n", "script_name": "wrap", "argv": []}, {}
        try:
            text, values = self._script(value)
        except GpuschedError as error:
            for one in error.mistakes or (error,):
                self._refuse((*at, kind), f"step {at[1]}: {one.message}", one.hint)
            return {}, {}
        words = [_as_text(word) for word in args] if _is_words(args) else []
        found = {"script": text, "script_name": environment.base_name(value), "argv": words}
        return {**found, "script_path": environment.absolute(value)}, values

    def _script(self, path: str) -> tuple[str, dict[str, Any]]:
        if path not in self._scripts:
            content = submission.read_file(path, hint="paths are looked up from the current folder")
            submission.check_script(content, path)
            values = submission.directives(self._table, content, path)
            self._scripts[path] = content.decode("utf-8", "surrogateescape"), values
        return self._scripts[path]

    def _put(self, values: dict[str, Any], at: tuple[str, ...], key: str, value: Any) -> None:
        """Set the value of the gsub option with this name."""
        option = self._options.get(key.replace("_", "-"))
        if option is None:
            known = [*self._options, *(OWN if at[0] == "step" else ())]
            self._unknown(at, f"{'.'.join(at[:-1])} has no", key, known)
            return
        if not option.metavar and (option.read is None or isinstance(value, bool)):
            self._put_flag(values, at, key, option, value)
            return
        try:
            for text in _texts(key, value):
                apply(self._table, option, text, values)
        except WrongValue as error:
            self._refuse(at, f"{'.'.join(at[:-1])}: {error.option.removeprefix('--')}: {error.why}")
        except ValueError as error:
            self._refuse(at, f"{'.'.join(at[:-1])}: {key}: {error}")

    def _put_flag(self, values: dict[str, Any], at: tuple[str, ...], key: str, option: Option, value: Any) -> None:
        if not isinstance(value, bool):
            self._refuse(at, f"{'.'.join(at)} is {printable(repr(value), 40)}; it must be true or false")
        elif value:
            values.update(option.sets or {})
        else:
            opposite = self._options.get(f"no-{key.replace('_', '-')}")
            off = {name: False for name, on in (option.sets or {}).items() if on is True}
            values.update((opposite.sets or {}) if opposite is not None else off)

    # --- needs ------------------------------------------------------------------------------------

    def _needs_text(self, at: tuple[str, ...], value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            return ",".join(value)
        self._refuse((*at, "needs"), f"step {at[1]}: needs must be a list of names: ['prep', 'afterany:train']")
        return ""

    def _read_needs(self, name: str, step: PipelineStepText) -> StepNeeds:
        try:
            needs = parse_needs(step.needs)
        except ValueError as error:
            self._refuse(("step", name, "needs"), f"step {name}: {error}")
            return StepNeeds()
        other = step.values.get("dependency")
        if other and needs.all and (needs.is_any or "?" in other):
            self._refuse(("step", name, "needs"), f"step {name}: needs and dependency go together only with ','")
        return needs

    def _check_needs(self, needs: Mapping[str, StepNeeds], steps: Mapping[str, Any]) -> None:
        for name, of in needs.items():
            for wanted in of.steps:
                if wanted not in steps:
                    near = closest(wanted, steps)
                    hint = f"did you mean {near}?" if near else f"steps: {', '.join(list(steps)[:20])}"
                    self._refuse(("step", name, "needs"), f"step {name} needs {wanted}, which is not a step", hint)
        left = dict(needs)
        while circle := find_circle(left):
            # Without these steps, look for further cycles, to report all of them at once.
            for name in circle:
                left.pop(name, None)
            text = f"the steps wait for each other: {' -> '.join(circle)}"
            self._refuse(("step", circle[0], "needs"), text, "take one of these needs out")

    # --- mistakes ---------------------------------------------------------------------------------

    def _table_at(self, at: tuple[str, ...], value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self._refuse(at, f"{at[0]} is a table; write [{at[0]}{'.NAME' if at[0] == 'step' else ''}] before its keys")
        return {}

    def _unknown(self, at: tuple[str, ...], said: str, key: str, known: Any) -> None:
        near = closest(key, known)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}" if len(known) < _FEW else HINT
        self._refuse(at, f"{said} {printable(key, 60)}", hint)

    def _refuse(self, at: tuple[str, ...], text: str, hint: str = HINT) -> None:
        self._mistakes.append((self._line(at), UsageError(f"{self._where(at)}: {text}", hint)))

    def _line(self, at: tuple[str, ...]) -> int:
        while at and at not in self._lines:
            at = at[:-1]
        return self._lines.get(at, 1)

    def _where(self, at: tuple[str, ...]) -> str:
        return f"{self._shown}, line {self._line(at)}"


def _with_sections(lines: Mapping[tuple[str, ...], int]) -> dict[tuple[str, ...], int]:
    """The line of each key, and of each section implied by its parts: `[step.a]` is also the start of `step`."""
    found: dict[tuple[str, ...], int] = {}
    for at, line in lines.items():
        for size in range(1, len(at)):
            found[at[:size]] = min(line, found.get(at[:size], line))
    return {**found, **lines}


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, (str, int, float)) for word in value)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(value: Any) -> list[str]:
    """Raises: ValueError."""
    words = value if isinstance(value, list) else [value]
    if not _is_words(words):
        raise ValueError("expected a list of strings or numbers")
    return [_as_text(word) for word in words]


def _texts(key: str, value: Any) -> list[str]:
    """Values of an option on a command line, one for each use. Raises: ValueError."""
    if isinstance(value, dict):
        return [f"{name}={','.join(_words(part))}" for name, part in value.items()]
    if isinstance(value, list):
        words = _words(value)
        return words if key in _REPEATED else [",".join(words)]
    if hasattr(value, "isoformat"):
        return [str(value.isoformat())]
    return [_as_text(value)]


if TYPE_CHECKING:
    from gpusched.cli.parse import Values
    from gpusched.snapshots.submission import Frozen

_NOT_WITH = ("wrap", "batch", "resubmit", "key", "key_again", "follow")


def submit(table: OptionTable, given: Values, operands: list[str]) -> int:
    """Submit the pipeline of --dag, or resume that of --resume; returns the exit code."""
    name = "dag" if "dag" in given else "resume"
    for key in _NOT_WITH:
        if key in given:
            raise UsageError(f"--{name} and --{key.replace('_', '-')} were both given", "use one of them")
    if operands:
        raise UsageError(f"--{name} and {printable(operands[0], 40)} were both given", "use one of them")
    if name == "resume":
        return _resume(given)
    if "resume" in given:
        raise UsageError("--dag and --resume were both given", "use one of them")
    request, modes, notes = _request(read(given["dag"], given.get("vars", {}), table), table, given)
    with connect() as client:
        if given.get("dry_run"):
            client.call("POST", "/v1/pipelines", {**request, "dry_run": True})
            return _print_check(request, given)
        _take_snapshots(client, request, modes, bool(given.get("quiet")))
        answer = client.call("POST", "/v1/pipelines", request)
        submission.say_excluded("gsub", answer.get("env_excluded", []), given)
        answer["notes"] = [*answer.get("notes", ()), *notes]
        return _print(client, answer, given, "Submitted")


def _resume(given: Values) -> int:
    others = given.keys() - {"resume", "json", "quiet", "wait", "verbose"}
    if others:
        said = sorted(others)[0].replace("_", "-")
        raise UsageError(f"--resume runs what was recorded, so --{said} has no effect", "change jobs with: gctl update")
    if parse_pipeline_id(given["resume"]) is None:
        shown = printable(given["resume"], 40)
        raise UsageError(f"{shown!r} is not a pipeline id; pipeline ids look like p42", "list them with: gq --tree")
    with connect() as client:
        from gpusched.snapshots.submission import keep_for_resumption  # few pipelines are resumed

        keep_for_resumption(client.call, given["resume"])
        answer = client.call("POST", f"/v1/pipelines/{quote(given['resume'])}/resume", {})
        return _print(client, answer, given, "Resumed")


def _request(pipeline: PipelineText, table: OptionTable, given: Values) -> tuple[dict[str, Any], list[str], list[str]]:
    """The request to the daemon, the snapshot mode of each step, and notes. Equal environments are sent once."""
    variables = submission.from_environment(table)
    typed = {key: value for key, value in given.items() if key not in ("dag", "vars")}
    environments: dict[tuple[object, ...], int] = {}
    texts: list[dict[str, str]] = []
    named: list[list[str]] = []
    steps, modes = [], []
    notes: dict[str, None] = {}
    folder, umask = environment.current_folder(), environment.umask()
    for step in pipeline.steps:
        values = submission.over(submission.over(variables, step.values), typed)
        mark = (values.get("export"), tuple(sorted(values.get("extra_env", {}).items())))
        if mark not in environments:
            environments[mark] = len(texts)
            texts.append(environment.captured(values))
            named.append(environment.named_variables(values))
        spec = {**submission.spec_of(values), **step.program, "umask": umask}
        notes.update(dict.fromkeys(submission.missing_folder(values)))
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
    return {**whole, "steps": steps}, modes, list(notes)


def _take_snapshots(client: DaemonConnection, request: dict[str, Any], modes: list[str], is_quiet: bool) -> None:
    """Start steps in a copy of their folder where requested; steps in one folder share a copy."""
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
    if not output.show(given, {"pipeline": {"name": request["name"], "steps": names}}, ()):
        word = "step" if len(names) == 1 else "steps"
        sys.stdout.write(f"{printable(request['name'])}: {len(names)} {word}, no errors\n")
    return 0


def _print(client: DaemonConnection, answer: dict[str, Any], given: Values, verb: str) -> int:
    name, jobs = answer["pipeline"], answer["jobs"]
    output.notes("gsub", answer)
    if not given.get("quiet"):
        output.notes("gsub", answer, "limits")
    limits = {"limits": answer["limits"]} if answer.get("limits") else {}
    if not output.show(given, {"pipeline": name, "jobs": jobs, **limits}, [name]):
        ids = sorted(map(int, jobs.values()))
        said = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} jobs, {ids[0]} to {ids[-1]}"
        sys.stdout.write(f"{verb} pipeline {name} ({said})\n")
    sys.stdout.flush()
    if given.get("wait"):
        from gpusched.cli.gwait import await_all  # rarely used

        return await_all(client, [name], None, "gsub")
    return 0
