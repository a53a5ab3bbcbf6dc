"""A real daemon with two agents, as on machines of their own: each has its spool and GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import CONNECT, Cluster, cold_agent, sh
from harness import Daemon
from support import is_alive, wait_until

from gpusched.addons.board.query import BoardCopy
from gpusched.errors import GpuschedError


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.head.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The same for all tests, without jobs and with every node there."""
    yield started
    started.reset()


def test_two_names_of_one_machine_are_one_node(tmp_path: Path) -> None:
    (tmp_path / "n2").mkdir(mode=0o700)
    connect = tmp_path / "connect"
    # Whichever name is called, the same machine answers, with the same home.
    text = CONNECT.replace("/$1 ", "/n2 ").replace("/$1/gpus.json", "/n2/gpus.json")
    connect.write_text(text.format(root=tmp_path, path="", agent=cold_agent(tmp_path)))
    connect.chmod(0o755)
    (tmp_path / "n2" / "gpus.json").write_text('{"gpus": [{"vram": "24GiB"}]}')
    more = f'[daemon]\npoll_s = 0.2\n[cluster]\nnodes = ["n2", "n3"]\nconnect = "{connect} {{node}}"\n'
    head = Daemon(tmp_path / "home", fake_gpus="1x24GiB", config=f'[node]\nname = "n1"\n{more}')

    def nodes() -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in head.call("GET", "/v1/cluster")["nodes"]}

    try:
        head.start()
        wait_until(lambda: "under another name" in str(nodes()), what="the machine to be known by both names")
        found = nodes()
        first, second = ("n2", "n3") if found["n2"]["state"] == "up" else ("n3", "n2")
        assert (found[first]["state"], found[second]["state"]) == ("up", "down")
        assert f"node {second} is the machine of node {first} under another name" in str(found[second])
        job = head.submit("true", gpus=1, nodelist=[first])
        assert [job["state"] for job in head.wait(job)] == ["COMPLETED"]
    finally:
        head.close()


def test_gpus_are_shown_on_their_own_node_whatever_the_names(tmp_path: Path) -> None:
    # Sorted by name, the head is the last.
    config = '[node]\nname = "z1"\n[cluster]\nnodes = ["a2"]\nconnect = "false {node}"\n'
    head = Daemon(tmp_path / "home", fake_gpus="2x24GiB", config=config)
    try:
        head.start()
        cluster = head.call("GET", "/v1/cluster")
        assert [(node["name"], node["state"]) for node in cluster["nodes"]] == [("z1", "up"), ("a2", "down")]
        assert [gpu["node"] for gpu in cluster["gpus"]] == ["z1", "z1"]
    finally:
        head.close()


def test_nodes_join_with_what_their_own_settings_say(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    assert list(nodes) == ["n1", "n2", "n3"]
    assert [nodes[name]["labels"] for name in nodes] == [[], ["n2"], ["n3"]]
    assert [nodes[name]["cpus"] for name in nodes] == [4, 4, 4]


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_job_runs_on_the_node_it_names(cluster: Cluster, node: str) -> None:
    job = cluster.on(node, *sh("echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES; exit 7"), gpus=2)
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"], ended["node"]) == ("FAILED", 7, node)
    assert cluster.head.output(job) == f"{node} 0,1\n"
    assert {gpu["uuid"] for gpu in ended["runs"][0]["gpus"]} == {f"GPU-{node}-0", f"GPU-{node}-1"}


def test_one_queue_fills_all_nodes(cluster: Cluster) -> None:
    jobs = [cluster.head.submit("sleep", "600", gpus=1) for _ in range(7)]
    wait_until(lambda: [cluster.head.state(job) for job in jobs].count("RUNNING") == 6, what="six to run")
    places = {(cluster.head.job(job)["node"], tuple(g["index"] for g in cluster.head.job(job)["gpus"])) for job in jobs}
    assert len(places - {(None, ())}) == 6
    assert cluster.head.job(jobs[-1])["reason"] == "Resources"


def test_a_gang_runs_on_all_its_nodes(cluster: Cluster) -> None:
    job = cluster.head.submit(*sh("echo $NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT"), nodes=3, gpus=6)
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["node"]) == ("COMPLETED", "n[1-3]")
    first = Path(ended["stdout_path"])
    outputs = [first.read_text(), *(Path(f"{first}.n{rank}").read_text() for rank in (1, 2))]
    port = outputs[0].rpartition(":")[2]
    assert outputs == [f"{rank} of 3 at n1:{port}" for rank in range(3)]


