"""Asks the head of a Ray cluster whom it admits, which versions it runs and which nodes it has.

A separate process each time: Ray takes whether and how to authenticate from the environment, once per process.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any, NamedTuple

from gpusched.addons.ray.site import RAY_VERSION, RayFolder, ray_environment, without_ray
from gpusched.errors import NotReady

_CONNECT_S = 3.0
_ANSWER_S = 30.0
_ALIVE = 0
"""GcsNodeInfo.ALIVE."""


class ProbedNode(NamedTuple):
    name: str
    address: str
    is_alive: bool
    is_head: bool


class HeadAnswer(NamedTuple):
    """What a head says."""

    ray: str
    python: str
    nodes: tuple[ProbedNode, ...]

    def alive(self, name: str) -> ProbedNode | None:
        """The living node of this name."""
        return next((node for node in self.nodes if node.is_alive and node.name == name), None)


class WrongToken(NotReady):
    """The head does not accept this token, or demands one."""


def ask_head(gcs: str, folder: RayFolder | None, environ: Mapping[str, str] | None = None) -> HeadAnswer:
    """Ask the head at IP:PORT. Args: folder: has the token; None to ask without. Raises: NotReady, WrongToken."""
    host, _, port = gcs.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        why = error.strerror or "it does not answer"
        hint = f"on {host}: gpusched cluster status; a firewall must let the ports from {port} on through"
        raise NotReady(f"the head {gcs} cannot be reached: {why}", hint) from None
    known = os.environ if environ is None else environ
    env = ray_environment(folder, known) if folder is not None else without_ray(known) | {"RAY_AUTH_MODE": "disabled"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, gcs], env=env, cwd="/", capture_output=True, timeout=_ANSWER_S, check=False
        )
        said: dict[str, Any] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        hint = f"on {host}: gpusched cluster doctor"
        raise NotReady(f"what listens at {gcs} does not answer as the head of a cluster", hint) from None
    if "error" in said:
        if said["error"] == "token":
            raise WrongToken(
                f"the head {gcs} does not accept this token", "its own is printed there by: gpusched cluster token"
            )
        raise NotReady(f"the head {gcs} does not answer: {said['error']}", f"on {host}: gpusched cluster doctor")
    return HeadAnswer(said["ray"], said["python"], tuple(ProbedNode(*node) for node in said["nodes"]))


def check_versions(answer: HeadAnswer) -> None:
    """Raises: NotReady with both versions, where Ray here cannot join that head."""
    for what, theirs, ours in (
        ("Ray", answer.ray, metadata.version("ray")),
        ("Python", answer.python, platform.python_version()),
    ):
        if theirs != ours:
            hint = f"install gpusched here with Python {theirs}"
            if what == "Ray" and theirs.startswith(f"{RAY_VERSION}."):
                hint = f"{sys.executable} -m pip install 'ray=={theirs}'"
            elif what == "Ray":
                hint = "install the same gpusched on both machines"
            raise NotReady(f"the head runs {what} {theirs}, this machine {ours}; both must be the same", hint)


def check_token_is_required(gcs: str, environ: Mapping[str, str] | None = None) -> None:
    """Raises: NotReady where the head admits callers without a token: they could run anything on every node."""
    try:
        ask_head(gcs, None, environ)
    except WrongToken:
        return
    host, _, _ = gcs.rpartition(":")
    raise NotReady(
        f"the Ray cluster at {gcs} admits anyone, without a token",
        f"on {host}: gpusched cluster leave, then: gpusched cluster init",
    )


def _answer(gcs: str) -> dict[str, Any]:
    from ray._common.usage import usage_lib
    from ray.exceptions import AuthenticationError

    try:
        client = import_module("ray._raylet").GcsClient(address=gcs)
        versions = usage_lib.get_cluster_metadata(client)
        nodes = [
            (one.node_name, one.node_manager_address, one.state == _ALIVE, one.is_head_node)
            for one in client.get_all_node_info().values()
        ]
    except AuthenticationError:
        return {"error": "token"}
    except Exception as error:
        return {"error": str(error).splitlines()[0][:200] if str(error) else type(error).__name__}
    return {"ray": versions["ray_version"], "python": versions["python_version"], "nodes": nodes}


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1])), flush=True)
    os._exit(0)
