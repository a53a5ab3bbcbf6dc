"""Ranks on several nodes: a real daemon with two agents, what each rank gets, how they end, and what they print."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from clusters import Cluster, sh
from support import PORTS_AT_ONCE, claim_ports, is_alive, wait_until

import gpusched
from gpusched.errors import NotFound, Refused

TORCH_PYTHON = os.environ.get("GPUSCHED_TEST_TORCH_PYTHON", sys.executable)
"""An interpreter with torch, whose CPU build is enough."""
ALL_REDUCE = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(total)
place = ("rank", dist.get_rank(), "of", dist.get_world_size(), "local", os.environ["LOCAL_RANK"])
print(*place, "sum", int(total), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def first_port() -> int:
    """Where ranks meet: by default another cluster, with a job of the same number, would meet the port taken below."""
    return claim_ports(range(16))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, first_port: int) -> Iterator[Cluster]:
    ports = f'master_ports = "{first_port}-{first_port + PORTS_AT_ONCE - 1}"\n'
    made = Cluster(tmp_path_factory.mktemp("ranks"), address="127.0.0.1", settings=ports)
    yield made
    made.head.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    for node in ("n2", "n3"):
        started.heal(node)
    jobs = [job["id"] for job in started.head.call("GET", "/v1/jobs")["jobs"]]
    if jobs:
        started.head.call("POST", "/v1/jobs/cancel", {"ids": jobs})
        started.head.wait(*jobs)
    (started.head.home / "go").unlink(missing_ok=True)


def typed(cluster: Cluster, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.typed(command, *words, env=cluster.head.env)


def story(cluster: Cluster, job: str) -> str:
    return typed(cluster, "gshow", job).stdout


def of_ranks(cluster: Cluster, text: str, **spec: Any) -> str:
    return cluster.head.submit(*sh(text), **spec)


def test_ranks_are_counted_over_all_nodes(cluster: Cluster) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK NNODES SLURM_PROCID SLURM_GTIDS"
    names += " SLURM_STEP_TASKS_PER_NODE MASTER_ADDR CUDA_VISIBLE_DEVICES"
    text = "echo $MASTER_PORT " + " ".join(f"${name}" for name in names.split())
    job = of_ranks(cluster, text, nodes=2, gpus=4, ntasks_per_node=2)
    (ended,) = cluster.head.wait(job)
    assert ended["state"] == "COMPLETED"
    first = Path(ended["stdout_path"])
    lines = [sorted(path.read_text().splitlines()) for path in (first, Path(f"{first}.n1"))]
    ports = {line.split(" ")[0] for node in lines for line in node}
    assert len(ports) == 1
    rest = [[line.split(" ", 1)[1] for line in node] for node in lines]
    assert rest == [
        [
            f"{2 * node + local} {local} 4 2 {node} {node} 2 {2 * node + local} {ids} 2(x2) 127.0.0.1 0,1"
            for local in (0, 1)
        ]
        for node, ids in enumerate(["0,1", "2,3"])
    ]


def test_ranks_follow_the_gpus_that_each_node_gives(cluster: Cluster) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK NNODES SLURM_TASKS_PER_NODE SLURM_JOB_CPUS_PER_NODE"
    text = "echo " + " ".join(f"${name}" for name in names.split()) + " $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"
    blocker = cluster.head.submit("sleep", "600", gpus=1, nodelist=["n1"])
    job = of_ranks(cluster, text, nodes=1, nodes_max=2, ntasks=3, gpus_per_task=1, cpus=1.0)
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["nodes"], ended["total_gpus"]) == ("COMPLETED", 2, 3)
    first = Path(ended["stdout_path"])
    lines = [line for path in (first, Path(f"{first}.n1")) for line in path.read_text().splitlines()]
    sizes = {"n[1-2]": [1, 2], "n[1,3]": [1, 2], "n[2-3]": [2, 1]}[ended["node"]]
    assert sum(sizes) == len(lines)
    counts = ",".join(map(str, sizes))
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    for rank, (node, local) in enumerate(places):
        (line,) = [one for one in lines if one.startswith(f"{rank} ")]
        words = line.split(" ")
        size = str(sizes[node])
        assert words[1:9] == [str(local), "3", size, str(node), "2", counts, counts, size]
        assert len(words[9].split(",")) == 1
    assert "needs" not in typed(cluster, "gq", "--why", job).stdout
    assert f"{ended['node']}" in story(cluster, job)
    cluster.head.call("POST", "/v1/jobs/cancel", {"ids": [blocker]})
    cluster.head.wait(blocker)
    said = typed(cluster, "gsub", "--dry-run", "-N", "1-2", "-g", "3", "--", "true").stdout
    assert said.startswith("would start now on n1, GPU 0,1; n2, GPU 0")
    refused = typed(cluster, "gsub", "-N", "1-3", "-g", "7", "--", "true")
    assert "asked for 7 GPUs on 1 to 3 nodes; the largest that fits is -N 3 -g 6" in refused.stderr
    shown = typed(cluster, "gsub", "-H", "-N", "1-2", "-g", "3", "--parsable", "--", "true")
    held = shown.stdout.strip()
    assert "1 to 2 nodes, as few as have room when it starts" in story(cluster, held)
    lines = typed(cluster, "slurm.scontrol", "show", "job", held).stdout
    assert "NumNodes=1-2 NumCPUs=1 NumTasks=1 " in lines
    assert "TresPerJob=gres:gpu:3" in lines
    assert typed(cluster, "slurm.squeue", "-h", "-j", held, "-o", "%D %b").stdout == "1 N/A\n"
    was = typed(cluster, "slurm.scontrol", "show", "job", job).stdout
    assert "NumNodes=2 NumCPUs=3 NumTasks=3 CPUs/Task=1 " in was


@pytest.mark.parametrize(("rank", "node"), [(0, "n1"), (3, "n2")])
def test_the_first_bad_rank_ends_all_nodes_and_is_named(cluster: Cluster, rank: int, node: str) -> None:
    await_all = "while [ $(ls pid.* | wc -l) -lt 4 ]; do sleep 0.05; done"
    text = f"echo $$ > pid.$RANK; {await_all}; [ $RANK = {rank} ] && exit 5; exec sleep 600"
    job = of_ranks(cluster, text, nodes=2, gpus=2, ntasks_per_node=2)
    (ended,) = cluster.head.wait(job)
    pids = [cluster.head.home / f"pid.{one}" for one in range(4)]
    assert not any(is_alive(int(path.read_text())) for path in pids)
    for path in pids:
        path.unlink()
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 5)
    assert ended["reason_text"] == f"exit code 5 of rank {rank} on {node}"
    assert f"FAILED: exit code 5 of rank {rank} on {node}" in story(cluster, job)
    assert f"exit code 5 of rank {rank} on {node}" in typed(cluster, "gq", "--why", job).stdout


def test_other_nodes_are_told_before_the_grace_of_the_first_is_over(cluster: Cluster) -> None:
    text = """trap 'touch told.$RANK' TERM; touch up.$RANK
    while [ $(ls up.* | wc -l) -lt 4 ]; do sleep 0.05; done
    [ $RANK = 1 ] && exit 5
    until [ -e go ]; do sleep 0.05; done"""
    job = of_ranks(cluster, text, nodes=2, gpus=2, ntasks_per_node=2, grace_s=300)
    home = cluster.head.home
    wait_until(lambda: len(list(home.glob("told.*"))) == 3, what="the ranks of both nodes to be told")
    assert cluster.head.state(job) == "COMPLETING"
    (home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], ended["reason_text"]) == (5, "exit code 5 of rank 1 on n1")


def test_a_job_without_ranks_names_the_node_that_failed(cluster: Cluster) -> None:
    job = of_ranks(cluster, "[ $NODE_RANK = 1 ] && exit 3; exec sleep 600", nodes=2, gpus=2)
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], ended["reason_text"]) == (3, "exit code 3 on n2")


def test_ranks_survive_the_death_of_head_and_agent(cluster: Cluster) -> None:
    text = "echo up >> alive.$RANK; until [ -e go ]; do sleep 0.05; done; [ $RANK = 2 ] && exit 6; exit 0"
    job = of_ranks(cluster, text, nodes=2, gpus=2, ntasks_per_node=2)
    home = cluster.head.home
    wait_until(lambda: len(list(home.glob("alive.*"))) == 4, what="all ranks to run")
    cluster.head.pid_of(job)
    before = cluster.agent("n2")
    cluster.kill_agent("n2")
    wait_until(lambda: cluster.agent("n2") != before, what="another agent")
    cluster.head.kill()
    cluster.head.start()
    cluster.all_up()
    (home / "go").touch()
    (ended,) = cluster.head.wait(job)
    assert (ended["exit_code"], ended["reason_text"]) == (6, "exit code 6 of rank 2 on n2")
    assert [path.read_text() for path in home.glob("alive.*")] == ["up\n"] * 4, "each once"


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_killed_supervisor_leaves_no_rank_behind_on_any_node(cluster: Cluster, node: str) -> None:
    job = of_ranks(
        cluster, "echo $$ $PPID > pids.$RANK; exec sleep 600", nodes=2, gpus=2, ntasks_per_node=2, requeue=False
    )
    home = cluster.head.home
    files = [home / f"pids.{rank}" for rank in range(4)]
    wait_until(lambda: all(path.exists() and path.read_text().strip() for path in files), what="all ranks to run")
    cluster.head.pid_of(job)
    words = [path.read_text().split() for path in files]
    os.kill(int(words[0 if node == "n1" else 2][1]), signal.SIGKILL)
    (ended,) = cluster.head.wait(job)
    assert ended["state"] == "NODE_FAIL"
    assert not any(is_alive(int(pid)) for pid, _ in words)
    for path in files:
        path.unlink()


def test_a_port_that_another_program_has_is_found_before_anything_starts(cluster: Cluster, first_port: int) -> None:
    with socket.socket() as taken:
        number = int(of_ranks(cluster, "true")) + 1
        # A job's first run begins to look at the port of its number.
        port = first_port + number % PORTS_AT_ONCE
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("0.0.0.0", port))
        taken.listen()
        job = of_ranks(
            cluster, "echo $MASTER_PORT; touch ran.$NODE_RANK.$MASTER_PORT", nodes=2, gpus=2, open_mode="append"
        )
        assert int(job) == number
        (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["failures"]) == ("COMPLETED", 0)
    assert len(ended["runs"]) > 1
    ran = [path.name.split(".") for path in cluster.head.home.glob("ran.*")]
    assert sorted(node for _, node, _ in ran) == ["0", "1"], "each once"
    assert len({port for _, _, port in ran} - {str(port)}) == 1
    assert "in use by another program" in story(cluster, job)


def test_glogs_labels_the_lines_of_each_node(cluster: Cluster) -> None:
    job = of_ranks(cluster, "echo node $NODE_RANK", nodes=3, gpus=3)
    cluster.head.wait(job)
    assert typed(cluster, "glogs", job).stdout == "[n1] node 0\n[n2] node 1\n[n3] node 2\n"
    assert typed(cluster, "glogs", "--rank", "1", job).stdout == "node 1\n"
    assert typed(cluster, "glogs", "--no-prefix", job).stdout == "node 0\nnode 1\nnode 2\n"
    wrong = typed(cluster, "glogs", "--rank", "3", job)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert f"job {job} has no rank 3" in wrong.stderr
    assert "its ranks are 0 to 2" in wrong.stderr


def test_glogs_labels_the_lines_of_each_rank_that_has_a_file(cluster: Cluster) -> None:
    home = str(cluster.head.home)
    job = of_ranks(
        cluster,
        "echo o$RANK; echo e$RANK >&2",
        nodes=2,
        gpus=2,
        ntasks_per_node=2,
        stdout=f"{home}/%j.%t",
        stderr="%j.err",
    )
    cluster.head.wait(job)
    assert typed(cluster, "glogs", job).stdout == "".join(f"[{rank}] o{rank}\n" for rank in range(4))
    assert typed(cluster, "glogs", "--rank", "3", job).stdout == "o3\n"
    errors = typed(cluster, "glogs", "--err", job).stdout
    assert sorted(errors.splitlines()) == ["[n1] e0", "[n1] e1", "[n2] e2", "[n2] e3"]
    shared = typed(cluster, "glogs", "--err", "--rank", "3", job)
    assert shared.stdout == ""
    assert f"rank 3 of job {job} writes to one file with ranks 2 to 3 of n2" in shared.stderr


def test_python_reads_the_file_of_a_rank(cluster: Cluster) -> None:
    home = str(cluster.head.home)
    job = of_ranks(
        cluster,
        "echo o$RANK; echo e$RANK >&2",
        nodes=2,
        gpus=2,
        ntasks_per_node=2,
        stdout=f"{home}/%j.%t",
        stderr=f"{home}/%j.e",
    )
    cluster.head.wait(job)
    with gpusched.Client(cluster.head.socket) as client:
        assert list(client.logs(job)) == ["o0\n"]
        assert list(client.logs(job, rank=3)) == ["o3\n"]
        assert list(client.logs(job, rank=2, follow=True)) == ["o2\n"]
        with pytest.raises(Refused, match=f"rank 3 of job {job} writes to one file with others"):
            client.logs(job, rank=3, err=True)
        with pytest.raises(NotFound, match=f"job {job} has no rank 4"):
            client.logs(job, rank=4)


def test_glogs_follows_all_ranks(cluster: Cluster) -> None:
    wait = "echo begin $RANK; until [ -e go ]; do sleep 0.05; done"
    text = f"{wait}; [ $RANK = 0 ] || until [ -e end ]; do sleep 0.05; done; echo end $RANK; touch end"
    text += "; exit $((4 * $RANK))"
    job = of_ranks(cluster, text, nodes=2, gpus=2, ntasks_per_node=1, grace_s=60)
    code = "import sys; sys.argv[0] = 'glogs'; from gpusched.cli.glogs import main; sys.exit(main())"
    argv = [sys.executable, "-u", "-c", code, "-f", job]
    with subprocess.Popen(argv, env=cluster.head.env, stdout=subprocess.PIPE, text=True) as follow:
        assert follow.stdout is not None
        assert {follow.stdout.readline(), follow.stdout.readline()} == {"[n1] begin 0\n", "[n2] begin 1\n"}
        (cluster.head.home / "go").touch()
        rest, _ = follow.communicate(timeout=60)
    assert sorted(line for line in rest.splitlines() if "end" in line) == ["[n1] end 0", "[n2] end 1"]
    assert follow.returncode == 4


@pytest.fixture(scope="module")
def torch_python() -> str:
    tried = subprocess.run([TORCH_PYTHON, "-c", "import torch"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no torch: {tried.stderr.strip().splitlines()[-1]}; set GPUSCHED_TEST_TORCH_PYTHON")
    return TORCH_PYTHON


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["ranks", "torchrun"])
def test_torch_reduces_over_two_nodes(cluster: Cluster, torch_python: str, shape: str) -> None:
    program = cluster.head.home / "reduce.py"
    program.write_text(ALL_REDUCE)
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HOME": str(cluster.root)}
    if shape == "ranks":
        job = cluster.head.submit(torch_python, str(program), nodes=2, gpus=4, ntasks_per_node=2, env=env)
    else:
        line = (
            f"exec {torch_python} -m torch.distributed.run --nnodes=$NNODES --node_rank=$NODE_RANK "
            f"--nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT {program}"
        )
        job = cluster.head.submit(*sh(line), nodes=2, gpus=4, env=env)
    (ended,) = cluster.head.wait(job)
    found = typed(cluster, "glogs", "--no-prefix", job).stdout
    assert ended["state"] == "COMPLETED", found
    lines = sorted(line for line in found.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} of 4 local {rank % 2} sum 10" for rank in range(4)]
