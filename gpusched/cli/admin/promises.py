"""What a config file says of queues and accounts, against the machines and their users: for `gpusched config check`."""

from __future__ import annotations

import pwd
from collections.abc import Iterator, Mapping
from typing import Any

from gpusched.access import is_group
from gpusched.client import connect
from gpusched.config import Loaded
from gpusched.errors import DaemonUnreachable, Refused
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.resources import Resources
from gpusched.model.settings import NodeSettings, Settings
from gpusched.model.value import fields, replace
from gpusched.scheduler import cells
from gpusched.scheduler.draft import Layout
from gpusched.scheduler.sharing.membership import membership_findings, unknown_members
from gpusched.scheduler.sharing.quota_problems import problems
from gpusched.scheduler.sharing.usage import capacity_of

_UNKNOWN = float(1 << 50)
"""In place of a number that nobody tells: more than anything that can be promised."""


def broken_promises(loaded: Loaded) -> list[Refused]:
    """A sentence with file and line for each promise that the machines cannot keep.

    The machines are those of the daemon, with what the file says of them; without a daemon only what the file says.
    """
    settings = loaded.settings
    if not settings.queue:
        return []
    hint = "promise less, or see what there is with: ginfo"
    return [Refused(f"{loaded.place_of(path)}: {text}", hint) for path, text in _found(settings, _nodes())]


def membership_warnings(loaded: Loaded) -> list[Refused]:
    """Accounts that are open by default or that nobody may use, and members that this machine does not know."""
    settings = loaded.settings
    found = (*membership_findings(settings), *unknown_members(settings, _is_user, is_group))
    return [Refused(f"{loaded.place_of(path)}: {text}", hint) for path, text, hint in found]


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, OSError):
        return False
    return True


def _found(settings: Settings, nodes: tuple[NodeView, ...]) -> Iterator[tuple[str, str]]:
    if not nodes:
        own = settings.node
        cores = _UNKNOWN if own.cpus is None else own.cpus
        mem_mib = _UNKNOWN if own.mem_mib is None else float(own.mem_mib)
        yield from problems(settings, Resources(_UNKNOWN, _UNKNOWN, cores, mem_mib))
        return
    if len(nodes) == 1:
        nodes = (_as_written(nodes[0], settings.node),)
    layout = Layout(nodes, settings)
    yield from problems(settings, capacity_of(layout))
    yield from cells.problems(settings, layout)


def _nodes() -> tuple[NodeView, ...]:
    """As the daemon sees them; none when there is no daemon."""
    try:
        with connect(autostart=False) as client:
            found = client.call("GET", "/v1/snapshot")["snapshot"]["nodes"]
    except DaemonUnreachable:
        return ()
    return tuple(_node(node) for node in found)


def _node(node: Mapping[str, Any]) -> NodeView:
    known = [one.name for one in fields(GpuView)]
    gpus = tuple(GpuView(**{name: gpu[name] for name in known if name in gpu}) for gpu in node["gpus"])
    return NodeView(node["name"], node["cpus"], node["mem_mib"], gpus)


def _as_written(node: NodeView, own: NodeSettings) -> NodeView:
    """The node with what the file says of it, which the running daemon need not have read yet."""
    return replace(
        node,
        name=own.name or node.name,
        cpus=node.cpus if own.cpus is None else own.cpus,
        mem_mib=node.mem_mib if own.mem_mib is None else own.mem_mib,
    )