def test_a_failing_rank_ends_the_gang(cluster: Cluster) -> None:
    all_run = "[ -s pid.0 ] && [ -s pid.1 ] && [ -s pid.2 ]"
    text = (
        f"echo $$ > pid.$NODE_RANK; [ $NODE_RANK = 1 ] || exec sleep 600; until {all_run}; do sleep 0.05; done; exit 3"
    )
    job = cluster.head.submit(*sh(text), nodes=3, gpus=3)
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 3)
    pids = [int((cluster.head.home / f"pid.{rank}").read_text()) for rank in range(3)]
    assert not any(map(is_alive, pids))


def test_a_killed_agent_costs_no_job_and_no_exit_code(cluster: Cluster) -> None:
    long = cluster.on("n2", *sh("until [ -e go ]; do sleep 0.05; done; exit 5"), gpus=1)
    pid = cluster.head.pid_of(long)
    for _ in range(3):
        before = cluster.agent("n2")
        cluster.kill_agent("n2")
        wait_until(lambda before=before: cluster.agent("n2") != before, what="another agent")
    assert is_alive(pid)
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(long)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_a_killed_head_takes_over_what_runs_elsewhere(cluster: Cluster) -> None:
    long = cluster.head.submit(
        *sh("until [ -e go ]; do sleep 0.05; done; exit 5"), nodes=2, gpus=2, nodelist=["n2", "n3"]
    )
    short = cluster.on("n3", *sh("sleep 0.5; exit 6"))
    cluster.head.pid_of(long)
    cluster.head.pid_of(short)
    cluster.head.kill()
    cluster.head.start()
    (ended,) = cluster.head.wait(short)
    assert (ended["exit_code"], len(ended["runs"])) == (6, 1)
    assert cluster.head.state(long) == "RUNNING"
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(long)
    assert (ended["exit_code"], len(ended["runs"])) == (5, 1)


def test_a_node_that_cannot_be_reached_keeps_its_runs_and_gets_no_new_ones(cluster: Cluster) -> None:
    long = cluster.on("n2", *sh("until [ -e go ]; do sleep 0.05; done; exit 5"), gpus=2)
    pid = cluster.head.pid_of(long)
    cluster.cut("n2")
    wait_until(lambda: "No route to host" in cluster.nodes()["n2"]["why_not"], what="the reason of another attempt")
    assert cluster.nodes()["n2"]["why_not"].startswith("node n2 has not answered since ")
    assert cluster.head.state(long) == "RUNNING", "its GPUs stay booked, since it may well be alive"
    waiting = cluster.on("n2", "true")
    elsewhere = cluster.head.submit("true", gpus=2)
    cluster.head.wait(elsewhere)
    assert cluster.head.state(waiting) == "PENDING"
    (cluster.head.home / "go").touch()
    wait_until(lambda: not is_alive(pid), what="the job to end while nobody can hear of it")
    cluster.heal("n2")
    ended, after = cluster.head.wait(long, waiting)
    assert (ended["exit_code"], len(ended["runs"]), after["state"]) == (5, 1, "COMPLETED")


