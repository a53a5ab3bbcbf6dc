"""Similar jobs, with their run times and VRAM use. Never used to end a run.

A family is one user's jobs with the same command or script (by file name) and the same number of GPUs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.snapshot import Prediction, VramSeen
from gpusched.model.states import JobState

SAMPLES = 50
"""Newest runs that count, since code and data change."""

LEAST_RUNS = 3
"""With fewer runs there is no prediction."""

_LAUNCHERS = frozenset({"python", "python3", "bash", "sh", "torchrun", "accelerate", "srun", "mpirun", "env", "nice"})
"""Commands that run another command, named by the next word that is not an option."""


class Family(NamedTuple):
    """Jobs expected to run equally long. A tuple, since it is the key of all that is learned."""

    user: str
    command: str
    gpus: int


class Invocation(NamedTuple):
    """Jobs of a family with the same script text and arguments."""

    digest: bytes
    """Of both, since thousands are remembered."""
    family: Family


def invocation_of(job: Job, kind: Family | None = None) -> Invocation:
    """Args: kind: its family, where that is known already."""
    launch = job.spec.launch
    return Invocation(_digest(launch.script_sha, launch.argv), kind or family(job))


@lru_cache(maxsize=64)
def _digest(script_sha: str | None, argv: tuple[str, ...]) -> bytes:
    words = "\0".join((script_sha or "", *argv))
    return blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def stated_limit_s(job: Job) -> int | None:
    """Time limit stated by the user; a default or a limit learned from similar jobs says nothing about the user."""
    return None if job.spec.time_limit_source else job.spec.time_limit_s


def family(job: Job) -> Family:
    return family_of(job.user, job.spec)


def family_of(user: str, spec: JobSpec) -> Family:
    return Family(user, _command(spec), spec.request.total_gpus)


def _command(spec: JobSpec) -> str:
    launch = spec.launch
    if launch.script_sha is not None:
        name = launch.script_name or ""
        # A script without a file is identified by the job's name.
        return spec.name if name in ("", "stdin", "wrap") else _basename(name)
    return _program(launch.argv, is_line=launch.script_name == "batch") or spec.name


@lru_cache(maxsize=64)
def _program(argv: tuple[str, ...], *, is_line: bool) -> str:
    """The program that a command runs; empty if there is none. Called many times per job.

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


def predict(run_times_s: Sequence[float], least: int = LEAST_RUNS) -> Prediction | None:
    """Prediction from the run times of a family (seconds, oldest first); None if there are fewer than `least`.

    Nearest-rank quantiles: one outlier moves only the ends.
    """
    newest = sorted(run_times_s[-SAMPLES:])
    if len(newest) < least:
        return None
    return Prediction(_rank(newest, 0.1), _rank(newest, 0.5), _rank(newest, 0.9), len(newest))


def predict_job(
    job: Job,
    invocations: Mapping[Hashable, Sequence[float]],
    families: Mapping[Hashable, Sequence[float]],
    least: int = LEAST_RUNS,
) -> Prediction | None:
    """Prediction for a job from run times by command line, if enough with its own have ended, or else by family."""
    kind = family(job)
    return predict(invocations.get(invocation_of(job, kind), ()), least) or predict(families.get(kind, ()), least)


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]


NEWEST_PEAKS = 5
"""Newest runs whose peaks count."""

LEAST_PEAKS = 3
"""With fewer peaks there is no advice."""


def peak_vram_mib(run: Run) -> int | None:
    """Peak VRAM of a run per GPU, in MiB; None if it did not complete or was not measured."""
    if run.outcome is not JobState.COMPLETED or run.peak_vram_mib is None or not run.gpus:
        return None
    return -(-run.peak_vram_mib // len(run.gpus))


def largest_peak(peaks_mib: Sequence[int]) -> VramSeen | None:
    """The largest of the newest peaks (oldest first); a mean would be too little for half of them. None if too few."""
    newest = peaks_mib[-NEWEST_PEAKS:]
    return VramSeen(len(newest), max(newest)) if len(newest) >= LEAST_PEAKS else None
