"""Walks up the trees of queues and accounts, which name their parents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar


class _Child(Protocol):
    @property
    def parent(self) -> str | None: ...


Node = TypeVar("Node", bound=_Child)


def chain_of(name: str, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """The node and all above it, from the bottom up, each once; none when it is not there."""
    passed: set[str] = set()
    above: str | None = name
    while above is not None and above in nodes and above not in passed:
        passed.add(above)
        yield nodes[above]
        above = nodes[above].parent


def parent_in(name: str, nodes: Mapping[str, Node]) -> str | None:
    """The parent; None where there is none, it is not there, or the way up leads round in a circle.

    The config file is refused for the last two; this only keeps a walk down from going on for ever.
    """
    above = nodes[name].parent if name in nodes else None
    if above is None or above not in nodes:
        return None
    last = list(chain_of(name, nodes))[-1]
    leads_out = last.parent is None or last.parent not in nodes
    return above if leads_out else None
