"""A real daemon with `engine = "ray"` and real agents, over a stand-in for the bridge to Ray."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import is_alive, wait_until
from warm_agents import agent_nest

from gpusched.addons.ray.site import RayFolder, RayMember, read_known

CONFIG = """
[node]
name = "n1"
cpus = 4
[daemon]
poll_s = 0.1
[gpu]
free_polls = 1
[cluster]
engine = "ray"
"""
STAND_IN = Path(__file__).parents[2] / "stand_in_bridge.py"
UNTIL_GO = ("sh", "-c", "until [ -e go ]; do sleep 0.05; done; exit 5")


def make_head(home: Path) -> RayFolder:
    """What `gpusched cluster init` leaves behind."""
    folder = RayFolder(str(home))
    folder.make_token()
    folder.save(RayMember("head", "n1", "127.0.0.1", "127.0.0.1"))
    return folder


class RayCluster:
    """The head `n1`, and nodes that come and go as Ray would tell."""

    def __init__(self, root: Path, *names: str) -> None:
        self.root = root
        self.nodes: dict[str, list[str]] = {}
        self.tell()
        for name in ("n1", *names):
            self.make_home(name)
        gpus = str(root / "n1" / "gpus.json")
        self.head = Daemon(root / "home", fake_gpus=gpus, config=CONFIG)
        self.head.env["GPUSCHED_RAY_BRIDGE"] = " ".join(
            [shlex.join([sys.executable, str(STAND_IN), str(root)]), agent_nest().command("PID_FILE")]
        )
        self.folder = make_head(root / "home")
        for name in names:
            self.join(name)
        self.head.start()

    def make_home(self, name: str) -> None:
        folder = self.root / name
        folder.mkdir(mode=0o700)
        gpus = [{"vram": "24GiB", "uuid": f"GPU-{name}-{index}"} for index in range(2)]
        (folder / "gpus.json").write_text(json.dumps({"gpus": gpus}))
        (folder / "config.toml").write_text("[node]\ncpus = 4\n")

    def tell(self) -> None:
        (self.root / "nodes.new").write_text(json.dumps(self.nodes))
        (self.root / "nodes.new").rename(self.root / "nodes.json")

    def join(self, name: str, number: int = 1) -> None:
        """A raylet starts; a restarted one has another id."""
        self.nodes[name] = ["127.0.0.1", f"{name}-{number}"]
        self.tell()

    def lose(self, name: str) -> None:
        self.nodes.pop(name)
        self.tell()

    def why_not(self, name: str) -> str:
        nodes = {node["name"]: node for node in self.head.call("GET", "/v1/cluster")["nodes"]}
        return str(nodes[name]["why_not"])

    def until(self, **states: str) -> None:
        def is_so() -> bool:
            cluster = self.head.call("GET", "/v1/cluster")
            found = {node["name"]: node["state"] for node in cluster["nodes"]}
            gpus = [gpu["node"] for gpu in cluster["gpus"]]
            return found == {"n1": "up", **states} and all(
                gpus.count(name) == 2 for name, state in found.items() if state == "up"
            )

        wait_until(is_so, what=f"nodes {states}")

    def pid(self, what: str) -> int:
        return int((self.root / f"{what}.pid").read_text())

    def kill(self, what: str) -> None:
        """kill -9 of the bridge, or of the agent of a node, and wait for the next one."""
        before = self.pid(what)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.pid(what) != before, what=f"another {what}")

    def go(self) -> None:
        (self.head.home / "go").touch()


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., RayCluster]]:
    made: list[RayCluster] = []

    def make(*names: str) -> RayCluster:
        made.append(RayCluster(tmp_path, *names))
        return made[-1]

    yield make
    for cluster in made:
        cluster.go()
        cluster.head.close()


def test_nodes_come_from_ray_and_may_join_at_any_time(make_cluster: Callable[..., RayCluster]) -> None:
    cluster = make_cluster("n2")
    cluster.until(n2="up")
    cluster.make_home("n3")
    cluster.join("n3")
    cluster.until(n2="up", n3="up")
    job = cluster.head.submit("sh", "-c", "echo $NODE_RANK at $MASTER_ADDR; exit $NODE_RANK", nodes=3, gpus=6)
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["node"]) == ("FAILED", "n[1-3]")
    assert cluster.head.output(job) == "0 at 127.0.0.1\n"
    assert read_known(cluster.folder.known) == {"n2": "127.0.0.1", "n3": "127.0.0.1"}


def test_no_death_of_agent_bridge_or_head_costs_a_job_or_its_exit_code(make_cluster: Callable[..., RayCluster]) -> None:
    cluster = make_cluster("n2")
    cluster.until(n2="up")
    job = cluster.head.submit(*UNTIL_GO, gpus=2, nodelist=["n2"])
    pid = cluster.head.pid_of(job)
    cluster.kill("n2")
    cluster.kill("bridge")
    cluster.head.kill()
    cluster.head.start()
    cluster.until(n2="up")
    assert is_alive(pid)
    cluster.go()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_a_restarted_raylet_is_the_same_node(make_cluster: Callable[..., RayCluster]) -> None:
    cluster = make_cluster("n2")
    cluster.until(n2="up")
    job = cluster.head.submit(*UNTIL_GO, gpus=2, nodelist=["n2"])
    pid, agent = cluster.head.pid_of(job), cluster.pid("n2")
    cluster.join("n2", 2)
    wait_until(lambda: cluster.pid("n2") != agent, what="the agent of the new raylet")
    cluster.until(n2="up")
    assert is_alive(pid)
    cluster.go()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_a_node_that_ray_has_lost_is_down_and_keeps_its_runs(make_cluster: Callable[..., RayCluster]) -> None:
    cluster = make_cluster("n2")
    cluster.until(n2="up")
    job = cluster.head.submit(*UNTIL_GO, gpus=2, nodelist=["n2"])
    cluster.head.pid_of(job)
    cluster.lose("n2")
    cluster.until(n2="down")
    wait_until(lambda: "Ray has no node n2; see there: gpusched cluster doctor" in cluster.why_not("n2"), what="why")
    # Also for the next daemon, whether or not it can read which nodes there were.
    for known in (True, False):
        cluster.head.kill()
        if not known:
            os.unlink(cluster.folder.known)
        cluster.head.start()
        cluster.until(n2="down")
        assert cluster.head.state(job) == "RUNNING"
    cluster.join("n2", 2)
    cluster.until(n2="up")
    cluster.go()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_a_node_with_the_name_of_the_head_is_left_out(make_cluster: Callable[..., RayCluster]) -> None:
    cluster = make_cluster("n2")
    cluster.nodes["n1"] = ["127.0.0.2", "other"]
    cluster.tell()
    log = cluster.head.home / "log" / "gpuschedd.log"
    wait_until(lambda: "the node at 127.0.0.2 has the daemon's own name, n1" in log.read_text(), what="a warning")
    cluster.until(n2="up")


def refusal(make_daemon: Callable[..., Daemon], prepare: Callable[[Path], Any], **env: str) -> str:
    daemon = make_daemon(start=False, config=CONFIG.replace("[gpu]\nfree_polls = 1\n", ""))
    prepare(daemon.home)
    line = daemon.try_start(**env)
    daemon.reap()
    said = json.loads(line.removeprefix("error "))
    return f"{said['message'].replace(str(daemon.home), 'HOME')} -> {said['hint']}"


def nothing(home: Path) -> None:
    pass


def as_node(home: Path) -> None:
    RayFolder(str(home)).save(RayMember("node", "n1", "10.0.0.2", "10.0.0.1"))


def without_token(home: Path) -> None:
    os.unlink(make_head(home).token)


def with_open_token(home: Path) -> None:
    os.chmod(make_head(home).token, 0o644)


def with_empty_token(home: Path) -> None:
    Path(make_head(home).token).write_text("\n")


def with_broken_file(home: Path) -> None:
    Path(make_head(home).member_file).write_text("{")


NEW_TOKEN = "gpusched cluster init on the head, gpusched cluster join HEAD on a node"


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (nothing, '[cluster] engine is "ray", and this machine is not in a cluster -> make one: gpusched cluster init'),
        (
            as_node,
            '[cluster] engine is "ray", and this machine is a node of the cluster of 10.0.0.1, not its head -> '
            "leave it first: gpusched cluster leave",
        ),
        (
            without_token,
            "there is no token to authenticate with: HOME/ray/token: No such file or directory -> "
            f"make one: {NEW_TOKEN}",
        ),
        (with_empty_token, f"HOME/ray/token holds no token -> remove it and make a new one: {NEW_TOKEN}"),
    ],
)
def test_the_engine_does_not_start_without_a_cluster_and_its_token(
    make_daemon: Callable[..., Daemon], prepare: Callable[[Path], Any], expected: str
) -> None:
    assert refusal(make_daemon, prepare) == expected


def test_a_token_that_others_can_read_is_refused(make_daemon: Callable[..., Daemon]) -> None:
    assert "can be read by others" in refusal(make_daemon, with_open_token)


def test_a_broken_file_of_the_cluster_is_named(make_daemon: Callable[..., Daemon]) -> None:
    assert "does not say what role this machine has in a cluster" in refusal(make_daemon, with_broken_file)


def test_a_bridge_that_cannot_run_is_why_nodes_are_down(make_cluster: Callable[..., RayCluster]) -> None:
    cluster = make_cluster("n2")
    cluster.until(n2="up")
    cluster.head.kill()
    words = "echo no raylet here >&2; exit 3"
    cluster.head.start(GPUSCHED_RAY_BRIDGE=shlex.join(["sh", "-c", words]))
    wait_until(lambda: "the bridge to Ray ended with 3: no raylet here" in cluster.why_not("n2"), what="the reason")
    cluster.head.kill()
    cluster.head.start()
    cluster.until(n2="up")
