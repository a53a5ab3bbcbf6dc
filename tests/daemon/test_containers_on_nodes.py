"""Jobs in containers on several nodes: a real daemon with agents, each with a stand-in for podman of its own.

The daemon's own node is left out: whether podman could run there depends on the machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, sh
from harness import FINAL
from stand_in_runtimes import DIGEST, StandIns
from support import is_alive, wait_until

from gpusched.errors import Refused

IMAGE = "docker.io/library/alpine:3"
PINNED = f"docker.io/library/alpine@sha256:{DIGEST}"


class Boxes:
    """The head `n1`, nodes `n2` and `n3` with podman, and `n4` without."""

    def __init__(self, root: Path) -> None:
        self.runtimes = {name: StandIns(root / f"bin-{name}") for name in ("n2", "n3")}
        settings = '[containers]\nruntime = "podman"\n'
        self.cluster = Cluster(root, ("n2", "n3", "n4"), path=f"{root}/bin-$1", settings=settings, address="127.0.0.1")
        self.head = self.cluster.head
        self.home = self.head.home

    def box(self, text: str, **spec: Any) -> str:
        """Submit a job in a container."""
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        return self.head.submit(*sh(text), **{"image": IMAGE, "gpus": 1, "exclude": ["n1"], "env": env, **spec})

    def job(self, job_id: object) -> dict[str, Any]:
        found: dict[str, Any] = self.head.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def until(self, job_id: object, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] in (states or FINAL), what=f"job {job_id}")
        return self.job(job_id)

    def pulls(self, since: str) -> dict[str, dict[str, Any]]:
        """The pulls from this job's on, by the node that they are for or have run on."""
        jobs = self.head.call("GET", "/v1/jobs?states=all")["jobs"]
        found = [
            self.job(job["id"]) for job in jobs if job["name"].startswith("pull ") and int(job["id"]) >= int(since) - 1
        ]
        return {(job["runs"] or [{"node": job["nodelist"][0]}])[-1]["node"]: job for job in found}

    def without_retries(self, job_id: str) -> None:
        for pull in self.pulls(job_id).values():
            if pull["state"] not in FINAL:
                self.head.call("POST", "/v1/jobs/update", {"ids": [pull["id"]], "changes": {"retries": 0}})

    def cancel(self, *ids: object) -> None:
        self.head.call("POST", "/v1/jobs/cancel", {"ids": [*ids]})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    made = Boxes(tmp_path_factory.mktemp("boxes"))
    yield made
    made.head.close()


@pytest.fixture
def boxes(started: Boxes) -> Iterator[Boxes]:
    for runtimes in started.runtimes.values():
        for name in ("calls", "image", "slow", "full", "names"):
            (runtimes.folder / name).unlink(missing_ok=True)
    yield started
    for runtimes in started.runtimes.values():
        (runtimes.folder / "slow").unlink(missing_ok=True)
    started.cluster.reset()
    for path in started.home.glob("up.*"):
        path.unlink()


def test_ranks_on_two_nodes_run_in_the_same_image(boxes: Boxes) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "SLURM_PROCID")
    text = "echo $CONTAINER_IMAGE $CONTAINER_NAME " + " ".join(f"$inside_{name}" for name in names)
    job = boxes.box(text, nodes=2, gpus=4, ntasks_per_node=2)
    ended = boxes.until(job)
    assert ended["state"] == "COMPLETED", ended["reason_text"]
    first = Path(ended["stdout_path"])
    lines = [sorted(path.read_text().splitlines()) for path in (first, Path(f"{first}.n1"))]
    for node, found in enumerate(lines):
        for local, line in enumerate(found):
            rank = 2 * node + local
            image, name, *values = line.split()
            assert (image, name.rpartition("-")[0]) == (PINNED, f"gpusched-{job}.1.{rank}")
            assert values == [str(rank), str(local), "4", str(node), "127.0.0.1", str(rank)]
    pulls = boxes.pulls(job)
    assert sorted(pulls) == ["n2", "n3"]
    assert [(pull["state"], pull["gpus"]) for pull in pulls.values()] == [("COMPLETED", [])] * 2
    (first_name, second_name) = sorted(pulls, key=lambda name: pulls[name]["id"])
    assert f"pull --quiet {IMAGE}" in "\n".join(boxes.runtimes[first_name].calls())
    assert f"pull --quiet {PINNED}" in "\n".join(boxes.runtimes[second_name].calls())
    assert [runtimes.names() for runtimes in boxes.runtimes.values()] == [[], []]


def test_a_job_on_one_idle_node_has_its_image_pulled_there_alone(boxes: Boxes) -> None:
    job = boxes.box("true")
    assert boxes.until(job)["state"] == "COMPLETED"
    assert [pull["state"] for pull in boxes.pulls(job).values()] == ["COMPLETED"]


def test_a_pull_in_progress_survives_the_death_of_agent_and_head(boxes: Boxes) -> None:
    for runtimes in boxes.runtimes.values():
        runtimes.be_slow()
    job = boxes.box("true", nodes=2, gpus=2)
    (node,) = boxes.pulls(job)
    pull = boxes.pulls(job)[node]["id"]
    # One that is only recorded as running begins again where nothing has started it yet.
    boxes.head.pid_of(pull)
    before = boxes.cluster.agent(node)
    boxes.cluster.kill_agent(node)
    wait_until(lambda: boxes.cluster.agent(node) != before, what="another agent")
    boxes.head.kill()
    boxes.head.start()
    boxes.cluster.all_up()
    found = boxes.job(pull)
    assert (found["state"], len(found["runs"])) == ("RUNNING", 1)
    assert (boxes.job(job)["state"], boxes.job(job)["reason"]) == ("PENDING", "ImagePull")
    boxes.cancel(job)
    assert boxes.until(pull)["state"] == "CANCELLED"


