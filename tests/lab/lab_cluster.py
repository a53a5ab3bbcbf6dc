"""A head and its nodes, each on a machine of its own; commands are typed on the head."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))

from harness import Daemon
from network_lab import Machine, Network, children_of, environment
from support import wait_until

AGENT = """#!/bin/sh
export GPUSCHED_HOME={folder}/$1/home GPUSCHED_FAKE_GPUS={folder}/$1/gpus.json
mkdir -p $GPUSCHED_HOME && chmod 700 $GPUSCHED_HOME && cp {folder}/$1/config.toml $GPUSCHED_HOME
exec {python} -c 'import sys; sys.argv[0] = "gpusched"; from gpusched.cli.admin import main; sys.exit(main())' agent $1
"""
CONFIG = """
[node]
name = "n1"
cpus = 4
[daemon]
poll_s = 0.2
[gpu]
free_polls = 1
release_wait_s = 2
[life]
grace_s = 1
[alert]
unreachable_s = 0.5
[cluster]
nodes = {nodes}
connect = {connect}
"""


class Head(Daemon):
    """A daemon on a machine; killed with what it is, not with the command that went there."""

    is_warm = False

    def __init__(self, machine: Machine, **options: str) -> None:
        super().__init__(machine.folder / "home", **options)
        self.machine = machine

    def try_start(self, **env: str) -> str:
        self.prefix = self.machine.prefix
        return super().try_start(**env)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.reap()

    def stop(self) -> None:
        if self.process is not None:
            self._signal(signal.SIGTERM)
            self.reap()

    def _signal(self, number: int) -> None:
        assert self.process is not None
        for pid in children_of(self.process.pid):
            os.kill(pid, number)


class Cluster:
    """The head on `n1`, agents on the others. Jobs run in one folder that all see."""

    def __init__(self, lab: Network, config: str = "") -> None:
        self.lab = lab
        self.folder = lab.folder
        self.names = list(lab.machines)
        for name in self.names:
            gpus = [{"vram": "24GiB", "uuid": f"GPU-{name}-{index}"} for index in range(2)]
            (self.folder / name / "gpus.json").write_text(json.dumps({"gpus": gpus}))
            (self.folder / name / "config.toml").write_text("[node]\ncpus = 4\n")
        agent = self.folder / "agent"
        agent.write_text(AGENT.format(folder=self.folder, python=sys.executable))
        agent.chmod(0o755)
        connect = f"{lab.connect} {{node}} {shlex.quote(str(agent))} {{node}}"
        text = CONFIG.format(nodes=json.dumps(self.names[1:]), connect=json.dumps(connect)) + config
        self.head = Head(lab["n1"], fake_gpus=str(self.folder / "n1" / "gpus.json"), config=text)

    def start(self) -> None:
        self.head.start()
        self.all_up()

    def command(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Type a command on the head: gsub, gq, ..."""
        name, *rest = argv
        path = [sys.executable, str(Path(__file__).parents[2] / "scripts" / name)]
        env = {**environment(), "GPUSCHED_HOME": str(self.head.home)}
        return self.lab["n1"].run(*path, *rest, env=env, check=check)

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in self.head.call("GET", "/v1/cluster")["nodes"]}

    def gpus(self, name: str) -> list[dict[str, Any]]:
        return [gpu for gpu in self.head.call("GET", "/v1/cluster")["gpus"] if gpu["node"] == name]

    def wait_node(self, name: str, state: str, timeout_s: float = 90.0) -> dict[str, Any]:
        wait_until(lambda: self.nodes()[name]["state"] == state, timeout_s, what=f"{name} to be {state}")
        return self.nodes()[name]

    def all_up(self) -> None:
        def is_up() -> bool:
            cluster = self.head.call("GET", "/v1/cluster")
            here = len(cluster["gpus"]) == 2 * len(self.names)
            return here and all(node["state"] == "up" for node in cluster["nodes"])

        wait_until(is_up, 120.0, what="all nodes to be there")

    def on(self, node: str, text: str, **spec: Any) -> str:
        """Submit a script of sh to a node."""
        return self.head.submit("sh", "-c", text, nodelist=[node], **spec)

    def agents(self, node: str) -> list[int]:
        return self.lab[node].pids("agent", node, "sys.argv[0]")

    def is_alive(self, node: str, job: str) -> bool:
        """Whether the first process of a job's last run lives on its node."""
        return self.lab[node].is_alive(self.head.pid_of(job))

    def reset(self) -> None:
        """No jobs, and every machine on and reachable."""
        for machine in self.lab.machines.values():
            if not machine.is_on:
                machine.power_on()
            machine.heal()
        if self.head.process is None or self.head.process.poll() is not None:
            self.head.process = None
            self.head.start()
        if drained := [name for name, node in self.nodes().items() if node["message"]]:
            self.head.call("POST", "/v1/undrain", {"targets": drained})
        self.all_up()
        jobs = [job["id"] for job in self.head.call("GET", "/v1/jobs")["jobs"]]
        if jobs:
            self.head.call("POST", "/v1/jobs/cancel", {"ids": jobs})
            self.head.wait(*jobs)
        for name in ("go", "go2"):
            (self.head.home / name).unlink(missing_ok=True)

    def close(self) -> None:
        """End the head; whatever else runs ends with its machine."""
        self.head.stop()
        self.head.disconnect()