def test_the_board_follows_nodes_that_go_and_come_back(cluster: Cluster) -> None:
    board = BoardCopy()

    def look(is_so: Callable[[], bool], what: str) -> None:
        def is_there() -> bool:
            after = f"?after={board.version}&timeout_s=5" if board.version else ""
            board.apply(cluster.head.call("GET", f"/v1/board{after}"))
            return is_so()

        wait_until(is_there, what=what)

    def states() -> list[str]:
        return [node["state"] for node in board.lists["nodes"].values()]

    # Cut before its part began on n3, it would be requeued.
    begins = f"touch {cluster.root}/began.$NODE_RANK; exec sleep 600"
    gang = cluster.head.submit(
        "/bin/sh", "-c", begins, gpus=4, nodes=2, nodelist=["n2", "n3"], ntasks_per_node=1, cpus=0, stdout="/dev/null"
    )
    wait_until(lambda: len(list(cluster.root.glob("began.*"))) == 2, what="both of its parts to run")
    look(lambda: [row["where"] for row in board.rows()] == ["n2:0,1 n3:0,1"], "the gang to run")
    holders = {card["id"]: [job["id"] for job in card["jobs"]] for card in board.lists["cards"].values()}
    assert holders == {
        f"GPU-{node}-{index}": [gang] * (node != "n1") for node in ("n1", "n2", "n3") for index in (0, 1)
    }
    assert board.parts["totals"]["gpus_free"] == 2
    cluster.cut("n3")
    look(lambda: states() == ["up", "up", "unreachable"], "n3 to be unreachable")
    assert [row["id"] for row in board.rows()] == [gang]
    cluster.head.kill()
    cluster.head.start()
    look(lambda: states()[:2] == ["up", "up"] and states()[2] in ("down", "unreachable"), "the head to be back")
    cluster.heal("n3")
    look(lambda: states() == ["up", "up", "up"], "n3 to be back")
    assert [row["where"] for row in board.rows()] == ["n2:0,1 n3:0,1"]


def test_a_cancel_reaches_a_node_that_comes_back(cluster: Cluster) -> None:
    long = cluster.on("n3", "sleep", "600", gpus=1)
    pid = cluster.head.pid_of(long)
    cluster.cut("n3")
    cluster.head.call("POST", "/v1/jobs/cancel", {"ids": [long]})
    assert cluster.head.state(long) == "COMPLETING"
    assert is_alive(pid)
    cluster.heal("n3")
    (ended,) = cluster.head.wait(long)
    assert (ended["state"], is_alive(pid)) == ("CANCELLED", False)


def test_a_drained_node_gets_no_new_jobs(cluster: Cluster) -> None:
    cluster.head.call("POST", "/v1/drain", {"targets": ["n2"], "message": "fan"})
    job = cluster.on("n2", "true")
    wait_until(lambda: bool(cluster.head.job(job)["reason"]), what="a reason")
    assert "n2" in cluster.head.job(job)["reason_text"]
    cluster.head.call("POST", "/v1/undrain", {"targets": ["n2"]})
    cluster.head.wait(job)


def test_a_foreground_job_stays_on_the_daemons_node_unless_it_names_another(cluster: Cluster) -> None:
    job = cluster.head.submit("sleep", "600", interactive="pipes", gpus=2, keep=True)
    assert cluster.head.job(job)["nodelist"] == ["n1"]
    named = cluster.head.submit("sleep", "600", interactive="pipes", keep=True, nodelist=["n2", "n3"])
    assert cluster.head.job(named)["nodelist"] == ["n2", "n3"]
    of_slurm = cluster.head.submit("sleep", "600", interactive="pipes", keep=True, nodelist=["n3"], slurm=True)
    assert cluster.head.job(of_slurm)["nodelist"] == ["n3"]
    over_nodes = cluster.head.submit("sleep", "600", interactive="pipes", keep=True, nodes=2)
    assert cluster.head.job(over_nodes)["nodelist"] == []


def test_the_own_node_is_not_one_of_the_others(make_daemon: Callable[..., Daemon]) -> None:
    config = '[node]\nname = "n1"\n[cluster]\nnodes = ["n1"]\n'
    daemon = make_daemon(start=False, config=config)
    line = daemon.try_start()
    daemon.reap()
    assert "[cluster] nodes names n1, the daemon's own node" in line


def test_a_head_that_has_just_started_refuses_no_job_that_its_nodes_can_hold(cluster: Cluster) -> None:
    cluster.head.stop()
    cluster.head.start()
    # At once: the GPUs of the others have only just been read.
    job = cluster.head.submit("true", nodes=2, gpus=4, nodelist=["n2", "n3"])
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["node"]) == ("COMPLETED", "n[2-3]")


