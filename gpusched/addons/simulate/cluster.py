"""Machines of a simulation: `8x8xA100`, a number of processors, or a file with one entry per node."""

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path

from gpusched.addons.simulate.trace import rows_of, whole
from gpusched.errors import UsageError, UserError
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.units import closest, format_size_mib, plural, printable
from gpusched.paths import MAX_TEXT, read_at_most

_SHAPE = re.compile(r"(\d+)x(\d+)(?:x([A-Za-z0-9_.-]+?))?(?:-(\d+)GiB)?(?::(\d+))?")
_EXAMPLE = "--nodes 8x8xA100"
_MOST_GPUS = 1_000_000
_LONGEST = 80
_PLENTY_MIB = 1 << 40
"""Memory of machines specified only by cards or processors."""


def processors(count: int) -> tuple[NodeView, ...]:
    """A machine of `count` identical processors, interchangeable for jobs. Raises: UsageError below 1."""
    if count < 1:
        raise UsageError(f"a machine of {count} processors cannot run anything", _EXAMPLE)
    return (NodeView("machine", float(count), _PLENTY_MIB),)


def nodes_of(text: str) -> tuple[NodeView, ...]:
    """Nodes with identical cards: `NODESxGPUS[xMODEL][-NGiB][:CPUS]`, as `8x8xA100-80GiB:64`; or `Np`, N processors.

    Unspecified cores are practically unlimited. Raises: UsageError.
    """
    if len(text) > _LONGEST:
        raise UsageError(f"{printable(text, 40)!r} is not a cluster: NODESxGPUS[xMODEL]", _EXAMPLE)
    if re.fullmatch(r"\d+p", text):
        return processors(int(text[:-1]))
    match = _SHAPE.fullmatch(text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(f"{text!r} is not a cluster: NODESxGPUS[xMODEL]", _EXAMPLE)
    count, gpus = int(match[1]), int(match[2])
    if count * gpus > _MOST_GPUS:
        raise UsageError(f"{text} are {count * gpus:,} GPUs, and at most {_MOST_GPUS:,} are simulated", _EXAMPLE)
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
    nodes = _read_json(path) if path.name.endswith(".json") else _read_table(path)
    if not nodes:
        raise UserError(f"{path} lists no nodes", _EXAMPLE)
    names = {node.name for node in nodes}
    if len(names) < len(nodes):
        twice = next(name for name in names if sum(node.name == name for node in nodes) > 1)
        raise UserError(f"{path} lists node {printable(twice, 40)!r} more than once", "give each node a unique name")
    return nodes


def _read_json(path: Path) -> tuple[NodeView, ...]:
    try:
        with path.open("rb") as file:
            listed = json.loads(read_at_most(file, MAX_TEXT, str(path), _EXAMPLE))
        for one in listed:
            _check_names(path, one)
        return tuple(
            _node(one["name"], float(one["cpus"]), int(one["mem_mib"]), int(one.get("gpus", 0)), one.get("model", ""))
            for one in listed
        )
    except FileNotFoundError:
        raise UserError(f"no node file {path}", _EXAMPLE) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -l {path}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is not a list of nodes: {error}", _EXAMPLE) from None


_OF_NODE = ("name", "cpus", "mem_mib", "gpus", "model")


def _check_names(path: Path, one: object) -> None:
    for name in one if isinstance(one, dict) else ():
        if name not in _OF_NODE:
            near = closest(name, _OF_NODE)
            hint = f"did you mean {near}?" if near else f"a node has {', '.join(_OF_NODE)}"
            raise UserError(f"{path}: {printable(name, 40)!r} is not a field of a node", hint)


def _read_table(path: Path) -> tuple[NodeView, ...]:
    try:
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
    except ValueError as error:
        raise UserError(f"{path} is not a list of nodes: {error}", _EXAMPLE) from None


def _node(name: str, cpus: float, mem_mib: int, gpus: int, model: str) -> NodeView:
    """Raises: ValueError for a negative number or a missing name."""
    if not (name and isinstance(name, str) and isinstance(model, str)):
        raise ValueError("a node has no name, or a model that is not a single word")
    if not (0 <= cpus < inf and mem_mib >= 0 and 0 <= gpus <= _MOST_GPUS):
        raise ValueError(
            f"node {printable(name, 40)} has {plural(cpus, 'CPU')}, {format_size_mib(mem_mib)}, {plural(gpus, 'GPU')}"
        )
    cards = tuple(GpuView(f"{name}-{index}", index, model, None) for index in range(gpus))
    return NodeView(name, cpus, mem_mib, cards)


def largest(nodes: tuple[NodeView, ...]) -> tuple[int, int]:
    """GPUs of all nodes, and processors of the largest."""
    return sum(len(node.gpus) for node in nodes), int(max(node.cpus for node in nodes))
