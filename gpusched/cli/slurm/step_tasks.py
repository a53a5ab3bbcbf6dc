"""What each task of a step gets: its variables, GPUs and cores. Nothing here depends on how it is started."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched.cli.slurm.command import Command

_KEPT = frozenset("HOME LANG LOGNAME PATH SHELL TERM TMPDIR TZ USER".split())
_OWN_PREFIXES = ("SLURM_", "SLURMD_", "GPUSCHED_", "CUDA_")


def bind_gpus(command: Command, kind: str, rest: str, words: Sequence[str], count: int) -> list[list[str]]:
    """What each task sees of the step's GPUs, by a word of --gpu-bind and its argument. Raises: CommandError."""
    numbers = rest.split(",") if rest else ["1"]
    if kind == "mask_gpu":
        try:
            masks = [int(number, 16) for number in numbers]
        except ValueError:
            raise command.error("Invalid --gpu-bind specification", 255) from None
        return [
            [word for place, word in enumerate(words) if masks[task % len(masks)] >> place & 1] for task in range(count)
        ]
    if not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers):
        raise command.error("Invalid --gpu-bind specification", 255)
    chosen = [int(number) for number in numbers]
    if kind == "map_gpu":
        return [[words[chosen[task % len(chosen)] % len(words)]] for task in range(count)]
    width = max(1, chosen[0])
    if kind == "single":
        return [[words[task // width % len(words)]] for task in range(count)]
    groups = max(1, len(words) // width)
    return [list(words[task % groups * width : (task % groups + 1) * width]) for task in range(count)]


def exported(text: str | None) -> dict[str, str]:
    """The environment that --export asks for; the job's own variables are always part of it."""
    if not text or text.upper() == "ALL":
        return dict(os.environ)
    words = [word for word in text.split(",") if word]
    if any(word.upper() == "ALL" for word in words):
        env = dict(os.environ)
    else:
        env = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_OWN_PREFIXES)}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name:
            env[name] = value.removeprefix('"').removesuffix('"') if value[:1] == '"' else value
        elif name in os.environ:
            env[name] = os.environ[name]
    return env


def cores_in(kind: str, word: str) -> set[int]:
    """Processors of a number or a mask. Raises: ValueError."""
    number = int(word, 16 if kind == "mask_cpu" or word.startswith("0x") else 10)
    if number < 0 or len(word) > 300:
        raise ValueError(word)
    return {number} if kind == "map_cpu" else {place for place in range(number.bit_length()) if number >> place & 1}
