"""What a real daemon does about the GPUs of another node: each is judged by readings of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from clusters import Cluster, sh
from support import wait_until

GPU = 'vram_over = "kill"\nvram_over_polls = 3\nvram_over_grace_s = 1.0\nforeign_peak_s = 1.0\n'


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), ("n2",), gpus=1, gpu=GPU)
    yield made
    made.head.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The same for all tests, without jobs and with nothing on its GPUs."""
    yield started
    for node in ("n1", "n2"):
        started.put_on_gpu(node)
    started.reset()


def test_a_gang_that_holds_too_much_on_its_second_node_is_ended(cluster: Cluster) -> None:
    text = "echo $$ > new.$NODE_RANK; mv new.$NODE_RANK pid.$NODE_RANK; exec sleep 600"
    job = cluster.head.submit(*sh(text), nodes=2, gpus=2, vram_mib=4096)
    pids = [cluster.head.home / f"pid.{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in pids), what="both ranks")
    limits = cluster.head.call("GET", f"/v1/jobs/{job}/why")["why"]["facts"]["vram_limit"]
    assert limits == {"GPU 0 on n1": "watched", "GPU 0 on n2": "watched"}
    cluster.put_on_gpu("n1", {int(pids[0].read_text()): "4GiB"})
    cluster.put_on_gpu("n2", {int(pids[1].read_text()): "16GiB"})
    wait_until(lambda: bool(cluster.head.job(job)["runs"][0]["outcome"]), what="the end")
    cluster.put_on_gpu("n2")
    (run,) = cluster.head.job(job)["runs"]
    held = "16G of GPU 0 on n2, of which it booked 4G"
    assert (run["outcome"], run["reason"], run["reason_text"]) == ("OUT_OF_MEMORY", "GpuMemoryOver", f"held {held}")
    (told,) = [event["text"] for event in cluster.head.job(job)["events"] if event["kind"] == "vram"]
    assert told.startswith(f"it holds {held}; ask for what it needs: --vram 16G; its run will be ended")


def foreign(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.head.call("GET", "/v1/foreign")["foreign"]
    return found


def test_one_pid_on_two_nodes_is_two_processes(cluster: Cluster) -> None:
    for node in ("n1", "n2"):
        cluster.put_on_gpu(node, {os.getpid(): "20GiB"})
    wait_until(lambda: len(foreign(cluster)) == 2, what="both to be seen")
    waiting = cluster.on("n2", "true", gpus=1)
    assert {row["node"]: row["jobs_kept_waiting"] for row in foreign(cluster)} == {"n1": 0, "n2": 1}
    cluster.put_on_gpu("n2")
    (ended,) = cluster.head.wait(waiting)
    assert ended["state"] == "COMPLETED"


def test_a_gang_starts_on_no_old_reading_of_its_second_node(cluster: Cluster) -> None:
    os.kill(cluster.agent("n2"), signal.SIGSTOP)
    try:
        cluster.put_on_gpu("n2", {os.getpid(): "20GiB"})
        looked = polls(cluster)
        wait_until(lambda: polls(cluster) > looked + 5, what="its last reading to be an old one")
        gang = cluster.head.submit("true", nodes=2, gpus=2)
        awaits = "is about to start: waits for a new reading of the GPUs of node n2; the last one is "
        wait_until(lambda: why(cluster, gang).startswith(awaits), what="the reading of n2 alone to be awaited")
    finally:
        os.kill(cluster.agent("n2"), signal.SIGCONT)
    wait_until(lambda: "GPU 0 of node n2: foreign use of 20G" in why(cluster, gang), what="the process to be found")
    assert (cluster.head.state(gang), cluster.head.job(gang)["run"]) == ("PENDING", 0)
    cluster.put_on_gpu("n2")
    (ended,) = cluster.head.wait(gang)
    assert (ended["state"], ended["run"]) == ("COMPLETED", 1)


def polls(cluster: Cluster) -> int:
    count: int = cluster.head.call("GET", "/v1/status")["daemon"]["tick"]["count"]
    return count


def why(cluster: Cluster, job: str) -> str:
    text: str = cluster.head.call("GET", f"/v1/jobs/{job}/why")["why"]["text"]
    return text
