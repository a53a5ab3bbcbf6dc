"""Output paths of runs: expands sbatch's filename patterns."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from gpusched.lifecycle.arrays import fill, swept
from gpusched.model.job import Job, Run
from gpusched.model.layout import holds_other_nodes, ranks_on_nodes, starts_ranks
from gpusched.model.units import is_digits


def expand_pattern(pattern: str, job: Job, node: str, rank: int = 0, task: int | None = None) -> str:
    """Expand an output pattern: `%j %J %A %a %x %u %N %n %t %s %%`, numbers padded by `%5j`.

    Args: rank: of the node among those of the job. task: number of the process among all; None for one on each node.

    Source: the filename patterns of sbatch. An unknown letter stays as it is. A slash in a name
    becomes `_`, so that a job's name cannot redirect the file.
    """
    out = []
    for literal, letter, width in _pieces(pattern):
        if not letter:
            out.append(literal)
        elif letter in "ja" and job.is_array:
            # Each task inserts its own value here.
            out.append("%" + letter)
        else:
            value: str | int
            if letter == "t" and task is not None:
                value = task
            else:
                value = rank if letter in _OF_RANK else _LETTERS[letter](job, node)
            out.append(str(value).zfill(width) if isinstance(value, int) else value)
    return "".join(out)


_LETTERS: Mapping[str, Callable[[Job, str], str | int]] = {
    "j": lambda job, node: job.id,
    "J": lambda job, node: job.id,
    "A": lambda job, node: job.array_id or job.id,
    "a": lambda job, node: job.task or 0,
    "s": lambda job, node: "batch",
    "x": lambda job, node: job.spec.name.replace("/", "_"),
    "u": lambda job, node: job.user.replace("/", "_"),
    "N": lambda job, node: node.partition(".")[0].replace("/", "_"),
}


_OF_JOB, _OF_RANK = "jJA", "nt"
_NO_PATH = "\0"
_OF_NODE = frozenset({*_OF_RANK, "N"})


@lru_cache(1024)
def _pieces(pattern: str) -> tuple[tuple[str, str, int], ...]:
    """Split an output pattern into text, or a letter and the padding width of its number.

    Cached, since nearly all jobs share a few patterns.
    """
    pieces = []
    at = 0
    while at < len(pattern):
        if pattern[at] != "%":
            end = pattern.find("%", at)
            end = len(pattern) if end < 0 else end
            pieces.append((pattern[at:end], "", 0))
            at = end
            continue
        end = at + 1
        while end < len(pattern) and is_digits(pattern[end]):
            end += 1
        letter = pattern[end : end + 1]
        if letter == "%" and end == at + 1:
            pieces.append(("%", "", 0))
        elif (letter and letter in _OF_RANK) or letter in _LETTERS:
            pieces.append(("", letter, min(int(pattern[at + 1 : end] or 0), 10)))
        else:
            pieces.append((pattern[at : end + 1], "", 0))
        at = end + 1
    return tuple(pieces)


def letters_of(pattern: str) -> frozenset[str]:
    """Letters that are filled in."""
    return frozenset(letter for _, letter, _ in _pieces(pattern))


@lru_cache(1024)
def _prefix(folder: str) -> str:
    return posixpath.join(posixpath.normpath(folder), "")


def output_paths(
    job: Job, run_number: int, node: str, default: str, rank: int = 0, task: int | None = None
) -> tuple[str, str | None]:
    """Absolute paths of a run's stdout and stderr on a node; None when stderr goes to stdout.

    Later runs get their number as a suffix, to preserve the logs of earlier attempts;
    with `--open-mode=append` all runs write to one file, with `truncate` each run truncates it as in Slurm.
    The other nodes of a gang get their rank as a suffix, `.n1`, unless the pattern names the node: two machines cannot
    append to one file of a shared file system. All processes of one node may.
    """
    launch = job.spec.launch
    suffix = f".{run_number}" if run_number > 1 and launch.open_mode is None else ""

    folder = launch.submit_dir or launch.work_dir
    if launch.stderr is None and not suffix and not rank and job.spec.array is None:
        ends = _around_id(launch.stdout or default, folder)
        if ends is not None:
            return str(job.id).join(ends), None

    def place(pattern: str) -> str:
        path = _filled(pattern, job, node, rank, task)
        is_shared = rank > 0 and _OF_NODE.isdisjoint(letter for _, letter, _ in _pieces(pattern))
        ending = f".n{rank}{suffix}" if is_shared else suffix
        if "/" not in path and path not in ("", ".", ".."):
            return f"{_prefix(folder)}{path}{ending}"
        # A device gets no suffix, as it has no content to preserve.
        ending = "" if path.startswith("/dev/") else ending
        return posixpath.normpath(posixpath.join(folder, path)) + ending

    stderr = launch.stderr
    if job.spec.array is not None:
        # As in Slurm, so that the tasks of an array are adjacent in a listing.
        default = default.replace("%j", "%A_%a")
    return place(launch.stdout or default), None if stderr is None else place(stderr)


@lru_cache(1024)
def _around_id(pattern: str, folder: str) -> list[str] | None:
    """The path before and after the id of a job that is no task, if nothing else is filled in; None if something is.

    Most jobs of a long queue have such a path, and a list works out that of each.
    """
    pieces = _pieces(pattern)
    is_simple = any(letter for _, letter, _ in pieces) and "/" not in pattern
    if not is_simple or any(letter and (letter not in _OF_JOB or width) for _, letter, width in pieces):
        return None
    return "".join([_prefix(folder), *(_NO_PATH if letter else literal for literal, letter, _ in pieces)]).split(
        _NO_PATH
    )


class OutputFile(NamedTuple):
    """One of the files that a run writes its output, or its errors, to."""

    node: str
    ranks: range
    """Of the processes that write to it."""
    label: str
    """What distinguishes its lines from those of the others: the node, or the rank if each has a file."""
    path: str


def output_files(job: Job, run: Run, default: str, *, is_error: bool = False) -> tuple[OutputFile, ...]:
    """All files of one stream of a run, by rank; empty before its start is recorded. Args: default: of the settings."""
    launch = job.spec.launch
    recorded = (run.stderr_path if is_error else None) or run.stdout_path
    if recorded is None:
        return ()
    pattern = (launch.stderr if is_error else None) or launch.stdout or default
    has_each = starts_ranks(job.spec) and "t" in letters_of(pattern)
    parts = run.on_each_node[:1] if holds_other_nodes(job.spec) else run.on_each_node
    found: list[OutputFile] = []
    for place, (part, ranks) in enumerate(zip(parts, ranks_on_nodes(job.spec, parts), strict=True)):
        node = part.node
        for some in [ranks[at : at + 1] for at in range(len(ranks))] if has_each else [ranks]:
            paths = output_paths(job, run.number, node, default, place, some[0])
            path = (paths[1] if is_error else None) or paths[0]
            label = str(some[0]) if has_each else node
            found.append(OutputFile(node, some, label, path if found else recorded))
    return tuple(found)


def input_path(job: Job, node: str, rank: int = 0, task: int | None = None) -> str | None:
    """Absolute path of a job's standard input on a node; None without any."""
    launch = job.spec.launch
    if launch.stdin is None:
        return None
    path = _filled(launch.stdin, job, node, rank, task)
    return posixpath.normpath(posixpath.join(launch.submit_dir or launch.work_dir, path))


def _filled(pattern: str, job: Job, node: str, rank: int, task: int | None) -> str:
    """A pattern with its letters and, in a sweep, its placeholders replaced."""
    path = expand_pattern(pattern, job, node, rank, task)
    values = {name: value.replace("/", "_") for name, value in values_of(job).items()}
    return fill(path, values) if values else path


def values_of(job: Job) -> dict[str, str]:
    """Values of a sweep task for its placeholders; empty for any other job."""
    array = job.spec.array
    return {} if array is None or not array.sweep or job.task is None else swept(array, job.task)
