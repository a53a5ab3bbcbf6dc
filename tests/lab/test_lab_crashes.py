"""Machines that lose their link, their power or any process of the scheduler: no job is lost, and none runs twice."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from lab_cluster import Cluster
from support import wait_until

LONG = "until [ -e go ]; do sleep 0.05; done; exit 5"
ONCE = "echo $SLURMD_NODENAME >> ran; " + LONG


def let_go(cluster: Cluster) -> None:
    (cluster.head.home / "go").touch()


def ended_once(cluster: Cluster, *jobs: str, exit_code: int = 5) -> None:
    """All of these end with this code, in their first run."""
    for job in cluster.head.wait(*jobs, timeout_s=150.0):
        assert (job["exit_code"], len(job["runs"])) == (exit_code, 1), job


def test_jobs_run_on_every_machine(cluster: Cluster) -> None:
    jobs = [cluster.on(name, "hostname; exit 7") for name in cluster.names]
    ended = cluster.head.wait(*jobs)
    assert [job["exit_code"] for job in ended] == [7, 7, 7]
    assert [cluster.head.output(job).strip() for job in jobs] == cluster.names


def test_commands_are_typed_on_the_head(cluster: Cluster) -> None:
    done = cluster.command("gsub", "--wait", "-w", "n2", "--", "sh", "-c", "hostname; exit 3", check=False)
    assert done.returncode == 3
    assert "n3" in cluster.command("ginfo").stdout


MEET = """
import os, socket
address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["NODE_RANK"]
if rank == "0":
    server = socket.create_server(("", port))
    print("met", server.accept()[0].recv(99).decode())
else:
    for _ in range(600):
        try:
            with socket.create_connection((address, port), 10) as stream:
                stream.sendall(socket.gethostname().encode())
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
    else:
        raise SystemExit(f"nobody at {address}:{port}")
