"""A submission as an sbatch script: `#SBATCH` lines before the script, or before the command.

The options are those that gsub would submit: of the command line, GSUB_* variables and the script's own lines, which
the written lines replace. Options of sbatch that mean nothing here stay in the script: they do on a cluster.
"""

from __future__ import annotations

from gpusched.addons.kubernetes.program import first_words, is_shell, job_name
from gpusched.addons.slurm.handover.directives import directive_line, directives
from gpusched.cli.parse import parse, split_words
from gpusched.cli.slurm_options import NOTES
from gpusched.errors import Refused
from gpusched.model.request import TASK_KEYS
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values

    Spec = dict[str, Any]
    Words = Iterator[tuple[str, str | None]]


def sbatch_script(table: OptionTable, spec: Spec, values: Values, nodes: int) -> tuple[str, set[str]]:
    """The text of the script, and the sentences on options without effect here that stay in it.

    Args: spec: fields as gsub sends them, with a `work_dir` only if one was named; nodes: how many the job is for.
    Raises: Refused for what no `#SBATCH` line can hold.
    """
    words = [("job-name", job_name(spec)), *directives(spec, nodes), *_environment(values)]
    lines = [directive_line(name, text) for name, text in words]
    argv = spec.get("argv") or []
    script = spec.get("script")
    starts_ranks = spec.get("ranks", True) and any(spec.get(key) for key in TASK_KEYS)
    if script is None:
        program = ["srun", *argv] if starts_ranks else argv
        return "\n".join(["#!/bin/sh", *lines, f"exec {_quoted(program)}", ""]), set()
    first, _, rest = script.partition("\n")
    if starts_ranks and spec.get("script_name") == "wrap":
        return "\n".join(["#!/bin/sh", *lines, f"exec {_quoted(['srun', '/bin/sh', '-c', rest.rstrip()])}", ""]), set()
    if starts_ranks:
        name = printable(str(spec.get("script_name") or "a script"))
        raise Refused(
            f"the tasks of {name} cannot be expressed in an sbatch script, which Slurm runs once",
            f"print it as a command, gsub --print sbatch -- ./{name}, or start its tasks with srun and add --no-ranks",
        )
    kept, rest = _without_directives(table, rest)
    lines += kept
    said = {sentence for sentences in kept.values() for sentence in sentences}
    if argv:
        if not is_shell(script):
            name = printable(str(spec.get("script_name") or ""))
            raise Refused(
                f"the arguments of {name} cannot be expressed in an sbatch script, which {first_words(script)[0]} runs",
                f"print it as a command: gsub --print sbatch -- ./{name} {printable(_quoted(argv))}",
            )
        lines.append(f"set -- {_quoted(argv)}")
    return "\n".join([first, *lines, rest]), said


def _environment(values: Values) -> Words:
    """The rule, not the environment: what a name means is looked up where sbatch is typed."""
    export = str(values.get("export", "ALL"))
    words = [word for word in export.split(",") if word]
    more = values.get("extra_env", {})
    if not more and words in (["ALL"], []):
        return
    words = [*words, *(f"{name}={_value(name, value)}" for name, value in more.items())]
    yield "export", ",".join(words)


def _value(name: str, value: str) -> str:
    """The value of a variable between the commas of --export."""
    if not any(mark in value for mark in ",'\""):
        return value
    quote = "'" if "'" not in value else '"'
    if quote in value:
        raise Refused(
            f"the variable {printable(name)} cannot be expressed in an sbatch script: it holds both kinds of quotes",
            "set it in the script",
        )
    return f"{quote}{value}{quote}"


def _quoted(words: list[str]) -> str:
    import shlex  # only for a file that is printed

    return shlex.join(words)


def _without_directives(table: OptionTable, text: str) -> tuple[dict[str, list[str]], str]:
    """Lines that only sbatch understands with the sentences on them, and the text without any directive."""
    kept: dict[str, list[str]] = {}
    rest: list[str] = []
    is_head = True
    for line in text.split("\n"):
        is_head = is_head and (not line.strip() or line.lstrip().startswith("#"))
        mark = next((mark for mark in ("#GSUB", "#SBATCH") if is_head and line.startswith(mark)), None)
        if mark is None or line[len(mark) :][:1].strip():
            rest.append(line)
        elif mark == "#SBATCH" and (sentences := _without_effect(table, line[len(mark) :])):
            kept[line] = sentences
    return kept, "\n".join(rest)


def _without_effect(table: OptionTable, options: str) -> list[str]:
    """The sentences on a line that has only options without effect here; empty for any other."""
    found, _, _ = parse(table, split_words(options), operands_first=True)
    return list(found[NOTES]) if set(found) == {NOTES} else []
