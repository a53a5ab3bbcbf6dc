"""Notes on submissions that are accepted although they are probably not meant so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpusched.model.spec import JobSpec
from gpusched.model.tasks import count_written, tasks_of
from gpusched.model.units import about, plural

_LATE_S = 60.0
"""A begin that is not longer ago may have been the present when it was typed."""
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_OVERWRITTEN = (_VARIABLE, "CUDA_DEVICE_ORDER")
_SETS = re.compile(
    r"""^[^#\n]*(?:(?<![$\w{])CUDA_VISIBLE_DEVICES=["']?(?=\d|GPU-|MIG-)"""
    r"""|environ\[["']CUDA_VISIBLE_DEVICES["']\]\s{0,9}=\s{0,9}(?:["'](?=\d|GPU-|MIG-)|str\(|f["'])"""
    r"""|(?:putenv|setenv)\W{1,9}CUDA_VISIBLE_DEVICES\W{1,9}(?=\d|GPU-|MIG-))""",
    re.MULTILINE,
)
"""An assignment of numbers in a shell or Python. Other values may derive from those that the job was given."""


def remarks(values: Mapping[str, Any], spec: JobSpec, now: float, batch: Sequence[str] = ()) -> list[str]:
    """Notes on a checked submission. Args: values: its fields; batch: its shell lines, if it has any."""
    return [*_on_devices(values, batch), *(() if values.get("slurm") else _not_slurms(values, spec, now))]


def begin_remark(begin_at: float | None, now: float) -> str | None:
    """A note on a begin that has passed."""
    if begin_at is None or begin_at > now - _LATE_S:
        return None
    return f"the begin that was asked for passed {about(now - begin_at)} ago, so it delays nothing"


def _not_slurms(values: Mapping[str, Any], spec: JobSpec, now: float) -> Iterator[str]:
    """Notes on what Slurm takes without a word."""
    if (late := begin_remark(spec.begin_at, now)) is not None:
        yield late
    text = str(values.get("array") or "").partition("%")[0]
    # Without a comma, nothing can be named twice.
    if "," in text and spec.array is not None:
        several, tasks = count_written(text), len(tasks_of(spec.array.tasks))
        if several > tasks:
            yield (
                f"the array names {several} tasks, some more than once, and has {plural(tasks, 'task')}; for the same "
                f"work several times: -a 0-{several - 1}"
            )
    for name in _OVERWRITTEN:
        if name in values.get("env_named", ()):
            yield f"the value given for {name} has no effect: the scheduler sets it to the GPUs of the job"


def _on_devices(values: Mapping[str, Any], batch: Sequence[str]) -> Iterator[str]:
    """A note on a job that chooses its GPUs itself."""
    script = values.get("script") or ""
    if _VARIABLE in script and (found := _SETS.search(script)) is not None:
        is_file = values.get("script_name") != "wrap"
        where = f"line {script.count(chr(10), 0, found.end()) + 1} of the script" if is_file else "the command"
    else:
        words = "\n".join((*values.get("argv", ()), *batch))
        if _VARIABLE not in words or _SETS.search(words) is None:
            return
        where = "the command"
    yield (
        f"{where} sets {_VARIABLE} itself, and so may use GPUs that are not the job's, or find none; the scheduler "
        "sets it to those that the job has booked: leave it out, or choose among them"
    )
