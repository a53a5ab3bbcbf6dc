"""Real Ray on machines of their own: two commands make a cluster, and no death of any part of Ray costs a job."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_cluster import CONFIG as SSH_CONFIG
from network_lab import Network, environment
from support import wait_until

import gpusched
from gpusched import __version__
from gpusched.client import DaemonConnection
from gpusched.engine.remote.messages import WIRE_VERSION

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
AGENT = ("agent n2 --address",)
FINALS = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}
LONG_S = 180.0
NOTICED_S = 12.0
"""After this long without a word Ray gives a node up: see `site.ray_environment`."""


class RayLab:
    """The head `n1` and the node `n2`, made by the commands of the documentation; `n3` joins in some tests.

    What is put into the folder `site` of a machine takes the place of the installed gpusched there.
    """

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
        own["PYTHONPATH"] = str(folder / "site")
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

    def submit(self, *options: str, script: str = UNTIL_GO) -> str:
        words = ["gsub", "--parsable", "-D", str(self.work), *options, "--", "sh", "-c", script]
        return self.ok("n1", *words).strip()

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/v1/jobs/{job}")["job"]
        return found

    def running(self, job: str) -> None:
        wait_until(lambda: self.job(job)["state"] == "RUNNING", LONG_S, what=f"{job} to run")

    def active(self) -> list[str]:
        jobs = self.call("GET", "/v1/jobs")["jobs"]
        return [job["id"] for job in jobs if job["state"] not in FINALS]

    def ended(self, job: str) -> dict[str, Any]:
        (self.work / "go").touch()
        wait_until(lambda: self.job(job)["state"] in FINALS, LONG_S, what=f"{job} to end")
        (self.work / "go").unlink()
        return self.job(job)

    def until_up(self, *names: str) -> None:
        def is_up() -> bool:
            cluster = self.call("GET", "/v1/cluster")
            up = {node["name"] for node in cluster["nodes"] if node["state"] == "up"}
            gpus = [gpu["node"] for gpu in cluster["gpus"]]
            return up >= set(names) and all(gpus.count(name) == 2 for name in names)

        wait_until(is_up, LONG_S, what=f"{names} to be up")

    def node(self, name: str) -> dict[str, Any]:
        return next(node for node in self.call("GET", "/v1/cluster")["nodes"] if node["name"] == name)

    def until_down(self, name: str) -> None:
        wait_until(lambda: self.node(name)["state"] == "down", LONG_S, what=f"{name} to be down")

    def in_ray(self, name: str) -> str:
        """What Ray says of a node: alive or gone."""
        nodes = json.loads(self.ok("n1", "gpusched", "cluster", "status", "--json"))["nodes"]
        return str(next((node["ray"] for node in nodes if node["name"] == name), "gone"))

    def members(self, name: str) -> int:
        """How many living nodes of this name Ray has."""
        ask = (
            "import sys; from gpusched.addons.ray.probe import ask_head; from gpusched.addons.ray.site import RayFolder"
        )
        ask += "; print(sum(n.name == sys.argv[2] and n.is_alive for n in"
        ask += " ask_head('10.99.0.1:7460', RayFolder(sys.argv[1], 'n1')).nodes))"
        home = str(self.lab["n1"].folder / "home")
        return int(self.lab["n1"].run(sys.executable, "-c", ask, home, name, env=self.env("n1")).stdout)

    def keep_again(self, name: str) -> None:
        """Type what starts Ray again where no systemd does."""
        again = shlex.join([str(COMMANDS / "gpusched"), "cluster", "run"])
        self.lab[name].run("sh", "-c", f"setsid {again} >/dev/null 2>&1 </dev/null &", env=self.env(name))

    def restart_daemon(self) -> None:
        self.ok("n1", "gpusched", "daemon", "stop")
        self.ok("n1", "gpusched", "daemon", "start")

    def upgrade(self, name: str) -> None:
        """Install a copy of this gpusched that is version 99.1 and understands its equals only."""
        site = self.lab[name].folder / "site"
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(Path(gpusched.__file__).parent, site / "gpusched", ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in (
            ("__init__.py", f'__version__ = "{__version__}"', '__version__ = "99.1"'),
            ("engine/remote/messages.py", f"\nWIRE_VERSION = {WIRE_VERSION}\n", "\nWIRE_VERSION = 99\n"),
        ):
            text = (site / "gpusched" / file).read_text()
            assert old in text
            (site / "gpusched" / file).write_text(text.replace(old, new))

    def kill(self, name: str, *words: str) -> None:
        """kill -9 of a process by the words in its command line, and wait for another one."""
        # It may be on its way back from an earlier test.
        wait_until(lambda: self.lab[name].pids(*words), LONG_S, what=f"{words}")
        before = set(self.lab[name].pids(*words))
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


@pytest.fixture(autouse=True)
def no_jobs_after(ray: RayLab) -> Iterator[None]:
    """What a failed test leaves is not in the way of the next one."""
    yield
    if jobs := ray.active():
        ray.call("POST", "/v1/jobs/cancel", {"ids": jobs})
    wait_until(lambda: not ray.active(), LONG_S, what="all jobs to end")
    (ray.work / "go").unlink(missing_ok=True)


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
        ("n2", AGENT),
        ("n2", ("raylet_socket_name",)),
        ("n2", ("cluster", "run")),
        ("n1", ("gcs_server",)),
        # After the directory: a driver that has outlived that may not hear where a relay is after its restart.
        ("n2", ("ray::AgentRelay",)),
        ("n1", ("raylet_socket_name",)),
    ],
    ids=["bridge", "agent", "raylet", "keeper", "directory", "relay", "raylet-of-the-head"],
)
def test_no_death_of_a_part_of_ray_costs_a_job(ray: RayLab, name: str, words: tuple[str, ...]) -> None:
    job = ray.submit("-N", "2", "-g", "4")
    ray.running(job)
    if words == ("cluster", "run"):
        # Nothing starts it again without systemd.
        ray.lab[name].kill(*ray.lab[name].pids(*words))
        ray.keep_again(name)
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


# --- links, power, versions ----------------------------------------------------------------------------------


def test_ray_does_not_notice_a_short_cut(ray: RayLab) -> None:
    job = ray.submit("-w", "n2", "-g", "2")
    ray.running(job)
    raylets = ray.lab["n2"].pids("raylet_socket_name")
    ray.lab["n2"].cut()
    time.sleep(3)
    ray.lab["n2"].heal()
    ray.until_up("n2")
    ended = ray.ended(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)
    assert ray.lab["n2"].pids("raylet_socket_name") == raylets


def test_a_node_that_ray_gave_up_during_a_cut_joins_again_with_its_jobs(ray: RayLab) -> None:
    job, short = ray.submit("-w", "n2", "-g", "2"), ray.submit("-w", "n2", script="sleep 15; exit 6")
    gang = ray.submit("-N", "2")
    for one in (job, short, gang):
        ray.running(one)
    raylets = set(ray.lab["n2"].pids("raylet_socket_name"))
    ray.lab["n2"].cut()
    ray.until_down("n2")
    waiting = ray.submit("-w", "n2", "-g", "1", script="exit 0")
    wait_until(lambda: ray.in_ray("n2") == "gone", LONG_S, what="Ray to give n2 up")
    time.sleep(NOTICED_S)
    assert [ray.job(one)["state"] for one in (job, short, gang, waiting)] == ["RUNNING"] * 3 + ["PENDING"]
    ray.lab["n2"].heal()
    # Its raylet ends itself when it hears that it is taken for dead; another one is started.
    wait_until(lambda: set(ray.lab["n2"].pids("raylet_socket_name")) - raylets, LONG_S, what="another raylet")
    ray.until_up("n1", "n2")
    assert [ray.job(one)["state"] for one in (job, gang)] == ["RUNNING"] * 2
    ended = [ray.ended(one) for one in (job, gang)]
    wait_until(lambda: ray.job(waiting)["state"] == "COMPLETED", LONG_S, what="the waiting job")
    ended.append(ray.job(short))
    assert [(one["exit_code"], len(one["runs"])) for one in ended] == [(5, 1), (5, 1), (6, 1)]


def test_runs_of_a_node_without_power_start_again_only_once_it_is_back(ray: RayLab) -> None:
    again, never = ray.submit("-w", "n2", "-g", "2"), ray.submit("-w", "n2", "--no-requeue")
    for one in (again, never):
        ray.running(one)
    ray.lab["n2"].power_off()
    ray.until_down("n2")
    wait_until(lambda: ray.in_ray("n2") == "gone", LONG_S, what="Ray to give n2 up")
    assert [ray.job(one)["state"] for one in (again, never)] == ["RUNNING", "RUNNING"]
    ray.lab["n2"].power_on()
    ray.keep_again("n2")
    wait_until(lambda: ray.job(never)["state"] == "NODE_FAIL", LONG_S, what="the lost job")
    wait_until(lambda: len(ray.job(again)["runs"]) == 2, LONG_S, what="the job to run again")
    ended = ray.ended(again)
    assert (ended["exit_code"], [run["exit_code"] for run in ended["runs"]]) == (5, [None, 5])
    assert len(ray.job(never)["runs"]) == 1
    ray.until_up("n1", "n2")


def test_a_head_without_power_for_90_s_finds_what_ended_meanwhile(ray: RayLab) -> None:
    """Ray of the node waits for its directory, and joins again if it has not."""
    long, short = ray.submit("-w", "n2", "-g", "2"), ray.submit("-w", "n2", script="sleep 10; exit 6")
    for one in (long, short):
        ray.running(one)
    ray.lab["n1"].power_off()
    time.sleep(90)
    ray.lab["n1"].power_on()
    ray.keep_again("n1")
    ray.ok("n1", "gpusched", "daemon", "start")
    ray.until_up("n1", "n2")
    wait_until(lambda: ray.job(short)["state"] == "FAILED", LONG_S, what="the end of the short job")
    assert (ray.job(short)["exit_code"], len(ray.job(short)["runs"])) == (6, 1)
    ended = ray.ended(long)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_a_head_that_lost_its_directory_gets_its_nodes_back(ray: RayLab) -> None:
    """A raylet that its new head does not know stays up, outside of the cluster, until its keeper asks."""
    job = ray.submit("-w", "n2", "-g", "2")
    ray.running(job)
    raylets = set(ray.lab["n2"].pids("raylet_socket_name"))
    ray.lab["n1"].kill(*ray.lab["n1"].pids("cluster", "run"))
    shutil.rmtree(ray.lab["n1"].folder / "home" / "ray" / "gcs")
    ray.keep_again("n1")
    wait_until(lambda: set(ray.lab["n2"].pids("raylet_socket_name")) - raylets, 3 * LONG_S, what="another raylet")
    ray.until_up("n1", "n2")
    ended = ray.ended(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_jobs_outlive_the_upgrade_of_the_head_and_then_of_the_node(ray: RayLab) -> None:
    job, gang = ray.submit("-w", "n2", "-g", "1"), ray.submit("-N", "2")
    for one in (job, gang):
        ray.running(one)
    ray.upgrade("n1")
    ray.restart_daemon()
    wait_until(lambda: "99.1" in (ray.node("n2")["why_not"] or ""), LONG_S, what="both versions to be named")
    assert __version__ in ray.node("n2")["why_not"]
    assert [ray.job(one)["state"] for one in (job, gang)] == ["RUNNING"] * 2
    ray.upgrade("n2")
    ray.until_up("n1", "n2")
    assert [(one["exit_code"], len(one["runs"])) for one in map(ray.ended, (job, gang))] == [(5, 1)] * 2
    # Out of the way of the other tests, once nothing runs that was started from it.
    for name in ("n1", "n2"):
        shutil.rmtree(ray.lab[name].folder / "site")
    ray.restart_daemon()
    ray.until_up("n1", "n2")


# --- tokens --------------------------------------------------------------------------------------------------


def test_real_ray_admits_no_machine_without_the_token_of_its_cluster(ray: RayLab) -> None:
    token = ray.ok("n1", "gpusched", "cluster", "token").strip()
    other = ray.lab.folder / "token"
    other.write_text("".join(reversed(token)))
    join = ("gpusched", "cluster", "join", "n1", "--yes")
    assert "does not accept this token" in ray.refused("n3", *join, "--token-file", str(other))
    assert not (ray.lab["n3"].folder / "home" / "ray" / "token").exists()
    other.write_text("two words")
    assert ray.type("n3", *join, "--token-file", str(other)).returncode == 2
    # The same at Ray's own door, without any of gpusched before it.
    address = "10.99.0.1:7460"
    for auth in ({}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        start = [str(COMMANDS / "ray"), "start", "--block", f"--address={address}", "--node-ip-address=10.99.0.3"]
        env = {**ray.env("n3"), **auth, "RAY_TMPDIR": str(ray.lab.folder / "r")}
        done = ray.lab["n3"].run("timeout", "60", *start, env=env, check=False)
        assert done.returncode != 0
        assert "Unauthenticated" in done.stdout + done.stderr, (auth, done.stdout[-2000:], done.stderr[-2000:])
        assert ray.lab["n3"].pids("raylet_socket_name") == []
    assert "n3" not in ray.ok("n1", "gpusched", "cluster", "status")


def test_a_node_of_one_cluster_joins_no_other_and_its_token_opens_none(ray: RayLab) -> None:
    ray.ok("n3", "gpusched", "cluster", "init", "--yes", "--address", "10.99.0.3")
    try:
        token = ray.lab.folder / "token"
        token.write_text(ray.ok("n3", "gpusched", "cluster", "token"))
        assert "already the head" in ray.refused("n3", "gpusched", "cluster", "join", "n1", "--yes")
        assert "already node n2" in ray.refused("n2", "gpusched", "cluster", "join", "n3", "--yes")
        home = ray.lab["n2"].folder / "home" / "ray" / "token"
        kept = home.read_text()
        home.write_text(token.read_text().strip())
        try:
            done = ray.type("n2", "gpusched", "cluster", "doctor")
            assert (done.returncode, "does not accept this token" in done.stdout) == (1, True), done.stdout
        finally:
            home.write_text(kept)
        assert "FAIL" not in ray.ok("n2", "gpusched", "cluster", "doctor")
    finally:
        ray.ok("n3", "gpusched", "cluster", "leave", "--yes", "--force")
        ray.ok("n3", "gpusched", "daemon", "stop")


# --- nodes that are not what they were -----------------------------------------------------------------------


def test_a_node_that_joins_twice_stays_one_node(ray: RayLab) -> None:
    job = ray.submit("-w", "n2", "-g", "2")
    ray.running(job)
    raylets = ray.lab["n2"].pids("raylet_socket_name")
    assert "already node n2" in ray.refused("n2", "gpusched", "cluster", "join", "n1", "--yes")
    assert "already node n2" in ray.refused("n2", "gpusched", "cluster", "join", "n1", "--yes", "--name", "n9")
    assert "Ray is already kept running here" in ray.refused("n2", "gpusched", "cluster", "run")
    assert ray.lab["n2"].pids("raylet_socket_name") == raylets
    nodes = json.loads(ray.ok("n1", "gpusched", "cluster", "status", "--json"))["nodes"]
    assert [(node["name"], node["state"]) for node in nodes] == [("n1", "up"), ("n2", "up")]
    ended = ray.ended(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_no_machine_takes_the_place_of_a_node_by_its_name(ray: RayLab) -> None:
    job = ray.submit("-w", "n2", "-g", "2")
    ray.running(job)
    token = ray.lab.folder / "token"
    token.write_text(ray.ok("n1", "gpusched", "cluster", "token"))
    token.chmod(0o600)
    join = ("gpusched", "cluster", "join", "n1", "--yes", "--name", "n2", "--token-file", str(token))
    assert "another machine, 10.99.0.2, is already node n2 of this cluster" in ray.refused("n3", *join)
    # The same at Ray's own door, which admits it: the daemon keeps to the node that it knows.
    start = [str(COMMANDS / "ray"), "start", "--block", "--address=10.99.0.1:7460", "--node-ip-address=10.99.0.3"]
    env = {**ray.env("n3"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    line = shlex.join([*start, "--node-name=n2", "--num-cpus=0", f"--temp-dir={ray.lab.folder}/r"])
    try:
        ray.lab["n3"].run("sh", "-c", f"setsid {line} >/dev/null 2>&1 </dev/null &", env=env)
        wait_until(lambda: ray.members("n2") == 2, LONG_S, what="another n2 in Ray")
        ended = ray.ended(job)
        assert (ended["exit_code"], len(ended["runs"])) == (5, 1)
        (ray.work / "go").touch()
        where = ray.submit("-w", "n2", script="hostname > where")
        wait_until(lambda: ray.job(where)["state"] == "COMPLETED", LONG_S, what="a job on n2")
        assert (ray.work / "where").read_text() == "n2\n"
    finally:
        ray.lab["n3"].reboot()
    wait_until(lambda: ray.members("n2") == 1, LONG_S, what="Ray to give the other n2 up")


def test_a_machine_that_joins_again_under_another_name_is_another_node(ray: RayLab) -> None:
    ray.ok("n2", "gpusched", "cluster", "leave", "--yes")
    ray.until_down("n2")
    waiting = ray.submit("-w", "n2", "-g", "2", script="exit 6")
    ray.ok("n2", "gpusched", "cluster", "join", "n1", "--yes", "--name", "n9")
    ray.until_up("n1", "n9")
    other = ray.submit("-w", "n9", "-g", "2", script="hostname > where; exit 7")
    wait_until(lambda: ray.job(other)["state"] == "FAILED", LONG_S, what="the job on n9")
    assert (ray.job(other)["exit_code"], (ray.work / "where").read_text()) == (7, "n2\n")
    assert ray.job(waiting)["state"] == "PENDING"
    ray.ok("n2", "gpusched", "cluster", "leave", "--yes")
    ray.until_down("n9")
    ray.ok("n1", "gpusched", "cluster", "leave", "n9", "--yes")
    ray.ok("n2", "gpusched", "cluster", "join", "n1", "--yes")
    ray.until_up("n1", "n2")
    wait_until(lambda: ray.job(waiting)["state"] == "FAILED", LONG_S, what="the waiting job")
    assert (ray.job(waiting)["exit_code"], len(ray.job(waiting)["runs"])) == (6, 1)
    assert [node["name"] for node in ray.call("GET", "/v1/cluster")["nodes"]] == ["n1", "n2"]


def test_gpus_that_vanish_between_a_report_and_the_start_cost_no_job(ray: RayLab) -> None:
    gpus = ray.lab["n2"].folder / "gpus.json"
    whole = gpus.read_text()
    # What is placed now arrives only later.
    bridge = ray.lab["n1"].pids("engine.ray.bridge")
    ray.lab["n1"].kill(*bridge, number=signal.SIGSTOP)
    try:
        job = ray.submit("-w", "n2", "-g", "2", script="echo $CUDA_VISIBLE_DEVICES >> started; exit 5")
        gpus.write_text(json.dumps({"gpus": json.loads(whole)["gpus"][:1]}))
    finally:
        ray.lab["n1"].kill(*bridge, number=signal.SIGCONT)
    try:

        def is_seen() -> bool:
            there = [gpu for gpu in ray.call("GET", "/v1/cluster")["gpus"] if gpu["node"] == "n2"]
            return ray.node("n2")["state"] == "up" and len([gpu for gpu in there if gpu["state"] != "lost"]) == 1

        wait_until(is_seen, LONG_S, what="n2 with one GPU")
    finally:
        gpus.write_text(whole)
    ray.until_up("n2")

    def is_back() -> bool:
        there = [gpu for gpu in ray.call("GET", "/v1/cluster")["gpus"] if gpu["node"] == "n2"]
        return len(there) == 2 and not any(gpu["state"] == "lost" for gpu in there)

    wait_until(is_back, LONG_S, what="the lost GPU to answer again")
    # Somebody has to say that it is well.
    ray.call("POST", "/v1/undrain", {"targets": ["n2:1"]})
    wait_until(lambda: ray.job(job)["state"] in FINALS, LONG_S, what="the job to end")
    assert ray.job(job)["exit_code"] == 5
    assert (ray.work / "started").read_text() == "0,1\n"
