"""The machines of a simulation: `8x8xA100`, a number of processors, or a file that names every node."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpusched.errors import UsageError, UserError
from gpusched.model.cluster import GpuView, NodeView
from gpusched.simulate.tables import rows_of
from gpusched.simulate.trace import whole

_SHAPE = re.compile(r"(\d+)x(\d+)(?:x([A-Za-z0-9_.-]+?))?(?:-(\d+)GiB)?(?::(\d+))?")
_EXAMPLE = "--nodes 8x8xA100"
_PLENTY_MIB = 1 << 40
"""Memory of machines of which only cards or processors are told."""


def processors(count: int) -> tuple[NodeView, ...]:
    """A machine of so many identical processors, of which a job may have any. Raises: UsageError below 1."""
    if count < 1:
        raise UsageError(f"a machine of {count} processors runs nothing", _EXAMPLE)
    return (NodeView("machine", float(count), _PLENTY_MIB),)


def nodes_of(text: str) -> tuple[NodeView, ...]:
    """Nodes with like cards: `NODESxGPUS[xMODEL][-NGiB][:CPUS]`, as `8x8xA100-80GiB:64`; or `Np`, so many processors.

    Cores are so many that they never run out where they are not given. Raises: UsageError.
    """
    if re.fullmatch(r"\d+p", text):
        return processors(int(text[:-1]))
    match = _SHAPE.fullmatch(text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(f"{text!r} does not name nodes", _EXAMPLE)
    count, gpus = int(match[1]), int(match[2])
    total_mib = None if match[4] is None else int(match[4]) * 1024
    cpus = float(match[5]) if match[5] else 1e6
    digits = len(str(count - 1))
    names = [f"node{number:0{digits}}" for number in range(count)]
    return tuple(
        NodeView(
            name,
            cpus,
            _PLENTY_MIB,
            tuple(GpuView(f"{name}-{index}", index, match[3] or "GPU", total_mib) for index in range(gpus)),
        )
        for name in names
    )


def read_nodes(path: Path) -> tuple[NodeView, ...]:
    """Nodes from a file: JSON, a list of objects with name, cpus, mem_mib, gpus (a number) and model, or the table of
    openb (sn, cpu_milli, memory_mib, gpu, model).

    Raises: NotFound, BadTrace, UserError.
    """
    if path.name.endswith(".json"):
        try:
            listed = json.loads(path.read_text("utf-8"))
            return tuple(
                _node(
                    one["name"], float(one["cpus"]), int(one["mem_mib"]), int(one.get("gpus", 0)), one.get("model", "")
                )
                for one in listed
            )
        except FileNotFoundError:
            raise UserError(f"there is no file {path} of nodes", _EXAMPLE) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no list of nodes: {error}", _EXAMPLE) from None
    return tuple(
        _node(
            row["sn"],
            whole(row["cpu_milli"], "cpu_milli", path, number) / 1000,
            whole(row["memory_mib"], "memory_mib", path, number),
            whole(row["gpu"], "gpu", path, number),
            row["model"],
        )
        for number, row in rows_of(path, {"sn", "cpu_milli", "memory_mib", "gpu", "model"})
    )


def _node(name: str, cpus: float, mem_mib: int, gpus: int, model: str) -> NodeView:
    cards = tuple(GpuView(f"{name}-{index}", index, model, None) for index in range(gpus))
    return NodeView(name, cpus, mem_mib, cards)


def largest(nodes: tuple[NodeView, ...]) -> tuple[int, int]:
    """GPUs of all nodes, and processors of the largest."""
    return sum(len(node.gpus) for node in nodes), int(max(node.cpus for node in nodes))
