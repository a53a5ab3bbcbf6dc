"""A real head with agents, as on machines of their own: each node has its spool and GPUs, and can be cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import Daemon
from support import wait_until
from warm import typed
from warm_agents import agent_nest

CONNECT = """#!/bin/sh
[ -e {root}/cut-$1 ] && {{ echo "ssh: connect to host $1: No route to host" >&2; exit 255; }}
export GPUSCHED_HOME={root}/$1 GPUSCHED_FAKE_GPUS={root}/$1/gpus.json{path}
{agent} $1
"""
COLD_AGENT = """echo $$ > {root}/$1.new && mv {root}/$1.new {root}/$1.pid
exec {within} \\
    {python} -c 'import sys; sys.argv[0] = "gpusched"; from gpusched.cli.admin import main; sys.exit(main())' agent"""
"""An agent as an interpreter starts it."""
CONFIG = """
[node]
name = "n1"
cpus = 4
{node}[daemon]
poll_s = 0.2
[gpu]
free_polls = 1
{gpu}[cluster]
nodes = {nodes}
connect = "{root}/connect {{node}}"
{more}"""


def cold_agent(root: Path, within: str = "") -> str:
    return COLD_AGENT.format(root=root, python=sys.executable, within=within)


def sh(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text)


class Cluster:
    """The head `n1`, and nodes whose connection can be cut."""

    def __init__(
        self,
        root: Path,
        nodes: Sequence[str] = ("n2", "n3"),
        *,
        gpus: int = 2,
        within: str = "",
        path: str | None = None,
        settings: str = "",
        gpu: str = "",
        address: str | None = None,
    ) -> None:
        """Args:
        gpus: of each node. settings: more of the head's.
        within: a command that executes the agents, which are forked otherwise, see `warm_agents`.
        path: of the agents, `$1` being the node's name; otherwise that of the tests.
        gpu: more of its section [gpu].
        address: of all nodes, where their names lead nowhere.
        """
        self.root = root
        self.names = nodes
        self._gpus = gpus
        of_node = "" if address is None else f'address = "{address}"\n'
        for name in ("n1", *nodes):
            folder = root / name
            folder.mkdir(mode=0o700, exist_ok=True)
            self.put_on_gpu(name)
            (folder / "config.toml").write_text(f'[node]\ncpus = 4\nlabels = ["{name}"]\n{of_node}')
        connect = root / "connect"
        agent = cold_agent(root, within) if within else f"exec {agent_nest().command(f'{root}/$1.pid')}"
        connect.write_text(CONNECT.format(root=root, path="" if path is None else f" PATH={path}", agent=agent))
        connect.chmod(0o755)
        config = CONFIG.format(root=root, node=of_node, nodes=json.dumps(list(nodes)), gpu=gpu, more=settings)
        self.head = Daemon(root / "home", fake_gpus=str(root / "n1" / "gpus.json"), config=config)
        self.head.start()
        self.all_up()

    def put_on_gpu(self, node: str, holders: Mapping[int, str] = MappingProxyType({})) -> None:
        """Only these processes are on the node's first GPU: pid and size."""
        cards: list[dict[str, Any]] = [
            {"vram": "24GiB", "uuid": f"GPU-{node}-{index}", "processes": []} for index in range(self._gpus)
        ]
        cards[0]["processes"] = [{"pid": pid, "vram": size} for pid, size in holders.items()]
        part = self.root / node / "gpus.part"
        part.write_text(json.dumps({"gpus": cards}))
        part.rename(self.root / node / "gpus.json")

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in self.head.call("GET", "/v1/cluster")["nodes"]}

    def all_up(self) -> None:
        def is_up() -> bool:
            cluster = self.head.call("GET", "/v1/cluster")
            expected = self._gpus * (1 + len(self.names))
            return len(cluster["gpus"]) == expected and all(node["state"] == "up" for node in cluster["nodes"])

        wait_until(is_up, what="all nodes to be there")

    def agent(self, node: str) -> int:
        return int((self.root / f"{node}.pid").read_text())

    def kill_agent(self, node: str) -> None:
        os.kill(self.agent(node), signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Nothing gets through any more; what runs there keeps running."""
        (self.root / f"cut-{node}").touch()
        self.kill_agent(node)
        wait_until(lambda: self.nodes()[node]["state"] == "down", what=f"{node} to be down")

    def heal(self, node: str) -> None:
        (self.root / f"cut-{node}").unlink(missing_ok=True)
        self.all_up()

    def reset(self) -> None:
        """Without jobs and with every node there, for the next test."""
        for node in self.names:
            (self.root / f"cut-{node}").unlink(missing_ok=True)
        self.all_up()
        jobs = [job["id"] for job in self.head.call("GET", "/v1/jobs")["jobs"]]
        if jobs:
            self.head.call("POST", "/v1/jobs/cancel", {"ids": jobs})
            self.head.wait(*jobs)
        (self.head.home / "go").unlink(missing_ok=True)
        self.all_up()

    def on(self, node: str, *argv: str, **spec: Any) -> str:
        return self.head.submit(*argv, nodelist=[node], **spec)

    def run(self, command: str, *words: str, input: str = "") -> subprocess.CompletedProcess[str]:  # noqa: A002
        """A command as users type it on the head, see `warm`."""
        return typed(command, *words, env=self.head.env, stdin=input.encode())

    def start(self, command: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        """The same, in the background and by an interpreter of its own."""
        argv = self.argv(command, *words)
        return subprocess.Popen(argv, env=self.head.env, text=True, stdout=subprocess.PIPE, **options)

    @staticmethod
    def argv(command: str, *words: str) -> list[str]:
        return [str(Path(sys.executable).parent / command), *words]
