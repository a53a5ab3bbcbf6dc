"""An operator declares a node down: its runs start again elsewhere, and what lived on there ends once it is back."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_cluster import Cluster
from support import wait_until

COUNT = "echo $SLURMD_NODENAME >> ran.$GPUSCHED_JOB_ID; until [ -e go ]; do sleep 0.05; done; exit 5"


def ran(cluster: Cluster, job: str) -> list[str]:
    path = Path(cluster.head.home / f"ran.{job}")
    return path.read_text().split() if path.exists() else []


def start(cluster: Cluster, **spec: object) -> str:
    job = cluster.head.submit("sh", "-c", COUNT, **{"nodelist": ["n2", "n3"], "gpus": 1, **spec})
    wait_until(lambda: len(ran(cluster, job)) == spec.get("nodes", 1), what=f"job {job} to run")
    return job


def story(cluster: Cluster, job: str) -> str:
    return cluster.command("gshow", job).stdout


def give_up(cluster: Cluster, node: str, *words: str) -> str:
    done = cluster.command("gctl", "down", node, "--confirm", *words)
    assert done.stdout == f"declared down {node}\n"
    return done.stderr


def test_runs_of_a_node_that_is_declared_down_start_again_elsewhere(cluster: Cluster) -> None:
    job = start(cluster)
    (first,) = ran(cluster, job)
    other = "n3" if first == "n2" else "n2"
    stays = start(cluster, nodelist=[other])
    pid = cluster.head.pid_of(job)
    refused = cluster.command("gctl", "down", first, check=False)
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (
        1,
        f"gctl: error: node {first} answers, so it reports itself what becomes of its runs",
    )
    cluster.lab[first].cut()
    cluster.wait_node(first, "down")
    asked = cluster.command("gctl", "down", first, check=False)
    assert asked.returncode == 1
    assert f"1 run on node {first} would be lost (job {job})" in asked.stderr
    assert f"gctl down {first} --confirm" in asked.stderr
    assert cluster.head.state(job) == "RUNNING", "nothing was confirmed"
    assert f"lost: {job}; use the node again with: gctl undrain {first}" in give_up(cluster, first, "-m", "fan")
    wait_until(lambda: ran(cluster, job) == [first, other], what="the job to run elsewhere")
    assert cluster.lab[first].is_alive(pid), "it lives on, out of reach"
    cluster.lab[first].heal()
    wait_until(lambda: not cluster.lab[first].is_alive(pid), what="the old run to be ended")
    wait_until(lambda: "run 1, taken for lost, had lived on" in story(cluster, job), what="the story to say so")
    assert "declared node " + first + " down: fan" in story(cluster, job)
    cluster.wait_node(first, "drained")
    cluster.command("gctl", "undrain", first)
    (cluster.head.home / "go").touch()
    ended, stayed = cluster.head.wait(job, stays)
    assert (ended["exit_code"], len(ended["runs"]), ended["runs"][0]["reason"]) == (5, 2, "NodeDown")
    assert (stayed["exit_code"], len(stayed["runs"])) == (5, 1)
    assert ran(cluster, job) == [first, other]


@pytest.mark.nightly
def test_a_declaration_outlives_the_head(cluster: Cluster) -> None:
    job = start(cluster, nodelist=["n2"])
    keeps = start(cluster, nodelist=["n2"], requeue=False)
    pids = [cluster.head.pid_of(one) for one in (job, keeps)]
    cluster.lab["n2"].cut()
    cluster.wait_node("n2", "down")
    give_up(cluster, "n2")
    cluster.head.kill()
    cluster.head.start()
    (lost,) = cluster.head.wait(keeps)
    assert (lost["state"], lost["reason"]) == ("NODE_FAIL", "NodeDown")
    assert lost["reason_text"].endswith(" declared node n2 down: it does not answer")
    assert cluster.head.state(job) == "PENDING"
    cluster.lab["n2"].heal()
    wait_until(lambda: not any(map(cluster.lab["n2"].is_alive, pids)), what="the old runs to be ended")
    wait_until(lambda: "run 1, taken for lost, had lived on" in story(cluster, keeps), what="the story to say so")
    cluster.command("gctl", "undrain", "n2")
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 2)


def test_of_a_gang_all_ranks_have_ended_before_it_starts_again(cluster: Cluster) -> None:
    job = start(cluster, nodes=2, gpus=2)
    pids = {rank: cluster.head.pid_of(job) for rank in (0,)}
    cluster.lab["n3"].power_off()
    cluster.wait_node("n3", "down")
    give_up(cluster, "n3")
    wait_until(lambda: cluster.head.state(job) == "PENDING", what="the gang to be given up")
    assert not cluster.lab["n2"].is_alive(pids[0])
    cluster.lab["n3"].power_on()
    cluster.wait_node("n3", "drained")
    cluster.command("gctl", "undrain", "n3")
    wait_until(lambda: len(ran(cluster, job)) == 4, what="both ranks to run again")
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 2)