def test_a_job_for_a_node_that_was_never_reached_waits_for_it(cluster: Cluster) -> None:
    cluster.head.stop()
    (cluster.root / "cut-n3").touch()
    cluster.head.start()
    job = cluster.on("n3", "true", gpus=2, cpus=3, constraint="n3")
    gang = cluster.head.submit("true", nodes=3, gpus=6)
    with pytest.raises(GpuschedError, match="asked for 3 nodes not on node n3; there are 2"):
        cluster.head.submit("true", nodes=3, cpus=3, exclude=["n3"])
    found = cluster.head.job(job)
    assert (found["state"], found["reason"]) == ("PENDING", "ReqNodeNotAvail")
    assert "node n3 has not" in found["reason_text"]
    (cluster.root / "cut-n3").unlink()
    assert [one["state"] for one in cluster.head.wait(job, gang)] == ["COMPLETED", "COMPLETED"]


WARNS_FIRST = """#!{python}
import os, subprocess, sys
sys.stderr.write("Warning: Permanently added " + sys.argv[1] + " to the list of known hosts.\\n")
sys.stderr.flush()
if os.path.exists("{root}/away"):
    os.execlp("sleep", "sleep", "600")
subprocess.call(["{as_before}", sys.argv[1]])
sys.exit(255)
"""


def test_why_a_node_is_down_is_not_what_its_connection_wrote_when_it_began(cluster: Cluster) -> None:
    connect, started_by = cluster.root / "connect", cluster.root / "connect-as-before"
    as_before = connect.read_text()
    started_by.write_text(as_before)
    started_by.chmod(0o755)
    before = cluster.agent("n3")
    # It ends as ssh does when its other end is killed: with 255, and without a word about it.
    connect.write_text(WARNS_FIRST.format(python=sys.executable, root=cluster.root, as_before=started_by))
    try:
        cluster.kill_agent("n3")
        wait_until(lambda: cluster.agent("n3") != before, what="another agent")
        cluster.head.wait(cluster.on("n3", "true"))
        (cluster.root / "away").touch()
        cluster.kill_agent("n3")
        wait_until(lambda: "ended with" in (cluster.nodes()["n3"]["why_not"] or ""), what="n3 to be down")
        assert cluster.nodes()["n3"]["why_not"].endswith("connect to n3 ended with 255")
        assert cluster.head.call("GET", "/v1/cluster")["nodes"][2]["state"] == "down"
    finally:
        connect.write_text(as_before)
        (cluster.root / "away").unlink(missing_ok=True)
        # It gives up the attempt that sleeps.
        cluster.head.kill()
        cluster.head.start()


def test_a_node_may_come_back_with_more_or_fewer_gpus(cluster: Cluster) -> None:
    gpus = cluster.root / "n3" / "gpus.json"
    as_before = gpus.read_text()
    four = [{"vram": "24GiB", "uuid": f"GPU-n3-{index}"} for index in range(4)]
    try:
        for there in (four, four[:1]):
            cluster.cut("n3")
            gpus.write_text(json.dumps({"gpus": there}))
            (cluster.root / "cut-n3").unlink()
            job = cluster.on("n3", "true", gpus=1)
            cluster.head.wait(job)
            if len(there) == 4:
                cluster.head.wait(cluster.on("n3", "true", gpus=4))
        shown = {gpu["uuid"]: gpu["state"] for gpu in cluster.head.call("GET", "/v1/cluster")["gpus"]}
        assert [shown[gpu["uuid"]] for gpu in four] == ["idle", "lost", "lost", "lost"]
        with pytest.raises(GpuschedError, match="the largest this scheduler can give"):
            cluster.on("n3", "true", gpus=2)
        # While it is connected, and perhaps between a reading and a start: a job gets what is there, once.
        gpus.write_text(json.dumps({"gpus": [{"vram": "24GiB", "uuid": "GPU-n3-new"}]}))
        job = cluster.on("n3", *sh("echo $$ >> pids; exec sleep 600"), gpus=1)

        def is_on_new_gpu() -> bool:
            shown = cluster.head.job(job)
            return shown["state"] == "RUNNING" and [gpu["uuid"] for gpu in shown["gpus"]] == ["GPU-n3-new"]

        wait_until(is_on_new_gpu, what="the job on the GPU that is there")
        *earlier, now = cluster.head.job(job)["runs"]
        assert all("is not there any more" in run["reason_text"] or "lost" in run["reason_text"] for run in earlier)
        path = cluster.head.home / "pids"

        def alive() -> list[bool]:
            return [is_alive(int(pid)) for pid in path.read_text().split()] if path.exists() else []

        # One of a run on a GPU that went may be there before it.
        wait_until(lambda: alive()[-1:] == [True], what="its process")
        assert alive().count(True) == 1
        assert now["outcome"] is None
        cluster.head.call("POST", "/v1/jobs/cancel", {"ids": [job]})
        cluster.head.wait(job)
    finally:
        cluster.head.stop()
        gpus.write_text(as_before)
        cluster.head.start()
        cluster.all_up()
        # A loss that was seen drains a GPU until somebody says that it is well.
        cluster.head.call("POST", "/v1/undrain", {"targets": ["n3:0", "n3:1"]})


