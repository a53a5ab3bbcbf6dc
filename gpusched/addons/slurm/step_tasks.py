"""What each task of a step gets: its variables, GPUs and cores. Used by srun and by the step's parts on other nodes."""

from __future__ import annotations

import os

from gpusched.model.units import is_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

_KEPT = frozenset("HOME LANG LOGNAME PATH SHELL TERM TMPDIR TZ USER".split())
OWN_PREFIXES = ("SLURM_", "SLURMD_", "GPUSCHED_", "CUDA_")
_OF_NODE = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        *("NODE_RANK", "GROUP_RANK", "GPUSCHED_NODE_RANK", "SLURM_CONF", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"),
        *("SLURM_CPUS_ON_NODE", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURMD_NODENAME"),
    }
)
"""Variables that describe a node: a task has them from the job's part there, if at all."""
_PREFIXES_OF_NODE = ("CUDA_MPS_",)


class NodeShare:
    """The part of a step that one node has. A plain class: srun imports no dataclasses."""

    __slots__ = ("address", "gpus", "node", "nodeid", "tasks")

    def __init__(self, found: Mapping[str, Any]) -> None:
        """Args: found: an element of `nodes` in the answer of POST /v1/steps."""
        self.node: str = found["node"]
        self.nodeid: int = found["nodeid"]
        """Its place among the nodes of the step."""
        self.tasks: list[int] = found["tasks"]
        """Their numbers in the step, by their number on the node."""
        self.gpus: list[dict[str, Any]] = found["gpus"]
        self.address: str = found["address"]


def exported(text: str | None) -> dict[str, str]:
    """The environment that --export asks for; the job's own variables are always part of it."""
    if not text or text.upper() == "ALL":
        return dict(os.environ)
    words = [word for word in text.split(",") if word]
    if any(word.upper() == "ALL" for word in words):
        env = dict(os.environ)
    else:
        env = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(OWN_PREFIXES)}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name:
            env[name] = value.removeprefix('"').removesuffix('"') if value[:1] == '"' else value
        elif name in os.environ:
            env[name] = os.environ[name]
    return env


def on_another_node(sent: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of tasks on another node: that of srun, but what describes the node as the job has it there.

    Args: sent: that of srun. own: that of the job's part on the node.
    """
    env = {name: value for name, value in sent.items() if not _is_of_node(name)}
    env.update({k: v for k, v in own.items() if _is_of_node(k) or (k.startswith("GPUSCHED_") and k in sent)})
    # Each node has its own folder of Slurm's commands, beside its slurm.conf.
    folder = own.get("SLURM_CONF", "").rpartition("/")[0]
    path = env.get("PATH", "").split(":")
    if folder and "PATH" in own:
        path += [one for one in own["PATH"].split(":") if one.startswith(f"{folder}/") and one not in path]
        env["PATH"] = ":".join(path)
    return env


def _is_of_node(name: str) -> bool:
    return name in _OF_NODE or name.startswith(_PREFIXES_OF_NODE)


def bind_gpus(kind: str, rest: str, words: Sequence[str], count: int) -> list[list[str]]:
    """What each task of a node sees of the step's GPUs there, by a word of --gpu-bind and its argument.

    Raises: ValueError.
    """
    numbers = rest.split(",") if rest else ["1"]
    if kind == "mask_gpu":
        masks = [int(number, 16) for number in numbers]
        return [
            [word for place, word in enumerate(words) if masks[task % len(masks)] >> place & 1] for task in range(count)
        ]
    if not all(is_digits(number) and len(number) < 6 for number in numbers):
        raise ValueError(rest)
    chosen = [int(number) for number in numbers]
    if kind == "map_gpu":
        return [[words[chosen[task % len(chosen)] % len(words)]] for task in range(count)]
    width = max(1, chosen[0])
    if kind == "single":
        return [[words[task // width % len(words)]] for task in range(count)]
    groups = max(1, len(words) // width)
    return [list(words[task % groups * width : (task % groups + 1) * width]) for task in range(count)]


def bind_cores(text: str, width: int, count: int, free: Collection[int]) -> list[list[int]] | None:
    """Processors of each task of a node; None leaves them alone. Raises: ValueError with the words of --cpu-bind.

    Args: text: the option's value. width: processors of a task. free: those of the job there.
    """
    words = [word for word in text.lower().split(",") if word]
    while words and words[0] in ("q", "quiet", "v", "verbose"):
        words.pop(0)
    if not words or words[0] in ("none", "no", "y", "yes", "n"):
        return None
    kind, _, first = words[0].partition(":")
    if kind not in ("rank", "cores", "threads", "sockets", "ldoms", "map_cpu", "mask_cpu", "rank_ldom"):
        raise ValueError(",".join(words))
    ordered = sorted(free)
    if kind in ("map_cpu", "mask_cpu"):
        try:
            sets = [_cores_in(kind, word) & set(ordered) for word in [first, *words[1:]]]
        except ValueError:
            raise ValueError(",".join(words)) from None
        return [sorted(sets[task % len(sets)]) for task in range(count)]
    if kind in ("sockets", "ldoms", "rank_ldom") or count * width > len(ordered):
        return None
    return [ordered[task * width : (task + 1) * width] for task in range(count)]


def _cores_in(kind: str, word: str) -> set[int]:
    """Processors of a number or a mask. Raises: ValueError."""
    number = int(word, 16 if kind == "mask_cpu" or word.startswith("0x") else 10)
    if number < 0 or len(word) > 300:
        raise ValueError(word)
    return {number} if kind == "map_cpu" else {place for place in range(number.bit_length()) if number >> place & 1}
