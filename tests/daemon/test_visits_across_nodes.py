"""Commands in a running job from any of its nodes to any other, and what breaks the way between them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster
from support import is_alive, wait_until

from gpusched.errors import NotFound, Refused, UsageError

BIN = Path(sys.executable).parent
LARGE = 10 << 20


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("visits"))
    yield made
    made.head.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The same for all tests, without jobs and connected."""
    yield started
    started.reset()


def on_all(cluster: Cluster) -> str:
    """A job with a part on each node."""
    job = cluster.head.submit("sleep", "600", nodes=3, gpus=3, work_dir=str(cluster.root))
    cluster.head.wait_state(job, "RUNNING")
    return job


def from_node(job: str, near: str, node: str, text: str, redirect: str = "") -> list[str]:
    """A command that starts a shell line on a node, from another one of the job."""
    inner = f"{BIN}/grun --job {job} -w {node} sh -c '{text}' {redirect}"
    return ["grun", "--job", job, "-w", near, "sh", "-c", inner]


@pytest.mark.parametrize(("near", "node"), [("n2", "n3"), ("n2", "n1"), ("n3", "n2"), ("n2", "n2")])
def test_a_command_starts_on_any_node_from_any_other(cluster: Cluster, near: str, node: str) -> None:
    job = on_all(cluster)
    text = "read word; echo $word on $SLURMD_NODENAME; echo bad >&2; exit 4"
    result = cluster.run(*from_node(job, near, node, text), input="hi\n")
    assert (result.stdout, result.stderr, result.returncode) == (f"hi on {node}\n", "bad\n", 4)


def test_srun_of_one_job_enters_another_on_another_node(cluster: Cluster) -> None:
    there = cluster.on("n3", "sleep", "600", work_dir=str(cluster.root))
    here = cluster.on("n2", "sleep", "600", work_dir=str(cluster.root))
    for job in (there, here):
        cluster.head.wait_state(job, "RUNNING")
    text = f"srun --jobid={there} sh -c 'echo $SLURM_JOB_ID on $SLURMD_NODENAME; exit 3'"
    result = cluster.run("grun", "--job", here, "sh", "-c", text)
    assert (result.stdout, result.returncode) == (f"{there} on n3\n", 3), result.stderr


def test_one_request_opens_doors_on_the_named_nodes_and_on_no_other(cluster: Cluster) -> None:
    job = on_all(cluster)
    found = cluster.head.call("POST", f"/v1/jobs/{job}/enter", {"nodes": ["n3", "n1"]})["enter"]
    doors = found["doors"]
    assert [(door["job"], door["run"], door["node"]) for door in doors] == [
        (job, f"{job}.1", "n3"),
        (job, f"{job}.1", "n1"),
    ]
    assert doors[0]["path"] is None
    token = doors[0]["token"]

    def is_open(node: str) -> bool:
        home = cluster.root / ("home" if node == "n1" else node)
        return bool(list(home.rglob(f"*.door-{token}")))

    wait_until(lambda: is_open("n3") and is_open("n1"), what="the doors")
    assert not is_open("n2")


def both_ways(cluster: Cluster, job: str, near: str, node: str) -> tuple[subprocess.Popen[str], Path]:
    """A command that reads a large file on `near`, and sends it back from `node` slowly; the copy."""
    source, copy = cluster.root / "large", cluster.root / "copy"
    if not source.exists():
        source.write_bytes(os.urandom(LARGE))
    copy.unlink(missing_ok=True)
    # As slow as the break needs, without a clock: a piece of output waits for a file that the test removes.
    text = (
        f"head -c {LARGE // 2}; touch {cluster.root}/half; while [ -e {cluster.root}/hold ]; do sleep 0.05; done; cat"
    )
    (cluster.root / "half").unlink(missing_ok=True)
    (cluster.root / "hold").touch()
    return cluster.start(*from_node(job, near, node, text, f"< {source} > {copy}")), copy


def same(cluster: Cluster, copy: Path) -> bool:
    return (cluster.root / "large").read_bytes() == copy.read_bytes()


@pytest.mark.parametrize(
    ("near", "node"),
    [("n2", "n3"), *(pytest.param(*both, marks=pytest.mark.nightly) for both in [("n2", "n1"), ("n1", "n3")])],
)
def test_a_restart_of_the_daemon_loses_no_byte_either_way(cluster: Cluster, near: str, node: str) -> None:
    job = on_all(cluster)
    client, copy = both_ways(cluster, job, near, node)
    wait_until(lambda: (cluster.root / "half").exists(), what="half of it")
    cluster.head.kill()
    cluster.head.start()
    (cluster.root / "hold").unlink()
    client.communicate(timeout=90)
    assert client.returncode == 0
    assert same(cluster, copy)


def test_killed_agents_and_heads_in_a_row_lose_no_byte(cluster: Cluster) -> None:
    job = on_all(cluster)
    client, copy = both_ways(cluster, job, "n2", "n3")
    wait_until(lambda: (cluster.root / "half").exists(), what="half of it")
    for kill in (lambda: cluster.kill_agent("n3"), lambda: cluster.kill_agent("n2"), cluster.head.kill):
        kill()
        if kill == cluster.head.kill:
            cluster.head.start()
        cluster.all_up()
    (cluster.root / "hold").unlink()
    client.communicate(timeout=120)
    assert client.returncode == 0
    assert same(cluster, copy)


