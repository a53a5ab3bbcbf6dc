"""Scripts that train on two nodes, on two machines with a network between them; see `tests/addons/slurm/scripts`."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from lab_cluster import Cluster
from network_lab import LabUnavailable, Network, network
from support import wait_until
from training_scripts import TABLES, TwoNodes, check_table, scripts_of_the_page, table_of

ADDRESSES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    try:
        with network(tmp_path_factory.mktemp("scripts"), machines=2) as lab:
            yield lab
    except LabUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def started(machines: Network) -> Iterator[TwoNodes]:
    cluster = Cluster(machines)
    cluster.start()
    yield TwoNodes(cluster, machines.folder / "scripts", machines["n1"].prefix)
    cluster.close()


@pytest.fixture
def two(started: TwoNodes) -> Iterator[TwoNodes]:
    yield started
    started.reset()


QUICK = ("torchrun", "jax", "ray")
"""Scripts that differ most in how they start their ranks. The others resemble them and run through the night."""


def some(scripts: Iterable[str]) -> list[Any]:
    return [pytest.param(one, marks=() if one in QUICK else pytest.mark.nightly) for one in scripts]


@pytest.mark.parametrize("script", some(TABLES))
def test_a_script_trains_on_both_nodes(two: TwoNodes, script: str) -> None:
    job, output = two.run(f"{script}.sh")
    assert (job["state"], job["exit_code"], job["node"]) == ("COMPLETED", 0, "n[1-2]"), output
    check_table(script, output, ADDRESSES)
    two.await_quiet()


@pytest.mark.parametrize("script", some(scripts_of_the_page()))
def test_a_script_of_the_page_for_users_trains_on_both_nodes(two: TwoNodes, script: str) -> None:
    (two.work / f"page-{script}.sh").write_text(scripts_of_the_page()[script])
    job, output = two.run(f"page-{script}.sh")
    assert (job["state"], job["exit_code"]) == ("COMPLETED", 0), output
    check_table(script, output, ADDRESSES)
    two.await_quiet()


ALL_REDUCE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(total)
print("rank", dist.get_rank(), "on", os.uname().nodename, "sum", int(total), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_the_real_torchrun_reduces_over_both_nodes(two: TwoNodes) -> None:
    python = os.environ.get("GPUSCHED_TEST_TORCH_PYTHON", sys.executable)
    tried = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no torch: {tried.stderr.strip().splitlines()[-1]}; set GPUSCHED_TEST_TORCH_PYTHON")
    (two.work / "reduce.py").write_text(ALL_REDUCE)
    script = scripts_of_the_page()["torchrun"].replace(
        "torchrun --nnodes", f"{python} -m torch.distributed.run --nnodes"
    )
    (two.work / "real-torchrun.sh").write_text(script.replace("train.py", "reduce.py"))
    job, output = two.run("real-torchrun.sh", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="eth0")
    assert job["state"] == "COMPLETED", output
    found = sorted(re.findall(r"rank \d on \S+ sum \d+", output))
    assert found == [f"rank {rank} on n{1 + rank // 2} sum 10" for rank in range(4)]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_the_real_mpirun_starts_its_ranks_on_both_nodes(two: TwoNodes) -> None:
    (two.work / "real-mpi.sh").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 -t 5\n"
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
        f"{shutil.which('mpirun')} sh -c 'echo rank $OMPI_COMM_WORLD_RANK $(hostname) $CUDA_VISIBLE_DEVICES; exit "
        "$((OMPI_COMM_WORLD_RANK / 3 * 7))'\n"
    )
    job, output = two.run("real-mpi.sh")
    assert sorted(re.findall(r"^rank .*$", output, re.MULTILINE)) == [
        *("rank 0 n1 0,1", "rank 1 n1 0,1"),
        *("rank 2 n2 0,1", "rank 3 n2 0,1"),
    ]
    # That of the last rank, which is on the other node.
    assert (job["state"], job["exit_code"]) == ("FAILED", 7), output
    two.await_quiet()


@pytest.mark.parametrize(
    "script", ["ddp", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("hugging_face", "mpi"))]
)
def test_a_rank_that_fails_on_the_other_node_ends_the_script_with_its_failure(two: TwoNodes, script: str) -> None:
    job, output = two.run(f"{script}.sh", STAND_IN_FAIL_RANK="3")
    assert job["state"] == "FAILED", output
    assert job["exit_code"] != 0
    assert "rank 3 fails" in output
    two.await_quiet()


def test_a_script_that_has_itself_requeued_at_its_signal_goes_on_with_what_all_ranks_have_saved(two: TwoNodes) -> None:
    job, output = two.run("lightning_requeue.sh")
    assert (job["state"], job["run"]) == ("COMPLETED", 2), output
    assert [(one["rank"], one["node"]) for one in table_of(output)] == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    two.await_quiet()


def test_a_cancelled_script_leaves_nothing_on_either_node(two: TwoNodes) -> None:
    job = two.ok("sbatch --parsable ddp.sh", STAND_IN_FAIL_RANK="99").strip()
    # Its ranks wait for one to fail that does not exist.
    wait_until(lambda: f"{job}.0" in two.ok(f"squeue -h -s -j {job} -o %i").split(), what="the step")
    two.ok(f"scancel {job}")
    (ended,) = two.head.wait(job)
    assert ended["state"] == "CANCELLED"
    two.await_quiet()


def test_a_farm_of_tasks_uses_every_gpu_of_both_nodes_for_one_task_at_a_time(two: TwoNodes) -> None:
    job, output = two.run("task_farm.sh")
    assert job["state"] == "COMPLETED", output
    began = re.findall(r"begin (\d+) (n\d) (\S*) (\d+)", output)
    assert sorted(int(item) for item, *_ in began) == list(range(1, 11)), output
    assert {(node, gpus) for _, node, gpus, _ in began} <= set(itertools.product(("n1", "n2"), ("0", "1")))
    assert {node for _, node, *_ in began} == {"n1", "n2"}
    assert len({step for *_, step in began}) == 10
    running: dict[str, int] = {"n1": 0, "n2": 0}
    for word, node in re.findall(r"(begin|end) \d+ (n\d)", output):
        running[node] += 1 if word == "begin" else -1
        assert 0 <= running[node] <= 2, output


def test_a_session_of_salloc_types_commands_over_its_nodes(two: TwoNodes) -> None:
    done = two.type("salloc -N 2 --ntasks-per-node=2 --gpus-per-node=2 -t 5 ./session.sh")
    assert done.returncode == 5, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["nodes: n[1-2], 2", "names: n1 n2", "folded: n[1-2]"]
    assert lines[3:7] == ["0: n1", "1: n1", "2: n2", "3: n2"]
    check_table("ddp", done.stdout, ADDRESSES)
    assert lines[-1] == "alone on n2 as 0 of 1"


def test_names_of_nodes_in_a_job(two: TwoNodes) -> None:
    job, output = two.run("names.sh")
    assert job["state"] == "COMPLETED", output
    first, names, folded, shown, queue, zero, one, alone = output.splitlines()
    assert first == "n[1-2] n[1-2] 2 2 1(x2) 2"
    assert names == "n1 n2/n1 n2/n2 n1"
    assert folded == "n[2,1]/n[1-2]"
    facts = dict(re.findall(r"(\S+?)=(\S*)", shown))
    assert (facts["NodeList"], facts["BatchHost"], facts["NumNodes"], facts["NumTasks"]) == ("n[1-2]", "n1", "2", "2")
    assert "node=2" in facts["TRES"]
    assert "gres/gpu=2" in facts["TRES"]
    assert "JOB_GRES=gpu:simulated_gpu:2 " in shown
    assert " Nodes=n[1-2] CPU_IDs=N/A Mem=0 GRES=gpu:simulated_gpu:1(IDX:0) " in shown
    (document,) = json.loads((two.work / "queue.json").read_text())["jobs"]
    assert (document["nodes"], document["batch_host"], document["node_count"]) == ("n[1-2]", "n1", 2)
    assert document["gres_detail"] == ["gpu:1(IDX:0)", "gpu:1(IDX:0)"]
    assert [one["nodename"] for one in document["job_resources"]["allocated_nodes"]] == ["n1", "n2"]
    assert queue.split()[:3] == ["n[1-2]", "n1", "2"]
    assert (zero, one) == ("0: n1 n2 n[1-2] n[1-2]", "1: n1 n2 n[1-2] n[1-2]")
    # The list of the job, as Slurm has it: that of a step on fewer nodes is SLURM_STEP_NODELIST.
    assert alone == "alone: n1 n2 n2 1 2"


RESERVED = {
    "Nodes=n2 TRES=gres/gpu=1": ("n2", "1"),
    "Nodes=n1,n2 TRES=gres/gpu=2": ("n[1-2]", "2"),
    "Nodes=ALL": ("n[1-2]", None),
    "NodeCnt=2 TRES=gres/gpu=4": ("n[1-2]", "4"),
}


@pytest.mark.parametrize("words", RESERVED)
def test_scontrol_reserves_the_nodes_that_it_names(two: TwoNodes, words: str) -> None:
    two.ok(f"scontrol create reservation ReservationName=r StartTime=now+1hour Duration=10 Users=root {words}")
    try:
        shown = two.ok("scontrol show reservation r")
        nodes, gpus = RESERVED[words]
        assert f" Nodes={nodes} " in shown
        assert gpus is None or f"gres/gpu={gpus}" in shown
    finally:
        two.ok("scontrol delete ReservationName=r")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("Nodes=n9", "Invalid node name specified"),
        ("Nodes=n1,n9", "Invalid node name specified"),
        ("Nodes=n[1-2] TRES=gres/gpu=3", "gpus=3 cannot be spread evenly over 2 nodes; make one for each node"),
        ("NodeCnt=1", "there are 2 nodes, and none is named"),
    ],
)
def test_scontrol_refuses_to_reserve_other_nodes(two: TwoNodes, words: str, why: str) -> None:
    done = two.type(f"scontrol create reservation ReservationName=r StartTime=now+1hour Duration=10 Users=root {words}")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"Error creating the reservation: {why}\n")


def test_sinfo_lists_each_node(two: TwoNodes) -> None:
    rows = [line.split() for line in two.ok("sinfo -h -N").splitlines()]
    assert [row[0] for row in rows] == ["n1", "n2"]
    assert socket.gethostname() not in two.ok("sinfo -h -N")
