"""Real Ray on machines of their own: two commands make a cluster, and no death of any part of Ray costs a job."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_cluster import CONFIG as SSH_CONFIG
from network_lab import Network, environment
from support import wait_until

from gpusched.client import DaemonConnection

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]

COMMANDS = Path(sys.executable).parent
CONFIG = SSH_CONFIG.partition("[cluster]")[0]
SSH = """#!/bin/sh
# As ssh would, with what its options say left out.
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
exec {connect} $host env GPUSCHED_HOME={folder}/$host/home PATH={path} "$@"
"""
UNTIL_GO = "until [ -e go ]; do sleep 0.05; done; exit 5"
LONG_S = 180.0


class RayLab:
    """The head `n1` and the node `n2`, made by the commands of the documentation."""

    def __init__(self, lab: Network) -> None:
        self.lab = lab
        for name in lab.machines:
            home = lab[name].folder / "home"
            home.mkdir(mode=0o700)
            gpus = [{"vram": "24GiB", "uuid": f"GPU-{name}-{index}"} for index in range(2)]
            (lab[name].folder / "gpus.json").write_text(json.dumps({"gpus": gpus}))
            own = CONFIG if name == "n1" else "[node]\ncpus = 4\n"
            (home / "config.toml").write_text(own)
        path = f"{lab.folder}/bin:{COMMANDS}:{os.environ['PATH']}"
        (lab.folder / "bin").mkdir()
        ssh = lab.folder / "bin" / "ssh"
        ssh.write_text(SSH.format(connect=lab.connect, folder=lab.folder, path=shlex.quote(path)))
        ssh.chmod(0o755)
        self.path = path
        self.work = lab.folder / "work"
        self.work.mkdir()
        self._client: DaemonConnection | None = None

    def env(self, name: str) -> dict[str, str]:
        folder = self.lab[name].folder
        own = {"GPUSCHED_HOME": str(folder / "home"), "GPUSCHED_FAKE_GPUS": str(folder / "gpus.json")}
        return {**environment(), **own, "PATH": self.path}

    def type(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Type a command of gpusched on a machine."""
        return self.lab[name].run(str(COMMANDS / words[0]), *words[1:], env=self.env(name), check=False)

    def ok(self, name: str, *words: str) -> str:
        done = self.type(name, *words)
        log = self.lab[name].folder / "home" / "ray" / f"{name}.log"
        assert done.returncode == 0, (words, done.stderr, done.stdout, log.read_text()[-3000:] if log.exists() else "")
        return done.stdout

    def refused(self, name: str, *words: str) -> str:
        done = self.type(name, *words)
        assert done.returncode == 1, (done.stdout, done.stderr)
        return done.stderr

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with DaemonConnection(str(self.lab["n1"].folder / "home" / "run" / "api.sock")) as client:
            return client.call(method, path, body)

    def submit(self, *options: str) -> str:
        words = ["gsub", "--parsable", "-D", str(self.work), *options, "--", "sh", "-c", UNTIL_GO]
        return self.ok("n1", *words).strip()

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/v1/jobs/{job}")["job"]
        return found

    def running(self, job: str) -> None:
        wait_until(lambda: self.job(job)["state"] == "RUNNING", LONG_S, what=f"{job} to run")

    def ended(self, job: str) -> dict[str, Any]:
        (self.work / "go").touch()
        finals = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}
        wait_until(lambda: self.job(job)["state"] in finals, LONG_S, what=f"{job} to end")
        (self.work / "go").unlink()
        return self.job(job)

    def until_up(self, *names: str) -> None:
        def is_up() -> bool:
            cluster = self.call("GET", "/v1/cluster")
            up = {node["name"] for node in cluster["nodes"] if node["state"] == "up"}
            gpus = [gpu["node"] for gpu in cluster["gpus"]]
            return up >= set(names) and all(gpus.count(name) == 2 for name in names)

        wait_until(is_up, LONG_S, what=f"{names} to be up")

    def kill(self, name: str, *words: str) -> None:
        """kill -9 of a process by the words in its command line, and wait for another one."""
        before = set(self.lab[name].pids(*words))
        assert before, words
        self.lab[name].kill(*before)
        wait_until(lambda: set(self.lab[name].pids(*words)) - before, LONG_S, what=f"another {words}")