def test_the_end_of_a_command_during_a_break_is_told_afterwards(cluster: Cluster) -> None:
    job = on_all(cluster)
    text = f"echo up $$; while [ -e {cluster.root}/hold ]; do sleep 0.05; done; echo rest; exit 7"
    (cluster.root / "hold").touch()
    client = cluster.start("grun", "--job", job, "-w", "n3", "sh", "-c", text)
    assert client.stdout is not None
    pid = int(client.stdout.readline().split()[1])
    cluster.head.kill()
    (cluster.root / "hold").unlink()
    wait_until(lambda: not is_alive(pid), what="the command to end")
    cluster.head.start()
    rest, _ = client.communicate(timeout=90)
    assert (rest, client.returncode) == ("rest\n", 7)


@pytest.mark.parametrize("near", ["n1", "n2"])
@pytest.mark.parametrize("text", ["exec sleep 600", "exec yes"])
def test_a_killed_client_ends_its_visit_at_once(cluster: Cluster, near: str, text: str) -> None:
    job = on_all(cluster)
    mine, theirs, pipe = (cluster.root / name for name in ("mine", "theirs", "pipe"))
    for path in (mine, theirs, pipe):
        path.unlink(missing_ok=True)
    os.mkfifo(pipe)
    # Nobody reads it: with output that nobody has taken, the kernel reports the end of the client as an error.
    keeper = os.open(pipe, os.O_RDWR)
    inner = f"{BIN}/grun --job {job} -w n3 sh -c 'echo $$ > {theirs}; {text}' > {pipe}"
    outer = cluster.start("grun", "--job", job, "-w", near, "sh", "-c", f"echo $$ > {mine}; exec {inner}")
    try:
        wait_until(lambda: theirs.exists() and theirs.read_text().strip(), what="the command")
        pid = int(theirs.read_text())
        assert is_alive(pid)
        os.kill(int(mine.read_text()), signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), timeout_s=15, what="the command to end")
    finally:
        os.close(keeper)
    outer.communicate(timeout=60)


def test_a_command_whose_host_is_killed_is_not_waited_for(cluster: Cluster) -> None:
    job = on_all(cluster)
    client = cluster.start(
        "grun", "--job", job, "-w", "n3", "sh", "-c", "echo $PPID; exec sleep 600", stderr=subprocess.PIPE
    )
    assert client.stdout is not None
    os.kill(int(client.stdout.readline()), signal.SIGKILL)
    _, said = client.communicate(timeout=30)
    assert client.returncode != 0
    assert f"the connection to job {job} on n3 broke off" in said


def upgrade(cluster: Cluster, target: str) -> bytes:
    """The answer to a request to connect, up to the end of its head."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(cluster.head.socket))
        sock.settimeout(20)
        lines = (f"POST {target} HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
        sock.sendall("\r\n".join((*lines, "", "")).encode())
        found = b""
        while b"\r\n\r\n" not in found and (data := sock.recv(4096)):
            found += data
        return found


def test_what_cannot_be_connected_is_said(cluster: Cluster) -> None:
    job = on_all(cluster)
    path = f"/v1/jobs/{job}/connect"

    def refusal(target: str) -> Any:
        with pytest.raises((NotFound, Refused, UsageError)) as caught:
            cluster.head.call("POST", target)
        return caught.value

    assert "send: Upgrade: tcp" in refusal(f"{path}?run={job}.1&node=n3&token=0a").hint
    for target, words in (
        (f"{path}?run={job}.1&node=n9&token=0a", b"does not run on node n9"),
        (f"{path}?run={job}.7&node=n3&token=0a", b"has no run"),
        (f"{path}?run={job}.1&node=n3&token=../x", b"and a token"),
        (f"/v1/jobs/999/connect?run={job}.1&node=n3&token=0a", b"there is no job 999"),
    ):
        assert words in upgrade(cluster, target), target
    with pytest.raises(UsageError, match="node or nodes, not both"):
        cluster.head.call("POST", f"/v1/jobs/{job}/enter", {"node": "n1", "nodes": ["n2"]})
    with pytest.raises(UsageError, match="no nodes given"):
        cluster.head.call("POST", f"/v1/jobs/{job}/enter", {"nodes": []})
    with pytest.raises(UsageError):
        cluster.head.call("POST", f"/v1/jobs/{job}/enter", {"node": 2})
    with pytest.raises(Refused, match="does not run on node n9"):
        cluster.head.call("POST", f"/v1/jobs/{job}/enter", {"nodes": ["n1", "n9"]})


def test_the_daemon_does_not_wait_for_connections_when_it_ends(cluster: Cluster) -> None:
    job = on_all(cluster)
    client = cluster.start(
        "grun", "--job", job, "-w", "n3", "sh", "-c", "echo up; read word; exit 3", stdin=subprocess.PIPE
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "up\n"
    began = time.monotonic()
    cluster.head.stop()
    assert time.monotonic() - began < 2.0, "it waits two seconds for answers that are not done"
    cluster.head.start()
    cluster.all_up()
    client.communicate("go\n", timeout=90)
    assert client.returncode == 3


def test_connections_leave_no_descriptors_in_the_daemon(cluster: Cluster) -> None:
    job = on_all(cluster)
    assert cluster.head.process is not None
    folder = f"/proc/{cluster.head.process.pid}/fd"
    assert cluster.run("grun", "--job", job, "-w", "n3", "true").returncode == 0
    before = len(os.listdir(folder))
    words = [("grun", "--job", job, "-w", node, "cat") for node in ("n2", "n3") for _ in range(4)]
    clients = [cluster.start(*command, stdin=subprocess.PIPE) for command in words]
    wait_until(lambda: len(os.listdir(folder)) >= before + 2 * len(clients), what="the connections")
    for number, client in enumerate(clients):
        client.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
        client.communicate()
    wait_until(lambda: len(os.listdir(folder)) <= before, what="its descriptors to be closed")
