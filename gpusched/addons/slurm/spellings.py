"""Options of sbatch and the fields of a job that they set: read by Slurm's commands, written for a job handed over."""

from __future__ import annotations

from gpusched.model.units import is_digits

BAD_GRES = "Invalid generic resource (gres) specification"

TEXTS = {
    "comment": "comment",
    "wckey": "wckey",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "constraint": "constraint",
    "prefer": "prefer",
    "dependency": "dependency",
}
"""Texts kept as they are, as are the next ones."""
FILES = {"output": "stdout", "error": "stderr", "input": "stdin"}
COUNTS = {
    "ntasks": "ntasks",
    "ntasks-per-node": "ntasks_per_node",
    "ntasks-per-gpu": "ntasks_per_gpu",
    "mincpus": "min_cpus",
}
CORES = {"cpus-per-task": "cpus", "cpus-per-gpu": "cpus_per_gpu"}
SIZES = {"mem": "mem_mib", "mem-per-gpu": "mem_per_gpu_mib", "mem-per-cpu": "mem_per_cpu_mib"}
GPUS = {"gpus": "gpus", "gpus-per-node": "gpus_per_node", "gpus-per-task": "gpus_per_task"}
INSTANTS = {"begin": "begin_at", "deadline": "deadline_at"}


def typed_count(text: str) -> tuple[str | None, int]:
    """The type and the number of `a100:2` or `2`. Raises: ValueError."""
    kind, colon, count = text.rpartition(":")
    if not (is_digits(count) and len(count) < 6) or ":" in kind or (colon and not kind):
        raise ValueError(text)
    return kind or None, int(count)


def options_of(variables: str) -> dict[str, str]:
    """Names of variables after their prefix, separated by blanks, and the options that have the same names."""
    return {name: name.lower().replace("_", "-") for name in variables.split()}
