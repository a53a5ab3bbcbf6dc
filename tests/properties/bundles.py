"""Requests whose layout over nodes is decided when they start, drawn by one dice."""

from __future__ import annotations

from random import Random
from typing import Any

from gpusched.api.resources import read_request
from gpusched.model.job import Request
from gpusched.model.settings import Settings
from gpusched.model.value import replace


def laid_out(dice: Random, nodes: int, **parts: Any) -> Request:
    """GPUs or tasks over a range of up to so many nodes, or GPUs over a fixed number. Args: parts: of the request."""
    least = dice.randint(1, nodes)
    most = dice.randint(max(2, least), max(2, nodes))
    wanted: dict[str, Any] = {"nodes": least, "nodes_max": most, "cpus": dice.choice([0.0, 1.0])}
    kind = dice.randrange(5)
    if kind == 0 and least < most:
        wanted.update(ntasks=most + dice.randint(1, 6), cpus=dice.choice([0.5, 1.0, 3.0]))
    elif kind == 1:
        wanted.update(ntasks=most + dice.randint(1, 3), gpus_per_task=dice.randint(1, 2))
    elif kind == 2:
        wanted.update(gpus=most + dice.randint(1, 4), ntasks_per_gpu=2)
    elif kind == 3:
        wanted.update(gpus=most + dice.randint(1, 5), mem_per_gpu_mib=2048)
    else:
        wanted.update(gpus=most + dice.randint(1, 5))
    request, _ = read_request(wanted, Settings())
    assert request.bundles is not None, wanted
    return replace(request, **parts)
