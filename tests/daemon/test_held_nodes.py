"""The other nodes of batch and foreground jobs, held by real supervisors: what may enter them, and how that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, sh
from support import is_alive, wait_until

SAVES = "trap 'touch told; until [ -e go ]; do sleep 0.05; done; echo saved; exit 0' TERM; echo up; "
FOREVER = "while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("held"), ("n2",))
    yield made
    made.head.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.reset()
    for name in ("told", "go"):
        (started.head.home / name).unlink(missing_ok=True)


def batch(cluster: Cluster, text: str, **spec: Any) -> str:
    return cluster.head.submit(*sh(text), **{"nodes": 2, "gpus": 2, "slurm": True, **spec})


def enter(cluster: Cluster, job: str, text: str, node: str = "n2") -> subprocess.Popen[str]:
    return cluster.start("grun", "--job", job, "-w", node, *sh(text), cwd=cluster.head.home)


def holder(cluster: Cluster, job: str) -> int:
    """The supervisor of the job's part on the second node, once all parts have started."""
    cluster.head.pid_of(job)
    (record,) = (cluster.root / "n2").rglob(f"{job}.1.record")
    return int(record.read_bytes().split()[1])


def await_end(held: int) -> None:
    """A supervisor waits a moment for another run before it ends."""
    wait_until(lambda: not is_alive(held), what="the end of the holder")


def slurm(cluster: Cluster, name: str, *words: str) -> list[str]:
    code = f"import sys; sys.argv[0] = {name!r}; from gpusched.addons.slurm.{name} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *words]


def first_line(visit: subprocess.Popen[str]) -> str:
    assert visit.stdout is not None
    return visit.stdout.readline().strip()


def cancel(cluster: Cluster, job: str) -> None:
    cluster.head.call("POST", "/v1/jobs/cancel", {"ids": [job]})


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (7, "FAILED")])
def test_the_second_node_is_held_while_the_script_runs(cluster: Cluster, code: int, state: str) -> None:
    job = batch(cluster, f"until [ -e go ]; do sleep 0.05; done; exit {code}")
    held = holder(cluster, job)
    assert is_alive(held)
    text = "echo $SLURM_NODEID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_JOB_NODELIST $GPUSCHED_JOB_ID; exit 3"
    for rank, node in enumerate(("n1", "n2")):
        visit = enter(cluster, job, text, node)
        assert visit.communicate(timeout=60)[0] == f"{rank} {node} 0 n[1-2] {job}\n"
        assert visit.returncode == 3
    assert is_alive(held), "no end of a command in it is its own"
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"]) == (state, code)
    await_end(held)


def test_commands_on_a_held_node_end_with_the_script_and_count(cluster: Cluster) -> None:
    job = batch(cluster, "until [ -e go ]; do sleep 0.05; done")
    cluster.head.pid_of(job)
    visit = enter(
        cluster, job, f"trap '' TERM HUP; echo $$; i=0; while [ $i -lt 3000000 ]; do i=$((i+1)); done; {FOREVER}"
    )
    pid = int(first_line(visit))
    wait_until(lambda: cpu_s(pid) > 0.3, what="it to compute")
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"], is_alive(pid)) == ("COMPLETED", 0, False)
    assert ended["runs"][0]["cpu_s"] > 0.3
    visit.communicate(timeout=60)


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("how", ["cancel", "limit"])
def test_what_runs_on_a_held_node_is_told_of_a_stop_and_has_the_whole_grace(cluster: Cluster, how: str) -> None:
    limit_s = 6 if how == "limit" else None
    job = batch(cluster, "exec sleep 600", grace_s=300, time_limit_s=limit_s)
    held = holder(cluster, job)
    visit = enter(cluster, job, SAVES + FOREVER)
    assert first_line(visit) == "up"
    if how == "cancel":
        cancel(cluster, job)
    wait_until((cluster.head.home / "told").exists, what="it to be told")
    # The script has ended at once; the part beside it does not hang up what still saves its work.
    (orders,) = (cluster.root / "n2").rglob(f"{job}.1.order")
    wait_until(lambda: "job_ended" in orders.read_text(), what="the end on the first node to be known")
    assert (cluster.head.state(job), is_alive(held)) == ("COMPLETING", True)
    (cluster.head.home / "go").touch()
    assert visit.communicate(timeout=60)[0] == "saved\n"
    (ended,) = cluster.head.wait(job)
    assert ended["state"] == ("CANCELLED" if how == "cancel" else "TIMEOUT")
    await_end(held)


def test_a_cancel_does_not_wait_for_a_node_where_nothing_runs(cluster: Cluster) -> None:
    job = batch(cluster, "exec sleep 600", grace_s=600)
    held = holder(cluster, job)
    cancel(cluster, job)
    (ended,) = cluster.head.wait(job)
    assert ended["state"] == "CANCELLED"
    await_end(held)


def test_a_suspended_job_stands_still_on_all_its_nodes(cluster: Cluster) -> None:
    job = batch(cluster, "exec sleep 600")
    cluster.head.pid_of(job)
    visit = enter(cluster, job, f"trap '' TSTP; echo $$; {FOREVER}")
    pid = int(first_line(visit))
    cluster.head.call("POST", "/v1/jobs/suspend", {"ids": [job]})
    wait_until(lambda: state_of(pid) == "T", what="it to be stopped")
    cluster.head.call("POST", "/v1/jobs/resume", {"ids": [job]})
    wait_until(lambda: state_of(pid) in "SR", what="it to continue")
    assert cluster.head.state(job) == "RUNNING"
    cancel(cluster, job)
    cluster.head.wait(job)
    visit.communicate(timeout=60)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]


