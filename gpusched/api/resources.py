"""The resources in a client's JSON as a Request: names, lists and counts checked, GPUs divided among the nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpusched.errors import UsageError
from gpusched.model import spec
from gpusched.model.hostlist import MAX_NODES, expand
from gpusched.model.job import Request
from gpusched.model.settings import Settings
from gpusched.model.spec import MAX_NAME, fields_of, gpus_of_each_node
from gpusched.model.units import printable
from gpusched.scheduler.filters import parse_constraint

_SEE = "see the resources in gsub --help"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/+-]*")
_PER_NODE = "gpus_per_node"
_FIELDS = fields_of(spec.Request)


def read_request(values: Mapping[str, Any], settings: Settings) -> Request:
    """The resources of a submission, checked against each other. Raises: UsageError."""
    wanted = request_values(values)
    wanted.setdefault("cpus", settings.default.cpus)
    wanted["cpus"] = float(wanted["cpus"])
    _spread(wanted)
    request = Request(**wanted)
    problem = request.contradiction()
    if problem:
        raise UsageError(problem, _SEE)
    return request


def request_name(key: str) -> str:
    """The name of a JSON field in a Request, or in the rest of a job."""
    field = _FIELDS.get(key)
    return key if field is None else field.attribute


def request_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checked JSON fields under their names in a Request; `gpus` still counts all nodes.

    Raises: UsageError for unreadable names, lists and labels.
    """
    wanted = {request_name(key): values[key] for key in _FIELDS if key in values}
    for key in ("nodelist", "exclude"):
        if key in wanted:
            wanted[key] = _nodes(key, wanted[key])
    for key in ("licenses", "resources"):
        if key in wanted:
            wanted[key] = _counts(key, wanted[key])
    for key in ("constraint", "prefer"):
        if key in wanted:
            wanted[key] = _labels(key, wanted[key])
    return wanted


def _spread(wanted: dict[str, Any]) -> None:
    """Convert `gpus` to the number on each node."""
    gpus, per_node = wanted.get("gpus"), wanted.pop(_PER_NODE, None)
    if gpus and per_node and "nodes" not in wanted and not gpus % per_node:
        wanted["nodes"] = gpus // per_node  # as Slurm: the two numbers determine the nodes
    nodes = wanted.get("nodes", 1)
    fraction = wanted.get("gpu_fraction")
    if fraction == 1:
        del wanted["gpu_fraction"]
    elif fraction is not None and nodes > 1 and per_node is None:
        raise UsageError(
            f"a share of one card, {fraction:g}, cannot be spread over {nodes} nodes",
            f"for so much on each of them: --gpus-per-node {fraction:g}",
        )
    if fraction is not None or wanted.get("vram_mib") is not None:
        # Part of a card means one card on each node, unless a number is given.
        per_node = 1 if gpus is None and per_node is None else per_node
    try:
        each = gpus_of_each_node(gpus, per_node, nodes)
    except ValueError as error:
        raise UsageError(str(error), "give -g for all nodes together, or --gpus-per-node") from None
    if each is not None:
        wanted["gpus"] = each


def _nodes(key: str, texts: Sequence[str]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    named = 0
    for text in texts:
        try:
            found = expand(text)
        except ValueError as error:
            raise UsageError(f"{key}: {printable(str(error))}", "see what there is with: ginfo") from None
        named += len(found)
        if named > MAX_NODES:
            raise UsageError(f"{key} names {named} nodes or more; at most {MAX_NODES} are read", "use --constraint")
        names.update(dict.fromkeys(found))
    return tuple(names)


def _counts(key: str, counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    for name in counts:
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            wanted = "-L matlab:2,ansys" if key == "licenses" else "--res scratch=2"
            raise UsageError(f"{printable(repr(name), 60)} is not a name for {key}", f"for example: gsub {wanted}")
    return tuple(sorted(counts.items()))


def _labels(key: str, text: str) -> str | None:
    """The constraint without blanks; None if it is blank."""
    if not text.strip():
        return None
    try:
        parse_constraint(text)
    except ValueError as error:
        raise UsageError(
            f"{key}: {printable(str(error), 200)}",
            f"for example: --{key} 'a100&nvlink|h100', and ! before a label that a node must not have",
        ) from None
    return "".join(text.split())