def test_a_new_agent_takes_over_from_one_that_hangs(cluster: Cluster) -> None:
    job = cluster.on("n2", *sh("until [ -e go ]; do sleep 0.05; done; exit 4"))
    cluster.head.pid_of(job)
    hanging = cluster.agent("n2")
    os.kill(hanging, signal.SIGSTOP)
    # As the head starts one once it has given the connection up.
    argv = [cluster.root / "connect", "n2"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as another:
        wait_until(lambda: not is_alive(hanging), what="the one that hangs to be gone")
        another.communicate(timeout=60)
    cluster.all_up()
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], len(ended["runs"])) == (4, 1)


def test_a_node_that_was_never_reached_is_shown_with_the_reason(make_daemon: Callable[..., Daemon]) -> None:
    connect = "sh -c 'echo Host key verification failed. >&2; exit 255' {node}"
    config = f'[node]\nname = "n1"\n[cluster]\nnodes = ["n2"]\nconnect = "{connect}"\n'
    daemon = make_daemon(config=config)

    def found() -> dict[str, Any]:
        return {node["name"]: node for node in daemon.call("GET", "/v1/cluster")["nodes"]}["n2"]

    wait_until(lambda: "Host key verification failed." in found()["why_not"], what="the reason")
    assert found()["state"] == "down"
    daemon.wait(daemon.submit("true"))


def test_a_restarted_head_remembers_a_node_that_it_cannot_reach(cluster: Cluster) -> None:
    long = cluster.on("n3", *sh("until [ -e go ]; do sleep 0.05; done; exit 5"), gpus=1)
    cluster.head.pid_of(long)
    cluster.cut("n3")
    cluster.head.kill()
    cluster.head.start()
    node = cluster.nodes()["n3"]
    assert (node["state"], node["cpus"], node["is_busy"]) == ("down", 4, True)
    gpus = {gpu["uuid"]: gpu for gpu in cluster.head.call("GET", "/v1/cluster")["gpus"]}
    held = cluster.head.job(long)["gpus"]
    assert {uuid for uuid in gpus if uuid.startswith("GPU-n3")} == {"GPU-n3-0", "GPU-n3-1"}
    assert [gpu["index"] for gpu in held] == [0]
    assert cluster.head.job(long)["reason"] == "NodeUnreachable"
    waiting = cluster.on("n3", "true", gpus=1)
    with pytest.raises(GpuschedError, match="asked for 5 GPUs"):
        cluster.on("n3", "true", gpus=5)
    wait_until(lambda: bool(cluster.head.job(waiting)["reason_text"]), what="a reason")
    assert "node n3 has not " in cluster.head.job(waiting)["reason_text"]
    (cluster.head.home / "go").touch()
    cluster.heal("n3")
    ended, after = cluster.head.wait(long, waiting)
    assert (ended["exit_code"], len(ended["runs"]), after["state"]) == (5, 1, "COMPLETED")