@pytest.fixture(scope="module")
def ray(machines: Network) -> Iterator[RayLab]:
    made = RayLab(machines)
    made.ok("n1", "gpusched", "cluster", "init", "--yes", "--address", "10.99.0.1")
    made.ok("n2", "gpusched", "cluster", "join", "n1", "--yes")
    made.until_up("n1", "n2")
    yield made
    made.ok("n2", "gpusched", "cluster", "leave", "--yes", "--force")
    made.ok("n1", "gpusched", "cluster", "leave", "--yes", "--force")
    made.ok("n1", "gpusched", "daemon", "stop")
    for name in ("n1", "n2"):
        assert made.lab[name].pids("raylet") == []
        assert not (made.lab[name].folder / "home" / "ray" / "token").exists()


def test_two_commands_make_a_cluster_and_a_gang_runs_on_it(ray: RayLab) -> None:
    job = ray.submit("-N", "2", "-g", "4")
    ray.running(job)
    ended = ray.ended(job)
    assert (ended["node"], ended["exit_code"], len(ended["runs"])) == ("n[1-2]", 5, 1)
    shown = ray.ok("n1", "gpusched", "cluster", "status")
    assert [line.split()[:5] for line in shown.splitlines()[1:]] == [
        ["n1", "head", "10.99.0.1", "alive", "up"],
        ["n2", "node", "10.99.0.2", "alive", "up"],
    ]
    for name in ("n1", "n2"):
        assert "FAIL" not in ray.ok(name, "gpusched", "cluster", "doctor")


def test_the_token_is_in_no_command_line_and_no_job(ray: RayLab) -> None:
    token = ray.ok("n1", "gpusched", "cluster", "token").strip()
    job = ray.submit("-N", "2")
    ray.running(job)
    for name in ("n1", "n2"):
        assert ray.lab[name].pids(token) == []
    environ = ray.ok("n1", "gsub", "--wait", "-w", "n2", "-D", str(ray.work), "-o", "env", "--", "env")
    assert "RAY_" not in (ray.work / "env").read_text(), environ
    assert (ray.work / "env").read_text()
    ray.ended(job)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("n1", ("engine.ray.bridge",)),
        ("n2", ("ray::AgentRelay",)),
        ("n2", ("raylet_socket_name",)),
        ("n2", ("cluster", "run")),
        ("n1", ("gcs_server",)),
        ("n1", ("raylet_socket_name",)),
    ],
    ids=["bridge", "relay", "raylet", "keeper", "directory", "raylet-of-the-head"],
)
def test_no_death_of_a_part_of_ray_costs_a_job(ray: RayLab, name: str, words: tuple[str, ...]) -> None:
    job = ray.submit("-N", "2", "-g", "4")
    ray.running(job)
    if words == ("cluster", "run"):
        # Nothing starts it again without systemd.
        ray.lab[name].kill(*ray.lab[name].pids(*words))
        again = shlex.join([str(COMMANDS / "gpusched"), *words])
        ray.lab[name].run("sh", "-c", f"setsid {again} >/dev/null 2>&1 </dev/null &", env=ray.env(name))
    else:
        ray.kill(name, *words)
    assert ray.job(job)["state"] == "RUNNING"
    ended = ray.ended(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)
    ray.until_up("n1", "n2")


def test_a_killed_daemon_finds_its_nodes_again(ray: RayLab) -> None:
    job = ray.submit("-w", "n2", "-g", "2")
    ray.running(job)
    ray.lab["n1"].kill(int(ray.call("GET", "/v1/status")["daemon"]["pid"]))
    ray.ok("n1", "gpusched", "daemon", "start")
    ended = ray.ended(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)
