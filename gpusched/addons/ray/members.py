"""The members of Ray's cluster as nodes of the daemon's: those that Ray has now, and those that it has ever had."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping

from gpusched.addons.ray.link import RayBridge, RayChannel, RayNode
from gpusched.addons.ray.site import RayFolder, check_ray, check_token, ray_environment, read_known, write_known
from gpusched.errors import NotReady

BRIDGE_VARIABLE = "GPUSCHED_RAY_BRIDGE"
"""Command in place of the bridge to Ray."""


class RayMembers:
    """Args: address: where they reach this machine. known: file with the nodes that Ray has ever had."""

    def __init__(self, bridge: RayBridge, address: str, known: str) -> None:
        self.address = address
        self._bridge = bridge
        self._file = known
        self._known = read_known(known)

    @property
    def known(self) -> Mapping[str, str]:
        return self._known

    def poll(self) -> Collection[RayNode]:
        self._bridge.poll()
        return self._bridge.nodes.values()

    def remember(self, node: RayNode) -> None:
        if self._known.get(node.name) != node.address:
            self._known[node.name] = node.address
            write_known(self._file, self._known)

    def open_channel(self, node: str) -> RayChannel:
        return RayChannel(self._bridge, node)

    def close(self) -> None:
        self._bridge.close()


def open_members(state_dir: str, *, is_system: bool) -> RayMembers:
    """The cluster that this machine is the head of. Raises: NotReady if it is none."""
    folder = RayFolder(state_dir)
    member = folder.load()
    if member is None or not member.is_head:
        what = "not in a cluster" if member is None else f"a node of the cluster of {member.head}, not its head"
        hint = "make one: gpusched cluster init" if member is None else "leave it first: gpusched cluster leave"
        raise NotReady(f'[cluster] engine is "ray", and this machine is {what}', hint)
    check_token(folder.token)
    # For daemons in tests only: a daemon that serves others has no such hook.
    stand_in = None if is_system else os.environ.get(BRIDGE_VARIABLE)
    if stand_in is not None:
        return RayMembers(RayBridge([*shlex.split(stand_in)]), member.address, folder.known)
    check_ray()
    argv = [sys.executable, "-m", "gpusched.addons.ray.bridge", os.path.dirname(folder.path)]
    return RayMembers(RayBridge(argv, ray_environment(folder, os.environ)), member.address, folder.known)