def test_no_gpu_is_taken_while_the_second_node_pulls(boxes: Boxes) -> None:
    boxes.runtimes["n3"].be_slow()
    # The first pull is for n2 then.
    blocker = boxes.head.submit("sleep", "600", cpus=4, gpus=0, nodelist=["n3"])
    boxes.until(blocker, "RUNNING")
    job = boxes.box("true", nodes=2, gpus=2)
    wait_until(lambda: "n3" in boxes.pulls(job), what="the pull to n3")
    pull = boxes.pulls(job)["n3"]["id"]
    why = boxes.cluster.run("gq", "--why", job).stdout
    assert f"job {job} is PENDING (ImagePull): its image is to be pulled by job {pull} to n3" in why
    boxes.cancel(blocker)
    boxes.until(pull, "RUNNING")
    assert boxes.job(job)["gpus"] == []
    other = boxes.head.submit("true", gpus=4, nodes=2, nodelist=["n2", "n3"])
    assert boxes.until(other)["state"] == "COMPLETED"
    boxes.cancel(job)
    assert boxes.until(pull)["state"] == "CANCELLED"


def test_a_node_that_cannot_pull_is_named(boxes: Boxes) -> None:
    (boxes.runtimes["n3"].folder / "full").touch()
    (boxes.runtimes["n3"].folder / "slow").unlink(missing_ok=True)
    blocker = boxes.head.submit("sleep", "600", cpus=4, gpus=0, nodelist=["n3"])
    boxes.until(blocker, "RUNNING")
    job = boxes.box("true", nodes=2, gpus=2)
    wait_until(lambda: "n3" in boxes.pulls(job), what="the pull to n3")
    pull = boxes.pulls(job)["n3"]["id"]
    boxes.without_retries(job)
    boxes.cancel(blocker)
    ended = boxes.until(job)
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "ImagePullFailed")
    text = f"its image was not pulled, job {pull}: on n3: exit code 125: writing blob: no space left on device"
    assert text in ended["reason_text"]


def test_a_job_goes_where_its_image_is_when_another_node_cannot_pull(boxes: Boxes) -> None:
    (boxes.runtimes["n3"].folder / "full").touch()
    busy = boxes.head.submit("sleep", "600", cpus=1, gpus=2, nodelist=["n2"])
    blocker = boxes.head.submit("sleep", "600", cpus=4, gpus=0, nodelist=["n3"])
    boxes.until(busy, "RUNNING")
    boxes.until(blocker, "RUNNING")
    job = boxes.box("true")
    wait_until(lambda: "n3" in boxes.pulls(job), what="the pull to n3")
    boxes.without_retries(job)
    why = boxes.cluster.run("gq", "--why", job).stdout
    assert "on nodes with podman, its image is on node n2" in why
    boxes.cancel(blocker)
    assert boxes.until(boxes.pulls(job)["n3"]["id"])["state"] == "FAILED"
    assert boxes.job(job)["state"] == "PENDING"
    assert "its image was not pulled to n3 by job" in boxes.cluster.run("gshow", job).stdout
    boxes.cancel(busy)
    ended = boxes.until(job)
    assert (ended["state"], ended["runs"][-1]["node"]) == ("COMPLETED", "n2")
    assert len(boxes.pulls(job)) == 2


def test_nodes_without_a_runtime_are_left_out(boxes: Boxes) -> None:
    with pytest.raises(Refused) as caught:
        boxes.box("true", nodes=3, gpus=3)
    assert caught.value.message == "asked for 3 nodes on nodes with podman, not on node n1; there are 2"
    with pytest.raises(Refused) as caught:
        boxes.box("true", nodelist=["n4"], exclude=[])
    assert caught.value.message == "asked for a node on node n4, with podman; there is none"
    job = boxes.box("true", gpus=4, nodes=2)
    ended = boxes.until(job)
    assert (ended["state"], ended["runs"][-1]["node"]) == ("COMPLETED", "n[2-3]")


@pytest.mark.parametrize("killed", ["supervisor", "agent", "head"])
def test_nothing_is_left_of_containers_after_a_kill(killed: str, boxes: Boxes) -> None:
    text = "echo $$ $PPID > up.$inside_RANK.new; mv up.$inside_RANK.new up.$inside_RANK; exec sleep 600"
    job = boxes.box(text, nodes=2, gpus=2, ntasks_per_node=1, requeue=False)
    files = [boxes.home / f"up.{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in files), what="both ranks")
    pids = [int(path.read_text().split()[0]) for path in files]
    assert [len(runtimes.names()) for runtimes in boxes.runtimes.values()] == [1, 1]
    if killed == "supervisor":
        podman = int(files[0].read_text().split()[1])
        stat = Path(f"/proc/{podman}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(stat[1]), signal.SIGKILL)
    elif killed == "agent":
        before = boxes.cluster.agent("n2")
        boxes.cluster.kill_agent("n2")
        wait_until(lambda: boxes.cluster.agent("n2") != before, what="another agent")
        boxes.cancel(job)
    else:
        boxes.head.kill()
        boxes.head.start()
        boxes.cluster.all_up()
        boxes.cancel(job)
    assert boxes.until(job)["state"] == ("NODE_FAIL" if killed == "supervisor" else "CANCELLED")
    assert not any(map(is_alive, pids))
    if killed == "supervisor":
        # Of a killed supervisor the next pull on its node removes what podman remembers.
        boxes.until(boxes.box("true", image="docker.io/library/busybox:1", nodes=2, gpus=2))
    assert [runtimes.names() for runtimes in boxes.runtimes.values()] == [[], []]
