"""A submission as an sbatch script: `#SBATCH` lines before the script, or before the command.

The options are those that gsub would submit: of the command line, GSUB_* variables and the script's own lines, which
the written lines replace. Options of sbatch that mean nothing here stay in the script: they do on a cluster.
"""

from __future__ import annotations

from gpusched.cli.jobfile.losses import events_lost
from gpusched.cli.jobfile.program import first_words, is_shell, job_name
from gpusched.cli.parse import parse, split_words
from gpusched.cli.slurm_options import NOTES
from gpusched.errors import Refused
from gpusched.model.spec import TASK_KEYS
from gpusched.model.units import format_duration, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values

    Spec = dict[str, Any]
    Words = Iterator[tuple[str, str | None]]

_TEXTS = {
    "comment": "comment",
    "wckey": "wckey",
    "account": "account",
    "queue": "partition",
    "qos": "qos",
    "reservation": "reservation",
}
_NUMBERS = {
    "ntasks": "ntasks",
    "ntasks_per_node": "ntasks-per-node",
    "ntasks_per_gpu": "ntasks-per-gpu",
    "cpus_per_gpu": "cpus-per-gpu",
}
_SIZES = {"mem_mib": "mem", "mem_per_gpu_mib": "mem-per-gpu", "mem_per_cpu_mib": "mem-per-cpu"}
_GPUS = {"gpus": "gpus", "gpus_per_node": "gpus-per-node", "gpus_per_task": "gpus-per-task"}
_FILES = {"work_dir": "chdir", "stdout": "output", "stderr": "error", "stdin": "input", "open_mode": "open-mode"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./?&|()-")


def sbatch_script(table: OptionTable, spec: Spec, values: Values, nodes: int) -> tuple[str, set[str]]:
    """The text of the script, and the sentences on options without effect here that stay in it.

    Args: spec: fields as gsub sends them, with a `work_dir` only if one was named; nodes: how many the job is for.
    Raises: Refused for what no `#SBATCH` line can hold.
    """
    lines = [_line(name, text) for name, text in _directives(spec, values, nodes)]
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
            f"the tasks of {name} cannot be said in an sbatch script, which Slurm runs once",
            f"print it as a command, gsub --print sbatch -- ./{name}, or start its tasks with srun and add --no-ranks",
        )
    kept, rest = _without_directives(table, rest)
    lines += kept
    said = {sentence for sentences in kept.values() for sentence in sentences}
    if argv:
        if not is_shell(script):
            name = printable(str(spec.get("script_name") or ""))
            raise Refused(
                f"the arguments of {name} cannot be said in an sbatch script, which {first_words(script)[0]} runs",
                f"print it as a command: gsub --print sbatch -- ./{name} {printable(_quoted(argv))}",
            )
        lines.append(f"set -- {_quoted(argv)}")
    return "\n".join([first, *lines, rest]), said


def _directives(spec: Spec, values: Values, nodes: int) -> Words:
    yield "job-name", job_name(spec)
    for key, name in _TEXTS.items():
        if spec.get(key):
            yield name, str(spec[key])
    most = spec.get("nodes_max")
    yield "nodes", f"{nodes}-{most}" if most else str(nodes)
    yield from _amounts(spec)
    if "nodelist" in spec or "exclude" in spec:
        from gpusched.model.hostlist import fold  # few submissions name nodes

        for key in ("nodelist", "exclude"):
            if spec.get(key):
                yield key, fold(spec[key])
    for key in ("constraint", "prefer"):
        if spec.get(key):
            yield key, spec[key]
    if spec.get("exclusive"):
        yield "exclusive", None
    yield from _times(spec)
    if spec.get("array"):
        yield "array", spec["array"]
    yield from _end(spec)
    for key, name in _FILES.items():
        if spec.get(key):
            yield name, spec[key]
    yield from _environment(values)


def _amounts(spec: Spec) -> Words:
    for key, name in _NUMBERS.items():
        if spec.get(key):
            yield name, str(spec[key])
    if spec.get("cpus") is not None:
        yield "cpus-per-task", str(max(1, -int(-spec["cpus"] // 1)))
    for key, name in _SIZES.items():
        if spec.get(key):
            yield name, "0" if spec[key] == "all" else _size(spec[key])
    kind = f"{spec['gpu_type']}:" if spec.get("gpu_type") else ""
    gres = [f"{name}:{count}" for name, count in spec.get("resources", {}).items()]
    if spec.get("gpu_fraction") is not None:
        if kind:
            raise Refused(
                f"-g {kind}{spec['gpu_fraction']:g} cannot be said in an sbatch script: gres mps has no types",
                "name the type as a feature of the cluster, with -C",
            )
        gres.insert(0, f"mps:{round(spec['gpu_fraction'] * 100)}")
    else:
        for key, name in _GPUS.items():
            if spec.get(key):
                yield name, f"{kind}{spec[key]}"
    if gres:
        yield "gres", ",".join(gres)
    if spec.get("licenses"):
        yield "licenses", ",".join(f"{name}:{count}" for name, count in spec["licenses"].items())


def _size(mib: int) -> str:
    return f"{mib // 1024}G" if not mib % 1024 else f"{mib}M"


def _times(spec: Spec) -> Words:
    limit = spec.get("time_limit_s")
    if limit == "unlimited":
        yield "time", "UNLIMITED"
    elif isinstance(limit, int):
        # Slurm reads two numbers as minutes and seconds, as we do.
        yield "time", format_duration(-(-limit // 60) * 60)
    for key, name in (("begin_at", "begin"), ("deadline_at", "deadline")):
        if spec.get(key) is not None:
            import time  # few jobs have one

            # A second later rather than earlier.
            yield name, time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(-int(-spec[key] // 1)))
    if spec.get("dependency"):
        yield "dependency", spec["dependency"]
    if spec.get("never_satisfied"):
        yield "kill-on-invalid-dep", "yes" if spec["never_satisfied"] == "cancel" else "no"
    if spec.get("hold"):
        yield "hold", None
    if spec.get("nice"):
        yield "nice", str(spec["nice"])


def _end(spec: Spec) -> Words:
    if "requeue" in spec:
        yield "requeue" if spec["requeue"] else "no-requeue", None
    if spec.get("notice"):
        import signal  # few jobs ask for one

        wanted = spec["notice"]
        try:
            name = signal.Signals(wanted["signal"]).name.removeprefix("SIG")
        except ValueError:
            name = str(wanted["signal"])
        yield "signal", f"{'B:' if wanted['main_only'] else ''}{name}@{wanted['before_s']}"
    words = [word for word in spec.get("notify") or () if word not in events_lost(spec["notify"])]
    if words:
        mail = ["REQUEUE" if word in ("preempt", "retry", "requeue") else word.upper() for word in words]
        yield "mail-type", ",".join(dict.fromkeys(mail))
    if addresses := [name for name in spec.get("notify_to") or () if "@" in name]:
        yield "mail-user", ",".join(addresses)


def _environment(values: Values) -> Words:
    """The rule, not the environment: what a name stands for is read where sbatch is typed."""
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
            f"the variable {printable(name)} cannot be said in an sbatch script: it holds both kinds of quotes",
            "set it in the script",
        )
    return f"{quote}{value}{quote}"


def _line(name: str, text: str | None) -> str:
    if text is None:
        return f"#SBATCH --{name}"
    if "\n" in text or "\r" in text:
        raise Refused(f"--{name} holds a line break, which no #SBATCH line can", "write it in one line")
    word = f"--{name}={text}"
    if not _PLAIN.issuperset(word):
        word = '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH {word}"


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
