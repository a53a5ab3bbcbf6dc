"""How long a job will run, judged by those like it that ended well. Never used to end anything.

Like means: the same user, the same command or script by its file name, the same number of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log

from gpusched.model.job import Job, JobSpec
from gpusched.model.snapshot import Prediction

SAMPLES = 50
"""Only the newest runs count: code and data change."""

LEAST = 3
"""With fewer runs nothing is said."""

_SHORTEST_S, _STEP = 60.0, 1.25

_LAUNCHERS = frozenset({"python", "python3", "bash", "sh", "torchrun", "accelerate", "srun", "mpirun", "env", "nice"})
"""Commands that say nothing of what runs; the next word that is no option does."""


@dataclass(frozen=True, slots=True)
class Family:
    """Jobs that are taken to run equally long."""

    user: str
    command: str
    gpus: int


def family(job: Job) -> Family:
    """The family of a job."""
    return family_of(job.user, job.spec)


def family_of(user: str, spec: JobSpec) -> Family:
    """The family that a submission of this user belongs to."""
    return Family(user, _command(spec), spec.request.gpus * spec.request.nodes)


def _command(spec: JobSpec) -> str:
    launch = spec.launch
    if launch.script_sha is not None:
        name = launch.script_name or ""
        # Scripts that come without a file are told apart by the name of the job.
        return spec.name if name in ("", "stdin", "wrap") else _basename(name)
    return _program(launch.argv, is_line=launch.script_name == "batch") or spec.name


@lru_cache(maxsize=64)
def _program(argv: tuple[str, ...], *, is_line: bool) -> str:
    """What a command runs; empty when it has no word. Asked many times for each job.

    Args: is_line: the third word is a line for the shell.
    """
    words = [_basename(word) for word in argv]
    if is_line and len(words) == 3:
        words = [_basename(word) for word in argv[2].split()]
    if not words:
        return ""
    if words[0] in _LAUNCHERS:
        named = next((word for word in words[1:] if not word.startswith("-")), None)
        if named is not None:
            return f"{words[0]} {named}"
    return words[0]


def _basename(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def predict(run_times_s: Sequence[float]) -> Prediction | None:
    """What the newest runs of a family (oldest first, in seconds) say of the next; None when they are too few.

    Quantiles by the nearest rank, so that one wild run moves nothing but the ends.
    """
    newest = sorted(run_times_s[-SAMPLES:])
    if len(newest) < LEAST:
        return None
    return Prediction(_rank(newest, 0.1), _rank(newest, 0.5), _rank(newest, 0.9), len(newest))


def planned_s(prediction: Prediction | None) -> int | None:
    """The run time to plan with, in seconds: what nine in ten kept to, rounded up in steps of a quarter.

    The steps keep jobs whose predictions differ by little in one class.
    """
    if prediction is None:
        return None
    steps = ceil(log(max(prediction.high_s, _SHORTEST_S) / _SHORTEST_S) / log(_STEP))
    return ceil(_SHORTEST_S * _STEP**steps)


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]