"""


def test_the_nodes_of_a_gang_meet_at_the_first_one(cluster: Cluster) -> None:
    job = cluster.head.submit(sys.executable, "-c", MEET, nodes=2, gpus=4, nodelist=["n2", "n3"])
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["node"]) == ("COMPLETED", "n[2-3]")
    assert cluster.head.output(job) == "met n3\n"


# --- links ---------------------------------------------------------------------------------------------------


def test_a_cut_shorter_than_detection_goes_unnoticed(cluster: Cluster) -> None:
    job = cluster.on("n2", LONG, gpus=2)
    pid = cluster.head.pid_of(job)
    cluster.lab["n2"].cut()
    began = time.monotonic()
    while time.monotonic() - began < 1.0:
        assert cluster.nodes()["n2"]["state"] == "up"
    cluster.lab["n2"].heal()
    let_go(cluster)
    ended_once(cluster, job)
    assert not cluster.lab["n2"].is_alive(pid)


@pytest.mark.parametrize("cut_s", [0.0, pytest.param(45.0, marks=pytest.mark.nightly)])
def test_a_cut_longer_than_detection_keeps_runs_and_their_gpus(cluster: Cluster, cut_s: float) -> None:
    """Args: cut_s: how long the cut goes on once it is noticed; above 30 s the connection is given up as well."""
    long, short = cluster.on("n2", LONG, gpus=2), cluster.on("n2", "sleep 0.5; exit 6")
    gang = cluster.head.submit("sh", "-c", LONG, nodes=2, gpus=0, nodelist=["n2", "n3"])
    pid = cluster.head.pid_of(long)
    cluster.head.pid_of(gang)
    cluster.head.wait_state(short, "RUNNING", "FAILED")
    cluster.lab["n2"].cut()
    cluster.wait_node("n2", "down")
    waiting = cluster.on("n2", "true", gpus=1)
    cluster.head.wait(cluster.on("n3", "true", gpus=2))
    time.sleep(cut_s)
    assert cluster.lab["n2"].is_alive(pid), "it needs nobody to go on"
    assert {gpu["state"] for gpu in cluster.gpus("n2")} & {"idle", "drained"} == set(), "its GPUs stay booked"
    assert [cluster.head.state(job) for job in (long, gang, waiting)] == ["RUNNING", "RUNNING", "PENDING"]
    cluster.lab["n2"].heal()
    cluster.wait_node("n2", "up")
    let_go(cluster)
    ended_once(cluster, long, gang)
    ended_once(cluster, short, exit_code=6)
    cluster.head.wait(waiting)


def test_ends_and_cancels_during_a_cut_arrive_after_it(cluster: Cluster) -> None:
    ends, cancelled = cluster.on("n3", LONG, gpus=1), cluster.on("n3", "exec sleep 600", gpus=1)
    gang = cluster.head.submit(
        "sh", "-c", f"[ $NODE_RANK = 1 ] || exec sleep 600; {LONG}", nodes=2, nodelist=["n2", "n3"]
    )
    pids = [cluster.head.pid_of(job) for job in (ends, cancelled, gang)]
    cluster.lab["n3"].cut()
    cluster.wait_node("n3", "down")
    cluster.head.call("POST", "/v1/jobs/cancel", {"ids": [cancelled]})
    let_go(cluster)
    wait_until(lambda: not cluster.lab["n3"].is_alive(pids[0]), what="the job to end unheard")
    assert cluster.head.state(cancelled) == "COMPLETING"
    assert cluster.lab["n3"].is_alive(pids[1])
    cluster.lab["n3"].heal()
    ended_once(cluster, ends, gang)
    (ended,) = cluster.head.wait(cancelled)
    assert (ended["state"], cluster.lab["n3"].is_alive(pids[1])) == ("CANCELLED", False)
    assert not cluster.lab["n2"].is_alive(pids[2]), "the first bad rank ends the others"


def test_users_see_which_jobs_are_out_of_reach(cluster: Cluster) -> None:
    job = cluster.on("n2", LONG, gpus=1)
    gang = cluster.head.submit("sh", "-c", LONG, nodes=2, nodelist=["n2", "n3"])
    other = cluster.on("n3", LONG)
    for one in (job, gang, other):
        cluster.head.pid_of(one)
    cluster.lab["n2"].cut()
    cluster.wait_node("n2", "down")
    found = {one["id"]: one for one in cluster.head.call("GET", "/v1/jobs")["jobs"]}
    assert [found[one]["reason"] for one in (job, gang, other)] == ["NodeUnreachable", "NodeUnreachable", None]
    table = {line.split()[0]: line for line in cluster.command("gq").stdout.splitlines()[1:] if line}
    assert "n2:0 (NodeUnreachable)" in table[job]
    assert "n[2-3] (NodeUnreachable)" in table[gang]
    assert "NodeUnreachable" not in table[other]
    for text in (cluster.command("gq", "--why", job).stdout, cluster.command("gshow", job).stdout):
        assert "RUNNING (NodeUnreachable): node n2 has not answered since " in text
        assert "the job may be running there, so its GPUs stay booked" in text
    why = cluster.head.call("GET", f"/v1/jobs/{gang}/why")["why"]
    assert (why["reason"], why["facts"]["unreachable"]) == ("NodeUnreachable", ["n2"])
    wait_until(lambda: "has not answered" in cluster.command("gshow", job).stdout.split("RUNNING", 1)[1], what="a note")
    cluster.lab["n2"].heal()
    cluster.wait_node("n2", "up")
    wait_until(lambda: cluster.head.job(job)["reason"] is None, what="the job to be within reach")
    let_go(cluster)
    ended_once(cluster, job, gang, other)


# --- power ---------------------------------------------------------------------------------------------------


def test_runs_of_a_node_without_power_are_requeued_only_once_that_is_certain(cluster: Cluster) -> None:
    again = cluster.on("n2", f"[ -e go ] || echo ran >> ran; {LONG}", gpus=2)
    never = cluster.on("n2", "exec sleep 600", requeue=False)
    cluster.head.pid_of(again)
    cluster.head.pid_of(never)
    cluster.lab["n2"].power_off()
    cluster.wait_node("n2", "down")
    # It might as well be a cut: nothing shows that they are gone.
    assert [cluster.head.state(job) for job in (again, never)] == ["RUNNING", "RUNNING"]
    cluster.lab["n2"].power_on()
    (lost,) = cluster.head.wait(never, timeout_s=150)
    assert (lost["state"], len(lost["runs"])) == ("NODE_FAIL", 1)
    wait_until(lambda: len(cluster.head.job(again)["runs"]) == 2, 150, what="the job to run again")
    let_go(cluster)
    (ended,) = cluster.head.wait(again)
    assert (ended["exit_code"], len(ended["runs"]), ended["runs"][0]["exit_code"]) == (5, 2, None), ended["runs"]


def test_a_head_that_loses_its_power_finds_all_runs_of_the_others(cluster: Cluster) -> None:
    own = cluster.on("n1", "exec sleep 600", requeue=False)
    other = cluster.on("n2", LONG, gpus=1)
    short = cluster.on("n3", "sleep 0.5; exit 6")
    for job in (own, other, short):
        cluster.head.pid_of(job)
    cluster.lab["n1"].power_off()
    cluster.head.reap()
    cluster.lab["n1"].power_on()
    cluster.head.start()
    (lost,) = cluster.head.wait(own)
    assert lost["state"] == "NODE_FAIL"
    ended_once(cluster, short, exit_code=6)
    let_go(cluster)
    ended_once(cluster, other)


# --- processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_agent_may_end_in_any_way_without_costing_a_run(cluster: Cluster, number: int) -> None:
    job = cluster.on("n2", LONG, gpus=1)
    pid = cluster.head.pid_of(job)
    for _ in range(2):
        before = cluster.agents("n2")
        assert before
        cluster.lab["n2"].kill(*before, number=number)
        wait_until(lambda before=before: set(cluster.agents("n2")) - set(before), what="another agent")
    assert cluster.lab["n2"].is_alive(pid)
    let_go(cluster)
    ended_once(cluster, job)


@pytest.mark.parametrize("down_s", [1.0, pytest.param(90.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.nightly), "upgraded"])
def test_a_head_that_was_down_hears_of_everything_that_ended_meanwhile(
    cluster: Cluster, down_s: float, how: str
) -> None:
    short = [cluster.on(name, f"sleep 0.{tenths}; exit 6") for name in ("n2", "n3") for tenths in range(1, 4)]
    long = cluster.on("n2", LONG, gpus=2)
    gang = cluster.head.submit("sh", "-c", LONG, nodes=2, gpus=2, nodelist=["n2", "n3"], cpus=0)
    cluster.head.pid_of(long)
    for job in short:
        cluster.head.pid_of(job)
    cluster.head.kill() if how == "killed" else cluster.head.stop()
    time.sleep(down_s)
    cluster.head.start()
    ended_once(cluster, *short, exit_code=6)
    assert cluster.head.state(long) == "RUNNING"
    let_go(cluster)
    ended_once(cluster, long, gang)


def test_supervisors_that_are_killed_leave_nothing_behind(cluster: Cluster) -> None:
    job = cluster.on("n2", "sleep 600 & exec sleep 600", requeue=False)
    pid = cluster.head.pid_of(job)
    run = cluster.head.job(job)["runs"][0]
    assert run["state"] == "RUNNING"
    node = cluster.lab["n2"]
    supervisor = int(Path(f"/proc/{node.pid_outside(pid)}/stat").read_text().rpartition(")")[2].split()[1])
    (inside,) = [one for one in node.pids() if node.pid_outside(one) == supervisor]
    node.kill(inside)
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], node.is_alive(pid), node.pids("sleep 600")) == ("NODE_FAIL", False, [])


@pytest.mark.nightly
def test_a_day_of_cuts_kills_and_power_offs_loses_no_job_and_doubles_none(cluster: Cluster) -> None:
    """Every job writes its name when it starts and its first run alone may end it, unless its machine lost power."""
    import random

    chance = random.Random(17)
    jobs = []
    for step in range(30):
        jobs += [cluster.on(name, f"echo {step} >> ran.$GPUSCHED_JOB_ID; sleep 0.3; exit 4") for name in ("n2", "n3")]
        node = cluster.lab[chance.choice(["n2", "n3"])]
        event = chance.choice(["cut", "heal", "agent", "head", "nothing", "nothing"])
        if event in ("cut", "heal"):
            getattr(node, event)()
        elif event == "agent":
            node.kill(*cluster.agents(node.name))
        elif event == "head":
            cluster.head.kill()
            cluster.head.start()
        time.sleep(chance.random())
    for name in ("n2", "n3"):
        cluster.lab[name].heal()
    for job in cluster.head.wait(*jobs, timeout_s=240.0):
        assert (job["exit_code"], job["state"]) == (4, "FAILED")
        starts = (cluster.head.home / f"ran.{job['id']}").read_text().split()
        assert len(starts) == 1, f"job {job['id']} ran {len(starts)} times"
