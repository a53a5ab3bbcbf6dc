"""Conditions on where a job may run that can never be met: names and labels that are not there, too many nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.cluster import NodeView
from gpusched.model.job import Request
from gpusched.scheduler.constraints import parse
from gpusched.scheduler.draft import Layout
from gpusched.scheduler.filters import reject_name
from gpusched.scheduler.need import Need
from gpusched.scheduler.refusal import Refusal
from gpusched.scheduler.words import describe_where, licenses, name_some

_LISTED = 12
"""Names that a sentence lists before it says how many more there are."""


def refuse_conditions(request: Request, layout: Layout) -> Refusal | None:
    """The first condition but an amount of a node that no node meets; None when all can be met."""
    return (
        _refuse_licenses(request, layout)
        or _refuse_names(request, layout.nodes)
        or _refuse_labels(request, layout.nodes)
        or _refuse_resources(request, layout.nodes)
        or _refuse_number(request, layout.nodes)
    )


def _listed(names: Iterable[str]) -> str:
    return name_some("", sorted(set(names)), named=_LISTED)


def _refuse_licenses(request: Request, layout: Layout) -> Refusal | None:
    for name, count in request.licenses:
        there = layout.licenses.get(name)
        if there is None:
            known = _listed(layout.licenses)
            return Refusal(
                f"asked for license {name}; " + (f"the licenses here are {known}" if known else "there are none here"),
                f"leave -L {name} out; licenses are listed under [license] of the config file",
            )
        if count > there:
            return Refusal(
                f"asked for {licenses(name, count)}; there {'is' if there == 1 else 'are'} {there or 'none'} in all",
                f"ask for less: -L {name}:{there}" if there else f"leave -L {name} out",
            )
    return None


def _refuse_names(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    there = {node.name for node in nodes}
    unknown = [name for name in request.nodelist if name not in there]
    if unknown:
        return Refusal(
            f"asked for {name_some('node', unknown)}; the nodes here are {_listed(there)}",
            "see the nodes with: ginfo",
        )
    if nodes and not there - set(request.exclude):
        return Refusal(
            f"asked for a node that is not {_listed(there)}; there are no others",
            "leave out one of those named with -x",
        )
    return None


def _refuse_labels(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    try:
        if request.prefer is not None:
            parse(request.prefer)
        constraint = None if request.constraint is None else parse(request.constraint)
    except ValueError as error:
        return Refusal(f"asked for labels that cannot be read: {error}", "for example: -C 'a100&nvlink|h100'")
    if constraint is None or any(constraint.admits(node.labels) for node in nodes):
        return None
    there = {label for node in nodes for label in node.labels}
    unknown = [label for label in constraint.labels if label not in there]
    known = _listed(there)
    if unknown and known:
        text = f"no node has the {name_some('label', unknown)}; the labels here are {known}"
    elif unknown:
        text = f"no node has the {name_some('label', unknown)}, nor any other label"
    else:
        text = f"no node has such labels together; the labels here are {known}"
    return Refusal(
        f"asked for nodes with {request.constraint}; {text}",
        "see the labels of each node with: ginfo; they are set by [node] labels in its config file",
    )


def _refuse_resources(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    there = {name for node in nodes for name, _ in node.resources}
    for name, _ in request.resources:
        if name not in there:
            known = _listed(there)
            return Refusal(
                f"asked for resource {name}; " + (f"those here are {known}" if known else "there are none here"),
                f"leave --res {name} out; nodes have what [node] resources in their config file says",
            )
    return None


def _refuse_number(request: Request, nodes: Sequence[NodeView]) -> Refusal | None:
    """More nodes than there are, or than the other conditions leave."""
    if request.nodes > max(1, len(nodes)):
        return Refusal(
            f"asked for {request.nodes} nodes; this scheduler has {len(nodes)}",
            f"ask for at most that many: -N {len(nodes)}" if nodes else "see the nodes with: ginfo",
        )
    where = Need.of(request, 0).where
    left = sum(1 for node in nodes if reject_name(node, where) is None)
    if request.nodes <= left or not nodes:
        return None
    limits = describe_where(request)
    if not left:
        return Refusal(f"asked for a node {limits}; there is none", "see the nodes and their labels with: ginfo")
    return Refusal(
        f"asked for {request.nodes} nodes {limits}; there {'is' if left == 1 else 'are'} {left}",
        f"ask for at most that many: -N {left}",
    )