@pytest.mark.parametrize("killed", ["head", "agent", "both"])
def test_neither_a_killed_head_nor_a_killed_agent_costs_anything(cluster: Cluster, killed: str) -> None:
    job = batch(cluster, "until [ -e go ]; do sleep 0.05; done; exit 7")
    held = holder(cluster, job)
    if killed != "head":
        before = cluster.agent("n2")
        cluster.kill_agent("n2")
    if killed != "agent":
        cluster.head.kill()
        if killed == "both":
            # The script ends while nobody is there to end the holder.
            (cluster.head.home / "go").touch()
        cluster.head.start()
    if killed != "head":
        wait_until(lambda: cluster.agent("n2") != before, what="another agent")
    cluster.all_up()
    assert killed == "both" or is_alive(held)
    (cluster.head.home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"], len(ended["runs"])) == ("FAILED", 7, 1)
    await_end(held)


@pytest.mark.parametrize("requeue", [True, False])
def test_a_killed_holder_is_the_end_of_its_run(cluster: Cluster, requeue: bool) -> None:
    job = batch(cluster, "echo $$ >> pids; exec sleep 600", requeue=requeue)
    held = holder(cluster, job)
    visit = enter(cluster, job, f"echo $$; {FOREVER}")
    pid = int(first_line(visit))
    os.kill(held, signal.SIGKILL)
    wait_until(lambda: cluster.head.job(job)["runs"][0]["outcome"] == "NODE_FAIL", what="the run to end")
    pids = cluster.head.home / "pids"
    assert not is_alive(int(pids.read_text().split()[0])), "the script is ended as well"
    wait_until(lambda: not is_alive(pid), what="what ran there to end")
    visit.communicate(timeout=60)
    if requeue:
        wait_until(lambda: len(cluster.head.job(job)["runs"]) == 2, what="another run")
        cancel(cluster, job)
    (ended,) = cluster.head.wait(job)
    assert ended["state"] == ("CANCELLED" if requeue else "NODE_FAIL")
    assert "on n2: " in ended["runs"][0]["reason_text"]
    pids.unlink()


def test_a_node_that_does_not_answer_is_released_when_it_does(cluster: Cluster) -> None:
    job = batch(cluster, "until [ -e go ]; do sleep 0.05; done; exit 7")
    held = holder(cluster, job)
    cluster.cut("n2")
    (cluster.head.home / "go").touch()
    wait_until(lambda: cluster.head.state(job) == "COMPLETING", what="the end on the first node")
    assert is_alive(held)
    cluster.heal("n2")
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 7)
    await_end(held)


def test_a_holder_leaves_the_files_of_the_job_alone(cluster: Cluster) -> None:
    output = cluster.head.home / "output"
    output.write_text("kept\n")
    words = {"stdout": str(output), "open_mode": "append", "prolog": "prolog", "epilog": "epilog"}
    for name in ("prolog", "epilog"):
        (cluster.head.home / name).write_text(f"#!/bin/sh\necho {name} on $SLURMD_NODENAME\n")
        (cluster.head.home / name).chmod(0o755)
    cluster.head.wait(batch(cluster, "echo script", **words))
    assert output.read_text() == "kept\nprolog on n1\nscript\nepilog on n1\n"
    assert not list(cluster.head.home.glob("output.*"))


@pytest.mark.parametrize("command", ["grun", "salloc"])
def test_a_foreground_job_over_other_nodes_survives_the_head(cluster: Cluster, command: str) -> None:
    text = "read word; echo $word $SLURM_JOB_NODELIST; read word; echo $word; exit 5"
    words = ["-N", "2", "sh", "-c", text]
    argv = slurm(cluster, command, *words) if command == "salloc" else cluster.argv(command, *words)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with_head = cluster.head.submit("sleep", "600", cpus=4)
    cluster.head.pid_of(with_head)
    client = subprocess.Popen(argv, env=cluster.head.env, text=True, **pipes)
    assert client.stdin is not None
    cancel(cluster, with_head)
    print("first", file=client.stdin, flush=True)
    assert first_line(client) == "first n[1-2]"
    cluster.head.kill()
    cluster.head.start()
    cluster.all_up()
    print("second", file=client.stdin, flush=True)
    output, said = client.communicate(timeout=60)
    assert (output, client.returncode) == ("second\n", 5), said


def test_salloc_without_a_shell_holds_all_nodes(cluster: Cluster) -> None:
    said = subprocess.run(
        slurm(cluster, "salloc", "-N2", "--no-shell"), env=cluster.head.env, text=True, capture_output=True, check=True
    ).stderr
    job = said.split()[-1]
    assert said == f"salloc: Granted job allocation {job}\n"
    held = holder(cluster, job)
    assert enter(cluster, job, "echo $SLURM_NODEID").communicate(timeout=60)[0] == "1\n"
    cancel(cluster, job)
    (ended,) = cluster.head.wait(job)
    assert ended["state"] == "CANCELLED"
    await_end(held)
