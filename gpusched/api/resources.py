"""The resources in a client's JSON as a Request: names, lists and counts checked, GPUs divided among the nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpusched.errors import Concerning, UsageError
from gpusched.model.bundles import bundles_of
from gpusched.model.hostlist import MAX_NODES, expand
from gpusched.model.job import Request, TaskLayout
from gpusched.model.layout import arrange, layout_values
from gpusched.model.option import fields_of
from gpusched.model.request import Request as DeclaredRequest
from gpusched.model.settings import Settings
from gpusched.model.spec import MAX_NAME
from gpusched.model.units import plural, printable
from gpusched.scheduler.filters import parse_constraint

_SEE = "see the resources in gsub --help"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@/+-]*")
_PER_NODE = "gpus_per_node"
_SHARDS = "gpu_shards"
_FIELDS = fields_of(DeclaredRequest)


def read_request(values: Mapping[str, Any], settings: Settings) -> tuple[Request, TaskLayout | None]:
    """The resources of a submission, checked against each other, and its tasks as asked for. Raises: UsageError."""
    wanted = request_values(values)
    if (shards := wanted.pop(_SHARDS, None)) is not None:
        wanted["gpu_fraction"] = _fraction(shards, wanted.get("gpu_fraction"), settings.slurm.shards_per_gpu)
    fraction = wanted.get("gpu_fraction")
    if fraction == 1:
        del wanted["gpu_fraction"]
    asked = _with_parts_of_cards(values, fraction)
    try:
        found = arrange(asked, settings.default.cpus)
    except ValueError as error:
        raise UsageError(str(error), _hint(asked)) from None
    wanted.pop(_PER_NODE, None)
    amounts = found.amounts()
    _check_amounts(amounts)
    request = Request(**{**wanted, **amounts}, bundles=bundles_of(found))
    problem = request.contradiction()
    if problem:
        raise UsageError(problem, _SEE)
    layout = layout_values(values)
    return request, TaskLayout(**layout) if layout else None


def _fraction(shards: int, fraction: float | None, most: int) -> float:
    """Convert shards of a GPU into a fraction of it. Args: most: shards per GPU. Raises: UsageError."""
    if fraction is not None:
        raise UsageError(f"a fraction of {fraction:g} and shards of a GPU cannot be combined", "name one of them")
    if shards > most:
        raise UsageError(
            f"asked for {plural(shards, 'shard')} of a GPU, and a GPU has {most} here",
            f"ask for whole GPUs, --gres=gpu:{-(-shards // most)}, or for at most --gres=shard:{most}; [slurm] "
            "shards_per_gpu in the config says how many it has",
            "gpus",
        )
    return shards / most


def _with_parts_of_cards(values: Mapping[str, Any], fraction: float | None) -> Mapping[str, Any]:
    """The values with one GPU on each node for a part of a card, unless a number is given. Raises: UsageError."""
    is_stated = any(values.get(key) is not None for key in ("gpus", _PER_NODE, "gpus_per_task", "ntasks_per_gpu"))
    nodes = values.get("nodes") or 1
    if fraction not in (None, 1) and nodes > 1 and values.get(_PER_NODE) is None:
        raise UsageError(
            f"a share of one card, {fraction:g}, cannot be spread over {nodes} nodes",
            f"to request this share on each node: --gpus-per-node {fraction:g}",
        )
    is_shared = fraction is not None or values.get("vram_mib") is not None or values.get("sm_percent") is not None
    if is_stated or not is_shared:
        return values
    return {**values, _PER_NODE: 1}


def _hint(asked: Mapping[str, Any]) -> str:
    if asked.get("gpus") and not any(asked.get(key) for key in ("gpus_per_task", "ntasks_per_gpu")):
        return "give -g for all nodes together, or --gpus-per-node"
    return "see the tasks in gsub --help"


def _check_amounts(amounts: Mapping[str, Any]) -> None:
    """Refuse amounts that only the product of two stated ones makes too large. Raises: UsageError."""
    for name, amount in amounts.items():
        high = _FIELDS[name].high
        if high is not None and amount > high:
            raise UsageError(f"{name} on each node would be {amount:g}; it must be at most {high:g}", _SEE)


def request_name(key: str) -> str:
    """The name of a JSON field in a Request, or in the rest of a job."""
    field = _FIELDS.get(key)
    return key if field is None else field.attribute


MAX_DATA = 64
"""Maximum number of data sets of one job."""


def request_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checked JSON fields under their names in a Request; `gpus` still counts all nodes.

    Raises: UsageError for unreadable names, lists and labels.
    """
    wanted = {request_name(key): values[key] for key in _FIELDS if key in values}
    for key, about, read in _READERS:
        if key in wanted:
            with Concerning(about):
                wanted[key] = read(key, wanted[key])
    return wanted


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


def _data(key: str, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not name or not name.isprintable() or " " in name or "," in name or len(name) > MAX_NAME:
            raise UsageError(f"{key}: {printable(repr(name), 60)} is not a data set", "write --near data=imagenet")
    if len(names) > MAX_DATA:
        raise UsageError(f"{key} names {len(names)} data sets; at most {MAX_DATA} are read", "name the largest")
    return tuple(sorted(set(names)))


_READERS: tuple[tuple[str, str, Callable[[str, Any], Any]], ...] = (
    ("nodelist", "node", _nodes),
    ("exclude", "node", _nodes),
    ("licenses", "license", _counts),
    ("resources", "resource", _counts),
    ("constraint", "constraint", _labels),
    ("prefer", "constraint", _labels),
    ("near", "data", _data),
)
"""Readers of texts and counts, and what their mistakes are about."""
